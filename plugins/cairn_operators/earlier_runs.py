"""Ask Airflow's execution API, from a running task, about other runs of its DAG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from cairn_operators.airflow_versions import has
from cairn_operators.dag_schedule import schedule_of_dag
from cairn_operators.data_interval import plain
from state_backend.values.airflow_runs import DagRun, read_run

if TYPE_CHECKING:
    from cairn_operators.predecessor import PredecessorRun

# The largest number of runs that one search reads, newest first. If more manual runs than this lie between two
# scheduled runs, the search does not find the scheduled run of the interval before.
_LOOK_BACK = 32
# Airflow 3.1 describes only runs in the state `running`. Scheduled runs in other states are found by their logical
# dates, without their `clear_number`. The stand-in -1 equals no run's number, so no record counts as a commit of such a
# run. This is right: a queued run has committed nothing since its last clear, and nobody waits for a run that ended.
_UNSTARTED = "query of a queued run"
_UNKNOWN_CLEAR = -1


def predecessor_runs(context: Any, start: datetime, end: datetime, tasks: Sequence[str]) -> list[PredecessorRun]:
    """Return the runs of the task's DAG whose data interval ends at `start`, with the states of their `tasks`.

    `start`, `end`: The data interval of the task's own run. The runs are the scheduled or backfill run of the interval
    before, and manual runs of that interval.

    The search goes back by logical date, from one interval length after `end`. It begins that late because a manual run
    of the interval before has a logical date after `start`: Airflow gives a manual run the last interval that has ended
    before the run's logical date. A scheduled run's logical date is its interval's start. So the search stops at the
    first scheduled or backfill run with a logical date before `start`.
    """
    from cairn_operators.predecessor import PredecessorRun

    dag_id, own, ti = context["dag_run"].dag_id, context["dag_run"].run_id, context["ti"]
    found = []
    for run in _runs_before(dag_id, end + (end - start), None if has(_UNSTARTED) else "running"):
        if run.run_id != own and run.end == start:
            found.append(run)
        if run.logical_date is not None and run.logical_date < start and run.run_type != "manual":
            break
    if not has(_UNSTARTED):
        known = {own, *(run.run_id for run in found)}
        for run_id in sorted(_scheduled(ti, dag_id, _starts_before(context, start, end, 1), tasks) - known):
            # Each state is one request. In this order, a run that changes its state between two requests is found.
            ways = ("queued", "running", "success", "failed")
            if state := next((s for s in ways if ti.get_dr_count(dag_id, run_ids=[run_id], states=[s])), None):
                found.append(DagRun(run_id=run_id, state=state, clear_number=_UNKNOWN_CLEAR))
    if not found:
        return []
    states = ti.get_task_states(dag_id=dag_id, run_ids=[run.run_id for run in found], task_ids=list(tasks))
    return [
        PredecessorRun(
            run_id=run.run_id,
            state=run.state,
            clear_number=run.clear_number,
            wanted=tuple(tasks),
            tasks=states.get(run.run_id, {}),
        )
        for run in found
    ]


def is_earlier_running(context: Any, start: datetime) -> bool:
    """Return True if a run of the task's DAG with a logical date before `start` is running."""
    return _previous(context["dag_run"].dag_id, start, "running") is not None


def is_earlier_blocked(context: Any, start: datetime) -> bool:
    """Return True if the last queued run before `start` may start only after the task's own run has ended.

    It may if both are runs of a backfill, or neither: Airflow counts both kinds separately towards `max_active_runs`.
    """
    own = read_run(DagRun, context["dag_run"]).run_type == "backfill"
    if has(_UNSTARTED):
        run = _previous(context["dag_run"].dag_id, start, "queued")
        return run is not None and (run.run_type == "backfill") == own
    dag_id, ti = context["dag_run"].dag_id, context["ti"]
    dates = _starts_before(context, start, context["data_interval_end"], _LOOK_BACK)
    there = _scheduled(ti, dag_id, dates, [ti.task_id])
    same = [run_id for run_id in there if run_id.startswith("backfill__") == own]
    return bool(same) and ti.get_dr_count(dag_id, run_ids=same, states=["queued"]) > 0


def _scheduled(ti: Any, dag_id: str, dates: Sequence[datetime], tasks: Sequence[str]) -> set[str]:
    """Return the ids of the runs that have one of these logical dates and one of `tasks`; empty without dates."""
    return {*ti.get_task_states(dag_id=dag_id, logical_dates=list(dates), task_ids=list(tasks))} if dates else set()


def _starts_before(context: Any, start: datetime, end: datetime, number: int) -> list[datetime]:
    """Return the starts of the last `number` intervals before `start`, newest first: logical dates of scheduled runs.

    If `start` is no boundary of the schedule, as after a change of schedule, the intervals are as long as from `start`
    to `end`, the task's own.
    """
    from state_backend.values.schedule import Every, decode, interval_before

    said, start, end = schedule_of_dag(context.get("dag")), plain(start), plain(end)
    own = Every((end - start) // timedelta(milliseconds=1))
    schedule = own if said is None or interval_before(decode(said), start) is None else decode(said)
    starts: list[datetime] = []
    while len(starts) < number and (before := interval_before(schedule, starts[-1] if starts else start)) is not None:
        starts.append(before.start)
    return starts


def _runs_before(dag_id: str, logical_date: datetime | None, state: str | None) -> Iterator[DagRun]:
    for _ in range(_LOOK_BACK):
        if logical_date is None or (run := _previous(dag_id, logical_date, state)) is None:
            return
        yield run
        logical_date = run.logical_date


def _previous(dag_id: str, logical_date: datetime, state: str | None) -> DagRun | None:
    """Return the DAG's last run before a logical date; None if there is none. `state`: None for a run in any state.

    Airflow's own `ti.get_previous_dagrun` searches only before the logical date of the task's own run.
    """
    from airflow.sdk.execution_time.comms import GetPreviousDagRun
    from airflow.sdk.execution_time.task_runner import SUPERVISOR_COMMS

    answer = SUPERVISOR_COMMS.send(GetPreviousDagRun(dag_id=dag_id, logical_date=logical_date, state=state))
    run = getattr(answer, "dag_run", None)
    return None if run is None else read_run(DagRun, run)
