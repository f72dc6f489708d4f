"""Whether a restored shard is, entry by entry, the state that its manifest records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from state_backend.adapters.rocks import RocksStore
from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.row_codec import RowCodec
from state_backend.formats.spark_hash import key_hasher
from state_backend.formats.types import parse_struct
from state_backend.state import layout
from state_backend.state.entries import decode_entry
from state_backend.values.errors import CairnError
from state_backend.values.records import KeyGroupState, ShardManifest, StateDescriptor

MAX_FINDINGS = 20


def verify_shard(
    store: RocksStore,
    manifest: ShardManifest,
    states: Sequence[StateDescriptor],
    key_schema: dict[str, Any],
    max_parallelism: int,
) -> tuple[int, list[str]]:
    """(entries, findings). Walks everything: each key in its key group and shard, each value decodable with its recorded
    schema, indexes that agree with what they index, counts and digests as recorded. At most 20 findings are listed."""
    check = _Check(manifest, states, key_schema, max_parallelism)
    try:
        for stored_key, entry in store.scan(b"", None):
            check.look_at(stored_key, entry)
    except CairnError as error:
        check.found(str(error))
    check.compare()
    return check.entries, check.findings


class _Check:
    def __init__(
        self,
        manifest: ShardManifest,
        states: Sequence[StateDescriptor],
        key_schema: dict[str, Any],
        max_parallelism: int,
    ) -> None:
        self.findings: list[str] = []
        self.entries = 0
        self._manifest = manifest
        self._max_parallelism = max_parallelism
        self._key_schema = parse_struct(key_schema)
        self._hash = key_hasher(self._key_schema)
        self._keys = KeyCodec(self._key_schema)
        self._by_id = {d.state_id: d for d in states}
        self._codecs = {
            (d.state_id, v.version): RowCodec(d.name, parse_struct(v.value), v.version)
            for d in states
            for v in d.versions
        }
        self._user_keys = {
            d.state_id: KeyCodec(parse_struct(d.versions[-1].user_key))
            for d in states
            if d.versions[-1].user_key is not None
        }
        self._seeds = {d.state_id: layout.seed_of(d.name) for d in states}
        self._timer_seed = layout.seed_of(layout.TIMERS_NAME)
        self._counts: dict[int, dict[str, int]] = {}
        self._digests: dict[int, int] = {}
        # What should be indexed minus what is: sums of hashes by key group, so that memory stays bounded.
        self._timer_balance: dict[int, int] = {}
        self._expiry_balance: dict[int, int] = {}

    def found(self, text: str) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(f"shard {self._manifest.shard}: {text}")

    def look_at(self, stored_key: bytes, entry: bytes) -> None:
        key_group, state_id, rest = int.from_bytes(stored_key[:2], "big"), stored_key[2], stored_key[3:]
        if key_group not in self._manifest.key_groups:
            self.found(f"key group {key_group} does not belong here")
            return
        if state_id == layout.TIMER_INDEX:
            self._timer_balance[key_group] = self._timer_balance.get(key_group, 0) - layout.entry_hash(0, rest, b"")
            return
        if state_id == layout.EXPIRY_INDEX:
            self._expiry_balance[key_group] = self._expiry_balance.get(key_group, 0) - layout.entry_hash(0, rest, b"")
            return
        try:
            if state_id == layout.TIMERS:
                self._timers(key_group, rest, entry)
            elif state_id in self._by_id:
                self._entry(self._by_id[state_id], key_group, stored_key, entry)
            else:
                self.found(f"an entry belongs to state id {state_id}, which no state has")
        except CairnError as error:
            self.found(str(error))

    def _entry(self, descriptor: StateDescriptor, key_group: int, stored_key: bytes, entry: bytes) -> None:
        decoded = decode_entry(descriptor, stored_key, entry, self._keys, self._user_keys.get(descriptor.state_id))
        if decoded is None:
            return
        codec = self._codecs.get((descriptor.state_id, decoded.row[1] if len(decoded.row) > 1 else -1))
        if codec is None:
            self.found(
                f"state {descriptor.name!r}, key {decoded.key!r}: written with a schema version that is not recorded"
            )
        else:
            codec.decode(decoded.row)
        self._owns(decoded.key, key_group)
        rest = stored_key[3:]
        self._count(key_group, descriptor.name, layout.entry_hash(self._seeds[descriptor.state_id], rest, entry))
        if decoded.expiry_ms is not None:
            indexed = layout.pack_time(decoded.expiry_ms) + stored_key[2:]
            self._expiry_balance[key_group] = self._expiry_balance.get(key_group, 0) + layout.entry_hash(
                0, indexed, b""
            )

    def _timers(self, key_group: int, key: bytes, packed: bytes) -> None:
        if not packed or len(packed) % 8:
            self.found(f"timers of a key in key group {key_group}: {len(packed)} bytes")
            return
        self._owns(self._keys.decode(key), key_group)
        for expiry_ms in layout.unpack_times(packed):
            time = layout.pack_time(expiry_ms)
            self._count(key_group, layout.TIMERS_NAME, layout.entry_hash(self._timer_seed, key + time, b""))
            self._timer_balance[key_group] = self._timer_balance.get(key_group, 0) + layout.entry_hash(
                0, time + key, b""
            )

    def _owns(self, key: tuple[Any, ...], key_group: int) -> None:
        expected = self._hash(key) % self._max_parallelism
        if expected != key_group:
            self.found(f"key {key!r} lies in key group {key_group}, but belongs to {expected}")

    def _count(self, key_group: int, name: str, entry_hash: int) -> None:
        self.entries += 1
        counts = self._counts.setdefault(key_group, {})
        counts[name] = counts.get(name, 0) + 1
        self._digests[key_group] = self._digests.get(key_group, 0) + entry_hash

    def compare(self) -> None:
        recorded = {s.key_group: s for s in self._manifest.key_group_states}
        for key_group in sorted({*recorded, *self._counts}):
            found = KeyGroupState(
                key_group=key_group,
                entries=self._counts.get(key_group, {}),
                digest=self._digests.get(key_group, 0) % 2**64,
            )
            expected = recorded.get(key_group, KeyGroupState(key_group=key_group, entries={}, digest=0))
            if found.entries != expected.entries:
                self.found(f"key group {key_group} holds {found.entries}, recorded are {expected.entries}")
            elif found.digest != expected.digest:
                self.found(f"key group {key_group} has digest {found.digest:016x}, recorded is {expected.digest:016x}")
            if self._timer_balance.get(key_group, 0):
                self.found(f"key group {key_group}: timers and their index disagree")
            if self._expiry_balance.get(key_group, 0):
                self.found(f"key group {key_group}: expiring entries and their index disagree")
