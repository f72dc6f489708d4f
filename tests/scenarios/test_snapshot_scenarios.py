"""What Flink and Spark show of snapshots, on shards of ours: what is uploaded, what is shared, and what a failure leaves."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from cairn.testing import PipelineTester
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.formats.spark_hash import key_group
from state_backend.formats.types import parse_struct
from state_backend.ports.storage import Storage
from state_backend.shard import snapshot
from state_backend.shard.changelog_store import ChangelogOptions
from state_backend.shard.manifest import ssts_of
from state_backend.state.shard_state import ShardState
from state_backend.state.state_variables import ValueState
from state_backend.values.errors import StorageUnavailable
from state_backend.values.handles import Handle
from state_backend.values.key_groups import KeyGroupRange
from tests.support.chains import ENGINE, Chain, Change, Mode
from tests.support.faulty_storage import Fault, FaultyStorage
from tests.support.once import HOUR, ONCE, START, manifests_of
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


def test_full_checkpoints_share_no_files_with_earlier_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """F1, F44, S26: incremental -> incremental -> full -> incremental."""
    monkeypatch.setattr(snapshot, "INLINE_FILE_BYTES", 0)
    tester, found = PipelineTester(ONCE, input_schema="k bigint, t timestamp"), list[set[str]]()
    for n, tester.mode in enumerate(("incremental", "incremental", "full", "incremental")):
        tester.run([(k, START + n * HOUR) for k in range(50 * n, 50 * n + 50)])
        found.append({h.path for made in manifests_of(tester) for h in made.handles})
    assert found[0] < found[1] and found[2] < found[3] and found[2].isdisjoint(found[1])


def test_empty_state_is_checkpointed_and_restored(chain: Chain) -> None:
    """F21: nothing is captured, restored, and captured again."""
    chain.step(2, "incremental")
    assert (chain.entries, chain.digest, values(chain, "a")) == (0, 0, [None])
    chain.step(1, "full")
    chain.step(1, "changelog")
    assert (chain.entries, chain.digest) == (0, 0)


@pytest.mark.parametrize("parallelism", [1, 2])
def test_untouched_state_is_kept_across_checkpoints_of_every_mode(chain: Chain, parallelism: int) -> None:
    """F22, F77, S40: written, restored, captured without a read or a write, restored: all there."""
    names = ["a", "b", "c"]
    chain.step(1, "incremental", put(*names, n=7))
    for mode in ("incremental", "changelog", "savepoint", "incremental"):
        chain.step(parallelism, mode)
    assert values(chain, *names) == [7, 7, 7]


def test_writes_after_the_last_checkpoint_are_rolled_back(chain: Chain) -> None:
    """S1, S4: an older checkpoint is what it was, whatever was captured after it, or written and never captured."""
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


class DuringUploads(MemoryStorage):
    """Does something else at each upload, before it takes effect, one at a time."""

    def __init__(self, files: Storage, act: Callable[[], object]) -> None:
        super().__init__()
        self.act, self._one = act, threading.Lock()
        for info in files.list(""):
            self.create(info.path, files.read(info.path))

    def upload(self, path: str, local: Path) -> Handle:
        with self._one:
            self.act()
        return super().upload(path, local)


@pytest.mark.parametrize("mode", ["incremental", "full", "savepoint"])
def test_writes_during_the_upload_are_not_in_the_checkpoint(chain: Chain, mode: Mode) -> None:
    """F12: the store is written to, flushed and compacted between the capture and the end of the upload; the checkpoint has what
    was there when it was captured, and nothing stays open."""
    chain.step(1, "incremental", put("a", "b", n=1))
    opened: list[ShardState] = []

    def change(state: ShardState, owned: KeyGroupRange) -> None:
        put("a", n=2)(state, owned)
        opened.append(state)

    def write() -> None:
        (state,) = opened
        put("a", "b", "c", n=3)(state, KeyGroupRange(first=0, last=GROUPS - 1))
        state.flush()
        state.store.compact()

    storage = DuringUploads(chain.storage, write)
    chain.storage = storage
    chain.step(1, mode, change)
    assert chain.manifests[0].files_bytes > 0
    storage.act = lambda: None
    assert values(chain, "a", "b", "c") == [2, 1, None]
    assert not any(thread.name.startswith("transfer") for thread in threading.enumerate())


def test_two_concurrent_snapshots_of_one_base_both_restore(tmp_path: Path) -> None:
    """F20: the first is held up in its upload; the second, from the same base, begins later and ends first; both are whole."""
    storage, reached, go_on = MemoryStorage(), threading.Event(), threading.Event()

    class Held(MemoryStorage):
        """The same files, by a way that is slow."""

        def upload(self, path: str, local: Path) -> Handle:
            reached.set()
            assert go_on.wait(30)
            return storage.upload(path, local)

        def download(self, handle: Handle, destination: Path) -> None:
            storage.download(handle, destination)

    slow, fast = (Chain(tmp_path / name, storage, max_parallelism=GROUPS) for name in ("slow", "fast"))
    fast.step(1, "incremental", put("a", "b", n=1))
    slow.manifests, slow.runs, slow.storage = fast.manifests, 100, Held()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(slow.step, 1, "incremental", put("a", n=2))
        assert reached.wait(30)
        fast.step(1, "incremental", put("a", n=3))
        assert not first.done()
        go_on.set()
        first.result(30)
    slow.storage = storage
    assert values(slow, "a", "b") == [2, 1]
    assert values(fast, "a", "b") == [3, 1]


def test_branches_of_one_checkpoint_do_not_mix(chain: Chain) -> None:
    """F37, S2, S16, S18: two restores of one checkpoint write files of one name and other bytes. Each goes on with its own, and the
    first branch is what it was after the second has written."""
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


def test_files_that_are_merged_away_stay_for_the_checkpoints_that_name_them(chain: Chain) -> None:
    """S17: a merge between two checkpoints removes local files that the first one shared; that one restores and goes on all the
    same, into files of its own, beside what came after it."""
    for n in range(3):
        chain.step(1, "incremental", put("a", f"k{n}", n=n))
    before = chain.manifests

    def change(state: ShardState, owned: KeyGroupRange) -> None:
        state.store.compact()
        put("a", n=10)(state, owned)

    chain.step(1, "incremental", change)
    after = chain.manifests
    assert {h.path for h in before[0].handles}.isdisjoint(h.path for h in after[0].handles)
    chain.manifests = before
    assert values(chain, "a", "k0", "k2") == [2, 0, 2]
    chain.step(1, "incremental", put("a", n=20))
    assert {*before[0].handles} < {*chain.manifests[0].handles}
    assert values(chain, "a", "k0", "k2") == [20, 0, 2]
    chain.manifests = after
    assert values(chain, "a", "k0", "k2") == [10, 0, 2]


def test_many_small_checkpoints_leave_few_files() -> None:
    """F17: 40 checkpoints of one key each; never more than the limit of 12 runs."""
    tester = PipelineTester(ONCE, input_schema="k bigint, t timestamp")
    for n in range(40):
        tester.run([(n, START + n * HOUR)])
        assert all(len(ssts_of(made)) <= ENGINE.most_sorted_runs for made in manifests_of(tester))


def test_a_pipelines_changelog_options_bound_its_segments() -> None:
    pipeline, found = replace(ONCE, parallelism=1, changelog=ChangelogOptions(max_segments=1)), list[int]()
    tester = PipelineTester(pipeline, input_schema="k bigint, t timestamp", mode="changelog")
    for n in range(6):
        tester.run([(random.getrandbits(62), START + n * HOUR) for _ in range(1500)])
        found += [len(made.segments) for made in manifests_of(tester)]
    assert found == [1, 0] * 3


def test_every_checkpoint_restores_after_switches_between_incremental_and_changelog(chain: Chain) -> None:
    """F85, S26, S30: five intervals of changelog between files; every checkpoint restores to what it was."""
    history = []
    for n in range(12):
        chain.step(1, "incremental" if n % 6 == 0 else "changelog", put(f"k{n % 4}", "last", n=n))
        history.append((n, chain.manifests))
        assert len(chain.manifests[0].segments) == n % 6
    for n, manifests in history:
        chain.manifests = manifests
        assert values(chain, "last", f"k{n % 4}") == [n, n]


@pytest.mark.long("half a second", runs_in="ci")
def test_segments_become_files_when_there_are_three(tmp_path: Path) -> None:
    """F84, S20: with at most three segments every fourth checkpoint of a changelog writes files, exactly; so do those whose first
    try to write them failed, and a segment that could not be written is tried again as one."""
    options = ChangelogOptions(max_segments=3)
    chain = Chain(tmp_path / "chain", MemoryStorage(), max_parallelism=GROUPS, changelog=options)
    found = []
    for n in range(22):
        inner, base = chain.storage, chain.manifests
        if base:
            calls = len(base[0].handles)  # the first upload
            chain.storage = FaultyStorage(inner, {calls: Fault(error=StorageUnavailable("gone"), when="before")})
            before = stored(chain)
            with pytest.raises(StorageUnavailable):
                chain.step(1, "changelog", put("a", f"k{n}", n=n))
            chain.storage = inner
            assert (stored(chain), chain.manifests) == (before, base)
        chain.step(1, "changelog", put("a", f"k{n}", n=n))
        found.append(len(chain.manifests[0].segments))
        assert values(chain, "a", "k0", f"k{n}") == [n, 0, n]
    assert [n for n, segments in enumerate(found) if not segments] == [0, 4, 8, 12, 16, 20]
    assert max(found) == 3
