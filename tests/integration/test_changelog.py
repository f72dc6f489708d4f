"""Changelog mode through Spark: whatever the modes and the parallelism, the state is that of a run that never changed them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import Row
from typer.testing import CliRunner

from cairn.command.cli import app
from cairn.data_sources.keyed_state import KeyedState
from cairn.operations.coordinator_of import coordinator_of
from cairn.operations.intervals.plan_interval import Attempt
from cairn.operations.intervals.process_interval import process_interval
from cairn.operations.intervals.run_interval import run_interval
from cairn.operations.savepoints.take_savepoint import take_savepoint
from cairn.pipeline import Pipeline
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.adapters.rocks import EngineOptions
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.formats import paths
from state_backend.shard.changelog_store import ChangelogOptions
from state_backend.shard.manifest import manifest_of
from state_backend.values import errors
from state_backend.values.records import Record, RunRef, ShardManifest
from state_backend.values.retention import KeepLast
from tests.support.counting import DAYS, Counting, counting, day
from tests.support.validating import validate_checkpoint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def days() -> Iterator[None]:
    DAYS.clear()
    yield
    DAYS.clear()


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


def shard_of(path: str) -> str:
    return path.rsplit("/", maxsplit=1)[-1].split("-", maxsplit=1)[0]


def state(spark: SparkSession, root: Path, name: str) -> list[str]:
    spark.dataSource.register(KeyedState)
    reader = spark.read.format("keyed_state").option("root", str(root)).option("pipeline", "counting")
    return sorted(map(str, reader.option("state", name).load().drop("shard").collect()))


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


def fill_days() -> None:
    DAYS[day(0).start] = [*users(range(60), "fig"), (None, "fig", 9)]
    DAYS[day(1).start] = users(range(0, 60, 3), "kiwi") + users(range(0, 60, 6), "pear")
    DAYS[day(2).start] = users(range(20), "fig")
    DAYS[day(3).start] = users(range(50, 70), "plum")
    DAYS[day(4).start] = users(range(0, 70, 5), "fig")
    DAYS[day(6).start] = users(range(3), "fig")
    DAYS[day(7).start] = [*users(range(1), "kiwi"), (None, "fig", 1)]


@pytest.mark.long("half a minute: rescaling of every mode")
def test_modes_follow_each_other_over_rescaling(spark: SparkSession, tmp_path: Path) -> None:
    """F71, F85, F86, S26. Digests and outputs day by day, then the contents of all states, as those of an incremental run; with thresholds
    that nothing reaches, and with low ones."""
    fill_days()
    thresholds = {
        "default": ChangelogOptions(),
        "low": ChangelogOptions(max_bytes=4_000, max_segments=2),
    }
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


@pytest.mark.long("ten seconds: 64 shards")
def test_many_shards_and_key_groups_write_no_manifest_anew(spark: SparkSession, tmp_path: Path) -> None:
    """Manifests that do not fit into the record lie in files; a hundred keys leave them alone, and so do segments in files,
    until the shard's files change."""
    pipeline = counting(parallelism=12, max_parallelism=256)
    DAYS[day(0).start] = users(range(2_000), "fig")
    DAYS[day(1).start] = users(range(0, 2_000, 20), "kiwi")
    DAYS[day(2).start] = users(range(0, 2_000, 20), "pear")
    first = run_interval(spark, pipeline, day(0), str(tmp_path))
    assert all(ref.manifest is not None for ref in first.content.shards), "else this shows nothing"
    before = state_objects(tmp_path)
    for n in (1, 2):
        record = run_interval(spark, pipeline, day(n), str(tmp_path), "changelog")
        new = state_objects(tmp_path) - before
        assert len(new) == len({shard_of(path) for path in new}), "at most one object per shard"
        if n == 1:
            assert new == set()
            assert [r.manifest for r in record.content.shards] == [r.manifest for r in first.content.shards]
        assert validate_checkpoint(spark, pipeline, str(tmp_path), record).success
        head = tmp_path / "counting" / f"checkpoints/{record.id:020d}.json"
        assert head.stat().st_size < 64 * 1024
    last = run_interval(spark, pipeline, day(3), str(tmp_path))
    steady = [run_interval(spark, counting(max_parallelism=256), day(n), str(tmp_path / "steady")) for n in range(4)]
    assert last.content.digest == steady[-1].content.digest
    assert record.content.digest == steady[-2].content.digest


@pytest.mark.long("ten seconds of Spark")
def test_where_the_record_has_no_room_segment_and_manifest_are_one_object(spark: SparkSession, tmp_path: Path) -> None:
    """So many key groups change that not even what changed fits the record: each touched shard writes one object all the same; a shard that is
    not touched writes none, and the record stays small. Clean-up leaves what is needed."""
    patient = ChangelogOptions(max_share_of_state=100.0)
    pipeline = counting(parallelism=4, max_parallelism=1024, engine=EngineOptions(cache_dir=None), changelog=patient)
    steady = counting(max_parallelism=1024)
    DAYS[day(0).start] = users(range(2_000), "fig")
    DAYS[day(1).start] = users(range(2_000), "kiwi" * 3)
    DAYS[day(2).start] = users(range(0, 2_000, 2), "pear" * 3)
    DAYS[day(3).start] = users(range(1), "fig")
    in_segments = []
    for n, mode in enumerate(["incremental", "changelog", "changelog", "changelog", "incremental"]):
        before = state_objects(tmp_path / "a")
        record = run_interval(spark, pipeline, day(n), str(tmp_path / "a"), mode)
        expected = run_interval(spark, steady, day(n), str(tmp_path / "steady"))
        assert record.content.digest == expected.content.digest
        new = state_objects(tmp_path / "a") - before
        refs = record.content.shards
        in_segments.append(sum(ref.in_segment is not None and ref.changes is None for ref in refs))
        if mode == "changelog":
            assert len(new) == len({shard_of(path) for path in new}) <= 4, new
            assert (tmp_path / f"a/counting/checkpoints/{record.id:020d}.json").stat().st_size < 64 * 1024
    assert in_segments[:3] == [0, 4, 4], "else this shows nothing"
    found = CliRunner().invoke(app, ["check", "--root", str(tmp_path / "a"), "--pipeline", "counting", "--json"])
    assert json.loads(found.stdout)["success"]
    # Dropped with all that only it needs; a twin with files of its own can do without the rest.
    coordinator = Coordinator(open_storage(f"{tmp_path}/a/counting"), "counting", policy=KeepLast(1))
    fork = ["fork", "--root", str(tmp_path / "a"), "--pipeline", "counting", "3", "--as", "twin"]
    assert CliRunner().invoke(app, fork).exit_code == 0
    attempt = "last"
    prepare(spark, pipeline, 5, tmp_path / "a", attempt, coordinator)
    last = coordinator.commit(attempt).record
    coordinator.publish(None)
    coordinator.clean_up()
    assert last is not None and validate_checkpoint(spark, pipeline, str(tmp_path / "a"), last).success
    needed = {h.path for m in manifests(tmp_path / "a", last) for h in m.handles}
    needed |= {ref.manifest.path for ref in last.content.shards if ref.manifest}
    assert {f"shared/{path}" for path in state_objects(tmp_path / "a")} == needed
    twin = CliRunner().invoke(app, ["check", "--root", str(tmp_path / "a"), "--pipeline", "twin", "--json"])
    assert json.loads(twin.stdout)["success"]


@pytest.mark.long("seconds of Spark")
def test_a_touched_shard_writes_one_object_and_the_others_none(spark: SparkSession, tmp_path: Path) -> None:
    """More than goes inline: one ``.log`` for each touched shard, the manifest of the other as it was, the files shared."""
    DAYS[day(0).start] = users(range(20_000), "fig" * 10)
    first = run_interval(spark, counting(), day(0), str(tmp_path))
    DAYS[day(1).start] = users(range(0, 20_000, 10), "kiwi")
    before = state_objects(tmp_path)
    second = run_interval(spark, counting(), day(1), str(tmp_path), "changelog")
    new = state_objects(tmp_path) - before
    assert sorted(shard_of(path) for path in new) == ["0", "1"]
    assert all(path.endswith(".log") for path in new)
    assert [m.files for m in manifests(tmp_path, second)] == [m.files for m in manifests(tmp_path, first)]
    assert second.content.totals.uploaded_bytes < first.content.totals.uploaded_bytes / 3
    # One key touches one shard; timers of day 0 are not due before day 2's end.
    DAYS[day(2).start] = []
    DAYS[day(1).start] = users(range(1), "kiwi")
    again = run_interval(spark, counting(), day(1), str(tmp_path), "changelog")
    kept = [a == b for a, b in zip(manifests(tmp_path, again), manifests(tmp_path, first), strict=True)]
    assert sorted(kept) == [False, True]


def test_segments_become_files_and_are_cleaned_up(spark: SparkSession, tmp_path: Path) -> None:
    """F32. The third segment would be one too many, and what changes on days 2 and 3, when nearly all timers fire and most
    entries expire, is too much of the state; a few hundred keys a day are not, and no segment is inline. When the checkpoints that
    need them are dropped, so are their files."""
    pipeline = counting(parallelism=1, changelog=ChangelogOptions(max_segments=2))
    coordinator = Coordinator(open_storage(join_url(str(tmp_path), pipeline.name)), pipeline.name, policy=KeepLast(1))
    segments, logs = [], []
    for n in range(7):
        rows = users(range(20_000), "fig" * 10) if n == 0 else users(range(n, 20_000, 60), "kiwi")
        DAYS[day(n).start] = rows
        attempt = f"attempt-{n}"
        prepare(spark, pipeline, n, tmp_path, attempt, coordinator)
        record = coordinator.commit(attempt).record
        coordinator.publish(None)
        coordinator.clean_up()
        assert record is not None
        (manifest,) = manifests(tmp_path, record)
        segments.append(len(manifest.segments))
        assert {f"shared/{path}" for path in state_objects(tmp_path)} == {h.path for h in manifest.handles}
        logs.append(sum(h.path.endswith(".log") for h in manifest.handles))
    assert segments == logs == [0, 1, 0, 0, 1, 2, 0]


def prepare(
    spark: SparkSession, pipeline: Pipeline, n: int, root: Path, attempt: str, coordinator: Coordinator
) -> None:
    process_interval(
        spark,
        pipeline,
        str(root),
        Attempt(
            id=attempt,
            interval=day(n),
            mode="changelog",
            run=RunRef(run_id=attempt, clear_number=0, try_number=1),
        ),
        coordinator=coordinator,
    )


@pytest.mark.long("seconds of Spark: the crash matrix shows the rule without Spark")
def test_a_crash_before_the_commit_leaves_the_base_usable(spark: SparkSession, tmp_path: Path) -> None:
    """F84. Segments of an attempt that dies in user code, and of one that was prepared but never committed, count for nothing."""
    DAYS[day(0).start] = users(range(2_000), "fig")
    run_interval(spark, counting(), day(0), str(tmp_path), "changelog")
    DAYS[day(1).start] = users(range(0, 2_000, 3), "kiwi")
    with pytest.raises(errors.ProcessorError):
        run_interval(spark, counting(processor=DiesLate), day(1), str(tmp_path), "changelog")
    coordinator = coordinator_of(counting(), str(tmp_path))
    prepare(spark, counting(), 1, tmp_path, "lost", coordinator)
    assert any((tmp_path / "counting" / "shared" / "lost").iterdir())
    run_interval(spark, counting(), day(0), str(tmp_path / "steady"))
    for n, mode in enumerate(["changelog", "changelog", "incremental"], 1):
        record = run_interval(spark, counting(), day(n), str(tmp_path), mode)
        steady = run_interval(spark, counting(), day(n), str(tmp_path / "steady"))
        assert record.content.digest == steady.content.digest
        assert not any("/lost/" in h.path for m in manifests(tmp_path, record) for h in m.handles)


class DiesLate(Counting):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        if key[0] == "user-999":
            raise ZeroDivisionError("on purpose")
        return Counting.handleInputRows(self, key, rows, timerValues)


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


def test_a_mode_that_is_none_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="incremental, full, changelog"):
        run_interval(spark, counting(), day(0), str(tmp_path), "log")
