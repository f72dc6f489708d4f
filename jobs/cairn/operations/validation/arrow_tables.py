"""Read states into Arrow tables in this process, in the forms on which expectations are evaluated.

The functions return the same columns and rows as the functions of `state_tables`, which return Spark tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.operations.validation.row_json import row_json
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.formats.arrow_columns import Int64s
from state_backend.inspection.compare_tables import codes_of, combine_codes
from state_backend.inspection.state_source import StateSource
from state_backend.inspection.state_table import read_shard, table_schema

Removable = Callable[[pa.Table], pa.Array]
_INSTANT = pa.timestamp("us", "UTC")


def read_states(
    source: StateSource, entries: Mapping[str, int], most_bytes: int | None = None
) -> dict[str, pa.Table] | None:
    """Return each state as a table in memory, by its name; None if they would take more than `most_bytes` in all.

    `entries`: The number of entries of each state to read.
    """
    storage, found = open_storage(source.url), dict[str, list[pa.Table]]()
    for shard in range(source.content.parallelism):
        with work_folder(f"read-{shard}") as work:
            for state, table in read_shard(source, [*entries], shard, storage, work):
                found.setdefault(state, []).append(table)
                if most_bytes is not None and _expected_bytes(found, entries) > most_bytes:
                    return None
    empty = {state: table_schema(source, state).empty_table() for state in entries}
    return {state: pa.concat_tables([empty[state], *found.get(state, ())]).combine_chunks() for state in entries}


def _expected_bytes(found: Mapping[str, Sequence[pa.Table]], entries: Mapping[str, int]) -> float:
    """Estimate the bytes of all states, as if the rows that are not read yet were as large as the rows read so far."""
    total = 0.0
    for state, tables in found.items():
        rows = sum(table.num_rows for table in tables)
        total += sum(table.nbytes for table in tables) * max(entries[state] / rows, 1.0)
    return total


def identity_of(schema: pa.Schema) -> tuple[str, ...]:
    """Return the names of the columns that identify a row of a state."""
    names = [
        f"{part}_{f.name}" for part in ("key", "user_key") if part in schema.names for f in schema.field(part).type
    ]
    last = "pos" if "pos" in schema.names else "expires_at" if "value" not in schema.names else None
    return (*names, *([last] if last is not None else []))


def flat(table: pa.Table) -> pa.Table:
    """Return a state with one column for each field, under the names that expectations use."""
    columns: list[tuple[str, pa.ChunkedArray]] = []
    for name in table.column_names:
        if name in ("key", "user_key", "value"):
            start = "" if name == "value" else f"{name}_"
            columns += _fields(table, name, start)
        else:
            columns.append((name, table[name].cast(_INSTANT) if name == "expires_at" else table[name]))
    return _table(columns)


def pairs(before: pa.Table, now: pa.Table, *, now_ms: int, removable: Removable | None, zone: str) -> pa.Table:
    """Join the state of a base with the same state of a later checkpoint, with the columns of `state_tables.pairs`.

    `removable`: Returns which rows of a table may disappear; None for none. Rows that expired by `now_ms` may too.
    """
    identity = identity_of(now.schema)
    left, right = flat(before), flat(now)
    from_left, from_right = _match(left.select(identity), right.select(identity))
    shared = [
        pc.if_else(from_right.is_null(), left[name].take(from_left), right[name].take(from_right)) for name in identity
    ]
    columns = [*zip(identity, shared, strict=True)]
    for side, table, rows in (("before", before, from_left), ("now", now, from_right)):
        taken = [("expires_at", table["expires_at"].cast(_INSTANT))]
        taken += _fields(table, "value", "") if "value" in table.column_names else []
        columns += [(f"{side}_{name}", column.take(rows)) for name, column in taken]
    fate = _fates(before, from_left, from_right, now_ms=now_ms, removable=removable)
    joined = _table(columns)
    lost = pc.equal(fate, "lost")
    texts = row_json(joined.filter(lost), identity, zone)
    lost_row = pc.replace_with_mask(pa.nulls(joined.num_rows, pa.string()), lost, texts)
    return joined.append_column("fate", fate).append_column("lost_row", lost_row)


def _fates(
    before: pa.Table, from_left: pa.Array, from_right: pa.Array, *, now_ms: int, removable: Removable | None
) -> pa.Array:
    gone = from_right.is_null()
    fate = pc.if_else(gone, "lost", pc.if_else(from_left.is_null(), "new", "kept"))
    missing = before.take(from_left.filter(gone))
    may = pa.repeat(False, missing.num_rows) if removable is None else pc.fill_null(removable(missing), False)
    times = missing["expires_at"].cast(pa.int64()).combine_chunks()
    expired = pc.fill_null(pc.less_equal(times, now_ms), False)
    of_missing = pc.if_else(expired, "expired", pc.if_else(may, "removed", "lost"))
    return pc.replace_with_mask(fate, gone, pc.cast(of_missing, pa.string()))


def _match(left: pa.Table, right: pa.Table) -> tuple[pa.Array, pa.Array]:
    """Pair the rows of both tables that have the same identity. Return (row numbers in `left`, row numbers in `right`).

    A row without a partner has null on the other side. Rows of `left` come first.
    """
    codes = combine_codes(
        [codes_of(left[name], right[name]) for name in left.column_names], left.num_rows, right.num_rows
    )
    number = int(max(side.max(initial=-1) for side in codes)) + 1
    first, second = np.full((2, number), -1, np.int64)
    first[codes[0]], second[codes[1]] = np.arange(left.num_rows), np.arange(right.num_rows)
    order = np.concatenate([codes[0], codes[1][first[codes[1]] < 0]])
    return _numbers(first[order]), _numbers(second[order])


def _numbers(rows: Int64s) -> pa.Array:
    return pa.array(rows, mask=rows < 0)


def _fields(table: pa.Table, name: str, start: str) -> list[tuple[str, pa.ChunkedArray]]:
    kind = table.schema.field(name).type
    return [(f"{start}{field.name}", pc.struct_field(table[name], n)) for n, field in enumerate(kind)]


def _table(columns: Sequence[tuple[str, pa.ChunkedArray]]) -> pa.Table:
    return pa.Table.from_arrays([column for _, column in columns], names=[name for name, _ in columns])
