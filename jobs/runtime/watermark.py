"""Event time: which rows are late, when timers are due, and how far the watermark gets in an interval.

A watermark says that no older row is expected. What a checkpoint records is the watermark for the interval after it:

    rule       late rows, and what handlers see    timers fire up to        recorded
    observed   the base's                          the base's               max(the base's, newest event seen - delay)
    interval   the base's                          max(base's, end - delay) max(the base's, end - delay)

"observed" is Spark's rule; an interval closes windows of earlier ones. With "interval" it closes its own. Neither ever goes
back, so an idle interval keeps what it has. Before any event the watermark is None: nothing is late, and handlers see 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Rule = Literal["observed", "interval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventTime:
    """The event-time settings of a pipeline, and the watermark that its base recorded. Milliseconds since the epoch."""

    column: str
    delay_ms: int
    rule: Rule
    base_ms: int | None

    @property
    def late_until_us(self) -> int | None:
        """A row of this event time or an older one is late. Source: Spark's late-event filter, for "at the watermark"."""
        return None if self.base_ms is None else self.base_ms * 1000

    def due_ms(self, interval_end_ms: int) -> int:
        """Timers with this expiry or an earlier one fire at the end of the interval."""
        advanced = self.recorded_ms(interval_end_ms, None) if self.rule == "interval" else self.base_ms
        return advanced or 0

    def recorded_ms(self, interval_end_ms: int, newest_event_us: int | None) -> int | None:
        """The watermark that the interval's checkpoint records."""
        if self.rule == "interval":
            reached: int | None = interval_end_ms - self.delay_ms
        else:
            reached = None if newest_event_us is None else newest_event_us // 1000 - self.delay_ms
        return max((ms for ms in (self.base_ms, reached) if ms is not None), default=None)
