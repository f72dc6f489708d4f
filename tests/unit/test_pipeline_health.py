"""How well a pipeline is: one rule, as a table and over random worlds of intervals, runs, pauses and checkpoints."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from state_backend.inspection.pipeline_health import (
    GRACE,
    Facts,
    Trouble,
    asked_until,
    broken,
    due_intervals,
    findings,
    troubles,
)
from state_backend.inspection.pipeline_status import Status
from state_backend.values.airflow_runs import DagRun, DagSchedule, FailingTask
from state_backend.values.intervals import Interval
from tests.support.checkpoints import day
from tests.support.log_in_memory import log_in_memory

NOW = day(9).end + timedelta(minutes=30)
HOUR = timedelta(hours=1)
WELL = Status(next=day(10), base=9, problem=None, rerun=None, stale=(), quarantined=(), unpublished=())
FAILING = FailingTask(
    dag_id="d", run_id="r", interval=day(7), task_id="process", try_number=3, tries=4, ended=NOW - timedelta(seconds=40)
)


def run_of(number: int, state: str, ended_h: float | None = 0.2, **changes: Any) -> DagRun:
    """The run of a day; hours count from the end of the day."""
    ended = None if ended_h is None else day(number).end + timedelta(hours=ended_h)
    made = {"run_id": f"{state}-{number}", "start": day(number).start, "end": day(number).end, "ended": ended}
    return DagRun(state=state, **(made | changes))


def plan(**changes: Any) -> DagSchedule:
    said = {"paused": False, "asked_end": day(9).end, "next_due": day(10).end, "running": 0}
    return DagSchedule(**(said | changes))


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
        (facts(9, plan(paused=True)), "warn", ["paused"]),
        # No scheduler creates the run that is due.
        (facts(9, plan(), day(10).end + 2 * HOUR), "bad", ["late by 2 h"]),
        (facts(8, None, unreadable="away"), "warn", ["unreadable"]),
        (Facts(now=NOW, unreadable="away"), "bad", ["unreadable"]),
        (Facts(now=NOW, status=WELL, begun=False), "info", ["no checkpoint yet"]),
        (Facts(now=NOW, status=WELL, begun=False, schedule=plan()), "bad", ["late by 30 min"]),
        (
            Facts(now=NOW, status=WELL, begun=False, schedule=plan(asked_end=None, next_due=None)),
            "info",
            ["no checkpoint yet", "no run due"],
        ),
        (
            facts(9, plan(waiting=frozenset({"r"})), unvalidated=(2, 7)),
            "good",
            ["on time", "waiting", "2 not validated"],
        ),
    ],
)
def test_what_there_is_to_say(known: Facts, tone: str, said: list[str]) -> None:
    found = findings(known)
    assert ([one.text for one in found], found[0].tone) == (said, tone)


def test_a_failing_task_is_told_in_words() -> None:
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
        (
            8,
            [],
            [run_of(9, "failed", 0.3), run_of(9, "failed", 0.1, run_id="a")],
            plan(),
            ("failed", 9),
            9,
            {"failed": 1},
        ),
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
def test_since_when_and_up_to_which_interval_a_pipeline_is_broken(
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


states = st.sampled_from(["none", "success", "failed", "running", "queued", "failed then running"])
worlds = st.fixed_dictionaries(
    {
        "usable": st.integers(1, 9),
        "states": st.lists(states, min_size=8, max_size=8),
        "bad": st.sets(st.integers(2, 9), max_size=3),
        "paused": st.booleans(),
        "ended": st.booleans(),
        "failing": st.booleans(),
        "blocked": st.booleans(),
        "unreadable": st.booleans(),
        "hours": st.integers(0, 60),
    }
)


@given(worlds)
def test_it_is_never_green_while_something_is_wrong(world: dict[str, Any]) -> None:
    """The oracle counts days: it knows neither `due_intervals` nor `troubles`."""
    now = day(9).end + world["hours"] * HOUR
    runs: list[DagRun] = []
    for number, state in enumerate(world["states"], 2):
        if state != "none" and number > world["usable"]:
            runs += [
                run_of(number, one, None if one in ("running", "queued") else 0.1) for one in state.split(" then ")
            ]
    unfinished = [one for one in runs if one.unfinished]
    asked = max((one.interval for one in runs if one.interval), default=day(world["usable"]))
    schedule = plan(
        paused=world["paused"],
        asked_end=asked.end,
        next_due=None if world["ended"] else day(10).end,
        running=len(unfinished),
    )
    known = facts(
        world["usable"],
        schedule,
        now,
        runs=runs,
        unusable=[bad(n, n, "stale", 99) for n in sorted(world["bad"]) if n > world["usable"]],
        failing=[FAILING] if world["failing"] and unfinished else [],
        status=Status(
            **{name: getattr(WELL, name) for name in WELL.__slots__} | {"problem": "it" if world["blocked"] else None}
        ),
        unreadable="away" if world["unreadable"] else None,
    )
    until = now if not world["ended"] and day(10).end <= now else asked.end
    lacking = [n for n in range(world["usable"] + 1, 14) if day(n).end <= min(until, now - GRACE)]
    overdue = not world["ended"] and now - day(10).end > GRACE and not lacking
    wrong = (
        bool(lacking) or overdue or bool(known.failing) or world["blocked"] or world["unreadable"] or world["paused"]
    )
    found = findings(known)
    assert (found[0].tone != "good") == (wrong or bool(troubles(known))), found
    # Without a person nothing gets right: the pipeline is broken from the first such interval up to the last one.
    of_day = {n: [one.state for one in runs if one.interval == day(n)] for n in range(2, 14)}
    failed = [n for n, of in of_day.items() if "failed" in of and not {"running", "queued"} & {*of}]
    said = broken(known)
    for n in {*failed, *(n for n in world["bad"] if n > world["usable"])}:
        assert said is not None and said.first.interval <= day(n) <= said.last
    if lacking and said is not None:
        assert said.last == max(day(lacking[-1]), *(one.interval for one in troubles(known)))
    if lacking and not unfinished and not world["paused"] and not of_day[lacking[0]] and lacking[0] not in world["bad"]:
        assert said is not None and said.first.interval <= day(lacking[0])


def test_airflow_has_asked_for_nothing_without_a_schedule() -> None:
    assert asked_until(None, NOW) is None and due_intervals(log_in_memory({}), day(1), None, NOW) == []
    assert due_intervals(log_in_memory({}), None, plan(), NOW) == []
    assert due_intervals(log_in_memory({}), Interval(day(7).start, day(7).end), plan(), NOW) == [day(8), day(9)]
