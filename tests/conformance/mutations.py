"""Random processors that change all that they yielded, stored, read or received, under Spark and under Cairn.

A program is a processor: steps that build values, hand them over, and change them afterwards. Each program has keys of its own, so
that one query runs many of them, and objects that all its keys share and refill. The vectorised API has no twin in Spark: there a
program is compared with itself, with copies in place of all that it would change.

Not generated, because both engines would be right: changes of a key's arrays, by which Spark groups rows; buffers that the timers of
several keys share in the row API, which Spark converts when the last timer of a partition has fired.
"""

from __future__ import annotations

import array
import collections
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row

from cairn.arrow_processor import ArrowProcessor, BatchResult, KeyedBatch, with_keys
from cairn.pipeline import Pipeline
from cairn.testing import PipelineTester
from tests.conformance.generator import DIFFERENT, ENTRIES, WRITTEN_ROWS, shown
from tests.support.spark_streaming import Case

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KEYS_PER_PROGRAM = 3
_CELLS = "n bigint, t string, a array<bigint>, b binary, m map<string,bigint>, s struct<q:bigint,w:array<string>>"
INPUT = f"p int, j int, seq bigint, x double, {_CELLS}"
OUTPUT = f"p int, j int, x double, aa array<array<bigint>>, note string, {_CELLS}"
# Without nested columns Cairn takes rows as they are.
FLAT_OUTPUT = "p int, j int, x double, note string, n bigint, t string, b binary"
NAMES, FLAT_NAMES = ([part.split()[0] for part in schema.split(", ")] for schema in (OUTPUT, FLAT_OUTPUT))
USER_KEY = "u binary, w string"
_NUMBERS = 3

# --- values ---------------------------------------------------------------------------------------------------------------------

# How a value of a column is built from three numbers. Those of `_STORED` may also go into state.
_MAKE: dict[str, dict[str, Callable[[list[int]], Any]]] = {
    "n": {"int": lambda n: n[0], "scalar": lambda n: np.int64(n[0]), "array": lambda n: np.array(n[0])},
    "t": {"str": lambda n: f"t{n[0]}"},
    "a": {
        "list": lambda n: [*n],
        "array": lambda n: np.array(n, np.int64),
        "array.array": lambda n: array.array("q", n),
        "tuple": lambda n: (*n,),
        "deque": collections.deque,
    },
    "b": {"bytes": bytes, "bytearray": bytearray, "memoryview": lambda n: memoryview(bytearray(n))},
    "m": {"dict": lambda n: {f"k{i}": v for i, v in enumerate(n)}},
    "s": {
        "dict": lambda n: {"q": n[0], "w": [f"w{v}" for v in n]},
        "row": lambda n: Row(q=n[0], w=[f"w{v}" for v in n]),
        "row with an array": lambda n: Row(q=n[0], w=np.array([f"w{v}" for v in n], object)),
    },
    "aa": {
        "lists": lambda n: [[*n], [n[0]]],
        "arrays": lambda n: [np.array(n, np.int64), np.array(n[:1], np.int64)],
        "tuple of lists": lambda n: ([*n], [n[0]]),
        "array of lists": lambda n: _objects([[*n], [n[0]]]),
    },
}
_STORED = {"n": ["int"], "a": ["list"], "b": ["bytes", "bytearray"], "m": ["dict"]}
_STORED["s"] = ["dict"] if WRITTEN_ROWS in DIFFERENT else ["dict", "row"]
_IN_FRAMES = {
    **{name: list(ways) for name, ways in _MAKE.items()},
    "n": ["int", "scalar"],
    "a": ["list", "array", "tuple"],
    "b": ["bytes", "bytearray"],
    "aa": ["lists", "arrays"],
}


def _objects(values: list[Any]) -> Any:
    made = np.empty(len(values), object)
    for at, value in enumerate(values):
        made[at] = value
    return made


def refill(value: Any, new: Any) -> Any:
    """The value with the content of another one of its kind, in place if that is possible."""
    match value:
        case bytearray() | memoryview() | list() | array.array():
            value[:] = new
        case np.ndarray() if value.shape == new.shape:
            value[...] = new
        case dict():
            value.clear()
            value.update(new)
        case collections.deque():
            value.clear()
            value.extend(new)
        case Row():
            refill(value.w, new.w)
            return type(value)(q=new.q, w=value.w) if type(value) is Row else new
        case _:
            return new
    return value


def spoil(value: Any) -> None:
    """Changes all that can be changed in a value."""
    match value:
        case bytearray() | memoryview():
            value[:] = bytes(len(value))
        case np.ndarray():
            for cell in value if value.dtype == object else ():
                spoil(cell)
            if value.flags.writeable:
                value[...] = value[::-1].copy() if value.dtype == object else -1
        case list() | collections.deque() | array.array():
            for part in value:
                spoil(part)
            value.append(value[0] if len(value) else -1)
            value.reverse()
        case dict():
            for part in value.values():
                spoil(part)
            for key in value:
                value[key] = None
            value["spoilt"] = -1
        case tuple():
            for part in value:
                spoil(part)


_STEPS = (
    "give",
    "give",
    "flat",
    "update",
    "append",
    "append_list",
    "put",
    "set_entry",
    "read",
    "read",
    "spoil_input",
    "timer",
)
_STEPS = tuple(step for step in _STEPS if not (ENTRIES in DIFFERENT and step in ("append_list", "put")))

# --- programs of the row and the pandas API ---------------------------------------------------------------------------------------


class Mutating(StatefulProcessor):
    """Runs the steps of each key's program, once per row."""

    ways: ClassVar = {name: list(ways) for name, ways in _MAKE.items()}
    timer_ways: ClassVar = ways | {"n": ["int"], "a": ["list"], "b": ["bytes"], "s": ["dict"], "aa": ["lists"]}

    def __init__(self, seed: int, names: list[str]) -> None:
        self.seed, self.names = seed, names

    def init(self, handle: Any) -> None:
        self.handle = handle
        value = _CELLS.replace(" t string,", "")
        self.v = handle.getValueState("v", value)
        self.l = handle.getListState("l", value)
        self.m = handle.getMapState("m", USER_KEY, value)
        # By program and name: objects that its keys share, and what they got before.
        self.shared: dict[Any, Any] = {}
        self.received: dict[Any, list[Any]] = {}

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        items = initialState.to_dict("records") if isinstance(initialState, pd.DataFrame) else [initialState.asDict()]
        for item in items:
            numbers = [*item["a"]]
            self.l.appendValue((item["n"], numbers, item["b"], None, None))
            spoil([numbers, item])
        spoil_frame(initialState) if isinstance(initialState, pd.DataFrame) else None

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        now_ms = timerValues.getCurrentProcessingTimeInMs()
        pick = random.Random(f"{self.seed} {key[0]}")
        steps = [(pick.choice(_STEPS), pick.random()) for _ in range(pick.randrange(3, 7))]
        steps.insert(pick.randrange(len(steps)), ("give", pick.random()))
        for count, item in enumerate(rows):
            self.now_ms, self.item, self.notes, self.key = now_ms, item, [], key
            numbers = self.numbers_of(item)
            for number, (step, chance) in enumerate(steps):
                # The same choices for all rows of a program, so that its objects are refilled and not made anew.
                self.pick, self.place = random.Random(f"{self.seed} {key[0]} {chance}"), (key[0], number)
                self.numbers = [(n + 7 * number + count) % 100 for n in numbers]
                yield from getattr(self, step)() or ()
            kept = self.received.setdefault(key[0], [])
            kept.append(item)
            if pick.random() < 0.5:
                self.spoil_items(kept)
        yield from self.give()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        number = expiredTimerInfo.getExpiryTimeInMs() % 10
        self.key, self.notes, self.item = key, [f"timer {number} {shown(self.v.get(), differ=DIFFERENT)}"], None
        self.pick, self.place = random.Random(f"{self.seed} {key[0]} timer"), (key[0], "timer")
        self.numbers = [key[1], number, 5]
        ways, self.ways = self.ways, self.timer_ways
        yield from self.give()
        self.ways = ways

    # --- steps: all may return items to yield --------------------------------------------------------------------------------------

    def numbers_of(self, item: Any) -> list[int]:
        return [item.n % 100, len(item.a), item.seq % 100]

    def value(self, name: str, ways: dict[str, list[str]] | None = None) -> Any:
        """A value for a column: a new one, or one that the program's keys share."""
        way = self.pick.choice((ways or self.ways)[name])
        new = _MAKE[name][way](self.numbers)
        if self.pick.random() < 0.4:
            return new
        place = (self.place, name, way)
        self.shared[place] = refill(self.shared[place], new) if place in self.shared else new
        return self.shared[place]

    def stored(self) -> tuple[Any, ...]:
        return tuple(self.value(name, _STORED) for name in "nabms")

    def give(self) -> Iterator[Any]:
        cells = {name: self.value(name) for name in _MAKE}
        if self.item is not None and self.pick.random() < 0.3:
            cells["a"], cells["b"] = self.item.a, self.item.b
        row = {"p": self.key[0], "j": self.key[1], "x": 0.5, "note": "; ".join(self.notes), **cells}
        yield Row(**{name: row[name] for name in self.names})
        if self.pick.random() < 0.7:
            spoil(list(cells.values()))

    def flat(self) -> Iterator[Any]:
        """An output row with nulls for nested values."""
        yield Row(**{name: None for name in self.names} | {"p": self.key[0], "j": self.key[1], "b": self.value("b")})

    def update(self) -> None:
        value = self.stored()
        self.v.update(value)
        spoil(value)

    def append(self) -> None:
        value = self.stored()
        self.l.appendValue(value)
        spoil(value)

    def append_list(self) -> None:
        self.write_list(self.l.appendList)

    def put(self) -> None:
        self.write_list(self.l.put)

    def write_list(self, write: Callable[[Any], None]) -> None:
        held: list[Any] = [*self.numbers]

        def refilled() -> Iterator[Any]:
            for n in range(2):
                held[0] = n
                yield (n, held, bytes([n]), None, None)

        if self.pick.random() < 0.5:
            write(refilled())
        else:
            values = [self.stored(), (1, held, None, None, None)]
            write(values)
            spoil(values)
        spoil(held)

    def set_entry(self) -> None:
        raw, value = bytearray(self.numbers[:1]), self.stored()
        self.m.updateValue((raw, "w"), value)
        spoil([raw, value])
        if self.pick.random() < 0.3:
            self.m.removeKey((raw, "w"))

    def read(self) -> None:
        for number in range(2):
            held = [self.v.get(), self.m.getValue((bytes(self.numbers[:1]), "w"))]
            if ENTRIES not in DIFFERENT:
                held += [*self.l.get(), *sorted(self.m.iterator(), key=repr)]
            self.notes.append(f"{number} {shown(held, differ=DIFFERENT)}")
            spoil(held)

    def spoil_input(self) -> None:
        self.spoil_items([self.item])

    def spoil_items(self, items: list[Any]) -> None:
        spoil([list(item) for item in items])

    def timer(self) -> None:
        self.handle.registerTimer(self.now_ms // 10 * 10 - 10 * self.pick.randrange(1, 4) + int(self.key[1]))


def spoil_frame(frame: pd.DataFrame) -> None:
    """Changes cells, columns, labels and values of a frame in place."""
    for name in frame.columns:
        column = frame[name]
        if column.dtype == object:
            spoil([cell for cell in column if not isinstance(cell, str)])
        if isinstance(column.dtype, np.dtype) and column.to_numpy().flags.writeable:
            column.to_numpy()[:] = None if column.dtype == object else 0
    if len(frame):
        frame.drop(columns=frame.columns[-1], inplace=True)
        frame.columns.values[0] = "spoilt"


class MutatingFrames(Mutating):
    """The same with frames."""

    ways: ClassVar = _IN_FRAMES
    timer_ways: ClassVar = _IN_FRAMES

    def numbers_of(self, item: Any) -> list[int]:
        return [int(item["n"].iloc[0]) % 100, len(item), int(item["seq"].iloc[0]) % 100]

    def cells(self, rows: int) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {"p": [self.key[0]] * rows, "j": [self.key[1]] * rows, "x": [0.5] * rows}
        # The rows of a frame hold the same object where the program's keys share it.
        columns |= {name: [self.value(name)] * rows for name in _MAKE}
        return columns | {"note": ["; ".join(self.notes)] * rows}

    def give(self) -> Iterator[Any]:
        way = self.pick.choice(["fresh", "template", "views", "buffer", "arrow", "extension", "input"])
        rows = 2 if way == "views" else self.pick.randrange(1, 3)
        frame = pd.DataFrame(self.cells(rows))
        if way == "template":
            template = self.shared.setdefault((self.place, rows), pd.DataFrame(self.cells(rows)))
            for name in frame.columns:
                for at in range(rows):
                    template.at[at, name] = frame.at[at, name]
            yield template
        elif way == "views":
            yield frame[:1]
            frame.loc[:, "n"] -= 1
            yield frame[1:]
            spoil_frame(frame)
        elif way == "buffer":
            frame = self.over_a_buffer(frame, rows)
            yield frame
            frame["n"] -= 5
        elif way == "arrow":
            buffer = self.shared.setdefault((self.place, "arrow", rows), np.zeros(rows, np.int64))
            buffer[:] = self.numbers[:rows]
            frame["n"] = pd.Series(pa.array(buffer), dtype=pd.ArrowDtype(pa.int64()))
            yield frame
            buffer[:] = 0
        elif way == "extension":
            frame = frame.astype({"n": "Int64", "t": "string", "x": "Float64"})
            yield frame
            frame.loc[:, ["n", "x"]] = 3
            frame.loc[:, "t"] = "spoilt"
        else:
            yield frame
        if (
            way == "input"
            and self.item is not None
            and list(self.item.columns) == [p.split()[0] for p in INPUT.split(", ")]
        ):
            given = self.item[["p", "j", "x", "n", "t", "a", "b"]].copy(deep=False)
            given[["aa", "m", "s", "note"]] = None
            yield given
            spoil_frame(given)
        if self.pick.random() < 0.7 and way not in ("template", "views"):
            spoil_frame(frame)

    def over_a_buffer(self, frame: pd.DataFrame, rows: int) -> pd.DataFrame:
        buffer = self.shared.setdefault((self.place, "buffer", rows), np.zeros((rows, 3), np.int64))
        for at, name in enumerate("pjn"):
            buffer[:, at] = frame[name]
        made = pd.DataFrame(buffer, columns=["p", "j", "n"], copy=False)
        for name in NAMES:
            if name not in "pjn":
                made[name] = frame[name]
        return made

    def flat(self) -> Iterator[Any]:
        frame = pd.DataFrame({name: [None] for name in NAMES} | {"p": [self.key[0]], "j": [self.key[1]]})
        frame["b"] = [self.value("b")]
        yield frame
        frame["j"] += 1

    def spoil_items(self, items: list[Any]) -> None:
        for item in items:
            spoil_frame(item)


def make_case(api: str, seed: int, programs: int) -> Case:
    """A query with so many programs, two batches and an initial state."""
    keys = [(p, j) for p in range(programs) for j in range(KEYS_PER_PROGRAM)]

    def row(key: tuple[int, int], seq: int) -> tuple[Any, ...]:
        pick = random.Random(f"{seed} {key} {seq}")
        n = [pick.randrange(100) for _ in range(_NUMBERS)]
        return (*key, seq, 0.25, n[0], f"t{n[1]}", n, bytes(n), {"k": n[2]}, {"q": n[0], "w": ["w"]})

    flat = seed % 4 == 3
    return Case(
        processor=partial(Mutating if api == "row" else MutatingFrames, seed=seed, names=FLAT_NAMES if flat else NAMES),
        input_schema=INPUT,
        output_schema=FLAT_OUTPUT if flat else OUTPUT,
        key=("p", "j"),
        batches=[[row(key, 2 * batch + seq) for key in keys for seq in range(2)] for batch in range(2)],
        states={"v": "value", "l": "list", "m": "map"},
        api=api,
        initial_schema="p int, j int, n bigint, a array<bigint>, b binary",
        initial=[(*key, 1, [1, 2], b"i") for key in keys if key[1] == 0],
    )


# --- programs of the vectorised API -----------------------------------------------------------------------------------------------


def overwrite(given: Any) -> None:
    """Zeros in all memory of arrays and tables that can be written to."""
    match given:
        case np.ndarray():
            if given.flags.writeable:
                given[...] = 0
        case pa.Table():
            for column in given.columns:
                for chunk in column.iterchunks():
                    for buffer in chunk.buffers():
                        if buffer is not None and buffer.is_mutable:
                            np.frombuffer(buffer, "u1")[:] = 0


def own(given: Any) -> Any:
    """A copy in memory that can be written to."""
    return given.copy() if isinstance(given, np.ndarray) else given.take(pa.array(np.arange(len(given))))


class MutatingColumns(ArrowProcessor):
    """One program. ``careless``: all that it got is overwritten once it is copied, all that it gave once the call is over."""

    def __init__(self, seed: int, careless: bool) -> None:
        self.seed, self.careless = seed, careless
        self.splits_keys = random.Random(seed).random() < 0.5

    def init(self, handle: Any) -> None:
        self.handle = handle
        handle.getValueState("v", "n bigint, t string, a array<bigint>")
        self.l = handle.getListState("l", "n bigint, t string, a array<bigint>")
        self.m = handle.getMapState("m", "n bigint, t string", "a array<bigint>, b binary")
        self.given: list[Any] = []

    def got(self, *parts: Any) -> list[Any]:
        copied = [own(part) for part in parts]
        if self.careless:
            for part in parts:
                overwrite(part)
        return copied

    def lent(self, part: Any) -> Any:
        self.given.append(own(part))
        return self.given[-1]

    def take_back(self) -> None:
        if self.careless:
            for part in self.given:
                overwrite(part)
        self.given.clear()

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        self.take_back()  # the last result
        pick, now_ms = random.Random(self.seed), batch.time.getCurrentProcessingTimeInMs()
        keys, rows, of_row, offsets, state, exists = self.got(
            batch.keys, batch.rows, batch.key_of_row, batch.row_offsets, batch.states["v"], batch.exists["v"]
        )
        count, said = len(keys), [exists.astype(np.int64), np.diff(offsets)]
        cells, user_keys, values = rows.select(["n", "t", "a"]), rows.select(["n", "t"]), rows.select(["a", "b"])
        for _ in range(pick.randrange(3, 10)):
            step = pick.choice(
                ["append", "put", "clear", "set", "remove", "forget", "timers", "untimed", "read", "read"]
            )
            some = pick.sample(range(len(of_row)), min(len(of_row), pick.randrange(1, 60)))
            chosen = pa.array(some)
            of = self.lent(of_row[some])
            mask = np.array([pick.random() < 0.5 for _ in range(count)])
            match step:
                case "append" | "put":
                    (self.l.appendList if step == "append" else self.l.put)(of, self.lent(cells.take(chosen)))
                case "clear":
                    self.l.clear(self.lent(mask))
                case "set":
                    self.m.updateValue(of, self.lent(user_keys.take(chosen)), self.lent(values.take(chosen)))
                case "remove":
                    self.m.removeKey(of, self.lent(user_keys.take(chosen)))
                case "forget":
                    self.m.clear(self.lent(mask))
                case "timers":
                    self.handle.registerTimer(of, self.lent(now_ms - 5 + rows["n"].to_numpy()[some] % 10))
                case "untimed":
                    self.handle.deleteTimer(of, self.lent(now_ms - 5 + rows["n"].to_numpy()[some] % 10))
                case _:
                    said += self.read(mask, of, user_keys.take(chosen), count)
            self.take_back()
        last = cells.take(pa.array(offsets[1:] - 1))
        told = [" ".join(map(str, column)) for column in np.array(said).T.tolist()]
        output = pa.table({"n": state["n"], "note": told, "a": state["a"]})
        states = {"v": self.lent(last)} if pick.random() < 0.8 else {}
        cleared = {"v": self.lent(np.array([pick.random() < 0.2 for _ in range(count)]))} if pick.random() < 0.5 else {}
        result = self.lent(with_keys(KeyedBatch(**_fields(batch) | {"keys": keys}), output))
        return BatchResult(states=states, cleared=cleared, output=result)

    def read(self, mask: Any, of: Any, user_keys: Any, count: int) -> list[Any]:
        """By key sums over all that the states give."""
        lists = self.l.get(self.lent(mask))
        entries = self.m.iterator()
        timers = self.handle.listTimers()
        found, there = self.m.getValue(of, self.lent(user_keys))
        rows, ends, keys, values, bounds, times, edges, found, there = self.got(
            *(lists.rows, lists.offsets, entries.keys, entries.values, entries.offsets),
            *(timers.rows, timers.offsets, found, there),
        )
        again = self.l.get(mask), self.m.iterator()
        assert [again[0].rows, again[1].keys, again[1].values] == [rows, keys, values]
        total = sum(map(len, found["a"].drop_null().to_pylist())) + int(there.sum())
        held = np.zeros(count, np.int64)
        held[mask] = np.diff(ends)
        owners = np.repeat(np.arange(count), np.diff(edges))
        clock = np.bincount(owners, times["expiry_ms"].to_numpy() % 10, count).astype(np.int64)
        digits = rows["n"].drop_null().to_numpy().sum() + values["a"].combine_chunks().flatten().to_numpy().sum()
        return [held, np.diff(bounds), clock, np.full(count, total), np.full(count, digits)]

    def handleExpiredTimers(self, batch: KeyedBatch) -> BatchResult:
        self.take_back()
        keys, rows, offsets, state, _ = self.got(
            batch.keys, batch.rows, batch.row_offsets, batch.states["v"], batch.exists["v"]
        )
        times = np.add.reduceat(rows["expiry_ms"].to_numpy() % 10, offsets[:-1])
        output = pa.table({"n": state["n"], "note": [f"timers {t}" for t in times.tolist()], "a": state["a"]})
        if random.Random(self.seed).random() < 0.5:
            # One that has fired, and one that is new.
            first = rows["expiry_ms"].to_numpy()[offsets[:-1]]
            self.handle.deleteTimer(self.lent(np.arange(len(keys))), self.lent(first))
            self.handle.registerTimer(self.lent(np.arange(len(keys))), self.lent(first + 3))
        result = self.lent(with_keys(KeyedBatch(**_fields(batch) | {"keys": keys}), output))
        return BatchResult(output=result)


def _fields(batch: KeyedBatch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in batch.__slots__}


def outcome_of_columns(seed: int, careless: bool) -> list[Any]:
    """Output, states and digest after two intervals. Set ``ROUND_ROWS`` to some hundred rows before, for several calls an interval."""
    pick = random.Random(f"rows {seed}")
    start = datetime(2024, 1, 1, tzinfo=UTC)
    pipeline = Pipeline(
        name="mutating",
        start=start,
        source=lambda spark, interval: None,
        key=["k", "j"],
        order_by=["seq"],
        processor=partial(MutatingColumns, seed, careless),
        api="arrow",
        output_schema="k bigint, j string, n bigint, note string, a array<bigint>",
        time_mode="processing",
        parallelism=1,
        max_parallelism=4,
    )
    schema = "k bigint, j string, seq bigint, n bigint, t string, a array<bigint>, b binary"
    tester, keys, found = PipelineTester(pipeline, input_schema=schema), pick.choice([1, 5, 40]), []
    for _ in range(2):
        rows = [
            (
                pick.randrange(keys),
                "j",
                seq,
                pick.randrange(20),
                f"t{seq % 3}",
                [seq] * pick.randrange(3),
                b"b" * (seq % 3),
            )
            for seq in range(pick.randrange(1, 400))
        ]
        found.append(tester.run(rows).output)
    return [found, *(tester.state(name) for name in "vlm"), tester.timers(), tester.checkpoints[-1].content.digest]


# --- runs -------------------------------------------------------------------------------------------------------------------------


def run_columns(seeds: range) -> list[str]:
    """The programs of the vectorised API that differ."""
    from cairn.rows import local_rows
    from cairn.runners import arrow_runner

    before = arrow_runner.ROUND_ROWS, local_rows.BATCH_ROWS
    arrow_runner.ROUND_ROWS, local_rows.BATCH_ROWS = 150, 60
    try:
        return [
            f"seed {seed}: {careless} where a program without changes has {careful}"[:1500]
            for seed in seeds
            for careful, careless in [[outcome_of_columns(seed, way) for way in (False, True)]]
            if careful != careless
        ]
    finally:
        arrow_runner.ROUND_ROWS, local_rows.BATCH_ROWS = before


def run_query(spark: SparkSession, api: str, seed: int, programs: int, folder: Path) -> tuple[int, int, list[str]]:
    """Programs that emit rows, their rows, and what differs between Spark and Cairn."""
    from tests.support.both_engines import run_both

    both = run_both(spark, make_case(api, seed, programs), folder)
    rows = [row for batch in both.spark.outputs for row in batch]
    return len({row["p"] for row in rows}), len(rows), both.differences()
