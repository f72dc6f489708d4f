"""Find the pipelines that a pipeline reads, and those that read it, in an order in which they can run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from typing import TypeVar

from state_backend.chains.judge_inputs import Chains, followed_in, root_of_edge
from state_backend.checkpoint.log import Log
from state_backend.checkpoint.trials import read_trial
from state_backend.inspection.find_pipelines import pipelines_below
from state_backend.values.errors import CairnError, RetryableError
from state_backend.values.marks import Trial

At = tuple[str, str]
T = TypeVar("T")


def chain_of(root: str, pipeline: str | None, chains: Chains | None = None) -> list[At]:
    """Return (root, name) of each pipeline of `chain_order`, in an order in which they can run: upstreams first."""
    return [*TopologicalSorter(chain_order(root, pipeline, chains)).static_order()]


def readers_of(root: str, pipeline: str) -> list[str]:
    """Return the names of the pipelines that read a pipeline, at every depth, each after those that it reads."""
    order = chain_order(root, pipeline, upstreams=False)
    return [name for _, name in TopologicalSorter(order).static_order() if name != pipeline]


def trials_of_chain(root: str, trial: Trial) -> tuple[list[Trial], list[str]]:
    """Return the trial and its readers' trials of this name, upstream first; and the names of readers without one."""
    found = {name: read_trial(root, name, trial.name) for name in readers_of(root, trial.pipeline)}
    there = [one for one in found.values() if one is not None]
    return [trial, *there], [name for name, one in found.items() if one is None]


def chain_order(
    root: str, pipeline: str | None, chains: Chains | None = None, *, upstreams: bool = True
) -> dict[At, list[At]]:
    """Return each pipeline of a chain, as (root, name), with the pipelines that must run before it.

    If `pipeline` is None, these are all pipelines below the root, and those of other roots that they read.

    A pipeline of another root is found only if one below `root` reads it, since the function does not look into other
    roots for readers. `upstreams`: If False, return only `pipeline` and its readers.
    """
    chains, root = chains or Chains(), root.rstrip("/")
    own = set[At]() if pipeline is None else {(root, pipeline)}
    reads = {at: _reads(chains, at) for at in {*own, *((root, name) for name in pipelines_below(root))}}
    found, before = own or {*reads}, set[At]()
    while found != before:
        before = set(found)
        for at in before:
            reads.setdefault(at, _reads(chains, at))
        found |= {at for at, ups in reads.items() if found & ups.keys()}
        found |= {up for at in before for up in reads[at] if upstreams}
    return without_cycles({at: {up: n for up, n in reads[at].items() if up in found} for at in sorted(found)})


def without_cycles(reads: Mapping[At, Mapping[At, int]]) -> dict[At, list[At]]:
    """Return for each pipeline the upstreams that must run before it. If they form a cycle, ignore reads with `back`.

    `reads`: The upstreams of each pipeline, with the number of intervals that it looks back.
    """
    every = {*reads, *(up for ups in reads.values() for up in ups)}
    for most in (sys.maxsize, 0):
        order = {
            at: [up for up, back in reads.get(at, {}).items() if back <= most and up != at] for at in sorted(every)
        }
        with suppress(CycleError):
            TopologicalSorter(order).prepare()
            return order
    return {at: [] for at in sorted(every)}  # Pipelines without `back` that read each other are refused when they run.


def _reads(chains: Chains, at: At) -> dict[At, int]:
    """Return the pipelines that a pipeline reads, each with the least number of intervals that it looks back."""
    found: dict[At, int] = {}
    for read in chains.inputs(*at):
        up = (root_of_edge(read.edge.root, at[0]), read.edge.pipeline)
        found[up] = min(found.get(up, read.edge.back), read.edge.back)
    for one in _if_readable(chains, at, followed_in) or ():  # also those that only older results have read
        up = (root_of_edge(one.root, at[0]), one.pipeline)
        if _if_readable(chains, up, lambda log: log.head_id) != 0:
            found.setdefault(up, 0)
    return found


def _if_readable(chains: Chains, at: At, read: Callable[[Log], T]) -> T | None:
    """Return `read(log)` for the log of the pipeline `at`; None if the log can't be read."""
    try:
        return read(chains.log(*at))
    except RetryableError:
        raise
    except CairnError:
        return None
