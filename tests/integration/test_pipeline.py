"""A pipeline without Airflow: interval after interval through Spark and RocksDB to local files."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F
from pyspark.sql.types import Row, StructType

from cairn.data_sources.keyed_output import KeyedOutput
from cairn.data_sources.keyed_state import KeyedState
from cairn.operations.coordinator_of import coordinator_of
from cairn.operations.intervals.plan_interval import Attempt
from cairn.operations.intervals.process_interval import process_interval
from cairn.operations.intervals.run_interval import run_interval
from cairn.operations.savepoints.take_savepoint import consolidate_checkpoint, take_savepoint
from cairn.pipeline import Interval, Pipeline
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.adapters.rocks import EngineOptions
from state_backend.shard.manifest import manifest_of
from state_backend.shard.restore import restore_shard
from state_backend.values import errors
from state_backend.values.records import Permissions, Record, RunRef, ShardManifest
from tests.support.counting import DAYS, INPUT_SCHEMA, START, Counting, counting, day, read_days
from tests.support.tiers import long_after
from tests.support.validating import validate_checkpoint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def days() -> Iterator[dict[Any, Any]]:
    DAYS.clear()
    DAYS[day(0).start] = [("ann", "pear", 1), ("bob", "fig", 5), ("ann", "fig", 2), (None, "fig", 9)]
    DAYS[day(1).start] = [("ann", "pear", 3)]
    DAYS[day(4).start] = [("bob", "kiwi", 1)]
    yield DAYS
    DAYS.clear()


def outputs(spark: SparkSession, root: Path, n: int) -> list[tuple[Any, ...]]:
    """One day's current output rows, as keyed_output reads them."""
    spark.dataSource.register(KeyedOutput)
    reader = spark.read.format("keyed_output").option("root", str(root)).option("pipeline", "counting")
    rows = reader.option("start", day(n).start.isoformat()).option("end", day(n).end.isoformat()).load().collect()
    return sorted((tuple(r) for r in rows), key=str)


def state(spark: SparkSession, root: Path, name: str, checkpoint: str = "latest") -> list[Row]:
    spark.dataSource.register(KeyedState)
    reader = spark.read.format("keyed_state").option("root", str(root)).option("pipeline", "counting")
    return reader.option("checkpoint", checkpoint).option("state", name).load().collect()


def test_state_is_carried_from_interval_to_interval(spark: SparkSession, tmp_path: Path) -> None:
    """Values, maps with expiry, lists and timers over eight days, two of them without input; a null key is a key."""
    records = [run_interval(spark, counting(), day(n), str(tmp_path)) for n in range(8)]
    assert [r.id for r in records] == list(range(1, 9))
    assert [r.content.base_id for r in records] == [None, 1, 2, 3, 4, 5, 6, 7]
    assert outputs(spark, tmp_path, 0) == [
        ("ann", "seen", 3, ["fig", "pear"], [1, 2]),
        ("bob", "seen", 5, ["fig"], [5]),
        (None, "seen", 9, ["fig"], [9]),
    ]
    assert outputs(spark, tmp_path, 1) == [("ann", "seen", 6, ["fig", "pear"], [1, 2, 3])]
    # Two days after the first day's end: bob and null; ann one day later. Their items still live for a day.
    assert outputs(spark, tmp_path, 2) == [("bob", "idle", 5, ["fig"], [5]), (None, "idle", 9, ["fig"], [9])]
    assert outputs(spark, tmp_path, 3) == [("ann", "idle", 6, ["pear"], [1, 2, 3])]
    assert outputs(spark, tmp_path, 4) == [("bob", "seen", 6, ["kiwi"], [5, 1])]
    assert outputs(spark, tmp_path, 5) == []
    totals = {r.key.user: (r.value.sum, r.value.rows) for r in state(spark, tmp_path, "total")}
    assert totals == {"ann": (6, 3), "bob": (6, 2), None: (9, 1)}
    assert [(r.key.user, r.value.amount, r.pos) for r in state(spark, tmp_path, "amounts") if r.key.user == "bob"] == [
        ("bob", 5, 0),
        ("bob", 1, 1),
    ]
    assert state(spark, tmp_path, "items") == []
    assert {(r.key.user, r.user_key.item) for r in state(spark, tmp_path, "items", "3")} == {
        ("ann", "fig"),
        ("ann", "pear"),
        ("bob", "fig"),
        (None, "fig"),
    }
    assert state(spark, tmp_path, "$timers") == []
    assert len(state(spark, tmp_path, "$timers", day(0).end.isoformat())) == 3


def test_an_interval_without_change_writes_no_state(spark: SparkSession, tmp_path: Path) -> None:
    for n in range(8):  # the last timer fires on day 6, the last entry expires on day 7
        run_interval(spark, counting(), day(n), str(tmp_path))
    before = {f for f in (tmp_path / "counting" / "shared").rglob("*") if f.is_file()}
    record = run_interval(spark, counting(), day(8), str(tmp_path))
    assert record.content.totals.uploaded_bytes == 0
    assert {f for f in (tmp_path / "counting" / "shared").rglob("*") if f.is_file()} <= before


def test_running_an_interval_again_gives_identical_rows_and_state(spark: SparkSession, tmp_path: Path) -> None:
    """The same input gives byte-identical output rows and an equal state, and makes nothing after it stale."""
    first = [run_interval(spark, counting(), day(n), str(tmp_path)) for n in range(3)]
    rows = [pq.read_table(tmp_path / "counting" / f.handle.path) for f in first[1].content.outputs]
    again = run_interval(spark, counting(), day(1), str(tmp_path))
    assert again.content.digest == first[1].content.digest
    assert again.content.attempt != first[1].content.attempt
    assert [pq.read_table(tmp_path / "counting" / f.handle.path) for f in again.content.outputs] == rows
    assert [f.handle.crc32c for f in again.content.outputs] == [f.handle.crc32c for f in first[1].content.outputs]
    run_interval(spark, counting(), day(3), str(tmp_path))


def test_changed_input_makes_later_intervals_stale(spark: SparkSession, tmp_path: Path) -> None:
    for n in range(3):
        run_interval(spark, counting(), day(n), str(tmp_path))
    DAYS[day(1).start] = [("ann", "pear", 100)]
    run_interval(spark, counting(), day(1), str(tmp_path))
    with pytest.raises(errors.StaleStateError, match="Run again the interval that starts at"):
        run_interval(spark, counting(), day(3), str(tmp_path))
    run_interval(spark, counting(), day(2), str(tmp_path))
    run_interval(spark, counting(), day(3), str(tmp_path))
    assert {r.key.user: r.value.sum for r in state(spark, tmp_path, "total")}["ann"] == 103


def test_a_gap_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    run_interval(spark, counting(), day(0), str(tmp_path))
    with pytest.raises(errors.StateGapError, match="To fill the gap, run the interval that starts at"):
        run_interval(spark, counting(), day(2), str(tmp_path))
    run_interval(spark, counting(), day(2), str(tmp_path), permissions=Permissions(allow_gap=True))


@pytest.mark.parametrize("steps", long_after(1, [((2, 1, 3, 2),), ((1, 16, 1),)], "seconds of Spark"))
def test_parallelism_may_change_between_intervals(spark: SparkSession, tmp_path: Path, steps: tuple[int, ...]) -> None:
    """F68, F71: the digest after each step equals that of a run that was never rescaled."""
    DAYS[day(0).start] = [(f"user-{n}", "fig", n) for n in range(200)]
    DAYS[day(1).start] = [(f"user-{n}", "kiwi", n) for n in range(0, 200, 7)]
    for n, parallelism in enumerate(steps):
        scaled = run_interval(spark, counting(parallelism=parallelism), day(n), str(tmp_path / "scaled"))
        steady = run_interval(spark, counting(), day(n), str(tmp_path / "steady"))
        assert scaled.content.digest == steady.content.digest
        assert [s.shard for s in scaled.content.shards] == list(range(parallelism))


def test_full_and_incremental_follow_each_other(spark: SparkSession, tmp_path: Path) -> None:
    """A full checkpoint shares nothing with its base, and later incremental ones share what it wrote."""
    DAYS[day(0).start] = [(f"user-{n}", "fig" * 10, n) for n in range(20_000)]
    small = {n: [(f"user-{n}", "kiwi", n)] for n in range(1, 4)}
    DAYS.update({day(n).start: rows for n, rows in small.items()})
    records = [
        run_interval(spark, counting(), day(n), str(tmp_path), mode)
        for n, mode in enumerate(["incremental", "full", "incremental"])
    ]
    files = [{f.handle.path for s in r.content.shards if s.inline for f in s.inline.files} for r in records]
    assert files[0] and not files[0] & files[1]
    assert files[1] <= files[2]
    assert records[2].content.totals.uploaded_bytes < records[1].content.totals.uploaded_bytes / 3


def test_validation_restores_from_storage_and_quarantines(spark: SparkSession, tmp_path: Path) -> None:
    root = str(tmp_path)
    for n in range(2):
        record = run_interval(spark, counting(), day(n), root)
    assert validate_checkpoint(spark, counting(), root, record).success

    def refuse() -> dict[str, list[Any]]:
        import great_expectations as gx

        return {"total": [gx.expectations.ExpectColumnValuesToBeBetween(column="sum", max_value=5)]}

    refused = validate_checkpoint(spark, counting(expectations=refuse), root, record, docs=tmp_path / "docs")
    assert "expect_column_values_to_be_between sum" in refused.findings[0]
    assert (tmp_path / "docs" / "counting" / "index.html").exists()
    with pytest.raises(errors.StateUnusable, match="quarantine"):
        run_interval(spark, counting(), day(2), root)


def test_an_expectation_that_fails_to_run_is_not_bad_data(spark: SparkSession, tmp_path: Path) -> None:
    record = run_interval(spark, counting(), day(0), str(tmp_path))

    def typo() -> dict[str, list[Any]]:
        import great_expectations as gx

        return {"total": [gx.expectations.ExpectColumnValuesToBeBetween(column="smu", max_value=5)]}

    with pytest.raises(errors.UsageError, match="could not be evaluated"):
        validate_checkpoint(spark, counting(expectations=typo), str(tmp_path), record)
    run_interval(spark, counting(), day(1), str(tmp_path))


def test_a_savepoint_is_compacted_self_contained_and_movable(spark: SparkSession, tmp_path: Path) -> None:
    root = tmp_path / "root"
    earlier, record = (run_interval(spark, counting(), day(n), str(root)) for n in range(2))
    pipeline_root, to = join_url(str(root), "counting"), str(tmp_path / "savepoint")
    taken = take_savepoint(spark, counting(), pipeline_root, record, to)
    assert take_savepoint(spark, counting(), pipeline_root, record, to) == taken  # a retry
    for other in ((earlier, to), (record, to, "canonical")):
        with pytest.raises(errors.UsageError, match="never overwritten"):
            take_savepoint(spark, counting(), pipeline_root, *other)
    (tmp_path / "savepoint").rename(tmp_path / "moved")
    (root / "counting").rename(tmp_path / "gone")
    from state_backend.formats import record_codec
    from state_backend.state.check_shard import verify_shard
    from state_backend.values.marks import Savepoint

    storage = open_storage(str(tmp_path / "moved"))
    savepoint = record_codec.decode(storage.read("savepoint.json"), "savepoint.json", Savepoint)
    assert savepoint.content.digest == record.content.digest
    for ref in savepoint.content.shards:
        manifest = manifest_of(ref, storage)
        assert len(manifest.files) <= 1
        restored = restore_shard(
            manifest.key_groups, [manifest], storage, tmp_path / f"db-{ref.shard}", EngineOptions()
        )
        assert (
            verify_shard(restored.store, manifest, savepoint.content.states, savepoint.content.key_schema, 16)[1] == []
        )
        restored.store.close()


class Broken(Counting):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        if key[0] == "bob":
            raise ZeroDivisionError("on purpose")
        return Counting.handleInputRows(self, key, rows, timerValues)


class Untyped(Counting):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        self._total.update(("many", 1))
        return iter([])


class Forgetful(Counting):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Any:
        return None


class Tuples(Counting):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Any:
        yield ("ann", 1)


@pytest.mark.parametrize(
    ("processor", "says"),
    [
        (
            Broken,
            "handleInputRows, key ('bob',), interval [2024-01-02T00:00:00Z, 2024-01-03T00:00:00Z): ZeroDivisionError: on purpose",
        ),
        (Untyped, "state 'total'"),
        (Forgetful, "handleInputRows returned None"),
        (Tuples, "expected pyspark.sql.Row"),
    ],
)
def test_errors_in_a_processor_name_key_and_interval_and_commit_nothing(
    spark: SparkSession, tmp_path: Path, processor: type, says: str
) -> None:
    DAYS[day(1).start] = [("ann", "pear", 3), ("bob", "pear", 3)]
    run_interval(spark, counting(), day(0), str(tmp_path))
    with pytest.raises(errors.ProcessorError) as raised:
        run_interval(spark, counting(processor=processor), day(1), str(tmp_path))
    assert says in str(raised.value)
    assert coordinator_of(counting(), str(tmp_path)).record("latest").id == 1
    run_interval(spark, counting(), day(1), str(tmp_path))


def test_the_user_sees_their_own_traceback(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(errors.ProcessorError) as raised:
        run_interval(spark, counting(processor=Broken), day(0), str(tmp_path))
    notes = "\n".join(raised.value.__notes__)
    assert 'raise ZeroDivisionError("on purpose")' in notes
    assert "\tat org.apache.spark" not in notes


def _lacks_key() -> Pipeline:
    return counting(key=["customer"])


@pytest.mark.parametrize(
    ("pipeline", "error", "says"),
    [
        (_lacks_key, errors.SourceError, "lacks the key column customer; found: user, item, amount"),
        (
            lambda: counting(source=lambda spark, interval: (_ for _ in ()).throw(errors.SourceError("no file"))),
            errors.SourceError,
            "no file",
        ),
        (lambda: counting(order_by=["when"]), errors.UsageError, "order_by names when"),
        (lambda: counting(output_schema="user strin"), errors.UsageError, "not a schema"),
        (
            lambda: counting(
                source=lambda spark, interval: (
                    spark.createDataFrame([("a", "b", 1)], "user string, item string, amount long"),
                    {"counts": {"rows": 2}},
                )
            ),
            errors.SourceError,
            "the source counted 2 rows, but 1 reached the processor",
        ),
    ],
)
def test_bad_input_is_refused_and_nothing_is_lost(
    spark: SparkSession, tmp_path: Path, pipeline: Any, error: type, says: str
) -> None:
    run_interval(spark, counting(), day(0), str(tmp_path))
    with pytest.raises(error, match=says):
        run_interval(spark, pipeline(), day(1), str(tmp_path))
    run_interval(spark, counting(), day(1), str(tmp_path))
    assert coordinator_of(counting(), str(tmp_path)).record("latest").id == 2


def _raising(spark: SparkSession, interval: Interval) -> DataFrame:
    raise LookupError("no such day\nat all")


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"source": _raising}, errors.SourceError, "the source raised LookupError: no such day"),
        ({"source": lambda *_: None}, errors.SourceError, "the source returned None; it must return a DataFrame"),
        ({"source": lambda *_: [1]}, errors.SourceError, "the source returned a list; it must return a DataFrame"),
        (
            {"source": lambda spark, _: (read_days(spark, day(0)), {}, 1)},
            errors.SourceError,
            "the source returned a tuple; it must",
        ),
        (
            {"source": lambda spark, _: spark.read.parquet("/not/there")},
            errors.SourceError,
            "the source raised AnalysisException: [PATH_NOT_FOUND] Path does not exist: file:/not/there",
        ),
        (
            {"source": lambda spark, _: spark.readStream.format("rate").load()},
            errors.SourceError,
            "the source returned a streaming DataFrame, which has no end; read the interval's rows with spark.read",
        ),
        (
            {"source": lambda spark, _: (read_days(spark, day(0)), {"at": START})},
            errors.SourceError,
            "position must be a dict of JSON values: Object of type datetime",
        ),
        (
            {"source": lambda spark, _: (read_days(spark, day(0)), {"at": float("nan")})},
            errors.SourceError,
            "position must be a dict of JSON values",
        ),
        (
            {"source": lambda spark, _: (read_days(spark, day(0)), "1")},
            errors.SourceError,
            "position must be a dict of JSON values: it is a str",
        ),
        (
            {
                "source": lambda spark, _: (
                    read_days(spark, day(0)).withColumn("n", F.lit(1)).selectExpr("*", "n as ITEM")
                )
            },
            errors.SourceError,
            "the input has two columns 'item' and 'ITEM'",
        ),
        ({"output_schema": "user strin"}, errors.UsageError, "'counting': output_schema is not a schema: 'user strin'"),
        ({"output_schema": "a int, b int, a int"}, errors.UsageError, "output_schema names a more than once"),
        ({"output_schema": 5}, errors.UsageError, "output_schema is a int; it must be DDL or a StructType"),
        (
            {"initial_state": lambda spark: spark.createDataFrame([("a",)], "item string").groupBy("item")},
            errors.SourceError,
            "the initial state lacks the key column user",
        ),
        (
            {"initial_state": lambda spark: read_days(spark, day(0)).groupBy("user", "item")},
            errors.UsageError,
            "the initial state is grouped by user, item, but the pipeline's key is user; group it by the key",
        ),
        (
            {"initial_state": lambda spark: read_days(spark, day(0)).groupBy(F.upper("user"))},
            errors.UsageError,
            "the initial state must be grouped with groupBy, by plain columns only",
        ),
    ],
)
def test_a_wrong_declaration_is_refused_before_the_first_row(
    spark: SparkSession, tmp_path: Path, changes: dict[str, Any], error: type, says: str
) -> None:
    with pytest.raises(error) as raised:
        run_interval(spark, counting(**changes), day(0), str(tmp_path))
    assert says in str(raised.value)
    assert "pipeline 'counting'" in str(raised.value)
    if "source" in changes and "two columns" not in says:
        assert str(day(0)) in str(raised.value)
    if changes.get("source") is _raising:
        (note,) = raised.value.__notes__
        assert 'raise LookupError("no such day' in note
        assert "read_source" not in note


def test_input_that_cannot_be_computed_is_named(spark: SparkSession, tmp_path: Path) -> None:
    """Seen only when Spark comes to it: a file that is damaged or went, a value that can't be cast."""
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 is how it begins, and ends: PAR1")
    spark.createDataFrame([("a", "b", 1)], INPUT_SCHEMA).coalesce(1).write.parquet(str(tmp_path / "gone"))
    gone = spark.read.parquet(str(tmp_path / "gone"))
    for file in (tmp_path / "gone").glob("part-*"):
        file.unlink()
    for rows, says in (
        (spark.read.schema(INPUT_SCHEMA).parquet(str(tmp_path / "damaged.parquet")), "damaged.parquet"),
        (gone, "File does not exist"),
        (spark.sql("select 'a' user, 'b' item, cast(concat('x', rand(1)) as long) amount"), "CAST_INVALID_INPUT"),
    ):
        with pytest.raises(errors.SourceError) as raised:
            run_interval(spark, counting(source=lambda *_, rows=rows: rows), day(0), str(tmp_path / "root"))
        assert str(raised.value).startswith(f"pipeline 'counting', {day(0)}: ")
        assert says in str(raised.value) and "Nothing was committed" in str(raised.value)


def test_a_file_that_the_source_itself_cannot_read_is_named(spark: SparkSession, tmp_path: Path) -> None:
    """Where it counts rows, or lets Spark find the schema, the error comes out of the source, as one of Py4J's."""
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 is how it begins, and ends: PAR1")
    (tmp_path / "no.json.gz").write_bytes(b"no gzip file")
    for read, says in (
        (lambda spark: spark.read.parquet(str(tmp_path / "damaged.parquet")), "damaged.parquet"),
        (lambda spark: spark.read.schema("a string").json(str(tmp_path / "no.json.gz")).count(), "no.json.gz"),
        (lambda spark: spark.read.json(str(tmp_path / "no.json.gz")), "no.json.gz"),
    ):
        with pytest.raises(errors.SourceError) as raised:
            run_interval(spark, counting(source=lambda s, _, read=read: read(s)), day(0), str(tmp_path / "root"))
        assert str(raised.value).startswith(f"pipeline 'counting', {day(0)}: ")
        assert says in str(raised.value) and "An error occurred while calling" not in str(raised.value)


PLAIN = """
import sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
from cairn import run_interval
from tests.support.counting import INPUT_SCHEMA, counting, day
rows = spark.createDataFrame([("u", "i", 1)], INPUT_SCHEMA)
print("record", run_interval(spark, counting(source=lambda *_: rows), day(0), sys.argv[1]).id)
"""


@pytest.mark.long("20 seconds: a Python of its own")
def test_workers_are_the_python_that_runs_the_driver(tmp_path: Path) -> None:
    """`.venv/bin/python` where the environment is not on the PATH: Spark would start the system's Python."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK")}
    env |= {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, "-c", PLAIN, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert "record 1" in done.stdout, done.stderr[-3000:]


def test_a_stopped_session_is_named(spark: SparkSession, tmp_path: Path) -> None:
    class Context:
        _jsc = None

    class Stopped:
        _sc = Context()

    class Closed:  # of Spark Connect
        is_stopped = True

    for session in (Stopped(), Closed()):
        with pytest.raises(errors.UsageError, match="the Spark session has been stopped; pass a running session"):
            run_interval(cast(Any, session), counting(), day(0), str(tmp_path))


def test_names_and_schemas_may_be_given_as_spark_takes_them(spark: SparkSession, tmp_path: Path) -> None:
    """Columns as objects, names in another case or with dots, spaces and backticks; a grouped initial state; StructTypes. A key
    that is an expression is refused, as by Spark."""

    def source(spark: SparkSession, interval: Interval) -> DataFrame:
        return read_days(spark, interval).withColumnsRenamed({"user": "Us.er", "amount": "a `m`"})

    def initial(spark: SparkSession) -> Any:
        return spark.createDataFrame([("cid", 1), ("ann", 2)], "`US.ER` string, n long").groupBy("`us.er`")

    record = run_interval(
        spark,
        counting(
            source=source,
            key=[F.col("`us.ER`")],
            processor=CountsInitial,
            order_by=["A `M`"],
            initial_state=initial,
            output_schema=StructType().add("user", "string").add("found", "string"),
        ),
        day(0),
        str(tmp_path),
    )
    files = [tmp_path / "counting" / f.handle.path for f in record.content.outputs]
    rows = sorted((r["user"] or "", r["found"]) for f in files for r in pq.read_table(f).to_pylist())
    assert rows == [("", "0 [9]"), ("ann", "2 [1, 2]"), ("bob", "0 [5]")]
    assert [f["name"] for f in record.content.key_schema["fields"]] == ["Us.er"]
    assert counting(key=[read_days(spark, day(0))["user"], F.col("item")]).key == ["user", "item"]
    for key in (F.upper("user"), F.col("user").alias("u"), F.col("s.x")):
        with pytest.raises(errors.UsageError, match=r"'counting': key: .* is not a plain column of the input"):
            counting(key=[key])


class CountsInitial(Counting):
    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self._total.update((initialState.n, 0))

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        yield Row(user=key[0], found=f"{(self._total.get() or (0,))[0]} {[row['a `m`'] for row in rows]}")


def test_a_root_that_cannot_be_written_is_named(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(errors.UsageError, match="is a file"):
        run_interval(spark, counting(), day(0), str(tmp_path / "file"))


def test_a_damaged_sst_is_named_and_nothing_is_committed(spark: SparkSession, tmp_path: Path) -> None:
    """S32: a corrupt file of the last checkpoint refuses the restore, naming the file; for every other kind of file and damage see
    ``tests/unit/test_corruption.py``. A host whose cache has the file whole would go on."""
    pipeline = counting(engine=EngineOptions(cache_dir=None))
    DAYS[day(0).start] = [(f"user-{n}", "fig", n) for n in range(5_000)]
    record = run_interval(spark, pipeline, day(0), str(tmp_path))
    victim = next(f.handle.path for s in record.content.shards if s.inline for f in s.inline.files)
    file = tmp_path / "counting" / victim
    whole = file.read_bytes()
    data = bytearray(whole)
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(errors.CorruptFile, match=victim):
        run_interval(spark, pipeline, day(1), str(tmp_path))
    assert coordinator_of(counting(), str(tmp_path)).record("latest").id == 1
    # Nothing else was touched: with the file as it was, the interval runs.
    file.write_bytes(whole)
    assert run_interval(spark, pipeline, day(1), str(tmp_path)).content.base_id == 1


def test_a_damaged_copy_in_the_hosts_cache_costs_a_download(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A bit of the cache flips where neither size nor time tells; the storage is sound. A local master runs each task once, so that
    the interval is computed once more in the same call, and ends as an undisturbed one."""
    pipeline = counting(engine=EngineOptions(cache_dir=str(tmp_path / "cache")))
    DAYS[day(0).start] = DAYS[day(1).start] = [(f"user-{n}", "fig", n) for n in range(5_000)]
    for root in ("sound", "disturbed"):
        run_interval(spark, pipeline, day(0), str(tmp_path / root))
    sound = run_interval(spark, pipeline, day(1), str(tmp_path / "sound"))

    def damage() -> None:
        for entry in (tmp_path / "cache").iterdir():
            times = entry.stat()
            data = bytearray(entry.read_bytes())
            data[len(data) // 4] ^= 1
            entry.write_bytes(data)
            os.utime(entry, ns=(times.st_atime_ns, times.st_mtime_ns))

    damage()
    with caplog.at_level("WARNING", "cairn"):
        record = run_interval(spark, pipeline, day(1), str(tmp_path / "disturbed"))
    assert "the cached copy of a state file on a host is damaged" in caplog.text
    assert record.content.digest == sound.content.digest
    assert record.content.totals.downloaded_bytes > 0
    DAYS[day(2).start] = [(f"user-{n}", "fig", n) for n in range(300)]
    record = run_interval(spark, pipeline, day(2), str(tmp_path / "disturbed"))
    damage()
    caplog.clear()
    with caplog.at_level("WARNING", "cairn"):
        consolidated = consolidate_checkpoint(spark, pipeline, str(tmp_path / "disturbed"), record)
    assert "the cached copy of a state file on a host is damaged" in caplog.text
    assert (consolidated.content.kind, consolidated.content.digest) == ("consolidate", record.content.digest)


def test_a_damaged_checkpoint_offers_the_one_before_and_its_command_mends_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    """S31, S32: the error of an interval names the file, the newest checkpoint that verifies, and what to run; after that the state
    is what it was. A savepoint that meets the file offers the same."""
    pipeline, root = counting(engine=EngineOptions(cache_dir=None)), str(tmp_path)
    for n in range(3):
        DAYS[day(n).start] = [(f"user-{m}", "fig", m + n) for m in range(3_000)]
    records = [run_interval(spark, pipeline, day(n), root) for n in range(2)]
    before, victim = ({f.handle.path for m in manifests(tmp_path, r) for f in m.files} for r in records)
    path = min(victim - before)
    (tmp_path / "counting" / path).unlink()
    offer = "By a quick check, the newest intact checkpoint before it is 1, the state at 2024-01-02T00:00:00Z"
    command = "run the interval that starts at 2024-01-02T00:00:00Z"
    with pytest.raises(errors.CorruptFile, match=path) as raised:
        run_interval(spark, pipeline, day(2), root)
    assert offer in str(raised.value) and command in str(raised.value)
    with pytest.raises(errors.CorruptFile, match=path) as raised:
        take_savepoint(spark, pipeline, f"{root}/counting", records[1], str(tmp_path / "savepoint"))
    assert offer in str(raised.value)
    assert coordinator_of(pipeline, root).log().head_id == 2
    mended = run_interval(spark, pipeline, day(1), root)
    assert (mended.reproduces, mended.content.digest) == (2, records[1].content.digest)
    assert run_interval(spark, pipeline, day(2), root).content.base_id == mended.id


def manifests(root: Path, record: Record) -> list[ShardManifest]:
    storage = open_storage(str(root / "counting"))
    return [manifest_of(ref, storage) for ref in record.content.shards]


def test_a_state_may_not_change_its_schema(spark: SparkSession, tmp_path: Path) -> None:
    class Renamed(Counting):
        def init(self, handle: Any) -> None:
            super().init(handle)
            self._extra = handle.getValueState("extra", "n long")

    class Changed(Counting):
        def init(self, handle: Any) -> None:
            self._handle = handle
            self._total = handle.getValueState("total", "sum string, rows long")
            self._items = handle.getMapState("items", "item string", "seen long", 3 * 86_400_000)
            self._amounts = handle.getListState("amounts", "amount long")

    run_interval(spark, counting(), day(0), str(tmp_path))
    with pytest.raises(
        errors.StateSchemaError, match="state 'total' field 'sum': recorded as bigint, declared as string"
    ):
        run_interval(spark, counting(processor=Changed), day(1), str(tmp_path))
    added = run_interval(spark, counting(processor=Renamed), day(1), str(tmp_path))
    assert [d.name for d in added.content.states] == ["total", "items", "amounts", "extra"]


def read_days_with_position(spark: SparkSession, interval: Interval) -> tuple[DataFrame, dict[str, Any]]:
    return read_days(spark, interval), {"rows": sorted(map(str, DAYS.get(interval.start, [])))}


def test_what_an_earlier_try_prepared_is_used_if_nothing_has_changed(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A retry writes nothing and gets the earlier attempt; another input, option or clear is computed again, and says why."""
    caplog.set_level("INFO", "cairn")
    pipeline = counting(source=read_days_with_position)
    run_interval(spark, pipeline, day(0), str(tmp_path))
    options: list[Any] = []

    class Computes(Exception):
        pass

    def begin(settings: Any) -> None:
        options.append(settings)
        if len(options) > 1:
            raise Computes  # that it would is all that is asked

    def attempt(earlier: tuple[str, Any] | None, *, clear: int = 0, mode: str = "incremental", **more: Any) -> str:
        prepared = process_interval(
            spark,
            replace(pipeline, **more),
            str(tmp_path),
            Attempt(
                id="later" if earlier else "first",
                interval=day(1),
                mode=mode,
                run=RunRef(run_id="run", clear_number=clear, try_number=1),
                earlier=earlier,
            ),
            on_begin=begin,
        )
        return prepared.content.attempt

    assert attempt(None) == "first"
    earlier = ("first", options[0])
    files = {file for file in tmp_path.rglob("*") if file.is_file()}
    assert attempt(earlier) == "first" and len(options) == 1
    assert {file for file in tmp_path.rglob("*") if file.is_file()} == files
    assert "nothing is computed again" in caplog.text

    def is_computed(reason: str, **changes: Any) -> None:
        caplog.clear()
        with pytest.raises(Computes):
            attempt(earlier, **changes)
        assert f"attempt first of an earlier try is not used: {reason}" in caplog.text

    is_computed("mode was incremental and is now full", mode="full")
    is_computed("engine was ", engine=EngineOptions(write_buffer_bytes=1 << 20))
    is_computed("the run was cleared since", clear=1)
    is_computed("source was ", source=read_days)
    DAYS[day(1).start] = [("ann", "pear", 4)]
    is_computed("the source's position differs: the input has changed")


class Dying(Counting):
    """Its worker ends by a signal at user bob."""

    SIGNAL = signal.SIGKILL

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        if key[0] == "bob":
            os.kill(os.getpid(), self.SIGNAL)
        return super().handleInputRows(key, rows, timerValues)


class Crashing(Dying):
    SIGNAL = signal.SIGSEGV


@pytest.mark.parametrize(("processor", "how"), [(Dying, "was killed"), (Crashing, "crashed by SIGSEGV")])
def test_a_worker_that_a_signal_ends_is_explained(
    spark: SparkSession, tmp_path: Path, processor: type[Dying], how: str
) -> None:
    with pytest.raises(errors.WorkerDied) as raised:
        run_interval(spark, counting(processor=processor), day(0), str(tmp_path))
    told = re.match(
        r"the Python worker of shard (\d) (.*) while processing keys from key group \d+ on", str(raised.value)
    )
    assert told is not None and told[2] == how, raised.value
    notes = "".join(getattr(raised.value, "__notes__", []))
    assert ("Fatal Python error: Segmentation fault" in notes and "in handleInputRows" in notes) == (
        processor is Crashing
    )
    print(raised.value, notes, sep="\n")
