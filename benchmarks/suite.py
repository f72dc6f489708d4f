"""The benchmark suite: Cairn beside Spark's own state, MERGE, recomputing and Flink, on one machine in one run.

    python -m benchmarks.suite [--scale small|full] [--only row,pandas,...] [--out benchmarks/out/report.json] [--work FOLDER]
    python -m benchmarks.suite --into-report        # the last report into benchmarks/REPORT.md and docs/benchmarks.md

Every run has a process, a JVM and a scratch folder of its own. The runs follow each other, so that none disturbs
another. At full scale, sections with a peer run in two rounds, the second round in reverse order. Each run writes its
figures as JSON, and the report is computed from these files only. At the end, also after a failure, the suite ends all
processes and deletes its folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet as pq

from benchmarks import inputs, merge, report, report_files
from benchmarks.engines import TUNED
from benchmarks.flink import __main__ as flink
from benchmarks.processes import ROOT, child_environment
from benchmarks.report import OURS, Check, Part, Run
from benchmarks.runs import COMPARED, PEER_NAMES, QUESTIONS, SECTIONS, Bench, NotBuilt, batches_of, result_name
from benchmarks.scales import SCALES, Scale
from local_stack.owned_process import OwnedProcesses

# Sections that are programs of their own. They install their peers.
OTHERS: dict[str, Callable[[Path, Scale], Part]] = {
    "merge": lambda work, scale: merge.measured(
        work, scale.merge_keys, scale.merge_batches, merge.PARTS, list(merge.ENGINES), scale.rounds
    ),
    "flink": lambda work, scale: flink.measured(work, flink.SCALES["full" if scale.judged else "small"], scale.rounds),
}
REPORT = ROOT / "benchmarks" / "out" / "report.json"
_RUN_DEADLINE_S = 900.0


def main(arguments: list[str] | None = None) -> int:
    """Run the suite.

    Returns:
        The exit code: 0 if every run succeeded and the engines agree, 1 if not, and 130 after Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    if options.run is not None:
        return _run_here(options)
    if options.into_report is not None:
        files = options.into_report or [options.out]
        if missing := [str(file) for file in files if not file.is_file()]:
            print(f"{', '.join(missing)} does not exist: run the suite first (make bench)", file=sys.stderr)
            return 1
        report_files.into_report(report.together([json.loads(file.read_text()) for file in files]))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    work = Path(tempfile.mkdtemp(prefix="cairn-bench-", dir=options.work)).resolve()
    work.chmod(0o711)  # If this process runs as root, PostgreSQL runs as another user, who must enter the folder.
    try:
        return _run_all(options.only, SCALES[options.scale], options.scale, work, options.out)
    except KeyboardInterrupt:
        print(
            "interrupted; everything that was started is stopped. A report is written only once all sections "
            f"before {' and '.join(OTHERS)} are through",
            file=sys.stderr,
        )
        return 130
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite", description=__doc__.splitlines()[0])
    parser.add_argument("--scale", choices=sorted(SCALES), default="full")
    names = [*SECTIONS, *OTHERS]
    parser.add_argument("--only", type=_sections, default=names, help=f"of {','.join(names)}")
    parser.add_argument("--out", type=Path, default=REPORT)
    parser.add_argument("--work", type=Path, help="where the temporary folder is made; a local disk")
    parser.add_argument(
        "--into-report",
        nargs="*",
        type=Path,
        metavar="REPORT",
        help="put the last report, or these of different sections, into benchmarks/REPORT.md and docs/benchmarks.md",
    )
    parser.add_argument("--run", nargs=2, metavar=("SECTION", "VARIANT"), help=argparse.SUPPRESS)
    return parser


def _sections(text: str) -> list[str]:
    names, known = text.split(","), [*SECTIONS, *OTHERS]
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"no section {', '.join(unknown)}; there are {', '.join(known)}")
    return [name for name in known if name in names]


# --- all runs ---------------------------------------------------------------------------------------------------------------


def _run_all(sections: list[str], scale: Scale, scale_name: str, work: Path, out: Path) -> int:
    started = report_files.Started()
    runs: list[Run] = []
    checks: list[Check] = []
    (work / "results").mkdir()
    for section in [name for name in SECTIONS if name in sections]:
        variants = [v for v in SECTIONS[section] if v != TUNED or scale.tuned_peer]
        for number in range(scale.rounds if section in COMPARED and section != "backfill" else 1):
            of_round = []
            for variant in variants[:: -1 if number % 2 else 1]:
                began_s = time.monotonic()
                of_round.append(_run_apart(section, variant, scale, scale_name, work))
                print(f"{section}/{variant}: {of_round[-1].status}, {time.monotonic() - began_s:.1f} s", flush=True)
            runs += of_round
            checks += _checks(of_round, work / "results", number + 1)
        shutil.rmtree(work / "inputs", ignore_errors=True)
    parts = [Part(runs=runs, questions=[q for q in QUESTIONS if q.section in sections], checks=checks)]
    for name in [name for name in OTHERS if name in sections]:
        # Write the report so far, because the next section may run for an hour and fail.
        started.write(parts, out, scale=scale_name, judged=scale.judged)
        folder = work / name
        folder.mkdir()
        try:
            parts.append(OTHERS[name](folder, scale))
        except (
            flink.Missing,
            AssertionError,
            OSError,
            subprocess.SubprocessError,
        ) as error:  # The peers can't be installed on this machine.
            print(f"{name}: failed: {error}", file=sys.stderr)
            failed = Run(section=name, variant=name, status="failed", note=str(error).replace("\n", " "))
            parts.append(Part(runs=[failed], questions=[], checks=[]))
        shutil.rmtree(folder)
    return started.finish(parts, out, scale=scale_name, judged=scale.judged)


def _run_apart(section: str, variant: str, scale: Scale, scale_name: str, work: Path) -> Run:
    """Run one variant in a process of its own. A failed run becomes part of the report, and the other runs continue."""
    name = f"{section}-{variant.replace(' ', '-')}"
    (work / f"{name}.json").unlink(missing_ok=True)  # The result of the previous round.
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
                # The process may have written its result and ended since the loop checked for the result.
                if not result.exists():
                    raise
        return Run(**json.loads(result.read_text()))
    except RuntimeError as error:
        return Run(section=section, variant=variant, status="failed", note=str(error))
    except KeyboardInterrupt:
        # A second Ctrl-C during the stop would leave processes running.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise
    finally:
        processes.stop()
        shutil.rmtree(scratch, ignore_errors=True)


def _input_folder(work: Path, section: str, variant: str) -> Path:
    # The runs of the section "floor" are not compared with each other. Each has an input of its own.
    return work / "inputs" / (f"{section}-{variant}" if section == "floor" else section)


def _scratch_folder(work: Path, section: str, variant: str) -> Path:
    return work / "scratch" / section / variant.replace(" ", "-")


def _checks(runs: list[Run], results: Path, number: int) -> list[Check]:
    """Compare the outputs and final states of Cairn and each peer in one round."""
    checks = []
    for section, kinds in COMPARED.items():
        measured = {run.variant for run in runs if run.section == section and run.status == "measured"}
        for peer in PEER_NAMES:
            for what in kinds if {OURS, peer} <= measured else ():
                ours, theirs = (
                    pq.read_table(results / result_name(section, variant, what)) for variant in (OURS, peer)
                )
                # Compare the columns by position, because Spark itself names the columns of an aggregation's state.
                equal = ours.num_columns == theirs.num_columns and ours.columns == theirs.columns
                note = f"{ours.num_rows} rows" if equal else f"{ours.num_rows} rows, and {theirs.num_rows}"
                label = f"{what} of {OURS} and {peer}, round {number}"
                checks.append(Check(section=section, label=label, equal=equal, note=note))
    return checks


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
