"""Names of Airflow that only tests use, and the skip of a test whose Airflow lacks something."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from airflow import __version__

from cairn_operators.airflow_versions import DIFFERENCES, has

if has("airflow.sdk.exceptions"):
    from airflow.sdk.exceptions import TaskDeferred
else:
    from airflow.exceptions import TaskDeferred

if has("airflow.sdk.exceptions"):  # Both came with 3.2.
    from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db
    from airflow.serialization.serialized_objects import DagSerialization
else:
    from airflow.models.dagbag import DagBag, sync_bag_to_db
    from airflow.serialization.serialized_objects import SerializedDAG as DagSerialization

if has("waiting for input"):
    from airflow.sdk.exceptions import TaskAwaitingInput as TaskAsking
else:
    TaskAsking = TaskDeferred

if has("timetables in airflow.sdk"):
    from airflow.sdk import CronTriggerTimetable
else:
    from airflow.timetables.trigger import CronTriggerTimetable

# State of a task that waits for a person.
ASKING = "awaiting_input" if has("waiting for input") else "deferred"
# Where a DAG file finds the classes of deadlines.
DEADLINES = "airflow.sdk" if has("deadlines in airflow.sdk") else "airflow.sdk.definitions.deadline"

if has("retry policy"):
    from airflow.sdk import RetryAction
else:
    RetryAction = None

__all__ = [
    "ASKING",
    "DEADLINES",
    "CronTriggerTimetable",
    "DagSerialization",
    "RetryAction",
    "TaskAsking",
    "TaskDeferred",
    "as_object",
    "needs",
    "store_dags",
]


def needs(name: str) -> pytest.MarkDecorator:
    """Skip a test whose Airflow lacks what `DIFFERENCES` calls `name`."""
    first, second = DIFFERENCES[name].since
    return pytest.mark.skipif(
        not has(name), reason=f"{name}: since Airflow {first}.{second}, and this is {__version__}"
    )


def store_dags(folder: str) -> None:
    """Read the DAG files of a folder, and write the DAGs into Airflow's database, as its DAG processor does."""
    named = {"bundle_name": "dags-folder"} if has("airflow.sdk.exceptions") else {}  # since 3.2
    bag = DagBag(bundle_path=Path(folder), dag_folder=folder, **named)
    assert not bag.import_errors, bag.import_errors
    sync_bag_to_db(bag, "dags-folder", None)


def as_object(shown: Any) -> Any:
    """Airflow 3.1 shows settings as a text, in which hidden values have no quotes."""
    return ast.literal_eval(shown.replace(": ***", ": '***'")) if isinstance(shown, str) else shown
