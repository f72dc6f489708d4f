"""RocksDB's metadata in memory, and the work folders of tasks: where they are, and what a killed process leaves."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from state_backend.adapters import rocks, rocks_metadata, work_folders
from state_backend.adapters.folder_lock import lock_folder, remove_unlocked
from state_backend.adapters.rocks import EngineOptions, RocksStore
from state_backend.adapters.work_folders import is_locked_by, kernel, work_folder
from state_backend.values.errors import CorruptFile, StorageUnavailable
from tests.support.layout import REPOSITORY

HOLDS_A_LOCK = """
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""
OPENS_MANY = """
import sys
from pathlib import Path
from unittest.mock import Mock
from state_backend.adapters.rocks_metadata import borrow_metadata
for n in range(500):
    borrowed = borrow_metadata(Path(sys.argv[2]), sys.argv[1])
    (borrowed.folder / "LOCK").touch()
    assert (borrowed.folder / "LOCK").exists()
    borrowed.give_back()
"""


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


def options(memory: Path | None) -> EngineOptions:
    return EngineOptions(metadata_dir=None if memory is None else str(memory))


def names(folder: Path) -> set[str]:
    return {path.name.rstrip("0123456789") for path in folder.iterdir()}


def test_metadata_cross_from_one_file_system_to_the_other_without_a_failing_rename(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    (tmp_path / "db").mkdir()
    (tmp_path / "db" / "CURRENT").write_text("MANIFEST-1")
    with monkeypatch.context() as patch:
        renames = Mock(side_effect=refused)
        patch.setattr(os, "rename", renames)
        borrowed = rocks_metadata.borrow_metadata(tmp_path / "db", str(memory))
        assert borrowed is not None and names(tmp_path / "db") == set() and (borrowed.folder / "CURRENT").exists()
        borrowed.give_back()
    assert (tmp_path / "db" / "CURRENT").read_text() == "MANIFEST-1" and list(memory.iterdir()) == []
    assert not renames.called


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_store_is_the_same_wherever_its_metadata_lie(tmp_path: Path, memory: Path, in_memory: bool) -> None:
    """Written, captured, merged, captured again; both images open, with and without memory, and the store itself does again."""
    chosen = options(memory if in_memory else None)
    with RocksStore(tmp_path / "db", chosen) as store:
        assert len(list(memory.iterdir())) == in_memory
        assert ("CURRENT" in names(tmp_path / "db")) != in_memory
        for n in range(3):
            store.write([(b"%d" % n, b"first"), (b"last", b"%d" % n)])
            store.sorted_runs()
        ssts, small = store.capture(tmp_path / "image-1")
        assert len(ssts) == 3 and all(f.stat().st_nlink == 2 for f in ssts)
        assert [f.name.rstrip("0123456789") for f in small] == ["CURRENT", "MANIFEST-", "rocksdict-config.json"]
        store.compact()
        store.write([(b"0", None)])
        assert len(store.capture(tmp_path / "image-2")[0]) == 2
    assert list(memory.iterdir()) == []
    for folder, found in (
        ("image-1", [(b"0", b"first"), (b"1", b"first"), (b"2", b"first"), (b"last", b"2")]),
        ("image-2", [(b"1", b"first"), (b"2", b"first"), (b"last", b"2")]),
        ("db", [(b"1", b"first"), (b"2", b"first"), (b"last", b"2")]),
    ):
        for other in (options(memory), options(None)):
            with RocksStore(tmp_path / folder, other) as store:
                assert list(store.scan(b"", None)) == found


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_store_that_is_opened_again_keeps_its_filters(tmp_path: Path, memory: Path, in_memory: bool) -> None:
    """Beside RocksDB's file OPTIONS, rocksdict would open a store with these options instead, without Bloom filters."""
    for n in range(3):
        with RocksStore(tmp_path / "db", options(memory if in_memory else None)) as store:
            store.write([(b"%d" % n, b"")])
            store.sorted_runs()
            found = store._db.property_value("rocksdb.aggregated-table-properties")
            assert f"# entries for filter={n + 1};" in found


def test_a_store_whose_metadata_are_missing_is_refused_as_corrupt(tmp_path: Path, memory: Path) -> None:
    """Open elsewhere, or the folder in memory is lost: RocksDB itself would begin anew, in the same folder."""
    with RocksStore(tmp_path / "db", options(memory)) as store:
        store.write([(b"a", b"1")])
        store.sorted_runs()
        with pytest.raises(CorruptFile, match="no CURRENT"):
            RocksStore(tmp_path / "db", options(memory))
        assert store.get(b"a") == b"1"


@pytest.mark.parametrize("why", ["absent", "a file", "too small", "without locks"])
def test_metadata_lie_beside_the_state_if_the_memory_folder_is_unusable(
    tmp_path: Path, memory: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = memory
    if why == "too small":
        monkeypatch.setattr(rocks_metadata, "_NEEDED_BYTES", 1 << 60)
    elif why == "without locks":
        monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.EOPNOTSUPP, "no locks")))
    else:
        place = memory / "other"
        if why == "a file":
            place.write_text("")
    with RocksStore(tmp_path / "db", options(place)) as store:
        store.write([(b"a", b"1")])
        assert "CURRENT" in names(tmp_path / "db")
    assert not any(path.is_dir() for path in memory.iterdir())


@pytest.fixture
def other_process(memory: Path) -> Iterator[Path]:
    """The folder of a store that another process has open."""
    folder = memory / ".cairn-rocksdb-alive"
    folder.mkdir()
    command = [sys.executable, "-c", HOLDS_A_LOCK, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        yield folder
        holder.stdin.close()


def test_opening_deletes_only_folders_of_killed_processes(tmp_path: Path, memory: Path, other_process: Path) -> None:
    """A folder that somebody has locked stays, this process or another; and what is not ours."""
    killed = memory / ".cairn-rocksdb-killed"
    others = {
        memory / name for name in ("other", "cairn-counts-0-abcdefgh", "cairn-cache-0")
    }  # as with TMPDIR=/dev/shm
    for folder in (killed, *others):
        folder.mkdir()
        (folder / "LOCK").touch()
    with RocksStore(tmp_path / "a", options(memory)) as first:
        first.write([(b"a", b"1")])
        with RocksStore(tmp_path / "b", options(memory)):
            assert not killed.exists() and len(list(memory.iterdir())) == 6
        first.capture(tmp_path / "image")
    assert {path.name for path in memory.iterdir()} == {other_process.name, *(path.name for path in others)}


def test_a_folder_that_goes_before_it_is_locked_is_made_again(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between making a folder and locking it another process may have found it, locked it, removed it, and be done."""
    taken, flock = [], fcntl.flock

    def too_late(descriptor: int, how: int) -> None:
        if not taken:
            taken.extend(memory.iterdir())
            taken[0].rmdir()
        flock(descriptor, how)

    monkeypatch.setattr("fcntl.flock", too_late)
    with RocksStore(tmp_path / "db", options(memory)) as store:
        store.write([(b"a", b"1")])
        assert [path for path in memory.iterdir()] != taken and len(list(memory.iterdir())) == 1


def test_a_folder_that_is_gone_can_not_be_locked(tmp_path: Path) -> None:
    """Another process deleted it since it was listed; a failed `close` would hide that."""
    assert lock_folder(tmp_path / "gone") is None
    assert not remove_unlocked(tmp_path / "gone")


def test_without_links_an_image_is_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RocksStore(tmp_path / "db", options(None)) as store:
        store.write([(b"a", b"1")])
        with monkeypatch.context() as patched:
            patched.setattr("os.link", Mock(side_effect=OSError(errno.EPERM, "no links")))
            ssts, _ = store.capture(tmp_path / "image")
        assert [sst.stat().st_nlink for sst in ssts] == [1]
    with RocksStore(tmp_path / "image", options(None)) as copy:
        assert list(copy.scan(b"", None)) == [(b"a", b"1")]


# --- work folders ------------------------------------------------------------------------------------------------------------

DAY_S = 86_400
OTHER_KERNEL = "0123abcd"
# A task in the middle of its work: the temp folder is argv[1], the memory for metadata argv[2], a file of the cache argv[3].
WORKS = """
import os, sys, tempfile
from pathlib import Path
from state_backend.adapters.rocks import EngineOptions, RocksStore
from state_backend.adapters.work_folders import work_folder
tempfile.tempdir = sys.argv[1]
with work_folder("p-3") as work, RocksStore(work / "db", EngineOptions(metadata_dir=sys.argv[2])) as store:
    store.write([(b"a", b"1")])
    store.sorted_runs()
    os.link(sys.argv[3], work / "db" / "000099.sst")
    print(work, flush=True)
    sys.stdin.read()
"""
WORKS_OFTEN = """
import sys, tempfile
from state_backend.adapters.work_folders import work_folder
tempfile.tempdir = sys.argv[1]
for n in range(300):
    with work_folder("p") as work:
        (work / "db").mkdir()
        (work / "db" / "file").touch()
        assert (work / "db" / "file").exists()
"""


@pytest.fixture
def parent(temp: Path) -> Path:
    """Where this user's work folders are."""
    with work_folder("first"):
        pass
    (made,) = temp.iterdir()
    assert made.stat().st_mode & 0o777 == 0o700
    return made


@contextmanager
def a_task(*arguments: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that is in the middle of its work, and its folder."""
    command = [sys.executable, "-c", WORKS, *map(str, arguments)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert (folder / "db").is_dir()
        yield process, folder
        process.stdin.close()


def test_the_next_task_removes_what_a_killed_one_left(tmp_path: Path, temp: Path, memory: Path) -> None:
    """Its state and its links to the cache. The cache's file is the same as before; a task that lives keeps its folder."""
    cached = tmp_path / "cached"
    cached.write_bytes(b"state")
    os.utime(cached, ns=(10**18, 10**18))
    with a_task(temp, memory, cached) as (_, alive), a_task(temp, memory, cached) as (task, killed):
        assert killed.parent == alive.parent and cached.stat().st_nlink == 3
        task.kill()
        task.wait()
        assert killed.exists()
        with work_folder("next") as work, RocksStore(work / "db", options(memory)):
            assert set(work.parent.iterdir()) == {work, alive} and len(list(memory.iterdir())) == 2
            assert (alive / "db" / "000099.sst").read_bytes() == b"state"
        found = cached.stat()
        assert (found.st_nlink, found.st_mtime_ns) == (2, 10**18)
        assert list(alive.parent.iterdir()) == [alive]
    assert not any(alive.parent.iterdir()) and not any(memory.iterdir())


@pytest.mark.parametrize(("program", "left"), [(OPENS_MANY, []), (WORKS_OFTEN, [[]])], ids=["stores", "tasks"])
@pytest.mark.long("half a second", runs_in="ci")
def test_stores_and_tasks_that_start_at_once_leave_each_other_alone(
    tmp_path: Path, temp: Path, program: str, left: list[Any]
) -> None:
    """Each start removes what looks abandoned, and a folder that was just made, and is not locked yet, does."""
    command = [sys.executable, "-c", program, str(temp)]
    processes = [subprocess.Popen([*command, str(tmp_path / str(n))], cwd=REPOSITORY) for n in range(3)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert [list(folder.iterdir()) for folder in temp.iterdir()] == left


@pytest.mark.parametrize(
    ("name", "ours", "locked"),
    [
        ("89abcdef-p-0-x", "89abcdef", True),
        ("0123abcd-p-0-x", "89abcdef", False),
        ("unlocked-p-0-x", "89abcdef", False),
        ("unlocked-p-0-x", "unlocked", False),
        ("89abcdef", "89abcdef", True),
        ("p-89abcdef-0-x", "89abcdef", False),
    ],
)
def test_a_work_folder_is_locked_by_a_process_of_the_same_kernel_only(name: str, ours: str, locked: bool) -> None:
    assert is_locked_by(name, ours) == locked


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize(
    ("of", "age_days", "inner_age_days", "stays"),
    [
        (OTHER_KERNEL, 6, 6, True),
        (OTHER_KERNEL, 8, 8, False),
        (OTHER_KERNEL, 8, 6, True),
        ("unlocked", 6, 6, True),
        ("unlocked", 8, 8, False),
        ("unlocked", 8, 6, True),
    ],
)
def test_a_work_folder_without_a_reliable_lock_is_deleted_after_a_week(
    parent: Path, monkeypatch: pytest.MonkeyPatch, of: str, age_days: int, inner_age_days: int, stays: bool, locks: bool
) -> None:
    """``inner_age_days``: since a file was made in the store, which lies in the folder."""
    folder, now_s = parent / f"{of}-p-0-x", time.time()
    (folder / "db").mkdir(parents=True)
    for path, days in ((folder / "db", inner_age_days), (folder, age_days)):
        os.utime(path, (now_s - days * DAY_S, now_s - days * DAY_S))
    if not locks:
        monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.EOPNOTSUPP, "no locks")))
    with work_folder("next"):
        assert folder.exists() == stays


def test_an_unlockable_work_folder_is_named_unlocked(temp: Path, parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may be able to lock its folder, as when this process had no descriptor left: that must not count."""
    with monkeypatch.context() as patched:
        patched.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "no locks left")))
        made = work_folder("p")
        work = made.__enter__()
    assert work.name.startswith("unlocked-p-") and work.parent == parent
    with work_folder("next"):
        assert work.exists()
    made.__exit__(None, None, None)
    assert list(parent.iterdir()) == []
    monkeypatch.setattr(work_folders, "kernel", lambda: "unlocked")  # no /proc
    with work_folder("p") as work:
        assert work.name.startswith("unlocked-p-")


def test_a_task_start_deletes_a_limited_number_of_own_folders_only(temp: Path, parent: Path, tmp_path: Path) -> None:
    others = {temp / "cairn-p-0-abcdefgh", temp / f"{kernel()}-p-0-x", tmp_path / "linked"}
    for folder in others:
        folder.mkdir()
        (folder / "file").touch()
    (parent / f"{kernel()}-link").symlink_to(tmp_path / "linked")
    (parent / "a file").touch()
    for n in range(40):
        (parent / f"{kernel()}-p-{n}").mkdir()
    left = []
    for _ in range(3):
        with work_folder("next"):
            left.append(len(list(parent.iterdir())) - 3)
    assert left == [24, 8, 0]
    assert all((folder / "file").exists() for folder in others)


def test_a_parent_that_becomes_a_link_is_not_followed(
    temp: Path, parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the temp folder lets others rename: folders of ours that are older than a week look abandoned."""
    victim = tmp_path / "elsewhere" / "unlocked-documents"
    (victim / "old").mkdir(parents=True)
    for folder in (victim / "old", victim):
        os.utime(folder, (0, 0))
    find = work_folders._parent

    def swapped() -> Path | None:
        found = find()
        parent.rename(temp / "was")
        parent.symlink_to(victim.parent)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(work_folders, "_parent", swapped)
        with work_folder("next"):
            pass
    assert (victim / "old").is_dir()


@pytest.mark.parametrize("what", ["a file", "a link", "another's"])
def test_a_work_folder_parent_that_is_a_file_or_link_or_another_users_is_not_used(
    temp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    parent = temp / f"cairn-work-{os.geteuid()}"
    if what == "a file":
        parent.touch()
    elif what == "a link":
        (tmp_path / "elsewhere").mkdir()
        parent.symlink_to(tmp_path / "elsewhere")
    else:
        monkeypatch.setattr("os.geteuid", lambda: 12345)
        parent = temp / "cairn-work-12345"
        parent.mkdir()
    with work_folder("p") as work:
        assert work.is_dir() and work.parent == temp
    assert list(temp.iterdir()) == [parent] and (what == "a file" or not any(parent.iterdir()))


# --- a local disk that fails -------------------------------------------------------------------------------------------------------


class Compacting:
    """What RocksDB says of its compactions."""

    def __init__(self, **says: int) -> None:
        self._says = says

    def property_int_value(self, name: str) -> int:
        return self._says.get(name.removeprefix("rocksdb.").replace("-", "_"), 0)

    def flush(self) -> None: ...


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ({"background_errors": 1}, "a compaction in .* failed; is the local disk full or failing?"),
        ({"compaction_pending": 1}, "compactions in .* did not end within 0 s; is the local disk slow or failing?"),
    ],
)
def test_a_failed_or_slow_compaction_is_reported(tmp_path: Path, says: dict[str, int], message: str) -> None:
    store: Any = RocksStore(tmp_path / "db")
    real, store._db = store._db, Compacting(**says)
    try:
        with pytest.raises(StorageUnavailable, match=re.escape(message).replace(r"\.\*", ".*")):
            store._await_compactions(0.0)
    finally:
        store._db = real
        store.close()


def test_a_store_that_is_open_already_is_not_taken_for_a_damaged_one(tmp_path: Path) -> None:
    options = EngineOptions(metadata_dir=None)
    first = RocksStore(tmp_path / "db", options)
    try:
        with pytest.raises(StorageUnavailable, match=r"can't open the state in .*/db: IO error: .*lock"):
            RocksStore(tmp_path / "db", options)
    finally:
        first.close()


def test_a_full_local_disk_is_not_taken_for_the_storage() -> None:
    error = rocks._translate(Exception("IO error: No space left on device: /tmp/x"), "can't write the state in /tmp/x")
    assert isinstance(error, StorageUnavailable)
    assert "is full (not the storage); free some space there, or set TMPDIR to a folder with more" in str(error)


def test_a_disk_that_is_full_when_a_task_writes_its_own_files_is_reported() -> None:
    """What restores, captures and outputs write there beside RocksDB. Any other error is the block's own."""
    with pytest.raises(StorageUnavailable, match=r"is full \(not the storage\).*No space left"), work_folder("full"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(FileNotFoundError), work_folder("missing") as folder:
        (folder / "missing").read_bytes()
