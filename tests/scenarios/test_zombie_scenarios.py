"""Tries that were taken for dead and go on writing, branches, and what is never subsumed: on real shards."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.checkpoint.sweep_files import sweep
from state_backend.formats import paths
from state_backend.ports.storage import Storage
from state_backend.values.errors import (
    AttemptLost,
    BaseMoved,
    CorruptRecord,
    Fenced,
    StaleStateError,
    StateUnusable,
    UsageError,
)
from state_backend.values.handles import Handle
from state_backend.values.records import Permissions, Record, Tombstone
from state_backend.values.retention import KeepLast
from tests.support.checkpoints import PIPELINE, Folder, day, start_ms
from tests.support.crash_matrix import FAR_MS, HOME, SAVED, Surveyor, Try, Values, live_files, take
from tests.support.faulty_storage import FaultyStorage
from tests.support.real_shards import RealPipeline
from tests.support.savepoints import Format, SmallPipeline, findings, restore


class Paused(BaseException):
    """The try hangs here, and is taken for dead."""


class Late(FaultyStorage):
    """Writes to paths with a certain ending hang; ``land`` lets them take effect, long after."""

    def __init__(self, inner: Storage, ending: str) -> None:
        super().__init__(inner, {})
        self._ending = ending
        self._hanging: list[Callable[[], object]] = []

    def create(self, path: str, data: bytes) -> Handle:
        if path.endswith(self._ending):
            self._hanging.append(lambda: self.inner.create(path, data))
            raise Paused(path)
        return super().create(path, data)

    def upload(self, path: str, local: Path) -> Handle:
        if path.endswith(self._ending):
            data = local.read_bytes()
            self._hanging.append(lambda: self.inner.create(path, data))
            raise Paused(path)
        return super().upload(path, local)

    def land(self) -> None:
        for write in self._hanging:
            write()


def begins_from(folder: Folder, n: int) -> int | None:
    """The id of the checkpoint that the n-th day starts from."""
    begun = folder.coordinator.begin(day(n), permissions=Permissions(), pipeline_start_ms=start_ms(), attempt="looks")
    return begun.base.id if begun.base else None


def values(storage: Storage, work: Path) -> list[Values]:
    """Of every completed checkpoint, by id; each restored, walked and compared with what is recorded of it."""
    seen = Surveyor(work).see(storage)
    return [state for state, _ in seen.states.values()]


@pytest.mark.parametrize(
    ("ending", "mode"),
    [(".manifest", "incremental"), (".log", "changelog"), (".sst", "incremental"), ("prepared.json", "changelog")],
)
@pytest.mark.long("half a second", runs_in="ci")
def test_what_a_zombie_writes_after_the_retry_was_committed_is_nobodys(tmp_path: Path, ending: str, mode: str) -> None:
    """S8, S9, S11: the late file has a name of its own, whatever it is; the state, the next intervals and the readers are the
    retry's, and the sweeper takes it. When the zombie gets as far as committing, it is refused."""
    storage = MemoryStorage()
    made = RealPipeline(tmp_path, storage=storage)
    made.run(1, "a1", {"a": 1, "b": 1})
    late = Late(storage, ending)
    with pytest.raises(Paused):
        RealPipeline(tmp_path, storage=late).prepare(2, "zombie", {"a": 666}, mode=mode)  # type: ignore[arg-type]
    made.prepare(2, "retry", {"a": 2}, mode=mode)  # type: ignore[arg-type]
    made.coordinator.commit("retry")
    late.land()
    assert values(storage, tmp_path)[-1] == {"a": 2, "b": 1}
    made.run(3, "a3", {"b": 3})
    assert values(storage, tmp_path)[-1] == {"a": 2, "b": 3}
    # If it is whole, only the log can say that it is too late.
    with pytest.raises((Fenced, BaseMoved) if ending == "prepared.json" else StateUnusable):
        made.coordinator.commit("zombie")
    sweep(storage, PIPELINE, now_ms=FAR_MS)
    assert values(storage, tmp_path)[-1] == {"a": 2, "b": 3}
    assert {info.path for info in storage.list("")} == live_files(storage)


def test_what_was_not_committed_is_not_there(tmp_path: Path) -> None:
    """S1, S4: a prepared attempt changes nothing; whoever begins again begins from the checkpoint."""
    storage = MemoryStorage()
    made = RealPipeline(tmp_path, storage=storage)
    made.run(1, "a1", {"a": 1})
    made.prepare(2, "given up", {"a": 666, "x": 1})
    assert values(storage, tmp_path) == [{"a": 1}]
    made.run(2, "a2", {"b": 2})
    assert values(storage, tmp_path) == [{"a": 1}, {"a": 1, "b": 2}]


@pytest.mark.long("half a second", runs_in="ci")
def test_back_to_an_older_version_and_on_along_another_branch(tmp_path: Path) -> None:
    """S2, S15: day 2 is run again with other input. Days that were made on the old branch are not gone on with; all versions can be
    read as they were; the new branch holds nothing of the old one."""
    storage = MemoryStorage()
    made = RealPipeline(tmp_path, storage=storage)
    for n in (1, 2, 3):
        made.run(n, f"a{n}", {"common": n, f"old-{n}": n})
    old = made.coordinator.record(3)
    made.run(2, "again", {"common": 20, "new-2": 2})
    with pytest.raises(StaleStateError):
        made.prepare(4, "on the old branch", {})
    made.run(3, "again3", {"new-3": 3})
    made.run(4, "a4", {})
    surveyor = Surveyor(tmp_path)

    def read(record: Record | None) -> Values:
        assert record is not None
        return surveyor._values(storage, record.content)[0]

    assert read(old) == {"common": 3, "old-1": 1, "old-2": 2, "old-3": 3}
    assert read(made.coordinator.record(day(4).end)) == {"common": 20, "old-1": 1, "new-2": 2, "new-3": 3}


@pytest.mark.parametrize("format", ["native", "canonical"])
def test_of_two_tries_at_one_savepoint_one_is_it_and_both_return_it(tmp_path: Path, format: Any) -> None:
    """S13: the slower one finds the record when it writes its own; what it wrote goes, and a later call finds the savepoint too."""
    made = RealPipeline(tmp_path)
    made.run(1, "a1", {"a": 1})
    saved = MemoryStorage()

    class Overtaken(FaultyStorage):
        def create(self, path: str, data: bytes) -> Handle:
            if path == paths.SAVEPOINT_RECORD:
                take(Try({HOME: made.storage, SAVED: saved}, tmp_path, "faster"), format)
            return super().create(path, data)

    for folder in (Overtaken(saved, {}), saved):
        take(Try({HOME: made.storage, SAVED: folder}, tmp_path, "slower"), format)
        assert Surveyor(tmp_path).see(saved).saved == {"a": 1}
        assert {info.path for info in saved.list("")} == live_files(saved)
    other = "canonical" if format == "native" else "native"
    with pytest.raises(UsageError, match="holds a savepoint already"):
        take(Try({HOME: made.storage, SAVED: saved}, tmp_path, "other"), other)


def test_an_attempt_that_was_fenced_and_swept_is_lost_for_good(tmp_path: Path) -> None:
    """F58: whatever comes late of it, and however often it tries."""
    storage = MemoryStorage()
    made = RealPipeline(tmp_path, storage=storage)
    made.run(1, "a1", {"a": 1})
    made.prepare(2, "slow", {"a": 666})
    sweep(storage, PIPELINE, now_ms=FAR_MS)
    made.run(2, "a2", {"a": 2})
    for _ in range(2):
        with pytest.raises(AttemptLost):
            Coordinator(storage, PIPELINE).commit("slow")
    assert values(storage, tmp_path)[-1] == {"a": 2}


@pytest.mark.parametrize("format", ["native", "canonical"])
@pytest.mark.long("half a second", runs_in="ci")
def test_savepoints_are_not_subsumed(tmp_path: Path, format: Format) -> None:
    """F56: commits with tight retention and a sweep of the pipeline take its files, and none of the savepoint's."""
    origin = SmallPipeline(tmp_path)
    origin.take(tmp_path / "savepoint", format)
    folder = Folder(origin.storage, policy=KeepLast(1))
    for n in (2, 3, 4):
        folder.run(day(n), f"a{n}", pipeline="p", key_schema=origin.coordinator.record("latest").content.key_schema)
    folder.coordinator.publish(None)
    folder.coordinator.clean_up()
    sweep(folder.storage, PIPELINE, now_ms=FAR_MS, min_age=timedelta(0))
    assert {paths.attempt_of(path) for path in folder.paths(paths.SHARED)} == {"a4"}
    made = restore(tmp_path / "q", tmp_path / "savepoint")
    assert origin.record is not None and made.content.digest == origin.record.content.digest
    assert findings(tmp_path / "q", made.content, tmp_path) == []


def test_lineage_goes_through_what_was_dropped() -> None:
    """S34: ancestors are read from tombstones; one that is missing is named, and nothing older is taken in its place."""
    folder = Folder(MemoryStorage(), policy=KeepLast(1))
    for n in range(1, 5):
        folder.run(day(n), f"a{n}")
    folder.coordinator.publish(None)
    folder.coordinator.clean_up()
    log = folder.coordinator.log()
    assert [type(log.entries[n]) for n in range(1, 5)] == [Tombstone, Tombstone, Tombstone, Record]
    folder.coordinator.quarantine(2, "wrong")
    with pytest.raises(StateUnusable, match="descends from checkpoint 2"):
        begins_from(folder, 5)
    folder.storage.delete(paths.record(3))
    with pytest.raises(CorruptRecord, match=paths.record(3)):
        begins_from(folder, 5)
