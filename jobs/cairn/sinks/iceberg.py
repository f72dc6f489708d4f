"""A sink that writes an Iceberg table with the package pyiceberg, without Spark.

Each call that changes the table makes one Iceberg commit. The commit deletes the interval's old rows, inserts the new
rows, and stores the checkpoint's id in the table property `cairn.checkpoint.START/END`. Snapshots carry the id too, but
snapshots expire. If the sink stops:

    before the table is     There is no table. The next call does all of the work.
    created
    after that, before      The table has the old rows; a new table is empty. Files without a commit stay until the
    the commit              owner removes orphan files. The next call does all of the work.
    after the commit,       The table has the new rows. The next call finds the checkpoint's id and changes nothing.
    before the answer
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import cache
from typing import Any

import pyarrow as pa
from typing_extensions import override

from cairn.sinks.table_sink import (
    END,
    NO_ROWS,
    START,
    Owner,
    Publication,
    TableSink,
    counts_of,
    foreign_rows,
    library,
    must_store_owner,
    with_type,
)
from state_backend.values.errors import UsageError
from state_backend.values.intervals import Interval, format_instant

# How often the catalog may refuse a commit. It refuses one if another process has changed any interval of the table
# since the sink read it. If four processes commit all the time, a commit is refused three times out of four.
_REFUSALS = 30
# How often the catalog may fail to tell whether a commit succeeded. Each time, the sink may write the files again.
_UNKNOWN = 3
# Longest wait before another try, in seconds. The wait is random, so that processes which failed together do not fail
# together again.
_WAIT_S = 0.5
_PIPELINE, _CHECKPOINT = "cairn.pipeline", "cairn.checkpoint"


def iceberg(
    table: str, catalog: str = "default", properties: Mapping[str, str] | Callable[[], Mapping[str, str]] | None = None
) -> IcebergSink:
    """Return a `Pipeline.sink` that keeps an Iceberg table equal to the pipeline's output.

    The first call creates the table: the columns `interval_start` and `interval_end`, the columns of the output, and a
    partition for each day of `interval_start`. The sink adds columns that the output gains, and widens their types as
    far as Iceberg can. A table belongs to one pipeline. Its owner expires snapshots and compacts files.

    Args:
        table: `namespace.name` of the table in the catalog. The namespace must exist.
        catalog: Name of the catalog in pyiceberg's configuration: `.pyiceberg.yaml` or `PYICEBERG_CATALOG__…` in the
            environment.
        properties: Properties of the catalog, such as `uri` and `warehouse`, or a function that returns them. They
            override those of the configuration. The function runs in the process that calls the sink. None: the
            configuration only.

    Raises:
        UsageError: The name has no namespace. A call raises this error if pyiceberg is missing, if the catalog lacks
            the namespace, if the table belongs to another pipeline, or if a value does not fit the type of its column.

    Example:
        Pipeline(..., sink=sinks.iceberg("shop.clicks", "warehouse"))
    """
    return IcebergSink(table, catalog, properties)


class IcebergSink(TableSink):
    def __init__(
        self, table: str, catalog: str, properties: Mapping[str, str] | Callable[[], Mapping[str, str]] | None
    ) -> None:
        names = table.split(".")
        if not all(names) or len(names) < 2:
            raise UsageError(
                f"{table!r} is no table of an Iceberg catalog; expected namespace.name, such as shop.clicks"
            )
        self._name, self._catalog_name, self._properties = table, catalog, properties

    def __repr__(self) -> str:
        return f"iceberg({self._name!r})"

    @override
    def publish(self, publication: Publication) -> None:
        # The rows are cached, so that a second try of the commit does not download them again.
        rows = cache(lambda: _checked_rows(publication))
        self._commit(lambda catalog: self._publish(catalog, publication, rows))

    @override
    def row_counts(self) -> dict[Interval | None, int]:
        counted: list[tuple[Any, Any, int]] = []
        with self._catalog() as catalog:
            table = self._table(catalog)
            if table is None:
                return {}
            if not _has_intervals(table):
                return counts_of([(None, None, table.scan().count())])
            for batch in table.scan(selected_fields=(START, END)).to_arrow_batch_reader():
                counts = pa.table(batch).group_by([START, END]).aggregate([([], "count_all")])
                counted += [(row[START], row[END], row["count_all"]) for row in counts.to_pylist()]
        return counts_of(counted)

    @override
    def rows(self, interval: Interval, schema: pa.Schema) -> pa.Table:
        with self._catalog() as catalog:
            table = self._table(catalog)
            assert table is not None, "row_counts() named no rows"
            columns = _columns(table)
            there = pa.schema([field for field in schema if field.name in columns])
            # START is selected too: if `there` is empty, a scan without any column would return no rows.
            scan = table.scan(row_filter=_is_one_of([interval]), selected_fields=(START, *there.names))
            return scan.to_arrow().select(there.names).cast(there, safe=False)

    @override
    def table_url(self) -> str:
        # OpenLineage names an Iceberg table by its location, because each engine may use another name for the catalog.
        with self._catalog() as catalog:
            return str(catalog.load_table(self._name).location())

    @override
    def clear(self, owner: Owner, *, takes_over: bool = False) -> None:
        self._commit(lambda catalog: self._clear(catalog, owner, takes_over))

    def _catalog(self) -> Any:
        library("pyiceberg", "iceberg")
        from pyiceberg.catalog import load_catalog

        properties = self._properties() if callable(self._properties) else self._properties
        return load_catalog(self._catalog_name, **(properties or {}))

    def _commit(self, change: Callable[[Any], None]) -> None:
        """Call `change`, which reads the table and commits.

        If another process commits first, or the catalog's answer is lost, call `change` again.
        """
        with self._catalog() as catalog:
            from pyiceberg import exceptions

            refusals = unknown = 0
            while True:
                try:
                    return change(catalog)
                except (exceptions.CommitFailedException, exceptions.TableAlreadyExistsError):
                    refusals += 1
                    if refusals == _REFUSALS:
                        raise
                except exceptions.CommitStateUnknownException:
                    # The next round reads the table. If the table has this checkpoint's id, the first commit succeeded.
                    # Otherwise the round commits again. If the first commit arrives late, both commits have the same
                    # parent snapshot, and the catalog accepts only one of them.
                    unknown += 1
                    if unknown == _UNKNOWN:
                        raise
                time.sleep(random.uniform(0, _WAIT_S))

    def _publish(self, catalog: Any, publication: Publication, rows: Callable[[], pa.Table]) -> None:
        interval, owner, checkpoint_id = publication.interval, publication.owner, publication.checkpoint_id
        table = self._table(catalog, owner)
        stored = {} if table is None else _read_stored(table)
        replaced = publication.replaces(stored)
        if replaced is None:
            return
        made = rows()
        if table is None:
            table = self._create(catalog, owner)
        changes = {_PIPELINE: str(owner), f"{_CHECKPOINT}.{_text_of(interval)}": str(checkpoint_id)}
        summary = {_PIPELINE: owner.name, "cairn.interval": _text_of(interval), _CHECKPOINT: str(checkpoint_id)}
        self._write(table, made, _is_one_of(replaced), changes, [], summary)

    def _clear(self, catalog: Any, owner: Owner, takes_over: bool) -> None:
        from pyiceberg.expressions import AlwaysTrue

        table = self._table(catalog, owner, takes_over=takes_over)
        if table is None:
            return
        if _PIPELINE not in table.properties and _has_rows(table, AlwaysTrue()):
            raise foreign_rows(self._name)
        removed = [name for name in table.properties if name.startswith(f"{_CHECKPOINT}.")]
        self._write(table, NO_ROWS, AlwaysTrue(), {_PIPELINE: str(owner)}, removed, {_PIPELINE: owner.name})

    def _table(self, catalog: Any, owner: Owner | None = None, *, takes_over: bool = False) -> Any:
        """Load the table from the catalog, and check its owner; None if there is no table."""
        from pyiceberg.exceptions import NoSuchTableError

        try:
            table = catalog.load_table(self._name)
        except NoSuchTableError:
            return None
        if owner is not None and _PIPELINE in table.properties:
            # `must_store_owner` only checks the owner here. Each commit of the sink stores the owner.
            must_store_owner(table.properties[_PIPELINE], owner, self._name, takes_over=takes_over)
        return table

    def _create(self, catalog: Any, owner: Owner) -> Any:
        """Create a table without rows. The columns of the output come with the first rows."""
        from pyiceberg.exceptions import NoSuchNamespaceError
        from pyiceberg.partitioning import PartitionField, PartitionSpec
        from pyiceberg.schema import Schema
        from pyiceberg.transforms import DayTransform
        from pyiceberg.types import NestedField, TimestamptzType

        schema = Schema(
            *(NestedField(n, name, TimestamptzType(), required=False) for n, name in ((1, START), (2, END)))
        )
        days = PartitionSpec(
            PartitionField(source_id=1, field_id=1000, transform=DayTransform(), name="interval_start_day")
        )
        properties = {
            _PIPELINE: str(owner),
            # Each commit adds a metadata file and a manifest. These two properties delete and merge old ones.
            "write.metadata.delete-after-commit.enabled": "true",
            "commit.manifest-merge.enabled": "true",
        }
        try:
            return catalog.create_table(self._name, schema, partition_spec=days, properties=properties)
        except NoSuchNamespaceError:
            namespace = self._name.rpartition(".")[0]
            raise UsageError(
                f"the catalog {self._catalog_name!r} has no namespace {namespace!r}, so the sink can't create the table "
                f"{self._name}\nCreate the namespace with a tool of your catalog, or in Python: "
                f"load_catalog(…).create_namespace({namespace!r})"
            ) from None

    def _write(
        self,
        table: Any,
        rows: pa.Table,
        where: Any,
        changed: dict[str, str],
        removed: list[str],
        summary: dict[str, str],
    ) -> None:
        """Commit: delete the rows that `where` selects, insert `rows`, and set and remove properties of the table.

        The commit fails if the table has changed since it was read: it makes a snapshot even without rows, and the
        catalog refuses a snapshot whose parent is no longer the newest one. `summary`: The snapshot's own properties.
        """
        from pyiceberg.table.update import AssertTableUUID

        transaction = table.transaction()
        there = table.schema().as_arrow()
        rows = _fit_to(rows, there)
        # Change the schema only for new or wider columns: pyiceberg copies the whole metadata several times even for an
        # empty change.
        new = [
            field
            for field in rows.schema
            if field.name not in there.names or there.field(field.name).type != field.type
        ]
        if new:
            _fit(transaction, new)
        if removed:
            transaction.remove_properties(*removed)
        transaction.set_properties(changed)
        if _has_intervals(table) and _has_rows(table, where):  # Without old rows, `overwrite` would log a warning.
            transaction.overwrite(rows, where, snapshot_properties=summary)
        else:
            transaction.append(rows, snapshot_properties=summary)
        # `commit_transaction` is not used, for two reasons. After a refusal it repeats the commit on the table's new
        # version, where the stored ids may be newer. After the last refusal it deletes the manifests. But the table has
        # these manifests if only the answer was lost, and the HTTP client sent the request again.
        same_table = AssertTableUUID(uuid=table.metadata.table_uuid)
        table._do_commit(updates=transaction._updates, requirements=(*transaction._requirements, same_table))


def _checked_rows(publication: Publication) -> pa.Table:
    rows = publication.table()
    for name in rows.column_names:
        if any(map(_loses_nulls, rows[name].chunks)):
            raise UsageError(
                f"the column {name!r} has a null instead of a list or map of structs, and pyiceberg would store an empty list or "
                "map\nReturn an empty list or map instead of null, or leave the column out of output_schema"
            )
    return rows


def _loses_nulls(column: pa.Array) -> bool:
    """Return True for a null list or map of structs, which pyiceberg 0.12 would write as an empty list or map."""
    kind = column.type
    if pa.types.is_struct(kind):
        there = column.drop_null()
        return any(_loses_nulls(there.field(n)) for n in range(kind.num_fields))
    if pa.types.is_map(kind) and pa.types.is_struct(kind.item_type):
        return column.null_count > 0 or _loses_nulls(column.items)
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_struct(kind.value_type):
        return column.null_count > 0 or _loses_nulls(column.flatten())
    return False


def _text_of(interval: Interval) -> str:
    return f"{format_instant(interval.start)}/{format_instant(interval.end)}"


def _read_stored(table: Any) -> dict[Interval, int]:
    found = {}
    for name, value in table.properties.items():
        if name.startswith(f"{_CHECKPOINT}."):
            start, end = name.removeprefix(f"{_CHECKPOINT}.").split("/")
            found[Interval(datetime.fromisoformat(start), datetime.fromisoformat(end))] = int(value)
    return found


def _is_one_of(intervals: Iterable[Interval]) -> Any:
    from pyiceberg.expressions import And, EqualTo, Or

    # A single expression is returned as it is: pyiceberg's `Or` needs at least two.
    first, *others = (
        And(EqualTo(START, interval.start.isoformat()), EqualTo(END, interval.end.isoformat()))
        for interval in sorted(intervals)
    )
    return Or(first, *others) if others else first


def _columns(table: Any) -> set[str]:
    return {field.name for field in table.schema().fields}


def _has_intervals(table: Any) -> bool:
    """Return True if the table has both columns of the interval. A table that a user made may lack them."""
    return {START, END} <= _columns(table)


def _has_rows(table: Any, where: Any) -> bool:
    """Return True if a data file may have rows that `where` selects."""
    return any(True for _ in table.scan(row_filter=where).plan_files())


def _fit_to(rows: pa.Table, there: pa.Schema) -> pa.Table:
    """Cast each column of `rows` to its type in the table. Leave it if Iceberg can widen the table's column instead."""
    for field in rows.schema:
        kind = there.field(field.name).type if field.name in there.names else field.type
        if not (pa.types.is_nested(kind) or kind == field.type or _widens(kind, field.type)):
            rows = with_type(rows, field.name, kind)
    return rows


def _widens(there: pa.DataType, wanted: pa.DataType) -> bool:
    """Return True if Iceberg can change a column from the type `there` to `wanted`."""
    if pa.types.is_decimal(there) and pa.types.is_decimal(wanted):
        return bool(there.scale == wanted.scale and there.precision < wanted.precision)
    return (there, wanted) in ((pa.int32(), pa.int64()), (pa.float32(), pa.float64()))


def _fit(transaction: Any, fields: Iterable[pa.Field]) -> None:
    """Add columns and widen types until the table can hold these columns."""
    from pyiceberg.exceptions import ResolveError, ValidationError
    from pyiceberg.io.pyarrow import UnsupportedPyArrowTypeException

    refused = (UnsupportedPyArrowTypeException, ResolveError, ValidationError, ValueError, TypeError)
    with transaction.update_schema() as update:
        for field in fields:
            try:
                update.union_by_name(pa.schema([field.with_nullable(True)]))
            except refused as error:
                raise UsageError(
                    f"the table can't hold the column {field.name!r} of type {field.type}: {error}\n"
                    "Leave the column out of output_schema, or give the sink the name of a new table, and fill that table:\n"
                    "cairn publish --rebuild"
                ) from None
