"""Find the files of committed output for readers of Parquet, such as DuckDB, pandas and Polars. This needs no Spark."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime

from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint.current_output import current_output
from state_backend.checkpoint.log import read_newest
from state_backend.inspection.find_pipelines import refuse_nothing
from state_backend.inspection.publication_group import end_within_group
from state_backend.values.hide_secrets import hide
from state_backend.values.inputs import Untracked

log = logging.getLogger("cairn")
_noticed: ContextVar[set[Untracked] | None] = ContextVar("noticed", default=None)


@contextmanager
def noticing() -> Iterator[set[Untracked]]:
    """Yield a set, to which `output_files` adds each pipeline that it lists within the block, in this thread only."""
    found = set[Untracked]()
    token = _noticed.set(found)
    try:
        yield found
    finally:
        _noticed.reset(token)


def output_files(
    root: str,
    pipeline: str,
    *,
    late: bool = False,
    start: datetime | None = None,
    end: datetime | None = None,
    group: str | None = None,
) -> list[str]:
    """Return the Parquet files of the current output, in the order of their intervals.

    Output stays current until its interval runs again, also if its checkpoint is stale or quarantined. A warning in the
    log names the intervals with a stale or quarantined checkpoint.

    Other files in the output folder belong to replaced results and to attempts that were not committed. A re-run may
    delete a returned file. So call this function again for each query.

    Args:
        root: URL of the folder that holds the pipelines.
        pipeline: Name of the pipeline.
        late: True returns the files of late rows instead of the output.
        start: Only intervals that start at this instant or later; None for no limit.
        end: Only intervals that end at this instant or earlier; None for no limit.
        group: Name of the pipeline's group: only intervals up to which the results of all members fit together. Or a
            marker from `group_marker`: several calls with one marker read the members as they were at one moment.

    Returns:
        Absolute paths if the root is a local folder, else URLs.

    Raises:
        UsageError: There is no such pipeline, it is not in the group, or `start` or `end` has no time zone.
        StorageUnavailable: The pipeline has committed one of these intervals again since the marker was made.

    Example:
        duckdb.read_parquet(output_files("file:///data/state", "clicks"), union_by_name=True)
    """
    if (noticed := _noticed.get()) is not None:
        noticed.add(Untracked(pipeline=pipeline, root=hide(root.rstrip("/"))))
    url = join_url(root, pipeline)
    storage = open_storage(url)
    known = read_newest(storage)
    if not known.head_id:
        refuse_nothing(storage, root, pipeline)
    if group is not None:
        end = end_within_group(group, root, pipeline, known, end)
    found = current_output(known, start, end)
    if (notice := found.notice(root, pipeline)) is not None:
        log.warning("%s", notice)
    folder = url.removeprefix("file://")
    return [f"{folder}/{file.handle.path}" for file in found.list_files(late=late)]
