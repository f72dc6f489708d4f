"""Values that a task hands to later tasks, as with `process.output["attempt"]` in a DAG file."""

from __future__ import annotations

from typing import Any

from airflow.sdk.definitions.xcom_arg import PlainXComArg


def push_outputs(context: Any, **values: Any) -> None:
    """Push each value as an XCom with its own key, which a DAG file reads as `task.output[key]`.

    Airflow's `multiple_outputs` is not used, since it would push every field of the task's result.
    """
    for key, value in values.items():
        context["ti"].xcom_push(key=key, value=value)


def task_of(value: Any) -> Any | None:
    """Return the task whose output `value` is, or None if `value` is no output of a task."""
    return value.operator if isinstance(value, PlainXComArg) else None
