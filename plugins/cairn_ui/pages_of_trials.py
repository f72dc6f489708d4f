"""The list of a pipeline's trials, and one trial beside production."""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException
from fastapi.responses import Response

from cairn_ui import airflow_database, next_steps
from cairn_ui.pipelines_of_dags import PipelineRef
from cairn_ui.read_logs import Reading
from cairn_ui.shown_page import Shown, router
from cairn_ui.trial_summary import commands_of, differs, headline
from state_backend.adapters.open_storage import join_url
from state_backend.checkpoint.log import read_log
from state_backend.checkpoint.trials import intervals_of_trial, root_of_trial, trials_in, trials_url
from state_backend.inspection.compare_logs import compare_intervals, describe_interval
from state_backend.inspection.describe import describe_trial
from state_backend.values.marks import Trial


def _trials(ref: PipelineRef) -> list[Trial]:
    return trials_in(airflow_database.open_url(ref, trials_url(ref.root, ref.name)))


@router.get("/p/{key}/trials")
def of_trials(page: Shown) -> Response:
    newest = page.look.reading.newest if page.look.reading is not None else None
    return page.show(
        "trials.html",
        lambda _: page.ask("trials", lambda _: [describe_trial(trial) for trial in _trials(page.ref)]),
        without_trial=next_steps.without_trial(page.ref, newest.content.interval if newest is not None else None),
    )


@router.get("/p/{key}/trials/{name}")
def of_trial(page: Shown, name: str) -> Response:
    """Show, for each interval of a trial, whether its result equals production's."""
    ref = page.ref

    def view(reading: Reading) -> dict[str, Any]:
        def read(_: object) -> tuple[Trial, list[dict[str, Any]]] | None:
            trial = next((trial for trial in _trials(ref) if trial.name == name), None)
            if trial is None:
                return None
            log = read_log(airflow_database.open_url(ref, join_url(root_of_trial(ref.root, ref.name, name), ref.name)))
            intervals = intervals_of_trial(trial, (interval for interval, _ in log.outputs_near(trial.span)))
            return trial, [*map(describe_interval, compare_intervals(reading.log, log, intervals))]

        found = page.ask(f"trial {name}", read)
        if found is None:
            raise HTTPException(404, "This trial does not exist. It may have been removed")
        trial, rows = found
        differing, missing = sum(map(differs, rows)), sum(row["old"] is None or row["new"] is None for row in rows)
        return {
            "trial": describe_trial(trial),
            "rows": rows,
            "tone": "warn" if differing or missing else "good",
            "headline": headline(len(rows), differing, missing),
            "commands": commands_of(ref, trial, rows),
        }

    return page.show("trial.html", view)
