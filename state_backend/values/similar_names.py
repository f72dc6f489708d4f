"""Suggest the name that a person meant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

DID_YOU_MEAN = "Did you mean"
# A message names at most this many names if none is similar.
_MOST_NAMES = 10


def similar_to(given: str, known: Sequence[str]) -> str:
    """Return a line break and `Did you mean …?` with the similar names in `known`; an empty text if none is similar."""
    close = get_close_matches(given, known)
    return f"\n{DID_YOU_MEAN} {' or '.join(map(repr, close))}?" if close else ""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return a line for an error message: the known names that are similar to a given name, else all known names."""
    names = sorted(known)
    if close := similar_to(given, names):
        return close
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"\nThese exist: {', '.join(names[:_MOST_NAMES])}{more}" if names else ""
