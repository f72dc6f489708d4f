"""Tries that were taken for dead and go on writing, branches, and what is never subsumed: on real shards."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.checkpoint.sweep import sweep
from state_backend.formats import paths
from state_backend.ports.storage import Storage
from state_backend.state.shard_state import ShardState
from state_backend.state.state_variables import ValueState
from state_backend.values.errors import AttemptLost, BaseMoved, Fenced, StaleStateError, StateUnusable, UsageError
from state_backend.values.handles import Handle
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.records import Record
from state_backend.values.retention import KeepLast
from tests.support.chains import Chain
from tests.support.checkpoints import PIPELINE, day
from tests.support.crash_matrix import FAR_MS, HOME, SAVED, Surveyor, Try, Values, live_files, take
from tests.support.faulty_storage import FaultyStorage
from tests.support.real_shards import RealPipeline
from tests.support.shards import KEYS


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


def values(storage: Storage, work: Path) -> list[Values]:
    """Of every completed checkpoint, by id; each restored, walked and compared with what is recorded of it."""
    seen = Surveyor(work).see(storage)
    return [state for state, _ in seen.states.values()]


@pytest.mark.parametrize(
    ("ending", "mode"),
    [(".manifest", "incremental"), (".log", "changelog"), (".sst", "incremental"), ("prepared.json", "changelog")],
)
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


def test_an_attempt_whose_base_is_not_the_intervals_any_more_is_refused(tmp_path: Path) -> None:
    """S34: what a try read and what its interval starts from must be the same checkpoint when it commits."""
    storage = MemoryStorage()
    made = RealPipeline(tmp_path, storage=storage)
    made.run(1, "a1", {"a": 1})
    made.prepare(2, "a2", {"b": 2})
    made.run(1, "again", {"a": 10})
    with pytest.raises(BaseMoved, match="started from checkpoint 1"):
        made.coordinator.commit("a2")
    assert values(storage, tmp_path)[-1] == {"a": 10}


def test_merging_files_leaves_older_versions_and_the_next_ones_whole(tmp_path: Path) -> None:
    """S17: files that a compaction replaced locally are still those that older checkpoints need, and no newer one names them by a
    number that means another file now."""
    chain = Chain(tmp_path, MemoryStorage(), max_parallelism=4)
    versions = []
    for n in range(6):

        def change(state: ShardState, owned: KeyGroupRange, n: int = n) -> None:
            if 0 in owned:
                state.set_key(0, KEYS.encode(("a",)))
                ValueState(state, "value").update((n, "x" * n))

        # Compacted every third time: all files anew, under numbers that were used before.
        versions.append((chain.step(1, "savepoint" if n % 3 == 2 else "incremental", change), chain.digest))
    for manifests, digest in versions:
        chain.manifests = manifests
        chain.step(1, "incremental")
        assert chain.digest == digest
    chain.manifests = versions[1][0]
    assert chain.step(1, "incremental")[0].entries == 1


def test_a_savepoint_is_never_subsumed(tmp_path: Path) -> None:
    """F56: its checkpoint is dropped and cleaned up, the pipeline's folder is removed, and it restores all the same."""
    made = RealPipeline(tmp_path, policy=KeepLast(1))
    made.run(1, "a1", {"a": 1})
    saved = MemoryStorage()
    take(Try({HOME: made.storage, SAVED: saved}, tmp_path, "take"), "native")
    made.run(2, "a2", {"a": 2})
    assert made.coordinator.log().retained.keys() == {2}
    shutil.rmtree(tmp_path / PIPELINE)
    assert Surveyor(tmp_path).see(saved).saved == {"a": 1}


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
