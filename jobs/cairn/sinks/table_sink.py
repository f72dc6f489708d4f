"""Base class of the sinks that write tables, and `Publication`: the output of one interval, as these sinks read it."""

from __future__ import annotations

import hashlib
import json
import math
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from importlib import import_module
from typing import Any, ClassVar, Literal, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.log import id_of_log
from state_backend.values.errors import UsageError
from state_backend.values.handles import Handle
from state_backend.values.intervals import Interval
from state_backend.values.records import OutputFile
from state_backend.values.release import WHEEL

# The columns that each table has in addition to those of the output.
START, END = "interval_start", "interval_end"
# The column that a table of late rows has in addition.
CHECKPOINT = "checkpoint_id"
INSTANT = pa.timestamp("us", "UTC")
NO_ROWS = pa.schema([(START, INSTANT), (END, INSTANT)]).empty_table()
_HASH_BITS = 128


@dataclass(frozen=True, slots=True)
class Owner:
    """The only writer of a table. A table stores it, and the sink refuses another writer.

    Attributes:
        name: Name of the pipeline; for late rows followed by `/late`, so that output and late rows can't share a table.
        log: Id of the pipeline's log. Two pipelines with the same name in two roots have different log ids.
    """

    name: str
    log: str

    def __str__(self) -> str:
        return f"{self.name}@{self.log}"


def must_store_owner(stored: str, owner: Owner, table: str, *, takes_over: bool = False) -> bool:
    """Return True if the sink must store `owner` as the table's owner; False if the table stores `owner` already.

    `stored`: The owner that the table stores. Old releases stored only the pipeline's name. The first pipeline of this
    name then becomes the owner. With `takes_over`, the writer deletes all rows, and may take the table from the
    pipeline of this name in another root.

    Raises:
        UsageError: The table belongs to another pipeline, or to this pipeline in another root.
    """
    name = stored.partition("@")[0]
    if name != owner.name:
        raise UsageError(
            f"the table {table} has the output of pipeline {name!r}, so {owner.name!r} can't write it\n"
            "Give each pipeline a table of its own"
        )
    if stored == str(owner):
        return False
    if stored != name and not takes_over:
        raise UsageError(
            f"the table {table} has the output of pipeline {name!r} in another root, so {name!r} in this root can't write it\n"
            "Give the pipeline of each root a table of its own. To delete all rows of the table, and fill it from this root:\n"
            "cairn publish --rebuild --yes"
        )
    return True


def foreign_rows(table: str) -> UsageError:
    return UsageError(
        f"the table {table} has rows, but the sink has never written to it, so it deletes none of them\n"
        "Name another table, or delete the rows yourself"
    )


@dataclass(frozen=True, slots=True)
class LongestName:
    """The longest name of a table or column that a system keeps."""

    system: str
    length: int
    unit: Literal["bytes", "characters"]

    def check(self, what: str, name: str, advice: str) -> None:
        """Raise `UsageError` if the name is too long. PostgreSQL would shorten it, and two names could become one."""
        length = len(name.encode() if self.unit == "bytes" else name)
        if length > self.length:
            raise UsageError(
                f"{what} {name!r} has {length} {self.unit}, and {self.system} keeps {self.length}\n{advice}"
            )


@dataclass(frozen=True, slots=True)
class Publication:
    """The output of one interval, as a sink gets it.

    Attributes:
        owner: The pipeline, as the table stores it.
        interval: The interval. Its rows in the table are replaced.
        checkpoint_id: Id of the commit that made the output. If `replaced`: id of the commit that replaced the output;
            `files` is then empty.
        files: The Parquet files of the output without late rows, or those of the late rows; empty if the interval has
            no such rows.
        late: True if the rows are late rows.
        replaced: True if another interval's commit replaced the output: the call only deletes the interval's rows.
    """

    owner: Owner
    interval: Interval
    checkpoint_id: int
    root_url: str = ""
    files: Sequence[Handle] = ()
    late: bool = False
    replaced: bool = False

    def replaces(self, stored: Mapping[Interval, int]) -> frozenset[Interval] | None:
        """Return the intervals whose rows the call deletes; None if the call must change nothing.

        A call is old in two cases. The table has this checkpoint or a newer checkpoint of the interval. Or an
        overlapping interval has a newer checkpoint, which replaced this output.

        A call that is not old deletes the rows of its interval, and the rows of overlapping intervals with an older
        checkpoint. Rows of the same checkpoint stay: a commit of an hour that replaces a day makes one call for the
        hour and one for the day.

        The call for a replaced interval deletes only this interval's rows, and newer checkpoints of other intervals do
        not make the call old. Otherwise the call for the day could delete the hour's old rows before the call for the
        hour inserts the new rows.

        Args:
            stored: The newest checkpoint of each interval in the table; at least of the intervals that overlap.
        """
        near = {other: n for other, n in stored.items() if other.overlaps(self.interval)}
        if near.pop(self.interval, 0) >= self.checkpoint_id:
            return None
        if self.replaced:
            return frozenset({self.interval})
        if any(n > self.checkpoint_id for n in near.values()):
            return None
        return frozenset({self.interval, *(other for other, n in near.items() if n < self.checkpoint_id)})

    def output(self) -> Iterator[pa.Table]:
        """Download each file, compare its checksum, and yield its rows; late rows with the column `checkpoint_id`.

        Raises:
            UsageError: Late rows have a column `checkpoint_id` already.
            CorruptFile: A file has another checksum than the record says.
        """
        for rows in self._download():
            if not self.late:
                yield rows
                continue
            _check_free(self.owner.name, True, {CHECKPOINT}, rows.column_names)
            yield rows.append_column(CHECKPOINT, pa.repeat(pa.scalar(self.checkpoint_id, pa.int64()), len(rows)))

    def _download(self) -> Iterator[pa.Table]:
        if not self.files:
            return
        storage = open_storage(self.root_url)
        with work_folder("sink") as folder:
            for number, handle in enumerate(self.files):
                file = folder / f"{number}.parquet"
                storage.download(handle, file)
                yield pq.read_table(file)
                file.unlink()

    def table(self) -> pa.Table:
        """Return the rows of all files as `tables` yields them. Without files, return an empty table."""
        tables = [*self.tables()]
        return pa.concat_tables(tables, promote_options="default") if tables else NO_ROWS

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows of each file with the columns `interval_start` and `interval_end`.

        Raises:
            UsageError: The output has a column `interval_start` or `interval_end`.
            CorruptFile: A file has another checksum than the record says.
        """
        for table in self.output():
            _check_free(self.owner.name, self.late, {START, END}, table.column_names)
            start, end = (
                pa.repeat(pa.scalar(instant, INSTANT), len(table))
                for instant in (self.interval.start, self.interval.end)
            )
            yield table.append_column(START, start).append_column(END, end)


@dataclass(frozen=True, slots=True)
class Difference:
    interval: Interval
    # Number of rows in the output; None if the interval has no output.
    expected: int | None
    found: int  # Number of the interval's rows in the table.
    missing: Sequence[str] = ()  # Columns with values that the table lacks.

    def __str__(self) -> str:
        if self.expected is None:
            return f"{self.interval}: the table has {self.found} rows of an interval without output"
        if self.missing:
            return f"{self.interval}: the table lacks {', '.join(map(repr, self.missing))}"
        if self.expected == self.found:
            return f"{self.interval}: {self.found} rows in both, but with other values"
        return f"{self.interval}: {self.expected} rows in the output, {self.found} in the table"


class TableSink(ABC):
    """A sink that keeps a table equal to the output of one pipeline.

    One transaction changes an interval's rows and stores the checkpoint's id. So the table stays right if a call is
    repeated, comes late, or loses its answer.
    """

    _late_rows: TableSink | None = None
    # The longest name that a column can have; None if there is no limit, as in Delta and Iceberg.
    longest_column: ClassVar[LongestName | None] = None

    def with_late_rows(self, table: TableSink) -> Self:
        """Return this sink with a second table, which the sink keeps equal to the pipeline's late rows.

        The second table has the columns of the input, `interval_start`, `interval_end` and `checkpoint_id`. It may be
        of another kind. Each table changes in a transaction of its own.

        Args:
            table: A sink of `cairn.sinks` for the late rows. Its table must be another one.

        Raises:
            UsageError: Both sinks write the same table, or one of them already has a table for late rows.

        Example:
            Pipeline(..., sink=sinks.delta("s3://warehouse/clicks").with_late_rows(sinks.delta("s3://warehouse/late_clicks")))
        """
        if repr(self) == repr(table):
            raise UsageError(f"{table!r} is the table of the output; give late rows another table")
        if self._late_rows is not None or table._late_rows is not None:
            raise UsageError(f"{self!r} or {table!r} has a table for late rows already; call with_late_rows once")
        made = copy(self)
        made._late_rows = table
        return made

    def each_table(self) -> list[tuple[TableSink, bool]]:
        """Return (sink, late) for this sink and for that of `with_late_rows`. `late`: True if it takes late rows."""
        return [(self, False), *([(self._late_rows, True)] if self._late_rows is not None else [])]

    @abstractmethod
    def publish(self, publication: Publication) -> None:
        """Replace the interval's rows in one transaction. Change nothing if the table has these or newer rows."""

    def check_columns(self, pipeline: str, names: Sequence[str], *, late: bool = False) -> None:
        """Check the names of the output's columns. Cairn calls the method before it processes an interval.

        Args:
            pipeline: Name of the pipeline, for the message.
            names: The columns of the output, or of the late rows.
            late: True for late rows.

        Raises:
            UsageError: The table can't have a column of one of these names beside its own columns.
        """
        _check_free(pipeline, late, {START, END, CHECKPOINT} if late else {START, END}, names)
        if self.longest_column is not None:
            for name in names:
                self.longest_column.check(f"pipeline {pipeline!r}: the column", name, f"Rename it in {_place(late)}")

    @abstractmethod
    def row_counts(self) -> dict[Interval | None, int]:
        """Return the number of rows of each interval in the table. The key None counts rows without an interval."""

    @abstractmethod
    def rows(self, interval: Interval, schema: pa.Schema) -> pa.Table:
        """Return the rows of an interval in any order, with those columns of the schema that the table has.

        Raises:
            ValueError, TypeError, ArithmeticError: The table has a value that the column's type in the schema does not
            have.
        """

    @abstractmethod
    def table_url(self) -> str:
        """Return the URL of the table, such as `s3://bucket/table` or `postgres://host:5432/database/schema/table`.

        The URL has no user name and no password. Lineage events name the table by it.
        """

    @abstractmethod
    def clear(self, owner: Owner, *, takes_over: bool = False) -> None:
        """Delete all rows of the table, and the checkpoint ids that the sink stored, in one transaction.

        The table itself stays.

        Args:
            owner: The pipeline.
            takes_over: Clear the table also if it belongs to the pipeline of this name in another root.
        """

    def check(self, current: Iterable[Publication]) -> list[Difference]:
        """Compare the rows of each interval in the table with the output, by number and hash. Return the differences.

        Args:
            current: The current output of each interval.
        """
        counts, found = self.row_counts(), []
        counts.pop(None, None)  # Rows that somebody else added may have no interval.
        for publication in current:
            tables, there = [*publication.output()], counts.pop(publication.interval, 0)
            expected = sum(map(len, tables))
            if expected != there:
                found.append(Difference(publication.interval, expected, there))
            elif expected and (missing := self._differs(publication.interval, pa.concat_tables(tables))) is not None:
                found.append(Difference(publication.interval, expected, there, missing))
        found += [Difference(interval, None, n) for interval, n in counts.items() if interval is not None]
        return sorted(found, key=lambda difference: difference.interval)

    def _differs(self, interval: Interval, ours: pa.Table) -> list[str] | None:
        """Return None if the table has the rows `ours`. Otherwise list the columns with values that the table lacks."""
        try:
            theirs = self.rows(interval, ours.schema)
        except (ValueError, TypeError, ArithmeticError, pa.ArrowException):
            return []  # The rows differ: somebody has changed the type of a column.
        lacks = [name for name in ours.column_names if name not in theirs.column_names]
        missing = [name for name in lacks if ours[name].null_count < len(ours)]
        if missing or hash_of_rows(ours.drop_columns(lacks)) != hash_of_rows(theirs):
            return missing
        return None


def counts_of(counted: Iterable[tuple[datetime | None, datetime | None, int]]) -> dict[Interval | None, int]:
    """Sum (start, end, rows) to the number of rows by interval. The key None counts rows without start or end."""
    found: dict[Interval | None, int] = {}
    for start, end, n in counted:
        interval = None if start is None or end is None else Interval(start, end)
        found[interval] = found.get(interval, 0) + n
    return {interval: n for interval, n in found.items() if n}


def published_output(
    owner: Owner,
    root_url: str,
    interval: Interval,
    checkpoint_id: int,
    outputs: Sequence[OutputFile],
    *,
    late: bool = False,
) -> Publication:
    """Return the publication of a commit's output or, with `late`, of its late rows. `outputs`: The files of both."""
    files = [output.handle for output in outputs if output.late == late]
    return Publication(owner, interval, checkpoint_id, root_url, files, late)


def owner_of(pipeline: str, root_url: str, *, late: bool) -> Owner:
    """Return the owner of the table that a pipeline's output or late rows go to."""
    return Owner(f"{pipeline}/late" if late else pipeline, id_of_log(open_storage(root_url)))


def _place(late: bool) -> str:
    return "the source" if late else "output_schema"


def _check_free(pipeline: str, late: bool, own: set[str], names: Iterable[str]) -> None:
    """Raise `UsageError` if the rows have a column that the sink adds (`own`). Ignore case, as most tables do."""
    taken = min((name for name in names if name.lower() in own), default=None)
    if taken is None:
        return
    what = "checkpoint's id" if taken.lower() == CHECKPOINT else "interval"
    raise UsageError(
        f"{'a late row of' if late else 'the output of'} {pipeline!r} has a column {taken!r}, but the sink writes the {what} into "
        f"the column of this name\nRename the column in {_place(late)}"
    )


def hash_of_rows(table: pa.Table) -> str:
    """Return a hash of all rows. The hash does not depend on the order of the rows, but it counts duplicates."""
    total, names = 0, sorted(table.column_names)
    for row in zip(*(plain_values(table[name]) for name in names), strict=True):
        digest = hashlib.blake2b(json.dumps(row).encode(), digest_size=_HASH_BITS // 8).digest()
        total += int.from_bytes(digest, "big")
    return f"{total % 2**_HASH_BITS:032x}"


def plain_values(column: pa.ChunkedArray) -> Iterator[Any]:
    """Yield each value of a column as a JSON value. Different values differ; a struct, list or map becomes a string."""
    if pa.types.is_nested(column.type):
        return (None if value is None else nested_text(value) for value in column.to_pylist())
    return (as_json(value) for value in column.to_pylist())


def nested_text(value: Any) -> str:
    """Return a struct, list or map as JSON. Equal numbers become equal text, since a database may store 1.0 as 1."""
    return json.dumps(_with_plain_numbers(as_json(value)))


def _with_plain_numbers(value: Any) -> Any:
    match value:
        case bool() | None | str():
            return value
        case int() | float():
            return repr(float(value) + 0.0) if float(value) == value else str(value)
        case dict():
            return {name: _with_plain_numbers(part) for name, part in value.items()}
    return [_with_plain_numbers(part) for part in value]


def as_json(value: Any) -> Any:
    """Return a value of Parquet as a JSON value: maps as lists of pairs, instants in UTC, bytes as hex digits."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else repr(value)
        case Decimal():
            return str(value)
        case datetime():
            return (value.astimezone(UTC) if value.tzinfo else value).isoformat()
        case date():
            return value.isoformat()
        case bytes():
            return value.hex()
        case dict():
            return {name: as_json(part) for name, part in sorted(value.items())}
        case list() | tuple():
            return [as_json(part) for part in value]
    raise UsageError(
        f"a table sink can't write a value of type {type(value).__name__}; leave its column out of output_schema"
    )


def library(name: str, extra: str) -> Any:
    """Import a sink's library.

    Raises:
        UsageError: The library is not installed here. The message has the command that installs it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name.partition(".")[0]:
            raise
        raise UsageError(
            f"the sink needs {name}, which {socket.gethostname()} lacks; install it there: pip install './{WHEEL}[{extra}]'"
        ) from None


def with_type(rows: pa.Table, name: str, kind: pa.DataType) -> pa.Table:
    """Return the rows with one column cast to its type in the sink's table.

    Raises:
        UsageError: A value does not fit.
    """
    column = rows[name].combine_chunks()
    try:
        made = column.cast(kind)
        why = "the cast would change it" if _is_changed(column, made) else None
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        why = str(error)
    if why is not None:
        raise UsageError(
            f"the table's column {name!r} has the type {kind}, and a value of type {column.type} does not fit: {why}\n"
            "Give the sink a new table, and fill that table:\ncairn publish --rebuild"
        )
    return rows.set_column(rows.schema.get_field_index(name), name, made)


def _is_changed(before: pa.Array, after: pa.Array) -> bool:
    """Return True if a cast has changed a value: pyarrow may round decimals and floats, and truncate times."""
    old, new = before.type, after.type
    if old == new or pa.types.is_null(old):
        return False
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        before, after = (column.filter(column.is_valid()) for column in (before, after))
        fields = [(before.field(o), new.get_field_index(part.name)) for o, part in enumerate(old)]
        # A cast drops a field that the new type lacks.
        return any(_is_changed(o, after.field(n)) if n >= 0 else o.null_count < len(o) for o, n in fields)
    if pa.types.is_map(old):
        return _is_changed(_pairs(before), _pairs(after))
    if pa.types.is_nested(old):
        return _is_changed(before.flatten(), after.flatten())
    back = after.cast(old)
    if pa.types.is_floating(old):  # NaN is left out, since it does not equal itself.
        back, before = (column.filter(pc.invert(pc.is_nan(column))) for column in (back, before))
    return not back.equals(before)


def _pairs(column: pa.Array) -> pa.Array:
    """Return maps as lists of structs `key` and `value`. BigQuery's sink casts a map to such lists."""
    if not pa.types.is_map(kind := column.type):
        return column
    return column.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
