"""Requests that Airflow's operators send to a driver, and the results that the driver returns.

A request travels as the arguments of the driver's command line. A result is JSON in a file: ``{"ok": {...}}``, or
``{"error": {"type": ..., "message": ..., "rerun": ...}}``. Secrets travel on stdin, because any user of the host can read a command line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from datetime import datetime, timedelta
from typing import Any, ClassVar, Literal, TypedDict, get_origin, get_type_hints

from state_backend.values.records import NO_PERMISSIONS, Permissions

DRIVER = "cairn.driver.driver"
BEGUN = "@cairn begun "
"""Prefix of a line of output: a ``process`` driver has planned its attempt. JSON with attempt and options follows."""
COMMITTED = "@cairn committed "
"""Prefix of a line of output: a ``range`` or ``deploy`` driver has committed an interval. JSON for the asset's event follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Arguments that every request has.

    Attributes:
        pipeline: The `Pipeline`, as ``module:NAME``.
        root: URL of the folder that holds the pipelines.
        spark: URL of a Spark Connect server, or a master URL.
        task: Names the task, the same in every try. The driver interrupts Spark jobs that an earlier try left.
        again: An earlier try may still run.
        settings_on_stdin: Token and Spark configuration follow on stdin, as JSON.
    """

    pipeline: str
    root: str
    spark: str
    task: str | None = None
    again: bool = False
    settings_on_stdin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The try of an Airflow run that asks."""

    run_id: str
    clear_number: int
    try_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Process(Run):
    """Compute one interval, up to *prepared*.

    Attributes:
        name: The pipeline's name in the DAG; the driver checks that `Pipeline.name` is equal.
        earlier: Attempt and options of an earlier try, to use again if nothing changed.
        committed: A committed result exists; the driver keeps it if code and input are the same.
    """

    command: ClassVar[str] = "process"

    start: datetime
    end: datetime
    attempt: str
    mode: str = "incremental"
    name: str | None = None
    earlier: dict[str, Any] | None = None
    committed: bool = False
    permissions: Permissions = NO_PERMISSIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Range(Run):
    """Compute and commit the intervals from the one that starts at ``first`` to the one that starts at ``last``."""

    command: ClassVar[str] = "range"

    first: datetime
    last: datetime
    every: timedelta
    name: str | None = None
    mode: str = "incremental"
    reprocess: Literal["changed", "none", "all"] = "changed"
    dry_run: bool = False
    permissions: Permissions = NO_PERMISSIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """Run intervals with other code beside production.

    Attributes:
        keep: How long the trial stays after its end.
        trial: Name of the trial; None derives a name.
        key: Columns that identify an output row.
    """

    command: ClassVar[str] = "try"

    first: datetime
    last: datetime
    every: timedelta
    keep: timedelta
    name: str | None = None
    trial: str | None = None
    key: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Deploy:
    """Take over the code of a trial, for the intervals since the trial's start too if ``past``."""

    command: ClassVar[str] = "deploy"

    trial: str
    name: str | None = None
    past: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSavepoint:
    """Copy a checkpoint to the new folder ``to``."""

    command: ClassVar[str] = "savepoint"

    to: str
    checkpoint: str = "latest"
    format: Literal["native", "canonical"] = "native"
    consolidate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreSavepoint:
    """Make a savepoint the state of the pipeline. Tries with the same ``attempt`` complete one another."""

    command: ClassVar[str] = "restore"

    savepoint: str
    claim: Literal["NO_CLAIM", "CLAIM"] = "NO_CLAIM"
    attempt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Validate:
    """Validate a checkpoint, a prepared attempt or a savepoint.

    Attributes:
        docs: Folder for Data Docs; None writes none.
    """

    command: ClassVar[str] = "validate"

    checkpoint: str = "latest"
    attempt: str | None = None
    savepoint: str | None = None
    mode: Literal["fast", "full"] = "full"
    docs: str | None = None
    without_expectations: bool = False


Request = Process | Range | Try | Deploy | TakeSavepoint | RestoreSavepoint | Validate
REQUESTS: dict[str, type[Any]] = {
    request.command: request for request in (Process, Range, Try, Deploy, TakeSavepoint, RestoreSavepoint, Validate)
}


class ProcessResult(TypedDict, total=False):
    """The attempt that is prepared, or that a committed checkpoint (``committed``) has.

    ``reused``: nothing was computed. ``sink``: ``module:NAME`` of the pipeline if it has a sink, else empty. ``counts`` are those of the source's position; sizes are bytes.
    """

    attempt: str
    reused: bool
    committed: int
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
    sink: str
    seconds: float


class RangeResult(TypedDict):
    """Counts of intervals, and the id of the last checkpoint; None after a dry run."""

    intervals: int
    computed: int
    kept: int
    checkpoint: int | None


class TryResult(TypedDict):
    """The trial, and its comparison with production as text."""

    trial: str
    same: bool
    comparison: str
    computed: int
    other_input: int


class DeployResult(TypedDict):
    """Counts of intervals that were computed again and that stay behind, and the command that undoes the deployment."""

    trial: str
    again: int
    behind: int
    back: str | None


class RestoreResult(TypedDict):
    """The new checkpoint."""

    checkpoint: int
    interval: str
    entries: int
    bytes: int


class ValidateResult(TypedDict):
    """The findings, and the work that found them.

    ``published``: output of the quarantined checkpoint that readers may have. ``rerun``: fields of `Rerun`. ``docs``: the page of Data Docs.
    """

    success: bool
    what: str
    mode: str
    checkpoint: int | None
    findings: list[str]
    files: int
    entries: int
    keys: int
    expectations: int
    pids: list[int]
    docs: str | None
    published: list[str]
    rerun: dict[str, Any] | None


# --- the command line ----------------------------------------------------------------------------------------------------


def to_arguments(value: Call | Request) -> list[str]:
    """Write the fields of a request as arguments, without those that have their default."""
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
    """Read a command line.

    Args:
        arguments: The words; None for those of this process.
        more: Names of required options of the caller.

    Returns:
        The call, the request, and the values of ``more``.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {DRIVER}")
    commands = parser.add_subparsers(required=True, dest="command")
    for command, request in REQUESTS.items():
        sub = commands.add_parser(command)
        for kind in (Call, request):
            _add_options(sub, kind)
        for name in more:
            sub.add_argument(f"--{name}", required=True)
    found = vars(parser.parse_args(arguments))
    kind = REQUESTS[found["command"]]
    return _from_options(Call, found), _from_options(kind, found), {name: found[name] for name in more}


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
            # The driver's operations refuse a wrong choice with a message that reaches the task's log; argparse would only exit.
            read = str if get_origin(hint) is Literal else _READ[hint]
            parser.add_argument(option, required=required, default=None if required else field.default, type=read)


def _from_options(kind: type[Any], found: dict[str, Any]) -> Any:
    given = {field.name: found[field.name] for field in fields(kind)}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def _permissions(text: str) -> Permissions:
    return Permissions(**json.loads(text))


_READ: dict[Any, Callable[[str], Any]] = {
    str: str,
    str | None: str,
    int: int,
    datetime: datetime.fromisoformat,
    timedelta: lambda text: timedelta(seconds=float(text)),
    dict[str, Any] | None: json.loads,
    Permissions: _permissions,
}
