"""Find once which commits of its upstreams an interval reads. Exactly these commits are then read and recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from state_backend.chains.inputs_of import attempt_at, commits_in, parts_of, pieces_of, span_within
from state_backend.chains.judge_inputs import Chains, find_problem, root_of_edge
from state_backend.checkpoint.log import Log
from state_backend.checkpoint.newest_state import valid_states
from state_backend.values.airflow_commands import backfill_command, command_line
from state_backend.values.errors import InputNotReady, Rerun, StaleStateError, StateGapError, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.inputs import Edge, InputRead, TriedUpstream
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.schedule import Schedule


@frozen
class Reader:
    """The pipeline that reads, and the interval that it reads for."""

    root: str
    pipeline: str
    interval: Interval
    schedule: Schedule | None
    # Start of the pipeline; None if it is not known.
    start: datetime | None = None

    def __str__(self) -> str:
        return f"pipeline {self.pipeline!r}, {self.interval}"


@frozen
class Awaited:
    """An input that an interval waits for. The waiting task of Airflow keeps this object as JSON.

    Attributes:
        root: Root of the upstream.
        head: The highest id in the upstream's log when the interval could not be read.
    """

    reader: Reader
    edge: Edge
    root: str
    head: int

    def problem(self) -> InputNotReady | None:
        """Read the logs, and return why the input still can't be read; None if it can."""
        try:
            pin(Chains(), self.reader, self.edge)
        except InputNotReady as error:
            return error
        return None


Pinned = tuple[InputRead, tuple[int, ...]]


def pin_each(
    chains: Chains, reader: Reader, edge: Edge, tried: Mapping[tuple[str, str], TriedUpstream]
) -> list[Pinned]:
    """Return what the interval reads of an upstream, as `pin` does: from production, or from the trial of a chain.

    `tried`: The pipelines of the trial, by root and name. An edge into one of them is read from production up to the
    start of its trial, and from the trial afterwards. So a read of the time around this start has two parts.
    """
    root = root_of_edge(edge.root, reader.root)
    if (trial := tried.get((root, edge.pipeline))) is None:
        return [pin(chains, reader, edge)]
    inside, begins = replace(edge, root=trial.root), trial.span.start
    span = span_within(chains.log(root, edge.pipeline), edge, edge.anchor(reader.interval, reader.schedule))
    if edge.reads == "state":
        return [pin(chains, reader, inside if span.end > begins else edge, span)]
    cut = min(max(span.start, begins), span.end)
    parts = [(edge, span.start, cut), (inside, cut, span.end)]
    return [pin(chains, reader, one, Interval(start, end)) for one, start, end in parts if start < end]


def pin(chains: Chains, reader: Reader, edge: Edge, part: Interval | None = None) -> Pinned:
    """Return what the interval reads of an upstream, for its record, and the ids of the commits that it reads.

    `part`: The part of the upstream's time that is read; None: all that the edge maps to the interval.

    Raises:
        InputNotReady: The upstream has not committed all of it, or some of it is out of date.
        StateGapError: The upstream's retention has dropped the state.
        UsageError: The upstream was forked after the span, an interval of it reaches beyond what the edge maps, or
            pipelines read each other.
    """
    root = root_of_edge(edge.root, reader.root)
    node = chains.node(root, edge.pipeline)
    anchor = edge.anchor(reader.interval, reader.schedule)
    span = part or span_within(node.log, edge, anchor)
    if not node.log.head_id:
        own = (root, edge.pipeline) == (reader.root.rstrip("/"), reader.pipeline) and edge.reads != "state"
        if own and edge.back and reader.start is not None and anchor.end <= reader.start:
            return InputRead(edge=edge, span=span, log="", head=0, parts=()), ()
        raise _not_ready(reader, edge, root, span, "the upstream has no checkpoint yet", 0)
    _check_no_cycle(chains, reader, edge, root)
    commits = commits_in(node.log, edge, span)
    if edge.reads != "state" and (beyond := [i for i in commits if i.start < span.start or i.end > span.end]):
        raise UsageError(
            f"{reader}: interval {beyond[0]} of pipeline {edge.pipeline!r} reaches beyond {span}, which this interval reads\n"
            "Let the intervals of the pipeline that reads begin and end where those of the upstream do, or read a whole number of them"
        )
    if (part := node.elsewhere(edge, span, commits)) is not None:
        raise UsageError(
            f"{reader} reads {edge.pipeline} {part}, but {edge.pipeline} began later, with the state of another pipeline\n"
            f"For this interval, read the other pipeline, or run {edge.pipeline} again from its start\n"
            "To skip earlier output after a fork, fork again, with a --from within the interval of the forked checkpoint"
        )
    if (problem := find_problem(node, edge, span, commits, chains.judged(root, edge.pipeline))) is not None:
        raise _not_ready(reader, edge, root, *problem, node.log.head_id)
    for interval, n in commits.items():
        if edge.reads == "state" and n not in node.log.retained:
            raise _gone(reader, edge, root, node.log, interval, n)
    head = _head_for(node.log, commits)
    pieces = pieces_of(node.log, edge, commits)
    of_log, attempt = chains.id_for(reader.root, reader.pipeline, (root, edge.pipeline)), attempt_at(node.log, head)
    read = InputRead(edge=edge, span=span, log=of_log, head=head, attempt=attempt or "", parts=parts_of(pieces))
    return read, tuple(sorted(piece.id for piece in pieces))


def check_earlier(chains: Chains, reader: Reader, log: Log) -> None:
    """Raise `StaleStateError` if the interval would start from a state that is out of date because of an input."""
    judged = chains.judged(reader.root, reader.pipeline, log)
    earlier = sorted(i for i, v in judged.items() if i.start < reader.interval.start and v.kind != "unknown")
    if not earlier:
        return
    first, last = earlier[0], earlier[-1]
    raise StaleStateError(
        f"{reader}: its base is out of date, since the result of {first} is {judged[first].kind}: {judged[first].why}\n"
        f"To see all such results: {command_line('status', root=reader.root, pipeline=reader.pipeline)}",
        rerun=Rerun(first=first.start, last=last.start) if judged[first].kind == "stale" else None,
    )


def position_of(reads: Sequence[InputRead]) -> dict[str, object]:
    """Return the source position for the reads of an edge. It has a digest, so that equal rows are the same input."""
    parts = [part for read in reads for part in read.parts]
    digests = [part.digest for part in parts if part.digest is not None]
    return {
        "pipeline": reads[0].edge.pipeline,
        "span": str(Interval(reads[0].span.start, reads[-1].span.end)),
        "intervals": sum(part.intervals for part in parts),
        "rows": sum(part.rows for part in parts),
        # If a part has no digest, the ids of checkpoints stand for the rows: another checkpoint may have others.
        "content": f"{sum(digests) % 2**64:016x}"
        if len(digests) == len(parts)
        else f"checkpoints {[part.last_id for part in parts]}",
    }


def _not_ready(reader: Reader, edge: Edge, root: str, span: Interval, why: str, head: int) -> InputNotReady:
    return InputNotReady(
        f"{reader}: it reads {edge.pipeline} {span}: {why}\nTo see what {edge.pipeline} waits for: "
        f"{command_line('status', root=root, pipeline=edge.pipeline)}",
        awaited=Awaited(reader=reader, edge=edge, root=root, head=head),
    )


def _head_for(log: Log, commits: Mapping[Interval, int]) -> int:
    """Return the log's newest id; if a `cairn erase` has yet to exchange output of `commits`, the id before it."""
    head = log.head_id
    for kept in log.kept:
        forget = log.whole(kept.id).content.forget if kept.kind == "forget" else None
        for one in forget.rewritten if forget is not None else ():
            there = log.outputs(one.id) if one.id == commits.get(one.interval) else ()
            if any(file.handle.path in one.replaces for file in there):
                head = min(head, kept.id - 1)
    return head


def _gone(reader: Reader, edge: Edge, root: str, log: Log, interval: Interval, checkpoint_id: int) -> StateGapError:
    before = [kept.interval.end for kept in valid_states(log) if kept.interval.end <= interval.start]
    start = from_ms(log.newest.content.pipeline_start_ms) if log.newest is not None else interval.start
    again = Rerun(first=max(before, default=start), last=interval.start)
    command = backfill_command(edge.pipeline, again)
    if log.newest is not None and log.newest.content.run.run_id.startswith("direct__"):
        command = command_line("run", code=log.code, root=root, from_=again.first, to=again.last, reprocess="all")
    return StateGapError(
        f"{reader}: it reads the state of {edge.pipeline} at {format_instant(interval.end)}, but retention has dropped checkpoint {checkpoint_id}\n"
        f"Give {edge.pipeline} a retention that keeps this state until {reader.pipeline} has run. To make the state again, with the new retention:\n"
        f"{command}"
    )


def _check_no_cycle(chains: Chains, reader: Reader, edge: Edge, root: str) -> None:
    """Raise `UsageError` if the upstream reads this pipeline's same interval, directly or through others."""
    if edge.back:
        return
    own = reader.root.rstrip("/"), reader.pipeline
    for path in _paths(chains, root, edge.pipeline, ()):
        if path[-1] == own:
            names = " reads ".join(name for _, name in (own, *path))
            raise UsageError(
                f"{reader}: pipelines read each other's same interval: {names}\nLet one of them read an earlier interval, with back=1. The other one must have run before"
            )


def _paths(
    chains: Chains, root: str, pipeline: str, before: tuple[tuple[str, str], ...]
) -> Iterator[tuple[tuple[str, str], ...]]:
    """Yield every path from a pipeline to one that it reads, directly or through others, over edges whose `back` is 0.

    `before`: The pipelines of the path so far.
    """
    path = (*before, (root, pipeline))
    yield path
    if (root, pipeline) in before:
        return
    for read in chains.inputs(root, pipeline):
        if not read.edge.back:
            yield from _paths(chains, root_of_edge(read.edge.root, root), read.edge.pipeline, path)
