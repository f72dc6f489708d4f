"""The terminal as the place that carries out a request: how it starts Spark, and what it prints."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

import typer

from cairn.command.open_spark import open_spark
from cairn.command.progress import progress
from cairn.operations.place import check_name
from cairn.pipeline import Interval, Pipeline
from state_backend.values.operation_parameters import OfCode

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cairn.operations.intervals.plan_range import Progress
    from cairn.operations.intervals.run_intervals import Outcome


class Terminal:
    """The place that carries out a request which a person has typed. `silent`: Print nothing on stdout."""

    conf: Mapping[str, str] = MappingProxyType({})

    def __init__(self, spark: str, *, silent: bool = False) -> None:
        self._spark, self._silent = spark, silent
        self._rewrites = sys.stderr.isatty() and not silent
        self.intervals: Sequence[Interval] = ()
        self.done = 0

    def load(self, request: OfCode) -> Pipeline:
        return check_name(load_code(request.code), request)

    def connect(self, pipeline: Pipeline, what: str, *, own_workers: bool = False) -> SparkSession:
        app = f"cairn {what} {pipeline.name}"
        return open_spark(self._spark, app, own_workers=own_workers, silent=self._silent)

    def say(self, text: str) -> None:
        if not self._silent:
            typer.echo(text)

    def tell_plan(self, intervals: Sequence[Interval]) -> None:
        """Remember which intervals will run, in order. The message after Ctrl-C names those that have not run."""
        self.intervals = intervals

    @contextmanager
    def watching(self, spark: SparkSession) -> Iterator[None]:
        from cairn.spark.task_progress import task_progress

        with progress("copying", "shards") as on_progress, task_progress(spark, on_progress):
            yield

    def on_outcome(self, outcome: Outcome, progress: Progress) -> None:
        """Print a line about the interval. On a terminal, a line with the progress follows, to be overwritten."""
        self.done += 1
        if self._rewrites:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        self.say(_line(outcome))
        if self._rewrites and progress.done < progress.total:
            sys.stderr.write(str(progress))
            sys.stderr.flush()


def load_code(code: str) -> Pipeline:
    """Load the pipeline that `module:NAME` names. Modules of the current folder can be imported."""
    from cairn.driver.load_pipeline import load_pipeline

    if "" not in sys.path:
        sys.path.insert(0, "")  # Import modules of the current folder, as `python -m` does.
    return load_pipeline(code)


def _line(outcome: Outcome) -> str:
    if outcome.record is None or not outcome.computed:
        return f"{outcome.interval}: {outcome.why}"
    totals = outcome.record.content.totals
    late = sum(file.rows for file in outcome.record.content.outputs if file.late)
    return (
        f"{outcome.interval}: checkpoint {outcome.record.id}, {totals.input_rows:,} rows in, {late:,} of them late, "
        f"{totals.output_rows:,} out, {totals.entries:,} entries of state and timers"
    )
