"""The overview of one pipeline."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from fastapi.responses import Response

from cairn_ui import airflow_database, database_runs, shown_page
from cairn_ui.health_facts import lag_of, mark_of, run_to_explain
from cairn_ui.interval_strip import MOST
from cairn_ui.page_of_run import failed_tries
from cairn_ui.pipeline_overview import FromAirflow, Overview, facts_of, furthest, latest_usable, overview
from cairn_ui.read_logs import NotAnswered, Reading
from cairn_ui.shown_page import PipelinePage, Shown, router, written_ms
from cairn_ui.waiting_dags import waiting_dags
from state_backend.inspection.pipeline_health import Broken
from state_backend.values.airflow_runs import DagRun
from state_backend.values.errors import CairnError
from state_backend.values.intervals import from_ms

# Largest number of runs after the last usable checkpoint that the overview reads to find the first failed run.
_RUNS_AFTER = 50
# Number of waiting DAGs, nearest first, for which the overview asks whether the user may read them.
_WAITING = 50


@router.get("/p/{key}/")
def of_overview(page: Shown) -> Response:
    ref = page.ref

    def view(reading: Reading) -> Overview:
        savepoint = None
        if ref.dag_id is not None and ref.savepoint is not None:
            savepoint = airflow_database.last_savepoint(ref.dag_id, ref.savepoint)

        usable = page.ask("newest state", lambda _: latest_usable(reading))
        until = None if usable is None else usable.content.interval.end
        last = () if ref.dag_id is None else database_runs.last_runs([ref.dag_id], MOST)[ref.dag_id]
        airflow = _from_airflow(page, until, last)

        def read(_: object) -> Overview:
            best = furthest(reading)
            written = written_ms(ref, reading.log, [best.id] if best is not None else [])
            facts = facts_of(page.look, airflow, datetime.now(UTC))
            return overview(ref, page.look, facts, last, savepoint, written, page.docs, page.airflow)

        view = page.ask(f"overview {page.airflow}", read)  # Its command has this URL.
        return replace(view, runs=_runs(page, reading, until, airflow, view.broken, last))

    return page.show("overview.html", view, stored=shown_page.reader.find_size(ref))


def _from_airflow(page: PipelinePage, until: datetime | None, last: tuple[DagRun, ...]) -> FromAirflow:
    dag_id = page.ref.dag_id
    if dag_id is None:
        return FromAirflow()
    runs = {one.run_id: one for one in (*last, *database_runs.runs_after(dag_id, until, _RUNS_AFTER))}
    failing = database_runs.failing_tasks([dag_id]).get(dag_id, [])
    return FromAirflow(schedule=page.schedule, runs=tuple(runs.values()), failing=tuple(failing))


def _runs(
    page: PipelinePage,
    reading: Reading,
    until: datetime | None,
    airflow: FromAirflow,
    broken: Broken | None,
    last: tuple[DagRun, ...],
) -> dict[str, Any]:
    """Return values for the template: since when the pipeline is broken, its lag, failed tries, and waiting DAGs.

    `until`: End of the last usable interval; None without one. `last`: The newest runs of the DAG.
    """
    now, ref = datetime.now(UTC), page.ref
    asset = f"cairn://{ref.name}"
    waiting = waiting_dags(asset, *database_runs.scheduled_by_assets(), ref.dag_id)
    run_id = run_to_explain(broken, airflow.failing, last)
    return {
        "since": _since(page, broken),
        "until": until,
        "lag": lag_of(until, reading.newest_end, page.schedule, now),
        "waiting": [one for one in waiting[:_WAITING] if page.rights.may_read_dag(one.dag_id)],
        "failed": failed_tries(ref, run_id, page.rights) if run_id is not None else [],
    }


def _since(page: PipelinePage, broken: Broken | None) -> datetime | None:
    if broken is None or not broken.first.checkpoint:
        return None if broken is None else broken.first.since
    mark = mark_of(broken.first)
    try:
        info = page.ask(f"time of {mark}", lambda storage: storage.stat(mark))
    except (CairnError, NotAnswered):
        return None
    return None if info is None else from_ms(info.modified_ms)
