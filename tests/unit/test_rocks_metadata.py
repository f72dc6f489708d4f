"""RocksDB's metadata in memory: where they are while a store is open, and what a killed process leaves."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from state_backend.adapters import rocks_metadata
from state_backend.adapters.rocks import EngineOptions, RocksStore
from state_backend.values.errors import CorruptFile

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


def test_files_without_their_metadata_are_no_empty_store(tmp_path: Path, memory: Path) -> None:
    """Open elsewhere, or the folder in memory is lost: RocksDB itself would begin anew, in the same folder."""
    with RocksStore(tmp_path / "db", options(memory)) as store:
        store.write([(b"a", b"1")])
        store.sorted_runs()
        with pytest.raises(CorruptFile, match="no CURRENT"):
            RocksStore(tmp_path / "db", options(memory))
        assert store.get(b"a") == b"1"


@pytest.mark.parametrize("why", ["absent", "a file", "too small", "without locks"])
def test_without_memory_they_lie_beside_the_state(
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


def test_what_a_killed_process_left_goes_and_nothing_else(tmp_path: Path, memory: Path, other_process: Path) -> None:
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


def test_a_store_is_no_abandoned_one_to_another_process(tmp_path: Path, memory: Path) -> None:
    look = "import sys; from pathlib import Path; from state_backend.adapters import rocks_metadata as m; "
    look += "m._remove_abandoned(Path(sys.argv[1]))"
    root = Path(__file__).resolve().parents[2]
    with RocksStore(tmp_path / "db", options(memory)) as store:
        store.write([(b"a", b"1")])
        before = {path.name for path in memory.rglob("*")}
        subprocess.run([sys.executable, "-c", look, str(memory)], check=True, cwd=root)
        assert {path.name for path in memory.rglob("*")} == before and "CURRENT" in before
        store.capture(tmp_path / "image")


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


def test_stores_that_are_opened_at_once_leave_each_other_alone(tmp_path: Path, memory: Path) -> None:
    """Each opening removes what looks abandoned, and a folder that was just made, and is not locked yet, does."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", OPENS_MANY, str(memory)]
    processes = [subprocess.Popen([*command, str(tmp_path / str(n))], cwd=root) for n in range(3)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert list(memory.iterdir()) == []


def test_without_links_an_image_is_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RocksStore(tmp_path / "db", options(None)) as store:
        store.write([(b"a", b"1")])
        with monkeypatch.context() as patched:
            patched.setattr("os.link", Mock(side_effect=OSError(errno.EPERM, "no links")))
            ssts, _ = store.capture(tmp_path / "image")
        assert [sst.stat().st_nlink for sst in ssts] == [1]
    with RocksStore(tmp_path / "image", options(None)) as copy:
        assert list(copy.scan(b"", None)) == [(b"a", b"1")]
