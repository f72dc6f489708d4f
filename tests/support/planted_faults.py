"""Checks of the program, taken out one at a time, for random histories to find."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

from state_backend.adapters import local_storage
from state_backend.checkpoint import clean_up_dropped as clean_up
from state_backend.checkpoint import decide_commit as commit
from state_backend.checkpoint import sweep_files
from state_backend.values.handles import FileInfo

TIME_NS = time.time_ns  # the clock as it is, before a process skews it


def without_leases() -> None:
    """A clean-up does not look for leases."""
    clean_up.leased_checkpoints = lambda storage, log: ({}, [])  # type: ignore[assignment]


def without_fence() -> None:
    """A commit does not mind who committed its interval since it began."""
    commit._fences = lambda entry, content: False


def without_age() -> None:
    """A sweep takes every attempt for dead."""
    plan = sweep_files.plan_sweep

    def ageless(*arguments: Any, min_age_ms: int, **more: Any) -> Any:
        return plan(*arguments, min_age_ms=-10 * 86_400_000, **more)

    sweep_files.plan_sweep = ageless


def with_old_listings() -> None:
    """Listings are taken for current, also where they may be some seconds old."""
    local_storage.LocalStorage.lists_what_is_there = True  # type: ignore[attr-defined]


def with_host_clocks() -> None:
    """Files are dated by the clock of the host that writes them."""
    info = local_storage._info

    def by_mtime(path: str, found: os.stat_result, behind_link: bool = False) -> FileInfo:
        made = info(path, found, behind_link)
        return replace(made, modified_ms=max(found.st_mtime_ns, found.st_ctime_ns) // 1_000_000)

    local_storage._info = by_mtime
    # What is subtracted from the time of the file system.
    ahead = SimpleNamespace(randbelow=lambda most: -(time.time_ns() - TIME_NS()))
    local_storage.secrets = ahead  # type: ignore[assignment]


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
        "without_leases": without_leases,
        "without_fence": without_fence,
        "without_age": without_age,
        "with_old_listings": with_old_listings,
        "with_host_clocks": with_host_clocks,
    }
)
