"""Two runs of the same intervals, by their logs alone: what each came to, and whether that is the same. Reads no output and no state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from state_backend.checkpoint.log import Log, interval_of
from state_backend.values.intervals import Interval
from state_backend.values.records import Content, OutputFile, Record, SweepRecord

Same = Literal["same", "other", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a run made of an interval: checkpoint ``id``, its state's digest and current output. ``content``: None if its record was
    shrunk, so that counts and times are gone. ``retained``: its state can be read."""

    id: int
    digest: int
    outputs: tuple[OutputFile, ...]
    content: Content | None
    retained: bool = True

    @property
    def seconds(self) -> float | None:
        """How long it took, without waiting for its turn."""
        return None if self.content is None else sum(self.content.durations_us.values()) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalDifference:
    """Production's (``old``) and the trial's (``new``) result of an interval; None: there is none. ``state``, ``output``, ``late``:
    whether they are the same. ``position``: whether the source recorded the same position; unknown: it recorded none."""

    interval: Interval
    old: Made | None
    new: Made | None
    state: Same
    output: Same
    late: Same
    position: Same

    @property
    def same(self) -> bool:
        """Whether both came to the same."""
        return (self.state, self.output, self.late) == ("same", "same", "same")


def compare_intervals(old: Log, new: Log, intervals: Sequence[Interval]) -> list[IntervalDifference]:
    """What both logs say of each interval. Reads no output and no state."""
    if not intervals:
        return []
    span = Interval(intervals[0].start, intervals[-1].end)
    sides = [made_within(log, span) for log in (old, new)]
    return [plan_difference(interval, sides[0].get(interval), sides[1].get(interval)) for interval in intervals]


def plan_difference(interval: Interval, old: Made | None, new: Made | None) -> IntervalDifference:
    """How the two results of an interval compare, by digests and checksums. Output that is cut into other files is ``other`` until it
    is read."""
    if old is None or new is None:
        same: Same = "unknown"
        return IntervalDifference(
            interval=interval, old=old, new=new, state=same, output=same, late=same, position=same
        )
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
    """What tells output apart without reading it: rows, size and checksum of each file that has rows."""
    return sorted((f.rows, f.handle.size_bytes, f.handle.crc32c) for f in made.outputs if f.late == late and f.rows)


def made_within(log: Log, span: Interval) -> dict[Interval, Made]:
    """What the log has of each interval within the span whose output is current."""
    if not log.head_id:
        return {}
    found = {}
    current = log.current_outputs_within(span)
    log.entries.load(n for n, _ in current.values())
    for interval, (n, files) in current.items():
        entry = log.entries[n]
        assert not isinstance(entry, SweepRecord) and interval_of(entry) == interval
        content = entry.content if isinstance(entry, Record) else None
        digest = entry.content.digest if isinstance(entry, Record) else entry.digest
        found[interval] = Made(id=n, digest=digest, outputs=files, content=content, retained=n in log.retained)
    return found
