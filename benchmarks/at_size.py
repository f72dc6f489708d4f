"""Pipelines at large sizes: many keys, one hot key, a long list, large values and many shards.

    python -m benchmarks.at_size [--only keys,hot,large,shards] [--keys 100000,1000000,10000000,100000000] [--plots FILE]

The sections are:

- keys: the state of `benchmarks.cpu_per_update`, with the vectorised API. Intervals of at most five million keys load
  every key. Then seven intervals update 1 % of the keys, drawn at random. The first of them warms up. The last one
  restores without the host's cache, after the storage's files were dropped from the system's page cache. Then follow a
  native savepoint, both validations, and look-ups of twenty keys.
- hot: one key with all rows of an interval, with the row API and with `RunningAggregate`. Then a list that grows to as
  many elements, takes a thousand more, and is read.
- large: values of 50 MB.
- shards: a thousand shards over a million keys.

Two options make the state larger than the memory: longer payloads (`--payload`), and memory that this program occupies
(`--hold-gib`). The disk needs about three times the state: for the storage, the host's cache, and Spark's shuffle files
of an interval.

Each size has a process and a Spark session of its own, with two cores and a driver heap of 4 GB. The program prints
JSON: wall seconds and CPU seconds (of Python and the JVM), the peak resident memory of a shard's Python worker, and,
for each second, the memory of all processes and the bytes on the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import Row

from benchmarks.cpu_per_update import OUTPUT, ArrowUpdates, RowUpdates
from benchmarks.engines import START, interval, start_spark
from benchmarks.line_plots import Plot, draw
from benchmarks.processes import Seen, own_and_below
from benchmarks.totals import TOTALS_SCHEMA, Totals
from cairn.data_sources.state_selection import plan_read
from cairn.operations.intervals.run_interval import run_interval
from cairn.operations.savepoints.take_savepoint import take_savepoint
from cairn.pipeline import Interval, Pipeline
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.open_storage import join_url
from state_backend.adapters.rocks import EngineOptions
from state_backend.checkpoint.find_checkpoint import record_of
from state_backend.checkpoint.location import locate
from state_backend.inspection.state_source import StateSource
from state_backend.inspection.state_table import read_table
from state_backend.values.records import Record
from state_backend.values.retention import KeepLast
from tests.support.validating import validate_checkpoint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MIB = 1024 * 1024
SECTIONS = ("keys", "hot", "large", "shards")
_LOAD_ROWS = 5_000_000
_UPDATES = 7
# This step is odd and no multiple of five. So its multiples, modulo a power of ten, visit every key once.
_STEP = 7_368_787


# --- memory and disk over time ----------------------------------------------------------------------------------------------


class Watch:
    """Sampler of this process, its descendants and a folder. It takes a sample each second during a `with` block.

    A sample is `[second, MiB of Python, MiB of the JVM, MiB of the largest Python worker, MiB on the disk]`. The disk
    is measured for every tenth sample only.
    """

    def __init__(self, folder: Path) -> None:
        self.samples: list[list[float]] = []
        self.worker_peak_mib = 0.0
        self._cpu_s: dict[int, float] = {}
        self._folder = folder
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        started_s, disk_mib = time.monotonic(), 0.0
        while True:
            if len(self.samples) % 10 == 0:
                disk_mib = bytes_below(self._folder) / MIB
            found = self._look()
            workers = [seen.resident_bytes / MIB for seen in found[1:] if not seen.java]
            java = sum(seen.resident_bytes for seen in found if seen.java) / MIB
            python = sum(seen.resident_bytes for seen in found if not seen.java) / MIB
            largest = max(workers, default=0.0)
            self.worker_peak_mib = max(self.worker_peak_mib, largest)
            at_s = time.monotonic() - started_s
            self.samples.append([round(x, 1) for x in (at_s, python, java, largest, disk_mib)])
            if self._over.wait(1.0):
                return

    def cpu_s(self) -> float:
        """Return the CPU seconds of all processes so far.

        For a process that has ended, the sum lacks the CPU time after the last sample.
        """
        self._look()
        return sum(self._cpu_s.values())

    def _look(self) -> list[Seen]:
        found = [*own_and_below()]
        self._cpu_s |= {seen.pid: seen.own_cpu_s for seen in found}
        return found


def bytes_below(folder: Path) -> int:
    """Return the bytes of the files below a folder. A file with several hard links counts once."""
    sizes: dict[int, int] = {}
    for above, _, names in os.walk(folder):
        for name in names:
            # The file was deleted after the folder was listed: shards create and delete folders meanwhile.
            with contextlib.suppress(OSError):
                status = (Path(above) / name).lstat()
                sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def forget_pages(folder: Path) -> None:
    """Drop the files below a folder from the system's page cache, so that reads come from the disk again."""
    os.sync()
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- an interval, measured --------------------------------------------------------------------------------------------------

Rows = Callable[["SparkSession", int], "DataFrame"]


def pipeline_of(rows: Rows, folder: Path, **settings: Any) -> Pipeline:
    """Return a pipeline whose n-th interval has the rows `rows(spark, n)`. It retains the two newest checkpoints."""

    def source(spark: SparkSession, interval: Interval) -> DataFrame:
        return rows(spark, (interval.start - START) // (interval.end - interval.start))

    engine = EngineOptions(cache_dir=str(folder / "cache"))
    defaults: dict[str, Any] = {"time_mode": "none", "engine": engine, "retention": KeepLast(2), "parallelism": 2}
    return Pipeline(name="bench", start=START, source=source, key=["k"], **(defaults | settings))


def timed(watch: Watch, work: Callable[[], Any]) -> dict[str, Any]:
    """Call the function, and return the wall seconds, the CPU seconds and the result."""
    before_s, started_s = watch.cpu_s(), time.monotonic()
    result = work()
    wall_s = time.monotonic() - started_s
    return {"s": round(wall_s, 3), "cpu_s": round(watch.cpu_s() - before_s, 3), "result": result}


def one(watch: Watch, spark: SparkSession, pipeline: Pipeline, number: int, root: Path) -> dict[str, Any]:
    """Run one interval, and return its seconds, phases, input rows, keys and state size."""
    found = timed(watch, lambda: run_interval(spark, pipeline, interval(number), str(root)))
    record: Record = found.pop("result")
    totals = record.content.totals
    found["phases_s"] = {name: round(us / 1e6, 3) for name, us in record.content.durations_us.items() if us >= 1000}
    found |= {"input_rows": totals.input_rows, "keys": totals.keys, "state_mib": round(totals.state_bytes / MIB, 1)}
    print(f"  interval {number}: {found['s']:.2f} s, CPU {found['cpu_s']:.2f} s, {totals.keys:,} keys", file=sys.stderr)
    return found


# --- sections ---------------------------------------------------------------------------------------------------------------


def keys(folder: Path, size: int, shards: int, chars: int) -> dict[str, Any]:
    """Measure load, updates of 1 %, restore, savepoint, validations and look-ups.

    Args:
        folder: The folder for all files.
        size: The number of keys.
        shards: The number of shards.
        chars: The number of characters of each payload, a multiple of 64.
    """
    loads = -(-size // _LOAD_ROWS)
    touched = max(1, size // 100)

    def rows(spark: SparkSession, number: int) -> DataFrame:
        if number < loads:
            ids = spark.range(number * size // loads, (number + 1) * size // loads, numPartitions=4)
            key = (F.col("id") * _STEP) % size
        else:
            ids = spark.range(0, touched, numPartitions=2)
            key = F.pmod(F.xxhash64(F.col("id"), F.lit(number)), F.lit(size))
        drawn = F.xxhash64(F.col("id"), F.lit(number), F.lit(1))
        # The payload is random hexadecimal digits, which RocksDB's lz4 can't compress.
        payload = F.concat(*(F.sha2(F.concat(drawn.cast("string"), F.lit(part)), 256) for part in range(chars // 64)))
        return ids.select(key.cast("bigint").alias("k"), (drawn % 1_000_000).alias("v"), payload.alias("payload"))

    root, spark = folder / "root", start_spark()
    pipeline = pipeline_of(rows, folder, processor=ArrowUpdates, api="arrow", output_schema=OUTPUT, parallelism=shards)
    found: dict[str, Any] = {"keys": size, "shards": shards}
    with Watch(folder) as watch:
        loaded = [one(watch, spark, pipeline, number, root) for number in range(loads)]
        updates = [one(watch, spark, pipeline, loads + number, root) for number in range(_UPDATES - 1)]
        shutil.rmtree(folder / "cache")
        forget_pages(root)
        cold_pipeline = replace(pipeline, engine=EngineOptions(cache_dir=None))
        cold = one(watch, spark, cold_pipeline, loads + _UPDATES - 1, root)
        url = join_url(str(root), "bench")
        record = record_of(locate(str(root), "bench"), "latest")
        source = StateSource.of_record(url, record)
        saved: dict[str, Any] = {"left out": "the disk has no room for it"}
        if shutil.disk_usage(folder).free > 1.5 * record.content.totals.state_bytes:
            to = folder / "savepoint"
            saved = timed(watch, lambda: take_savepoint(spark, pipeline, url, record, str(to), "native"))
            saved["mib"] = round(bytes_below(to) / MIB, 1)
            del saved["result"]
            shutil.rmtree(to)
        validated = {}
        for mode in ("fast", "full"):
            validated[mode] = timed(
                watch,
                lambda mode=mode: validate_checkpoint(
                    spark, pipeline, str(root), record, fast=mode == "fast", without_expectations=True
                ),
            )
            assert validated[mode].pop("result").success
        looked_up = timed(
            watch, lambda: look_up(source, folder, [int(k) for k in np.random.default_rng(2).integers(0, size, 20)])
        )
        assert looked_up.pop("result") == 20
    spark.stop()
    found["load"] = loaded
    found["update"] = updates
    found["cold"] = cold
    found |= {"savepoint": saved, "validation": validated, "look up 20 keys": looked_up}
    found["us_per_key"] = {
        "load": round(sum(each["s"] for each in loaded) / size * 1e6, 3),
        "load, CPU": round(sum(each["cpu_s"] for each in loaded) / size * 1e6, 3),
        "last load, CPU": round(loaded[-1]["cpu_s"] / loaded[-1]["input_rows"] * 1e6, 3),
        "update": round(statistics.median(each["s"] for each in updates[1:]) / touched * 1e6, 3),
        "update, CPU": round(statistics.median(each["cpu_s"] for each in updates[1:]) / touched * 1e6, 3),
    }
    return found | {"worker_peak_mib": watch.worker_peak_mib, "over_time": watch.samples}


def look_up(source: StateSource, folder: Path, wanted: list[int]) -> int:
    """Look up each key by itself, and return the number of rows that were found."""
    storage, rows = LocalStorage(Path(source.url)), 0
    for key in wanted:
        plan = plan_read(source.content, keys=[(key,)])
        for shard in plan.shards:
            with tempfile.TemporaryDirectory(dir=folder) as work:
                tables = read_table(source, "state", shard, storage, Path(work), plan.part_of(shard, source.content))
                rows += sum(table.num_rows for table in tables)
    return rows


class Grows(StatefulProcessor):
    """A list that grows by each row's value.

    A row with the value -1 instead yields the length of the whole list.
    """

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._values = handle.getListState("values", "v bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        appended = 0
        for row in rows:
            if row.v == -1:
                yield Row(k=key[0], n=sum(1 for _ in self._values.get()))
                return
            self._values.appendValue((row.v,))
            appended += 1
        yield Row(k=key[0], n=appended)

    def close(self) -> None:
        """Do nothing, because the processor holds no resources."""


def hot(folder: Path, size: int) -> dict[str, Any]:
    """Measure one key with all rows, and a list of as many elements."""

    def rows(spark: SparkSession, number: int) -> DataFrame:
        ids = spark.range(0, (size, size, size, 1_000, 1)[number] if number < 5 else 1, numPartitions=4)
        value = F.lit(-1) if number == 4 else F.col("id")
        text = F.lit("x" * 64)
        return ids.select(F.lit(7).cast("bigint").alias("k"), value.cast("bigint").alias("v"), text.alias("payload"))

    found: dict[str, Any] = {"rows": size}
    cases: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
        ("row", {"processor": RowUpdates, "api": "row", "output_schema": OUTPUT}, (0, 1)),
        ("aggregate", {"processor": Totals, "api": "arrow", "output_schema": TOTALS_SCHEMA}, (0, 1)),
        ("list", {"processor": Grows, "api": "row", "output_schema": "k bigint, n bigint"}, (0,)),
    ]
    spark = start_spark()
    with Watch(folder) as watch:
        for name, settings, numbers in cases:
            pipeline, root = pipeline_of(rows, folder, **settings), folder / name
            found[name] = [one(watch, spark, pipeline, number, root) for number in numbers]
            found[f"{name}, worker peak MiB"], watch.worker_peak_mib = watch.worker_peak_mib, 0.0
        then = pipeline_of(lambda spark, number: rows(spark, number + 2), folder, **cases[2][1])
        found["list, 1,000 more"] = one(watch, spark, then, 1, folder / "list")
        found["list, read"] = one(watch, spark, then, 2, folder / "list")
        found["list read, worker peak MiB"] = watch.worker_peak_mib
    spark.stop()
    return found | {"over_time": watch.samples}


class Keeps(StatefulProcessor):
    """The last payload of each key. Each call yields the length of the previous payload."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._last = handle.getValueState("last", "payload string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        before = self._last.get()
        for row in rows:
            self._last.update((row.payload,))
        yield Row(k=key[0], n=len(before[0]) if before else 0)

    def close(self) -> None:
        """Do nothing, because the processor holds no resources."""


def large(folder: Path, values: int, value_mib: int) -> dict[str, Any]:
    """Measure intervals that write and read values of 50 MB."""
    times = value_mib * MIB // 64

    def rows(spark: SparkSession, number: int) -> DataFrame:
        ids = spark.range(0, values, numPartitions=values)
        payload = F.expr(f"repeat(sha2(cast(id * 31 + {number} as string), 256), {times})")
        return ids.select(F.col("id").alias("k"), F.col("id").alias("v"), payload.alias("payload"))

    spark = start_spark()
    pipeline = pipeline_of(rows, folder, processor=Keeps, api="row", output_schema="k bigint, n bigint")
    with Watch(folder) as watch:
        runs = [one(watch, spark, pipeline, number, folder / "root") for number in range(3)]
    spark.stop()
    found = {"values": values, "value_mib": value_mib, "intervals": runs}
    return found | {"worker_peak_mib": watch.worker_peak_mib, "over_time": watch.samples}


def many_shards(folder: Path, size: int, shards: int) -> dict[str, Any]:
    """Measure a load, three updates of 1 %, and an interval with one row."""

    def rows(spark: SparkSession, number: int) -> DataFrame:
        ids = spark.range(0, size if number == 0 else size // 100 if number < 4 else 1, numPartitions=4)
        key = (
            (F.col("id") * _STEP) % size if number == 0 else F.pmod(F.xxhash64(F.col("id"), F.lit(number)), F.lit(size))
        )
        payload = F.sha2(F.col("id").cast("string"), 256)
        return ids.select(key.cast("bigint").alias("k"), F.col("id").alias("v"), payload.alias("payload"))

    spark = start_spark()
    pipeline = pipeline_of(
        rows,
        folder,
        processor=ArrowUpdates,
        api="arrow",
        output_schema=OUTPUT,
        parallelism=shards,
        max_parallelism=max(1024, shards),
    )
    with Watch(folder) as watch:
        runs = [one(watch, spark, pipeline, number, folder / "root") for number in range(5)]
    spark.stop()
    found = {"keys": size, "shards": shards, "intervals": runs}
    return found | {"worker_peak_mib": watch.worker_peak_mib, "over_time": watch.samples}


# --- all --------------------------------------------------------------------------------------------------------------------


def shards_of(size: int) -> int:
    """Return the number of shards: two, and one more for every five million keys."""
    return 2 + max(0, size - 5_000_000) // 5_000_000


def runs_of(options: argparse.Namespace) -> dict[str, Callable[[Path], dict[str, Any]]]:
    """Return the chosen measurements by name. Each runs in a process of its own."""
    sizes = [int(size) for size in options.keys.split(",")]
    found: dict[str, Callable[[Path], dict[str, Any]]] = {}
    for size in sizes:
        found[f"keys {size}"] = lambda folder, size=size: keys(
            folder, size, options.shards or shards_of(size), options.payload
        )
    found["hot"] = lambda folder: hot(folder, options.hot)
    found["large"] = lambda folder: large(folder, options.values, options.value_mib)
    found["shards"] = lambda folder: many_shards(folder, options.shard_keys, options.many)
    return {name: run for name, run in found.items() if name.split()[0] in options.only.split(",")}


def plots_of(report: dict[str, Any]) -> list[Plot]:
    """Return the plots of memory and disk over time for each run."""
    plots = []
    for name, found in report.items():
        over = found["over_time"]
        of = {"Python, all": 1, "JVM": 2, "largest worker": 3}
        lines = {label: [(row[0], row[column]) for row in over] for label, column in of.items()}
        plots.append(Plot(title=f"{name}: resident MiB", lines=lines))
        plots.append(Plot(title=f"{name}: MiB on the disk", lines={"": [(row[0], row[4]) for row in over]}))
    return plots


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--keys", default="100000,1000000,10000000,100000000")
    parser.add_argument("--payload", type=int, default=64, help="characters of each key's payload, a multiple of 64")
    parser.add_argument(
        "--hold-gib", type=int, default=0, help="memory that is taken away, so that state is larger than what is left"
    )
    parser.add_argument("--shards", type=int, help="of `keys`; two, and one more for every five million keys")
    parser.add_argument("--hot", type=int, default=10_000_000)
    parser.add_argument("--values", type=int, default=20)
    parser.add_argument("--value-mib", type=int, default=50)
    parser.add_argument("--many", type=int, default=1_000)
    parser.add_argument("--shard-keys", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "at_size.json")
    parser.add_argument("--plots", type=Path)
    parser.add_argument("--work", type=Path, help="where temporary folders are made; a local disk")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        with tempfile.TemporaryDirectory(prefix="cairn-size-", dir=options.work) as folder:
            os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
            os.environ["PYSPARK_SUBMIT_ARGS"] = f"--driver-memory 4g --conf spark.local.dir={folder} pyspark-shell"
            print(json.dumps(runs_of(options)[options.run](Path(folder))))
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    # The array is written, so it occupies memory until the end of this process.
    held = np.ones(options.hold_gib << 30, np.uint8)
    report: dict[str, Any] = {}
    for name in runs_of(options):
        print(f"{name}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "benchmarks.at_size", *sys.argv[1:], "--run", name]
        report[name] = json.loads(
            subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]
        )
        options.out.write_text(json.dumps(report) + "\n")
    del held
    if options.plots:
        draw(plots_of(report), options.plots, "second")
    print(
        json.dumps({n: {k: v for k, v in found.items() if k != "over_time"} for n, found in report.items()}, indent=1)
    )


if __name__ == "__main__":
    main()
