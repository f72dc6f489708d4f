"""A small checkpoint on a real disk with everything that one can consist of, and how validation looks at it, without Spark."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from cairn.shard_jobs.check_restored import ValidationJob
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.rocks import EngineOptions, RocksStore
from state_backend.formats import paths, record_codec
from state_backend.formats.spark_hash import key_group
from state_backend.formats.types import parse_struct
from state_backend.inspection.verify import verify_files
from state_backend.shard.manifest import manifest_of
from state_backend.shard.restore import restore_shard
from state_backend.state import layout
from state_backend.state.shard_state import ShardState
from state_backend.state.state_variables import ListState, MapState, ValueState
from state_backend.state.timers import register_timer
from state_backend.values.errors import CairnError
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.marks import CanonicalFile
from state_backend.values.records import (
    Content,
    FiledShard,
    InlineShard,
    KeyGroupState,
    OutputFile,
    Prepared,
    Record,
    ShardManifest,
    StateDescriptor,
)
from tests.support.chains import Chain, Mode
from tests.support.checkpoints import PIPELINE, content, day
from tests.support.coordinator import Coordinator
from tests.support.in_process import run_here
from tests.support.savepoints import some_state
from tests.support.shards import KEY_SCHEMA, KEYS, snapshot_of

MAX_PARALLELISM, PARALLELISM = 16, 3
USERS = ["", "a", "b", "\x00", "ä", *(f"user-{n}" for n in range(80))]
_KEY = parse_struct(KEY_SCHEMA)


def with_totals(made: Content, manifests: Sequence[ShardManifest]) -> Content:
    """The content with what the manifests sum up to."""
    values = dict.fromkeys((d.name for d in made.states if d.kind == "value"), 0)
    for manifest in manifests:
        for state in manifest.key_group_states:
            for name in values.keys() & state.entries.keys():
                values[name] += state.entries[name]
    totals = replace(
        made.totals,
        entries=sum(m.entries for m in manifests),
        keys=max(values.values(), default=0),
        state_bytes=sum(m.size_bytes for m in manifests),
    )
    return replace(made, totals=totals, digest=sum(m.digest for m in manifests) % 2**64)


def content_of(chain: Chain, n: int, attempt: str, base_id: int | None) -> Content:
    """What an interval's driver would record of the chain's last checkpoint; manifests inline."""
    refs = tuple(InlineShard(shard=m.shard, inline=m) for m in chain.manifests)
    made = content(
        day(n),
        attempt,
        base_id,
        parallelism=len(chain.manifests),
        max_parallelism=chain.max_parallelism,
        key_schema=KEY_SCHEMA,
        states=tuple(chain.states),
        shards=refs,
    )
    return with_totals(made, chain.manifests)


def look(root: Path, made: Content, mode: str, *, savepoint: tuple[CanonicalFile, ...] | None = None) -> list[str]:
    """What validation finds in what lies in the folder, in the order in which it looks. ``savepoint``: its canonical files."""
    with tempfile.TemporaryDirectory(prefix="cairn-test-") as work:
        found = verify_files(made, LocalStorage(root), work=Path(work), savepoint=savepoint).findings
    if found or mode == "fast":
        return list(found)
    job = ValidationJob(root=str(root), content=made, canonical=savepoint or (), engine=EngineOptions())
    return list(job.findings(run_here(None, job)))


class Checkpointed:
    """The folder of a pipeline with four checkpoints: two incremental ones, then two changelogs. The last one, which is looked at,
    has files and segments of several attempts, states of every kind, timers and what expires. Shards 0 and 1 have manifests in
    files, shard 2 inline."""

    ID = 4

    def __init__(self, folder: Path) -> None:
        self.root = folder / PIPELINE

    @classmethod
    def make(cls, folder: Path) -> Checkpointed:
        made = cls(folder)
        storage = LocalStorage(made.root)
        chain = Chain(folder / "work", storage, max_parallelism=MAX_PARALLELISM)
        modes: list[Mode] = ["incremental", "incremental", "changelog", "changelog"]
        for n, mode in enumerate(modes, 1):
            chain.step(PARALLELISM, mode, _fill if n == 1 else _change(n))
            attempt = f"attempt-{chain.runs}"
            output = storage.create(paths.output(day(n), attempt, 0, 0), f"rows of day {n}".encode())
            content_n = content_of(chain, n, attempt, n - 1 or None)
            refs = [
                FiledShard(
                    shard=m.shard,
                    manifest=storage.create(paths.shared(attempt, m.shard, 0, 99, "manifest"), record_codec.encode(m)),
                )
                for m in chain.manifests[:2]
            ]
            shards = (*refs, *content_n.shards[2:])
            content_n = replace(content_n, shards=shards, outputs=(OutputFile(handle=output, rows=1),))
            coordinator = Coordinator(storage, PIPELINE)
            coordinator.prepare(Prepared(h0=n - 1, content=content_n))
            coordinator.commit(attempt)
        shutil.rmtree(folder / "work")
        return made

    def copy_to(self, folder: Path) -> Checkpointed:
        shutil.copytree(self.root, folder / PIPELINE)
        return Checkpointed(folder)

    @property
    def storage(self) -> LocalStorage:
        return LocalStorage(self.root)

    def record(self, checkpoint_id: int = ID) -> Record:
        return Coordinator(self.storage, PIPELINE).record(checkpoint_id)

    def manifests(self, checkpoint_id: int = ID) -> list[ShardManifest]:
        return [manifest_of(ref, self.storage) for ref in self.record(checkpoint_id).content.shards]

    def look(self, mode: str) -> list[str]:
        try:
            made = self.record().content
        except CairnError as error:
            return [str(error)]
        return look(self.root, made, mode)

    def tree(self) -> dict[str, bytes]:
        """Every file and its bytes."""
        files = (f for f in self.root.rglob("*") if f.is_file())
        return {str(f.relative_to(self.root)): f.read_bytes() for f in files}

    # --- rewriting, with every checksum right ----------------------------------------------------------------------------------

    def write(self, made: Content) -> None:
        """The content as the checkpoint's record."""
        record = replace(self.record(), content=made)
        (self.root / paths.record(self.ID)).write_bytes(record_codec.encode(record))

    def write_manifests(self, manifests: Sequence[ShardManifest], *, sum_up: bool = True) -> None:
        """These manifests, inline, as the checkpoint's, and what they sum up to unless the record shall stay as it is."""
        made = self.record().content
        refs = tuple(InlineShard(shard=m.shard, inline=m) for m in manifests)
        made = replace(made, shards=refs)
        self.write(with_totals(made, manifests) if sum_up else made)

    def rewrite_shard(self, shard: int, change: Callable[[RocksStore], None], *, recount: bool) -> None:
        """Restores a shard, changes what is stored, and puts it in the checkpoint again with handles that are right. ``recount``:
        with the counts and digests of what is stored now; else with those of before."""
        manifests = self.manifests()
        before = manifests[shard]
        work = Path(tempfile.mkdtemp(prefix="cairn-test-"))
        restored = restore_shard(before.key_groups, [before], self.storage, work / "db", EngineOptions())
        with restored.store as store:
            change(store)
            states = counted(store, self.record().content.states) if recount else before.key_group_states
            given = {"attempt": "rewritten", "shard": shard, "key_group_states": states}
            manifests[shard] = snapshot_of(store, self.storage, work / "image", before.key_groups, **given).manifest
        shutil.rmtree(work)
        self.write_manifests(manifests)


def counted(store: RocksStore, states: Sequence[StateDescriptor]) -> tuple[KeyGroupState, ...]:
    """Counts and digests of all that is stored, right or wrong, entry by entry."""
    by_id = {d.state_id: d for d in states}
    counts: dict[int, dict[str, int]] = {}
    digests: dict[int, int] = {}

    def add(group: int, name: str, rest: bytes, entry: bytes) -> None:
        of_group = counts.setdefault(group, {})
        of_group[name] = of_group.get(name, 0) + 1
        digests[group] = (digests.get(group, 0) + layout.entry_hash(layout.seed_of(name), rest, entry)) % 2**64

    for stored, entry in store.scan(b"", None):
        if len(stored) < 3:
            continue
        group, state_id, rest = int.from_bytes(stored[:2], "big"), stored[2], stored[3:]
        if state_id == layout.TIMERS:
            for timer in [rest + entry[at : at + 8] for at in range(0, len(entry), 8)] or [rest]:
                add(group, layout.TIMERS_NAME, timer, b"")
        elif state_id in by_id and not (by_id[state_id].kind == "list" and is_head(rest)):
            add(group, by_id[state_id].name, rest, entry)
    return tuple(
        KeyGroupState(key_group=group, entries=dict(sorted(entries.items())), digest=digests[group])
        for group, entries in sorted(counts.items())
    )


def is_head(rest: bytes) -> bool:
    """Whether what follows state id of a list names its positions."""
    return rest[KEYS.decode_prefix(rest)[1] :] == layout.LIST_META


def _mine(owned: KeyGroupRange) -> list[str]:
    return [u for u in USERS if key_group((u,), _KEY, MAX_PARALLELISM) in owned]


def _fill(state: ShardState, owned: KeyGroupRange) -> None:
    some_state(state, list(_mine(owned)), now_ms=1_000)


def _change(n: int) -> Callable[[ShardState, KeyGroupRange], None]:
    """A third of the keys changes in everything, or loses it; the last change also what the one before did."""

    def change(state: ShardState, owned: KeyGroupRange) -> None:
        for at, user in enumerate(_mine(owned)):
            if at % 3 != n % 3 and (n < 4 or at % 3):
                continue
            state.set_key(key_group((user,), _KEY, MAX_PARALLELISM), KEYS.encode((user,)))
            ListState(state, "list").append_list([(n, "appended"), (n, None)])
            ListState(state, "list_ttl").append_value((n, "appended"))
            MapState(state, "map").update_value((f"{n}",), (n, "put"))
            ValueState(state, "value_ttl").update((n, "again"))
            register_timer(state, 5_000 + n)
            if at % 2:
                ValueState(state, "value").update((n, user * 3))
            else:
                MapState(state, "map_ttl").clear()

    return change
