"""Where the time of an interval went: phases that add up, and the line that shows them."""

from __future__ import annotations

import time

import pytest

from cairn.shard_jobs.run_on_shards import StopWatch
from state_backend.values.human_units import in_words


@pytest.mark.parametrize(
    ("phases_us", "wall_us", "says"),
    [
        ({}, 0, "0.00 s: "),
        ({"plan": 500_000, "spark": 1_500_000}, 2_000_000, "2.00 s: spark 1.50, plan 0.50"),
        ({"spark": 1_910_000}, 2_000_000, "2.00 s: spark 1.91"),  # all but less than a twentieth
        ({"spark": 1_500_000}, 2_000_000, "2.00 s: spark 1.50, other 0.50"),
        ({"spark": 2_000_000}, 1_500_000, "1.50 s: spark 2.00"),  # another clock's
    ],
)
def test_the_line_of_phases_shows_a_large_rest_as_other(phases_us: dict[str, int], wall_us: int, says: str) -> None:
    assert in_words(phases_us, wall_us) == says


def test_a_phase_within_another_counts_once() -> None:
    clock, began_ns = StopWatch(), time.monotonic_ns()
    with clock.phase("upload", "a"):
        time.sleep(0.02)
        with clock.phase("consolidate", "b"):
            time.sleep(0.03)
    with clock.phase("upload", "a"):
        time.sleep(0.01)
    wall_us = (time.monotonic_ns() - began_ns) // 1000
    assert clock.durations_us["consolidate"] >= 30_000 and clock.durations_us["upload"] >= 30_000
    assert wall_us * 0.95 <= sum(clock.durations_us.values()) <= wall_us
