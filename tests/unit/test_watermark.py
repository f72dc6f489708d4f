"""What is late, which timers are due, and what watermark an interval records."""

from __future__ import annotations

import pytest

from jobs.runtime.watermark import EventTime, Rule


@pytest.mark.parametrize(
    ("rule", "base_ms", "newest_us", "late_until_us", "due_ms", "recorded_ms"),
    [
        # Nothing seen yet: nothing is late, and timers are due up to 0, as in Spark.
        ("observed", None, None, None, 0, None),
        ("observed", None, 5_000_999, None, 0, 4_900),
        ("observed", 4_900, 6_000_000, 4_900_000, 4_900, 5_900),
        # Older events, and none at all, keep the watermark where it is.
        ("observed", 4_900, 1_000_000, 4_900_000, 4_900, 4_900),
        ("observed", 4_900, None, 4_900_000, 4_900, 4_900),
        ("observed", None, -5_000_000, None, 0, -5_100),
        ("interval", None, None, None, 9_900, 9_900),
        ("interval", 4_900, 99_000_000, 4_900_000, 9_900, 9_900),
        # Settings that were changed to a longer delay do not take it back either.
        ("interval", 9_990, None, 9_990_000, 9_990, 9_990),
    ],
)
def test_rules(
    rule: Rule,
    base_ms: int | None,
    newest_us: int | None,
    late_until_us: int | None,
    due_ms: int,
    recorded_ms: int | None,
) -> None:
    """The interval ends at 10,000 ms, the delay is 100 ms."""
    event_time = EventTime(column="at", delay_ms=100, rule=rule, base_ms=base_ms)
    assert event_time.late_until_us == late_until_us
    assert event_time.due_ms(10_000) == due_ms
    assert event_time.recorded_ms(10_000, newest_us) == recorded_ms
