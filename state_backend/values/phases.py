"""Where the time of an interval went, as one line of a log. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def in_words(phases_us: Mapping[str, int], wall_us: int) -> str:
    """``2.00 s: spark 1.20, plan 0.50, other 0.30``: the longest first, in seconds. ``other``: what of the wall time no phase has,
    so that what is shown always adds up; left out where it is less than a twentieth."""
    other_us = wall_us - sum(phases_us.values())
    shown = dict(phases_us) | ({"other": other_us} if other_us * 20 >= wall_us > 0 else {})
    told = ", ".join(f"{name} {us / 1e6:.2f}" for name, us in sorted(shown.items(), key=lambda p: -p[1]))
    return f"{wall_us / 1e6:.2f} s: {told}"
