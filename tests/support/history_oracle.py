"""What every checkpoint, output and file of a random history has to be, from the journal of its records and plain Python."""

from __future__ import annotations

import io
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from cairn.shipping.ship_processor import code_hash
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.log import Log, read_log
from state_backend.formats import paths, record_codec
from state_backend.inspection.state_source import StateSource
from state_backend.inspection.state_table import read_shard
from state_backend.inspection.verify import verify_pipeline
from state_backend.ports.storage import Storage
from state_backend.shard.manifest import manifest_of
from state_backend.values.handles import handles_in
from state_backend.values.intervals import Interval
from state_backend.values.marks import Savepoint
from state_backend.values.records import OutputFile, Prepared, Record, SweepRecord, Tombstone
from tests.support import commit_world
from tests.support.disturbed_storage import note, noted, noted_at_ns
from tests.support.history_pipeline import CODES, DAY_MS, OutputRow, Users, apply_day, day_number, shown
from tests.support.interleavings import Violation

STATES = ("total", "origins", "items", "$timers")


class Difference(AssertionError):
    """Something is other than the oracle says."""


def same(expected: Any, found: Any, what: str) -> None:
    if expected != found:
        raise Difference(f"{what}: expected {_short(expected)}, found {_short(found)}; {_apart(expected, found)}")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 400 else f"{text[:400]}..."


def _apart(expected: Any, found: Any) -> str:
    if isinstance(expected, Counter) and isinstance(found, Counter):
        return f"missing {_short(dict(expected - found))}, too many {_short(dict(found - expected))}"
    if isinstance(expected, set | frozenset) and isinstance(found, set | frozenset):
        return f"missing {sorted(expected - found)}, too many {sorted(found - expected)}"
    return "they differ"


class Oracle:
    """Of one pipeline of a history. ``history``: its folder. ``root``: a root below it."""

    def __init__(self, history: Path, root: Path, pipeline: str) -> None:
        self.history = history
        self.pipeline = pipeline
        self.folder = root / pipeline
        self._states: dict[int, tuple[Users, int]] = {}
        self._records: dict[int, Record | SweepRecord] = {}

    @cached_property
    def _codes(self) -> dict[str, int]:
        return {code_hash(processor, self.pipeline): code for code, processor in CODES.items()}

    # --- the log as it was committed ---------------------------------------------------------------------------------------------

    def record(self, checkpoint_id: int) -> Record | SweepRecord:
        """The record as it was created, whatever it was shrunk to since."""
        if checkpoint_id not in self._records:
            path = paths.record(checkpoint_id)
            there: Any = record_codec.decode((self.folder / path).read_bytes(), path, Record, SweepRecord, Tombstone)
            candidates = (
                record_codec.decode(d, path, Record, SweepRecord) for d in noted(self.history, self.folder, path)
            )
            found = [c for c in candidates if _author(c) == _author(there)]
            assert found, f"nobody noted {path}"
            if isinstance(there, Record | SweepRecord) and there not in found:
                raise Difference(f"{path} of {self.folder} is not as its author created it")
            self._records[checkpoint_id] = there if isinstance(there, Record | SweepRecord) else found[-1]
        return self._records[checkpoint_id]

    def records(self) -> dict[int, Record | SweepRecord]:
        """All records that are there now, by id."""
        n = 0
        while (self.folder / paths.record(n + 1)).exists():
            n += 1
        there = {m for f in (self.folder / paths.CHECKPOINTS).glob("*.json") if (m := int(f.stem)) > n}
        if there:
            raise Difference(f"checkpoint {n + 1} is missing from {self.folder}, and {sorted(there)} are there")
        return {m: self.record(m) for m in range(1, n + 1)}

    def commit(self, checkpoint_id: int) -> Record:
        found = self.record(checkpoint_id)
        assert isinstance(found, Record), found
        return found

    # --- states and outputs ------------------------------------------------------------------------------------------------------

    def state(self, checkpoint_id: int) -> tuple[Users, int]:
        """The users after a checkpoint, and the number of its last day."""
        if checkpoint_id not in self._states:
            self._states[checkpoint_id] = self._state(self.commit(checkpoint_id))
        return self._states[checkpoint_id]

    def _state(self, record: Record) -> tuple[Users, int]:
        content = record.content
        if content.kind == "interval":
            return self._applied(record)[0], day_number(content.interval)
        if content.base_id is not None:
            return self.state(content.base_id)
        (origin,) = {(o["root"], o["pipeline"], o["id"]) for o in self._origins(content.attempt)}
        root, pipeline, checkpoint_id = origin
        return Oracle(self.history, self.history / root, pipeline).state(checkpoint_id)

    def _applied(self, record: Record) -> tuple[Users, list[OutputRow]]:
        content = record.content
        before: Users = {} if content.base_id is None else self.state(content.base_id)[0]
        version, code = content.source_position["version"], self._codes[content.code_hash]
        return apply_day(before, day_number(content.interval), version, code)

    def _origins(self, attempt: str) -> list[dict[str, Any]]:
        return [json.loads(data) for data in noted(self.history, self.history, f"origins/{attempt}")]

    def output(self, checkpoint_id: int) -> Counter[OutputRow]:
        """The rows that an interval's checkpoint emitted."""
        record = self.commit(checkpoint_id)
        return Counter(self._applied(record)[1]) if record.content.kind == "interval" else Counter()

    # --- comparing -----------------------------------------------------------------------------------------------------------------

    def check_state(self, record: Record, storage: Storage) -> None:
        """Restores the checkpoint and compares it. Raises: Difference; what reading raises."""
        users, day = self.state(record.id)
        found = read_states(StateSource.of_record(storage.url, record), storage)
        for name, rows in shown(users, day).items():
            same(rows, found[name], f"state {name!r} of checkpoint {record.id} of {self.folder}")

    def check_output(self, checkpoint_id: int, files: tuple[OutputFile, ...], storage: Storage) -> None:
        """Reads the output of a checkpoint and compares it."""
        found = Counter[OutputRow]()
        for file in files:
            assert not file.late
            rows = pq.read_table(io.BytesIO(storage.read(file.handle.path))).to_pylist()
            found.update((r["user"], r["kind"], r["total"], tuple(r["items"]), tuple(r["origins"])) for r in rows)
        same(self.output(checkpoint_id), found, f"output of checkpoint {checkpoint_id} of {self.folder}")

    def check_current(self, log: Log) -> dict[Interval, tuple[int, tuple[OutputFile, ...]]]:
        """Which checkpoint's output a log says is current, for each interval."""
        current = log.current_outputs()
        same(
            self.current(log.head_id),
            {i: n for i, (n, _) in current.items()},
            f"current output of {self.folder} at {log.head_id}",
        )
        return current

    def current(self, head_id: int) -> dict[Interval, int]:
        """Of each interval the highest commit up to ``head_id``."""
        commits = [r for n in range(1, head_id + 1) if isinstance(r := self.record(n), Record)]
        return {r.content.interval: r.id for r in commits if r.content.kind == "interval"}

    def check_rules(self) -> None:
        """Each commit was allowed when it was made: fences, bases, staleness, retention, abandoned attempts."""
        records = self.records()
        prepared = {}
        for record in records.values():
            if isinstance(record, Record):
                path = paths.prepared(record.content.attempt)
                for data in noted(self.history, self.folder, path):
                    prepared[record.content.attempt] = record_codec.decode(data, path, Prepared)
        refused = frozenset(n for n in records if (self.folder / paths.quarantine(n)).exists())
        unseen = {n: frozenset(m for m in refused if self._is_younger(m, r)) for n, r in records.items()}
        history = commit_world.History(records=records, prepared=prepared, refused=refused, unseen=unseen)
        try:
            for record in history.commits():
                commit_world.check_commit(history, record)
            commit_world.check_retained(history)
            commit_world.check_outputs(history)
        except Violation as error:
            raise Difference(f"{self.folder}: {error}") from error
        self._check_digests(history.commits())

    def _is_younger(self, mark: int, record: Record | SweepRecord) -> bool:
        """Whether the quarantine mark may not have been there when this record's attempt was prepared."""
        if not isinstance(record, Record):
            return True
        prepared = noted_at_ns(self.history, self.folder, paths.prepared(record.content.attempt))
        return prepared is None or (self.folder / paths.quarantine(mark)).stat().st_ctime_ns >= prepared

    def _check_digests(self, commits: list[Record]) -> None:
        """Also of checkpoints that were dropped before anybody read them: equal states have equal digests."""
        digests = defaultdict(set)
        for record in commits:
            users, _ = self.state(record.id)
            kept = json.dumps({k: vars(v) for k, v in sorted(users.items())}, sort_keys=True)
            digests[kept].add((record.content.digest, *(d.name for d in record.content.states)))
        for kept, found in digests.items():
            if len(found) > 1:
                raise Difference(f"{self.folder}: equal states have several digests {found}: {kept[:300]}")


def _author(entry: Record | SweepRecord | Tombstone) -> str:
    if isinstance(entry, SweepRecord):
        return entry.sweep
    return entry.attempt if isinstance(entry, Tombstone) else entry.content.attempt


def note_origin(history: Path, attempt: str, root: Path, pipeline: str, checkpoint_id: int) -> None:
    """Notes that an attempt makes another pipeline's checkpoint its state, before it begins."""
    told = {"root": str(root.relative_to(history)), "pipeline": pipeline, "id": checkpoint_id}
    note(history, history, f"origins/{attempt}", json.dumps(told).encode())


def read_states(source: StateSource, storage: Storage) -> dict[str, Counter[Any]]:
    """All rows of a checkpoint or savepoint, by state."""
    found: dict[str, Counter[Any]] = {name: Counter() for name in STATES}
    for shard in range(source.content.parallelism):
        with work_folder("history") as work:
            for name, table in read_shard(source, STATES, shard, storage, work):
                found[name].update(_row(name, row) for row in table.to_pylist())
    return found


def _row(name: str, row: dict[str, Any]) -> tuple[Any, ...]:
    user = row["key"]["user"]
    if name == "total":
        return user, row["value"]["sum"], row["value"]["rows"]
    if name == "origins":
        return user, row["pos"], row["value"]["origin"]
    if name == "items":
        return user, row["user_key"]["item"], row["value"]["seen"]
    start = datetime(2024, 1, 1, tzinfo=UTC)
    fires_ms = int((row["expires_at"] - start).total_seconds() * 1000)
    assert fires_ms % DAY_MS == 0
    return user, fires_ms // DAY_MS - 1


# --- when nobody is at work any more --------------------------------------------------------------------------------------------


def check_at_rest(oracle: Oracle, work: Path) -> None:
    """All that is completed and current is as the oracle says; `verify` finds nothing; there is no file too many. Raises: Difference."""
    storage = LocalStorage(oracle.folder)
    oracle.check_rules()
    log = read_log(storage)
    same(max(oracle.records(), default=0), log.head_id, f"end of the log of {oracle.folder}")
    for record in log.completed():
        oracle.check_state(record, storage)
        if oracle.current(log.head_id).get(record.content.interval) == record.id:
            oracle.check_output(record.id, record.content.outputs, storage)
    current = oracle.check_current(log)
    for checkpoint_id, files in current.values():
        oracle.check_output(checkpoint_id, files, storage)
    verified = verify_pipeline(storage, work=work)
    if not verified.success:
        found = [*verified.findings, *(f for c in verified.checkpoints for f in c.findings)]
        raise Difference(f"verify of {oracle.folder}: {found[:5]}")


def check_files(oracle: Oracle) -> None:
    """The files below a pipeline's folder are those that are needed, after everything was let finish and swept. Raises: Difference."""
    needed, allowed = _expected_files(oracle)
    there = {str(p.relative_to(oracle.folder)) for p in oracle.folder.rglob("*") if not p.is_dir()}
    if missing := needed - there:
        raise Difference(f"{oracle.folder}: needed files are missing: {sorted(missing)[:8]}")
    if left := there - needed - allowed:
        raise Difference(f"{oracle.folder}: {len(left)} files are left over: {sorted(left)[:8]}")


def _expected_files(oracle: Oracle) -> tuple[set[str], set[str]]:
    """What has to be there, and what may."""
    storage, records = LocalStorage(oracle.folder), oracle.records()
    head = max(records)
    retained = [oracle.commit(r.id) for r in records[head].retained]
    outputs = [oracle.commit(n) for n in oracle.current(head).values()]
    needed = {paths.record(n) for n in records} | {paths.HEAD}
    needed |= {paths.prepared(r.content.attempt) for r in retained}
    needed |= {h.path for r in retained for ref in r.content.shards for h in handles_in(ref)}
    needed |= {h.path for r in retained for ref in r.content.shards for h in manifest_of(ref, storage).handles}
    needed |= {o.handle.path for r in outputs for o in r.content.outputs}
    needed |= {paths.published(r.content.interval, r.id) for r in outputs}
    commits = [r for r in records.values() if isinstance(r, Record)]
    settled = {r.id: paths.settled(r.content.interval, r.id, r.content.kind) for r in commits}
    needed |= {path for n, path in settled.items() if n < head}
    needed |= {
        paths.attempt_end(a)
        for n in records
        if isinstance(s := records[n], SweepRecord) and n < head
        for a in s.abandoned
    }
    kept = {r.id for r in retained}
    needed |= {paths.attempt_end(r.content.attempt) for r in commits if r.id not in kept}
    folders = {paths.QUARANTINE, paths.LEASES, *(f"{path.rpartition('/')[0]}/" for path in settled.values())}
    allowed = {*settled.values(), *map(paths.names, folders), ".tmp/lock", ".tmp/room"}
    allowed |= {paths.attempt_end(r.content.attempt) for r in commits}
    allowed |= {paths.attempt_end(a) for s in records.values() if isinstance(s, SweepRecord) for a in s.abandoned}
    allowed |= {paths.quarantine(n) for n in records}
    # A checkpoint that may be gone back to keeps the output that it made, although a later one replaced it.
    allowed |= {o.handle.path for r in retained for o in r.content.outputs}
    return needed, allowed


def savepoints(history: Path) -> Iterator[tuple[Path, Savepoint]]:
    """The savepoints that were taken, each with its folder."""
    for folder in sorted((history / "savepoints").glob("*")):
        if (folder / paths.SAVEPOINT_RECORD).exists():
            data = (folder / paths.SAVEPOINT_RECORD).read_bytes()
            yield folder, record_codec.decode(data, paths.SAVEPOINT_RECORD, Savepoint)
