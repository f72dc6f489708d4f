"""The run of day 3 and the run of day 2 before it: what the operator asks of Airflow, and is told."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG

from cairn_operators import ProcessIntervalOperator, earlier_runs
from cairn_operators.predecessor import PredecessorRun
from state_backend.adapters.open_storage import open_storage
from tests.support.airflow_names import TaskDeferred
from tests.support.checkpoints import PIPELINE, Folder, day, run

TASKS = ("process", "checkpoint")
MINUTE = timedelta(minutes=1)


def before(
    state: str, process: str | None, checkpoint: str | None, *, clear: int = 0, run_id: str = "day2"
) -> PredecessorRun:
    """The run of day 2, which day 3 starts from."""
    tasks = {"process": process, "checkpoint": checkpoint}
    return PredecessorRun(run_id=run_id, state=state, clear_number=clear, wanted=TASKS, tasks=tasks)


NOW_S = 1_700_000_000.0


class Airflow:
    """The operator of day 3's run, with made-up answers of Airflow and a made-up clock. Days 1 and 2 have checkpoints."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Folder) -> None:
        self.runs = [before("running", "running", None, clear=1)]
        self.earlier_running = self.earlier_blocked = False
        self.now_s, self.times_asked = NOW_S, 0
        folder.run(day(2), "a2", run=run("day2"))
        monkeypatch.setattr(earlier_runs, "predecessor_runs", self._asked)
        monkeypatch.setattr(earlier_runs, "is_earlier_running", lambda *_: self.earlier_running)
        monkeypatch.setattr(earlier_runs, "is_earlier_blocked", lambda *_: self.earlier_blocked)
        monkeypatch.setattr("cairn_operators.process_data_interval._now_ms", lambda: int(self.now_s * 1000))
        monkeypatch.setattr(ProcessIntervalOperator, "run_driver", lambda *_, **__: {"ran": True, "sink": ""})
        self.operator = self.made()
        self.context = {
            "data_interval_start": day(3).start,
            "data_interval_end": day(3).end,
            "dag_run": SimpleNamespace(dag_id="d", run_id="day3", clear_number=0, logical_date=day(3).start),
            "ti": SimpleNamespace(try_number=1, xcom_push=lambda **_: None),
            "task": SimpleNamespace(downstream_list=[]),
        }

    def _asked(self, *_: Any) -> list[PredecessorRun]:
        self.times_asked += 1
        assert self.times_asked < 1_000, "the task asks Airflow without end"
        return self.runs

    def made(self) -> ProcessIntervalOperator:
        return ProcessIntervalOperator(
            task_id="process",
            dag=DAG("d", schedule=None),
            code="m:P",
            pipeline=PIPELINE,
            root="memory://predecessor",
            wait_timeout=timedelta(hours=1),
            wait_in_slot=timedelta(0),
            start_patience=2 * MINUTE,
        )

    def begin(self) -> Any:
        return type(self.operator).execute.__wrapped__(self.operator, self.context)

    def resume(self, deferred: TaskDeferred, after_s: float, why: str = "") -> Any:
        self.now_s += after_s
        # Airflow goes on in another process, with a task made anew.
        self.operator = self.made()
        return getattr(self.operator, deferred.method_name)(self.context, {"why": why}, **deferred.kwargs)


URL = f"memory://predecessor/{PIPELINE}"


@pytest.fixture
def folder() -> Folder:
    """Day 1 is committed; the trigger waits for run day2."""
    storage = open_storage(URL)
    for info in list(storage.list("")):
        storage.delete(info.path)
    made = Folder(storage, days=1)
    return made
