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


def command_line(command: str, *arguments: object, **options: object) -> str:
    """Return a command line of `cairn`, quoted for a shell. An option that is None or False is left out.

    Each keyword argument is an option: `from_=value` gives `--from value`. True gives the option without a value.
    """
    words = ["cairn", *command.split(), *map(_text, arguments)]
    for name, value in options.items():
        if value is None or value is False:
            continue
        words.append("--" + name.rstrip("_").replace("_", "-"))
        if value is not True:
            words.append(_text(value))
    return shlex.join(words)


def _text(value: object) -> str:
    return format_instant(value) if isinstance(value, datetime) else str(value)


def backfill_command(dag_id: str, again: Rerun, airflow: str | None = None) -> str:
    """Return the command that runs the intervals in `again` in order, even if some ran before. `airflow`: its URL."""
    return command_line(
        "backfill",
        dag=dag_id,
        from_=again.first,
        to=again.last,
        replace_overlapping=again.replace_overlapping,
        airflow=_address(airflow),
    )


def _address(airflow: str | None) -> str | None:
    usual = (None, Variable.AIRFLOW.default, "http://localhost:8080")
    return None if airflow is None or airflow.rstrip("/") in usual else airflow


def heal_command(
    root: str,
    pipeline: str,
    to: str | datetime,
    dag_id: str | None = None,
    airflow: str | None = None,
    *,
    code: str | None = None,
    chain: bool = False,
) -> str:
    """Return the `cairn heal` command that runs all stale, failed, quarantined and missing intervals up to `to`.

    Callers with a DAG pass `dag_id`: without `--dag`, `cairn heal` uses Airflow only if the newest interval ran there.
    `airflow`: URL of Airflow's API. `code`: run without Airflow, with this module:NAME. `chain`: heal upstreams first.
    """
    at = _address(airflow)
    return command_line("heal", root=root, pipeline=pipeline, to=to, code=code, dag=dag_id, airflow=at, chain=chain)


def repair_command(
    root: str,
    pipeline: str,
    again: Rerun,
    *,
    dag_id: str | None = None,
    code: str | None = None,
    airflow: str | None = None,
    chain: bool = False,
) -> str:
    """Return a command that runs the intervals in `again` once more: `cairn heal`, which repairs earlier intervals too.

    For intervals that `cairn heal` can't run, the command is `cairn backfill` or, without a DAG, `cairn run`.
    `airflow`: URL of Airflow's API. `code`: module:NAME, to run without Airflow. `chain`: heal the upstreams first.
    """
    if not (again.replace_overlapping or again.though_valid):
        return heal_command(root, pipeline, again.last, dag_id, airflow, code=code, chain=chain)
    # `cairn heal` runs no interval with a valid result, and replaces no output of intervals with other boundaries.
    if dag_id is not None:
        return backfill_command(dag_id, again, airflow)
    return command_line(
        "run",
        code=code,
        root=root,
        from_=again.first,
        to=again.last,
        reprocess="all",
        replace_overlapping=again.replace_overlapping,
    )


def clear_command(dag_id: str, task_id: str, logical_date: datetime, others: Collection[str] = ()) -> str:
    """Return Airflow's command that clears a task of one run together with its downstream tasks.

    The command clears every task whose id contains `task_id`. A second line names such ids among `others`.
    """
    day = logical_date.isoformat()
    text = shlex.join(["airflow", "tasks", "clear", dag_id, "-t", task_id, "-d", "-s", day, "-e", day, "-y"])
    same = sorted(other for other in others if task_id in other and other != task_id)
    if same:
        text += f"\n(this also clears {', '.join(same)}: Airflow clears every task whose id contains {task_id!r})"
    return text
