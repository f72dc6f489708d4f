"""The overview of one pipeline."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from fastapi.responses import Response

from cairn_ui import airflow_database, database_runs, shown_page
from cairn_ui.broken_since import (
    Broken,
    Trouble,
    broken_since,
    lag_of,
    mark_of,
    newest_words,
    run_to_explain,
    unusable_checkpoints,
)
from cairn_ui.page_of_run import failed_tries
from cairn_ui.pipeline_overview import Overview, furthest, latest_usable, overview
from cairn_ui.read_logs import NotAnswered, Reading
from cairn_ui.run_bars import MOST, bars_of
from cairn_ui.shown_page import PipelinePage, Shown, router, written_ms
from cairn_ui.waiting_dags import waiting_dags
from state_backend.inspection.pipeline_status import following_interval
from state_backend.values.airflow_commands import heal_command
from state_backend.values.airflow_runs import DagRun
from state_backend.values.errors import CairnError
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.records import Record

# Number of runs after the last usable checkpoint that the overview looks at. The first failed one is among them.
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

        def read(_: object) -> Overview:
            best = furthest(reading)
            written = written_ms(ref, reading.log, [best.id] if best is not None else [])
            now = datetime.now(UTC)
            return overview(ref, reading, page.schedule, savepoint, written, page.docs, now, page.airflow)

        return replace(page.ask("overview", read), runs=_runs(page, reading))

    return page.show("overview.html", view, stored=shown_page.reader.find_size(ref))


def _runs(page: PipelinePage, reading: Reading) -> dict[str, Any]:
    """Return since when a pipeline is broken, its lag, its last runs, and who waits for it."""
    now, log, ref = datetime.now(UTC), reading.log, page.ref
    asset = f"cairn://{ref.name}"
    usable, unusable, words = page.ask("unusable checkpoints", lambda _: _unusable(reading))
    until = usable.content.interval.end if usable is not None else None
    last: tuple[DagRun, ...] = ()
    after: tuple[DagRun, ...] = ()
    if ref.dag_id is not None:
        last = database_runs.last_runs([ref.dag_id], MOST)[ref.dag_id]
        after = database_runs.runs_after(ref.dag_id, until, _RUNS_AFTER)
    expected = None if usable is None else following_interval(log, usable.content.interval)
    later = [one for one in unusable if until is None or one.interval.start >= until]
    broken = broken_since(later, after, expected, page.schedule, now)
    waiting = waiting_dags(asset, *database_runs.scheduled_by_assets(), ref.dag_id)
    run_id, command = run_to_explain(broken, last), None
    if broken is not None and ref.dag_id is not None:
        to = format_instant(broken.last.start)
        command = heal_command(ref.root, ref.name, to, ref.dag_id, page.airflow)
    return {
        "broken": broken,
        "since": _since(page, broken),
        "until": until,
        "lag": lag_of(until, reading.newest_end, page.schedule, now),
        "bars": bars_of(last, words, now),
        "waiting": [one for one in waiting[:_WAITING] if page.rights.may_read_dag(one.dag_id)],
        "asset": asset,
        "failed": failed_tries(ref, run_id, page.rights) if run_id is not None else [],
        "command": command,
    }


def _unusable(reading: Reading) -> tuple[Record | None, list[Trouble], dict[Interval, str]]:
    usable, unusable = latest_usable(reading), unusable_checkpoints(reading.log)
    return usable, unusable, newest_words(reading.log, unusable)


def _since(page: PipelinePage, broken: Broken | None) -> datetime | None:
    if broken is None or not broken.first.checkpoint:
        return None if broken is None else broken.first.since
    mark = mark_of(broken.first)
    try:
        info = page.ask(f"time of {mark}", lambda storage: storage.stat(mark))
    except (CairnError, NotAnswered):
        return None
    return None if info is None else from_ms(info.modified_ms)
