"""A pipeline whose state tells which inputs it was made of, and the same computed from a lineage in plain Python.

Per user: a value, a list that names each input by day, version and code, a map with expiry, and a timer. ``INPUTS`` holds a file for
each day, with the version of the day's input. Rows are a function of day and version.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import Row

from cairn.pipeline import Interval, Pipeline
from cairn.rows.local_rows import LocalRows
from cairn.spark.ddl import parse_ddl_locally
from state_backend.adapters.rocks import EngineOptions
from state_backend.values.retention import KeepLast
from state_backend.values.zones import zone_of
from tests.support.counting import DAY, START

INPUT_SCHEMA = "user string, item string, amount long, origin string"
OUTPUT_SCHEMA = "user string, kind string, total long, items array<string>, origins array<string>"
IDLE_DAYS, ITEM_DAYS = 2, 3
DAY_MS = 86_400_000

# Set in each process of a history.
INPUTS: dict[str, Path] = {}

InputRow = tuple[str, str, int, str]


def rows_of(day: int, version: int) -> list[InputRow]:
    """The input of a day."""
    chosen = random.Random(f"{day}.{version}")
    return [
        (f"u{chosen.randrange(8)}", f"i{chosen.randrange(5)}", chosen.randrange(100), f"{day}.{version}")
        for _ in range(chosen.randint(0, 12))
    ]


def day_number(interval: Interval) -> int:
    """The number of a day from the pipeline's start, from 0."""
    return (interval.start - START) // DAY


def version_file(interval: Interval) -> Path:
    return INPUTS["folder"] / str(day_number(interval))


def read(spark: Any, interval: Interval) -> Any:
    """The rows of the day in their present version, and the version as the position."""
    file = version_file(interval)
    version = int(file.read_text()) if file.exists() else 1
    rows = rows_of(day_number(interval), version)
    return LocalRows(rows, parse_ddl_locally(INPUT_SCHEMA), zone_of("UTC"), "the input"), {"version": version}


class Remembering(StatefulProcessor):
    """Sums per user, and the origin of each input that the user had rows in."""

    FACTOR = 1

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._total = handle.getValueState("total", "sum long, rows long")
        self._origins = handle.getListState("origins", "origin string")
        self._items = handle.getMapState("items", "item string", "seen long", ITEM_DAYS * DAY_MS)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        total, count = self._total.get() or (0, 0)
        origins = set()
        for row in rows:
            total, count = total + self.FACTOR * row.amount, count + 1
            seen = self._items.getValue((row.item,))
            self._items.updateValue((row.item,), ((seen[0] if seen else 0) + 1,))
            origins.add(f"{row.origin}.{self.FACTOR}")
        self._total.update((total, count))
        for origin in sorted(origins):
            self._origins.appendValue((origin,))
        for timer in list(self._handle.listTimers()):
            self._handle.deleteTimer(timer)
        self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + IDLE_DAYS * DAY_MS)
        yield self._row(key, "seen")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield self._row(key, "idle")

    def _row(self, key: Any, kind: str) -> Row:
        items = sorted(item for ((item,), _) in self._items.iterator())
        origins = [origin for (origin,) in self._origins.get()]
        return Row(user=key[0], kind=kind, total=self._total.get()[0], items=items, origins=origins[-3:])


class Doubling(Remembering):
    """The changed code of a trial: each amount counts twice."""

    FACTOR = 2


CODES = {1: Remembering, 2: Doubling}
LAST_KEPT = 3


def pipeline_of(
    name: str, code: int, folder: Path, *, cached: bool = False, last: int = LAST_KEPT, parallelism: int = 2
) -> Pipeline:
    """The pipeline as it is deployed. ``folder``: holds what a host has on its own disk."""
    engine = EngineOptions(cache_dir=str(folder / "cache") if cached else None, metadata_dir=str(folder / "memory"))
    return Pipeline(
        name=name,
        start=START,
        source=read,
        key=["user"],
        processor=CODES[code],
        output_schema=OUTPUT_SCHEMA,
        time_mode="processing",
        order_by=["amount"],
        parallelism=parallelism,
        max_parallelism=16,
        engine=engine,
        retention=KeepLast(last),
    )


@dataclass(kw_only=True)
class User:
    """The state of one user. ``items``: times seen and the last day; ``idle_at``: the day whose end fires the timer."""

    total: int = 0
    rows: int = 0
    origins: list[str] = field(default_factory=list)
    items: dict[str, tuple[int, int]] = field(default_factory=dict)
    idle_at: int | None = None


Users = dict[str, User]
OutputRow = tuple[str, str, int, tuple[str, ...], tuple[str, ...]]


def apply_day(before: Mapping[str, User], day: int, version: int, factor: int) -> tuple[Users, list[OutputRow]]:
    """The state and the sorted output rows after a day."""
    users, output = deepcopy(dict(before)), list[OutputRow]()
    by_user: dict[str, list[InputRow]] = {}
    for row in rows_of(day, version):
        by_user.setdefault(row[0], []).append(row)
    for name, rows in by_user.items():
        user = users.setdefault(name, User())
        user.items = _alive(user, day)
        for _, item, amount, _ in rows:
            user.total += factor * amount
            user.rows += 1
            user.items[item] = (user.items.get(item, (0, 0))[0] + 1, day)
        user.origins += sorted({f"{row[3]}.{factor}" for row in rows})
        user.idle_at = day + IDLE_DAYS
        output.append(_output(name, user, "seen", day))
    for name, user in users.items():
        if user.idle_at is not None and user.idle_at <= day:
            user.idle_at = None
            output.append(_output(name, user, "idle", day))
    return users, sorted(output)


def _alive(user: User, day: int) -> dict[str, tuple[int, int]]:
    return {item: seen for item, seen in user.items.items() if seen[1] + ITEM_DAYS > day}


def _output(name: str, user: User, kind: str, day: int) -> OutputRow:
    return name, kind, user.total, tuple(sorted(_alive(user, day))), tuple(user.origins[-3:])


def shown(users: Mapping[str, User], day: int) -> dict[str, Counter[Any]]:
    """What readers see of the state after ``day``, as `tests.support.history_oracle.read_states` gives it."""
    return {
        "total": Counter((name, user.total, user.rows) for name, user in users.items()),
        "origins": Counter((name, n, origin) for name, user in users.items() for n, origin in enumerate(user.origins)),
        "items": Counter(
            (name, item, seen[0]) for name, user in users.items() for item, seen in _alive(user, day).items()
        ),
        "$timers": Counter((name, user.idle_at) for name, user in users.items() if user.idle_at is not None),
    }
