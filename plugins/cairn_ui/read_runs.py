"""Read what the overview of a pipeline and the page of a run tell about runs of Airflow."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

from cairn_ui import airflow_runs, shown_page
from cairn_ui.access import Rights
from cairn_ui.broken_since import (
    Broken,
    Trouble,
    broken_since,
    lag_of,
    mark_of,
    newest_words,
    run_to_explain,
    tries_to_explain,
    unusable_checkpoints,
)
from cairn_ui.find_pipelines import PipelineRef
from cairn_ui.pipeline_overview import latest_usable
from cairn_ui.read_logs import NotAnswered, Reading
from cairn_ui.run_bars import MOST, bars_of
from cairn_ui.shown_page import PipelinePage
from cairn_ui.waiting_dags import waiting_dags
from state_backend.inspection.status import following_interval
from state_backend.values.airflow_commands import heal_command
from state_backend.values.airflow_runs import DagRun, TaskTry
from state_backend.values.errors import CairnError
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.records import Record

# Longest wait of a page for the logs of tasks, in seconds. A later view of the page has what is missing then.
_LOGS_WAIT_S = 2.0
# Number of runs after the last usable checkpoint that the overview looks at. The first failed one is among them.
_RUNS_AFTER = 50
# Number of waiting DAGs, nearest first, for which the overview asks whether the user may read them.
_WAITING = 50


class FailedTry(NamedTuple):
    """A try that failed."""

    run_id: str
    of: TaskTry
    # Why it failed, in one line; None if neither its log nor the database has a reason.
    reason: str | None


def pipeline_runs_of(page: PipelinePage, reading: Reading) -> dict[str, Any]:
    """Return since when a pipeline is broken, its lag, its last runs, and who waits for it."""
    now, log, ref = datetime.now(UTC), reading.log, page.ref
    asset = f"cairn://{ref.name}"
    usable, unusable, words = page.ask("unusable checkpoints", lambda _: _unusable(reading))
    until = usable.content.interval.end if usable is not None else None
    last: tuple[DagRun, ...] = ()
    after: tuple[DagRun, ...] = ()
    if ref.dag_id is not None:
        last = airflow_runs.last_runs([ref.dag_id], MOST)[ref.dag_id]
        after = airflow_runs.runs_after(ref.dag_id, until, _RUNS_AFTER)
    expected = None if usable is None else following_interval(log, usable.content.interval)
    later = [one for one in unusable if until is None or one.interval.start >= until]
    broken = broken_since(later, after, expected, page.schedule, now)
    waiting = waiting_dags(asset, *airflow_runs.scheduled_by_assets(), ref.dag_id)
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


def failed_tries(
    ref: PipelineRef, run_id: str, rights: Rights, tries: Sequence[TaskTry] | None = None
) -> list[FailedTry]:
    """Return the failed tries of a run, with their reasons if the user may read logs.

    A reason is missing if the log can't be read within two seconds. A later call may have it.
    """
    dag_id = ref.dag_id or ""
    failed = tries_to_explain(airflow_runs.tries_of(dag_id, run_id) if tries is None else tries)
    found: dict[TaskTry, str | None] = {}
    if failed and rights.may_read_logs(dag_id):
        with suppress(NotAnswered):
            found = shown_page.reader.ask(
                ref,
                f"reasons {run_id}",
                lambda _: {one: shown_page.reasons.reason(dag_id, run_id, one) for one in failed},
                _LOGS_WAIT_S,
            )
    return [FailedTry(run_id, one, found.get(one)) for one in failed]
