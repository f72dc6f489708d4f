"""Writes a copy of the state that belongs to the user."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

from airflow.sdk import XComArg
from airflow.sdk.exceptions import AirflowSkipException

from cairn_operators.data_interval import data_interval, is_due
from cairn_operators.driver_operator import DriverOperator


class SavepointOperator(DriverOperator):
    """The task that copies a checkpoint into a savepoint: a self-contained folder that Cairn never deletes.

    Args:
        checkpoint: Id of the checkpoint.
        to: URL of the new folder.
        format: "native" for compacted SST files. "canonical" for Parquet, which any tool reads and any max parallelism restores.
        every: Take a savepoint only at intervals that end a whole number of this span after the DAG's start date; None for all.
        consolidate: Rewrite the checkpoint without obsolete entries first. Intervals that begin later start from the rewritten checkpoint.
    """

    template_fields: Sequence[str] = (*DriverOperator.template_fields, "checkpoint", "to")

    def __init__(
        self,
        *,
        checkpoint: str | XComArg,
        to: str,
        format: Literal["native", "canonical"] = "native",
        every: timedelta | None = timedelta(days=7),
        consolidate: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.format = format
        self.checkpoint = checkpoint
        self.to = to
        self.every = every
        self.consolidate = consolidate

    def is_due_at(self, end: datetime, start: datetime) -> bool:
        """Whether one is taken for an interval that ends then. The checkpoint's task asks too, so that what is not due is never started."""
        return is_due(end, start, self.every)

    def execute(self, context: Any) -> dict[str, Any]:
        """Takes the savepoint, or skips where none is due."""
        _, end = data_interval(context)
        if not self.is_due_at(end, context["dag"].start_date):
            raise AirflowSkipException(f"a savepoint is taken every {self.every}, and not at {end.isoformat()}")
        from cairn.driver.driver_protocol import TakeSavepoint

        request = TakeSavepoint(
            checkpoint=str(self.checkpoint), to=self.to, format=self.format, consolidate=self.consolidate
        )
        return self.run_driver(request)
