"""Late rows in a table of their own, of every sink of `cairn.sinks`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from cairn import Interval, sinks
from cairn.command.cli import app
from cairn.errors import SinkFailed, UsageError
from cairn.sinks.table_sink import Publication, TableSink, owner_of, with_type
from cairn.testing import PipelineTester
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.log import read_log
from tests.support.clicks_pipeline import ANYTHING, LATE, Rows, current, expected, output_path, pipeline, restored
from tests.support.clicks_table import HOUR, START, Killed, hour, iceberg_properties, publish
from tests.support.coordinator import coordinator_of

LATE_SCHEMA = pa.schema([("user", pa.string()), ("at", pa.timestamp("us", "UTC")), ("checkpoint_id", pa.int64())])


def late_sink(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> TableSink:
    if kind == "bigquery":
        return sinks.bigquery("shop.late_clicks", request.getfixturevalue("stand_in").client)
    if kind == "delta":
        return sinks.delta(f"file://{tmp_path}/late")
    if kind == "iceberg":
        return sinks.iceberg("shop.late_clicks", "tests", lambda: iceberg_properties(tmp_path))
    address = request.getfixturevalue("server")
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS late_clicks")
    return sinks.postgres("late_clicks", lambda: address)


def late_rows(tester: PipelineTester) -> dict[Interval, list[dict[str, Any]]]:
    """The late rows of the current output, each with the checkpoint that found it."""
    found = {}
    for interval, (n, files) in read_log(open_storage(f"{tester.root}/clicks")).current_outputs().items():
        of_files = [pq.read_table(output_path(tester, file)).to_pylist() for file in files if file.late]
        rows = [{**row, "checkpoint_id": n} for rows in of_files for row in rows]
        if rows:
            found[interval] = sorted(rows, key=repr)
    return found


def kill_in(patched: pytest.MonkeyPatch, owner: type, late: bool, after: bool) -> None:
    """The process is killed before or after the transaction of the late rows' table, or of the other table."""
    called = owner.publish  # type: ignore[attr-defined]

    def publish(self: Any, publication: Publication) -> None:
        if publication.late != late or after:
            called(self, publication)
        if publication.late == late:
            raise Killed

    patched.setattr(owner, "publish", publish)


def test_late_rows_get_a_table_of_their_own(
    kind: str,
    sink: TableSink,
    read: Callable[[], Rows],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    late = late_sink(kind, tmp_path, request)
    both = sink.with_late_rows(late)
    event_time = {"time_mode": "event", "event_time": "at", "watermark_delay": timedelta(0), "watermark": "interval"}
    tester = PipelineTester(
        pipeline(both, **event_time),
        input_schema="user string, at timestamp",
        every=HOUR,
        root=f"file://{tmp_path}/state",
        call_sink=True,
    )
    at = [START + n * HOUR + timedelta(minutes=5) for n in range(3)]

    def same() -> int:
        """Both tables are equal to output and late rows; returns the number of late rows."""
        wanted = late_rows(tester)
        assert late.row_counts() == {interval: len(rows) for interval, rows in wanted.items()}
        for interval, rows in wanted.items():
            assert sorted(late.rows(interval, LATE_SCHEMA).to_pylist(), key=repr) == rows
        assert read() == expected(tester)
        return sum(map(len, wanted.values()))

    tester.run([("ann", at[0])])
    assert same() == 0
    tester.run([("ann", at[1]), ("bob", at[0]), ("cid", at[0])])
    assert same() == 2
    # A run again: the process is killed before or after one of the two transactions.
    for late_dies, after in ((False, True), (True, False), (True, True)):
        with monkeypatch.context() as patched:
            kill_in(patched, type(late), late_dies, after)
            with pytest.raises(SinkFailed):
                tester.run([("ann", at[1]), ("dan", at[0])], hour(1))
        coordinator_of(tester.pipeline, tester.root).publish(tester.pipeline.sink_hook(None, f"{tester.root}/clicks"))
        assert same() == 1
    tester.run([("ann", at[1])], hour(1))
    assert same() == 0
    tester.run([("ann", at[2]), ("eve", at[0])])
    assert same() == 1
    (call,) = [p for p in current(tester, late=True) if p.interval == hour(2)]
    # Two hours replace what the hours had; then a call of before comes late.
    tester.run([("fay", at[2])], hour(1, 2), permissions=ANYTHING)
    assert same() == 0
    late.publish(call)
    assert same() == 0
    tester.run([("gus", at[0])], hour(3))
    assert same() == 1
    restored(tester, 1).publish(tester.pipeline.sink_hook(None, f"{tester.root}/clicks"))
    assert same() == 0
    tester.run([("ann", at[1]), ("bob", at[0])], hour(1))
    assert same() == 1

    monkeypatch.setattr("cairn.command.publish.load_code", lambda code: tester.pipeline)
    variables = {"CAIRN_ROOT": tester.root, "CAIRN_PIPELINE": "clicks", "CAIRN_CODE": "clicks:CLICKS"}

    def typed(*words: str) -> list[str]:
        return CliRunner().invoke(app, ["publish", *words], env=variables).output.splitlines()

    equal = [
        f"{sink!r} is equal to the output of 2 interval(s)",
        f"{late!r} is equal to the late rows of 2 interval(s)",
    ]
    assert typed("--check") == equal
    late.clear(owner_of("clicks", f"{tester.root}/clicks", late=True))
    assert typed("--check") == [
        equal[0],
        f"{late!r} differs from the late rows of 1 interval(s):",
        f"{hour(1)}: 1 rows in the output, 0 in the table",
    ]
    assert typed("--rebuild") == [
        f"{sink!r} has the output of 2 interval(s)",
        f"{late!r} has the late rows of 2 interval(s)",
    ]
    assert typed("--check") == equal and same() == 1


@pytest.mark.parametrize(
    ("value", "old", "new", "fits"),
    [
        (Decimal("1.5"), pa.decimal128(38, 9), pa.float64(), True),
        (Decimal("12345678901234567890.123456789"), pa.decimal128(38, 9), pa.float64(), False),
        (1e-12, pa.float64(), pa.decimal128(38, 9), False),
        (0.1, pa.float64(), pa.float32(), False),
        (float("nan"), pa.float64(), pa.float32(), True),
        (2**40, pa.int64(), pa.int32(), False),
        ("01", pa.string(), pa.int64(), False),
        (START.replace(tzinfo=None, hour=5), pa.timestamp("us"), pa.date32(), False),
        ([1, None], pa.list_(pa.int32()), pa.list_(pa.int64()), True),
        ({"a": [0.1]}, pa.struct([("a", pa.list_(pa.float64()))]), pa.struct([("a", pa.list_(pa.float32()))]), False),
        ({"a": 1}, pa.struct([("a", pa.int32())]), pa.struct([("a", pa.int64()), ("b", pa.string())]), True),
        ({"a": 1, "b": 2}, pa.struct([("a", pa.int32()), ("b", pa.int32())]), pa.struct([("a", pa.int32())]), False),
        ({"a": 1}, pa.struct([("a", pa.int32()), ("b", pa.int32())]), pa.struct([("a", pa.int32())]), True),
        ([("k", 1.26)], pa.map_(pa.string(), pa.float64()), pa.map_(pa.string(), pa.decimal128(5, 1)), False),
        ([("k", 1.5)], pa.map_(pa.string(), pa.float64()), pa.map_(pa.string(), pa.decimal128(5, 1)), True),
    ],
)
def test_a_value_that_a_cast_would_change_is_refused(
    value: Any, old: pa.DataType, new: pa.DataType, fits: bool
) -> None:
    rows = pa.table({"v": pa.array([value, None], old)})
    if fits:
        assert with_type(rows, "v", new)["v"].type == new
        return
    with pytest.raises(UsageError, match="does not fit"):
        with_type(rows, "v", new)


def test_wrong_tables_and_columns_for_late_rows_are_refused(sink: TableSink) -> None:
    with pytest.raises(UsageError, match="has a table for late rows already"):
        sink.with_late_rows(sinks.delta("file:///late")).with_late_rows(sinks.delta("file:///late"))
    other = sinks.delta("file:///other")
    with pytest.raises(UsageError, match="has a table for late rows already"):
        sink.with_late_rows(other.with_late_rows(sinks.delta("file:///late")))
    with pytest.raises(UsageError, match="is the table of the output; give late rows another table"):
        sink.with_late_rows(sink)
    rows = pa.table({"user": ["ann"], "clicks": [1]})
    publish(sink, hour(0), 1, rows)
    with pytest.raises(UsageError, match="Give each pipeline a table of its own"):
        sink.publish(Publication(LATE, hour(0), 1, late=True))
    for name, what in (
        ("interval_end", "interval"),
        ("checkpoint_id", "checkpoint's id"),
        ("Interval_Start", "interval"),
        ("CHECKPOINT_ID", "checkpoint's id"),
    ):
        with pytest.raises(
            UsageError, match=rf"a late row of .* has a column '{name}', but the sink writes the {what}"
        ):
            sink.check_columns("clicks", [name], late=True)
