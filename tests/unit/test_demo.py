"""The demo's patience, lines and verdict, without Airflow and Spark."""

from __future__ import annotations

import pytest

from local_stack.demo import activity_of
from local_stack.demo_report import DayResult, verdict_of
from local_stack.patience import Patience
from local_stack.progress_lines import ProgressLines


@pytest.mark.parametrize(
    ("progress_at_s", "gives_up_at_s"),
    [
        ([], 301),
        # The whole wait may be long, as long as something moves.
        ([250 * n for n in range(1, 20)], 250 * 19 + 1251),
        ([10, 20, 30], 331),
        # A machine that needed 100 s for a step gets five times as long.
        ([100], 601),
        ([20], 321),
    ],
)
def test_patience_ends_only_without_progress(progress_at_s: list[int], gives_up_at_s: int) -> None:
    patience = Patience(0, least_s=300)
    patience.is_over(0, 0)
    seconds = (s for s in range(10_000) if patience.is_over(sum(at <= s for at in progress_at_s), s))
    assert next(seconds) == gives_up_at_s


def test_progress_lines_are_written_under_a_lock_and_stop_with_the_block() -> None:
    held: list[bool] = []
    with ProgressLines(write=lambda _: held.append(lines._lock.locked())) as lines:
        lines.say("one")
    assert (held, lines._filler.is_alive()) == ([True], False)


def test_a_running_task_is_named_before_one_that_waits() -> None:
    assert activity_of([("day", "a", "success"), ("day", "b", "queued"), ("day", "c", "running")]) == "day: c runs"


def day(number: int, tries: int = 1, expectations: int | None = 9) -> DayResult:
    return DayResult(
        day=f"2013-01-{number:02}",
        checkpoint=number,
        input_rows=842,
        keys=1_892,
        uploaded_bytes=37,
        state_bytes=100,
        seconds=12.34,
        tries=tries,
        expectations=expectations,
        entries=7_808,
    )


@pytest.mark.parametrize(
    ("results", "killed", "verdict"),
    [
        (
            [day(n, tries=1 + (n == 5)) for n in range(1, 7)],
            "2013-01-05",
            "6 days, 1 driver killed and recovered, 54 checks passed",
        ),
        # A driver that was killed after its result counted needed no second try: nothing was recovered.
        ([day(1)], "2013-01-01", "1 day, 1 driver killed, 9 checks passed"),
        ([day(1, tries=2, expectations=None)], None, "1 day, no driver killed"),
    ],
)
def test_the_verdict_has_measured_numbers_only(results: list[DayResult], killed: str | None, verdict: str) -> None:
    assert verdict_of(results, killed) == f"{verdict}, 63 % fewer bytes uploaded than with full checkpoints"
