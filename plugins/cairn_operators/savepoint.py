"""The operator that copies a checkpoint into a savepoint, which belongs to the user."""

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
        pipeline: The `Pipeline`, as `module:NAME`.
        root: URL of the folder that holds the pipelines.
        checkpoint: Id of the checkpoint.
        folder: URL of the new folder.
        format: "native" for compacted SST files. "canonical" for Parquet, which any tool reads and any max parallelism
            restores.
        cadence: Take a savepoint only at intervals that end a whole number of this span after the DAG's start date; None
            for all.
        consolidate: First rewrite the checkpoint without deleted and replaced entries, as a checkpoint of its own.
            Later intervals start from this rewritten checkpoint.
        **kwargs: More arguments of `DriverOperator` and Airflow's `BaseOperator`.
    """

    template_fields: Sequence[str] = (*DriverOperator.template_fields, "checkpoint", "folder")

    def __init__(
        self,
        *,
        checkpoint: str | XComArg,
        folder: str,
        format: Literal["native", "canonical"] = "native",
        cadence: timedelta | None = timedelta(days=7),
        consolidate: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.format = format
        self.checkpoint = checkpoint
        self.folder = folder
        self.cadence = cadence
        self.consolidate = consolidate

    def is_due_at(self, end: datetime, start: datetime) -> bool:
        """Return True if the task takes a savepoint after an interval that ends at `end`.

        `CommitCheckpointOperator` asks this too, so that Airflow does not start a task that is not due.

        Args:
            end: End of the interval.
            start: Start date of the DAG.
        """
        return is_due(end, start, self.cadence)

    def execute(self, context: Any) -> dict[str, Any]:
        """Take the savepoint in a driver, or skip the task if no savepoint is due.

        Returns:
            The driver's result, with the checkpoint's id and the savepoint's folder.

        Raises:
            AirflowSkipException: No savepoint is due after this interval.
            AirflowException: Storage or Spark failed, and a retry may help.
            AirflowFailException: A retry can't help.
        """
        _, end = data_interval(context)
        if not self.is_due_at(end, context["dag"].start_date):
            raise AirflowSkipException(f"savepoints are taken every {self.cadence}; none is due at {end.isoformat()}")
        from state_backend.values.requests import TakeSavepoint

        request = TakeSavepoint(
            **self.of_code(),
            checkpoint=str(self.checkpoint),
            folder=self.folder,
            format=self.format,
            consolidate=self.consolidate,
        )
        return self.run_driver(request)
