"""The order of tests by chance: the variable CAIRN_ORDER holds a seed. Two runs with the same seed have the same order.

Tests of a module stay together, and those of a class, since they share fixtures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from random import Random
from typing import TypeVar

import pytest

T = TypeVar("T")

SEED = os.environ.get("CAIRN_ORDER", "")


def shuffle_tests(items: list[pytest.Item]) -> None:
    """Shuffle modules, classes of a module, and functions, if CAIRN_ORDER holds a seed."""
    if SEED:
        items[:] = shuffled(items, SEED, [lambda item: item.nodeid.split("::")[0], _class_of])


def shuffled(items: Iterable[T], seed: str, groups: Sequence[Callable[[T], str]]) -> list[T]:
    """Return the items in a random order that keeps neighbours of a group together.

    Args:
        items: In the order of the files.
        seed: The same seed gives the same order.
        groups: Functions that name an item's group, the outer group first.
    """
    return _shuffled(list(items), Random(seed), groups)


def _shuffled(items: list[T], random: Random, groups: Sequence[Callable[[T], str]]) -> list[T]:
    if not groups:
        random.shuffle(items)
        return items
    together = [_shuffled(list(group), random, groups[1:]) for _, group in groupby(items, groups[0])]
    random.shuffle(together)
    return [item for group in together for item in group]


def _class_of(item: pytest.Item) -> str:
    """Return the item's class; without a class its own name, which makes it a group of one."""
    _, *names = item.nodeid.split("::")
    return names[0] if len(names) > 1 else item.nodeid
