"""Output whose schema changes: what may follow what, what the log keeps of it, and how older rows are read. Without Spark's JVM."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import StructType

from cairn import spark_versions
from cairn.data_sources.keyed_output import KeyedOutput
from cairn.runners.output_schema import arrow_schema, from_record, recorded_schema
from cairn.spark_versions import struct_of
from state_backend.adapters.local_storage import LocalStorage
from state_backend.checkpoint.output_schemas import check_output_schema, newest_output, recorded_schemas, schema_of
from state_backend.checkpoint.rewind import fork
from state_backend.formats import paths
from state_backend.formats.table_evolution import batch_converter
from state_backend.formats.table_schema import join_schemas, table_schema
from state_backend.formats.types import parse_struct
from state_backend.values.errors import CorruptFile, CorruptRecord, StorageUnavailable, UsageError
from state_backend.values.handles import Handle
from state_backend.values.intervals import Interval
from state_backend.values.records import OutputFile, Permissions
from tests.support.checkpoints import PIPELINE, Folder, day, run, start_ms
from tests.support.schema_json import array, field, mapping

Columns = dict[str, Any]


def schema(columns: Columns) -> dict[str, Any]:
    """Of nullable columns; one whose name ends with ``!`` is NOT NULL."""
    return {"type": "struct", "fields": [field(n.rstrip("!"), t, not n.endswith("!")) for n, t in columns.items()]}


# --- the rule -----------------------------------------------------------------------------------------------------------------

JOINED: list[tuple[Columns, Columns, Columns, list[dict[str, Any]], list[dict[str, Any]]]] = [
    # earlier, later, the table, rows of the earlier file, the same rows in the table
    (
        {"a": "integer"},
        {"a": "integer", "b": "string"},
        {"a": "integer", "b": "string"},
        [{"a": 1}],
        [{"a": 1, "b": None}],
    ),
    (
        {"a": "integer", "b": "string"},
        {"a": "integer"},
        {"a": "integer", "b": "string"},
        [{"a": 1, "b": "x"}],
        [{"a": 1, "b": "x"}],
    ),
    (
        {"a": "integer", "b": "string"},
        {"b": "string", "a": "integer"},
        {"b": "string", "a": "integer"},
        [{"a": 1, "b": "x"}],
        [{"b": "x", "a": 1}],
    ),
    ({"a": "byte"}, {"a": "float"}, {"a": "float"}, [{"a": 7}, {"a": None}], [{"a": 7.0}, {"a": None}]),
    ({"a": "long"}, {"a": "integer"}, {"a": "long"}, [{"a": 2**40}], [{"a": 2**40}]),
    (
        {"a": "integer"},
        {"a": "double"},
        {"a": "double"},
        [{"a": 2**31 - 1}, {"a": None}],
        [{"a": float(2**31 - 1)}, {"a": None}],
    ),
    ({"a": "float"}, {"a": "double"}, {"a": "double"}, [{"a": 0.5}, {"a": None}], [{"a": 0.5}, {"a": None}]),
    (
        {"a": "decimal(5,2)"},
        {"a": "decimal(38,10)"},
        {"a": "decimal(38,10)"},
        [{"a": Decimal("999.99")}],
        [{"a": Decimal("999.9900000000")}],
    ),
    ({"a!": "integer"}, {"a": "long"}, {"a": "long"}, [{"a": 1}], [{"a": 1}]),
    (
        {"a": "integer"},
        {"a!": "integer", "b!": "long"},
        {"a": "integer", "b": "long"},
        [{"a": None}],
        [{"a": None, "b": None}],
    ),
    (
        {"s": schema({"x!": "integer", "y": "string"})},
        {"s": schema({"z": "date", "x": "long"})},
        {"s": schema({"z": "date", "x": "long", "y": "string"})},
        [{"s": {"x": 1, "y": "u"}}, {"s": None}],
        [{"s": {"z": None, "x": 1, "y": "u"}}, {"s": None}],
    ),
    (
        {"l": array(schema({"p": "short"}), contains_null=False)},
        {"l": array(schema({"q": "string", "p": "double"}))},
        {"l": array(schema({"q": "string", "p": "double"}))},
        [{"l": [{"p": 1}, {"p": None}]}, {"l": []}, {"l": None}],
        [{"l": [{"q": None, "p": 1.0}, {"q": None, "p": None}]}, {"l": []}, {"l": None}],
    ),
    (
        {"m": mapping("string", array("integer"))},
        {"m": mapping("string", array("long"))},
        {"m": mapping("string", array("long"))},
        [{"m": [("k", [1, None]), ("j", None)]}, {"m": []}, {"m": None}],
        [{"m": [("k", [1, None]), ("j", None)]}, {"m": []}, {"m": None}],
    ),
    ({"a": "integer"}, {}, {"a": "integer"}, [{"a": 1}], [{"a": 1}]),
    (
        {"i": "interval day to second"},
        {"i": "interval day to second", "b": "long"},
        {"i": "interval day to second", "b": "long"},
        [{"i": None}],
        [{"i": None, "b": None}],
    ),
]


@pytest.mark.parametrize(("earlier", "later", "table", "rows", "expected"), JOINED)
@pytest.mark.parametrize("start", [0, 1])
def test_joining_two_output_schemas_keeps_all_columns_and_values(
    earlier: Columns, later: Columns, table: Columns, rows: list[Any], expected: list[Any], start: int
) -> None:
    old, new = (recorded_schema(schema(columns)) for columns in (earlier, later))
    made = table_schema([parse_struct(old), parse_struct(new)])
    assert made == parse_struct(recorded_schema(schema(table)))
    assert table_schema(map(parse_struct, [old, new, old])) == made
    other = table_schema(map(parse_struct, [new, old]))  # The order of commits changes no column and no type.
    assert (join_schemas(made, other), join_schemas(other, made)) == ((made, ()), (other, ()))
    written = pa.RecordBatch.from_pylist(rows, schema=arrow_schema(old)).slice(start)
    read = batch_converter(arrow_schema(made.to_json()))(written)
    read.validate(full=True)
    assert read.to_pylist() == expected[start:]


CLASHES: list[tuple[Columns, Columns, str]] = [
    ({"a": "integer"}, {"a": "string"}, "field 'a': recorded as int, declared as string"),
    ({"a": "long"}, {"a": "double"}, "field 'a': recorded as bigint, declared as double"),
    ({"a": "integer"}, {"a": "float"}, "field 'a'"),
    ({"a": "decimal(5,2)"}, {"a": "decimal(4,3)"}, "field 'a'"),
    ({"s": schema({"x": "date"})}, {"s": schema({"x": "timestamp"})}, "field 's.x'"),
    ({"m": mapping("integer", "long")}, {"m": mapping("long", "long")}, "field 'm'"),
    ({"t": "timestamp"}, {"t": "timestamp_ntz"}, "field 't'"),
    ({"v": "variant"}, {"v": "string"}, "field 'v'"),
]


@pytest.mark.parametrize(("before", "after", "says"), CLASHES)
def test_an_output_type_that_clashes_with_current_output_is_refused(before: Columns, after: Columns, says: str) -> None:
    """Until no current output has the other type: then its schema does not count any more."""
    folder = Folder()
    files = (output(None),)
    folder.run(day(1), "d1", output_schema=schema(before), outputs=files)
    folder.run(day(2), "d2", output_schema=schema({}), outputs=files)
    log = folder.coordinator.log()
    check_output_schema(log, PIPELINE, day(1), schema(after))
    told = r"(?s)does not fit the output of .*2024-01-01.*cairn fork copies the state"
    with pytest.raises(UsageError, match=told) as refused:
        check_output_schema(log, PIPELINE, day(3), schema(after))
    assert says in str(refused.value)
    folder.run(day(1), "again", output_schema=schema({}), outputs=files)
    check_output_schema(folder.coordinator.log(), PIPELINE, day(3), schema(after))


def output(version: int | None) -> OutputFile:
    return OutputFile(
        handle=Handle(path="output/x", size_bytes=1, crc32c=1), rows=1, late=False, schema_version=version
    )


def test_files_that_are_read_decide_the_type_of_a_column_whose_recorded_types_clash() -> None:
    number, text = parse_struct(schema({"a": "long", "b": "date"})), parse_struct(schema({"a": "string"}))
    assert str(table_schema([number, text], [number])) == "struct<a: bigint, b: date>"
    assert str(table_schema([number, text], [text])) == "struct<a: string, b: date>"


def test_the_recorded_schema_has_the_same_arrow_types_as_the_declared_schema() -> None:
    declared = schema({"i": "interval day to second", "v": "variant", "t": "timestamp", "s": schema({"x!": "byte"})})
    declared["fields"].append(
        field("c", "string") | {"metadata": {"__COLLATIONS": {"c": "icu.UNICODE"}, "comment": "sorted"}}
    )
    recorded = recorded_schema(declared)
    assert recorded_schema(recorded) == recorded and arrow_schema(recorded) == arrow_schema(declared)
    assert recorded["fields"][-1]["metadata"] == {"comment": "sorted"}


def test_a_recorded_class_is_not_unpickled() -> None:
    evil = {"type": "udt", "pyClass": "os.system", "serializedClass": "Y29z", "sqlType": "string"}
    with pytest.raises(CorruptRecord, match=r"udt at 's.x', which Cairn never records"):
        from_record(schema({"s": schema({"x": evil})}), "memory://")


# --- the log, and the reader over it --------------------------------------------------------------------------------------------


class Outputs:
    """A pipeline's folder whose output files are real ones."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        self.storage = LocalStorage(root / PIPELINE)
        self.folder = Folder(self.storage, **options)
        self.coordinator = self.folder.coordinator

    def prepare(
        self,
        interval: Interval,
        attempt: str,
        columns: Columns,
        *rows: dict[str, Any],
        recorded: bool = True,
        late: bool = False,
        **changes: Any,
    ) -> None:
        made = schema(columns)
        local = self.root / f"{attempt}.parquet"
        pq.write_table(pa.Table.from_pylist(list(rows), schema=arrow_schema(made)), local)
        handle = self.storage.upload(paths.output(interval, attempt, 1, 0, late=late), local)
        files = (OutputFile(handle=handle, rows=len(rows), late=late),) if rows else ()
        changes |= {"input_schema" if late else "output_schema": recorded_schema(made)} if recorded else {}
        self.folder.prepare(interval, attempt, outputs=files, **changes)

    def run(self, interval: Interval, attempt: str, columns: Columns, *rows: dict[str, Any], **changes: Any) -> None:
        self.prepare(interval, attempt, columns, *rows, **changes)
        self.coordinator.commit(attempt)
        self.coordinator.publish(None)
        self.coordinator.clean_up()

    def source(self, **options: str) -> KeyedOutput:
        return KeyedOutput({"root": str(self.root), "pipeline": PIPELINE, **options})

    def read(self, **options: str) -> list[dict[str, Any]]:
        source = self.source(**options)
        told = source.schema()
        reader = source.reader(told)
        batches = [b for p in reader.partitions() for b in reader.read(p)]
        assert all(b.schema == arrow_schema(told.jsonValue()) for b in batches)
        return [row for b in batches for row in b.to_pylist()]


A, AB, AC = {"a": "integer"}, {"b": "string", "a": "long"}, {"a": "integer", "c": "long"}


@pytest.mark.parametrize("late", [False, True])
def test_no_order_of_commits_loses_a_column(tmp_path: Path, late: bool) -> None:
    """Day 1 runs again with its own code, which lacks c; the roll-back goes on with that code; then c is back."""
    made, options = Outputs(tmp_path), {"late": str(late)}
    made.run(day(1), "d1", A, {"a": 1}, digest=5, late=late)
    made.run(day(2), "d2", AC, {"a": 2, "c": 7}, late=late)
    two = [{"a": 1, "c": None}, {"a": 2, "c": 7}]
    assert made.read(**options) == two
    made.run(day(1), "again", A, {"a": 1}, digest=5, late=late)
    assert made.read(**options) == two
    made.run(day(3), "old code", A, {"a": 3}, late=late)
    made.run(day(4), "new code", {"c": "integer", "a": "integer"}, {"a": 4, "c": 8}, late=late)
    all_rows = [*two, {"a": 3, "c": None}, {"a": 4, "c": 8}]
    assert made.read(**options) == all_rows
    for n in range(1, 5):  # The columns are the same whichever intervals are read.
        assert made.read(start=day(n).start.isoformat(), end=day(n).end.isoformat(), **options) == [all_rows[n - 1]]
    beyond = made.source(start=day(5).start.isoformat(), **options).schema()
    assert {*beyond.names} == {"a", "c"}


def test_a_fork_starts_without_recorded_output_schemas(tmp_path: Path) -> None:
    """The way out that a refusal names."""
    made, other = Outputs(tmp_path), Folder(LocalStorage(tmp_path / "other"))
    made.run(day(1), "d1", A, {"a": 1})
    fork(made.storage, 1, other.over(other.storage).at, run=run(), attempt="fork", pipeline_start_ms=start_ms())
    assert recorded_schemas(other.coordinator.log()) == ()


def test_a_new_column_comment_records_no_new_output_schema() -> None:
    folder = Folder()
    commented = schema(A)
    commented["fields"][0]["metadata"] = {"comment": "a"}
    folder.run(day(1), "d1", output_schema=schema(A))
    folder.run(day(2), "d2", output_schema=commented)
    assert recorded_schemas(folder.coordinator.log()) == (schema(A),)


def test_a_query_is_refused_if_a_commit_changes_the_schema_before_the_read(tmp_path: Path) -> None:
    made = Outputs(tmp_path)
    made.run(day(1), "d1", A, {"a": 1})
    source = KeyedOutput({"root": str(tmp_path), "pipeline": PIPELINE})
    told = source.schema()
    made.run(day(2), "d2", AB, {"b": "x", "a": 2})
    with pytest.raises(StorageUnavailable, match="Run the query again"):
        source.reader(told)


def test_a_query_is_refused_if_its_expected_checkpoints_are_not_current(tmp_path: Path) -> None:
    """So the position of a chain's second pipeline is that of the rows that it read."""
    made = Outputs(tmp_path)
    made.run(day(1), "d1", A, {"a": 1})
    assert made.read(checkpoints="1") == [{"a": 1}]
    made.run(day(1), "again", A, {"a": 2})
    with pytest.raises(StorageUnavailable, match=r"now that of the checkpoints \[2\], and the query expects 1\nAsk"):
        made.read(checkpoints="1")
    assert made.read(checkpoints="2") == [{"a": 2}]


def test_a_file_with_other_rows_than_recorded_is_refused(tmp_path: Path) -> None:
    made = Outputs(tmp_path)
    made.run(day(1), "d1", A, {"a": 1})
    source = made.source()
    reader: Any = source.reader(source.schema())
    (partition,) = reader.partitions()
    partition.file = replace(partition.file, rows=2)
    with pytest.raises(CorruptFile, match="has 1 rows, but its record says 2; put the file back from a copy"):
        list(reader.read(partition))


@pytest.mark.parametrize("late", [False, True])
def test_a_schema_that_no_record_has_is_read_from_the_output_files(tmp_path: Path, late: bool) -> None:
    made, options = Outputs(tmp_path), {"late": str(late)}
    made.run(day(1), "d1", A, {"a": 1}, late=late, recorded=False, digest=5)
    made.run(day(2), "d2", {"b!": "string", "a!": "long"}, {"b": "x", "a": 2}, late=late, recorded=False)
    made.run(day(1), "again", A, {"a": 1}, late=late, recorded=False, digest=5)
    expected = [{"b": None, "a": 1}, {"b": "x", "a": 2}]
    assert made.read(**options) == expected
    dated = made.read(**options, interval_column="at")
    assert [row.pop("at") for row in dated] == [day(1).start, day(2).start] and dated == expected
    with pytest.raises(UsageError, match="interval_column 'A': the output has a column of this name"):
        made.read(**options, interval_column="A")
    assert made.read(start=day(3).start.isoformat(), **options) == []
    assert {*made.source(start=day(3).start.isoformat(), **options).schema().names} == {"a", "b"}
    made.run(day(3), "d3", {"c": "date", "a": "byte"}, {"c": None, "a": 3}, late=late)
    assert made.read(**options) == [
        *({"c": None, "a": row["a"], "b": row["b"]} for row in expected),
        {"c": None, "a": 3, "b": None},
    ]
    assert newest_output(made.coordinator.log(), late=not late) is None


@pytest.mark.parametrize("recorded", [False, True])
def test_late_files_with_clashing_types_are_named_and_read_by_interval(tmp_path: Path, recorded: bool) -> None:
    """No schema declares the columns of late rows, so nothing refuses them."""
    made = Outputs(tmp_path)
    made.run(day(1), "d1", {"a": "string"}, {"a": "x"}, late=True, recorded=recorded)
    made.run(day(2), "d2", A, {"a": 2}, late=True, recorded=recorded)
    told = r"/d1/late-.*'a' is string, but int in .*/d2/late-.*\n.*start and end"
    with pytest.raises(UsageError, match=told):
        made.read(late="true")
    assert made.read(late="true", start=day(2).start.isoformat()) == [{"a": 2}]
    vienna = timezone(timedelta(hours=1))
    assert made.read(late="true", start=day(2).start.astimezone(vienna).isoformat(), end=day(2).end.isoformat()) == [
        {"a": 2}
    ]
    for text, problem in (("2024-01-02", "has no time zone"), ("soon", "is not a point in time")):
        with pytest.raises(UsageError, match=f"start '{text}' {problem}; write it as in"):
            made.read(late="true", start=text)
    assert made.read(late="true", end=day(1).end.isoformat()) == [{"a": "x"}]


def test_an_output_schema_version_that_is_not_recorded_is_refused() -> None:
    with pytest.raises(CorruptRecord, match="output schema 3, but the pipeline has only 1"):
        schema_of(output(3), (schema(A),))


def test_output_that_replaces_overlapping_intervals_may_have_other_columns(tmp_path: Path) -> None:
    made = Outputs(tmp_path)
    made.run(day(1), "d1", {"a": "string"}, {"a": "x"})
    both = Interval(day(1).start, day(2).end)
    made.run(both, "both", AB, {"b": "x", "a": 2}, permissions=Permissions(replace_overlapping=True))
    assert made.read() == [{"b": "x", "a": 2}]


@pytest.mark.parametrize(
    ("of", "path", "since"),
    [
        ("time(6)", "a", "4.1"),
        (array({**schema({"b": mapping("string", "time(0)")})}), "a.element.b.value", "4.1"),
        ("geography(OGC:CRS84, SPHERICAL)", "a", "4.1"),
        ("geometry(SRID:0)", "a", "4.1"),
    ],
)
def test_a_type_that_an_older_spark_lacks_is_refused_by_name(
    of: Any, path: str, since: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, name = schema({"k": "string", "a": of}), of if isinstance(of, str) else "time(0)"
    says = rf"^the column '{path}' has the type {re.escape(name)}, which PySpark has since {since}; this process runs PySpark 4.0\nUse PySpark {since} or newer"
    assert struct_of(given).names == from_record(given, "r").names == ["k", "a"]
    monkeypatch.setattr(spark_versions, "VERSION", (4, 0))
    for read in (struct_of, lambda schema: from_record(schema, "r")):
        with pytest.raises(UsageError, match=says):
            read(given)


def test_the_reader_reports_the_recorded_schema_to_spark(tmp_path: Path) -> None:
    made = Outputs(tmp_path)
    made.run(day(1), "d1", {"a!": "integer", "t": "timestamp"}, {"a": 1, "t": None})
    told = KeyedOutput({"root": str(tmp_path), "pipeline": PIPELINE}).schema()
    assert told == StructType.fromJson(schema({"a!": "integer", "t": "timestamp"}))
