"""The share of the output's digest in the CPU time of an interval.

    python -m benchmarks.digest [--rows 1000000] [--intervals 6]

Each interval has as many keys as rows, and emits a row for each: two columns, or twelve with four texts. Intervals with
and without the digest take turns. CPU time is that of Python and the JVM from the start to the end of an interval. The
digest's own CPU time is measured in the shards' tasks.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.engines import START, interval, start_spark
from benchmarks.processes import with_cpu_s
from cairn.arrow_processor import ArrowProcessor, BatchResult, KeyedBatch, with_keys
from cairn.operations.intervals.run_interval import run_interval
from cairn.pipeline import Interval, Pipeline
from cairn.rows import output_file
from state_backend.formats.content_digest import digest_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TEXTS, NUMBERS = [f"t{n}" for n in range(4)], [f"d{n}" for n in range(3)]
WIDE = "k bigint, n bigint, at timestamp, day date, flag boolean, " + ", ".join(
    [*(f"{name} string" for name in TEXTS), *(f"{name} double" for name in NUMBERS)]
)
SHAPES = {"narrow": "k bigint, n bigint", "wide": WIDE}
_WARM_UP = 4


class Counted(ArrowProcessor):
    """Count the rows of each key, and emit the count with the other columns of the input."""

    def __init__(self, names: list[str], used: Path | None) -> None:
        self.names, self.used = names, used

    def init(self, handle: Any) -> None:
        handle.getValueState("n", "n bigint")
        output_file.digest_of = partial(_measured, self.used) if self.used else lambda _: 0

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        starts, ends = batch.row_offsets[:-1], batch.row_offsets[1:]
        n = pa.array(batch.states["n"]["n"].fill_null(0).to_numpy() + (ends - starts))
        last = batch.rows.take(pa.array(ends - 1))
        output = pa.table({"n": n} | {name: last[name] for name in self.names})
        return BatchResult(states={"n": pa.table({"n": n})}, output=with_keys(batch, output))


def _measured(used: Path, rows: pa.RecordBatch | pa.Table) -> int:
    before = time.thread_time()
    digest = digest_of(rows)
    with used.open("a") as file:
        file.write(f"{time.thread_time() - before}\n")
    return digest


def write_input(path: Path, rows: int) -> None:
    """Write rows with all columns of the wide shape, the keys in random order."""
    random = np.random.default_rng(20130101)
    words = pa.array([f"{n:x}" * (1 + n % 5) for n in range(4_096)])
    seconds = random.integers(0, 10**9, rows)
    columns: dict[str, Any] = {
        "k": random.permutation(rows),
        "at": pa.array(seconds * 10**6).cast(pa.timestamp("us", "UTC")),
        "day": pa.array((seconds // 86_400).astype(np.int32)).cast(pa.date32()),
        "flag": seconds % 2 == 0,
    }
    columns |= {name: words.take(pa.array(random.integers(0, len(words), rows))) for name in TEXTS}
    columns |= {name: random.random(rows) for name in NUMBERS}
    pq.write_table(pa.table(columns), path, row_group_size=max(1, rows // 4))


def pipeline_of(shape: str, file: Path, used: Path | None) -> Pipeline:
    """Return a pipeline whose intervals all read the file. A digest appends its CPU seconds to `used`."""
    names = [column.split()[0] for column in SHAPES[shape].split(", ")]

    def source(spark: SparkSession, interval: Interval) -> DataFrame:
        return spark.read.parquet(str(file)).select(*(name for name in names if name != "n"))

    return Pipeline(
        name=shape,
        start=START,
        source=source,
        key=["k"],
        processor=partial(Counted, names[2:], used),
        api="arrow",
        output_schema=SHAPES[shape],
        time_mode="none",
        parallelism=2,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--intervals", type=int, default=6)
    options = parser.parse_args()
    spark = start_spark()
    with tempfile.TemporaryDirectory(prefix="cairn-digest-") as folder:
        file = Path(folder) / "input.parquet"
        write_input(file, options.rows)
        for shape in SHAPES:
            totals: dict[bool, list[float]] = {True: [], False: []}
            own = []
            for number in range(_WARM_UP + 2 * options.intervals):
                used = Path(folder) / f"{shape}-{number}.txt" if number % 2 == 0 else None
                pipeline = pipeline_of(shape, file, used)
                total_s = with_cpu_s(partial(run_interval, spark, pipeline, interval(number), folder))[1]
                if number >= _WARM_UP:
                    totals[used is not None].append(total_s)
                    own += [sum(map(float, used.read_text().split()))] if used else []
            with_, without, alone = map(statistics.median, (totals[True], totals[False], own))
            print(
                f"{shape:6} with {with_:.3f} s, without {without:.3f} s: {(with_ - without) / with_:.1%} of the CPU; "
                f"digest_of {alone:.3f} s, {alone / with_:.1%}   {totals} {own}",
                flush=True,
            )
    spark.stop()


if __name__ == "__main__":
    main()
