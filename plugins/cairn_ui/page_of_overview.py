"""The overview of one pipeline."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from fastapi import APIRouter
from fastapi.responses import Response

from cairn_ui import airflow_database, shown_page
from cairn_ui.access import PAGE
from cairn_ui.pipeline_overview import Overview, furthest, overview
from cairn_ui.read_logs import Reading
from cairn_ui.read_runs import pipeline_runs_of
from cairn_ui.shown_page import Shown, written_ms

router = APIRouter()


@router.get("/p/{key}/", **PAGE)
def of_overview(page: Shown) -> Response:
    """Show the problems of a pipeline, its latest checkpoints, and whether its next interval can start."""
    ref = page.ref

    def view(reading: Reading) -> Overview:
        savepoint = None
        if ref.dag_id is not None and ref.savepoint is not None:
            savepoint = airflow_database.last_savepoint(ref.dag_id, ref.savepoint)

        def read(_: object) -> Overview:
            best = furthest(reading)
            written = written_ms(ref, reading.log, [best.id] if best is not None else [])
            now = datetime.now(UTC)
            return overview(ref, reading, page.schedule, savepoint, written, page.docs, now, page.airflow)

        return replace(page.ask("overview", read), runs=pipeline_runs_of(page, reading))

    return page.show("overview.html", view, stored=shown_page.reader.stored(ref))
