"""The files of several shards as one store: the same entries, before and after merges, and only where no file is in another's way."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.adapters.rocks import EngineOptions, RocksStore
from state_backend.formats.changelog import write_segment
from state_backend.formats.rocksdb_manifest import Store, store_of, with_stores
from state_backend.shard.join_files import join_manifests
from state_backend.shard.restore import restore_shard
from state_backend.values.key_groups import KeyGroupRange, range_of
from state_backend.values.records import InlineFile, Segment, ShardManifest

Model = dict[bytes, bytes]
GROUPS = 6


def some_keys(pick: random.Random, groups: KeyGroupRange, count: int) -> list[bytes]:
    return [
        bytes([0, pick.randint(groups.first, groups.last), 1]) + b"%03d" % pick.randrange(200) for _ in range(count)
    ]


def change(store: RocksStore, model: Model, pick: random.Random, groups: KeyGroupRange) -> None:
    """An interval: writes, deletions, maybe a deleted range, and what consolidation does to runs."""
    changes = {key: None if pick.random() < 0.2 else pick.randbytes(20) for key in some_keys(pick, groups, 60)}
    store.write(list(changes.items()))
    model.update({key: value for key, value in changes.items() if value is not None})
    for key in [key for key, value in changes.items() if value is None]:
        model.pop(key, None)
    if pick.random() < 0.3:
        start, end = (bytes([0, pick.randint(groups.first, groups.last), 1]) + ending for ending in (b"050", b"120"))
        if start < end:
            store.delete_range(start, end)
            for key in [key for key in model if start <= key < end]:
                del model[key]
    runs = len(store.sorted_runs())
    if pick.random() < 0.15:
        store.compact()
    elif runs > 2 and pick.random() < 0.4:
        store.merge_newest(pick.randrange(2, runs))


def manifest(store: RocksStore, shard: int, groups: KeyGroupRange, image: Path) -> ShardManifest:
    """All of it inline."""
    files = [file for part in store.capture(image) for file in part]
    inline = tuple(InlineFile(name=file.name, data=file.read_bytes()) for file in files)
    shutil.rmtree(image)
    return ShardManifest(
        shard=shard, key_groups=groups, files=(), inline_files=inline, segments=(), key_group_states=()
    )


def shards(
    folder: Path, pick: random.Random, count: int, intervals: Sequence[int]
) -> tuple[list[ShardManifest], list[Model]]:
    manifests, models = [], []
    for shard in range(count):
        groups, model = range_of(shard, count, GROUPS), Model()
        with RocksStore(folder / f"shard-{shard}") as store:
            for _ in range(intervals[shard]):
                change(store, model, pick, groups)
            manifests.append(manifest(store, shard, groups, folder / "image"))
        models.append(model)
    return manifests, models


@pytest.mark.parametrize("seed", range(8))
def test_joined_shards_hold_what_each_held_and_go_on(tmp_path: Path, seed: int) -> None:
    pick = random.Random(seed)
    count = pick.choice([2, 3])
    manifests, models = shards(tmp_path, pick, count, [pick.randrange(9) for _ in range(count)])
    opened, joined = join_manifests(manifests[0], manifests[1:])
    assert joined == tuple(manifests[1:])
    # The range ends within the last shard, so that it is clipped.
    target = KeyGroupRange(first=0, last=GROUPS - 1 - seed % 2)
    end = bytes([0, target.last + 1])
    model = {key: value for m in models for key, value in m.items() if key < end}
    restored = restore_shard(target, manifests, MemoryStorage(), tmp_path / "db", EngineOptions())
    with restored.store as store:
        assert dict(store.scan(b"", None)) == model
        assert restored.opened_inline == {f.name for f in opened.inline_files if f.name.endswith(".sst")}
        before = {f"{s.number:06d}.sst" for s in _spans(opened)}
        assert before == restored.opened_inline
        after = {f.name for f in manifest(store, 0, target, tmp_path / "image").inline_files}
        assert before <= after  # nothing was written anew
        for _ in range(6):
            change(store, model, pick, target)
            assert dict(store.scan(b"", None)) == model
        last = manifest(store, 0, target, tmp_path / "image")
    again = restore_shard(target, [last], MemoryStorage(), tmp_path / "again", EngineOptions())
    with again.store as store:
        assert dict(store.scan(b"", None)) == model
        store.compact()
        assert dict(store.scan(b"", None)) == model


def _spans(manifest: ShardManifest) -> list[object]:
    (log,) = (f for f in manifest.inline_files if f.name.startswith("MANIFEST-"))
    return list(store_of(log.data, log.name).spans)


def test_each_joined_shard_replays_its_own_segments(tmp_path: Path) -> None:
    pick, storage = random.Random(3), MemoryStorage()
    manifests, models = shards(tmp_path, pick, 3, [2, 2, 2])
    for at, (shard, model) in enumerate(zip(manifests, models, strict=True)):
        segments = []
        for number in range(2 + at % 2):
            entries = {key: pick.randbytes(9) for key in some_keys(pick, shard.key_groups, 5)}
            model.update(entries)
            with (tmp_path / "segment").open("wb") as file:
                changes = write_segment(file, [], sorted(entries.items()))
            inline = number == 1  # between two that are files
            segments.append(
                Segment(
                    handle=None if inline else storage.upload(f"{at}-{number}", tmp_path / "segment"),
                    data=(tmp_path / "segment").read_bytes() if inline else None,
                    changes=changes,
                    content_bytes=1,
                )
            )
        manifests[at] = replace(shard, segments=tuple(segments))
    assert join_manifests(manifests[0], manifests[1:])[1] == tuple(manifests[1:])
    whole = KeyGroupRange(first=0, last=GROUPS - 1)
    with restore_shard(whole, manifests, storage, tmp_path / "db", EngineOptions()).store as store:
        assert dict(store.scan(b"", None)) == models[0] | models[1] | models[2]
    assert not [*(tmp_path / "db").glob("segment-*")]


def test_every_merge_after_a_join_is_one_that_rocksdb_takes(tmp_path: Path) -> None:
    """Level 0 of both shards has the same epochs. A merge of the newest file and some of one shard's would have the epoch of a file of
    the other one, with keys between that one's."""
    pick = random.Random(0)
    for width in range(2, 7):
        folder = tmp_path / str(width)
        models: list[Model] = [{}, {}]
        manifests = []
        for shard, model in enumerate(models):
            groups = range_of(shard, 2, GROUPS)
            with RocksStore(folder / f"shard-{shard}") as store:
                for _ in range(3):
                    entries = {key: pick.randbytes(20) for key in some_keys(pick, groups, 60)}
                    store.write(list(entries.items()))
                    store.sorted_runs()
                    model.update(entries)
                manifests.append(manifest(store, shard, groups, folder / "image"))
        whole = KeyGroupRange(first=0, last=GROUPS - 1)
        with restore_shard(whole, manifests, MemoryStorage(), folder / "db", EngineOptions()).store as store:
            entries = {key: pick.randbytes(20) for key in some_keys(pick, whole, 60)}
            store.write(list(entries.items()))
            store.merge_newest(width)
            assert len(store.sorted_runs()) == 7 - width + 1
            assert dict(store.scan(b"", None)) == models[0] | models[1] | entries


def test_a_shard_whose_files_reach_out_of_it_is_copied(tmp_path: Path) -> None:
    """Both halves of a split shard have its files, and each deleted the other one's keys there."""
    pick = random.Random(1)
    (whole,), (model,) = shards(tmp_path, pick, 1, [4])
    halves = []
    for shard in range(2):
        groups = range_of(shard, 2, GROUPS)
        with restore_shard(
            groups, [whole], MemoryStorage(), tmp_path / f"half-{shard}", EngineOptions()
        ).store as store:
            halves.append(manifest(store, shard, groups, tmp_path / "image"))
    for first, other in (halves, halves[::-1]):
        assert join_manifests(first, [other]) == (first, ())
    # One that was rewritten is in nobody's way, but the other one is in its.
    with restore_shard(
        halves[1].key_groups, halves[1:], MemoryStorage(), tmp_path / "rewritten", EngineOptions()
    ).store as store:
        store.compact()
        halves[1] = manifest(store, 1, halves[1].key_groups, tmp_path / "image")
    assert join_manifests(halves[1], [halves[0]]) == (halves[1], ())
    assert join_manifests(halves[0], [halves[1]]) == (halves[0], ())
    restored = restore_shard(whole.key_groups, halves, MemoryStorage(), tmp_path / "db", EngineOptions())
    with restored.store as store:
        assert dict(store.scan(b"", None)) == model


def test_what_cannot_be_followed_or_is_too_much_is_copied(tmp_path: Path) -> None:
    pick = random.Random(2)
    manifests, models = shards(tmp_path, pick, 2, [3, 3])
    first, other = manifests
    (log,) = (f for f in other.inline_files if f.name.startswith("MANIFEST-"))
    rest = tuple(f for f in other.inline_files if f is not log)
    unknown = replace(other, inline_files=(*rest, replace(log, data=log.data[:-1])))
    incomplete = replace(other, inline_files=tuple(f for f in other.inline_files if not f.name.endswith(".sst")))
    for stranger in (unknown, incomplete, replace(other, inline_files=rest)):
        assert join_manifests(first, [stranger]) == (first, ())
    store = store_of(log.data, "it")
    old = Store(
        spans=tuple(replace(s, epoch=0) for s in store.spans),
        next_file=store.next_file,
        last_sequence=store.last_sequence,
    )
    with pytest.raises(ValueError, match="epoch"):
        with_stores(log.data, store, [old])
    groups = range_of(1, 2, GROUPS)
    with RocksStore(tmp_path / "many") as many:
        for n in range(29):
            many.write([(bytes([0, groups.first, 1, n]), b"v")])
            many.sorted_runs()
        manifests[1] = manifest(many, 1, groups, tmp_path / "image")
    assert join_manifests(first, manifests[1:]) == (first, ())
    whole = KeyGroupRange(first=0, last=GROUPS - 1)
    with restore_shard(whole, manifests, MemoryStorage(), tmp_path / "db", EngineOptions()).store as joined:
        assert len(dict(joined.scan(b"", None))) == len(models[0]) + 29
