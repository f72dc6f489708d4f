"""Trace a result that is out of date back to its cause, over several pipelines. Only reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from state_backend.chains.judge_inputs import Cause, Chains
from state_backend.checkpoint.choose_base import why_stale
from state_backend.checkpoint.log import Log, interval_of, kind_of
from state_backend.formats import paths
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.records import Record, Tombstone


@frozen
class Step:
    """Neighbouring results of a pipeline, on the way from a cause to a result.

    Attributes:
        span: From the first of the results to the last; None if the pipeline can't be read.
        checkpoint: The commit that is the cause; None if the results follow from an earlier step.
    """

    root: str
    pipeline: str
    span: Interval | None
    why: str
    checkpoint: int | None = None


def path_to(result: Cause, cause_of: Callable[[Cause], Cause | None]) -> list[Cause]:
    """Return a result and its causes, in the order of cause. A circle of causes ends where it begins again."""
    path = [result]
    while (before := cause_of(path[0])) is not None and before not in path:
        path.insert(0, before)
    return path


def trace_cause(chains: Chains, root: str, pipeline: str, interval: Interval) -> list[Step]:
    """Return how a result came to be out of date, in the order of cause; its own pipeline is in the last step.

    Nothing if the result is up to date, as far as the logs tell.
    """

    def cause_of(at: Cause) -> Cause | None:
        verdict = chains.judged(*at[:2]).get(at.interval) if at.interval is not None else None
        return None if verdict is None else verdict.cause

    path, steps = path_to(Cause(root.rstrip("/"), pipeline, interval), cause_of), list[Step]()
    first = path[0]
    if first.interval is None or first.interval not in chains.judged(*first[:2]):
        steps += _begin(chains, path.pop(0), alone=not path)
    while path:
        at = path[0][:2]
        same = [one.interval for one in path if one[:2] == at and one.interval is not None]
        path, judged, kinds, last = [one for one in path if one[:2] != at], chains.judged(*at), Counter[str](), same[0]
        for one in sorted(i for i in judged if i.start >= same[0].start and i.end <= interval.end):
            if one.start <= last.end or one <= same[-1]:
                kinds[judged[one].kind], last = kinds[judged[one].kind] + 1, one
        why = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
        steps.append(Step(root=at[0], pipeline=at[1], span=Interval(same[0].start, last.end), why=why))
    return steps


def _begin(chains: Chains, at: Cause, *, alone: bool) -> list[Step]:
    """Return the steps that no input has caused: a commit, a mark of the pipeline's own log, or a missing result.

    `alone`: No other result follows from it, so a commit is no fault.
    """

    def step(why: str, checkpoint: int | None = None, span: Interval | None = at.interval) -> Step:
        return Step(root=at.root, pipeline=at.pipeline, span=span, why=why, checkpoint=checkpoint)

    if at.interval is None:
        return [step("can't be read")]
    node = chains.node(at.root, at.pipeline)
    checkpoint, spoilt = node.outputs.get(at.interval), node.spoilt.get(at.interval)
    if checkpoint is None:
        return [step("is not committed")]
    if spoilt is None:
        return [] if alone else [step(_corrected(node.log, checkpoint), checkpoint)]
    mark = node.log.retained.get(checkpoint)
    by = node.log.entry(mark.stale_by) if mark is not None and mark.stale_by is not None else None
    if not isinstance(by, Record | Tombstone):
        return [step(spoilt, checkpoint)]
    if kind_of(by) != "interval":
        return [step(why_stale(node.log, by.id), by.id)]
    return [step(_corrected(node.log, by.id), by.id, interval_of(by)), step("1 stale")]


def _corrected(log: Log, checkpoint_id: int) -> str:
    # The file of a dropped checkpoint was written again when it was dropped.
    retained = checkpoint_id in log.retained
    info = log.entries.storage.stat(paths.record(checkpoint_id)) if retained else None
    return "corrected" if info is None else f"corrected at {format_instant(from_ms(info.modified_ms // 1000 * 1000))}"
