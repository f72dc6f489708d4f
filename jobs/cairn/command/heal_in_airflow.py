"""The part of `cairn heal` that asks Airflow, and carries steps out by Airflow's REST API."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from cairn.command.airflow_rest import AirflowRest, RestError, explain_errors
from cairn.operations.intervals.plan_heal import (
    Adopt,
    AirflowRun,
    AirflowView,
    EndBackfill,
    EndRun,
    HealPlan,
    Health,
    OpenBackfill,
    RunIntervals,
    Step,
    UnpauseDag,
    WaitFor,
    health_of,
    plan_heal,
)
from state_backend.chains.judge_inputs import Chains
from state_backend.checkpoint.log import Log, read_log
from state_backend.ports.storage import Storage
from state_backend.values.airflow_runs import UNFINISHED
from state_backend.values.errors import UsageError
from state_backend.values.intervals import Interval

_CREATE_TIMEOUT_S = 180.0


class InAirflow:
    def __init__(
        self, rest: AirflowRest, dag_id: str, storage: Storage, last: datetime, say: Callable[[str], None]
    ) -> None:
        self.rest = rest
        self.dag_id = dag_id
        self.storage = storage
        self.last = last
        self.say = say
        self._path = f"/api/v2/dags/{urllib.parse.quote(dag_id, safe='')}"
        self._log: Log | None = None
        # Starts of the intervals of the DAG's schedule, from a backfill's dry run. The dry run leaves out intervals
        # whose run is queued or running, so the starts of these intervals come from their runs.
        self._starts: set[datetime] = set()
        self._from: datetime | None = None
        self._first_seen: dict[str, datetime | None] = {}
        self._committed: dict[tuple[str, str | None], bool] = {}
        self._queued: tuple[str, datetime] | None = None
        self.own_backfills: set[int] = set()

    def plan(self, now: datetime, *, fresh: bool) -> tuple[HealPlan, Health]:
        """Ask Airflow, read the log, and return (plan, health). `fresh`: Ask again for the schedule's intervals."""
        with explain_errors(self.rest.url, self.dag_id):
            dag = self.rest.call("GET", f"{self._path}/details")
            health = self._health()
            begin = self._begin(health, dag)
            if fresh or self._from is None or begin < self._from:
                self._starts, self._from = self._starts | self._schedule(begin, dag), begin
            runs = self._runs(self._from, self.last + self._length())
            self._note_starts(runs)
            backfills = self._backfills()
            # The log is read after the runs, so that it has the commits of all runs that Airflow reports as ended.
            health = self._health()
            runs = [self._with_commit(run, health) for run in runs]
        view = AirflowView(dag_id=self.dag_id, paused=dag["is_paused"], runs=tuple(runs), backfills=tuple(backfills))
        for run in runs:
            self._first_seen.setdefault(run.run_id, run.began)
        calendar = self._calendar(health, runs)
        queued_for = timedelta(0) if self._queued is None else now - self._queued[1]
        made = plan_heal(health, calendar, view, first_seen=self._first_seen, queued_for=queued_for)
        waited = next((step.run for step in made.steps if isinstance(step, WaitFor)), None)
        if waited is None or waited.state != "queued":
            self._queued = None
        elif self._queued is None or self._queued[0] != waited.run_id:
            self._queued = (waited.run_id, now)
        return made, health

    def publish(self) -> None: ...

    def carry_out(self, step: Step) -> None:
        """Carry out one step through Airflow's API. A step that only waits does nothing."""
        with explain_errors(self.rest.url, self.dag_id):
            match step:
                case UnpauseDag():
                    self.rest.pause(self.dag_id, False)
                case Adopt(backfill=backfill):
                    self._unless_ended(f"/api/v2/backfills/{backfill.id}/unpause")
                case EndBackfill(backfill=backfill):
                    self._unless_ended(f"/api/v2/backfills/{backfill.id}/cancel")
                case EndRun(run=run):
                    path = f"{self._path}/dagRuns/{urllib.parse.quote(run.run_id, safe='')}"
                    self.rest.call("PATCH", path, {"state": "failed"})
                case RunIntervals():
                    made = self.rest.create_backfill(
                        self.dag_id,
                        step.first,
                        step.last,
                        conf={"allow_gap": True} if step.allow_gap else None,
                        timeout_s=_CREATE_TIMEOUT_S,
                        say=self.say,
                    )
                    self.own_backfills.add(made.id)
                case _:
                    pass

    def page_of(self, run: AirflowRun) -> str:
        return f"{self.rest.url}/dags/{self.dag_id}/runs/{urllib.parse.quote(run.run_id, safe='')}"

    def _health(self) -> Health:
        self._log = read_log(self.storage, self._log)
        root, _, pipeline = self.storage.url.rstrip("/").rpartition("/")
        return health_of(self._log, Chains().judged(root, pipeline, self._log))

    def _begin(self, health: Health, dag: Mapping[str, Any]) -> datetime:
        """Return the start of the earliest interval whose checkpoint is not healthy, or whose run has not ended.

        If retention has dropped the base of this interval, return the end of the newest earlier interval that still has
        a checkpoint. `dag`: The DAG as Airflow's API describes it; without a checkpoint its start date is returned.
        """
        if health.start is None or health.begin is None:
            if dag["start_date"] is None:
                raise UsageError(f"DAG {self.dag_id} has no start_date, and its pipeline has no checkpoint")
            return datetime.fromisoformat(dag["start_date"])
        begin = health.begin
        runs = self._runs(health.start, self.last + self._length(), ("failed", *UNFINISHED))
        self._note_starts(runs)
        for run in runs:
            again = health.can_start_at(run.start) and not self._with_commit(run, health).committed
            if run.start < begin and run.start in health.results and (run.unfinished or again):
                begin = run.start
        return begin

    def _note_starts(self, runs: Sequence[AirflowRun]) -> None:
        """Remember the intervals of queued and running runs, which a backfill's dry run leaves out.

        When such a run has ended, its interval still belongs to the schedule.
        """
        self._starts |= {run.start for run in runs if run.unfinished and run.run_type != "manual"}

    def _schedule(self, begin: datetime, dag: Mapping[str, Any]) -> set[datetime]:
        """Return the starts of the intervals of the DAG's schedule that have ended, from `begin` to `self.last`.

        Intervals whose run is queued or running are left out.
        """
        end = dag["end_date"]
        last = self.last if end is None else min(self.last, datetime.fromisoformat(end))
        if begin > last:
            return set()
        body = {
            "dag_id": self.dag_id,
            "from_date": begin.isoformat(),
            "to_date": last.isoformat(),
            "reprocess_behavior": "completed",
        }
        try:
            _, dates = self.rest.backfill_dates(body)
        except RestError as error:
            if error.status == 422 and "future" in str(error):
                return set()
            raise
        return {datetime.fromisoformat(date) for date in dates}

    def _calendar(self, health: Health, runs: Sequence[AirflowRun]) -> tuple[Interval, ...]:
        working = {run.start for run in runs if run.unfinished and run.start <= self.last}
        starts = sorted({*(start for start in self._starts if self._from and start >= self._from), *working})
        ends = [*starts[1:], starts[-1] + self._length()] if starts else []
        return tuple(health.results.get(start, Interval(start, end)) for start, end in zip(starts, ends, strict=True))

    def _length(self) -> timedelta:
        """Return the time between the last two starts. It stands for the length of the last interval, because
        Airflow's dry run returns only starts."""
        last_two = sorted(self._starts)[-2:]
        return last_two[1] - last_two[0] if len(last_two) > 1 else timedelta(days=1)

    def _runs(self, first: datetime, last: datetime, states: Sequence[str] = ()) -> list[AirflowRun]:
        found = self.rest.runs_between(AirflowRun, self.dag_id, first.isoformat(), last.isoformat(), states)
        return [run for run in found if run.start is not None and run.start <= self.last]

    def _with_commit(self, run: AirflowRun, health: Health) -> AirflowRun:
        """Return the run with `committed` set. Ask Airflow for a failed run whose interval has a valid result."""
        if run.state != "failed" or run.start not in health.results or run.start in health.spoilt:
            return run
        key = (run.run_id, None if run.ended is None else run.ended.isoformat())
        if key not in self._committed:
            path = f"{self._path}/dagRuns/{urllib.parse.quote(run.run_id, safe='')}/taskInstances?limit=100"
            tasks = self.rest.call("GET", path)["task_instances"]
            states = [task["state"] for task in tasks if task["operator_name"] == "CommitCheckpointOperator"]
            self._committed[key] = bool(states) and all(state == "success" for state in states)
        return replace(run, committed=self._committed[key])

    def _backfills(self) -> list[OpenBackfill]:
        found = []
        for one in self.rest.active_backfills(self.dag_id):
            dates = {"logical_date_gte": one["from_date"], "logical_date_lte": one["to_date"], "state": UNFINISHED}
            query = urllib.parse.urlencode({**dates, "run_type": "backfill", "limit": 1}, doseq=True)
            at_work = self.rest.call("GET", f"{self._path}/dagRuns?{query}")["total_entries"]
            found.append(
                OpenBackfill(
                    id=one["id"],
                    first=datetime.fromisoformat(one["from_date"]),
                    last=datetime.fromisoformat(one["to_date"]),
                    paused=one["is_paused"],
                    created=datetime.fromisoformat(one["created_at"]),
                    at_work=at_work,
                )
            )
        return found

    def _unless_ended(self, path: str) -> None:
        try:
            self.rest.call("PUT", path)
        except RestError as error:
            if error.status != 409:  # 409: Airflow has completed the backfill in the meantime.
                raise
