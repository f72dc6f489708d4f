"""Changelog mode through Spark: whatever the modes and the parallelism, the state is that of a run that never changed them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import Row

from cairn.operations.intervals.run_interval import run_interval
from cairn.operations.savepoints.take_savepoint import take_savepoint
from cairn.pipeline import Pipeline
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.formats import paths
from state_backend.shard.changelog_store import ChangelogOptions
from state_backend.shard.manifest import manifest_of
from state_backend.values.records import Record, ShardManifest
from tests.support.coordinator import coordinator_of
from tests.support.counting import DAYS, Counting, counting, day, fresh_days, put_days
from tests.support.spark_tables import state_table
from tests.support.validating import validate_checkpoint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


days = fresh_days({})


def users(numbers: range, item: str) -> list[tuple[str | None, str, int]]:
    return [(f"user-{n}", item, n) for n in numbers]


def manifests(root: Path, record: Record) -> list[ShardManifest]:
    storage = open_storage(join_url(str(root), "counting"))
    return [manifest_of(ref, storage) for ref in record.content.shards]


def bytes_of_groups(root: Path, record: Record) -> dict[int, int | None]:
    """By key group, as they were counted."""
    return {s.key_group: s.size_bytes for m in manifests(root, record) for s in m.key_group_states}


def files(root: Path) -> set[str]:
    return {str(f.relative_to(root)) for f in root.rglob("*") if f.is_file()}


def state_objects(root: Path) -> set[str]:
    """``<attempt>/<shard>-<task>-<n>.<suffix>``"""
    return files(root / "counting" / "shared")


def state(spark: SparkSession, root: Path, name: str) -> list[str]:
    return sorted(map(str, state_table(spark, root, name).drop("shard").collect()))


# Mode and parallelism by day. Timers fire and entries expire on most of them.
PROGRAM = (
    ("changelog", 2),
    ("changelog", 2),
    ("incremental", 2),
    ("changelog", 2),
    ("changelog", 3),
    ("full", 3),
    ("changelog", 3),
    ("changelog", 1),
    ("changelog", 1),
    ("incremental", 1),
)


@pytest.mark.long("half a minute: rescaling of every mode")
def test_modes_follow_each_other_over_rescaling(spark: SparkSession, tmp_path: Path) -> None:
    """F71, F85, F86, S26. Digests and outputs day by day, then the contents of all states, as those of an incremental run; with thresholds
    that nothing reaches, and with low ones."""
    put_days(
        {
            0: [*users(range(60), "fig"), (None, "fig", 9)],
            1: users(range(0, 60, 3), "kiwi") + users(range(0, 60, 6), "pear"),
            2: users(range(20), "fig"),
            3: users(range(50, 70), "plum"),
            4: users(range(0, 70, 5), "fig"),
            6: users(range(3), "fig"),
            7: [*users(range(1), "kiwi"), (None, "fig", 1)],
        }
    )
    thresholds = {"default": ChangelogOptions(), "low": ChangelogOptions(max_bytes=4_000, max_segments=2)}
    for n, (mode, parallelism) in enumerate(PROGRAM):
        steady = run_interval(spark, counting(), day(n), str(tmp_path / "steady"))
        for name, options in thresholds.items():
            pipeline = counting(parallelism=parallelism, changelog=options)
            mixed = run_interval(spark, pipeline, day(n), str(tmp_path / name), mode)
            assert mixed.content.digest == steady.content.digest, (n, mode, name)
            assert bytes_of_groups(tmp_path / name, mixed) == bytes_of_groups(tmp_path / "steady", steady), (
                n,
                mode,
                name,
            )
            assert mixed.content.totals.output_rows == steady.content.totals.output_rows, (n, mode, name)
            segments = sum(len(m.segments) for m in manifests(tmp_path / name, mixed))
            if mode != "changelog":
                assert segments == 0
            elif name == "default" and (n == 0 or PROGRAM[n - 1][1] == parallelism):
                assert segments > 0
    for name in thresholds:
        last = coordinator_of(counting(), str(tmp_path / name)).record("latest")
        assert validate_checkpoint(spark, counting(parallelism=1), str(tmp_path / name), last).success
        for kind in ("total", "items", "amounts", "$timers"):
            assert state(spark, tmp_path / name, kind) == state(spark, tmp_path / "steady", kind)


def test_a_hundred_keys_write_no_state_object_and_no_change_writes_records_only(
    spark: SparkSession, tmp_path: Path
) -> None:
    """F66. A hundred keys of all kinds of state, with timers and expiry, over many more that lie in files."""
    DAYS[day(0).start] = users(range(5_000), "fig" * 10)
    DAYS[day(1).start] = users(range(0, 5_000, 50), "kiwi")
    run_interval(spark, counting(), day(0), str(tmp_path))
    before = state_objects(tmp_path)
    assert before
    record = run_interval(spark, counting(), day(1), str(tmp_path), "changelog")
    assert record.content.totals.keys_touched == 100
    assert state_objects(tmp_path) <= before
    assert [(len(m.segments), len(m.segments[0].data or b"") > 0) for m in manifests(tmp_path, record)] == [
        (1, True)
    ] * 2
    # Two days after the last row of most, their timers fire and leave again; then nothing is left to do.
    for n in range(2, 8):
        run_interval(spark, counting(), day(n), str(tmp_path), "changelog")
    root = tmp_path / "counting"
    before = files(root)
    record = run_interval(spark, counting(), day(8), str(tmp_path), "changelog")
    assert record.content.totals.changed_bytes == record.content.totals.uploaded_bytes == 0
    settled = paths.settled(day(7), record.id - 1, "interval")
    assert files(root) - before == {
        f"checkpoints/{record.id:020d}.json",
        f"attempts/{record.content.attempt}/prepared.json",
        paths.published(day(8), record.id),
        settled,
        paths.names(settled.rpartition("/")[0]),
    }


def test_a_savepoint_of_segments_has_none(spark: SparkSession, tmp_path: Path) -> None:
    root = tmp_path / "root"
    DAYS[day(0).start] = users(range(100), "fig")
    record = run_interval(spark, counting(), day(0), str(root), "changelog")
    assert all(m.segments and not m.files for m in manifests(root, record))
    to = str(tmp_path / "savepoint")
    savepoint = take_savepoint(spark, counting(), join_url(str(root), "counting"), record, to)
    assert savepoint.content.digest == record.content.digest
    for ref in savepoint.content.shards:
        assert ref.inline is not None
        assert ref.inline.segments == ()
        assert len(ref.inline.files) == 1


@pytest.mark.long("a quarter of a minute of Spark")
def test_dropping_a_state_is_a_change_like_any_other(spark: SparkSession, tmp_path: Path) -> None:
    """Deleted ranges are recorded, with and without files below; a state of the same name may begin anew."""
    DAYS[day(0).start] = users(range(100), "fig")
    pipelines: list[Pipeline] = [counting(), counting(processor=Forgets), counting(), counting()]
    DAYS[day(2).start] = users(range(0, 100, 7), "pear")
    for n, pipeline in enumerate(pipelines):
        changed = run_interval(spark, pipeline, day(n), str(tmp_path / "changelog"), "changelog")
        steady = run_interval(spark, pipeline, day(n), str(tmp_path / "steady"))
        assert changed.content.digest == steady.content.digest
        assert validate_checkpoint(spark, pipeline, str(tmp_path / "changelog"), changed).success
    for name in ("total", "items", "amounts"):
        assert state(spark, tmp_path / "changelog", name) == state(spark, tmp_path / "steady", name)


class Forgets(Counting):
    def init(self, handle: Any) -> None:
        handle.deleteIfExists("items")
        handle.deleteIfExists("amounts")
        self._handle = handle
        self._total = handle.getValueState("total", "sum long, rows long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        return iter([])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        return iter([])
