"""The command lines for a DAG, as error messages and pages print them.

These functions only format text. Their callers know the DAG's id, which the state backend does not know.

Each command was run against a real Airflow 3.3.2 (tests/integration/test_airflow.py):

* The text names `cairn backfill` instead of `airflow backfill create`, because Airflow refuses to create a backfill
  while another backfill of the DAG is running. `cairn backfill` takes two logical dates, both included. A scheduled
  run's logical date is its interval's start. By default, `cairn backfill` executes one run at a time and repeats runs
  that have already ended.
* `airflow tasks clear -t TEXT` clears every task whose id contains TEXT, although its help calls TEXT a regular
  expression. With `-d` the command also clears the downstream tasks, so the command line needs to name only the first
  task.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection
from datetime import datetime

from state_backend.values.environment import Variable
from state_backend.values.errors import Rerun
from state_backend.values.intervals import format_instant


def backfill_command(dag_id: str, again: Rerun, airflow: str | None = None) -> str:
    """Return the command that runs the given intervals in order, including intervals that have already run."""
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
    return shlex.join([*words, *_address(airflow)])


def _address(airflow: str | None) -> list[str]:
    usual = (None, Variable.AIRFLOW.default, "http://localhost:8080")
    return [] if airflow is None or airflow.rstrip("/") in usual else ["--airflow", airflow]


def heal_command(
    root: str,
    pipeline: str,
    to: str,
    dag_id: str | None = None,
    airflow: str | None = None,
    *,
    code: str | None = None,
) -> str:
    """Return the command that runs all stale, failed, quarantined and missing intervals in order."""
    words = ["cairn", "heal", "--root", root, "--pipeline", pipeline, "--to", to]
    if code is not None:
        words += ["--code", code]
    if dag_id is not None and dag_id != pipeline:
        words += ["--dag", dag_id]
    return shlex.join([*words, *_address(airflow)])


def local_command(root: str, pipeline: str, again: Rerun, code: str) -> str:
    """Return the command that runs the given intervals again, in order, without Airflow."""
    last = format_instant(again.last)
    if not again.replace_overlapping:
        return heal_command(root, pipeline, last, code=code)
    # `cairn heal` replaces no output of intervals with other boundaries.
    words = ["cairn", "run", "--code", code, "--root", root, "--from", format_instant(again.first), "--to", last]
    return shlex.join([*words, "--reprocess", "all", "--replace-overlapping"])


def clear_command(dag_id: str, task_id: str, logical_date: datetime, others: Collection[str] = ()) -> str:
    """Return the command that clears a task of one run together with its downstream tasks.

    The text warns about unrelated tasks that the command clears too, because Airflow matches tasks by a part of their
    id.
    """
    day = logical_date.isoformat()
    text = shlex.join(["airflow", "tasks", "clear", dag_id, "-t", task_id, "-d", "-s", day, "-e", day, "-y"])
    same = sorted(other for other in others if task_id in other and other != task_id)
    if same:
        text += f"\n(this also clears {', '.join(same)}: Airflow clears every task whose id contains {task_id!r})"
    return text


def with_command(message: str, dag_id: str, again: Rerun | None) -> str:
    """Return the message, followed on a new line by the command that runs `again`."""
    return message if again is None else f"{message}\n{backfill_command(dag_id, again)}"
