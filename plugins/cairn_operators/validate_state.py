"""Restores a checkpoint and checks what is in it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from airflow.sdk.exceptions import AirflowFailException

from cairn_operators.data_interval import data_interval, is_due
from cairn_operators.driver_operator import DriverOperator


class ValidateStateOperator(DriverOperator):
    """Fails if the restored state of ``checkpoint`` is not what the pipeline expects of it; the driver has quarantined the
    checkpoint then, so that no later interval starts from it. Data Docs are written to ``docs_dir``.

    Every time, the state is restored and proven to be the recorded one, entry by entry. The owner's expectations come with it
    at the intervals that end a whole number of ``expectations_every`` after the DAG's start date; None: always.
    """

    template_fields: Sequence[str] = (*DriverOperator.template_fields, "checkpoint", "docs_dir")

    def __init__(
        self, *, checkpoint: str, docs_dir: str, expectations_every: timedelta | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.checkpoint = checkpoint
        self.docs_dir = docs_dir
        self.expectations_every = expectations_every

    def execute(self, context: Any) -> dict[str, Any]:
        _, end = data_interval(context)
        arguments = ["--checkpoint", str(self.checkpoint), "--docs", self.docs_dir]
        if not is_due(end, context["dag"].start_date, self.expectations_every):
            arguments.append("--without-expectations")
        result = self.run_driver("validate", *arguments)
        if result.get("docs"):
            self.log.info("Data Docs: %s", result["docs"])
        if not result["success"]:
            findings = "\n".join(f"- {finding}" for finding in result["findings"])
            raise AirflowFailException(
                f"checkpoint {self.checkpoint} is refused and quarantined: {len(result['findings'])} finding(s)\n{findings}\n"
                f"Data Docs: {result.get('docs')}\nMend the cause, then clear this run's process task with its downstream."
            )
        return result
