"""Keyed state beside Flink 2.3: the same updates, a checkpoint after each batch, savepoints, restores and re-scaling.

    python -m benchmarks.flink [--scale small|full] [--rounds 2] [--only "1% uniform,10% zipf"] [--out benchmarks/out/flink.json]

The state has 1,000,000 keys with six fields, one of them 64 characters. A first batch has every key. Ten more batches
have 1 % or 10 % of the keys, drawn uniformly or by 1 / rank. In one more workload, seven batches have as many rows as
there are keys, drawn at random. `make bench` runs this program as the section *flink*.

- **flink**: `Updates.java` on RocksDB with incremental checkpoints and its ingest option, on two slots of a mini
  cluster in one JVM. The job runs all the time, so its state stays open and its code compiled. The time of a batch
  includes its checkpoint.
- **cairn**, **cairn row**: `run_interval` with the vectorised API and with the row API, on two shards in Spark's local
  mode. Every interval plans, opens its state from the previous checkpoint, and commits.
- **cairn zstd**: as **cairn**, with `EngineOptions(compression="zstd")`, for 10 % uniform only.

Each engine has a process of its own, one after the other. Every second round runs the engines in reverse order. The
zipf and random workloads run once. All engines must end with the same state, row by row, including Flink's restored
states, or the run fails. CPU seconds are those of the process and its descendants.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import report
from benchmarks.cpu_per_update import updates_over
from benchmarks.engines import interval, start_spark
from benchmarks.flink.inputs import Workload, read_state, write_batches
from benchmarks.processes import ROOT, child_environment, cpu_s
from benchmarks.report import Check, Part, Question, Run
from benchmarks.report_files import Started
from cairn.data_sources.keyed_state import KeyedState
from cairn.operations.intervals.run_interval import run_interval
from cairn.operations.savepoints.restore_savepoint import restore_savepoint
from cairn.operations.savepoints.take_savepoint import take_savepoint
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.adapters.rocks import EngineOptions
from state_backend.shard.manifest import manifest_of
from state_backend.shard.restore import restore_shard
from state_backend.values.key_groups import KeyGroupRange
from tests.support.environments import environment_with

OUT = ROOT / "benchmarks" / "out" / "flink.json"
FLINK = "flink"
ZSTD = "cairn zstd"
OURS = {"cairn": "arrow", "cairn row": "row", ZSTD: "arrow"}
FEW, MOVED = (Workload(part=part, drawn="uniform") for part in (0.01, 0.1))
# The workload for the cost of a row: its batches are long, so an interval's fixed cost no longer matters.
MANY = Workload(part=1.0, drawn="random", batches=7)
WORKLOADS = (
    FEW,
    MOVED,
    Workload(part=0.01, drawn="zipf"),
    Workload(part=0.1, drawn="zipf"),
    MANY,
)
FIELDS = ("k", "n", "total", "low", "high", "last", "payload")
# The size of a scale: keys, batches, repeats of savepoints and restores, workloads.
Size = tuple[int, int, int, Sequence[Workload]]
SCALES: dict[str, Size] = {
    "full": (1_000_000, 10, 5, WORKLOADS),
    "small": (20_000, 3, 1, (MOVED, WORKLOADS[3], replace(MANY, batches=2))),
}
_DEADLINE_S = 1_800.0
_MOVES = "flink, moves"
_JAVAC = ("java", "-m", "jdk.compiler/com.sun.tools.javac.Main", "-nowarn")
Step = dict[str, Any]


class Missing(Exception):
    """Error: this machine lacks a program. The message says how to install it."""


# --- the peer ---------------------------------------------------------------------------------------------------------------


def compile_job(jars: list[Path], to: Path) -> str:
    """Compile `Updates.java`, and return the class path that runs it.

    Raises:
        Missing: There is no Java, or it can't compile.
    """
    class_path = os.pathsep.join(map(str, [to, *jars]))
    source = Path(__file__).with_name("Updates.java")
    if shutil.which("java") is None:
        raise Missing("Flink's job needs Java 17, and there is none on the PATH.\nInstall it with: make java")
    done = subprocess.run(
        [*_JAVAC, "-cp", class_path, "-d", str(to), str(source)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Missing(
            f"{source} could not be compiled by the Java on the PATH:\n{(done.stdout + done.stderr).strip()}\n"
            "A runtime without the module jdk.compiler can't; install a JDK (Debian: openjdk-17-jdk-headless) and run this again."
        )
    return class_path


def flink_jars(work: Path) -> list[Path]:
    """Install Flink's distribution below `work`, and return the jars of its core and its logging."""
    python = environment_with(work, Path(__file__).with_name("flink.lock"))
    (lib,) = python.parents[1].glob("lib/python*/site-packages/pyflink/lib")
    return sorted([*lib.glob("flink-dist-*.jar"), *lib.glob("log4j-*.jar")])


def run_flink(class_path: str, inputs: Path, folder: Path, batches: int, repeats: int) -> Iterator[Step]:
    """Run Flink's job, and return the steps that it printed."""
    opened = [f"--add-opens=java.base/java.{package}=ALL-UNNAMED" for package in ("util", "lang", "nio", "time")]
    command = ["java", "-Xmx4g", *opened, "-cp", class_path, "Updates"]
    arguments = map(str, (inputs, folder, batches, repeats))
    done = subprocess.run([*command, *arguments], stdout=subprocess.PIPE, text=True, check=True, timeout=_DEADLINE_S)
    return (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


# --- ours, in a process of its own --------------------------------------------------------------------------------------------


def run_cairn(name: str, inputs: Path, folder: Path, batches: int, repeats: int) -> Iterator[Step]:
    """Run the same steps as Flink's job, and write the last state to `folder / rows.parquet`.

    Yields:
        The name and the figures of each step.
    """
    files = [inputs / f"{number:03d}.parquet" for number in range(batches + 1)]
    root, spark = str(folder / "state"), start_spark()
    engine = EngineOptions(compression="zstd" if name == ZSTD else "lz4")
    pipeline = updates_over(files, OURS[name], order_by=["v"], max_parallelism=128, engine=engine)

    def timed(step: str, work: Callable[[], Any]) -> tuple[Step, Any]:
        cpu_before, began_s = sum(cpu_s().values()), time.monotonic()
        made = work()
        wall_s = time.monotonic() - began_s
        return {"step": step, "wall_s": wall_s, "cpu_s": sum(cpu_s().values()) - cpu_before}, made

    known: set[tuple[Path, int]] = set()
    for number, file in enumerate(files):
        step, record = timed("batch", lambda n=number: run_interval(spark, pipeline, interval(n), root))
        below = (f for f in Path(root).rglob("*") if f.is_file() and "output" not in f.relative_to(root).parts)
        there = {(f, f.stat().st_mtime_ns) for f in below}
        written_mb = sum(f.stat().st_size for f, _ in there - known) / 1e6
        known = there
        phases_s = {name: us / 1e6 for name, us in record.content.durations_us.items()}
        rows = pq.read_metadata(file).num_rows
        yield step | {"rows": rows, "written_mb": written_mb, "phases_s": phases_s}
    spark.dataSource.register(KeyedState)
    reader = spark.read.format("keyed_state").option("root", root).option("pipeline", "updates")
    state = reader.option("state", "state").load().selectExpr("key.k k", *(f"value.{f} {f}" for f in FIELDS[1:]))
    pq.write_table(state.toArrow().sort_by("k"), folder / "rows.parquet")

    of_pipeline = join_url(root, "updates")
    storage, saved = open_storage(of_pipeline), folder / "canonical"
    into = folder / "restored"
    manifests = [manifest_of(ref, storage) for ref in record.content.shards]

    def restore(groups: KeyGroupRange, sources: list[Any]) -> None:
        restore_shard(groups, sources, storage, folder / "db", EngineOptions(cache_dir=None)).store.close()
        shutil.rmtree(folder / "db")

    for _ in range(repeats):
        shutil.rmtree(saved, ignore_errors=True)
        yield timed(
            "take canonical", lambda: take_savepoint(spark, pipeline, of_pipeline, record, str(saved), "canonical")
        )[0]
        shutil.rmtree(into, ignore_errors=True)
        step, restored = timed("restore canonical", lambda: restore_savepoint(spark, pipeline, str(into), str(saved)))
        assert restored.content.digest == record.content.digest
        yield step
        slowest = max(
            (timed("restore 2 to 2", lambda m=m: restore(m.key_groups, [m]))[0] for m in manifests), key=_wall
        )
        yield slowest
        yield timed("restore 2 to 1", lambda: restore(KeyGroupRange(first=0, last=127), manifests))[0]
    spark.stop()


def _wall(step: Step) -> float:
    return float(step["wall_s"])


# --- all runs -------------------------------------------------------------------------------------------------------------------


def samples_of(rounds: list[list[Step]]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the samples by metric: those of batches, and those of savepoints and restores.

    The first batch, which loads every key, has metrics of its own. The second batch warms up: it counts only in the sum
    of the bytes that all batches wrote.
    """
    batches: dict[str, list[float]] = {}
    moves: dict[str, list[float]] = {}
    for steps in rounds:
        of_batches = [step for step in steps if step["step"] == "batch"]
        load, updates = of_batches[0], of_batches[1:]
        for metric, value in (
            ("load_s", load["wall_s"]),
            ("load_cpu_s", load["cpu_s"]),
            ("load_mb", load["written_mb"]),
            ("all_written_mb", sum(step["written_mb"] for step in updates)),
        ):
            batches.setdefault(metric, []).append(value)
        for step in updates[1:] or updates:
            for metric in ("wall_s", "cpu_s", "written_mb", "checkpoint_s"):
                if metric in step:
                    batches.setdefault(metric, []).append(step[metric])
            batches.setdefault("cpu_us_per_row", []).append(step["cpu_s"] / step["rows"] * 1e6)
        for step in steps:
            if step["step"] != "batch":
                moves.setdefault(f"{step['step']}, s", []).append(step["wall_s"])
                moves.setdefault(f"{step['step']}, cpu_s", []).append(step["cpu_s"])
    return batches, moves


def questions(workloads: Sequence[Workload] = WORKLOADS) -> list[Question]:
    """Return the questions of the report, with the targets of issue 19."""
    asked = []
    for workload in workloads:
        of_workload = {"section": _section(workload), "higher_is_better": False, "against": (FLINK,)}
        if workload.name == MANY.name:
            for variant, api, target in ((report.OURS, "vectorised", 4.0), ("cairn row", "row", 6.0)):
                label = f"CPU of a row, {api} API, with its checkpoint"
                metric: dict[str, Any] = {"metric": "cpu_us_per_row", "unit": "us", "at_most": target}
                asked.append(Question(label=label, variant=variant, peers=(FLINK,), **metric, **of_workload))
        for label, metric_name, unit in (
            ("batch with its checkpoint", "wall_s", "s"),
            ("CPU of a batch", "cpu_s", "s"),
            ("written per batch", "written_mb", "MB"),
            ("written by all batches", "all_written_mb", "MB"),
            ("load of all keys", "load_s", "s"),
            ("CPU of the load", "load_cpu_s", "s"),
        ):
            if metric_name.startswith("load") and workload != MOVED:
                continue  # The load is the same for all workloads.
            at_most = 150.0 if metric_name == "all_written_mb" and workload == MOVED else None
            peers = ("cairn row", *([ZSTD] if workload == MOVED else []), FLINK)
            asked.append(
                Question(label=label, metric=metric_name, unit=unit, peers=peers, at_most=at_most, **of_workload)
            )
    for step, target_ratio in (
        ("take canonical", 1.0),
        ("restore canonical", None),
        ("restore 2 to 2", None),
        ("restore 2 to 1", 1.0),
    ):
        for unit in ("s", "cpu_s"):
            asked.append(
                Question(
                    section=_MOVES,
                    label=step if unit == "s" else f"{step}, CPU",
                    metric=f"{step}, {unit}",
                    unit="s",
                    higher_is_better=False,
                    peers=(FLINK,),
                    at_least_ratio=target_ratio if unit == "s" else None,
                )
            )
    return asked


def _section(workload: Workload) -> str:
    return f"flink, {workload.name}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0 if all states are equal, 1 if not, and 2 if this machine lacks a program.
    """
    options = _parser().parse_args(arguments)
    if options.here:
        name, inputs, folder, batches, repeats = options.here
        for step in run_cairn(name, Path(inputs), Path(folder), int(batches), int(repeats)):
            print(json.dumps(step), flush=True)
        return 0
    size, started = SCALES[options.scale], Started()
    if options.only:
        names = options.only.split(",")
        size = (*size[:3], [workload for workload in WORKLOADS if workload.name in names])
    with tempfile.TemporaryDirectory(prefix="cairn-flink-", dir=options.work) as scratch:
        try:
            part = measured(Path(scratch), size, options.rounds)
        except Missing as missing:
            print(missing, file=sys.stderr)
            return 2
    return started.finish([part], options.out, scale=options.scale, judged=options.scale == "full")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.flink", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", choices=sorted(SCALES), default="full")
    parser.add_argument("--rounds", type=int, default=2, help="how often every engine runs every workload")
    parser.add_argument("--only", help=f"of {','.join(w.name for w in WORKLOADS)}".replace("%", "%%"))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--work", type=Path, help="where the temporary folder is made; a local disk with 5 GB")
    parser.add_argument(
        "--here", nargs=5, metavar=("VARIANT", "INPUTS", "FOLDER", "BATCHES", "REPEATS"), help=argparse.SUPPRESS
    )
    return parser


def measured(work: Path, size: Size, rounds: int) -> Part:
    """Measure every engine with every workload, in folders below `work`.

    Raises:
        Missing: This machine lacks a program.
    """
    keys, batches_of_scale, repeats, workloads = size
    (work / "classes").mkdir()
    class_path = compile_job(flink_jars(work), work / "classes")
    runs: list[Run] = []
    checks: list[Check] = []
    moves: dict[str, dict[str, list[float]]] = {}
    for workload in workloads:
        inputs, batches, section = work / "inputs", workload.batches or batches_of_scale, _section(workload)
        inputs.mkdir()
        write_batches(inputs, keys, batches, workload)
        steps: dict[str, list[list[Step]]] = {name: [] for name in (*OURS, FLINK) if name != ZSTD or workload == MOVED}
        failed: dict[str, str] = {}
        first: pa.Table | None = None
        for number in range(rounds if workload in (FEW, MOVED) else 1):
            for name in list(steps)[:: -1 if number % 2 else 1]:
                folder = work / "run"
                (folder / "tmp").mkdir(parents=True)
                times = repeats if workload == MOVED and name in (report.OURS, FLINK) else 0
                load = os.getloadavg()[0]
                try:
                    made = _run_apart(name, class_path, inputs, folder, batches, times)
                except subprocess.SubprocessError as error:
                    # The other engines continue, so that the report of a long run keeps their figures. The suite still
                    # fails.
                    failed[name] = str(error)
                    print(f"{workload.name}, {name}: failed: {error}", file=sys.stderr)
                    shutil.rmtree(folder)
                    continue
                steps[name].append(made)
                for what, state in _states(folder).items():
                    first = state if first is None else first
                    label = f"{what} of {name}, round {number + 1}"
                    equal = state.equals(first)
                    checks.append(Check(section=section, label=label, equal=equal, note=f"{state.num_rows} rows"))
                shutil.rmtree(folder)
                took_s = sum(step["wall_s"] for step in made)
                print(f"{workload.name}, {name}: {took_s:.1f} s measured, load before it {load:.1f}", flush=True)
        for name, of_rounds in steps.items():
            if name in failed:
                runs.append(Run(section=section, variant=name, status="failed", note=failed[name]))
                continue
            of_batches, of_moves = samples_of(of_rounds)
            runs.append(Run(section=section, variant=name, status="measured", samples=of_batches))
            if of_moves:
                moves[name] = of_moves
        shutil.rmtree(inputs)
    runs += [Run(section=_MOVES, variant=name, status="measured", samples=samples) for name, samples in moves.items()]
    return Part(runs=runs, questions=questions(workloads), checks=checks)


def _run_apart(name: str, class_path: str, inputs: Path, folder: Path, batches: int, repeats: int) -> list[Step]:
    if name == FLINK:
        return list(run_flink(class_path, inputs, folder, batches, repeats))
    command = [
        sys.executable,
        "-m",
        "benchmarks.flink",
        "--here",
        name,
        str(inputs),
        str(folder),
        str(batches),
        str(repeats),
    ]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=child_environment(folder / "tmp")
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _states(folder: Path) -> dict[str, pa.Table]:
    """Return the states of a run that are compared, sorted by key: the last state and Flink's restored states."""
    schema = pa.schema([*((name, pa.int64()) for name in FIELDS[:-1]), (FIELDS[-1], pa.string())])
    found = {}
    if (folder / "rows.parquet").is_file():
        found["end"] = pq.read_table(folder / "rows.parquet").select(FIELDS).cast(schema)
    for name in sorted({file.name.rsplit("-", 1)[0] for file in folder.glob("rows-*.bin")}):
        found[name.removeprefix("rows-")] = read_state(sorted(folder.glob(f"{name}-?.bin"))).select(FIELDS).cast(schema)
    return found


if __name__ == "__main__":
    sys.exit(main())
