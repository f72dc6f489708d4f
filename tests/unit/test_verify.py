"""Verification beside commits, and over a storage that keeps checksums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.formats import paths
from state_backend.inspection.verify import verify_pipeline
from state_backend.ports.storage import Storage
from state_backend.values.errors import StorageUnavailable
from state_backend.values.retention import KeepLast
from tests.support.checkpoints import day
from tests.support.faulty_storage import Fault, FaultyStorage
from tests.support.real_shards import RealPipeline


def in_memory(storage: Storage) -> MemoryStorage:
    twin = MemoryStorage()
    for info in storage.list(""):
        twin.create(info.path, storage.read(info.path))
    return twin


class Meanwhile(FaultyStorage):
    """Lets something happen just after the log was read: before everything is listed."""

    def __init__(self, inner: Storage, action: Callable[[], object]) -> None:
        super().__init__(inner, {})
        self._action: Callable[[], object] | None = action

    def list(self, prefix: str) -> Any:
        if prefix == "" and self._action is not None:
            action, self._action = self._action, None
            action()
        return super().list(prefix)


@pytest.fixture
def pipeline(tmp_path: Path) -> RealPipeline:
    made = RealPipeline(tmp_path, policy=KeepLast(1))
    made.run(1, "a1", dict.fromkeys("abcdef", 1))
    return made


@pytest.mark.parametrize("deep", [True, False])
def test_a_checkpoint_that_is_dropped_meanwhile_is_no_finding(
    pipeline: RealPipeline, tmp_path: Path, deep: bool
) -> None:
    storage = Meanwhile(pipeline.storage, lambda: pipeline.run(2, "a2", dict.fromkeys("abcdef", 2)))
    (tmp_path / "temp").mkdir()
    found = verify_pipeline(storage, work=tmp_path / "temp" if deep else None)
    assert (found.findings, found.checkpoints) == ((), ())
    assert [*(tmp_path / "temp").iterdir()] == []


@pytest.mark.parametrize("inline", [True, False])
def test_a_flipped_file_is_found_fast_where_the_storage_keeps_checksums(tmp_path: Path, inline: bool) -> None:
    pipeline = RealPipeline(tmp_path, inline=inline)
    pipeline.run(1, "a1", dict.fromkeys("abcdef", 1))
    for path in (paths.shared("a1", 0, 0, 0, "sst"), paths.output(day(1), "a1", 0, 0)):
        storage = in_memory(pipeline.storage)
        assert verify_pipeline(storage).success
        data = bytearray(storage.read(path))
        data[-1] ^= 1
        storage.delete(path)
        storage.create(path, bytes(data))
        (checked,) = verify_pipeline(storage).checkpoints
        assert len(checked.findings) == 1
        assert path in checked.findings[0]
        assert "crc32c" in checked.findings[0]


def test_a_deep_verification_leaves_no_local_files(pipeline: RealPipeline, tmp_path: Path) -> None:
    (tmp_path / "temp").mkdir()
    found = verify_pipeline(pipeline.storage, work=tmp_path / "temp")
    assert (found.success, [c.entries for c in found.checkpoints]) == (True, [6])
    assert [*(tmp_path / "temp").iterdir()] == []


def test_a_storage_that_fails_is_no_finding(pipeline: RealPipeline) -> None:
    watched = FaultyStorage(pipeline.storage, {})
    assert verify_pipeline(watched).success
    for at in range(len(watched.calls)):
        plan = {at: Fault(error=StorageUnavailable("outage"), when="before")}
        with pytest.raises(StorageUnavailable, match="outage"):
            verify_pipeline(FaultyStorage(pipeline.storage, plan))
