"""Shares of a profiled call's time, by owner.

A function's own time counts for the owner of its file, such as pandas or Cairn. A function without an owner, such as a
C function or one of Python's own, counts for its callers. Each caller gets the part of the time that it caused.
"""

from __future__ import annotations

import cProfile
import io
import pstats
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# The file, the line and the name of a function. The file of a C function is "~".
Function = tuple[str, int, str]
# For each function: primitive calls, calls, own seconds, seconds with callees, and the same four for each caller.
Stats = Mapping[Function, tuple[int, int, float, float, Mapping[Function, tuple[int, int, float, float]]]]

NOBODY = "other"


def profiled(call: Callable[[], Any]) -> pstats.Stats:
    """Call the function once and return the profile of the call."""
    profile = cProfile.Profile()
    profile.runcall(call)
    return pstats.Stats(profile, stream=io.StringIO())


def top(stats: pstats.Stats, count: int = 15) -> str:
    """Return the functions with the largest own time, as `pstats` prints them, without folders."""
    text = io.StringIO()
    stats.stream = text  # type: ignore[attr-defined]
    stats.strip_dirs().sort_stats("tottime").print_stats(count)
    return text.getvalue().strip()


def shares(stats: Stats, owner_of: Callable[[Function], str | None]) -> dict[str, float]:
    """Return each owner's share of the whole time, the largest first. The shares sum to 1.

    Args:
        stats: The profile.
        owner_of: The function that returns the owner of a function; None if the function has no owner.

    Raises:
        ValueError: The profile is empty.
    """
    seconds: dict[str, float] = {}
    memo: dict[Function, dict[str, float]] = {}
    for function, (_, _, own_s, _, _) in stats.items():
        for owner, part in _owners(function, stats, owner_of, memo, frozenset()).items():
            seconds[owner] = seconds.get(owner, 0.0) + part * own_s
    total_s = sum(seconds.values())
    if not total_s:
        raise ValueError("nothing was profiled")
    return {owner: s / total_s for owner, s in sorted(seconds.items(), key=lambda item: -item[1])}


def _owners(
    function: Function,
    stats: Stats,
    owner_of: Callable[[Function], str | None],
    memo: dict[Function, dict[str, float]],
    above: frozenset[Function],
) -> dict[str, float]:
    """Return the owners that a function's own time counts for, with shares that sum to 1."""
    owner = owner_of(function)
    if owner is not None:
        return {owner: 1.0}
    if function in memo:
        return memo[function]
    # In a cycle of functions without an owner, only the callers outside the cycle count.
    callers = {c: called for c, called in stats[function][4].items() if c not in above and c != function}
    # Weigh each caller by the function's own seconds, or by its seconds with callees if its own seconds are zero.
    weights = {c: called[2] or called[3] for c, called in callers.items()}
    total = sum(weights.values())
    if not total:
        return {NOBODY: 1.0}
    parts: dict[str, float] = {}
    for caller, weight in weights.items():
        for name, part in _owners(caller, stats, owner_of, memo, above | {function}).items():
            parts[name] = parts.get(name, 0.0) + part * weight / total
    if not above:
        memo[function] = parts
    return parts


def owner_by_path(function: Function) -> str | None:
    """Return the owner of a function, or None if it has no owner.

    The owners are "pandas" (with NumPy), "pyarrow", "user" for the measured processor, and "cairn" for Cairn's own
    code.
    """
    file, _, name = function
    if file == "~":
        # The name of a compiled method may contain its package.
        return next((owner for package, owner in _PACKAGES.items() if f"{package}." in name), None)
    path = Path(file)
    if path.is_relative_to(_ROOT):
        first, *rest = path.relative_to(_ROOT).parts
        if first == "benchmarks":
            return "user" if rest[0] in _PROCESSORS else None
        if first == "state_backend" or (first == "jobs" and rest[0] == "cairn"):
            return "cairn"
    if "site-packages" in path.parts:
        return _PACKAGES.get(path.parts[path.parts.index("site-packages") + 1])
    return None


_ROOT = Path(__file__).resolve().parents[1]
_PROCESSORS = ("processors.py", "totals.py")
_PACKAGES = {"pandas": "pandas", "numpy": "pandas", "pyarrow": "pyarrow"}
