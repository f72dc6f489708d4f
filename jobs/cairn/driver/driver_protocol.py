"""Requests that Airflow's operators send to a driver, and the results that the driver returns.

A request travels as the arguments of the driver's command line. A result is JSON in a file: `{"ok": {...}}`, or
`{"error": {"type": ..., "message": ..., "rerun": ...}}`. Secrets travel on stdin, because any user of the host can read
a command line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from datetime import datetime, timedelta
from functools import cache
from typing import Any, ClassVar, Literal, TypedDict, get_origin, get_type_hints

from state_backend.values.records import NO_PERMISSIONS, Permissions

DRIVER = "cairn.driver.driver"
# A `process` driver that has planned its attempt prints a line with this prefix, then JSON with attempt and options.
BEGUN = "@cairn begun "
# A `range` or `deploy` driver that has committed an interval prints a line with this prefix, then JSON for the asset's
# event.
COMMITTED = "@cairn committed "


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Arguments that every request has."""

    pipeline: str
    root: str
    spark: str
    # UUID of the driver's session on a Spark Connect server; None: the driver chooses one.
    session: str | None = None
    # UUID of the session of an earlier try of the same task. The driver ends this session and its jobs. None if this is
    # the first try.
    former: str | None = None
    settings_on_stdin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The Airflow run that sends the request."""

    run_id: str
    clear_number: int
    try_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Process(Run):
    """Request to compute one interval, up to *prepared*."""

    command: ClassVar[str] = "process"

    start: datetime
    end: datetime
    attempt: str
    mode: str = "incremental"
    # The pipeline's name in the DAG. The driver checks that `Pipeline.name` is equal. None skips the check.
    name: str | None = None
    # `{"attempt": ID, "options": {NAME: TEXT}}` of an earlier try of this run; None if there is no earlier try. The
    # options are settings that decide the result. If nothing changed, the driver computes nothing, and returns that
    # attempt.
    earlier: dict[str, Any] | None = None
    committed: bool = False
    # The DAG's schedule, encoded. The driver checks that the pipeline declares no other one. None skips the check.
    schedule: dict[str, Any] | None = None
    newest_first: bool = False
    permissions: Permissions = NO_PERMISSIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Range(Run):
    """Request to compute and commit the intervals of a range."""

    command: ClassVar[str] = "range"

    first: str
    last: str
    # Length of each interval; None for the pipeline's schedule.
    every: timedelta | None = None
    # The pipeline's name in the DAG. The driver checks that `Pipeline.name` is equal. None skips this check.
    name: str | None = None
    mode: str = "incremental"
    reprocess: Literal["changed", "none", "all"] = "changed"
    dry_run: bool = False
    permissions: Permissions = NO_PERMISSIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """Request to run intervals with other code beside production."""

    command: ClassVar[str] = "try"

    first: str
    last: str
    # Length of each interval; None for the pipeline's schedule.
    every: timedelta | None = None
    keep: timedelta
    # The pipeline's name in the DAG. The driver checks that `Pipeline.name` is equal. None skips this check.
    name: str | None = None
    # Name of the trial; None makes a name from the first interval and the code.
    trial: str | None = None
    # Columns by which output rows of the trial and of production are matched; if empty, whole rows are compared.
    key: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Deploy:
    """Request to take over the code of a trial."""

    command: ClassVar[str] = "deploy"

    trial: str
    # The pipeline's name in the DAG. The driver checks that `Pipeline.name` is equal. None skips this check.
    name: str | None = None
    past: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSavepoint:
    """Request to copy a checkpoint to the new folder `to`."""

    command: ClassVar[str] = "savepoint"

    to: str
    checkpoint: str = "latest"
    format: Literal["native", "canonical"] = "native"
    consolidate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreSavepoint:
    """Request to make a savepoint the state of the pipeline."""

    command: ClassVar[str] = "restore"

    savepoint: str
    claim: Literal["NO_CLAIM", "CLAIM"] = "NO_CLAIM"
    # A uuid, the same in every try. A second try completes the first one. None for a new uuid.
    attempt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Validate:
    """Request to validate a checkpoint, a prepared attempt or a savepoint."""

    command: ClassVar[str] = "validate"

    checkpoint: str = "latest"
    # Id of a prepared attempt; None validates something else.
    attempt: str | None = None
    # URL of a savepoint's folder; None validates something else.
    savepoint: str | None = None
    mode: Literal["fast", "full"] = "full"
    # Folder for Data Docs; None writes none.
    docs: str | None = None
    without_expectations: bool = False


Request = Process | Range | Try | Deploy | TakeSavepoint | RestoreSavepoint | Validate
REQUESTS: dict[str, type[Any]] = {
    request.command: request for request in (Process, Range, Try, Deploy, TakeSavepoint, RestoreSavepoint, Validate)
}


class ProcessResult(TypedDict, total=False):
    """Result of `Process`, as a dict with some of these keys.

    If the interval has a committed checkpoint of the same code and input, the driver prepares no attempt, and the dict
    has only `attempt`, `reused`, `committed`, `interval`, `sink` and `seconds`. Otherwise the driver prepares an
    attempt, and the dict has all keys except `committed`.
    """

    attempt: str
    reused: bool
    committed: int
    # Id of the base; None for empty state.
    checkpoint_base: int | None
    interval: str
    input_rows: int
    output_rows: int
    keys: int
    changed_bytes: int
    uploaded_bytes: int
    state_bytes: int
    durations_us: dict[str, int]
    counts: dict[str, Any]
    # `module:NAME` of a pipeline that has a sink, else empty.
    sink: str
    seconds: float


class RangeResult(TypedDict):
    """Result of `Range`."""

    intervals: int
    computed: int
    kept: int
    # Id of the last interval's checkpoint; None if a dry run would compute this interval.
    checkpoint: int | None


class TryResult(TypedDict):
    """Result of `Try`."""

    trial: str
    same: bool
    comparison: str
    computed: int
    other_input: int


class DeployResult(TypedDict):
    """Result of `Deploy`."""

    trial: str
    again: int
    behind: int
    # Command that restores the state before the deployment; None if that is impossible.
    back: str | None


class RestoreResult(TypedDict):
    """Result of `RestoreSavepoint`: the new checkpoint."""

    checkpoint: int
    interval: str
    entries: int
    bytes: int


class ValidateResult(TypedDict):
    """Result of `Validate`."""

    success: bool
    what: str
    mode: str
    # Id of the checkpoint; None for an attempt.
    checkpoint: int | None
    findings: list[str]
    files: int
    entries: int
    keys: int
    expectations: int
    pids: list[int]
    # Path of the Data Docs page with all checks; None without Data Docs.
    docs: str | None
    # Intervals whose current output was computed from the state that this validation quarantined, as text; empty
    # without a quarantine.
    published: list[str]
    # Fields of `Rerun`, the intervals to run again; None if no re-run is needed.
    rerun: dict[str, Any] | None


# --- the command line -------------------------------------------------------------------------------------------------


def to_arguments(value: Call | Request) -> list[str]:
    """Convert a request to command-line arguments. Fields that have their default are left out."""
    arguments: list[str] = []
    for field in fields(value):
        given = getattr(value, field.name)
        if given == field.default:
            continue
        option = "--" + field.name.replace("_", "-")
        if given is True:
            arguments.append(option)
        elif isinstance(given, tuple):
            for one in given:
                arguments += [option, one]
        else:
            arguments += [option, _to_text(given)]
    return arguments


def _to_text(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return str(value.total_seconds())
    if isinstance(value, Permissions):
        return json.dumps(asdict(value))
    return json.dumps(value) if isinstance(value, dict) else str(value)


def parse_call(arguments: Sequence[str] | None, more: Sequence[str]) -> tuple[Call, Any, dict[str, str]]:
    """Parse the command line of a driver."""
    found = vars(parser_of(*more).parse_args(arguments))
    kind = REQUESTS[found["command"]]
    return _from_options(Call, found), _from_options(kind, found), {name: found[name] for name in more}


@cache
def parser_of(*more: str) -> argparse.ArgumentParser:
    """Return the parser of a driver's command line. The host of warm drivers makes it once for all its drivers."""
    parser = argparse.ArgumentParser(prog=f"python -m {DRIVER}")
    commands = parser.add_subparsers(required=True, dest="command")
    for command, request in REQUESTS.items():
        sub = commands.add_parser(command)
        for kind in (Call, request):
            _add_options(sub, kind)
        for name in more:
            sub.add_argument(f"--{name}", required=True)
    return parser


def _add_options(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    hints = get_type_hints(kind)
    for field in fields(kind):
        option, hint = "--" + field.name.replace("_", "-"), hints[field.name]
        if hint is bool:
            parser.add_argument(option, action="store_true")
        elif hint == tuple[str, ...]:
            parser.add_argument(option, action="append", default=[])
        else:
            required = field.default is MISSING
            # The driver's operations check the choices: their error message reaches the task's log. argparse would only
            # exit.
            read = str if get_origin(hint) is Literal else _READ[hint]
            parser.add_argument(option, required=required, default=None if required else field.default, type=read)


def _from_options(kind: type[Any], found: dict[str, Any]) -> Any:
    given = {field.name: found[field.name] for field in fields(kind)}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def _permissions(text: str) -> Permissions:
    return Permissions(**json.loads(text))


def _seconds(text: str) -> timedelta:
    return timedelta(seconds=float(text))


_READ: dict[Any, Callable[[str], Any]] = {
    str: str,
    str | None: str,
    int: int,
    datetime: datetime.fromisoformat,
    timedelta: _seconds,
    timedelta | None: _seconds,
    dict[str, Any] | None: json.loads,
    Permissions: _permissions,
}
