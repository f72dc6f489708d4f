"""Windows and sessions of the ready-made processors: small examples, and declarations that are refused.

Their laws beside oracles in SQL: tests/property/test_window_laws.py.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from random import Random
from typing import Any
from unittest import mock

import pytest
from pyspark.sql.types import DayTimeIntervalType, IntegerType

from cairn.aggregates import Count, First, Last, Max, Sum
from cairn.errors import ProcessorError, UsageError
from cairn.processors import Funnel, SessionWindow, SlidingWindow, TumblingWindow
from cairn.spark.ddl import parse_ddl_locally
from cairn.testing import PipelineTester
from tests.support.ready_made import DAY, HOUR, TIMED, at, declared, ready, seqs
from tests.support.tiers import at_tier, long_after

MINUTE = timedelta(minutes=1)
READINGS = "user string, seq int, at timestamp, celsius double"
NOW = {**TIMED, "watermark_delay": timedelta(0)}


def spans(rows: list[dict[str, Any]], *names: str) -> list[Any]:
    """Return key, begin, end and other columns of each row. The times are texts; a null is None."""
    bounds = [name for name in rows[0] if name.endswith(("_start", "_end"))] if rows else []
    return sorted(
        (row["user"], *(row[b] and f"{row[b]:%H:%M}" for b in bounds), *(row[name] for name in names)) for row in rows
    )


def windowed(base: type, settings: dict[str, Any], pipeline: dict[str, Any] = TIMED) -> PipelineTester:
    return ready(declared(base, **{"n": Count(), **settings}), READINGS, **pipeline)


# --- TumblingWindow ---------------------------------------------------------------------------------------------------


def test_an_interval_that_closes_a_window_puts_out_one_row_of_it() -> None:
    window = windowed(TumblingWindow, {"size": HOUR, "early": True}, {**TIMED, "watermark_delay": HOUR})
    assert spans(window.run([("ann", 1, at(0, 10), 5.0)]).output, "n", "version", "is_final") == [
        ("ann", "00:00", "01:00", 1, 1, False)
    ]
    closing = window.run([("ann", 2, at(0, 20), 5.0)])
    assert spans(closing.output, "n", "version", "is_final") == [("ann", "00:00", "01:00", 2, 2, True)]
    assert window.state("windows") == [] and window.timers() == []


def test_a_window_of_one_interval_never_enters_the_state() -> None:
    window = windowed(TumblingWindow, {"size": 10 * MINUTE}, NOW)
    result = window.run([("ann", minute, at(0, minute), 5.0) for minute in range(0, 60, 5)])
    assert (len(result.output), window.state("windows"), window.timers()) == (6, [], [])


@pytest.mark.parametrize("base", [TumblingWindow, SlidingWindow])
def test_late_rows_correct_a_window(base: Any) -> None:
    size = {"size": HOUR, **({"slide": HOUR} if base is SlidingWindow else {})}
    window = windowed(base, {**size, "allowed_lateness": HOUR}, {**TIMED, "watermark_delay": HOUR})
    found = [
        spans(window.run(rows).output, "n", "version")
        for rows in (
            [("ann", 1, at(0, 10), 5.0), ("bob", 2, at(0, 20), 5.0)],
            [("ann", 3, at(0, 30), 5.0), ("cid", 4, at(0, 40), 5.0)],
            [("ann", 5, at(1, 30), 5.0)],
            [],
            [],
        )
    ]
    assert found == [
        [("ann", "00:00", "01:00", 1, 1), ("bob", "00:00", "01:00", 1, 1)],
        [("ann", "00:00", "01:00", 2, 2), ("cid", "00:00", "01:00", 1, 1)],
        [("ann", "01:00", "02:00", 1, 1)],
        [],
        [],
    ]
    states = ["windows"] if base is TumblingWindow else ["panes", "put_out"]
    assert [window.state(name) for name in states] == [[]] * len(states) and window.timers() == []


@pytest.mark.long("half a second", runs_in="ci")
@pytest.mark.parametrize(
    ("base", "length", "delay", "times"),
    [
        (TumblingWindow, {"size": HOUR}, 2 * HOUR, [at(0, 10), at(1, 10), None, at(1, 20)]),
        (SessionWindow, {"gap": HOUR}, 3 * HOUR, [at(0), at(1) + timedelta(microseconds=500), at(1, 30), None, None]),
    ],
)
def test_windows_that_share_a_timer_all_close(base: Any, length: Any, delay: timedelta, times: list[Any]) -> None:
    window = windowed(base, {**length, "allowed_lateness": HOUR}, {**TIMED, "watermark_delay": delay})
    for seq, time in enumerate([*times, None, None]):
        window.run([] if time is None else [("ann", seq, time, 5.0)])
    assert window.state("windows" if base is TumblingWindow else "sessions") == [] and window.timers() == []


# --- SlidingWindow ----------------------------------------------------------------------------------------------------


def test_a_row_counts_in_all_windows_that_have_it() -> None:
    window = windowed(SlidingWindow, {"size": HOUR, "slide": 20 * MINUTE, "most": Max("celsius")}, NOW)
    first = window.run([("ann", 1, at(0, 10), 5.0), ("ann", 2, at(0, 30), 7.0), ("bob", 3, at(0, 59), None)])
    assert spans(first.output, "n", "most") == [
        ("ann", "00:00", "01:00", 2, 7.0),
        ("ann", "23:20", "00:20", 1, 5.0),
        ("ann", "23:40", "00:40", 2, 7.0),
        ("bob", "00:00", "01:00", 1, None),
    ]
    assert [row["user_key_pane_start"] for row in window.state("panes")] == [at(0, 20), at(0, 40)]
    assert spans(window.run().output, "n", "most") == [
        ("ann", "00:20", "01:20", 1, 7.0),
        ("bob", "00:20", "01:20", 1, None),
        ("bob", "00:40", "01:40", 1, None),
    ]
    assert window.state("panes") == [] and window.timers() == []


def test_panes_are_as_long_as_the_common_divisor() -> None:
    window = windowed(SlidingWindow, {"size": 50 * MINUTE, "slide": 20 * MINUTE, "offset": 5 * MINUTE}, NOW)
    window.run([("ann", 1, at(0, 44), 5.0)])
    assert [row["user_key_pane_start"] for row in window.state("panes")] == [at(0, 35)]


@pytest.mark.long("half a second", runs_in="ci")
def test_sliding_windows_put_out_early_rows_before_their_final_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.runners.arrow_runner.ROUND_ROWS", 1)
    window = windowed(
        SlidingWindow, {"size": 2 * HOUR, "slide": HOUR, "early": True}, {**TIMED, "watermark_delay": HOUR}
    )
    names = ("n", "version", "is_final")
    rows = [("ann", 1, at(0, 10), 5.0), ("ann", 2, at(0, 20), 5.0), ("bob", 3, at(0), 5.0)]
    assert spans(window.run(rows).output, *names) == [
        ("ann", "00:00", "02:00", 2, 1, False),
        ("ann", "23:00", "01:00", 2, 1, False),
        ("bob", "00:00", "02:00", 1, 1, False),
        ("bob", "23:00", "01:00", 1, 1, False),
    ]
    assert spans(window.run([("ann", 4, at(1, 10), 5.0)]).output, *names) == [
        ("ann", "00:00", "02:00", 3, 2, False),
        ("ann", "01:00", "03:00", 1, 1, False),
        ("ann", "23:00", "01:00", 2, 2, True),
        ("bob", "23:00", "01:00", 1, 2, True),
    ]
    for _ in range(2):
        window.run()
    assert [window.state("panes"), window.state("put_out"), window.timers()] == [[], [], []]


def test_many_windows_are_put_out_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.processors.sliding_window._PAIRS", 2)
    window = windowed(SlidingWindow, {"size": HOUR, "slide": 10 * MINUTE}, NOW)
    rows = [(f"user {n}", n, at(0, n), 5.0) for n in range(0, 60, 7)]
    with mock.patch.object(SlidingWindow, "_rows", autospec=True, side_effect=SlidingWindow._rows) as part:
        assert len([*window.run(rows).output, *window.run().output]) == 6 * len(rows) <= 6 * part.call_count


# --- SessionWindow ----------------------------------------------------------------------------------------------------


def test_a_session_ends_after_a_gap() -> None:
    window = windowed(SessionWindow, {"gap": 10 * MINUTE, "last": Last("celsius")}, {**TIMED, "watermark_delay": HOUR})
    rows = [
        ("ann", 1, at(0, 5), 1.0),
        ("ann", 2, at(0, 14), 2.0),
        ("ann", 3, at(0, 24), 3.0),
        ("ann", 4, at(0, 50), 4.0),
    ]
    assert window.run(rows).output == []
    assert [(row["user_key_session_start"], row["session_end"]) for row in window.state("sessions")] == [
        (at(0, 5), at(0, 34)),
        (at(0, 50), at(1)),
    ]
    assert spans(window.run([("ann", 5, at(1, 5), 5.0)]).output, "n", "last") == [
        ("ann", "00:05", "00:34", 3, 3.0),
        ("ann", "00:50", "01:00", 1, 4.0),
    ]
    assert spans(window.run().output, "n") == [("ann", "01:05", "01:15", 1)]
    assert window.state("sessions") == [] and window.timers() == []
    window.run([("bob", 6, at(3, 55), 6.0)])
    window.run([("bob", 7, at(4, 2), 7.0)])
    assert len(window.timers()) == 1  # A session that grows moves its timer.


def test_a_late_row_merges_two_sessions() -> None:
    aggregates = {"total": Sum("celsius"), "first": First("celsius"), "last": Last("celsius")}
    window = windowed(SessionWindow, {"gap": 10 * MINUTE, **aggregates}, {**TIMED, "watermark_delay": HOUR})
    window.run([("ann", 1, at(0, 40), 4.0), ("ann", 2, at(0, 20), 2.0)])
    merged = window.run([("ann", 3, at(0, 30), 6.0)])
    (row,) = merged.output
    assert {name: row[name] for name in aggregates} == {"total": 12.0, "first": 4.0, "last": 6.0}
    assert spans(merged.output, "n") == [("ann", "00:20", "00:50", 3)]
    assert window.state("sessions") == [] and window.timers() == []


@pytest.mark.parametrize("of", [IntegerType(), DayTimeIntervalType()])
def test_each_row_sets_the_gap_of_its_session(of: Any) -> None:
    schema = parse_ddl_locally("user string, seq int, at timestamp").add("gap", of)
    window = ready(declared(SessionWindow, gap="gap", n=Count()), schema, **NOW)
    minutes = (lambda m: 60 * m) if isinstance(of, IntegerType) else (lambda m: m * MINUTE)
    rows = [
        ("ann", 1, at(0, 0), minutes(30)),
        ("ann", 2, at(0, 5), minutes(1)),
        ("ann", 3, at(0, 30), minutes(5)),
        ("ann", 4, at(0, 36), minutes(1)),
    ]
    assert spans(window.run(rows).output, "n") == [("ann", "00:00", "00:35", 3), ("ann", "00:36", "00:37", 1)]


def test_a_row_without_a_gap_is_refused() -> None:
    window = ready(declared(SessionWindow, gap="seq", n=Count()), READINGS, **NOW)
    with pytest.raises(
        ProcessorError, match=r"Mine: a row of key user='ann' has no gap: its 'seq' is 0; filter or fill such rows"
    ):
        window.run([("ann", 0, at(0), 5.0)])


def test_sessions_that_merge_after_early_output_delete_the_rows_put_out_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.runners.arrow_runner.ROUND_ROWS", 1)
    window = windowed(SessionWindow, {"gap": 10 * MINUTE, "early": True}, TIMED)
    names = ("n", "version", "is_final", "is_deleted")
    first = window.run([("ann", 1, at(0, 20), 1.0), ("ann", 2, at(0, 40), 1.0), ("bob", 3, at(0, 20), 1.0)])
    assert spans(first.output, *names) == [
        ("ann", "00:20", "00:30", 1, 1, False, False),
        ("ann", "00:40", "00:50", 1, 1, False, False),
        ("bob", "00:20", "00:30", 1, 1, False, False),
    ]
    # One row joins the sessions of ann. Another one moves the begin of bob's session.
    second = window.run([("ann", 4, at(0, 30), 1.0), ("bob", 5, at(0, 15), 1.0)])
    assert spans(second.output, *names) == [
        ("ann", "00:20", "00:50", 3, 2, False, False),
        ("ann", "00:40", None, None, 2, False, True),
        ("bob", "00:15", "00:30", 2, 1, False, False),
        ("bob", "00:20", None, None, 2, False, True),
    ]
    assert spans(window.run().output, *names) == [
        ("ann", "00:20", "00:50", 3, 3, True, False),
        ("bob", "00:15", "00:30", 2, 2, True, False),
    ]
    assert window.state("sessions") == [] and window.timers() == []


@pytest.mark.long("half a second", runs_in="ci")
def test_late_rows_correct_sessions() -> None:
    window = windowed(SessionWindow, {"gap": 10 * MINUTE, "allowed_lateness": HOUR}, {**TIMED, "watermark_delay": HOUR})
    names = ("n", "version", "is_deleted")
    first = window.run([("ann", 1, at(0, 20), 1.0), ("ann", 2, at(0, 40), 1.0), ("bob", 3, at(0, 55), 1.0)])
    assert spans(first.output, *names) == [
        ("ann", "00:20", "00:30", 1, 1, False),
        ("ann", "00:40", "00:50", 1, 1, False),
    ]
    second = window.run([("ann", 4, at(0, 30), 1.0), ("bob", 5, at(1), 1.0)])
    assert spans(second.output, *names) == [
        ("ann", "00:20", "00:50", 3, 2, False),
        ("ann", "00:40", None, None, 2, True),
        ("bob", "00:55", "01:10", 2, 1, False),
    ]
    for _ in range(2):
        assert window.run().output == []
    assert window.state("sessions") == [] and window.timers() == []


# --- declarations that are refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "settings", "message"),
    [
        (SlidingWindow, {"size": HOUR}, r"Mine\.slide is missing; write slide = timedelta\(hours=1\)"),
        (SlidingWindow, {"size": MINUTE, "slide": HOUR}, r"Mine\.slide is .*, longer than size = .*: rows between two"),
        (SlidingWindow, {"size": HOUR, "slide": HOUR, "offset": 1}, r"Mine\.offset is 1; write offset = timedelta"),
        (
            SessionWindow,
            {"early": True},
            r"Mine\.gap is missing; write gap = timedelta\(minutes=30\), or name a column",
        ),
        (SessionWindow, {"gap": 30}, r"Mine\.gap is 30; write gap = timedelta\(minutes=30\), or name a column"),
        (SessionWindow, {"gap": -HOUR}, r"Mine\.gap is datetime\.timedelta\(.*\); write gap"),
        (
            SessionWindow,
            {"gap": HOUR, "size": HOUR},
            r"Mine\.size is no setting of SessionWindow; its settings are gap",
        ),
        (
            TumblingWindow,
            {"size": HOUR, "allowed_lateness": 5},
            r"Mine\.allowed_lateness is 5; write allowed_lateness =",
        ),
        (
            SessionWindow,
            {"gap": HOUR, "allowed_lateness": HOUR, "early": True},
            r"Mine\.early is True and allowed_lateness is set: early rows include .*; leave out allowed_lateness",
        ),
    ],
)
def test_a_wrong_setting_is_refused_where_the_class_is_declared(base: type, settings: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        declared(base, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gap": "gaps"}, r"Mine\.gap names column 'gaps', which the input lacks; its columns are user string,"),
        ({"gap": "celsius"}, r"Mine\.gap names column 'celsius', which is double; name a column with an interval, or"),
        ({"gap": HOUR, "session_end": Count()}, "Mine: SessionWindow adds the column 'session_end' to the output, but"),
    ],
)
def test_sessions_that_do_not_fit_the_pipeline_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        windowed(SessionWindow, settings).run([])


def test_a_session_of_rows_before_1970_is_put_out() -> None:
    begin = datetime(1969, 12, 31, 22, tzinfo=DAY.tzinfo)
    window = windowed(SessionWindow, {"gap": HOUR}, {**NOW, "start": begin})
    found = [window.run([("ann", hour, begin + hour * HOUR + MINUTE, 1.0)]).output for hour in range(3)]
    assert spans([row for output in [*found, window.run().output, window.run().output] for row in output], "n") == [
        ("ann", "22:01", "01:01", 3)
    ]


@pytest.mark.parametrize(
    ("base", "settings", "delay", "rows", "late", "put_out"),
    [
        # The watermark is 00:30, and each interval emits windows up to 01:30.
        (TumblingWindow, {"size": HOUR}, 30 * MINUTE, [at(0, 10), at(0, 40)], [], [("00:00", "01:00", 3)]),
        (TumblingWindow, {"size": 10 * MINUTE}, 30 * MINUTE, [at(0, 19), at(0, 20)], [0, 1], [("00:50", "01:00", 1)]),
        (
            TumblingWindow,
            {"size": 10 * MINUTE, "offset": MINUTE},
            30 * MINUTE,
            [at(0, 20), at(0, 21)],
            [0],
            [("00:21", "00:31", 1), ("00:41", "00:51", 1)],
        ),
        # The watermark is 01:00. The windows up to 00:30 and 01:00 have closed.
        (
            SlidingWindow,
            {"size": HOUR, "slide": 30 * MINUTE},
            timedelta(0),
            [at(0, 29), at(0, 30), at(0, 55)],
            [0],
            [("00:30", "01:30", 3)],
        ),
        (
            SlidingWindow,
            {"size": HOUR, "slide": 30 * MINUTE, "early": True},
            timedelta(0),
            [at(0, 29), at(0, 30), at(0, 55)],
            [0],
            [("00:30", "01:30", 3)],
        ),
        # The stored session is 00:50 to 01:50. The rows of 00:01 and 00:40 join it; the row of 00:00 is late.
        (SessionWindow, {"gap": HOUR}, timedelta(0), [at(0, 0), at(0, 1), at(0, 40)], [0], [("00:01", "01:50", 3)]),
    ],
)
def test_a_row_counts_while_its_window_is_open(
    base: type, settings: Any, delay: timedelta, rows: list[datetime], late: list[int], put_out: list[Any]
) -> None:
    window = windowed(base, settings, {**TIMED, "watermark_delay": delay})
    window.run([("ann", 9, at(0, 50), 1.0)])
    result = window.run([(key, n, time, 1.0) for key in ("ann", "bob") for n, time in enumerate(rows)])
    assert seqs(result.late) == sorted(late * 2)
    of_key = {key: spans([row for row in result.output if row["user"] == key], "n") for key in ("ann", "bob")}
    assert of_key["ann"] == [("ann", *row) for row in put_out]
    # Without earlier rows in the state, no window that has closed is emitted again.
    assert {row[1] for row in of_key["bob"]} <= {row[1] for row in of_key["ann"]}


def test_a_row_whose_session_has_closed_opens_another_session() -> None:
    """As in Spark and Flink. With a gap per row, its event time decides: its start could be that of a closed session."""
    window = windowed(SessionWindow, {"gap": 30 * MINUTE}, NOW)
    assert spans(window.run([("ann", 1, at(0, 10), 1.0)]).output, "n") == [("ann", "00:10", "00:40", 1)]
    assert spans(window.run([("ann", 2, at(0, 35), 1.0)]).output, "n") == [("ann", "00:35", "01:05", 1)]
    of_row = ready(declared(SessionWindow, n=Count(), gap="seq"), READINGS, **NOW)
    of_row.run()
    assert seqs(of_row.run([("ann", 3600, at(0, 59), 1.0)]).late) == [3600]


def test_allowed_lateness_longer_than_the_watermark_delay_is_refused() -> None:
    settings = {"gap": HOUR, "allowed_lateness": 3 * HOUR}
    with pytest.raises(
        UsageError,
        match=r"pipeline 'ready': Mine\.allowed_lateness is 3:00:00, longer than watermark_delay = 2:00:00: windows would",
    ):
        windowed(SessionWindow, settings)
    windowed(SessionWindow, settings, {**TIMED, "watermark_delay": 3 * HOUR})


# --- state over many intervals ----------------------------------------------------------------------------------------


@pytest.mark.long("30 intervals for each processor, 60 in make test-all", runs_in="ci")
@pytest.mark.parametrize(
    ("base", "settings"),
    long_after(
        4,
        [
            (TumblingWindow, {"size": HOUR, "allowed_lateness": HOUR}),
            (SlidingWindow, {"size": HOUR, "slide": 20 * MINUTE, "early": True}),
            (SessionWindow, {"gap": 10 * MINUTE}),
            (Funnel, {"step": "celsius", "steps": (1.0, 2.0, 3.0), "within": HOUR}),
            (TumblingWindow, {"size": HOUR}),
            (SlidingWindow, {"size": HOUR, "slide": 20 * MINUTE}),
            (SlidingWindow, {"size": HOUR, "slide": 20 * MINUTE, "allowed_lateness": HOUR}),
            (SessionWindow, {"gap": 10 * MINUTE, "early": True}),
            (SessionWindow, {"gap": 10 * MINUTE, "allowed_lateness": HOUR}),
        ],
        "seconds",
    ),
)
def test_state_is_flat_over_many_intervals(base: type, settings: dict[str, Any]) -> None:
    aggregates = {} if base is Funnel else {"n": Count(), "last": Last("celsius")}
    window = ready(declared(base, **aggregates, **settings), READINGS, **TIMED)
    random = Random(7)
    states = {TumblingWindow: ["windows"], SlidingWindow: ["panes"], SessionWindow: ["sessions"], Funnel: ["rows"]}[
        base
    ]
    states += ["put_out"] * (base is SlidingWindow and len(settings) > 2)
    sizes = []
    for hour in range(at_tier(fast=30, ci=30, all=60)):
        window.run(
            [
                (f"user {key}", n, at(hour, random.randrange(-60, 60)), float(random.randrange(1, 4)))
                for key in range(4)
                for n in range(3)
            ]
        )
        if hour % 10 == 9:
            sizes.append(sum(len(window.state(name)) for name in states) + len(window.timers()))
    assert max(sizes[1:]) <= 1.5 * min(sizes[1:]), sizes
    for _ in range(6):
        window.run()
    assert [window.state(name) for name in states] == [[]] * len(states) and window.timers() == []
