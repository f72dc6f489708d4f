"""The history of one key: the retained checkpoints that changed the key, with the change of each.

The search first compares the digests of the key's group. If a checkpoint and the checkpoint before it have the same
digest, the key did not change, and the search does not read its state. Otherwise the search reads the files that one of
the two has and the other has not (`key_versions.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from state_backend.checkpoint.dropped_checkpoint import check_retained, telling_drops
from state_backend.checkpoint.log import Log, attempt_of, base_of, kind_of, run_of, shrunk
from state_backend.checkpoint.parallel import at_once
from state_backend.formats.rocksdb_table import UnknownTable
from state_backend.inspection.describe import code_name, plain, source_of, start_and_end, state_of
from state_backend.inspection.key_entries import KeyEntries, SearchedKey, entries_of, read_keys, spans_of
from state_backend.inspection.key_rows import read_key_rows
from state_backend.inspection.key_versions import KeyFiles, KeyVersions
from state_backend.inspection.state_diff import EntryChange, changes_of_group, describe_change
from state_backend.inspection.state_source import StateSource
from state_backend.ports.storage import Storage
from state_backend.shard.file_cache import FileCache
from state_backend.shard.manifest import needed_manifest
from state_backend.state import layout
from state_backend.values.errors import CairnError, CorruptRecord
from state_backend.values.frozen import frozen
from state_backend.values.intervals import format_instant, from_ms, shown_ms
from state_backend.values.key_groups import shard_of
from state_backend.values.records import Content, Record, ShardRef, StateDescriptor, Tombstone

_CACHE_BYTES = 1 << 30
# The most checkpoints whose manifests and files are read together, in parallel.
_AT_ONCE = 64


@frozen
class KeyStep:
    """One checkpoint of a key's history."""

    record: Record | Tombstone
    status: str
    # The checkpoint that `changes` compare with: the base, or the nearest retained ancestor. None if the interval began
    # with empty state, or if `unknown` is set.
    since: int | None = None
    # The number of dropped checkpoints between `since` and this checkpoint.
    between: int = 0
    # Why the earlier state is unknown; None if it is known.
    unknown: str | None = None
    # The changed entries and timers of the key. If `unknown` is set, the whole state of the key; empty for a dropped
    # checkpoint.
    changes: tuple[EntryChange, ...] = ()
    # The times of removed timers that were due, in milliseconds since the epoch.
    fired_ms: tuple[int, ...] = ()
    # The key's rows in the output of the interval; None if they were not searched.
    output: pa.Table | None
    # The key's late rows; None if they were not searched.
    late: pa.Table | None


def history_of_key(
    log: Log, key: SearchedKey, storage: Storage, work: Path, *, follow_output: bool = False
) -> Iterator[KeyStep]:
    """Yield the retained checkpoints that changed a key, by id. `follow_output`: also all whose output has the key."""
    steps = _Steps(log, key, storage, work)
    ids = {*log.retained}
    if follow_output:
        ids |= {checkpoint_id for checkpoint_id, _ in log.current_outputs().values()}
    ordered = sorted(ids)
    for at in range(0, len(ordered), _AT_ONCE):
        yield from steps.steps(ordered[at : at + _AT_ONCE], follow_output)


@frozen
class _Shard:
    """Facts about the key's shard in one checkpoint."""

    # The counts of entries and the digest of the key's group; None for no entries.
    group: Any
    # The files that may hold the key; None if only RocksDB can read them.
    files: KeyFiles | None


class _Steps:
    def __init__(self, log: Log, key: SearchedKey, storage: Storage, work: Path) -> None:
        self._log, self._key, self._storage, self._work = log, key, storage, work
        self._cache = FileCache(work / "cache", _CACHE_BYTES)
        self._contents: dict[int, Content] = {}
        self._states: dict[int, StateDescriptor] = {}
        self._versions = KeyVersions((), storage, work)
        self._shards: dict[int, _Shard] = {}
        self._entries: dict[int, KeyEntries] = {}

    def steps(self, ids: Sequence[int], follow_output: bool) -> Iterator[KeyStep]:
        retained = [n for n in ids if n in self._log.retained]
        self._load_contents(retained)
        before = {n: self._before(n) for n in retained}
        since = {n: found[0] for n, found in before.items()}
        earlier = [n for n in since.values() if n is not None]
        self._load_contents(earlier)
        self._load_shards([*since, *earlier])
        changed = [n for n in since if self._may_differ(n, since[n])]
        self._fetch([*changed, *(n for n in map(since.get, changed) if n is not None)])
        changes = {n: self._changes(n, since[n]) for n in changed}
        searched = [n for n in ids if follow_output or changes.get(n)]
        rows = dict(zip(searched, at_once(self._rows, searched), strict=True))
        for n in ids:
            output, late = rows.get(n, (None, None))
            if not changes.get(n) and not _any(output) and not _any(late):
                continue
            if n in before:
                yield self._step(n, before[n], changes.get(n, []), output, late)
            elif isinstance(entry := self._log.entry(n), Tombstone):
                why = "the checkpoint is dropped: its rows are known, its state is not"
                yield KeyStep(record=entry, status="dropped", unknown=why, output=output, late=late)

    def _load_contents(self, ids: Iterable[int]) -> None:
        """Read the records of some retained checkpoints.

        SSTs and segments are searched only for the states that are known so far. If one of these records has a state
        that is new, forget all that was read.
        """
        missing = sorted({*ids} - self._contents.keys())
        try:
            self._contents |= _contents(self._log, missing)
        except CorruptRecord:
            for n in missing:
                check_retained(self._storage, n)
            raise
        states = {d.state_id: d for n in missing for d in self._contents[n].states}
        if not states.keys() <= self._states.keys() or not self._shards:
            self._states |= states
            self._versions = KeyVersions(spans_of(self._key, [*self._states.values()]), self._storage, self._work)
            self._shards.clear()

    def _load_shards(self, ids: Iterable[int]) -> None:
        """Read the manifests of the key's shard in some checkpoints."""
        missing = sorted({*ids} - self._shards.keys())
        same: dict[int, int] = {}
        for n in missing:
            base = self._contents[n].base_id
            if base is not None and (base in self._shards or base in missing) and self._ref(base) == self._ref(n):
                same[n] = base
        different = [n for n in missing if n not in same]
        for n, shard in zip(different, at_once(self._read_shard, different), strict=True):
            self._shards[n] = shard
        for n, base in same.items():  # Ascending, so that a base comes first.
            self._shards[n] = self._shards[base]

    def _ref(self, checkpoint_id: int) -> ShardRef:
        content = self._contents[checkpoint_id]
        return content.shards[shard_of(self._key.group, content.parallelism, content.max_parallelism)]

    def _read_shard(self, checkpoint_id: int) -> _Shard:
        with telling_drops(self._storage, checkpoint_id):
            manifest = needed_manifest(self._ref(checkpoint_id), self._storage)
        found = [s for s in manifest.key_group_states if s.key_group == self._key.group]
        group = (found[0].entries, found[0].digest) if found else None
        return _Shard(group=group, files=self._versions.files_of(manifest))

    def _may_differ(self, checkpoint_id: int, since: int | None) -> bool:
        """Return False if the key surely has the same entries in both checkpoints; with `since` None, if it has
        none."""
        here, before = self._shards[checkpoint_id], self._shards[since] if since is not None else None
        if here.group == (before.group if before is not None else None):
            return False
        return here.files is None or before is None or here.files != before.files

    def _fetch(self, ids: Iterable[int]) -> None:
        """Read the files of some checkpoints that were not read yet. Forget files that none of these has."""
        files = {n: found for n in ids if (found := self._shards[n].files) is not None}
        self._versions.forget_all_but(files.values())
        try:
            self._versions.fetch(files.values())
        except CairnError:
            for n in sorted(files):
                check_retained(self._storage, n)
            raise

    def _changes(self, checkpoint_id: int, since: int | None) -> list[EntryChange]:
        after = self._read(checkpoint_id)
        before = self._read(since) if since is not None else entries_of(self._key, [*after.states.values()], ())
        if before.stored == after.stored and before.states == after.states:
            return []
        return [*changes_of_group(before, after, self._key.group)]

    def _step(
        self,
        checkpoint_id: int,
        before: tuple[int | None, int, str | None],
        changes: list[EntryChange],
        output: pa.Table | None,
        late: pa.Table | None,
    ) -> KeyStep:
        since, between, unknown = before
        record = Record(id=checkpoint_id, retained=(), reproduces=None, content=self._contents[checkpoint_id])
        return KeyStep(
            record=record,
            status=state_of(self._log, record),
            since=since,
            between=between,
            unknown=unknown,
            changes=tuple(changes),
            fired_ms=self._find_fired(record, changes),
            output=output,
            late=late,
        )

    def _before(self, checkpoint_id: int) -> tuple[int | None, int, str | None]:
        """Return (id of the retained checkpoint to compare with or None, number of dropped checkpoints in between, why
        the earlier state is unknown or None)."""
        content, between, first = self._contents[checkpoint_id], 0, min(self._log.retained)
        if content.kind == "restore":
            return None, 0, f"the state was restored from {source_of(content)}"
        base = content.base_id
        if base is None:
            return None, 0, None
        while base is not None and base not in self._log.retained:
            entry = self._log.entry(base) if base > first else None
            base = base_of(entry) if isinstance(entry, Tombstone) else None
            between += 1
        if base is None:
            return None, 0, f"the base, checkpoint {content.base_id}, is dropped"
        return base, between, None

    def _read(self, checkpoint_id: int) -> KeyEntries:
        if checkpoint_id not in self._entries:
            # Most states are read twice within a few steps: for the comparison with their base and with their
            # successor.
            while len(self._entries) > 8:
                del self._entries[next(iter(self._entries))]
            self._entries[checkpoint_id] = self._entries_of(checkpoint_id)
        return self._entries[checkpoint_id]

    def _entries_of(self, checkpoint_id: int) -> KeyEntries:
        content, files = self._contents[checkpoint_id], self._shards[checkpoint_id].files
        if files is not None:
            with suppress(UnknownTable):
                return entries_of(self._key, content.states, self._versions.read_stored(files))
        source = StateSource(url=self._storage.url, content=content, checkpoint_id=checkpoint_id)
        with TemporaryDirectory(dir=self._work) as folder:
            ((_, entries),) = read_keys(source, [self._key], content.states, self._storage, Path(folder), self._cache)
            return entries

    def _rows(self, checkpoint_id: int) -> tuple[pa.Table, pa.Table]:
        content = self._contents.get(checkpoint_id)
        if content is not None:
            files, attempt, parallelism = content.outputs, content.attempt, content.parallelism
        else:
            # A tombstone does not say how many shards the checkpoint had, so all its files are searched.
            files, attempt, parallelism = self._log.outputs(checkpoint_id), "", 1
        most = next(iter(self._contents.values())).max_parallelism if self._contents else parallelism
        shard = shard_of(self._key.group, parallelism, max(most, parallelism))
        found = [
            read_key_rows([f for f in files if f.late == late], attempt, shard, self._key, self._storage, self._work)
            for late in (False, True)
        ]
        return found[0], found[1]

    def _find_fired(self, record: Record, changes: list[EntryChange]) -> tuple[int, ...]:
        due_ms = record.content.time.fired_until_ms
        gone = [c.before.value["at_ms"] for c in changes if c.state == layout.TIMERS_NAME and c.before is not None]
        return tuple(at_ms for at_ms in gone if at_ms <= due_ms)


def _any(rows: pa.Table | None) -> bool:
    return rows is not None and rows.num_rows > 0


def describe_step(step: KeyStep) -> dict[str, Any]:
    """Return a step of a key's history as JSON values. Unknown rows (not searched, or without key columns) are None."""
    record = step.record
    run = run_of(record)
    changes = [describe_change(c) for c in step.changes if c.state != layout.TIMERS_NAME]
    timers = [c for c in step.changes if c.state == layout.TIMERS_NAME]
    added = sorted(c.after.value["at_ms"] for c in timers if c.after is not None)
    removed = sorted(c.before.value["at_ms"] for c in timers if c.before is not None)
    return {
        "checkpoint": record.id,
        "kind": kind_of(record),
        "status": step.status,
        **start_and_end(record.interval),
        "since": step.since,
        "dropped_between": step.between,
        "unknown": step.unknown,
        "code": code_name(record.content) if isinstance(record, Record) else None,
        "attempt": attempt_of(record),
        "run": {"run_id": run.run_id, "clear_number": run.clear_number, "try_number": run.try_number},
        "changes": changes,
        "timers_set": _instants(added),
        "timers_fired": _instants(sorted(step.fired_ms)),
        "timers_deleted": _instants([at for at in removed if at not in step.fired_ms]),
        "output": _plain_rows(step.output),
        "late": _plain_rows(step.late),
    }


def _instants(times_ms: list[int]) -> list[str]:
    return [format_instant(from_ms(shown_ms(ms))) for ms in times_ms]


def _plain_rows(rows: pa.Table | None) -> list[dict[str, Any]] | None:
    return None if rows is None else plain(rows.to_pylist())


def _contents(log: Log, ids: Sequence[int]) -> dict[int, Content]:
    """Return the contents of retained checkpoints, read in parallel.

    Faster than `Log.whole`, because the records' lists of other checkpoints are not decoded.
    """
    found = {}
    for n, content in zip(ids, at_once(log.entries.content, ids), strict=True):
        if content is None:
            raise shrunk(n)
        found[n] = content
    return found
