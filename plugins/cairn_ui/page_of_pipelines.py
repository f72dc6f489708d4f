"""The list of pipelines: all of them, or those of a DAG."""

from __future__ import annotations

from datetime import UTC, datetime
from urllib.parse import quote

from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from cairn_ui import airflow_database, database_runs, next_steps, shown_page
from cairn_ui.access import Asks
from cairn_ui.chain_graph import chain_graph
from cairn_ui.interval_strip import MOST
from cairn_ui.pipeline_overview import FromAirflow, OverviewRow, furthest, overview_row, worst_first
from cairn_ui.pipelines_of_dags import PipelineRef
from cairn_ui.read_logs import Look, NotAnswered
from cairn_ui.render_template import HEADERS
from cairn_ui.shown_page import router
from state_backend.ports.storage import Storage
from state_backend.values.errors import CairnError


@router.get("/")
def pipelines(request: Request, rights: Asks) -> Response:
    return _list(request, rights.readable(shown_page.dags.pipelines()), None)


@router.get("/dag/{dag_id}")
def of_dag(request: Request, rights: Asks, dag_id: str) -> Response:
    """Show the pipelines that a DAG commits or restores. If there is only one, redirect to its overview."""
    refs = [ref for ref in rights.readable(shown_page.dags.pipelines()) if ref.is_of(dag_id)]
    if len(refs) == 1:
        return RedirectResponse(f"{shown_page.base_of(request)}/p/{quote(refs[0].key)}/", headers=HEADERS)
    return _list(request, refs, dag_id)


def _list(request: Request, refs: list[PipelineRef], dag_id: str | None) -> Response:
    now, looks = datetime.now(UTC), shown_page.reader.look_at_all(refs)
    dag_ids = {r.dag_id for r in refs if r.dag_id is not None}
    schedules, runs = airflow_database.schedules_of(dag_ids), database_runs.last_runs(dag_ids, MOST)
    failing = database_runs.failing_tasks(dag_ids)
    told = {
        dag_id: FromAirflow(schedule=schedules.get(dag_id), runs=runs[dag_id], failing=tuple(failing.get(dag_id, ())))
        for dag_id in dag_ids
    }
    rows = [_row(ref, looks[ref.key], told.get(ref.dag_id or "", FromAirflow()), now) for ref in refs]
    return shown_page.page_of(
        request,
        "pipelines.html",
        rows=worst_first(rows),
        graph=chain_graph(refs, looks, {row.ref.key: row.health for row in rows}),
        dag_id=dag_id,
        next=next_steps.without_pipeline(dag_id),
        running=any(s.running for s in schedules.values()) or any(r.read is None and r.look.problem for r in rows),
    )


def _row(ref: PipelineRef, look: Look, airflow: FromAirflow, now: datetime) -> OverviewRow:
    stored, reading = shown_page.reader.find_size(ref), look.reading
    if reading is None:
        return overview_row(ref, look, airflow, stored, None, now)

    def row(_: Storage) -> OverviewRow:
        last, log, written = furthest(reading), reading.log, None
        if last is not None and look.problem is None:
            written = shown_page.written_ms(ref, log, [last.id]).get(last.id)
        return overview_row(ref, look, airflow, stored, written, now)

    try:  # The row may need reads of earlier records, so `row` runs in a thread with a time limit.
        return shown_page.reader.ask(ref, "overview row", row)
    except (CairnError, NotAnswered) as error:
        return overview_row(ref, Look(reading=None, problem=str(error)), airflow, stored, None, now)
