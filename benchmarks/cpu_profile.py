"""Where the time of a profiled call went, by owner: a function's own time counts for whoever owns its file; what nobody owns
(C functions, Python's own modules) counts for its callers, each by the time that it caused."""

from __future__ import annotations

import cProfile
import io
import pstats
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# (file, line, function); C functions have the file "~".
Function = tuple[str, int, str]
# By function: primitive calls, calls, own seconds, seconds with callees, and by caller the same four.
Stats = Mapping[Function, tuple[int, int, float, float, Mapping[Function, tuple[int, int, float, float]]]]

NOBODY = "other"


def profiled(call: Callable[[], Any]) -> pstats.Stats:
    """The profile of one call."""
    profile = cProfile.Profile()
    profile.runcall(call)
    return pstats.Stats(profile, stream=io.StringIO())


def top(stats: pstats.Stats, count: int = 15) -> str:
    """The functions that took most time themselves, as pstats prints them, without folders."""
    text = io.StringIO()
    stats.stream = text  # type: ignore[attr-defined]
    stats.strip_dirs().sort_stats("tottime").print_stats(count)
    return text.getvalue().strip()


def shares(stats: Stats, owner_of: Callable[[Function], str | None]) -> dict[str, float]:
    """Parts of the whole time by owner, the largest first; they sum to 1. ``owner_of`` gives None for what nobody owns."""
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
    """Who answers for a function's own time, in parts that sum to 1."""
    owner = owner_of(function)
    if owner is not None:
        return {owner: 1.0}
    if function in memo:
        return memo[function]
    # A circle of functions that nobody owns adds nothing: the callers outside it count.
    callers = {c: called for c, called in stats[function][4].items() if c not in above and c != function}
    # Own seconds by caller; a function that only passes on is weighed by all that it caused.
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
    """pandas (with NumPy), pyarrow, the user's processor, or this project's runtime ("cairn")."""
    file, _, name = function
    if file == "~":
        # Compiled methods that say whose they are.
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
