"""``format("keyed_state")`` through Spark: every type, every kind of snapshot, and filters that reach the reader."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F
from pyspark.sql.datasource import EqualTo

from jobs.pipeline import Pipeline
from jobs.run_interval import coordinator_of, run_interval
from jobs.runtime.keyed_state import KeyedState
from jobs.runtime.pushed_filters import plan_read
from jobs.savepoint import take_savepoint
from jobs.spark import connect
from state_backend.adapters.open_storage import join_url
from tests.support.both_engines import NAME, comparable, read_states
from tests.support.counting import DAYS, START, counting, day
from tests.support.differential_processors import (
    TYPED_KEY,
    TYPED_RESULT,
    TYPED_SCHEMA,
    EveryType,
    typed_rows,
)
from tests.support.spark_streaming import ddl

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def table(spark: SparkSession, path: Path, state: str, checkpoint: str = "latest") -> DataFrame:
    spark.dataSource.register(KeyedState)
    return spark.read.format("keyed_state").option("state", state).option("checkpoint", checkpoint).load(str(path))


@contextmanager
def setting(spark: SparkSession, on: bool) -> Iterator[None]:
    spark.conf.set(PUSHDOWN, str(on).lower())
    try:
        yield
    finally:
        spark.conf.set(PUSHDOWN, "true")


def plain(value: Any) -> Any:
    """As ``comparable`` takes it: instants in UTC without a zone, whatever Arrow or Spark made of them."""
    if isinstance(value, datetime):
        return value.replace(tzinfo=None)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map(plain, value)) if type(value) in (tuple, list) else tuple(map(plain, value))
    return value


def entries(rows: list[Any]) -> list[str]:
    """(key, user key or (), value, expiry in ms or None) of each row."""
    found = []
    for row in rows:
        user_key = tuple(row["user_key"]) if "user_key" in row else ()
        expiry = None if row["expires_at"] is None else round(row["expires_at"].timestamp() * 1000)
        if "value" in row:
            found.append((tuple(row["key"]), user_key, tuple(row["value"]), expiry))
        else:
            found.append((tuple(row["key"]), (), (expiry,), None))
    return sorted(repr(comparable(plain(entry))) for entry in found)


@pytest.fixture(scope="module")
def typed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Pipeline, list[Any]]:
    """Values, lists, maps and timers of every type, by a key of seven columns: one batch per interval, the second a changelog."""
    root = tmp_path_factory.mktemp("typed")
    schema = ddl(spark, TYPED_SCHEMA)
    batches = typed_rows()
    pipeline = Pipeline(
        name=NAME,
        start=START,
        source=lambda spark, interval: spark.createDataFrame(batches[(interval.start - START).days], schema),
        key=list(TYPED_KEY),
        processor=EveryType,
        output_schema=TYPED_RESULT,
        order_by=["seq"],
        parallelism=3,
        max_parallelism=16,
    )
    modes = ("incremental", "changelog")
    return root, pipeline, [run_interval(spark, pipeline, day(n), str(root), mode) for n, mode in enumerate(modes)]


def test_every_type_is_in_the_table_what_the_row_codec_reads(
    spark: SparkSession, tmp_path: Path, typed: tuple[Path, Pipeline, list[Any]]
) -> None:
    """S30, F96: the table is read by columns; what it is compared with, row by row. Timers too, and both kinds of savepoint."""
    root, pipeline, records = typed
    expected = read_states(root, records[-1], timed=True)
    places = [(root / NAME, state) for state in expected]
    for format, states in (("native", ["list"]), ("canonical", ["list", "map"])):
        take_savepoint(spark, pipeline, join_url(str(root), NAME), records[-1], str(tmp_path / format), format)  # type: ignore[arg-type]
        places += [(tmp_path / format, state) for state in states]
    for place, state in places:
        found, wanted = table(spark, place, state).collect(), expected[state]
        assert entries(found) == sorted(repr(comparable(plain(entry))) for entry in wanted)
        assert len(found) > 3 or state == "$timers"


def test_a_filter_on_keys_of_every_type_finds_what_spark_finds(
    spark: SparkSession, typed: tuple[Path, Pipeline, list[Any]]
) -> None:
    """With each key of the state, by its columns and as a whole struct; null, NaN, extremes and nested values among them."""
    root = typed[0]
    with setting(spark, False):
        everything = table(spark, root / NAME, "value").collect()
    frame = table(spark, root / NAME, "value")
    for row in everything:
        condition = " and ".join(f"key.{name} <=> {literal(name, row.key[name])}" for name in TYPED_KEY)
        assert entries(frame.filter(condition).collect()) == entries([row])


def literal(name: str, value: Any) -> str:
    """SQL for a value of one of the key's columns."""
    types = {
        "s": "string",
        "da": "date",
        "t": "timestamp",
        "short_dec": "decimal(18,4)",
        "d": "double",
        "bo": "boolean",
    }
    if value is None:
        return f"cast(null as {types.get(name, 'struct<x:int,y:string>')})"
    if name == "pair":
        y = "null" if value.y is None else f"'{value.y}'"
        return f"named_struct('x', cast({'null' if value.x is None else value.x} as int), 'y', cast({y} as string))"
    if name == "s":
        return f"cast(x'{value.encode().hex()}' as string)"
    return f"cast('{value}' as {types[name]})"


@pytest.fixture
def counted(spark: SparkSession, tmp_path: Path) -> Iterator[tuple[Path, Any]]:
    DAYS.clear()
    DAYS[day(0).start] = [(f"user-{n}", f"item-{n % 3}", n) for n in range(60)]
    DAYS[day(0).start] += [(None, "fig", 1), ("ann", "fig", 2)]
    DAYS[day(1).start] = [("ann", "kiwi", 3)]
    pipeline = counting(parallelism=4)
    yield tmp_path / "counting", run_interval(spark, pipeline, day(0), str(tmp_path), "full")
    DAYS.clear()


def test_a_key_look_up_touches_one_shard(spark: SparkSession, tmp_path: Path, counted: tuple[Path, Any]) -> None:
    """Nothing but the files of the key's shard is left: the look-up is answered, by any kind of state, whatever else fails."""
    root, record = counted
    (shard,) = plan_read([EqualTo(("key", "user"), "ann")], record.content).shards
    take_savepoint(spark, counting(parallelism=4), str(root), record, str(tmp_path / "saved"), "canonical")
    for file in root.glob("shared/*/*.sst"):
        if not file.name.startswith(f"{shard}-"):
            file.unlink()
    for file in (tmp_path / "saved").glob("*/*/*.parquet"):
        if not file.name.startswith(f"{shard:05d}-"):
            file.unlink()
    inline = [f for ref in record.content.shards for f in ref.inline.inline_files if f.name.endswith(".sst")]
    assert not inline or len(list(root.glob("shared/*/*.sst"))) == 0
    for place in (tmp_path / "saved", root) if not inline else (tmp_path / "saved",):
        for state, column in (("total", "value"), ("items", "user_key"), ("amounts", "pos"), ("$timers", "expires_at")):
            frame = table(spark, place, state)
            found = frame.filter(F.col("key.user") == "ann").select(column, "shard").collect()
            assert [row.shard for row in found] == [shard]
            assert [r.shard for r in frame.filter(f"key.user in ('ann', 'ann') and shard = {shard}").collect()] == [
                shard
            ]
            assert frame.filter((F.col("key.user") == "ann") & (F.col("shard") == (shard + 1) % 4)).collect() == []
            with setting(spark, False), pytest.raises(Exception, match="missing"):
                frame = table(spark, place, state)
                frame.filter(F.col("key.user") == "ann").collect()


def test_without_the_setting_the_answers_are_the_same(spark: SparkSession, counted: tuple[Path, Any]) -> None:
    root, _ = counted
    questions = [
        "key.user = 'ann'",
        "key.user is null",
        "key_group in (1, 2, 3)",
        "shard = 2 and key.user > 'u'",
        "true",
    ]
    answers = []
    for on in (True, False):
        with setting(spark, on):
            answers.append([entries(table(spark, root, "amounts").filter(q).collect()) for q in questions])
    assert answers[0] == answers[1] and all(answers[0])
    assert connect("local[2]", "cairn tests").conf.get(PUSHDOWN) == "true"


def test_latest_is_what_it_was_when_the_table_was_loaded(
    spark: SparkSession, tmp_path: Path, counted: tuple[Path, Any]
) -> None:
    """And a pipeline's folder that was copied elsewhere is read like the one that it is a copy of."""
    root, _ = counted
    before = table(spark, root, "amounts")
    run_interval(spark, counting(parallelism=4), day(1), str(tmp_path))
    assert [r.value.amount for r in before.filter("key.user = 'ann'").collect()] == [2]
    shutil.copytree(root, tmp_path / "copied")
    shutil.rmtree(root)
    after = table(spark, tmp_path / "copied", "amounts").filter("key.user = 'ann'").orderBy("pos").collect()
    assert [r.value.amount for r in after] == [2, 3]
    end = table(spark, tmp_path / "copied", "amounts", day(0).end.isoformat())
    assert end.count() == 62


def test_what_is_missing_is_said(spark: SparkSession, tmp_path: Path, counted: tuple[Path, Any]) -> None:
    root, record = counted
    for options, says in (
        ({}, "root and pipeline"),
        ({"path": str(root)}, 'option "state": total, items, amounts, .timers'),
        ({"path": str(root), "state": "none"}, "no state 'none'; it has total, items"),
        ({"path": str(root), "state": "total", "checkpoint": "7"}, "no usable checkpoint 7"),
        ({"path": str(tmp_path), "state": "total"}, "is no savepoint"),
    ):
        spark.dataSource.register(KeyedState)
        with pytest.raises(Exception, match=says):
            spark.read.format("keyed_state").options(**options).load()
    assert coordinator_of(counting(), str(tmp_path)).record("latest").id == record.id
