"""The sink for a Delta table, through the package deltalake. It needs no Spark.

Each interval is a partition of the table. One Delta commit replaces the partition's files, and sets the version of a transaction
identifier to the checkpoint's id. The identifier is `cairn/PIPELINE/GENERATION/START/END`. `cairn publish --rebuild` raises
GENERATION, and the sink no longer finds the ids of before. If the sink stops:

    before the commit     The table has the old rows. Files without a commit stay until `VACUUM`. The next call does all of the work.
    after the commit,     The table has the new rows. The next call finds the checkpoint's id and changes nothing.
    before the answer
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from typing_extensions import override

from cairn.sinks.plan_publication import plan_publication
from cairn.sinks.table_sink import END, INSTANT, NO_ROWS, START, Publication, TableSink, library, with_type
from state_backend.values.errors import UsageError
from state_backend.values.intervals import Interval, format_instant

# How often the sink tries to commit. A try fails if another process has changed the same interval or the schema meanwhile.
_ROUNDS = 10


def delta(url: str, storage_options: Mapping[str, str] | None = None) -> DeltaSink:
    """Return a `Pipeline.sink` that keeps a Delta table equal to the pipeline's output.

    The first call creates the table: the columns of the output, and the partition columns `interval_start` and `interval_end`.
    The sink adds columns that the output gains. A column keeps its type: a value that does not fit fails the call. A table
    belongs to one pipeline. Its owner runs `OPTIMIZE` and `VACUUM`.

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
    """The sink that `delta` returns."""

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
            table = self._table(publication.pipeline)
            try:
                return self._publish(table, publication)
            except errors.CommitFailedError:
                if not left:
                    raise
            except errors.DeltaError:
                # Another process may have made the table meanwhile.
                if not left or table is not None or self._table() is None:
                    raise

    @override
    def row_counts(self) -> dict[Interval, int]:
        table = self._table()
        if table is None:
            return {}
        found: dict[Interval, int] = {}
        for file in pa.table(table.get_add_actions(flatten=False)).to_pylist():
            interval = _interval_of(file["partition"])
            found[interval] = found.get(interval, 0) + file["num_records"]
        return {interval: n for interval, n in found.items() if n}

    @override
    def rows(self, interval: Interval, schema: pa.Schema) -> pa.Table:
        table = self._table()
        assert table is not None, "row_counts() named no rows"
        found = self._read(table, interval)
        missing = [name for name in schema.names if name not in found.column_names]
        for name in missing:
            found = found.append_column(name, pa.nulls(len(found), schema.field(name).type))
        return found.select(schema.names).cast(schema, safe=False)

    @override
    def table_url(self) -> str:
        return self._url

    @override
    def clear(self, pipeline: str) -> None:
        table = self._table(pipeline)
        if table is not None:
            generation = library("deltalake", "delta").Transaction(
                _generation_id(pipeline), _generation(table, pipeline) + 1
            )
            self._write(table, pipeline, NO_ROWS, "true", generation)

    def _publish(self, table: Any, publication: Publication) -> None:
        deltalake = library("deltalake", "delta")
        interval, pipeline = publication.interval, publication.pipeline
        generation = 0 if table is None else _generation(table, pipeline)
        stored: dict[Interval, int] = {}
        if table is not None:
            # Only overlapping intervals: `transaction_version` scans the identifiers of all intervals, which may be thousands.
            others = {other for other in map(_interval_of, table.partitions()) if other.overlaps(interval)}
            for near in {interval, *others}:
                version = table.transaction_version(_app_id(pipeline, generation, near))
                if version is not None:
                    stored[near] = version
        replaced = plan_publication(stored, interval, publication.checkpoint_id, is_replaced=publication.replaced)
        if replaced is None:
            return
        transaction = deltalake.Transaction(_app_id(pipeline, generation, interval), publication.checkpoint_id)
        self._write(table, pipeline, publication.table(), _is_one_of(replaced), transaction)

    def _write(self, table: Any, pipeline: str, rows: pa.Table, where: str, transaction: Any) -> None:
        deltalake = library("deltalake", "delta")
        common = {
            "storage_options": self._options or None,
            "commit_properties": deltalake.CommitProperties(app_transactions=[transaction]),
        }
        if table is None:
            made = {"partition_by": [START, END], "description": _description(pipeline)}
            # Create the table even without rows: it stores the checkpoint's id, so a late call with an older id changes nothing.
            deltalake.write_deltalake(self._url, rows, mode="error", **made, **common)
            return
        rows = _fitted(rows, pa.schema(table.schema()))
        deltalake.write_deltalake(table, rows, mode="overwrite", predicate=where, schema_mode="merge", **common)

    def _table(self, pipeline: str | None = None) -> Any:
        """Return the newest version of the table; None if there is no table."""
        deltalake = library("deltalake", "delta")
        try:
            table = deltalake.DeltaTable(self._url, storage_options=self._options or None)
        except deltalake.exceptions.TableNotFoundError:
            return None
        description = table.metadata().description
        if pipeline is not None and description != _description(pipeline):
            raise UsageError(
                f"{self._url} is a table with the description {description!r}, but the sink of {pipeline!r} makes a table with "
                f"the description {_description(pipeline)!r}\nGive each pipeline a table of its own"
            )
        return table

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


def _interval_of(partition: Mapping[str, Any]) -> Interval:
    return Interval(*(_instant(partition[name]) for name in (START, END)))


def _instant(value: Any) -> datetime:
    made = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    return made if made.tzinfo else made.replace(tzinfo=UTC)


def _is_one_of(intervals: Iterable[Interval]) -> str:
    return " OR ".join(
        f"({START} = '{interval.start.isoformat()}' AND {END} = '{interval.end.isoformat()}')"
        for interval in sorted(intervals)
    )


def _fitted(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Cast each column to the type in the table. A new column keeps its type; a missing column becomes null."""
    for field in rows.schema:
        there = schema.field(field.name).type if field.name in schema.names else field.type
        if there != field.type:
            rows = with_type(rows, field.name, there)
    for field in schema:
        if field.name not in rows.column_names:
            rows = rows.append_column(field.name, pa.nulls(len(rows), field.type))
    return rows
