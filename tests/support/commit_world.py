"""What must be true of a pipeline's folder at any moment, whoever writes to it. The processes that write: commit_actors.py.

The rules are those of sections 5 and 6 of the design, written a second time: nothing of ``checkpoint/`` is asked whether
``checkpoint/`` did right. The whole history is known from ghosts, files that no actor sees (`tests/support/interleavings.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from itertools import chain, combinations
from types import MappingProxyType
from typing import Any

import google_crc32c

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint import sweep_files as sweeping
from state_backend.checkpoint.plan_retention import DEFAULT_POLICY
from state_backend.checkpoint.sweep_files import sweep
from state_backend.formats import paths, record_codec
from state_backend.ports.storage import Storage
from state_backend.values.errors import CairnError, StateUnusable, UsageError
from state_backend.values.handles import Handle
from state_backend.values.intervals import Interval
from state_backend.values.marks import Quarantine, Released
from state_backend.values.records import (
    FiledShard,
    InlineShard,
    OutputFile,
    Permissions,
    Prepared,
    Record,
    RunRef,
    ShardManifest,
    ShardRef,
    SweepRecord,
    Tombstone,
)
from state_backend.values.retention import KeepLast, RetentionPolicy
from tests.support.checkpoints import PIPELINE, content, day, manifest, run, sst, start_ms
from tests.support.coordinator import Coordinator
from tests.support.interleavings import GHOST, LATER_MS, Actor, Contents, Violation

decode = lru_cache(maxsize=100_000)(record_codec.decode)


def sink(interval: Interval) -> str:
    return f"sink/{paths.interval_name(interval)}"


# --- the history, and what is true of it ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Every record that was ever committed, by id, whole; what each attempt prepared; what is refused now.

    ``unseen`` has, for a record, the quarantine marks that may be younger than its commit.
    """

    records: dict[int, Record | SweepRecord]
    prepared: dict[str, Prepared]
    refused: frozenset[int]
    unseen: dict[int, frozenset[int]] = field(default_factory=dict)

    def commits(self, until: int | None = None) -> list[Record]:
        """Ids below ``until``."""
        found = [r for n, r in sorted(self.records.items()) if until is None or n < until]
        return [r for r in found if isinstance(r, Record)]

    def commit(self, checkpoint_id: int) -> Record:
        record = self.records[checkpoint_id]
        assert isinstance(record, Record)
        return record

    def usable(self, checkpoint_id: int, unseen: Collection[int] = ()) -> bool:
        at: int | None = checkpoint_id
        while at is not None:
            if at in self.refused and at not in unseen:
                return False
            content = self.commit(at).content
            at = None if content.permissions.allow_quarantined else content.base_id
        return True

    def same(self, one: Record, other: Record) -> bool:
        return _left(one) == _left(other)

    def reproduces(self, record: Record) -> bool:
        """Whether it left what the commit of its interval before it had left."""
        if record.content.kind != "interval":
            return record.content.kind == "consolidate"
        before = [c for c in self.commits(record.id) if _counts(c) and c.content.interval == record.content.interval]
        replaces = self.outputs(record.id).keys() - self.outputs(record.id + 1).keys()
        return bool(before) and self.same(before[-1], record) and not replaces

    def stale_by(self, checkpoint_id: int, until: int) -> int | None:
        """The commit below ``until`` that made it stale."""
        mine = self.commit(checkpoint_id).content.interval
        for other in self.commits(until):
            theirs = other.content.interval
            later = other.id > checkpoint_id and _counts(other) and other.content.kind != "forget"
            if later and theirs != mine and theirs.start < mine.end and not self.reproduces(other):
                return other.id
        return None

    def superseded(self, checkpoint_id: int, until: int, unseen: Collection[int] = ()) -> bool:
        """Whether a commit below ``until``, not refused now, left another result of its interval."""
        mine = self.commit(checkpoint_id)
        return any(
            other.id > mine.id
            and _counts(other)
            and other.content.interval == mine.content.interval
            and not self.same(other, mine)
            and self.usable(other.id, unseen)
            for other in self.commits(until)
        )

    def base_for(self, interval: Interval) -> int | str | None:
        """The id that the interval starts from now, None for empty state, or the name of the error."""
        if any(i.start < interval.end and interval.start < i.end and i != interval for i in self.outputs()):
            return "UsageError"
        if interval.start_ms == start_ms():
            return "UsageError" if self.brings_back(interval, None) else None
        retained = self.retained(max(self.records, default=0))
        end = max(self.records, default=0) + 1
        fitting = [n for n in retained if self.commit(n).content.interval.end == interval.start]
        fitting = [n for n in fitting if not self.superseded(n, end)]
        usable = [n for n in fitting if self.usable(n)]
        fresh = [n for n in usable if self.stale_by(n, end) is None]
        if fresh:
            return "UsageError" if self.brings_back(interval, max(fresh)) else max(fresh)
        return "StaleStateError" if usable else "StateUnusable" if fitting else "StateGapError"

    def brings_back(self, interval: Interval, base: int | None, until: int | None = None) -> bool:
        """Whether a key that a commit below ``until`` forgot would be in the state again: by the rows, or by the base."""
        return any(
            interval.start_ms < key.until_ms or (base is not None and base < forget.id)
            for forget in self.commits(until)
            if forget.content.kind == "forget" and forget.content.forget is not None
            for key in forget.content.forget.keys
        )

    def retained(self, checkpoint_id: int) -> dict[int, int | None]:
        record = self.records.get(checkpoint_id)
        return {r.id: r.stale_by for r in record.retained} if record is not None else {}

    def outputs(self, until: int | None = None) -> dict[Interval, Record]:
        """Whose output is current before the id ``until``."""
        commits = self.commits(until)
        made = [c for c in commits if c.content.kind == "interval"]
        return {c.content.interval: c for c in made if not any(_replaces(later, c) for later in commits)}

    def withdrawn(self) -> dict[Interval, int]:
        """Intervals whose output is not current any more, with the commit that replaced it."""
        commits = self.commits()
        made = [c for c in commits if c.content.kind == "interval"]
        gone = {c.content.interval: [n.id for n in commits if _replaces(n, c)] for c in made}
        return {i: min(by) for i, by in gone.items() if by and i not in self.outputs()}


def _counts(record: Record) -> bool:
    return record.content.kind in ("interval", "restore", "forget")


def _replaces(later: Record, earlier: Record) -> bool:
    ours, theirs = later.content.interval, earlier.content.interval
    may = later.id > earlier.id and later.content.permissions.replace_overlapping
    if later.content.kind == "restore":  # It retracts the output of later intervals.
        return may and theirs.end > ours.end
    return may and ours.start < theirs.end and theirs.start < ours.end and ours != theirs


def _left(record: Record) -> tuple[Any, ...]:
    return record.content.digest, record.content.time.watermark_ms, record.content.states


def history_of(contents: Contents) -> History:
    records: dict[int, Record | SweepRecord] = {}
    prepared = {}
    for path, (data, _) in contents.items():
        if path.startswith(GHOST + paths.CHECKPOINTS):
            record = decode(data, path, Record, SweepRecord)
            records[record.id] = record
        elif path.startswith(GHOST + paths.ATTEMPTS):
            made = decode(data, path, Prepared)
            prepared[made.content.attempt] = made
    marks = {n: contents[paths.quarantine(n)][0] for n in records if paths.quarantine(n) in contents}
    refused = frozenset(n for n, mark in marks.items() if isinstance(_mark(n, mark), Quarantine))
    return History(records=records, prepared=prepared, refused=refused)


def _mark(checkpoint_id: int, data: bytes) -> Quarantine | Released:
    return decode(data, paths.quarantine(checkpoint_id), Quarantine, Released)


def check(contents: Contents) -> None:
    """Raises a Violation naming the rule that is broken now, or would be if all processes died now."""
    history = history_of(contents)
    check_log(contents, history)
    for record in history.commits():
        check_commit(history, record)
    check_retained(history)
    check_summaries(history)
    check_outputs(history)
    check_schemas(history)
    check_files(contents, history)
    check_recovery(contents, history)


def check_end(contents: Contents, ends: list[tuple[Actor, str]]) -> None:
    """Whoever was told that it is committed is; whoever was told that it is lost for good is not. If nobody died, and
    whoever commits publishes, the sink has what is current."""
    history = history_of(contents)
    committed = {c.content.attempt for c in history.commits()}
    everybody = all(outcome != "UnknownOutcome" for _, outcome in ends)
    if everybody and all(_publishes(a) for a, _ in ends if a.attempt is not None):
        for interval, record in history.outputs().items():
            seen = contents.get(sink(interval), (b"", 0))[0].decode()
            must(seen == str(record.id), "the sink has the newest output", interval, record.id, seen)
    for actor, outcome in ends:
        if outcome in ("committed", "already"):
            must(actor.attempt in committed, "what is reported as committed is", actor.name)
        if outcome == "StateUnusable":
            must(actor.attempt not in committed, "who tries again what is committed is told so", actor.name)
        if outcome in ("Fenced", "Swept", "adopted"):
            must(actor.attempt not in committed, "what is reported as lost is not committed", actor.name)


def _publishes(actor: Actor) -> bool:
    return len(actor.stages) > 2 or getattr(actor.stages[0], "publishes", False)


def must(fact: bool, rule: str, *what: object) -> None:
    if not fact:
        raise Violation(f"{rule}: {', '.join(map(str, what))}")


def check_log(contents: Contents, history: History) -> None:
    """Ids are dense, and each names for ever what was committed under it."""
    must(sorted(history.records) == list(range(1, len(history.records) + 1)), "ids are dense", sorted(history.records))
    for n, record in history.records.items():
        must(paths.record(n) in contents, "an id is never freed", n)
        now = decode(contents[paths.record(n)][0], paths.record(n), Record, SweepRecord, Tombstone)
        attempt = record.content.attempt if isinstance(record, Record) else None
        shrunk = isinstance(now, Tombstone) and (now.id, now.attempt) == (n, attempt)
        must(now == record or shrunk, "a record is created once and shrunk to its own tombstone", n)


def check_commit(history: History, record: Record) -> None:
    """What had to be true when this record was created."""
    n, made = record.id, record.content
    before = history.commits(n)
    must(made.attempt not in {c.content.attempt for c in before}, "an attempt is committed at most once", n)
    sweeps = [s for s in history.records.values() if isinstance(s, SweepRecord)]
    named = [s.id for s in sweeps if made.attempt in s.abandoned]
    must(not named, "what a sweep abandons is never committed", n, named)
    prepared = history.prepared.get(made.attempt)
    h0 = prepared.h0 if prepared is not None else 0
    for other in before if prepared is not None else []:
        theirs = other.content
        if other.id <= h0 or not _counts(other) or not theirs.interval.overlaps(made.interval):
            continue
        earlier_try = theirs.run.run_id == made.run.run_id and _order(theirs.run) < _order(made.run)
        must(history.reproduces(other) or earlier_try, "of two attempts at one interval one counts", other.id, n)
    known = {made.attempt, *(c.content.attempt for c in before)}
    inline = [ref.inline for ref in made.shards if ref.inline is not None]
    files = [h.path for shard in inline for h in shard.handles if paths.attempt_of(h.path) not in known]
    must(not files, "a file is one's own or that of a commit before", n, *files)
    gone = history.outputs(n).keys() - history.outputs(n + 1).keys() if prepared is not None else set()
    late = [i for i in gone if history.outputs(n)[i].id > h0]
    must(not late, "output is replaced that was there at begin", n, *late)
    if made.kind == "interval":
        must(not history.brings_back(made.interval, made.base_id, n), "what was forgotten stays away", n)
    if made.kind == "forget":
        later = [c.id for c in before if c.id > h0]
        must(not later or prepared is None, "a forget is of the newest state", n, *later)
    if made.base_id is None:
        must(made.kind == "restore" or made.interval.start_ms == start_ms(), "only the first interval starts empty", n)
        return
    base = made.base_id
    must(base in history.retained(n - 1), "a base is retained until it is committed on", n, base)
    if made.kind == "interval":
        must(history.commit(base).content.interval.end == made.interval.start, "a base ends where it starts", n, base)
        must(not history.superseded(base, n), "no commit on a result that was replaced", n, base)
        newer = [c.id for c in before if c.id > base and c.content.interval == history.commit(base).content.interval]
        newer = [
            c for c in newer if c in history.retained(n - 1) and history.usable(c) and history.stale_by(c, n) is None
        ]
        must(not newer, "a base is the newest of its interval", n, base, newer)
    stale_by = history.stale_by(base, n)
    forgiven = made.permissions.allow_stale_base and (prepared is None or (stale_by or 0) <= h0)
    must(stale_by is None or forgiven, "no commit on a dead branch", n, base)


def _order(who: RunRef) -> tuple[int, int]:
    return who.clear_number, who.try_number


def check_retained(history: History) -> None:
    """What is completed was so before or is new; staleness is told from then on; the furthest usable one and the newest state stay."""
    for n in range(2, len(history.records) + 1):
        before, now = history.retained(n - 1), history.retained(n)
        must(now.keys() <= {*before, n}, "a dropped checkpoint never comes back", n, sorted(now.keys() - before.keys()))
        sweeping = isinstance(history.records[n], SweepRecord)
        must((n in now) != sweeping, "a commit retains itself", n)
        must(not sweeping or now == before, "a sweep changes nothing that is retained", n)
        for kept, stale_by in now.items():
            must(stale_by == history.stale_by(kept, n + 1), "staleness is marked", n, kept, stale_by)
        marks = sorted(history.unseen.get(n, ()))
        if sweeping:
            continue
        dropped = [
            lost
            for unseen in chain.from_iterable(combinations(marks, count) for count in range(len(marks) + 1))
            if (lost := _must_stay(history, before, n, unseen) - now.keys())
        ]
        must(len(dropped) < 2 ** len(marks), "the furthest and the newest state stay", n, *dropped)


def _must_stay(history: History, before: Iterable[int], n: int, unseen: Collection[int]) -> set[int]:
    """The furthest usable checkpoint after commit ``n``, and the furthest of those that are neither stale nor replaced."""
    usable = [c for c in {*before, n} if c == n or history.usable(c, unseen)]
    valid = [c for c in usable if history.stale_by(c, n + 1) is None and not history.superseded(c, n + 1, unseen)]
    return {max(ids, key=lambda c: (history.commit(c).content.interval.end, c)) for ids in (usable, valid) if ids}


def check_summaries(history: History) -> None:
    """What planning takes from the newest record instead of from the records below it is what those say."""
    for n, record in history.records.items():
        told = record.summary
        if told is None or told.kept is None or told.replaced_outputs is None:
            continue
        whole = [history.commit(k) for k in history.retained(n)]
        mine = [(k.id, k.kind, k.interval, k.attempt, k.base_id, k.quarantine_allowed, k.digest) for k in told.kept]
        theirs = [
            (r.id, c.kind, c.interval, c.attempt, c.base_id, c.permissions.allow_quarantined, c.digest)
            for r in whole
            for c in [r.content]
        ]
        must(mine == theirs, "a summary says what is retained", n)
        ever = [c.content.interval.end_ms for c in history.commits(n + 1)]
        must(
            not ever or told.latest_end_ms == max(ever), "a summary knows how far commits reach", n, told.latest_end_ms
        )
        current = {r.id for r in history.outputs(n + 1).values()}
        near = [c.id for c in history.commits(n + 1) if c.content.kind == "interval"]
        near = [c for c in near if c in history.retained(n) or c in told.dropping]
        gone = sorted({*near} - current)
        must(gone == [*told.replaced_outputs], "a summary knows whose output is replaced", n, gone)


def check_outputs(history: History) -> None:
    """Nobody who reads all that is current has the same time twice."""
    current = sorted(history.outputs())
    for i, one in enumerate(current):
        for other in current[i + 1 :]:
            must(one.end <= other.start, "no two current outputs overlap", one, other)


def check_schemas(history: History) -> None:
    """No schema of output is lost, every file knows its own, and one table holds all current output."""
    known: tuple[Any, ...] = ()
    for record in history.commits():
        schemas = record.output_schemas
        must(schemas[: len(known)] == known, "no output schema is lost", record.id)
        known = schemas
        made = history.prepared.get(record.content.attempt)
        declared = made.content.output_schema if made is not None else None
        if declared is not None and made is not None and made.content.kind == "interval":
            mine = {schemas[(f.schema_version or 0) - 1]["fields"][0]["type"] for f in record.content.outputs}
            must(mine == {declared["fields"][0]["type"]}, "a file knows its schema", record.id, mine)
    numbers = {f.schema_version for record in history.outputs().values() for f in record.content.outputs}
    types = {known[number - 1]["fields"][0]["type"] for number in numbers if number}
    must(not {"long", "double"} <= types, "one table holds all current output", types)


def check_files(contents: Contents, history: History) -> None:
    """Whatever is completed can be restored; whatever output is current can be read."""
    for kept in history.retained(len(history.records)):
        for handle in _handles(history.commit(kept), contents):
            _must_be(contents, handle, f"completed checkpoint {kept}")
    for record in history.outputs().values():
        for output in record.content.outputs:
            _must_be(contents, output.handle, f"current output of {record.id}")


def _must_be(contents: Contents, handle: Handle, whose: str) -> None:
    must(handle.path in contents, "what is needed is there", whose, handle.path)
    data = contents[handle.path][0]
    crc32c: int = google_crc32c.value(data)
    must(
        (len(data), crc32c) == (handle.size_bytes, handle.crc32c), "what is there is what was acked", whose, handle.path
    )


def _handles(record: Record, contents: Contents) -> list[Handle]:
    found = []
    for ref in record.content.shards:
        if ref.manifest is not None:
            _must_be(contents, ref.manifest, f"completed checkpoint {record.id}")
            found.append(ref.manifest)
        found += read_manifest(ref, lambda path: contents[path][0]).handles
    return found


def read_manifest(ref: ShardRef, read: Callable[[str], bytes]) -> ShardManifest:
    if ref.inline is not None:
        return ref.inline
    assert ref.manifest is not None
    return decode(read(ref.manifest.path), ref.manifest.path, ShardManifest)


# --- if all died now --------------------------------------------------------------------------------------------------------------


class _Sink(MemoryStorage):
    """The storage together with the sink."""

    def __init__(self) -> None:
        super().__init__(now_ms=lambda: 0)
        self.sink: dict[str, bytes] = {}

    def put(self, path: str, data: bytes) -> None:
        self.sink[path] = data


def check_recovery(contents: Contents, history: History) -> None:
    """The next process publishes and cleans up; a sweep past the grace period leaves what is needed and nothing else; then
    every interval starts from what it should."""
    storage = _Sink()
    for path, (data, _) in sorted(contents.items()):
        if path.startswith("sink/"):
            storage.sink[path] = data
        elif not path.startswith((GHOST, paths.LEASES)):  # those of the dead have ended by then
            storage.create(path, data)
    made = coordinator(storage, KeepLast(1))
    try:
        sweeping.rebuild_settled(storage)
        made.publish(hook_into(storage))
        made.clean_up()
        _check_clean(storage, history)
        sweep(storage, PIPELINE, now_ms=LATER_MS, min_age=timedelta(0))
        made.publish(hook_into(storage))
    except CairnError as error:
        raise Violation(f"recovery failed: {type(error).__name__}: {error}") from error
    after = {info.path: (storage.read(info.path), 0) for info in storage.list("")}
    check_files(after, history)
    left = {p for p in after if p.startswith((paths.SHARED, paths.OUTPUT, paths.ATTEMPTS))}
    must(_needed(after, history) <= left, "a sweep removes nothing live", *sorted(_needed(after, history) - left))
    orphans = left - _needed(after, history) - _old_outputs(history)
    must(not orphans, "a sweep leaves no orphan", *sorted(orphans))
    for interval, record in history.outputs().items():
        seen = int(storage.sink.get(sink(interval), b"0"))
        # Whoever dies in its hook may have written over a newer one's; a sink that minds refuses smaller ids.
        died = seen < record.id and storage.stat(paths.published(interval, seen)) is None
        must(seen == record.id or (died and seen), "the sink has the newest output", interval, record.id, seen)
    shown = {i: n for i, (n, _) in made.log().current_outputs().items()}
    must(shown == {i: r.id for i, r in history.outputs().items()}, "readers see what is current", shown)
    for interval, by in history.withdrawn().items():
        seen = int(storage.sink.get(sink(interval), b"0"))
        died = seen < by and storage.stat(paths.published(interval, seen)) is None
        must(seen >= by or (died and seen), "the sink knows what was replaced", interval, by, seen)
    _check_bases(made, history)


def _check_clean(storage: MemoryStorage, history: History) -> None:
    """A clean-up leaves of the attempts that were committed only what is needed."""
    contents = {info.path: (storage.read(info.path), 0) for info in storage.list("")}
    committed = {c.content.attempt for c in history.commits()}
    mine = {p for p in contents if paths.attempt_of(p) in committed}
    left = sorted(mine - _needed(contents, history) - _old_outputs(history))
    must(not left, "a clean-up leaves nothing of dropped checkpoints", *left)


def _needed(contents: Contents, history: History) -> set[str]:
    kept = [history.commit(n) for n in history.retained(len(history.records))]
    needed = {h.path for record in kept for h in _handles(record, contents)}
    needed |= {paths.prepared(r.content.attempt) for r in kept}
    needed |= {o.handle.path for r in history.outputs().values() for o in r.content.outputs}
    # What a scene began with has no prepared.json that the log would know nothing of.
    return {p for p in needed if not p.startswith(paths.ATTEMPTS) or p in contents}


def _old_outputs(history: History) -> set[str]:
    """Of retained checkpoints: they may stay, although a later run of the interval replaced them."""
    kept = [history.commit(n) for n in history.retained(len(history.records))]
    return {o.handle.path for r in kept for o in r.content.outputs}


def _check_bases(made: Coordinator, history: History) -> None:
    for n in range(1, 6):
        expected, found = history.base_for(day(n)), None
        try:
            begun = made.begin(day(n), permissions=Permissions(), pipeline_start_ms=start_ms())
            found = begun.base.id if begun.base is not None else None
        except (StateUnusable, UsageError) as error:
            found = type(error).__name__
        must(found == expected, "an interval starts from its base", day(n), expected, found)


def scene(
    days: int,
    attempts: Iterable[tuple[str, Interval, RunRef, int | None]] = (),
    *,
    inline: bool = True,
    outputs: bool = True,
    recut: Iterable[tuple[str, Interval]] = (),
    may_replace: Container[str] = (),
    columns: Mapping[str, str] = MappingProxyType({}),
) -> MemoryStorage:
    """Days that were committed as ``a1``, ``a2``, ... and then intervals of other cuts (name, interval) that replace what they
    overlap, all published, and attempts (name, interval, run, digest) prepared since; those of ``may_replace`` may replace too.
    ``columns``: the output's type, by attempt."""
    storage = _Sink()
    made = coordinator(storage, DEFAULT_POLICY)
    for n in range(1, days + 1):
        name, who = f"a{n}", run(f"run-{n}")
        prepare(storage, day(n), name, who, inline=inline, outputs=outputs, column=columns.get(name))
        made.commit(f"a{n}")
    for name, interval in recut:
        allowed = Permissions(replace_overlapping=True, allow_stale_base=True)
        prepare(storage, interval, name, run(f"run-{name}"), permissions=allowed)
        made.commit(name)
    made.publish(hook_into(storage))
    for path, data in storage.sink.items():
        storage.create(path, data)
    for attempt, interval, who, digest in attempts:
        allowed = Permissions(replace_overlapping=attempt in may_replace)
        how: dict[str, Any] = {"inline": inline, "outputs": outputs, "column": columns.get(attempt)}
        prepare(storage, interval, attempt, who, digest=digest, permissions=allowed, **how)
    return storage


def coordinator(storage: Storage, policy: RetentionPolicy) -> Coordinator:
    return Coordinator(storage, PIPELINE, policy=policy)


def hook_into(storage: Any) -> Callable[[Record], None]:
    """A sink that keeps, per interval, the checkpoint whose output it was given last."""
    return lambda record: storage.put(sink(record.content.interval), str(record.id).encode())


def prepare(
    storage: Storage,
    interval: Interval,
    attempt: str,
    who: RunRef,
    *,
    digest: int | None = None,
    inline: bool = True,
    outputs: bool = True,
    permissions: Permissions = Permissions(),  # noqa: B008
    column: str | None = None,
) -> None:
    """One new file of state beside the base's, one of output, then *prepared*. ``column``: the type of the output's only one."""
    begun = coordinator(storage, DEFAULT_POLICY).begin(interval, permissions=permissions, pipeline_start_ms=start_ms())
    old = [
        h for ref in (begun.base.content.shards if begun.base else ()) for h in read_manifest(ref, storage.read).handles
    ]
    new = storage.create(sst(attempt), f"state of {attempt}".encode())
    made = manifest([*old, new])
    ref = InlineShard(shard=0, inline=made)
    if not inline:
        file = storage.create(paths.shared(attempt, 0, 0, 0, "manifest"), record_codec.encode(made))
        ref = FiledShard(shard=0, manifest=file)
    options: dict[str, Any] = {} if digest is None else {"digest": digest}
    options |= {"permissions": permissions, "output_schema": None if column is None else one_column(column)}
    base_id = begun.base.id if begun.base else None
    files = ()
    if outputs:
        output = storage.create(paths.output(interval, attempt, 0, 0), f"output of {attempt}".encode())
        files = (OutputFile(handle=output, rows=1),)
    made_content = content(interval, attempt, base_id, run=who, shards=(ref,), outputs=files, **options)
    coordinator(storage, DEFAULT_POLICY).prepare(Prepared(h0=begun.h0, content=made_content))


def one_column(type_: str) -> dict[str, Any]:
    return {"type": "struct", "fields": [{"name": "a", "type": type_, "nullable": True, "metadata": {}}]}
