"""CPU time of one update, in the JVM and in Python, over whole intervals with their checkpoints.

    python -m benchmarks.cpu_per_update [--rows 1000000] [--keys 1000000] [--intervals 5] [--apis row,arrow] [--ways alone]
    python -m benchmarks.cpu_per_update --rows 10000,100000 --apis arrow --ways alone,together      # what a small interval takes

The state has six fields, one of them 64 characters. The first interval loads every key, and the next seven warm up.
Each further interval has `--rows` rows on keys drawn at random. With as many rows as keys, about 63 % of the keys have
a row.

The program prints medians and every sample, in seconds and in microseconds for each row. The way *alone* calls
`run_interval` for each interval. The way *together* calls `run_intervals` once for all intervals; an interval's figures
count from the previous commit to its own. The program fails if the digests of the ways differ.

CPU time is user and system time of this process and its descendants (JVM, Python daemon and workers), from the start to
the end of an interval. So it is comparable even on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import Row

from benchmarks.engines import START, interval, start_spark
from benchmarks.processes import cpu_s
from cairn.arrow_processor import ArrowProcessor, BatchResult, KeyedBatch, with_keys
from cairn.operations.intervals.run_interval import run_interval
from cairn.operations.intervals.run_intervals import run_intervals
from cairn.pipeline import Interval, Pipeline
from state_backend.checkpoint.find_checkpoint import record_of
from state_backend.checkpoint.location import locate

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STATE = "n bigint, total bigint, low bigint, high bigint, last bigint, payload string"
INPUT = "k bigint, v bigint, payload string"
OUTPUT = "k bigint, n bigint, total bigint"
_PAYLOADS = 4096


class RowUpdates(StatefulProcessor):
    """Count, sum, lowest, highest and last value of each key, and its last payload."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._state = handle.getValueState("state", STATE)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        found = self._state.get()
        n, total, low, high, last, payload = found or (0, 0, 1 << 62, -(1 << 62), 0, "")
        for row in rows:
            last, payload = row.v, row.payload
            n, total = n + 1, total + last
            low, high = min(low, last), max(high, last)
        self._state.update((n, total, low, high, last, payload))
        yield Row(k=key[0], n=n, total=total)

    def close(self) -> None:
        """Do nothing, because the processor holds no resources."""


class ArrowUpdates(ArrowProcessor):
    """The totals of `RowUpdates` for each key, computed in the vectorised API."""

    def init(self, handle: Any) -> None:
        handle.getValueState("state", STATE)

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        v, starts, ends = batch.rows["v"].to_numpy(), batch.row_offsets[:-1], batch.row_offsets[1:]
        state = batch.states["state"]
        n = state["n"].fill_null(0).to_numpy() + (ends - starts)
        total = state["total"].fill_null(0).to_numpy() + np.add.reduceat(v, starts)
        low = np.minimum(state["low"].fill_null(1 << 62).to_numpy(), np.minimum.reduceat(v, starts))
        high = np.maximum(state["high"].fill_null(-(1 << 62)).to_numpy(), np.maximum.reduceat(v, starts))
        payload = batch.rows["payload"].take(pa.array(ends - 1))
        new = pa.table(
            {
                "n": n,
                "total": total,
                "low": low,
                "high": high,
                "last": v[ends - 1],
                "payload": payload.cast(pa.string()),
            }
        )
        return BatchResult(states={"state": new}, output=with_keys(batch, new.select(["n", "total"])))


PROCESSORS: dict[str, type] = {"row": RowUpdates, "arrow": ArrowUpdates}


_WARM_UP = 8  # Intervals get faster up to the eighth, while the JVM compiles its hot code.


def write_input(folder: Path, rows: int, keys: int, intervals: int) -> list[Path]:
    """Write one file for each interval: first every key once, then `rows` rows on keys drawn at random."""
    random = np.random.default_rng(20130101)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz0123456789", "S1")
    payloads = pa.array(random.choice(letters, (_PAYLOADS, 64)).view("S64")[:, 0].astype(str))
    files = []
    folder.mkdir()
    for number in range(intervals):
        drawn = random.permutation(keys) if number == 0 else random.integers(0, keys, rows)
        columns = {
            "k": drawn,
            "v": random.integers(-1_000_000, 1_000_000, len(drawn)),
            "payload": payloads.take(pa.array(random.integers(0, _PAYLOADS, len(drawn)))),
        }
        files.append(folder / f"{number:03d}.parquet")
        pq.write_table(pa.table(columns), files[-1], row_group_size=max(1, len(drawn) // 4), use_dictionary=False)
    return files


def updates_over(files: Sequence[Path], api: str, **settings: Any) -> Pipeline:
    """Return the pipeline whose n-th interval reads the n-th file.

    Args:
        files: The input files.
        api: The API of the processor: "row" or "arrow".
        settings: More arguments of `Pipeline`.
    """
    of_start = {interval(number).start: str(file) for number, file in enumerate(files)}

    def source(spark: SparkSession, interval: Interval) -> DataFrame:
        return spark.read.schema(INPUT).parquet(of_start[interval.start])

    return Pipeline(
        name="updates",
        start=START,
        source=source,
        key=["k"],
        processor=PROCESSORS[api],
        api=api,  # type: ignore[arg-type]
        output_schema=OUTPUT,
        time_mode="none",
        parallelism=2,
        **settings,
    )


def measure(
    spark: SparkSession, api: str, files: list[Path], root: Path, way: str
) -> tuple[dict[str, list[float]], int]:
    """Run all intervals, one call of Cairn for each interval or one call for all.

    Args:
        spark: The session.
        api: The API of the processor: "row" or "arrow".
        files: The input files, one for each interval.
        root: The root of the state.
        way: "alone" for one call for each interval, "together" for one call for all.

    Returns:
        The seconds of every interval after the warm-up, by kind: CPU of the JVM, CPU of Python, CPU of both, and wall
        time. Then the digest of the last state.
    """
    pipeline = updates_over(files, api)
    found: dict[str, list[float]] = {"java": [], "python": [], "both": [], "wall": []}
    intervals = [interval(number) for number in range(len(files))]
    before, started_s = cpu_s(), time.monotonic()

    def mark(*_: Any) -> None:
        nonlocal before, started_s
        now, now_s = cpu_s(), time.monotonic()
        used = {kind: now[kind] - before[kind] for kind in now}
        for kind, seconds in {**used, "both": sum(used.values()), "wall": now_s - started_s}.items():
            found[kind].append(seconds)
        before, started_s = now, now_s

    if way == "together":
        run_intervals(spark, pipeline, intervals, str(root), on_outcome=mark)
    else:
        for one in intervals:
            mark(run_interval(spark, pipeline, one, str(root)))
    digest = record_of(locate(str(root), pipeline.name), "latest").content.digest
    return {kind: samples[_WARM_UP:] for kind, samples in found.items()}, digest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1000000", help="one number, or several with commas between them")
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--intervals", type=int, default=5)
    parser.add_argument("--apis", default="row,arrow")
    parser.add_argument("--ways", default="alone", help="alone, together, or both with a comma between them")
    options = parser.parse_args()
    print(f"load before the start {os.getloadavg()[0]:.1f}; {options.keys:,} keys", flush=True)
    with tempfile.TemporaryDirectory(prefix="cairn-cpu-") as text:
        folder = Path(text)
        spark = start_spark()
        try:
            for rows in map(int, options.rows.split(",")):
                files = write_input(folder / f"{rows}", rows, options.keys, options.intervals + _WARM_UP)
                for api in options.apis.split(","):
                    digests = set()
                    for way in options.ways.split(","):
                        found, digest = measure(spark, api, files, folder / f"{rows}-{api}-{way}", way)
                        digests.add(digest)
                        for kind, samples in found.items():
                            median, listed = statistics.median(samples), " ".join(f"{s:.3f}" for s in samples)
                            per_row = f"{median / rows * 1e6:8.2f} us a row"
                            print(
                                f"{rows:>9,} {api:5} {way:8} {kind:6} {median:7.3f} s {per_row}   ({listed})",
                                flush=True,
                            )
                    if len(digests) != 1:
                        raise RuntimeError(f"{rows} rows, {api}: the states of the ways differ")
                    print(f"{rows:>9,} {api:5} digest of the last state {digests.pop():016x}", flush=True)
            print(f"load at the end {os.getloadavg()[0]:.1f}")
        finally:
            spark.stop()


if __name__ == "__main__":
    main()
