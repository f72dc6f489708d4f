"""``cairn try``, ``cairn compare``, ``cairn deploy``: a change of a pipeline's code, beside production, what it changes, and taking it
over. Trying and deploying run Spark where ``--spark`` says; comparing needs none."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer

from cairn.command.backfill import day_or_instant
from cairn.command.run import interval_length
from cairn.command.state_commands import Code, Json, Name, Root, Spark, load_code
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.checkpoint.trials import (
    find_trial,
    intervals_of_trial,
    list_trials,
    remove_trial,
    root_of_trial,
)
from state_backend.inspection.checkpoint_names import parse_duration
from state_backend.inspection.compare_runs import Comparison, compare_runs, describe_comparison
from state_backend.inspection.compare_tables import TableDifference
from state_backend.values.errors import UsageError
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.records import Trial

if TYPE_CHECKING:
    from cairn.operations.plan_range import Progress
    from cairn.operations.run_intervals import Outcome
    from cairn.trials.try_code import TrialPlan

FINDINGS = 1
_KEEP = "3d"
_LISTED = 10

OfTrial = Annotated[str | None, typer.Argument(help="Name of the trial; left out: the only one.")]
Keys = Annotated[
    list[str] | None,
    typer.Option("--key", help="A column that tells output rows apart; may be repeated. Left out: whole rows."),
]


def try_(
    root: Root,
    code: Annotated[
        str | None, typer.Option(envvar="CAIRN_CODE", help="module:NAME of the Pipeline with the new code.")
    ] = None,
    from_: Annotated[str | None, typer.Option("--from", help="Start of the first interval, 2024-01-04.")] = None,
    to: Annotated[str | None, typer.Option("--to", help="Start of the last interval, included.")] = None,
    every: Annotated[
        str | None, typer.Option(help="How long an interval is, as in 1h; left out: like production's newest one.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the trial; left out: from its start and its code.")] = None,
    savepoint: Annotated[
        str | None, typer.Option(help="Begin from this native savepoint instead of production's state.")
    ] = None,
    keep: Annotated[str, typer.Option(help="How long it stays until a sweep removes it: 12h, 3d.")] = _KEEP,
    pipeline: Annotated[
        str | None, typer.Option(envvar="CAIRN_PIPELINE", help="Name of the pipeline, for --list and --remove.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Only say which trials there are.")] = False,
    remove: Annotated[str | None, typer.Option(help="Remove the trial of this name.")] = None,
    spark: Spark = "local[2]",
    as_json: Json = False,
) -> int:
    """Runs intervals with other code beside production, from production's state before them. Production stays as it is.

    No sink is called. The same command goes on where it stopped."""
    if list_ or remove is not None:
        if pipeline is None:
            raise UsageError("--list and --remove need --pipeline NAME: whose trials")
        return _list(root, pipeline, as_json) if remove is None else _remove(root, pipeline, remove, as_json)
    if code is None or from_ is None or to is None:
        raise UsageError(
            "a trial needs --code module:NAME, and --from and --to: the starts of its first and last interval"
        )
    from cairn.operations.plan_range import intervals_between
    from cairn.operations.run_interval import coordinator_of
    from cairn.spark.session import connect
    from cairn.trials.try_code import try_code

    keeps, declared = parse_duration(keep), load_code(code)
    first, last = day_or_instant("--from", from_), day_or_instant("--to", to)
    newest = max(
        (c.content.interval for c in coordinator_of(declared, root).log().completed()),
        key=lambda i: i.end,
        default=None,
    )
    length = interval_length(declared.name, newest, every)
    intervals = intervals_between(first, last + length, length)
    session = connect(spark, f"cairn try {declared.name}")
    if not spark.startswith("sc://"):
        session.sparkContext.setLogLevel("OFF")
    tried = try_code(
        session,
        declared,
        intervals,
        root,
        code=code,
        name=name,
        savepoint=savepoint,
        keep=keeps,
        on_plan=None if as_json else _say_plan,
        on_outcome=None if as_json else _say_outcome,
    )
    trial = tried.trial
    compared = _command("compare", root, declared.name, trial.name)
    if as_json:
        said = _described(trial) | {
            "root": tried.root,
            "computed": sum(o.computed for o in tried.outcomes),
            "fork_seconds": round(tried.fork_s, 3),
            "other_input": [str(i) for i in tried.other_input],
        }
        return _print_json(said)
    typer.echo(f"kept until {format_instant(from_ms(trial.ends_ms))}, when the next sweep removes it")
    typer.echo(f"what it changes:\n{compared}")
    return 0


def _say_plan(plan: TrialPlan) -> None:
    trial = plan.trial
    begins = "empty state" if trial.base is None else f"the state of checkpoint {trial.base.id}"
    typer.echo(
        f"trial {trial.name} of {trial.pipeline}: code {trial.code_version or trial.code_hash[:8]}, from {begins}"
    )
    for interval in plan.other_input[:_LISTED]:
        typer.echo(f"{interval}: the source says another position than production's checkpoint has")
    if len(plan.other_input) > _LISTED:
        typer.echo(f"and so for {len(plan.other_input) - _LISTED} more intervals")


def _say_outcome(outcome: Outcome, progress: Progress) -> None:
    if outcome.record is None:
        typer.echo(f"{outcome.interval}: {outcome.why}")
        return
    totals = outcome.record.content.totals
    typer.echo(
        f"{outcome.interval}: {totals.input_rows:,} rows in, {totals.output_rows:,} out, {totals.entries:,} entries ({progress})"
    )


def _list(root: str, pipeline: str, as_json: bool) -> int:
    there = list_trials(root, pipeline)
    if as_json:
        return _print_json([_described(trial) for trial in there])
    for trial in there:
        typer.echo(
            f"{trial.name}: {trial.span}, code {trial.code_version or trial.code_hash[:8]} ({trial.code}), "
            f"kept until {format_instant(from_ms(trial.ends_ms))}"
        )
    if not there:
        typer.echo(f"pipeline {pipeline!r} has no trial")
    return 0


def _remove(root: str, pipeline: str, name: str, as_json: bool) -> int:
    removed = remove_trial(root, find_trial(root, pipeline, name))
    if as_json:
        return _print_json({"name": removed.name, "files": removed.files, "bytes": removed.bytes})
    typer.echo(f"removed trial {removed.name}: {removed.files} files")
    return 0


# --- compare ------------------------------------------------------------------------------------------------------------------------


def compare(
    root: Root,
    pipeline: Name,
    trial: OfTrial = None,
    key: Keys = None,
    limit: Annotated[int, typer.Option(min=0, help="Examples of each kind of difference.")] = 3,
    interval: Annotated[
        str | None, typer.Option(help="Only the interval that starts then, 2024-01-04, and the state at its end.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="Also write all rows that differ there, a Parquet file for each interval.")
    ] = None,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if they differ.")] = False,
    as_json: Json = False,
) -> int:
    """What a trial changes: output rows, late rows and states beside production's, interval by interval.

    What has equal digests is not read. Needs no Spark."""
    start = None if interval is None else day_or_instant("--interval", interval)
    found_trial, found = compare_trial(root, pipeline, trial, key or (), limit, to, start)
    said = describe_comparison(found)
    if as_json:
        _print_json({"trial": _described(found_trial)} | said)
    else:
        typer.echo("\n".join(comparison_lines(found_trial, said)))
    return FINDINGS if exit_code and not found.same else 0


def compare_trial(
    root: str,
    pipeline: str,
    name: str | None,
    key: Sequence[str],
    limit: int,
    to: Path | None = None,
    start: datetime | None = None,
) -> tuple[Trial, Comparison]:
    """A trial and what it changes; None for the only one. ``to``: a local folder for all rows that differ. ``start``: of the one interval
    that is compared; None: all of them.

    Raises: as `find_trial` and `compare_runs`; UsageError if no interval of the trial starts then.
    """
    trial = find_trial(root, pipeline, name)
    intervals = [i for i in intervals_of_trial(trial) if start in (None, i.start)]
    if start is not None and not intervals:
        raise UsageError(
            f"trial {trial.name!r} of {pipeline!r} has no interval that starts at {format_instant(start)}\n"
            f"Its intervals are those of {trial.span}, each {timedelta(milliseconds=trial.length_ms)} long"
        )
    if to is not None:
        to.mkdir(parents=True, exist_ok=True)

    def write(interval: Interval, rows: TableDifference) -> None:
        if to is not None:
            table: pa.Table = rows.rows()
            pq.write_table(table, to / f"{interval.start:%Y%m%dT%H%M%S}.parquet")

    sides = []
    for above in (root, root_of_trial(root, pipeline, trial.name)):
        url = join_url(above, pipeline)
        coordinator = Coordinator(open_storage(url), pipeline)
        sides.append((url, coordinator.log(), coordinator.storage))
    with work_folder("compare") as work:
        found = compare_runs(sides[0], sides[1], intervals, work, key=key, limit=limit, on_rows=write)
    return trial, found


def comparison_lines(trial: Trial, said: dict[str, Any]) -> list[str]:
    """A comparison for people: what differs, and nothing of what does not. A pure function."""
    intervals = said["intervals"]
    lines = [f"trial {trial.name} of {trial.pipeline}: {len(intervals)} intervals, {trial.span}"]
    missing = [i for i in intervals if i["old"] is None or i["new"] is None]
    for one in missing[:_LISTED]:
        who = "production" if one["old"] is None else "the trial"
        lines.append(f"{one['start']}: {who} has no result, so that there is nothing to compare")
    if len(missing) > _LISTED:
        lines.append(f"and {len(missing) - _LISTED} more without a result")
    other = [i["start"] for i in intervals if i["position"] == "other"]
    if other:
        lines.append(
            f"input: the source said another position in {len(other)} intervals, the first one from {other[0]}"
        )
    for what, rows in (("output", said["outputs"]), ("late rows", said["late"])):
        lines += _rows_lines(what, rows)
    for state in said["states"]:
        counts = ", ".join(f"{state[k]:,} {k}" for k in ("added", "removed", "changed") if state[k])
        lines.append(f"state {state['state']} at {said['states_at']}: {counts}")
        lines += [f"  {_column(field)}" for field in state["fields"]]
        for example in state["examples"]:
            lines.append(f"  {_entry(example)}")
    differing = [i["start"] for i in intervals if i["state"] == "other"]
    if differing:
        lines.append(f"the state differs in {len(differing)} intervals, the first one from {differing[0]}")
    lines += _cost(intervals)
    if said["same"]:
        lines.append("no difference: every digest is equal")
    return lines


def _rows_lines(what: str, found: list[dict[str, Any]]) -> list[str]:
    if not found:
        return []
    totals = {kind: sum(one[kind] for one in found) for kind in ("changed", "only_old", "only_new")}
    words = {"changed": "changed", "only_old": "only in production", "only_new": "only in the trial"}
    counts = ", ".join(f"{n:,} {words[kind]}" for kind, n in totals.items() if n)
    lines = [f"{what} in {len(found)} intervals, the first one from {found[0]['start']}: {counts or 'other columns'}"]
    for which, text in (
        ("added", "columns only in the trial"),
        ("removed", "columns only in production"),
        ("retyped", "columns of another type"),
    ):
        names = dict.fromkeys(name for one in found for name in one[f"columns_{which}"])
        if names:
            lines.append(f"  {text}: {', '.join(names)}")
    columns: dict[str, dict[str, Any]] = {}
    for one in found:
        for column in one["columns"]:
            columns[column["name"]] = _added(columns.get(column["name"]), column)
    lines += [f"  {_column(column)}" for column in columns.values()]
    repeated = sum(one["repeated_keys"] for one in found)
    if repeated:
        lines.append(f"  {repeated:,} keys are of several rows, which are compared as a whole")
    for one in [one for one in found if one["examples"]][:1]:
        for example in one["examples"]:
            if example["change"] == "changed":
                changes = ", ".join(
                    f"{n} {json.dumps(b)} -> {json.dumps(a)}" for n, (b, a) in example["columns"].items()
                )
                lines.append(f"  ~ {json.dumps(example['key'])}: {changes}")
            else:
                lines.append(f"  {'-' if example['change'] == 'only_old' else '+'} {json.dumps(example['row'])}")
    return lines


def _added(before: dict[str, Any] | None, more: dict[str, Any]) -> dict[str, Any]:
    """The changes of a column in one interval more. The mean is of all rows together, as far as they are numbers."""
    if before is None or before["mean"] is None or more["mean"] is None:
        return more if before is None else {**before, "changed": before["changed"] + more["changed"]}
    changed = before["changed"] + more["changed"]
    mean = (before["mean"] * before["changed"] + more["mean"] * more["changed"]) / changed
    return {**more, "changed": changed, "mean": mean, "largest": max(before["largest"], more["largest"])}


def _column(column: dict[str, Any]) -> str:
    by = "" if column["mean"] is None else f", by {column['mean']:,.6g} on average and {column['largest']:,.6g} at most"
    return f"{column['name']}: {column['changed']:,} changed{by}"


def _entry(change: dict[str, Any]) -> str:
    sign = {"added": "+", "removed": "-", "changed": "~"}[change["change"]]
    place = [json.dumps(change[n]) for n in ("key", "user_key", "pos") if n in change]
    values = [json.dumps(change[n]) for n in ("before", "after") if n in change]
    return f"{sign} {' '.join(place)}: {' -> '.join(values)}"


def _cost(intervals: list[dict[str, Any]]) -> list[str]:
    """Counts, seconds and bytes of those intervals of which both records are whole."""
    both = [
        (i["old"], i["new"])
        for i in intervals
        if i["old"] and i["new"] and "seconds" in i["old"] and "seconds" in i["new"]
    ]
    if not both:
        return []
    lines = []
    for what, name in (
        ("rows in", "input_rows"),
        ("rows out", "output_rows"),
        ("late rows", "late_rows"),
        ("bytes uploaded", "uploaded_bytes"),
    ):
        before, after = (sum(side[name] for side in sides) for sides in zip(*both, strict=True))
        if before != after or name == "uploaded_bytes":
            lines.append(f"{what}: {before:,} -> {after:,}")
    seconds = [sum(side["seconds"] for side in sides) for sides in zip(*both, strict=True)]
    last = both[-1]
    lines.append(f"entries at the end: {last[0]['entries']:,} -> {last[1]['entries']:,}")
    return [*lines, f"seconds: {seconds[0]:,.1f} -> {seconds[1]:,.1f}"]


# --- deploy -------------------------------------------------------------------------------------------------------------------------


def deploy(
    root: Root,
    code: Code,
    trial: OfTrial = None,
    past: Annotated[
        bool,
        typer.Option(
            "--past", help="Run the trial's intervals again in production, each only if it comes to the same."
        ),
    ] = False,
    key: Keys = None,
    yes: Annotated[bool, typer.Option("--yes", help="Agree to what it would do.")] = False,
    spark: Spark = "local[2]",
    as_json: Json = False,
) -> int:
    """Takes over what was tried: from the next interval on, or with --past for the trial's intervals too.

    Without --yes it says what would be done, with what the trial changes, and does nothing."""
    from cairn.operations.run_interval import coordinator_of
    from cairn.spark.session import connect
    from cairn.trials.deploy_trial import deploy_past, plan_deployment, restore_command

    declared = load_code(code)
    session = connect(spark, f"cairn deploy {declared.name}")
    if not spark.startswith("sc://"):
        session.sparkContext.setLogLevel("OFF")
    plan = plan_deployment(session, declared, root, name=trial, past=past)
    changes = compare_trial(root, declared.name, plan.trial.name, key or (), 3)
    said = describe_comparison(changes[1])
    what = [
        f"would run again in production: {len(plan.again)} intervals of the trial, {plan.trial.span}"
        if past
        else "production's state is one that this code can take: nothing is run again",
        *([f"and {len(plan.behind)} behind them, of which the trial says nothing"] if plan.behind else []),
    ]
    if not yes:
        if as_json:
            return _print_json(
                {"deployed": False, "again": len(plan.again), "behind": len(plan.behind), "comparison": said}
            )
        typer.echo("\n".join([*comparison_lines(plan.trial, said), *what]))
        typer.echo("Nothing was done: agree to that with --yes")
        return 0
    outcomes = []
    if past:
        outcomes = deploy_past(session, declared, root, plan, on_outcome=None if as_json else _say_outcome)
    restore = restore_command(coordinator_of(declared, root).log(), plan, root)
    if as_json:
        return _print_json(
            {
                "deployed": True,
                "again": len(plan.again),
                "behind": len(plan.behind),
                "checkpoint": outcomes[-1].checkpoint if outcomes else None,
                "back": restore,
            }
        )
    if past:
        typer.echo(f"{len(plan.again)} intervals came to what the trial came to, digest by digest")
    typer.echo(f"Let the DAG run {code} from the next interval on")
    if restore is not None:
        typer.echo(f"To go back: the old code in the DAG, and its state:\n{restore}")
    elif past:
        typer.echo(
            "To go back: the old code in the DAG, and run the intervals again with it; production began empty there"
        )
    return 0


# --- what they share ----------------------------------------------------------------------------------------------------------------


def _described(trial: Trial) -> dict[str, Any]:
    return {
        "name": trial.name,
        "pipeline": trial.pipeline,
        "code": trial.code,
        "code_hash": trial.code_hash,
        "code_version": trial.code_version,
        "start": format_instant(trial.span.start),
        "end": format_instant(trial.span.end),
        "interval_seconds": timedelta(milliseconds=trial.length_ms).total_seconds(),
        "base": None if trial.base is None else trial.base.id,
        "savepoint": None if trial.base is None else trial.base.savepoint,
        "kept_until": format_instant(from_ms(trial.ends_ms)),
    }


def _command(what: str, root: str, pipeline: str, trial: str) -> str:
    return f"cairn {what} {trial} --root {shlex.quote(root)} --pipeline {pipeline}"


def _print_json(value: Any) -> int:
    typer.echo(json.dumps(value, indent=2))
    return 0
