"""Output whose schema changes: what may follow what, what the log keeps of it, and how older rows are read. Without Spark's JVM."""

from __future__ import annotations

from datetime import timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import StructType

from cairn.data_sources.keyed_output import KeyedOutput, converter
from cairn.runners.output_schema import arrow_schema, from_record, recorded_schema
from state_backend.adapters.local_storage import LocalStorage
from state_backend.checkpoint.output_schemas import check_output_schema, newest_output, output_so_far, recorded_schemas
from state_backend.checkpoint.rewind import fork, rewind
from state_backend.checkpoint.sweep import sweep
from state_backend.formats import paths
from state_backend.values.errors import BaseMoved, CorruptRecord, StorageUnavailable, UsageError
from state_backend.values.handles import Handle
from state_backend.values.intervals import Interval
from state_backend.values.records import OutputFile, Permissions
from state_backend.values.retention import KeepLast
from tests.support.checkpoints import PIPELINE, Folder, day, run, start_ms

Columns = dict[str, Any]


def field(name: str, type_: Any, nullable: bool = True) -> dict[str, Any]:
    return {"name": name, "type": type_, "nullable": nullable, "metadata": {}}


def schema(columns: Columns) -> dict[str, Any]:
    """Of nullable columns; one whose name ends with ``!`` is NOT NULL."""
    return {"type": "struct", "fields": [field(n.rstrip("!"), t, not n.endswith("!")) for n, t in columns.items()]}


def array(of: Any, nulls: bool = True) -> dict[str, Any]:
    return {"type": "array", "elementType": of, "containsNull": nulls}


def map_(key: Any, value: Any, nulls: bool = True) -> dict[str, Any]:
    return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": nulls}


# --- the rule -----------------------------------------------------------------------------------------------------------------

FOLLOWS: list[tuple[Columns, Columns, list[dict[str, Any]], list[dict[str, Any]]]] = [
    # before, after, rows before, the same rows after
    ({"a": "integer"}, {"a": "integer", "b": "string"}, [{"a": 1}], [{"a": 1, "b": None}]),
    ({"a": "integer", "b": "string"}, {"a": "integer"}, [{"a": 1, "b": "x"}], [{"a": 1}]),
    ({"a": "integer", "b": "string"}, {"b": "string", "a": "integer"}, [{"a": 1, "b": "x"}], [{"b": "x", "a": 1}]),
    ({"a": "byte"}, {"a": "float"}, [{"a": 7}, {"a": None}], [{"a": 7.0}, {"a": None}]),
    ({"a": "integer"}, {"a": "double"}, [{"a": 2**31 - 1}, {"a": None}], [{"a": float(2**31 - 1)}, {"a": None}]),
    ({"a": "float"}, {"a": "double"}, [{"a": 0.5}, {"a": None}], [{"a": 0.5}, {"a": None}]),
    (
        {"a": "decimal(5,2)"},
        {"a": "decimal(38,10)"},
        [{"a": Decimal("999.99")}],
        [{"a": Decimal("999.9900000000")}],
    ),
    ({"a!": "integer"}, {"a": "long"}, [{"a": 1}], [{"a": 1}]),
    (
        {"s": schema({"x!": "integer", "y": "string"})},
        {"s": schema({"y": "string", "z": "date", "x": "long"})},
        [{"s": {"x": 1, "y": "u"}}, {"s": None}],
        [{"s": {"y": "u", "z": None, "x": 1}}, {"s": None}],
    ),
    (
        {"l": array(schema({"p": "short"}), nulls=False)},
        {"l": array(schema({"q": "string", "p": "double"}))},
        [{"l": [{"p": 1}, {"p": None}]}, {"l": []}, {"l": None}],
        [{"l": [{"q": None, "p": 1.0}, {"q": None, "p": None}]}, {"l": []}, {"l": None}],
    ),
    (
        {"m": map_("string", array("integer"))},
        {"m": map_("string", array("long"))},
        [{"m": [("k", [1, None]), ("j", None)]}, {"m": []}, {"m": None}],
        [{"m": [("k", [1, None]), ("j", None)]}, {"m": []}, {"m": None}],
    ),
    ({"a": "integer"}, {}, [{"a": 1}], [{}]),
    ({"a": "integer"}, {"b": "string"}, [{"a": 1}], [{"b": None}]),  # a renamed column is another one
    (
        {"i": "interval day to second"},
        {"i": "interval day to second", "b": "long"},
        [{"i": None}],
        [{"i": None, "b": None}],
    ),
]


@pytest.mark.parametrize(("before", "after", "rows", "expected"), FOLLOWS)
@pytest.mark.parametrize("start", [0, 1])
def test_what_may_follow_and_how_older_rows_are_read(
    before: Columns, after: Columns, rows: list[Any], expected: list[Any], start: int
) -> None:
    old, new = recorded_schema(schema(before)), recorded_schema(schema(after))
    check_output_schema("p", old, new)
    written = pa.RecordBatch.from_pylist(rows, schema=arrow_schema(old)).slice(start)
    for version in (1, None):  # None: nobody wrote down which
        read = converter(output(version), old, (old, new) if version else (new,))(written)
        read.validate(full=True)
        assert read.schema == arrow_schema(new)
        assert read.to_pylist() == expected[start:]


REFUSED: list[tuple[Columns, Columns, str]] = [
    ({"a": "integer"}, {"a": "string"}, "field 'a': recorded as int, declared as string"),
    ({"a": "long"}, {"a": "integer"}, "recorded values may not fit"),
    ({"a": "long"}, {"a": "double"}, "some recorded values have no equal in the new type"),
    ({"a": "integer"}, {"a!": "integer"}, "older rows may be null there: make it nullable"),
    ({"a": "integer"}, {"a": "integer", "b!": "long"}, "older rows lack it: make it nullable"),
    ({"s": schema({"x": "date"})}, {"s": schema({"x": "timestamp"})}, "field 's.x'"),
    ({"m": map_("integer", "long")}, {"m": map_("long", "long")}, "keys of maps can't change"),
    ({"t": "timestamp"}, {"t": "timestamp_ntz"}, "field 't'"),
    ({"v": "variant"}, {"v": "string"}, "field 'v'"),
]


@pytest.mark.parametrize(("before", "after", "says"), REFUSED)
def test_what_may_not_follow(before: Columns, after: Columns, says: str) -> None:
    with pytest.raises(UsageError, match=r"(?s)output_schema does not fit .*cairn fork copies the state") as refused:
        check_output_schema("p", schema(before), schema(after))
    assert says in str(refused.value)


def output(version: int | None) -> OutputFile:
    return OutputFile(
        handle=Handle(path="output/x", size_bytes=1, crc32c=1), rows=1, late=False, schema_version=version
    )


def test_a_column_that_comes_back_is_another_one() -> None:
    """As in states. Its type may be another too."""
    first, without, again = schema({"a": "integer", "b": "integer"}), schema({"b": "integer"}), schema({"a": "string"})
    rows = pa.RecordBatch.from_pylist([{"a": 1, "b": 2}], schema=arrow_schema(first))
    chain = (first, without, schema({"b": "integer", "a": "string"}))
    assert converter(output(1), first, chain)(rows).to_pylist() == [{"b": 2, "a": None}]
    nested = [schema({"s": s}) for s in (first, without, again)]
    struct = pa.RecordBatch.from_pylist([{"s": {"a": 1, "b": 2}}], schema=arrow_schema(nested[0]))
    assert converter(output(1), nested[0], nested)(struct).to_pylist() == [{"s": {"a": None}}]


def test_what_is_recorded_is_what_files_have() -> None:
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
        changes |= {"output_schema": recorded_schema(made)} if recorded and not late else {}
        self.folder.prepare(interval, attempt, outputs=files, **changes)

    def run(self, interval: Interval, attempt: str, columns: Columns, *rows: dict[str, Any], **changes: Any) -> None:
        self.prepare(interval, attempt, columns, *rows, **changes)
        self.coordinator.commit(attempt)
        self.coordinator.publish(None)
        self.coordinator.clean_up()

    def read(self, **options: str) -> list[dict[str, Any]]:
        source = KeyedOutput({"root": str(self.root), "pipeline": PIPELINE, **options})
        told = source.schema()
        reader = source.reader(told)
        batches = [b for p in reader.partitions() for b in reader.read(p)]
        assert all(b.schema == arrow_schema(told.jsonValue()) for b in batches)
        return [row for b in batches for row in b.to_pylist()]


A, AB, B = {"a": "integer"}, {"b": "string", "a": "long"}, {"b": "string"}


def test_reading_gives_the_newest_schema(tmp_path: Path) -> None:
    made = Outputs(tmp_path, policy=KeepLast(1))  # all but the newest record are tombstones
    made.run(day(1), "d1", A, {"a": 1})
    assert made.read() == [{"a": 1}]
    made.run(day(2), "d2", AB, {"b": "x", "a": 2**40})
    assert made.read() == [{"b": None, "a": 1}, {"b": "x", "a": 2**40}]
    made.run(day(3), "d3", B, {"b": "y"})
    assert made.read() == [{"b": None}, {"b": "x"}, {"b": "y"}]
    made.run(day(4), "d4", {**B, "a": "date"})  # no rows: the columns are there all the same
    assert made.read() == [{"b": None, "a": None}, {"b": "x", "a": None}, {"b": "y", "a": None}]
    made.run(day(5), "d5", {**B, "a": "date"}, {"b": "z", "a": None})
    assert len(recorded_schemas(made.coordinator.log())) == 4
    assert made.read(end=day(1).end.isoformat()) == [{"b": None, "a": None}]


def test_a_re_run_of_the_past_has_the_newest_schema(tmp_path: Path) -> None:
    made = Outputs(tmp_path)
    made.run(day(1), "d1", A, {"a": 1})
    made.run(day(2), "d2", A, {"a": 2})
    made.run(day(1), "again", AB, {"b": "x", "a": 10})
    assert made.read() == [{"b": "x", "a": 10}, {"b": None, "a": 2}]


def test_schemas_outlive_rewinds_sweeps_and_retention(tmp_path: Path) -> None:
    made = Outputs(tmp_path, policy=KeepLast(2))
    made.run(day(1), "d1", A, {"a": 1})
    made.run(day(2), "d2", AB, {"b": "x", "a": 2})
    rewind(made.coordinator, 1, run=run("back"), attempt="back")
    made.coordinator.clean_up()
    made.storage.create(paths.shared("dead", 0, 0, 0, "sst"), b"x")
    assert sweep(made.storage, PIPELINE, now_ms=10**15).record is not None
    log = made.coordinator.log()
    assert recorded_schemas(log)[-1] == recorded_schema(schema(AB)) == output_so_far(log)
    assert made.read() == [{"b": None, "a": 1}, {"b": "x", "a": 2}]


def test_a_fork_begins_anew(tmp_path: Path) -> None:
    """The way out that a refusal names."""
    made, other = Outputs(tmp_path), Folder(LocalStorage(tmp_path / "other"))
    made.run(day(1), "d1", A, {"a": 1})
    fork(made.storage, 1, other.over(other.storage), run=run(), attempt="fork", pipeline_start_ms=start_ms())
    assert output_so_far(other.coordinator.log()) is None


def test_of_two_attempts_the_later_commit_has_to_fit(tmp_path: Path) -> None:
    """Day 1 again, with the same state, makes nothing stale and fences nobody; but its output has other columns."""
    made = Outputs(tmp_path)
    made.run(day(1), "d1", A, {"a": 1}, digest=5)
    made.run(day(2), "d2", A, {"a": 2})
    made.prepare(day(1), "again", {"a": "double"}, {"a": 1.5}, digest=5)
    made.prepare(day(3), "d3", {"a": "long"}, {"a": 3})
    made.coordinator.commit("again")
    with pytest.raises(BaseMoved, match="another commit has changed the output schema since this attempt began"):
        made.coordinator.commit("d3")
    assert made.read() == [{"a": 1.5}, {"a": 2.0}]


def test_comments_make_no_schema() -> None:
    folder = Folder()
    commented = schema(A)
    commented["fields"][0]["metadata"] = {"comment": "a"}
    folder.run(day(1), "d1", output_schema=schema(A))
    folder.run(day(2), "d2", output_schema=commented)
    assert recorded_schemas(folder.coordinator.log()) == (schema(A),)


def test_a_query_that_a_new_schema_overtakes_is_asked_again(tmp_path: Path) -> None:
    made = Outputs(tmp_path)
    made.run(day(1), "d1", A, {"a": 1})
    source = KeyedOutput({"root": str(tmp_path), "pipeline": PIPELINE})
    told = source.schema()
    made.run(day(2), "d2", AB, {"b": "x", "a": 2})
    with pytest.raises(StorageUnavailable, match="Run the query again"):
        source.reader(told)


# --- late rows: their schemas are not recorded --------------------------------------------------------------------


def test_rows_that_do_not_fit_are_named_and_read_apart(tmp_path: Path) -> None:
    made = Outputs(tmp_path)
    made.run(day(1), "d1", {"a": "string"}, {"a": "x"}, late=True)
    made.run(day(2), "d2", A, {"a": 2}, late=True)
    with pytest.raises(
        UsageError, match=r"/d1/late-.*field 'a': recorded as string, declared as int.*\n.*start and end"
    ):
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


def test_late_rows_have_the_newest_inputs_columns(tmp_path: Path) -> None:
    made = Outputs(tmp_path)
    made.run(day(1), "d1", A, {"a": 1}, late=True)
    made.run(day(2), "d2", {"b!": "string", "a!": "long"}, {"b": "x", "a": 2}, late=True)
    made.run(day(3), "d3", B)
    assert made.read(late="true") == [{"b": None, "a": 1}, {"b": "x", "a": 2}]
    assert made.read() == []
    assert newest_output(made.coordinator.log()) is None


def test_a_file_without_a_version_may_have_a_recorded_schema() -> None:
    """Prepared by the release before, committed by this one behind others. It need not go through what came before its schema."""
    chain = (schema(A), schema({"a": "long"}))
    rows = pa.RecordBatch.from_pylist([{"a": 2**40}], schema=arrow_schema(chain[1]))
    assert converter(output(None), chain[1], chain)(rows).to_pylist() == [{"a": 2**40}]


def test_a_version_that_is_not_recorded_is_refused() -> None:
    with pytest.raises(CorruptRecord, match="output schema 3, but the pipeline has only 1"):
        converter(output(3), schema(A), (schema(A),))


def test_what_replaces_output_of_another_cut_may_have_other_columns(tmp_path: Path) -> None:
    made = Outputs(tmp_path)
    made.run(day(1), "d1", A, {"a": 1})
    both = Interval(day(1).start, day(2).end)
    made.run(both, "both", AB, {"b": "x", "a": 2}, permissions=Permissions(replace_overlapping=True))
    assert made.read() == [{"b": "x", "a": 2}]


def test_spark_reads_what_is_told(tmp_path: Path) -> None:
    made = Outputs(tmp_path)
    made.run(day(1), "d1", {"a!": "integer", "t": "timestamp"}, {"a": 1, "t": None})
    told = KeyedOutput({"root": str(tmp_path), "pipeline": PIPELINE}).schema()
    assert told == StructType.fromJson(schema({"a!": "integer", "t": "timestamp"}))
