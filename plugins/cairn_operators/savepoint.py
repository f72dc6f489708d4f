"""The operator that copies a checkpoint into a savepoint, which belongs to the user."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

from airflow.sdk import XComArg

from cairn_operators.data_interval import skip_unless_due
from cairn_operators.driver_operator import DriverOperator
from cairn_operators.request_of import request_of


class SavepointOperator(DriverOperator):
    """The task that copies a checkpoint into a savepoint: a self-contained folder that Cairn never deletes.

    Args:
        code: The `Pipeline`, as `module:NAME`.
        root: URL of the folder that holds the pipelines.
        checkpoint: Id of the checkpoint.
        folder: URL of the new folder.
        format: "native" for compacted SST files. "canonical" for Parquet, which any tool reads and any max parallelism
            restores.
        cadence: Take a savepoint only at intervals that end a whole number of this span after the DAG's start date;
            None for all.
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

    def execute(self, context: Any) -> dict[str, Any]:
        """Take the savepoint in a driver, or skip the task if no savepoint is due."""
        skip_unless_due(context, self.cadence, "savepoints are taken")
        from state_backend.values.operation_parameters import TakeSavepoint

        return self.run_driver(request_of(TakeSavepoint, self, checkpoint=str(self.checkpoint)))
