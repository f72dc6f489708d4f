"""What the chaos run does is decided by its seed."""

from __future__ import annotations

from itertools import pairwise

from tests.soak import KINDS, plan_disturbances


def test_the_plan_is_that_of_its_seed() -> None:
    assert plan_disturbances(7, 60) == plan_disturbances(7, 60) != plan_disturbances(8, 60)
    for seed in range(50):
        plan = plan_disturbances(seed, 60)
        assert {disturbance.kind for disturbance in plan} == set(KINDS)
        assert all(2 <= later.after - sooner.after <= 4 for sooner, later in pairwise(plan))
        assert plan[0].after == 2 and plan[-1].after < 59
        assert all(0 <= disturbance.day < disturbance.after for disturbance in plan), "only a committed day is cleared"


def test_a_short_run_is_disturbed_too() -> None:
    assert plan_disturbances(1, 2) == []
    assert 1 <= len(plan_disturbances(1, 6)) <= 2
