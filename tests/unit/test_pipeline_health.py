"""How well a pipeline is: one rule, as a table and over random histories of intervals, runs, pauses and checkpoints."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.models import import_all_models
from airflow.models.base import metadata
from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun as Row
from airflow.models.taskinstance import TaskInstance
from sqlalchemy import create_engine, insert, update
from sqlalchemy.orm import Session
from sqlalchemy.pool import StaticPool

from cairn_ui import airflow_database, database_runs
from cairn_ui.pipeline_overview import FromAirflow, facts_of, latest_usable
from cairn_ui.pipelines_of_dags import PipelineRef
from cairn_ui.read_logs import Reader
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.inspection.pipeline_health import GRACE, Facts, Trouble, asked_until, broken, due_intervals, findings
from state_backend.inspection.pipeline_status import Status
from state_backend.values.airflow_runs import DagRun, DagSchedule, FailingTask
from state_backend.values.errors import CairnError
from state_backend.values.intervals import Interval
from tests.support.checkpoints import PIPELINE, Folder, day
from tests.support.log_in_memory import log_in_memory
from tests.support.shown_pipelines import plan
from tests.support.tiers import at_tier

NOW = day(9).end + timedelta(minutes=30)
HOUR = timedelta(hours=1)
WELL = Status(next=day(10), base=9, problem=None, rerun=None, stale=(), quarantined=(), unpublished=())
BLOCKED = replace(WELL, problem="x")
FAILING = FailingTask(
    dag_id="d", run_id="r", interval=day(7), task_id="process", try_number=3, tries=4, ended=NOW - timedelta(seconds=40)
)


def run_of(number: int, state: str, ended_h: float | None = 0.2, **changes: Any) -> DagRun:
    """The run of a day; hours count from the end of the day."""
    ended = None if ended_h is None else day(number).end + timedelta(hours=ended_h)
    made = {"run_id": f"{state}-{number}", "start": day(number).start, "end": day(number).end, "ended": ended}
    return DagRun(state=state, **(made | changes))


def bad(number: int, checkpoint: int, why: Any, by: int | None = None) -> Trouble:
    return Trouble(interval=day(number), why=why, checkpoint=checkpoint, by=by)


def facts(until: int = 9, schedule: DagSchedule | None = None, now: datetime = NOW, **more: Any) -> Facts:
    """Facts about a pipeline whose newest usable state is that of a day."""
    due = due_intervals(log_in_memory({}), day(until), schedule, now)
    return Facts(**({"now": now, "status": WELL, "until": day(until).end, "due": due, "schedule": schedule} | more))


@pytest.mark.parametrize(
    ("known", "tone", "said"),
    [
        (facts(), "good", ["no problems"]),
        (facts(schedule=plan()), "good", ["on time"]),
        (facts(8, plan()), "bad", ["late by 30 min"]),
        (facts(8, plan(), day(9).end + timedelta(minutes=5)), "good", ["on time"]),
        (facts(7, plan()), "bad", ["late by 1 d"]),  # since the first one was due
        # The runs of `make demo` used another root than the page reads.
        (facts(8, plan(next_due=None)), "warn", ["incomplete"]),
        (facts(9, plan(next_due=None)), "good", ["no problems", "no run due"]),
        # The schedule has ended, and its last run failed; or a run beside it succeeded.
        (facts(8, plan(next_due=None), runs=[run_of(9, "failed")]), "bad", ["1 failed", "incomplete"]),
        (facts(9, plan(), runs=[run_of(9, "failed")]), "warn", ["1 run failed, results kept"]),
        (facts(9, plan(), runs=[run_of(9, "success", 0.3), run_of(9, "failed")]), "good", ["on time"]),
        (facts(8, plan(running=1), runs=[run_of(9, "running", None)]), "info", ["running"]),
        (facts(9, plan(running=1)), "good", ["on time"]),
        # An older run fails and newer ones are in progress, as in a backfill.
        (
            facts(6, plan(running=3), runs=[run_of(n, "running", None) for n in (7, 8, 9)], failing=[FAILING]),
            "warn",
            ["failing", "running"],
        ),
        (facts(8, plan(), runs=[run_of(9, "failed")]), "bad", ["1 failed", "late by 30 min"]),
        (facts(8, plan(paused=True)), "warn", ["paused, behind 30 min"]),
        (facts(8, plan(paused=True, asked_end=day(8).end, next_due=day(9).end)), "warn", ["paused, behind 30 min"]),
        # Airflow starts no further task of this run.
        (facts(8, plan(paused=True, running=1), runs=[run_of(9, "running", None)]), "warn", ["paused, behind 30 min"]),
        (facts(9, plan(paused=True)), "warn", ["paused"]),
        # No scheduler creates the run that is due.
        (facts(9, plan(), day(10).end + 2 * HOUR), "bad", ["late by 2 h"]),
        (facts(8, None, unreadable="away"), "warn", ["unreadable"]),
        (facts(unreadable="away", status=BLOCKED), "bad", ["next interval can't start", "unreadable"]),
        (Facts(now=NOW, unreadable="away"), "bad", ["unreadable"]),
        (Facts(now=NOW, status=WELL, begun=False), "info", ["no checkpoint yet"]),
        (Facts(now=NOW, status=WELL, begun=False, schedule=plan()), "bad", ["late by 30 min"]),
        (
            Facts(now=NOW, status=WELL, begun=False, schedule=plan(asked_end=None, next_due=None)),
            "info",
            ["no checkpoint yet", "no run due"],
        ),
        (facts(9, plan(waiting={"r"}), unvalidated=(2, 7)), "good", ["on time", "waiting", "2 not validated"]),
    ],
)
def test_health_findings_follow_from_log_schedule_and_runs(known: Facts, tone: str, said: list[str]) -> None:
    found = findings(known)
    assert ([one.text for one in found], found[0].tone) == (said, tone)


def test_a_failing_task_is_described_with_try_interval_and_age() -> None:
    failing = findings(facts(9, plan(running=1), failing=[FAILING, FAILING]))[0]
    assert failing.title == (
        f"try 3 of 4 of task process of {day(7)} failed 40 s ago, and 1 other task failed. Airflow tries again."
    )


@pytest.mark.parametrize(
    ("until", "unusable", "runs", "schedule", "first", "last", "counts"),
    [
        # The first failed run counts, and a failure that is being repeated does not.
        (6, [], [run_of(7, "failed"), run_of(8, "failed")], plan(), ("failed", 7), 9, {"failed": 2, "missing": 1}),
        (8, [], [run_of(9, "failed"), run_of(9, "running", None)], plan(running=1), None, 0, {}),
        (8, [], [run_of(9, "failed", 0.3), run_of(9, "failed", 0.1)], plan(), ("failed", 9), 9, {"failed": 1}),
        # A checkpoint that can't be used says more than its run. Of an interval, the newest checkpoint counts.
        (8, [bad(9, 3, "stale", 9)], [run_of(9, "success")], plan(), ("stale", 9), 9, {"stale": 1}),
        (
            7,
            [bad(8, 14, "quarantined"), bad(8, 12, "stale", 13), bad(9, 15, "descends")],
            [run_of(8, "failed")],
            plan(),
            ("quarantined", 8),
            9,
            {"quarantined": 1, "descends": 1},
        ),
        # Every interval that is due and has no run counts, up to the last one.
        (4, [], [], plan(), ("missing", 5), 9, {"missing": 5}),
        (7, [], [run_of(9, "failed")], plan(), ("missing", 8), 9, {"missing": 1, "failed": 1}),
        # A run waits for the intervals before it, which have none.
        (5, [], [run_of(9, "running", None)], plan(running=1), ("missing", 6), 9, {"missing": 3}),
        # Airflow is about to create the run: its earlier runs are in progress, or the DAG is paused.
        (6, [], [run_of(7, "running", None)], plan(running=1, asked_end=day(7).end, next_due=day(8).end), None, 0, {}),
        (8, [], [], plan(paused=True, asked_end=day(8).end, next_due=day(9).end), None, 0, {}),
        # It is not due: in the future, or after the schedule's last run.
        (9, [], [], plan(), None, 0, {}),
        (8, [], [], plan(next_due=None, asked_end=day(8).end), None, 0, {}),
        (7, [], [], None, None, 0, {}),
        # The next run is due later, as on the day after Friday; or it is overdue, since no scheduler runs.
        (8, [], [], plan(asked_end=day(8).end), None, 0, {}),
        (8, [], [], plan(asked_end=day(8).end, next_due=day(9).end), ("missing", 9), 9, {"missing": 1}),
    ],
)
def test_a_pipeline_is_broken_from_its_first_to_its_last_bad_interval(
    until: int, unusable: Any, runs: Any, schedule: Any, first: Any, last: int, counts: dict[str, int]
) -> None:
    found = broken(facts(until, schedule, unusable=unusable, runs=runs))
    if first is None:
        assert found is None
    else:
        assert found is not None and (found.first.why, found.first.interval) == (first[0], day(first[1]))
        assert (dict(found.counts), found.last) == (counts, day(last))
        ended = min((run.ended for run in runs if run.interval == day(first[1]) and run.ended), default=None)
        assert found.first.since == {"failed": ended, "missing": day(first[1]).end}.get(first[0])


def test_an_interval_is_missing_only_after_ten_minutes() -> None:
    said = [broken(facts(8, plan(), day(9).end + timedelta(minutes=m))) is not None for m in (0, 9, 10)]
    assert said == [False, False, True]


def day_of(run_id: str) -> int:
    return int(run_id[1:])


class History:
    """A pipeline under Airflow. What happens goes to a real log and to Airflow's tables; the oracle keeps its own record of each day."""

    def __init__(self, chance: random.Random, session: Session) -> None:
        self.chance, self.session, self.dag_id = chance, session, f"d{chance.random()}"
        self.folder, self.now = Folder(MemoryStorage(f"memory://{self.dag_id}/x")), day(1).end
        self.next, self.paused, self.made = 1, False, 0
        # By id, those that ended in the order of their ends: running, failing, success or failed.
        self.runs: dict[str, str] = {}
        # Of each commit: day, digest, id of the base, and whether it is stale or refused.
        self.commits: dict[int, SimpleNamespace] = {}
        bundle = {"bundle_name": "b", "max_active_tasks": 1, "max_consecutive_failed_dag_runs": 0}
        bundle |= {"has_task_concurrency_limits": False}
        session.execute(
            insert(DagModel).values(dag_id=self.dag_id, is_paused=False, next_dagrun_create_after=self.now, **bundle)
        )

    def happen(self) -> None:
        """Let one thing happen."""
        ended = [n for n, state in self.runs.items() if state in ("success", "failed")]
        open_ = [n for n in self.runs if n not in ended]
        kind = self.chance.choice(
            ["tick", "create", "create", "again", "end", "end", "end", "retry", "clear", "refuse", "pause"]
        )
        if kind == "tick":
            self.now += timedelta(minutes=self.chance.choice([5, 60, 24 * 60]))
        elif kind == "create" and not self.paused and day(self.next).end <= self.now:
            self.next += self.chance.random() < 0.1  # a day that Airflow leaves out, as without catchup
            self.create(f"r{self.next}")
            self.next += 1
        elif kind == "again" and self.runs and self.chance.random() < 0.5:  # a manual run beside the scheduled one
            manual = f"m{day_of(self.chance.choice([*self.runs]))}"
            self.create(manual) if manual not in self.runs else None
        elif kind == "end" and open_:
            self.end(self.chance.choice(open_))
        elif kind == "retry" and open_:
            self.retry(self.chance.choice(open_))
        elif kind == "clear" and ended and self.chance.random() < 0.6:
            self.clear(self.chance.choice(ended))
        elif kind == "refuse" and self.commits and self.chance.random() < 0.3:
            refused = self.chance.choice([n for n in self.commits if self.newest(self.commits[n].day) == n])
            self.folder.coordinator.quarantine(refused, "a sum is wrong")
            self.commits[refused].refused = True
        elif kind == "pause" and self.chance.random() < 0.3:
            self.paused = not self.paused
        said = {"is_paused": self.paused, "next_dagrun_create_after": day(self.next).end}
        self.session.execute(update(DagModel).where(DagModel.dag_id == self.dag_id).values(**said))

    def create(self, one: str) -> None:
        of, late = day(day_of(one)), timedelta(hours=one[0] == "m")
        run = {"dag_id": self.dag_id, "run_id": one, "run_type": "scheduled", "logical_date": of.start + late}
        run |= {"data_interval_start": of.start, "data_interval_end": of.end, "start_date": self.now}
        self.session.execute(insert(Row).values(state="running", run_after=of.end, **run))
        task = {"dag_id": self.dag_id, "run_id": one, "task_id": "process", "pool": "p", "max_tries": 3}
        self.session.execute(insert(TaskInstance).values(state="running", try_number=1, map_index=-1, **task))
        self.runs[one] = "running"

    def end(self, one: str) -> None:
        """The run commits, with the result of before or another one, or fails, as it does if Cairn refuses it."""
        n, self.made, self.now = day_of(one), self.made + 1, self.now + timedelta(seconds=1)
        digest = self.chance.choice([n, 100 + self.made])
        state = "failed"
        with suppress(CairnError):
            if self.chance.random() < 0.75:
                base = self.usable(n - 1)
                made = self.folder.run(day(n), f"a{self.made}", digest=digest).id
                self.folder.coordinator.publish(None)
                self.remember(made, n, digest, base)
                state = "success"
        self.say(one, state, state, end=self.now)
        self.runs = {**{other: said for other, said in self.runs.items() if other != one}, one: state}

    def remember(self, made: int, n: int, digest: int, base: int | None) -> None:
        of_day = [one for one in self.commits.values() if one.day == n]
        usable = [one for one in of_day if not self.is_refused(one)]
        if not of_day or any(one.digest != digest for one in (of_day[-1], *usable[-1:])):
            for one in self.commits.values():
                one.stale |= one.day > n
        # A commit drops what was computed from a refused one, but no base of a refused one.
        held = {i for i, one in self.commits.items() if one.refused or not self.is_refused(one)}
        held |= {one.base for one in self.commits.values() if one.refused}
        self.commits = {i: one for i, one in self.commits.items() if i in held}
        self.commits[made] = SimpleNamespace(day=n, digest=digest, base=base, stale=False, refused=False)

    def retry(self, one: str) -> None:
        self.say(one, "running", "up_for_retry", end=self.now)
        self.runs[one] = "failing"

    def clear(self, one: str) -> None:
        self.say(one, "queued", None, end=None, max_tries=9)
        self.runs[one] = "running"

    def say(self, one: str, run: str, task: str | None, end: datetime | None, **more: Any) -> None:
        key = {"dag_id": self.dag_id, "run_id": one}
        ended = None if run in ("running", "queued") else end
        self.session.execute(update(Row).filter_by(**key).values(state=run, end_date=ended))
        self.session.execute(update(TaskInstance).filter_by(**key).values(state=task, end_date=end, **more))

    # --- the oracle -------------------------------------------------------------------------------------------------------

    def is_refused(self, one: SimpleNamespace | None) -> bool:
        return one is not None and (one.refused or self.is_refused(self.commits.get(one.base)))

    def newest(self, n: int) -> int | None:
        """The commit of a day that counts: the newest one that is not refused, else the newest one."""
        of_day = [i for i, one in self.commits.items() if one.day == n]
        return max([i for i in of_day if not self.is_refused(self.commits[i])] or of_day, default=None)

    def usable(self, n: int) -> int | None:
        found = self.newest(n)
        one = None if found is None else self.commits[found]
        return None if one is None or one.stale or self.is_refused(one) else found

    def check(self) -> None:
        known = self.known()
        until = max((n for n in range(1, self.next + 1) if self.usable(n)), default=0)
        assert known.until == (day(until).end if until else None)
        of = {n: [s for one, s in self.runs.items() if day_of(one) == n] for n in map(day_of, self.runs)}
        asked = max(of, default=0)
        last = 99 if day(self.next).end <= self.now else asked
        lacking = [n for n in range(until + 1, last + 1) if day(n).end <= self.now - GRACE]
        of_day = {n: self.commits[i] for n in range(1, self.next + 1) if (i := self.newest(n))}
        unusable = {n: one for n, one in of_day.items() if one.stale or self.is_refused(one)}
        # A refused checkpoint is told until its day has a newer result, also if an older one counts again.
        refused = [i for i, one in self.commits.items() if one.refused and (self.newest(one.day) or 0) <= i]
        failing = "failing" in self.runs.values()
        failed = [n for n, states in of.items() if {*states} <= {"success", "failed"} and states[-1] == "failed"]
        found = findings(known)
        wrong = bool(lacking or unusable or refused or failing or failed or self.paused)
        assert not wrong or found[0].tone != "good", found
        assert wrong or found[0].tone == ("good" if self.commits else "info"), found
        running = any(state in ("running", "failing") for state in self.runs.values())
        gone = [n for n in lacking if until and n not in of and (n <= asked or not (self.paused or running))]
        first = min(
            [*(n for n in unusable if n > until), *(n for n in failed if n > until and n not in unusable), *gone],
            default=None,
        )
        said = broken(known)
        assert (None if said is None else said.first.interval) == (None if first is None else day(first)), (said, first)

    def known(self) -> Facts:
        """What the overview knows: the log, and the answers to its queries."""
        look = Reader(lambda _: self.folder.storage).look(PipelineRef(name=PIPELINE, root="memory://x"))
        usable = None if look.reading is None else latest_usable(look.reading)
        runs = database_runs.runs_after(self.dag_id, usable and usable.content.interval.end, 50)
        airflow = FromAirflow(
            schedule=airflow_database.schedules_of({self.dag_id})[self.dag_id],
            runs=(*runs, *(one for one in database_runs.last_runs([self.dag_id], 30)[self.dag_id] if one not in runs)),
            failing=tuple(database_runs.failing_tasks([self.dag_id]).get(self.dag_id, ())),
        )
        return facts_of(look, airflow, self.now)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Airflow's tables in SQLite, for the queries of the pages."""
    engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    import_all_models()
    metadata.create_all(engine)
    with Session(engine) as opened, pytest.MonkeyPatch.context() as patch:
        for module in (airflow_database, database_runs):
            patch.setattr(module, "create_session", lambda: nullcontext(opened))
        yield opened


@pytest.mark.parametrize("seed", range(at_tier(fast=3, ci=10, all=200)))
def test_health_in_random_histories_agrees_with_an_oracle(session: Session, seed: int) -> None:
    history = History(random.Random(seed), session)
    for _ in range(40):
        history.happen()
        history.check()


def test_no_interval_is_due_without_a_schedule() -> None:
    assert asked_until(None, NOW) is None and due_intervals(log_in_memory({}), day(1), None, NOW) == []
    assert due_intervals(log_in_memory({}), None, plan(), NOW) == []
    assert due_intervals(log_in_memory({}), Interval(day(7).start, day(7).end), plan(), NOW) == [day(8), day(9)]
