"""Ask a person a question in Airflow's Required Actions, for an operator whose task waits for the answer."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any, NoReturn

from cairn_operators.airflow_versions import AirflowFailException, say_lacks, wait_for_answer

APPROVE, REJECT = "Approve", "Reject"


def ask_person(
    task: Any, context: Any, subject: str, text: str, asked: dict[str, Any], timeout: timedelta | None
) -> NoReturn:
    """Ask a person to approve or reject, and end the task's process until the person has answered.

    `subject`, `text`: Title and text of the question. `asked`: Arguments of `task.after_answer`, which Airflow calls
    after the answer. `timeout`: Longest wait; None for no limit.
    """
    from airflow.sdk.execution_time.hitl import upsert_hitl_detail

    upsert_hitl_detail(
        ti_id=context["ti"].id,
        options=[APPROVE, REJECT],
        subject=subject,
        body=as_markdown(text),
        params={},  # Airflow's API refuses None here.
    )
    task.log.info("waiting, without a worker slot, for a person to answer under Required Actions in the UI")
    say_lacks(task.log, "waiting for input", "task state store")
    wait_for_answer(task, context["ti"].id, [APPROVE, REJECT], asked, timeout)


def agreed_before(context: Any, key: str) -> Any:
    """Return the `asked` to which a person agreed before, since the run was last cleared; None if nobody has agreed."""
    store = context.get("task_state_store")
    return None if store is None else store.get(agreed_key(context, key))


def check_approved(context: Any, event: dict[str, Any], what: str, done: str, key: str, asked: Any) -> str:
    """Return the name of the person who approved, by the answer in `event`. Raise `AirflowFailException` if nobody did.

    An approval stores `asked` under `key`: a retry gets it from `agreed_before`, and does not ask again. `what`,
    `done`: Words of the error, as in "promotion" and "promoted".
    """
    if "error" in event:
        raise AirflowFailException(f"no person has answered: {event.get('error_type')}; nothing is {done}")
    who = str((event.get("responded_by_user") or {}).get("name", "somebody"))
    if event["chosen_options"] != [APPROVE]:
        raise AirflowFailException(f"{who} has rejected the {what}; nothing is {done}")
    if (store := context.get("task_state_store")) is not None:
        store.set(agreed_key(context, key), asked)
    return who


def agreed_key(context: Any, key: str) -> str:
    return f"{key}_{context['dag_run'].clear_number or 0}"


def as_markdown(text: str) -> str:
    """Format text as a Markdown list: each line becomes an item, formatted as code.

    An indented line becomes an item below the line before it. Without a list, Airflow's UI would show all lines of a
    paragraph or a code block as one line.
    """
    items: list[str] = []
    for line in filter(str.strip, text.splitlines()):
        words = line.strip()
        # Markdown needs a fence with more backticks than any run of backticks in the line. A line that begins or ends
        # with a backtick gets a space at each end, which Markdown does not show.
        fence = "`" * (1 + max((len(run) for run in re.findall("`+", words)), default=0))
        within = f" {words} " if "`" in (words[0], words[-1]) else words
        below = bool(items) and line.startswith(" ")
        items.append(f"{'  ' if below else ''}- {fence}{within}{fence}")
    return "\n".join(items)
