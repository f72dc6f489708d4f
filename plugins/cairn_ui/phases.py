"""Order and colour the phases of an interval, such as restore or upload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_ORDER = ("plan", "restore", "read", "process", "timers", "expire", "consolidate", "capture", "upload", "commit")


class Phase(NamedTuple):
    # Number n of the colour's class `p<n>` in the style sheet.
    colour: int
    name: str
    seconds: float
    share: float


def phases_of(durations_us: Mapping[str, int] | None) -> list[Phase]:
    """Return an interval's phases in the order in which they happen. `durations_us`: Microseconds by phase."""
    durations = durations_us or {}
    whole = sum(durations.values()) or 1
    place = {name: _ORDER.index(name) if name in _ORDER else len(_ORDER) for name in durations}
    return [
        Phase(place[n] if n in _ORDER else 7, n, durations[n] / 1e6, durations[n] / whole)
        for n in sorted(durations, key=lambda n: (place[n], n))
    ]
