"""What is late, which timers are due, and what watermarks an interval records."""

from __future__ import annotations

import pytest

from cairn.rows.watermark import Rule, event_time_of
from state_backend.values.records import LogicalTime


def clock(watermark_ms: int | None, late_ms: int | None) -> LogicalTime:
    times = {"watermark_ms": watermark_ms, "late_watermark_ms": late_ms}
    return LogicalTime(mode="event", processing_time_ms=0, event_zone="UTC", **times)


@pytest.mark.parametrize(
    ("rule", "base", "newest_us", "late_until_us", "seen_ms", "due_ms", "recorded"),
    [
        # The first interval begins at 0, as in Spark: events up to 1970 are late.
        ("observed", None, None, 0, 0, 0, (0, 0)),
        ("observed", None, 5_000_999, 0, 0, 0, (4_900, 0)),
        ("observed", None, -5_000_000, 0, 0, 0, (0, 0)),
        # Rows are filtered one interval behind the watermark that handlers see.
        ("observed", (4_900, 0), 6_000_000, 0, 4_900, 4_900, (5_900, 4_900)),
        ("observed", (5_900, 4_900), 6_000_000, 4_900_000, 5_900, 5_900, (5_900, 5_900)),
        # Older events, and none at all, keep the watermark where it is; the late one follows.
        ("observed", (5_900, 4_900), 1_000_000, 4_900_000, 5_900, 5_900, (5_900, 5_900)),
        ("observed", (5_900, 5_900), None, 5_900_000, 5_900, 5_900, (5_900, 5_900)),
        # Records of before there were two: rows up to the only one are late. None, or less than 0, is 0.
        ("observed", (4_900, None), 6_000_000, 4_900_000, 4_900, 4_900, (5_900, 4_900)),
        ("observed", (None, None), 6_000_000, 0, 0, 0, (5_900, 0)),
        ("observed", (-5_100, None), None, 0, 0, 0, (0, 0)),
        ("interval", None, None, None, None, 9_900, (9_900, None)),
        ("interval", (4_900, None), 99_000_000, 4_900_000, 4_900, 9_900, (9_900, None)),
        # Settings that were changed to a longer delay do not take it back either, nor does another rule.
        ("interval", (9_990, None), None, 9_990_000, 9_990, 9_990, (9_990, None)),
        ("interval", (9_990, 4_900), None, 9_990_000, 9_990, 9_990, (9_990, None)),
    ],
)
def test_a_watermark_follows_its_rule_and_never_goes_back(
    rule: Rule,
    base: tuple[int | None, int | None] | None,
    newest_us: int | None,
    late_until_us: int | None,
    seen_ms: int | None,
    due_ms: int,
    recorded: tuple[int | None, int | None],
) -> None:
    """The interval ends at 10,000 ms, the delay is 100 ms."""
    event_time = event_time_of("at", 100, rule, clock(*base) if base is not None else None)
    assert event_time.late_until_us == late_until_us
    assert event_time.base_ms == seen_ms
    assert event_time.due_ms(10_000) == due_ms
    assert event_time.advance(clock(seen_ms, None), 10_000, newest_us) == clock(*recorded)
