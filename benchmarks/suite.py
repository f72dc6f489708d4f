"""The benchmark suite: ours and Spark's own state, on the same input and machine, in one run.

    python -m benchmarks.suite [--scale small|full] [--only row,pandas,...] [--out benchmarks/out/report.json] [--work FOLDER]
    python -m benchmarks.suite --markdown        # the last report as a table for docs/benchmarks.md

Every run has a process, a JVM and a scratch folder of its own, one after the other, so that none disturbs another. Each
writes what it measured as JSON; the report is made of that and nothing else. All processes are ended and the folder is
removed, however it ends.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks import inputs, report
from benchmarks.engines import TUNED
from benchmarks.report import OURS, Check, Run
from benchmarks.runs import COMPARED, PEER_NAMES, QUESTIONS, SECTIONS, Bench, NotBuilt, batches_of, result_name
from benchmarks.scales import SCALES, Scale
from local_stack.owned_process import OwnedProcesses

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "benchmarks" / "out" / "report.json"
_RUN_DEADLINE_S = 900.0


def main(arguments: list[str] | None = None) -> int:
    """0 if every run could be measured and the engines agree, 1 if not, 130 if it was interrupted."""
    options = _parser().parse_args(arguments)
    if options.run is not None:
        return _run_here(options)
    if options.markdown:
        if not options.out.is_file():
            print(f"{options.out} does not exist: run the suite first (make bench)", file=sys.stderr)
            return 1
        print(report.as_markdown(json.loads(options.out.read_text())))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    work = Path(tempfile.mkdtemp(prefix="cairn-bench-", dir=options.work)).resolve()
    work.chmod(0o711)  # PostgreSQL runs as another user, if this is root
    try:
        return _run_all(options.only, SCALES[options.scale], options.scale, work, options.out)
    except KeyboardInterrupt:
        print("interrupted; everything that was started is stopped, and no report is written", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite", description=__doc__.splitlines()[0])
    parser.add_argument("--scale", choices=sorted(SCALES), default="full")
    parser.add_argument("--only", type=_sections, default=list(SECTIONS), help=f"of {','.join(SECTIONS)}")
    parser.add_argument("--out", type=Path, default=REPORT)
    parser.add_argument("--work", type=Path, help="where the temporary folder is made; a local disk")
    parser.add_argument("--markdown", action="store_true", help="print the last report instead")
    parser.add_argument("--run", nargs=2, metavar=("SECTION", "VARIANT"), help=argparse.SUPPRESS)
    return parser


def _sections(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    return [name for name in SECTIONS if name in names]


# --- all runs ---------------------------------------------------------------------------------------------------------------


def _run_all(sections: list[str], scale: Scale, scale_name: str, work: Path, out: Path) -> int:
    started, started_s = datetime.now(tz=UTC), time.monotonic()
    machine = describe_machine()
    runs: list[Run] = []
    (work / "results").mkdir()
    for section in sections:
        for variant in SECTIONS[section]:
            if variant == TUNED and not scale.tuned_peer:
                continue
            began_s = time.monotonic()
            runs.append(_run_apart(section, variant, scale, scale_name, work))
            print(f"{section}/{variant}: {runs[-1].status}, {time.monotonic() - began_s:.1f} s", flush=True)
        shutil.rmtree(work / "inputs", ignore_errors=True)
    made = report.build_report(
        runs,
        QUESTIONS,
        _checks(runs, work / "results"),
        scale=scale_name,
        judged=scale.judged,
        started=started.isoformat(timespec="seconds"),
        seconds=time.monotonic() - started_s,
        environment=machine,
    )
    write_report(made, out)
    return 0 if report.passed(made) else 1


def write_report(made: dict[str, Any], out: Path) -> None:
    """Writes it to ``out``, whole or not at all, and prints its table."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(made, indent=1) + "\n")
    partial.replace(out)
    print(f"\n{report.as_table(made)}\n\n{out} has every sample, the settings and the profiles")


def _run_apart(section: str, variant: str, scale: Scale, scale_name: str, work: Path) -> Run:
    """The run in a process of its own. A run that fails is part of the report; the others go on."""
    name = f"{section}-{variant.replace(' ', '-')}"
    folder = _input_folder(work, section, variant)
    if not folder.exists():
        inputs.write_batches(folder, batches_of(section, variant, scale))
    scratch, result = _scratch_folder(work, section, variant), work / f"{name}.json"
    for made in (scratch / "tmp", scratch / "state"):
        made.mkdir(parents=True)
    command = [sys.executable, "-m", "benchmarks.suite", "--run", section, variant]
    command += ["--scale", scale_name, "--work", str(work), "--out", str(result)]
    processes = OwnedProcesses(work / "logs")
    try:
        processes.start(name, command, env=child_environment(scratch / "tmp"), cwd=ROOT)
        deadline_s = time.monotonic() + _RUN_DEADLINE_S
        while not result.exists():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"not done after {_RUN_DEADLINE_S:.0f} s")
            time.sleep(0.1)
            try:
                processes.check_alive()
            except RuntimeError:
                # It may have written its result and ended since we looked.
                if not result.exists():
                    raise
        return Run(**json.loads(result.read_text()))
    except RuntimeError as error:
        return Run(section=section, variant=variant, status="failed", note=str(error))
    except KeyboardInterrupt:
        # A second Ctrl-C while processes are being stopped would leave some of them running.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise
    finally:
        processes.stop()
        shutil.rmtree(scratch, ignore_errors=True)


def _input_folder(work: Path, section: str, variant: str) -> Path:
    # The runs of "floor" are not compared with each other, and each has an input of its own.
    return work / "inputs" / (f"{section}-{variant}" if section == "floor" else section)


def _scratch_folder(work: Path, section: str, variant: str) -> Path:
    return work / "scratch" / section / variant.replace(" ", "-")


def child_environment(tmp: Path) -> dict[str, str]:
    """Spark's and Python's temporary files lie in the run's own folder; the same heap for either engine."""
    submit = f"--driver-memory 4g --driver-java-options -Djava.io.tmpdir={tmp} pyspark-shell"
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "plugins"), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {
        "TZ": "UTC",
        "TMPDIR": str(tmp),
        "SPARK_LOCAL_DIRS": str(tmp),
        "PYSPARK_SUBMIT_ARGS": submit,
        "PYTHONPATH": path,
    }


def _checks(runs: list[Run], results: Path) -> list[Check]:
    """Whether the peer and ours put out the same rows, and hold the same state after the last batch."""
    checks = []
    for section, kinds in COMPARED.items():
        measured = {run.variant for run in runs if run.section == section and run.status == "measured"}
        for peer in PEER_NAMES:
            for what in kinds if {OURS, peer} <= measured else ():
                ours, theirs = (
                    pq.read_table(results / result_name(section, variant, what)) for variant in (OURS, peer)
                )
                # Columns by position: the peer names those of an aggregation's state itself.
                equal = ours.num_columns == theirs.num_columns and ours.columns == theirs.columns
                note = f"{ours.num_rows} rows" if equal else f"{ours.num_rows} rows, and {theirs.num_rows}"
                checks.append(Check(section=section, label=f"{what} of {OURS} and {peer}", equal=equal, note=note))
    return checks


def describe_machine() -> dict[str, Any]:
    """The machine, the versions, and how busy it was before anything started."""
    model = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [int(line.split()[1]) // 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal:")]
    java = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False).stderr.splitlines()
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        check=False,
    )
    names = ("pyspark", "rocksdict", "pyarrow", "pandas", "numpy")
    return {
        "cpu": {"model": model[0] if model else platform.processor(), "count": os.cpu_count()},
        "memory_mib": memory[0] if memory else None,
        "load_before": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "java": java[0] if java else None,
        "commit": commit.stdout.strip() or None,
        "versions": {name: importlib.metadata.version(name) for name in names},
    }


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []


# --- one run, in its own process ----------------------------------------------------------------------------------------------


def _run_here(options: argparse.Namespace) -> int:
    section, variant = options.run
    bench = Bench(
        section=section,
        variant=variant,
        scale=SCALES[options.scale],
        inputs=_input_folder(options.work, section, variant),
        scratch=_scratch_folder(options.work, section, variant) / "state",
        results=options.work / "results",
    )
    try:
        run = SECTIONS[section][variant](bench)
    except NotBuilt as missing:
        run = Run(section=section, variant=variant, status="not built", note=str(missing))
    partial = options.out.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(run)))
    partial.replace(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
