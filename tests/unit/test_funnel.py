"""Funnels: small examples, and declarations that are refused. Their law: tests/property/test_window_laws.py."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from cairn.errors import ProcessorError, UsageError
from cairn.processors import Funnel
from tests.support.ready_made import HOUR, TIMED, at, declared, ready

STEPS: dict[str, Any] = {"step": "page", "steps": ("cart", "address", "payment"), "within": HOUR}
CLICKS = "user string, seq int, at timestamp, page string"
NOW = {**TIMED, "watermark_delay": timedelta(0)}


def funnels(rows: list[dict[str, Any]]) -> list[Any]:
    return sorted(
        (row["user"], f"{row['funnel_start']:%H:%M}", row["last_step"], row["steps_reached"], row["is_completed"])
        for row in rows
    )


def test_a_funnel_is_completed_or_abandoned() -> None:
    steps = ready(declared(Funnel, **STEPS), CLICKS, **NOW)
    rows = [
        ("ann", 1, at(0, 0), "cart"),
        ("ann", 2, at(0, 10), "home"),
        ("ann", 3, at(0, 20), "address"),
        ("ann", 4, at(0, 30), "payment"),
        ("bob", 5, at(0, 30), "cart"),
        ("bob", 6, at(0, 35), "payment"),
        ("bob", 7, at(0, 40), "address"),
        ("cid", 8, at(0, 40), "payment"),
    ]
    first = steps.run(rows).output
    assert funnels(first) == [("ann", "00:00", "payment", 3, True)]
    assert (first[0]["funnel_end"], first[0]["step_times"]) == (at(0, 30), [at(0, 0), at(0, 20), at(0, 30)])
    assert [row["step"] for row in steps.state("rows")] == [0, 2, 1]  # Those of bob.
    assert funnels(steps.run([("bob", 9, at(1, 30), "payment")]).output) == [("bob", "00:30", "address", 2, False)]
    steps.run()
    assert steps.state("rows") == [] and steps.timers() == []


@pytest.mark.long("half a second", runs_in="ci")
def test_a_further_first_step_opens_the_funnel_anew() -> None:
    steps = ready(declared(Funnel, **STEPS), CLICKS, **NOW)
    rows = [("ann", minute, at(0, minute), "cart") for minute in (0, 20, 50)]
    assert steps.run(rows).output == []
    # Only the last of these rows may still open a funnel.
    assert [row["at"] for row in steps.state("rows")] == [at(0, 50)]
    assert funnels(steps.run([("ann", 60, at(1, 45), "address")]).output) == [("ann", "00:50", "address", 2, False)]
    assert steps.state("rows") == steps.timers() == []


def test_the_next_funnel_begins_behind_the_last_row_that_counted() -> None:
    steps = ready(declared(Funnel, **STEPS), CLICKS, **NOW)
    pages = [(0, "cart"), (10, "address"), (20, "cart"), (30, "address"), (65, "payment")]
    rows = [("ann", minute, at(0) + timedelta(minutes=minute), page) for minute, page in pages]
    assert funnels(steps.run(rows[:4]).output) == [("ann", "00:00", "address", 2, False)]
    assert funnels(steps.run(rows[4:]).output) == [("ann", "00:20", "payment", 3, True)]


def test_a_late_row_completes_a_funnel() -> None:
    steps = ready(declared(Funnel, **STEPS), CLICKS, **{**TIMED, "watermark_delay": HOUR})
    steps.run([("ann", 1, at(0, 10), "cart"), ("ann", 2, at(0, 30), "payment")])
    assert funnels(steps.run([("ann", 3, at(0, 20), "address")]).output) == [("ann", "00:10", "payment", 3, True)]


def test_steps_may_be_numbers() -> None:
    steps = ready(declared(Funnel, step="seq", steps=[2, 1], within=HOUR), CLICKS, **NOW)
    (row,) = steps.run([("ann", 2, at(0, 0), None), ("ann", 1, at(0, 1), None)]).output
    assert (row["last_step"], row["is_completed"]) == (1, True)


def test_a_step_without_a_time_is_refused() -> None:
    steps = ready(declared(Funnel, **STEPS), CLICKS, **NOW)
    with pytest.raises(ProcessorError, match="Mine: a row of key user='ann' has no event time"):
        steps.run([("ann", 1, None, "cart")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": None}, r'Mine\.step is None; name the column with the steps, as in step = "page"'),
        ({"steps": ("cart",)}, r"Mine\.steps is \('cart',\); name at least two different steps"),
        ({"steps": ("cart", "cart")}, r"Mine\.steps is .*; name at least two different steps"),
        ({"steps": (["cart"], ["payment"])}, r"Mine\.steps is .*; name at least two different steps"),
        ({"within": 5}, r"Mine\.within is 5; write within = timedelta\(hours=1\)"),
        ({"gap": HOUR}, r"Mine\.gap is no setting of Funnel; its settings are step, steps, within"),
    ],
)
def test_a_wrong_setting_is_refused_where_the_class_is_declared(change: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        declared(Funnel, **{**STEPS, **change})


@pytest.mark.parametrize(
    ("processor", "pipeline", "message"),
    [
        (Funnel, TIMED, r'Funnel\.step is missing; name the column with the steps, as in step = "page"'),
        (declared(Funnel, **STEPS), {}, "Mine: Funnel needs event time"),
        (declared(Funnel, **{**STEPS, "step": "at"}), TIMED, r"Mine\.steps is .*, but column 'at' is timestamp; name"),
        (
            declared(Funnel, step="seq", steps=(1, 2.7), within=HOUR),
            TIMED,
            r"Mine\.steps is \(1, 2\.7\), but column 'seq' is int; name values of this column",
        ),
        (declared(Funnel, **{**STEPS, "step": "day"}), TIMED, r"Mine\.step names column 'day', which the input lacks"),
    ],
)
def test_a_funnel_that_does_not_fit_the_pipeline_is_refused(processor: Any, pipeline: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ready(processor, CLICKS, **pipeline).run([])
