"""The pages over a pipeline's log: its history, its lineage and its trends."""

from __future__ import annotations

import time
from typing import Any

from fastapi.responses import Response

from cairn_ui.lineage_graph import place
from cairn_ui.log_pages import ids_of_page
from cairn_ui.phases import phases_of
from cairn_ui.read_logs import Reading
from cairn_ui.shown_page import Number, Shown, router, written_ms
from cairn_ui.trends import trends_of
from state_backend.inspection.describe import describe_log


@router.get("/p/{key}/history")
def of_history(page: Shown, before: Number = None) -> Response:
    def view(reading: Reading) -> dict[str, Any]:
        shown, log = ids_of_page(reading.log.head_id, before, 50), reading.log

        def read(_: object) -> list[dict[str, Any]]:
            written = written_ms(page.ref, log, shown.ids)
            return describe_log(log, shown.ids, written, now_ms=round(time.time() * 1000))

        rows = page.ask(f"history {before}", read)
        return {
            "page": shown,
            "rows": rows,
            "docs": page.docs,
            "validated": reading.validated,
            "in_airflow": page.runs_there(rows),
            "phases": sorted({(p.colour, p.name) for row in rows for p in phases_of(row["durations_us"])}),
        }

    return page.show("checkpoints.html", view)


@router.get("/p/{key}/lineage")
def of_lineage(page: Shown, before: Number = None) -> Response:
    """Show checkpoints and their bases as a graph, newest first."""

    def view(reading: Reading) -> dict[str, Any]:
        shown, log = ids_of_page(reading.log.head_id, before, 60), reading.log
        rows = page.ask(f"lineage {before}", lambda _: describe_log(log, shown.ids, {}, now_ms=0))
        rows = [row for row in rows if row["start"] is not None]
        placed, lanes = place((row["id"], row["base"]) for row in rows)
        return {"page": shown, "nodes": [*zip(placed, rows, strict=True)], "lanes": lanes}

    return page.show("lineage.html", view)


@router.get("/p/{key}/trends")
def of_trends(page: Shown, first: Number = None, last: Number = None) -> Response:
    return page.show("trends.html", lambda reading: trends_of(reading, first, last), first=first, last=last)
