"""A model of what commits decide, as plain loops over plain values, and the folders that random histories compare with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint import newest_state as newest_states
from state_backend.formats import paths
from state_backend.ports.storage import Storage
from state_backend.shard.manifest import manifest_of
from state_backend.values.errors import UnknownOutcome
from state_backend.values.intervals import Interval
from state_backend.values.records import Record, RunRef
from state_backend.values.retention import AnyOf, KeepLast, KeepQuarantined
from tests.support.checkpoints import day
from tests.support.coordinator import Coordinator
from tests.support.faulty_storage import FaultyStorage, StaleStorage

HOUR_MS, DAY_MS = 3_600_000, 86_400_000


INTERVALS = (*(day(n) for n in range(1, 6)), Interval(day(2).start, day(3).end))


SEEN: Counter[str] = Counter()


@dataclass(frozen=True, kw_only=True)
class Forgets:
    """A key that was forgotten by the attempt of that name, up to an end; ``refuses``: what would bring it back."""

    name: str
    until: datetime
    refuses: bool


@dataclass(kw_only=True)
class Try:
    """An attempt. ``state``: what its checkpoint holds, oldest first. ``lost``: nothing is left of it, so that nobody can tell."""

    name: str
    kind: str
    interval: Interval
    run: tuple[str, int, int]
    h0: int
    base: int | None
    gap: bool
    stale: bool
    replace: bool
    quarantine_allowed: bool
    digest: int
    state: tuple[bytes, ...]
    written_ms: int
    prepared: bool = False
    lost: bool = False
    damaged: bool = False
    forgets: tuple[Forgets, ...] = ()
    filtered: frozenset[str] = frozenset()
    drops: frozenset[int] = frozenset()


@dataclass(kw_only=True)
class Entry:
    id: int
    made: Try
    reproduction: bool


@dataclass
class Model:
    """One pipeline. ``log``: commits and, as None, sweeps, from id 1 on. ``kept``: completed ids with what made them stale."""

    log: list[Entry | None] = field(default_factory=list)
    kept: dict[int, int | None] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    since_ms: dict[int, int] = field(default_factory=dict)
    abandoned: set[str] = field(default_factory=set)
    tries: dict[str, Try] = field(default_factory=dict)

    @property
    def head(self) -> int:
        return len(self.log)

    def entries(self) -> list[Entry]:
        return [e for e in self.log if e is not None]

    def of(self, attempt: str) -> Entry | None:
        return next((e for e in self.entries() if e.made.name == attempt), None)

    def entry(self, id: int) -> Entry:
        found = self.log[id - 1]
        assert found is not None
        return found

    def good(self, id: int | None) -> bool:
        while id is not None:
            if id in self.refused:
                return False
            made = self.entry(id).made
            id = None if made.quarantine_allowed else made.base
        return True

    def replaced(self, id: int) -> bool:
        mine = self.entry(id).made
        return any(
            e.id > id and e.made.interval == mine.interval and e.made.digest != mine.digest and self.good(e.id)
            for e in self.entries()
        )

    def computed_without(self, id: int) -> bool:
        """Whether a checkpoint that counts would rest on what this one replaces, if it were released."""
        after = Model(log=self.log, kept=self.kept, refused=self.refused - {id})
        mine = self.entry(id).made.interval
        if any(e.id > id and e.made.interval == mine and after.good(e.id) for e in self.entries()):
            return False
        later = [
            n for n, by in self.kept.items() if n > id and by is None and self.entry(n).made.interval.end > mine.end
        ]
        return any(after.good(n) and id not in after.line(n) for n in later)

    def hides(self, id: int) -> bool:
        """Whether this dropped checkpoint would replace a usable one, if it were released."""
        after = Model(log=self.log, kept=self.kept, refused=self.refused - {id})
        mine = self.entry(id).made.interval
        same = [e.id for e in self.entries() if e.made.interval == mine and after.good(e.id)]
        return id not in self.kept and not any(n > id for n in same) and any(n in self.kept for n in same)

    def line(self, id: int | None) -> list[int]:
        """A checkpoint and what it was made from."""
        found = []
        while id is not None:
            found.append(id)
            made = self.entry(id).made
            id = None if made.quarantine_allowed else made.base
        return found

    def returning(self, start: datetime | None, base: int | None) -> list[Forgets]:
        """The forgotten keys that rows from ``start`` on, or this base, would bring back."""
        return [
            forgets
            for entry in self.entries()
            for forgets in entry.made.forgets
            if (start is not None and start < forgets.until) or (base is not None and base < entry.id)
        ]

    def newest(self, end: datetime | None = None) -> int | None:
        """The newest state; of an interval's end, the state then."""
        usable = [id for id, by in self.kept.items() if by is None and self.good(id) and not self.replaced(id)]
        usable = [id for id in usable if end in (None, self.entry(id).made.interval.end)]
        return max(usable, key=lambda id: (self.entry(id).made.interval.end, id), default=None)

    def base(
        self, interval: Interval, *, gap: bool, stale: bool, replace: bool = False, as_of: int | None = None
    ) -> int | str | None:
        """The id, None for empty, or the error's class."""
        found = self._base(interval, gap=gap, stale=stale, replace=replace, as_of=as_of)
        if isinstance(found, str):
            return found
        return "UsageError" if any(f.refuses for f in self.returning(interval.start, found)) else found

    def _base(
        self, interval: Interval, *, gap: bool, stale: bool, replace: bool = False, as_of: int | None = None
    ) -> int | str | None:
        """The id, None for empty, or the error's class."""
        for other, entry in self.outputs().items():
            may = replace and (as_of is None or entry.id <= as_of)
            if other != interval and other.overlaps(interval) and not may:
                return "UsageError"
        if interval.start == day(1).start:
            return None
        there = [id for id in self.kept if not self.replaced(id)]
        fitting = [id for id in there if self.entry(id).made.interval.end == interval.start]
        if gap and not any(self.good(id) for id in fitting):
            fitting = [id for id in there if self.entry(id).made.interval.end <= interval.start]
        if not fitting:
            return "StateGapError"
        usable = [id for id in fitting if self.good(id)]
        if not usable:
            return "StateUnusable"
        fresh = [id for id in usable if self.forgiven(id, stale, as_of)]
        if not fresh:
            return "StaleStateError"
        return max(fresh, key=lambda id: (self.entry(id).made.interval.end, id))

    def forgiven(self, id: int, stale: bool, as_of: int | None = None) -> bool:
        by = self.kept[id]
        return by is None or (stale and (as_of is None or by <= as_of))

    def judge(self, made: Try) -> str:
        """What comes of trying to commit it now: "create", "adopted", or the error's class."""
        if made.name in self.abandoned:
            return "Swept"
        if made.lost or not made.prepared:
            return "StateUnusable"
        for other in self.entries():
            theirs = other.made
            if other.id <= made.h0 or other.reproduction or not theirs.interval.overlaps(made.interval):
                continue
            if theirs.run[0] == made.run[0] and theirs.run[1:] < made.run[1:]:
                continue
            same_try = theirs.run[:2] == made.run[:2] and theirs.interval == made.interval and theirs.base == made.base
            return "adopted" if same_try else "Fenced"
        if made.base is not None and made.base not in self.kept:
            return "BaseMoved"
        if made.kind == "forget" and (self.newest() != made.base or max(self.kept) > made.h0):
            return "BaseMoved"
        if made.kind != "interval" and made.base is not None and self.returning(None, made.base):
            return "BaseMoved"
        if made.kind == "interval":
            now = self.base(made.interval, gap=made.gap, stale=made.stale, replace=made.replace, as_of=made.h0)
            if now != made.base or {f.name for f in self.returning(made.interval.start, now)} - made.filtered:
                return "BaseMoved"
        elif (made.base is not None and not (made.quarantine_allowed or self.good(made.base))) or (
            made.base is not None and not self.forgiven(made.base, made.stale, made.h0)
        ):
            return "BaseMoved"
        return "CorruptFile" if made.damaged else "create"

    def planned(self, made: Try, last: int) -> tuple[Entry, dict[int, int | None]]:
        """The entry and what is kept with it, if it is created now and ``last`` are retained."""
        id = self.head + 1
        before = [e for e in self.entries() if e.made.interval == made.interval]
        compared = [*before[-1:], *[e for e in before if self.good(e.id)][-1:]]
        equal = made.kind == "interval" and {e.made.digest for e in compared} == {made.digest}
        equal = equal and not any(i != made.interval and i.overlaps(made.interval) for i in self.outputs())
        kept = dict(self.kept)
        if not equal and made.kind != "forget":
            for old, by in self.kept.items():
                theirs = self.entry(old).made.interval
                if by is None and theirs != made.interval and made.interval.start < theirs.end:
                    kept[old] = id
        ends = {old: self.entry(old).made.interval.end for old in kept if self.good(old)} | {id: made.interval.end}
        stay = {id, max(ends, key=lambda n: (ends[n], n)), *sorted(ends)[-last:]}
        after = Model(
            log=[*self.log, Entry(id=id, made=made, reproduction=equal)], kept=kept | {id: None}, refused=self.refused
        )
        newest = after.newest()
        assert newest is not None
        SEEN["newest state behind a stale one"] += newest not in stay
        stay |= {newest}
        for old in self.held(made.written_ms):
            SEEN["held in quarantine"] += old not in stay
            stay |= {old, *({self.entry(old).made.base} & kept.keys())}
        return Entry(id=id, made=made, reproduction=equal), {n: kept.get(n) for n in sorted(stay - made.drops)}

    def held(self, now_ms: int) -> set[int]:
        """The quarantined checkpoints whose files stay: refused for less than a day, and not dropped by a person."""
        return {n for n in self.refused & self.kept.keys() if n in self.since_ms and now_ms - self.since_ms[n] < DAY_MS}

    def outputs(self) -> dict[Interval, Entry]:
        return {i: e for i, e in self.published().items() if e.made.interval == i}

    def published(self) -> dict[Interval, Entry]:
        """What a sink hears last of each interval: its own output, or what replaced it."""
        heard: dict[Interval, Entry] = {}
        for entry in self.entries():
            mine = entry.made.interval
            if entry.made.kind == "restore" and entry.made.replace:
                for other in [i for i, e in heard.items() if e.made.interval == i and i.end > mine.end]:
                    heard[other] = entry
            if entry.made.kind == "interval":
                for other in [i for i, e in heard.items() if e.made.interval == i and i.overlaps(mine)]:
                    if entry.made.replace:
                        heard[other] = entry
                heard[mine] = entry
        return heard


@dataclass(frozen=True)
class Late:
    """A create that was sent and not answered; it lands now, later or never."""

    path: str
    data: bytes
    entry: Entry
    kept: dict[int, int | None]


class LosesOne(FaultyStorage):
    """Keeps the create of a record instead of doing it (``arrives``: does it), and says that it does not know."""

    sent: tuple[str, bytes] | None = None
    arrives = False

    def create(self, path: str, data: bytes) -> Any:
        if path.startswith(paths.CHECKPOINTS) and self.sent is None:
            self.sent = path, data
            if self.arrives:
                super().create(path, data)
            raise UnknownOutcome(f"the answer to {path} is lost")
        return super().create(path, data)


class Host:
    """The host at work, whose clock is wrong. ``now_ms``: the right time."""

    ahead_ms = 0

    def __init__(self) -> None:
        self.now_ms: Callable[[], int] = lambda: 0

    def time_ns(self) -> int:
        return (self.now_ms() + self.ahead_ms) * 1_000_000


HOST = Host()


class House:
    """A pipeline's folder on a network disk, with its model, and a sink."""

    def __init__(self, name: str, clock: Callable[[], int]) -> None:
        self.name, self.model, self.late = name, Model(), list[Late]()
        self.storage = StaleStorage(MemoryStorage(f"memory://{name}", now_ms=clock))
        self.published: dict[Interval, int] = {}

    def coordinator(self, last: int = 3, over: Storage | None = None) -> Coordinator:
        policy = AnyOf((KeepLast(last), KeepQuarantined(1)))
        return Coordinator(over or self.storage, self.name, policy=policy)

    def hook(self, record: Record) -> None:
        self.published[record.content.interval] = record.id

    def state_of(self, record: Record) -> tuple[bytes, ...]:
        manifest = manifest_of(record.content.shards[0], self.storage)
        return tuple(self.storage.read(h.path) for h in manifest.handles)

    def check_log(self) -> None:
        """All that is completed can be restored, and is what the model says."""
        log = self.coordinator().log()
        model = self.model
        assert log.head_id == model.head
        assert {n: r.stale_by for n, r in log.retained.items()} == model.kept
        assert newest_states.checkpoint_named(log, "latest") == model.newest()
        for end in {model.entry(n).made.interval.end for n in model.kept}:
            assert newest_states.checkpoint_named(log, end) == model.newest(end)
        for record in log.completed():
            made = model.entry(record.id).made
            assert (record.content.attempt, record.content.base_id) == (made.name, made.base)
            assert self.state_of(record) == made.state
            assert (record.reproduces is not None) == model.entry(record.id).reproduction
        current, cuts = log.current_outputs(), sorted(log.current_outputs())
        assert all(one.end <= other.start for one, other in pairwise(cuts))
        assert {i: n for i, (n, _) in current.items()} == {i: e.id for i, e in model.outputs().items()}
        for interval, entry in model.outputs().items():
            data = self.storage.read(paths.output(interval, entry.made.name, 0, 0))
            assert data == b"output of " + f"state of {entry.made.name}".encode()


def run_ref(run: tuple[str, int, int]) -> RunRef:
    return RunRef(run_id=run[0], clear_number=run[1], try_number=run[2])
