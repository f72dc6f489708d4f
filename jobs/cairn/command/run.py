"""The command `cairn run`: process and commit intervals of a pipeline without Airflow."""

from __future__ import annotations

from cairn.command.options import LOCAL_SPARK, Json, Spark
from cairn.command.printing import print_json
from cairn.command.progress import Stopped
from cairn.command.terminal import Terminal
from cairn.operations.intervals.run_range import run_range
from state_backend.values.airflow_commands import command_line
from state_backend.values.day_or_instant import format_duration
from state_backend.values.environment import Variable
from state_backend.values.errors import CairnError, Rerun, UserCodeError
from state_backend.values.frozen import frozen
from state_backend.values.operation_parameters import RunRange


def run(request: RunRange, spark: Spark = LOCAL_SPARK, as_json: Json = False) -> int:
    """With --to, run a range: an interval keeps its result if code and input are unchanged. After a failure, the same
    command continues after the last commit (not with --reprocess all). Without --to, an interval that ran before runs
    again, from the same checkpoint.
    """
    place = Terminal(spark, silent=as_json)
    again = _Again(request=request, spark=spark)
    try:
        said = run_range(request, place)
    except KeyboardInterrupt as stop:
        if request.dry_run or not place.intervals:
            raise
        raise _explain_stop(place, again) from stop
    except CairnError as error:
        if isinstance(error, UserCodeError) and not Variable.SPARK_LOG.given and not spark.startswith("sc://"):
            error.add_note(f"For Spark's own stack trace, run the same command with {Variable.SPARK_LOG}=error")
        if error.rerun is None:
            raise
        raise type(error)(f"{error}\n{again.command(error.rerun, 'all')}") from error
    return print_json(said) if as_json else 0


def _explain_stop(place: Terminal, again: _Again) -> Stopped:
    done, intervals, request = place.done, place.intervals, again.request
    said = f"{done} of {len(intervals)} intervals are done; their commits stay"
    if done == len(intervals):
        return Stopped(said)
    rest = Rerun(first=intervals[done].start, last=intervals[-1].start, replace_overlapping=request.replace_overlapping)
    reprocess = "all" if request.last is None else request.reprocess
    return Stopped(f"{said}\nTo continue, run:\n{again.command(rest, reprocess)}")


@frozen
class _Again:
    """The call of `cairn run` that a user has typed, which `command` repeats for other intervals of the pipeline."""

    request: RunRange
    spark: str

    def command(self, rerun: Rerun, reprocess: str) -> str:
        asked = self.request
        last = rerun.last
        if asked.every is not None:  # `--to` needs an interval's start, but `rerun.last` may lie inside an interval.
            last = rerun.first + (last - rerun.first) // asked.every * asked.every
        return command_line(
            "run",
            code=asked.code,
            root=asked.root,
            from_=rerun.first,
            to=last,
            every=None if asked.every is None else format_duration(asked.every),
            reprocess=None if reprocess == "changed" else reprocess,
            replace_overlapping=rerun.replace_overlapping,
            # Left out if CAIRN_SPARK or the default gives the same, since the user's terminal still has the variable.
            spark=None if self.spark == (Variable.SPARK.given or LOCAL_SPARK) else self.spark,
        )
