"""Restores a checkpoint and checks what is in it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from cairn_operators.data_interval import data_interval, is_due
from cairn_operators.driver_operator import DriverOperator


class ValidateStateOperator(DriverOperator):
    """Fails if the restored state of ``checkpoint`` is not what the pipeline expects of it; the driver has quarantined the
    checkpoint then, so that no later interval starts from it. Data Docs are written to ``docs_dir``.

    ``every`` validates only the intervals that end a whole number of it after the DAG's start date; None all of them.
    """

    template_fields: Sequence[str] = (*DriverOperator.template_fields, "checkpoint", "docs_dir")

    def __init__(self, *, checkpoint: str, docs_dir: str, every: timedelta | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.checkpoint = checkpoint
        self.docs_dir = docs_dir
        self.every = every

    def execute(self, context: Any) -> dict[str, Any]:
        _, end = data_interval(context)
        if not is_due(end, context["dag"].start_date, self.every):
            raise AirflowSkipException(f"validated every {self.every}, and not at {end.isoformat()}")
        result = self.run_driver("validate", "--checkpoint", str(self.checkpoint), "--docs", self.docs_dir)
        self.log.info("Data Docs: %s", result.get("docs"))
        if not result["success"]:
            findings = "\n".join(f"- {finding}" for finding in result["findings"])
            raise AirflowFailException(
                f"checkpoint {self.checkpoint} is refused and quarantined: {len(result['findings'])} finding(s)\n{findings}\n"
                f"Data Docs: {result.get('docs')}\nMend the cause, then clear this run's process task with its downstream."
            )
        return result
