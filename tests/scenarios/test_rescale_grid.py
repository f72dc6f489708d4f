"""Every small history of each shard, restored at every other number of shards."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from cairn.testing import PipelineTester
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.shard.restore import restore_shard
from state_backend.state.layout import key_group_bounds
from state_backend.state.shard_state import ShardState
from state_backend.state.state_variables import ListState, ValueState
from state_backend.values.key_groups import KeyGroupRange, range_of
from state_backend.values.records import ShardManifest
from tests.support.chains import ENGINE, Chain, Mode
from tests.support.once import HOUR, ONCE, START
from tests.support.shards import KEYS, snapshot_of
from tests.support.tiers import ALL, at_tier

GROUPS, MOST_INTERVALS, MOST_SHARDS = 12, 6, 4
MODES: tuple[Mode, ...] = ("incremental", "full", "changelog")
# Some combinations of each mode and number of shards, or all.
SAMPLE = at_tier(fast=5, ci=10, all=0)

Entries = dict[bytes, bytes]
Taken = tuple[ShardManifest, Entries]


def shard_by_intervals(folder: Path, storage: MemoryStorage, shard: int, shards: int, mode: Mode) -> list[Taken]:
    """The manifest and entries of a shard after 0 to 6 intervals with few keys. Without rows, a shard keeps its manifest."""
    chain = Chain(folder, storage, max_parallelism=GROUPS, inline_budget_bytes=8 * 1024, consolidates=True)
    owned, taken = range_of(shard, shards, GROUPS), list[Taken]()
    for interval in range(MOST_INTERVALS + 1):
        entries: Entries = {}

        def change(state: ShardState, owned: KeyGroupRange, interval: int = interval) -> None:
            for group in [owned.first, owned.last] if interval else []:
                state.set_key(group, KEYS.encode((f"{group}",)))
                ValueState(state, "value").update((interval, "x"))
                if interval % 2:
                    ListState(state, "list").put([(interval, "y")])
                else:
                    ListState(state, "list").clear()
            state.flush()
            entries.update(state.store.scan(b"", None))  # noqa: B023

        chain.runs += 1
        # A first interval with rows has no checkpoint without rows before it.
        chain.manifests = [taken[-1][0]] if interval > 1 else []
        taken.append((chain._shard(shard, owned, mode, change).manifest, entries))
    return taken


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shards", range(2, MOST_SHARDS + 1))
@pytest.mark.long("seconds", runs_in="ci")
def test_every_combination_of_intervals_is_restored_at_every_other_number_of_shards(
    tmp_path: Path, shards: int, mode: Mode
) -> None:
    """And goes on there. What a shard is restored from are the old shards that overlap it, so equal ones are restored once."""
    storage = MemoryStorage()
    grid = [shard_by_intervals(tmp_path / f"{n}", storage, n, shards, mode) for n in range(shards)]
    combinations: Sequence[Any] = [*itertools.product(range(MOST_INTERVALS + 1), repeat=shards)]
    if not ALL:
        combinations = random.Random(shards).sample(combinations, SAMPLE)
    done = set[Any]()
    for combination in combinations:
        for target in {*range(1, MOST_SHARDS + 2)} - {shards}:
            for shard in range(target):
                owned = range_of(shard, target, GROUPS)
                overlapping = [n for n in range(shards) if range_of(n, shards, GROUPS).intersect(owned)]
                case = (owned, *((n, combination[n]) for n in overlapping))
                if case not in done:
                    done.add(case)
                    go_on(tmp_path, storage, [grid[n][combination[n]] for n in overlapping], owned)
    print(f"{mode}, {shards} shards: {len(combinations)} combinations, {len(done)} different restores")


def go_on(folder: Path, storage: MemoryStorage, taken: Sequence[Taken], owned: KeyGroupRange) -> None:
    """Restore a shard, write one more entry, take a checkpoint, and restore that."""
    low, high = key_group_bounds(owned.first, owned.last)
    expected = {
        key: value
        for _, entries in taken
        for key, value in entries.items()
        if key >= low and (high is None or key < high)
    }
    restored = restore_shard(owned, [manifest for manifest, _ in taken], storage, folder / "db", ENGINE)
    with restored.store as store:
        assert dict(store.scan(b"", None)) == expected
        expected[low + b"\x01more"] = b"1"
        store.write([(low + b"\x01more", b"1")])
        given = {"attempt": f"{random.getrandbits(64):x}", "opened": restored.opened, "inline_budget_bytes": 1 << 20}
        snapshot = snapshot_of(store, storage, folder / "image", owned, **given)
    with restore_shard(owned, [snapshot.manifest], storage, folder / "again", ENGINE).store as store:
        assert dict(store.scan(b"", None)) == expected
    for made in ("db", "image", "again"):
        shutil.rmtree(folder / made)


HISTORIES = [range(first, first + 50) for first in range(0, 200, 50)] if ALL else [range(at_tier(fast=2, ci=8, all=0))]


@pytest.mark.parametrize("seeds", HISTORIES, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
@pytest.mark.long("seconds", runs_in="ci")
def test_deduplicate_outputs_each_key_once_across_rescaling(seeds: range) -> None:
    """F67, F72: each key comes out once, in the interval of its first row, whatever becomes of the shards."""
    intervals = rescales = 0
    for seed in seeds:
        pick, seen = random.Random(seed), set[int]()
        tester = PipelineTester(replace(ONCE, parallelism=pick.randint(1, 8)), input_schema="k bigint, t timestamp")
        for n in range(pick.randint(4, 14)):
            if pick.random() < 0.4:
                tester.rescale(pick.randint(1, 8))
                rescales += 1
            keys = pick.choices(range(10), k=pick.choice([0, 1, 1, 2, 6]))
            tester.mode = pick.choice(["incremental", "incremental", "full", "changelog"])
            found = tester.run([(key, START + n * HOUR + timedelta(minutes=5)) for key in keys])
            assert sorted(row["k"] for row in found.output) == sorted({*keys} - seen), f"history {seed}, interval {n}"
            seen |= {*keys}
            intervals += 1
    print(f"{len(seeds)} histories, {intervals} intervals, {rescales} changes of the number of shards")
