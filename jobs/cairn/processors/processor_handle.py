"""PySpark's ``StatefulProcessorHandle`` and states over a shard's own state, in process.

Subclasses PySpark's public classes, as its own test kit does, so that type hints and ``isinstance`` in user code hold. The
processor class is the one that runs under Spark streaming, unmodified.
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
from pyspark.sql.types import Row, StructType

from cairn.processors.arrow_states import ArrowListState, ArrowMapState, ArrowTimers
from state_backend.state import state_variables
from state_backend.state.entry_columns import Groups
from state_backend.state.layout import MAX_TIME_MS
from state_backend.state.list_columns import ListColumns
from state_backend.state.map_columns import MapColumns
from state_backend.state.shard_state import ShardState
from state_backend.state.state_columns import EntryColumns
from state_backend.state.timer_columns import TimerColumns
from state_backend.state.value_columns import ValueColumns
from state_backend.values.errors import StateSchemaError, StateTypeError, UsageError
from state_backend.values.records import SchemaVersion, StateDescriptor, StateKind, TimeMode

ParseDdl = Callable[[str], StructType]


class HandleState(Enum):
    """Where in its life a handle is; what may be called depends on it. Source: Spark's StatefulProcessorHandleState."""

    CREATED = "CREATED"
    INITIALIZED = "INITIALIZED"
    DATA_PROCESSED = "DATA_PROCESSED"
    TIMER_PROCESSED = "TIMER_PROCESSED"
    CLOSED = "CLOSED"


def row_maker(names: Sequence[str]) -> Callable[[Iterable[Any]], Row]:
    """A function from values to PySpark rows with these field names; what ``Row(**...)`` does, without its cost.

    The rows' class is made for the names: PySpark keeps the names in every row and looks for a field by name at every
    access, which costs more than the state of a key. Where a name is already a method of rows, the method wins, as there.
    """
    fields = namedtuple("fields", [f"f{i}" for i in range(len(names))])  # type: ignore[misc]
    accessors = {name: vars(fields)[f"f{i}"] for i, name in enumerate(names) if not hasattr(Row, name)}
    row_class = type("Row", (Row,), {**accessors, "__fields__": list(names), "__slots__": ()})
    new: Any = tuple.__new__
    return partial(new, row_class)


class RowValueState(state_variables.ValueState, spark_api.ValueState):
    """PySpark's ``ValueState``. Parameters have PySpark's names, here and below: they may be passed by name."""


class RowListState(state_variables.ListState, spark_api.ListState):
    """PySpark's ``ListState``."""

    def put(self, newState: Any) -> None:
        """As Spark's: replaces the list; an empty one is refused."""
        state_variables.ListState.put(self, _not_empty(self._name, newState))

    # As Spark's; not one call more for each element.
    appendValue = state_variables.ListState.append_value

    def appendList(self, newState: Any) -> None:
        """As Spark's: an empty list is refused."""
        self.append_list(_not_empty(self._name, newState))


class RowMapState(state_variables.MapState, spark_api.MapState):
    """PySpark's ``MapState``. ``getValue`` gives a Row and the iterators plain tuples, as Spark's do."""

    _as_row: Callable[[tuple[Any, ...]], Row]

    def _prepare(self, descriptor: StateDescriptor) -> None:
        super()._prepare(descriptor)
        self._as_row = row_maker(tuple(f["name"] for f in descriptor.versions[-1].value["fields"]))

    def getValue(self, key: Any) -> Row | None:
        """As Spark's: a Row, or None."""
        value = self.get_value(key)
        return None if value is None else self._as_row(value)

    def keys(self) -> Iterator[tuple[Any, ...]]:
        """As Spark's."""
        return (key for key, _ in self.iterator())

    def values(self) -> Iterator[tuple[Any, ...]]:
        """As Spark's."""
        return (value for _, value in self.iterator())

    containsKey = state_variables.MapState.contains_key
    updateValue = state_variables.MapState.update_value
    removeKey = state_variables.MapState.remove_key


def _not_empty(name: str, values: Any) -> Iterator[Any]:
    """The values, one at a time: a generator may refill one object for all of them. Raises: StateTypeError if there is none."""
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
            f"a timer's expiry is a whole number of milliseconds since the epoch; found {type(expiry).__name__} {expiry!r}"
        ) from None


State = TypeVar("State")


class ProcessorHandle(spark_api.StatefulProcessorHandle):
    """The handle that ``init`` gets in a shard task."""

    def __init__(self, shard: ShardState, time_mode: TimeMode) -> None:
        self._shard = shard
        self._time_mode = time_mode
        self._unplanned: dict[str, StateSchemaError] = {}
        self.state = HandleState.CREATED

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> RowValueState:
        """As Spark's, in ``init`` only. Schema and ttl were read when the interval was planned."""
        _check_state(self.state, "getValueState", HandleState.CREATED)
        return self._planned(RowValueState, stateName)

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> RowListState:
        """As Spark's, in ``init`` only."""
        _check_state(self.state, "getListState", HandleState.CREATED)
        return self._planned(RowListState, stateName)

    def getMapState(
        self, stateName: str, userKeySchema: Any, valueSchema: Any, ttlDurationMs: int | None = None
    ) -> RowMapState:
        """As Spark's, in ``init`` only."""
        _check_state(self.state, "getMapState", HandleState.CREATED)
        return self._planned(RowMapState, stateName)

    def deleteIfExists(self, stateName: str) -> None:
        """The driver has planned it already; see ``DeclaringHandle``."""
        _check_state(self.state, "deleteIfExists", HandleState.CREATED)
        self._unplanned.pop(stateName, None)

    def initialized(self) -> None:
        """``init`` is over. Raises: StateSchemaError for a state that it declared here and not on the driver."""
        for error in self._unplanned.values():
            raise error
        self.state = HandleState.INITIALIZED

    def _planned(self, make: Callable[[ShardState, str], State], name: str) -> State:
        try:
            return make(self._shard, name)
        except StateSchemaError as error:
            # Right if ``init`` goes on to delete it.
            self._unplanned[name] = error
            return cast(State, _Deleted(name))

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """As Spark's. Raises: in time mode "none", and outside handlers."""
        self._check_timers("registerTimer")
        self._shard.register_timer(_milliseconds(expiryTimestampMs))

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        """As Spark's. Raises: in time mode "none", and outside handlers."""
        self._check_timers("deleteTimer")
        self._shard.delete_timer(_milliseconds(expiryTimestampMs))

    def listTimers(self) -> Iterator[int]:
        """As Spark's: the current key's, ascending, in milliseconds since the epoch."""
        self._check_timers("listTimers")
        return self._shard.timers()

    def _check_timers(self, call: str) -> None:
        if self._time_mode == "none":
            raise PySparkRuntimeError(
                f"[STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_TIME_MODE] {call} needs "
                "time_mode 'processing' or 'event'; the pipeline has 'none'"
            )
        _check_state(self.state, call, HandleState.INITIALIZED, HandleState.DATA_PROCESSED)


class DeclaringHandle(spark_api.StatefulProcessorHandle):
    """The handle that ``init`` gets on the driver, to learn which states there are. The states that it hands out can't be
    used: ``init`` runs again in every shard task."""

    def __init__(self, parse_ddl: ParseDdl, time_mode: TimeMode) -> None:
        self._parse_ddl = parse_ddl
        self._time_mode = time_mode
        self.declared: dict[str, StateDescriptor] = {}
        self.deleted: list[str] = []

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> Any:
        """Notes the declaration. Raises: UsageError for a name or schema that can't be a state's."""
        return self._declare(stateName, "value", schema, None, ttlDurationMs)

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> Any:
        """Notes the declaration; raises as for values."""
        return self._declare(stateName, "list", schema, None, ttlDurationMs)

    def getMapState(
        self, stateName: str, userKeySchema: Any, valueSchema: Any, ttlDurationMs: int | None = None
    ) -> Any:
        """Notes the declaration; raises as for values."""
        return self._declare(stateName, "map", valueSchema, userKeySchema, ttlDurationMs)

    def deleteIfExists(self, stateName: str) -> None:
        """The state goes, with all its entries, when the interval runs. It may be declared anew after this call; one that was
        declared before it can't be used."""
        self.declared.pop(stateName, None)
        self.deleted.append(stateName)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Raises as Spark does: there is no key in ``init``."""
        _check_state(HandleState.CREATED, "registerTimer", HandleState.INITIALIZED)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        """Raises as Spark does: there is no key in ``init``."""
        _check_state(HandleState.CREATED, "deleteTimer", HandleState.INITIALIZED)

    def listTimers(self) -> Iterator[int]:
        """Raises as Spark does: there is no key in ``init``."""
        _check_state(HandleState.CREATED, "listTimers", HandleState.INITIALIZED)
        return iter(())

    def _declare(self, name: str, kind: StateKind, schema: Any, user_key: Any, ttl_ms: int | None) -> _Declared:
        if not name or name != name.strip() or name == "default" or name.startswith("$"):
            raise StateSchemaError(
                f"{name!r} can't name a state: not empty, no spaces around it, not 'default', no leading '$'"
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
                f"state {name!r}: ttlDurationMs is {ttl_ms}; it must be positive, or 0 or None for no expiry"
            )
        if ttl_ms and self._time_mode != "processing":
            raise StateSchemaError(
                f"state {name!r}: expiry goes by processing time, but time_mode is {self._time_mode!r}"
            )
        version = SchemaVersion(
            version=1, value=self._schema(schema), user_key=None if user_key is None else self._schema(user_key)
        )
        self.declared[name] = StateDescriptor(
            name=name, kind=kind, state_id=len(self.declared) + 1, ttl_ms=ttl_ms or None, versions=(version,)
        )
        return _Declared(name)

    def _schema(self, schema: Any) -> dict[str, Any]:
        struct = schema if isinstance(schema, StructType) else self._parse_ddl(schema)
        value: dict[str, Any] = struct.jsonValue()
        return value


class _Declared:
    """Stands for a state on the driver, where there is no key and no state."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        raise UsageError(
            f"state {self._name!r} is used outside a key ({method}, in init or close): only the handlers of a key may use state"
        )


class _Deleted:
    """A state that ``init`` declared and then deleted."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        raise PySparkRuntimeError(
            f"state {self._name!r} is used ({method}), but init() deletes it by deleteIfExists after declaring it; drop that call, "
            "or make it before the state is declared"
        )


class ArrowDeclaringHandle(DeclaringHandle):
    """The same for the vectorised API, which needs to know the columns that it will get."""

    def __init__(
        self, parse_ddl: ParseDdl, time_mode: TimeMode, key_schema: StructType, input_schema: StructType
    ) -> None:
        super().__init__(parse_ddl, time_mode)
        self.key_schema = key_schema
        self.input_schema = input_schema

    def registerTimer(self, keys: Any, expiryTimestampMs: Any = None) -> None:  # type: ignore[override]
        """Raises as Spark does: there is no key in ``init``."""
        super().registerTimer(0)

    def deleteTimer(self, keys: Any, expiryTimestampMs: Any = None) -> None:  # type: ignore[override]
        """Raises as Spark does: there is no key in ``init``."""
        super().deleteTimer(0)

    def listTimers(self, keys: Any = None) -> Any:
        """Raises as Spark does: there is no key in ``init``."""
        return super().listTimers()


class ArrowHandle(ProcessorHandle):
    """The handle that a vectorised processor's ``init`` gets in a shard task. ``states``: the value states, by name."""

    def __init__(
        self, shard: ShardState, time_mode: TimeMode, key_schema: StructType, input_schema: StructType
    ) -> None:
        super().__init__(shard, time_mode)
        self.key_schema = key_schema
        self.input_schema = input_schema
        self.states: dict[str, ValueColumns] = {}
        self.timers = TimerColumns(shard)
        self._columns: list[EntryColumns] = [self.timers]
        self._timers = ArrowTimers(self.timers, "a timer")

    def begin(self, key_groups: Groups, keys: pa.Array) -> None:
        """The keys of the next call: encoded, ascending by key group and key."""
        for columns in self._columns:
            columns.begin(key_groups, keys)

    def end(self) -> None:
        """The call is over."""
        for columns in self._columns:
            columns.end()

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> Any:
        """Makes the state one of ``KeyedBatch.states``, and of what ``BatchResult.states`` may have. Returns nothing to use."""
        _check_state(self.state, "getValueState", HandleState.CREATED)
        found = self._planned(lambda shard, name: ValueColumns(shard, shard.descriptor(name, "value")), stateName)
        if isinstance(found, ValueColumns):
            self.states[stateName] = found

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> Any:
        """The lists of the keys of a batch, an ``ArrowListState``."""
        _check_state(self.state, "getListState", HandleState.CREATED)
        return self._planned(self._lists, stateName)

    def getMapState(
        self, stateName: str, userKeySchema: Any, valueSchema: Any, ttlDurationMs: int | None = None
    ) -> Any:
        """The maps of the keys of a batch, an ``ArrowMapState``."""
        _check_state(self.state, "getMapState", HandleState.CREATED)
        return self._planned(self._maps, stateName)

    def _lists(self, shard: ShardState, name: str) -> ArrowListState:
        columns = ListColumns(shard, shard.descriptor(name, "list"))
        self._columns.append(columns)
        return ArrowListState(columns, f"list state {name!r}")

    def _maps(self, shard: ShardState, name: str) -> ArrowMapState:
        columns = MapColumns(shard, shard.descriptor(name, "map"))
        self._columns.append(columns)
        return ArrowMapState(columns, f"map state {name!r}")

    def registerTimer(self, keys: Any, expiryTimestampMs: Any) -> None:  # type: ignore[override]
        """A timer per row: keys of rows, and their times, or one for all. Raises: in time mode "none", and outside a batch."""
        self._check_timers("registerTimer")
        self._timers.register(keys, expiryTimestampMs)

    def deleteTimer(self, keys: Any, expiryTimestampMs: Any) -> None:  # type: ignore[override]
        """The reverse; nothing happens for a timer that is not there."""
        self._check_timers("deleteTimer")
        self._timers.delete(keys, expiryTimestampMs)

    def listTimers(self, keys: Any = None) -> Any:
        """The timers of the chosen keys, each key's ascending: ``KeyedRows`` with the column ``expiry_ms``."""
        self._check_timers("listTimers")
        return self._timers.times(keys)


def _check_state(state: HandleState, call: str, *allowed: HandleState) -> None:
    if state not in allowed:
        raise PySparkRuntimeError(
            f"[STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_HANDLE_STATE] {call} can't be called when the handle "
            f"is {state.value}; it may be {' or '.join(s.value for s in allowed)}"
        )
