"""A checkpoint that somebody reads for longer than retention keeps it. The order of the calls is in `test_commit_interleaved.py`."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import UUID

import pytest

from cairn.data_sources.keyed_state import KeyedState
from cairn.operations import export_state as exporting
from cairn.operations.export_state import export_state
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint import leases as leasing
from state_backend.checkpoint.fresh_listing import listed_files, note_names
from state_backend.checkpoint.leases import give_back, holding, plan_leases, take_lease
from state_backend.checkpoint.storage_clock import storage_now_ms
from state_backend.checkpoint.sweep_files import sweep
from state_backend.formats import paths
from state_backend.inspection.state_source import StateSource
from state_backend.inspection.verify import verify_pipeline
from state_backend.values.errors import (
    CheckpointDropped,
    CorruptFile,
    PermissionRefused,
    StateGapError,
    StorageUnavailable,
    UsageError,
)
from state_backend.values.handles import FileInfo
from state_backend.values.retention import KeepLast
from tests.support.checkpoints import PIPELINE, Folder, day, sst
from tests.support.faulty_storage import Fault, FaultyStorage
from tests.support.real_shards import RealPipeline


def lease_at(ms: int, name: str) -> FileInfo:
    return FileInfo(path=name, size_bytes=1, generation=1, modified_ms=ms, crc32c=None)


A, B = (paths.lease(n, 10, f"00000000-0000-0000-0000-00000000000{n}") for n in (1, 2))


@pytest.mark.parametrize(
    ("leases", "newest_ms", "held", "ended"),
    [
        ([], 5, set(), []),
        ([lease_at(0, A)], 10_000, {1}, []),
        ([lease_at(0, A)], 10_001, set(), [A]),
        # Renewed once: what counts is when it was last written.
        ([lease_at(4_000, A)], 13_000, {1}, []),
        ([lease_at(0, A), lease_at(9_000, B)], 15_000, {2}, [A]),
        # Taken after the newest record was written.
        ([lease_at(99_000, A)], 10_001, {1}, []),
        ([lease_at(0, "leases/notes.txt")], 99_000, set(), []),
        # As long as a duration can be.
        ([lease_at(0, paths.lease(3, 999_999 * 86_400, str(UUID(int=3))))], 99_000, {3}, []),
    ],
)
def test_a_lease_holds_its_checkpoint_until_it_ends(
    leases: list[FileInfo], newest_ms: int, held: set[int], ended: list[str]
) -> None:
    found, over = plan_leases(leases, newest_ms)
    assert (found, [info.path for info in over]) == (held, ended)


def test_an_old_listing_brings_no_deleted_lease_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryStorage, "lists_what_is_there", False)
    storage = MemoryStorage()
    storage.create(A, b"")
    note_names(storage, paths.LEASES, [A.removeprefix(paths.LEASES)])
    old = list(storage.list(paths.LEASES))
    storage.delete(A)
    monkeypatch.setattr(storage, "list", lambda folder: iter(old))
    assert old and listed_files(storage, paths.LEASES) == []


class Clock:
    """A folder with one day, in a storage whose time stands still between calls of ``commit``."""

    def __init__(self) -> None:
        self.ms = 0
        self.storage = MemoryStorage(now_ms=lambda: self.ms)
        self.folder = Folder(self.storage, inline=False, policy=KeepLast(1))
        self.days = 0
        self.commit()

    def commit(self, seconds: int = 0) -> int:
        self.ms += 1000 * seconds
        self.days += 1
        self.folder.run(day(self.days), f"a{self.days}")
        self.folder.coordinator.publish(None)
        self.folder.coordinator.clean_up()
        return self.days

    def left(self) -> set[str]:
        return {p for p in self.folder.paths("shared/") if p.endswith(".sst")}


def test_files_of_a_leased_checkpoint_stay_until_the_read_ends(tmp_path: Path) -> None:
    made = Clock()
    with holding(made.storage, 1, "a test"):
        made.commit(seconds=60)
        made.commit(seconds=60)
        assert made.left() == {sst("a1"), sst("a3")}
        assert made.folder.coordinator.record(1).content.attempt == "a1"
        with pytest.raises(StateGapError, match="no usable checkpoint 2"):
            made.folder.coordinator.record(2)
        # Nobody else gets hold of it any more: a clean-up may be between its listing and its deletes.
        with pytest.raises(CheckpointDropped, match=r"^checkpoint 1, .* is no longer retained"):
            take_lease(made.storage, 1, "another")
        swept = sweep(made.storage, PIPELINE, now_ms=made.ms, min_age=timedelta(0))
        assert (swept.deleted_files, swept.plan.unknown) == (0, ())
        assert not [f for f in verify_pipeline(made.storage, work=tmp_path).findings if "lease" in f]
    assert made.folder.paths(paths.LEASES) == set()
    made.folder.coordinator.clean_up()
    assert made.left() == {sst("a3")}


def test_taking_a_lease_reads_only_the_newest_record(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(MemoryStorage(), days=8)
    read: list[str] = []
    before = folder.storage.read
    monkeypatch.setattr(folder.storage, "read", lambda path: read.append(path) or before(path))  # type: ignore[func-returns-value]
    with holding(folder.storage, 3, "a test"):
        pass
    assert [path for path in read if path.startswith(paths.CHECKPOINTS)] == [paths.record(8), paths.record(9)]


def test_a_lease_without_renewal_expires_by_the_clock_of_the_storage() -> None:
    made = Clock()
    lease = take_lease(made.storage, 1, "killed", timedelta(seconds=100))
    assert lease is not None
    made.commit(seconds=60)
    assert leasing.renew(made.storage, lease)
    made.commit(seconds=100)
    assert sst("a1") in made.left()
    made.commit(seconds=1)
    assert made.left() == {sst("a4")}
    assert made.folder.paths(paths.LEASES) == set()
    assert not leasing.renew(made.storage, lease)
    give_back(made.storage, lease)


def test_a_lease_is_renewed_again_after_a_failure_and_then_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its renewal is over, else the renewal would warn about the lease that is gone."""
    made, began, at_work, failures = Clock(), threading.Event(), list[str](), [StorageUnavailable("away")]

    def renew(*_: object) -> bool:
        while failures:
            raise failures.pop()
        began.set()
        return not threading.Event().wait(0.1)

    monkeypatch.setattr(leasing, "renew", renew)
    monkeypatch.setattr(leasing, "give_back", lambda *_: at_work.extend(one.name for one in threading.enumerate()))
    with holding(made.storage, 1, "a test", lasts=timedelta(0)):
        assert began.wait(5)
    assert at_work and "cairn-lease" not in at_work


def test_a_reader_without_write_permission_reads_without_a_lease_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    made = Clock()
    refuses = FaultyStorage(made.storage, {0: Fault(error=PermissionRefused("read-only"), when="before")})
    with holding(refuses, 1, "a test"):
        pass
    assert (
        "checkpoint 1 is read without a lease, so a clean-up may delete its files during the read: read-only"
        in caplog.text
    )
    # It is told that the checkpoint was dropped, as before there were leases; damage is told as damage.
    with pytest.raises(CheckpointDropped), holding(refuses, 1, "a test"):
        made.storage.delete(next(iter(made.folder.paths(paths.LEASES))))
        made.commit(seconds=1)
        raise CorruptFile("missing")
    with pytest.raises(CorruptFile), holding(made.storage, 2, "a test"):
        raise CorruptFile("damaged")


def test_an_export_longer_than_retention_needs_a_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = RealPipeline(tmp_path / "root", policy=KeepLast(1))
    pipeline.run(1, "a1", {"a": 1, "b": 1})
    real: Callable[..., Any] = exporting._export_shard

    def source_of(newest: int, *later: int) -> StateSource:
        """The newest checkpoint. An export of it is so slow that later days are committed meanwhile."""

        def slow(source: StateSource, states: Any, to: str, shard: int) -> Any:
            for n in later if shard == 1 else ():
                pipeline.run(n, f"a{n}", {"a": n, "b": n})
            return real(source, states, to, shard)

        monkeypatch.setattr(exporting, "_export_shard", slow)
        return StateSource.of_record(str(pipeline.root / PIPELINE), pipeline.coordinator.record(newest))

    source = source_of(1, 2, 3, 4)
    assert sum(file["rows"] for file in export_state(source, str(tmp_path / "out"))["files"]) == 2
    assert pipeline.coordinator.clean_up().shrunk == (1,)
    monkeypatch.setattr(
        "cairn.operations.export_state.StateSource.held", lambda self, what: holding(pipeline.storage, 0, "")
    )
    source = source_of(4, 5, 6)
    with pytest.raises(CheckpointDropped):
        export_state(source, str(tmp_path / "without"))


HOLD = """
import sys, time
from pathlib import Path
from datetime import timedelta
from state_backend.adapters.local_storage import LocalStorage
from state_backend.checkpoint.leases import holding
with holding(LocalStorage(Path(sys.argv[1])), 1, "a process", lasts=timedelta(seconds=6)):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.long("seconds", runs_in="ci")
def test_the_lease_of_a_killed_reader_expires(tmp_path: Path) -> None:
    """Its lease is renewed while it lives, and ends after that."""
    pipeline = RealPipeline(tmp_path, policy=KeepLast(1))
    pipeline.run(1, "a1", {"a": 1})
    storage = LocalStorage(tmp_path / PIPELINE)
    reader = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / PIPELINE)], stdout=subprocess.PIPE, text=True)
    try:
        assert reader.stdout is not None and reader.stdout.readline() == "held\n"
        (lease,) = storage.list(paths.LEASES)
        until = time.monotonic() + 30
        while (now := next(iter(storage.list(paths.LEASES)))).modified_ms == lease.modified_ms:
            assert time.monotonic() < until, "never renewed"
            time.sleep(0.1)
        pipeline.run(2, "a2", {"a": 2})
        assert pipeline.coordinator.record(1).content.attempt == "a1"
    finally:
        reader.send_signal(signal.SIGKILL)
        reader.wait()
        reader.stdout.close()  # type: ignore[union-attr]
    assert {info.path for info in storage.list(paths.LEASES)} == {now.path}
    # As if the reader had asked for one second.
    (tmp_path / PIPELINE / now.path).rename(tmp_path / PIPELINE / now.path.replace("-6-", "-1-"))
    time.sleep(1.1)
    pipeline.run(3, "a3", {"a": 3})
    assert [*storage.list(paths.LEASES)] == []
    with pytest.raises(StateGapError):
        pipeline.coordinator.record(1)
    assert {paths.attempt_of(info.path) for info in storage.list(paths.ATTEMPTS)} == {"a3"}


@pytest.mark.parametrize("ahead_s", [-3600, 900, 3600, 30 * 86_400])
@pytest.mark.long("seconds", runs_in="ci")
def test_no_clock_of_a_host_ends_a_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: int) -> None:
    """A host with a wrong clock commits, cleans up and sweeps while another host reads and writes."""
    pipeline = RealPipeline(tmp_path, policy=KeepLast(1))
    pipeline.run(1, "a1", {"a": 1})
    storage = LocalStorage(tmp_path / PIPELINE)
    with holding(storage, 1, "another host"):
        storage.create(sst("under way"), b"state")
        now_s, now_ns = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: now_s() + ahead_s)
        monkeypatch.setattr(time, "time_ns", lambda: now_ns() + ahead_s * 10**9)
        for n in (2, 3):
            pipeline.run(n, f"a{n}", {"a": n})
        assert sweep(storage, PIPELINE, min_age=timedelta(minutes=10)).deleted_files == 0
        monkeypatch.undo()
        pipeline.run(4, "a4", {"a": 4})
        assert pipeline.coordinator.record(1).content.attempt == "a1"
        assert sweep(storage, PIPELINE, min_age=timedelta(minutes=10)).deleted_files == 0
        assert len([*storage.list(paths.LEASES)]) == 1 and storage.stat(sst("under way")) is not None
    assert abs(storage_now_ms(storage) - time.time() * 1000) < 60_000 and storage.stat(paths.CLOCK) is None


def test_only_a_dry_run_takes_the_time_of_the_newest_file_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """That time may be long past, and a sweep or a removal of trials must not go by it."""
    storage = MemoryStorage(now_ms=iter((7, 5)).__next__)
    for path in ("a", "b"):
        storage.create(path, b"")
    monkeypatch.setattr(storage, "create", mock.Mock(side_effect=PermissionRefused("can't create")))
    assert storage_now_ms(storage, dry_run=True) == 7
    with pytest.raises(PermissionRefused):
        storage_now_ms(storage)


def test_a_query_that_asks_for_a_lease_gets_one_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = RealPipeline(tmp_path)
    pipeline.run(1, "a1", {"a": 1})
    options = {"path": str(tmp_path / PIPELINE), "state": "value", "hold": "2h"}
    assert [field.name for field in KeyedState(options).schema() if field.nullable] == ["expires_at"]
    (lease,) = pipeline.storage.list(paths.LEASES)
    assert paths.leased_id(lease.path) == (1, 7200)
    monkeypatch.setattr("cairn.data_sources.keyed_state.take_lease", lambda *args: None)
    with pytest.raises(UsageError, match=r"hold: Cairn can't write a lease to .*/leases\nAllow .* or leave out hold"):
        KeyedState(options).schema()


def test_a_log_that_cannot_be_read_leaves_no_lease() -> None:
    made = Clock()
    away = {1: Fault(error=StorageUnavailable("away"), when="before")}
    with pytest.raises(StorageUnavailable):
        take_lease(FaultyStorage(made.storage, away), 1, "a test")
    assert made.folder.paths(paths.LEASES) == set()
