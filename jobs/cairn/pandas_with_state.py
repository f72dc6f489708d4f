"""Functions of Spark's `applyInPandasWithState` as processors of the pandas interface.

The user's function does not change. Its `GroupState` is PySpark's own class. This module fills a `GroupState` before
each call, and stores what the function left in it. The processor uses only the public handle, so it also runs under
Spark's `transformWithStateInPandas`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import DataType, StructType

from cairn.spark.ddl import parse_ddl_locally
from cairn.spark_versions import series_of, to_arrow_type
from state_backend.values.errors import UsageError

Timeout = Literal["NoTimeout", "ProcessingTimeTimeout", "EventTimeTimeout"]
Function = Callable[[tuple[Any, ...], Iterable[pd.DataFrame], GroupState], Iterable[pd.DataFrame]]

STATE = "groupState"

_INTEGERS = {"tinyint": "int8", "smallint": "int16", "int": "int32", "bigint": "int64"}
_NUMBERS = {**_INTEGERS, "float": "float32", "double": "float64"}
_SYNONYMS = {"byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint", "real": "float"}
_NESTED = ("array<", "map<", "struct<")
# DDL allows a space before the bracket: "array <int>".
_NESTED_WORD = re.compile(r"(array|map|struct)(<|$)")


def pandas_with_state(
    func: Function,
    *,
    key: Sequence[str],
    input_schema: str | StructType,
    state_schema: str | StructType,
    timeout: Timeout = "NoTimeout",
) -> PandasWithState:
    """Make a processor for `api="pandas"` that calls `func` as `applyInPandasWithState` does.

    Args:
        func: The unchanged function `(key, frames, state) -> frames`.
        key: The key columns, in the pipeline's order.
        input_schema: All columns of the source, in order: DDL or a `StructType`. The function gets the dtypes that
            Spark gives: int32 for INT, float32 for FLOAT.
        state_schema: The fields of the state: DDL or a `StructType`.
        timeout: Value of `GroupStateTimeout`. "EventTimeTimeout" needs a pipeline with `time_mode="event"`,
            "ProcessingTimeTimeout" a pipeline with `time_mode="processing"`.

    Returns:
        An instance for `Pipeline.processor`.

    Raises:
        UsageError: The timeout is unknown, the input schema can't be read, or it lacks a key column.

    Example:
        Pipeline(
            ...,
            api="pandas",
            key=["user"],
            processor=pandas_with_state(
                count_clicks, key=["user"], input_schema="user string, at timestamp", state_schema="clicks long"
            ),
        )
    """
    return PandasWithState(func, key=key, input_schema=input_schema, state_schema=state_schema, timeout=timeout)


class PandasWithState(StatefulProcessor):  # type: ignore[misc]
    """Processor that `pandas_with_state` makes of a function of `applyInPandasWithState`.

    The function's state is stored in a value state. A timeout is stored as the key's only timer.
    """

    def __init__(
        self,
        func: Function,
        *,
        key: Sequence[str],
        input_schema: str | StructType,
        state_schema: str | StructType,
        timeout: Timeout = "NoTimeout",
    ) -> None:
        known = (
            GroupStateTimeout.NoTimeout,
            GroupStateTimeout.ProcessingTimeTimeout,
            GroupStateTimeout.EventTimeTimeout,
        )
        if timeout not in known:
            raise UsageError(f"timeout={timeout!r} is not one of {', '.join(known)}")
        columns = columns_of(input_schema)
        missing = [name for name in key if name not in columns]
        if missing:
            raise UsageError(f"input_schema lacks the key column {missing[0]!r}; it has {', '.join(columns)}")
        self._func = func
        self._columns = columns
        self._key = [columns[name] for name in key]
        self._state_schema = state_schema
        self._timeout = timeout

    def init(self, handle: Any) -> None:
        """Declare the only state, which holds the state of the user's function."""
        self._handle = handle
        self._state = handle.getValueState(STATE, self._state_schema)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:
        """Call the user's function with the key's rows, in the dtypes that Spark gives."""
        frames = (as_spark_gives(frame, self._columns) for frame in rows)
        yield from self._call(key, frames, timerValues, None)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        """Call the user's function with one empty frame and `hasTimedOut` set."""
        empty = pd.DataFrame(columns=list(self._columns))
        yield from self._call(key, [empty], timerValues, expiredTimerInfo.getExpiryTimeInMs())

    def _call(
        self, key: Any, frames: Iterable[pd.DataFrame], times: Any, fired_ms: int | None
    ) -> Iterator[pd.DataFrame]:
        """Call the user's function, yield its rows, store its state. `fired_ms`: Time of the timer; None for rows."""
        value = self._state.get()
        watermark_ms = times.getCurrentWatermarkInMs()
        state = GroupState(
            optionalValue=value,
            batchProcessingTimeMs=times.getCurrentProcessingTimeInMs(),
            eventTimeWatermarkMs=watermark_ms,
            timeoutConf=self._timeout,
            hasTimedOut=fired_ms is not None,
            watermarkPresent=self._timeout == GroupStateTimeout.EventTimeTimeout or watermark_ms > 0,
            defined=value is not None,
            updated=False,
            removed=False,
            timeoutTimestamp=GroupState.NO_TIMESTAMP,
            keyAsUnsafe=b"",
            valueSchema=None,
        )
        scalars = tuple(scalar(part, kind) for part, kind in zip(key, self._key, strict=True))
        for frame in _iterable(self._func(scalars, frames, state)):
            if not isinstance(frame, pd.DataFrame):
                raise _wrong_return("iterator of pandas.DataFrame", f"iterator of {type(frame).__name__}")
            if len(frame):
                yield frame
        self._store(state, fired_ms)

    def _store(self, state: GroupState, fired_ms: int | None) -> None:
        left = json.loads(state.json())
        if left["updated"]:
            self._state.update(state.get)
        elif left["removed"]:
            self._state.clear()
        timeout_ms = int(left["timeoutTimestamp"])
        if left["updated"] or left["removed"] or timeout_ms != GroupState.NO_TIMESTAMP:
            for expiry_ms in list(self._handle.listTimers()) if self._timeout != "NoTimeout" else ():
                self._handle.deleteTimer(expiry_ms)
            if timeout_ms != GroupState.NO_TIMESTAMP:
                # A timeout fires after its millisecond, but a timer in its millisecond. So the timer is 1 ms later.
                self._handle.registerTimer(timeout_ms + 1)
        elif fired_ms is not None:
            # The function left the state and the timeout as they were. Spark then repeats the timeout in every batch,
            # so the key needs a timer that is due in the next interval. After this call, Cairn deletes the timer that
            # fired, which would include a new timer of the same time. So the new timer is 1 ms earlier.
            self._handle.registerTimer(fired_ms - 1)


def columns_of(schema: str | StructType) -> dict[str, str | DataType]:
    """Return the type of each column of `input_schema` by name: a text such as "int", or a `DataType` if nested."""
    if isinstance(schema, StructType):
        short = {field.name: field.dataType.simpleString() for field in schema.fields}
        return {f.name: f.dataType if short[f.name].startswith(_NESTED) else short[f.name] for f in schema.fields}
    columns: dict[str, str | DataType] = {}
    # `_split` does not split at a comma within brackets, as in decimal(10, 2).
    for part in _split(schema):
        name, *rest = part.replace(":", " ", 1).split(None, 2)
        if not rest:
            raise UsageError(f"input_schema: {part.strip()!r} is not a column definition; expected a name and a type")
        kind = rest[0].lower()
        if _NESTED_WORD.match(kind):
            (field,) = parse_ddl_locally(part).fields
            columns[field.name] = field.dataType
            continue
        columns[name.strip("`")] = _SYNONYMS.get(kind, kind)
    return columns


def _split(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "(<") - (char in ")>")
        if char == "," and not depth:
            parts.append(text[start:at])
            start = at + 1
    return [part for part in (*parts, text[start:]) if part.strip()]


def as_spark_gives(frame: pd.DataFrame, columns: dict[str, str | DataType]) -> pd.DataFrame:
    """Return a frame with the dtypes that a function of `applyInPandasWithState` gets from Spark.

    `columns`: As `columns_of` returns them. The dtypes follow from the SQL types by Arrow's conversion to pandas, such
    as int32 for INT.
    """
    return pd.DataFrame({name: _series(frame[name], kind) for name, kind in columns.items()}, index=frame.index)


def _series(values: pd.Series[Any], kind: str | DataType) -> pd.Series[Any]:
    if isinstance(kind, DataType):
        series = series_of(pa.array(values.tolist(), type=to_arrow_type(kind)), "UTC")
        return pd.Series(series.array, index=values.index)
    dtype: Any = _NUMBERS.get(kind)
    if dtype is None:
        return values
    # Integers become floats if this key's rows contain a null. Under Spark, a null of another key can have this effect
    # too, but this function does not know the other keys. `Int64` stays: a float could not hold its integers exactly.
    if values.dtype == pd.Int64Dtype():
        return values
    return values.astype("float64" if kind in _INTEGERS and values.hasnans else dtype)


def scalar(value: Any, kind: str | DataType) -> Any:
    """Return a key value in the type that a cell of its column has in the frames of `applyInPandasWithState`."""
    if isinstance(kind, DataType):
        return None if value is None else _series(pd.Series([value]), kind).iloc[0]
    dtype = _NUMBERS.get(kind)
    if dtype is not None:
        null = value is None or np.isnan(value)
        return np.dtype("float64" if null and kind in _INTEGERS else dtype).type(np.nan if null else value)
    if kind in ("timestamp", "timestamp_ntz"):
        return pd.Timestamp(value)
    return np.bool_(value) if kind == "boolean" and value is not None else value


def _iterable(result: Any) -> Iterable[Any]:
    if isinstance(result, pd.DataFrame):
        raise _wrong_return("iterable of pandas.DataFrame", type(result).__name__)
    if not isinstance(result, Iterable):
        raise _wrong_return("iterable", type(result).__name__)
    return result


def _wrong_return(expected: str, actual: str) -> PySparkTypeError:
    return PySparkTypeError(errorClass="UDF_RETURN_TYPE", messageParameters={"expected": expected, "actual": actual})
