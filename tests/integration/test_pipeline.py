"""A pipeline without Airflow: interval after interval through Spark and RocksDB to local files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F
from pyspark.sql.types import Row, StructType

from cairn.operations.intervals.run_interval import run_interval
from cairn.operations.savepoints.take_savepoint import consolidate_checkpoint, take_savepoint
from cairn.pipeline import Interval
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.rocks import EngineOptions
from state_backend.shard.manifest import manifest_of
from state_backend.values import errors
from state_backend.values.records import Record, ShardManifest
from tests.support.coordinator import coordinator_of
from tests.support.counting import DAYS, FEW_ROWS, INPUT_SCHEMA, Counting, counting, day, fresh_days, read_days
from tests.support.spark_tables import output_rows, state_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


days = fresh_days(FEW_ROWS)


def test_state_is_carried_from_interval_to_interval(spark: SparkSession, tmp_path: Path) -> None:
    """Values, maps with expiry, lists and timers over eight days, two of them without input; a null key is a key."""
    records = [run_interval(spark, counting(), day(n), str(tmp_path)) for n in range(8)]
    assert [r.id for r in records] == list(range(1, 9))
    assert [r.content.base_id for r in records] == [None, 1, 2, 3, 4, 5, 6, 7]
    assert output_rows(spark, tmp_path, day(0)) == [
        ("ann", "seen", 3, ["fig", "pear"], [1, 2]),
        ("bob", "seen", 5, ["fig"], [5]),
        (None, "seen", 9, ["fig"], [9]),
    ]
    assert output_rows(spark, tmp_path, day(1)) == [("ann", "seen", 6, ["fig", "pear"], [1, 2, 3])]
    # Two days after the first day's end: bob and null; ann one day later. Their items still live for a day.
    assert output_rows(spark, tmp_path, day(2)) == [("bob", "idle", 5, ["fig"], [5]), (None, "idle", 9, ["fig"], [9])]
    assert output_rows(spark, tmp_path, day(3)) == [("ann", "idle", 6, ["pear"], [1, 2, 3])]
    assert output_rows(spark, tmp_path, day(4)) == [("bob", "seen", 6, ["kiwi"], [5, 1])]
    assert output_rows(spark, tmp_path, day(5)) == []
    totals = {r.key.user: (r.value.sum, r.value.rows) for r in state_table(spark, tmp_path, "total").collect()}
    assert totals == {"ann": (6, 3), "bob": (6, 2), None: (9, 1)}
    assert [
        (r.key.user, r.value.amount, r.pos)
        for r in state_table(spark, tmp_path, "amounts").collect()
        if r.key.user == "bob"
    ] == [("bob", 5, 0), ("bob", 1, 1)]
    assert state_table(spark, tmp_path, "items").collect() == []
    assert {(r.key.user, r.user_key.item) for r in state_table(spark, tmp_path, "items", checkpoint="3").collect()} == {
        ("ann", "fig"),
        ("ann", "pear"),
        ("bob", "fig"),
        (None, "fig"),
    }
    assert state_table(spark, tmp_path, "$timers").collect() == []
    assert len(state_table(spark, tmp_path, "$timers", checkpoint=day(0).end.isoformat()).collect()) == 3


class Broken(Counting):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        if key[0] == "bob":
            raise ZeroDivisionError("on purpose")
        return Counting.handleInputRows(self, key, rows, timerValues)


def test_an_error_in_a_processor_names_key_and_interval_and_commits_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The user sees their own traceback."""
    DAYS[day(1).start] = [("ann", "pear", 3), ("bob", "pear", 3)]
    run_interval(spark, counting(), day(0), str(tmp_path))
    with pytest.raises(errors.ProcessorError) as raised:
        run_interval(spark, counting(processor=Broken), day(1), str(tmp_path))
    says = f"handleInputRows, key ('bob',), interval {day(1)}: ZeroDivisionError: on purpose"
    assert says in str(raised.value)
    notes = "\n".join(raised.value.__notes__)
    assert 'raise ZeroDivisionError("on purpose")' in notes
    assert "\tat org.apache.spark" not in notes
    assert coordinator_of(counting(), str(tmp_path)).record("latest").id == 1
    run_interval(spark, counting(), day(1), str(tmp_path))


def _raising(spark: SparkSession, interval: Interval) -> DataFrame:
    raise LookupError("no such day\nat all")


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"source": _raising}, errors.SourceError, "the source raised LookupError: no such day"),
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
            {
                "source": lambda spark, _: (
                    read_days(spark, day(0)).withColumn("n", F.lit(1)).selectExpr("*", "n as ITEM")
                )
            },
            errors.SourceError,
            "the input has two columns 'item' and 'ITEM'",
        ),
        (
            {"initial_state": lambda spark: spark.createDataFrame([("a",)], "item string").groupBy("item")},
            errors.SourceError,
            "the initial state lacks the key column user",
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


def test_input_that_spark_cannot_compute_is_a_source_error_with_the_cause(spark: SparkSession, tmp_path: Path) -> None:
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


def test_the_error_of_a_source_names_the_file_that_it_cannot_read(spark: SparkSession, tmp_path: Path) -> None:
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
def test_spark_workers_run_the_same_python_as_the_driver(tmp_path: Path) -> None:
    """`.venv/bin/python` where the environment is not on the PATH: Spark would start the system's Python."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK")}
    env |= {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, "-c", PLAIN, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert "record 1" in done.stdout, done.stderr[-3000:]


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


def test_a_missing_state_files_error_names_the_last_intact_checkpoint_and_a_rerun_repairs_it(
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
