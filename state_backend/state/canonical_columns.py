"""Conversion between a shard's stored entries and the rows of a canonical savepoint, many at a time.

In this module, `stored` are whole stored keys, `rests` are stored keys without key group and state id, and `entries`
are the values under them (see `layout`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.formats.arrow_columns import Array, Fixed, arrow_field, binary_views, concatenate, cut, valid_rows
from state_backend.formats.canonical_tables import fits_parquet, state_schema, timers_schema
from state_backend.formats.evolution_columns import columns_reader
from state_backend.formats.key_columns import KeyColumns
from state_backend.formats.row_columns import RowColumns
from state_backend.formats.types import StructType, parse_struct
from state_backend.state import layout
from state_backend.state.entry_columns import (
    Groups,
    check_timers,
    join_columns,
    list_parts,
    mask_of,
    numbers_at,
    packed_times,
    parts_of,
    row_versions,
    split_expiry,
    split_timers,
)
from state_backend.values.errors import CorruptFile
from state_backend.values.records import StateDescriptor

_NULL = pa.scalar(None, pa.binary())


@dataclass(frozen=True, slots=True)
class Located:
    rests: pa.Array  # stored keys without key group and state id
    entries: pa.Array  # the entry of each of them
    # For a list state, two arrays with one column for each list whose first element is in these rows. A list that began
    # in earlier rows is left out. The first array has the index in `rests` of each list's first element. The second
    # array has two rows: the position of each list's first element, and the position that the list's next appended
    # element will get. None for other states.
    lists: tuple[Array, Array] | None = None


class StateRows:
    """Converter of one state, batch by batch: from stored entries to rows of a canonical savepoint, and back.

    Pass batches in the order of keys: a list that begins in one batch may continue in the next.
    """

    def __init__(self, descriptor: StateDescriptor, key_schema: StructType) -> None:
        latest = descriptor.versions[-1]
        value = parse_struct(latest.value)
        self.schema = state_schema(descriptor, key_schema)
        self._descriptor = descriptor
        self._keys = KeyColumns(key_schema)
        user_key = parse_struct(latest.user_key) if latest.user_key is not None else None
        self._user_keys = KeyColumns(user_key, what=f"user key of state {descriptor.name!r}") if user_key else None
        self._read = columns_reader(descriptor.name, descriptor.versions) if fits_parquet(value) else None
        self._codec = RowColumns(descriptor.name, value, latest.version)
        self._next_position = 0
        self._last_key: bytes | None = None

    def table(self, stored: pa.Array, entries: pa.Array) -> pa.Table:
        groups, _, rests = parts_of(stored)
        columns: dict[str, pa.Array] = {}
        if self._descriptor.kind == "list":
            groups, rests, entries, columns = self._elements(groups, rests, entries)
        if self._user_keys is None and not columns:
            keys = self._keys.decode(rests)
        else:
            keys, sizes = self._keys.decode_prefix(rests)
            if self._user_keys is not None:
                offsets = binary_views(rests)[0]
                behind = cut(rests.buffers()[2], offsets[:-1] + sizes, offsets[1:])
                columns["user_key"] = _struct(self._user_keys.schema, self._user_keys.decode(behind))
        columns["key"] = _struct(self._keys.schema, keys)
        columns["key_group"] = pa.array(groups.astype(np.int32))
        columns["expires_at_ms"], rows = split_expiry(entries, self._descriptor.name)
        numbers = row_versions(rows, self._descriptor.name)
        columns["schema_version"] = pa.array(numbers.astype(np.int32))
        if self._read is not None:
            columns["value"] = self._read(rows).to_struct_array()
        if "encoded_row" in self.schema.names:
            older = (
                numbers != self._descriptor.versions[-1].version
                if self._read is not None
                else np.ones(len(rows), np.bool_)
            )
            columns["encoded_row"] = pc.if_else(pa.array(older), rows, _NULL)
        return pa.table([columns[name] for name in self.schema.names], schema=self.schema)

    def _elements(
        self, groups: Groups, rests: pa.Array, entries: pa.Array
    ) -> tuple[Groups, pa.Array, pa.Array, dict[str, pa.Array]]:
        """Return (key groups, rests, entries) of list elements, and their columns `position` and `next_position`."""
        _, sizes = self._keys.decode_prefix(rests)
        heads, elements = list_parts(rests, sizes)
        if not (heads | elements).all():
            raise CorruptFile(
                f"list state {self._descriptor.name!r}: a stored key is neither an element nor the positions of a list"
            )
        starts, entry_bytes = binary_views(entries)
        if (np.diff(starts)[heads] != 16).any():
            raise CorruptFile(f"list state {self._descriptor.name!r}: the positions of a list are not 16 bytes")
        nexts = numbers_at(entry_bytes, starts[:-1][heads] + 8)
        list_of = np.cumsum(heads) - 1
        # `list_of[row]` is the number of the row's list: list 0 is the first that begins in this batch, and `nexts[0]`
        # is its next position. Rows before list 0 belong to a list that began in an earlier batch, and get the number
        # -1. That list's next position, `self._next_position`, is appended as last item, which NumPy's index -1 picks.
        every = np.concatenate((nexts, [self._next_position]))
        offsets, raw = binary_views(rests)
        positions = numbers_at(raw, offsets[1:][elements] - 8)
        next_positions = every[list_of[elements]]
        if (positions >= next_positions).any():
            raise CorruptFile(f"list state {self._descriptor.name!r}: an element lies behind the end of its list")
        if len(nexts):
            self._next_position = int(nexts[-1])
        mask = pa.array(elements)
        columns = {"position": pa.array(positions), "next_position": pa.array(next_positions)}
        return groups[elements], rests.filter(mask), entries.filter(mask), columns

    def to_entries(self, table: pa.Table) -> Located:
        keys = self._keys.encode(keys_of(table))
        rests, lists = keys, None
        if self._user_keys is not None:
            rests = join_columns(keys, self._user_keys.encode(_fields(table, "user_key")))
        elif self._descriptor.kind == "list":
            positions, nexts = (_longs(table, name) for name in ("position", "next_position"))
            if (positions < 0).any() or (positions >= nexts).any():
                raise CorruptFile(f"list state {self._descriptor.name!r}: a position is not in 0 .. next_position - 1")
            element = [Fixed(np.void(layout.LIST_ELEMENT)), Fixed(positions.astype(">u8"))]
            rests = join_columns(keys, concatenate(len(keys), element))
            begins = np.flatnonzero(differs(keys, self._last_key))
            lists = begins, np.stack((positions[begins], nexts[begins]))
            self._last_key = keys[-1].as_py()
        return Located(rests, self._entries(table), lists)

    def _entries(self, table: pa.Table) -> pa.Array:
        encoded: Any = table["encoded_row"].combine_chunks() if "encoded_row" in self.schema.names else None
        if self._read is not None:
            rows = self._codec.encode(pa.table(_fields(table, "value"), names=self._codec.schema.names))
            if encoded is not None:
                rows = pc.coalesce(encoded, rows)
        else:
            rows = encoded
        if rows.null_count or (row_versions(rows, self._descriptor.name) != _longs(table, "schema_version")).any():
            raise CorruptFile(
                f"state {self._descriptor.name!r}: a row has another schema version than its column schema_version says"
            )
        return _with_expiry(table["expires_at_ms"].combine_chunks(), rows)


class TimerRows:
    def __init__(self, key_schema: StructType) -> None:
        self.schema = timers_schema(key_schema)
        self._keys = KeyColumns(key_schema)

    def table(self, stored: pa.Array, entries: pa.Array) -> pa.Table:
        groups, _, rests = parts_of(stored)
        check_timers(rests, entries)
        keys, times = split_timers(rests)
        key = _struct(self._keys.schema, self._keys.decode(keys))
        return pa.table([key, pa.array(times), pa.array(groups.astype(np.int32))], schema=self.schema)

    def to_entries(self, table: pa.Table) -> Located:
        keys = self._keys.encode(keys_of(table))
        rests = concatenate(len(keys), [keys, packed_times(_longs(table, "expires_at_ms"))])
        return Located(rests, pa.array([b""] * len(keys), pa.binary()))


def keys_of(table: pa.Table) -> list[pa.Array]:
    return _fields(table, "key")


def check_ascending(groups: Array, rests: pa.Array, before: tuple[int, bytes] | None, name: str) -> tuple[int, bytes]:
    first = (int(groups[0]), rests[0].as_py())
    risen = groups[1:] > groups[:-1]
    later = mask_of(pc.greater(rests[1:], rests[:-1]))
    if not (risen | ((groups[1:] == groups[:-1]) & later)).all() or (before is not None and first <= before):
        raise CorruptFile(f"{name}: its rows do not ascend by key group and key, or a key occurs twice")
    return int(groups[-1]), rests[-1].as_py()


def differs(keys: pa.Array, before: bytes | None) -> Array:
    inner = mask_of(pc.not_equal(keys[1:], keys[:-1]))
    return np.concatenate(([keys[0].as_py() != before], inner))


def _with_expiry(times: pa.Array, rows: pa.Array) -> pa.Array:
    if times.null_count == len(times):
        return rows
    valid = valid_rows(times)
    numbers = np.asarray(times.fill_null(0)).astype("<i8")
    packed = concatenate(
        len(rows), [Fixed(np.full(len(rows), layout.EXPIRING, np.uint8), valid), Fixed(numbers, valid)]
    )
    return join_columns(packed, rows)


def _struct(schema: StructType, columns: Sequence[pa.Array]) -> pa.Array:
    return pa.StructArray.from_arrays(columns, fields=[arrow_field(f) for f in schema.fields])


def _fields(table: pa.Table, name: str) -> list[pa.Array]:
    return list(table[name].combine_chunks().flatten())


def _longs(table: pa.Table, name: str) -> Array:
    return np.asarray(table[name].combine_chunks())
