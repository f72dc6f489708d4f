"""The command `cairn plan`: show which intervals of a chain would run, now or after an assumed change. Run none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from cairn.command.exit_codes import FINDINGS
from cairn.command.options import Json, open_log
from cairn.command.printing import print_json, print_text
from cairn.command.repair_command import ran_here
from cairn.operations.intervals.plan_chain import Stage, plan_chain
from cairn.operations.intervals.plan_heal import health_of
from state_backend.chains.judge_inputs import Chains
from state_backend.checkpoint.find_checkpoint import id_of
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import outputs_of
from state_backend.checkpoint.rewind import plan_rewind
from state_backend.checkpoint.trials import check_no_trial
from state_backend.inspection.chain_of import At, chain_of
from state_backend.inspection.describe import start_and_end
from state_backend.values.airflow_commands import backfill_command, command_line, heal_command
from state_backend.values.day_or_instant import first_instant, last_instant
from state_backend.values.errors import CairnError, Rerun, RetryableError, StateUnusable, UsageError
from state_backend.values.human_units import span as duration
from state_backend.values.operation_parameters import Plan
from state_backend.values.records import Record, Tombstone
from state_backend.values.schedule import Every

Row = dict[str, Any]


def plan(request: Plan, as_json: Json = False) -> int:
    """The intervals are those that cairn heal --chain would run. Rows and seconds are those of the present results.
    Exit code 1 says that a pipeline can't be read, or that an interval is left out: no run repairs what it waits for.
    """
    check_no_trial(request.root, "plan")
    if request.last is not None:
        last_instant("--to", request.last)
    if request.pipeline is not None:
        open_log(request.root, request.pipeline)
    chains, stages, unread = Chains(), list[Stage](), list[Row]()
    order = chain_of(request.root, request.pipeline, chains)
    reruns = _by_pipeline(request.root, order, "--rerun", request.rerun)
    restores = _by_pipeline(request.root, order, "--restore", request.restore)
    codes = _by_pipeline(request.root, order, "--code", request.code)
    for at in order:
        try:
            stages.append(_stage_of(chains, at, request.last, reruns.get(at), restores.get(at), at in codes))
        except CairnError as error:
            if at in restores or at in reruns or isinstance(error, RetryableError):
                raise
            unread.append({"root": at[0], "pipeline": at[1], "why": str(error).splitlines()[0]})
    before = {stage.at: stage for stage in stages}
    found = [one for one in plan_chain(stages, datetime.now(tz=UTC)) if one.planned or one.left_out or one.untold]
    rows = [_row(before[one.at], one) for one in found]
    total = _total([interval for row in rows for interval in row["intervals"]])
    commands = [*_commands(request, chains, found, order, restores, codes)]
    shown = {"pipelines": rows, "unread": unread, "total": total, "commands": commands}
    if as_json:
        print_json(shown)
    else:
        print_text("\n".join([*_lines(shown), *(["", "to carry it out, run:", *commands] if commands else [])]))
        if request.last is None and commands:
            print_text("this also runs missing intervals up to its date; to see them here, add --to")
    return FINDINGS if unread or any(one.left_out for one in found) else 0


def _by_pipeline(root: str, order: Sequence[At], option: str, texts: Iterable[str]) -> dict[At, str]:
    """Parse the values of an option `PIPELINE=VALUE`. Return each value by pipeline. `order`: The allowed pipelines."""
    found = dict[At, str]()
    for name, _, value in (text.partition("=") for text in texts):
        named = sorted((at for at in order if at[1] == name), key=lambda at: at[0] != root.rstrip("/"))
        if not named or not value:
            raise UsageError(f"{option} {name}: give PIPELINE=VALUE for one of {', '.join(name for _, name in order)}")
        if named[0] in found:
            raise UsageError(f"{option} names {name} twice; give it once for each pipeline")
        found[named[0]] = value
    return found


def _stage_of(chains: Chains, at: At, to: str | None, rerun: str | None, restore: str | None, code: bool) -> Stage:
    log, node, judged = chains.log(*at), chains.node(*at), chains.judged(*at)
    if not log.kept:
        raise StateUnusable(f"pipeline {at[1]!r} has no checkpoint yet; run an interval first")
    newest = max((kept.interval for kept in log.kept), key=lambda i: i.end)
    schedule, again = log.schedule or Every(newest.end_ms - newest.start_ms), frozenset[Any]()
    if rerun is not None:
        first, only, last = rerun.partition("..")
        begin = first_instant("--rerun", first, schedule.rules)
        end = last_instant("--rerun", last or first, schedule.rules)
        again = frozenset(i for i in node.outputs if begin <= i.start and (i.start <= end or (code and not only)))
        if not again:
            raise UsageError(f"--rerun {at[1]}={rerun}: no interval with a result begins then")
    target = None if restore is None else plan_rewind(log, id_of(locate(*at), restore)).target
    return Stage(
        at=at,
        node=node,
        health=health_of(log, judged),
        judged=judged,
        schedule=schedule,
        last=None if to is None else last_instant("--to", to, schedule.rules),
        reads=chains.inputs(*at),
        rerun=again,
        restored=None if target is None else target.content.interval,
    )


def _commands(
    request: Plan,
    chains: Chains,
    found: Sequence[Stage],
    order: Sequence[At],
    restores: Mapping[At, str],
    codes: Mapping[At, str],
) -> Iterator[str]:
    """Yield the commands that carry out a plan: for each chain the assumed changes in order, then `cairn heal`."""
    left, below = [one for one in found if one.planned], [at for at in order if at[0] == request.root.rstrip("/")]
    while left:
        # `cairn heal` finds a chain's readers only below its own root. So it names a pipeline of the plan's root.
        named = next((one.at for one in left if one.at in below), None)
        named = named or next((at for at in below if left[0].at in chain_of(*at, chains)), left[0].at)
        chain = {*chain_of(*named, chains)}
        here, left = [one for one in left if one.at in chain], [one for one in left if one.at not in chain]
        coded = [one.at for one in here if one.at in codes and not one.rerun and ran_here(chains.log(*one.at))]
        to = request.last or max(i.start for stage in here for i in stage.planned)
        heal = [heal_command(*(at := [*coded, named][0]), to, code=codes[at] if coded else None, chain=True)]
        if len(coded) > 1 or any(at not in below for at in coded):  # A command can take the code of one pipeline.
            heal = [heal_command(*one.at, to, code=codes[one.at] if one.at in coded else None) for one in here]
        changes = [one for one in here if one.rerun or one.restored]
        own = {p.reason for one in here for p in one.planned.values() if p.cause is None}
        if not changes or own - {
            "run again",
            "missing",
        }:  # Repair first, if a change may need it. Missing intervals can wait.
            yield from heal
        for one in changes:
            (root, name), log, runs = one.at, chains.log(*one.at), [*one.planned]
            if one.restored:
                yield command_line("restore", restores[one.at], root=root, pipeline=name, yes=True)
            if again := [n for n, i in enumerate(runs) if i in one.rerun]:
                first = again[0]
                while first and one.planned[runs[first - 1]].reason == "base dropped":
                    first -= 1  # The base of the interval is dropped, so earlier ones run first.
                begin, end = runs[first].start, runs[again[-1]].start
                code = codes.get(one.at, log.code) if ran_here(log) else None
                local = command_line("run", code=code, root=root, from_=begin, to=end, reprocess="all")
                yield local if code else backfill_command(name, Rerun(first=begin, last=end))
            yield from heal


def _row(before: Stage, one: Stage) -> Row:
    """Return the plan of one pipeline as JSON values. `before`: Its state now. `one`: Its state with the plan."""
    intervals, late = list[Row](), False
    for interval, (reason, sure, cause) in one.planned.items():
        made, verdict = one.node.outputs.get(interval), before.judged.get(interval)
        entry = None if made is None else one.node.log.entries[made]
        content = entry.content if isinstance(entry, Record) else None
        late |= isinstance(entry, Record | Tombstone) and any(file.late and file.rows for file in outputs_of(entry))
        by = None if cause is None or cause.interval is None else start_and_end(cause.interval)
        intervals.append(
            start_and_end(interval)
            | {"reason": reason, "sure": sure, "why": verdict.why if reason == "input changed" and verdict else None}
            | {"cause": by and cause and {"root": cause.root, "pipeline": cause.pipeline, **by}}
            | {"rows": content and content.totals.input_rows}
            | {"seconds": content and sum(content.durations_us.values()) / 1e6}
        )
    left_out = [start_and_end(i) | {"why": why} for i, why in one.left_out.items()]
    named = {"root": one.at[0], "pipeline": one.at[1], "intervals": intervals, "left_out": left_out, "late": late}
    return named | {"untold": [*map(start_and_end, one.untold)]}


def _total(rows: Sequence[Row]) -> Row:
    found = {"intervals": len(rows), "sure": sum(row["sure"] for row in rows)}
    found["rows"], found["unknown"] = sum(row["rows"] or 0 for row in rows), sum(row["rows"] is None for row in rows)
    return found | {"seconds": round(sum(row["seconds"] or 0.0 for row in rows), 3)}


def _lines(shown: Row) -> Iterator[str]:
    for row in shown["pipelines"]:
        yield f"{row['pipeline']}: {_cost(_total(row['intervals']))}"
        for _, some in groupby(
            row["intervals"], lambda p: (p["reason"], p["sure"], p["cause"] and p["cause"]["pipeline"])
        ):
            yield _reason([*some])
        if left := row["left_out"]:
            yield f"  left out: {_span(left)}: {left[0]['why']}"
            yield f"  to see what it waits for: {command_line('status', root=row['root'], pipeline=row['pipeline'])}"
        if row["untold"]:
            yield f"  not tracked: {_span(row['untold'])}: no digest of what was read; the next run of each records it"
    yield from (f"{one['pipeline']} is left out: {one['why']}" for one in shown["unread"])
    for title, of in (("output that may change, in sinks too", "intervals"), ("late rows that may change", "late")):
        if names := [row["pipeline"] for row in shown["pipelines"] if row[of]]:
            yield f"{title}: {', '.join(names)}"
    yield f"in all: {_cost(shown['total'])}" if shown["total"]["intervals"] else "no interval has to run"


def _reason(some: Sequence[Row]) -> str:
    """Return the printed line for `some` consecutive intervals that run for the same reason."""
    reason, why, cause = (some[0][name] for name in ("reason", "why", "cause"))
    if cause is not None:
        at = f"{cause['pipeline']} {_span([one for one, _ in groupby(p['cause'] for p in some)])}"
        why = f"{reason}, by {at}" if some[0]["sure"] or reason == "base dropped" else f"if {at} differs"
    return f"  {_span(some)}: {why or reason}"


def _cost(total: Row) -> str:
    known = f"{total['rows']:,} rows, {duration(total['seconds'])}"
    unknown = f"at least {known} (the cost of {total['unknown']:,} is unknown)" if total["unknown"] else known
    return f"{total['intervals']:,} intervals, {total['sure']:,} of them for sure, {unknown}"


def _span(rows: Sequence[Row]) -> str:
    first, last = (text.removesuffix("T00:00:00Z") for text in (rows[0]["start"], rows[-1]["end"]))
    return f"{first} to {last}" if len(rows) == 1 else f"{first} to {last}, {len(rows):,} intervals"
