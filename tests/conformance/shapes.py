"""Processors of the shapes that people write, small and many: those of Spark's own tests by behaviour, and published ones.

A shape is written once for both APIs. ``Mux`` runs all of them in one query: the first key column says which shape a key
belongs to. What a shape yields goes out as text with its Python types, and so does what it raises, so that one difference
hides no other.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import (
    ArrayType,
    IntegerType,
    LongType,
    MapType,
    Row,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

KEY = ["shape", "k"]
INPUT_SCHEMA = (
    "shape string, k string, seq int, n int, f float, x double, s string, at timestamp, day date, price decimal(10,2), "
    "ok boolean, tags array<string>, tiny tinyint, small smallint, big bigint"
)
OUTPUT_SCHEMA = "shape string, k string, out string"
FIELDS = [part.split()[0] for part in INPUT_SCHEMA.split(", ")]
INTS = ("seq", "n", "tiny", "small", "big")
T0 = datetime(2024, 3, 1, tzinfo=UTC)
SHAPES: dict[str, type[Shape]] = {}
EVENT_SHAPES: dict[str, type[Shape]] = {}


def text(value: Any) -> str:
    """The value with the types of all that is in it."""
    match value:
        case pd.DataFrame():
            return f"frame {[(c, str(value[c].dtype)) for c in value]} {value.to_dict('list')!r}"
        case tuple() | list():
            fields = f" {list(value.__fields__)}" if isinstance(value, Row) and hasattr(value, "__fields__") else ""
            return f"{type(value).__name__}{fields}({', '.join(map(text, value))})"
        case dict():
            return (
                f"{type(value).__name__}({', '.join(f'{text(k)}: {text(value[k])}' for k in sorted(value, key=repr))})"
            )
    return f"{type(value).__name__} {value!r}"


class Shape:
    """One processor. ``frames``: whether it runs in the pandas API."""

    frames = False

    def __init_subclass__(cls, event: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        (EVENT_SHAPES if event else SHAPES)[cls.__name__] = cls

    def init(self, handle: Any) -> None:
        self.handle = handle

    def rows(self, items: Any) -> Iterator[Any]:
        """The rows one by one, with plain values, whatever the API."""
        for item in items:
            if not self.frames:
                yield item
                continue
            for record in item.to_dict("records"):
                yield Row(**{name: plain(value, whole=name in INTS) for name, value in record.items()})

    def rowwise(self, key: Any, row: Any, now: int) -> Any:
        raise NotImplementedError

    def handle_rows(self, key: Any, items: Any, times: Any) -> Iterator[Any]:
        for row in self.rows(items):
            yield self.rowwise(key, row, times.getCurrentProcessingTimeInMs())

    def fired(self, key: Any, times: Any, info: Any) -> Iterator[Any]:
        yield "fired", info.getExpiryTimeInMs() - times.getCurrentProcessingTimeInMs()


def plain(value: Any, *, whole: bool = False) -> Any:
    """A cell as the row API gives it."""
    if isinstance(value, np.ndarray):
        # Spark can't take an array of NumPy's into state.
        return value.tolist()
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or value is pd.NaT or (isinstance(value, float) and np.isnan(value)):
        return None
    return int(value) if whole else value


class Prefixed:
    """The handle for one of many shapes: its states have its name before theirs."""

    def __init__(self, handle: Any, prefix: str, kinds: dict[str, str]) -> None:
        self._handle, self._prefix, self._kinds = handle, prefix, kinds

    def __getattr__(self, call: str) -> Any:
        method = getattr(self._handle, call)
        if not call.startswith("get"):
            return method

        def get(name: str, *args: Any, **kwargs: Any) -> Any:
            self._kinds[f"{self._prefix}_{name}"] = call.removeprefix("get").removesuffix("State").lower()
            return method(f"{self._prefix}_{name}", *args, **kwargs)

        return get


class Mux(StatefulProcessor):
    """All shapes of a table as one processor."""

    frames = False
    table = SHAPES

    def init(self, handle: Any) -> None:
        self.kinds: dict[str, str] = {}
        self.shapes = {}
        for name, cls in self.table.items():
            shape = self.shapes[name] = cls()
            shape.frames = self.frames
            shape.init(Prefixed(handle, name, self.kinds))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        yield from self._out(key, lambda: self.shapes[key[0]].handle_rows(key, rows, timerValues))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield from self._out(key, lambda: self.shapes[key[0]].fired(key, timerValues, expiredTimerInfo))

    def _out(self, key: Any, call: Any) -> Iterator[Any]:
        out = []
        try:
            for result in call():
                out.append(text(result))
        except Exception as error:
            out.append(f"raised {type(error).__name__}")
        if self.frames:
            # Spark fails at a frame without rows.
            if out:
                yield pd.DataFrame({"shape": [key[0]] * len(out), "k": [key[1]] * len(out), "out": out})
        else:
            for line in out:
                yield Row(shape=key[0], k=key[1], out=line)


class MuxFrames(Mux):
    frames = True


class EventMux(Mux):
    table = EVENT_SHAPES


class EventMuxFrames(MuxFrames):
    table = EVENT_SHAPES


class _Anything:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


def states_of(mux: type[Mux]) -> dict[str, str]:
    """The states that the shapes declare, with their kinds."""
    processor = mux()
    processor.init(_Anything())
    return processor.kinds


# Shapes of Spark's tests.


class Total(Shape):
    """Adds up; the state is declared by a StructType and holds an int."""

    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", StructType([StructField("value", IntegerType(), True)]))

    def handle_rows(self, key: Any, items: Any, times: Any) -> Iterator[Any]:
        before = self.total.get()[0] if self.total.exists() else 0
        total = before + sum(row.n or 0 for row in self.rows(items))
        self.total.update((total,))
        yield key[1], str(total), self.total.get()


class FrameTotal(Shape):
    """The same with what pandas gives: NumPy scalars go into state."""

    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", "value int")

    def handle_rows(self, key: Any, items: Any, times: Any) -> Iterator[Any]:
        total = self.total.get()[0] if self.total.exists() else 0
        for item in items:
            total += item["n"].fillna(0).astype(int).sum() if self.frames else (item.n or 0)
        self.total.update((total,))
        yield int(total), self.total.get()


class CountWithReset(Shape):
    """Counts as text; one key's timer clears it. Timers are listed twice at a time."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.count = handle.getValueState("count", "value string")

    def handle_rows(self, key: Any, items: Any, times: Any) -> Iterator[Any]:
        count = int(self.count.get()[0]) if self.count.exists() else 0
        if key[1] == "a":
            self.handle.registerTimer(times.getCurrentProcessingTimeInMs() + 1)
        count += sum(1 for _ in self.rows(items))
        self.count.update((str(count),))
        yield count, times.getCurrentWatermarkInMs()

    def fired(self, key: Any, times: Any, info: Any) -> Iterator[Any]:
        first = list(self.handle.listTimers())
        assert [timer for timer in self.handle.listTimers()] == first
        self.count.clear()
        self.handle.deleteTimer(info.getExpiryTimeInMs())
        yield len(first), len(list(self.handle.listTimers())), type(key).__name__, self.count.exists()


class Expiring(Shape):
    """Counts in states that expire at once, after an hour, and never."""

    def init(self, handle: Any) -> None:
        self.states = [
            (f"{kind}{ttl}", getattr(handle, f"get{kind}State")(f"{kind}{ttl}", *schemas, ttl))
            for ttl in (1, 3_600_000, None)
            for kind, schemas in (("Value", ["n int"]), ("List", ["n int"]), ("Map", ["u string", "n int"]))
        ]

    def handle_rows(self, key: Any, items: Any, times: Any) -> Iterator[Any]:
        for row in self.rows(items):
            if row.n is None or row.n % 3 == 0:
                continue
            for name, state in self.states:
                if name.startswith("Value"):
                    state.update(((state.get()[0] if state.exists() else 0) + 1,))
                elif name.startswith("List"):
                    state.put([*state.get(), (row.n,)]) if row.n % 2 else state.appendValue((row.n,))
                else:
                    state.updateValue((row.s,), (row.n,))
        for name, state in self.states:
            found = state.get() if name.startswith("Value") else None
            found = list(state.get()) if name.startswith("List") else found
            found = sorted(state.iterator(), key=repr) if name.startswith("Map") else found
            yield name, state.exists(), found


class Absent(Shape):
    """Reads and clears what is not there."""

    def init(self, handle: Any) -> None:
        self.v = handle.getValueState("v", "n int")
        self.l = handle.getListState("l", "n int")
        self.m = handle.getMapState("m", "u string", "n int")

    def handle_rows(self, key: Any, items: Any, times: Any) -> Iterator[Any]:
        yield self.v.exists(), self.v.get(), self.l.exists(), list(self.l.get()), self.m.exists(), list(self.m.keys())
        yield self.m.getValue(("x",)), self.m.containsKey(("x",)), self.m.removeKey(("x",))
        yield self.v.clear(), self.l.clear(), self.m.clear()


class Interleaved(Shape):
    """Several iterators over one list at a time; instants in a list."""

    def init(self, handle: Any) -> None:
        self.one = handle.getListState("one", StructType([StructField("t", IntegerType(), True)]))
        self.two = handle.getListState("two", "t int")
        self.times = handle.getListState("times", StructType([StructField("time", TimestampType(), True)]))

    def handle_rows(self, key: Any, items: Any, times: Any) -> Iterator[Any]:
        instants = []
        for row in self.rows(items):
            for state, extra in ((self.one, 111), (self.two, 222)):
                state.put([(120,), (20,)])
                state.appendValue((extra,))
                state.appendList([(row.n,), (None,)])
            instants.append((datetime.fromtimestamp(1_700_000_000) + timedelta(minutes=row.seq),))
        one, two = self.one.get(), self.two.get()
        yield next(one), next(two), next(one)
        three = self.one.get()
        yield next(three), list(one), list(two), list(three)
        self.times.put(instants)
        yield list(self.times.get())


class MapCalls(Shape):
    """Every call on a map, which is emptied at the end."""

    def init(self, handle: Any) -> None:
        self.map = handle.getMapState("map", StructType().add("name", StringType()), "count int")
        self.brief = handle.getMapState("brief", "name string", "count int", 31_536_000_000)

    def handle_rows(self, key: Any, items: Any, times: Any) -> Iterator[Any]:
        count = sum(1 for _ in self.rows(items))
        for state in (self.map, self.brief):
            for name in ("key1", "key2"):
                before = state.getValue((name,))[0] if state.containsKey((name,)) else 0
                state.updateValue((name,), (before + count,))
            yield list(state.keys()), list(state.values()), list(state.iterator()), state.getValue(("key1",))
            state.removeKey(("key1",))
            yield state.containsKey(("key1",)), state.exists()
        self.map.clear()
        yield self.map.exists(), self.brief.exists()


class Address(NamedTuple):
    road: int
    city: str


class Composite(Shape):
    """Arrays of arrays, of structs given as dicts, named tuples and rows, and maps of maps."""

    def init(self, handle: Any) -> None:
        pair = ArrayType(StructType().add("key", StringType()).add("value", StringType()))
        place = ArrayType(StructType().add("road", IntegerType()).add("city", StringType()))
        schema = (
            StructType()
            .add("ids", ArrayType(IntegerType()))
            .add("tags", ArrayType(ArrayType(StringType())))
            .add("meta", pair)
            .add("places", place)
        )
        maps = (
            StructType()
            .add("id", IntegerType())
            .add("lists", MapType(StringType(), ArrayType(IntegerType())))
            .add("deep", MapType(StringType(), MapType(StringType(), LongType())))
        )
        self.v = handle.getValueState("v", schema)
        self.l = handle.getListState("l", schema)
        self.m = handle.getMapState("m", "name string", maps)

    def handle_rows(self, key: Any, items: Any, times: Any) -> Iterator[Any]:
        total = sum(row.n or 0 for row in self.rows(items))
        tags, meta = [["a", "b"], [], ["c", None]], [{"key": "env", "value": "prod"}, {"key": "r", "value": None}]
        places = [Address(1, "Oslo"), Row(road=3, city="Ås")]
        ids = [n + total for n in self.v.get()[0]] if self.v.exists() else [0]
        self.v.update((ids, tags, meta, places))
        yield self.v.get()
        if self.l.exists():
            old = list(self.l.get())
            self.l.put([([*i, total], t, [m.asDict() for m in ms], p) for i, t, ms, p in old])
        else:
            self.l.appendValue((ids, tags, meta, places))
        yield list(self.l.get())
        if not self.m.containsKey((key[1],)):
            self.m.updateValue((key[1],), (0, {"k1": [1], "k2": []}, {"e": {"x": 5}}))
        else:
            number, lists, deep = self.m.getValue((key[1],))
            lists["new"] = [total, None]
            deep.setdefault("e", {})["y"] = total
            self.m.updateValue((key[1],), (number, lists, deep))
        yield self.m.getValue((key[1],))


class NotNull(Shape):
    """State fields that may not be null, and rows with names and without."""

    def init(self, handle: Any) -> None:
        fields = [StructField("id", IntegerType(), False), StructField("name", StringType(), False)]
        self.v = handle.getValueState("v", StructType(fields))

    def rowwise(self, key: Any, row: Any, now: int) -> Any:
        self.v.update((row.seq, f"name-{row.seq}") if row.seq % 2 else Row(id=row.seq, name="row"))
        return self.v.get()


class Quiet(Shape):
    """Yields nothing, and reads only the first of its rows."""

    def init(self, handle: Any) -> None:
        self.v = handle.getValueState("v", "n int")

    def handle_rows(self, key: Any, items: Any, times: Any) -> Any:
        first = next(self.rows(items))
        self.v.update((first.seq,))
        return []


class Cells(Shape):
    """What a handler gets, type by type: rows with their fields, frames with dtypes and cells."""

    def handle_rows(self, key: Any, items: Any, times: Any) -> Iterator[Any]:
        yield key
        for item in items:
            yield item if not self.frames else (item, repr(item.index))


class NoNulls(Cells):
    """The same with rows that have no nulls."""


class IntoState(Shape):
    """Cells as they come go into states of the same type."""

    columns = ("n", "f", "x", "s", "at", "day", "price", "ok", "tiny", "small", "big")

    def init(self, handle: Any) -> None:
        types = dict(part.split(maxsplit=1) for part in INPUT_SCHEMA.split(", "))
        self.v = {c: handle.getValueState(c, f"v {types[c]}") for c in self.columns}
        self.m = handle.getMapState("m", f"n {types['n']}, s string", f"at {types['at']}, p {types['price']}")

    def handle_rows(self, key: Any, items: Any, times: Any) -> Iterator[Any]:
        for item in items:
            for row in item.itertuples(index=False) if self.frames else (item,):
                for name, state in self.v.items():
                    before = state.get()
                    try:
                        state.update((getattr(row, name),))
                    except Exception as error:
                        yield name, type(error).__name__
                    yield name, before, state.get()
                self.m.updateValue((row.n, row.s), (row.at, row.price))
        yield sorted(self.m.iterator(), key=repr)


# Published shapes.


class Heartbeat(Shape):
    """An alert when a device is silent, repeated until it is heard."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.alerts = handle.getValueState("alerts", "n int")

    def handle_rows(self, key: Any, items: Any, times: Any) -> Iterator[Any]:
        for timer in list(self.handle.listTimers()):
            self.handle.deleteTimer(timer)
        self.handle.registerTimer(times.getCurrentProcessingTimeInMs() + 1)
        yield "heard", self.alerts.get()
        self.alerts.clear()

    def fired(self, key: Any, times: Any, info: Any) -> Iterator[Any]:
        count = (self.alerts.get() or (0,))[0] + 1
        self.alerts.update((count,))
        if count < 3:
            self.handle.registerTimer(times.getCurrentProcessingTimeInMs() + 1)
        yield "silent", count


# By event time. The input has no late rows.


class Latecomer(Shape, event=True):
    """The newest event, forgotten when the watermark comes to the timer that each batch sets at it."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.newest = handle.getValueState("newest", "value string")

    def handle_rows(self, key: Any, items: Any, times: Any) -> Iterator[Any]:
        seconds = [int(row.at.replace(tzinfo=UTC).timestamp()) for row in self.rows(items)]
        newest = max([*seconds, int(self.newest.get()[0]) if self.newest.exists() else 0])
        self.newest.update((str(newest),))
        self.handle.registerTimer(times.getCurrentWatermarkInMs())
        yield newest, times.getCurrentWatermarkInMs()

    def fired(self, key: Any, times: Any, info: Any) -> Iterator[Any]:
        self.newest.clear()
        yield info.getExpiryTimeInMs(), times.getCurrentWatermarkInMs()


class EventSession(Shape, event=True):
    """A session ends five minutes after its newest event."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.session = handle.getValueState("session", "until long, count int")

    def rowwise(self, key: Any, row: Any, now: int) -> Any:
        until, count = self.session.get() or (0, 0)
        end = int(row.at.replace(tzinfo=UTC).timestamp() * 1000) + 300_000
        if end > until:
            self.handle.deleteTimer(until)
            self.handle.registerTimer(end)
            until = end
        self.session.update((until, count + 1))
        return count + 1, list(self.handle.listTimers())

    def fired(self, key: Any, times: Any, info: Any) -> Iterator[Any]:
        yield "session", self.session.get(), info.getExpiryTimeInMs(), times.getCurrentWatermarkInMs()
        self.session.clear()


class Reorder(Shape, event=True):
    """Rows wait in a list until the watermark has passed them, and come out by time."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.waiting = handle.getListState("waiting", "at timestamp, seq int")

    def handle_rows(self, key: Any, items: Any, times: Any) -> Iterator[Any]:
        for row in self.rows(items):
            self.waiting.appendValue((row.at, row.seq))
            self.handle.registerTimer(int(row.at.replace(tzinfo=UTC).timestamp() * 1000))
        return iter(())

    def fired(self, key: Any, times: Any, info: Any) -> Iterator[Any]:
        rows = sorted(self.waiting.get(), key=repr)
        at = datetime.fromtimestamp(info.getExpiryTimeInMs() / 1000, UTC).replace(tzinfo=None)
        out, kept = [r for r in rows if r[0] <= at], [r for r in rows if r[0] > at]
        self.waiting.put(kept) if kept else self.waiting.clear()
        yield [seq for _, seq in out], len(kept)


def batches(
    shapes: dict[str, type[Shape]], *, seed: int, count: int, keys: Sequence[Any], nulls: Container[str]
) -> list[list[tuple[Any, ...]]]:
    """For each batch rows of most keys of each shape. The same for the same seed. ``nulls``: the columns that have them, but
    for ``NoNulls``."""
    rng = random.Random(seed)
    found: list[list[tuple[Any, ...]]] = []
    clock = T0
    for n in range(count):
        rows: list[tuple[Any, ...]] = []
        clock += timedelta(minutes=9)
        for shape in shapes:
            for k in keys:
                if n and rng.random() < 0.3:
                    continue
                few = rng.randint(1, 4)
                rows += [_row(rng, shape, k, seq, clock, () if shape == "NoNulls" else nulls) for seq in range(few)]
        found.append(rows)
    return found


def _row(rng: random.Random, shape: str, k: Any, seq: int, clock: datetime, nulls: Container[str]) -> Any:
    words = ("view", "cart", "pay", "view", "ä😀", "", "x'\"\\")
    values = {
        "n": rng.randint(-5, 100),
        "f": rng.choice([0.5, -2.25, 1e10, 0.1]),
        "x": rng.choice([0.1, 2.5, -7.75, 1e300, 3.0]),
        "s": rng.choice(words),
        "day": date(2024, 2, 28) + timedelta(days=rng.randint(0, 3)),
        "price": Decimal(rng.randint(-100, 99_999)).scaleb(-2),
        "ok": rng.random() < 0.4,
        "tags": [rng.choice(words) for _ in range(rng.randint(0, 2))],
        "tiny": rng.randint(-128, 127),
        "small": rng.randint(0, 3),
        "big": rng.randint(-(2**63), 2**63 - 1),
    }
    for name in values:
        if name in nulls and rng.random() < 0.15:
            values[name] = None
    # Every batch is later than the watermark of all before it.
    at = clock + timedelta(seconds=rng.randint(0, 500), microseconds=rng.choice([0, 1000, 123_456]))
    return tuple({"shape": shape, "k": k, "seq": seq, "at": at, **values}[name] for name in FIELDS)
