"""What a processor changes after it yielded, stored, read or received it: nothing that was handed over before may change.

The same under Spark and with generated processors, and the vectorised API, is in tests/conformance/test_mutations.py.
"""

from __future__ import annotations

import array
import collections
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import IntEnum
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from cairn.replay.trace import rows_of
from cairn.runners.mutable_values import all_immutable, copy_of, copy_of_column, without_rows
from cairn.testing import PipelineTester
from tests.support.bare_pipeline import bare_pipeline

START = datetime(2024, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


class Level(IntEnum):
    HIGH = 3


class Counter:
    """An integer to Arrow, which its owner may count up."""

    n = 1

    def __index__(self) -> int:
        return self.n


# --- copies ---------------------------------------------------------------------------------------------------------------------


def append(values: Any) -> None:
    values.append(9)


def zero(values: Any) -> None:
    values[:] = type(values)(values.nbytes * b"\0") if isinstance(values, memoryview) else 0


def first(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda value: change(value[0])


def count(counter: Any) -> None:
    counter.n += 1


def structured() -> Any:
    made = np.zeros(1, [("n", "i8"), ("o", "O")])
    made["o"][0] = [1]
    return made


MUTABLE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1], append),
    "list of lists": (lambda: [[1], [2]], first(append)),
    "list in a tuple": (lambda: ([1],), first(append)),
    "list in a dict in a list": (lambda: [{"x": [1]}], lambda value: append(value[0]["x"])),
    "dict": (lambda: {"x": 1}, lambda value: value.update(x=2)),
    "row with a list": (lambda: Row(x=[1]), first(append)),
    "bytearray": (lambda: bytearray(b"ab"), append),
    "memoryview": (lambda: memoryview(bytearray(b"ab")), lambda value: value.__setitem__(0, 0)),
    "memoryview of numbers": (lambda: memoryview(np.array([[1, 2]])), lambda value: value.__setitem__((0, 0), 0)),
    "array": (lambda: np.array([1, 2]), zero),
    "array without dimensions": (lambda: np.array(1), lambda value: value.fill(0)),
    "array of objects": (lambda: np.array([[1], None], object), first(append)),
    "array with a field of objects": (structured, lambda value: value["o"][0].append(2)),
    "record": (lambda: structured()[0], lambda value: value.__setitem__("n", 5)),
    "array.array": (lambda: array.array("q", [1]), append),
    "deque": (lambda: collections.deque([1]), append),
    "set": (lambda: {1}, lambda value: value.add(2)),
    "series": (lambda: pd.Series([1, 2]), lambda value: zero(value.to_numpy())),
    "series of lists": (lambda: pd.Series([[1], [2]]), lambda value: append(value.iloc[0])),
    "index": (lambda: pd.Index(["a", "b"]), lambda value: value.values.fill("z")),
    "nullable integers": (lambda: pd.array([1, None]), lambda value: value.__setitem__(0, 5)),
    "own class": (Counter, count),
    "memory of Arrow": (lambda: pa.array(np.array([1, 2])), lambda value: zero(np.frombuffer(value.buffers()[1], "q"))),
}


def shown(value: Any) -> str:
    """A text that tells whether the value changed."""
    if isinstance(value, Counter):
        return f"counter {value.n}"
    return repr(value.tolist() if isinstance(value, memoryview | pa.Array) else value)


@pytest.mark.parametrize("name", MUTABLE)
def test_a_copy_shares_no_memory(name: str) -> None:
    make, change = MUTABLE[name]
    value = make()
    copied, before = copy_of([value])[0], shown(value)
    (traced,) = rows_of(pd.DataFrame({"x": pd.Series([value], dtype=object)}))
    assert not all_immutable([value])
    assert shown(copied) == before and type(copied) is type(value)
    change(value)
    assert shown(value) != before, "the change changes nothing"
    assert shown(copied) == shown(traced["x"]) == before


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 1, 1.5, "a", b"a", Decimal(1), date(2024, 1, 1), START, HOUR, pd.NaT, pd.NA, pd.Timestamp(0)),
        *(np.int8(1), np.float32(1), np.bool_(True), np.str_("a"), np.datetime64(0, "s"), Level.HIGH),
    ],
    ids=repr,
)
def test_immutable_values_are_not_copied(value: Any) -> None:
    assert copy_of(value) is value


def test_rows_become_dicts_and_values_of_unusual_types_are_collected() -> None:
    numbers, tagged, raw, others = [1], ([1],), bytearray(b"x"), list[Any]()
    row = Row(a=[numbers, 2.5], m={"x": [Row(b=raw), tagged]}, e=Level.HIGH)
    plain = without_rows(row, others)
    assert plain == row.asDict(True) == {"a": [[1], 2.5], "m": {"x": [{"b": raw}, tagged]}, "e": 3}
    assert [*map(id, others)] == [*map(id, (raw, tagged, Level.HIGH))]
    numbers.append(9)
    assert plain["a"] == [[1], 2.5]


@pytest.mark.parametrize(
    "make",
    [
        lambda numbers: numbers,
        lambda numbers: pd.array(numbers, copy=False),
        lambda numbers: pd.Series(pa.array(numbers), dtype=pd.ArrowDtype(pa.int64())).array,
        lambda numbers: np.array([numbers, None], object),
    ],
    ids=["numbers", "nullable", "arrow", "objects"],
)
def test_a_copy_of_a_column_shares_no_memory(make: Callable[[Any], Any]) -> None:
    numbers = np.array([1, 2])
    column = make(numbers)
    copied, before = copy_of_column(column), repr(list(column))
    numbers[:] = 7
    assert repr(list(copied)) == before != repr(list(column))


# --- a pipeline -----------------------------------------------------------------------------------------------------------------


class Given(StatefulProcessor):
    """Does what a test wants done with the rows of a key. ``kept``: objects for all keys."""

    on_rows: Any = None
    on_timer: Any = None

    def init(self, handle: Any) -> None:
        self.handle, self.kept = handle, {}
        self.v = handle.getValueState("v", "a array<bigint>, b binary")
        self.l = handle.getListState("l", "a array<bigint>, b binary")
        self.m = handle.getMapState("m", "u binary", "a array<bigint>, b binary")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        self.now_ms = timerValues.getCurrentProcessingTimeInMs()
        return type(self).on_rows(self, key, rows)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        return type(self).on_timer(self, key)


def outputs(on_rows: Any, output: str, *, api: Any = "row", on_timer: Any = None, **settings: Any) -> list[Any]:
    """The output's values, by key, after one interval with the keys a, b and c, each with a list of two numbers."""
    pipeline = bare_pipeline(
        type("Does", (Given,), {"on_rows": on_rows, "on_timer": on_timer}),
        api=api,
        output_schema=output,
        parallelism=1,
        max_parallelism=1,
        **{"order_by": ["n"], **settings},
    )
    tester = PipelineTester(pipeline, input_schema="k string, n bigint, a array<bigint>")
    rows = [(k, n, [n, n]) for n, k in enumerate("abc")]
    return sorted(tuple(row.values()) for row in tester.run(rows).output)


def test_a_list_that_grows_is_in_each_row_as_it_was_when_that_row_was_yielded() -> None:
    def on_rows(p: Any, key: Any, rows: Any) -> Iterator[Row]:
        seen = p.kept.setdefault("seen", [])
        for _ in range(2):
            seen.append(len(seen))
            yield Row(k=key[0], a=seen)

    found = outputs(on_rows, "k string, a array<bigint>")
    assert found == [(k, [*range(n)]) for n, k in enumerate("aabbcc", 1)]


@pytest.mark.parametrize(
    "make", [bytearray, lambda raw: memoryview(bytearray(raw)), lambda raw: np.frombuffer(bytearray(raw), "u1")]
)
@pytest.mark.parametrize("within", ["row", "struct"])
def test_a_buffer_that_each_key_refills_is_in_its_row_as_the_key_left_it(make: Any, within: str) -> None:
    kind = "array<smallint>" if isinstance(make(b".."), np.ndarray) else "binary"

    def on_rows(p: Any, key: Any, rows: Any) -> Iterator[Row]:
        buffer = p.kept.setdefault("buffer", make(b".."))
        for n in range(2):  # the rows of a key end together, as under Spark
            buffer[0], buffer[1] = ord(key[0]), n
            yield Row(k=key[0], s=Row(b=buffer)) if within == "struct" else Row(k=key[0], s=buffer)

    found = outputs(on_rows, f"k string, s struct<b:{kind}>" if within == "struct" else f"k string, s {kind}")
    cells = [bytes(s["b"] if within == "struct" else s) for _, s in found]
    assert cells == [b"a\1", b"a\1", b"b\1", b"b\1", b"c\1", b"c\1"]


def test_an_output_number_keeps_its_value_at_the_time_of_the_yield() -> None:
    def on_rows(p: Any, key: Any, rows: Any) -> Iterator[Row]:
        counter = p.kept.setdefault("counter", Counter())
        counter.n = ord(key[0])
        yield Row(k=key[0], n=counter)

    assert outputs(on_rows, "k string, n bigint") == [("a", 97), ("b", 98), ("c", 99)]


TEMPLATE = pd.DataFrame({"k": ["?"], "n": [0]})


def refilled(p: Any, key: Any, rows: Any) -> Iterator[pd.DataFrame]:
    template = p.kept.setdefault("template", TEMPLATE.copy())
    template.loc[0, "k"], template.loc[0, "n"] = key[0], ord(key[0])
    yield template


def changed_in_place(p: Any, key: Any, rows: Any) -> Iterator[pd.DataFrame]:
    frame = pd.DataFrame({"k": [key[0]], "n": [ord(key[0])]})
    yield frame
    frame["n"] -= 50
    frame["k"].values[:] = "x"


def views_of_one_frame(p: Any, key: Any, rows: Any) -> Iterator[pd.DataFrame]:
    whole = pd.DataFrame({"k": [key[0]] * 2, "n": [ord(key[0]), 0]})
    yield whole[:1]
    whole.loc[:, "n"] = -1
    yield whole[2:]


def over_a_buffer(p: Any, key: Any, rows: Any) -> Iterator[pd.DataFrame]:
    buffer = p.kept.setdefault("buffer", np.zeros((1, 1), np.int64))
    buffer[:] = ord(key[0])
    frame = pd.DataFrame(buffer, columns=["n"], copy=False)
    frame.insert(0, "k", key[0])
    yield frame


def over_memory_of_arrow(p: Any, key: Any, rows: Any) -> Iterator[pd.DataFrame]:
    buffer = p.kept.setdefault("buffer", np.zeros(1, np.int64))
    buffer[:] = ord(key[0])
    yield pd.DataFrame({"k": [key[0]], "n": pd.Series(pa.array(buffer), dtype=pd.ArrowDtype(pa.int64()))})


@pytest.mark.parametrize(
    "on_rows", [refilled, changed_in_place, views_of_one_frame, over_a_buffer, over_memory_of_arrow]
)
def test_a_frame_goes_out_as_it_was_when_it_was_yielded(on_rows: Any) -> None:
    assert outputs(on_rows, "k string, n bigint", api="pandas") == [("a", 97), ("b", 98), ("c", 99)]


def test_the_cells_of_a_frame_go_out_as_they_were_when_it_was_yielded() -> None:
    def on_rows(p: Any, key: Any, rows: Any) -> Iterator[pd.DataFrame]:
        cells = p.kept.setdefault("cells", ([], np.zeros(1, np.int64), bytearray(1)))
        cells[0].append(ord(key[0]))
        cells[1][0] = cells[2][0] = ord(key[0])
        yield pd.DataFrame({"k": [key[0]], "a": [cells[0]], "b": [cells[1]], "c": [cells[2]]})
        cells[1][0] = cells[2][0] = 0

    found = outputs(on_rows, "k string, a array<bigint>, b array<bigint>, c binary", api="pandas")
    assert found == [("a", [97], [97], b"a"), ("b", [97, 98], [98], b"b"), ("c", [97, 98, 99], [99], b"c")]


def test_states_store_and_return_copies_of_values() -> None:
    def on_rows(p: Any, key: Any, rows: Any) -> Iterator[Row]:
        numbers, raw = [1], bytearray(b"x")

        def refilled() -> Iterator[tuple[Any, Any]]:
            for n in (2, 3):
                numbers[0], raw[0] = n, ord("a") + n
                yield numbers, raw

        p.v.update((numbers, raw))
        p.l.appendValue((numbers, raw))
        p.m.updateValue((raw,), (numbers, raw))
        p.l.appendList(refilled())
        numbers.append(9)
        raw.append(9)
        for (a, _), *_ in (p.v.get(),), *zip(p.l.get()), (p.m.getValue((b"x",)),), *zip(p.m.values()):
            a.append(8)
        lists = [*p.l.get()]
        assert lists == [([1], b"x"), ([2], b"c"), ([3], b"d")] and p.v.get() == ([1], b"x")
        assert [*p.m.iterator()] == [((b"x",), ([1], b"x"))]
        p.l.put(refilled())
        assert [*p.l.get()] == [([2, 9], b"c\t"), ([3, 9], b"d\t")]
        yield Row(k=key[0])

    assert outputs(on_rows, "k string") == [("a",), ("b",), ("c",)]


def test_a_timer_gets_the_unchanged_key_after_an_earlier_handler_mutated_it() -> None:
    def on_rows(p: Any, key: Any, rows: Any) -> Iterator[Row]:
        for before_ms in (2, 1):  # One key's timers fire one after the other: no other key has a time between them.
            p.handle.registerTimer(p.now_ms - before_ms - 10 * key[0][0])
        key[0].append(5)
        yield from ()

    def on_timer(p: Any, key: Any) -> Iterator[Row]:
        buffer = p.kept.setdefault("buffer", bytearray(1))
        buffer[0] = key[0][0]
        yield Row(a=key[0], b=buffer)
        key[0].append(6)

    found = outputs(on_rows, "a array<bigint>, b binary", key=["a"], on_timer=on_timer, time_mode="processing")
    assert found == [([n, n], bytes([n])) for n in (0, 0, 1, 1, 2, 2)]
