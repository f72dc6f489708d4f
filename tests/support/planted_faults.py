"""Checks of the program, taken out, for random histories to find: those that no test without histories finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from state_backend.adapters import local_storage


def with_old_listings() -> None:
    """Listings are taken for current, also where they may be some seconds old."""
    local_storage.LocalStorage.lists_what_is_there = True  # type: ignore[attr-defined]


def _newest_schema(recorded: Iterable[Any], read: Iterable[Any] = ()) -> Any:
    """The schema that was recorded last; of files without a recorded one, that of the last file."""
    return [*read, *recorded][-1]


def _appended(schemas: tuple[Any, ...], schema: Any) -> tuple[tuple[Any, ...], int]:
    return (*schemas, schema), len(schemas) + 1


# The newest commit's schema decides which columns the rows of older commits have.
NEWEST_DECIDES_THE_COLUMNS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "cairn.data_sources.keyed_output.table_schema": _newest_schema,
        "state_backend.checkpoint.output_schemas._with": _appended,
    }
)


PLANTED: Mapping[str, Callable[[], None]] = MappingProxyType(
    {
        "with_old_listings": with_old_listings,
    }
)
