"""Restores at the edges of ranges, and from checkpoints of which a file is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.adapters.rocks import EngineOptions
from state_backend.shard.restore import restore_shard
from state_backend.state.shard_state import ShardState
from state_backend.state.state_variables import ValueState
from state_backend.values.errors import CorruptFile, StorageUnavailable
from state_backend.values.key_groups import KeyGroupRange
from tests.support.chains import Chain, Change
from tests.support.faulty_storage import Fault, FaultyStorage
from tests.support.shards import KEYS

EDGES = [0, 1, 126, 127, 128, 129, 254, 255, 256, 257, 32_766, 32_767]


def every_group(groups: list[int], per_group: int = 20) -> Change:
    def change(state: ShardState, owned: KeyGroupRange) -> None:
        values = ValueState(state, "value")
        for group in groups:
            if group in owned:
                for n in range(per_group):
                    state.set_key(group, KEYS.encode((f"{group}-{n}",)))
                    values.update((n, None))

    return change


@pytest.mark.parametrize("first, last", [(0, 127), (127, 128), (128, 255), (255, 256), (256, 32_766), (32_767, 32_767)])
@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_restored_shard_has_only_its_key_groups(tmp_path: Path, first: int, last: int, parallelism: int) -> None:
    """F69: where one byte of a key group ends and the next begins, and at the very last; from one shard and from three."""
    chain = Chain(tmp_path / "chain", MemoryStorage(), max_parallelism=32_768)
    chain.step(parallelism, "incremental", every_group(EDGES))
    target = KeyGroupRange(first=first, last=last)
    restored, state = chain.open(target, "clipped")
    with restored.store as store:
        found = [int.from_bytes(key[:2], "big") for key, _ in store.scan(b"", None)]
        assert found == [group for group in EDGES if group in target for _ in range(20)]
        assert [s.key_group for s in state.key_group_states()] == sorted({*found})


@pytest.mark.parametrize("mode", ["incremental", "changelog", "savepoint"])
@pytest.mark.parametrize("damage", ["missing", "empty", "shorter", "flipped"])
def test_one_bad_file_among_three_shards_refuses_the_restore(tmp_path: Path, mode: str, damage: str) -> None:
    """F7, S32: the file is named, no folder of the three is left, and an undamaged range still restores."""
    storage = MemoryStorage()
    chain = Chain(tmp_path / "chain", storage, max_parallelism=6)
    chain.step(3, "incremental", every_group([*range(6)]))
    chain.step(3, mode, every_group([*range(6)], 30))  # type: ignore[arg-type]
    handle = chain.manifests[2].handles[-1]
    data = storage.read(handle.path)
    storage.delete(handle.path)
    if damage != "missing":
        bad = {"empty": b"", "shorter": data[:-1], "flipped": data[:40] + bytes([data[40] ^ 1]) + data[41:]}[damage]
        storage.create(handle.path, bad)
    into = tmp_path / "into" / "db"
    with pytest.raises(CorruptFile, match=handle.path):
        restore_shard(KeyGroupRange(first=0, last=5), chain.manifests, storage, into, EngineOptions())
    assert not into.parent.exists() or list(into.parent.iterdir()) == []
    restore_shard(KeyGroupRange(first=0, last=3), chain.manifests, storage, into, EngineOptions()).store.close()


def test_a_failed_rescaling_leaves_the_earlier_checkpoint_restorable(tmp_path: Path) -> None:
    """S36, and where we differ: rescaling is part of an interval, so one that dies in the middle leaves the checkpoint that it
    started from, and the next try may take that or any other number of shards."""
    chain = Chain(tmp_path / "chain", MemoryStorage(), max_parallelism=6)
    chain.step(2, "incremental", every_group([*range(6)]))
    inner, base, digest = chain.storage, chain.manifests, chain.digest
    # The second of three shards has been restored and changed when its upload fails.
    chain.storage = FaultyStorage(inner, {6: Fault(error=StorageUnavailable("gone"), when="before")})
    with pytest.raises(StorageUnavailable, match="gone"):
        chain.step(3, "incremental", every_group([*range(6)], 25))
    assert chain.manifests == base and any("attempt-2/0-" in i.path for i in inner.list("shared/"))
    chain.storage = inner
    for parallelism in (5, 3, 2):
        chain.manifests = base
        chain.step(parallelism, "incremental")
        assert chain.digest == digest
