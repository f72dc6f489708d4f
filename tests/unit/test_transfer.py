"""Parallel transfers: all files, or none and the first error."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from state_backend.adapters.local_storage import LocalStorage, write_verified
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint import parallel
from state_backend.shard.transfer import download_all, upload_all
from state_backend.values.errors import AlreadyExists, CorruptFile, StorageUnavailable, UnknownOutcome, UsageError
from state_backend.values.handles import Handle
from tests.support.faulty_storage import Fault, FaultyStorage, lost_answer_at


@pytest.fixture
def files(tmp_path: Path) -> list[tuple[str, Path]]:
    """Six files of random bytes, each with the path that it goes to."""
    pairs = []
    for number in range(6):
        local = tmp_path / "db" / f"{number:06}.sst"
        local.parent.mkdir(exist_ok=True)
        local.write_bytes(os.urandom(20_000 + number))
        pairs.append((f"shared/attempt/0-{number}.sst", local))
    return pairs


def stored(storage: MemoryStorage) -> list[str]:
    return [info.path for info in storage.list("")]


class SlowStorage(MemoryStorage):
    """Transfers wait until they are let go; counts those that run."""

    def __init__(self) -> None:
        super().__init__("memory://slow")
        self.go = threading.Event()
        self.running = 0
        self.most_running = 0
        self._count = threading.Lock()

    def _wait(self) -> None:
        with self._count:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        self.go.wait(10)
        with self._count:
            self.running -= 1

    def upload(self, path: str, local: Path) -> Handle:
        self._wait()
        return super().upload(path, local)

    def download(self, handle: Handle, destination: Path) -> None:
        self._wait()
        super().download(handle, destination)


@pytest.fixture
def slow() -> Iterator[SlowStorage]:
    storage = SlowStorage()
    yield storage
    storage.go.set()


@pytest.mark.parametrize("parallelism", [1, 5, 8])
def test_all_files_arrive_whole_and_in_order(files: list[tuple[str, Path]], tmp_path: Path, parallelism: int) -> None:
    """F3, F6: random files through several threads, each byte-equal to its local one, there and back."""
    storage = FaultyStorage(MemoryStorage(), {})
    handles = upload_all(storage, files, parallelism=parallelism)

    assert [handle.path for handle in handles] == [path for path, _ in files]
    for path, local in files:
        assert storage.inner.read(path) == local.read_bytes()
    assert len(storage.calls) == 6

    got = [tmp_path / f"restored-{number % 3}" / str(number) for number in range(6)]
    download_all(storage, list(zip(handles, got, strict=True)), parallelism=parallelism)
    assert [path.read_bytes() for path in got] == [local.read_bytes() for _, local in files]
    assert len(storage.calls) == 12


@pytest.mark.parametrize("failing", range(6))
@pytest.mark.parametrize("parallelism", [1, 4])
def test_the_first_upload_error_surfaces_and_nothing_is_left(
    files: list[tuple[str, Path]], failing: int, parallelism: int
) -> None:
    """F2, F4: the exact exception, unwrapped; what this call wrote is gone, what was there before is not."""
    inner = MemoryStorage()
    inner.create("shared/earlier/0-0.sst", b"of another attempt")
    error = OSError("this one")
    with pytest.raises(OSError, match="this one") as caught:
        upload_all(FaultyStorage(inner, {failing: Fault(error=error, when="before")}), files, parallelism=parallelism)

    assert caught.value is error
    assert error.__cause__ is None
    assert stored(inner) == ["shared/earlier/0-0.sst"]


def test_after_the_first_error_nothing_more_is_begun(files: list[tuple[str, Path]]) -> None:
    faulty = FaultyStorage(MemoryStorage(), {1: Fault(error=StorageUnavailable("full"), when="before")})
    with pytest.raises(StorageUnavailable, match="full"):
        upload_all(faulty, files, parallelism=1)
    assert faulty.calls == [("upload", files[0][0]), ("upload", files[1][0]), ("delete", files[0][0])]


def test_after_the_first_error_no_small_read_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(ThreadPoolExecutor):
        """Its caller learns of an error only when all parts have ended."""

        def map(self, fn: Callable[..., Any], *parts: Any, **_: Any) -> Iterator[Any]:
            futures = [self.submit(fn, *part) for part in zip(*parts, strict=True)]
            wait(futures)
            return (future.result() for future in futures)

    begun = []

    def read(item: int) -> None:
        begun.append(item)
        if item == 1:
            raise StorageUnavailable("full")

    monkeypatch.setattr(parallel, "ThreadPoolExecutor", Late)
    monkeypatch.setattr(parallel, "PARALLELISM", 1)
    with pytest.raises(StorageUnavailable, match="full"):
        parallel.at_once(read, range(24))  # one thread, three items at a time
    assert begun == [0, 1]


def test_a_file_of_someone_else_is_not_deleted(files: list[tuple[str, Path]]) -> None:
    storage = MemoryStorage()
    storage.create(files[3][0], b"theirs")
    with pytest.raises(AlreadyExists):
        upload_all(storage, files)
    assert stored(storage) == [files[3][0]]
    assert storage.read(files[3][0]) == b"theirs"


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_unknown_outcome_deletes_nothing(files: list[tuple[str, Path]], when: str) -> None:
    """F54: an ambiguous answer causes no deletes."""
    faulty = FaultyStorage(MemoryStorage(), lost_answer_at(3, when))  # type: ignore[arg-type]
    with pytest.raises(UnknownOutcome):
        upload_all(faulty, files, parallelism=1)
    assert {name for name, _ in faulty.calls} == {"upload"}
    assert isinstance(faulty.inner, MemoryStorage)
    assert stored(faulty.inner) == [path for path, _ in files[: 3 + (when == "after")]]


def test_files_that_cant_be_cleaned_up_are_noted_on_the_upload_error(files: list[tuple[str, Path]]) -> None:
    plan = {
        2: Fault(error=StorageUnavailable("the first"), when="before"),
        3: Fault(error=StorageUnavailable("no delete either"), when="before"),
    }
    inner = MemoryStorage()
    with pytest.raises(StorageUnavailable, match="the first") as caught:
        upload_all(FaultyStorage(inner, plan), files, parallelism=1)
    assert len(stored(inner)) == 1
    assert [files[0][0] in note and "no delete either" in note for note in caught.value.__notes__] == [True]


@pytest.mark.parametrize("parallelism", [1, 4])
def test_one_failed_download_removes_all_files(files: list[tuple[str, Path]], tmp_path: Path, parallelism: int) -> None:
    """F7, F8: one damaged file among them: all destinations gone, the original error, the storage still usable."""
    storage = MemoryStorage()
    handles = upload_all(storage, files)
    storage.delete(files[4][0])
    storage.create(files[4][0], b"damaged")
    (tmp_path / "out").mkdir()

    with pytest.raises(CorruptFile, match="0-4"):
        download_all(storage, [(h, tmp_path / "out" / str(n)) for n, h in enumerate(handles)], parallelism=parallelism)
    assert list((tmp_path / "out").iterdir()) == []
    download_all(storage, [(handles[0], tmp_path / "out" / "0")])
    assert (tmp_path / "out" / "0").read_bytes() == files[0][1].read_bytes()


def test_no_more_than_parallelism_run_at_once(slow: SlowStorage, files: list[tuple[str, Path]]) -> None:
    threading.Timer(0.2, slow.go.set).start()
    upload_all(slow, files, parallelism=3)
    assert slow.most_running == 3


@pytest.mark.parametrize("lost", [{}, lost_answer_at(1, "after")])
def test_running_transfers_end_before_the_first_error_is_raised(slow: SlowStorage, files: Any, lost: Any) -> None:
    """F2: a file that is written after the clean-up would stay for ever. F54: only a lost answer leaves files."""
    faulty = FaultyStorage(slow, {2: Fault(error=StorageUnavailable("early"), when="before"), **lost})
    threading.Timer(0.2, slow.go.set).start()
    with pytest.raises(StorageUnavailable, match="early"):
        upload_all(faulty, files, parallelism=3)
    assert (slow.running, len(stored(slow))) == (0, 2 * len(lost))


def test_interrupts_do_not_abandon_running_transfers(
    slow: SlowStorage, files: list[tuple[str, Path]], tmp_path: Path
) -> None:
    """F9: interrupted five times while files are on their way, it still waits for them, then cleans up."""
    handles = [slow.create(path, local.read_bytes()) for path, local in files]
    main = threading.get_ident()
    # PySpark, if a test before this one used it, has put a handler of its own in the place of Python's.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        while slow.running < 2:
            time.sleep(0.01)
        for _ in range(5):
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.1)
        slow.go.set()

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        download_all(slow, [(h, tmp_path / "out" / str(n)) for n, h in enumerate(handles)], parallelism=2)
    assert slow.go.is_set()
    assert slow.running == 0
    assert list((tmp_path / "out").iterdir()) == []
    interrupter.join()
    signal.signal(signal.SIGINT, before)


def test_a_full_worker_disk_is_not_reported_as_a_full_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said to move the root to a larger disk, which does not help."""
    storage = LocalStorage(tmp_path / "root")
    handle = storage.create("a.sst", b"state")

    def full(*_: Any, **_more: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("state_backend.adapters.local_storage.verify_chunks", full)
    with pytest.raises(StorageUnavailable) as refused:
        write_verified([b"state"], handle, tmp_path / "out" / "a.sst", url=storage.url)
    assert "root" not in str(refused.value).partition("; ")[2]
    assert f"the local disk of {socket.gethostname()} is full (not the storage); " in str(refused.value)
    assert "set TMPDIR to a folder with more" in str(refused.value)


def test_a_parallelism_of_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        upload_all(MemoryStorage(), [], parallelism=0)
