"""What the tasks that move state leave on a worker's disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from state_backend.adapters.local_storage import LocalStorage
from state_backend.values.errors import StorageUnavailable
from tests.support.faulty_storage import Fault, FaultyStorage
from tests.support.savepoints import Format, SmallPipeline, restore


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def left_in(temp: Path) -> list[Path]:
    """All that lies there, but for the folder that a user's work folders share, which stays."""
    return [path for path in temp.rglob("*") if path != temp / f"cairn-work-{os.geteuid()}"]


@pytest.mark.parametrize("format", ["native", "canonical"])
@pytest.mark.long("half a second", runs_in="ci")
def test_nothing_is_left_of_a_task_that_ended(tmp_path: Path, temp: Path, format: Format) -> None:
    """F15: a savepoint is taken and restored; of stores, images and downloads nothing stays in the temporary folder."""
    SmallPipeline(tmp_path / "origin").take(tmp_path / "savepoint", format)
    restore(tmp_path / "root" / "q", tmp_path / "savepoint")
    assert left_in(temp) == []


@pytest.mark.parametrize("format", ["native", "canonical"])
def test_nothing_is_left_of_a_task_that_failed(
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
