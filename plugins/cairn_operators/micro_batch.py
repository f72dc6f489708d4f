"""One data interval as one Spark micro-batch."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Literal

from airflow.sdk.exceptions import AirflowFailException

from cairn_operators.data_interval import data_interval
from cairn_operators.driver_operator import DriverOperator


class StatefulMicroBatchOperator(DriverOperator):
    """Restores the state that the data interval starts from, processes the interval, uploads what changed. Nothing is
    committed: that is for `IncrementalCheckpointOperator`, which takes the returned ``attempt``.

    ``mode``: incremental, full or changelog. ``allow_gap`` starts from the latest checkpoint before the interval if none
    ends where it starts; ``allow_stale_base`` starts from a checkpoint that a later re-run made stale. Both may be
    templates, so that one run can be given the permission and not all.
    """

    template_fields: Sequence[str] = (*DriverOperator.template_fields, "mode", "allow_gap", "allow_stale_base")

    def __init__(
        self,
        *,
        mode: Literal["incremental", "full", "changelog"] = "incremental",
        allow_gap: bool | str = False,
        allow_stale_base: bool | str = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.mode = mode
        self.allow_gap = allow_gap
        self.allow_stale_base = allow_stale_base

    def execute(self, context: Any) -> dict[str, Any]:
        start, end = data_interval(context)
        run, ti = context["dag_run"], context["ti"]
        # A new one for every try: a lost try may still be writing, and the attempt scopes all that it writes.
        attempt = str(uuid.uuid4())
        arguments = ["--start", start.isoformat(), "--end", end.isoformat(), "--mode", self.mode]
        arguments += ["--run-id", run.run_id, "--clear-number", str(run.clear_number or 0)]
        arguments += ["--try-number", str(ti.try_number), "--attempt", attempt]
        arguments += ["--allow-gap"] if _granted("allow_gap", self.allow_gap) else []
        arguments += ["--allow-stale-base"] if _granted("allow_stale_base", self.allow_stale_base) else []
        return {**self.run_driver("process", *arguments), "attempt": attempt}


def _granted(name: str, value: bool | str) -> bool:
    """A permission, perhaps rendered from a template. Only a clear yes is one."""
    text = str(value).strip().lower()
    if text not in ("true", "false", ""):
        raise AirflowFailException(f"{name} is {value!r}; expected true or false")
    return text == "true"
