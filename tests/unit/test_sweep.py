"""The sweep over a storage that may die or lose an answer at any call, and beside attempts that wake up late."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest

from state_backend.adapters import local_storage
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint.log import read_log
from state_backend.checkpoint.rewind import fork
from state_backend.checkpoint.sweep_files import SweepPlan, SweepResult, sweep
from state_backend.formats import paths, record_codec
from state_backend.ports.storage import Storage
from state_backend.values.errors import (
    CorruptFile,
    CorruptRecord,
    StorageUnavailable,
    Swept,
    UnknownOutcome,
    UsageError,
)
from state_backend.values.handles import Handle, handles_in
from state_backend.values.marks import Savepoint
from state_backend.values.records import Record, SweepRecord
from state_backend.values.retention import KeepLast
from tests.support.checkpoints import PIPELINE, Folder, content, day, files_in, run, sst
from tests.support.coordinator import Coordinator
from tests.support.faulty_storage import Fault, FaultyStorage, StaleStorage, lost_answer_at

When = Literal["before", "after"]
HOUR_MS = 3_600_000
MIN_AGE = timedelta(hours=2)


class Clock:
    def __init__(self) -> None:
        self.now_ms = 0

    def __call__(self) -> int:
        return self.now_ms

    def pass_hours(self, hours: int) -> None:
        self.now_ms += hours * HOUR_MS


def make(storage: Storage, clock: Clock, **options: Any) -> SweepResult:
    return sweep(storage, PIPELINE, now_ms=clock.now_ms, min_age=MIN_AGE, **options)


def folder_with_clock(clock: Clock, **options: Any) -> Folder:
    return Folder(MemoryStorage(now_ms=clock), **options)


def copy_of(storage: MemoryStorage, clock: Clock) -> MemoryStorage:
    """Another storage with the same files and ages."""
    then = Clock()
    twin = MemoryStorage(now_ms=then)
    for info in storage.list(""):
        then.now_ms = info.modified_ms
        twin.create(info.path, storage.read(info.path))
    then.now_ms = clock.now_ms
    return twin


def scenario(clock: Clock, inline: bool) -> tuple[Folder, set[str]]:
    """Everything that a pipeline's folder can hold; the paths that no sweep may take."""
    folder = folder_with_clock(clock, policy=KeepLast(2), inline=inline)
    folder.run(day(1), "a1")
    folder.run(day(2), "a2", keep=(sst("a1"),))
    folder.run(day(3), "a3", keep=(sst("a1"), sst("a2")))
    folder.publish_and_clean_up()
    folder.run(day(4), "a4", keep=(sst("a3"),))
    folder.run(day(1), "again")
    folder.run(day(2), "again2", keep=(sst("again"),))
    folder.coordinator.publish(None)  # and crashes before its clean-up
    folder.prepare(day(3), "silent", keep=(sst("again2"),), run=run("old"))
    folder.storage.create(sst("crashed"), b"x")
    folder.storage.create(paths.output(day(3), "crashed", 0, 0), b"x")
    folder.storage.create(paths.shared("again2", 0, 7, 0, "sst"), b"a task that ran twice")
    folder.storage.create("notes/README", b"somebody's")
    clock.pass_hours(3)
    folder.prepare(day(3), "live", keep=(sst("again2"),), run=run("new"))
    log = folder.coordinator.log()
    needed = {"notes/README", *(p for p in folder.paths() if "/live/" in p or p.startswith(paths.CHECKPOINTS))}
    for record in log.completed():
        attempt = record.content.attempt
        needed |= {h.path for ref in record.content.shards for h in [ref.manifest] if h is not None}
        needed |= {sst(attempt), paths.output(record.content.interval, attempt, 0, 0), paths.prepared(attempt)}
    needed |= {sst("again"), sst("a3")}  # shared with again2 and a4
    needed |= {o.handle.path for _, outputs in log.current_outputs().values() for o in outputs}
    needed |= {paths.published(interval, i) for interval, (i, _) in log.current_outputs().items()}
    assert needed <= folder.paths()
    return folder, needed


def check_all_there(storage: MemoryStorage, needed: set[str]) -> None:
    assert needed <= {info.path for info in storage.list("")}
    read_log(storage).completed()


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "manifest files"])
def test_a_sweep_takes_all_orphans_and_nothing_else(inline: bool) -> None:
    """F38, F41, F58: what no record names goes when it is old, file by file."""
    clock = Clock()
    folder, needed = scenario(clock, inline)
    before = folder.paths()
    result = make(folder.storage, clock)
    assert result.record is not None
    assert result.record.abandoned == ("crashed", "silent")
    assert result.plan.unknown == ("notes/README",)
    assert folder.paths() == needed | {paths.record(result.record.id)}
    assert result.deleted_files == len(before - folder.paths())
    assert result.shrunk == (2, 3)
    again = make(folder.storage, clock)
    assert (again.record, again.deleted_files, again.plan.delete) == (None, 0, ())


def test_a_dry_run_plans_and_touches_nothing() -> None:
    clock = Clock()
    folder, _ = scenario(clock, inline=False)
    watched = FaultyStorage(folder.memory, {})
    result = make(watched, clock, dry_run=True)
    assert result.plan.abandon == ("crashed", "silent")
    assert (result.record, result.deleted_files) == (None, 0)
    assert {name for name, _ in watched.calls} <= {"list", "read", "stat"}
    real = make(folder.storage, clock)
    assert {f.path for f in result.plan.delete} == {f.path for f in real.plan.delete}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.long("half a second", runs_in="ci")
def test_a_lost_answer_at_any_write_deletes_no_needed_file(when: When) -> None:
    clock = Clock()
    folder, needed = scenario(clock, inline=False)
    whole = FaultyStorage(copy_of(folder.memory, clock), {})
    make(whole, clock)
    for at, (method, path) in enumerate(whole.calls):
        if method not in ("create", "replace"):
            continue
        storage = copy_of(folder.memory, clock)
        faulty = FaultyStorage(storage, lost_answer_at(at, when))
        if path == paths.HEAD or (method == "create" and when == "after"):
            assert make(faulty, clock).record is not None  # the log shows that it arrived
        else:
            with pytest.raises(UnknownOutcome):
                make(faulty, clock)
            assert storage.stat(sst("silent")) is not None
        check_all_there(storage, needed)
        make(storage, clock)
        assert files_in(storage) == needed | {paths.record(7)}


@pytest.mark.long("seconds", runs_in="ci")
def test_an_outage_at_any_call_is_raised_and_the_next_sweep_completes() -> None:
    clock = Clock()
    folder, needed = scenario(clock, inline=False)
    whole = FaultyStorage(copy_of(folder.memory, clock), {})
    make(whole, clock)
    for at in range(len(whole.calls)):
        storage = copy_of(folder.memory, clock)
        with pytest.raises(StorageUnavailable, match="outage"):
            make(FaultyStorage(storage, {at: Fault(error=StorageUnavailable("outage"), when="before")}), clock)
        check_all_there(storage, needed)
        make(storage, clock)
        assert files_in(storage) == needed | {paths.record(7)}


# --- beside others ----------------------------------------------------------------------------------------------------------------


class Before(FaultyStorage):
    """Lets something happen just before the first call of a method on a path that begins so."""

    def __init__(self, inner: Storage, method: str, start: str, action: Callable[[], object]) -> None:
        super().__init__(inner, {})
        self._trigger: tuple[str, str] | None = (method, start)
        self._action = action

    def _call(self, name: str, path: str, action: Callable[[], Any]) -> Any:
        if self._trigger is not None and name == self._trigger[0] and path.startswith(self._trigger[1]):
            self._trigger = None
            self._action()
        return super()._call(name, path, action)


def silent_attempt(clock: Clock, inline: bool = True) -> Folder:
    folder = folder_with_clock(clock, inline=inline)
    folder.run(day(1), "a1")
    folder.coordinator.publish(None)
    folder.prepare(day(2), "slow", keep=(sst("a1"),))
    clock.pass_hours(3)
    return folder


def test_a_zombie_that_prepares_after_the_sweep_cannot_commit_and_is_swept_next_time() -> None:
    clock = Clock()
    folder = folder_with_clock(clock)
    folder.run(day(1), "a1")
    folder.storage.create(paths.shared("zombie", 1, 0, 0, "sst"), b"an early shard")
    h0 = folder.coordinator.log().head_id
    clock.pass_hours(3)
    record = make(folder.storage, clock).record
    assert record is not None
    assert record.abandoned == ("zombie",)
    folder.prepare(day(2), "zombie", h0=h0, base_id=1)
    with pytest.raises(Swept, match=f"sweep {record.id}"):
        folder.coordinator.commit("zombie")
    assert make(folder.storage, clock).deleted_files == 0  # young
    clock.pass_hours(3)
    result = make(folder.storage, clock)
    assert (result.record, result.deleted_files) == (None, 3)


def test_a_checkpoint_dropped_while_its_manifest_is_read_does_not_stop_the_sweep() -> None:
    clock = Clock()
    folder = folder_with_clock(clock, policy=KeepLast(1), inline=False)
    folder.run(day(1), "a1")
    folder.coordinator.publish(None)
    folder.storage.create(sst("crashed"), b"x")

    def drop() -> None:
        folder.run(day(2), "a2")
        folder.publish_and_clean_up()

    clock.pass_hours(3)
    result = make(Before(folder.storage, "read", paths.SHARED, drop), clock)
    assert result.record is not None
    assert result.record.abandoned == ("crashed",)
    assert {sst("a2"), paths.output(day(2), "a2", 0, 0)} <= folder.paths()


@pytest.mark.parametrize("frozen", [(paths.SETTLED,), (paths.SETTLED, paths.CHECKPOINTS, paths.PUBLISHED)])
def test_a_sweep_whose_listings_are_old_deletes_no_output(frozen: tuple[str, ...]) -> None:
    """What is settled was settled a moment ago, though the outputs are hours old: their checkpoints are dropped and shrunk."""
    clock = Clock()
    memory = MemoryStorage(now_ms=clock)
    folder, elsewhere = Folder(FaultyStorage(memory, {}, late=True), policy=KeepLast(1)), StaleStorage(memory)
    folder.run(day(1), "a1")
    elsewhere.freeze(*frozen)
    for n in range(2, 6):
        folder.run(day(n), f"a{n}")
        folder.publish_and_clean_up()
        clock.pass_hours(3)
    log = read_log(elsewhere)
    assert [n for n, _ in sorted(log.current_outputs().values())] == [1, 2, 3, 4, 5]
    assert [n for _, n in log.outputs_near(day(4))] == [4] and 4 not in log.retained
    result = make(elsewhere, clock)
    assert (result.plan.abandon, result.deleted_files, result.record) == ((), 0, None)
    assert folder.paths(paths.OUTPUT) == {paths.output(day(n), f"a{n}", 0, 0) for n in range(1, 6)}


def test_a_fork_that_links_old_files_is_not_abandoned(tmp_path: Path) -> None:
    """On a disk: its files are those of the source, four days old; the sweep runs while it links them. A loop of symbolic links
    in the root does not stop the sweep."""
    source, into = LocalStorage(tmp_path / "source"), LocalStorage(tmp_path / "other")
    Folder(source, days=1)
    old_s = time.time() - 4 * 86_400
    for info in source.list(""):
        os.utime(tmp_path / "source" / info.path, (old_s, old_s))
    result: list[SweepResult] = []

    class Meanwhile(FaultyStorage):
        def create(self, path: str, data: bytes) -> Any:
            if path == paths.prepared("forked"):
                (tmp_path / "other" / "loop").symlink_to("loop")
                result.append(sweep(into, "other", now_ms=time.time_ns() // 1_000_000))
            return super().create(path, data)

    other = Coordinator(Meanwhile(into, {}), "other")
    assert fork(source, 1, other.at, run=run(), attempt="forked").outcome == "committed"
    assert [r.plan for r in result] == [SweepPlan(abandon=(), delete=(), unknown=())]


def test_two_concurrent_sweeps_write_one_record_and_keep_all_needed_files() -> None:
    clock = Clock()
    folder, needed = scenario(clock, inline=False)
    storage = Before(folder.storage, "create", paths.CHECKPOINTS, lambda: make(folder.storage, clock))
    result = make(storage, clock)
    assert result.record is None
    assert folder.paths() == needed | {paths.record(7)}


def test_a_file_that_was_written_anew_since_it_was_listed_stays() -> None:
    clock = Clock()
    folder = silent_attempt(clock)

    def rewrite() -> None:
        folder.storage.delete(sst("slow"))
        folder.storage.create(sst("slow"), b"another file")

    result = make(Before(folder.storage, "delete", sst("slow"), rewrite), clock)
    assert folder.storage.read(sst("slow")) == b"another file"
    assert result.deleted_files == len(result.plan.delete) - 1


# --- in doubt -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["record", "newest record", "manifest", "lost manifest", "quarantine"])
def test_a_damaged_or_missing_record_stops_the_sweep_before_any_delete(damage: str) -> None:
    clock = Clock()
    folder = silent_attempt(clock, inline=False)
    folder.run(day(2), "a2", keep=(sst("a1"),))
    folder.coordinator.publish(None)
    folder.coordinator.quarantine(1, "wrong")
    path = {
        "record": paths.record(1),
        "newest record": paths.record(2),
        "manifest": paths.shared("a2", 0, 0, 0, "manifest"),
        "lost manifest": paths.shared("a2", 0, 0, 0, "manifest"),
        "quarantine": paths.quarantine(1),
    }[damage]
    info = folder.storage.stat(path)
    assert info is not None
    if damage in ("newest record", "lost manifest"):
        folder.storage.delete(path)
    else:
        folder.storage.replace(path, b"garbage", generation=info.generation)
    clock.pass_hours(3)
    before = folder.paths()
    with pytest.raises(CorruptFile, match=path):
        make(folder.storage, clock)
    assert folder.paths() == before


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "manifest files"])
def test_a_savepoint_in_the_pipelines_own_folder_stays(inline: bool) -> None:
    clock = Clock()
    folder = folder_with_clock(clock, inline=inline)
    result = folder.run(day(1), "a1")
    assert isinstance(result.record, Record)
    kept = folder.storage.create(sst("savepoint"), b"the user's")
    shards = tuple(folder.prepare(day(2), "tmp").content.shards)
    saved = Savepoint(
        savepoint="savepoint", format="native", checkpoint_id=1, content=content(day(1), "a1", shards=shards)
    )
    folder.storage.create(paths.SAVEPOINT_RECORD, record_codec.encode(saved))
    clock.pass_hours(3)
    make(folder.storage, clock)
    assert {paths.SAVEPOINT_RECORD, sst("tmp"), *(h.path for h in handles_in(saved))} <= folder.paths()
    assert kept.path not in folder.paths()  # no savepoint.json names it
    info = folder.storage.stat(paths.SAVEPOINT_RECORD)
    assert info is not None
    folder.storage.replace(paths.SAVEPOINT_RECORD, b"{}", generation=info.generation)
    with pytest.raises(CorruptRecord, match=paths.SAVEPOINT_RECORD):
        make(folder.storage, clock)


def test_an_empty_folder_has_nothing_to_sweep_and_a_negative_age_is_refused() -> None:
    clock = Clock()
    assert make(MemoryStorage(), clock).plan.delete == ()
    with pytest.raises(UsageError, match="negative"):
        sweep(MemoryStorage(), PIPELINE, now_ms=0, min_age=-MIN_AGE)


def test_checkpoints_can_be_committed_to_a_log_that_begins_with_a_sweep() -> None:
    """The first interval ever crashed, and was swept before any was committed."""
    clock = Clock()
    folder = folder_with_clock(clock)
    folder.prepare(day(1), "first")
    clock.pass_hours(3)
    make(folder.storage, clock)
    assert isinstance(folder.coordinator.log().entries[1], SweepRecord)
    assert [folder.run(day(n), f"a{n}").id for n in (1, 2)] == [2, 3]
    folder.coordinator.publish(None)
    assert [r.id for r in folder.coordinator.log().completed()] == [2, 3]


def test_stale_marks_and_retained_are_carried_on_by_a_sweep() -> None:
    clock = Clock()
    folder, _ = scenario(clock, inline=True)
    before = folder.coordinator.log().retained
    assert any(r.stale_by is not None for r in before.values())
    assert make(folder.storage, clock).record is not None
    assert folder.coordinator.log().retained == before


def bytes_below(folder: Path) -> int:
    """Sizes of all files, without those that other threads move or delete meanwhile."""
    used = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):
            used += file.stat().st_size if file.is_file() else 0
    return used


class SmallDisk(LocalStorage):
    """A disk of so many bytes: whoever writes beyond that is told that it is full, as the system tells it."""

    def __init__(self, root: Path, size_bytes: int) -> None:
        super().__init__(root)
        self.size_bytes = size_bytes

    @contextmanager
    def _written(self, path: str, chunks: Iterable[bytes], doing: str) -> Iterator[tuple[Path, Handle]]:
        data = b"".join(chunks)
        if bytes_below(self._root.path) + len(data) > self.size_bytes:
            with local_storage.os_errors(doing, may_be_absent=False):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with super()._written(path, (data,), doing) as written:
            yield written


def test_a_full_disk_is_swept(tmp_path: Path) -> None:
    """What a sweep has to write before it deletes fits into the room that commits keep."""
    disk = SmallDisk(tmp_path, 12 << 20)
    folder = Folder(disk, days=1, inline=False, policy=KeepLast(1))
    folder.coordinator.publish(None)
    disk.create(sst("crashed"), bytes(5 << 20))
    with pytest.raises(
        StorageUnavailable, match=r"No space left .*free some space \(`cairn sweep` works on a full disk\)"
    ):
        disk.create(sst("too-much"), bytes(6 << 20))
    disk.size_bytes = bytes_below(tmp_path)  # not a byte more
    with pytest.raises(StorageUnavailable):
        disk.create("attempts/x/prepared.json", b"x")
    result = sweep(disk, PIPELINE, now_ms=2**52, min_age=timedelta(0))
    assert result.record is not None and result.deleted_bytes == 5 << 20
    assert folder.run(day(2), "a2", keep=(sst("a1"),)).outcome == "committed"
    folder.coordinator.publish(None)
    assert folder.coordinator.clean_up().shrunk == (1,)
    # The room is kept anew, and once: full again, it is swept again, unless somebody took the room meanwhile.
    disk.size_bytes = 12 << 20
    disk.create(sst("again"), bytes(5 << 20))
    disk.size_bytes = bytes_below(tmp_path)
    assert disk.free_room() and not disk.free_room()
    disk.size_bytes -= 2 << 20
    with pytest.raises(StorageUnavailable):
        sweep(disk, PIPELINE, now_ms=2**52, min_age=timedelta(0))
