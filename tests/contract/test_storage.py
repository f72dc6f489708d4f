"""The contract of the storage port, the same for every adapter; then what only one adapter can show."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as changed
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import google_crc32c
import pytest
from google.cloud.storage import Blob

from cairn_operators.check_dag_arguments import check_code_and_root
from state_backend.adapters import gcs_storage
from state_backend.adapters.azure_storage import AzureCloud
from state_backend.adapters.gcs_storage import GcsCloud
from state_backend.adapters.local_storage import CHUNK_BYTES, LocalStorage
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.adapters.object_store import ChecksumStore, Found, Interrupted, LostUpload, ObjectStore, compared
from state_backend.adapters.open_storage import folders_in, join_url, open_storage, remove_all
from state_backend.adapters.s3_storage import S3Cloud
from state_backend.adapters.schemes import is_over_network
from state_backend.ports.storage import Storage
from state_backend.values.errors import (
    AlreadyExists,
    CairnError,
    CorruptFile,
    NotFound,
    PreconditionFailed,
    StorageUnavailable,
    UnknownOutcome,
    UsageError,
)
from state_backend.values.handles import FileInfo, Handle
from tests.support.azure_server import BUCKET as AZURE_BUCKET
from tests.support.azure_server import azure_server
from tests.support.faulty_proxy import FaultyProxy
from tests.support.faulty_storage import FaultyStorage
from tests.support.gcs_server import BUCKET, GcsServer, gcs_server
from tests.support.s3_server import BUCKET as S3_BUCKET
from tests.support.s3_server import SEAWEEDFS, S3Server, s3_server
from tests.support.storage_calls import generation, paths


def memory(_: Path) -> Storage:
    return MemoryStorage("memory://contract")


def memory_below(_: Path) -> Storage:
    whole = MemoryStorage("memory://contract")
    whole.create("elsewhere", b"not below")
    return whole.below("pipeline")


def local(folder: Path) -> Storage:
    return LocalStorage(folder / "made" / "by" / "first write")


def gcs(_: Path) -> Storage:
    return ObjectStore(GcsCloud(BUCKET, f"contract/{uuid4().hex}"))


def s3(_: Path) -> Storage:
    return ChecksumStore(S3Cloud(S3_BUCKET, f"contract/{uuid4().hex}"))


def azure(_: Path) -> Storage:
    return ChecksumStore(AzureCloud(AZURE_BUCKET, f"contract/{uuid4().hex}"))


def faultless(folder: Path) -> Storage:
    return FaultyStorage(local(folder), {})


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[GcsServer]:
    """One for all; every storage on it has a prefix of its own."""
    with gcs_server() as server:
        yield server


@pytest.fixture(scope="module")
def amazon() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def azurite() -> Iterator[FaultyProxy]:
    with azure_server() as server:
        yield server


GCS = pytest.param(gcs, marks=pytest.mark.gcs)
S3 = pytest.param(s3, marks=pytest.mark.s3)
AZURE = pytest.param(azure, marks=pytest.mark.azure)


@pytest.fixture(autouse=True)
def _server_if_marked(request: pytest.FixtureRequest) -> None:
    for marker, server in (("s3", "amazon"), ("azure", "azurite")):
        if request.node.get_closest_marker(marker) is not None:
            request.getfixturevalue(server)


@pytest.fixture(params=[memory, memory_below, local, GCS, S3, AZURE, faultless])
def storage(request: pytest.FixtureRequest, tmp_path: Path, _server_if_marked: None) -> Storage:
    make: Callable[[Path], Storage] = request.param
    return make(tmp_path / "storage")


@pytest.fixture(params=[memory, local, GCS, S3, AZURE])
def opened(
    request: pytest.FixtureRequest, tmp_path: Path, _server_if_marked: None, monkeypatch: pytest.MonkeyPatch
) -> Storage:
    """What `open_storage` opens."""
    storage: Storage = request.param(tmp_path)
    monkeypatch.setattr("state_backend.adapters.open_storage.open_storage", lambda url: storage)
    return storage


def test_folders_are_listed_without_their_files(opened: Storage) -> None:
    for path in ("a/x/1", "a/x/2", "a/y/3", "b/4", "c"):
        opened.create(path, b"")
    assert [name for name in folders_in(opened.url, "") if name[0] != "."] == ["a", "b"]
    assert folders_in(opened.url, "a") == ["x", "y"]
    assert folders_in(opened.url, "c/d") == []


def outcome(call: Callable[[], object]) -> type[CairnError] | None:
    try:
        call()
    except CairnError as error:
        return type(error)
    return None


# --- create, read, stat, list, delete ---------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000])
def test_what_is_created_is_read_back_and_named_by_its_handle(storage: Storage, data: bytes) -> None:
    handle = storage.create("checkpoints/00000000000000000001.json", data)

    assert handle == Handle(
        path="checkpoints/00000000000000000001.json", size_bytes=len(data), crc32c=google_crc32c.value(data)
    )
    assert storage.read(handle.path) == data
    for offset in {0, len(data) // 2, len(data) - 1} if data else ():
        assert storage.read(handle.path, offset=offset) == data[offset:]
    info = storage.stat(handle.path)
    assert info is not None
    assert (info.path, info.size_bytes) == (handle.path, len(data))
    assert info.crc32c in (None, handle.crc32c)
    assert abs(info.modified_ms - time.time() * 1000) < 600_000


def test_create_never_overwrites(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "second").write_bytes(b"second")
    storage.create("a/record", b"first")

    with pytest.raises(AlreadyExists, match="a/record"):
        storage.create("a/record", b"second")
    with pytest.raises(AlreadyExists, match="a/record"):
        storage.upload("a/record", tmp_path / "second")
    assert storage.read("a/record") == b"first"
    assert paths(storage, "") == ["a/record"]


def winner_of(count: int, write: Callable[[int], object], refused: type[CairnError]) -> int:
    """Writers that begin at once: the one that wins, while all others are refused."""
    start = threading.Barrier(count)

    def attempt(writer: int) -> object:
        start.wait()
        return outcome(lambda: write(writer))

    with ThreadPoolExecutor(count) as pool:
        outcomes = list(pool.map(attempt, range(count)))
    assert (outcomes.count(None), outcomes.count(refused)) == (1, count - 1)
    return outcomes.index(None)


def test_of_many_creators_exactly_one_wins(storage: Storage) -> None:
    """S13: two writers of one version, on a store that does not overwrite."""
    for path in (f"checkpoints/{n}" for n in range(20)):
        won = winner_of(8, lambda writer, path=path: storage.create(path, b"%d" % writer), AlreadyExists)  # type: ignore[misc]
        assert storage.read(path) == b"%d" % won


def test_memory_storage_checks_and_writes_in_one_atomic_step(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(dict[str, Any]):
        def __contains__(self, key: object) -> bool:
            return self.get(key) is not None

        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            time.sleep(0.02)  # meanwhile all others look
            return found

        def __getitem__(self, key: str) -> Any:
            return self.get(key)

    storage = MemoryStorage()
    monkeypatch.setattr(storage, "_files", Slow())
    winner_of(4, lambda writer: storage.create("a", b"%d" % writer), AlreadyExists)
    known = generation(storage, "a")
    winner_of(4, lambda writer: storage.replace("a", b"%d" % writer, generation=known), PreconditionFailed)
    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(lambda _: storage.delete("a"), range(4))) == [False, False, False, True]


def test_absent_files_are_reported_as_absent_by_every_operation(storage: Storage, tmp_path: Path) -> None:
    storage.create("folder/file", b"x")
    for path in ("nothing", "folder/nothing", "nowhere/nothing", "folder"):
        assert storage.stat(path) is None
        assert storage.delete(path) is False
        assert storage.delete(path, generation=7) is False
        with pytest.raises(NotFound, match=path):
            storage.read(path)
        with pytest.raises(NotFound, match=path):
            storage.replace(path, b"y", generation=7)
        with pytest.raises(NotFound, match=path):
            storage.download(Handle(path=path, size_bytes=0, crc32c=0), tmp_path / "got")
    assert not (tmp_path / "got").exists()


def test_list_takes_a_string_prefix_and_sorts_by_path(storage: Storage) -> None:
    """F51: with zero-padded ids the order of the names is the order of the numbers."""
    everything = ["a", "b-c/1", "b/1", "b/10", "b/2", "b/d/e", "b/d0", "bc", "checkpoints/02", "checkpoints/10", "ü/ö"]
    for path in reversed(everything):
        storage.create(path, b"12")

    if isinstance(getattr(storage, "cloud", None), S3Cloud) and SEAWEEDFS:
        everything.sort(key=lambda path: path.split("/"))
    assert paths(storage, "") == everything
    for prefix in ("b", "b/", "b/1", "b/d", "b/d/", "checkpoints/", "check", "b/x", "x/", "ü"):
        assert paths(storage, prefix) == [path for path in everything if path.startswith(prefix)], prefix
    assert list(storage.list("")) == [storage.stat(path) for path in everything]


def test_delete_removes_one_file_and_never_its_neighbours(storage: Storage) -> None:
    """F27, F41: deleting one file never deletes its parent; a missing file is no error."""
    storage.create("shared/a/1", b"1")
    storage.create("shared/a/2", b"2")

    assert storage.delete("shared/a/1") is True
    assert storage.delete("shared/a/1") is False
    assert paths(storage, "") == ["shared/a/2"]
    assert storage.delete("shared/a/2") is True
    assert paths(storage, "") == []
    storage.create("shared/a/2", b"again")
    assert storage.read("shared/a/2") == b"again"


# --- generations --------------------------------------------------------------------------------------------------------


def test_replace_and_delete_match_the_generation(storage: Storage) -> None:
    storage.create("record", b"head")
    first = generation(storage, "record")

    assert storage.replace("record", b"tombstone", generation=first).size_bytes == 9
    assert storage.read("record") == b"tombstone"
    second = generation(storage, "record")
    assert second != first
    with pytest.raises(PreconditionFailed, match="record"):
        storage.replace("record", b"again", generation=first)
    with pytest.raises(PreconditionFailed, match="record"):
        storage.delete("record", generation=first)
    assert storage.read("record") == b"tombstone"
    assert storage.delete("record", generation=second) is True
    assert storage.stat("record") is None


def test_generations_are_never_reused(storage: Storage) -> None:
    """Not by replacing, and not by deleting and creating, however fast. On S3, the same bytes have the same generation."""
    seen = []
    for n in range(50):
        storage.create("record", b"%d" % n)
        seen.append(generation(storage, "record"))
        storage.replace("record", b"-%d" % n, generation=seen[-1])
        seen.append(generation(storage, "record"))
        storage.delete("record")
    assert len(set(seen)) == 100


def test_of_many_concurrent_replaces_exactly_one_succeeds(storage: Storage) -> None:
    storage.create("record", b"start")
    for n in range(20):
        replaced = partial(storage.replace, "record", generation=generation(storage, "record"))
        won = winner_of(6, lambda writer, n=n, it=replaced: it(b"%d %d" % (n, writer)), PreconditionFailed)  # type: ignore[misc]
        assert storage.read("record") == b"%d %d" % (n, won)


# --- upload and download ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_upload_and_download_are_inverse(storage: Storage, tmp_path: Path, size_bytes: int) -> None:
    """F66: below, at and above the size of a chunk."""
    data = os.urandom(size_bytes)
    (tmp_path / "000017.sst").write_bytes(data)

    handle = storage.upload("shared/attempt/0-1.sst", tmp_path / "000017.sst")
    storage.download(handle, tmp_path / "new" / "folder" / "000017.sst")

    assert handle == Handle(path="shared/attempt/0-1.sst", size_bytes=size_bytes, crc32c=google_crc32c.value(data))
    assert storage.read(handle.path) == data
    assert (tmp_path / "new" / "folder" / "000017.sst").read_bytes() == data
    assert [file.name for file in (tmp_path / "new" / "folder").iterdir()] == ["000017.sst"]
    assert (tmp_path / "000017.sst").read_bytes() == data


@pytest.mark.parametrize("size_bytes", [0, 2 * CHUNK_BYTES + 1])
@pytest.mark.parametrize("from_", [memory_below, local, GCS, S3, faultless])
def test_a_copy_does_not_depend_on_its_source(
    storage: Storage, tmp_path: Path, from_: Callable[[Path], Storage], size_bytes: int
) -> None:
    data, source = os.urandom(size_bytes), from_(tmp_path / "source")
    handle = source.create("shared/one/0.sst", data)

    copied = storage.copy_from(source, handle, "shared/two/1.sst")
    assert copied == changed(handle, path="shared/two/1.sst")
    with pytest.raises(AlreadyExists, match=r"shared/two/1\.sst"):
        storage.copy_from(source, handle, "shared/two/1.sst")
    source.delete(handle.path)
    assert storage.read(copied.path) == data
    storage.download(copied, tmp_path / "got")
    with pytest.raises(NotFound, match=r"shared/one/0\.sst"):
        storage.copy_from(source, handle, "shared/two/2.sst")
    assert paths(storage, "shared/") == ["shared/two/1.sst"]


def test_copied_file_gets_the_time_of_the_copy(storage: Storage, tmp_path: Path) -> None:
    """By its age a sweep tells an attempt under way from what a dead one left. On a disk a copy is a link to the old file."""
    source = local(tmp_path / "source")
    handle = source.create("a", b"state")
    (file,) = (tmp_path / "source").rglob("a")
    os.utime(file, (0, 0))
    storage.copy_from(source, handle, "b")
    (info,) = storage.list("")
    assert storage.stat("b") == info
    assert abs(info.modified_ms - time.time() * 1000) < 600_000


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_modification_times_do_not_depend_on_the_clock_of_the_host(
    storage: Storage, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    if "memory" in request.node.callspec.id:
        pytest.skip("its clock is that of its only process")
    now_s, now_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now_s() + ahead_s)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + ahead_s * 10**9)
    storage.create("a", b"1")
    first = storage.stat("a")
    assert first is not None
    storage.replace("a", b"2", generation=first.generation)
    for info in (first, storage.stat("a"), *storage.list("")):
        assert info is not None and abs(info.modified_ms - now_s() * 1000) < 60_000


@pytest.mark.parametrize("from_", [memory_below, local, GCS, S3, AZURE])
def test_a_damaged_file_is_not_copied(storage: Storage, tmp_path: Path, from_: Callable[[Path], Storage]) -> None:
    source = from_(tmp_path / "source")
    handle = changed(source.create("a", b"something else"), crc32c=google_crc32c.value(b"what was acked"))
    with pytest.raises(CorruptFile, match=f"expected 14 bytes with crc32c {handle.crc32c:08x}"):
        storage.copy_from(source, handle, "b")
    assert paths(storage, "") == []


def test_download_replaces_what_was_there(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "got").write_bytes(b"something much longer")
    storage.download(storage.create("a", b"new"), tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == b"new"


@pytest.mark.parametrize("stored", [b"sst bytes!", b"sst byte", b"", b"sst bytes and more"])
def test_a_damaged_file_is_refused_and_nothing_is_left(storage: Storage, tmp_path: Path, stored: bytes) -> None:
    """S32: a flipped byte, a truncated file, an empty one, a longer one: the error names expected and found size and
    crc, and the destination keeps what it had."""
    handle = storage.create("shared/x.sst", b"sst bytes?")
    storage.delete("shared/x.sst")
    storage.create("shared/x.sst", stored)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").write_bytes(b"before")

    for name in ("absent", "kept"):
        with pytest.raises(CorruptFile) as caught:
            storage.download(handle, tmp_path / "out" / name)
    for part in (
        "shared/x.sst", "expected 10 bytes", f"found {len(stored)} bytes",
        f"{handle.crc32c:08x}", f"{google_crc32c.value(stored):08x}",
    ):  # fmt: skip
        assert part in str(caught.value)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["kept"]
    assert (tmp_path / "out" / "kept").read_bytes() == b"before"


def test_download_checks_size_and_crc_independently(storage: Storage, tmp_path: Path) -> None:
    handle = storage.create("a", b"data")
    for wrong in (changed(handle, crc32c=handle.crc32c ^ 1), changed(handle, size_bytes=5)):
        with pytest.raises(CorruptFile):
            storage.download(wrong, tmp_path / "got")
    assert not list(tmp_path.glob("*got*"))


def test_absent_upload_source_and_blocked_download_target_are_reported(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for absent in (tmp_path / "absent", tmp_path / "folder"):
        with pytest.raises(NotFound, match=absent.name):
            storage.upload("a", absent)
    assert paths(storage, "") == []
    handle = storage.create("a", b"data")
    for blocked in (tmp_path / "file" / "got", tmp_path / "folder"):
        with pytest.raises(StorageUnavailable, match=str(blocked)):
            storage.download(handle, blocked)
    assert not list((tmp_path / "folder").iterdir())


def test_a_file_in_the_making_is_invisible(storage: Storage, tmp_path: Path) -> None:
    """S12, S24: until the last byte is there nothing is, and another writer may take the name meanwhile."""
    os.mkfifo(tmp_path / "slow")
    with ThreadPoolExecutor(2) as pool:
        uploads = [pool.submit(storage.upload, "slow", tmp_path / "slow")]
        with (tmp_path / "slow").open("wb") as pipe:
            pipe.write(b"half")
            pipe.flush()
            time.sleep(0.05)
            assert paths(storage, "") == []
            assert storage.stat("slow") is None
            assert outcome(lambda: storage.read("slow")) is NotFound
            storage.create("slow", b"overtaken")
        with pytest.raises(AlreadyExists):
            uploads[0].result()
    assert storage.read("slow") == b"overtaken"
    assert paths(storage, "") == ["slow"]


# --- paths --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/abs",
        "a//b",
        "a/",
        ".",
        "..",
        "a/../b",
        "./a",
        "a/.",
        "a\\b",
        "a\0b",
        "a\nb",
        ".tmp",
        "a/.tmp/b",
        "\ud800",
    ],
)
def test_paths_that_leave_the_root_or_mean_nothing_are_refused(storage: Storage, tmp_path: Path, path: str) -> None:
    for call in (
        lambda: storage.read(path),
        lambda: storage.create(path, b""),
        lambda: storage.replace(path, b"", generation=0),
        lambda: storage.upload(path, tmp_path / "absent"),
        lambda: storage.download(Handle(path=path, size_bytes=0, crc32c=0), tmp_path / "got"),
        lambda: storage.copy_from(storage, Handle(path="a", size_bytes=0, crc32c=0), path),
        lambda: storage.stat(path),
        lambda: storage.delete(path),
    ):
        assert outcome(call) is UsageError
    assert paths(storage, "") == []


@pytest.mark.parametrize("prefix", ["/", "/abs", "../", "a/../b", "a//", "a\\", "\0", ".tmp/"])
def test_prefixes_that_leave_the_root_are_refused_at_once(storage: Storage, prefix: str) -> None:
    with pytest.raises(UsageError):
        storage.list(prefix)


def test_remove_all_deletes_every_file_and_returns_number_and_bytes(opened: Storage) -> None:
    opened.create("a/x", b"12")
    opened.create("b", b"3")
    assert remove_all(opened.url, dry_run=True) == (2, 3) and paths(opened, "") == ["a/x", "b"]
    assert remove_all(opened.url) == (2, 3) and paths(opened, "") == []
    assert remove_all(opened.url) == (0, 0)


# --- opening --------------------------------------------------------------------------------------------------------------


def test_local_path_and_file_url_open_the_same_storage(tmp_path: Path) -> None:
    open_storage(f"file://{tmp_path}").create("p/a", b"1")
    below = open_storage(join_url(str(tmp_path), "p"))
    assert below.read("a") == b"1"
    assert below.url == f"file://{tmp_path}/p"
    assert open_storage(below.url).read("a") == b"1"


@pytest.mark.parametrize(
    ("url", "over_network"),
    [
        ("gs://bucket/a", True),
        ("s3://bucket/a", True),
        ("file:///a", False),
        ("/a", False),
        ("memory://a", False),
        ("{{ var.value.root }}", False),
    ],
)
def test_bucket_urls_count_as_network_storage_and_local_urls_do_not(url: str, over_network: bool) -> None:
    assert is_over_network(url) == over_network


def test_memory_urls_with_the_same_name_share_one_storage(request: pytest.FixtureRequest) -> None:
    name = f"memory://{request.node.name}"
    open_storage(name).create("p/a", b"1")
    assert open_storage(join_url(name, "p")).read("a") == b"1"
    assert open_storage(join_url(name, "p")).url == f"{name}/p"
    assert paths(open_storage(join_url(name, "p")), "") == ["a"]
    assert paths(open_storage(f"{name}-other"), "") == []


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("gs:///prefix", "gs://bucket/prefix"),
        ("gs://bucket/a/../b", "'..'"),
        ("gs://bucket//a", "not a storage path"),
        ("s3://bucket/a/../b", "'..'"),
        ("s3://buc ket", "not a bucket"),
        ("wasb://bucket", "file:///absolute/path"),
        ("relative/path", "file:///absolute/path"),
        ("file://host/path", "file:///absolute/path"),
        ("file:///a/../b", "'..'"),
        ("", "file:///absolute/path"),
    ],
)
def test_urls_that_nothing_serves_are_refused(url: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        open_storage(url)


def test_a_url_is_joined_and_does_not_leave_its_root() -> None:
    assert join_url("file:///", "a", "b") == "file:///a/b"
    assert join_url("/data/", "a") == "/data/a"
    with pytest.raises(UsageError):
        join_url("/data", "..")


@pytest.mark.parametrize(
    ("root", "says"),
    [
        ("", "is the variable unset"),
        ("s3://", "s3://bucket/prefix"),
        ("gs://", "gs://bucket/prefix"),
        ("memory://", "not a storage URL"),
        ("relative", "file:///absolute/path"),
        ("s3://AKIAEXAMPLE:pl4nt3d@bucket/state", "contains credentials"),
        ("https://account.blob.example/c?sig=pl4nt3d", "contains credentials"),
    ],
)
def test_a_root_without_a_folder_or_with_credentials_is_refused_before_a_pipeline_s_name_is_added(
    root: str, says: str
) -> None:
    for opened in (lambda: join_url(root, "clicks"), lambda: open_storage(root), lambda: folders_in(root, "")):
        with pytest.raises(UsageError, match=says) as refused:
            opened()
        assert "pl4nt3d" not in str(refused.value)
    with pytest.raises(ValueError, match=says) as by_dag:
        check_code_and_root("d", "m:P", root)
    assert "pl4nt3d" not in str(by_dag.value)


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="is a file, but"):
            folders_in(f"file://{root}", "")
    assert folders_in(f"file://{tmp_path}/absent/below", "") == []


def test_an_object_without_a_size_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some servers leave out of an object's metadata what is 0."""

    def size(blob: Blob) -> int | None:
        return int(blob._properties["size"]) or None if "size" in blob._properties else None

    monkeypatch.setattr(Blob, "size", property(size))
    storage = ObjectStore(GcsCloud(BUCKET, f"contract/{uuid4().hex}"))
    assert storage.create("empty", b"").size_bytes == 0
    (listed,) = storage.list("")
    assert listed.size_bytes == 0
    assert storage.read("empty") == b""


def test_a_write_whose_end_is_not_known_is_an_unknown_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk over a network that answers with an error of input and output may have done it all the same."""
    storage = LocalStorage(tmp_path)
    storage.create("before", b"")

    def refuse(number: int, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    for number in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT):
        for name in ("link", "rename"):
            monkeypatch.setattr(f"state_backend.adapters.local_storage.os.{name}", partial(refuse, number))
        with pytest.raises(UnknownOutcome, match=rf"can't tell whether this was done: .*{os.strerror(number)}"):
            storage.create("a", b"data")


def test_error_for_missing_google_client_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n == "google.cloud.storage" or n.startswith("google.cloud.storage.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "google.cloud.storage", None)
    monkeypatch.delitem(sys.modules, "state_backend.adapters.gcs_storage")
    with pytest.raises(
        UsageError, match=r"gs://bucket needs Google's client.*install it there: pip install '.*whl\[gcs\]'"
    ):
        open_storage("gs://bucket")


# --- answers that Google's server does not give, by its documentation ------------------------------------------------------------


def google_answers(status: int, **headers: str) -> Any:
    """Clients, or a storage with a client, whose every request is answered so."""
    answer = SimpleNamespace(status_code=status, headers=headers, close=lambda: None)
    session = SimpleNamespace(put=lambda *_, **__: answer, get=lambda *_, **__: answer)
    client = SimpleNamespace(_http=session, api_endpoint="")
    return SimpleNamespace(of_this_process=lambda: client, _client=lambda: client)


def test_read_with_a_wrong_checksum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = gcs(Path())
    storage.create("a", b"data")
    monkeypatch.setattr("state_backend.adapters.object_store.google_crc32c.value", lambda _: 5)
    with pytest.raises(
        StorageUnavailable, match=r"can't read 'a' of gs://.*: the received bytes have crc32c 00000005, .*try again"
    ):
        storage.read("a")


def test_replacement_stored_with_the_wrong_size_is_an_unknown_outcome() -> None:
    """What was there before is gone, so that nothing can be taken back."""
    storage: Any = gcs(Path())
    handle = Handle(path="a", size_bytes=4, crc32c=1)
    with pytest.raises(
        UnknownOutcome, match=r"expected 4 bytes .*, the server has 3 bytes .*; check the file before you go on"
    ):
        other = FileInfo(path="a", size_bytes=3, generation=8, modified_ms=0, crc32c=1)
        compared(storage.cloud, Found(other, other.crc32c), handle, 7, "replace 'a'")


def test_upload_that_the_server_stored_only_partly_is_reported_as_lost() -> None:
    session = gcs_storage._Session(google_answers(308, Range="bytes=0-1"), "url")
    session._at = 4
    with pytest.raises(Interrupted, match="stored only a part"):
        session.send(b"data", False, 1.0)
    with pytest.raises(LostUpload):
        session.send(b"data", False, 1.0)


def test_a_download_that_begins_anew_in_the_middle_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    storage: Any = gcs(Path())
    monkeypatch.setattr(storage.cloud, "_clients", google_answers(200))
    with pytest.raises(StorageUnavailable, match="the server can't continue the interrupted download; try again"):
        storage.read("a", offset=3)
