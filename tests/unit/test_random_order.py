from __future__ import annotations

import pytest

from tests.support.random_order import shuffled

TESTS = [f"{module}::{name}" for module in "abcd" for name in ("one", "Some::1", "Some::2", "two", "three")]


def in_order(seed: str) -> list[str]:
    groups = [lambda test: test.split("::")[0], lambda test: test.rpartition("::")[0] if "Some" in test else test]
    return shuffled(TESTS, seed, groups)


def test_a_seed_is_an_order_of_its_own() -> None:
    orders = [in_order(str(seed)) for seed in range(20)]
    assert in_order("7") == orders[7]
    assert len({*map(tuple, orders)}) == 20
    assert all(sorted(order) == sorted(TESTS) for order in orders)


@pytest.mark.parametrize("group", ["a", "b", "c", "d", "a::Some", "d::Some"])
def test_tests_that_share_fixtures_stay_together(group: str) -> None:
    for seed in range(20):
        order = in_order(str(seed))
        places = [order.index(test) for test in order if test.startswith(f"{group}::")]
        assert places[-1] - places[0] == len(places) - 1
