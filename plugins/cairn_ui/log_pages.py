"""Find the entries of a pipeline's log that a page shows: those of one page of a list, and those of one run."""

from __future__ import annotations

from state_backend.checkpoint.log import Log, run_of
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval
from state_backend.values.records import SweepRecord


@frozen
class IdsOfPage:
    """The ids of one page of a list of log entries, newest first."""

    ids: list[int]
    # Value of the URL parameter `before` for the page with newer entries; None on the first page.
    newer: int | None
    # Value of the URL parameter `before` for the page with older entries; None on the last page.
    older: int | None


def ids_of_page(head: int, before: int | None, size: int) -> IdsOfPage:
    """Return the ids on a page: up to `size` ids below `before` (None: the newest). A log has the ids 1 to `head`."""
    first = head if before is None else min(head, before - 1)
    ids = list(range(first, max(0, first - size), -1))
    newer = min(head, first + size) + 1 if ids and first < head else None
    return IdsOfPage(ids=ids, newer=newer, older=ids[-1] if ids and ids[-1] > 1 else None)


def ids_of_run(log: Log, run_id: str, interval: Interval | None) -> list[int]:
    """Return the ids of the checkpoints that a run committed, ascending.

    The search covers the retained checkpoints, and commits of any age whose interval overlaps `interval`, the data
    interval of the run; None if it has none.
    """
    near = {e.id for e in log.commits_near(interval)} if interval is not None and log.head_id else set()
    entries = [log.entries[n] for n in sorted({*near, *log.retained})]
    return [e.id for e in entries if not isinstance(e, SweepRecord) and run_of(e).run_id == run_id]
