"""Every way to damage a checkpoint that we could think of, and which mode of validation finds it.

*fast* must find whatever touches a file under a handle or makes record and manifests contradict each other. *full* must find
everything, also where whoever did the damage rewrote files, manifests and record with checksums that are right.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from state_backend.adapters.rocks import RocksStore
from state_backend.formats import paths, record_codec
from state_backend.formats.row_codec import RowCodec
from state_backend.formats.spark_hash import key_group
from state_backend.formats.types import parse_struct
from state_backend.state import layout
from state_backend.values.handles import Handle
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.records import (
    Content,
    KeyGroupState,
    SchemaVersion,
    Segment,
    ShardManifest,
    ShardRef,
    StateDescriptor,
)
from tests.support.shards import KEY_SCHEMA, KEYS, STATES, struct
from tests.support.tiers import at_tier
from tests.support.validated import MAX_PARALLELISM, PARALLELISM, Checkpointed, is_head

SEEDS = (1, 2)
_IDS = {d.name: d.state_id for d in STATES}
Mutate = Callable[[Checkpointed, random.Random], None]


@dataclass(frozen=True, slots=True)
class Mutation:
    """``fast``: whether the fast mode must find it too."""

    name: str
    fast: bool
    mutate: Mutate


# --- bytes of files ------------------------------------------------------------------------------------------------------------


def files_of(world: Checkpointed, kind: str) -> list[Path]:
    """The files of a kind that the checkpoint needs."""
    content, manifests = world.record().content, world.manifests()
    handles: dict[str, Sequence[Handle]] = {
        "sst": [f.handle for m in manifests for f in m.files],
        "segment": [s.handle for m in manifests for s in m.segments if s.handle is not None],
        "manifest": [ref.manifest for ref in content.shards if ref.manifest is not None],
        "output": [o.handle for o in content.outputs],
    }
    if kind == "record":
        return [world.root / paths.record(world.ID)]
    return [world.root / h.path for h in handles[kind]]


def file(kind: str, change: Callable[[bytes, random.Random], bytes | None]) -> Mutate:
    """One file has other bytes, or is gone."""

    def mutate(world: Checkpointed, rng: random.Random) -> None:
        file = rng.choice(files_of(world, kind))
        data = change(file.read_bytes(), rng)
        file.unlink() if data is None else file.write_bytes(data)

    return mutate


def flipped(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


# --- what is recorded, with checksums that are right ---------------------------------------------------------------------------


def content(change: Callable[[Content, random.Random], Content]) -> Mutate:
    return lambda world, rng: world.write(change(world.record().content, rng))


def total(name: str, change: int) -> Mutate:
    def changed(made: Content, rng: random.Random) -> Content:
        return replace(made, totals=replace(made.totals, **{name: getattr(made.totals, name) + change}))

    return content(changed)


def manifest(
    change: Callable[[ShardManifest, Checkpointed, random.Random], ShardManifest],
    shard: int = -1,
    *,
    sum_up: bool = True,
) -> Mutate:
    """One shard's manifest; ``sum_up``: the record's totals follow."""

    def mutate(world: Checkpointed, rng: random.Random) -> None:
        manifests = world.manifests()
        at = shard if shard >= 0 else rng.randrange(len(manifests))
        manifests[at] = change(manifests[at], world, rng)
        world.write_manifests(manifests, sum_up=sum_up)

    return mutate


def group_of(change: Callable[[KeyGroupState, random.Random], KeyGroupState], *, sum_up: bool) -> Mutate:
    """One key group's counts and digest."""

    def changed(made: ShardManifest, world: Checkpointed, rng: random.Random) -> ShardManifest:
        states = list(made.key_group_states)
        at = rng.randrange(len(states))
        states[at] = change(states[at], rng)
        return replace(made, key_group_states=tuple(states))

    return manifest(changed, sum_up=sum_up)


def another_digest(state: KeyGroupState, rng: random.Random) -> KeyGroupState:
    return replace(state, digest=state.digest ^ 1 << rng.randrange(64))


def one_more(state: KeyGroupState, rng: random.Random) -> KeyGroupState:
    name = rng.choice([*state.entries])
    return replace(state, entries={**state.entries, name: state.entries[name] + 1})


def unknown_name(state: KeyGroupState, rng: random.Random) -> KeyGroupState:
    return replace(state, entries={("gone" if n == "value" else n): c for n, c in state.entries.items()})


def counts_of_two_states(made: ShardManifest, world: Checkpointed, rng: random.Random) -> ShardManifest:
    """One entry more of one state and one less of another in one key group, and the other way round in another: all sums stay."""
    states = list(made.key_group_states)
    places = [at for at, s in enumerate(states) if s.entries.get("map", 0) > 1 and s.entries.get("list", 0) > 1]
    for at, sign in zip(rng.sample(places, 2), (1, -1), strict=True):
        entries = states[at].entries
        changed = {**entries, "map": entries["map"] + sign, "list": entries["list"] - sign}
        states[at] = replace(states[at], entries=changed)
    return replace(made, key_group_states=tuple(states))


def ranges(first: int, last: int) -> Mutate:
    """The key groups that shard 1 says it has, moved at its ends."""

    def moved(made: ShardManifest, world: Checkpointed, rng: random.Random) -> ShardManifest:
        owned = made.key_groups
        return replace(made, key_groups=KeyGroupRange(first=owned.first + first, last=owned.last + last))

    return manifest(moved, shard=1)


def shards(change: Callable[[list[ShardRef]], list[ShardRef]]) -> Mutate:
    return content(lambda made, rng: replace(made, shards=tuple(change(list(made.shards)))))


def crossed(refs: list[ShardRef]) -> list[ShardRef]:
    return [replace(refs[0], manifest=refs[1].manifest), replace(refs[1], manifest=refs[0].manifest), *refs[2:]]


def without_an_sst(made: ShardManifest, world: Checkpointed, rng: random.Random) -> ShardManifest:
    gone = rng.choice(made.files)
    return replace(made, files=tuple(f for f in made.files if f is not gone))


def exchanged_ssts(made: ShardManifest, world: Checkpointed, rng: random.Random) -> ShardManifest:
    first, second = made.files[:2]
    return replace(
        made, files=(replace(first, handle=second.handle), replace(second, handle=first.handle), *made.files[2:])
    )


def sst_of_another_shard(made: ShardManifest, world: Checkpointed, rng: random.Random) -> ShardManifest:
    other = world.manifests()[(made.shard + 1) % PARALLELISM]
    return replace(made, files=(replace(made.files[0], handle=other.files[0].handle), *made.files[1:]))


def old_sst_under_a_new_name(made: ShardManifest, world: Checkpointed, rng: random.Random) -> ShardManifest:
    """A copy of the oldest file with a name and a handle of its own, in the place of the newest."""
    data = (world.root / made.files[0].handle.path).read_bytes()
    handle = world.storage.create(paths.shared("replayed", made.shard, 0, 0, "sst"), data)
    return replace(made, files=(*made.files[:-1], replace(made.files[-1], handle=handle)))


def flipped_sst(made: ShardManifest, world: Checkpointed, rng: random.Random) -> ShardManifest:
    """A bit of the data, and a handle that was made afterwards."""
    file = made.files[0]
    data = bytearray((world.root / file.handle.path).read_bytes())
    data[rng.randrange(len(data) // 2)] ^= 1 << rng.randrange(8)
    handle = world.storage.create(paths.shared("flipped", made.shard, 0, 0, "sst"), bytes(data))
    return replace(made, files=(replace(file, handle=handle), *made.files[1:]))


def segment_of_another_shard(made: ShardManifest, world: Checkpointed, rng: random.Random) -> ShardManifest:
    other = world.manifests()[(made.shard + 1) % PARALLELISM]
    return replace(made, segments=(*made.segments[:-1], other.segments[-1]))


def segment_counts(made: ShardManifest, world: Checkpointed, rng: random.Random) -> ShardManifest:
    last = made.segments[-1]
    return replace(made, segments=(*made.segments[:-1], replace(last, changes=last.changes + rng.choice((1, -1)))))


def small_file(change: Callable[[bytes, random.Random], bytes]) -> Mutate:
    """RocksDB's own manifest, inline in ours."""

    def mutate(made: ShardManifest, world: Checkpointed, rng: random.Random) -> ShardManifest:
        files = list(made.inline_files)
        at = next(n for n, f in enumerate(files) if f.name.startswith("MANIFEST"))
        files[at] = replace(files[at], data=change(files[at].data, rng))
        return replace(made, inline_files=tuple(files))

    return manifest(mutate)


def states(change: Callable[[list[StateDescriptor]], list[StateDescriptor]]) -> Mutate:
    return content(lambda made, rng: replace(made, states=tuple(change(list(made.states)))))


def one_state(of_name: str, **changes: Any) -> Mutate:
    return states(lambda all_: [replace(d, **changes) if d.name == of_name else d for d in all_])


def exchanged_ids(first: str, second: str) -> Mutate:
    ids = {first: _IDS[second], second: _IDS[first]}
    return states(lambda all_: [replace(d, state_id=ids.get(d.name, d.state_id)) for d in all_])


def without_state(name: str, *, forgotten: bool) -> Mutate:
    """``forgotten``: its entries are not counted any more either."""

    def mutate(world: Checkpointed, rng: random.Random) -> None:
        states(lambda all_: [d for d in all_ if d.name != name])(world, rng)
        if forgotten:
            manifests = [
                replace(
                    m,
                    key_group_states=tuple(
                        replace(s, entries=left)
                        for s in m.key_group_states
                        if (left := {n: c for n, c in s.entries.items() if n != name})
                    ),
                )
                for m in world.manifests()
            ]
            world.write_manifests(manifests)

    return mutate


def version(value: dict[str, Any], number: int = 1) -> tuple[SchemaVersion, ...]:
    return (SchemaVersion(version=number, value=value, user_key=None),)


# --- what is stored, with checksums that are right -----------------------------------------------------------------------------


Change = Callable[[RocksStore, random.Random], None]


def stored(change: Change, *, recount: bool = True) -> Mutate:
    """One shard is restored, changed, and written again; counts and digests are those of what it holds then."""

    def mutate(world: Checkpointed, rng: random.Random) -> None:
        world.rewrite_shard(rng.randrange(PARALLELISM), lambda store: change(store, rng), recount=recount)

    return mutate


def some_of(store: RocksStore, state_id: int, rng: random.Random, *, heads: bool | None = None) -> tuple[bytes, bytes]:
    """A stored key and its entry; of lists, positions or elements."""
    found = [
        (key, entry)
        for key, entry in store.scan(b"", None)
        if key[2] == state_id and (heads is None or is_head(key[3:]) == heads)
    ]
    return rng.choice(found)


def of(name: str) -> Callable[[RocksStore, random.Random], tuple[bytes, bytes]]:
    heads = False if name.startswith("list") else None
    return lambda store, rng: some_of(store, _IDS[name], rng, heads=heads)


def write(make: Callable[[bytes, bytes, random.Random], Iterator[tuple[bytes, bytes | None]]], pick: Any) -> Change:
    def change(store: RocksStore, rng: random.Random) -> None:
        store.write(list(make(*pick(store, rng), rng)))

    return change


def entry_becomes(make: Callable[[bytes], bytes], pick: Any) -> Change:
    return write(lambda key, entry, rng: iter([(key, make(entry))]), pick)


def gone(key: bytes, entry: bytes, rng: random.Random) -> Iterator[tuple[bytes, bytes | None]]:
    yield key, None


def row(value: dict[str, Any], number: int, *values: Any) -> bytes:
    return RowCodec("value", parse_struct(value), number).encode(values)


def moved(to: Callable[[int, KeyGroupRange], int]) -> Change:
    """A value under the key group that ``to`` makes of its own and its shard's."""

    def change(store: RocksStore, rng: random.Random) -> None:
        groups = sorted({int.from_bytes(key[:2], "big") for key, _ in store.scan(b"", None)})
        key, entry = of("value")(store, rng)
        group = to(int.from_bytes(key[:2], "big"), KeyGroupRange(first=groups[0], last=groups[-1]))
        store.write([(key, None), (group.to_bytes(2, "big") + key[2:], entry)])

    return change


def beside(group: int, owned: KeyGroupRange) -> int:
    return group + 1 if group < owned.last else group - 1


def elsewhere(group: int, owned: KeyGroupRange) -> int:
    return (owned.last + 2) % MAX_PARALLELISM


def in_system(state_id: int) -> Callable[[RocksStore, random.Random], tuple[bytes, bytes]]:
    return lambda store, rng: some_of(store, state_id, rng)


timers, timer_index, expiry_index = map(in_system, (layout.TIMERS, layout.TIMER_INDEX, layout.EXPIRY_INDEX))


def heads(store: RocksStore, rng: random.Random) -> tuple[bytes, bytes]:
    return some_of(store, _IDS["list"], rng, heads=True)


def timer_in_both_layouts(key: bytes, entry: bytes, rng: random.Random) -> Iterator[tuple[bytes, bytes | None]]:
    yield key[:-8], key[-8:]


def older_timers_cut_off(key: bytes, entry: bytes, rng: random.Random) -> Iterator[tuple[bytes, bytes | None]]:
    yield key, None
    yield key[:-8], key[-8:-3]


def later(key: bytes, ms: int) -> bytes:
    """The key of an entry of an index, at a later time."""
    return key[:3] + layout.pack_time(layout.unpack_time(key[3:11]) + ms) + key[11:]


def extra_index(key: bytes, entry: bytes, rng: random.Random) -> Iterator[tuple[bytes, bytes | None]]:
    yield later(key, 7), entry


def later_expiry(entry: bytes) -> bytes:
    expiry_ms = layout.expiry_of(entry)
    assert expiry_ms is not None
    return layout.with_expiry(layout.row_of(entry), expiry_ms + 1)


def positions(first: int, next_: int) -> Change:
    def make(packed: bytes) -> bytes:
        now = layout.unpack_positions(packed)
        return layout.pack_positions(now[0] + first, now[1] + next_)

    return entry_becomes(make, heads)


def under(change: Callable[[bytes], bytes]) -> Callable[..., Iterator[tuple[bytes, bytes | None]]]:
    """The entry under another stored key."""

    def make(key: bytes, entry: bytes, rng: random.Random) -> Iterator[tuple[bytes, bytes | None]]:
        yield key, None
        yield change(key), entry

    return make


def invented(store: RocksStore, rng: random.Random) -> None:
    """A value of a key that was never seen, where it belongs."""
    groups = sorted({int.from_bytes(key[:2], "big") for key, _ in store.scan(b"", None)})
    names = (f"invented-{n}" for n in range(1000))
    name = next(n for n in names if key_group((n,), parse_struct(KEY_SCHEMA), MAX_PARALLELISM) in groups)
    group = key_group((name,), parse_struct(KEY_SCHEMA), MAX_PARALLELISM)
    stored_key = layout.prefix(group, _IDS["value"]) + KEYS.encode((name,))
    store.write([(stored_key, row(struct(("n", "long"), ("s", "string")), 1, 1, "x"))])


EMPTY = Segment(handle=None, data=b"", changes=0, content_bytes=0)
_OTHER = struct(("a", "double"), ("b", "long"), ("c", "long"))
MUTATIONS = [
    *[
        Mutation(f"{what} {kind}", True, file(kind, change))
        for what, change in (
            ("bit flipped in", flipped),
            ("bytes behind", lambda data, rng: data + rng.randbytes(rng.randrange(1, 50))),
            ("missing", lambda data, rng: None),
        )
        for kind in ("sst", "segment", "manifest", "record", "output")
    ],
    *[
        Mutation(f"total of {name} {change:+d}", True, total(name, change))
        for name in ("entries", "keys", "state_bytes")
        for change in (1, -1)
    ],
    Mutation("recorded digest", True, content(lambda made, rng: replace(made, digest=made.digest ^ 1 << rng.randrange(64)))),
    Mutation("digest of a key group", True, group_of(another_digest, sum_up=False)),
    Mutation("digest of a key group, summed up", False, group_of(another_digest, sum_up=True)),
    Mutation("count of a key group +1", True, group_of(one_more, sum_up=False)),
    Mutation("count of a key group +1, summed up", False, group_of(one_more, sum_up=True)),
    Mutation("counts under a name that no state has", True, group_of(unknown_name, sum_up=True)),
    Mutation("counts of two states exchanged", False, manifest(counts_of_two_states)),
    Mutation("range of a shard overlaps the one before", True, ranges(-1, 0)),
    Mutation("range of a shard leaves a gap", True, ranges(1, 0)),
    Mutation("range of a shard too long", True, ranges(0, 1)),
    Mutation("shard missing", True, shards(lambda refs: refs[:-1])),
    Mutation("shard twice", True, shards(lambda refs: [*refs, refs[-1]])),
    Mutation("shards have each other's manifests", True, shards(crossed)),
    Mutation("other parallelism", True, content(lambda made, rng: replace(made, parallelism=PARALLELISM - 1))),
    Mutation("other max parallelism", True, content(lambda made, rng: replace(made, max_parallelism=2 * MAX_PARALLELISM))),
    Mutation("other key schema", False, content(lambda made, rng: replace(made, key_schema=struct(("k", "long"))))),
    Mutation("sst left out of the manifest", False, manifest(without_an_sst)),
    Mutation("ssts exchanged in the manifest", False, manifest(exchanged_ssts)),
    Mutation("sst of another shard in the manifest", False, manifest(sst_of_another_shard)),
    Mutation("old sst under a new name and handle", False, manifest(old_sst_under_a_new_name)),
    Mutation("bit flipped in sst, handle made anew", False, manifest(flipped_sst)),
    Mutation("segment left out of the manifest", False, manifest(lambda made, world, rng: replace(made, segments=made.segments[:-1]))),
    Mutation("segments in the wrong order", False, manifest(lambda made, world, rng: replace(made, segments=made.segments[::-1]))),
    Mutation("segment of another shard in the manifest", False, manifest(segment_of_another_shard)),
    Mutation("changes of a segment off by one", False, manifest(segment_counts)),
    Mutation("segment emptied", False, manifest(lambda made, world, rng: replace(made, segments=(*made.segments[:-1], EMPTY)))),
    Mutation("bit flipped in RocksDB's manifest", False, small_file(flipped)),
    Mutation("RocksDB's manifest truncated", False, small_file(lambda data, rng: data[: rng.randrange(len(data))])),
    # RocksDB's small files of the first checkpoint, which know one SST only.
    Mutation("RocksDB's small files of an older checkpoint", False, manifest(lambda made, world, rng: replace(made, inline_files=world.manifests(1)[made.shard].inline_files))),
    Mutation("state dropped", True, without_state("map", forgotten=False)),
    Mutation("state dropped and not counted", False, without_state("map", forgotten=True)),
    Mutation("ids of two states exchanged, same kind", False, exchanged_ids("value", "value_ttl")),
    Mutation("ids of two states exchanged, other kind", False, exchanged_ids("value", "list")),
    Mutation("two states with one id", True, one_state("map", state_id=1)),
    Mutation("two states with one name", True, one_state("map", name="value")),
    Mutation("state with an id that is reserved", True, one_state("map", state_id=layout.TIMERS)),
    Mutation("kind of a state changed", True, one_state("list", kind="value")),
    Mutation("schema of a state changed", False, one_state("value", versions=version(_OTHER))),
    Mutation("schema version that entries have is gone", False, one_state("value", versions=version(_OTHER, 2))),
    Mutation("state without a schema", True, one_state("value", versions=())),
    Mutation("value changed", False, stored(entry_becomes(lambda e: e[:-1] + bytes([e[-1] ^ 1]), of("value")), recount=False)),
    *[Mutation(f"entry of {n} lost", False, stored(write(gone, of(n)), recount=False)) for n in ("value", "list", "map_ttl")],
    Mutation("value invented", False, stored(invented, recount=False)),
    Mutation("key in a foreign key group", False, stored(moved(beside))),
    Mutation("key in a foreign shard's key group", False, stored(moved(elsewhere), recount=False)),
    Mutation("key in a foreign shard's key group, counted", True, stored(moved(elsewhere))),
    Mutation("value of another schema", False, stored(entry_becomes(lambda e: row(_OTHER, 1, 1.5, 2, 3), of("value")))),
    Mutation("value of an unknown schema version", False, stored(entry_becomes(lambda e: row(struct(("n", "long"), ("s", "string")), 9, 1, ""), of("value")))),
    Mutation("value cut off", False, stored(entry_becomes(lambda e: e[:-1], of("value")))),
    Mutation("value of nothing", False, stored(entry_becomes(lambda e: b"", of("value")))),
    Mutation("entry with an unknown first byte", False, stored(entry_becomes(lambda e: b"\x07" + e[1:], of("map")))),
    Mutation("entry that expires, cut off", False, stored(entry_becomes(lambda e: e[:5], of("value_ttl")))),
    Mutation("list position given out twice", False, stored(positions(0, -1))),
    Mutation("list begins too late", False, stored(positions(1, 0))),
    Mutation("positions of a list cut off", False, stored(entry_becomes(lambda packed: packed[:-1], heads))),
    Mutation("positions of a list missing", False, stored(write(gone, heads))),
    Mutation("element behind the end of its list", False, stored(write(under(lambda key: key[:-8] + layout.pack_position(10_000)), of("list")))),
    Mutation("timer missing", False, stored(write(gone, timers))),
    Mutation("timer without its index entry", False, stored(write(gone, timer_index))),
    Mutation("timer index entry without its timer", False, stored(write(extra_index, timer_index))),
    Mutation("timer index entry at another time", False, stored(write(under(lambda key: later(key, 1)), timer_index))),
    Mutation("timer twice", False, stored(write(timer_in_both_layouts, timers))),
    Mutation("timers of the older layout cut off", False, stored(write(older_timers_cut_off, timers))),
    Mutation("timer cut off", False, stored(write(under(lambda key: key[:-3]), timers))),
    Mutation("expiry index entry missing", False, stored(write(gone, expiry_index))),
    Mutation("expiry index entry at another time", False, stored(write(under(lambda key: later(key, 1)), expiry_index))),
    Mutation("expiry index entry too many", False, stored(write(extra_index, expiry_index))),
    *[Mutation(f"expiry of {n} changed", False, stored(entry_becomes(later_expiry, of(n)))) for n in ("value_ttl", "map_ttl", "list_ttl")],
    Mutation("something under an index entry", False, stored(entry_becomes(lambda _: b"x", expiry_index))),
    Mutation("user key that is none", False, stored(write(under(lambda key: key[: 3 + KEYS.decode_prefix(key[3:])[1]] + b"\x07"), of("map")))),
    Mutation("bytes behind a key", False, stored(write(under(lambda key: key + b"\x00"), of("value")))),
    Mutation("key that is none", False, stored(write(under(lambda key: key[:3] + b"\x05"), of("value")))),
    Mutation("stored key without a state", False, stored(write(under(lambda key: key[:2]), of("value")))),
    Mutation("entry of a state that is none", False, stored(write(under(lambda key: key[:2] + b"\x63" + key[3:]), of("value")))),
    Mutation("stored key of a list that is none", False, stored(write(under(lambda key: key + b"\x07"), of("list")))),
]  # fmt: skip


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Checkpointed:
    made = Checkpointed.make(tmp_path_factory.mktemp("healthy"))
    assert (made.look("fast"), made.look("full")) == ([], [])
    return made


@pytest.mark.parametrize(
    "mutation", at_tier(fast=MUTATIONS[::12], ci=[*MUTATIONS[::3], MUTATIONS[-1]], all=MUTATIONS), ids=lambda m: m.name
)
def test_a_damaged_checkpoint_is_found(mutation: Mutation, healthy: Checkpointed, tmp_path: Path) -> None:
    """The untouched copy passes; each mutation changes bytes or content, and what must find it finds it."""
    for seed in SEEDS:
        damaged = healthy.copy_to(tmp_path / str(seed))
        before = damaged.tree()
        assert before == healthy.tree()
        mutation.mutate(damaged, random.Random(f"{mutation.name} {seed}"))
        assert damaged.tree() != before, "the mutation changes nothing"
        fast, full = damaged.look("fast"), damaged.look("full")
        assert full, "the full mode must find everything"
        assert bool(fast) == mutation.fast, f"fast: {fast}, full: {full}"


@pytest.mark.long("seconds", runs_in="ci")
def test_an_undamaged_rewritten_checkpoint_passes_validation(healthy: Checkpointed, tmp_path: Path) -> None:
    """What mutations do besides their damage is no damage: a shard that is restored and written again passes."""
    for shard in range(PARALLELISM):
        for recount in (True, False):
            copy = healthy.copy_to(tmp_path / f"{shard}-{recount}")
            copy.rewrite_shard(shard, lambda store: None, recount=recount)
            assert copy.look("full") == []
    copy = healthy.copy_to(tmp_path / "manifests")
    copy.write_manifests(copy.manifests())
    assert copy.look("full") == []
    assert record_codec.encode(copy.record()) != record_codec.encode(healthy.record())
