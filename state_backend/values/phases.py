"""Format the duration of an interval, phase by phase, as one line of a log."""

from __future__ import annotations

from collections.abc import Mapping


def in_words(phases_us: Mapping[str, int], wall_us: int) -> str:
    """Format durations in seconds, the longest first, like `2.00 s: spark 1.20, plan 0.50, other 0.30`.

    `other` is the part of the wall time that belongs to no phase. With it, the shown phases add up to the wall time.
    The text leaves `other` out if it is less than a twentieth of the wall time.
    """
    other_us = wall_us - sum(phases_us.values())
    shown = dict(phases_us) | ({"other": other_us} if other_us * 20 >= wall_us > 0 else {})
    told = ", ".join(f"{name} {us / 1e6:.2f}" for name, us in sorted(shown.items(), key=lambda p: -p[1]))
    return f"{wall_us / 1e6:.2f} s: {told}"
