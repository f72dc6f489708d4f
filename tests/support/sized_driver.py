"""A pipeline of many keys, in production and on trial, without Spark, as a process that may be killed at any time.

    python -m tests.support.sized_driver ROOT run FIRST LAST NUMBER
    python -m tests.support.sized_driver ROOT try LAST

``run`` computes those days in production, as one run of that number; ``try`` tries other code on all days but the first one. It prints
``ready`` when it begins. Days that a file ``ROOT/changed`` names have other input.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row

from cairn import testing
from cairn.operations.intervals.run_intervals import run_intervals
from cairn.pipeline import Interval, Pipeline
from cairn.rows.local_rows import LocalRows
from cairn.spark.ddl import parse_ddl_locally
from cairn.trials.try_code import Tried, try_code
from state_backend.values.records import RunRef
from state_backend.values.retention import KeepLast
from state_backend.values.zones import zone_of
from tests.support.counting import DAY, START, day

KEYS, TOUCHED = 200_000, 500
SESSION: Any = testing.PlanningSession("UTC")


class Sums(StatefulProcessor):
    """A sum for each user, and a timer two days after the last row that is not of the first day."""

    TIMES = 1

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._total = handle.getValueState("total", "sum long, rows long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        total, count = self._total.get() or (0, 0)
        for row in rows:
            total, count = total + self.TIMES * row.amount, count + 1
        self._total.update((total, count))
        if count > 1:
            for timer in list(self._handle.listTimers()):
                self._handle.deleteTimer(timer)
            self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 2 * 86_400_000)
            yield Row(user=key[0], total=total)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield Row(user=key[0], total=self._total.get()[0])


class Doubled(Sums):
    """Counts each amount twice."""

    TIMES = 2


def pipeline(root: str, processor: type[Sums] = Sums) -> Pipeline:
    def read(spark: Any, interval: Interval) -> Any:
        number = (interval.start - START) // DAY
        changed = Path(root, "changed")
        other = changed.exists() and str(number) in changed.read_text().split()
        chosen = random.Random(f"{number} {other}")
        users = range(KEYS) if number == 0 else chosen.sample(range(KEYS), TOUCHED)
        rows = [(f"user {n:06}", chosen.randrange(1000)) for n in users]
        schema = parse_ddl_locally("user string, amount long")
        return LocalRows(rows, schema, zone_of("UTC"), "the input"), {"day": number, "other": other}

    made = Pipeline(
        name="sums",
        start=START,
        source=read,
        key=["user"],
        processor=processor,
        output_schema="user string, total long",
        time_mode="processing",
        parallelism=2,
        max_parallelism=32,
        retention=KeepLast(100),
    )
    return replace(made, engine=replace(made.engine, cache_dir=None))


def run_days(root: str, first: int, last: int, number: int) -> None:
    """The days as run ``number``; called again, it goes on with them."""
    run_intervals(
        SESSION,
        pipeline(root),
        [day(n) for n in range(first, last + 1)],
        root,
        reprocess="all",
        run=RunRef(run_id=f"run {number}", clear_number=number, try_number=1),
        on_shards=partial(testing._on_shards, Sums),
    )


def try_days(root: str, last: int) -> Tried:
    """The trial "doubled" of all days but the first."""
    return try_code(
        SESSION,
        pipeline(root, Doubled),
        [day(n) for n in range(1, last + 1)],
        root,
        code="tests.support.sized_driver:DOUBLED",
        trial="doubled",
        now_ms=time.time_ns() // 1_000_000,
        on_shards=partial(testing._on_shards, Doubled),
    )


if __name__ == "__main__":
    where, what, *numbers = sys.argv[1:]
    print("ready", flush=True)
    if what == "run":
        run_days(where, *map(int, numbers))
    else:
        try_days(where, *map(int, numbers))
