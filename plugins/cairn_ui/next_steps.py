"""Decide which next step an empty page or an error page names: a link, a command that works, or both."""

from __future__ import annotations

import shlex
from typing import NamedTuple
from urllib.parse import quote

from cairn_ui.pipelines_of_dags import PipelineRef
from state_backend.values.airflow_runs import DagSchedule
from state_backend.values.intervals import Interval, format_instant


class Step(NamedTuple):
    text: str
    # A command to copy; None without one.
    command: str | None = None
    # Text of a link; None without one.
    link: str | None = None
    href: str = "/"
    airflow: bool = False


class Refusal(NamedTuple):
    """The heading and the next step of an error page."""

    heading: str
    step: Step


def _to_list(text: str) -> Step:
    return Step(text, link="All pipelines")


_REFUSALS = {
    401: Refusal(
        "You are not logged in",
        Step("Log in to Airflow, then open this page again.", link="Open Airflow", airflow=True),
    ),
    403: Refusal(
        "You may not see this",
        _to_list("Ask the administrator of Airflow for the right to read the DAG."),
    ),
    404: Refusal("Not found", _to_list("Look for it in the list.")),
    422: Refusal("The address of this page has a wrong value", _to_list("Begin again from the list.")),
}
_FAILED = Refusal(
    "The page failed",
    _to_list("The log of Airflow's API server has the error. Reload the page to try again."),
)


def after_error(status: int, ref: PipelineRef | None = None) -> Refusal:
    found = _REFUSALS.get(status, _FAILED)
    if status == 404 and ref is not None:
        step = Step("Look for it in the history.", link=f"History of {ref.name}", href=f"/p/{quote(ref.key)}/history")
        found = Refusal(found.heading, step)
    return found


def after_failed_read(ref: PipelineRef) -> Step | None:
    """Return the next step if a pipeline's storage can't be read; None if the pages don't know the folder's URL."""
    if ref.unreadable:
        return None
    return Step("To try the same read on the host of the API server, run:", command=_status(ref))


def _status(ref: PipelineRef, *options: str) -> str:
    return shlex.join(["cairn", "status", "--root", ref.root, "--pipeline", ref.name, *options])


def without_pipeline(dag_id: str | None) -> Step:
    if dag_id is not None:
        return _to_list(f"No task of DAG {dag_id} commits or restores checkpoints that you may see.")
    return Step(
        "To write the files of a new pipeline and its DAG, run the command below. If there is a DAG with a pipeline, ask "
        "for the right to read the DAG. To show a pipeline that no DAG runs, add its folder to CAIRN_UI_PIPELINES.",
        command="cairn new clicks",
    )


def without_checkpoint(ref: PipelineRef, schedule: DagSchedule | None) -> Step:
    command = _status(ref) if ref.dag_id in (None, ref.name) else _status(ref, "--dag", str(ref.dag_id))
    advice = "For advice on the first interval, run the command below."
    if ref.dag_id is None:
        return Step(advice, command=command)
    if schedule is not None and schedule.running:
        advice = f"A run of DAG {ref.dag_id} is in progress. Its checkpoint appears here after the commit. {advice}"
    elif schedule is not None and schedule.paused:
        advice = f"DAG {ref.dag_id} is paused: unpause it in Airflow. {advice}"
    else:
        advice = f"Look at the runs of DAG {ref.dag_id} in Airflow. {advice}"
    return Step(
        advice,
        command=command,
        link=f"Open DAG {ref.dag_id}",
        href=f"/dags/{quote(ref.dag_id, safe='')}",
        airflow=True,
    )


def without_trial(ref: PipelineRef, interval: Interval | None) -> Step:
    start = "START" if interval is None else format_instant(interval.start)
    words = ["cairn", "try", "--code", ref.code or "module:NAME", "--from", start, "--to", start]
    command = shlex.join([*words, "--root", ref.root, "first"])
    return Step("To run changed code over an interval, beside production and without changing it:", command=command)


def without_docs() -> Step:
    return _to_list(
        "A full validation writes Data Docs when it evaluates expectations. Give the task `validate` of a pipeline the "
        "argument `docs`. Or open a checkpoint: its page has the command that validates it."
    )
