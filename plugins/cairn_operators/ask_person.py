"""Ask a person a question in Airflow's Required Actions, for an operator whose task waits for the answer."""

from __future__ import annotations

import re
from typing import Any

APPROVE, REJECT = "Approve", "Reject"


def ask_person(context: Any, subject: str, text: str) -> None:
    """Ask a person to approve or reject. The calling operator then defers its task until the answer."""
    from airflow.sdk.execution_time.hitl import upsert_hitl_detail

    upsert_hitl_detail(
        ti_id=context["ti"].id,
        options=[APPROVE, REJECT],
        subject=subject,
        body=as_markdown(text),
        params={},  # Airflow's API refuses None here.
    )


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
