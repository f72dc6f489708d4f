"""Show and check the state of a pipeline, run intervals, and take, restore and fork state.

Most commands need neither Spark nor Airflow. Only run, try, deploy and savepoints need Spark. Only backfill and
stopping a DAG need Airflow.

Exit codes: 0 success, 1 the command found a problem or can't use the state, the input or the pipeline's code, 2 the
call is wrong, 3 the storage failed or refused.
"""

from __future__ import annotations

import functools
import json
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cairn.command import new_pipeline, state_commands, trial_commands
from cairn.command.backfill import backfill
from cairn.command.estimate import estimate_
from cairn.command.forget import forget
from cairn.command.heal import heal
from cairn.command.run import run
from cairn.command.spark_server import spark
from cairn.operations.export_state import export_state
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.checkpoint.dropped_checkpoint import telling_drops
from state_backend.checkpoint.lineage import lines_of
from state_backend.checkpoint.log import Log
from state_backend.checkpoint.parallel import at_once
from state_backend.checkpoint.sweep import MIN_AGE, sweep
from state_backend.checkpoint.trials import sweep_trials
from state_backend.formats import paths
from state_backend.inspection.checkpoint_names import find_state, parse_checkpoint, parse_duration
from state_backend.inspection.describe import describe_checkpoint, describe_difference, describe_log
from state_backend.inspection.state_diff import describe_change, diff_states, manifests_of
from state_backend.inspection.state_table import StateSource
from state_backend.inspection.status import Status, status_of
from state_backend.inspection.verify import Verification, verify_pipeline
from state_backend.ports.storage import Storage
from state_backend.shard.manifest import manifest_of
from state_backend.values.airflow_commands import backfill_command, with_command
from state_backend.values.errors import (
    CairnError,
    CorruptFile,
    NoSuchCheckpoint,
    NotFound,
    PermissionRefused,
    RetryableError,
    StorageError,
    UsageError,
)
from state_backend.values.intervals import format_instant
from state_backend.values.records import Record, ShardManifest

FINDINGS, USAGE, STORAGE = 1, 2, 3

app = typer.Typer(
    name="cairn", help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False
)
Root = Annotated[
    str, typer.Option(envvar="CAIRN_ROOT", help="URL of the folder that holds all pipelines, as in file:///data/state.")
]
Pipeline = Annotated[str, typer.Option(envvar="CAIRN_PIPELINE", help="Name of the pipeline.")]
AnyRoot = Annotated[
    str | None,
    typer.Option(
        "--root", envvar="CAIRN_ROOT", help="URL of the folder that holds all pipelines; not needed for a savepoint."
    ),
]
AnyPipeline = Annotated[
    str | None,
    typer.Option("--pipeline", envvar="CAIRN_PIPELINE", help="Name of the pipeline; not needed for a savepoint."),
]
States = Annotated[
    list[str] | None, typer.Option("--state", help="Only this state; $timers for the timers; may be repeated.")
]
_PUT_BACK = "Put the manifest back from a backup, or go back to an older checkpoint with cairn restore"
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")]
P = ParamSpec("P")


def main() -> None:
    """Run the `cairn` command line."""
    app()


def _exit_codes(command: Callable[P, int]) -> Callable[P, None]:
    """Wrap a command: make its return value the exit code, and print a `CairnError` on stderr with its own exit code.

    Other exceptions pass through.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
        except CairnError as error:
            dag_id = kwargs.get("dag") or kwargs.get("pipeline")
            message = with_command(str(error), str(dag_id), error.rerun if dag_id else None)
            for note in getattr(error, "__notes__", []):  # Notes come first: they may be long, such as a traceback.
                typer.echo(note, err=True)
            typer.echo(f"{type(error).__name__}: {message}", err=True)
            code = _code_of(error)
        raise typer.Exit(code)

    return run


def _code_of(error: CairnError) -> int:
    if isinstance(error, PermissionRefused):
        return STORAGE
    if isinstance(error, NoSuchCheckpoint):
        return USAGE
    if isinstance(error, UsageError):
        return USAGE
    return STORAGE if isinstance(error, RetryableError | StorageError) else FINDINGS


@app.command()
@_exit_codes
def status(
    root: Root,
    pipeline: Pipeline,
    dag: state_commands.Dag = None,
    as_json: Json = False,
) -> int:
    """Show the next interval, all stale, quarantined and unpublished intervals, and the command that repairs them."""
    storage, log = _open(root, pipeline)
    found = status_of(log, pipeline, storage)
    command = None if found.rerun is None else backfill_command(dag or pipeline, found.rerun)
    if as_json:
        _print_json(_status(found, command))
        return 0 if found.well else FINDINGS
    if found.next is None:
        _print("the pipeline has no checkpoint yet\nTo process its first interval, unpause its DAG, or call cairn run")
    elif found.problem is None:
        _print(f"next: {found.next}, from checkpoint {found.base}")
    else:
        _print(f"next: {found.next}, which can't start\n{found.problem}")
    for title, lines in (
        ("stale", [f"checkpoint {n}: checkpoint {by} changed an earlier interval" for n, by in found.stale]),
        ("quarantined", [f"checkpoint {n}: {reason}" for n, reason in found.quarantined]),
        ("unpublished", [f"{interval} (checkpoint {n})" for interval, n in found.unpublished]),
    ):
        if lines:
            _print(f"{title}:{lines_of(lines)}")
    if command is not None:
        _print(f"to repair this, run:\n{command}")
    elif found.unpublished:
        first, where = (
            format_instant(found.unpublished[0][0].start),
            f"--root {shlex.quote(root)} --pipeline {pipeline}",
        )
        _print(
            "the `checkpoint` task of the next interval calls the sink again\nTo call it now, or to skip an interval's output:\n"
            f"cairn publish {where} --code module:NAME --retry {first}\n"
            f"cairn publish {where} --skip {first}"
        )
    return 0 if found.well else FINDINGS


def _status(found: Status, command: str | None) -> dict[str, Any]:
    return {
        "well": found.well,
        "next": None if found.next is None else [format_instant(found.next.start), format_instant(found.next.end)],
        "base": found.base,
        "problem": found.problem,
        "stale": [{"id": n, "by": by} for n, by in found.stale],
        "quarantined": [{"id": n, "reason": reason} for n, reason in found.quarantined],
        "unpublished": [{"id": n, "interval": str(interval)} for interval, n in found.unpublished],
        "command": command,
    }


@app.command("list")
@_exit_codes
def list_(
    root: Root,
    pipeline: Pipeline,
    all_: Annotated[bool, typer.Option("--all", help="List dropped checkpoints and sweeps too.")] = False,
    newest: Annotated[int | None, typer.Option(min=1, help="How many to list, newest first; left out: all.")] = None,
    as_json: Json = False,
) -> int:
    """List the checkpoints, newest first."""
    storage, log = _open(root, pipeline)
    wanted = range(1, log.head_id + 1) if all_ else sorted({*log.retained, *log.quarantined})
    ids = wanted[-newest:] if newest is not None else wanted
    log.entries.load(ids)
    infos = at_once(lambda n: storage.stat(paths.record(n)), ids)
    written = {n: info.modified_ms for n, info in zip(ids, infos, strict=True) if info is not None}
    shown = describe_log(log, ids, written, now_ms=_now_ms())
    if as_json:
        return _print_json(shown)
    table = _table("id", "interval", "kind", "base", "state", "keys", "bytes", "files", "code", "age")
    for row in shown:
        table.add_row(*_cells(row))
    _print(table)
    if any(row["code_changed"] for row in shown):
        _print("* code differs from that of the checkpoint before")
    older = len(wanted) - len(ids)
    if older:
        _print(f"not listed: {older} older; a larger --newest lists them")
    hidden = log.head_id - len(wanted)
    if hidden:
        _print(f"not listed: {hidden} dropped checkpoints and sweeps; --all lists them")
    return 0


@app.command()
@_exit_codes
def show(
    root: Root,
    pipeline: Pipeline,
    checkpoint: Annotated[
        str, typer.Argument(help="latest, an id, or an interval's end with its time zone.")
    ] = "latest",
    files: Annotated[bool, typer.Option("--files", help="List every state file too.")] = False,
    as_json: Json = False,
) -> int:
    """Show everything that Cairn has recorded about one checkpoint."""
    storage, log = _open(root, pipeline)
    record = Coordinator(storage, pipeline).record(parse_checkpoint(checkpoint))
    shown = describe_checkpoint(log, record, _manifests(record, storage))
    if as_json:
        return _print_json(shown)
    for name, value in shown.items():
        if name not in ("shards", "outputs", "totals", "durations_us", "states"):
            _print(f"{name:<16} {_text(value)}")
    for name in ("totals", "durations_us"):
        _print(f"\n{name}")
        for key, value in shown[name].items():
            _print(f"  {key:<16} {_text(value):>16}")
    _print("\nstates")
    for state in shown["states"]:
        _print(f"  {state['name']} ({state['kind']}), schema version {state['versions'][-1]['version']}")
    table = _table("shard", "key groups", "entries", "bytes", "files", "digest")
    for s in shown["shards"]:
        first, last = s["key_groups"]
        cells = (s["shard"], f"{first} to {last}", s["entries"], s["bytes"], len(s["files"]), s["digest"])
        table.add_row(*map(_text, cells))
    _print(table)
    for output in shown["outputs"]:
        _print(f"{'late output' if output['late'] else 'output'} {output['path']}: {output['rows']} rows")
    for file in (f for s in shown["shards"] for f in s["files"]) if files else ():
        _print(f"{file['crc32c']} {file['bytes']:>12} {file['path']}")
    return 0


@app.command()
@_exit_codes
def diff(
    first: Annotated[
        str, typer.Argument(help="First state: latest, an id, an interval's end, or a savepoint's folder.")
    ],
    second: Annotated[str, typer.Argument(help="Second state, named in the same way.")] = "latest",
    root: AnyRoot = None,
    pipeline: AnyPipeline = None,
    states: States = None,
    limit: Annotated[int, typer.Option(help="How many differing entries to list.")] = 20,
    metadata: Annotated[
        bool, typer.Option("--metadata", help="Compare records and manifests only; read no state.")
    ] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with code 1 if the state differs.")] = False,
    as_json: Json = False,
) -> int:
    """Show what changed from one checkpoint to another: totals, states, key groups, files, and keys.

    Only key groups that differ are read.
    """
    sources = [find_state(which, root=root, pipeline=pipeline) for which in (first, second)]
    found = _metadata_diff(sources)
    same = found["same_state"]
    if not metadata:
        found["entries"], found["changes"] = _entry_diff(sources, states, limit)
        same = not any(any(counts.values()) for counts in found["entries"].values())
    if as_json:
        _print_json(found)
    else:
        _print_diff(found)
    return FINDINGS if exit_code and not same else 0


def _metadata_diff(sources: Sequence[StateSource]) -> dict[str, Any]:
    sides: list[Any] = []
    for source in sources:
        manifests = None
        if not source.canonical:
            try:
                manifests = manifests_of(source, open_storage(source.url))
            except NotFound as error:
                raise CorruptFile(f"{source}: a manifest is missing: {error}\n{_PUT_BACK}") from error
        sides += [Record(id=source.checkpoint_id, retained=(), reproduces=None, content=source.content), manifests]
    return describe_difference(*sides)


def _entry_diff(
    sources: Sequence[StateSource], states: Sequence[str] | None, limit: int
) -> tuple[dict[str, dict[str, int]], list[dict[str, Any]]]:
    """Compare two states entry by entry.

    Returns:
        For each state, how many entries were added, removed and changed; and the first `limit` changes.
    """
    counts: dict[str, dict[str, int]] = {}
    listed: list[dict[str, Any]] = []
    with ExitStack() as stack:
        work = stack.enter_context(work_folder("diff"))
        for source in sources:
            stack.enter_context(source.held("a comparison"))
        for change in diff_states(sources[0], sources[1], work, states=states or None):
            of_state = counts.setdefault(change.state, dict.fromkeys(("added", "removed", "changed"), 0))
            of_state[change.change] += 1
            if len(listed) < limit:
                listed.append(describe_change(change))
    return counts, listed


def _print_diff(found: dict[str, Any]) -> None:
    state, code = ("the same" if found[name] else "another" for name in ("same_state", "same_code"))
    names = "" if found["same_code"] else f" ({found['code'][0]}, then {found['code'][1]})"
    inputs = {True: "from the same input", False: "from other input", None: "the source recorded no input position"}
    _print(
        f"checkpoint {found['first']} to {found['second']}: {state} state, by {code} code{names}, {inputs[found['same_input']]}"
    )
    table = _table("", str(found["first"]), str(found["second"]), "change")
    for name, (before, after) in found["totals"].items():
        table.add_row(name, _text(before), _text(after), f"{after - before:+,}" if after != before else "")
    _print(table)
    for what, names in found["states"].items():
        if names:
            _print(f"states {what}: {', '.join(names)}")
    for what, sizes in found["files"].items():
        _print(f"files {what.replace('_', ' ')}: {sizes['files']} with {sizes['bytes']:,} bytes")
    groups, sizes = found["key_groups"], found["max_parallelism"]
    if groups is not None:
        _print(f"key groups that differ: {len(groups)} of {sizes[0]}")
    elif sizes[0] != sizes[1]:
        _print(f"key groups can't be compared: the numbers of key groups are {sizes[0]} and {sizes[1]}")
    for name, counts in found.get("entries", {}).items():
        _print(f"{name}: " + ", ".join(f"{count:,} {what}" for what, count in counts.items() if count))
    for change in found.get("changes", ()):
        place = [change["state"], *(json.dumps(change[n]) for n in ("key", "user_key", "pos") if n in change)]
        values = [json.dumps(change[n]) for n in ("before", "after") if n in change]
        sign = {"added": "+", "removed": "-", "changed": "~"}[change["change"]]
        _print(f"{sign} {' '.join(place)}: {' -> '.join(values)}")
    hidden = sum(sum(c.values()) for c in found.get("entries", {}).values()) - len(found.get("changes", ()))
    if hidden:
        _print(f"not listed: {hidden:,} more; a larger --limit lists them")


@app.command()
@_exit_codes
def export(
    to: Annotated[str, typer.Option(help="Empty folder for the files: a path or URL.")],
    checkpoint: Annotated[
        str, typer.Argument(help="latest, an id, an interval's end, or a savepoint's folder.")
    ] = "latest",
    root: AnyRoot = None,
    pipeline: AnyPipeline = None,
    states: States = None,
    jobs: Annotated[int, typer.Option(help="How many shards to restore at a time, each in its own process.")] = 1,
    as_json: Json = False,
) -> int:
    """Write state as Parquet files, one folder for each state."""
    source = find_state(checkpoint, root=root, pipeline=pipeline)
    files = export_state(source, to, states=states or None, jobs=jobs)
    if as_json:
        return _print_json([{"state": f.state, "path": f.path, "rows": f.rows, "bytes": f.size_bytes} for f in files])
    for state in dict.fromkeys(f.state for f in files):
        of_state = [f for f in files if f.state == state]
        rows, size_bytes = sum(f.rows for f in of_state), sum(f.size_bytes for f in of_state)
        _print(f"{state}: {rows:,} rows in {len(of_state)} files with {size_bytes:,} bytes")
    _print(f"exported {source} to {to}")
    return 0


@app.command()
@_exit_codes
def verify(
    root: Root,
    pipeline: Pipeline,
    checkpoint: Annotated[
        str | None, typer.Argument(help="latest, an id, or an interval's end; left out: all checkpoints.")
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Quick check of metadata; download no state.")] = False,
    as_json: Json = False,
) -> int:
    """Check the log, every file that it names, and the state itself.

    The state is restored shard by shard into a temporary folder.
    """
    storage = open_storage(join_url(root, pipeline))
    _refuse_nothing(storage)
    which = None if checkpoint is None else {Coordinator(storage, pipeline).record(parse_checkpoint(checkpoint)).id}
    with work_folder("verify") as work:
        found = verify_pipeline(storage, which=which, work=None if fast else work)
    if as_json:
        _print_json(_verification(found, fast))
        return 0 if found.success else FINDINGS
    for finding in found.findings:
        _print(f"finding: {finding}")
    for checked in found.checkpoints:
        for finding in checked.findings:
            _print(f"finding: checkpoint {checked.id}: {finding}")
    _print_unknown(found.unknown)
    sound = [c for c in found.checkpoints if not c.findings]
    _print(
        f"{len(sound)} of {len(found.checkpoints)} checkpoints are intact"
        + (
            " by the quick check; leave out --fast to read the state too"
            if fast
            else f", {sum(c.entries for c in sound):,} entries checked"
        )
    )
    if not found.success:
        newest = found.newest_intact
        _print(
            f"the newest intact checkpoint is {newest}" if newest is not None else "no checkpoint is certainly intact"
        )
    return 0 if found.success else FINDINGS


@app.command()
@_exit_codes
def publish(
    root: Root,
    pipeline: Pipeline,
    code: Annotated[
        str,
        typer.Option(
            envvar="CAIRN_CODE", help="module:NAME of the Pipeline whose sink is called; not needed for --skip."
        ),
    ] = "",
    retry: Annotated[
        list[str] | None,
        typer.Option(
            help="Only the interval that starts then, 2024-01-04T00:00Z; may be repeated. Left out: all unpublished ones."
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(help="Mark the interval that starts then as published without the sink; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Call the sink for output that it has not accepted yet, or mark output as published without the sink."""
    storage, _ = _open(root, pipeline)
    coordinator = Coordinator(storage, pipeline)
    skipped: list[int] = []
    published: list[int] = []
    if skip:
        skipped = coordinator.skip_publication([state_commands.start_of("--skip", text) for text in skip])
    if retry or not skip:
        if not code:
            raise UsageError("--code is missing: give module:NAME of the pipeline whose sink is called")
        declared = state_commands.load_code(code)
        only = [state_commands.start_of("--retry", text) for text in retry] if retry else None
        hook = declared.sink_hook(None, join_url(root, pipeline))
        published = coordinator.publish(hook, in_order=declared.sink_in_order, only=only, code=code)
    if as_json:
        return _print_json({"published": published, "skipped": skipped})
    for what, ids in (("published", published), ("skipped", skipped)):
        if ids:
            _print(f"{what}: {', '.join(f'checkpoint {n}' for n in ids)}")
    if not published and not skipped:
        _print("all output is published already")
    return 0


@app.command("sweep")
@_exit_codes
def sweep_(
    root: Root,
    pipeline: Pipeline,
    min_age: Annotated[
        str, typer.Option(help="An attempt that wrote nothing for this time counts as dead: 90m, 12h, 3d.")
    ] = f"{MIN_AGE.days}d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be deleted; delete nothing.")] = False,
    as_json: Json = False,
) -> int:
    """Delete the files of attempts that died, and expired trials."""
    storage, _ = _open(root, pipeline)
    trials = sweep_trials(root, pipeline, dry_run=dry_run)
    result = sweep(storage, pipeline, min_age=parse_duration(min_age), dry_run=dry_run)
    plan = result.plan
    abandoned = plan.abandon if dry_run else result.record.abandoned if result.record is not None else ()
    if as_json:
        return _print_json(
            {
                "dry_run": dry_run,
                "record": result.record.id if result.record is not None else None,
                "abandoned": list(abandoned),
                "planned": [{"path": f.path, "bytes": f.size_bytes} for f in plan.delete],
                "deleted_files": result.deleted_files,
                "deleted_bytes": result.deleted_bytes,
                "shrunk": list(result.shrunk),
                "unknown": list(plan.unknown),
                "rebuilt": list(result.rebuilt),
                "trials": [{"name": t.name, "files": t.files, "bytes": t.bytes} for t in trials],
            }
        )
    for file in plan.delete if dry_run else ():
        _print(f"{file.size_bytes:>12} {file.path}")
    for attempt in abandoned:
        _print(f"{'would abandon' if dry_run else 'abandoned'} attempt {attempt}")
    for path in result.rebuilt:
        _print(f"{'would write' if dry_run else 'wrote'} a lost file again: {path}")
    _print_unknown(plan.unknown)
    for trial in trials:
        _print(f"{'would remove' if dry_run else 'removed'} expired trial {trial.name}: {trial.files} files")
    if dry_run and result.rebuilt:
        _print(
            f"would write {len(result.rebuilt)} lost files again; a dry run can list the files to delete only after a sweep has written them"
        )
    elif dry_run:
        _print(f"would delete {len(plan.delete)} files with {plan.delete_bytes:,} bytes")
    else:
        _print(
            f"deleted {result.deleted_files} files; {result.deleted_bytes:,} bytes were in files that no record names"
        )
    return 0


app.command("estimate")(_exit_codes(estimate_))
app.command()(_exit_codes(backfill))
app.command()(_exit_codes(heal))
app.command()(_exit_codes(spark))
app.command()(_exit_codes(state_commands.savepoint))
app.command()(_exit_codes(state_commands.restore))
app.command()(_exit_codes(state_commands.fork))
app.command()(_exit_codes(forget))
app.command("try")(_exit_codes(trial_commands.try_))
trials = typer.Typer(help="List and remove trials.", no_args_is_help=True)
trials.command("list")(_exit_codes(trial_commands.list_))
trials.command()(_exit_codes(trial_commands.remove))
app.add_typer(trials, name="trials")
app.command()(_exit_codes(trial_commands.compare))
app.command()(_exit_codes(trial_commands.deploy))
app.command()(_exit_codes(new_pipeline.new))
app.command()(_exit_codes(run))


# --- reading ----------------------------------------------------------------------------------------------------------


def _open(root: str, pipeline: str) -> tuple[Storage, Log]:
    storage = open_storage(join_url(root, pipeline))
    log = Coordinator(storage, pipeline).log()
    if not log.head_id:
        _refuse_nothing(storage)
    return storage, log


def _refuse_nothing(storage: Storage) -> None:
    if next(iter(storage.list("")), None) is None:
        raise UsageError(f"no pipeline at {storage.url}: the folder has no files; check --root and --pipeline")


def _manifests(record: Record, storage: Storage) -> list[ShardManifest]:
    try:
        with telling_drops(storage, record.id):
            return [manifest_of(ref, storage) for ref in record.content.shards]
    except NotFound as error:
        raise CorruptFile(f"checkpoint {record.id}: a manifest is missing: {error}\n{_PUT_BACK}") from error


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


# --- printing ---------------------------------------------------------------------------------------------------------


def _print_unknown(unknown: Sequence[str]) -> None:
    for path in unknown:
        _print(f"unknown file, left unchanged: {path}")
    if unknown:
        _print(f"{len(unknown)} files were not written by Cairn; Cairn ignores them")


def _verification(found: Verification, fast: bool) -> dict[str, Any]:
    return {
        "success": found.success,
        "fast": fast,
        "newest_intact": found.newest_intact,
        "findings": list(found.findings),
        "unknown": list(found.unknown),
        "checkpoints": [
            {"id": c.id, "entries": None if fast else c.entries, "findings": list(c.findings)}
            for c in found.checkpoints
        ],
    }


def _print_json(value: Any) -> int:
    typer.echo(json.dumps(value, indent=2))
    return 0


def _print(what: str | Table) -> None:
    """Print plain text or a table.

    Brackets in a text are not markup. A table is as wide as its content, because a truncated path or instant is
    useless.
    """
    console = Console(highlight=False, width=1000)
    console.print(Text(what) if isinstance(what, str) else what, soft_wrap=isinstance(what, str))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        text = name in ("", "interval", "kind", "state", "code")
        table.add_column(name, justify="left" if text else "right", no_wrap=True)
    return table


def _cells(row: dict[str, Any]) -> Iterable[str]:
    interval = f"{_short(row['start'])} to {_short(row['end'])}" if row["start"] is not None else ""
    age = "" if row["age_s"] is None else _age(row["age_s"])
    code = row["code"] if not row["code_changed"] else f"{row['code']} *"
    values: Sequence[Any] = (row["base"], row["state"], row["keys"], row["bytes"], row["files"], code)
    return str(row["id"]), interval, row["kind"], *map(_text, values), age


def _short(instant: str) -> str:
    return instant.removesuffix("T00:00:00Z")


def _age(seconds: int) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{max(seconds, 0)}s"


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    main()
