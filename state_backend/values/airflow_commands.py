"""The command lines for a DAG, as messages print them. Text only: who knows the DAG calls these, and nothing below does.

They are read so, each tried against a real Airflow 3.3.2 (tests/integration/test_airflow.py):

* ``cairn backfill`` and not ``airflow backfill create``, which fails while another backfill of the DAG has not ended: both dates are
  logical dates, included; a scheduled run has its interval's start as logical date. Its defaults are one run at a time, and that runs
  which have ended run again.
* ``tasks clear -t TEXT``: every task whose id contains the text, though the help says that it is a regular expression. With
  ``-d`` also what follows from it, so that the first task is all that has to be named.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection
from datetime import datetime

from state_backend.values.errors import Rerun
from state_backend.values.intervals import format_instant

DEFAULT_AIRFLOW = "http://127.0.0.1:8080"
"""The Airflow that `cairn backfill` calls if neither ``--airflow`` nor CAIRN_AIRFLOW names one."""


def backfill_command(dag_id: str, again: Rerun, airflow: str | None = None) -> str:
    """The command that runs these intervals, also those that have run, one after the other.

    Args:
        dag_id: The DAG of the pipeline.
        again: The intervals.
        airflow: The URL of Airflow; the command names the URL unless it is `DEFAULT_AIRFLOW`.
    """
    words = [
        "cairn",
        "backfill",
        "--dag",
        dag_id,
        "--from",
        format_instant(again.first),
        "--to",
        format_instant(again.last),
    ]
    if again.replace_overlapping:
        words.append("--replace-overlapping")
    if airflow is not None and airflow.rstrip("/") not in (DEFAULT_AIRFLOW, "http://localhost:8080"):
        words += ["--airflow", airflow]
    return shlex.join(words)


def clear_command(dag_id: str, task_id: str, logical_date: datetime, others: Collection[str] = ()) -> str:
    """The command that clears a task of one run and all that follows from it. ``others``: the ids of the DAG's other tasks that do
    not follow from it; those that Airflow takes for the same are named, since the command clears them too."""
    day = logical_date.isoformat()
    text = shlex.join(["airflow", "tasks", "clear", dag_id, "-t", task_id, "-d", "-s", day, "-e", day, "-y"])
    same = sorted(other for other in others if task_id in other and other != task_id)
    if same:
        text += f"\n(it clears {', '.join(same)} too: Airflow takes every task whose name contains {task_id!r})"
    return text


def with_command(message: str, dag_id: str, again: Rerun | None) -> str:
    """The message with, on a line of its own, the command that runs again what it asks for."""
    return message if again is None else f"{message}\n{backfill_command(dag_id, again)}"
