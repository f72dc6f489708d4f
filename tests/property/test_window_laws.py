"""Windows, sessions and funnels give the rows of SQL queries over the whole history, however the history is cut into intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import patch
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.aggregates import ApproxDistinct, Count, First, Last, Max, Mean, Min, StdDev, Sum, Variance
from cairn.processors import Funnel, SessionWindow, SlidingWindow, TumblingWindow
from tests.support.cut_histories import (
    DELAY,
    START,
    Cut,
    History,
    as_texts,
    ask,
    histories,
    oracle_laws,
    pipeline_of,
    run_cut,
    three_cuts,
    union,
)

pytestmark = pytest.mark.long("up to 100 histories for each processor, each in three cuts", runs_in="ci")

_AGGREGATES = {
    "rows": (Count(), "count(*)"),
    "values": (Count("value"), "count(value)"),
    "total": (Sum("value"), "CAST(sum(value) AS BIGINT)"),
    "amounts": (Sum("amount"), "CAST(sum(amount) AS DECIMAL(19, 2))"),
    "mean": (Mean("value"), "avg(value)"),
    "spread": (Variance("value"), "if(count(value) > 1, var_samp(value), NULL)"),
    "deviation": (StdDev("value"), "if(count(value) > 1, stddev_samp(value), NULL)"),
    "least": (Min("text"), "min(text)"),
    "most": (Max("value"), "max(value)"),
    "largest": (Max("amount"), "max(amount)"),
    "first": (First("value"), "first(value ORDER BY arrived, seq)"),
    "last": (Last("amount"), "last(amount ORDER BY arrived, seq)"),
    "first_text": (First("text", ignore_nulls=True), "first(text ORDER BY arrived, seq) FILTER (text IS NOT NULL)"),
    "last_text": (Last("text", ignore_nulls=True), "last(text ORDER BY arrived, seq) FILTER (text IS NOT NULL)"),
    "texts": (ApproxDistinct("text"), "count(DISTINCT text)"),
}
_DECLARED = {name: aggregate for name, (aggregate, _) in _AGGREGATES.items()}
_COLUMNS = ", ".join(f'{sql} AS "{name}"' for name, (_, sql) in _AGGREGATES.items())
_MINUTE_US = 60_000_000
_LATENESS = [timedelta(minutes=minutes) for minutes in (5, 30, 90)]
modes = st.sampled_from([{}, {"early": True}, *({"allowed_lateness": lateness} for lateness in _LATENESS)])
rows_of_values = histories(
    columns={
        "value": ("int", st.none() | st.integers(-2, 2)),
        "text": ("string", st.none() | st.sampled_from(["", "a", "B"])),
        "amount": ("decimal(9,2)", st.none() | st.decimals(-2, 2, places=2)),
        "gap": ("int", st.sampled_from([1, 300, 600, 3600])),
    },
    null_times=False,
)
Oracle = Callable[[datetime, Cut], list[dict[str, Any]]]


def rounded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows whose variances have few enough digits to be equal."""
    return [
        {name: round(v, 9) if name in ("spread", "deviation") and v is not None else v for name, v in row.items()}
        for row in rows
    ]


def check(
    history: History,
    cuts: list[Cut],
    processor: type,
    mode: dict[str, Any],
    oracle: Oracle,
    late_rows: Callable[[Cut], list[int]] | None = None,
    delay: timedelta = DELAY,
) -> None:
    """Compare the output of each cut with the oracle's rows: all of them at the end, or those of each interval."""
    pipeline = pipeline_of(type("Mine", (processor,), {**mode, **_DECLARED}), watermark_delay=delay)
    begin, finish = processor.bounds  # type: ignore[attr-defined]
    for cut in cuts:
        late: list[int] | None = None if late_rows is None else []
        outputs = [rounded(output) for output in run_cut(pipeline, history, cut, late)]
        assert late_rows is None or sorted(late or ()) == late_rows(cut), cut
        if not mode:
            assert union(outputs) == as_texts(rounded(oracle(cut.ends[-1], cut))), cut
            continue
        table: dict[Any, Any] = {}
        versions: dict[Any, int] = {}
        finals: set[Any] = set()
        for end, output in zip(cut.ends, outputs, strict=True):
            assert len({(repr(row["k"]), row[begin]) for row in output}) == len(output), (cut, end)
            for row in output:
                window = (repr(row["k"]), row[begin])
                assert row.pop("version") == versions.get(window, 0) + 1 and window not in finals
                versions[window] = versions.get(window, 0) + 1
                if row.pop("is_final", False):
                    finals.add(window)
                if row.pop("is_deleted", False):
                    del table[window]
                else:
                    table[window] = row
            now, expected = as_texts(list(table.values())), rounded(oracle(end, cut))
            if "early" in mode:
                assert now == as_texts(expected), (cut, end)
                continue
            at = end - delay
            if history.schema.find("t timestamp_ntz") > 0:
                at = at.astimezone(ZoneInfo(history.zone)).replace(tzinfo=None)
            at += mode["allowed_lateness"]
            assert set(now) <= set(as_texts(expected)), (cut, end)
            assert set(now) >= set(as_texts([row for row in expected if row[finish] <= at])), (cut, end)
        assert as_texts(list(table.values())) == as_texts(rounded(oracle(cut.ends[-1], cut)))
        assert "early" not in mode or finals == set(table)


@pytest.mark.parametrize("processor", [TumblingWindow, SlidingWindow])
@oracle_laws
@given(
    rows_of_values,
    three_cuts(),
    st.sampled_from([(20, 20), (60, 20), (50, 20), (90, 60), (420, 60)]),
    st.sampled_from([0, 10, -5]),
    modes,
)
def test_windows(processor: type, history: Any, cuts: Any, spans: tuple[int, int], offset: int, mode: Any) -> None:
    """A tumbling window slides by its size."""
    size, slide = spans if processor is SlidingWindow else spans[:1] * 2

    def oracle(end: datetime, cut: Cut) -> list[dict[str, Any]]:
        return ask(
            f"""SELECT k, t - to_microseconds(before) AS window_start,
                t - to_microseconds(before) + to_minutes({size}) AS window_end, {_COLUMNS}
            FROM (
                SELECT *, (epoch_us(t) - {offset * _MINUTE_US}) % {slide * _MINUTE_US} + nth * {slide * _MINUTE_US} AS before
                FROM history, range({-(-size // slide)}) AS numbers(nth) WHERE arrived < '{end}'
            ) WHERE before < {size * _MINUTE_US} GROUP BY ALL""",
            history,
        )

    declared = {"size": size, "offset": offset} | ({"slide": slide} if processor is SlidingWindow else {})
    settings = {name: timedelta(minutes=minutes) for name, minutes in declared.items()}
    check(history, cuts, type("Spans", (processor,), settings), mode, oracle)


@oracle_laws
@given(rows_of_values, three_cuts(), st.sampled_from([5, 15, 60, "gap"]), modes)
def test_session_windows_equal_sql_at_any_interval_length(history: Any, cuts: Any, gap: Any, mode: Any) -> None:
    seconds = gap if gap == "gap" else gap * 60

    def oracle(end: datetime, cut: Cut) -> list[dict[str, Any]]:
        return ask(
            f"""WITH ends AS (SELECT *, t + to_seconds({seconds}) AS e FROM history WHERE arrived < '{end}'),
            reached AS (
                SELECT *, max(e) OVER (
                    PARTITION BY k ORDER BY t, e ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
                ) AS before FROM ends
            ),
            numbered AS (
                SELECT *, count_if(before IS NULL OR t > before) OVER (
                    PARTITION BY k ORDER BY t, e ROWS UNBOUNDED PRECEDING
                ) AS session FROM reached
            )
            SELECT k, min(t) AS session_start, max(e) AS session_end, {_COLUMNS} FROM numbered GROUP BY k, session""",
            history,
        )

    settings = {"gap": gap if gap == "gap" else timedelta(minutes=gap)}
    check(history, cuts, type("Spans", (SessionWindow,), settings), mode, oracle)


# --- rows that are later than the delay -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Windows of rows.

    Attributes:
        processor: The processor.
        settings: Its settings.
        windows_of: Returns begin and end of the windows of a row by its event time. All times are in microseconds.
    """

    processor: type
    settings: dict[str, timedelta]
    windows_of: Callable[[int], list[tuple[int, int]]]


def _tumbling(size: int, offset: int) -> Spans:
    def windows_of(at: int) -> list[tuple[int, int]]:
        begin = at - (at - offset * _MINUTE_US) % (size * _MINUTE_US)
        return [(begin, begin + size * _MINUTE_US)]

    settings = {"size": timedelta(minutes=size), "offset": timedelta(minutes=offset)}
    return Spans(processor=TumblingWindow, settings=settings, windows_of=windows_of)


def _sliding(size: int, slide: int) -> Spans:
    def windows_of(at: int) -> list[tuple[int, int]]:
        last = at - at % (slide * _MINUTE_US)
        begins = (last - n * slide * _MINUTE_US for n in range(-(-size // slide)))
        return [(b, b + size * _MINUTE_US) for b in begins if at < b + size * _MINUTE_US]

    settings = {"size": timedelta(minutes=size), "slide": timedelta(minutes=slide)}
    return Spans(processor=SlidingWindow, settings=settings, windows_of=windows_of)


def _sessions(gap: int) -> Spans:
    settings = {"gap": timedelta(minutes=gap)}
    return Spans(processor=SessionWindow, settings=settings, windows_of=lambda at: [(at, at + gap * _MINUTE_US)])


def counted(history: History, cut: Cut, delay: timedelta, spans: Spans, until: datetime) -> tuple[pa.Table, list[int]]:
    """Return a row for each row and window that counts it, and the `seq` of late rows. Intervals end at `until`.

    A row counts in a window that ends after the watermark of the previous interval. A session takes rows until it closes.
    """
    rows, (begin_name, end_name) = history.rows, spans.processor.bounds  # type: ignore[attr-defined]
    of_time = rows.schema.field("t").type
    times = rows["t"].cast(pa.int64()).to_pylist()
    keys, arrived = [repr(key) for key in rows["k"].to_pylist()], rows["arrived"].to_pylist()
    closed: list[tuple[str, int, int, list[int]]] = []
    still_open: list[tuple[str, int, int, list[int]]] = []
    late: list[int] = []
    begin, zone = START, UTC if of_time.tz else ZoneInfo(history.zone)
    for end in cut.ends:
        if begin >= until:
            break
        walls = ((at - delay).astimezone(zone).replace(tzinfo=UTC) for at in (begin, end))
        watermark, due = (int(wall.timestamp() * 1000) * 1000 for wall in walls)
        for row in [n for n, at in enumerate(arrived) if begin <= at < end]:
            windows = [w for w in spans.windows_of(times[row]) if begin == START or w[1] > watermark]
            late += [] if windows else [rows["seq"][row].as_py()]
            for low, high in windows:
                joins = [
                    w
                    for w in still_open
                    if w[0] == keys[row]
                    and (w[1] <= high and low <= w[2] if spans.processor is SessionWindow else w[1] == low)
                ]
                still_open = [w for w in still_open if w not in joins]
                lows, highs = [low, *(w[1] for w in joins)], [high, *(w[2] for w in joins)]
                still_open.append((keys[row], min(lows), max(highs), [row, *(n for w in joins for n in w[3])]))
        closed += [w for w in still_open if w[2] <= due]
        still_open = [w for w in still_open if w[2] > due]
        begin = end
    of_window = [(n, *w[1:3], row) for n, w in enumerate([*closed, *still_open]) for row in w[3]]
    numbers, lows_, highs_, at = ([pair[n] for pair in of_window] for n in range(4))
    table = rows.take(pa.array(at, pa.int64())).append_column("w", pa.array(numbers, pa.int64()))
    for name, values in ((begin_name, lows_), (end_name, highs_)):
        table = table.append_column(name, pa.array(values, pa.int64()).cast(of_time))
    return table, sorted(late)


@oracle_laws
@given(
    rows_of_values,
    three_cuts(),
    st.sampled_from(
        [
            *(_tumbling(size, offset) for size, offset in ((20, 0), (60, 10), (420, -5))),
            *(_sliding(size, slide) for size, slide in ((60, 20), (50, 20), (420, 60))),
            *map(_sessions, (5, 15, 60)),
        ]
    ),
    st.sampled_from([timedelta(0), timedelta(minutes=5), timedelta(minutes=30)]),
    modes,
)
def test_a_row_counts_while_its_window_is_open(history: Any, cuts: Any, spans: Spans, delay: Any, mode: Any) -> None:
    begin, end = spans.processor.bounds  # type: ignore[attr-defined]
    if "allowed_lateness" in mode:
        mode = {"allowed_lateness": min(mode["allowed_lateness"], delay)} if delay else {}

    def oracle(until: datetime, cut: Cut) -> list[dict[str, Any]]:
        table, _ = counted(history, cut, delay, spans, until)
        return ask(
            f'SELECT k, "{begin}", "{end}", {_COLUMNS} FROM history GROUP BY k, w, "{begin}", "{end}"',
            replace(history, rows=table),
        )

    check(
        history,
        cuts,
        type("Spans", (spans.processor,), spans.settings),
        mode,
        oracle,
        lambda cut: counted(history, cut, delay, spans, cut.ends[-1])[1],
        delay,
    )


# --- Funnel -----------------------------------------------------------------------------------------------------------

_FUNNELS = """
WITH RECURSIVE ordered AS (
    SELECT k, t, row_number() OVER (PARTITION BY k ORDER BY t, arrived, seq) AS n, list_position({steps}, page) AS step
    FROM history
), walk AS (
    SELECT DISTINCT k, 1::BIGINT AS n, 0::BIGINT AS level, 0::BIGINT AS last, []::{of}[] AS times, 'skip' AS kind FROM ordered
    UNION ALL
    SELECT k, CASE kind WHEN 'abandon' THEN last + 1 ELSE n + 1 END,
        CASE kind WHEN 'open' THEN 1 WHEN 'advance' THEN level + 1 WHEN 'skip' THEN level ELSE 0 END,
        CASE WHEN kind IN ('open', 'advance', 'complete') THEN n ELSE last END,
        CASE kind WHEN 'open' THEN [t] WHEN 'advance' THEN list_append(times, t)
            WHEN 'complete' THEN list_append(times, t) ELSE times END,
        kind
    FROM (
        SELECT w.k, w.n, w.level, w.last, w.times, o.t, CASE
            WHEN w.level > 0 AND (o.n IS NULL OR o.t >= w.times[1] + {within}) THEN 'abandon'
            WHEN o.step = w.level + 1 AND o.step = {count} THEN 'complete'
            WHEN w.level < 2 AND o.step = 1 THEN 'open'
            WHEN w.level > 0 AND o.step = w.level + 1 THEN 'advance'
            ELSE 'skip' END AS kind
        FROM walk w LEFT JOIN ordered o ON o.k IS NOT DISTINCT FROM w.k AND o.n = w.n
        WHERE o.n IS NOT NULL OR w.level > 0
    )
)
SELECT k, times[1] AS funnel_start, times[-1] AS funnel_end, CAST(len(times) AS INT) AS steps_reached,
    ({steps})[len(times)] AS last_step, kind = 'complete' AS is_completed, times AS step_times
FROM walk WHERE kind IN ('abandon', 'complete')
"""


@oracle_laws
@given(
    histories(
        columns={"page": ("string", st.none() | st.sampled_from(["a", "a", "b", "b", "c", "x"]))},
        most_rows=40,
        null_times=False,
    ),
    three_cuts(),
    st.sampled_from([("a", "b"), ("a", "b", "c"), ("b", "a")]),
    st.sampled_from([5, 20, 60, 600]),
    st.sampled_from([0, 1, 32]),
)
def test_funnel_rows_equal_those_of_an_sql_query(history: Any, cuts: Any, steps: Any, within: int, rounds: int) -> None:
    settings = {"step": "page", "steps": steps, "within": timedelta(minutes=within)}
    pipeline = pipeline_of(type("Steps", (Funnel,), settings))
    sql = _FUNNELS.format(
        steps=list(steps),
        count=len(steps),
        within=f"INTERVAL {within} MINUTES",
        of="TIMESTAMP" if "t timestamp_ntz" in history.schema else "TIMESTAMPTZ",
    )
    expected = as_texts(ask(sql, history))
    with patch("cairn.processors.funnel._ROUNDS", rounds):
        for cut in cuts:
            assert union(run_cut(pipeline, history, cut)) == expected, cut
