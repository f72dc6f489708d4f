"""A group of pipelines: up to which time the results of all members fit together. Only reads.

A result is out of date if its own log says so, or the log of a pipeline that it read (`Chains`). No interval reads
beyond its own end. So all results that end before the first outdated, missing or incomplete result fit together.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime

from state_backend.chains.judge_inputs import Chains, reached
from state_backend.checkpoint.log import Log, newest_interval
from state_backend.inspection.chain_of import chain_of
from state_backend.values.day_or_instant import parse_instant
from state_backend.values.errors import StorageUnavailable, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval, format_instant
from state_backend.values.similar_names import did_you_mean

# Member, interval, and the id of the commit that made or replaced the interval's output.
Output = tuple[str, Interval, int]


@frozen
class Group:
    """The members of a group, upstream first, and up to which time their results fit together."""

    members: Mapping[str, Log]
    until: datetime
    outdated: str | None  # the first result that is out of date, and why; None without one
    behind: str  # the member whose results end first
    level: bool  # True: no member has a result after `until`

    def ready(self, waiting: Collection[Output]) -> list[Output]:
        """Return the outputs that the sinks may get now: none while a result is out of date that others may have read.

        Short intervals that replaced a longer one wait until its rows can leave the sink together with them.
        """
        until = _uncrossed(self.until, (interval for _, interval, _ in waiting))
        return [o for o in waiting if self.outdated is None and (o[1].end <= until or self.level)]


def group_in(log: Log) -> str | None:
    """Return the group that a pipeline's newest interval names; None if none, or if no interval ran after a fork."""
    newest = newest_interval(log)
    return None if newest is None else newest.content.group


def group_of(root: str, name: str, chains: Chains | None = None) -> Group:
    """Find the members of a group in the logs below a root. Raise `UsageError` if there is no member."""
    chains, root = chains or Chains(), root.rstrip("/")
    order = [at for at in chain_of(root, None, chains) if at[0] == root]
    names = {at[1]: group_in(chains.log(*at)) for at in order}
    nodes = {member: chains.node(root, member) for member, group in names.items() if group == name}
    if not nodes:
        known = did_you_mean(name, {*filter(None, names.values())})
        raise UsageError(f"no pipeline below {root} is in a group {name!r}{known}")
    wrong = {(interval, member): why for member, node in nodes.items() for interval, why in node.spoilt.items()}
    for member in nodes:
        wrong |= {(i, member): v.why for i, v in chains.judged(root, member).items() if v.kind != "unknown"}
    first = min(wrong, default=None)
    ends = {member: reached(node) for member, node in nodes.items()}
    behind = min(ends, key=lambda member: ends[member])
    every = [interval for node in nodes.values() for interval in node.outputs]
    until = _uncrossed(ends[behind] if first is None else min(ends[behind], first[0].start), every)
    return Group(
        members={member: node.log for member, node in nodes.items()},
        until=until,
        outdated=None if first is None else f"{first[1]} {first[0]} is out of date: {wrong[first]}",
        behind=behind,
        level=all(interval.end <= until for interval in every),
    )


def _uncrossed(until: datetime, intervals: Iterable[Interval]) -> datetime:
    """Return the latest instant up to `until` that lies within none of the intervals."""
    every = [*intervals]
    while crossing := [i.start for i in every if i.start < until < i.end]:
        until = min(crossing)
    return until


def group_marker(root: str, group: str) -> str:
    """Return a text for the argument `group` of `output_files`, or for this option of `format("keyed_output")`.

    Reads with this marker get results that fit together, or fail if a result was committed again since.

    Args:
        root: URL of the folder that holds the pipelines.
        group: Name of the group, as in `Pipeline(group="board")`.

    Raises:
        UsageError: No pipeline below the root is in the group.
    """
    found = group_of(root, group)
    heads = {member: log.head_id for member, log in found.members.items()}
    return json.dumps({"until": format_instant(found.until), "heads": heads})


def end_within_group(group: str, root: str, pipeline: str, log: Log, end: datetime | None) -> datetime:
    """Return the end of the results that a reader gets, at most `end`. `group`: A name, or a marker.

    Raise `StorageUnavailable` if the log does not have the results that the marker stands for.
    """
    marker = json.loads(group if group.startswith("{") else group_marker(root, group))
    heads, until = marker["heads"], parse_instant("until", marker["until"])
    if pipeline not in heads:
        raise UsageError(f"pipeline {pipeline!r} is not in the group; its members are {', '.join(heads)}")
    # A commit of `cairn erase` counts in any case, since it may rewrite the output of any interval.
    newer = any(f.id > heads[pipeline] and (f.interval.start < until or f.kind == "forget") for f in log.facts(None))
    if newer or log.head_id < heads[pipeline]:
        raise StorageUnavailable(
            f"pipeline {pipeline!r} has committed again since its log or the marker of its group was read\n"
            "Make a new marker, and read all members again"
        )
    return until if end is None else min(end, until)
