"""Savepoints of a running pipeline: taken in both formats, moved, restored elsewhere, and gone on with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pandas as pd
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from cairn.command.cli import app
from cairn.operations.intervals.run_interval import run_interval
from cairn.operations.savepoints.restore_savepoint import restore_savepoint
from cairn.operations.savepoints.take_savepoint import take_savepoint
from cairn.pipeline import Interval, Pipeline
from state_backend.adapters.open_storage import join_url
from state_backend.values import errors
from state_backend.values.operation_parameters import Restore, TakeSavepoint
from state_backend.values.records import Record
from tests.support.coordinator import coordinator_of
from tests.support.counting import FEW_ROWS, Counting, counting, day, fresh_days, put_days, read_days
from tests.support.drivers import driven
from tests.support.spark_tables import state_table
from tests.support.tiers import long_after
from tests.support.validating import validate_checkpoint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

FORMATS = ("native", "canonical")
LAST = 7


# Values, lists, maps that expire after three days, timers that fire after two, a null key; two days without input.
ROWS = {
    0: FEW_ROWS[0] + [(f"user-{n}", f"item-{n % 3}", n) for n in range(40)],
    1: FEW_ROWS[1] + [(f"user-{n}", "kiwi", n) for n in range(0, 40, 3)],
    4: FEW_ROWS[4] + [("user-7", "fig", 1)],
    5: [("new", "fig", 1), (None, "pear", 2)],
}
days = fresh_days(ROWS)


def rows_of(root: Path, pipeline: Pipeline, record: Record) -> list[str]:
    files = [root / pipeline.name / f.handle.path for f in record.content.outputs]
    return sorted(repr(row) for f in files for row in pq.read_table(f).to_pylist())


def go_on(spark: SparkSession, pipeline: Pipeline, root: Path, first: int) -> dict[int, tuple[int, list[str]]]:
    """By day the digest and the output rows of the days from ``first`` on."""
    found = {}
    for n in range(first, LAST + 1):
        record = run_interval(spark, pipeline, day(n), str(root))
        found[n] = record.content.digest, rows_of(root, pipeline, record)
    return found


def saved(spark: SparkSession, root: Path, to: Path, format: Any, days: int = 2) -> Record:
    """A savepoint of the pipeline after so many days."""
    for n in range(days):
        record = run_interval(spark, counting(), day(n), str(root))
    take_savepoint(spark, counting(), join_url(str(root), "counting"), record, str(to), format)
    return record


@pytest.fixture(scope="module")
def uninterrupted(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[int, list[str]]]:
    put_days(ROWS)
    return go_on(spark, counting(), tmp_path_factory.mktemp("uninterrupted"), 0)


@pytest.mark.parametrize(
    ("format", "changes"),
    long_after(
        2,
        [
            ("native", {"parallelism": 3, "name": "renamed"}),
            ("canonical", {"parallelism": 3, "max_parallelism": 50, "name": "renamed"}),
            ("native", {"parallelism": 1}),
            ("canonical", {"parallelism": 1}),
        ],
        "seconds of Spark",
    ),
)
def test_a_pipeline_goes_on_from_its_savepoint_elsewhere(
    spark: SparkSession, tmp_path: Path, uninterrupted: Any, format: Any, changes: dict[str, Any]
) -> None:
    """F74-F76: taken, moved, its root deleted, restored at another parallelism (canonical: and max parallelism and name), the
    savepoint deleted as well: every later day has the output and the digest of a run that was never interrupted."""
    record = saved(spark, tmp_path / "root", tmp_path / "savepoint", format)
    (tmp_path / "savepoint").rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "root")
    pipeline = counting(**changes)
    restored = restore_savepoint(spark, pipeline, str(tmp_path / "new"), str(tmp_path / "moved"))
    shutil.rmtree(tmp_path / "moved")
    assert (restored.id, restored.content.kind, restored.content.pipeline) == (1, "restore", pipeline.name)
    assert restored.content.digest == record.content.digest
    assert validate_checkpoint(spark, pipeline, str(tmp_path / "new"), restored).success
    with pytest.raises(errors.StateGapError):
        run_interval(spark, pipeline, day(3), str(tmp_path / "new"))
    found = go_on(spark, pipeline, tmp_path / "new", 2)
    assert found == {n: uninterrupted[n] for n in found}
    head = coordinator_of(pipeline, str(tmp_path / "new")).record("latest").content
    assert (head.parallelism, head.max_parallelism) == (pipeline.parallelism, pipeline.max_parallelism)


def test_canonical_savepoints_are_readable_by_spark_duckdb_and_pandas(spark: SparkSession, tmp_path: Path) -> None:
    """Spark, DuckDB, pandas and pyarrow read them without this project; sorted by key group, then key."""
    record = saved(spark, tmp_path / "root", tmp_path / "savepoint", "canonical")
    (folder,) = (f for f in (tmp_path / "savepoint").iterdir() if f.is_dir() and f.name != ".tmp")
    assert {f.name for f in folder.iterdir()} == {"state-total", "state-items", "state-amounts", "timers"}

    ours = {r.key.user: (r.value.sum, r.value.rows) for r in state_table(spark, tmp_path / "root", "total").collect()}
    theirs = spark.read.parquet(str(folder / "state-total"))
    assert {r.key.user: (r.value.sum, r.value.rows) for r in theirs.collect()} == ours
    ordered = theirs.selectExpr("key.user", "key_group", "pmod(xxhash64(key.user), 16) as expected").collect()
    assert all(r.key_group == r.expected for r in ordered)

    query = "SELECT key.user, value.sum, value.rows FROM read_parquet($files)"
    with duckdb.connect() as database:
        rows = database.execute(query, {"files": str(folder / "state-total" / "*.parquet")}).fetchall()
    assert {user: (total, count) for user, total, count in rows} == ours

    frame = pd.read_parquet(folder / "state-amounts")
    lists = frame.groupby(frame["key"].map(lambda key: str(key["user"])))
    amounts = {user: [v["amount"] for v in rows.sort_values("position")["value"]] for user, rows in lists}
    assert amounts["ann"] == [1, 2, 3] and amounts["None"] == [9]

    for file in folder.glob("*/*.parquet"):
        rows = pq.ParquetFile(file).read().to_pylist()
        places = [
            (r["key_group"], r["key"]["user"] is not None, (r["key"]["user"] or "").encode(), _behind(r)) for r in rows
        ]
        assert places == sorted(places) and rows
    items = pq.read_table(folder / "state-items").to_pylist()
    found = {(r["key"]["user"], r["user_key"]["item"]): r["expires_at_ms"] for r in items}
    assert found["ann", "fig"] == day(0).end_ms + 3 * 86_400_000
    assert found["ann", "pear"] == day(1).end_ms + 3 * 86_400_000
    timers = spark.read.parquet(str(folder / "timers")).collect()
    assert len(timers) == len(state_table(spark, tmp_path / "root", "$timers").collect())
    assert record.content.totals.entries == len(timers) + sum(
        spark.read.parquet(str(folder / f"state-{n}")).count() for n in ("total", "items", "amounts")
    )


@pytest.mark.parametrize("format", long_after(1, ["canonical", "native"], "seconds of Spark"))
def test_the_state_table_reads_a_savepoint_like_a_checkpoint(spark: SparkSession, tmp_path: Path, format: Any) -> None:
    """F96, S38: values, map entries, list elements and timers, while the pipeline's own root is away."""
    saved(spark, tmp_path / "root", tmp_path / "savepoint", format)
    for state in ("total", "items", "amounts", "$timers"):
        expected = state_table(spark, tmp_path / "root", state).collect()
        shutil.move(tmp_path / "root", tmp_path / "away")
        reader = spark.read.format("keyed_state").option("checkpoint", str(tmp_path / "savepoint"))
        found = reader.option("state", state).load()
        assert sorted(map(repr, found.collect())) == sorted(map(repr, expected)) and expected
        shutil.move(tmp_path / "away", tmp_path / "root")


def _behind(row: dict[str, Any]) -> Any:
    if "user_key" in row:
        return row["user_key"]["item"]
    return row.get("position", row["expires_at_ms"] or 0)


def test_another_type_of_the_key_is_refused_before_the_first_row(spark: SparkSession, tmp_path: Path) -> None:
    """F92: the savepoint restores into a pipeline whose key has the same name; the first interval finds that its type is not the
    recorded one, and nothing is committed. With the type of before it goes on."""
    saved(spark, tmp_path / "root", tmp_path / "savepoint", "canonical")
    restore_savepoint(spark, counting(), str(tmp_path / "new"), str(tmp_path / "savepoint"))

    def read(session: SparkSession, interval: Interval) -> DataFrame:
        return read_days(session, interval).selectExpr("length(user) AS user", "item", "amount")

    with pytest.raises(errors.UsageError, match=r"the key is struct<user: int>.* made with struct<user: string>"):
        run_interval(spark, counting(source=read), day(2), str(tmp_path / "new"))
    assert run_interval(spark, counting(), day(2), str(tmp_path / "new")).id == 2


class ByUsers(Counting):
    """Its initial state is the items' names."""

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self._items.updateValue((initialState.item,), (1,))


@pytest.mark.long("seconds of Spark")
def test_a_key_column_may_become_not_null_and_get_a_comment(spark: SparkSession, tmp_path: Path) -> None:
    """The key is an array. Days come from sources that say otherwise of its nulls, and so does the initial state. Every day goes on, the
    first day run again is the same result, and what is recorded allows the nulls that the state has."""
    plain = "array(user) AS user"
    strict = "array(coalesce(user, 'nobody')) AS user"  # neither it nor what is in it is null

    def reading(user: str, comment: str | None = None) -> Any:
        def read(session: SparkSession, interval: Interval) -> DataFrame:
            rows = read_days(session, interval).selectExpr(user, "item", "amount")
            return rows if comment is None else rows.withMetadata("user", {"comment": comment})

        return read

    def initial(session: SparkSession) -> DataFrame:
        return session.createDataFrame([(["ann"], "pear"), ([None], "fig")], "user array<string>, item string")

    def process(n: int, source: Any) -> Record:
        schema = "user array<string>, kind string, total long, items array<string>, last array<long>"
        pipeline = counting(
            source=source, processor=ByUsers, output_schema=schema, start=day(0).start, initial_state=initial
        )
        return run_interval(spark, pipeline, day(n), str(tmp_path))

    def nulls(record: Record) -> list[bool]:
        (key,) = record.content.key_schema["fields"]
        return [key["nullable"], key["type"]["containsNull"]]

    first = process(0, reading(strict))  # the initial state has a null in a key
    assert nulls(first) == [True, True]
    assert nulls(process(1, reading(plain))) == [True, True]
    assert nulls(process(2, reading(strict, "who"))) == [True, True]
    again = process(0, reading(strict, "who it was"))
    assert again.reproduces == first.id and all(r.stale_by is None for r in again.retained)
    assert process(3, reading(plain)).content.base_id == 3
    validated = validate_checkpoint(
        spark, counting(output_schema="x long"), str(tmp_path), again, without_expectations=True
    )
    assert validated.success, validated.findings


def test_the_driver_takes_and_restores_a_savepoint(spark: SparkSession, tmp_path: Path) -> None:
    run_interval(spark, counting(), day(0), str(tmp_path / "root"))

    def drive(kind: type[Any], root: str, **given: str) -> dict[str, Any]:
        request = kind(root=str(tmp_path / root), code="tests.support.counting:COUNTING", **given)
        return driven(request, tmp_path / "result.json", spark="local[2]")

    folder = str(tmp_path / "savepoint")
    taken = drive(TakeSavepoint, "root", folder=folder, format="canonical")["ok"]
    assert (taken["format"], taken["checkpoint"]) == ("canonical", 1) and taken["files"] >= 4 and taken["bytes"] > 0
    restored = drive(Restore, "new", savepoint=folder, claim="CLAIM")["ok"]
    assert restored["checkpoint"] == 1 and restored["interval"] == str(day(0))
    refused = drive(Restore, "new", savepoint=folder, claim="STEAL")["error"]
    assert refused["type"] == "UsageError" and "STEAL" in refused["message"]


def test_the_command_line_takes_and_restores_a_savepoint(spark: SparkSession, tmp_path: Path) -> None:
    """`cairn savepoint` with its dry run and --consolidate after two intervals of changelog: the pipeline's own checkpoint has no
    segments any more and the same digest; `cairn restore` into another root says what it would do, does it, and deletes."""
    root, folder = tmp_path / "root", str(tmp_path / "savepoint")
    for n in range(3):
        before = run_interval(spark, counting(), day(n), str(root), "changelog" if n else "incremental")
    assert any(ref.inline.segments for ref in before.content.shards if ref.inline)
    code = ["--code", "tests.support.counting:COUNTING", "--json"]

    def cairn(*arguments: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, [*arguments, *code])
        assert result.exit_code == 0, result.output
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer

    take = ["savepoint", "--root", str(root), "--folder", folder, "--consolidate", "--spark", "local[2]"]
    planned = cairn(*take, "--dry-run")
    assert (planned["checkpoint"], planned["entries"]) == (3, before.content.totals.entries)
    assert not Path(folder).exists() and coordinator_of(counting(), str(root)).log().head_id == 3
    taken = cairn(*take)
    assert (taken["checkpoint"], taken["paused"], taken["committed"]) == (4, None, [])
    made = coordinator_of(counting(), str(root)).record(4)
    assert (made.content.kind, made.content.digest) == ("consolidate", before.content.digest)
    assert not any(ref.inline.segments for ref in made.content.shards if ref.inline)
    assert validate_checkpoint(spark, counting(), str(root), made).success
    tables = tmp_path / "tables"
    said = cairn(
        "savepoint", "--root", str(root), "--folder", str(tables), "--format", "canonical", "--spark", "local[2]"
    )
    assert (said["format"], said["checkpoint"]) == ("canonical", 4) and list(tables.rglob("*.parquet"))
    again = CliRunner().invoke(app, [*take, *code])
    assert again.exit_code == 2 and "holds a savepoint already" in again.output

    back = [
        "restore",
        "--root",
        str(tmp_path / "new"),
        "--savepoint",
        folder,
        "--claim",
        "CLAIM",
        "--spark",
        "local[2]",
    ]
    planned = cairn(*back, "--dry-run")
    assert (planned["discards"], planned["deletes_savepoint"]) == ([], True)
    assert planned["of"] == {"pipeline": "counting", "checkpoint": 4}
    restored = cairn(*back)
    assert (restored["checkpoint"], restored["entries"]) == (1, before.content.totals.entries)
    assert not (Path(folder) / "savepoint.json").exists()
    assert run_interval(spark, counting(), day(3), str(tmp_path / "new")).content.base_id == 1
    assert run_interval(spark, counting(), day(3), str(root)).content.base_id == 4
