"""A question in Airflow's Required Actions, of an operator that parks its task until a person has answered."""

from __future__ import annotations

import re
from typing import Any

APPROVE, REJECT = "Approve", "Reject"


def ask_person(context: Any, subject: str, text: str) -> None:
    """Asks whether to go on. ``text``: lines that the person reads before. The caller parks the task."""
    from airflow.sdk.execution_time.hitl import upsert_hitl_detail

    upsert_hitl_detail(
        ti_id=context["ti"].id,
        options=[APPROVE, REJECT],
        subject=subject,
        body=as_markdown(text),
        params={},  # Airflow's API takes no None here
    )


def as_markdown(text: str) -> str:
    """Lines as items of a list, indented ones below the line before them, each as code. Airflow's UI puts the lines of a code block, and of a
    paragraph, behind one another."""
    items: list[str] = []
    for line in filter(str.strip, text.splitlines()):
        words = line.strip()
        # A fence longer than any that is within; with spaces, which do not count, where the text begins or ends with one.
        fence = "`" * (1 + max((len(run) for run in re.findall("`+", words)), default=0))
        within = f" {words} " if "`" in (words[0], words[-1]) else words
        below = bool(items) and line.startswith(" ")
        items.append(f"{'  ' if below else ''}- {fence}{within}{fence}")
    return "\n".join(items)
