"""Segments from the writes of an interval to the store that replays them, over a storage in memory."""

from __future__ import annotations

import io
from bisect import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.adapters.rocks import EngineOptions, RocksStore
from state_backend.formats import changelog, record_codec
from state_backend.shard.changelog_store import ChangelogOptions, ShardChangelog
from state_backend.shard.manifest import INLINE_MANIFESTS_BYTES, apply_changes, changes_since, manifest_of, plan_ref
from state_backend.shard.restore import restore_shard
from state_backend.shard.snapshot import INLINE_FILE_BYTES, Snapshot
from state_backend.values.errors import CorruptFile, InvariantViolated, UsageError
from state_backend.values.handles import Handle
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.records import (
    FiledShard,
    InlineFile,
    InlineShard,
    KeyGroupState,
    LocalFile,
    Segment,
    ShardChanges,
    ShardManifest,
)
from tests.support.shards import snapshot_of

ALL = KeyGroupRange(first=0, last=7)
# So many shards that the record has no byte for any.
NO_ROOM = 10**6
NOTHING = ShardManifest(shard=0, key_groups=ALL, files=(), inline_files=(), segments=(), key_group_states=())


class Shard:
    """One shard, interval after interval; keys are ``<key group><name>``."""

    def __init__(self, folder: Path, base: ShardManifest = NOTHING) -> None:
        self.folder = folder
        self.storage = MemoryStorage()
        self.base = base
        self.runs = 0

    @contextmanager
    def opened(self, manifest: ShardManifest, owned: KeyGroupRange = ALL) -> Iterator[RocksStore]:
        self.runs += 1
        options = EngineOptions()
        with restore_shard(owned, [manifest], self.storage, self.folder / f"db-{self.runs}", options).store as store:
            yield store

    def content(self, manifest: ShardManifest, owned: KeyGroupRange = ALL) -> dict[bytes, bytes]:
        with self.opened(manifest, owned) as store:
            return dict(store.scan(b"", None))

    def interval(
        self,
        changes: dict[bytes, bytes | None],
        deleted: tuple[tuple[bytes, bytes], ...] = (),
        *,
        inline_budget_bytes: int = INLINE_FILE_BYTES,
        parallelism: int = 1,
    ) -> Snapshot:
        """Deletes ranges, then writes, and takes the segment as the next base."""
        with self.opened(self.base) as store:
            recorder = ShardChangelog(
                store, self.base, self.folder / f"changes-{self.runs}", ChangelogOptions(), parallelism=parallelism
            )
            for start, end in deleted:
                store.delete_range(start, end)
            store.write(changes.items())
            made = recorder.append(
                self.storage,
                attempt=f"a{self.runs}",
                task=0,
                key_group_states=(),
                inline_budget_bytes=inline_budget_bytes,
            )
        self.base = made.manifest
        return made


key_group_states = st.dictionaries(st.integers(0, 7), st.integers(1, 3), max_size=5).map(
    lambda counts: tuple(KeyGroupState(key_group=g, entries={"s": n}, digest=n) for g, n in sorted(counts.items()))
)


@given(st.lists(key_group_states, min_size=1, max_size=5))
def test_changes_applied_to_a_manifest_file_give_the_current_manifest(history: list[tuple[KeyGroupState, ...]]) -> None:
    """Over any number of intervals, key groups that become empty or come back included."""
    file = replace(NOTHING, key_group_states=history[0])
    base, changes = file, None
    for n, states in enumerate(history[1:]):
        segment = Segment(handle=None, data=b"%d" % n, changes=1, content_bytes=1)
        now = replace(base, segments=(*base.segments, segment), key_group_states=states)
        changes = changes_since(changes, base, now)
        assert changes is not None
        assert apply_changes(file, changes) == now
        assert {s.key_group for s in changes.key_group_states} <= {s.key_group for h in history for s in h}
        base = now


def test_a_manifest_with_other_files_can_not_be_recorded_as_changes() -> None:
    file = LocalFile(name="1.sst", handle=Handle(path="shared/a/0-0-0.sst", size_bytes=1, crc32c=1))
    other = InlineFile(name="CURRENT", data=b"")
    for now in (replace(NOTHING, files=(file,)), replace(NOTHING, inline_files=(other,)), replace(NOTHING, shard=1)):
        assert changes_since(None, NOTHING, now) is None


def groups(count: int) -> tuple[KeyGroupState, ...]:
    return tuple(KeyGroupState(key_group=g, entries={"s": 1}, digest=2**63 + g) for g in range(count))


def test_a_shard_manifest_is_inline_only_if_the_record_has_room_for_all_shards() -> None:
    """A ref to the old file and what changed, or the whole manifest, or neither; and if all of any number of shards take all they
    may, the record has room for them."""
    handle = Handle(path="shared/a/0-0-0.manifest", size_bytes=1, crc32c=1)
    small, large = replace(NOTHING, key_group_states=groups(10)), replace(NOTHING, key_group_states=groups(200))
    kept = FiledShard(shard=0, manifest=handle)
    few = replace(kept, changes=ShardChanges(segments=(), key_group_states=groups(10)))
    many = replace(kept, changes=ShardChanges(segments=(), key_group_states=groups(200)))
    assert plan_ref(small, None, 8) == InlineShard(shard=0, inline=small)
    assert plan_ref(large, None, 8) is None
    assert plan_ref(large, kept, 8) == kept
    assert plan_ref(large, few, 8) == few
    assert plan_ref(large, many, 8) is None
    assert plan_ref(small, many, 8) == InlineShard(shard=0, inline=small)
    for parallelism in (1, 3, 8, 40):
        most = (
            bisect(
                range(2000),
                0,
                key=lambda n: plan_ref(replace(NOTHING, key_group_states=groups(n)), None, parallelism) is None,
            )
            - 1
        )
        manifest = replace(NOTHING, key_group_states=groups(most))
        assert parallelism * len(record_codec.encode(manifest)) <= INLINE_MANIFESTS_BYTES


def test_a_segment_takes_the_manifest_along_if_the_record_has_no_room(shard: Shard) -> None:
    """One object for both; the manifest is read without the segment, which replays as ever; the next segment follows it."""
    shard.interval({b"\x00\x00a": b"1" * 9000, b"\x00\x00b": b"2"}, inline_budget_bytes=0)
    before = {i.path for i in shard.storage.list("")}
    room: list[ShardManifest] = []
    with mock.patch.object(ShardChangelog, "fits_record", lambda self, manifest: room.append(manifest) is not None):
        taken = shard.interval({b"\x00\x00a": b"3"}, inline_budget_bytes=0)
    (new,) = {i.path for i in shard.storage.list("")} - before
    assert new.endswith("-1.manifest") and taken.in_segment is not None
    (asked,) = room
    last = taken.manifest.segments[-1]
    assert last.handle is not None and last.handle.path == new
    # What was asked about is at least as long as what came of it, so that the driver finds room where the worker did.
    assert (
        len(record_codec.encode(asked)) >= len(record_codec.encode(taken.manifest)) - len("manifest") + len("log") - 1
    )
    ref = FiledShard(shard=0, manifest=last.handle, in_segment=taken.in_segment)
    assert manifest_of(ref, shard.storage) == taken.manifest
    assert shard.content(shard.base)[b"\x00\x00a"] == b"3"
    shard.interval({b"\x00\x00b": b"4"}, inline_budget_bytes=0)
    assert len(shard.base.segments) == 3
    assert shard.content(shard.base) == {b"\x00\x00a": b"3", b"\x00\x00b": b"4"}


@pytest.mark.parametrize("damage", ["shorter", "longer", "flipped", "elsewhere", "a segment"])
def test_a_damaged_manifest_inside_a_segment_file_is_refused_with_its_path(shard: Shard, damage: str) -> None:
    taken = shard.interval({b"\x00\x00a": b"1" * 9000}, inline_budget_bytes=0, parallelism=NO_ROOM)
    handle, where = taken.manifest.segments[-1].handle, taken.in_segment
    assert handle is not None and where is not None
    data = shard.storage.read(handle.path)
    shard.storage.delete(handle.path)
    if damage == "flipped":
        data = data[:-40] + bytes([data[-40] ^ 1]) + data[-39:]
    elif damage == "elsewhere":
        where = replace(where, offset=where.offset - 1)
    elif damage == "a segment":
        where = replace(where, offset=len(changelog.MAGIC))
    else:
        data = data[:-1] if damage == "shorter" else data + b"\x00"
    shard.storage.create(handle.path, data)
    with pytest.raises(CorruptFile, match=handle.path):
        manifest_of(FiledShard(shard=0, manifest=handle, in_segment=where), shard.storage)


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    return Shard(tmp_path)


def test_a_replay_restores_only_the_owned_key_groups(shard: Shard) -> None:
    """Ranges too: they may span what another shard had."""
    shard.interval({bytes([0, n]) + b"a": b"1" for n in range(8)}, inline_budget_bytes=0)
    shard.interval(
        {b"\x00\x03b": b"2", b"\x00\x07b": b"2"}, deleted=((b"\x00\x01", b"\x00\x03"), (b"\x00\x04", b"\x09"))
    )
    owned = KeyGroupRange(first=2, last=4)
    assert shard.content(shard.base, owned) == {b"\x00\x03a": b"1", b"\x00\x03b": b"2"}


def test_a_replay_touches_nothing_that_came_from_another_shard(shard: Shard, tmp_path: Path) -> None:
    """F86, FLINK-26063: where shards are put together, a segment counts for its own shard's key groups only."""
    lower = replace(NOTHING, key_groups=KeyGroupRange(first=0, last=2))
    # The larger one, so that it is opened and the other one replayed over it.
    shard.base = replace(NOTHING, key_groups=KeyGroupRange(first=3, last=7))
    upper = shard.interval({b"\x00\x04a": b"1"}, inline_budget_bytes=0).manifest
    shard.base = lower
    stray = shard.interval({b"\x00\x01a": b"1", b"\x00\x04a": b"stray"}, deleted=((b"", b"\x00\x08"),)).manifest
    restored = restore_shard(ALL, [stray, upper], shard.storage, tmp_path / "db", EngineOptions())
    with restored.store as store:
        assert dict(store.scan(b"", None)) == {b"\x00\x01a": b"1", b"\x00\x04a": b"1"}


def test_small_segments_gather_inline_and_go_to_one_file_together(shard: Shard) -> None:
    """Each interval takes over the inline segment before it; the file that does not fit inline holds them all."""
    seen = []
    for n in range(40):
        made = shard.interval(
            {b"\x00\x00%d" % n: Random(n).randbytes(50), b"\x00\x00same": b"%d" % n}, inline_budget_bytes=600
        )
        seen.append((len(shard.base.handles), len(shard.base.segments), made.uploaded_files))
        assert sum(len(s.data or b"") for s in shard.base.segments) <= 600
    assert seen[0] == (0, 1, 0)
    files = [uploaded for _, _, uploaded in seen]
    assert 2 <= sum(files) <= 6
    assert shard.base.segments[-1].data is not None or files[-1]
    assert all(s.handle is not None for s in shard.base.segments[:-1])
    expected = {b"\x00\x00%d" % n: Random(n).randbytes(50) for n in range(40)} | {b"\x00\x00same": b"39"}
    assert shard.content(shard.base) == expected
    assert {info.path for info in shard.storage.list("")} == {h.path for h in shard.base.handles}


@pytest.mark.parametrize(("over", "files"), [(0, 0), (1, 1)])
def test_a_segment_is_inline_up_to_the_budget(shard: Shard, over: int, files: int) -> None:
    size_bytes = shard.interval({b"\x00\x00a": b"1"}).uploaded_bytes
    shard.base = NOTHING
    assert shard.interval({b"\x00\x00a": b"1"}, inline_budget_bytes=size_bytes - over).uploaded_files == files


def test_an_inline_segment_counts_toward_the_size_limit_of_the_next_segment(shard: Shard) -> None:
    options = ChangelogOptions(max_bytes=100)
    shard.interval({b"\x00\x00a": bytes(60)})
    with shard.opened(shard.base) as store:
        recorder = ShardChangelog(store, shard.base, shard.folder / "changes", options)
        assert recorder.fits()
        store.write([(b"\x00\x00b", bytes(60))])
        assert not recorder.fits()
        with pytest.raises(InvariantViolated):
            recorder.append(shard.storage, attempt="a", task=0, key_group_states=(), inline_budget_bytes=0)


def test_no_change_makes_no_segment(shard: Shard) -> None:
    """Of a shard that only counts as changed, as by a new layout."""
    before = shard.interval({b"\x00\x00a": b"1"}, inline_budget_bytes=0).manifest
    made = shard.interval({})
    assert (made.manifest, made.uploaded_files, made.uploaded_bytes) == (before, 0, 0)


def test_a_file_checkpoint_drops_the_changelog_segments_and_contains_their_changes(shard: Shard) -> None:
    shard.interval({b"\x00\x00a": b"1", b"\x00\x01a": b"1"}, inline_budget_bytes=0)
    shard.interval({b"\x00\x01a": None, b"\x00\x02a": b"2"})
    restored = restore_shard(ALL, [shard.base], shard.storage, shard.folder / "db", EngineOptions())
    with restored.store as store:
        store.write([(b"\x00\x03a", b"3")])
        made = snapshot_of(store, shard.storage, shard.folder / "image", ALL, attempt="files", opened=restored.opened)
    assert made.manifest.segments == ()
    assert {h.path for h in made.manifest.handles}.isdisjoint(h.path for h in shard.base.handles)
    assert shard.content(made.manifest) == {b"\x00\x00a": b"1", b"\x00\x02a": b"2", b"\x00\x03a": b"3"}
    shard.base = made.manifest
    shard.interval({b"\x00\x00a": None})
    assert shard.base.files == made.manifest.files
    assert shard.content(shard.base) == {b"\x00\x02a": b"2", b"\x00\x03a": b"3"}


def test_a_damaged_inline_segment_stops_the_restore(shard: Shard) -> None:
    (inline,) = shard.interval({b"\x00\x00a": b"1"}).manifest.segments
    damaged = replace(inline, data=(inline.data or b"")[:-1] + b"\x00")
    with pytest.raises(CorruptFile, match="segment 0 of shard 0"):
        shard.content(replace(shard.base, segments=(damaged,)))


def block(kind: int, pairs: int, raw: bytes) -> bytes:
    """As the changelog writes one, of whatever content."""
    file = io.BytesIO()
    changelog._write_block(file, kind, pairs, raw)
    return file.getvalue()


def packed(*pairs: changelog.Pair) -> bytes:
    return changelog._pack(pairs)


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        (block(changelog.MANIFEST, 1, packed((b"k", b"v"))), "the block for the manifest has no manifest"),
        (block(changelog.MANIFEST, 1, packed((b"", None))), "the block for the manifest has no manifest"),
    ],
)
def test_a_file_that_is_no_manifest_is_refused(blocks: bytes, says: str) -> None:
    """Its checksums are right: another program wrote it."""
    with pytest.raises(CorruptFile, match=f"shared/x.manifest: {says}"):
        changelog.read_manifest(blocks + block(changelog.END, 0, b""), "shared/x.manifest")


def test_an_entry_too_large_for_any_segment_is_refused(monkeypatch: pytest.MonkeyPatch, shard: Shard) -> None:
    monkeypatch.setattr(changelog, "_MOST_BLOCK_BYTES", 1000)
    with pytest.raises(UsageError, match=r"too large for changelog mode.*under one key, or use checkpoint mode inc"):
        shard.interval({b"\x00\x00a": b"1" * 2000})
