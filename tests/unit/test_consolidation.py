"""The rule of consolidation as tables, what it does to real files, and a short history of them."""

from __future__ import annotations

import random
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.adapters.rocks import GIB, EngineOptions, RocksStore, SortedRun
from state_backend.shard.changelog_store import ChangelogOptions
from state_backend.shard.consolidation import Consolidation, consolidate, count_bytes, live_bytes, plan_consolidation
from state_backend.shard.file_cache import FileCache
from state_backend.shard.restore import restore_shard
from state_backend.state import layout
from state_backend.state.expiry import expire
from state_backend.state.shard_state import ShardState
from state_backend.values.errors import CorruptFile, StorageUnavailable, UsageError
from state_backend.values.key_groups import KeyGroupRange
from tests.support.shards import STATES, snapshot_of
from tests.support.state_history import HOUR_MS, History, session_history
from tests.support.tiers import long_after

MIB = 1024 * 1024
OPTIONS = EngineOptions(most_sorted_runs=4, most_obsolete_percent=80, consolidation_bytes=GIB)


def run(size_mib: float, *, deletions: int = 0, raw_mib: float | None = None) -> SortedRun:
    """With an entry per KiB, by default not compressed."""
    return SortedRun(
        size_bytes=int(size_mib * MIB),
        entries=int(size_mib * 1024),
        deletions=deletions,
        raw_bytes=int((size_mib if raw_mib is None else raw_mib) * MIB),
    )


def planned(runs: list[SortedRun], **changes: Any) -> Consolidation:
    """By default all puts of the newer runs replace some of the oldest."""
    given = {
        "live_raw_bytes": runs[-1].raw_bytes if runs else 0,
        "ranges_deleted": False,
        "options": OPTIONS,
        "shard": 0,
        "parallelism": 1,
        "sequence": 0,
        "free_bytes": 1024 * GIB,
    }
    return plan_consolidation(runs, **(given | changes))


def plan(runs: list[SortedRun], **changes: Any) -> tuple[int, str | None]:
    """What is merged and what is put off."""
    made = planned(runs, **changes)
    return made.merged_runs, made.put_off


@pytest.mark.parametrize(
    ("sizes", "merged"),
    [
        ([], 0),
        ([100], 0),
        ([1, 1, 1, 100], 0),
        ([1, 1, 1, 1, 100], 4),
        ([1, 1, 1, 4, 100], 3),
        ([1, 1, 9, 20, 100], 2),
        # A merge takes the newest, wherever the small ones lie.
        ([30, 1, 1, 1, 100], 4),
        # With nothing but small runs, the oldest is one of them.
        ([1, 1, 1, 1, 1], 5),
    ],
)
def test_the_newest_runs_are_merged_where_that_costs_least_per_run(sizes: list[int], merged: int) -> None:
    """Nothing is obsolete here: every put is of a new key."""
    assert plan([run(size) for size in sizes], live_raw_bytes=GIB) == (merged, None)


@pytest.mark.parametrize(
    ("newer", "live_mib", "merged"),
    [
        (run(79), 100, 0),
        (run(81), 100, 2),
        (run(120), 100, 2),
        # New keys are no reason.
        (run(500), 600, 0),
        # TTL: half of the entries deleted by small records. What is left would fit in half the bytes.
        (run(1, deletions=1024), 50, 2),
        (run(1, deletions=1024), 60, 0),
        # Lists of large rows between many small timers: a hundredth of the records, and nearly all of the bytes.
        (run(0.1, deletions=1024), 2, 2),
    ],
)
def test_a_shard_is_rewritten_when_too_much_of_it_is_obsolete(newer: SortedRun, live_mib: int, merged: int) -> None:
    assert plan([newer, run(100)], live_raw_bytes=live_mib * MIB) == (merged, None)


@pytest.mark.parametrize(
    ("runs", "live_mib"),
    [
        # Keys and values of 30 MiB are live.
        ([run(10), run(90)], 30),
        # Compressed as far as the oldest run is: newer files are small, and hardly compressed.
        ([run(30, raw_mib=30), run(10, raw_mib=100)], 3),
        # As far as all runs are, where the oldest holds the worse half.
        ([run(5, raw_mib=50), run(45, raw_mib=50)], 15),
    ],
)
def test_the_live_size_is_estimated_from_the_compression_of_the_runs(runs: list[SortedRun], live_mib: int) -> None:
    assert live_bytes(runs, 30 * MIB) == pytest.approx(live_mib * MIB, abs=1)


def test_a_deleted_range_waits_until_changes_are_worth_a_rewriting() -> None:
    """One shard becomes two: each holds the files of both."""
    half = {"live_raw_bytes": 50 * MIB, "ranges_deleted": True}
    assert plan([run(0.1), run(100)], **half) == (0, None)
    assert plan([run(20), run(100)], **half) == (2, None)
    assert plan([run(0.1), run(100)], **(half | {"ranges_deleted": False})) == (2, None)


def test_shards_take_turns() -> None:
    """Of eight shards with the same load one is rewritten per interval; far above the limit nobody waits."""
    due, urgent = [run(85), run(100)], [run(101), run(100)]
    for sequence in range(16):
        merged = [plan(due, shard=shard, parallelism=8, sequence=sequence)[0] for shard in range(8)]
        assert [shard for shard in range(8) if merged[shard]] == [sequence % 8]
        assert plan(due, shard=(sequence + 1) % 8, parallelism=8, sequence=sequence) == (0, "turn")
        assert plan(urgent, shard=(sequence + 1) % 8, parallelism=8, sequence=sequence) == (2, None)


def test_shards_whose_turn_it_is_share_the_budget() -> None:
    due = [run(85), run(100)]
    tight = EngineOptions(most_sorted_runs=4, consolidation_bytes=150 * MIB)
    assert plan(due, options=tight, parallelism=8) == (2, None)
    assert plan(due, options=tight, parallelism=16) == (0, "budget")
    assert plan([run(101), run(100)], options=tight, parallelism=16) == (2, None)


def test_a_merge_beyond_the_budget_waits_until_reads_suffer() -> None:
    tight = EngineOptions(most_sorted_runs=4, consolidation_bytes=15 * MIB)
    assert plan([run(10), run(10), *[run(1)] * 2, run(500)], options=tight) == (0, "budget")
    assert plan([run(10), *[run(1)] * 8, run(500)], options=tight)[0] == 9


def test_a_merge_is_put_off_or_reduced_without_room_on_the_disk() -> None:
    assert plan([run(90), run(100)], free_bytes=189 * MIB) == (0, "disk")
    assert plan([run(90), run(100)], free_bytes=190 * MIB) == (2, None)
    assert plan([run(1)] * 4 + [run(100)], free_bytes=3 * MIB) == (3, None)
    assert plan([run(1)] * 4 + [run(100)], free_bytes=MIB) == (0, "disk")


def test_the_plan_estimates_the_bytes_that_a_rewrite_writes() -> None:
    assert planned([run(90), run(100)], free_bytes=GIB).written_bytes == 100 * MIB


def write(store: RocksStore, keys: list[int], rng: random.Random) -> dict[bytes, bytes]:
    entries = {key.to_bytes(4, "big"): rng.randbytes(100) for key in keys}
    store.write(entries.items())
    return entries


@pytest.mark.parametrize("reopened", [False, True])
def test_exactly_the_newest_runs_are_merged(tmp_path: Path, reopened: bool) -> None:
    """By RocksDB, in this process and in the next one; nothing that is live changes."""
    rng = random.Random(3)
    store = RocksStore(tmp_path / "db")
    state = write(store, list(range(2000)), rng)
    store.compact()
    for _ in range(6):
        state |= write(store, rng.sample(range(2000), 100), rng)
        store.sorted_runs()
    if reopened:
        store.close()
        store = RocksStore(tmp_path / "db")
    before = store.sorted_runs()
    assert [r.entries for r in before] == [100] * 6 + [2000]
    for width in (3, 2, 3):
        before = store.sorted_runs()
        store.merge_newest(width)
        after = store.sorted_runs()
        assert [(r.size_bytes, r.entries) for r in after[1:]] == [(r.size_bytes, r.entries) for r in before[width:]]
        assert after[0].entries <= sum(r.entries for r in before[:width])
    assert len(after) == 2
    assert dict(store.scan(b"", None)) == state
    store.close()


def test_deletion_records_are_counted_and_a_compaction_removes_them(tmp_path: Path) -> None:
    rng = random.Random(3)
    with RocksStore(tmp_path / "db") as store:
        state = write(store, list(range(1000)), rng)
        store.sorted_runs()
        store.write([(key, None) for key in list(state)[:900]])
        runs = store.sorted_runs()
        assert [(r.entries, r.deletions) for r in runs] == [(900, 900), (1000, 0)]
        store.compact()
        assert [(r.entries, r.deletions) for r in store.sorted_runs()] == [(100, 0)]


@pytest.mark.long("seconds", runs_in="ci")
def test_uploads_and_checkpoint_size_stay_bounded_over_many_batches(tmp_path: Path) -> None:
    """60 batches of 5 % of the keys, in two shards: the bounds that docs/measurements.md shows over 1,000 batches, a little wider."""
    history = History(folder=tmp_path, keys=10_000, parallelism=2)
    history.load()
    live_bytes = history.compacted_bytes()
    batches = [history.update(0.05) for _ in range(60)]
    assert sum(b.uploaded_bytes for b in batches) <= 4 * sum(b.changed_bytes for b in batches)
    for batch in batches[20:]:
        assert batch.live_files <= 2 * 12
        assert batch.checkpoint_bytes <= 2.2 * live_bytes
        assert batch.retained_bytes <= 3.8 * live_bytes
    merged = [c.merged_runs for b in batches for c in b.merged if c.merged_runs]
    assert len(merged) >= 6
    assert history.update(0).uploaded_bytes == 0
    check_state(history)


@pytest.mark.parametrize("changelog", long_after(1, [None, ChangelogOptions()], "seconds"))
@pytest.mark.long("seconds", runs_in="ci")
def test_checkpoint_size_is_bounded_when_sessions_expire(tmp_path: Path, changelog: ChangelogOptions | None) -> None:
    """Lists, maps, timers and expiry: what is written is deleted some hours later, and at night state shrinks to a tenth. A
    changelog's interval writes files as soon as too much of them is obsolete."""
    history = session_history(tmp_path, 1500, 1, changelog)
    for hour in range(26):
        batch = history.hour()
        assert batch.checkpoint_bytes <= max(2.5 * history.compacted_bytes(), 256 * 1024), hour
    batches = history.batches
    assert sum(b.uploaded_bytes for b in batches) <= 0.8 * sum(b.changed_bytes for b in batches)


def test_a_split_shard_goes_on_with_segments(tmp_path: Path) -> None:
    """Each part holds the files of all four: to write files would not rewrite it before more has changed."""
    history = History(folder=tmp_path, keys=20_000, parallelism=1, changelog=ChangelogOptions())
    history.load()
    history.run(np.arange(0), parallelism=4)
    history.update(0.001)
    assert [len(m.segments) for m in history.manifests] == [1] * 4
    assert all(m.size_bytes > 1_500_000 for m in history.manifests)


def test_a_recorded_byte_count_that_would_become_negative_is_recounted(tmp_path: Path) -> None:
    """A number below nothing could not be read again from the record, and then nothing could be committed."""
    history = session_history(tmp_path, 200, 1)
    history.hour()
    wrong = [replace(s, size_bytes=1) for s in history.manifests[0].key_group_states]
    with history.restored(0, 1) as restored:
        state = ShardState(restored.store, key_groups=wrong, descriptors=history.states, now_ms=10 * HOUR_MS)
        expire(state)
        states = state.key_group_states()
        assert None in [s.size_bytes for s in states]
        assert all(s.size_bytes is not None and s.size_bytes >= 0 for s in count_bytes(restored.store, states))


def check_state(history: History) -> None:
    """What each shard's files hold is what its record says: every key once, and the digest over all of it."""
    seed = layout.seed_of("value")
    for shard, manifest in enumerate(history.manifests):
        with history.restored(shard, history.parallelism) as restored:
            held = dict(restored.store.scan(b"", None))
        assert {int.from_bytes(key[:2], "big") for key in held} <= {s.key_group for s in manifest.key_group_states}
        assert len(held) == manifest.entries
        assert sum(layout.entry_hash(seed, key[3:], entry) for key, entry in held.items()) % 2**64 == manifest.digest
    assert sum(m.entries for m in history.manifests) == history.keys


@pytest.mark.long("seconds", runs_in="ci")
def test_changes_of_parallelism_keep_all_state_and_share_the_restored_files(tmp_path: Path) -> None:
    """From one parallelism to the next with merges between: nothing is lost or kept twice, and the checkpoint after a restore
    shares what was opened: all files after a split. Of several shards in one, the files of one are opened, and only the entries
    of the others uploaded."""
    options = EngineOptions(most_sorted_runs=3, most_obsolete_percent=20, cache_dir=None)
    cache = FileCache(tmp_path / "cache", 100 * MIB)
    history = History(folder=tmp_path, keys=5000, parallelism=2, options=options, cache=cache)
    history.load()
    for parallelism in (1, 3, 4, 2, 7, 1):
        for _ in range(6):
            history.update(0.05)
        before, opened = history.parallelism, {f.handle.path for m in history.manifests for f in m.files}
        sizes = [m.files_bytes for m in history.manifests]
        digest = sum(m.digest for m in history.manifests) % 2**64
        batch = history.run(np.arange(0), parallelism=parallelism)
        assert sum(m.digest for m in history.manifests) % 2**64 == digest
        shared = {f.handle.path for m in history.manifests for f in m.files} & opened
        assert shared
        if parallelism > before:
            assert shared == opened
        if (before, parallelism) == (2, 1):
            assert batch.uploaded_bytes < 1.1 * max(sizes)
            with history.restored(0, 1) as restored:
                assert restored.store.range_deletions() == 0  # no key group was outside of the new shard
        assert batch.merged == ()
        check_state(history)


@pytest.mark.long("half a second", runs_in="ci")
def test_expired_entries_leave_the_files(tmp_path: Path) -> None:
    """Every interval writes keys of its own that expire after the next; the files hold some intervals, never all."""
    rng = random.Random(5)
    storage, owned = MemoryStorage(), KeyGroupRange(first=0, last=3)
    manifests, sizes = [], []
    ttl = next(d for d in STATES if d.name == "value_ttl")
    for interval in range(40):
        now_ms = interval * 100
        restored = restore_shard(owned, manifests, storage, tmp_path / "db" / str(interval), EngineOptions())
        state = ShardState(restored.store, key_groups=restored.key_group_states, descriptors=STATES, now_ms=now_ms)
        for key in range(300):
            stored = layout.prefix(key % 4, ttl.state_id) + f"{interval}-{key}".encode()
            state.write(stored, layout.with_expiry(b"\x01" + rng.randbytes(200), now_ms + 150))
        expire(state)
        groups = state.key_group_states()
        consolidate(
            restored.store, key_groups=groups, options=EngineOptions(), shard=0, parallelism=1, sequence=interval
        )
        given = {"attempt": str(interval), "key_group_states": groups, "opened": restored.opened}
        snapshot = snapshot_of(restored.store, storage, tmp_path / f"image-{interval}", owned, **given)
        restored.store.close()
        manifests = [snapshot.manifest]
        sizes.append(sum(f.handle.size_bytes for f in snapshot.manifest.files))
    assert manifests[0].entries == 600
    assert max(sizes[5:]) <= 2.2 * 600 * 260
    assert sum(sizes[-10:]) <= 1.3 * sum(sizes[10:20])


def test_a_compaction_without_room_on_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    with RocksStore(tmp_path / "db") as store:
        state = write(store, list(range(1000)), random.Random(3))
        (before,) = store.sorted_runs()
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, before.size_bytes - 1))
        with pytest.raises(StorageUnavailable, match=f"may write {before.size_bytes} bytes.* TMPDIR"):
            store.compact()
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, before.size_bytes))
        store.compact()
        assert dict(store.scan(b"", None)) == state


def test_each_thread_of_a_merge_writes_a_file(tmp_path: Path) -> None:
    """Also of a shard smaller than one file, unless it is so small that a thread has nothing to gain."""
    rng, state = random.Random(3), dict[bytes, bytes]()
    with RocksStore(tmp_path / "db") as store:
        for mib, files in ((8, 1), (24, 2)):
            state |= {rng.randbytes(8): rng.randbytes(8192) for _ in range(mib * 128)}
            store.write(state.items())
            store.compact()
            assert len(store.capture(tmp_path / str(mib))[0]) == files
            assert dict(store.scan(b"", None)) == state


@pytest.mark.parametrize("seed", range(6))
def test_no_merge_changes_what_is_read(tmp_path: Path, seed: int) -> None:
    """Random writes, deletions of keys and ranges, merges of any width, re-openings, against a dict."""
    rng = random.Random(seed)
    store, model = RocksStore(tmp_path / "db"), {}
    for _ in range(40):
        act = rng.choice(["write", "write", "delete", "range", "merge", "merge", "compact", "reopen"])
        keys = rng.sample(range(500), 60)
        if act == "write":
            model |= write(store, keys, rng)
        elif act == "delete":
            gone = [key.to_bytes(4, "big") for key in keys]
            store.write((key, None) for key in gone)
            model = {key: value for key, value in model.items() if key not in gone}
        elif act == "range":
            start, end = keys[0].to_bytes(4, "big"), (keys[0] + 50).to_bytes(4, "big")
            store.delete_range(start, end)
            model = {key: value for key, value in model.items() if not start <= key < end}
        elif act == "merge":
            runs = len(store.sorted_runs())
            if runs > 2:
                width = rng.randint(2, runs - 1)
                store.merge_newest(width)
                # Of a merge of deletions only, of keys that no older run has, nothing is left.
                assert len(store.sorted_runs()) in (runs - width, runs - width + 1)
        elif act == "compact":
            store.compact()
        else:
            store.sorted_runs()
            store.close()
            store = RocksStore(tmp_path / "db")
        assert dict(store.scan(b"", None)) == model
    store.close()


@pytest.mark.parametrize(("entries", "files"), [(20_000, 32), (80_000, 64), (200_000, 80)])
def test_files_grow_with_the_state(tmp_path: Path, entries: int, files: int) -> None:
    """About 64 of them, until they are four times as large."""
    with RocksStore(tmp_path / "db", EngineOptions(target_file_bytes=64 * 1024)) as store:
        write(store, list(range(entries)), random.Random(3))
        store.compact()
        ssts, _ = store.capture(tmp_path / "image")
        assert 0.8 * files <= len(ssts) <= 1.2 * files


def test_an_interval_that_fills_many_buffers_is_merged_meanwhile(tmp_path: Path) -> None:
    """Left to the capture, its last reads would have to look through a file per buffer."""
    with RocksStore(tmp_path / "db", EngineOptions(write_buffer_bytes=64 * 1024)) as store:
        for n in range(80):
            write(store, list(range(1000 * n, 1000 * n + 1000)), random.Random(n))
        store.capture(tmp_path / "image")
        assert len(store.sorted_runs()) <= 32


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_merging_one_or_all_runs_is_refused(tmp_path: Path, count: int) -> None:
    """RocksDB would find nothing to pick, and be waited for in vain."""
    with RocksStore(tmp_path / "db") as store:
        for n in range(3):
            write(store, [n], random.Random(n))
            store.sorted_runs()
        with pytest.raises(UsageError, match=f"can't merge {count} of 3"):
            store.merge_newest(count)


@pytest.mark.long("seconds", runs_in="ci")
def test_a_merge_of_a_damaged_file_reports_a_checksum_mismatch(tmp_path: Path) -> None:
    store = RocksStore(tmp_path / "db")
    for n in range(4):
        write(store, list(range(500)), random.Random(n))
        store.sorted_runs()
    store.close()
    victim = sorted((tmp_path / "db").glob("*.sst"))[2]
    data = bytearray(victim.read_bytes())
    data[5000] ^= 1
    victim.write_bytes(data)
    store = RocksStore(tmp_path / "db")
    with pytest.raises(CorruptFile, match="block checksum mismatch"):
        store.merge_newest(3)
    with pytest.raises(CorruptFile, match="can't close"):
        store.close()


@pytest.mark.parametrize("wrong", [{"most_sorted_runs": 1}, {"most_obsolete_percent": 0}])
def test_limits_that_would_rewrite_all_of_the_time_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="at least 2 and 1"):
        EngineOptions(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("target_file_bytes", [64 * MIB, 100_000])
@pytest.mark.parametrize("end", [2000, 20_000, None])
def test_a_key_range_is_copied_from_another_store(tmp_path: Path, end: int | None, target_file_bytes: int) -> None:
    options = EngineOptions(target_file_bytes=target_file_bytes)
    rng = random.Random(3)
    with RocksStore(tmp_path / "from", options) as source, RocksStore(tmp_path / "to", options) as destination:
        theirs = write(source, list(range(1000, 20_000)), rng)
        source.write([((1500).to_bytes(4, "big"), None)])
        ours = write(destination, list(range(1000)), rng)
        bound = None if end is None else end.to_bytes(4, "big")
        source.copy_range(destination, (1000).to_bytes(4, "big"), bound)
        source.copy_range(destination, b"\xff", None)
        wanted = {k: v for k, v in theirs.items() if k != (1500).to_bytes(4, "big") and (bound is None or k < bound)}
        assert dict(destination.scan(b"", None)) == ours | wanted
        assert len(destination.sorted_runs()) == 2
        assert destination.sorted_runs()[-1].entries == len(wanted)
    assert not [f for f in (tmp_path / "from").iterdir() if f.name.startswith("copied")]


def test_files_of_either_compression_lie_in_one_store(tmp_path: Path) -> None:
    """Each interval writes as its options say and reads what others wrote. Letters take a quarter less of zstd."""
    rng = random.Random(4)
    sizes, entries = {}, {}
    for n, compression in enumerate(["lz4", "zstd", "lz4"]):
        options = EngineOptions(compression=compression)  # type: ignore[arg-type]
        with RocksStore(tmp_path / "db", options) as store:
            new = {b"%04d" % k: bytes(rng.choices(b"abcdefghijklmnopqrstuvwxyz012345", k=64)) for k in range(n, 3000)}
            store.write(list(new.items()))
            entries |= new
            assert dict(store.scan(b"", None)) == entries
            sizes[n] = store.sorted_runs()[0].size_bytes
    assert sizes[1] < 0.8 * min(sizes[0], sizes[2])
    with RocksStore(tmp_path / "db", EngineOptions(compression="zstd")) as store:
        store.compact()
        assert dict(store.scan(b"", None)) == entries
    with pytest.raises(UsageError, match="lz4"):
        EngineOptions(compression="gzip")  # type: ignore[arg-type]
