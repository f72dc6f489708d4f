"""Pipelines that `cairn replay --code` names: of accounts, and of values of every type."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

from pyspark.sql import Row
from pyspark.sql import types as t
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from cairn.pipeline import Interval
from cairn.spark.ddl import parse_ddl_locally
from cairn.spark_versions import has
from tests.support.accounts import IDLE_MS, SCHEMA, Accounts, Broken, Random, accounts, days_of, position_of, read_days
from tests.support.checkpoints import DAY


def read_moved(spark: Any, interval: Interval) -> Any:
    return spark.createDataFrame(days_of(interval)[1:], SCHEMA), {"day": "moved"}


ROW = accounts("row", source=read_days)
PANDAS = accounts("pandas", source=read_days)
ARROW = accounts("arrow", source=read_days)
BROKEN = accounts("row", source=read_days, processor=Broken)
RANDOM = accounts("row", source=read_days, processor=Random)
MOVED = accounts("row", source=read_moved)

# The types of key columns, and of values.
KEY = (
    "text string, big bigint, exact decimal(10,2), at timestamp, wall timestamp_ntz, day date, raw binary, flag boolean, real double, "
    "part struct<a: bigint, inner: struct<at: timestamp, words: array<string>>>"
)
VALUE = (
    "i int, b byte, sh short, f float, d double, s string, bin binary, ok boolean, born date, since timestamp, local timestamp_ntz, "
    "dec decimal(20,4), nested struct<a: bigint, inner: struct<x: double, at: timestamp, words: array<string>>>, "
    "structs array<struct<k: string, v: decimal(5,2)>>, times array<timestamp>"
)
AT = datetime(2024, 1, 1, 5, 30, 0, 123456, tzinfo=UTC)
_TEXT = "Zürich \"q\" 'x' \n{}\\ 日本 🙂"
KEYS: dict[str, tuple[Any, ...]] = {
    "full": (_TEXT, -(2**63), Decimal("-1.50"), AT, datetime(2024, 7, 1, 2, 30), date(1, 1, 2), b"\x00\xff'\"", True, -0.0, (1, (AT, ["ä", None]))),
    "NaN": ("", 0, Decimal("0.00"), datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC), datetime(1, 1, 3), date(9999, 12, 30), b"", False, math.nan, (None, None)),
    "null": (None,) * 10,
}  # fmt: skip
VALUES: list[tuple[Any, ...]] = [
    (1, -2, 3, 0.1, math.nan, _TEXT, b"\x00\xff'", True, date(1, 1, 2), AT, datetime(2024, 7, 1, 2, 30), Decimal("1234567890123456.7890"),
     (7, (math.inf, AT, ["a", None, "ß"])), [("k", Decimal("1.50")), None, (None, None)], [AT, None]),
    (None,) * 15,
    (2**31 - 1, 127, -32768, -0.0, -math.inf, "", b"", False, date(9999, 12, 30), datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
     datetime(1, 1, 3), Decimal("-0.0001"), (None, None), [], []),
]  # fmt: skip
AT, AT_TYPE = (time(1, 2, 3, 4), t.TimeType()) if has("time") else (date(1, 2, 3), t.DateType())


class Typed(StatefulProcessor):
    """Keeps each row in a value, a list and a map. A timer puts the last one out."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._value = handle.getValueState("value", VALUE)
        self._list = handle.getListState("list", VALUE, 3 * 86_400_000)
        self._map = handle.getMapState("map", "d double, since timestamp, s string, bin binary", VALUE)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        for row in rows:
            values = tuple(row)[len(key) :]
            self._value.update(values)
            self._list.appendValue(values)
            self._map.updateValue((row.d, row.since, row.s, row.bin), values)
            yield Row(row=row.asDict(), names={"é": Decimal("1.10"), "z": None}, at=AT)
        self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + IDLE_MS)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        yield Row(row=None, names={str(self._value.get()): None}, at=None)


TYPED_SCHEMA = parse_ddl_locally(f"{KEY}, {VALUE}")
TYPED_ROWS = [(*key, *values) for key in KEYS.values() for values in VALUES]


def read_typed(spark: Any, interval: Interval) -> Any:
    return spark.createDataFrame(TYPED_ROWS if interval.start.day < 3 else [], TYPED_SCHEMA), position_of(interval)


TYPED = accounts(
    source=read_typed,
    key=[field.name for field in TYPED_SCHEMA.fields[:10]],
    processor=Typed,
    order_by=(),
    schedule=DAY,
    output_schema=t.StructType(
        [
            t.StructField("row", TYPED_SCHEMA),
            t.StructField("names", t.MapType(t.StringType(), t.DecimalType(5, 2))),
            t.StructField("at", AT_TYPE),
        ]
    ),
)


class Wider(Accounts):
    """Has one more field in its value state, and no map."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._balance = handle.getValueState("balance", "total long, due_ms long, note string")
        self._amounts = handle.getListState("amounts", "amount long")
        handle.deleteIfExists("days")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        (total, _, _), count = self._balance.get() or (0, None, None), 0
        for row in rows:
            total, count = total + row.amount, count + 1
        self._balance.update((total, None, "new"))
        yield Row(account=key[0], kind="row", balance=total, rows=count)
