"""Call the sink for output that it has not accepted yet, and mark the output as published.

A process that stops between the call and the mark leaves no mark: the next publishing calls the sink again, with the
same checkpoint id.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import fields, replace
from datetime import datetime

from state_backend.checkpoint.location import Location
from state_backend.checkpoint.log import Log, interval_of, last_facts, read_newest
from state_backend.checkpoint.record_reader import RecordReader
from state_backend.formats import paths, record_codec
from state_backend.ports.storage import Storage
from state_backend.values.airflow_commands import command_line
from state_backend.values.errors import AlreadyExists, SinkFailed, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval, format_instant
from state_backend.values.marks import Published
from state_backend.values.records import Record, SweepRecord

Hook = Callable[[Record], None]


class _HookRaised(Exception):
    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@frozen
class ReplacedOutput(Record):
    """What a sink gets for replaced output: the replacing commit's record, with the old interval and without files."""


def publish(
    at: Location,
    hook: Hook | None,
    *,
    after: Log | None = None,
    in_order: bool = False,
    replaced_last: bool = False,
    only: Collection[datetime] | None = None,
    code: str | None = None,
    of: int | None = None,
) -> list[tuple[Interval, int]]:
    """Call the sink hook for each current output without a published mark. Return the published (interval, id) pairs.

    If the hook raises for an interval, that interval gets no mark, and the next call of `publish` tries it again.
    The other intervals are still published; with `in_order`, only those before it.

    If a commit of an overlapping interval replaced an interval's output, the rows must leave the sink. The hook
    then gets a copy of that commit's record with the replaced interval and without files. By default these calls
    come first, so a sink that replaces only the rows of the call's interval never has the same rows twice; with
    `replaced_last`, they come last.

    `after`: The log as the caller's own commit left it. If another process has committed since, that process publishes
    its own output. `only`: The starts of the intervals to publish; None: all. `code`: module:NAME for printed commands.
    `of`: Id of the commit whose output to publish; None: any commit.
    """
    log = after or read_newest(at.storage)
    published: list[tuple[Interval, int]] = []
    failed: list[tuple[Interval, int, Exception]] = []
    waiting = sorted(
        (told for told in unpublished_in(at.storage, log, own=after is not None) if of in (None, told[1])),
        key=lambda told: (is_own(log, *told) != replaced_last, told),
    )
    for interval, checkpoint_id in waiting:
        if only is not None and interval.start not in only:
            if in_order and max(only) > interval.start:
                raise UsageError(
                    f"{interval} waits for the sink too, and with sink_in_order goes before later intervals: name it as well, or --skip it"
                )
            continue
        own = after is not None and checkpoint_id == log.head_id
        try:
            published += _publish(at.storage, log, interval, checkpoint_id, hook, own=own)
        except _HookRaised as raised:
            failed.append((interval, checkpoint_id, raised.error))
            if in_order:
                break
    if failed:
        held = {n for _, n in {*waiting} - {*published}} if in_order else set[int]()
        raise SinkFailed(
            _explain_failed(at, failed, in_order, code or log.code), frozenset({n for _, n, _ in failed} | held)
        ) from failed[0][2]
    return published


def unpublished(at: Location) -> list[tuple[Interval, int]]:
    return unpublished_in(at.storage, read_newest(at.storage))


def record_to_publish(storage: Storage, interval: Interval, checkpoint_id: int) -> Record | None:
    """Return the record for the sink of an interval's output, if that output still waits to be published; else None."""
    waiting = {(u.interval, u.id) for u in read_newest(storage).summary.unpublished}
    entry = RecordReader(storage, checkpoint_id).fresh(checkpoint_id)
    return as_published(entry, interval) if isinstance(entry, Record) and (interval, checkpoint_id) in waiting else None


def newer_output(storage: Storage, interval: Interval, checkpoint_id: int) -> Record | None:
    """Return the record of a later commit that made or replaced an interval's output; None if there is none."""
    newest = _publication_of(read_newest(storage), interval)
    entry = None if newest in (None, checkpoint_id) else RecordReader(storage, newest).fresh(newest)
    return as_published(entry, interval) if isinstance(entry, Record) else None


def unpublished_in(storage: Storage, log: Log, *, own: bool = False) -> list[tuple[Interval, int]]:
    """Return the outputs that the sink has not accepted: those without a file that marks them as published.

    `own`: this process has just made the newest commit, so no such file exists yet, and none is looked up.
    """
    just_made = log.head_id if own else 0
    told = [(u.interval, u.id) for u in log.summary.unpublished]
    return [(i, n) for i, n in told if n == just_made or storage.stat(paths.published(i, n)) is None]


def skip_publication(at: Location, starts: Collection[datetime]) -> list[tuple[Interval, int]]:
    """Mark the outputs of the intervals with these starts as published, without a call of the sink."""
    waiting = unpublished(at)
    strange = {*starts} - {interval.start for interval, _ in waiting}
    if strange:
        there = ", ".join(format_instant(i.start) for i, _ in waiting) or "none"
        raise UsageError(
            f"the interval that starts at {format_instant(min(strange))} has no unpublished output in pipeline "
            f"{at.pipeline!r}\nIntervals with unpublished output start at: {there}"
        )
    skipped = [(interval, n) for interval, n in waiting if interval.start in starts]
    for interval, checkpoint_id in skipped:
        mark_published(at.storage, interval, checkpoint_id)
    return skipped


def _explain_failed(at: Location, failed: list[tuple[Interval, int, Exception]], in_order: bool, code: str) -> str:
    where = {"root": at.storage.url.rstrip("/").removesuffix(f"/{at.pipeline}"), "pipeline": at.pipeline}
    lines = [f"  {interval} (checkpoint {n}): {type(e).__name__}: {e}" for interval, n, e in failed]
    first = failed[0][0].start
    others = "later intervals wait" if in_order else "the other intervals are published"
    return "\n".join(
        [
            f"the sink of {at.pipeline!r} failed for {len(failed)} interval(s); {others}. The next checkpoint calls the "
            "sink again for:",
            *lines,
            "To call the sink now, or to skip an interval's output:",
            command_line("publish", first, **where, code=code),
            command_line("publish", first, **where, skip=True),
        ]
    )


def is_own(log: Log, interval: Interval, checkpoint_id: int) -> bool:
    """Return True if the commit computed this interval, False if another interval's commit replaced its output."""
    entry = log.entries[checkpoint_id]
    return not isinstance(entry, SweepRecord) and interval_of(entry) == interval


def _publish(
    storage: Storage, log: Log, interval: Interval, checkpoint_id: int, hook: Hook | None, *, own: bool
) -> list[tuple[Interval, int]]:
    """Call the hook for an interval until the newest output of the interval is published.

    While the hook runs, another process may publish a newer output. The hook may then have overwritten the newer output
    in the sink, so the hook runs again for the newer commit. `own`: this process has just made the commit, so the
    record in `log` is current.
    """
    published: list[tuple[Interval, int]] = []
    while True:
        entry = log.entries[checkpoint_id] if own else RecordReader(storage, checkpoint_id).fresh(checkpoint_id)
        if not isinstance(entry, Record):
            return published  # other processes published this output and dropped the checkpoint
        if hook is not None:
            try:
                hook(as_published(entry, interval))
            except Exception as error:
                raise _HookRaised(error) from error
        mark_published(storage, interval, checkpoint_id)
        published.append((interval, checkpoint_id))
        if hook is None:
            return published  # no hook ran that could have overwritten a newer output
        later = read_newest(storage, log)
        current = _publication_of(later, interval) if later.head_id != log.head_id else checkpoint_id
        if current is None or current == checkpoint_id:
            return published
        checkpoint_id, log, own = current, later, False


def _publication_of(log: Log, interval: Interval) -> int | None:
    """Return the id of the last commit that made or replaced the output of exactly this interval."""
    return next((f.id for f in last_facts(log.facts(interval)) if f.interval == interval), None)


def mark_published(storage: Storage, interval: Interval, checkpoint_id: int) -> None:
    mark = record_codec.encode(Published(id=checkpoint_id, interval=interval))
    with suppress(AlreadyExists):
        storage.create(paths.published(interval, checkpoint_id), mark)


def as_published(record: Record, interval: Interval) -> Record:
    if interval == record.content.interval:
        return record
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return ReplacedOutput(**values | {"content": replace(record.content, interval=interval, outputs=())})
