"""The command `cairn run`: process and commit intervals of a pipeline without Airflow."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from cairn.command.open_spark import open_spark
from cairn.command.progress import Stopped
from state_backend.checkpoint.trials import check_no_trial
from state_backend.inspection.checkpoint_names import parse_duration
from state_backend.values.environment import Variable
from state_backend.values.errors import CairnError, Rerun, UsageError, UserCodeError
from state_backend.values.intervals import Interval, format_instant
from state_backend.values.records import Permissions
from state_backend.values.schedule import Schedule, interval_from, next_interval, no_boundary, starting_between

if TYPE_CHECKING:
    from cairn.operations.plan_range import Progress
    from cairn.operations.run_intervals import Outcome

LOCAL_SPARK = Variable.SPARK.default


class Redo(StrEnum):
    """Values of `--reprocess`: which intervals of a range that have a result are computed again."""

    changed = "changed"
    none = "none"
    all = "all"


class SparkLog(StrEnum):
    """Values of `--spark-log`: the lowest level of Spark's own log lines that are shown."""

    OFF, ERROR, WARN, INFO = "off", "error", "warn", "info"


First = Annotated[
    str | None,
    typer.Option(help="Start of the first interval, 2024-01-04T00:00Z; left out: the newest interval's end."),
]
Every = Annotated[
    str | None, typer.Option(help="Length of an interval: 1h, 1d; left out: that of the newest interval.")
]
Count = Annotated[int, typer.Option(min=1, help="Number of intervals, one after the other.")]
From = Annotated[
    str | None, typer.Option("--from", help="Run a range: start of its first interval, 2024-01-04 or 2024-01-04T06:00.")
]
To = Annotated[str | None, typer.Option("--to", help="Start of the range's last interval, included.")]
Reprocess = Annotated[
    Redo,
    typer.Option(
        help="Which intervals of the range with a result to compute again: changed (code or input differs now), none, all."
    ),
]
ReplaceOverlapping = Annotated[
    bool, typer.Option("--replace-overlapping", help="Replace output of overlapping intervals with other boundaries.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print which intervals would be computed, and why. Compute nothing.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")]
SparkUrl = Annotated[
    str, typer.Option(envvar=Variable.SPARK, help="URL of Spark: sc://host:port, local[2], spark://...")
]
LogLevel = Annotated[
    SparkLog, typer.Option(help="Level of local Spark's own log lines; error prints its stack traces.")
]


def run(
    code: Annotated[str, typer.Argument(help="module:NAME of the Pipeline, as in pipelines.clicks:CLICKS.")],
    root: Annotated[str, typer.Option(envvar=Variable.ROOT, help="URL of the folder that holds all pipelines.")],
    start: First = None,
    every: Every = None,
    count: Count = 1,
    from_: From = None,
    to: To = None,
    reprocess: Reprocess = Redo.changed,
    replace_overlapping: ReplaceOverlapping = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    spark: SparkUrl = LOCAL_SPARK,
    spark_log: LogLevel = SparkLog.OFF,
) -> int:
    """Process and commit intervals of a pipeline here and now, without Airflow.

    With --from and --to, run a range: an interval keeps its result if code and input are unchanged. After a failure,
    the same command continues after the last commit (not with --reprocess all). Without --from and --to, an interval
    that ran before runs again, from the same checkpoint.
    """
    from cairn.command.state_commands import load_code
    from cairn.operations.coordinator_of import coordinator_of
    from cairn.operations.run_intervals import plan_intervals, run_intervals

    asked = _Asked(start=start, from_=from_, to=to, count=count)
    check_no_trial(root, "run")
    pipeline = load_code(code)
    log = coordinator_of(pipeline, root).log()
    completed = log.completed()
    newest = max((record.content.interval for record in completed), key=lambda i: i.end, default=None)
    schedule = None if every is not None else pipeline.declared_schedule or log.schedule
    lengths = [i.end - i.start for i in sorted({record.content.interval for record in completed})[-2:]]
    if schedule is not None:
        intervals = asked.scheduled(schedule, pipeline.start, newest)
        length = intervals[0].end - intervals[0].start
    else:
        if len({*lengths}) > 1 and every is None:
            raise _two_lengths(code, root, newest, lengths)
        length = interval_length(pipeline.name, newest, every)
        if newest is not None and start is None and from_ is None and length not in lengths:
            _check_length(pipeline.name, newest, length, every)
        intervals = asked.intervals(length, newest.end if newest is not None else pipeline.start)
    permissions = Permissions(replace_overlapping=replace_overlapping)
    how = Redo.all if from_ is None else reprocess
    again = _Again(code=code, root=root, every=every, spark=spark, length=length, schedule=schedule)
    # A dry run needs Spark only to ask the source whether its input changed.
    session = None
    if not dry_run or how is Redo.changed:
        session = open_spark(spark, f"cairn run {pipeline.name}", log=spark_log.upper(), silent=as_json)
    if dry_run or session is None:
        with again.printed():
            planned = plan_intervals(session, pipeline, intervals, root, reprocess=how.value, permissions=permissions)
        return _say(planned, as_json)
    lines = _Lines(terminal=sys.stderr.isatty() and not as_json, silent=as_json)
    try:
        with again.printed():
            outcomes = run_intervals(
                session,
                pipeline,
                intervals,
                root,
                reprocess=how.value,
                permissions=permissions,
                on_outcome=lines.show,
            )
    except KeyboardInterrupt as stop:
        raise _stopped(intervals, lines.done, again, permissions, None if how is Redo.all else sys.argv[1:]) from stop
    except UserCodeError as error:
        if spark_log is SparkLog.OFF and not spark.startswith("sc://"):
            error.add_note("For Spark's own stack trace, run the same command with --spark-log error")
        raise
    return _say(outcomes, as_json) if as_json else 0


def _stopped(
    intervals: Sequence[Interval], done: int, again: _Again, permissions: Permissions, same: Sequence[str] | None
) -> Stopped:
    """Return the message after Ctrl-C."""
    said = f"{done} of {len(intervals)} intervals are done; their commits stay"
    if done == len(intervals):
        return Stopped(said)
    rerun = Rerun(
        first=intervals[done].start,
        last=intervals[-1].start,
        replace_overlapping=permissions.replace_overlapping,
    )
    command = again.command(rerun) if same is None else shlex.join(["cairn", *same])
    return Stopped(f"{said}\nTo continue, run:\n{command}")


def _two_lengths(code: str, root: str, newest: Interval | None, lengths: list[timedelta]) -> UsageError:
    command = shlex.join(["cairn", "run", code, "--root", root, "--every", f"{int(lengths[-1].total_seconds())}s"])
    return UsageError(
        f"{code} declares no schedule, and its last two intervals have the lengths {lengths[0]} and {lengths[1]}: Cairn can't tell how "
        "long the next one is\n"
        "Declare the schedule, as in Pipeline(schedule='0 6 * * 1-5'). Or give the length of the next interval:\n"
        f"{command}\n"
        "To begin elsewhere:\n"
        f"{command} --start {format_instant(newest.end) if newest is not None else ''}"
    )


def _check_length(pipeline: str, newest: Interval, length: timedelta, every: str | None) -> None:
    """Raise `UsageError` if `--every` differs from the length of the newest interval.

    Without this check, daily intervals after hourly ones would silently skip 23 of 24 files of a source that reads the
    file of the interval's start.
    """
    if length == newest.end - newest.start:
        return
    raise UsageError(
        f"{pipeline}: --every {every} differs from the length of its newest interval, {newest}\n"
        f"To continue with intervals of {newest.end - newest.start}, leave out --every\n"
        f"To change the length from now on, use --every {every} --start {format_instant(newest.end)}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Intervals that the options ask for: a range from `--from` to `--to`, or `--count` intervals from a start on."""

    start: str | None
    from_: str | None
    to: str | None
    count: int

    def __post_init__(self) -> None:
        if (self.from_ is None) != (self.to is None):
            raise UsageError("give --from and --to together: the starts of the first and of the last interval")
        if self.from_ is not None and (self.start is not None or self.count != 1):
            raise UsageError("--start and --count can't be combined with --from and --to; leave them out")

    def intervals(self, length: timedelta, default_start: datetime) -> tuple[Interval, ...]:
        """Return the intervals that `cairn run` must run.

        With `--from` and `--to`, they are all intervals from the one that starts at `--from` to the one that starts at
        `--to`. Otherwise they are `--count` intervals, and the first of them starts at `--start`.
        """
        from cairn.operations.plan_range import intervals_between, named_intervals

        if self.from_ is not None and self.to is not None:
            return named_intervals(self.from_, self.to, length, ("--from", "--to"))
        at = _instant(self.start) if self.start is not None else default_start
        return intervals_between(at, at + self.count * length, length)

    def scheduled(self, schedule: Schedule, pipeline_start: datetime, newest: Interval | None) -> tuple[Interval, ...]:
        """Return the intervals of a schedule that `cairn run` must run.

        A date without a time in `--from` or `--to` means all intervals that begin on this date, in the schedule's zone.
        """
        from cairn.operations.plan_range import named_intervals

        if self.from_ is not None and self.to is not None:
            return named_intervals(self.from_, self.to, schedule, ("--from", "--to"))
        if self.start is None and newest is not None:
            one = next_interval(schedule, newest)
        else:
            at = _instant(self.start) if self.start is not None else pipeline_start
            begins = interval_from(schedule, at)
            if begins is None:
                raise UsageError(
                    f"{no_boundary(schedule, at)}\nFor an interval outside of the schedule, give its length too: --every"
                )
            one = begins
        row = [one]
        while len(row) < self.count:
            row.append(next_interval(schedule, row[-1]))
        return tuple(row)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Again:
    """Builder of the `cairn run` command that an error message recommends for intervals that must run again first.

    The command repeats the options of the `cairn run` that failed.
    """

    code: str
    root: str
    # Value of `--every`, as text; None if the user left the option out.
    every: str | None
    spark: str
    length: timedelta
    # The schedule, which gives this number; None without one.
    schedule: Schedule | None

    def command(self, rerun: Rerun) -> str:
        """Return the command that runs the intervals from `rerun.first` to `rerun.last`."""
        words = ["cairn", "run", self.code, "--root", self.root, "--start", format_instant(rerun.first)]
        if self.schedule is None:
            count = (rerun.last - rerun.first) // self.length + 1
        else:
            count = sum(1 for _ in starting_between(self.schedule, rerun.first, rerun.last))
        words += ["--count", str(count)] if count > 1 else []
        words += ["--every", self.every] if self.every is not None else []
        words += ["--replace-overlapping"] if rerun.replace_overlapping else []
        # Omit `--spark` if CAIRN_SPARK says the same: the user's terminal still has this variable.
        words += ["--spark", self.spark] if self.spark != (Variable.SPARK.given or LOCAL_SPARK) else []
        return shlex.join(words)

    @contextmanager
    def printed(self) -> Iterator[None]:
        """Add the `cairn run` command for a re-run, as a last line, to the message of a `CairnError` of the block.

        The error's `rerun` names the intervals that must run again first. An error without `rerun` passes unchanged.
        """
        try:
            yield
        except CairnError as error:
            if error.rerun is None:
                raise
            raise type(error)(f"{error}\n{self.command(error.rerun)}") from error


class _Lines:
    """Printer of one line for each interval.

    On a terminal it also prints a line with the progress, which the next interval's line overwrites.
    """

    def __init__(self, *, terminal: bool, silent: bool) -> None:
        self._terminal, self._silent = terminal, silent
        self.done = 0

    def show(self, outcome: Outcome, progress: Progress) -> None:
        """Count an outcome, and print it unless `silent`. `run_intervals` calls this as `on_outcome`."""
        self.done += 1
        if self._silent:
            return
        if self._terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        typer.echo(_line(outcome))
        if self._terminal and progress.done < progress.total:
            sys.stderr.write(str(progress))
            sys.stderr.flush()


def _line(outcome: Outcome) -> str:
    if outcome.record is None:
        return f"{outcome.interval}: {outcome.why}"
    totals = outcome.record.content.totals
    late = sum(file.rows for file in outcome.record.content.outputs if file.late)
    return (
        f"{outcome.interval}: checkpoint {outcome.record.id}, {totals.input_rows:,} rows in, {late:,} of them late, "
        f"{totals.output_rows:,} out, {totals.entries:,} entries of state and timers"
    )


def _say(outcomes: list[Outcome], as_json: bool) -> int:
    if as_json:
        shown = [
            {
                "start": format_instant(o.interval.start),
                "end": format_instant(o.interval.end),
                "computed": o.computed,
                "checkpoint": o.checkpoint,
                "why": o.why,
            }
            for o in outcomes
        ]
        typer.echo(json.dumps(shown, indent=2))
        return 0
    for outcome in outcomes:
        what = "would be computed" if outcome.computed else f"keeps checkpoint {outcome.checkpoint}"
        typer.echo(f"{outcome.interval}: {what}: {outcome.why}")
    computed = sum(outcome.computed for outcome in outcomes)
    typer.echo(f"{computed} of {len(outcomes)} intervals would be computed; nothing was written")
    return 0


def interval_length(pipeline: str, newest: Interval | None, every: str | None) -> timedelta:
    """Return the length that `--every` gives, else the length of the newest interval."""
    if every is not None:
        return parse_duration(every)
    if newest is None:
        raise UsageError(f"{pipeline} has no checkpoint yet; give the length of its intervals, as in --every 1h")
    return newest.end - newest.start


def _instant(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--start {text!r} is not a time; write it as in 2024-01-01T00:00Z") from None
    if found.tzinfo is None:
        raise UsageError(f"--start {text!r} has no time zone; write it as in 2024-01-01T00:00Z")
    return found
