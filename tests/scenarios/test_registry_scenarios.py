"""Zombies, late files, branches and savepoints as Flink and Spark test them, over files on a disk and in memory."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint.rewind import rewind
from state_backend.checkpoint.sweep import sweep
from state_backend.formats import paths, record_codec
from state_backend.ports.storage import Storage
from state_backend.shard.manifest import manifest_of
from state_backend.values.errors import (
    AlreadyExists,
    BaseMoved,
    CorruptFile,
    CorruptRecord,
    Fenced,
    StaleStateError,
    StateUnusable,
)
from state_backend.values.intervals import Interval
from state_backend.values.records import Permissions, Record, Tombstone
from state_backend.values.retention import KeepLast
from tests.support.checkpoints import PIPELINE, Folder, day, record, run, sst, start_ms
from tests.support.savepoints import Format, SmallPipeline, findings, restore

LONG_AGO = timedelta(0)


@pytest.fixture(params=["memory", "disk"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return MemoryStorage() if request.param == "memory" else LocalStorage(tmp_path / "p")


def state_at(folder: Folder, which: str | int) -> list[bytes]:
    """What the files of a checkpoint say, oldest first."""
    made = folder.coordinator.record(which)
    return [
        folder.storage.read(h.path) for ref in made.content.shards for h in manifest_of(ref, folder.storage).handles
    ]


def states(*attempts: str) -> list[bytes]:
    return [f"state of {a}".encode() for a in attempts]


def swept(folder: Folder) -> set[str]:
    """Whose files are left when everything that nobody needs is gone."""
    folder.coordinator.publish(None)
    sweep(folder.storage, PIPELINE, now_ms=2**52, min_age=LONG_AGO)
    return {owner for path in folder.paths(paths.SHARED) if (owner := paths.attempt_of(path)) is not None}


def base_of(folder: Folder, interval: Interval) -> int | None:
    begun = folder.coordinator.begin(
        interval, run=run("looks"), permissions=Permissions(), pipeline_start_ms=start_ms(), attempt="looks"
    )
    return begun.base.id if begun.base else None


@pytest.mark.parametrize("format", ["native", "canonical"])
def test_savepoints_are_not_subsumed(tmp_path: Path, format: Format) -> None:
    """F56: commits with tight retention and a sweep of the pipeline take its files, and none of the savepoint's."""
    origin = SmallPipeline(tmp_path)
    origin.take(tmp_path / "savepoint", format)
    folder = Folder(origin.storage, policy=KeepLast(1))
    for n in (2, 3, 4):
        folder.run(day(n), f"a{n}", pipeline="p", key_schema=origin.coordinator.record("latest").content.key_schema)
    folder.coordinator.publish(None)
    folder.coordinator.clean_up()
    assert swept(folder) == {"a4"}
    made = restore(tmp_path / "q", tmp_path / "savepoint")
    assert origin.record is not None and made.content.digest == origin.record.content.digest
    assert findings(tmp_path / "q", made.content, tmp_path) == []


def test_whoever_is_late_or_unknown_is_cleaned_up_after(storage: Storage) -> None:
    """F58: a late ack's files go when it learns that it lost, a silent one's with a sweep, and an unknown name changes nothing."""
    folder = Folder(storage)
    folder.run(day(1), "a1")
    folder.prepare(day(2), "late", keep=(sst("a1"),))
    folder.prepare(day(2), "silent", keep=(sst("a1"),))
    folder.run(day(2), "winner", keep=(sst("a1"),))
    with pytest.raises(Fenced):
        folder.coordinator.commit("late")
    before = folder.paths()
    assert not {p for p in before if paths.attempt_of(p) == "late"}
    with pytest.raises(StateUnusable, match="unknown"):
        folder.coordinator.commit("unknown")
    assert folder.paths() == before
    assert swept(folder) == {"a1", "winner"}
    assert state_at(folder, "latest") == states("a1", "winner")


def test_going_back_is_exactly_what_was_there(storage: Storage) -> None:
    """S4: an attempt that is given up leaves its base as it was; so does one that was committed and taken back."""
    folder = Folder(storage)
    folder.run(day(1), "a1")
    before = state_at(folder, 1)
    folder.prepare(day(2), "given-up", keep=(sst("a1"),))
    assert base_of(folder, day(2)) == 1 and state_at(folder, 1) == before
    folder.run(day(2), "a2", keep=(sst("a1"),))
    back = rewind(folder.coordinator, 1, run=run("back"), attempt="back")
    assert base_of(folder, day(2)) == back.id == 3
    assert state_at(folder, back.id) == before
    with pytest.raises(StaleStateError):
        base_of(folder, day(3))


def zombie_of(folder: Folder, what: Callable[[str], object]) -> None:
    """Day 2 is begun, its process hangs in one write, the retry commits, and the write lands."""
    folder.run(day(1), "a1")
    folder.run(day(2), "retry", keep=(sst("a1", folder.suffix),), run=run("r", 0, 2))
    what("zombie")


def test_a_record_that_lands_after_its_retry_was_committed(storage: Storage) -> None:
    """S8, S11: the name is taken, also once the retry's checkpoint is dropped; readers see the retry's."""
    folder = Folder(storage, policy=KeepLast(1))

    def land(attempt: str) -> None:
        late = record(2, day(2), 1, {1: None, 2: None}, attempt=attempt)
        with pytest.raises(AlreadyExists):
            folder.storage.create(paths.record(2), record_codec.encode(late))

    zombie_of(folder, land)
    assert state_at(folder, "latest") == states("a1", "retry")
    folder.run(day(3), "a3", keep=(sst("a1"), sst("retry")))
    folder.coordinator.publish(None)
    folder.coordinator.clean_up()
    assert isinstance(folder.coordinator.log().entries[2], Tombstone)
    land("zombie")
    assert state_at(folder, "latest") == states("a1", "retry", "a3")


@pytest.mark.parametrize("suffix", ["log", "manifest"])
def test_a_file_that_lands_after_its_retry_was_committed(storage: Storage, suffix: str) -> None:
    """S8, S9, S11: a segment or manifest of the first try has its own name, so that nothing is overwritten; a sweep finds it."""
    folder = Folder(storage, suffix="log", inline=False)
    zombie_of(folder, lambda attempt: storage.create(paths.shared(attempt, 0, 0, 0, suffix), b"late"))
    assert state_at(folder, "latest") == states("a1", "retry")
    folder.run(day(3), "a3", keep=(sst("a1", "log"), sst("retry", "log")))
    assert state_at(folder, "latest") == states("a1", "retry", "a3")
    assert swept(folder) == {"a1", "retry", "a3"}
    assert state_at(folder, "latest") == states("a1", "retry", "a3")


def test_back_to_an_old_version_then_on_another_branch(storage: Storage) -> None:
    """S2, S15: to version 2, on from there, while somebody still works on the old branch; every version reads as it was made."""
    folder = Folder(storage)
    for n in range(1, 5):
        folder.run(day(n), f"a{n}", keep=tuple(sst(f"a{i}") for i in range(1, n)))
    folder.prepare(day(5), "old-branch", keep=tuple(sst(f"a{i}") for i in range(1, 5)))
    rewind(folder.coordinator, 2, run=run("back"), attempt="back")
    for n in (3, 4):
        folder.run(day(n), f"b{n}", keep=(sst("a1"), sst("a2"), *(sst(f"b{i}") for i in range(3, n))))
    with pytest.raises(BaseMoved):
        folder.coordinator.commit("old-branch")
    assert base_of(folder, day(5)) == 7
    assert state_at(folder, "latest") == states("a1", "a2", "b3", "b4")
    assert state_at(folder, 4) == states("a1", "a2", "a3", "a4")
    assert state_at(folder, 5) == state_at(folder, 2) == states("a1", "a2")
    rewind(folder.coordinator, 4, run=run("again"), attempt="again", permissions=Permissions(allow_stale_base=True))
    folder.run(day(5), "a5", keep=tuple(sst(f"a{i}") for i in range(1, 5)))
    assert state_at(folder, "latest") == states("a1", "a2", "a3", "a4", "a5")


def test_merged_files_are_still_there_for_an_older_version(storage: Storage) -> None:
    """S17: version 2 merged the files of version 1 away; going back to 1 and committing anew finds them, until nobody needs them."""
    folder = Folder(storage, policy=KeepLast(3))
    folder.run(day(1), "a1")
    folder.run(day(2), "merged")  # keeps nothing of a1
    rewind(folder.coordinator, 1, run=run("back"), attempt="back")
    folder.run(day(2), "b2", keep=(sst("a1"),))
    folder.coordinator.publish(None)
    folder.coordinator.clean_up()
    assert state_at(folder, "latest") == states("a1", "b2")
    folder.options["policy"] = KeepLast(1)
    folder.coordinator = folder.over(storage)
    folder.run(day(3), "b3")
    folder.coordinator.publish(None)
    folder.coordinator.clean_up()
    assert folder.paths(paths.SHARED) == {sst("b3")}


def test_an_attempt_that_names_another_base_than_the_log(storage: Storage) -> None:
    """S34: what a commit says that it started from is checked against the log, by id and not by position."""
    folder = Folder(storage)
    folder.run(day(1), "a1")
    folder.run(day(2), "a2")
    folder.prepare(day(3), "wrong", base_id=1, h0=2)
    folder.prepare(day(3), "none", base_id=99, h0=2)
    for attempt in ("wrong", "none"):
        with pytest.raises(BaseMoved, match="started from checkpoint"):
            folder.coordinator.commit(attempt)
    assert folder.coordinator.log().head_id == 2


def test_lineage_goes_through_what_was_dropped(storage: Storage) -> None:
    """S34: ancestors are read from tombstones; one that is missing is named, and nothing older is taken in its place."""
    folder = Folder(storage, policy=KeepLast(1))
    for n in range(1, 5):
        folder.run(day(n), f"a{n}")
    folder.coordinator.publish(None)
    folder.coordinator.clean_up()
    log = folder.coordinator.log()
    assert [type(log.entries[n]) for n in range(1, 5)] == [Tombstone, Tombstone, Tombstone, Record]
    folder.coordinator.quarantine(2, "wrong")
    with pytest.raises(StateUnusable, match="descends from checkpoint 2"):
        base_of(folder, day(5))
    storage.delete(paths.record(3))
    with pytest.raises(CorruptRecord, match=paths.record(3)):
        base_of(folder, day(5))


def test_a_base_whose_file_is_missing_is_named_by_who_takes_it_over(storage: Storage) -> None:
    """S34: nothing is made of a checkpoint that is not whole."""
    folder = Folder(storage, inline=False)
    folder.run(day(1), "a1")
    broken = paths.shared("a1", 0, 0, 0, "manifest")
    storage.delete(broken)
    with pytest.raises(CorruptFile, match=broken):
        sweep(storage, PIPELINE, now_ms=2**52, min_age=LONG_AGO)
    with pytest.raises(Exception, match=broken):
        state_at(folder, 1)


@pytest.mark.parametrize(("first", "second"), [("one", "two"), ("two", "one")])
def test_two_writers_of_one_version(storage: Storage, first: str, second: str) -> None:
    """S13, S14: whoever is first is version 2, and reading gives its bytes."""
    folder = Folder(storage)
    folder.run(day(1), "a1")
    folder.prepare(day(2), "one", run=run("r1"), keep=(sst("a1"),))
    folder.prepare(day(2), "two", run=run("r2"), keep=(sst("a1"),))
    assert folder.coordinator.commit(first).id == 2
    with pytest.raises(Fenced):
        folder.coordinator.commit(second)
    assert state_at(folder, "latest") == states("a1", first)
    assert state_at(folder, 1) == states("a1")


def test_one_shard_of_another_attempt_is_not_mixed_in(storage: Storage) -> None:
    """S2, S16, S18: a branch from version 1 has the same numbers and sizes as the old one, and none of its bytes."""
    folder = Folder(storage)
    folder.run(day(1), "a1")
    folder.run(day(2), "old-2", keep=(sst("a1"),))
    rewind(folder.coordinator, 1, run=run("back"), attempt="back")
    folder.run(day(2), "new-2", keep=(sst("a1"),))
    old, new = (folder.coordinator.record(n).content.shards[0] for n in (2, 4))
    names = [[f.name for f in manifest_of(ref, storage).files] for ref in (old, new)]
    sizes = [[h.size_bytes for h in manifest_of(ref, storage).handles] for ref in (old, new)]
    assert names[0] == names[1] and sizes[0] == sizes[1]
    assert state_at(folder, 2) == states("a1", "old-2")
    assert state_at(folder, 4) == states("a1", "new-2")
