"""Bounds of lengths of time and of event times, for each ready-made processor. `docs/ready-made.md` has them as a table."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from cairn.errors import UsageError
from state_backend.values.time_bounds import LONGEST
from tests.support.every_processor import READY_MADE, made_tester, row
from tests.support.layout import REPOSITORY

START = datetime.fromisoformat("2024-01-15T06:00Z")
LENGTHS = [
    (case, name)
    for case, (_, given) in READY_MADE.items()
    for name, value in given.items()
    if isinstance(value, timedelta)
]
EDGES = (datetime(1, 1, 1), datetime(1, 1, 1, 0, 0, 0, 1), datetime(9999, 12, 31), datetime.max)
# The greatest, and some whose sum with an event time, or product with a million, exceeds 64 bits.
GAPS = (2**63 - 1, 2**62, 2**44, 10**12, 250_000_000_000, 1)


@pytest.mark.parametrize(("case", "name"), LENGTHS)
def test_a_length_of_more_than_a_thousand_years_is_refused_where_the_pipeline_is_declared(case: str, name: str) -> None:
    over = LONGEST + timedelta(microseconds=1)
    for value in (over, timedelta.max, *((-over, timedelta.min) if name in ("lower", "offset") else ())):
        with pytest.raises(UsageError, match=rf"Mine\.{name} is .*; the longest is timedelta\(days=365000\)"):
            made_tester(case, START, settings={name: value, **({"upper": value} if name == "lower" else {})})


def test_a_watermark_delay_of_more_than_a_thousand_years_is_refused() -> None:
    with pytest.raises(UsageError, match=r"watermark_delay is .*; the longest is"):
        made_tester("TopN", START, watermark_delay=timedelta.max)


def seen(tester: Any, rows: list[Any]) -> list[dict[str, Any]]:
    """The output of an interval, and of enough further rows to fire timers."""
    found: list[dict[str, Any]] = tester.run(rows).output
    for _ in range(3):
        found += tester.run().output
    return found


@pytest.mark.parametrize("of_time", ["timestamp", "timestamp_ntz"])
@pytest.mark.parametrize("case", READY_MADE)
def test_rows_at_the_first_and_last_event_time_are_taken(case: str, of_time: str) -> None:
    """No interval stops, and the times of output and state are times of the years 1 to 9999, each end after its start."""
    zone = START.tzinfo if of_time == "timestamp" else None
    edges = [at.replace(tzinfo=zone) for at in EDGES]
    tester = made_tester(case, START, of_time)
    rows = [row(at, 2 * n + twice, gap=GAPS[n]) for n, at in enumerate(edges) for twice in (0, 1)]
    usual = [
        row(START.replace(tzinfo=zone) + timedelta(minutes=5 * n), 20 + n, "bob", GAPS[n]) for n in range(len(GAPS))
    ]
    found = seen(tester, [*rows, *usual])
    assert seen(tester, [row(edges[3], 40), row(edges[0], 41)]) is not None
    for one in found:
        for start, end in (
            ("window_start", "window_end"),
            ("session_start", "session_end"),
            ("funnel_start", "funnel_end"),
        ):
            if start in one:
                assert one[start] < one[end] if start != "funnel_start" else one[start] <= one[end]
    for state in tester.checkpoints[-1].content.states:
        assert isinstance(tester.state(state.name), list)
    tester.timers()


@pytest.mark.parametrize("case", READY_MADE)
def test_the_longest_lengths_are_taken(case: str) -> None:
    given = {
        name: LONGEST
        for one, name in LENGTHS
        if one == case and name not in ("slide", "lower", "allowed_lateness", "offset")
    }
    given |= {"slide": LONGEST} if case.startswith("Sliding") else {}
    tester = made_tester(case, START, settings=given)
    rows = [row(at, n) for n, at in enumerate((*EDGES, START.replace(tzinfo=None)))]
    assert isinstance(seen(tester, rows), list)


def test_the_docs_list_the_longest_length_and_each_bounded_setting() -> None:
    page = (REPOSITORY / "docs/ready-made.md").read_text()
    table = page.partition("### Bounds of time")[2].partition("\n## ")[0]
    assert f"timedelta(days={LONGEST.days})" in table
    for name in {name for _, name in LENGTHS} | {"watermark_delay", "gap"}:
        assert f"`{name}`" in table, name
