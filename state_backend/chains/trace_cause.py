"""Trace a result that is out of date back to its cause, over several pipelines. Only reads."""

from __future__ import annotations

from typing import NamedTuple

from state_backend.chains.judge_inputs import Cause, Chains, Node
from state_backend.checkpoint.choose_base import why_stale
from state_backend.checkpoint.log import interval_of, kind_of
from state_backend.formats import paths
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.records import Record, Tombstone


class Step(NamedTuple):
    """One result on the way from the first cause to the asked result."""

    pipeline: str
    span: Interval | None  # the result's interval; None for a pipeline that can't be read
    why: str
    checkpoint: int | None = None  # the checkpoint whose corrected result is the first cause; else None


def trace_cause(chains: Chains, root: str, pipeline: str, interval: Interval) -> list[Step]:
    """Return the steps by which a result became out of date, the first cause first; empty if no log shows any."""
    path = [Cause(root.rstrip("/"), pipeline, interval)]
    if (verdict := chains.judged(*path[0][:2]).get(interval)) is not None and verdict.kind == "unknown":
        return []
    while (before := _cause_of(chains, path[0])) is not None and before not in path:
        path.insert(0, before)
    steps = [_step(chains, at) for at in path]
    return [] if len(steps) == 1 and steps[0].why.startswith("corrected") else steps


def _cause_of(chains: Chains, at: Cause) -> Cause | None:
    if at.interval is None:
        return None
    if (verdict := chains.judged(*at[:2]).get(at.interval)) is not None:
        return verdict.cause
    by = _spoilt_by(chains.node(*at[:2]), at.interval)
    return Cause(*at[:2], interval_of(by)) if by is not None and kind_of(by) == "interval" else None


def _spoilt_by(node: Node, interval: Interval) -> Record | Tombstone | None:
    """Return the commit of the same pipeline that made a result stale; None if the result is not stale or dropped."""
    mark = node.log.retained.get(node.outputs.get(interval, 0))
    by = node.log.entry(mark.stale_by) if mark is not None and mark.stale_by is not None else None
    return by if isinstance(by, Record | Tombstone) else None


def _step(chains: Chains, at: Cause) -> Step:
    if at.interval is None:
        return Step(at.pipeline, None, "can't be read")
    node, verdict = chains.node(*at[:2]), chains.judged(*at[:2]).get(at.interval)
    made, spoilt, by = node.outputs.get(at.interval), node.spoilt.get(at.interval), _spoilt_by(node, at.interval)
    if verdict is not None or made is None:
        return Step(at.pipeline, at.interval, "not committed" if verdict is None else verdict.kind)
    if spoilt is not None:
        return Step(at.pipeline, at.interval, spoilt if by is None else f"stale: {why_stale(node.log, by.id)}")
    # The time of a record's file is that of the commit, until a clean-up writes the tombstone of a dropped checkpoint.
    info = node.log.entries.storage.stat(paths.record(made)) if made in node.log.retained else None
    when = "" if info is None else f" at {format_instant(from_ms(info.modified_ms // 1000 * 1000))}"
    return Step(at.pipeline, at.interval, f"corrected{when}", made)
