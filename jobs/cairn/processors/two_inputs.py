"""Two inputs in one: the union that a join's source returns, and the rows of each side in a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StringType, StructField, StructType

from cairn.aggregates.state_fields import nullable
from cairn.arrow_processor import KeyedBatch
from cairn.numpy_columns import Bools, Int64s, booleans, numbers, valid_rows, whole
from cairn.processors.ready_made import ceil_ms, check_free, key_of_row_text, keys_at, type_of_event_time, wrong_setting
from cairn.spark_versions import to_arrow_schema
from state_backend.values.errors import ProcessorError, UsageError
from state_backend.values.frozen import frozen

KIND = "kind"
NO_TIME = np.iinfo(np.int64).max


def union_by_kind(inputs: Mapping[str, Any], *, shared: Sequence[str]) -> Any:
    """Return the rows of several DataFrames as one DataFrame with the column `kind`.

    A column that is not shared gets the kind as a prefix: `amount` of the kind "order" becomes `order_amount`. It is
    null in rows of other kinds.

    Args:
        inputs: The DataFrames by their kinds.
        shared: Columns that all inputs have, and that keep their names: the key, the event time, columns of `order_by`.

    Raises:
        UsageError: An input lacks a shared column, has it with another type, or has a column `kind`. Or two kinds
            differ in case only. Or a column's new name is a shared column, or begins with another kind: `line_count`
            of "order" becomes `order_line_count`, and "order_line" is a kind.

    Example:
        union_by_kind({"order": orders, "payment": payments}, shared=["order_id", "at"])
    """
    from pyspark.sql import functions as F

    _check_inputs({kind: frame.schema for kind, frame in inputs.items()}, shared)
    frames = []
    for kind, frame in inputs.items():
        own = [name for name in frame.columns if name not in shared]
        # By position: renamed one after the other, `status` and `order_status` would get the same name.
        renamed = frame.select(*shared, *own).toDF(*shared, *(f"{kind}_{name}" for name in own))
        frames.append(renamed.withColumn(KIND, F.lit(kind)))
    return reduce(lambda union, frame: union.unionByName(frame, allowMissingColumns=True), frames)


def _check_inputs(schemas: Mapping[str, StructType], shared: Sequence[str]) -> None:
    types: dict[str, str] = {}
    folded: dict[str, str] = {}
    for kind, schema in schemas.items():
        if (other := folded.setdefault(str(kind).lower(), kind)) != kind:
            raise UsageError(
                f"union_by_kind: the kinds {other!r} and {kind!r} differ in case only, so their columns would too; rename one of them"
            )
        found = {field.name: field.dataType.simpleString() for field in schema.fields}
        for name in shared:
            if name not in found:
                raise UsageError(
                    f"union_by_kind: input {kind!r} lacks the shared column {name!r}; its columns are {', '.join(found)}"
                )
            if types.setdefault(name, found[name]) != found[name]:
                raise UsageError(
                    f"union_by_kind: the shared column {name!r} is {types[name]} in one input, but {found[name]} in input {kind!r}; cast one of them"
                )
        if KIND in found:
            raise UsageError(f"union_by_kind: input {kind!r} has a column {KIND!r}; rename it")
        for name in found.keys() - set(shared):
            if f"{kind}_{name}".lower() in map(str.lower, shared):
                raise UsageError(
                    f"union_by_kind: column {name!r} of input {kind!r} becomes {f'{kind}_{name}'!r}, which is a shared column; rename the column or the kind"
                )
            if (of := _kind_of(f"{kind}_{name}", schemas)) != kind:
                raise UsageError(
                    f"union_by_kind: column {name!r} of input {kind!r} becomes {f'{kind}_{name}'!r}, which would count as a column of input {of!r}; rename the column or a kind"
                )
    if not schemas:
        raise UsageError('union_by_kind: there is no input; write union_by_kind({"order": orders, ...}, shared=[...])')


@frozen
class Side:
    """One of the two inputs of a join. `kind`: Its value of the column `kind`. `fields`: Its columns in the output."""

    kind: str
    columns: Mapping[str, str]  # The name of each column in the output, by its name in the union.
    fields: tuple[StructField, ...]
    time: str  # Output name of the event-time column.


@frozen
class SideRows:
    """Rows of one input of a join, from the state or from a batch, with the columns of the output."""

    owners: Int64s  # For each row, the position of its key in the batch.
    times: Int64s  # Event times in microseconds.
    rows: pa.Table

    def chosen(self, which: Bools) -> SideRows:
        if which.all():
            return self
        return SideRows(owners=self.owners[which], times=self.times[which], rows=self.rows.filter(pa.array(which)))

    def followed_by(self, later: SideRows) -> SideRows:
        if not len(self.owners) or not len(later.owners):
            return later if len(later.owners) else self
        return SideRows(
            owners=np.concatenate([self.owners, later.owners]),
            times=np.concatenate([self.times, later.times]),
            rows=pa.concat_tables([self.rows.select(later.rows.column_names).cast(later.rows.schema), later.rows]),
        )


def check_kinds(cls: type, *settings: str) -> None:
    for name in settings:
        value = getattr(cls, name, None)
        if not isinstance(value, str) or not value:
            raise wrong_setting(cls, name, f"name the value of the column 'kind', as in {name} = \"order\"")
    first, second = (getattr(cls, name) for name in settings)
    if first.lower() == second.lower():
        raise UsageError(
            f"{cls.__name__}: {settings[0]} is {first!r} and {settings[1]} is {second!r}; each input needs a kind of its own, also without regard to case"
        )


def sides_of(owner: str, processor: str, handle: Any, kinds: Sequence[str]) -> tuple[Side, Side]:
    """Return the two inputs of a join, with the columns that belong to each.

    A column belongs to the input whose kind is its prefix, as in `order_amount`. If both kinds are prefixes, the longer
    one counts. Other columns belong to both inputs. In the output, their names get the kind as a prefix.
    """
    type_of_event_time(owner, processor, handle)
    key, schema = handle.key_schema.names, handle.input_schema
    if handle.event_time in key:
        raise UsageError(
            f"{owner}: the event time is the key column {handle.event_time!r}; key=[...] must name the columns that are equal on both sides"
        )
    if KIND in key or KIND not in schema.names or not isinstance(schema[KIND].dataType, StringType):
        raise UsageError(
            f'{owner}: {processor} needs the string column {KIND!r} in the input, outside of the key; let the source return union_by_kind({{"{kinds[0]}": ..., "{kinds[1]}": ...}}, shared=[...])'
        )
    if (of_time := _kind_of(handle.event_time, kinds)) is not None:
        raise UsageError(
            f"{owner}: the event time is column {handle.event_time!r}, which by its name belongs to {of_time!r} alone; give both inputs the event time under one name, such as 'at'"
        )
    sides: list[Side] = []
    taken: list[str] = list(key)
    for kind in kinds:
        columns: dict[str, str] = {}
        fields: list[StructField] = []
        for field in nullable(schema):
            if field.name in (*key, KIND):
                continue
            of = _kind_of(field.name, kinds)
            if of not in (None, kind):
                continue
            columns[field.name] = field.name if of else f"{kind}_{field.name}"
            check_free(owner, columns[field.name], taken, processor, "the output has a column")
            taken.append(columns[field.name])
            fields.append(StructField(columns[field.name], field.dataType))
        sides.append(Side(kind=kind, columns=columns, fields=tuple(fields), time=columns[handle.event_time]))
    return sides[0], sides[1]


def _kind_of(column: str, kinds: Iterable[str]) -> str | None:
    return max((kind for kind in kinds if column.startswith(f"{kind}_")), key=lambda kind: len(str(kind)), default=None)


def output_schema(handle: Any, sides: Sequence[Side], without: str | None = None) -> StructType:
    fields = [field for side in sides for field in side.fields if field.name != without]
    return StructType([*nullable(handle.key_schema), *fields])


def split_sides(
    owner: str, batch: KeyedBatch, event_time: str, sides: Sequence[Side]
) -> list[tuple[SideRows, SideRows]]:
    """Return for each side (rows that can match, rows that can't), from a batch.

    As in SQL, a row with a null in its key or its event time matches nothing.
    """
    kinds = whole(batch.rows[KIND])
    which = [booleans(pc.equal(kinds, side.kind)) for side in sides]
    if not (which[0] | which[1]).all():
        row = int(np.argmin(which[0] | which[1]))
        raise ProcessorError(
            f"{owner}: a row of key {key_of_row_text(batch, row)} has kind {kinds[row].as_py()!r}; the kinds are {sides[0].kind!r} and {sides[1].kind!r}"
        )
    time = whole(batch.rows[event_time])
    owners, times = batch.key_of_row, numbers(time)
    matches = valid_rows(time)
    for column in batch.keys.columns:
        if column.null_count:
            matches = matches & valid_rows(whole(column))[owners]
    result = []
    for side, mine in zip(sides, which, strict=True):
        renamed = batch.rows.select(list(side.columns)).rename_columns(list(side.columns.values()))
        rows = SideRows(owners=owners, times=times, rows=renamed)
        result.append((rows.chosen(mine & matches), rows.chosen(mine & ~matches)))
    return result


def held_rows(held: Any, side: Side) -> SideRows:
    return SideRows(owners=held.key_of_row, times=numbers(whole(held.rows[side.time])), rows=held.rows)


def no_rows(side: Side) -> SideRows:
    table = to_arrow_schema(StructType(list(side.fields))).empty_table()
    return SideRows(owners=np.zeros(0, np.int64), times=np.zeros(0, np.int64), rows=table)


def output_rows(
    batch: KeyedBatch, owners: Int64s, parts: Sequence[tuple[Side, pa.Table, Int64s]], schema: pa.Schema
) -> pa.Table:
    output = keys_at(batch, owners)
    for side, rows, at in parts:
        places = pa.array(at, mask=at < 0)
        for name in side.columns.values():
            if name in schema.names:
                output[name] = whole(rows[name]).take(places)
    return pa.table(output).cast(schema)


def positions(
    owners: Int64s, times: Int64s, bounds: Sequence[tuple[Int64s, Int64s, Literal["left", "right"]]]
) -> tuple[Int64s, list[Int64s]]:
    """Return (order, places): the order of rows by key and time, and the places of each bound in this order.

    A bound is (keys, times, side). A place is what `np.searchsorted` finds for a key and a time on this side.
    """
    order = np.lexsort((times, owners))
    every = np.concatenate([times, *(at for _, at, _ in bounds)])
    keys = 1 + max(max((int(part.max(initial=0)) for part, _, _ in bounds), default=0), int(owners.max(initial=0)))
    low = int(every.min(initial=0))
    span = int(every.max(initial=0)) - low + 1
    if span * keys < 2**62:
        ranks = every - low
    else:
        ranks = np.unique(every, return_inverse=True)[1].astype(np.int64)
        span = len(every)
    placed = (owners * span + ranks[: len(times)])[order]
    found, at = [], len(times)
    for of_key, of_time, side in bounds:
        found.append(np.searchsorted(placed, of_key * span + ranks[at : at + len(of_time)], side=side))
        at += len(of_time)
    return order, found


def remove_rows(state: Any, rows: SideRows, gone: Bools) -> SideRows:
    kept, touched = rows.chosen(~gone), np.unique(rows.owners[gone])
    again = kept.chosen(np.isin(kept.owners, touched))
    state.clear(np.setdiff1d(touched, again.owners))
    state.put(again.owners, again.rows)
    return kept


def register_first(handle: Any, first: Int64s) -> None:
    timed = np.flatnonzero(first < NO_TIME)
    handle.registerTimer(timed, ceil_ms(first[timed]))


def earliest(keys: int, *parts: tuple[Int64s, Int64s]) -> Int64s:
    """Return the earliest time of each of `keys` keys over all `parts` (keys, times); `NO_TIME` if it has none."""
    first = np.full(keys, NO_TIME)
    for owners, times in parts:
        np.minimum.at(first, owners, times)
    return first
