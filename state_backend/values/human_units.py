"""Format sizes, durations and counts for people."""

from __future__ import annotations

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
