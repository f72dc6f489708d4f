"""The routed Arrow batches of one shard, as keys with their rows.

A batch is one round: its keys' state is prefetched when it is read. A key's rows may go on in the next batch; its handler
sees one lazy iterator all the same, and what it does not read is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.conversion import ArrowTableToRowsConversion
from pyspark.sql.types import (
    ArrayType,
    MapType,
    Row,
    StructType,
    TimestampType,
    UserDefinedType,
    VariantType,
)

from jobs.runtime.processor_handle import row_maker
from jobs.runtime.routing import INPUT, TICK
from state_backend.formats.key_codec import KeyCodec
from state_backend.state.shard_state import ShardState
from state_backend.values.errors import InvariantViolated
from state_backend.values.key_groups import KeyGroupRange


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows ``start .. end-1`` of one key in one batch."""

    key_group: int
    key: tuple[object, ...]
    encoded_key: bytes
    start: int
    end: int


class KeyedInput:
    """Iterates ``(key, encoded key, key group, rows)``; the rows of a key must be used before the next key is asked for."""

    def __init__(
        self,
        batches: Iterator[pa.RecordBatch],
        key_codec: KeyCodec,
        schema: StructType,
        state: ShardState,
        owned: KeyGroupRange,
    ) -> None:
        self.input_rows = 0
        self.keys = 0
        self.ticks = 0
        self._batches = batches
        self._key_codec = key_codec
        self._to_rows = rows_converter(schema)
        self._state = state
        self._owned = owned
        self._segments: list[Segment] = []
        self._rows: list[Row] = []
        self._at = 0

    def __iter__(self) -> Iterator[tuple[Segment, Iterator[Row]]]:
        while self._at < len(self._segments) or self._load():
            self.keys += 1
            segment = self._segments[self._at]
            rows = self._rows_of(segment)
            yield segment, rows
            for _ in rows:
                pass

    def _rows_of(self, segment: Segment) -> Iterator[Row]:
        encoded_key = segment.encoded_key
        while True:
            self._at += 1
            yield from self._rows[segment.start : segment.end]
            if self._at < len(self._segments) or not self._load():
                return
            segment = self._segments[0]
            if segment.encoded_key != encoded_key:
                return

    def _load(self) -> bool:
        """Makes the next batch with rows current; False at the end."""
        for batch in self._batches:
            self._state.flush()
            kinds = batch.column("__kind").to_numpy()
            self.ticks += int((kinds == TICK).sum())
            if not (kinds == INPUT).any():
                continue
            inputs = batch.filter(pa.array(kinds == INPUT)) if (kinds != INPUT).any() else batch
            self.input_rows += inputs.num_rows
            self._segments = self._split(inputs)
            self._rows = self._to_rows(inputs.column("__input"))
            self._at = 0
            self._state.prefetch([(s.key_group, s.encoded_key) for s in self._segments])
            return True
        self._state.flush()
        self._segments, self._rows, self._at = [], [], 0
        return False

    def _split(self, batch: pa.RecordBatch) -> list[Segment]:
        groups = batch.column("__key_group").to_pylist()
        keys = list(zip(*[_plain(column).to_pylist() for column in batch.column("__key").flatten()], strict=True))
        if not (groups[0] in self._owned and groups[-1] in self._owned):
            raise InvariantViolated(
                f"rows of key groups {groups[0]} .. {groups[-1]} reached the shard of {self._owned}"
            )
        segments: list[Segment] = []
        start, key, encoded = 0, keys[0], self._key_codec.encode(keys[0])
        for at in range(1, len(keys)):
            if keys[at] != key:
                # NaN is unequal to itself, but encodes to one key.
                next_encoded = self._key_codec.encode(keys[at])
                if next_encoded != encoded:
                    segments.append(Segment(groups[start], key, encoded, start, at))
                    start, encoded = at, next_encoded
                key = keys[at]
        segments.append(Segment(groups[start], key, encoded, start, len(keys)))
        return segments


def rows_converter(schema: StructType) -> Callable[[pa.StructArray], list[Row]]:
    """A function from a struct column to PySpark rows, with the Python types that PySpark gives. Flat schemas take a path
    by columns; nested ones PySpark's own conversion."""
    names = tuple(schema.names)
    if any(
        isinstance(f.dataType, ArrayType | MapType | StructType | UserDefinedType | VariantType) for f in schema.fields
    ):
        return lambda column: ArrowTableToRowsConversion.convert(
            pa.Table.from_batches([pa.RecordBatch.from_struct_array(column)]), schema
        )
    make = row_maker(names)
    zoned = [isinstance(f.dataType, TimestampType) for f in schema.fields]

    def convert(column: pa.StructArray) -> list[Row]:
        columns = [
            (_plain(values) if has_zone else values).to_pylist()
            for values, has_zone in zip(column.flatten(), zoned, strict=True)
        ]
        return [make(values) for values in zip(*columns, strict=True)]

    return convert


def _plain(column: pa.Array) -> pa.Array:
    """Instants as naive UTC, as PySpark gives them in a UTC session."""
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        return column.cast(pa.timestamp("us"))
    return column
