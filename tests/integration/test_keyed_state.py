"""``format("keyed_state")`` through Spark: every type, every kind of snapshot, and keys that are looked up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from cairn.data_sources import keyed_state
from cairn.data_sources.keyed_state import KeyedState
from cairn.data_sources.state_selection import plan_read
from cairn.operations.intervals.run_interval import run_interval
from cairn.operations.savepoints.take_savepoint import take_savepoint
from cairn.pipeline import Pipeline
from cairn.spark.ddl import parse_ddl_locally
from state_backend.adapters.open_storage import join_url
from state_backend.inspection import describe
from state_backend.values.records import SchemaVersion, StateDescriptor
from state_backend.values.retention import KeepLast
from tests.support.both_engines import NAME, comparable, read_states
from tests.support.coordinator import coordinator_of
from tests.support.counting import DAYS, START, counting, day
from tests.support.differential_processors import TYPED_KEY, TYPED_RESULT, TYPED_SCHEMA, EveryType, typed_rows
from tests.support.spark_streaming import ddl

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


def table(spark: SparkSession, path: Path, state: str, checkpoint: str = "latest", **options: str) -> DataFrame:
    spark.dataSource.register(KeyedState)
    reader = spark.read.format("keyed_state").option("state", state).option("checkpoint", checkpoint)
    return reader.options(**options).load(str(path))


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


def test_the_state_table_has_the_values_of_the_row_codec_for_every_type(
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


def test_keys_of_every_type_are_looked_up(spark: SparkSession, typed: tuple[Path, Pipeline, list[Any]]) -> None:
    """Each key of the state, as JSON: null, NaN, extremes and nested values among them."""
    root = typed[0]
    everything = table(spark, root / NAME, "value").collect()
    assert len(everything) == 4
    keys = [json.dumps(describe.plain(row.key.asDict(recursive=True))) for row in everything]
    for row, key in zip(everything, keys, strict=True):
        assert entries(table(spark, root / NAME, "value", key=key).collect()) == entries([row])
    assert entries(table(spark, root / NAME, "value", key=f"[{', '.join(keys[:3])}]").collect()) == entries(
        everything[:3]
    )


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
    """The files of all other shards are deleted: the look-up is answered, of any kind of state and of a savepoint, and whatever
    reads more fails."""
    root, record = counted
    (shard,) = plan_read(record.content, keys=[("ann",)]).shards
    for format in ("native", "canonical"):
        take_savepoint(spark, counting(parallelism=4), str(root), record, str(tmp_path / format), format)  # type: ignore[arg-type]
    for file in (tmp_path / "native").glob("shared/*/*.sst"):
        if not file.name.startswith(f"{shard}-"):
            file.unlink()
    for file in (tmp_path / "canonical").glob("*/*/*.parquet"):
        if not file.name.startswith(f"{shard:05d}-"):
            file.unlink()
    for format, states in (("native", ("items", "amounts", "$timers")), ("canonical", ("total",))):
        for state in states:
            found = table(spark, tmp_path / format, state, key='{"user": "ann"}')
            assert [(r.key.user, r.shard) for r in found.select("key", "shard").collect()] == [("ann", shard)]
        assert table(spark, tmp_path / format, states[0], shard=f"{shard}, 7").count() > 1
        with pytest.raises(Exception, match="missing"):
            table(spark, tmp_path / format, states[0]).filter("key.user = 'ann'").collect()


@pytest.mark.long("20 seconds")
def test_filters_of_one_query_do_not_leak_into_the_next_query(spark: SparkSession, counted: tuple[Path, Any]) -> None:
    """Spark keeps what a Python data source's ``pushFilters`` made of one query for the next one over the same DataFrame, and for
    other parts of the same query: the reader has none. If the last line fails, Spark may have mended that."""
    root, _ = counted
    setting = "spark.sql.python.filterPushdown.enabled"
    spark.conf.set(setting, "true")
    try:
        frame = table(spark, root, "total")
        assert frame.filter("key.user = 'ann'").count() == 1
        assert frame.filter("key.user = 'ann'").union(frame).count() == 63
        assert frame.count() == 62
        spark.dataSource.register(Pushing)
        pushing = spark.read.format("pushing").load()
        assert (pushing.count(), pushing.filter("k = 1").count()) == (4, 1)
        # Spark 4.0 pushes no filters.
        assert pushing.count() == (1 if hasattr(DataSourceReader, "pushFilters") else 4)
    finally:
        spark.conf.unset(setting)


class Pushing(DataSource):
    """Four partitions, of which a filter on ``k`` leaves one."""

    @classmethod
    def name(cls) -> str:
        return "pushing"

    def schema(self) -> str:
        return "k int"

    def reader(self, schema: Any) -> DataSourceReader:
        class Reader(DataSourceReader):
            keys: Any = range(4)

            def pushFilters(self, filters: Any) -> Any:
                self.keys = [f.value for f in filters if type(f).__name__ == "EqualTo"] or self.keys
                return filters

            def partitions(self) -> Any:
                return [InputPartition(key) for key in self.keys]

            def read(self, partition: Any) -> Any:
                yield (partition.value,)

        return Reader()


def test_the_table_has_the_newest_columns_of_a_state() -> None:
    schemas = [parse_ddl_locally(columns).jsonValue() for columns in ("n long", "n long, last timestamp")]
    versions = tuple(SchemaVersion(version=n, value=schema, user_key=None) for n, schema in enumerate(schemas, 1))
    grown = StateDescriptor(name="s", kind="value", state_id=1, ttl_ms=None, versions=versions)
    source: Any = SimpleNamespace(content=SimpleNamespace(key_schema=schemas[0]), descriptor=lambda name: grown)
    assert keyed_state._table_schema(source, "s")["value"].dataType.names == ["n", "last"]


def test_a_loaded_table_keeps_the_checkpoint_that_was_latest_at_its_load(
    spark: SparkSession, tmp_path: Path, counted: tuple[Path, Any]
) -> None:
    """Also if retention drops the checkpoint before the rows are read, for as long as the reader holds it. And a pipeline's folder
    that was copied elsewhere is read like the one that it is a copy of."""
    root, _ = counted
    before = table(spark, root, "amounts", hold="1h")
    run_interval(spark, counting(parallelism=4, retention=KeepLast(1)), day(1), str(tmp_path))
    assert coordinator_of(counting(), str(tmp_path)).log().retained.keys() == {2} and [*root.glob("leases/*")]
    assert [r.value.amount for r in before.filter("key.user = 'ann'").collect()] == [2]
    assert before.schema["shard"].metadata == {"source": f"checkpoint 1 of 'counting', {day(0)}"}
    shutil.copytree(root, tmp_path / "copied")
    shutil.rmtree(root)
    after = table(spark, tmp_path / "copied", "amounts").filter("key.user = 'ann'").orderBy("pos").collect()
    assert [r.value.amount for r in after] == [2, 3]
    assert table(spark, tmp_path / "copied", "amounts", "1").count() == 62
    with pytest.raises(Exception, match="no usable checkpoint"):
        table(spark, tmp_path / "copied", "amounts", day(0).end.isoformat())


def test_missing_or_invalid_options_are_refused(spark: SparkSession, tmp_path: Path, counted: tuple[Path, Any]) -> None:
    root, record = counted
    for options, says in (
        ({"path": str(root)}, 'option "state", one of: total, items, amounts, .timers'),
        ({"path": str(root), "state": "total", "key": "ann"}, "is not JSON"),
        ({"path": str(root), "state": "total", "key": '{"user": [7]}'}, "is no text; write it in quotes; expected"),
    ):
        spark.dataSource.register(KeyedState)
        with pytest.raises(Exception, match=says):
            spark.read.format("keyed_state").options(**options).load()
    assert coordinator_of(counting(), str(tmp_path)).record("latest").id == record.id
