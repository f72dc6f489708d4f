"""The versions of keys in SSTs and segments, read without RocksDB, give the entries that a restored store has."""

from __future__ import annotations

import io
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.rocks import EngineOptions, RocksStore
from state_backend.formats import changelog
from state_backend.formats.rocksdb_table import UnknownTable, versions_in
from state_backend.inspection.key_versions import KeyVersions
from state_backend.shard import transfer
from state_backend.shard.restore import restore_shard
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.records import InlineFile, LocalFile, Segment, ShardManifest
from tests.support.tiers import at_tier

GROUPS = KeyGroupRange(first=0, last=1023)
SPANS = [(b"\x00\x01b", b"\x00\x01c"), (b"\x00\x02b", b"\x00\x02c"), (b"\x00\xfbb", b"\x00\xfbc")]


def key(chance: random.Random) -> bytes:
    return (
        b"\x00"
        + chance.choice((b"\x01", b"\x02", b"\xfb"))
        + chance.choice((b"a", b"b", b"b", b"c"))
        + chance.randbytes(1)
    )


def change(store: RocksStore, chance: random.Random) -> None:
    """Change entries, some of them in ranges, and sometimes merge files."""
    for _ in range(chance.randint(1, 3)):
        pairs = {key(chance): chance.choice((None, chance.randbytes(chance.randint(0, 400)))) for _ in range(60)}
        store.write(sorted(pairs.items()))
        if chance.random() < 0.5:
            start, end = sorted((key(chance), key(chance)))
            if start < end:
                store.delete_range(start, end)
    if chance.random() < 0.3:
        if (runs := len(store.sorted_runs())) > 3 and chance.random() < 0.5:
            store.merge_newest(runs - 1)
        else:
            store.compact()


def segment(chance: random.Random, storage: LocalStorage, *, inline: bool) -> Segment:
    """Return a segment of random changes, in the manifest or in a file."""
    ranges = [r for r in ((key(chance), key(chance)) for _ in range(3)) if r[0] < r[1]]
    entries = {key(chance): chance.choice((None, chance.randbytes(9))) for _ in range(40)}
    file = io.BytesIO()
    changes = changelog.write_segment(file, ranges, sorted(entries.items()))
    data = file.getvalue()
    handle = None if inline else storage.create("shared/segment.log", data)
    return Segment(handle=handle, data=data if inline else None, changes=changes, content_bytes=1)


def manifest_of(store: RocksStore, storage: LocalStorage, work: Path, n: int) -> ShardManifest:
    """Return a manifest of the store's files. SSTs with an odd number are files, the others inline."""
    ssts, small = store.capture(work / f"image-{n}")
    files, inline = [], [*small]
    for sst in ssts:
        if int(sst.stem) % 2:
            path = f"shared/{sst.stem}-{n}.sst"
            files.append(LocalFile(name=sst.name, handle=storage.upload(path, sst)))
        else:
            inline.append(sst)
    return ShardManifest(
        shard=0,
        key_groups=GROUPS,
        files=tuple(files),
        inline_files=tuple(InlineFile(name=path.name, data=path.read_bytes()) for path in inline),
        segments=(),
        key_group_states=(),
    )


def restored(manifest: ShardManifest, storage: LocalStorage, work: Path) -> list[tuple[bytes, bytes]]:
    with restore_shard(GROUPS, [manifest], storage, work, EngineOptions()).store as store:
        return [entry for span in SPANS for entry in store.scan(*span)]


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("seed", range(at_tier(fast=2, ci=5, all=40)))
def test_key_versions_read_from_files_equal_the_entries_of_a_restored_store(
    tmp_path: Path, seed: int, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(transfer, "IN_MEMORY_BYTES", 4096 if seed % 2 else 1 << 20)
    storage = LocalStorage(tmp_path / "root")
    versions = KeyVersions(SPANS, storage, tmp_path)
    options = EngineOptions(compression=compression, metadata_dir=None)  # type: ignore[arg-type]
    manifests = []
    with RocksStore(tmp_path / "store", options) as store, RocksStore(tmp_path / "copy", options) as copy:
        change(copy, chance)
        copy.delete_range(b"", b"\xff")
        for n in range(8):
            change(store, chance)
            manifests.append(manifest_of(store, storage, tmp_path, n))
        store.copy_range(copy, b"", None)  # as in a restore to fewer shards, above deleted ranges
        for n in range(8, 12):
            manifests.append(manifest_of(copy, storage, tmp_path, n))
            change(copy, chance)
    for n in range(2):
        last = manifests[-1]
        manifests.append(replace(last, segments=(*last.segments, segment(chance, storage, inline=n == 0))))
    for n, manifest in enumerate(manifests):
        files = versions.files_of(manifest)
        assert files is not None
        versions.fetch([files])
        assert versions.read_stored(files) == restored(manifest, storage, tmp_path / f"restored-{n}")


@pytest.fixture(scope="module", params=["lz4", "zstd"])
def table(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("table")
    with RocksStore(folder / "store", EngineOptions(compression=request.param, metadata_dir=None)) as store:
        store.write([(b"\x00\x01b%03d" % n, bytes(300) if n % 9 else None) for n in range(500)])
        store.delete_range(b"\x00\x01b100", b"\x00\x01b140")
        (sst,), _ = store.capture(folder / "image")
    return sst.read_bytes()


def test_a_table_of_another_kind_is_left_to_rocksdb(table: bytes) -> None:
    assert len(versions_in(memoryview(table), SPANS).entries) == 460
    footer = len(table) - 53
    for at, byte in ((footer + 41, 5), (footer + 13, 0xFF), (footer + 1, 0), (len(table) - 1, 0)):
        other = bytearray(table)
        other[at] = byte
        with pytest.raises(UnknownTable):
            versions_in(memoryview(bytes(other)), SPANS)


@settings(deadline=None, max_examples=at_tier(fast=100, ci=300, all=5000), suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_a_damaged_table_is_read_or_left_to_rocksdb(table: bytes, data: st.DataObject) -> None:
    """Its checksum is compared before. Here it is about what a table says: no other error, and no loop without end."""
    changed = bytearray(table)
    for _ in range(data.draw(st.integers(0, 5))):
        at = data.draw(st.integers(0, len(changed) - 1) | st.integers(len(changed) - 1500, len(changed) - 1))
        changed[at] = data.draw(st.integers(0, 255))
    start, end = sorted(data.draw(st.integers(0, len(changed))) for _ in range(2))
    cut = data.draw(st.sampled_from([b"", bytes(changed[:start]), bytes(changed[end:]), data.draw(st.binary())]))
    with suppress(UnknownTable):
        versions_in(memoryview(bytes(changed) if not cut else cut + bytes(changed[-53:])), SPANS)
