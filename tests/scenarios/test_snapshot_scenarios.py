"""What Flink and Spark show of snapshots, on shards of ours: what is uploaded, what is shared, and what a failure leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from state_backend.adapters.faulty_storage import Fault, FaultyStorage
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.formats.spark_hash import key_group
from state_backend.formats.types import parse_struct
from state_backend.state.keyed_states import ValueState
from state_backend.state.shard_state import ShardState
from state_backend.values.errors import StorageUnavailable
from state_backend.values.key_groups import KeyGroupRange
from tests.support.chains import Chain, Change
from tests.support.shards import KEY_SCHEMA, KEYS

GROUPS = 4


def put(*names: str, n: int) -> Change:
    """Sets the value of each of these keys that the shard owns."""

    def change(state: ShardState, owned: KeyGroupRange) -> None:
        values = ValueState(state, "value")
        for name in names:
            group = key_group((name,), parse_struct(KEY_SCHEMA), GROUPS)
            if group in owned:
                state.set_key(group, KEYS.encode((name,)))
                values.update((n, None))

    return change


def values(chain: Chain, *names: str) -> list[int | None]:
    """What the last checkpoint, restored, says of these keys."""
    found: dict[str, int | None] = {}
    for manifest in chain.manifests:
        restored, state = chain.open(manifest.key_groups, "read")
        with restored.store:
            for name in names:
                group = key_group((name,), parse_struct(KEY_SCHEMA), GROUPS)
                if group in manifest.key_groups:
                    state.set_key(group, KEYS.encode((name,)))
                    row = ValueState(state, "value").get()
                    found[name] = row[0] if row else None
    chain.runs += 1
    return [found[name] for name in names]


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(tmp_path / "chain", MemoryStorage(), max_parallelism=GROUPS)


def stored(chain: Chain) -> set[str]:
    return {info.path for info in chain.storage.list("")}


def test_a_checkpoint_writes_what_is_new_and_shares_the_rest(chain: Chain) -> None:
    """F1, S19: the second checkpoint names more bytes than it uploads; the third, without a write, uploads no SST."""
    chain.step(1, "incremental", put(*map(str, range(2000)), n=1))
    (first,) = chain.manifests
    chain.step(1, "incremental", put("0", n=2))
    (second,), (taken,) = chain.manifests, chain.snapshots
    assert {*first.files} < {*second.files}
    assert taken.uploaded_files == 1 and taken.uploaded_bytes < second.files_bytes
    before = stored(chain)
    chain.step(1, "incremental")
    assert chain.snapshots[0].uploaded_files == 0
    assert stored(chain) == before and chain.manifests[0].files == second.files


def test_a_full_checkpoint_and_a_savepoint_share_nothing_and_later_ones_share_them(chain: Chain) -> None:
    """F1, F44, S26: full -> incremental -> savepoint -> incremental; what was saved apart is never taken for the base's."""
    chain.step(1, "incremental", put("a", n=1))
    for mode in ("full", "savepoint"):
        before = {h.path for h in chain.manifests[0].handles}
        chain.step(1, mode)
        (made,) = chain.manifests
        assert made.handles and before.isdisjoint(h.path for h in made.handles)
        chain.step(1, "incremental", put("b", n=2))
        assert {*made.handles} <= {*chain.manifests[0].handles}
    assert values(chain, "a", "b") == [1, 2]


def test_an_empty_state_is_a_checkpoint_too(chain: Chain) -> None:
    """F21: nothing is captured, restored, and captured again."""
    chain.step(2, "incremental")
    assert (chain.entries, chain.digest, values(chain, "a")) == (0, 0, [None])
    chain.step(1, "full")
    chain.step(1, "changelog")
    assert (chain.entries, chain.digest) == (0, 0)


@pytest.mark.parametrize("parallelism", [1, 2])
def test_state_that_nobody_touched_goes_on(chain: Chain, parallelism: int) -> None:
    """F22, F77: written, restored, captured without a read or a write, restored: all there."""
    names = ["a", "b", "c"]
    chain.step(1, "incremental", put(*names, n=7))
    for mode in ("incremental", "changelog", "savepoint", "incremental"):
        chain.step(parallelism, mode)
    assert values(chain, *names) == [7, 7, 7]


def test_writes_after_the_capture_are_not_in_it(chain: Chain) -> None:
    """F12, F20, S1: an older checkpoint is what it was, whatever was captured after it, or written and never captured."""
    chain.step(1, "incremental", put("a", n=1))
    first = chain.manifests
    chain.step(1, "incremental", put("a", n=2))
    second = chain.manifests
    restored, state = chain.open(second[0].key_groups, "lost")
    put("a", n=3)(state, second[0].key_groups)
    state.flush()
    restored.store.close()
    assert values(chain, "a") == [2]
    chain.manifests = first
    assert values(chain, "a") == [1]


@pytest.mark.parametrize("mode", ["incremental", "full", "savepoint", "changelog"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_upload_that_fails_costs_nothing_of_what_was(chain: Chain, mode: str, when: str) -> None:
    """F2, F18, S3, S5: the error surfaces, the storage is as before, the checkpoint before restores, and the retry succeeds."""
    chain.step(1, "incremental", put("a", "b", n=1))
    inner, before = chain.storage, stored(chain)
    calls = len(chain.manifests[0].files)
    fault = Fault(error=StorageUnavailable("no space"), when="before" if when == "before" else "after")
    chain.storage = FaultyStorage(inner, {calls: fault})
    with pytest.raises(StorageUnavailable, match="no space"):
        chain.step(1, mode, put("a", n=2))  # type: ignore[arg-type]
    chain.storage = inner
    if when == "before":
        assert stored(chain) == before
    assert before <= stored(chain)
    assert values(chain, "a", "b") == [1, 1]
    chain.step(1, mode, put("a", n=2))  # type: ignore[arg-type]
    assert values(chain, "a", "b") == [2, 1]


def test_branches_of_one_checkpoint_do_not_mix(chain: Chain) -> None:
    """F37, S2, S13, S14, S16, S18: two restores of one checkpoint write files of one name and other bytes. Each goes on with its
    own, and the first branch is what it was after the second has written."""
    chain.step(1, "incremental", put("a", n=1))
    base = chain.manifests
    chain.step(1, "incremental", put("a", "b", n=2))
    one = chain.manifests
    chain.manifests = base
    chain.step(1, "incremental", put("a", "b", n=3))
    other = chain.manifests
    names = [{f.name for f in branch[0].files} - {f.name for f in base[0].files} for branch in (one, other)]
    assert names[0] == names[1] != set()
    assert {*one[0].handles} & {*other[0].handles} == {*base[0].handles}
    for branch, n in ((one, 2), (other, 3)):
        chain.manifests = branch
        chain.step(1, "incremental", put("c", n=n))
        assert values(chain, "a", "b", "c") == [n, n, n]


def test_back_and_forth_between_the_modes(chain: Chain) -> None:
    """F84, F85, S20, S26, S30: five intervals of changelog between files; every checkpoint restores to what it was."""
    history = []
    for n in range(12):
        chain.step(1, "incremental" if n % 6 == 0 else "changelog", put(f"k{n % 4}", "last", n=n))
        history.append((n, chain.manifests))
        assert len(chain.manifests[0].segments) == n % 6
    for n, manifests in history:
        chain.manifests = manifests
        assert values(chain, "last", f"k{n % 4}") == [n, n]
