"""The upstreams that a pipeline declares (edges), and what an interval has read of them, as records keep it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

from state_backend.values.errors import UsageError
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval
from state_backend.values.schedule import Schedule, interval_before

Reads = Literal["output", "late", "state"]
Maps = Literal["within", "all"]


@frozen
class Edge:
    """A declared upstream of a pipeline.

    Attributes:
        pipeline: Name of the upstream.
        root: Root of the upstream; None for the root of the reading pipeline.
        reads: The upstream's output rows, its late rows, or its state.
        mapping: `within`: read the upstream's intervals inside of the running interval. `all`: also all earlier ones.
        back: The mapping applies to the interval that lies `back` intervals before the interval that runs.
        tracked: True if a change of the upstream makes results of the reading pipeline stale.
    """

    pipeline: str
    root: str | None = None
    reads: Reads = "output"
    mapping: Maps = "within"
    back: int = 0
    tracked: bool = True

    def anchor(self, interval: Interval, schedule: Schedule | None) -> Interval:
        """Return the interval `back` steps before `interval`, on the reading pipeline's schedule."""
        for _ in range(self.back):
            before = interval_before(schedule, interval.start) if schedule is not None else None
            interval = before or Interval(interval.start - (interval.end - interval.start), interval.start)
        return interval


@frozen
class TriedUpstream:
    """The trial of an upstream. From the start of `span` on, its readers' trials read it instead of production."""

    root: str  # the trial's own root
    span: Interval


@frozen
class InputPart:
    """Neighbouring intervals of an upstream that were read.

    Attributes:
        last_id: The highest id of the commits that were read.
        rows: The number of rows in all these intervals; for a state, the number of its entries.
        digest: The digest of the intervals and of what they hold; None if the upstream's records have no digests.
    """

    span: Interval
    intervals: int
    last_id: int
    rows: int
    digest: int | None


@frozen
class InputRead:
    """What an attempt read of an upstream.

    Attributes:
        edge: The edge as it was declared.
        span: The upstream's time that the edge's mapping selects. If the edge reads a state: the state at its end.
        log: The uuid that tells the upstream's log from other logs (`Chains.id_for`).
        head: The highest id in the upstream's log when the attempt read it.
        attempt: The uuid of the attempt that made the record `head`. Empty in older records.
        parts: What was read, in the order of time, in at most 64 parts: single intervals, or groups of neighbours.
        plain: True if the processor got the upstream's output rows unchanged.
    """

    edge: Edge
    span: Interval
    log: str
    head: int
    parts: tuple[InputPart, ...]
    attempt: str = ""
    plain: bool = False


@frozen
class Followed:
    """An upstream that a pipeline has read for some of its current results.

    Attributes:
        root: Root of the upstream; None for the root of the reading pipeline.
        log: The uuid of the upstream's log at the time of that reading, as in `InputRead`.
        erased: The attempts of `cairn erase` in the upstream whose keys were erased from this pipeline too.
    """

    pipeline: str
    root: str | None
    log: str
    erased: tuple[str, ...] = ()


@frozen
class LogMark:
    """Where a pipeline's log ended when the interval read it.

    Attributes:
        root: The pipeline's root; None if it is the reader's root.
        head: The highest id; 0 for an empty log.
        attempt: The uuid of the attempt that made the record `head`.
        end_ms: The latest end of all committed intervals, in milliseconds since the epoch; None for an empty log.
        quarantined: The checkpoints with a mark of quarantine.
    """

    pipeline: str
    root: str | None
    head: int
    attempt: str
    end_ms: int | None
    quarantined: tuple[int, ...] = ()


@frozen
class FreshAt:
    """Where the logs of a pipeline (`own`) and its upstreams ended at a check that found no result out of date."""

    own: LogMark
    upstreams: tuple[LogMark, ...]


@frozen
class Untracked:
    """A pipeline that a source read without declaring it as an upstream, so its changes make no result stale."""

    pipeline: str
    root: str


def followed_after(before: Iterable[Followed], reads: Iterable[InputRead]) -> tuple[Followed, ...]:
    """Return the upstreams in `before`, which older results have read, and the tracked ones in `reads`, each once."""
    new = [Followed(pipeline=r.edge.pipeline, root=r.edge.root, log=r.log) for r in reads if r.log and r.edge.tracked]
    found: dict[tuple[str, str | None, str], Followed] = {}
    for one in [*before, *new]:
        known = found.get((one.pipeline, one.root, one.log), one)
        erased = tuple(dict.fromkeys([*known.erased, *one.erased]))
        found[one.pipeline, one.root, one.log] = replace(known, erased=erased)
    return tuple(found.values())


def gaps_in(span: Interval, covered: Iterable[Interval]) -> Iterator[Interval]:
    """Yield the parts of a span that none of the intervals covers, in the order of time."""
    at = span.start
    for interval in sorted(covered):
        if interval.start > at:
            yield Interval(at, interval.start)
        at = max(at, interval.end)
    if at < span.end:
        yield Interval(at, span.end)


def check_edge(edge: Edge, owner: str) -> None:
    """Raise `UsageError` if `back`, `reads` or `mapping` has no valid value. `owner` begins the message."""
    if edge.back < 0 or not isinstance(edge.back, int):
        raise UsageError(f"{owner}: back is {edge.back!r}; give the number of intervals before the interval, 0 or more")
    for name, value, known in (
        ("reads", edge.reads, ("output", "late", "state")),
        ("mapping", edge.mapping, ("within", "all")),
    ):
        if value not in known:
            raise UsageError(f"{owner}: {name}={value!r} is not one of {', '.join(known)}")
