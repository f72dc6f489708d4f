"""The processor's side of a shard without Spark: handle, states and the order of calls, as PySpark's contract has them."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from functools import partialmethod
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql.streaming import StatefulProcessor, stateful_processor
from pyspark.sql.types import LongType, Row, StringType, StructField, StructType, TimestampType

from cairn.rows.output_file import LocalParquet
from cairn.rows.routing import INPUT
from cairn.runners import processor_handle
from cairn.runners.keyed_runner import KeyedRunner
from cairn.runners.output_rows import OutputRows
from cairn.runners.pandas_frames import OutputFrames, frame_slices
from cairn.runners.processor_handle import Clock, DeclaringHandle, HandleState, ProcessorHandle, row_maker
from cairn.runners.user_code import UserCode
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.adapters.rocks import RocksStore
from state_backend.state.expiry import expire
from state_backend.state.shard_state import ShardState
from state_backend.values import errors
from state_backend.values.intervals import Interval
from state_backend.values.records import KeyGroupState, StateDescriptor
from tests.support.shards import KEYS

VALUE = StructType([StructField("n", LongType()), StructField("s", StringType())])
NUMBER = StructType([StructField("n", LongType())])
USER_KEY = StructType([StructField("u", StringType())])
OUTPUT = pa.schema([("k", pa.string()), ("n", pa.int64())])
DAY = Interval(datetime(2024, 1, 1, tzinfo=UTC), datetime(2024, 1, 2, tzinfo=UTC))


def parse(ddl: str) -> StructType:
    raise AssertionError(f"the tests declare schemas as StructType, not {ddl!r}")


class Calls(StatefulProcessor):
    """States v (n, s), number (n), l (n), m (u -> n); ``on_rows`` and ``on_timer`` are what a test wants done."""

    on_rows: Callable[..., Any] = staticmethod(lambda p, key, rows, tv: iter([]))
    on_timer: Callable[..., Any] = staticmethod(lambda p, key, tv, info: iter([]))
    ttl_ms: int | None = None

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.v = handle.getValueState("v", VALUE, self.ttl_ms)
        self.number = handle.getValueState("number", NUMBER)
        self.l = handle.getListState("l", NUMBER, self.ttl_ms)
        self.m = handle.getMapState("m", USER_KEY, NUMBER, self.ttl_ms)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        return self.on_rows(self, key, rows, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        return self.on_timer(self, key, timerValues, expiredTimerInfo)


class Collected(list[Any]):
    """Output in memory."""

    full = False
    add = list.append

    def settle(self) -> None:
        pass

    def flush(self) -> None:
        pass


class Shard:
    """Runs processors over one store, interval after interval."""

    def __init__(self, directory: Path) -> None:
        self.store = RocksStore(directory)
        self.key_groups: tuple[KeyGroupState, ...] = ()
        self.descriptors: tuple[StateDescriptor, ...] = ()

    def run(
        self,
        rows: Mapping[str | None, Sequence[Any]],
        on_rows: Callable[..., Any] = Calls.on_rows,
        on_timer: Callable[..., Any] = Calls.on_timer,
        *,
        now_ms: int = 1_000,
        time_mode: Any = "processing",
        processor: type[Calls] = Calls,
        output: Any = None,
        groups: Mapping[str | None, int] = {},
    ) -> list[Any]:
        class Described(processor):  # type: ignore[valid-type, misc]
            pass

        Described.on_rows, Described.on_timer = staticmethod(on_rows), staticmethod(on_timer)
        self.descriptors = declare(Described, time_mode)
        state = ShardState(
            self.store,
            key_groups=self.key_groups,
            descriptors=self.descriptors,
            now_ms=now_ms,
            struct_factory=row_maker,
        )
        output = Collected() if output is None else output
        timer_values = stateful_processor.TimerValues(now_ms, 0)
        runner = KeyedRunner(
            Described,
            state,
            KEYS,
            output,
            UserCode(DAY, "p"),
            Clock(mode=time_mode, now=timer_values, expired=timer_values, due_ms=now_ms),
        )
        # In the order of their key groups, which is 0 unless the test says otherwise.
        keyed = sorted((groups.get(key, 0), KEYS.encode((key,)), key, items) for key, items in rows.items())
        runner.process([(INPUT, group, (key,), encoded, iter(items)) for group, encoded, key, items in keyed])  # type: ignore[arg-type]
        runner.fire_timers()
        runner.close()
        expire(state)
        self.key_groups = state.key_group_states()
        return output  # type: ignore[no-any-return]

    def one(self, call: Callable[[Calls], Any], **settings: Any) -> Any:
        """What a call gives within key "k"."""

        def on_rows(p: Calls, *_: Any) -> Iterator[Any]:
            result = call(p)
            yield list(result) if isinstance(result, Iterator) else result

        return self.run({"k": [0]}, on_rows, **settings)[0]


def declare(processor: type, time_mode: Any = "processing") -> tuple[StateDescriptor, ...]:
    handle = DeclaringHandle(parse, time_mode)
    processor().init(handle)
    return tuple(handle.declared.values())


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    shard = Shard(tmp_path / "db")
    yield shard
    shard.store.close()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (stateful_processor.ValueState, processor_handle.RowValueState),
        (stateful_processor.ListState, processor_handle.RowListState),
        (stateful_processor.MapState, processor_handle.RowMapState),
        (stateful_processor.StatefulProcessorHandle, ProcessorHandle),
        (stateful_processor.StatefulProcessorHandle, DeclaringHandle),
    ],
)
def test_every_public_method_of_pyspark_is_overridden_with_the_same_parameters(theirs: type, ours: type) -> None:
    """By name, since user code may pass them so; and none is inherited, since PySpark's talk to a JVM that is not there."""
    assert issubclass(ours, theirs)
    methods = {name: f for name, f in vars(theirs).items() if callable(f) and not name.startswith("_")}
    assert methods
    for name, method in methods.items():
        own = getattr(ours, name)
        assert own is not method, name
        assert _parameters(own) == _parameters(method), name


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


def test_user_code_gets_the_public_classes(shard: Shard) -> None:
    def on_rows(p: Calls, key: Any, rows: Any, timer_values: Any) -> Iterator[Any]:
        yield [
            isinstance(value, getattr(stateful_processor, name))
            for value, name in (
                (p.handle, "StatefulProcessorHandle"),
                (p.v, "ValueState"),
                (p.l, "ListState"),
                (p.m, "MapState"),
                (timer_values, "TimerValues"),
            )
        ]

    assert shard.run({"k": [0]}, on_rows) == [[True] * 5]


def test_init_then_keys_then_timers_then_close(shard: Shard) -> None:
    """A generator is drained before the next key, also where the handler leaves rows unread; keys are tuples and, for
    timers, Rows; the timer's handler is called by keywords."""
    calls: list[Any] = []

    class Logged(Calls):
        def init(self, handle: Any) -> None:
            super().init(handle)
            if isinstance(handle, ProcessorHandle):
                calls.append("init")

        def close(self) -> None:
            calls.append("close")

    def on_rows(p: Calls, key: Any, rows: Any, timer_values: Any) -> Iterator[Any]:
        calls.append(("begin", type(key), key, next(rows)))
        p.handle.registerTimer(timer_values.getCurrentProcessingTimeInMs())
        yield "first"
        calls.append(("end", *key))

    def on_timer(p: Calls, key: Any, timer_values: Any, info: Any) -> Iterator[Any]:
        calls.append((isinstance(key, Row), key.k, info.getExpiryTimeInMs()))
        yield "timer"

    output = shard.run({"a": [1, 2, 3], None: [4]}, on_rows, on_timer, processor=Logged)
    assert calls == [
        "init",
        ("begin", tuple, (None,), 4),
        ("end", None),
        ("begin", tuple, ("a",), 1),
        ("end", "a"),
        (True, None, 1_000),
        (True, "a", 1_000),
        "close",
    ]
    assert output == ["first", "first", "timer", "timer"]


def test_timers_fire_in_an_interval_without_rows(shard: Shard) -> None:
    shard.run({"k": [0]}, lambda p, *_: iter([p.handle.registerTimer(2_000)]))
    fired = shard.run({}, on_timer=lambda p, key, tv, info: iter([(key, info.getExpiryTimeInMs())]), now_ms=2_000)
    assert fired == [(Row(k="k"), 2_000)]
    assert shard.key_groups == ()


def test_a_processor_sees_processing_time_and_watermark(shard: Shard) -> None:
    def on_rows(p: Calls, key: Any, rows: Any, timer_values: Any) -> Iterator[Any]:
        yield timer_values.getCurrentProcessingTimeInMs(), timer_values.getCurrentWatermarkInMs()

    assert shard.run({"k": [0]}, on_rows, now_ms=77) == [(77, 0)]


def test_timers_are_listed_in_order_and_unique(shard: Shard) -> None:
    def calls(p: Calls) -> list[int]:
        for at in (5_000, 3_000, 4_000, 3_000, -1):
            p.handle.registerTimer(at)
        for at in (4_000, 4_000, 9_999):
            p.handle.deleteTimer(at)
        return list(p.handle.listTimers())

    assert shard.one(calls) == [-1, 3_000, 5_000]


def registers(p: Calls, key: Any, rows: Any, timer_values: Any) -> Iterator[Any]:
    return iter([p.handle.registerTimer(at) for at in rows][:0])


def test_due_timers_fire_by_time_over_all_keys(shard: Shard) -> None:
    """Those up to now, past ones too, in the order of all key groups; each is listed while it fires, and gone afterwards."""

    def on_timer(p: Calls, key: Any, timer_values: Any, info: Any) -> Iterator[Any]:
        yield key.k, info.getExpiryTimeInMs(), list(p.handle.listTimers())

    fired = shard.run({"a": [1_000, 1_001, 10], "b": [500, -5]}, registers, on_timer, groups={"b": 1})
    assert fired == [
        ("b", -5, [-5, 500]),
        ("a", 10, [10, 1_000, 1_001]),
        ("b", 500, [500]),
        ("a", 1_000, [1_000, 1_001]),
    ]
    assert shard.run({}, on_timer=on_timer, now_ms=1_001) == [("a", 1_001, [1_001])]


def test_a_timer_registered_by_a_timer_handler_fires_in_the_next_interval(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at exactly the time up to which timers are due, and though later timers are read after the handler ran."""
    monkeypatch.setattr("state_backend.state.timers._DUE_TIMERS", 1)
    monkeypatch.setattr("state_backend.state.timers._NOTED_TIMERS", 0)
    monkeypatch.setattr(RocksStore, "chunks", partialmethod(RocksStore.chunks, rows=1))

    def on_timer(p: Calls, key: Any, timer_values: Any, info: Any) -> Iterator[Any]:
        if info.getExpiryTimeInMs() == 100:
            p.handle.deleteTimer(200)
            p.handle.registerTimer(150)
            (p.handle.deleteTimer if key.k == "deletes" else p.handle.registerTimer)(400)
        yield key.k, info.getExpiryTimeInMs()

    fired = shard.run({"k": [100, 200, 300], "deletes": [100, 400]}, registers, on_timer, now_ms=400)
    assert sorted(fired) == [("deletes", 100), ("k", 100), ("k", 300)]
    assert sorted(shard.run({}, on_timer=on_timer, now_ms=400)) == [("deletes", 150), ("k", 150), ("k", 400)]


def test_a_timer_registered_again_by_its_own_handler_is_still_deleted(shard: Shard) -> None:
    """As under Spark: it is still there in the handler, so registering is no change, and it is deleted afterwards."""

    def again(p: Calls, key: Any, timer_values: Any, info: Any) -> Iterator[Any]:
        p.handle.registerTimer(info.getExpiryTimeInMs())
        yield "fired"

    assert shard.run({"k": [0]}, lambda p, *_: iter([p.handle.registerTimer(5)]), again)[1:] == ["fired"]
    assert shard.run({}, on_timer=again) == []


# --- what may be called when ------------------------------------------------------------------------------------------------

_STATE_CALLS: dict[str, Callable[[Any], Any]] = {
    "getValueState": lambda handle: handle.getValueState("v", VALUE),
    "getListState": lambda handle: handle.getListState("l", NUMBER),
    "getMapState": lambda handle: handle.getMapState("m", USER_KEY, NUMBER),
    "deleteIfExists": lambda handle: handle.deleteIfExists("gone"),
}
_TIMER_CALLS: dict[str, Callable[[Any], Any]] = {
    "registerTimer": lambda handle: handle.registerTimer(1),
    "deleteTimer": lambda handle: handle.deleteTimer(1),
    "listTimers": lambda handle: handle.listTimers(),
}


@pytest.mark.parametrize("call", [*_STATE_CALLS, *_TIMER_CALLS])
@pytest.mark.parametrize("state", list(HandleState))
def test_a_handle_call_is_refused_outside_its_handle_states(shard: Shard, call: str, state: HandleState) -> None:
    allowed = {HandleState.CREATED} if call in _STATE_CALLS else {HandleState.INITIALIZED, HandleState.DATA_PROCESSED}
    shard_state = ShardState(shard.store, key_groups=(), descriptors=declare(Calls), now_ms=0)
    shard_state.set_key(0, KEYS.encode(("k",)))
    handle = ProcessorHandle(shard_state, "processing")
    handle.state = state
    run = (_STATE_CALLS | _TIMER_CALLS)[call]
    if state in allowed:
        run(handle)
        return
    with pytest.raises(PySparkRuntimeError, match=rf"INVALID_HANDLE_STATE\] {call} .* is {state.value}"):
        run(handle)


@pytest.mark.parametrize("call", _TIMER_CALLS)
def test_timer_calls_are_refused_in_time_mode_none_and_in_init(shard: Shard, call: str) -> None:
    with pytest.raises(errors.ProcessorError, match=rf"INVALID_TIME_MODE\] {call} needs"):
        shard.one(lambda p: _TIMER_CALLS[call](p.handle), time_mode="none")
    with pytest.raises(PySparkRuntimeError, match="INVALID_HANDLE_STATE"):
        _TIMER_CALLS[call](DeclaringHandle(parse, "processing"))


def test_state_outside_a_key_is_refused(shard: Shard) -> None:
    class Closing(Calls):
        def close(self) -> None:
            if isinstance(self.handle, ProcessorHandle):
                self.v.get()

    with pytest.raises(errors.ProcessorError, match=r"close, interval .*state 'v' is used outside a key"):
        shard.run({"k": [0]}, processor=Closing)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        *((name, "can't be the name of a state") for name in ("", " w", "w ", "default", "$w")),
        ("v", "'v' is declared twice"),
    ],
)
def test_an_empty_padded_reserved_or_second_state_name_is_refused(name: str, says: str) -> None:
    handle = DeclaringHandle(parse, "processing")
    handle.getMapState("v", USER_KEY, VALUE)
    with pytest.raises(errors.StateSchemaError, match=says):
        handle.getValueState(name, VALUE)


@pytest.mark.parametrize("time_mode", ["none", "event"])
def test_expiry_needs_processing_time(time_mode: Any) -> None:
    with pytest.raises(errors.StateSchemaError, match=f"a time to live needs time_mode='processing', .*='{time_mode}'"):
        DeclaringHandle(parse, time_mode).getListState("l", VALUE, 1)


def test_a_negative_or_non_integer_ttl_is_refused_and_zero_means_no_ttl() -> None:
    handle = DeclaringHandle(parse, "processing")
    for wrong in (1000.0, "1000", 1 << 63):
        with pytest.raises(errors.StateSchemaError, match=r"state 'one': ttlDurationMs is .*(1000|at most)"):
            handle.getValueState("one", VALUE, ttlDurationMs=wrong)
    with pytest.raises(errors.StateSchemaError, match="ttlDurationMs is -1; it must not be negative"):
        handle.getValueState("v", VALUE, -1)
    handle.getValueState("zero", VALUE, 0)
    handle.getValueState("one", VALUE, ttlDurationMs=1)
    assert [d.ttl_ms for d in handle.declared.values()] == [None, 1]


def test_a_state_that_was_not_declared_on_the_driver_is_refused(shard: Shard) -> None:
    class Varying(Calls):
        def init(self, handle: Any) -> None:
            super().init(handle)
            if isinstance(handle, ProcessorHandle):
                handle.getValueState("surprise", VALUE)

    with pytest.raises(
        errors.ProcessorError, match=r"init, interval .*did not declare value state 'surprise' on the driver"
    ):
        shard.run({"k": [0]}, processor=Varying)


# --- values -----------------------------------------------------------------------------------------------------------------

_MISTAKES: list[tuple[Callable[[Calls], Any], str]] = [
    (lambda p: p.l.put([]), "list state 'l': an empty list can't be stored"),
    (lambda p: p.l.appendList([]), "list state 'l': an empty list can't be stored"),
    (lambda p: p.v.update(None), "state 'v'"),
    (lambda p: p.m.updateValue(("u",), None), "state 'm'"),
    (lambda p: p.v.update(5), "state 'v'"),
    (lambda p: p.l.appendValue(5), "state 'l'"),
    (lambda p: p.number.update((1, 2)), "state 'number'"),
    (lambda p: p.number.update(()), "state 'number'"),
    (lambda p: p.number.update(("x",)), "state 'number'.*'n'.*bigint.*str"),
    (lambda p: p.number.update((1.5,)), "state 'number'.*'n'.*bigint.*float"),
    (lambda p: p.number.update((2**63,)), "state 'number'.*'n'.*bigint"),
    (lambda p: p.v.update((1, b"2")), "state 'v'.*'s'.*string.*bytes"),
    (lambda p: p.m.updateValue((b"1",), (1,)), "user key of state 'm'.*'u'.*string.*bytes"),
    (lambda p: p.m.getValue("uv"), "user key of state 'm'"),
    (lambda p: p.m.containsKey(None), "user key of state 'm'"),
]


@pytest.mark.parametrize(("mistake", "message"), _MISTAKES, ids=[str(n) for n in range(len(_MISTAKES))])
def test_a_state_value_of_a_wrong_type_is_refused_by_state_name_and_not_stored(
    shard: Shard, mistake: Callable[[Calls], Any], message: str
) -> None:
    """Spark stores NULL silently for some of these. All are TypeErrors, as the others are under Spark."""

    def call(p: Calls) -> Any:
        with pytest.raises(errors.StateTypeError, match=message) as raised:
            mistake(p)
        return isinstance(raised.value, TypeError), p.v.exists(), p.number.exists(), p.l.exists(), p.m.exists()

    assert shard.one(call) == (True, False, False, False, False)
    assert shard.key_groups == ()


def test_mistakes_name_key_and_interval(shard: Shard) -> None:
    with pytest.raises(
        errors.ProcessorError, match=r"handleInputRows, key \('k',\), interval \[2024-01-01T00:00:00Z, .*\): .*'v'"
    ):
        shard.one(lambda p: p.v.update(5))


@pytest.mark.parametrize(
    "value",
    [(1, "x"), [1, "x"], Row(n=1, s="x"), {"s": "x", "n": 1}, (np.int64(1), np.str_("x")), (np.uint8(1), "x")],
    ids=lambda v: type(v).__name__,
)
def test_a_state_value_may_be_a_tuple_list_row_dict_or_numpy_values(shard: Shard, value: Any) -> None:
    got = shard.one(lambda p: (p.v.update(newValue=value), p.v.get())[1])
    assert got == (1, "x")
    assert [type(got), *map(type, got)] == [tuple, int, str]


def test_nulls_are_values(shard: Shard) -> None:
    def call(p: Calls) -> Any:
        p.number.update((None,))
        p.m.updateValue((None,), (None,))
        return p.number.exists(), p.number.get(), p.m.containsKey((None,)), p.m.getValue((None,))

    assert shard.one(call) == (True, (None,), True, Row(n=None))


def test_map_iterators_yield_the_entries_of_their_start_in_key_order(shard: Shard) -> None:
    """``getValue`` a Row, iterators tuples, in the order of the user keys, over what was there when they began."""

    def call(p: Calls) -> Any:
        for u, n in (("b", 2), ("", 0), ("a", 1)):
            p.m.updateValue((u,), (n,))
        seen = []
        for key, _ in p.m.iterator():
            seen.append(key)
            p.m.removeKey(key)
            p.m.updateValue((key[0] + "z",), (9,))
        return p.m.getValue(("az",)), type(next(p.m.values())), seen, list(p.m.iterator())

    value, kind, seen, after = shard.one(call)
    assert (value, value.n, kind) == (Row(n=9), 9, tuple)
    assert seen == [("",), ("a",), ("b",)]
    assert after == [(("az",), (9,)), (("bz",), (9,)), (("z",), (9,))]


def test_state_is_separate_for_each_key_and_lasts_to_the_next_interval(shard: Shard) -> None:
    def write(p: Calls, key: Any, rows: Any, timer_values: Any) -> Iterator[Any]:
        p.v.update((len(key[0] or ""), key[0]))
        p.l.appendList([(n,) for n in rows])
        return iter([])

    def read(p: Calls, *_: Any) -> Iterator[Any]:
        yield p.v.get(), list(p.l.get())

    shard.run({"a": [1, 2], "ab": [3], None: [4]}, write)
    assert shard.run({"ab": [0], None: [0], "none": [0], "a": [0]}, read) == [
        ((0, None), [(4,)]),
        ((1, "a"), [(1,), (2,)]),
        ((2, "ab"), [(3,)]),
        (None, []),
    ]


def test_expiry_goes_by_the_intervals_clock(shard: Shard) -> None:
    """Visible until now reaches write time + ttl; each list element and map entry by itself; then gone from the files."""

    class Brief(Calls):
        ttl_ms = 100

    def read(p: Calls) -> Any:
        return p.v.get(), p.l.exists(), list(p.l.get()), sorted(p.m.keys())

    def write(p: Calls) -> Any:
        p.v.update((1, "x"))
        p.l.appendValue((1,))
        p.m.updateValue(("u",), (1,))
        return read(p)

    def write_more(p: Calls) -> Any:
        p.l.appendValue((2,))
        p.m.updateValue(("w",), (2,))
        return read(p)

    assert shard.one(write, now_ms=1_000, processor=Brief) == ((1, "x"), True, [(1,)], [("u",)])
    assert shard.one(write_more, now_ms=1_099, processor=Brief) == ((1, "x"), True, [(1,), (2,)], [("u",), ("w",)])
    assert shard.one(read, now_ms=1_100, processor=Brief) == (None, True, [(2,)], [("w",)])
    assert shard.one(read, now_ms=1_199, processor=Brief) == (None, False, [], [])
    assert shard.key_groups == ()


# --- output -----------------------------------------------------------------------------------------------------------------


def rows_to(tmp_path: Path) -> OutputRows:
    return OutputRows(LocalParquet(OUTPUT, tmp_path / "rows.parquet"))


def test_changes_of_a_handler_to_its_frame_do_not_reach_other_keys() -> None:
    columns = {"n": pa.array([1, 2, 3, 4]), "m": pa.array([5, 6, 7, 8]), "s": pa.array(["a", "b", "c", None])}
    slices = frame_slices("UTC")(pa.StructArray.from_arrays([*columns.values()], [*columns]))
    (first,), (second,) = slices(0, 2), slices(2, 4)
    pd.testing.assert_frame_equal(first, pd.DataFrame({"n": [1, 2], "m": [5, 6], "s": ["a", "b"]}))
    first.index.name = first.columns.name = "named"
    first.loc[0, "n"] = 9
    first["m"] += 1
    first["s"].values[:] = "z"
    first["more"] = 1
    expected = pd.DataFrame({"n": [3, 4], "m": [7, 8], "s": ["c", None]})
    pd.testing.assert_frame_equal(second, expected)
    second.columns.values[0] = "renamed"
    (third,) = slices(2, 4)
    pd.testing.assert_frame_equal(third, expected)
    assert first["n"].tolist() == [9, 2] and list(second.columns) == ["renamed", "m", "s"]


def frames_to(tmp_path: Path) -> OutputFrames:
    schema = StructType([StructField("k", StringType()), StructField("n", LongType())])
    return OutputFrames(LocalParquet(OUTPUT, tmp_path / "rows.parquet"), schema, "UTC")


def test_a_time_without_zone_is_local_time_also_beside_an_instant_beyond_the_range_of_pandas(tmp_path: Path) -> None:
    schema = StructType([StructField("v", TimestampType())])
    file = LocalParquet(pa.schema([pa.field("v", pa.timestamp("us", "UTC"))]), tmp_path / "rows.parquet")
    output = OutputFrames(file, schema, "America/New_York")
    times = [datetime(2024, 1, 1, 12), None, datetime(2024, 11, 3, 1), datetime(9999, 1, 1)]
    for some in (times[:3], times):
        output.add(pd.DataFrame({"v": pd.Series(some, dtype=object)}))
    output.flush()
    file.finish(MemoryStorage(), "rows.parquet")
    hours = [f"{at:%dT%H}" if at else None for at in pq.read_table(tmp_path / "rows.parquet")["v"].to_pylist()]
    assert hours == ["01T17", None, "03T06", "01T17", None, "03T06", "01T05"]


def test_of_two_columns_with_one_name_the_first_goes_out(tmp_path: Path) -> None:
    """As under Spark; the frame was refused with an error of pandas."""
    output = frames_to(tmp_path)
    frame = pd.DataFrame([["a", 1, 2], ["b", 3, 4]], columns=["k", "n", "n"])
    output.add(frame)
    output.flush()
    output._file.finish(MemoryStorage(), "rows.parquet")
    assert pq.read_table(tmp_path / "rows.parquet")["n"].to_pylist() == [1, 3]


def test_a_method_of_row_wins_over_a_field_of_its_name_as_under_spark() -> None:
    made, spark = row_maker(["n", "count", "asDict"])((1, 2, 3)), Row(n=1, count=2, asDict=3)
    assert made == spark and (made.n, made["count"]) == (spark.n, spark["count"]) == (1, 2)
    assert made.asDict() == spark.asDict() == {"n": 1, "count": 2, "asDict": 3}
    assert made.count(1) == spark.count(1) == 1


def test_output_rows_are_matched_to_columns_by_name(tmp_path: Path) -> None:
    file = LocalParquet(OUTPUT, tmp_path / "rows.parquet")
    output = OutputRows(file)
    for row in (Row(k="a", n=1), Row(n=2, k="b"), Row(k="c"), Row(n=3)):
        output.add(row)
    output.flush()
    file.finish(MemoryStorage(), "rows.parquet")
    assert pq.read_table(tmp_path / "rows.parquet").to_pylist() == [
        {"k": "a", "n": 1},
        {"k": "b", "n": 2},
        {"k": "c", "n": None},
        {"k": None, "n": 3},
    ]


INSTANT = pa.timestamp("us", "UTC")


@pytest.mark.parametrize(
    ("data_type", "value", "expected"),
    [
        (INSTANT, datetime(2013, 7, 1, 2), datetime(2013, 7, 1, tzinfo=UTC)),
        (INSTANT, datetime(2013, 7, 1, tzinfo=UTC), datetime(2013, 7, 1, tzinfo=UTC)),
        (pa.list_(INSTANT), [datetime(2013, 7, 1, 2), None], [datetime(2013, 7, 1, tzinfo=UTC), None]),
        (
            pa.struct([("at", INSTANT), ("n", pa.int64())]),
            {"at": datetime(2013, 7, 1, 2), "n": 1},
            {"at": datetime(2013, 7, 1, tzinfo=UTC), "n": 1},
        ),
        (pa.list_(INSTANT), np.array([datetime(2013, 7, 1, 2)]), [datetime(2013, 7, 1, tzinfo=UTC)]),
        (
            pa.struct([("n", pa.int64()), ("at", INSTANT)]),
            (1, datetime(2013, 7, 1, 2)),
            {"n": 1, "at": datetime(2013, 7, 1, tzinfo=UTC)},
        ),
        (
            pa.map_(pa.string(), INSTANT),
            {"a": datetime(2013, 7, 1, 2), "b": None},
            [("a", datetime(2013, 7, 1, tzinfo=UTC)), ("b", None)],
        ),
        *((of, None, None) for of in (INSTANT, pa.list_(INSTANT), pa.struct([("at", INSTANT)]))),
        (pa.map_(pa.string(), INSTANT), None, None),
    ],
)
def test_a_datetime_without_a_zone_goes_out_in_the_sessions_zone(
    tmp_path: Path, data_type: pa.DataType, value: Any, expected: Any
) -> None:
    file = LocalParquet(pa.schema([("c", data_type)]), tmp_path / "rows.parquet")
    output = OutputRows(file, ZoneInfo("Europe/Berlin"))
    output.add(Row(c=value))
    output.flush()
    file.finish(MemoryStorage(), "rows.parquet")
    assert pq.read_table(tmp_path / "rows.parquet")["c"].to_pylist() == [expected]


def test_texts_have_dictionaries_in_an_output_file_and_numbers_have_none(tmp_path: Path) -> None:
    fields = [("day", pa.date32()), ("a.b", pa.string()), ("d", pa.decimal128(9, 2)), ("raw", pa.binary())]
    nested = pa.struct([("n", pa.int64())])
    for name, schema in (("flat", pa.schema(fields)), ("nested", pa.schema([*fields, ("s", nested)]))):
        file = LocalParquet(schema, tmp_path / name)
        row = {"day": DAY.start.date(), "a.b": "x", "d": Decimal("1.50"), "raw": b"", "s": {"n": 1}}
        file.write(pa.RecordBatch.from_pylist([row] * 3, schema))
        file.finish(MemoryStorage(), name)
        group = pq.ParquetFile(tmp_path / name).metadata.row_group(0)
        columns = map(group.column, range(group.num_columns))
        found = {c.path_in_schema: "RLE_DICTIONARY" in c.encodings for c in columns}
        known = {"day": False, "a.b": True, "d": False, "raw": True}
        # Of a nested column the leaves would have to be named.
        assert found == (known if name == "flat" else dict.fromkeys([*known, "s.n"], True))


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (None, "handleInputRows returned None; it must return an iterator"),
        ([("a", 1)], r"yielded a tuple: \('a', 1\); expected pyspark.sql.Row"),
        ([{"k": "a", "n": 1}], "yielded a dict: .*; expected pyspark.sql.Row"),
        ([Row("a", 1)], "which has no field names"),
        (
            [Row(k="a", nn=1)],
            "(?s)yielded a row with 'nn', which output_schema lacks\noutput_schema has k, n; the row has no value for n\n"
            "Did you mean 'n' instead of 'nn'",
        ),
        (
            [Row(k="a", n=1, more=3)],
            "a row with 'more', which output_schema lacks\noutput_schema has k, n\nAdd the field to output_schema with its type, or",
        ),
        ([Row(k=5, n=1)], "output column 'k' is string"),
        ([Row(k="a", n="x")], "output column 'n' is int64"),
        ([Row(k="a", n=2**63)], "output column 'n' is int64"),
    ],
)
def test_output_rows_that_do_not_fit_are_refused(shard: Shard, tmp_path: Path, results: Any, message: str) -> None:
    with pytest.raises(errors.ProcessorError, match=message):
        shard.run({"k": [0]}, lambda *_: results, output=rows_to(tmp_path))


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([Row(k="a", n=1)], "yielded a Row; with api='pandas' it must yield pandas.DataFrame"),
        ([pd.DataFrame({"n": [1], "key": ["a"]})], "lacks the output column k; it has n, key"),
        ([pd.DataFrame([[1]])], "has 1 columns without names; the output has 2: k, n"),
        ([pd.DataFrame({"n": ["x"], "k": ["a"]})], "output column 'n' is int64"),
        # Of pandas' own arrays, which only Spark's conversion knows.
        (
            [pd.DataFrame({"n": pd.array(["x"], dtype="string"), "k": ["a"]})],
            "output column 'n' is int64, and a value does not fit",
        ),
    ],
)
def test_output_frames_that_do_not_fit_are_refused(shard: Shard, tmp_path: Path, results: Any, message: str) -> None:
    with pytest.raises(errors.ProcessorError, match=message):
        shard.run({"k": [0]}, lambda *_: results, output=frames_to(tmp_path))


def test_a_handler_with_other_parameter_names_is_refused(shard: Shard) -> None:
    """PySpark passes them by name."""

    class Renamed(Calls):
        def handleExpiredTimer(self, key: Any, timer_values: Any, info: Any) -> Any:
            return iter([])

    with pytest.raises(
        errors.ProcessorError, match=r"handleExpiredTimer, key .*TypeError.*unexpected keyword argument"
    ):
        shard.run({"k": [0]}, lambda p, *_: iter([p.handle.registerTimer(1)]), processor=Renamed)


# --- what user code raises --------------------------------------------------------------------------------------------------


class Silent(Exception):
    def __str__(self) -> str:
        raise KeyError


@pytest.mark.parametrize(
    "error", [errors.InvariantViolated("x"), errors.CorruptFile("x"), errors.StorageUnavailable("x")]
)
def test_internal_and_storage_errors_in_a_handler_are_raised_unwrapped(shard: Shard, error: errors.CairnError) -> None:
    def on_rows(p: Calls, *_: Any) -> Any:
        raise error

    with pytest.raises(type(error)) as raised:
        shard.run({"k": [0]}, on_rows)
    assert raised.value is error


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (errors.UsageError("bad"), "bad"),
        (SystemExit(3), "SystemExit: 3; a processor must not end its process: raise an exception instead"),
        (KeyboardInterrupt(), "KeyboardInterrupt: ; a processor must not end"),
        (GeneratorExit("x"), "GeneratorExit: x; a processor must not end"),
        (StopIteration("x"), "StopIteration: x"),
        (Silent(), "Silent: <its __str__ raised KeyError>"),
        (ValueError("a \udc80"), r"ValueError: a \udc80"),
    ],
)
@pytest.mark.parametrize("call", ["init", "handleInputRows", "handleExpiredTimer"])
def test_user_exceptions_name_call_key_and_interval(shard: Shard, call: str, error: BaseException, says: str) -> None:
    class Raising(Calls):
        def init(self, handle: Any) -> None:
            super().init(handle)
            if call == "init" and isinstance(handle, ProcessorHandle):
                raise error

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    on_rows: Any = fail if call != "handleExpiredTimer" else lambda p, *_: iter([p.handle.registerTimer(0)])
    with pytest.raises(errors.ProcessorError) as raised:
        shard.run({"k": [0]}, on_rows, fail, processor=Raising)
    where = "init" if call == "init" else f"{call}, key ('k',)"
    assert str(raised.value).startswith(
        f"pipeline 'p': {where}, interval [2024-01-01T00:00:00Z, 2024-01-02T00:00:00Z): {says}"
    )
    "".join(traceback.format_exception(raised.value)).encode()  # as Spark's worker sends it


def test_a_timer_at_a_part_of_a_millisecond_is_refused(shard: Shard) -> None:
    with pytest.raises(errors.ProcessorError, match=r"a whole number of milliseconds since the epoch; found float 1.5"):
        shard.one(lambda p: p.handle.registerTimer(1.5))


@pytest.mark.parametrize("method", ["get", "update", "exists"])
def test_state_in_init_is_refused_on_the_driver(method: str) -> None:
    state = DeclaringHandle(parse, "processing").getValueState("v", VALUE)
    with pytest.raises(errors.UsageError, match=rf"state 'v': {method} was called outside a handler, in init or close"):
        getattr(state, method)()
