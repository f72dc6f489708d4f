"""Seconds and bytes of one interval in a sink's table, compared with a hand-written MERGE and a hand-written overwrite.

    python -m benchmarks.sinks [--rows 100 1000000] [--intervals 3]

Each way publishes the same Parquet file as several intervals, and then publishes the first interval again with a newer checkpoint. The
hand-written way is the usual one: rows go to a temporary table by COPY, row by row, and one MERGE updates and inserts. The MERGE
deletes no rows of an earlier run, and keeps no checkpoint. The hand-written way for Iceberg is `overwrite` with a filter on the interval,
also without a checkpoint. Iceberg's catalog is a SQLite file.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog import load_catalog
from pyiceberg.expressions import EqualTo
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import DayTransform
from pyiceberg.types import LongType, NestedField, StringType, TimestamptzType

from cairn import Interval, sinks
from cairn.sinks.table_sink import Publication
from local_stack.postgres_server import Postgres

START = datetime(2024, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


@dataclass(frozen=True)
class Local(Publication):
    """The rows of a local file."""

    file: Path = Path()

    def output(self) -> Iterator[pa.Table]:
        yield pq.read_table(self.file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100, 1_000_000])
    parser.add_argument("--intervals", type=int, default=3)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Delete operation did not match any records")
    folder = Path(tempfile.mkdtemp(prefix="cairn-sinks-"))
    folder.chmod(0o711)  # As root, PostgreSQL runs as nobody.
    try:
        with Postgres(folder / "data", log_dir=folder / "logs") as server:
            address = server.url.replace("+psycopg", "")
            for rows in options.rows:
                measure(rows, options.intervals, folder, address)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(rows: int, intervals: int, folder: Path, address: str) -> None:
    file = folder / f"{rows}.parquet"
    pq.write_table(pa.table({"user": [f"user-{n}" for n in range(rows)], "clicks": range(rows)}), file)
    execute(address, "DROP TABLE IF EXISTS clicks, merged, cairn_publications")
    delta, iceberg = folder / f"delta-{rows}", folder / f"iceberg-{rows}"
    catalog = create_overwritten(iceberg)
    ways: dict[str, tuple[Callable[[Local], None], Callable[[], int]]] = {
        "sinks.postgres": (sinks.postgres("clicks", address).publish, lambda: size_of(address, "clicks")),
        "hand-written MERGE": (lambda call: merge(address, call), lambda: size_of(address, "merged")),
        "sinks.delta": (
            sinks.delta(f"file://{delta}").publish,
            lambda: bytes_below(delta),
        ),
        "sinks.iceberg": (
            sinks.iceberg("shop.clicks", "bench", catalog).publish,
            lambda: bytes_below(iceberg / "shop" / "clicks"),
        ),
        "hand-written overwrite": (
            lambda call: overwrite(catalog, call),
            lambda: bytes_below(iceberg / "shop" / "overwritten"),
        ),
    }
    execute(
        address,
        'CREATE TABLE merged (interval_start timestamptz, "user" text, clicks bigint, PRIMARY KEY (interval_start, "user"))',
    )
    for name, (publish, bytes_now) in ways.items():
        calls = [Local("clicks", hour(n), n + 1, file=file) for n in range(intervals)]
        again = Local("clicks", hour(0), intervals + 1, file=file)
        times = [timed(publish, call) for call in calls]
        size = bytes_now() / intervals
        print(
            f"{rows:,} rows, {name}: first {show(times[0])}, next {show(min(times[1:]))}, again {show(timed(publish, again))}; "
            f"{size / max(rows, 1):.0f} bytes a row",
            flush=True,
        )


def hour(n: int) -> Interval:
    return Interval(START + n * HOUR, START + (n + 1) * HOUR)


def timed(publish: Callable[[Local], None], call: Local) -> tuple[float, float]:
    """Return the elapsed seconds and the CPU seconds of this process. The CPU seconds of PostgreSQL are not counted."""
    wall, cpu = time.perf_counter(), time.process_time()
    publish(call)
    return time.perf_counter() - wall, time.process_time() - cpu


def show(times: tuple[float, float]) -> str:
    return f"{times[0]:.3f} s ({times[1]:.3f} s CPU)"


def merge(address: str, call: Local) -> None:
    with psycopg.connect(address) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TEMPORARY TABLE staged (LIKE merged) ON COMMIT DROP")
        with cursor.copy("COPY staged FROM STDIN") as copy:
            for user, clicks in rows_of(call):
                copy.write_row((call.interval.start, user, clicks))
        cursor.execute(
            'MERGE INTO merged m USING staged s ON m.interval_start = s.interval_start AND m."user" = s."user" '
            'WHEN MATCHED THEN UPDATE SET clicks = s.clicks WHEN NOT MATCHED THEN INSERT VALUES (s.interval_start, s."user", s.clicks)'
        )


def create_overwritten(folder: Path) -> dict[str, str]:
    """Create the table of the hand-written overwrite, and return the properties of its catalog."""
    folder.mkdir()
    properties = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
    columns = {"interval_start": TimestamptzType(), "user": StringType(), "clicks": LongType()}
    schema = Schema(*(NestedField(n, name, kind, required=False) for n, (name, kind) in enumerate(columns.items(), 1)))
    days = PartitionSpec(PartitionField(source_id=1, field_id=1000, transform=DayTransform(), name="day"))
    with load_catalog("bench", **properties) as catalog:
        catalog.create_namespace("shop")
        catalog.create_table("shop.overwritten", schema, partition_spec=days)
    return properties


def overwrite(properties: dict[str, str], call: Local) -> None:
    start = pa.scalar(call.interval.start, pa.timestamp("us", "UTC"))
    with load_catalog("bench", **properties) as catalog:
        for table in call.output():
            rows = table.append_column("interval_start", pa.repeat(start, len(table)))
            interval = EqualTo("interval_start", call.interval.start.isoformat())
            catalog.load_table("shop.overwritten").overwrite(rows, interval)


def bytes_below(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def rows_of(call: Local) -> Iterator[tuple[Any, ...]]:
    for batch in pq.ParquetFile(call.file).iter_batches():
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def execute(address: str, text: str) -> None:
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute(text.encode())


def size_of(address: str, table: str) -> int:
    with psycopg.connect(address) as connection:
        found = connection.execute("SELECT pg_total_relation_size(%s)", (table,)).fetchone()
    assert found is not None
    return int(found[0])


if __name__ == "__main__":
    main()
