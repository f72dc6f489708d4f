"""The operator that deletes files of crashed and lost attempts, and expired trials. It needs no Spark."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from airflow.sdk import BaseOperator

from cairn_operators.data_interval import skip_unless_due
from cairn_operators.failures import convert_errors
from cairn_operators.request_of import request_of
from cairn_operators.storage_connection import as_storage_identity

_DOC = """Deletes files that crashed and lost attempts left behind, and trials whose time is over. A file that any record names stays.
The task may run beside the pipeline. If it can't be sure about a file, it deletes nothing. The log lists the deleted files.
"""


class SweepStateOperator(BaseOperator):  # type: ignore[misc]  # Airflow is not type-checked here
    """The task that deletes files of crashed and lost attempts, and trials whose time is over.

    The task may run beside the pipeline. If an attempt has written nothing for `min_age`, the task first records in the
    log that the attempt is abandoned, and then deletes its files. So the attempt can't be committed later.

    Args:
        pipeline: Name of the `Pipeline`.
        root: URL of the folder that holds the pipelines.
        min_age: Age below which files of an unfinished attempt stay.
        dry_run: Log the files that would be deleted; delete none.
        cadence: Sweep only at intervals that end a whole number of this span after the DAG's start date; None for all.
        storage_conn_id: Connection of type `google_cloud_platform`, `aws` or `wasb` for the root. None: the host's own
            identity.
        **kwargs: More arguments of Airflow's `BaseOperator`.
    """

    template_fields: Sequence[str] = ("pipeline", "root", "storage_conn_id")
    ui_color = "#dcdcdc"

    def __init__(
        self,
        *,
        pipeline: str,
        root: str,
        min_age: timedelta = timedelta(days=3),
        dry_run: bool = False,
        cadence: timedelta | None = None,
        storage_conn_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{"doc_md": _DOC, **kwargs})
        self.pipeline = pipeline
        self.root = root
        self.min_age = min_age
        self.storage_conn_id = storage_conn_id
        self.only_plan = dry_run  # Airflow's `BaseOperator` has a method `dry_run`.
        self.cadence = cadence

    def execute(self, context: Any) -> dict[str, Any]:
        """Sweep the pipeline's folder, or skip the task if it is not due."""
        skip_unless_due(context, self.cadence, "sweeps run")
        from state_backend.checkpoint.sweep_files import lines_of_sweep, sweep_all
        from state_backend.values.operation_parameters import Sweep

        with as_storage_identity(self.storage_conn_id), convert_errors(self):
            swept = sweep_all(request_of(Sweep, self, dry_run=self.only_plan))
        for line in lines_of_sweep(swept, files=True):
            self.log.info("%s", line)
        # The result has counts in place of lists, because a long list would make a large XCom.
        return swept | {name: len(swept[name]) for name in ("planned", "shrunk", "unknown", "rebuilt")}
