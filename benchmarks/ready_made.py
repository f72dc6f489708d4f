"""Bytes of state per key of the ready-made processors, without Spark.

    python -m benchmarks.ready_made [--keys 100000]

Each processor gets one row per key in one interval, and writes a full checkpoint. The keys are random UUIDs as strings of
36 characters. The other columns are given for each case. The figures are the sizes of the files of state, which are
compressed, and the sizes of the keys and values that the interval wrote, which are not.
"""

from __future__ import annotations

import argparse
import random
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cairn import Pipeline
from cairn.aggregates import Count, Max, Sum
from cairn.processors import Deduplicate, History, IntervalJoin, Latest, LookupJoin, TopN, TumblingWindow
from cairn.testing import PipelineTester

START = datetime(2024, 1, 1, tzinfo=UTC)
SCHEMA = "id string, at timestamp, amount double, city string, gone boolean"


class First(Deduplicate):
    """The first row of each key."""

    horizon = timedelta(days=7)


class Last(First):
    """The last row of each key."""

    keep = "last"


class Newest(Latest):
    """The newest row of each key."""

    version = "at"


class Hourly(TumblingWindow):
    """Three aggregates of each hour."""

    size = timedelta(hours=1)
    rows = Count()
    total = Sum("amount")
    highest = Max("amount")


class Best(TopN):
    """The ten best rows of each key."""

    n = 10
    order = "amount desc"


class Near(IntervalJoin):
    """Pairs of rows at most a day apart."""

    left, right = "a", "b"
    lower, upper = -timedelta(days=1), timedelta(days=1)


class NearOrAlone(Near):
    """Pairs, and rows without partner."""

    how = "full"


class AsOf(LookupJoin):
    """Facts with the version of their time."""

    facts, table = "a", "b"


SIDES = "id string, at timestamp, a_amount double, a_city string, b_amount double, b_city string, kind string"


def some_rows(keys: int, rows_per_key: int) -> pa.Table:
    """Return rows with random values, in a random order."""
    rng = random.Random(7)
    ids = [str(uuid.UUID(int=rng.getrandbits(128))) for _ in range(keys)] * rows_per_key
    times = [START + timedelta(microseconds=rng.randrange(3_600_000_000)) for _ in ids]
    return pa.table(
        {
            "id": ids,
            "at": pa.array(times, pa.timestamp("us", "UTC")),
            "amount": [rng.random() for _ in ids],
            "city": [rng.choice(("Amsterdam", "Berlin", "Oslo", "Rome")) for _ in ids],
            "gone": pc.equal(pa.array([rng.random() for _ in ids]), -1.0),
        }
    )


def rows_of_side(keys: int, side: str) -> pa.Table:
    """Return one row per key of one input of a join."""
    other = "b" if side == "a" else "a"
    rows = some_rows(keys, 1).select(["id", "at", "amount", "city"])
    rows = rows.rename_columns(["id", "at", f"{side}_amount", f"{side}_city"])
    rows = rows.append_column(f"{other}_amount", pa.nulls(keys, pa.float64()))
    rows = rows.append_column(f"{other}_city", pa.nulls(keys, pa.string()))
    return rows.append_column("kind", pa.array([side] * keys))


def measure(
    name: str, processor: type, keys: int, rows_per_key: int = 1, side: str | None = None, **settings: Any
) -> None:
    """Run one interval, and print the bytes per key."""
    pipeline = Pipeline(
        name="bytes",
        start=START,
        source=lambda spark, interval: spark.range(0),
        key=["id"],
        api="arrow",
        processor=processor,
        order_by=["at"],
        **settings,
    )
    tester = PipelineTester(pipeline, input_schema=SIDES if side else SCHEMA, mode="full")
    record = tester.run(rows_of_side(keys, side) if side else some_rows(keys, rows_per_key)).record
    assert record is not None
    totals = record.content.totals
    files, written = totals.state_bytes / keys, totals.changed_bytes / keys
    print(f"{name:44} {files:8.1f} bytes in files {written:8.1f} bytes of keys and values, per key", flush=True)


def main() -> None:
    """Measure each processor."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--keys", type=int, default=100_000)
    keys = arguments.parse_args().keys
    timed: dict[str, Any] = {
        "time_mode": "event",
        "event_time": "at",
        "watermark_delay": timedelta(days=1),
        "watermark": "interval",
    }
    measure("Deduplicate, first", First, keys, **timed)
    measure("Deduplicate, last, a row of 4 columns", Last, keys, **timed)
    measure("Latest, a row of 4 columns", Newest, keys)
    measure("History, 1 change of 4 columns", History, keys, **timed)
    measure("TumblingWindow, 1 open window of 3 aggregates", Hourly, keys, **timed)
    measure("TopN, 1 row of 4 columns", Best, keys)
    measure("TopN, 10 rows of 4 columns", Best, keys // 10, 10)
    measure("IntervalJoin, inner, 1 row of 3 columns", Near, keys, side="a", **timed)
    measure("IntervalJoin, full, 1 row of 3 columns", NearOrAlone, keys, side="a", **timed)
    measure("LookupJoin, 1 version of 3 columns", AsOf, keys, side="b", **timed)
    measure("LookupJoin, 1 waiting fact of 3 columns", AsOf, keys, side="a", **timed)


if __name__ == "__main__":
    main()
