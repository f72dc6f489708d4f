"""Ready-made processors beside Flink SQL: CPU seconds and wall time of the same rows, and equal results.

    python -m benchmarks.flink.sql [--cases tumbling join] [--keys 1000000] [--rows 1000000] [--batches 4] [--jars FOLDER]

Each batch is one hour of rows with random keys. The first batch warms both engines up, and is not measured.

- **flink**: `Queries.java` runs one SQL query in a mini cluster of one JVM, with two slots and RocksDB. The job runs all
  the time, with object reuse, mini-batches if the case gives settings for them, and *without checkpoints*. It reads plain
  bytes and writes plain bytes. All of this favours Flink.
- **cairn**: `run_interval` with the same query as a ready-made processor, on two shards in Spark's local mode. Each
  interval reads Parquet, commits a checkpoint, and writes Parquet.

CPU seconds are those of all processes of an engine. The engines run one after the other. The program fails if the results
differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import engines
from benchmarks.flink.__main__ import _JAVAC, flink_jars
from benchmarks.processes import with_cpu_s
from benchmarks.ready_made import START, Hourly, Overlapping, Visits
from cairn import Pipeline
from cairn.operations.intervals.run_interval import run_interval
from cairn.processors import Deduplicate, IntervalJoin, TopN, union_by_kind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = "id long, at timestamp, amount double"
_JARS = ("dist", "table-api-java-uber", "table-planner-loader", "table-runtime", "connector-files", "cep")
_ROW = np.dtype([("id", ">i8"), ("at", ">i8"), ("amount", ">f8")])
_INSERTS = (0, 2)
_MINUTE = timedelta(minutes=1)


class Once(Deduplicate):
    """The first row of each key, for ever."""

    horizon = None


class OnceWithin(Deduplicate):
    """The first row of each key within 90 minutes."""

    horizon = timedelta(minutes=90)


class Best(TopN):
    """The three best rows of each key."""

    n = 3
    order = "amount desc"


class Near(IntervalJoin):
    """Pairs of rows at most half an hour apart."""

    left, right = "a", "b"
    lower, upper = timedelta(minutes=-30), timedelta(minutes=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A processor and Flink's query for the same output.

    Attributes:
        processor: The processor.
        sql: Flink's query over the tables `a` and `b`.
        columns: The columns of Flink's output, in SQL.
        compared: The columns that both results have, and that are compared. Which one of several equal rows an engine
            takes is open.
        delay: The delay of the watermark.
        late: True if a tenth of the rows are up to 29 minutes late.
        new_keys: True if each batch has keys of its own.
        two_inputs: True if the query reads both tables. Each has half of the rows.
        settings: More settings of Flink.
        counted: True if a batch ends with the number of Cairn's output rows, because mini-batches drop watermarks.
        state: The state that is compared instead of the output.
    """

    processor: type
    sql: str
    columns: str
    compared: tuple[str, ...]
    delay: timedelta = 30 * _MINUTE
    late: bool = True
    new_keys: bool = False
    two_inputs: bool = False
    settings: str = ""
    counted: bool = False
    state: str | None = None


_TOTALS = "COUNT(*), SUM(amount), MAX(amount)"
_OF_WINDOW = ("id", "window_start", "window_end", "rows", "total", "highest")
_WINDOW_COLUMNS = (
    "id BIGINT, window_start TIMESTAMP(3), window_end TIMESTAMP(3), `rows` BIGINT, total DOUBLE, highest DOUBLE"
)
_FIRST = "SELECT id, `at`, amount FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY id ORDER BY arrived ASC) AS n FROM a) WHERE n = 1"
_ROW_COLUMNS = "id BIGINT, `at` TIMESTAMP(3), amount DOUBLE"
_MINI_BATCH = (
    "table.exec.mini-batch.enabled=true;table.exec.mini-batch.allow-latency=1 s;table.exec.mini-batch.size=20000"
)


def _windows(function: str) -> str:
    return (
        f"SELECT id, window_start, window_end, {_TOTALS} FROM TABLE({function}) GROUP BY id, window_start, window_end"
    )


CASES = {
    "deduplicate": Case(processor=Once, sql=_FIRST, columns=_ROW_COLUMNS, compared=("id",)),
    "deduplicate, mini-batch": Case(
        processor=Once, sql=_FIRST, columns=_ROW_COLUMNS, compared=("id",), settings=_MINI_BATCH, counted=True
    ),
    # Flink's time to live is processing time: within the run, no entry expires.
    "deduplicate, horizon": Case(
        processor=OnceWithin,
        sql=_FIRST,
        columns=_ROW_COLUMNS,
        compared=("id",),
        delay=90 * _MINUTE,
        new_keys=True,
        settings="table.exec.state.ttl=2 h",
    ),
    "tumbling": Case(
        processor=Hourly,
        sql=_windows("TUMBLE(TABLE a, DESCRIPTOR(`at`), INTERVAL '1' HOUR)"),
        columns=_WINDOW_COLUMNS,
        compared=_OF_WINDOW,
    ),
    "sliding": Case(
        processor=Overlapping,
        sql=_windows("HOP(TABLE a, DESCRIPTOR(`at`), INTERVAL '20' MINUTES, INTERVAL '1' HOUR)"),
        columns=_WINDOW_COLUMNS,
        compared=_OF_WINDOW,
    ),
    "sessions": Case(
        processor=Visits,
        sql=_windows("SESSION(TABLE a PARTITION BY id, DESCRIPTOR(`at`), INTERVAL '10' MINUTES)"),
        columns=_WINDOW_COLUMNS.replace("window_", "session_"),
        compared=("id", "session_start", "session_end", "rows", "total", "highest"),
    ),
    "top": Case(
        processor=Best,
        sql="SELECT id, `at`, amount FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY id ORDER BY amount DESC) AS n FROM a) WHERE n <= 3",
        columns=_ROW_COLUMNS,
        compared=("id", "amount"),
        state="top",
        settings="table.exec.rank.topn-cache-size=1000000",
    ),
    "join": Case(
        processor=Near,
        sql="SELECT a.id, CAST(a.`at` AS TIMESTAMP(3)), a.amount, CAST(b.`at` AS TIMESTAMP(3)), b.amount FROM a, b WHERE a.id = b.id AND b.`at` BETWEEN "
        "a.`at` - INTERVAL '30' MINUTES AND a.`at` + INTERVAL '30' MINUTES",
        columns="id BIGINT, a_at TIMESTAMP(3), a_amount DOUBLE, b_at TIMESTAMP(3), b_amount DOUBLE",
        compared=("id", "a_at", "a_amount", "b_at", "b_amount"),
        # Without a delay, a row at the start of an hour would be late.
        delay=timedelta(milliseconds=1),
        late=False,
        two_inputs=True,
    ),
}


def write_inputs(folder: Path, case: Case, keys: int, rows: int, batches: int) -> None:
    """Write `TABLE-NNN.parquet` and, for each of Flink's two sources, `TABLE-NNN-P.bin`."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(7)
    tables = "ab" if case.two_inputs else "a"
    for number in range(batches):
        for table in tables:
            count = rows // len(tables)
            made = np.empty(count, _ROW)
            minutes = random.uniform(60 * number, 60 * (number + 1), count)
            if case.late:
                minutes -= np.where(random.random(count) < 0.1, random.uniform(0, 29, count), 0)
            made["id"] = random.integers(0, keys, count) + (number * keys if case.new_keys else 0)
            # Flink's event time has milliseconds.
            made["at"] = int(START.timestamp()) * 1000 + (minutes * 60_000).astype(np.int64)
            # Whole numbers, whose sum does not depend on the order.
            made["amount"] = random.integers(0, 1000, count)
            for source in range(2):
                made[source::2].tofile(folder / f"{table}-{number:03d}-{source}.bin")
            of_us = pa.array(made["at"].astype(np.int64) * 1000).cast(pa.timestamp("us", "UTC"))
            columns = {"id": made["id"].astype(np.int64), "at": of_us, "amount": made["amount"].astype(np.float64)}
            pq.write_table(pa.table(columns), folder / f"{table}-{number:03d}.parquet")


def pipeline(case: Case, inputs: Path) -> Pipeline:
    """Return the pipeline that reads the Parquet files."""

    def source(spark: SparkSession, of: Any) -> DataFrame:
        number = (of.start - engines.START) // timedelta(hours=1)
        read = {
            t: spark.read.schema(SCHEMA).parquet(str(inputs / f"{t}-{number:03d}.parquet"))
            for t in "ab"[: 1 + case.two_inputs]
        }
        return union_by_kind(read, shared=["id", "at"]) if case.two_inputs else read["a"]

    timed: dict[str, Any] = {
        "time_mode": "event",
        "event_time": "at",
        "watermark_delay": case.delay,
        "watermark": "interval",
    }
    return Pipeline(
        name="bench",
        start=engines.START,
        source=source,
        key=["id"],
        processor=case.processor,
        order_by=["at"],
        max_parallelism=128,
        **({} if case.state else timed),
    )


def class_path(jars: Path | None, work: Path) -> str:
    """Compile `Queries.java`, and return the class path that runs it."""
    lib = jars if jars is not None else flink_jars(work)[0].parent
    found = [*(file for name in _JARS for file in lib.glob(f"flink-{name}-*.jar")), *lib.glob("log4j-*.jar")]
    classes = work / "classes"
    services = classes / "META-INF" / "services"
    services.mkdir(parents=True)
    (services / "org.apache.flink.table.factories.Factory").write_text("Queries$Factory\n")
    path = os.pathsep.join(map(str, [classes, *found]))
    source = Path(__file__).with_name("Queries.java")
    subprocess.run([*_JAVAC, "-cp", path, "-d", str(classes), str(source)], check=True)
    return path


def run_flink(
    path: str, case: Case, inputs: Path, folder: Path, batches: int, counts: list[int]
) -> list[dict[str, Any]]:
    """Run Flink's query, and return the figures of each batch."""
    opened = [f"--add-opens=java.base/java.{package}=ALL-UNNAMED" for package in ("util", "lang", "nio", "time")]
    ms = (str(int(START.timestamp()) * 1000), str(case.delay // timedelta(milliseconds=1)))
    arguments = [str(inputs), str(folder), str(batches), *ms, case.sql, case.columns, case.settings]
    numbers = ",".join(map(str, counts)) if case.counted else ""
    command = ["java", "-Xmx4g", *opened, "-cp", path, "Queries", *arguments, numbers]
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False, timeout=3_600)
    if done.returncode:
        raise RuntimeError(f"Flink failed:\n{(folder / 'log.txt').read_text()[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def flink_rows(case: Case, folder: Path) -> pa.Table:
    """Return the rows of Flink's output. A row that Flink took back is left out."""
    fields = [column.strip().split(" ")[:2] for column in case.columns.split(",")]
    names = [name.strip("`") for name, _ in fields]
    dtype = np.dtype(
        [("kind", "u1"), *((n, ">f8" if of == "DOUBLE" else ">i8") for n, (_, of) in zip(names, fields, strict=True))]
    )
    rows = np.concatenate([np.fromfile(folder / f"output-{sink}.bin", dtype) for sink in range(2)])
    columns = {}
    for name, (_, of) in zip(names, fields, strict=True):
        values = rows[name].astype(np.float64 if of == "DOUBLE" else np.int64)
        columns[name] = (
            pa.array(values * 1000).cast(pa.timestamp("us", "UTC")) if of.startswith("TIME") else pa.array(values)
        )
    table = pa.table(columns).select(case.compared)
    inserted = np.isin(rows["kind"], _INSERTS)
    if inserted.all():
        return table
    came, went = (
        Counter(zip(*table.filter(pa.array(mask)).to_pydict().values(), strict=True)) for mask in (inserted, ~inserted)
    )
    left = list((came - went).elements())
    return pa.table(dict(zip(case.compared, map(list, zip(*left, strict=True)), strict=True)))


def measure(name: str, spark: SparkSession, path: str, folder: Path, keys: int, rows: int, batches: int) -> None:
    """Run both engines, compare the results, and print CPU and wall time per row.

    Raises:
        AssertionError: The results differ.
    """
    case, root = CASES[name], folder / "root"
    write_inputs(folder / "inputs", case, keys, rows, batches)
    ours = pipeline(case, folder / "inputs")
    records = [run_interval(spark, ours, engines.interval(0), str(root))]
    begun = time.monotonic()
    more, cpu_s = with_cpu_s(
        lambda: [run_interval(spark, ours, engines.interval(n), str(root)) for n in range(1, batches)]
    )
    wall_s = time.monotonic() - begun
    records += more
    outputs = [[pq.read_table(root / "bench" / f.handle.path) for f in r.content.outputs] for r in records]
    counts = np.cumsum([sum(map(len, tables)) for tables in outputs]).tolist()
    (folder / "flink").mkdir()
    steps = run_flink(path, case, folder / "inputs", folder / "flink", batches, counts)[1:]
    per_row = 1e6 / (rows * (batches - 1))
    figures = {"cairn": (cpu_s, wall_s), "flink": (sum(s["cpu_s"] for s in steps), sum(s["wall_s"] for s in steps))}
    for engine, (cpu, wall) in figures.items():
        print(f"{name:24} {engine:6} CPU {cpu * per_row:6.2f} µs/row, wall {wall * per_row:6.2f} µs/row", flush=True)
    result = (
        engines.cairn_state(spark, root, case.state)
        if case.state
        else pa.concat_tables(table for tables in outputs for table in tables)
    )
    theirs = flink_rows(case, folder / "flink")
    order = [(column, "ascending") for column in case.compared]
    result, theirs = (t.select(case.compared).cast(theirs.schema).sort_by(order) for t in (result, theirs))
    print(f"{name:24} {len(result):,} and {len(theirs):,} rows, load {os.getloadavg()[0]:.0f}", flush=True)
    assert result.combine_chunks().equals(theirs.combine_chunks()), f"{name}: the results differ"


def main() -> None:
    """Measure each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of each batch")
    parser.add_argument("--batches", type=int, default=4, help="with the first one, which is not measured")
    parser.add_argument(
        "--jars", type=Path, help="the folder of an installed Flink's jars; without it, Flink is installed"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cairn-flink-sql-", ignore_cleanup_errors=True) as made:
        path = class_path(given.jars, Path(made))
        spark = engines.start_spark()
        for name in given.cases:
            folder = Path(made) / name.replace(", ", "-")
            measure(name, spark, path, folder, given.keys, given.rows, given.batches)
        spark.stop()


if __name__ == "__main__":
    main()
