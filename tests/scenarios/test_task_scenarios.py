"""What the tasks that move state leave on a worker's disk and in a savepoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint.savepoints import read_savepoint
from state_backend.formats import paths
from state_backend.shard.manifest import manifest_of
from state_backend.values.errors import StorageUnavailable, UsageError
from state_backend.values.handles import Handle
from tests.support.crash_matrix import HOME, SAVED, Surveyor, Try, live_files, take
from tests.support.faulty_storage import Fault, FaultyStorage
from tests.support.real_shards import RealPipeline
from tests.support.savepoints import Format, SmallPipeline, restore


def left_in(temp: Path) -> list[Path]:
    """All that lies there, but for the folder that a user's work folders share, which stays."""
    return [path for path in temp.rglob("*") if path != temp / f"cairn-work-{os.geteuid()}"]


@pytest.mark.parametrize("format", ["native", "canonical"])
@pytest.mark.long("half a second", runs_in="ci")
def test_a_finished_savepoint_task_leaves_no_temporary_files(tmp_path: Path, temp: Path, format: Format) -> None:
    """F15: a savepoint is taken and restored; of stores, images and downloads nothing stays in the temporary folder."""
    SmallPipeline(tmp_path / "origin").take(tmp_path / "savepoint", format)
    restore(tmp_path / "root" / "q", tmp_path / "savepoint")
    assert left_in(temp) == []


@pytest.mark.parametrize("format", ["native", "canonical"])
def test_a_failed_savepoint_task_leaves_no_temporary_files(
    tmp_path: Path, temp: Path, format: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F15: nor when the upload of a savepoint fails, with the store open."""
    origin = SmallPipeline(tmp_path / "origin")
    full = FaultyStorage(
        LocalStorage(tmp_path / "savepoint"), {0: Fault(error=StorageUnavailable("no space"), when="before")}
    )
    monkeypatch.setattr(
        "cairn.shard_jobs.write_savepoint.open_storage", lambda url: origin.storage if url == origin.url else full
    )
    with pytest.raises(StorageUnavailable, match="no space"):
        origin.take(tmp_path / "savepoint", format)
    assert full.calls and left_in(temp) == []


@pytest.mark.parametrize("format", ["native", "canonical"])
def test_two_concurrent_savepoint_tries_leave_one_complete_savepoint(tmp_path: Path, format: Format) -> None:
    """S13: the slower one finds the record when it writes its own; what it wrote goes, and a later call finds the savepoint too. A
    native one is compacted: of the two files of the shard of "a" there is one."""
    made = RealPipeline(tmp_path)
    made.run(1, "a1", {"a": 2})
    made.run(2, "a2", {"a": 1})
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
    files = [len(manifest_of(ref, saved).files) for ref in read_savepoint(saved).content.shards]
    assert max(files, default=0) <= 1
    other: Format = "canonical" if format == "native" else "native"
    with pytest.raises(UsageError, match="holds a savepoint already"):
        take(Try({HOME: made.storage, SAVED: saved}, tmp_path, "other"), other)
