"""Format sizes, durations and counts for people, as the command line does."""

from __future__ import annotations

from state_backend.values.human_units import count, plural, size, span

__all__ = ["count", "plural", "size", "span"]
