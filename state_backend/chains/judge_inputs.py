"""Decide which results of a pipeline are out of date, because what they read of other pipelines has changed.

A result is *stale* if the content of its inputs, or the set of its input intervals, differs from what its record says.
A result is *pending* if an input is missing, quarantined or itself out of date, or if an earlier result of its own
pipeline is. Both are computed from the logs when they are asked for: nothing is written, and no commit spans
two logs. If an upstream commits while a result is computed, the result is stale when the next reader asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Literal, NamedTuple

from state_backend.chains.ends_of_logs import changed_only_by, has_only_grown, mark_of
from state_backend.chains.inputs_of import Piece, attempt_at, commits_in, is_left_out, part_of, pieces_of, unexchanged
from state_backend.checkpoint.interval_results import last_restore, results_of, spoilt_results
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import (
    Fact,
    Log,
    attempt_of,
    id_of_log,
    last_facts,
    newest_interval,
    read_log,
    read_newest,
    run_of,
)
from state_backend.checkpoint.trials import production_root
from state_backend.values.errors import CairnError, RetryableError
from state_backend.values.frozen import frozen
from state_backend.values.inputs import Edge, Followed, FreshAt, InputPart, InputRead, followed_after, gaps_in
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.records import Record, Tombstone

OLD_RECORD = "its record does not say what it read of other pipelines"
Kind = Literal["stale", "pending", "unknown", "unreadable"]


class Cause(NamedTuple):
    """The interval because of which a result is out of date; None for a pipeline whose log can't be read."""

    root: str
    pipeline: str
    interval: Interval | None


@frozen
class Verdict:
    """Why the result of an interval may not be used as it is.

    Attributes:
        kind: `stale`: an input has changed. `pending`: an input is missing or itself out of date. `unknown`: the
            records have no digests to compare. `unreadable`: an upstream's log can't be read.
        cause: The interval directly behind this verdict, whose own verdict leads on towards the first cause.
    """

    kind: Kind
    why: str
    cause: Cause | None = None


def judge_part(read: InputPart, now: list[Piece], name: str, *, known_until: int) -> Verdict | None:
    """Compare what was read of an upstream with what it has now. Return None if nothing has changed.

    Args:
        read: The part of the upstream that was read, from the reader's record.
        now: What the upstream has in the same span.
        name: Name of the upstream, for the reason.
        known_until: Commits up to this id were there at the reading: they can't have changed since. 0 if the upstream's
            log is another one than at the reading.
    """
    newer = [piece for piece in now if piece.id > known_until]
    if len(now) == read.intervals and not newer:
        return None
    if len(now) != read.intervals:
        return Verdict(kind="stale", why=f"{name} has {len(now)} intervals in {read.span}; it read {read.intervals}")
    current = part_of(now).digest
    shown = f"{name} {newer[0].interval}, checkpoint {newer[0].id}"
    if current is None or read.digest is None:
        return Verdict(
            kind="unknown", why=f"{shown} is newer than the reading, and the records have no digest of its rows"
        )
    if current == read.digest:
        return None
    why = f"{name} {newer[0].interval} was changed by checkpoint {newer[0].id} after it was read"
    return Verdict(kind="stale", why=why)


@dataclass(frozen=True)
class Node:
    """A pipeline of a chain. Facts about all of its intervals are read when a property is first used."""

    log: Log

    @cached_property
    def id(self) -> str:
        return id_of_log(self.log.entries.storage) if self.log.head_id else ""

    @cached_property
    def _facts(self) -> list[Fact]:
        return self.log.facts(None)

    @cached_property
    def outputs(self) -> Mapping[Interval, int]:
        """The intervals with current output, each with the id of its commit."""
        return {f.interval: f.id for f in last_facts(self._facts) if f.kind == "interval"}

    @cached_property
    def spoilt(self) -> Mapping[Interval, str]:
        """The intervals whose results are not valid by the pipeline's own log, each with the reason."""
        results = spoilt_results(self.log, self.outputs)
        return {i: r.spoilt for i, r in results.items() if r.spoilt is not None}

    @cached_property
    def origin(self) -> Fact | None:
        """The first commit: of the first interval, or of a restored state. None for an empty log."""
        return min(self._facts, key=lambda fact: fact.id, default=None)

    def elsewhere(self, edge: Edge, span: Interval, commits: Mapping[Interval, int]) -> Interval | None:
        """Return the part of `span` from before the fork: only the forked pipeline has its output. Otherwise None.

        The result is None too if the start lies within the forked checkpoint's interval: a person has declared that
        nobody reads earlier output.
        """
        at = Interval(span.end - timedelta(milliseconds=1), span.end) if edge.reads == "state" else span
        gap, newest = next(gaps_in(at, commits), None), self.log.newest
        if gap is None or newest is None or (first := self.origin) is None or first.kind != "restore":
            return None
        entry = self.log.entries[first.id]
        if not isinstance(entry, Record | Tombstone) or not _is_fork(entry):
            return None
        start = from_ms(newest.content.pipeline_start_ms)
        if first.interval.start < start or max(gap.start, start) >= min(gap.end, first.interval.end):
            return None
        return Interval(max(gap.start, start), min(gap.end, first.interval.end))

    def spoilt_among(self, commits: Mapping[Interval, int]) -> Mapping[Interval, str]:
        if not commits or self.log.newest is None:
            return {}
        start = from_ms(self.log.newest.content.pipeline_start_ms)
        found = results_of(self.log, [*commits], Interval(start, start + timedelta(milliseconds=1)))
        # `results_of` does not know that a restored state makes earlier results valid. `self.spoilt` does.
        return self.spoilt if any(one.spoilt is not None for one in found.values()) else {}

    @cached_property
    def moved(self) -> tuple[Interval, ...]:
        """Intervals that were committed more than once, or after a later interval."""
        return tuple(_moved(self._facts))

    @cached_property
    def restored(self) -> Fact | None:
        """The latest restore that counts, or None. The person who restored wanted the earlier results as they are."""
        return last_restore(self.log, self._facts)

    @cached_property
    def erased(self) -> tuple[tuple[Interval, int, str], ...]:
        """Intervals whose output `cairn erase` rewrote, each with the id and the attempt of that commit."""
        erasing = [self.log.entries[f.id] for f in self._facts if f.kind == "forget"]
        found = (e for e in erasing if isinstance(e, Record | Tombstone))
        return tuple((i, e.id, attempt_of(e)) for e in found for i in e.rewritten)


def root_of_edge(declared: str | None, reader_root: str) -> str:
    """Return the root of an upstream. A trial reads production, except where an edge of its records names a trial."""
    return (declared or production_root(reader_root)).rstrip("/")


def inputs_in(entry: object) -> tuple[InputRead, ...]:
    """Return what a commit read of other pipelines."""
    return entry.content.inputs if isinstance(entry, Record) else entry.inputs if isinstance(entry, Tombstone) else ()


def followed_in(log: Log | None) -> tuple[Followed, ...]:
    """Return the upstreams that some current result of a pipeline has read, by its newest records."""
    if log is None or not log.kept:
        return ()
    # The newest record may be of a restore or a `cairn erase`, which copy an older content: read two records.
    found = [record.content for record in (log.whole(log.kept[-1].id), newest_interval(log)) if record is not None]
    known = [one for content in found for one in content.followed]
    if any(one.erased for one in known) and unexchanged(log):  # the rows are still in this pipeline's output
        known = [replace(one, erased=()) for one in known]
    return followed_after(known, (read for content in found for read in content.inputs))


def reached(node: Node) -> datetime:
    """Return the time up to which the results have no gap. Gaps that a person allowed do not count."""
    if not node.outputs:
        return from_ms(node.log.whole(node.log.kept[-1].id).content.pipeline_start_ms)
    span = Interval(min(node.outputs).start, max(interval.end for interval in node.outputs))
    gaps = (gap for gap in gaps_in(span, node.outputs) if not is_left_out(node.log, node.outputs, gap))
    return next((gap.start for gap in gaps), span.end)


def _is_fork(first: Record | Tombstone) -> bool:
    """Return True if a pipeline whose first record is `first` began as a fork, not with a savepoint or an import."""
    run_id, saved = run_of(first).run_id, isinstance(first, Tombstone) or first.content.restored_from is not None
    return run_id.startswith("fork__") or not (saved or run_id.startswith("import__"))


def find_problem(
    node: Node, edge: Edge, span: Interval, commits: Mapping[Interval, int], judged: Mapping[Interval, Verdict]
) -> tuple[Interval, str] | None:
    """Return the first interval of `span` of an upstream that can't be read now, and why; None if all can be read."""
    if edge.reads == "state":
        newest = node.log.newest
        if not commits and (newest is None or span.end > from_ms(newest.content.pipeline_start_ms)):
            return span, f"no checkpoint ends at {format_instant(span.end)}"
    else:
        for gap in gaps_in(span, commits):
            begins = (
                min(node.outputs).start if node.outputs else node.origin.interval.end if node.origin else span.start
            )
            if gap.end > begins and not is_left_out(node.log, node.outputs, gap):
                return gap, "the upstream has not committed it"
    current = {i: n for i, n in commits.items() if n}  # id 0: by the plan, the interval runs again before it is read
    spoilt = node.spoilt_among(current)
    for interval in current:
        if (why := spoilt.get(interval)) is not None:
            return interval, f"its result is out of date: {why}"
        if (verdict := judged.get(interval)) is not None and verdict.kind != "unknown":
            return interval, f"its result is out of date: {verdict.why}"
    return None


def _open(root: str, pipeline: str) -> Log:
    log = read_newest(storage := locate(root, pipeline).storage)
    needed = [*(k for k in log.kept if k.kind == "forget"), *[k for k in log.kept if k.kind == "interval"][-1:]]
    # If another process has dropped one of these checkpoints since, read the log again.
    return log if all(isinstance(log.entry(kept.id), Record) for kept in needed) else read_log(storage, log)


@dataclass
class Chains:
    """The logs of pipelines and of their upstreams, each read once.

    Attributes:
        open_log: Function that reads the log of a pipeline, given the root and the name.
    """

    open_log: Callable[[str, str], Log] = _open
    _logs: dict[tuple[str, str], Log] = field(default_factory=dict)
    _nodes: dict[tuple[str, str], Node | CairnError] = field(default_factory=dict)
    _judged: dict[tuple[str, str], Mapping[Interval, Verdict]] = field(default_factory=dict)
    _ids: dict[tuple[str, ...], str] = field(default_factory=dict)
    _under_way: set[tuple[str, str]] = field(default_factory=set)
    _met_itself: bool = False

    def node(self, root: str, pipeline: str, log: Log | None = None) -> Node:
        """Return a pipeline's log and results as a `Node`. If its log is damaged, each call raises the same error."""
        at = root.rstrip("/"), pipeline
        if at not in self._nodes:
            try:
                self._nodes[at] = Node(self.log(*at, log))
            except CairnError as error:
                self._nodes[at] = error
        found = self._nodes[at]
        if isinstance(found, CairnError):
            raise found
        return found

    def log(self, root: str, pipeline: str, log: Log | None = None) -> Log:
        """Return the log of a pipeline. `log`: the log, if the caller has just read it."""
        at = root.rstrip("/"), pipeline
        if at not in self._logs:
            self._logs[at] = self.open_log(*at) if log is None else log
        return self._logs[at]

    def judged(self, root: str, pipeline: str, log: Log | None = None) -> Mapping[Interval, Verdict]:
        """Return the verdicts about those current results of a pipeline that are out of date, by interval.

        A result that the pipeline's own log calls stale or quarantined has no verdict for that alone.
        """
        at = root.rstrip("/"), pipeline
        if at in self._judged:
            return self._judged[at]
        if at in self._under_way:  # In a cycle, the inner answer counts only the pipeline's own log.
            self._met_itself = True
            return {}
        self._under_way.add(at)
        try:
            self.log(root, pipeline, log)
            found = {} if self._is_known_fresh(*at) else self._judge_all(*at)
        finally:
            self._under_way.remove(at)
        if not self._under_way:
            self._met_itself = False
        if not self._met_itself:  # within a cycle, the answer may be incomplete, so it is not kept
            self._judged[at] = found
        return found

    def inputs(self, root: str, pipeline: str) -> tuple[InputRead, ...]:
        """Return what the newest interval of a pipeline read of other pipelines; nothing if its log can't be read."""
        try:
            newest = newest_interval(self.log(root, pipeline))
        except RetryableError:
            raise
        except CairnError:
            return ()
        return () if newest is None else newest.content.inputs

    def id_for(self, root: str, pipeline: str, upstream: tuple[str, str]) -> str:
        """Return the uuid by which a pipeline tells an upstream's log from other logs; an empty text for an empty log.

        A folder that was put back from a backup uses ids a second time. The pipeline notices that the record that it
        saw last is gone or differs. Then the log gets a new uuid, which the pipeline's next interval records.
        """
        at = (root, pipeline, *upstream)
        if at in self._ids:
            return self._ids[at]
        node = self.node(*upstream)
        reads = self.inputs(root, pipeline)
        seen = [r for r in reads if (root_of_edge(r.edge.root, root), r.edge.pipeline) == upstream and r.head]
        if all(_is_there(node.log, read) for read in seen):
            if seen and all(read.attempt and read.log == seen[0].log for read in seen):
                return self._ids.setdefault(at, seen[0].log)
            followed = followed_in(self.log(root, pipeline))
            known = [f.log for f in followed if (root_of_edge(f.root, root), f.pipeline) == upstream]
            found = next((log for log in reversed(known) if log.partition("/")[0] == node.id), node.id)
        else:
            found = f"{node.id}/{attempt_at(node.log, node.log.head_id)}"
        return self._ids.setdefault(at, found)

    def fresh_at(self, root: str, pipeline: str, reads: Sequence[InputRead]) -> FreshAt | None:
        """Return where the logs end, for the record of a result with these reads; None if a result may be outdated."""
        try:
            log = self.log(root, pipeline)
            if self.judged(root, pipeline) or any(self.judge_read(root, pipeline, read) is not None for read in reads):
                return None
            ups = {(one.root, one.pipeline) for one in followed_after(followed_in(log), reads)}
            logs = {up: self.log(root_of_edge(up[0], root), up[1]) for up in sorted(ups, key=str)}
        except RetryableError:
            raise
        except CairnError:
            return None
        marks = {(at, name): mark_of(one, name, at) for (at, name), one in logs.items()}
        ends = [(read, marks[read.edge.root, read.edge.pipeline]) for read in reads if read.log and read.edge.tracked]
        # Two cases get no mark: a `cairn erase`, which exchanges output without a new record; and a log that has grown
        # or was replaced since it was read.
        if any(kept.kind == "forget" for one in logs.values() for kept in one.kept):
            return None
        if any((read.head, read.attempt) != (mark.head, mark.attempt) for read, mark in ends):
            return None
        return FreshAt(own=mark_of(log, pipeline), upstreams=tuple(marks.values()))

    def _is_known_fresh(self, root: str, pipeline: str) -> bool:
        """Return True if no result was out of date when the newest interval ran, and no log has changed one since."""
        try:
            newest = newest_interval(log := self.log(root, pipeline))
            if newest is None or (known := newest.content.fresh_at) is None:
                return False
            ups = [((root_of_edge(mark.root, root), mark.pipeline), mark) for mark in known.upstreams]
            return changed_only_by(log, known.own, {newest.id}) and all(
                has_only_grown(self.log(*at), mark) and not self.judged(*at) for at, mark in ups
            )
        except RetryableError:
            raise
        except CairnError:
            return False

    def _judge_all(self, root: str, pipeline: str) -> Mapping[Interval, Verdict]:
        followed = followed_in(self.log(root, pipeline))
        since = min((at for one in followed if (at := self._unsettled(root, pipeline, one))), default=None)
        if since is None:
            return {}
        node, found = self.node(root, pipeline), dict[Interval, Verdict]()
        first: Interval | None = None
        outputs = {interval: n for interval, n in sorted(node.outputs.items()) if interval.end > since}
        node.log.entries.load(outputs.values())
        for interval, n in outputs.items():
            verdict = self._judge(root, pipeline, node.log.entries[n])
            if verdict is not None and verdict.kind == "unreadable":
                edges = [read.edge for read in self.inputs(root, pipeline)]
                if verdict.cause not in {Cause(root_of_edge(edge.root, root), edge.pipeline, None) for edge in edges}:
                    verdict = Verdict(kind="unknown", why=f"{verdict.why}; newer intervals do not read it")
            if (by := node.restored) is not None and interval.start < by.interval.end and n < by.id:
                # A person has restored a state since and so accepted the earlier results, so no verdict may block them.
                if verdict is not None:
                    found[interval] = Verdict(kind="unknown", why=f"a state was restored after it; {verdict.why}")
                continue
            if first is not None and (verdict is None or verdict.kind == "unknown"):
                why = f"it continues from {first}, which is out of date"
                verdict = Verdict(kind="pending", why=why, cause=Cause(root, pipeline, first))
            if verdict is not None:
                found[interval] = verdict
                if verdict.kind != "unknown":
                    first = first or interval
        return found

    def _unsettled(self, root: str, pipeline: str, followed: Followed) -> datetime | None:
        """Return the start of the first interval of an upstream whose readers may be out of date; None without one.

        Such an interval was committed more than once, or after a later interval, or is out of date. No interval reads
        beyond its own end, so the results of earlier intervals need not be looked at.
        """
        at = root_of_edge(followed.root, root), followed.pipeline
        try:
            node, judged = self.node(*at), self.judged(*at)
            if self.id_for(root, pipeline, at) != followed.log:
                return datetime.min.replace(tzinfo=UTC)
            erased = [i for i, _, attempt in node.erased if attempt not in followed.erased]
            return min((i.start for i in (*node.moved, *node.spoilt, *judged, *erased)), default=None)
        except RetryableError:
            raise
        except CairnError:
            return datetime.min.replace(tzinfo=UTC)

    def _judge(self, root: str, pipeline: str, entry: object) -> Verdict | None:
        if not isinstance(entry, Record | Tombstone):
            return None
        inputs = inputs_in(entry)
        if not inputs:
            if isinstance(entry, Record) and entry.content.followed:
                return None  # It knew of the upstreams of earlier intervals, and read none.
            return Verdict(kind="unknown", why=OLD_RECORD)
        verdicts = [self.judge_read(root, pipeline, read) for read in inputs if read.edge.tracked]
        return min((v for v in verdicts if v is not None), key=lambda v: _ORDER.index(v.kind), default=None)

    def judge_read(self, root: str, pipeline: str, read: InputRead) -> Verdict | None:
        """Return the verdict about an input that a pipeline below `root` has read; None if the input is as it was."""
        edge = read.edge
        at = root_of_edge(edge.root, root), edge.pipeline
        if not read.parts and not read.log:
            return None  # The upstream had not begun, and its intervals of that time never run.
        try:
            node = self.node(*at)
            if not node.log.head_id:
                why = f"there is no pipeline {edge.pipeline} below {at[0]}"
                return Verdict(kind="unreadable", why=why, cause=Cause(*at, None))
            there = commits_in(node.log, edge, read.span)
            problem = find_problem(node, edge, read.span, there, self.judged(*at))
            if problem is not None:
                why = f"{edge.pipeline} {problem[0]}: {problem[1]}"
                return Verdict(kind="pending", why=why, cause=Cause(*at, problem[0]))
            # A log that is shorter than it was has been put back from a backup, and uses ids again.
            same_log = self.id_for(root, pipeline, at) == read.log and node.log.head_id >= read.head
            known_until, erased = read.head if same_log else 0, set[Interval]()
            if node.log.head_id > read.head:
                here = followed_in(self.log(root, pipeline))
                done = {a for f in here if (root_of_edge(f.root, root), f.pipeline) == at for a in f.erased}
                erased = {i for i, n, attempt in node.erased if n > read.head and attempt not in done}
            found = _judge_parts(node, read, there, known_until=known_until, erased=erased)
            return found and replace(found[0], cause=Cause(*at, found[1]))
        except RetryableError:
            raise
        except CairnError as error:
            why = f"{edge.pipeline} can't be read: {str(error).splitlines()[0]}"
            return Verdict(kind="unreadable", why=why, cause=Cause(*at, None))


_ORDER: tuple[Kind, ...] = ("unreadable", "stale", "pending", "unknown")


def _is_there(log: Log, read: InputRead) -> bool:
    """Return True if a log still has the record that was its newest one when an attempt read it."""
    found = attempt_at(log, read.head)
    return found is not None and read.attempt in ("", found)


def _judge_parts(
    node: Node, read: InputRead, there: Mapping[Interval, int], *, known_until: int, erased: set[Interval]
) -> tuple[Verdict, Interval] | None:
    """Return a verdict about what changed since the reading, and the first changed interval; None for no change.

    `there`: The upstream's intervals in the span read, and their commits now. `erased`: Those with erased rows.
    """
    edge, count = read.edge, sum(part.intervals for part in read.parts)
    if len(there) == count and all(n <= known_until and i not in erased for i, n in there.items()):
        return None
    if edge.reads == "state" and read.parts:
        now = pieces_of(node.log, edge, there)
        verdict = judge_part(read.parts[0], now, f"the state of {edge.pipeline}", known_until=known_until)
        if verdict is not None and not all(n in node.log.retained for n in there.values()):
            verdict = replace(verdict, why=f"{verdict.why}; retention has dropped this state")
        return None if verdict is None else (verdict, next(iter(there), read.span))
    lone = [i for i in there if not any(p.span.start <= i.start and i.end <= p.span.end for p in read.parts)]
    if lone:
        return Verdict(kind="stale", why=f"{edge.pipeline} has {lone[0]}, which it did not read"), lone[0]
    for part in read.parts:
        inside = {i: n for i, n in there.items() if part.span.start <= i.start and i.end <= part.span.end}
        newer = sorted(i for i, n in inside.items() if n > known_until or i in erased)
        changed = len(inside) != part.intervals or newer
        known = known_until if erased.isdisjoint(inside) else 0
        now = pieces_of(node.log, edge, inside) if changed else []
        if changed and (verdict := judge_part(part, now, edge.pipeline, known_until=known)) is not None:
            if verdict.kind == "stale" and not erased.isdisjoint(inside):
                verdict = replace(verdict, why=f"{verdict.why}; `cairn erase` removed rows there")
            return verdict, next(iter(newer), part.span)
    return None


def _moved(facts: Sequence[Fact]) -> Iterator[Interval]:
    first: dict[Interval, int] = {}
    for fact in sorted(facts, key=lambda fact: fact.id):
        if first.setdefault(fact.interval, fact.id) != fact.id or fact.kind != "interval":
            yield fact.interval
    latest = 0
    for interval, n in sorted(first.items(), reverse=True):
        if latest and n > latest:
            yield interval
        latest = min(latest or n, n)
