"""Base class of the ready-made processors, and the checks of their declarations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import BooleanType, DataType, StructField, StructType

from cairn.aggregates.groups import key_text
from cairn.aggregates.state_fields import nullable, spelled_name
from cairn.arrow_processor import ArrowProcessor, KeyedBatch
from cairn.numpy_columns import numbers, valid_rows, whole
from cairn.processors.ordering import type_of
from state_backend.formats.recorded_settings import SETTINGS
from state_backend.state.plan_state_schemas import MADE_WITH
from state_backend.values.errors import ProcessorError, UsageError
from state_backend.values.time_bounds import EARLIEST_US, LATEST_US, check_length_of_time

MICROSECOND = timedelta(microseconds=1)
_EVENT_TIME = 'time_mode="event", event_time="at", watermark_delay=timedelta(hours=1), watermark="interval"'


class ReadyMade(ArrowProcessor, ABC):
    """Base class of the ready-made processors. A user's subclass sets class attributes as settings."""

    splits_keys = True
    _states_follow_settings = True
    settings: ClassVar[tuple[str, ...]] = ()  # Names of all settings.
    column_settings: ClassVar[tuple[str, ...]] = ()  # Names of the settings that name columns of the input.
    _handle: Any

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if cls.__module__.startswith("cairn.processors."):
            return
        own = {name: value for name, value in vars(cls).items() if not name.startswith("_")}
        for name, value in own.items():
            if not cls.is_setting(name, value):
                near = get_close_matches(name, cls.settings, 1)
                hint = f"did you mean {near[0]}?" if near else f"its settings are {', '.join(cls.settings)}"
                raise UsageError(f"{cls.__name__}.{name} is no setting of {ready_made(cls).__name__}; {hint}")
        # A class without any setting is not checked here: cloudpickle creates a class first and sets its attributes
        # later. `init` checks the settings again.
        if any(name in cls.settings for name in own):
            cls.check_settings()

    @classmethod
    def is_setting(cls, name: str, value: Any) -> bool:
        """Return True if a subclass may define this class attribute: it is a setting, or a method."""
        return name in (*cls.settings, "settings", "column_settings", "splits_keys") or hasattr(value, "__get__")

    def _spell_columns(self, names: Sequence[str]) -> None:
        for setting in self.column_settings:
            value = getattr(self, setting, None)
            if isinstance(value, str):
                setattr(self, setting, _spell(value, names))
            elif isinstance(value, list | tuple):
                setattr(self, setting, tuple(_spell(text, names) for text in value))

    @classmethod
    @abstractmethod
    def check_settings(cls) -> None:
        """Raise `UsageError` if a setting is missing or wrong, or if two settings contradict each other."""

    @classmethod
    def check_pipeline(cls, pipeline: Any) -> None:
        """Check the settings when a pipeline is declared. A subclass may compare them with the pipeline."""
        cls.check_settings()

    def _times_of(self, batch: KeyedBatch) -> npt.NDArray[np.int64]:
        """Return the event times of a batch's rows in microseconds. Raise `ProcessorError` if one is null."""
        column = self._handle.event_time
        times = whole(batch.rows[column])
        if times.null_count:
            row = int(np.argmin(valid_rows(times)))
            raise ProcessorError(
                f"{type(self).__name__}: a row of key {key_of_row_text(batch, row)} has no event time: its {column!r} is null; filter or fill such rows in the source"
            )
        found: npt.NDArray[np.int64] = numbers(times)
        return found


def _spell(text: Any, names: Sequence[str]) -> Any:
    """Return a setting such as "score desc" with the column spelled as in `names`, and other values unchanged."""
    if not isinstance(text, str):
        return text
    name, _, direction = text.strip().rpartition(" ")
    if name.strip() and direction.lower() in ("asc", "desc"):
        return f"{spelled_name(name.strip(), names)} {direction}"
    return spelled_name(text.strip(), names)


def fields_beside_key(handle: Any) -> list[StructField]:
    return [f for f in nullable(handle.input_schema) if f.name not in handle.key_schema.names]


def keys_at(batch: KeyedBatch, owners: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Return the key columns, by name, of output rows. `owners`: For each row, the position of its key in the batch."""
    at = pa.array(owners)
    return {name: batch.keys[name].take(at) for name in batch.keys.column_names}


def ready_made(cls: type) -> type:
    return next(base for base in cls.__mro__ if base.__module__.startswith("cairn.processors."))


def made_with(processor: ReadyMade, settings: Sequence[str], fields: Sequence[StructField]) -> StructType:
    """Return a state's schema that records `settings` as metadata. Cairn refuses other values of them later."""
    first, *others = fields
    values = {name: f"{name} = {getattr(processor, name)}" for name in settings}
    return StructType([StructField(first.name, first.dataType, first.nullable, {MADE_WITH: values}), *others])


def with_settings(settings: Mapping[str, str], fields: Sequence[StructField]) -> list[StructField]:
    """Return `fields` of a state that record `settings` as metadata. Cairn refuses other values of them later."""
    first, *others = fields
    return [_recording(first, settings), *others]


def with_deleted(column: str | None, fields: Sequence[StructField]) -> list[StructField]:
    """Return `fields` of a state with metadata that records which of them is the setting `deleted`; None: none is.

    Each boolean field records whether it deletes keys, and Cairn refuses another value later. So only a new column of
    the input may become `deleted`.
    """
    return [
        _recording(f, {f"deleted {f.name}": f"deleted {'=' if f.name == column else 'other than'} {f.name}"})
        if isinstance(f.dataType, BooleanType)
        else f
        for f in fields
    ]


def _recording(field: StructField, settings: Mapping[str, str]) -> StructField:
    metadata = {**field.metadata, SETTINGS: {**field.metadata.get(SETTINGS, {}), **settings}}
    return StructField(field.name, field.dataType, field.nullable, metadata)


class ChangedKeys:
    """A filter for processors that emit each changed key once: with the last batch of the interval that has the key."""

    def __init__(self) -> None:
        self._changed_before = False

    def select_changed(self, batch: KeyedBatch, changed: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return True for each key that changed in this or an earlier batch and has no rows in the next batch."""
        changed = changed.copy()
        changed[0] |= self._changed_before
        self._changed_before = bool(batch.last_key_continues and changed[-1])
        if batch.last_key_continues:
            changed[-1] = False
        return changed


def wrong_setting(cls: type, name: str, advice: str) -> UsageError:
    """Return the error for the setting `name`, which is missing or has a wrong value. `advice`: What to write."""
    found = f"is {getattr(cls, name)!r}" if hasattr(cls, name) else "is missing"
    return UsageError(f"{cls.__name__}.{name} {found}; {advice}")


def check_span(cls: type, name: str, forever: str) -> None:
    value = getattr(cls, name, 0)
    if value is not None and (not isinstance(value, timedelta) or value <= timedelta(0)):
        raise wrong_setting(cls, name, f"write {name} = timedelta(days=7), or {name} = None to {forever}")
    if value is not None:
        check_length_of_time(f"{cls.__name__}.{name}", value, f". Write {name} = None to {forever}")


def check_length(cls: type, name: str) -> None:
    value = getattr(cls, name, None)
    if not isinstance(value, timedelta) or value <= timedelta(0):
        raise wrong_setting(cls, name, f"write {name} = timedelta(hours=1)")
    check_length_of_time(f"{cls.__name__}.{name}", value)


def check_deleted(cls: Any, example: str = "is_deleted") -> None:
    if cls.deleted is not None and not isinstance(cls.deleted, str):
        raise wrong_setting(cls, "deleted", f'name a boolean column, as in deleted = "{example}"')


def check_deleted_column(processor: Any, handle: Any) -> None:
    owner, name = type(processor).__name__, processor.deleted
    of = type_of(owner, "deleted", name, handle)
    if not isinstance(of, BooleanType) or name in handle.key_schema.names:
        raise UsageError(
            f"{owner}.deleted names column {name!r}, which is {of.simpleString()}; name a boolean column that is not in the key"
        )


def check_choice(cls: type, name: str, choices: Collection[Any]) -> None:
    value = getattr(cls, name)
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise wrong_setting(cls, name, f"write one of {', '.join(map(repr, choices))}")


def check_free(
    owner: str, column: str, names: Collection[str], why: str, other: str = "the input has a column"
) -> None:
    """Raise `UsageError` if one of `names` equals `column`, which the processor adds to the output. Case is ignored."""
    for name in names:
        if name.lower() == column.lower():
            raise UsageError(
                f"{owner}: {why} adds the column {column!r} to the output, but {other} {name!r}; rename that column"
            )


def type_of_event_time(owner: str, setting: str, handle: Any) -> DataType:
    if handle.event_time is None:
        raise UsageError(
            f"{owner}: {setting} needs event time\nDeclare it in the pipeline: Pipeline({_EVENT_TIME}, ...)"
        )
    found: DataType = handle.input_schema[handle.event_time].dataType
    return found


def within_bounds(times_us: npt.NDArray[np.int64], before_us: Any, after_us: Any) -> npt.NDArray[np.int64]:
    """Clip event times, so that each time minus `before_us` and plus `after_us` is within the years 1 to 9999.

    A time too close to the first or the last year is replaced by the nearest possible time.
    """
    return np.clip(times_us, EARLIEST_US + before_us, LATEST_US - after_us)


def key_of_row_text(batch: KeyedBatch, row: int) -> str:
    return key_text(batch, batch.key_of_row[row])


def ceil_ms(times_us: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Convert microseconds to milliseconds. Round up, so that a timer at the result does not fire too early."""
    return -(-times_us // 1000)
