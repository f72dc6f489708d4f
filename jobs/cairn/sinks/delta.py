"""The sink for a Delta table, through the package deltalake. It needs no Spark.

Each interval is a partition of the table. One Delta commit replaces the partition's files, and sets the version of a
transaction identifier to the checkpoint's id. The identifier is `cairn/PIPELINE/GENERATION/START/END`. `cairn publish
--rebuild` raises GENERATION, so that the sink no longer finds earlier ids. The version of `cairn/PIPELINE/log` is a
hash of the id of the pipeline's log. If the sink stops:

    before the commit     The table has the old rows. Files without a commit stay until `VACUUM`. The next call does all
                          of the work.
    after the commit,     The table has the new rows. The next call finds the checkpoint's id and changes nothing.
    before the answer
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from typing_extensions import override

from cairn.sinks.table_sink import (
    END,
    INSTANT,
    NO_ROWS,
    START,
    Owner,
    Publication,
    TableSink,
    counts_of,
    library,
    must_store_owner,
    with_type,
)
from state_backend.values.errors import UsageError
from state_backend.values.intervals import Interval, format_instant

# Largest number of tries to commit. A try fails if another process has changed the same interval or the schema since
# the sink read the table.
_ROUNDS = 10

# Readers skip files by each column's bounds (smallest and largest value) in Delta's log. deltalake rounds the bounds of
# decimals to doubles, or clips them to 64 bits. For a column without values, it tests `column >= null`. By each of
# these, filters lose rows. So the log gets no bounds. Intervals are partitions: readers still skip other intervals.
_NO_STATISTICS = {"delta.dataSkippingNumIndexedCols": "0"}


def delta(url: str, storage_options: Mapping[str, str] | None = None) -> DeltaSink:
    """Return a `Pipeline.sink` that keeps a Delta table equal to the pipeline's output.

    The first call creates the table: the columns of the output, and the partition columns `interval_start` and
    `interval_end`. The sink adds columns that the output gains. A column keeps its type: a value that does not fit
    fails the call. A table belongs to one pipeline. Its owner runs `OPTIMIZE` and `VACUUM`.

    Args:
        url: Folder of the table: `file:///…`, `s3://…`, `gs://…` or `abfss://…`.
        storage_options: Options of deltalake's object store, such as `AWS_REGION`. None: the environment.

    Raises:
        UsageError: The URL has no scheme. A call raises this error if deltalake is missing, or if a value does not fit
            the type of its column.

    Example:
        Pipeline(..., sink=sinks.delta("s3://warehouse/clicks"))
    """
    return DeltaSink(url, storage_options)


class DeltaSink(TableSink):
    def __init__(self, url: str, storage_options: Mapping[str, str] | None) -> None:
        if "://" not in url:
            raise UsageError(f"{url!r} has no scheme; expected a URL such as file:///data/tables/clicks")
        self._url, self._options = url.rstrip("/"), dict(storage_options or {})

    def __repr__(self) -> str:
        return f"delta({self._url!r})"

    @override
    def publish(self, publication: Publication) -> None:
        errors = library("deltalake", "delta").exceptions
        for left in reversed(range(_ROUNDS)):
            table = self._table()
            try:
                return self._publish(table, publication)
            except errors.CommitFailedError:
                if not left:
                    raise
            except errors.DeltaError:
                # Try again if the table did not exist before, and another process has created it since.
                if not left or table is not None or self._table() is None:
                    raise

    @override
    def row_counts(self) -> dict[Interval | None, int]:
        table = self._table()
        if table is None:
            return {}
        files = pa.table(table.get_add_actions(flatten=False)).to_pylist()
        return counts_of((*_instants(file["partition"]), file["num_records"]) for file in files)

    @override
    def rows(self, interval: Interval, schema: pa.Schema) -> pa.Table:
        table = self._table()
        assert table is not None, "row_counts() named no rows"
        found = self._read(table, interval)
        there = pa.schema([field for field in schema if field.name in found.column_names])
        return found.select(there.names).cast(there, safe=False)

    @override
    def table_url(self) -> str:
        return self._url

    @override
    def clear(self, owner: Owner, *, takes_over: bool = False) -> None:
        table = self._table()
        if table is not None:
            new = self._new_owner(table, owner, takes_over=takes_over)
            new[_generation_id(owner.name)] = _generation(table, owner.name) + 1
            self._write(table, owner, NO_ROWS, "true", new)

    def _publish(self, table: Any, publication: Publication) -> None:
        interval, owner, pipeline = publication.interval, publication.owner, publication.owner.name
        new = self._new_owner(table, owner)
        generation = 0 if table is None else _generation(table, pipeline)
        stored: dict[Interval, int] = {}
        if table is not None:
            # Ask only for overlapping intervals: each call of `transaction_version` scans the identifiers of all
            # intervals, which may be thousands.
            others = {Interval(*_instants(partition)) for partition in table.partitions()}
            others = {other for other in others if other.overlaps(interval)}
            for near in {interval, *others}:
                version = table.transaction_version(_app_id(pipeline, generation, near))
                if version is not None:
                    stored[near] = version
        replaced = publication.replaces(stored)
        if replaced is None:
            return
        new[_app_id(pipeline, generation, interval)] = publication.checkpoint_id
        self._write(table, owner, publication.table(), _is_one_of(replaced), new)

    def _write(self, table: Any, owner: Owner, rows: pa.Table, where: str, new: Mapping[str, int]) -> None:
        """Commit: replace the rows that `where` selects, and set the versions of transaction identifiers."""
        deltalake = library("deltalake", "delta")
        transactions = [deltalake.Transaction(app_id, version) for app_id, version in new.items()]
        common = {
            "storage_options": self._options or None,
            "commit_properties": deltalake.CommitProperties(app_transactions=transactions),
        }
        rows = _fit(rows, pa.schema([] if table is None else table.schema()))
        if table is None:
            made = {"partition_by": [START, END], "description": _description(owner.name)}
            # Create the table even without rows. It then stores the checkpoint's id, so that a late call with an older
            # id changes nothing.
            deltalake.write_deltalake(self._url, rows, mode="error", configuration=_NO_STATISTICS, **made, **common)
            return
        deltalake.write_deltalake(table, rows, mode="overwrite", predicate=where, schema_mode="merge", **common)

    def _new_owner(self, table: Any, owner: Owner, *, takes_over: bool = False) -> dict[str, int]:
        """Return {identifier: version} that makes `owner` the table's owner; empty if it is the owner already."""
        hash_of_log = hashlib.blake2b(owner.log.encode(), digest_size=7).digest()
        new = {f"cairn/{owner.name}/log": int.from_bytes(hash_of_log, "big")}
        if table is None:
            return new
        metadata = table.metadata()
        if (description := metadata.description) != _description(owner.name):
            raise UsageError(
                f"{self._url} is a table with the description {description!r}, but the sink of {owner.name!r} makes a table with "
                f"the description {_description(owner.name)!r}\nGive each pipeline a table of its own"
            )
        ((app_id, version),) = new.items()
        there = table.transaction_version(app_id)
        # Delta stores a hash of the log's id instead of the id. So the text of another owner contains the hash.
        stored = owner.name if there is None else str(owner) if there == version else f"{owner.name}@{there}"
        must_store = must_store_owner(stored, owner, self._url, takes_over=takes_over)
        if not any(name.startswith("delta.dataSkipping") for name in metadata.configuration):
            # An older release made the table. Read the owner again, and the checkpoint ids only now: this commit may
            # follow one of another process.
            table.alter.set_table_properties(_NO_STATISTICS)
            return self._new_owner(table, owner, takes_over=takes_over)
        return new if must_store else {}

    def _table(self) -> Any:
        """Read and return the table in its newest version; None if there is no table."""
        deltalake = library("deltalake", "delta")
        try:
            return deltalake.DeltaTable(self._url, storage_options=self._options or None)
        except deltalake.exceptions.TableNotFoundError:
            return None

    def _read(self, table: Any, interval: Interval) -> pa.Table:
        import pyarrow.compute as pc

        where = (pc.field(START) == pa.scalar(interval.start, INSTANT)) & (
            pc.field(END) == pa.scalar(interval.end, INSTANT)
        )
        return table.to_pyarrow_dataset().to_table(filter=where)


def _description(pipeline: str) -> str:
    return f"Output of Cairn's pipeline {pipeline}"


def _generation_id(pipeline: str) -> str:
    return f"cairn/{pipeline}/generation"


def _generation(table: Any, pipeline: str) -> int:
    return table.transaction_version(_generation_id(pipeline)) or 0


def _app_id(pipeline: str, generation: int, interval: Interval) -> str:
    return f"cairn/{pipeline}/{generation}/{format_instant(interval.start)}/{format_instant(interval.end)}"


def _instants(partition: Mapping[str, Any]) -> tuple[Any, Any]:
    return _instant(partition[START]), _instant(partition[END])


def _instant(value: Any) -> datetime | None:
    if value is None:
        return None
    made = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    return made if made.tzinfo else made.replace(tzinfo=UTC)


def _is_one_of(intervals: Iterable[Interval]) -> str:
    return " OR ".join(
        f"({START} = '{interval.start.isoformat()}' AND {END} = '{interval.end.isoformat()}')"
        for interval in sorted(intervals)
    )


def _fit(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Cast each column to the type in the table. A new column or field keeps its type; a missing one becomes null.

    Every column that the sink makes takes nulls, because Delta can't let a column take nulls later.

    Raises:
        UsageError: A value does not fit, or a column that an older release made takes no null.
    """
    for field in rows.schema:
        there = schema.field(field.name).type if field.name in schema.names else _nullable(field.type)
        kind = _merged(there, field.type)
        if kind != field.type or not field.nullable:
            rows = with_type(rows, field.name, kind)
    for field in schema:
        if field.name not in rows.column_names:
            rows = rows.append_column(field.name, pa.nulls(len(rows), field.type))
        if rows[field.name].null_count and not field.nullable:
            raise UsageError(
                f"the table's column {field.name!r} takes no null, and the output has a null or lacks the column\n"
                "Give the sink a new table, and fill that table:\ncairn publish --rebuild"
            )
    return rows


def _merged(there: pa.DataType, new: pa.DataType) -> pa.DataType:
    """Return the type `there`, to which structs get the fields that only `new` has. The new fields take nulls."""
    if pa.types.is_struct(there) and pa.types.is_struct(new):
        old, more = ({part.name: part for part in kind} for kind in (there, new))
        kept = [part.with_type(_merged(part.type, more.get(name, part).type)) for name, part in old.items()]
        return pa.struct([*kept, *((name, _nullable(part.type)) for name, part in more.items() if name not in old)])
    if pa.types.is_map(there) and pa.types.is_map(new):
        item = there.item_field
        return pa.map_(_merged(there.key_type, new.key_type), item.with_type(_merged(item.type, new.item_type)))
    if pa.types.is_list(there) and pa.types.is_list(new):
        return pa.list_(there.value_field.with_type(_merged(there.value_type, new.value_type)))
    return there


def _nullable(kind: pa.DataType) -> pa.DataType:
    """Return the type with nested fields that all take nulls."""
    if pa.types.is_struct(kind):
        return pa.struct([(part.name, _nullable(part.type)) for part in kind])
    if pa.types.is_map(kind):
        return pa.map_(_nullable(kind.key_type), _nullable(kind.item_type))
    return pa.list_(_nullable(kind.value_type)) if pa.types.is_list(kind) else kind
