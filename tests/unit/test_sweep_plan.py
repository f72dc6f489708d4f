"""What a sweep may take, as a pure decision: files with ages, the log, and the paths that are needed."""

from __future__ import annotations

import pytest

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint.clean_up_dropped import tombstone_of
from state_backend.checkpoint.log import Log, read_log
from state_backend.checkpoint.sweep_files import SweepPlan, plan_sweep
from state_backend.formats import paths, record_codec
from state_backend.inspection.verify import verify_pipeline
from state_backend.values.errors import CorruptRecord
from state_backend.values.handles import FileInfo, Handle, handles_in
from state_backend.values.marks import Quarantine
from state_backend.values.records import FiledShard, InlineShard, OutputFile, Retained, SweepRecord
from tests.support.checkpoints import day, manifest, record
from tests.support.log_in_memory import log_in_memory

NOW_MS = 1_000_000
OLD_MS, YOUNG_MS = NOW_MS - 5_000, NOW_MS - 500
MIN_AGE_MS = 1_000


def info(path: str, modified_ms: int = OLD_MS) -> FileInfo:
    return FileInfo(path=path, size_bytes=7, generation=1, modified_ms=modified_ms, crc32c=None)


def plan(files: list[FileInfo], log: Log | None = None, needed: tuple[str, ...] = ()) -> SweepPlan:
    return plan_sweep(files, log or log_in_memory(), frozenset(needed), now_ms=NOW_MS, min_age_ms=MIN_AGE_MS)


def deleted(made: SweepPlan) -> list[str]:
    return [f.path for f in made.delete]


SST, LOG, MANIFEST = (paths.shared("x", 0, 0, 0, suffix) for suffix in ("sst", "log", "manifest"))
PREPARED = paths.prepared("x")
FAILING = f"{paths.failing('x', 'check')}rows.parquet"
PART, LATE = (paths.output(day(1), "x", 0, 0, late=late) for late in (False, True))


@pytest.mark.parametrize("path", [SST, LOG, MANIFEST, PREPARED, FAILING, PART, LATE])
def test_old_files_of_an_uncommitted_attempt_are_deleted_and_it_is_abandoned(path: str) -> None:
    made = plan([info(path)])
    assert (made.abandon, deleted(made), made.unknown) == (("x",), [path], ())


@pytest.mark.parametrize("young", [SST, MANIFEST, PREPARED, PART])
def test_one_young_file_keeps_its_whole_attempt(young: str) -> None:
    """A shard that takes long must not lose what another uploaded at the beginning."""
    files = [info(p, YOUNG_MS if p == young else OLD_MS) for p in (SST, MANIFEST, PREPARED, PART)]
    assert plan(files) == SweepPlan(abandon=(), delete=(), unknown=())


def test_a_file_of_exactly_the_minimum_age_is_deleted_and_one_from_the_future_stays() -> None:
    assert deleted(plan([info(SST, NOW_MS - MIN_AGE_MS)])) == [SST]
    assert deleted(plan([info(SST, NOW_MS - MIN_AGE_MS + 1)])) == []
    assert deleted(plan([info(SST, NOW_MS + 10_000)])) == []


def test_a_needed_file_of_an_uncommitted_attempt_stays() -> None:
    other = paths.shared("x", 0, 0, 1, "sst")
    made = plan([info(SST), info(other)], needed=(SST,))
    assert deleted(made) == [other]


def test_leftovers_of_a_task_that_ran_twice_are_deleted_and_its_committed_attempt_stays() -> None:
    log = log_in_memory({1: record(1, day(1), attempt="x")})
    left, young = paths.shared("x", 0, 9, 0, "sst"), paths.shared("x", 0, 9, 1, "sst")
    made = plan([info(SST), info(left), info(young, YOUNG_MS)], log, needed=(SST,))
    assert (made.abandon, deleted(made)) == ((), [left])


def test_failing_rows_stay_with_their_checkpoint() -> None:
    assert plan([info(FAILING)], log_in_memory({1: record(1, day(1), attempt="x")})).delete == ()


def test_leftover_files_of_a_dropped_checkpoint_are_deleted() -> None:
    log = log_in_memory({1: tombstone_of(record(1, day(1), attempt="x")), 2: record(2, day(2), 1, retained={2: None})})
    made = plan([info(SST), info(PREPARED), info(FAILING)], log)
    assert (made.abandon, deleted(made)) == ((), [SST, PREPARED, FAILING])


def test_an_already_abandoned_attempt_is_not_recorded_as_abandoned_again() -> None:
    log = log_in_memory({1: SweepRecord(id=1, retained=(), sweep="s", abandoned=("x",))})
    made = plan([info(SST), info(PART, YOUNG_MS)], log)
    assert (made.abandon, deleted(made)) == ((), [SST])


def test_log_records_and_quarantine_marks_are_known_and_never_deleted() -> None:
    log = log_in_memory({1: record(1, day(1))}, {1: Quarantine(id=1, reason="wrong")})
    assert plan([info(paths.record(1)), info(paths.quarantine(1))], log) == SweepPlan(abandon=(), delete=(), unknown=())


@pytest.mark.parametrize(
    "path",
    [
        "savepoint.json",
        "claimed.json",
        "savepoints/weekly/savepoint.json",
        "savepoints/weekly/shared/x/0-0-0.sst",
        "shared/mine/savepoint.json",
        "shared/mine/shared/x/0-0-0.sst",
        "shared/0-0-0.sst",
        "attempts/x/notes.txt",
        "output/x/a1/sub/part-00000-0.parquet",
        "output/x/a1/_SUCCESS",
        "published/day/1.json.bak",
        "README",
    ],
)
def test_files_with_unknown_names_are_reported_and_not_deleted(path: str) -> None:
    assert plan([info(path)]) == SweepPlan(abandon=(), delete=(), unknown=(path,))


def test_marks_go_when_a_later_commit_of_the_interval_replaced_them() -> None:
    log = log_in_memory({1: record(1, day(1)), 2: record(2, day(1), attempt="again"), 3: record(3, day(2), 2)})
    marks = [paths.published(day(1), 1), paths.published(day(1), 2), paths.published(day(2), 3)]
    assert deleted(plan([info(m) for m in marks], log)) == marks[:1]
    assert deleted(plan([info(marks[0], YOUNG_MS)], log)) == []


def test_a_sweep_keeps_a_published_mark_whose_interval_differs_from_its_record() -> None:
    log = log_in_memory({1: record(1, day(1)), 2: record(2, day(1), attempt="again")})
    assert deleted(plan([info(paths.published(day(9), 1))], log)) == []


@pytest.mark.parametrize("mark", [paths.published(day(2), 2), paths.quarantine(2), paths.validated(2, "full")])
def test_a_log_that_lost_its_newest_record_is_noticed_by_any_mark(mark: str) -> None:
    """By all who look at the whole log: a sweep, verify, and a read without ``HEAD.json``."""
    with pytest.raises(CorruptRecord, match=f"{paths.record(2)} is missing: {mark} refers to"):
        plan([info(SST), info(mark)], log_in_memory({1: record(1, day(1))}))
    storage = MemoryStorage()
    storage.create(paths.record(1), record_codec.encode(record(1, day(1))))
    storage.create(mark, b"")
    with pytest.raises(CorruptRecord, match=f"{paths.record(2)} is missing: {mark} refers to"):
        read_log(storage)
    assert any(f"{paths.record(2)} is missing: {mark}" in finding for finding in verify_pipeline(storage).findings)
    storage.delete(mark)
    assert read_log(storage).head_id == 1


def test_a_quarantine_mark_that_came_after_the_listing_is_no_reason_to_stop() -> None:
    assert deleted(plan([info(SST)], log_in_memory({}, {5: Quarantine(id=5, reason="wrong")}))) == [SST]


def test_handles_are_found_wherever_a_record_holds_them() -> None:
    a, b, c, d = (Handle(path=p, size_bytes=1, crc32c=1) for p in "abcd")
    inline = InlineShard(shard=0, inline=manifest([a, b]))
    filed = FiledShard(shard=1, manifest=c)
    made = record(1, day(1), shards=(inline, filed), outputs=(OutputFile(handle=d, rows=1, late=True),))
    assert sorted(h.path for h in handles_in(made)) == ["a", "b", "c", "d"]
    assert [h.path for h in handles_in(tombstone_of(made))] == ["d"]
    assert list(handles_in(Retained(id=1, stale_by=None))) == []
