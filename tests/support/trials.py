"""A pipeline in production and changes of its code, without Spark."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cairn import testing
from cairn.operations.intervals.run_intervals import Outcome, run_intervals
from cairn.pipeline import Interval, Pipeline
from cairn.rows.local_rows import LocalRows
from cairn.spark.ddl import parse_ddl_locally
from cairn.trials.try_code import Tried, try_code
from state_backend.values.zones import zone_of
from tests.support.counting import DAYS, INPUT_SCHEMA, Counting, counting, day

SESSION: Any = testing.PlanningSession("UTC")
CODE = "tests.support.trials:CHANGED"


def read(spark: Any, interval: Interval) -> Any:
    """The rows of the day, and their position."""
    rows = DAYS[interval.start]
    return LocalRows(rows, parse_ddl_locally(INPUT_SCHEMA), zone_of("UTC"), "the input"), {"rows": repr(rows)}


def pipeline_of(**changes: Any) -> Pipeline:
    made = counting(**{"source": read, **changes})
    return replace(made, engine=replace(made.engine, cache_dir=None))


OLD = pipeline_of()


def run(pipeline: Pipeline, root: Path | str, days: Sequence[int], **more: Any) -> list[Outcome]:
    on_shards = partial(testing._on_shards, pipeline.processor)
    return run_intervals(SESSION, pipeline, [day(n) for n in days], str(root), on_shards=on_shards, **more)


def try_days(pipeline: Pipeline, root: Path | str, days: Sequence[int], **more: Any) -> Tried:
    return try_code(
        SESSION,
        pipeline,
        [day(n) for n in days],
        str(root),
        **{"code": CODE, "on_shards": partial(testing._on_shards, pipeline.processor), **more},
    )


def bytes_of(folder: Path) -> dict[str, str]:
    """Every file of a pipeline's folder by the hash of its bytes, without the adapter's own and without noted names."""
    found = (p for p in folder.rglob("*") if p.is_file() and not {".tmp", "names"} & {*p.parts})
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


class Doubling(Counting):
    """A planted mistake: the total of "ann" is twice what it is."""

    def _row(self, key: Any, kind: str) -> Any:
        from pyspark.sql.types import Row

        found = super()._row(key, kind).asDict()
        return Row(**(found | ({"total": 2 * found["total"]} if key[0] == "ann" and found["total"] else {})))


class Averaging(Counting):
    """A state added, a timer that fires a day later, and a total that has one field more."""

    TOTAL = "sum long, rows long, largest long"

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._total = handle.getValueState("total", self.TOTAL)
        self._items = handle.getMapState("items", "item string", "seen long", 3 * 86_400_000)
        self._amounts = handle.getListState("amounts", "amount long")
        self._seen = handle.getValueState("seen_at", "at long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        rows = list(rows)  # type: ignore[assignment]
        before = self._total.get() or (0, 0, None)
        total, count = before[0], before[1]
        for row in rows:
            total, count = total + row.amount, count + 1
            seen = self._items.getValue((row.item,))
            self._items.updateValue((row.item,), ((seen[0] if seen else 0) + 1,))
            self._amounts.appendValue((row.amount,))
        self._total.update((total, count, max(row.amount for row in rows)))
        now_ms = timerValues.getCurrentProcessingTimeInMs()
        self._seen.update((now_ms,))
        for timer in list(self._handle.listTimers()):
            self._handle.deleteTimer(timer)
        self._handle.registerTimer(now_ms + 3 * 86_400_000)
        yield self._row(key, "seen")


class Narrowing(Averaging):
    """Its total is no number any more."""

    TOTAL = "sum boolean, rows long"


CHANGED = pipeline_of(processor=Averaging)


def production_and_trial(root: Path) -> None:
    """Three days of `counting`, the last two of which a trial ran with changed code."""
    try:
        DAYS.update({day(n).start: [("bob", "fig", 5), ("ann", "pear", n)] for n in range(3)})
        run(OLD, root, range(3))
        try_days(CHANGED, root, [1, 2], trial="more")
    finally:
        DAYS.clear()
