"""The host's cache of immutable files: hits are whole, misses are harmless, and nothing else can come of it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.adapters.rocks import EngineOptions, RocksStore
from state_backend.shard import file_cache
from state_backend.shard.file_cache import FileCache, damage_of_copies, open_cache
from state_backend.shard.restore import restore_shard
from state_backend.values.errors import CorruptFile, DamagedCopy
from state_backend.values.handles import Handle
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.records import ShardManifest
from tests.support.faulty_storage import FaultyStorage
from tests.support.shards import snapshot_of

URL = "file:///data/p"


def handle_of(data: bytes, path: str = "shared/a/0-0-0.sst") -> Handle:
    return Handle(path=path, size_bytes=len(data), crc32c=google_crc32c.value(data))


class Host:
    """A cache, and a folder beside it to fetch into."""

    def __init__(self, folder: Path, limit_bytes: int = 10_000) -> None:
        self.folder = folder / "cache"
        self.cache = FileCache(self.folder, limit_bytes)
        self.work = folder / "work"
        self.work.mkdir()
        self.fetched = 0

    def keep(self, data: bytes, path: str = "shared/a/0-0-0.sst", url: str = URL) -> Handle:
        local = self.work / f"kept-{len(list(self.work.iterdir()))}"
        local.write_bytes(data)
        self.cache.keep(url, [(handle_of(data, path), local)])
        return handle_of(data, path)

    def get(self, handle: Handle, url: str = URL) -> bytes | None:
        """The bytes of a hit, or None."""
        self.fetched += 1
        destination = self.work / f"fetched-{self.fetched}"
        if self.cache.link(url, handle, destination):
            return destination.read_bytes()
        assert not destination.exists()
        return None

    def entries(self) -> list[Path]:
        return sorted(self.folder.iterdir())


def sound_files(folder: Path) -> list[Path]:
    """The cached files, each of which is what its name says."""
    cached = [path for path in folder.iterdir() if not path.name.startswith(".")]
    for path in cached:
        assert path.name.endswith(f"-{google_crc32c.value(path.read_bytes()):08x}")
    return cached


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def failing_link(error_number: int) -> Callable[..., None]:
    def link(*_: object, **__: object) -> None:
        raise OSError(error_number, os.strerror(error_number))

    return link


def test_a_file_that_was_kept_is_linked(host: Host) -> None:
    handle = host.keep(b"state")
    assert host.get(handle) == b"state"
    (entry,) = host.entries()
    assert entry.stat().st_nlink == 3


def test_a_file_that_was_never_cached_is_a_miss(host: Host) -> None:
    assert host.get(handle_of(b"state")) is None
    host.keep(b"state")
    assert host.get(handle_of(b"state", "shared/a/0-0-1.sst")) is None


def test_files_of_other_roots_paths_or_contents_are_separate_cache_entries(host: Host) -> None:
    """Two pipelines with one attempt and name, two shards of one pipeline, two attempts at one file."""
    same = "shared/a/0-0-0.sst"
    kept = [
        (host.keep(b"of p", same), URL, b"of p"),
        (host.keep(b"of q", same, "file:///data/q"), "file:///data/q", b"of q"),
        (host.keep(b"shard", "shared/a/1-0-0.sst"), URL, b"shard"),
        (host.keep(b"other bytes", same), URL, b"other bytes"),
    ]
    assert [host.get(handle, url) for handle, url, _ in kept] == [data for *_, data in kept]
    assert len(host.entries()) == 4


@pytest.mark.parametrize("damage", ["flip", "truncate", "grow", "empty"])
def test_a_cached_file_modified_in_place_is_a_miss_and_is_removed(host: Host, damage: str) -> None:
    """Whichever of its links it was written through."""
    handle = host.keep(b"state of a shard")
    with (host.work / "kept-0").open("r+b") as file:
        if damage == "flip":
            file.seek(3)
            file.write(b"X")
        elif damage == "grow":
            file.seek(0, os.SEEK_END)
            file.write(b"more")
        else:
            file.truncate(5 if damage == "truncate" else 0)
    assert host.get(handle) is None
    assert host.entries() == []


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    host = Host(tmp_path, limit_bytes=300)
    handles = [host.keep(bytes([n]) * 100, f"shared/{n}/0-0-0.sst") for n in range(3)]
    assert host.get(handles[0]) is not None
    handles.append(host.keep(b"3" * 100, "shared/3/0-0-0.sst"))
    assert [host.get(handle) is not None for handle in handles] == [True, False, True, True]


@pytest.mark.long("seconds", runs_in="ci")
def test_the_number_of_cached_files_is_limited(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not exactly: one insertion in some looks how many there are."""
    monkeypatch.setattr(file_cache, "_MOST_FILES", 640)
    looks = []
    evict = FileCache._evict
    monkeypatch.setattr(FileCache, "_evict", lambda *args: (looks.append(1), evict(*args)))
    for n in range(1000):
        host.keep(str(n).encode(), f"shared/{n}/0-0-0.sst")
    assert 600 <= len(host.entries()) <= 700
    assert 60 <= len(looks) <= 180


def test_a_file_beyond_the_limit_is_not_kept(tmp_path: Path) -> None:
    host = Host(tmp_path, limit_bytes=300)
    small = host.keep(b"small")
    assert host.get(host.keep(b"x" * 301, "shared/b/0-0-0.sst")) is None
    assert host.get(small) == b"small"


def test_half_of_the_free_disk_is_left_alone(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1000, 900, 100))
    monkeypatch.setattr(file_cache, "_MOST_FILES", 64)  # every insertion looks at all
    handles = [host.keep(bytes([n]) * 100, f"shared/{n}/0-0-0.sst") for n in range(3)]
    assert [host.get(handle) is not None for handle in handles] == [False, False, True]


def test_an_evicted_file_stays_readable_through_its_other_hard_links(tmp_path: Path) -> None:
    host = Host(tmp_path, limit_bytes=100)
    handle = host.keep(b"1" * 100)
    assert host.cache.link(URL, handle, host.work / "in use")
    host.keep(b"2" * 100, "shared/b/0-0-0.sst")
    assert host.get(handle) is None
    assert (host.work / "in use").read_bytes() == b"1" * 100


@pytest.mark.parametrize("error_number", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_where_links_do_not_work_files_are_copied(
    host: Host, monkeypatch: pytest.MonkeyPatch, error_number: int
) -> None:
    monkeypatch.setattr(os, "link", failing_link(error_number))
    handle = host.keep(b"state")
    assert host.get(handle) == b"state"
    (entry,) = host.entries()
    assert entry.stat().st_nlink == 1


def test_copies_into_and_out_of_the_cache_are_verified_by_checksum(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", failing_link(errno.EXDEV))
    local = host.work / "local"
    local.write_bytes(b"STATE")
    host.cache.keep(URL, [(handle_of(b"state"), local)])
    assert host.entries() == []
    handle = host.keep(b"state")
    (entry,) = host.entries()
    times = entry.stat()
    entry.write_bytes(b"STATE")
    os.utime(entry, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert host.get(handle) is None
    assert host.entries() == []


@pytest.mark.parametrize("failing", ["link", "utime"])
def test_a_failed_write_to_the_cache_is_a_miss_and_no_error(
    host: Host, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, failing, failing_link(errno.ENOSPC))
        handle = host.keep(b"state")
        assert host.get(handle) is None and host.entries() == []
    handle = host.keep(b"state")
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", failing_link(errno.ENOSPC))
        assert host.get(handle) is None
    assert host.get(handle) == b"state"


def test_a_copy_that_fails_on_a_full_disk_leaves_no_partial_file(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", failing_link(errno.EXDEV))

    def half(source: Path, destination: Path) -> None:
        destination.write_bytes(b"ha")
        raise OSError(errno.ENOSPC, "No space left on device")

    handle = host.keep(b"half")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", half)
        host.keep(b"more", "shared/b/0-0-0.sst")
        assert host.get(handle) is None
    assert len(host.entries()) == 1
    assert host.get(handle) == b"half"


def test_partial_files_of_a_crash_are_removed_after_an_hour(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_cache, "_MOST_FILES", 64)  # every insertion looks at all
    host.keep(b"state")
    old, new = host.folder / ".1.part", host.folder / ".2.part"
    for leftover in (old, new):
        leftover.write_bytes(b"half")
    os.utime(old, (0, 0))
    host.keep(b"more", "shared/b/0-0-0.sst")
    assert (old.exists(), new.exists()) == (False, True)


def test_a_cache_folder_that_is_a_symbolic_link_is_not_used(tmp_path: Path) -> None:
    """In a shared temp folder anybody could lay a link, or make the folder and keep it."""
    host = Host(tmp_path)
    handle = host.keep(b"state")
    host.folder.rename(tmp_path / "elsewhere")
    host.folder.symlink_to(tmp_path / "elsewhere")
    assert host.get(handle) is None
    host.keep(b"more", "shared/b/0-0-0.sst")
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


def test_eviction_does_not_follow_a_cache_folder_that_became_a_symbolic_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the temp folder lets others rename; a leftover there looks like somebody's download."""
    host, victims = Host(tmp_path, limit_bytes=200), tmp_path / "victims"
    host.keep(b"0" * 100, "shared/0/0-0-0.sst")
    (host.folder / ".old.part").write_bytes(b"half")
    shutil.copytree(host.folder, victims)
    for folder in (host.folder, victims):
        os.utime(folder / ".old.part", (0, 0))
    evict, was = FileCache._evict, tmp_path / "was"

    def swapped(*args: Any) -> None:
        host.folder.rename(was)
        host.folder.symlink_to(victims)
        evict(*args)

    monkeypatch.setattr(FileCache, "_evict", swapped)
    host.keep(b"1" * 200, "shared/1/0-0-0.sst")
    assert len(list(was.iterdir())) == 1 and len(list(victims.iterdir())) == 2


def test_a_folder_of_another_user_is_not_used(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = host.keep(b"state")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert host.get(handle) is None


def test_the_cache_folder_contains_the_user_id_and_none_disables_the_cache() -> None:
    assert open_cache(EngineOptions(cache_dir=None)) is None
    assert EngineOptions(cache_dir="/mnt/fast/{uid}").cache_folder() == Path(f"/mnt/fast/{os.getuid()}")
    assert str(os.getuid()) in str(EngineOptions().cache_folder())


_RACER = """
import os, random, sys
from pathlib import Path
from typing import Any
import google_crc32c
from state_backend.shard.file_cache import FileCache
from state_backend.values.handles import Handle
folder, me = Path(sys.argv[1]), sys.argv[2]
work = folder / me
work.mkdir()
cache, rng, hits = FileCache(folder / "cache", 4000), random.Random(me), 0
for turn in range(400):
    n = rng.randrange(12)
    data = bytes([n]) * 600
    handle = Handle(path=f"shared/{n}/0-0-0.sst", size_bytes=600, crc32c=google_crc32c.value(data))
    local = work / f"{turn}.sst"
    if cache.link("file:///p", handle, local):
        hits += 1
        assert local.read_bytes() == data, f"{n}: wrong bytes"
    else:
        assert not local.exists(), f"{n}: a miss left a file"
        local.write_bytes(data)
        cache.keep("file:///p", [(handle, local)])
        assert local.read_bytes() == data
    local.unlink()
print(hits)
"""


@pytest.mark.long("half a second", runs_in="ci")
def test_concurrent_processes_share_the_cache_and_never_read_wrong_bytes(tmp_path: Path) -> None:
    """Three at once over twelve files, of which six have room: always the right bytes or a miss."""
    racers = [
        subprocess.Popen([sys.executable, "-c", _RACER, str(tmp_path), str(n)], stdout=subprocess.PIPE, text=True)
        for n in range(3)
    ]
    hits = [int(racer.communicate(timeout=60)[0]) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert min(hits) > 0
    assert 0 < len(sound_files(tmp_path / "cache")) <= 9


# --- as restore and snapshot use it ---------------------------------------------------------------------------------------

OWNED = KeyGroupRange(first=0, last=3)
OPTIONS = EngineOptions(cache_dir=None)


def checkpoint(storage: FaultyStorage, folder: Path, cache: FileCache | None) -> ShardManifest:
    with RocksStore(folder / "made") as store:
        store.write((n.to_bytes(4, "big"), os.urandom(100)) for n in range(1000))
        return snapshot_of(store, storage, folder / "image", OWNED, cache=cache).manifest


@pytest.fixture
def storage() -> FaultyStorage:
    return FaultyStorage(MemoryStorage("memory://p"), {})


def entries_in(store: RocksStore) -> int:
    count = sum(1 for _ in store.scan(b"", None))
    store.close()
    return count


def test_the_next_interval_on_this_host_downloads_nothing(tmp_path: Path, storage: FaultyStorage) -> None:
    """Warm after an upload, and after a download; without the cache all comes from the storage."""
    cache = FileCache(tmp_path / "cache", 1_000_000)
    manifest = checkpoint(storage, tmp_path, cache)
    size_bytes = manifest.files[0].handle.size_bytes

    def restored(name: str, with_cache: FileCache | None) -> tuple[int, int]:
        calls = len(storage.calls)
        shard = restore_shard(OWNED, [manifest], storage, tmp_path / name, OPTIONS, with_cache)
        assert entries_in(shard.store) == 1000
        assert len(storage.calls) - calls == (shard.downloaded_bytes > 0)
        return shard.downloaded_bytes, shard.cached_bytes

    assert restored("warm", cache) == (0, size_bytes)
    assert restored("without", None) == (size_bytes, 0)
    shutil.rmtree(tmp_path / "cache")
    assert restored("lost", cache) == (size_bytes, 0)
    assert restored("warm again", cache) == (0, size_bytes)


def test_work_on_a_restored_shard_leaves_the_cache_as_it_was(tmp_path: Path, storage: FaultyStorage) -> None:
    cache = FileCache(tmp_path / "cache", 1_000_000)
    manifest = checkpoint(storage, tmp_path, cache)
    for n in range(3):
        shard = restore_shard(OWNED, [manifest], storage, tmp_path / f"db-{n}", OPTIONS, cache)
        assert (shard.downloaded_bytes > 0) is False
        shard.store.write([(key.to_bytes(4, "big"), None) for key in range(1000)])
        shard.store.compact()
        assert entries_in(shard.store) == 0
        shutil.rmtree(tmp_path / f"db-{n}")
    assert len(sound_files(tmp_path / "cache")) == 1


@pytest.mark.long("seconds", runs_in="ci")
def test_reads_detect_a_damaged_cached_file_and_forget_drops_it(tmp_path: Path, storage: FaultyStorage) -> None:
    """F81: neither size nor time tells. Reads and merges do, and after that the next try downloads."""
    cache = FileCache(tmp_path / "cache", 1_000_000)
    manifest = checkpoint(storage, tmp_path, cache)
    (entry,) = (tmp_path / "cache").iterdir()
    times = entry.stat()
    with entry.open("r+b") as file:
        file.seek(3000)
        file.write(b"damage")
    os.utime(entry, ns=(times.st_atime_ns, times.st_mtime_ns))
    shard = restore_shard(OWNED, [manifest], storage, tmp_path / "damaged", OPTIONS, cache)
    assert shard.cached_bytes > 0
    with pytest.raises(CorruptFile, match="block checksum mismatch"):
        entries_in(shard.store)
    for key in range(2):
        shard.store.write([(key.to_bytes(4, "big"), b"newer")])
        shard.store.sorted_runs()
    with pytest.raises(CorruptFile, match="block checksum mismatch"):
        shard.store.compact()
    with suppress(CorruptFile):
        shard.store.close()
    cache.forget(storage.url, [f.handle for f in manifest.files])
    shard = restore_shard(OWNED, [manifest], storage, tmp_path / "again", OPTIONS, cache)
    assert (shard.cached_bytes, entries_in(shard.store)) == (0, 1000)


def test_damage_in_the_cache_costs_a_download_damage_in_storage_fails(tmp_path: Path, storage: FaultyStorage) -> None:
    """The cache's damage costs a download; the storage's is an error, and nothing of it gets into the cache."""
    cache = FileCache(tmp_path / "cache", 1_000_000)
    manifest = checkpoint(storage, tmp_path, cache)
    (entry,) = (tmp_path / "cache").iterdir()
    entry.write_bytes(entry.read_bytes()[:-1] + b"?")
    shard = restore_shard(OWNED, [manifest], storage, tmp_path / "healed", OPTIONS, cache)
    assert (shard.cached_bytes, entries_in(shard.store)) == (0, 1000)
    path = manifest.files[0].handle.path
    storage.inner.delete(path)
    storage.inner.create(path, b"damaged")
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(CorruptFile, match="0-0-0"):
        restore_shard(OWNED, [manifest], storage, tmp_path / "refused", OPTIONS, cache)
    assert not (tmp_path / "cache").exists()


def test_damage_of_a_cached_copy_raises_damaged_copy_and_drops_the_copy(tmp_path: Path, storage: FaultyStorage) -> None:
    """A task that finds damage in a file that this host had asks for another try, which downloads it."""
    cache = FileCache(tmp_path / "cache", 1_000_000)
    manifest = checkpoint(storage, tmp_path, cache)
    for kind in (DamagedCopy, CorruptFile):  # The second time the cache has no copy, so the storage's file is damaged.
        with pytest.raises(CorruptFile) as told, damage_of_copies(cache, storage.url, [manifest]):
            raise CorruptFile("block checksum mismatch")
        assert (told.type, str(told.value), sound_files(tmp_path / "cache")) == (kind, "block checksum mismatch", [])
