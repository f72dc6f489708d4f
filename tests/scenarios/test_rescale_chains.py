"""50,000 keys with state of every kind through chains of parallelisms, with a checkpoint of another kind at each step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.adapters.rocks import EngineOptions
from state_backend.formats.spark_hash import key_hasher
from state_backend.formats.types import parse_struct
from state_backend.ports.storage import Storage
from state_backend.state.check_shard import verify_shard
from state_backend.state.shard_state import ShardState
from state_backend.state.state_variables import ListState, MapState, ValueState
from state_backend.state.timers import register_timer
from state_backend.values.key_groups import KeyGroupRange
from tests.support.chains import Chain, Mode
from tests.support.shards import KEY_SCHEMA, KEYS, STATES

MAX_PARALLELISM = 128
KEY_COUNT = 50_000
# 128 stores at a time need no 64 MiB of buffer each.
ENGINE = EngineOptions(write_buffer_bytes=4 << 20, block_cache_bytes=4 << 20, background_jobs=1)
# What a key of each residue has besides its value, and how many entries that makes with it.
KINDS = {0: 1, 1: 3, 2: 3, 3: 2, 4: 2}


class Keys:
    """``count`` keys in the order of their key groups, encoded once."""

    def __init__(self, count: int) -> None:
        hash_of = key_hasher(parse_struct(KEY_SCHEMA))
        rows = [(hash_of((f"key-{n}",)) % MAX_PARALLELISM, KEYS.encode((f"key-{n}",)), n) for n in range(count)]
        self.rows = sorted(rows)
        self.groups = np.array([group for group, _, _ in self.rows], np.uint16)

    def within(self, owned: KeyGroupRange) -> list[tuple[int, bytes, int]]:
        first, last = np.searchsorted(self.groups, [owned.first, owned.last + 1])
        return self.rows[first:last]

    def write(self, state: ShardState, owned: KeyGroupRange, *, round: int = 0, every: int = 1) -> None:
        """A value for every key that is due in this round; by its number some keys also get a list of two, two map entries, a
        timer, or a value with expiry. ``every`` > 1: that share of keys again, with other values and no new entries."""
        values, expiring = ValueState(state, "value"), ValueState(state, "value_ttl")
        lists, maps = ListState(state, "list"), MapState(state, "map")
        rows = [row for row in self.within(owned) if row[2] % every == round % every]
        for start in range(0, len(rows), 10_000):
            batch = rows[start : start + 10_000]
            state.prefetch(
                np.array([group for group, _, _ in batch], np.uint16),
                pa.array([key for _, key, _ in batch], pa.binary()),
            )
            for group, key, n in batch:
                state.set_key(group, key)
                values.update((n + round, None))
                kind = n % len(KINDS)
                if kind == 1:
                    lists.put([(n, "first"), (round, "second")])
                elif kind == 2:
                    maps.update_value(("a",), (n, None))
                    maps.update_value(("b",), (round, "b"))
                elif kind == 3:
                    register_timer(state, 1_000_000 + n)
                elif kind == 4:
                    expiring.update((n, f"round {round}"))
            state.flush()


def rescale(folder: Path, storage: Storage, keys: Keys, first: int, steps: list[tuple[int, Mode]], every: int) -> Chain:
    """Takes ``steps``, each a checkpoint at a parallelism in a mode after 1 of ``every`` keys was written again, beside a chain
    that is never rescaled and says what the digest must be. Every restored shard is walked before it is changed."""
    chain = Chain(folder / "chain", storage, max_parallelism=MAX_PARALLELISM, engine=ENGINE)
    twin = Chain(folder / "twin", MemoryStorage(), max_parallelism=MAX_PARALLELISM, engine=ENGINE)
    for each, parallelism in ((chain, first), (twin, 1)):
        each.step(parallelism, "incremental", keys.write)
    assert chain.digest == twin.digest
    located = Counter(group.to_bytes(2, "big") + b"\x01" + key for group, key, _ in keys.rows)
    for round, (parallelism, mode) in enumerate(steps, 1):
        found: Counter[bytes] = Counter()
        digests: list[int] = []

        def change(state: ShardState, owned: KeyGroupRange, round: int = round) -> None:
            digests.append(sum(s.digest for s in state.key_group_states()))  # noqa: B023
            for stored_key, _ in state.store.scan(b"", None):
                assert int.from_bytes(stored_key[:2], "big") in owned
                if stored_key[2] == 1:
                    found[stored_key] += 1  # noqa: B023
            keys.write(state, owned, round=round, every=every)

        restored = chain.digest
        chain.step(parallelism, mode, change)
        assert found == located, f"step {round}: each key is in exactly one shard"
        assert sum(digests) % 2**64 == restored
        twin.step(
            1, "incremental", lambda state, owned, round=round: keys.write(state, owned, round=round, every=every)
        )
        assert (chain.digest, chain.entries) == (twin.digest, twin.entries), f"step {round}"
        segments = sum(len(m.segments) for m in chain.manifests)
        assert segments >= parallelism if mode == "changelog" else segments == 0
    return chain


def walk(chain: Chain) -> None:
    """Restores the last checkpoint as it is and checks every entry, index, count and digest."""
    for manifest in chain.manifests:
        restored, _ = chain.open(manifest.key_groups, "walk")
        with restored.store as store:
            assert verify_shard(store, manifest, STATES, KEY_SCHEMA, MAX_PARALLELISM) == (manifest.entries, [])


UP_AND_DOWN: list[tuple[int, Mode]] = [
    *((1, "changelog"), (2, "incremental"), (8, "full"), (8, "changelog"), (7, "savepoint"), (7, "changelog")),
    *((3, "incremental"), (1, "full"), (1, "changelog")),
]
OTHER_WAYS: list[tuple[int, Mode]] = [
    *((7, "full"), (8, "incremental"), (8, "changelog"), (2, "full"), (3, "savepoint"), (2, "incremental")),
]
FAR: list[tuple[int, Mode]] = [(128, "incremental"), (128, "changelog"), (1, "full")]


@pytest.mark.parametrize(
    ("keys", "first", "steps", "every"),
    [
        (KEY_COUNT, 1, UP_AND_DOWN, 10),
        (KEY_COUNT // 10, 7, [(7, "changelog"), (2, "savepoint"), (7, "incremental")], 3),
        (KEY_COUNT // 10, 7, OTHER_WAYS, 3),
        pytest.param(KEY_COUNT, 1, FAR, 50, marks=pytest.mark.long("twenty seconds: one key group per shard")),
    ],
    ids=["up and down", "to 2 and back", "other ways", "as far as it goes"],
)
@pytest.mark.long("seconds", runs_in="ci")
def test_chains_of_parallelisms(
    tmp_path: Path, keys: int, first: int, steps: list[tuple[int, Mode]], every: int
) -> None:
    """F67, F68, F71, F72, S36: one of ``every`` keys is written anew at each step, over incremental, full, changelog and savepoint checkpoints:
    the same digest as without rescaling, every key in exactly one shard."""
    chain = rescale(tmp_path, LocalStorage(tmp_path / "root"), Keys(keys), first, steps, every)
    assert chain.entries == sum(KINDS[n % len(KINDS)] for n in range(keys))
    walk(chain)
