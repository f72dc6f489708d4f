"""RocksDB's metadata in memory: where they are while a store is open, and what a killed process leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from state_backend.adapters import rocks_metadata
from state_backend.adapters.rocks import EngineOptions, RocksStore
from state_backend.values.errors import CorruptFile

HOLDS_A_LOCK = """
import fcntl, sys
lock = open(sys.argv[1], "r+b")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
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


@pytest.mark.parametrize("why", ["absent", "a file", "too small"])
def test_without_memory_they_lie_beside_the_state(
    tmp_path: Path, memory: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = memory
    if why == "too small":
        monkeypatch.setattr(rocks_metadata, "_NEEDED_BYTES", 1 << 60)
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
    folder = memory / "cairn-999999999-alive"
    folder.mkdir()
    (folder / "LOCK").touch()
    command = [sys.executable, "-c", HOLDS_A_LOCK, str(folder / "LOCK")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        yield folder
        holder.stdin.close()


def test_what_a_killed_process_left_goes_and_nothing_else(tmp_path: Path, memory: Path, other_process: Path) -> None:
    """A folder whose lock is held stays, whatever process its name says; so does one that is just being made, one of this
    process, and what is not ours."""
    for name in (
        "cairn-999999999-killed",
        "cairn-999999999-new",
        "cairn-999999999-old",
        f"cairn-{os.getpid()}-mine",
        "other",
    ):
        (memory / name).mkdir()
    (memory / "cairn-999999999-killed" / "LOCK").touch()
    (memory / f"cairn-{os.getpid()}-mine" / "LOCK").touch()
    os.utime(memory / "cairn-999999999-old", (1, 1))
    with RocksStore(tmp_path / "db", options(memory)):
        pass
    assert {path.name for path in memory.iterdir()} == {
        other_process.name, "cairn-999999999-new", f"cairn-{os.getpid()}-mine", "other"
    }  # fmt: skip


def test_a_store_holds_the_lock_that_others_look_for(tmp_path: Path, memory: Path) -> None:
    """Asked from another process, as only that one can: it would take an open store's folder for an abandoned one otherwise."""
    look = "import sys; from pathlib import Path; from state_backend.adapters import rocks_metadata as m; "
    look += "m._remove_abandoned(Path(sys.argv[1]))"
    root = Path(__file__).resolve().parents[2]
    with RocksStore(tmp_path / "db", options(memory)) as store:
        store.write([(b"a", b"1")])
        before = {path.name for path in memory.rglob("*")}
        subprocess.run([sys.executable, "-c", look, str(memory)], check=True, cwd=root)
        assert {path.name for path in memory.rglob("*")} == before and "LOCK" in before
        store.capture(tmp_path / "image")
