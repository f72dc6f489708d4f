"""The parameters of each operation, stated once.

A command of `cairn` and an operator of Airflow each build a request. One Python function carries the request out, for
the command and for the operator. A driver process reads the request as JSON. The command line's help texts and defaults
are defined here too: `cairn.command.from_request` makes the options from the fields.

The module imports neither Typer nor Spark nor rocksdict, because Airflow's scheduler imports it.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from datetime import datetime, timedelta
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints
from uuid import uuid4

from state_backend.values.environment import Variable
from state_backend.values.records import NO_PERMISSIONS, OnRerun, Permissions, RunRef, own_run

# A driver of `ProcessInterval` that has planned its attempt prints a line with this prefix, then JSON with attempt and
# options.
BEGUN = "@cairn begun "
# A driver of `RunRange` or `PromoteTrial` that has committed an interval prints a line with this prefix, then JSON for
# the asset's event.
COMMITTED = "@cairn committed "


def parameter(text: str, default: Any = MISSING, *, option: str = "", env: str = "", least: int | None = None) -> Any:
    """Return a field that the command line offers as an option.

    `option`: Name of the option; empty: the field's name. A name without dashes makes a positional argument.
    """
    return field(default=default, metadata={"help": text, "option": option, "env": env, "least": least})


CHECKPOINT = "The checkpoint: latest, an id, or an interval's end with its time zone."
DRY_RUN = "Print what would be done; do nothing."
MATCH = "Column that identifies an output row; may be repeated. Left out: compare whole rows."


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Parameters of one call of an operation."""

    command: ClassVar[str]

    root: str = parameter("URL of the folder that holds all pipelines, as in file:///data/state.", env=Variable.ROOT)


@dataclass(frozen=True, kw_only=True)
class OfPipeline(Operation):
    """Request that needs no code of the pipeline."""

    pipeline: str = parameter("Name of the pipeline.", env=Variable.PIPELINE)


@dataclass(frozen=True, kw_only=True)
class OfCode(Operation):
    """Request that needs the pipeline's code."""

    code: str = parameter("module:NAME of the Pipeline, as in its DAG.", env=Variable.CODE)
    pipeline: str | None = parameter(
        "Name that the Pipeline of --code must have; not needed.", None, env=Variable.PIPELINE
    )


@dataclass(frozen=True, kw_only=True)
class ProcessInterval(OfCode):
    """Request of an operator: compute one interval, up to *prepared*."""

    command: ClassVar[str] = "interval"

    run: RunRef
    start: datetime
    end: datetime
    attempt: str
    mode: str = "incremental"
    # `{"attempt": ID, "options": {NAME: TEXT}}` of an earlier try of this run; None if there is no earlier try. The
    # options are settings that decide the result. If nothing changed, the driver computes nothing, and returns that
    # attempt.
    earlier: dict[str, Any] | None = None
    committed: bool = False
    # The DAG's schedule, encoded. The driver checks that the pipeline declares no other one. None skips the check.
    schedule: dict[str, Any] | None = None
    newest_first: bool = False
    permissions: Permissions = NO_PERMISSIONS


@dataclass(frozen=True, kw_only=True)
class RunRange(OfCode):
    """Request to compute and commit intervals in their order."""

    command: ClassVar[str] = "run"

    first: str | None = parameter(
        "The first interval: a day, as in 2024-01-04, or the interval's start; left out: the newest interval's end.",
        None,
        option="--from",
    )
    last: str | None = parameter(
        "The last interval: a day, or the interval's start. Intervals whose code and input are unchanged keep their results.",
        None,
        option="--to",
    )
    count: int = parameter(
        "Without --to: number of intervals to run; each is computed, even if its code and input are unchanged.",
        1,
        least=1,
    )
    every: timedelta | None = parameter(
        "Length of an interval, as in 1h or 1d; left out: the pipeline's schedule, or the length of the newest interval.",
        None,
    )
    reprocess: Literal["changed", "none", "all"] = parameter(
        "Which intervals up to --to that have a result to compute again: changed (code or input differs now), none, all.",
        "changed",
    )
    replace_overlapping: bool = parameter(
        "Accept an interval that overlaps earlier ones with other boundaries, and replace their output.", False
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

    first: str = parameter("The first interval: a day, as in 2024-01-04, or the interval's start.", option="--from")
    last: str = parameter("The last interval: a day, or the interval's start.", option="--to")
    every: timedelta | None = parameter(
        "Length of an interval, as in 1h or 1d; left out: the pipeline's schedule.", None
    )
    trial: str | None = parameter("Name of the trial; left out: made from its start and code.", None, option="trial")
    savepoint: str | None = parameter("Begin from this native savepoint instead of production's state.", None)
    keep_for: timedelta = parameter("How long the trial stays before a sweep removes it: 12h, 3d.", timedelta(days=3))
    # True also compares the trial with production; `match` names the columns that identify an output row.
    compare: bool = False
    match: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PromoteTrial(OfCode):
    """Request to take over the code of a trial."""

    command: ClassVar[str] = "promote"

    trial: str | None = parameter("Name of the trial; left out: the pipeline's only trial.", None, option="trial")
    past: bool = parameter(
        "Also run the trial's intervals again in production; commit only results equal to the trial's.", False
    )
    match: tuple[str, ...] = parameter(MATCH, ())


@dataclass(frozen=True, kw_only=True)
class TakeSavepoint(OfCode):
    """Request to copy a checkpoint to a new folder."""

    command: ClassVar[str] = "savepoint"

    folder: str = parameter("URL of a new folder for the savepoint.")
    checkpoint: str = parameter(CHECKPOINT, "latest", option="checkpoint")
    format: Literal["native", "canonical"] = parameter(
        "native: compacted files of RocksDB, quick to restore. canonical: Parquet, which also fits changed states.",
        "native",
    )
    consolidate: bool = parameter("First rewrite the checkpoint itself without deleted and replaced entries.", False)
    dry_run: bool = parameter(DRY_RUN, False)


@dataclass(frozen=True, kw_only=True)
class _OfState(Operation):
    """Request that gives a state to a pipeline. The state may be refused."""

    allow_stale: bool = parameter("Accept a stale checkpoint.", False)
    allow_quarantined: bool = parameter("Accept a quarantined checkpoint, which validation refused.", False)
    # A uuid, the same in every try. A second try completes the first one. None for a new uuid.
    attempt: str | None = None
    # The Airflow run that asks; None: the command line.
    run: RunRef | None = None

    def of_record(self, what: str) -> dict[str, Any]:
        """Return run, attempt and permissions of the record that the operation makes."""
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
        "Go back to this checkpoint of the pipeline: an id, or an interval's end.", None, option="checkpoint"
    )
    savepoint: str | None = parameter("Or restore the savepoint in this folder (URL); needs --code and Spark.", None)
    code: str = parameter("With --savepoint: module:NAME of the Pipeline.", "", env=Variable.CODE)
    pipeline: str | None = parameter("With a checkpoint: name of the pipeline.", None, env=Variable.PIPELINE)
    claim: Literal["NO_CLAIM", "CLAIM"] = parameter(
        "With --savepoint: CLAIM deletes the savepoint after the restore.", "NO_CLAIM"
    )
    retract_output: bool = parameter(
        "With a checkpoint: also delete the output of later intervals, here and in the sink's system.", False
    )
    dry_run: bool = parameter(DRY_RUN, False)


@dataclass(frozen=True, kw_only=True)
class Fork(_OfState):
    """Request to give a checkpoint or a native savepoint to a pipeline of another name."""

    fork_as: str = parameter("Name of the pipeline that gets the state.", option="--as")
    checkpoint: str = parameter(CHECKPOINT, "latest", option="checkpoint")
    pipeline: str | None = parameter("Name of the pipeline to fork.", None, env=Variable.PIPELINE)
    savepoint: str | None = parameter(
        "Take the state from the native savepoint in this folder (URL), instead of from --pipeline.", None
    )
    fork_root: str | None = parameter(
        "Root of the new pipeline; left out: the same as --root.", None, option="--to-root"
    )
    start: str | None = parameter(
        "Start of the new pipeline's first interval, with time zone; left out: as in the forked one.",
        None,
        option="--from",
    )
    dry_run: bool = parameter(DRY_RUN, False)


@dataclass(frozen=True, kw_only=True)
class Validate(OfCode):
    """Request to validate a checkpoint, a prepared attempt or a savepoint."""

    command: ClassVar[str] = "validate"

    checkpoint: str = parameter(CHECKPOINT, "latest", option="checkpoint")
    fast: bool = parameter("Read no state: check files only. Needs no Spark.", False)
    docs: str | None = parameter("Folder or URL for Data Docs; left out: none are written.", None)
    dry_run: bool = parameter("Mark the checkpoint neither as valid nor as refused.", False)
    # Id of a prepared attempt; None validates something else.
    attempt: str | None = None
    # URL of a savepoint's folder; None validates something else.
    savepoint: str | None = None
    without_expectations: bool = False


@dataclass(frozen=True, kw_only=True)
class Sweep(OfPipeline):
    """Request to delete the files of attempts that died, and trials whose time is over."""

    # The time exceeds a weekend, because a task that failed on Friday may be cleared as late as Monday.
    min_age: timedelta = parameter(
        "An attempt that wrote nothing for this time counts as dead: 90m, 12h, 3d.", timedelta(days=3)
    )
    dry_run: bool = parameter("Print what would be deleted; delete nothing.", False)


@dataclass(frozen=True, kw_only=True)
class Heal(OfCode):
    """Request to run every stale, failed, quarantined and missing interval up to a date, in order."""

    code: str = parameter(
        "module:NAME of the Pipeline: run the intervals in this process, without Airflow. Left out: where the newest "
        "interval ran.",
        "",
    )
    pipeline: str = parameter("Name of the pipeline.", env=Variable.PIPELINE)
    last: str = parameter(
        "The last interval: its start, or a day of the schedule's zone for all intervals that start on it.",
        option="--to",
    )
    every: timedelta | None = parameter(
        "Without Airflow: length of an interval, as in 1h or 1d; left out: the schedule, or the length of the newest "
        "interval.",
        None,
    )
    dag: str | None = parameter("Id of the pipeline's DAG; left out: the pipeline's name.", None)
    dry_run: bool = parameter(DRY_RUN, False)


@dataclass(frozen=True, kw_only=True)
class ReplayKey(OfCode):
    """Request to run one key of one committed interval again, and to compare the results."""

    key: str = parameter(
        "The key: its value, column=value for each column, or a JSON object with all columns.", option="key"
    )
    interval: str = parameter(
        "The interval: its start, as a day of the schedule's zone or an instant, or a checkpoint's id.",
        option="interval",
    )


@dataclass(frozen=True, kw_only=True)
class Export(Operation):
    """Request to write state as Parquet files."""

    folder: str = parameter("Empty folder for the files: a path or URL.")
    checkpoint: str = parameter(
        "The state: latest, an id, an interval's end, or a savepoint's folder.", "latest", option="checkpoint"
    )
    root: str = parameter(
        "URL of the folder that holds all pipelines; not needed for a savepoint.", "", env=Variable.ROOT
    )
    pipeline: str = parameter("Name of the pipeline; not needed for a savepoint.", "", env=Variable.PIPELINE)
    states: tuple[str, ...] = parameter(
        "Only this state; $timers for the timers; may be repeated.", (), option="--state"
    )


@dataclass(frozen=True, kw_only=True)
class Erase(OfPipeline):
    """Request to remove keys from the newest state."""

    key: tuple[str, ...] = parameter('Keys to remove, as JSON: \'{"user": "u1"}\'.', option="key")
    on_rerun: OnRerun = parameter(
        "What to do with an interval that would bring a key back: refuse it, or filter the key out of it.", "refuse"
    )
    drop_checkpoints: bool = parameter("Also drop checkpoints whose files may hold the key.", False)
    rewrite_output: bool = parameter("Also rewrite files of output and late rows that contain the key.", False)


# What a driver carries out.
Request = ProcessInterval | RunRange | TryCode | PromoteTrial | TakeSavepoint | Restore | Validate
REQUESTS: dict[str, type[Any]] = {kind.command: kind for kind in get_args(Request)}


@dataclass(frozen=True, kw_only=True)
class Call:
    """How a driver reaches Spark, beside its request."""

    spark: str
    # UUID of the driver's session on a Spark Connect server; None: the driver chooses one.
    session: str | None = None
    # UUID of the session of an earlier try of the same task. The driver ends this session and its jobs. None if this is
    # the first try.
    former: str | None = None
    settings_on_stdin: bool = False


def to_json(value: Any) -> str:
    """Encode a request or a call. Fields that have their default are left out."""
    given = {f.name: getattr(value, f.name) for f in fields(value)}
    return json.dumps({f.name: _plain(given[f.name]) for f in fields(value) if given[f.name] != f.default})


def from_json(kind: type[Any], text: str) -> Any:
    """Decode a request or a call of a kind."""
    hints = get_type_hints(kind)
    return kind(**{name: _parsed(hints[name], value) for name, value in json.loads(text).items()})


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return asdict(value) if isinstance(value, Permissions | RunRef) else value


def _parsed(hint: Any, value: Any) -> Any:
    for kind in (hint, *get_args(hint)):
        if kind is datetime:
            return datetime.fromisoformat(value)
        if kind is timedelta:
            return timedelta(seconds=value)
        if kind in (Permissions, RunRef):
            return kind(**value)
    return tuple(value) if get_origin(hint) is tuple else value
