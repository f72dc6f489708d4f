"""The place where a request is carried out: the terminal of `cairn`, or the driver process of an Airflow task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from cairn.pipeline import Interval, Pipeline
from state_backend.values.errors import UsageError
from state_backend.values.operation_parameters import OfCode

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cairn.operations.intervals.plan_range import Progress
    from cairn.operations.intervals.run_intervals import Outcome


class Place(Protocol):
    """The place of one request: it loads the request's code, opens its Spark session, and shows its lines."""

    # Spark's configuration for a session that the request opens.
    conf: Mapping[str, str]

    def load(self, request: OfCode) -> Pipeline: ...

    def connect(self, pipeline: Pipeline, what: str, *, own_workers: bool = False) -> SparkSession: ...

    def say(self, text: str) -> None:
        """Show a line: on the terminal, or in the log of a task."""

    def tell_plan(self, intervals: Sequence[Interval]) -> None:
        """Receive the intervals that will run, before the first one runs."""

    def watching(self, spark: SparkSession) -> AbstractContextManager[None]:
        """Show the progress of the session's tasks while the context is open."""

    def on_outcome(self, outcome: Outcome, progress: Progress) -> None: ...


def check_name(pipeline: Pipeline, request: OfCode) -> Pipeline:
    if request.pipeline not in (None, pipeline.name):
        raise UsageError(
            f"{request.code} is named {pipeline.name!r}, but {request.pipeline!r} is expected: by the task's pipeline in Airflow, "
            "at the command line by --pipeline or CAIRN_PIPELINE; make them the same"
        )
    return pipeline
