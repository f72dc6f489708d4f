"""The command `cairn status`: the next interval, problems, and the command that repairs them; or all pipelines."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import UTC
from typing import Annotated

import typer

from cairn.command.exit_codes import FINDINGS
from cairn.command.list_pipelines import list_pipelines
from cairn.command.options import Dag, Json, Root, open_log
from cairn.command.printing import print_json, print_text, span_of, style_of
from cairn.command.repair_command import code_of, command_to_repair
from state_backend.chains.judge_inputs import OLD_RECORD, Chains
from state_backend.chains.trace_cause import trace_cause
from state_backend.checkpoint.choose_base import lines_of, why_stale
from state_backend.inspection.describe import in_words
from state_backend.inspection.pipeline_status import Status, describe_status, status_of
from state_backend.values.airflow_commands import command_line
from state_backend.values.day_or_instant import first_instant
from state_backend.values.environment import Variable
from state_backend.values.errors import Rerun, UsageError
from state_backend.values.intervals import format_instant


def status(
    root: Root,
    pipeline: Annotated[
        str | None,
        typer.Option(envvar=Variable.PIPELINE, help="Name of the pipeline; left out: list all pipelines of the root."),
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="List all pipelines of the root, also if CAIRN_PIPELINE names one.")
    ] = False,
    why: Annotated[
        str | None,
        typer.Option(
            help="Show how the result of one interval came to be out of date: an instant in it, or a day in the zone of the schedule."
        ),
    ] = None,
    dag: Dag = None,
    as_json: Json = False,
) -> int:
    """A stale interval ran before an earlier interval got another result, or before an earlier state was restored. With
    a pipeline, exit code 1 says that something needs a repair.
    """
    if all_ or pipeline is None:
        return list_pipelines(root, as_json=as_json)
    advice = _first_interval(dag or pipeline, root)
    at, log = open_log(root, pipeline, if_new=f"\nIf the pipeline never ran: {advice}")
    chains = Chains()
    found = status_of(log, pipeline, at.storage, chains.judged(root, pipeline, log))
    waits = (v.cause for _, v in found.outdated if v.kind == "pending" and v.cause is not None)
    chain = found.heal_to is not None and any(cause[:2] != (root.rstrip("/"), pipeline) for cause in waits)
    again = Rerun(first=found.heal_to, last=found.heal_to) if chain and found.heal_to is not None else found.rerun
    command = None
    if again is not None:
        command = command_to_repair(log, again, root=root, pipeline=pipeline, dag=dag, chain=chain)
    if why is not None:
        return _tell_why(chains, root, pipeline, why, command, as_json=as_json)
    if as_json:
        print_json(describe_status(found, command))
        return 0 if found.well else FINDINGS
    if found.next is None:
        print_text(f"the pipeline has no checkpoint yet\n{advice}")
    elif found.problem is None:
        print_text(f"next: {found.next}, from checkpoint {found.base}")
    else:
        print_text(f"next: {found.next}, which can't start\n{found.problem}", style_of("blocked"))
    for title, lines in (
        ("stale", [f"checkpoint {n}: {why_stale(log, by)}" for n, by in found.stale]),
        ("quarantined", [f"checkpoint {n}: {reason}" for n, reason in found.quarantined]),
        ("out of date", [*_outdated(found)]),
        ("reads without tracking", [in_words(read) for read in found.not_tracked]),
        ("unpublished", [f"{interval} (checkpoint {n})" for interval, n in found.unpublished]),
        (f"waiting for group {found.group!r}", [f"{interval} (checkpoint {n})" for interval, n in found.held]),
    ):
        if lines:
            print_text(f"{title}:{lines_of(lines)}", style_of(title))
    if command is not None:
        aim = "to repair this" if found.problem is not None else "to run again what the restore discarded"
        print_text(f"{aim}, run:\n{command}")
    elif found.unpublished:
        first = format_instant(found.unpublished[0][0].start)
        where = f"--root {shlex.quote(root)} --pipeline {pipeline}"
        print_text(
            "the `checkpoint` task of the next interval calls the sink again\nTo call it now, or to skip an interval's output:\n"
            f"cairn publish {first} {where} --code {code_of(log)}\n"
            f"cairn publish {first} {where} --skip"
        )
    if found.held:
        print_text(f"to publish what fits together, run:\n{command_line('publish', group=found.group, root=root)}")
    return 0 if found.well else FINDINGS


def _tell_why(chains: Chains, root: str, pipeline: str, when: str, command: str | None, *, as_json: bool) -> int:
    """Print why the result of the interval at `when` is out of date, and the command that repairs it (None: none)."""
    node, schedule = chains.node(root, pipeline), chains.log(root, pipeline).schedule
    at = first_instant("--why", when, UTC if schedule is None else schedule.rules)
    interval = next((i for i in sorted(node.outputs) if i.start <= at < i.end), None)
    if interval is None:
        raise UsageError(f"{pipeline} has no result for {format_instant(at)}; name an interval that has run")
    steps = trace_cause(chains, root, pipeline, interval)
    if as_json:
        path = [step._asdict() | {"span": step.span and str(step.span)} for step in steps]
        print_json({"interval": str(interval), "path": path, "command": command if steps else None})
    elif not steps:
        unknown = chains.judged(root, pipeline).get(interval)
        why = "" if unknown is None else f"; unknown: {unknown.why}"
        print_text(f"{pipeline} {interval}: nothing is out of date, as far as the logs tell{why}")
    else:
        print_text(f"{pipeline} {interval} is out of date. From the cause on:")
        for name, span, text, n in steps:
            by = "" if n is None else f" (checkpoint {n})"
            print_text(f"  {name}{'' if span is None else f' {span_of(span)}'}: {text}{by}")
        print_text(f"to repair this, run:\n{command}" if command is not None else "no run repairs this")
    return FINDINGS if steps else 0


def _outdated(found: Status) -> Iterator[str]:
    """Yield a line for each result that is out of date. All results with records too old to tell share one line."""
    old = [interval for interval, verdict in found.outdated if verdict.why == OLD_RECORD]
    yield from (f"{i}: {verdict.kind}: {verdict.why}" for i, verdict in found.outdated if verdict.why != OLD_RECORD)
    if old:
        yield f"{len(old)} from {old[0]} on: unknown: {OLD_RECORD}; intervals that run from now on are tracked"


def _first_interval(dag: str, root: str) -> str:
    """Return the commands that run a pipeline's first interval. The user fills in START, which only its code knows."""
    return (
        "its first interval begins at Pipeline.start. An unpaused DAG runs the newest interval first, unless catchup is on. With an end_date "
        "in the past, it runs none. To process all intervals in order instead, give the first and the last start:\n"
        f"cairn backfill --dag {shlex.quote(dag)} --from START --to END\n"
        "To process the first interval without Airflow:\n"
        f"cairn run --code module:NAME --root {shlex.quote(root)}\n"
        "If the Pipeline declares no schedule, add the length of an interval, as in --every 1h"
    )
