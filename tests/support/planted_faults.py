"""Checks of the program, taken out one at a time, for random histories to find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from state_backend.checkpoint import clean_up, commit, sweep


def without_leases() -> None:
    """A clean-up does not look for leases."""
    clean_up.leased_checkpoints = lambda storage, log: ({}, [])  # type: ignore[assignment]


def without_fence() -> None:
    """A commit does not mind who committed its interval since it began."""
    commit._fences = lambda entry, content: False


def without_age() -> None:
    """A sweep takes every attempt for dead."""
    plan = sweep.plan_sweep

    def ageless(*arguments: Any, min_age_ms: int, **more: Any) -> Any:
        return plan(*arguments, min_age_ms=-10 * 86_400_000, **more)

    sweep.plan_sweep = ageless


PLANTED: Mapping[str, Callable[[], None]] = MappingProxyType(
    {"without_leases": without_leases, "without_fence": without_fence, "without_age": without_age}
)
