"""Format sizes, durations, counts and the phases of an interval for people."""

from __future__ import annotations

from collections.abc import Mapping

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SPANS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def size(count: float | None) -> str:
    """Format bytes in binary units: 1023 B, 1.5 KiB, 12 MiB. None is `–`."""
    if count is None:
        return "–"
    value, unit = float(count), 0
    while value >= 1023.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    if unit == 0:
        return f"{count:.0f} B"
    return f"{value:.1f} {_UNITS[unit]}" if value < 9.95 else f"{value:.0f} {_UNITS[unit]}"


def span(seconds: float | None) -> str:
    """Format a duration in seconds by its two largest units: 420 ms, 3.2 s, 2 h 5 min, 3 d 4 h. None is `–`."""
    if seconds is None:
        return "–"
    if seconds < 0:
        return f"−{span(-seconds)}"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    rest, parts = round(seconds), list[str]()
    for length, unit in _SPANS:
        if rest >= length or parts:
            parts.append(f"{rest // length} {unit}")
            rest %= length
        if len(parts) == 2:
            break
    return " ".join(part for part in parts if not part.startswith("0 "))


def count(number: int | None) -> str:
    """Format a number with separators of thousands: 12,345. None is `–`."""
    return "–" if number is None else f"{number:,}"


def plural(number: int, noun: str) -> str:
    """Format a number with its noun: `1 checkpoint`, `2 checkpoints`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def in_words(phases_us: Mapping[str, int], wall_us: int) -> str:
    """Format durations in seconds, the longest first, like `2.00 s: spark 1.20, plan 0.50, other 0.30`.

    `other` is the part of the wall time that belongs to no phase. With it, the shown phases add up to the wall time.
    The text leaves `other` out if it is less than a twentieth of the wall time.
    """
    other_us = wall_us - sum(phases_us.values())
    shown = dict(phases_us) | ({"other": other_us} if other_us * 20 >= wall_us > 0 else {})
    told = ", ".join(f"{name} {us / 1e6:.2f}" for name, us in sorted(shown.items(), key=lambda p: -p[1]))
    return f"{wall_us / 1e6:.2f} s: {told}"
