"""Build a request from the arguments of a task and from its run."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


def run_of(context: Any) -> Any:
    from state_backend.values.records import RunRef

    run = context["dag_run"]
    return RunRef(run_id=run.run_id, clear_number=run.clear_number or 0, try_number=context["ti"].try_number)


def request_of(kind: type[Any], task: Any, **others: Any) -> Any:
    """Build a request of class `kind`: fields from `others`, else from attributes of `task`, else the defaults."""
    # `vars` skips methods: Airflow's `BaseOperator` has methods with the name of a field, such as `dry_run`.
    given = {field.name: vars(task)[field.name] for field in fields(kind) if field.name in vars(task)}
    return kind(**given | others)
