"""Compare two runs of the same intervals by their logs alone.

The digests and checksums in the logs show which intervals have equal state and output. No output and no state is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from state_backend.checkpoint.log import Log, interval_of
from state_backend.inspection.describe import start_and_end
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval
from state_backend.values.records import Content, OutputFile, Record, SweepRecord

Same = Literal["same", "other", "unknown"]


@frozen
class Made:
    """Result of one interval in one of the compared logs."""

    id: int
    outputs: tuple[OutputFile, ...]
    # The content of commit `id`; None if the checkpoint was dropped, because a tombstone has no counts and times.
    content: Content | None
    digest: int
    # The record whose checkpoint has this state; None if it was dropped, so that the state can't be read.
    state: Record | None = None

    @property
    def seconds(self) -> float | None:
        """Return the seconds of the interval's planning and Spark job; None for a tombstone.

        The commit is left out, and also the time in which the interval waited for the interval before it.
        """
        return None if self.content is None else sum(self.content.durations_us.values()) / 1e6


@frozen
class IntervalDifference:
    """Comparison of one interval's results in production and in a trial.

    The comparisons `state`, `output`, `late` and `position` are "same", "other", or "unknown" if a side has no result.
    """

    interval: Interval
    # Production's result; None if production has no checkpoint of the interval.
    old: Made | None
    # The trial's result; None if the trial has no checkpoint of the interval.
    new: Made | None
    state: Same = "unknown"
    output: Same = "unknown"
    late: Same = "unknown"
    position: Same = "unknown"

    @property
    def same(self) -> bool:
        return (self.state, self.output, self.late) == ("same", "same", "same")


def compare_intervals(old: Log, new: Log, intervals: Sequence[Interval]) -> list[IntervalDifference]:
    """Compare the results of each interval by the two logs. No output and no state is read."""
    if not intervals:
        return []
    span = Interval(intervals[0].start, intervals[-1].end)
    sides = [made_within(log, span) for log in (old, new)]
    return [plan_difference(interval, sides[0].get(interval), sides[1].get(interval)) for interval in intervals]


def plan_difference(interval: Interval, old: Made | None, new: Made | None) -> IntervalDifference:
    """Compare the two results of an interval by digests and checksums.

    Equal rows that are split into other files count as "other": the logs do not show that the rows are equal.
    """
    if old is None or new is None:
        return IntervalDifference(interval=interval, old=old, new=new)
    positions = [made.content.source_position if made.content is not None else {} for made in (old, new)]
    return IntervalDifference(
        interval=interval,
        old=old,
        new=new,
        state="same" if old.digest == new.digest else "other",
        output="same" if _files(old, late=False) == _files(new, late=False) else "other",
        late="same" if _files(old, late=True) == _files(new, late=True) else "other",
        position="unknown" if not all(positions) else "same" if positions[0] == positions[1] else "other",
    )


def _files(made: Made, *, late: bool) -> list[tuple[int, int, int]]:
    """Return rows, size and checksum of each output file that has rows. Equal lists mean equal output."""
    return sorted((f.rows, f.handle.size_bytes, f.handle.crc32c) for f in made.outputs if f.late == late and f.rows)


def made_within(log: Log, span: Interval) -> dict[Interval, Made]:
    """Return the result of each interval within the span, for intervals with current output."""
    if not log.head_id:
        return {}
    found = {}
    states = {interval_of(e): e for e in log.commits_near(span) if log.quarantine_above(e.id) is None}
    for interval, (n, files) in log.current_outputs(span).items():
        entry = log.entries[n]
        assert not isinstance(entry, SweepRecord) and interval_of(entry) == interval
        state = states.get(interval, entry)
        found[interval] = Made(
            id=n,
            outputs=files,
            content=entry.content if isinstance(entry, Record) else None,
            digest=state.content.digest if isinstance(state, Record) else state.digest,
            state=state if isinstance(state, Record) and state.id in log.retained else None,
        )
    return found


def describe_interval(found: IntervalDifference) -> dict[str, Any]:
    return {
        **start_and_end(found.interval),
        "state": found.state,
        "output": found.output,
        "late": found.late,
        "position": found.position,
        "old": _side(found.old),
        "new": _side(found.new),
    }


def _side(made: Made | None) -> dict[str, Any] | None:
    if made is None:
        return None
    rows = [sum(f.rows for f in made.outputs if f.late == late) for late in (False, True)]
    shown: dict[str, Any] = {"checkpoint": made.id, "output_rows": rows[0], "late_rows": rows[1]}
    if made.content is None:
        return shown
    totals = made.content.totals
    return shown | {
        "input_rows": totals.input_rows,
        "entries": totals.entries,
        "state_bytes": totals.state_bytes,
        "uploaded_bytes": totals.uploaded_bytes,
        "seconds": round(made.seconds or 0.0, 3),
    }
