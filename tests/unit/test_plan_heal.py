"""What `cairn heal` decides: from a log of some days, from Airflow's runs and backfills, and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from cairn.operations.intervals.plan_heal import AirflowRun, AirflowView, HealPlan, OpenBackfill, health_of, plan_heal
from state_backend.chains.judge_inputs import Verdict
from state_backend.checkpoint.log import Log
from state_backend.values.marks import Quarantine
from state_backend.values.records import Permissions, Record
from tests.support.checkpoints import DAY, day, record
from tests.support.log_in_memory import log_in_memory

T0 = day(1).start + timedelta(days=100)
MINUTE = timedelta(minutes=1)


def log_of(*records: Record, refused: Sequence[int] = ()) -> Log:
    marks = {n: Quarantine(id=n, reason="rows", findings=()) for n in refused}
    return log_in_memory(entries={entry.id: entry for entry in records}, quarantined=marks)


def healthy(days: int) -> list[Record]:
    """Day n is checkpoint n."""
    return [record(n, day(n), n - 1 or None) for n in range(1, days + 1)]


def re_run(days: int, again: int, kept: Sequence[int] | None = None) -> list[Record]:
    """Days as above; then the day `again` with another state, which makes the later ones stale."""
    new = days + 1
    stale = {n: new if n > again else None for n in (kept or range(1, new))} | {new: None}
    return [*healthy(days), record(new, day(again), again - 1 or None, stale)]


def run(n: int, state: str, **more: Any) -> AirflowRun:
    """The run of the n-th day; an ended one ended n minutes after T0."""
    at = T0 + n * MINUTE
    ended = at if state in ("success", "failed") else None
    queued = {"queued": at - MINUTE, "began": None if state == "queued" else at - MINUTE / 2, "ended": ended}
    return AirflowRun(run_id=f"day{n}", start=day(n).start, state=state, **{"run_type": "backfill", **queued, **more})


def backfill(first: int, last: int, *, paused: bool = False, at_work: int = 1, id: int = 7) -> OpenBackfill:
    return OpenBackfill(
        id=id, first=day(first).start, last=day(last).start, paused=paused, created=T0 - DAY, at_work=at_work
    )


def plan(
    log: Log,
    to: int,
    *runs: AirflowRun,
    backfills: Sequence[OpenBackfill] = (),
    paused: bool = False,
    begin: int = 1,
    airflow: bool = True,
    seen: Mapping[str, datetime | None] | None = None,
    queued_for: timedelta = timedelta(0),
) -> HealPlan:
    view = AirflowView(dag_id="d", paused=paused, runs=runs, backfills=tuple(backfills)) if airflow else None
    calendar = [day(n) for n in range(begin, to + 1)]
    return plan_heal(health_of(log), calendar, view, first_seen=seen, queued_for=queued_for)


def days(first: int, last: int | None = None) -> str:
    """How a step names days."""
    names = [f"2024-01-{n:02}T00:00:00Z" for n in (first, last or first)]
    return f"the interval that starts at {names[0]}" if last is None else f"from {names[0]} to {names[1]}"


def over_a_gap(*kept: int) -> list[Record]:
    """Days 1, 2 and 4 to 6 are checkpoints 1 to 5. A person allowed the gap at day 3, and retention kept only `kept`."""
    gap = record(3, day(4), 2, permissions=Permissions(allow_gap=True))
    return [*healthy(2), gap, record(4, day(5), 3), record(5, day(6), 4, dict.fromkeys(kept))]


MISSING_2 = log_of(*healthy(1))
ENDED_3 = [run(1, "success"), run(2, "success"), run(3, "success")]


@pytest.mark.parametrize(
    ("log", "to", "steps"),
    [
        pytest.param(log_of(*healthy(3)), 3, [], id="healthy: nothing to do"),
        pytest.param(log_of(*healthy(3)), 2, [], id="healthy beyond the date"),
        pytest.param(log_of(), 2, [f"run 2 intervals {days(1, 2)}: 2 missing"], id="nothing ran yet"),
        pytest.param(MISSING_2, 3, [f"run 2 intervals {days(2, 3)}: 2 missing"], id="missing"),
        pytest.param(log_of(*re_run(4, 2)), 4, [f"run 2 intervals {days(3, 4)}: 2 stale"], id="stale"),
        pytest.param(
            log_of(*re_run(3, 2)), 5, [f"run 3 intervals {days(3, 5)}: 1 stale, 2 missing"], id="stale, then missing"
        ),
        pytest.param(log_of(*re_run(4, 2)), 3, [f"run {days(3)}: stale"], id="stale beyond the date stays"),
        pytest.param(log_of(*healthy(3), refused=[3]), 3, [f"run {days(3)}: quarantined"], id="quarantined"),
        pytest.param(
            log_of(*healthy(3), refused=[2]), 3, [f"run 2 intervals {days(2, 3)}: 2 quarantined"], id="descends from it"
        ),
        pytest.param(
            log_of(*healthy(2), record(3, day(2), 1), refused=[2]), 2, [], id="quarantined, and replaced by a valid one"
        ),
        pytest.param(
            # Day 3 is stale, and retention has dropped checkpoint 2, from which it starts.
            log_of(*re_run(4, 2, kept=[1, 4]), record(6, day(2), 1, {1: None, 4: 5})),
            4,
            [f"run 3 intervals {days(2, 4)}: 1 base dropped, 2 stale"],
            id="the base was dropped",
        ),
        pytest.param(
            log_of(*healthy(2), record(3, day(5), 2, permissions=Permissions(allow_gap=True))),
            6,
            [f"run {days(6)}: missing"],
            id="a gap that was allowed stays",
        ),
        pytest.param(
            log_of(
                *healthy(2),
                record(3, day(5), 2, permissions=Permissions(allow_gap=True)),
                record(4, day(1), None, {1: None, 2: 4, 3: 4, 4: None}),
            ),
            6,
            [f"run {days(2)}: stale", f"run {days(5)}: stale", f"run {days(6)}: missing"],
            id="stale behind a gap that was allowed",
        ),
        pytest.param(
            log_of(*over_a_gap(1, 5), refused=[4]),
            5,
            [f"run {days(2)}: base dropped", f"run {days(4)}: base dropped", f"run {days(5)}: quarantined"],
            id="the base was dropped, also that of the interval behind a gap",
        ),
        pytest.param(
            log_of(*over_a_gap(1, 2, 5), record(6, day(3), 2, {1: None, 2: None, 5: 6})),
            6,
            [f"run 4 intervals {days(3, 6)}: 1 base dropped, 3 stale"],
            id="a gap that was filled: day 4 starts from day 3",
        ),
        pytest.param(
            log_of(*healthy(4), record(5, day(2), 2, {1: None, 2: None, 3: 5, 4: 5, 5: None}, kind="restore")),
            4,
            [f"run 2 intervals {days(3, 4)}: 2 stale"],
            id="restored: what it discarded",
        ),
        pytest.param(log_of(record(1, day(4), None, kind="restore")), 5, [f"run {days(5)}: missing"], id="a fork"),
    ],
)
def test_a_plan_runs_the_intervals_that_the_log_lacks(log: Log, to: int, steps: list[str]) -> None:
    assert [str(step) for step in plan(log, to, airflow=False).steps] == steps
    assert [str(step) for step in plan(log, to).steps] == steps


END = f"none of its runs is for {days(2)}, which comes first"


@pytest.mark.parametrize(
    ("log", "to", "runs", "more", "steps"),
    [
        # --- failed ---------------------------------------------------------------------------------------------------
        (MISSING_2, 3, [run(2, "failed")], {}, [f"run 2 intervals {days(2, 3)}: 1 failed, 1 missing"]),
        # A re-run with corrected input failed: the old result is current, and somebody wanted another one.
        (log_of(*healthy(3)), 3, [*ENDED_3[:1], run(2, "failed"), ENDED_3[2]], {}, [f"run {days(2)}: failed"]),
        # Only its savepoint failed: the interval is done.
        (log_of(*healthy(3)), 3, [run(2, "failed", committed=True)], {}, []),
        # Two rows of neighbours: each its own backfill.
        (
            log_of(*healthy(5)),
            6,
            [run(2, "failed"), run(3, "success")],
            {},
            [f"run {days(2)}: failed", f"run {days(6)}: missing"],
        ),
        # A manual run failed, and the scheduled run succeeded later.
        (log_of(*healthy(1)), 1, [run(1, "failed"), run(1, "success", ended=T0 + DAY)], {}, []),
        # --- at work: waited for, not cleared -----------------------------------------------------------------------------
        (MISSING_2, 2, [run(2, "running")], {}, ["wait for run day2, which is running"]),
        (log_of(*healthy(2)), 2, [run(2, "running")], {}, ["wait for run day2, which is running"]),
        (
            MISSING_2,
            3,
            [run(2, "queued", run_type="scheduled")],
            {"paused": True},
            ["unpause DAG d", "wait for run day2, which is queued", f"run {days(3)}: missing"],
        ),
        # The runs at work between are passed by.
        (MISSING_2, 4, [run(3, "running")], {}, [f"run 2 intervals {days(2, 4)}: 2 missing"]),
        # --- backfills ----------------------------------------------------------------------------------------------------
        (
            MISSING_2,
            3,
            [run(2, "queued"), run(3, "queued")],
            {"backfills": [backfill(2, 3)]},
            [f"adopt {backfill(2, 3)}: wait for its run day2, which is queued"],
        ),
        (
            MISSING_2,
            3,
            [run(2, "queued"), run(3, "queued")],
            {"backfills": [backfill(2, 3, paused=True)]},
            [f"adopt {backfill(2, 3)}, which is paused: unpause it and wait for its runs"],
        ),
        # It goes on over days that have a result: somebody wanted it.
        (
            log_of(*healthy(3)),
            3,
            [run(1, "success"), run(2, "queued"), run(3, "queued")],
            {"backfills": [backfill(1, 3, paused=True)]},
            [f"adopt {backfill(1, 3)}, which is paused: unpause it and wait for its runs"],
        ),
        # It begins too late, and is in the way.
        (
            MISSING_2,
            4,
            [run(3, "running"), run(4, "queued")],
            {"backfills": [backfill(3, 4)]},
            [f"end {backfill(3, 4)}: {END}", f"run {days(2)}: missing"],
        ),
        (
            MISSING_2,
            2,
            [],
            {"backfills": [backfill(8, 9, paused=True)]},
            [f"end {backfill(8, 9)}: {END}", f"run {days(2)}: missing"],
        ),
        # All its runs have ended: Airflow closes it soon, and a cancelled one would keep cleared runs queued.
        (
            MISSING_2,
            3,
            [run(2, "failed"), run(3, "failed")],
            {"backfills": [backfill(2, 3, at_work=0)]},
            [f"run 2 intervals {days(2, 3)}: 2 failed"],
        ),
        # A run of a cancelled backfill was cleared: Airflow never starts it.
        (MISSING_2, 2, [run(2, "queued")], {}, ["wait for run day2, which is queued"]),
        (
            MISSING_2,
            2,
            [run(2, "queued")],
            {"queued_for": MINUTE},
            ["mark run day2 as failed: it is queued, and the backfill that it belongs to has ended"],
        ),
        # The run was queued before the open backfill was created, so the run belongs to another backfill.
        (
            MISSING_2,
            2,
            [run(2, "queued", queued=T0 - 2 * DAY)],
            {"backfills": [backfill(2, 3)], "queued_for": MINUTE},
            ["mark run day2 as failed: it is queued, and the backfill that it belongs to has ended"],
        ),
        # Airflow creates a backfill and its runs in one go, so both may have one time.
        (
            MISSING_2,
            2,
            [run(2, "queued", queued=T0 - DAY)],
            {"backfills": [backfill(2, 3)], "queued_for": MINUTE},
            [f"adopt {backfill(2, 3)}: wait for its run day2, which is queued"],
        ),
        # --- what does not help is not repeated -------------------------------------------------------------------------------
        (
            MISSING_2,
            3,
            [run(1, "success"), run(2, "failed"), run(3, "queued")],
            {"seen": {"day2": None}, "backfills": [backfill(2, 3)]},
            [f"end {backfill(2, 3)}: its runs come after {days(2)}", f"stop: run day2 of {days(2)} failed"],
        ),
        (
            MISSING_2,
            2,
            [run(2, "success")],
            {"seen": {"day2": T0}},
            [f"stop: run day2 of {days(2)} succeeded, but the interval is still missing in the log"],
        ),
        # It ended before the run of the day before, so it could not succeed.
        (
            MISSING_2,
            2,
            [run(1, "success", ended=T0 + DAY), run(2, "failed")],
            {"seen": {"day2": None}},
            [f"run {days(2)}: failed"],
        ),
    ],
)
def test_a_plan_repeats_the_failed_runs_that_airflow_knows(
    log: Log, to: int, runs: list[AirflowRun], more: dict[str, Any], steps: list[str]
) -> None:
    assert [str(step) for step in plan(log, to, *runs, **more).steps] == steps


def test_a_changed_input_before_a_valid_checkpoint_runs_no_interval_of_a_gap() -> None:
    log = log_of(*over_a_gap(1, 5), record(6, day(7), 5, {1: None, 6: None}))
    health = health_of(log, {day(6): Verdict(kind="stale", why="w"), day(7): Verdict(kind="pending", why="w")})
    found = plan_heal(health, [day(n) for n in range(2, 8)], None)
    assert [one.interval for one in found.to_run] == [day(2), *map(day, (4, 5, 6))] and found.skipped == (day(3),)


def test_a_failed_run_whose_base_is_dropped_is_left_alone() -> None:
    """Its interval has a valid result, and a repeat would compute weeks from an earlier checkpoint."""
    log = log_of(*healthy(3), record(4, day(4), 3, {3: None, 4: None}))
    found = plan(log, 4, run(2, "failed"))
    assert found.steps == () and [run.run_id for run in found.not_repeatable] == ["day2"]


def test_a_stale_result_off_the_current_schedule_is_reported() -> None:
    log = log_of(*re_run(3, 2))
    halves = [replace(i, end=i.start + DAY / 2) for i in (day(1), day(2))]
    found = plan_heal(health_of(log), [*halves, replace(day(3), start=day(3).start + DAY / 2)], None)
    assert [i.start for i in found.off_schedule] == [day(3).start]
