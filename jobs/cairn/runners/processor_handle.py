"""PySpark's `StatefulProcessorHandle` and state classes, implemented over a shard's own state in the same process.

The classes inherit from PySpark's public classes, as those of PySpark's own test kit do. So type hints and `isinstance`
in user code hold, and a processor class that runs under Spark's streaming runs here unmodified.
"""

from __future__ import annotations

import operator
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import Any, TypeVar, cast

import pyarrow as pa
from pyspark.errors import PySparkRuntimeError
from pyspark.sql.streaming import stateful_processor as spark_api
from pyspark.sql.streaming.stateful_processor import TimerValues
from pyspark.sql.types import Row, StructType

from cairn.runners.arrow_states import ArrowListState, ArrowMapState, ArrowTimers
from state_backend.state import state_variables
from state_backend.state.entry_columns import Groups
from state_backend.state.layout import MAX_TIME_MS
from state_backend.state.list_columns import ListColumns
from state_backend.state.map_columns import MapColumns
from state_backend.state.shard_state import ShardState
from state_backend.state.state_columns import EntryColumns, ValueColumns
from state_backend.state.timer_columns import TimerColumns
from state_backend.state.timers import delete_timer, register_timer, timers
from state_backend.values.errors import StateSchemaError, StateTypeError, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.records import SchemaVersion, StateDescriptor, StateKind, TimeMode

ParseDdl = Callable[[str], StructType]


class HandleState(Enum):
    """The phase of a handle's life. Each method of the handle may be called in some phases only.

    Source: Spark's StatefulProcessorHandleState.
    """

    CREATED = "CREATED"
    INITIALIZED = "INITIALIZED"
    DATA_PROCESSED = "DATA_PROCESSED"
    TIMER_PROCESSED = "TIMER_PROCESSED"
    CLOSED = "CLOSED"


def row_maker(names: Sequence[str]) -> Callable[[Iterable[Any]], Row]:
    """Return a function that turns values into a PySpark row with these field names.

    The function does what `Row(**...)` does, without its cost. PySpark stores the names in every row and searches for a
    name at each access, which costs more than the state of a key. So this function makes one row class for the names.
    If a name is already a method of `Row`, the method wins, as in PySpark.
    """
    fields = namedtuple("fields", [f"f{i}" for i in range(len(names))])  # type: ignore[misc]
    accessors = {name: vars(fields)[f"f{i}"] for i, name in enumerate(names) if not hasattr(Row, name)}
    row_class = type("Row", (Row,), {**accessors, "__fields__": list(names), "__slots__": ()})
    new: Any = tuple.__new__
    return partial(new, row_class)


class RowValueState(state_variables.ValueState, spark_api.ValueState):
    """PySpark's `ValueState` over the shard's state. Its parameters have PySpark's names, which user code may use."""


class RowListState(state_variables.ListState, spark_api.ListState):
    """PySpark's `ListState` over the shard's state."""

    def put(self, newState: Any) -> None:
        state_variables.ListState.put(self, _not_empty(self._name, newState))

    # An alias with Spark's name. A wrapper method would cost one more call for each element.
    appendValue = state_variables.ListState.append_value

    def appendList(self, newState: Any) -> None:
        self.append_list(_not_empty(self._name, newState))


class RowMapState(state_variables.MapState, spark_api.MapState):
    """PySpark's `MapState` over the shard's state.

    As in Spark, `getValue` returns a `Row`, and the iterators yield plain tuples.
    """

    _as_row: Callable[[tuple[Any, ...]], Row]

    def _prepare(self, descriptor: StateDescriptor) -> None:
        super()._prepare(descriptor)
        self._as_row = row_maker(tuple(f["name"] for f in descriptor.versions[-1].value["fields"]))

    def getValue(self, key: Any) -> Row | None:
        value = self.get_value(key)
        return None if value is None else self._as_row(value)

    def keys(self) -> Iterator[tuple[Any, ...]]:
        return (key for key, _ in self.iterator())

    def values(self) -> Iterator[tuple[Any, ...]]:
        return (value for _, value in self.iterator())

    containsKey = state_variables.MapState.contains_key
    updateValue = state_variables.MapState.update_value
    removeKey = state_variables.MapState.remove_key


def _not_empty(name: str, values: Any) -> Iterator[Any]:
    """Yield the values for the list state `name`, and raise `StateTypeError` if there are none.

    The values are not collected in a list, because a generator may yield one object again and again with new content.
    """
    empty = True
    for value in values:
        empty = False
        yield value
    if empty:
        raise StateTypeError(f"list state {name!r}: an empty list can't be stored; call clear() instead")


def _milliseconds(expiry: Any) -> int:
    try:
        return operator.index(expiry)
    except TypeError:
        raise StateTypeError(
            f"a timer's expiry must be a whole number of milliseconds since the epoch; found {type(expiry).__name__} {expiry!r}"
        ) from None


State = TypeVar("State")


class ProcessorHandle(spark_api.StatefulProcessorHandle):
    """The handle that a processor's `init` receives in a shard task, in the row and the pandas API."""

    def __init__(self, shard: ShardState, time_mode: TimeMode) -> None:
        self._shard = shard
        self._time_mode = time_mode
        self._unplanned: dict[str, StateSchemaError] = {}
        self.state = HandleState.CREATED

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> RowValueState:
        """Return the value state of this name. Only `init` may call this method.

        The schema and the time to live are ignored here: the driver read them from its own call of `init` when it
        planned the interval.
        """
        return self._plan(RowValueState, stateName, "getValueState")

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> RowListState:
        return self._plan(RowListState, stateName, "getListState")

    def getMapState(
        self, stateName: str, userKeySchema: Any, valueSchema: Any, ttlDurationMs: int | None = None
    ) -> RowMapState:
        return self._plan(RowMapState, stateName, "getMapState")

    def deleteIfExists(self, stateName: str) -> None:
        """Allow the state of this name to be missing in this shard.

        The driver has already planned the deletion, see `DeclaringHandle.deleteIfExists`.
        """
        _check_state(self.state, "deleteIfExists", HandleState.CREATED)
        self._unplanned.pop(stateName, None)

    def end_init(self) -> None:
        """Mark the end of `init`. From then on, handlers may use timers."""
        for error in self._unplanned.values():
            raise error
        self.state = HandleState.INITIALIZED

    def _plan(self, make: Callable[[ShardState, str], State], name: str, call: str) -> State:
        _check_state(self.state, call, HandleState.CREATED)
        try:
            return make(self._shard, name)
        except StateSchemaError as error:
            # The missing state is allowed if `init` later passes its name to `deleteIfExists`. Otherwise `initialized`
            # raises this error.
            self._unplanned[name] = error
            return cast(State, _Placeholder(name, deleted=True))

    def registerTimer(self, expiryTimestampMs: int) -> None:
        self._check_timers("registerTimer")
        register_timer(self._shard, _milliseconds(expiryTimestampMs))

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        self._check_timers("deleteTimer")
        delete_timer(self._shard, _milliseconds(expiryTimestampMs))

    def listTimers(self) -> Iterator[int]:
        self._check_timers("listTimers")
        return timers(self._shard)

    def _check_timers(self, call: str) -> None:
        if self._time_mode == "none":
            raise PySparkRuntimeError(
                f"[STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_TIME_MODE] {call} needs "
                "time_mode 'processing' or 'event'; the pipeline has 'none'"
            )
        _check_state(self.state, call, HandleState.INITIALIZED, HandleState.DATA_PROCESSED)


class DeclaringHandle(spark_api.StatefulProcessorHandle):
    """The handle that a processor's `init` receives on the driver. It collects the declared states.

    A method such as `getValueState` returns a stand-in that can't be used. `init` runs again in every shard task and
    receives usable states there.
    """

    def __init__(self, parse_ddl: ParseDdl, time_mode: TimeMode) -> None:
        self._parse_ddl = parse_ddl
        self._time_mode = time_mode
        self.declared: dict[str, StateDescriptor] = {}
        self.deleted: list[str] = []

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> Any:
        return self._declare(stateName, "value", schema, None, ttlDurationMs)

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> Any:
        return self._declare(stateName, "list", schema, None, ttlDurationMs)

    def getMapState(
        self, stateName: str, userKeySchema: Any, valueSchema: Any, ttlDurationMs: int | None = None
    ) -> Any:
        return self._declare(stateName, "map", valueSchema, userKeySchema, ttlDurationMs)

    def deleteIfExists(self, stateName: str) -> None:
        """Plan that this interval deletes a state with all its entries.

        `init` may declare a state of the same name after this call. A state object from an earlier declaration can't be
        used.
        """
        self.declared.pop(stateName, None)
        self.deleted.append(stateName)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Raise an error, as Spark does, because `init` has no current key."""
        _check_state(HandleState.CREATED, "registerTimer", HandleState.INITIALIZED)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        _check_state(HandleState.CREATED, "deleteTimer", HandleState.INITIALIZED)

    def listTimers(self) -> Iterator[int]:
        _check_state(HandleState.CREATED, "listTimers", HandleState.INITIALIZED)
        return iter(())

    def _declare(self, name: str, kind: StateKind, schema: Any, user_key: Any, ttl_ms: int | None) -> _Placeholder:
        if not name or name != name.strip() or name == "default" or name.startswith("$"):
            raise StateSchemaError(
                f"{name!r} can't be the name of a state: a name is not empty, has no spaces around it, is not 'default' and does not begin with '$'"
            )
        if name in self.declared:
            raise StateSchemaError(f"state {name!r} is declared twice in init()")
        try:
            ttl_ms = None if ttl_ms is None else operator.index(ttl_ms)
        except TypeError:
            raise StateSchemaError(
                f"state {name!r}: ttlDurationMs is the {type(ttl_ms).__name__} {ttl_ms!r}; expected integer milliseconds"
            ) from None
        if ttl_ms is not None and ttl_ms > MAX_TIME_MS:
            raise StateSchemaError(f"state {name!r}: ttlDurationMs is {ttl_ms}; expected at most {MAX_TIME_MS}")
        if ttl_ms is not None and ttl_ms < 0:
            raise StateSchemaError(
                f"state {name!r}: ttlDurationMs is {ttl_ms}; it must not be negative (0 or None: no expiry)"
            )
        if ttl_ms and self._time_mode != "processing":
            raise StateSchemaError(
                f"state {name!r}: a time to live needs time_mode='processing', but the pipeline has time_mode={self._time_mode!r}"
            )
        version = SchemaVersion(
            version=1, value=self._schema(schema), user_key=None if user_key is None else self._schema(user_key)
        )
        self.declared[name] = StateDescriptor(
            name=name, kind=kind, state_id=len(self.declared) + 1, ttl_ms=ttl_ms or None, versions=(version,)
        )
        return _Placeholder(name)

    def _schema(self, schema: Any) -> dict[str, Any]:
        struct = schema if isinstance(schema, StructType) else self._parse_ddl(schema)
        value: dict[str, Any] = struct.jsonValue()
        return value


class _Placeholder:
    """A stand-in for a state on the driver, or for a state that `init` deleted after its declaration. A use raises."""

    def __init__(self, name: str, *, deleted: bool = False) -> None:
        self._name, self._deleted = name, deleted

    def __getattr__(self, method: str) -> Any:
        if self._deleted:
            raise PySparkRuntimeError(
                f"state {self._name!r}: {method} was called, but init() deleted the state with deleteIfExists after it had declared it; "
                "remove that call, or move it before the declaration"
            )
        raise UsageError(
            f"state {self._name!r}: {method} was called outside a handler, in init or close; only handlers may use state"
        )


@frozen
class Clock:
    """The times of an interval, as a processor sees them."""

    mode: TimeMode
    now: TimerValues  # The times that a handler of input rows gets.
    expired: TimerValues  # The times that a handler of expired timers gets.
    # A timer at or before this time fires in this interval, in milliseconds since the epoch.
    due_ms: int


@frozen
class InputColumns:
    """What the handle tells a vectorised processor about its input: schemas, special columns, and lateness."""

    key_schema: StructType
    input_schema: StructType
    event_time: str | None
    order_by: tuple[str, ...] = ()
    # Rows with this event time (in ms) or an earlier one are late; None if no row is late.
    late_ms: int | None = None


class ArrowDeclaringHandle(DeclaringHandle):
    """The handle that the `init` of a vectorised processor receives on the driver. It collects the declared states."""

    def __init__(self, parse_ddl: ParseDdl, time_mode: TimeMode, columns: InputColumns) -> None:
        super().__init__(parse_ddl, time_mode)
        self.order_by = columns.order_by
        self.key_schema = columns.key_schema
        self.input_schema = columns.input_schema
        self.event_time = columns.event_time
        self.time_mode = time_mode

    def registerTimer(self, keys: Any, expiryTimestampMs: Any = None) -> None:  # type: ignore[override]
        """Raise an error, as Spark does, because `init` has no current batch."""
        super().registerTimer(0)

    def deleteTimer(self, keys: Any, expiryTimestampMs: Any = None) -> None:  # type: ignore[override]
        super().deleteTimer(0)

    def listTimers(self, keys: Any = None) -> Any:
        return super().listTimers()


class ArrowHandle(ProcessorHandle):
    """The handle that the `init` of a vectorised processor receives in a shard task."""

    def __init__(self, shard: ShardState, clock: Clock, columns: InputColumns) -> None:
        super().__init__(shard, clock.mode)
        self.order_by = columns.order_by
        self.due_ms = clock.due_ms
        self.late_ms = columns.late_ms
        self.key_schema = columns.key_schema
        self.input_schema = columns.input_schema
        self.event_time = columns.event_time
        self.time_mode = clock.mode
        self.states: dict[str, ValueColumns] = {}
        self.timers = TimerColumns(shard)
        self._columns: list[EntryColumns] = [self.timers]
        self._timers = ArrowTimers(self.timers, "a timer")

    def begin(self, key_groups: Groups, keys: pa.Array) -> None:
        """Begin a call of the processor for `keys`. Lists, maps and timers act on these keys until `end`."""
        for columns in self._columns:
            columns.begin(key_groups, keys)

    def end(self) -> None:
        """End the call of the processor. Until the next `begin`, lists, maps and timers can't be used."""
        for columns in self._columns:
            columns.end()

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> Any:
        """Declare a value state. Its values come in `KeyedBatch.states`, and `BatchResult.states` may replace them.

        The method returns None, because a processor needs no object for a value state.
        """
        found = self._plan(
            lambda shard, name: ValueColumns(shard, shard.descriptor(name, "value")), stateName, "getValueState"
        )
        if isinstance(found, ValueColumns):
            self.states[stateName] = found

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> Any:
        return self._plan(partial(self._add_key, "list", ListColumns, ArrowListState), stateName, "getListState")

    def getMapState(
        self, stateName: str, userKeySchema: Any, valueSchema: Any, ttlDurationMs: int | None = None
    ) -> Any:
        return self._plan(partial(self._add_key, "map", MapColumns, ArrowMapState), stateName, "getMapState")

    def _add_key(self, kind: str, columns_of: Any, state_of: Any, shard: ShardState, name: str) -> Any:
        columns = columns_of(shard, shard.descriptor(name, kind))
        self._columns.append(columns)
        return state_of(columns, f"{kind} state {name!r}")

    def registerTimer(self, keys: Any, expiryTimestampMs: Any) -> None:  # type: ignore[override]
        self._check_timers("registerTimer")
        self._timers.register(keys, expiryTimestampMs)

    def deleteTimer(self, keys: Any, expiryTimestampMs: Any) -> None:  # type: ignore[override]
        """Delete a timer for each key in `keys` at its time. A timer that does not exist is ignored."""
        self._check_timers("deleteTimer")
        self._timers.delete(keys, expiryTimestampMs)

    def listTimers(self, keys: Any = None) -> Any:
        """Return the timers of `keys` (None: all) as `KeyedRows` with `expiry_ms`, ascending for each key."""
        self._check_timers("listTimers")
        return self._timers.times(keys)


def _check_state(state: HandleState, call: str, *allowed: HandleState) -> None:
    if state not in allowed:
        raise PySparkRuntimeError(
            f"[STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_HANDLE_STATE] {call} can't be called when the handle "
            f"is {state.value}; it may be {' or '.join(s.value for s in allowed)}"
        )
