"""Read what the overview of a pipeline and the page of a run tell about runs of Airflow."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from cairn_ui import airflow_runs
from cairn_ui.access import Rights
from cairn_ui.airflow_values import Run, Schedule, TaskTry
from cairn_ui.broken_since import Broken, Unusable, broken_since, lag_of
from cairn_ui.find_pipelines import PipelineRef
from cairn_ui.pipeline_overview import latest_usable
from cairn_ui.pipeline_runs import (
    FailedTry,
    PipelineRuns,
    asset_of,
    following,
    mark_of,
    newest_words,
    run_to_explain,
    tries_to_explain,
    unusable_checkpoints,
)
from cairn_ui.read_logs import NotAnswered, Reader
from cairn_ui.run_bars import MOST, Bars, bars_of
from cairn_ui.values import Reading
from cairn_ui.waiting_dags import waiting_dags
from state_backend.checkpoint.log import Log
from state_backend.values.airflow_commands import heal_command
from state_backend.values.errors import CairnError
from state_backend.values.intervals import Interval, format_instant
from state_backend.values.records import Record

# Longest wait of a page for the logs of tasks, in seconds. A later view of the page has what is missing then.
_LOGS_WAIT_S = 2.0
# Number of runs after the last usable checkpoint that the overview looks at. The first failed one is among them.
_RUNS_AFTER = 50
# Number of waiting DAGs, nearest first, for which the overview asks whether the user may read them.
_WAITING = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """The caches that pages share."""

    logs_of_pipelines: Reader
    logs_of_tries: airflow_runs.Reasons


def bars(log: Log, runs: Sequence[Run], now: datetime) -> Bars:
    """Return the bars of a DAG's runs, with the states of the checkpoints that can't be used."""
    return bars_of(runs, newest_words(log, unusable_checkpoints(log)), now)


def pipeline_runs_of(
    ref: PipelineRef, reading: Reading, schedule: Schedule | None, rights: Rights, readers: Readers, airflow: str
) -> PipelineRuns:
    """Return since when a pipeline is broken, its lag, its last runs, and who waits for it."""
    now, log, asset = datetime.now(UTC), reading.log, asset_of(ref.name)
    reader = readers.logs_of_pipelines
    usable, unusable, words = reader.ask(ref, "unusable checkpoints", lambda _: _unusable(reading))
    until = usable.content.interval.end if usable is not None else None
    last: tuple[Run, ...] = ()
    after: tuple[Run, ...] = ()
    if ref.dag_id is not None:
        last = airflow_runs.last_runs([ref.dag_id], MOST)[ref.dag_id]
        after = airflow_runs.runs_after(ref.dag_id, until, _RUNS_AFTER)
    later = [one for one in unusable if until is None or one.interval.start >= until]
    broken = broken_since(later, after, following(log, usable), schedule, now)
    waiting = waiting_dags(asset, *airflow_runs.scheduled_by_assets(), ref.dag_id)
    run_id = run_to_explain(broken, last)
    return PipelineRuns(
        broken=broken,
        since=_since(ref, broken, reader),
        until=until,
        lag=lag_of(until, reading.newest_end, schedule, now),
        bars=bars_of(last, words, now),
        waiting=tuple(one for one in waiting[:_WAITING] if rights.may_read_dag(one.dag_id)),
        asset=asset,
        failed=failed_tries(ref, run_id, rights, readers) if run_id is not None else (),
        command=_command(ref, broken, airflow),
    )


def _unusable(reading: Reading) -> tuple[Record | None, list[Unusable], dict[Interval, str]]:
    usable, unusable = latest_usable(reading), unusable_checkpoints(reading.log)
    return usable, unusable, newest_words(reading.log, unusable)


def _since(ref: PipelineRef, broken: Broken | None, reader: Reader) -> datetime | None:
    if broken is None or broken.first.checkpoint is None:
        return broken.first.since if broken is not None else None
    mark = mark_of(broken.first.checkpoint)
    try:
        info = reader.ask(ref, f"time of {mark}", lambda storage: storage.stat(mark))
    except (CairnError, NotAnswered):
        return None
    return None if info is None else datetime.fromtimestamp(info.modified_ms / 1000, UTC)


def _command(ref: PipelineRef, broken: Broken | None, airflow: str) -> str | None:
    if broken is None or ref.dag_id is None:
        return None
    return heal_command(ref.root, ref.name, format_instant(broken.last.start), ref.dag_id, airflow)


def failed_tries(
    ref: PipelineRef, run_id: str, rights: Rights, readers: Readers, tries: Sequence[TaskTry] | None = None
) -> tuple[FailedTry, ...]:
    """Return the failed tries of a run, with their reasons if the user may read logs.

    A reason is missing if the log can't be read within two seconds. A later call may have it.
    """
    dag_id = ref.dag_id or ""
    failed = tries_to_explain(airflow_runs.tries_of(dag_id, run_id) if tries is None else tries)
    reasons: dict[TaskTry, str | None] = {}
    if failed and rights.may_read_logs(dag_id):
        of_tries = readers.logs_of_tries
        with suppress(NotAnswered):
            reasons = readers.logs_of_pipelines.ask(
                ref,
                f"reasons {run_id}",
                lambda _: {one: of_tries.reason(dag_id, run_id, one) for one in failed},
                _LOGS_WAIT_S,
            )
    return tuple(FailedTry(run_id=run_id, of=one, reason=reasons.get(one)) for one in failed)
