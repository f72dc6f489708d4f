"""What changelog mode writes through Spark. Modes, parallelism and dropped states: test_rescale_grid.py, test_pipeline_tester.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cairn.operations.intervals.run_interval import run_interval
from cairn.operations.savepoints.take_savepoint import take_savepoint
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.formats import paths
from state_backend.shard.manifest import manifest_of
from state_backend.values.records import Record, ShardManifest
from tests.support.counting import DAYS, counting, day, fresh_days

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


days = fresh_days({})


def users(numbers: range, item: str) -> list[tuple[str | None, str, int]]:
    return [(f"user-{n}", item, n) for n in numbers]


def manifests(root: Path, record: Record) -> list[ShardManifest]:
    storage = open_storage(join_url(str(root), "counting"))
    return [manifest_of(ref, storage) for ref in record.content.shards]


def files(root: Path) -> set[str]:
    return {str(f.relative_to(root)) for f in root.rglob("*") if f.is_file()}


def state_objects(root: Path) -> set[str]:
    """``<attempt>/<shard>-<task>-<n>.<suffix>``"""
    return files(root / "counting" / "shared")


def test_few_changes_write_no_state_file_and_an_empty_interval_writes_only_records(
    spark: SparkSession, tmp_path: Path
) -> None:
    """F66. A hundred keys of all kinds of state, with timers and expiry, over many more that lie in files."""
    DAYS[day(0).start] = users(range(2_000), "fig" * 10)
    DAYS[day(1).start] = users(range(0, 2_000, 20), "kiwi")
    run_interval(spark, counting(), day(0), str(tmp_path))
    before = state_objects(tmp_path)
    assert before
    record = run_interval(spark, counting(), day(1), str(tmp_path), "changelog")
    assert record.content.totals.keys_touched == 100
    assert state_objects(tmp_path) <= before
    assert [(len(m.segments), len(m.segments[0].data or b"") > 0) for m in manifests(tmp_path, record)] == [
        (1, True)
    ] * 2
    # Timers fire two days after a row, and items expire after three; then nothing is left to do.
    for n in range(2, 5):
        run_interval(spark, counting(), day(n), str(tmp_path), "changelog")
    root = tmp_path / "counting"
    before = files(root)
    record = run_interval(spark, counting(), day(5), str(tmp_path), "changelog")
    assert record.content.totals.changed_bytes == record.content.totals.uploaded_bytes == 0
    settled = paths.settled(day(4), record.id - 1, "interval")
    assert files(root) - before == {
        f"checkpoints/{record.id:020d}.json",
        f"attempts/{record.content.attempt}/prepared.json",
        paths.published(day(5), record.id),
        settled,
        paths.names(settled.rpartition("/")[0]),
    }


def test_savepoint_of_changelog_segments_contains_only_files(spark: SparkSession, tmp_path: Path) -> None:
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
