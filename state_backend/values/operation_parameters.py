"""The parameters of each operation, stated once.

A command of `cairn` and an operator of Airflow each build a request. One Python function carries the request out, for
the command and for the operator. A driver process reads the request as JSON. The command line's help texts and defaults
are defined here too: `cairn.command.from_request` makes the options from the fields.

The module imports neither Typer nor Spark nor rocksdict, because Airflow's scheduler imports it.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from datetime import datetime, timedelta
from typing import Any, ClassVar, Literal, get_args
from uuid import uuid4

from state_backend.values.environment import Variable
from state_backend.values.errors import UsageError
from state_backend.values.records import NO_PERMISSIONS, OnRerun, Permissions, RunRef, own_run

# A driver of `ProcessInterval` that has planned its attempt prints a line with this prefix, then JSON with attempt and
# options.
BEGUN = "@cairn begun "
# A driver of `RunRange` or `PromoteTrial` that has committed an interval prints a line with this prefix, then JSON for
# the asset's event.
COMMITTED = "@cairn committed "


def parameter(text: str, default: Any = MISSING, *, option: str = "", env: str = "", least: int | None = None) -> Any:
    """Return a field of a request that the command line offers as an option, with the help `text`.

    `option`: The option, as `--from`; empty: made from the field's name. A name without dashes: positional argument.
    `env`: An environment variable that gives the value instead. `least`: The smallest number that is accepted.
    """
    return field(default=default, metadata={"help": text, "option": option, "env": env, "least": least})


# The ways to name a checkpoint, for the help of each command.
NAMED = "latest (the newest that is neither stale nor quarantined), an id, or an interval's end with its time zone"
CHECKPOINT = f"The checkpoint: {NAMED}."
STATE = f"a checkpoint ({NAMED}) or a savepoint (path or URL of its folder)"
_ZONE = "A day, or a time without a zone, is in the schedule's zone; without a schedule, or with --every, in UTC."
FIRST_INTERVAL = "The first interval: its start, or a day for the first interval that starts on it."
LAST_INTERVAL = "The last interval: its start, or a day for all intervals that start on it"
_LAST = f"{LAST_INTERVAL}; without a schedule, or with --every, only for the one at 00:00 UTC."
EVERY = (
    "Length of an interval, as in 1h or 1d; left out: as the pipeline's schedule says; without a schedule, the length of "
    "the newest interval."
)
SAME_NAME = "stop if the Pipeline of --code has another name."
DRY_RUN = "Print what would be done; do nothing."
MATCH = "Column that identifies an output row; may be repeated. Left out: compare whole rows."


# A driver refuses unknown fields: if it ignored a newer release's field, such as `dry_run`, it could do too much.
_NO_OTHER_FIELDS = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class Operation:
    __pydantic_config__: ClassVar = _NO_OTHER_FIELDS
    command: ClassVar[str]

    root: str = parameter("URL of the folder that holds all pipelines, as in file:///data/state.", env=Variable.ROOT)


@dataclass(frozen=True, kw_only=True)
class OfPipeline(Operation):
    """Base of the requests that need the pipeline's name, but not its code."""

    pipeline: str = parameter("Name of the pipeline.", env=Variable.PIPELINE)


@dataclass(frozen=True, kw_only=True)
class OfCode(Operation):
    code: str = parameter("module:NAME of the Pipeline, as in pipelines.clicks:CLICKS.", env=Variable.CODE)
    pipeline: str | None = parameter(f"Optional check: {SAME_NAME}", None, env=Variable.PIPELINE)


@dataclass(frozen=True, kw_only=True)
class ProcessInterval(OfCode):
    """Request of an operator to compute one interval, without the commit: the attempt becomes *prepared*."""

    command: ClassVar[str] = "interval"

    run: RunRef
    start: datetime
    end: datetime
    attempt: str
    mode: str = "incremental"
    # `{"attempt": ID, "options": {NAME: TEXT}}` of an earlier try of this run; None if there is no earlier try. The
    # options are settings that decide the result. If code, options and input are as in that try, the driver returns its
    # attempt, and computes nothing.
    earlier: dict[str, Any] | None = None
    committed: bool = False  # True: a run has committed this interval, so its result may be reused
    # The DAG's schedule, encoded. The driver checks that the pipeline declares no other one. None skips the check.
    schedule: dict[str, Any] | None = None
    newest_first: bool = False  # True: Airflow chose the newest interval, because the DAG's catchup is off
    permissions: Permissions = NO_PERMISSIONS


@dataclass(frozen=True, kw_only=True)
class RunRange(OfCode):
    """Request to compute and commit intervals in their order."""

    command: ClassVar[str] = "run"

    first: str | None = parameter(
        f"{FIRST_INTERVAL} {_ZONE} Without --to, a day is the interval at its 00:00. Left out: the interval after the "
        "newest one, at first the one at Pipeline.start.",
        None,
        option="--from",
    )
    last: str | None = parameter(f"{_LAST} Needs --from.", None, option="--to")
    count: int = parameter(
        "Without --to: how many intervals to run; each is computed, even if its code and input are unchanged.",
        1,
        least=1,
    )
    every: timedelta | None = parameter(EVERY, None)
    reprocess: Literal["changed", "none", "all"] = parameter(
        "With --to: stale and quarantined intervals always run; of the others: changed (code, settings or input differ "
        "now), none, or all.",
        "changed",
    )
    replace_overlapping: bool = parameter(
        "After a change of the schedule: let an interval replace the whole output of old intervals that it overlaps, also "
        "the part outside of it. Without this option, such an interval is refused.",
        False,
    )
    dry_run: bool = parameter(DRY_RUN, False)
    mode: str = "incremental"
    permissions: Permissions = NO_PERMISSIONS
    # The Airflow run that asks; None: the command line.
    run: RunRef | None = None


@dataclass(frozen=True, kw_only=True)
class TryCode(OfCode):
    """Request to run intervals with other code beside production."""

    command: ClassVar[str] = "try"

    code: str = parameter("module:NAME of the Pipeline with the changed code.", env=Variable.CODE)
    first: str = parameter(f"{FIRST_INTERVAL} {_ZONE}", option="--from")
    last: str = parameter(_LAST, option="--to")
    every: timedelta | None = parameter(EVERY, None)
    trial: str | None = parameter(
        "Name of the trial; left out: made from the start of its first interval and from its code.",
        None,
        option="trial",
    )
    savepoint: str | None = parameter(
        "Begin from the native savepoint in this folder (URL), instead of production's state. It must end where the "
        "first interval starts.",
        None,
    )
    keep_for: timedelta = parameter(
        "How long the trial stays after this command, as in 12h or 3d; then cairn sweep removes it.", timedelta(days=3)
    )
    chain: bool = parameter(
        "Try the pipelines that read this one too, at every depth: they read the trial's output.", False
    )
    code_of: tuple[str, ...] = parameter(
        "With --chain: PIPELINE=module:NAME, the code of a pipeline that reads this one; may be repeated. Left out: the "
        "recorded code.",
        (),
    )
    # True: compare the trial with production too. The columns in `match` identify an output row.
    compare: bool = False
    match: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PromoteTrial(OfCode):
    """Request to make the code of a trial the code of production: `cairn promote`."""

    command: ClassVar[str] = "promote"

    code: str = parameter("module:NAME of the Pipeline that the trial ran; other code is refused.", env=Variable.CODE)
    trial: str | None = parameter("Name of the trial; left out: the pipeline's only trial.", None, option="trial")
    past: bool = parameter(
        "Also run the trial's intervals again in production, and stop at the first result that differs from the trial's; "
        "then run those that follow, which have nothing to differ from.",
        False,
    )
    chain: bool = parameter(
        "Promote the trials of this name of the pipelines that read this one too, upstream first, if all can be.", False
    )
    match: tuple[str, ...] = parameter(f"Without --yes: {MATCH[0].lower()}{MATCH[1:]}", ())


@dataclass(frozen=True, kw_only=True)
class TakeSavepoint(OfCode):
    """Request to copy a checkpoint to a new folder."""

    command: ClassVar[str] = "savepoint"

    folder: str = parameter("URL of a new folder for the savepoint, outside of the pipeline's folder.")
    checkpoint: str = parameter(CHECKPOINT, "latest", option="checkpoint")
    format: Literal["native", "canonical"] = parameter(
        "native: RocksDB's files, quick to restore. canonical: Parquet, which any tool reads, and which a pipeline with "
        "another max_parallelism can restore.",
        "native",
    )
    consolidate: bool = parameter(
        "First commit the pipeline's checkpoint again in compacted files, from which later intervals start.", False
    )
    dry_run: bool = parameter(DRY_RUN, False)


@dataclass(frozen=True, kw_only=True)
class _OfState(Operation):
    """Base of the requests that give a state to a pipeline. Stale and quarantined states are refused by default."""

    allow_stale: bool = parameter(
        "Accept a stale checkpoint: later, an earlier interval got another result, or an earlier state was restored.",
        False,
    )
    allow_quarantined: bool = parameter(
        "Accept a quarantined checkpoint, or one that was computed from a quarantined one.", False
    )
    # Uuid of the attempt, equal in all tries of a task, so that a second try completes the first. None: a new uuid.
    attempt: str | None = None
    # The Airflow run that asks; None: the command line.
    run: RunRef | None = None

    def of_record(self, what: str) -> dict[str, Any]:
        """Return run, attempt and permissions for a record. Without an Airflow run, the run id begins with `what`."""
        attempt = self.attempt or str(uuid4())
        return {
            "run": self.run or own_run(f"{what}__{attempt}"),
            "attempt": attempt,
            "permissions": Permissions(allow_stale_base=self.allow_stale, allow_quarantined=self.allow_quarantined),
        }


@dataclass(frozen=True, kw_only=True)
class Restore(_OfState, OfCode):
    """Request to make a checkpoint or a savepoint the state of the pipeline."""

    command: ClassVar[str] = "restore"

    checkpoint: str | None = parameter(
        f"Go back to this checkpoint of the pipeline: {NAMED}.", None, option="checkpoint"
    )
    savepoint: str | None = parameter(
        "Instead of a checkpoint, restore the savepoint in this folder (URL); needs --code and Spark.", None
    )
    code: str = parameter("With --savepoint: module:NAME of the Pipeline that gets the state.", "", env=Variable.CODE)
    pipeline: str | None = parameter(
        f"With a checkpoint: name of the pipeline. With --savepoint, an optional check: {SAME_NAME}",
        None,
        env=Variable.PIPELINE,
    )
    claim: Literal["NO_CLAIM", "CLAIM"] = parameter(
        "With --savepoint: CLAIM deletes the savepoint after the restore, NO_CLAIM keeps it.", "NO_CLAIM"
    )
    retract_output: bool = parameter(
        "With a checkpoint: also delete the output of later intervals, below the root now, in the sink's system at the "
        "sink's next call.",
        False,
    )
    dry_run: bool = parameter(DRY_RUN, False)


@dataclass(frozen=True, kw_only=True)
class Fork(_OfState):
    """Request to give a checkpoint or a native savepoint to a pipeline of another name."""

    fork_as: str = parameter("Name of the new pipeline, which gets the state.", option="--as")
    checkpoint: str = parameter(CHECKPOINT, "latest", option="checkpoint")
    pipeline: str | None = parameter(
        "Name of the pipeline to fork; not needed for a savepoint.", None, env=Variable.PIPELINE
    )
    savepoint: str | None = parameter(
        "Take the state from the native savepoint in this folder (URL), instead of from --pipeline.", None
    )
    fork_root: str | None = parameter(
        "URL of the new pipeline's root; left out: that of --root.", None, option="--to-root"
    )
    start: str | None = parameter(
        "Pipeline.start of the new pipeline, with time zone; left out: that of the forked pipeline.",
        None,
        option="--from",
    )
    dry_run: bool = parameter(DRY_RUN, False)


@dataclass(frozen=True, kw_only=True)
class Validate(OfCode):
    """Request to validate a checkpoint, a prepared attempt or a savepoint."""

    command: ClassVar[str] = "validate"

    checkpoint: str = parameter(CHECKPOINT, "latest", option="checkpoint")
    fast: bool = parameter(
        "Check only that each file is there, with its size and checksum: no restored state, no expectations, no Spark.",
        False,
    )
    docs: str | None = parameter(
        "Local folder for Data Docs, HTML pages of all checks; left out: none are written.", None
    )
    dry_run: bool = parameter(
        "Print the findings, but mark the checkpoint neither as validated nor as quarantined.", False
    )
    # Uuid of the prepared attempt to validate; None: validate the checkpoint or the savepoint.
    attempt: str | None = None
    # URL of the folder of the savepoint to validate; None: validate the checkpoint or the attempt.
    savepoint: str | None = None
    without_expectations: bool = False


@dataclass(frozen=True, kw_only=True)
class Sweep(OfPipeline):
    """Request to delete the files of attempts that died, and trials whose time is over."""

    # The default exceeds a weekend, because a task that failed on Friday may be cleared as late as Monday.
    min_age: timedelta = parameter(
        "An attempt (a try of an interval) without a commit that wrote nothing for this time counts as dead: 90m, 12h, "
        "3d. Younger files stay.",
        timedelta(days=3),
    )
    dry_run: bool = parameter("Print what would be deleted; delete nothing.", False)


@dataclass(frozen=True, kw_only=True)
class Heal(OfCode):
    """Request to run every stale, failed, quarantined and missing interval up to a date, in order."""

    code: str = parameter(
        "module:NAME of the Pipeline: run the intervals in this process, without Airflow. Left out: in Airflow; but if "
        "cairn run made the newest interval and --dag is not given, in this process with CAIRN_CODE or the recorded code. "
        "CAIRN_CODE alone counts as left out.",
        "",
    )
    pipeline: str = parameter("Name of the pipeline.", env=Variable.PIPELINE)
    last: str = parameter(
        f"{LAST_INTERVAL}. A day is in the zone of the pipeline's cron schedule; without one, in Airflow's default zone "
        "or, without Airflow, in UTC.",
        option="--to",
    )
    every: timedelta | None = parameter(f"Without Airflow: {EVERY[0].lower()}{EVERY[1:]}", None)
    dag: str | None = parameter(
        "Id of the DAG that runs the intervals in Airflow; left out: the pipeline's name. Not with --code.", None
    )
    chain: bool = parameter("Heal first the pipelines that this one reads, and then those that read it.", False)
    dry_run: bool = parameter(DRY_RUN, False)


@dataclass(frozen=True, kw_only=True)
class Plan(Operation):
    pipeline: str | None = parameter("Only pipelines that this one reads or that read it; left out: all.", None)
    rerun: tuple[str, ...] = parameter(
        "Assume that intervals run again with another result: PIPELINE=FROM or PIPELINE=FROM..TO, each the start of an "
        "interval, or a day; may be repeated.",
        (),
    )
    code: tuple[str, ...] = parameter(
        "Assume changed code: PIPELINE=module:NAME; with --rerun PIPELINE=FROM from there on; may be repeated.", ()
    )
    restore: tuple[str, ...] = parameter(
        "Assume that a pipeline goes back to a checkpoint: PIPELINE=CHECKPOINT; may be repeated.", ()
    )
    last: str | None = parameter(f"{LAST_INTERVAL}; left out: only intervals with a result.", None, option="--to")


@dataclass(frozen=True, kw_only=True)
class ReplayKey(OfCode):
    """Request to run one key of one committed interval again, and to compare the results."""

    key: str = parameter(
        "The key: its value, column=value with a comma between columns, or a JSON object with all columns.",
        option="key",
    )
    interval: str = parameter(
        "The interval: its start, or the id of its checkpoint. A day, or a time without a zone, is in the schedule's "
        "zone; without a schedule, in UTC.",
        option="interval",
    )


@dataclass(frozen=True, kw_only=True)
class Export(Operation):
    folder: str = parameter("Empty folder for the files, outside of the pipeline's folder: a path or URL.")
    checkpoint: str = parameter(f"The state: {STATE}.", "latest", option="checkpoint")
    root: str = parameter(
        "URL of the folder that holds all pipelines; not needed for a savepoint.", "", env=Variable.ROOT
    )
    pipeline: str = parameter("Name of the pipeline; not needed for a savepoint.", "", env=Variable.PIPELINE)
    states: tuple[str, ...] = parameter(
        "Only the state of this name, or '$timers' (quoted) for the timers; may be repeated.", (), option="--state"
    )


@dataclass(frozen=True, kw_only=True)
class Erase(OfPipeline):
    """Request to remove keys from the newest state."""

    key: tuple[str, ...] = parameter(
        'Keys to remove, each as a JSON object with all key columns: \'{"user": "u1"}\'. Other forms are refused here.',
        option="key",
    )
    on_rerun: OnRerun = parameter(
        "What happens to a later re-run of an interval that would bring a key back: refuse stops it, filter runs it "
        "without the key.",
        "refuse",
    )
    drop_checkpoints: bool = parameter(
        "Also drop the older checkpoints whose files may hold a key; they can't be restored then.", False
    )
    rewrite_output: bool = parameter(
        "Also rewrite the files of output and late rows that contain a key, without its rows.", False
    )


# The requests that a driver process carries out.
Request = ProcessInterval | RunRange | TryCode | PromoteTrial | TakeSavepoint | Restore | Validate
REQUESTS: dict[str, type[Any]] = {kind.command: kind for kind in get_args(Request)}


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a driver process gets beside its request: above all, how it reaches Spark."""

    __pydantic_config__: ClassVar = _NO_OTHER_FIELDS

    spark: str
    # UUID of the driver's session on a Spark Connect server; None: the driver chooses one.
    session: str | None = None
    # UUID of the session of an earlier try of the same task. The driver ends this session and its jobs. None if this is
    # the first try.
    former: str | None = None
    settings_on_stdin: bool = False  # True: standard input has Spark's settings and token as JSON
    # Version of Cairn in the operator's process.
    release: str = ""


def to_json(value: Any) -> str:
    from pydantic import TypeAdapter

    return TypeAdapter(type(value)).dump_json(value, exclude_defaults=True, warnings=False).decode()


def from_json(kind: type[Any], text: str) -> Any:
    """Return the request in a JSON text. Raise `UsageError` for an unknown field, or a value of a wrong type."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        lines = []
        for wrong in error.errors():
            field, why = ".".join(map(str, wrong["loc"])), f"{wrong['msg'][0].lower()}{wrong['msg'][1:]}"
            shown = field and (field if wrong["type"] == "missing" else f"{field} is {wrong['input']!r}")
            lines.append(f"{shown or 'the request'}: {why}")
        raise UsageError("\n".join(["the request can't be carried out", *lines])) from error
