"""Check cheaply that no result is out of date: none was at an earlier `LogMark`, and logs have only grown since.

A result reads only upstream intervals that were committed when it was computed. So an interval that the upstream
appends later, after its latest end at that time, changes no result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from state_backend.chains.inputs_of import attempt_at
from state_backend.checkpoint.log import Entry, Log, interval_of, kind_of
from state_backend.values.inputs import LogMark
from state_backend.values.records import SweepRecord

MOST_READ = 200  # To read more records costs more than to judge all results again.


def mark_of(log: Log, pipeline: str, root: str | None = None) -> LogMark:
    return LogMark(
        pipeline=pipeline,
        root=root,
        head=log.head_id,
        attempt=attempt_at(log, log.head_id) or "",
        end_ms=log.summary.latest_end_ms if log.head_id else None,
        quarantined=tuple(sorted(log.quarantined)),
    )


def has_only_grown(log: Log, mark: LogMark) -> bool:
    """Return True if each record since `mark` adds an interval later than all before it, or changes no result."""
    return (since := _since(log, mark)) is not None and appends_only(since, mark.end_ms)


def changed_only_by(log: Log, mark: LogMark, ids: Collection[int]) -> bool:
    """Return True if no commit outside `ids` has changed results since `mark`."""
    return (since := _since(log, mark)) is not None and all(e.id in ids or keeps_results(e) for e in since)


def appends_only(entries: Iterable[Entry], end_ms: int | None) -> bool:
    """Return True if each entry adds an interval later than `end_ms` and all before it, or changes no result."""
    for entry in entries:
        if keeps_results(entry):
            continue
        if isinstance(entry, SweepRecord) or kind_of(entry) != "interval":
            return False
        if end_ms is not None and interval_of(entry).start_ms < end_ms:
            return False
        end_ms = interval_of(entry).end_ms
    return True


def keeps_results(entry: Entry) -> bool:
    # A release from quarantine is a `SweepRecord` too. `_since` notices the release by the quarantined ids.
    return isinstance(entry, SweepRecord) or kind_of(entry) == "consolidate"


def _since(log: Log, mark: LogMark) -> list[Entry] | None:
    """Return the entries after `mark`; None if they are over 200, quarantined ids differ, or the log was replaced."""
    if not 0 <= log.head_id - mark.head <= MOST_READ or {*log.quarantined} != {*mark.quarantined}:
        return None
    if (attempt_at(log, mark.head) or "") != mark.attempt:  # a folder that was put back from a backup
        return None
    ids = range(mark.head + 1, log.head_id + 1)
    log.entries.load(ids)
    return [log.entries[n] for n in ids]
