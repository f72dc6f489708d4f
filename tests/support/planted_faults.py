"""A check of the program, taken out, for random histories to find: no test without histories finds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from state_backend.adapters import local_storage


def with_old_listings() -> None:
    """Listings are taken for current, also where they may be some seconds old."""
    local_storage.LocalStorage.lists_what_is_there = True  # type: ignore[attr-defined]


PLANTED: Mapping[str, Callable[[], None]] = MappingProxyType({"with_old_listings": with_old_listings})
