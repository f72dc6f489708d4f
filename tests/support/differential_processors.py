"""Processors that run under Spark streaming and under Cairn alike, and programs for them.

``Scripted`` evaluates the Python expression that each input row carries and emits the ``repr`` of the result, which
tells a Row from a tuple and a date from its number of days. So a whole contract is a list of expressions, and what differs
between two engines shows as a differing row.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import Row

KEY = ("a", "b")
SCRIPT_SCHEMA = "a string, b long, seq long, ts timestamp, op string"
RESULT_SCHEMA = "a string, b long, seq long, call string, result string"
SCRIPT_STATES = {
    "v": "value",
    "l": "list",
    "m": "map",
    "brief_v": "value",
    "brief_l": "list",
    "brief_m": "map",
    "long_v": "value",
    "long_l": "list",
    "long_m": "map",
    "fire": "value",
    "when": "value",
}
UNTIMED_STATES = {name: kind for name, kind in SCRIPT_STATES.items() if "_" not in name}
BRIEF_MS, LONG_MS = 1, 3_600_000


class Scripted(StatefulProcessor):
    """Evaluates ``op`` of each row with the states v, l, m, the handle h, and the clocks now and wm in scope.

    An expression ``Row(...)`` puts that row out as it is. ``skip`` leaves the key's other rows unread. What the state
    ``fire`` holds is evaluated when a timer fires.
    """

    ttl = True

    def init(self, handle: StatefulProcessorHandle) -> None:
        value, user_key = "n long, s string", "u string"
        self.scope = {
            "h": handle,
            "v": handle.getValueState("v", value),
            "l": handle.getListState("l", value),
            "m": handle.getMapState("m", user_key, value),
            "fire": handle.getValueState("fire", "op string"),
            "when": handle.getValueState("when", "t timestamp, ntz timestamp_ntz, d date"),
            "Row": Row,
            "np": np,
            "pd": pd,
        }
        for prefix, ttl_ms in (("brief_", BRIEF_MS), ("long_", LONG_MS)) if self.ttl else ():
            self.scope[prefix + "v"] = handle.getValueState(prefix + "v", value, ttl_ms)
            self.scope[prefix + "l"] = handle.getListState(prefix + "l", value, ttl_ms)
            self.scope[prefix + "m"] = handle.getMapState(prefix + "m", user_key, value, ttl_ms)
        self.inside = False

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        assert not self.inside, "the generator of the key before was not drained"
        self.inside = True
        scope = self._scope(key, timerValues)
        for row in rows:
            result = self.evaluate(row.op, scope)
            if row.op.startswith("Row("):
                yield result
                continue
            yield self.out(key, row.seq, row.op, result)
            if row.op == "skip":
                break
        self.inside = False

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        scope = self._scope(key, timerValues) | {"at": expiredTimerInfo.getExpiryTimeInMs()}
        yield self.out(key, None, "timer", (type(key).__name__, key, scope["at"], self.timers()))
        planned = self.scope["fire"].get()
        if planned is not None:
            yield self.out(key, None, planned[0], self.evaluate(planned[0], scope))
            yield self.out(key, None, "then", self.timers())

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        scope = self._scope(key, timerValues)
        assert isinstance(initialState, Row)
        scope["l"].appendValue((initialState.n, f"{key!r} at {scope['now']}, {scope['wm']}"))
        if not initialState.n:
            scope["h"].registerTimer(scope["now"])

    def timers(self) -> list[int]:
        return sorted(self.scope["h"].listTimers())

    def out(self, key: Any, seq: Any, call: str, result: Any) -> Any:
        return Row(a=key[0], b=key[1], seq=seq, call=call, result=repr(result))

    def evaluate(self, op: str, scope: dict[str, Any]) -> Any:
        try:
            result = eval(op, scope)
        except TypeError:
            return "TypeError"
        return list(result) if isinstance(result, Iterator) else result

    def _scope(self, key: Any, timer_values: Any) -> dict[str, Any]:
        now, wm = timer_values.getCurrentProcessingTimeInMs(), timer_values.getCurrentWatermarkInMs()
        return self.scope | {"key": key, "now": now, "wm": wm, "skip": "skip"}


class ScriptedUntimed(Scripted):
    """Without expiry, which needs processing time."""

    ttl = False


def random_script(
    seed: int, *, keys: int, ops: int, batches: int, prefixes: tuple[str, ...]
) -> list[list[tuple[Any, ...]]]:
    """Batches of random calls on states and timers: per batch each of some keys makes ``ops`` calls. The third batch has no
    rows."""
    pick = random.Random(seed)
    names = [(None, n) if n % 3 == 2 else (f"k{n}", n % 3 or None) for n in range(keys)]
    script = []
    for _ in range(batches):
        called = pick.sample(names, k=keys * 2 // 3 if len(script) != 2 else 0)
        script.append([(*key, seq, None, _random_op(pick, prefixes)) for key in called for seq in range(ops)])
    return script


def _random_op(pick: random.Random, prefixes: tuple[str, ...]) -> str:
    def value() -> str:
        number = pick.choice(["None", "0", "-1", str(pick.randrange(-(2**63), 2**63)), str(pick.randrange(100))])
        return f"({number}, {pick.choice([None, '', 'x', 'ä', 'long ' * 9])!r})"

    def values() -> str:
        return "[" + ", ".join(value() for _ in range(pick.randint(1, 4))) + "]"

    user_key = f"({pick.choice([None, '', 'p', 'pq', 'ä'])!r},)"
    delay_ms = pick.choice([-60_000, -1, 0, 1, 500, 3_600_000])
    prefix = pick.choice(prefixes)
    return pick.choice(
        [
            *(f"{prefix}v.{call}" for call in ("get()", "exists()", f"update({value()})", "clear()")),
            *(f"{prefix}l.{call}" for call in ("get()", "exists()", f"put({values()})", "clear()")),
            *(f"{prefix}l.{call}" for call in (f"appendValue({value()})", f"appendList({values()})")),
            *(
                f"{prefix}m.{call}"
                for call in (f"getValue({user_key})", f"containsKey({user_key})", "exists()", "clear()")
            ),
            *(f"{prefix}m.{call}" for call in (f"updateValue({user_key}, {value()})", f"removeKey({user_key})")),
            *(f"sorted({prefix}m.{call}, key=repr)" for call in ("iterator()", "keys()", "values()")),
            *(f"h.{call}" for call in (f"registerTimer(now + {delay_ms})", f"deleteTimer(now + {delay_ms})")),
            "sorted(h.listTimers())",
            f"fire.update(('h.registerTimer(now + {delay_ms})',))",
        ]
    )


VALUE_TYPES = (
    "bo boolean, by tinyint, sh smallint, i int, lo bigint, f float, d double, short_dec decimal(18,4), long_dec decimal(38,10), "
    "s string, bi binary, da date, t timestamp, ntz timestamp_ntz, ar array<int>, ma map<string,bigint>, "
    "st struct<x:int,y:struct<z:string,w:array<date>>>, pair struct<x:int,y:string>"
)
VALUE_NAMES = tuple(field.split()[0] for field in VALUE_TYPES.split(", "))
TYPED_KEY = ("s", "da", "t", "short_dec", "d", "bo", "pair")
TYPED_SCHEMA = f"seq long, {VALUE_TYPES}"
TYPED_RESULT = f"{TYPED_SCHEMA}, key string, got string, read string"
TYPED_USER_KEY = (
    "s string, i int, da date, t timestamp, long_dec decimal(38,10), bi binary, pair struct<x:int,y:string>"
)


class EveryType(StatefulProcessor):
    """Puts each row into a value, a list and a map state, and gives back what the value state then holds."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", VALUE_TYPES)
        self.list = handle.getListState("list", VALUE_TYPES)
        self.map = handle.getMapState("map", TYPED_USER_KEY, VALUE_TYPES)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            before = self.value.get()
            # Spark's row API gives a map as its pairs; state wants a dict.
            values = tuple(dict(row[n]) if n == "ma" and row[n] is not None else row[n] for n in VALUE_NAMES)
            user_key = (row.s, row.i, row.da, row.t, row.long_dec, row.bi, row.pair)
            self.value.update(values)
            self.list.appendValue(values)
            self.map.updateValue(user_key, values)
            clocks = (timerValues.getCurrentProcessingTimeInMs(), timerValues.getCurrentWatermarkInMs())
            if clocks != (-1, -1):
                self.handle.registerTimer(clocks[0])
            # What is compared is the types too, all the way down.
            got = (before, list(self.list.get())[-1], self.map.getValue(user_key), list(self.map.keys())[:1], clocks)
            plain_key = tuple(k.replace(tzinfo=None) if isinstance(k, datetime) else k for k in key)
            yield Row(
                seq=row.seq,
                **dict(zip(VALUE_NAMES, self.value.get(), strict=True)),
                key=repr(plain_key),
                got=repr(got),
                read=repr((key[2] and key[2].tzinfo, row.t and row.t.tzinfo, type(row.ma), type(row.st))),
            )

    def handleExpiredTimer(self, key: Row, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(**key.asDict(), key=repr(key), got=repr(self.value.get()))


def typed_rows() -> list[list[tuple[Any, ...]]]:
    """Two batches of rows of every type: usual values, the ends of the ranges (of instants those that PySpark can convert),
    and nulls."""
    usual = (
        True, 1, 2, 3, 4, 1.5, 2.5, Decimal("12.3400"), Decimal("-1.0000000001"), "text", b"\x00\xff", date(2024, 2, 29),
        datetime(2024, 2, 29, 12, 30, 15, 123456, tzinfo=UTC), datetime(2024, 2, 29, 12, 30, 15, 1), [1, None, 3],
        {"a": 1, "b": None}, {"x": 1, "y": {"z": "deep", "w": [date(1969, 12, 31), None]}}, {"x": 1, "y": "p"},
    )  # fmt: skip
    lowest = (
        False, -128, -(2**15), -(2**31), -(2**63), float("-inf"), -1.7976931348623157e308, Decimal("-99999999999999.9999"),
        Decimal("-9999999999999999999999999999.9999999999"), "", b"", date(1, 1, 1), datetime(2, 1, 1, tzinfo=UTC),
        datetime(2, 1, 1), [], {}, {"x": None, "y": None}, {"x": None, "y": None},
    )  # fmt: skip
    highest = (
        True, 127, 2**15 - 1, 2**31 - 1, 2**63 - 1, -0.0, float("nan"), Decimal("99999999999999.9999"),
        Decimal("9999999999999999999999999999.9999999999"), "ä\U0001f600\x00z", bytes(range(256)), date(9999, 12, 31),
        datetime(9998, 12, 31, 23, 59, 59, 999999, tzinfo=UTC), datetime(9998, 12, 31, 23, 59, 59, 999999), [2**31 - 1],
        {"": 2**63 - 1}, {"x": 0, "y": {"z": None, "w": None}}, {"x": 2**31 - 1, "y": ""},
    )  # fmt: skip
    nulls = (None,) * len(usual)
    rows = [usual, lowest, highest, nulls]
    return [[(n, *row) for n, row in enumerate(rows)], [(n, *row) for n, row in enumerate(reversed(rows))]]


def event_script(seed: int, delay: timedelta) -> list[list[tuple[Any, ...]]]:
    """Batches of rows with event times around a moving front, with calls on timers by event time.

    Late ones lie around the two watermarks: what is older than the one of the batch before is dropped, what lies between them is not.
    """
    pick = random.Random(seed)
    front_ms, watermark_ms, before_ms = 1_704_067_200_000, 0, 0
    script = []
    for _ in range(6):
        front_ms += pick.choice([5_000, 30_000])
        batch: list[tuple[Any, ...]] = []
        for seq in range(30):
            ts_ms: int | None = front_ms - pick.choice([0, 1, 2_000, 9_000])
            if seq > 0 and pick.random() < 0.1:
                ts_ms = None
            elif seq > 0 and pick.random() < 0.3:
                ts_ms = pick.choice([before_ms, watermark_ms]) + pick.choice([-90_000, -1, 0, 1])
            at_ms = front_ms + pick.choice([-20_000, -1, 0, 1, 4_000, 60_000])
            op = pick.choice(
                [
                    f"h.registerTimer({at_ms})",
                    f"h.registerTimer(wm + {pick.choice([-1, 0, 1])})",
                    f"h.deleteTimer({at_ms})",
                    "sorted(h.listTimers())",
                    "(key, now, wm)",
                    f"l.appendValue(({seq}, 'x'))",
                    "list(l.get())",
                    f"fire.update(('h.registerTimer(wm + {pick.choice([-1, 0, 3_000])})',))",
                ]
            )
            batch.append((pick.choice(["x", "y", None]), pick.choice([1, 2]), seq, _instant(ts_ms), op))
        script.append(batch)
        newest_ms = max(round(row[3].timestamp() * 1000) for row in batch if row[3] is not None)
        before_ms, watermark_ms = watermark_ms, max(watermark_ms, newest_ms - delay // timedelta(milliseconds=1))
    return script


def _instant(ms: int | None) -> datetime | None:
    return None if ms is None else datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
