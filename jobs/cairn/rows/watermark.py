"""Event time: late rows, due timers, and the watermarks that a checkpoint records.

A watermark is an event time: no older rows are expected. As in Spark, a checkpoint records two watermarks. Processors
see the `watermark`, which also fires timers. The `late watermark` decides which rows of the next interval are late.

An interval reads both watermarks from its base, and its own checkpoint records new ones. The pipeline's rule is
"observed" or "interval". Below, `newest` is the latest event time of the interval's rows, `end` is the interval's end,
and `delay` is the pipeline's watermark delay:

                               rule "observed"                       rule "interval"
    a row is late up to        base's late watermark                 base's watermark
    processors see             base's watermark                      base's watermark
    timers fire up to          base's watermark                      max(base's watermark, end - delay)
    recorded watermark         max(base's watermark,                 max(base's watermark, end - delay)
                                   newest - delay)
    recorded late watermark    base's watermark                      none

docs/processors.md explains both rules ("Event time"). With "observed", the timers up to the base's watermark fire only
after the interval's rows, so these rows may still change the timers' results. Therefore the watermark of one interval
earlier decides which rows are late. Before the first interval both watermarks are 0 with "observed". With "interval"
there is no watermark before the first interval, so no row is late. An interval without rows keeps the watermark.

No watermark ever decreases.

Event times of type TIMESTAMP_NTZ are wall times of the pipeline's zone. Then all event times, watermarks and timers are
milliseconds of wall time, as if the zone were UTC, as in Spark. Only `end - delay` is an instant, which is converted:

- While clocks repeat an hour, the wall time stands still in the first of the two hours. So rows of both hours count.
- Where clocks skip an hour, the wall time jumps. A row whose wall time was skipped counts like any other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from state_backend.values.frozen import frozen
from state_backend.values.records import LogicalTime
from state_backend.values.zones import settled_wall_ms, zone_of

Rule = Literal["observed", "interval"]


@frozen
class EventTime:
    """Event-time settings of a pipeline, and the watermarks of an interval's base, in milliseconds since the epoch."""

    column: str
    delay_ms: int
    rule: Rule
    # The watermark that the base recorded; None if the base has none. With "observed" it is at least 0.
    base_ms: int | None
    # A row with this event time or an older one is late; None if no row is late.
    late_ms: int | None
    # If the event times are wall times: the name of their time zone. None if they are instants.
    wall_zone: str | None = None

    @property
    def zone(self) -> str:
        """Return the name of the time zone of event times and watermarks."""
        return self.wall_zone or "UTC"

    @property
    def late_until_us(self) -> int | None:
        """Return `late_ms` in microseconds.

        Rows exactly at the watermark are late. Source: Spark's late-event filter.
        """
        return None if self.late_ms is None else self.late_ms * 1000

    def due_ms(self, interval_end_ms: int) -> int:
        """Return the event time up to which timers fire in the interval, in milliseconds since the epoch.

        With the rule "interval" this time follows from the interval's end. With "observed" it is the watermark that the
        base recorded, and 0 without one.
        """
        advanced = self._reached_ms(interval_end_ms, None) if self.rule == "interval" else self.base_ms
        return advanced or 0

    def advance(self, time: LogicalTime, interval_end_ms: int, newest_event_us: int | None) -> LogicalTime:
        return replace(
            time,
            watermark_ms=self._reached_ms(interval_end_ms, newest_event_us),
            late_watermark_ms=self.base_ms if self.rule == "observed" else None,
            event_zone=self.zone,
        )

    def _reached_ms(self, interval_end_ms: int, newest_event_us: int | None) -> int | None:
        reached: int | None
        if self.rule == "interval":
            at_ms = interval_end_ms - self.delay_ms
            reached = at_ms if self.wall_zone is None else settled_wall_ms(at_ms, zone_of(self.wall_zone).rules)
        else:
            reached = None if newest_event_us is None else newest_event_us // 1000 - self.delay_ms
        return max((ms for ms in (self.base_ms, reached) if ms is not None), default=None)


def event_time_of(
    column: str, delay_ms: int, rule: Rule, base: LogicalTime | None, wall_zone: str | None = None
) -> EventTime:
    """Return the event-time settings of one interval, with the watermarks that its base recorded.

    With "observed", a checkpoint records two watermarks: one for timers, and an older one that decides which rows of
    the next interval are late. A checkpoint of an older release recorded only the watermark for timers. After such a
    checkpoint, rows up to that watermark are late, because they could open a window again that a timer has closed.
    """
    base_ms = base.watermark_ms if base is not None else None
    late_ms = base_ms
    if rule == "observed":
        base_ms = max(base_ms or 0, 0)
        late_ms = base_ms if base is not None else 0
        if base is not None and base.late_watermark_ms is not None:
            late_ms = base.late_watermark_ms
    return EventTime(column=column, delay_ms=delay_ms, rule=rule, base_ms=base_ms, late_ms=late_ms, wall_zone=wall_zone)
