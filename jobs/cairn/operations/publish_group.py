"""Call the sinks of a group of pipelines, once the results of all its members fit together.

If the process stops between two sinks, the next `publish_group` calls the rest: marks in each folder tell what is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import datetime

from cairn.pipeline import Pipeline
from cairn.sinks.postgres import PostgresSink
from cairn.sinks.table_sink import TableSink
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.publish_output import (
    Hook,
    is_own,
    mark_published,
    newer_output,
    record_to_publish,
    unpublished_in,
)
from state_backend.formats import paths
from state_backend.inspection.publication_group import Output, group_of
from state_backend.values.airflow_commands import command_line
from state_backend.values.errors import SinkFailed, UsageError
from state_backend.values.intervals import Interval, format_instant


def publish_group(root: str, name: str, load: Callable[[str], Pipeline]) -> tuple[list[Output], int, str]:
    """Call the members' sinks for output that fits together, in one transaction if one PostgreSQL has all tables.

    Return (outputs that the sinks got, number of outputs that wait, why they wait). `load`: Loads a `module:NAME`.
    """
    group = group_of(root, name)
    places = {member: locate(root, member) for member in group.members}
    waiting = [(m, *one) for m, log in group.members.items() for one in unpublished_in(places[m].storage, log)]
    ready, published = group.ready(waiting), list[Output]()
    why = group.outdated or f"all fits together up to {format_instant(group.until)}; then {group.behind} has no result"
    pipelines = {member: load(group.members[member].code) for member in {output[0] for output in ready}}
    if wrong := [member for member, pipeline in pipelines.items() if pipeline.name != member]:
        raise UsageError(f"{group.members[wrong[0]].code} is named {pipelines[wrong[0]].name!r}, not {wrong[0]!r}")

    def order(output: Output) -> tuple[datetime, int, bool]:
        # As in `call_sink`, a sink function gets replaced intervals first, and a table sink gets them last.
        member, interval, n = output
        replaced = not is_own(group.members[member], interval, n)
        at = interval.start if replaced and callable(pipelines[member].sink) else interval.end
        return at, [*group.members].index(member), replaced

    def again(hook: Hook, member: str, interval: Interval, n: int) -> None:
        # Another process may have called the sink with newer output, which this call has overwritten: repeat it.
        storage = places[member].storage
        while (newer := newer_output(storage, interval, n)) is not None:
            given = storage.stat(paths.published(interval, newer.id)) is not None
            if not given and not group_of(root, name).ready([(member, interval, newer.id)]):
                return
            hook(newer)
            mark_published(storage, interval, n := newer.id)

    outputs = sorted(ready, key=order)  # By end: an interval reads no upstream output that ends after its own end.
    hooks = {member: pipeline.sink_hook(None, places[member].url) for member, pipeline in pipelines.items()}
    joint = _one_database(pipelines.values())
    for calls in [[output] for output in outputs] if joint is None else [outputs]:
        records = [record_to_publish(places[member].storage, interval, n) for member, interval, n in calls]
        if None in records:
            why = "a member has committed another result meanwhile"
            break
        member, interval, n = calls[0]
        try:
            with nullcontext() if joint is None else joint.one_transaction():
                for (member, interval, n), record in zip(calls, records, strict=True):
                    if (hook := hooks[member]) is not None and record is not None:
                        hook(record)
                        if callable(pipelines[member].sink):
                            again(hook, member, interval, n)
        except Exception as error:
            raise SinkFailed(
                f"group {name!r}: the sink of {member!r} failed for {interval} (checkpoint {n}): {type(error).__name__}: {error}\n"
                f"The rest of the group waits. To go on:\n{command_line('publish', group=name, root=root)}",
                frozenset({n}),
            ) from error
        for member, interval, n in calls:
            mark_published(places[member].storage, interval, n)
        published += calls
    return published, len(waiting) - len(published), why


def _one_database(pipelines: Iterable[Pipeline]) -> PostgresSink | None:
    """Return a sink whose transaction covers all tables; None if they are not all in one PostgreSQL database."""
    sinks = [pipeline.sink for pipeline in pipelines if pipeline.sink is not None]
    tables = [table for sink in sinks if isinstance(sink, TableSink) for table, _ in sink.each_table()]
    ours = [table for table in tables if isinstance(table, PostgresSink)]
    whole = len(ours) == len(tables) and all(isinstance(sink, TableSink) for sink in sinks)
    return ours[0] if whole and len({table.conninfo() for table in ours}) == 1 else None
