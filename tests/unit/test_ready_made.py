"""Ready-made processors: small examples of each, and declarations that are refused.

Their laws beside oracles in SQL: tests/property/test_ready_made_laws.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyspark import cloudpickle

from cairn import Pipeline
from cairn.aggregates import Count, First, Max, Min, RunningAggregate, Sum
from cairn.errors import ProcessorError, UsageError
from cairn.processors import Deduplicate, History, Latest, SessionWindow, SlidingWindow, TopN, TumblingWindow
from cairn.testing import PipelineTester
from tests.support.bare_pipeline import bare_pipeline
from tests.support.layout import REPOSITORY
from tests.support.ready_made import DAY, HOUR, TIMED, at, declared, ready, seqs


def newest_rows(table: str, tester: PipelineTester, *intervals: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Return the rows that the page's query finds in a table of the output of hourly intervals."""
    page = (REPOSITORY / "docs/ready-made.md").read_text()
    (query,) = (q for q in re.findall(r"```sql\n(.*?)```", page, re.DOTALL) if f"AS n FROM {table}\n" in q)
    outputs = [(at(hour), tester.run(rows).output) for hour, rows in enumerate(intervals)]
    rows = [{**row, "interval_start": start} for start, output in outputs for row in output]
    with duckdb.connect() as connection:
        connection.register(table, pa.Table.from_pylist(rows))
        return connection.sql(query).to_arrow_table().to_pylist()


# --- Deduplicate ------------------------------------------------------------------------------------------------------

EVENTS = "user string, seq int, at timestamp"


def test_the_first_row_of_a_horizon_is_put_out() -> None:
    once = ready(declared(Deduplicate, horizon=HOUR), EVENTS, **TIMED)
    first = once.run([("ann", 1, at(0, 5)), ("ann", 2, at(0, 3)), ("ann", 3, None), ("bob", 4, at(0, 59))])
    assert seqs(first.output) == [1, 3, 4]
    assert once.state("seen") == [
        {"key_user": "ann", "duplicates": 1, "opened_at": at(0, 5)},
        {"key_user": "bob", "duplicates": 0, "opened_at": at(0, 59)},
    ]
    # 01:04:59.999999 is less than an hour after 00:05.
    second = [("ann", 5, at(1, 5) - timedelta(microseconds=1)), ("ann", 6, at(1, 5)), ("ann", 7, at(0, 50))]
    assert seqs(once.run(second).output) == [6]
    assert [row["duplicates"] for row in once.state("seen")] == [1, 0]


@pytest.mark.long("half a second", runs_in="ci")
def test_the_last_row_of_a_horizon_waits_for_its_end() -> None:
    once = ready(declared(Deduplicate, horizon=HOUR, keep="last"), EVENTS, **TIMED)
    rows = [("ann", 1, at(0, 5)), ("ann", 2, at(0, 40)), ("ann", 3, at(0, 20)), ("ann", 4, at(1, 10))]
    assert seqs(once.run(rows).output) == [2]  # Row 4 opened the next horizon.
    assert once.state("waiting") == [
        {"key_user": "ann", "duplicates": 0, "opened_at": at(1, 10), "row_seq": 4, "row_at": at(1, 10)}
    ]
    outputs = [seqs(once.run().output) for _ in range(4)]
    assert outputs == [[], [], [], [4]]  # The watermark is two hours behind.
    assert once.state("waiting") == [] and once.timers() == []


@pytest.mark.parametrize(
    ("keep", "numbers"), [("first", [(1, 0), (2, 1), (3, 2), (4, 3)]), ("last", [(1, 1), (2, 3), (3, 2)])]
)
def test_duplicates_are_put_out_with_a_number(keep: Any, numbers: Any) -> None:
    once = ready(declared(Deduplicate, horizon=HOUR, keep=keep, output_duplicates=True), EVENTS, **TIMED)
    rows = [("ann", 1, at(0, 5)), ("ann", 2, at(0, 40)), ("ann", 3, at(0, 20)), ("ann", 4, at(0, 40))]
    assert seqs(once.run(rows).output, "duplicate_number") == numbers


def test_a_key_that_is_remembered_for_ever_needs_no_time() -> None:
    once = ready(declared(Deduplicate, horizon=None), "user string, seq int", time_mode="none")
    assert seqs(once.run([("ann", 1), ("ann", 2), (None, 3)]).output) == [1, 3]
    assert seqs(once.run([("ann", 4), (None, 5), ("bob", 6)]).output) == [6]
    assert [row["duplicates"] for row in once.state("seen")] == [1, 2, 0]


def test_deduplicate_emits_the_first_row_of_each_of_many_horizons_in_a_batch() -> None:
    once = ready(declared(Deduplicate, horizon=timedelta(minutes=1)), EVENTS, **TIMED)
    rows = [("ann", seq, at(0) + timedelta(seconds=30 * seq)) for seq in range(100)]
    assert seqs(once.run(rows).output) == list(range(0, 100, 2))


def test_a_late_row_is_put_aside() -> None:
    once = ready(declared(Deduplicate, horizon=HOUR), EVENTS, **{**TIMED, "watermark_delay": timedelta(0)})
    once.run()
    late = once.run([("ann", 1, at(0, 30)), ("ann", 2, at(1, 30))])
    assert (seqs(late.output), seqs(late.late)) == ([2], [1])


@pytest.mark.parametrize("base", [Deduplicate, Latest, History, TopN, TumblingWindow])
@pytest.mark.long("half a second", runs_in="ci")
def test_ready_made_processors_accept_columns_that_are_not_null(base: type) -> None:
    """A column may be NOT NULL in the input. In the state the column may be null, because a key without state has only nulls."""
    settings: dict[Any, dict[str, Any]] = {
        Deduplicate: {"horizon": HOUR, "keep": "last", "output_duplicates": True},
        Latest: {"version": "seq", "deleted": "gone", "horizon": HOUR},
        History: {"deleted": "gone"},
        TopN: {"n": 1, "order": "seq"},
        TumblingWindow: {"size": HOUR, "early": True, "first": First("gone"), "least": Min("seq")},
    }
    schema = "user string not null, seq int not null, at timestamp not null, gone boolean not null"
    pipeline = ready(declared(base, **settings[base]), schema, **TIMED)
    found = [pipeline.run([("ann", 1, at(hour), False), ("ann", 2, at(hour, 1), True)]).output for hour in range(3)]
    found += [pipeline.run().output for _ in range(6)]
    assert any(found)


def test_the_time_may_be_a_part_of_the_key() -> None:
    last = ready(declared(Deduplicate, horizon=HOUR, keep="last"), EVENTS, **TIMED, key=["user", "seq", "at"])
    assert last.run([("ann", 1, at(0, 5))] * 3).output == []
    for _ in range(2):
        last.run()
    assert last.run().output == [{"user": "ann", "seq": 1, "at": at(0, 5)}]


# --- Latest -----------------------------------------------------------------------------------------------------------

CHANGES = "user string, seq int, version int, gone boolean, city string"


def test_an_older_row_replaces_nothing() -> None:
    newest = ready(declared(Latest, version="version"), CHANGES)
    rows = [("ann", 1, 5, None, "Oslo"), ("ann", 2, 4, None, "Rome"), ("bob", 3, None, None, "Bern")]
    assert seqs(newest.run(rows).output) == [1, 3]
    assert seqs(newest.run([("ann", 4, 3, None, "Rome"), ("bob", 5, None, True, "Bonn")]).output, "city") == [
        (5, "Bonn")
    ]
    assert newest.state("latest") == [
        {"key_user": "ann", "seq": 1, "version": 5, "gone": None, "city": "Oslo"},
        {"key_user": "bob", "seq": 5, "version": None, "gone": True, "city": "Bonn"},
    ]


def test_a_deleted_key_is_remembered_for_a_horizon() -> None:
    newest = ready(declared(Latest, version="version", deleted="gone", horizon=2 * HOUR), CHANGES)
    newest.run([("ann", 1, 5, None, "Oslo")])
    gone = {"seq": None, "version": 6, "gone": True, "city": None}
    assert newest.run([("ann", 2, 6, True, "Oslo")]).output == [{"user": "ann", **gone}]
    old = ("ann", 3, 5, False, "Oslo")
    assert newest.run([old]).output == []
    assert newest.state("latest") == [{"key_user": "ann", **gone}]
    assert newest.run([old]).output == []  # The timer fires behind these rows.
    assert newest.state("latest") == [] and newest.timers() == []
    assert seqs(newest.run([old]).output) == [3]


def test_the_pages_query_finds_the_newest_row_of_each_key() -> None:
    """Neither a deleted key nor a row that was replaced."""
    of = {"key": ["customer"], "order_by": []}
    tester = ready(
        declared(Latest, version="v", deleted="is_deleted", horizon=None),
        "customer string, v int, is_deleted boolean",
        **of,
    )
    first = [("ann", 1, False), ("bob", 1, False), ("cy", 1, None)]
    second = [("ann", 3, False), ("bob", 2, True)]
    found = newest_rows("customers", tester, first, second, [("ann", 2, False), ("bob", 1, False)])
    assert sorted((row["customer"], row["v"]) for row in found) == [("ann", 3), ("cy", 1)]


def test_latest_does_not_forget_a_deleted_key_that_is_written_again() -> None:
    newest = ready(declared(Latest, version="version", deleted="gone", horizon=HOUR), CHANGES)
    newest.run([("ann", 1, 5, True, None), ("bob", 2, 5, True, None)])
    newest.run([("ann", 3, 6, False, "Oslo"), ("bob", 4, 7, True, None)])
    assert [row["key_user"] for row in newest.timers()] == ["bob"]
    newest.run()
    assert [row["key_user"] for row in newest.state("latest")] == ["ann"]


def test_deleted_keys_may_be_kept_for_ever() -> None:
    newest = ready(declared(Latest, version="version", deleted="gone", horizon=HOUR), CHANGES)
    newest.run([("ann", 1, 5, True, None)])
    newest.deploy(ready(declared(Latest, version="version", deleted="gone", horizon=None), CHANGES).pipeline)
    for _ in range(3):
        newest.run()
    assert len(newest.state("latest")) == 1


def test_latest_without_a_version_column_keeps_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.runners.arrow_runner.ROUND_ROWS", 1)
    newest = ready(Latest, CHANGES)
    assert seqs(newest.run([("ann", seq, None, None, None) for seq in range(5)]).output) == [4]


@pytest.mark.parametrize("round_rows", [1, 65_536])
def test_a_row_that_is_sent_again_unchanged_is_not_emitted_again(
    round_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the rows in between, and wherever the processor's calls end. Null is equal to null, NaN to NaN."""
    monkeypatch.setattr("cairn.runners.arrow_runner.ROUND_ROWS", round_rows)
    schema = "user string, seq int, x double, tags array<int>, s struct<a:int,b:string>"
    newest = ready(Latest, schema)
    first = ("ann", 1, float("nan"), [1, None], (None, "x"))
    other = ("bob", 2, None, None, None)
    assert seqs(newest.run([first, other]).output) == [1, 2]
    assert newest.run([first, other, other]).output == []
    assert newest.run([first, ("ann", 0, 1.0, [], None), first]).output == []
    for changed in (
        (0.0, [1, None], (None, "x")),
        (-0.0, [1, None], (None, "x")),
        (-0.0, [1], (None, "x")),
        (None, [1], (1, "x")),
    ):
        assert seqs(newest.run([("ann", 1, *changed), other]).output) == [1]
    deletes = ready(declared(Latest, version="version", deleted="gone", horizon=None), CHANGES)
    gone = ("ann", 2, 6, True, "Oslo")
    assert len(deletes.run([("ann", 1, 5, False, "Oslo"), gone]).output) == 1
    assert deletes.run([gone]).output == []


def test_the_version_may_be_a_part_of_the_key() -> None:
    newest = ready(declared(Latest, version=("version", "seq")), CHANGES, key=["user", "version"])
    newest.run([("ann", 2, 5, None, "Oslo"), ("ann", 1, 6, None, "Rome")])
    assert seqs(newest.run([("ann", 1, 5, None, "Bern"), ("ann", 3, 6, None, "Bonn")]).output) == [3]


# --- TopN -------------------------------------------------------------------------------------------------------------

SCORES = "user string, seq int, score int"


@pytest.mark.parametrize(
    ("ties", "first", "second"),
    [
        ("first", [(1, 1), (2, 2), (4, 1)], [(1, 2), (6, 1)]),
        ("all", [(1, 1), (2, 1), (3, 1), (4, 1)], [(1, 2), (2, 2), (3, 2), (6, 1)]),
    ],
)
def test_the_best_rows_are_put_out_with_their_ranks(ties: Any, first: Any, second: Any) -> None:
    best = ready(declared(TopN, n=2, order="score desc", ties=ties), SCORES)
    rows = [("ann", 1, 5), ("ann", 2, 5), ("ann", 3, 5), ("bob", 4, None)]
    assert seqs(best.run(rows).output, "rank") == first
    assert seqs(best.run([("ann", 5, 4), ("ann", 6, 7)]).output, "rank") == second
    assert best.run([("ann", 7, 4)]).output == []
    assert [row["seq"] for row in best.state("top") if row["key_user"] == "ann"] == [
        seq for seq, _ in sorted(second, key=lambda row: row[1])
    ]


@pytest.mark.parametrize("limit", ["ROUND_ROWS", "ROUND_BYTES"])
def test_a_key_in_many_batches_is_put_out_once(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"cairn.runners.arrow_runner.{limit}", 1)
    best = ready(declared(TopN, n=2, order=["score"]), SCORES)
    assert seqs(best.run([("ann", seq, 9 - seq % 7) for seq in range(20)]).output, "rank") == [(6, 1), (13, 2)]


def test_best_rows_that_do_not_change_are_forgotten() -> None:
    best = ready(declared(TopN, n=1, order="score desc", ttl_ms=2 * 3_600_000), SCORES)
    assert seqs(best.run([("ann", 1, 5)]).output) == [1]
    assert best.run([("ann", 2, 4)]).output == []
    assert seqs(best.run([("ann", 3, 3)]).output) == [3]


# --- History ----------------------------------------------------------------------------------------------------------

MOVES = "user string, seq int, at timestamp, gone boolean, city string"


def versions(rows: list[dict[str, Any]]) -> list[Any]:
    """Return city, valid_from and valid_to of each output row of `History`, with the times as text."""
    texts = [
        (row["city"], *(row[name] and f"{row[name]:%H:%M}" for name in ("valid_from", "valid_to"))) for row in rows
    ]
    return sorted(texts, key=lambda text: text[1])


@pytest.mark.long("half a second", runs_in="ci")
def test_a_change_ends_the_version_before_it() -> None:
    history = ready(declared(History, deleted="gone"), MOVES, **TIMED)
    first = history.run([("ann", 1, at(0, 10), None, "Oslo"), ("ann", 2, at(0, 30), False, "Rome")])
    assert versions(first.output) == [("Oslo", "00:10", "00:30"), ("Rome", "00:30", None)]
    late = history.run([("ann", 3, at(0, 20), None, "Bern"), ("ann", 4, at(1, 30), True, None)])
    assert versions(late.output) == [("Oslo", "00:10", "00:20"), ("Bern", "00:20", "00:30"), ("Rome", "00:30", "01:30")]
    assert history.run([("ann", 5, at(1, 30), True, None)]).output == []
    for _ in range(2):
        history.run()
    assert history.state("changes") == [] and history.timers() == []


def test_a_later_row_replaces_a_row_of_the_same_time() -> None:
    history = ready(declared(History, deleted="gone"), MOVES, **TIMED)
    rows = [
        ("ann", 1, at(0, 10), None, "Oslo"),
        ("ann", 2, at(0, 10), None, "Rome"),
        ("ann", 3, at(0, 20), None, "Bern"),
    ]
    assert versions(history.run(rows).output) == [("Rome", "00:10", "00:20"), ("Bern", "00:20", None)]
    deletion = history.run([("ann", 4, at(0, 20), True, None)])
    assert versions(deletion.output) == [("Bern", "00:20", "00:20")]  # The version is to be deleted.


def test_the_pages_query_finds_the_versions_that_exist() -> None:
    """Later rows change the end of a version, and delete one."""
    schema = "customer string, at timestamp, city string, is_deleted boolean"
    tester = ready(declared(History, deleted="is_deleted"), schema, **TIMED, key=["customer"], order_by=[])
    first = [("ann", at(0), "Oslo", False), ("ann", at(0, 30), "Rome", False), ("bob", at(0, 5), "Bern", False)]
    second = [("ann", at(0, 15), "Bern", False), ("bob", at(0, 5), None, True), ("ann", at(1), None, True)]
    found = newest_rows("customer_history", tester, first, second)
    assert sorted((row["valid_from"].minute, row["city"], row["valid_to"].minute) for row in found) == [
        (0, "Oslo", 15),
        (15, "Bern", 30),
        (30, "Rome", 0),
    ]


@pytest.mark.long("half a second", runs_in="ci")
def test_history_keeps_only_the_last_change_before_the_watermark_in_state() -> None:
    history = ready(History, MOVES, **TIMED)
    history.run([("ann", minute, at(0, minute), None, "Oslo") for minute in range(5)])
    assert [len(history.state("changes")), len(history.timers())] == [5, 1]
    for _ in range(2):
        history.run()
    assert [[row["seq"] for row in history.state("changes")], history.timers()] == [[0], []]
    later = history.run([("ann", 5, at(3, 30), None, "Rome")])
    assert versions(later.output) == [("Oslo", "00:00", "03:30"), ("Rome", "03:30", None)]


@pytest.mark.long("half a second", runs_in="ci")
def test_a_row_without_a_change_makes_no_version() -> None:
    """A row that comes late may begin the version earlier, and the version that was emitted is then deleted."""
    history = ready(declared(History, deleted="gone"), MOVES, **TIMED)
    same = [("ann", minute, at(0, minute), None, "Oslo") for minute in (10, 30, 50)]
    assert versions(history.run(same).output) == [("Oslo", "00:10", None)]
    assert history.run([same[0], ("ann", 7, at(0, 20), False, "Oslo")]).output == []
    earlier = history.run([("ann", 8, at(0, 5), None, "Oslo"), ("ann", 9, at(0, 40), None, "Rome")]).output
    assert versions(earlier) == [
        ("Oslo", "00:05", "00:40"),
        ("Oslo", "00:10", "00:10"),
        ("Rome", "00:40", "00:50"),
        ("Oslo", "00:50", None),
    ]


@pytest.mark.long("half a second", runs_in="ci")
@pytest.mark.parametrize("field", ["makes_version", "of a release without the field"])
@pytest.mark.parametrize("settled", [False, True])
def test_history_leaves_no_old_version_open_if_fewer_rows_make_versions(
    field: str, settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table has versions of rows without a change, of other settings or of an older release. None of them stays open."""
    each_row = declared(History, tracked="at")
    history, table = ready(each_row, MOVES, **TIMED), {}

    def run(*rows: Any) -> list[Any]:
        for city, start, end in versions(history.run([*rows]).output):
            table[start] = (city, end)
            if start == end:
                del table[start]
        return sorted((start, *values) for start, values in table.items())

    with monkeypatch.context() as patched:
        patched.setattr("cairn.processors.history.MAKES_VERSION", field)
        rows = [("ann", minute, at(0, minute), None, "Oslo") for minute in (10, 30)]
        assert run(*rows) == [("00:10", "Oslo", "00:30"), ("00:30", "Oslo", None)]
        for _ in range(2 * settled):
            run()
    history.deploy(ready(History, MOVES, **TIMED).pipeline)
    hour = 3 if settled else 1
    rome = ("ann", 60, at(hour, 10), None, "Rome")
    one = [("00:10", "Oslo", f"0{hour}:10")]
    two = [("00:10", "Oslo", "00:30"), ("00:30", "Oslo", f"0{hour}:10")]
    # Of rows before the watermark, the state has only the last version.
    assert run(rome) == [*(two if settled else one), (f"0{hour}:10", "Rome", None)]


def test_only_tracked_columns_make_versions() -> None:
    for tracked, found in (
        ("city", ["00:10", "00:30"]),
        (("city", "seq"), ["00:10", "00:20", "00:30"]),
        ("at", ["00:10", "00:20", "00:30"]),
    ):
        history = ready(declared(History, tracked=tracked), MOVES, **TIMED)
        rows = [
            ("ann", seq, at(0, minute), None, city) for seq, minute, city in ((1, 10, "a"), (2, 20, "a"), (3, 30, "b"))
        ]
        assert [start for _, start, _ in versions(history.run(rows).output)] == found
    for tracked, says in (
        ("town", "'town', which the input lacks"),
        ("user", "'user', which is a key column or `deleted`"),
    ):
        with pytest.raises(UsageError, match=says):
            ready(declared(History, tracked=tracked), MOVES, **TIMED).run([])
    with pytest.raises(UsageError, match="rename that column"):
        ready(History, f"{MOVES}, makes_version int", **TIMED).run([])


def test_a_history_may_begin_before_1970() -> None:
    begin = datetime(1960, 1, 1, tzinfo=UTC)
    history = ready(History, MOVES, **TIMED, start=begin)
    minutes = [begin + timedelta(minutes=minute) for minute in (10, 20, 30)]
    history.run([("ann", 1, minutes[0], None, "Oslo"), ("ann", 2, minutes[2], None, "Rome")])
    late = history.run([("ann", 3, minutes[1], None, "Bern")])
    assert versions(late.output) == [("Oslo", "00:10", "00:20"), ("Bern", "00:20", "00:30")]


def test_a_change_without_a_time_is_refused() -> None:
    history = ready(History, MOVES, **TIMED)
    with pytest.raises(
        ProcessorError, match=r"History: a row of key user='bob' has no event time: its 'at' is null; filter"
    ):
        history.run([("ann", 1, at(0), None, "Oslo"), ("bob", 2, None, None, "Rome")])


# --- TumblingWindow ---------------------------------------------------------------------------------------------------

READINGS = "user string, seq int, at timestamp, celsius double"


def windows(rows: list[dict[str, Any]], *names: str) -> list[Any]:
    """Return key, begin of the window and other columns of each row."""
    return sorted((row["user"], f"{row['window_start']:%H:%M}", *(row[name] for name in names)) for row in rows)


def test_a_window_is_put_out_when_the_watermark_passes_its_end() -> None:
    hourly = declared(TumblingWindow, size=HOUR, readings=Count(), highest=Max("celsius"))
    window = ready(hourly, READINGS, **{**TIMED, "watermark_delay": timedelta(minutes=30)})
    assert (
        window.run([("ann", 1, at(0, 10), 5.0), ("ann", 2, at(0, 59), 7.0), ("bob", 3, at(0, 50), None)]).output == []
    )
    late = window.run([("ann", 4, at(0, 20), 9.0), ("ann", 5, at(1), 1.0), ("ann", 6, DAY - HOUR, 99.0)])
    assert windows(late.output, "readings", "highest") == [("ann", "00:00", 3, 9.0), ("bob", "00:00", 1, None)]
    assert seqs(late.late) == [6]
    assert window.state("windows") == [
        {"key_user": "ann", "user_key_window_start": at(1), "readings_count": 1, "highest_max": 1.0}
    ]
    last = window.run()
    assert last.output == [{"user": "ann", "window_start": at(1), "window_end": at(2), "readings": 1, "highest": 1.0}]
    assert window.state("windows") == [] and window.timers() == []


def test_windows_begin_at_an_offset() -> None:
    shifted = declared(TumblingWindow, size=HOUR, offset=timedelta(minutes=-15), readings=Count())
    window = ready(shifted, READINGS, **{**TIMED, "watermark_delay": timedelta(0)})
    begin = datetime(1969, 12, 31, 23, 50, tzinfo=UTC)
    rows = [("ann", 1, at(0, 44), None), ("ann", 2, at(0, 45), None), ("ann", 3, begin, None)]
    assert windows(window.run(rows).output, "readings") == [("ann", "23:45", 1), ("ann", "23:45", 1)]


def test_early_rows_have_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.runners.arrow_runner.ROUND_ROWS", 1)
    hourly = declared(TumblingWindow, size=HOUR, early=True, readings=Count())
    window = ready(hourly, READINGS, **TIMED)
    names = ("readings", "version", "is_final")
    rows = [("ann", 1, at(0, 10), 5.0), ("ann", 2, at(1, 10), 5.0), ("ann", 3, at(0, 20), 5.0), ("bob", 4, at(0), 5.0)]
    assert windows(window.run(rows).output, *names) == [
        ("ann", "00:00", 2, 1, False),
        ("ann", "01:00", 1, 1, False),
        ("bob", "00:00", 1, 1, False),
    ]
    assert windows(window.run([("ann", 5, at(0, 30), 5.0)]).output, *names) == [("ann", "00:00", 3, 2, False)]
    assert windows(window.run().output, *names) == [("ann", "00:00", 3, 3, True), ("bob", "00:00", 1, 2, True)]


def test_an_overflow_names_key_and_window() -> None:
    sums = declared(TumblingWindow, size=HOUR, total=Sum("amount"))
    window = ready(sums, "user string, seq int, at timestamp, amount bigint", **TIMED)
    with pytest.raises(ProcessorError, match=r"does not fit int64 at key user='ann', window_start=datetime"):
        window.run([("ann", 1, at(0), 2**63 - 1), ("ann", 2, at(0), 1)])


@pytest.mark.parametrize(
    ("base", "settings", "message"),
    [
        (Deduplicate, {"horizon": 3600}, r"Mine\.horizon is 3600; write horizon = timedelta"),
        (Deduplicate, {"horizon": timedelta(0)}, r"Mine\.horizon is datetime\.timedelta\(0\); write"),
        (Deduplicate, {"horizon": HOUR, "keep": "newest"}, r"Mine\.keep is 'newest'; write one of 'first', 'last'"),
        (
            Deduplicate,
            {"horizon": HOUR, "output_duplicates": 1},
            r"Mine\.output_duplicates is 1; write one of True, False",
        ),
        (Deduplicate, {"horizn": HOUR}, r"Mine\.horizn is no setting of Deduplicate; did you mean horizon\?"),
        (Deduplicate, {"ttl": 5}, r"Mine\.ttl is no setting of Deduplicate; its settings are horizon, keep,"),
        (Deduplicate, {"horizon": None, "keep": "last"}, r"Mine\.keep is 'last' and horizon is None"),
        (Latest, {"version": 5}, r"Mine\.version is 5; name one or more columns, as in version = "),
        (Latest, {"version": ()}, r"Mine\.version is \(\); name one or more columns"),
        (Latest, {"version": "at desc"}, r"Mine\.version has a descending column 'at'; a larger version is newer"),
        (Latest, {"deleted": True}, r"Mine\.deleted is True; name a boolean column"),
        (Latest, {"deleted": "gone"}, r"Mine\.horizon is missing; .* None to keep deleted keys for ever"),
        (Latest, {"horizon": HOUR}, r"Mine\.horizon is set without deleted"),
        (History, {"deleted": ["gone"]}, r"Mine\.deleted is \['gone'\]; name a boolean column"),
        (History, {"tracked": ()}, r"Mine\.tracked is \(\); name columns"),
        (History, {"version": "at"}, r"Mine\.version is no setting of History; its settings are tracked, deleted"),
        (TumblingWindow, {"early": True}, r"Mine\.size is missing; write size = timedelta\(hours=1\)"),
        (TumblingWindow, {"size": 60}, r"Mine\.size is 60; write size = timedelta"),
        (TumblingWindow, {"size": HOUR, "offset": 5}, r"Mine\.offset is 5; write offset = timedelta"),
        (TumblingWindow, {"size": HOUR, "early": "yes"}, r"Mine\.early is 'yes'; write one of True, False"),
        (TumblingWindow, {"size": HOUR, "init": Count()}, r"Mine\.init = Count\(\): every processor already has"),
        (
            TumblingWindow,
            {"size": HOUR, "gap": HOUR},
            r"Mine\.gap is no setting of TumblingWindow; its settings are size",
        ),
        (TopN, {"order": "score"}, r"Mine\.n is missing; write n = 3"),
        (TopN, {"n": 3}, r'Mine\.order is missing; write order = "score desc"'),
        (TopN, {"n": 0, "order": "score"}, r"Mine\.n is 0; write a whole number from 1 to 10,000"),
        (TopN, {"n": True, "order": "score"}, r"Mine\.n is True; write a whole number"),
        (TopN, {"n": 1, "order": "score", "ties": None}, r"Mine\.ties is None; write one of 'first', 'all'"),
        (TopN, {"n": 1, "order": "score", "ttl_ms": True}, r"Mine\.ttl_ms is True; write a number of milliseconds"),
        (TopN, {"n": 1, "order": "score", "ttl_ms": 0}, r"Mine\.ttl_ms is 0; write a number of milliseconds above 0"),
        (TopN, {"n": 1, "order": "v descending"}, r'Mine\.order is \'v descending\'; write order = "v desc"'),
    ],
)
def test_a_wrong_setting_is_refused_where_the_class_is_declared(base: type, settings: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        declared(base, **settings)


@pytest.mark.parametrize(
    ("processor", "schema", "settings", "message"),
    [
        (
            Deduplicate,
            EVENTS,
            TIMED,
            r"Deduplicate\.horizon is missing; write horizon = timedelta\(days=7\), or horizon = None to remember",
        ),
        (declared(TumblingWindow, size=HOUR, n=Count()), READINGS, {}, "Mine: TumblingWindow needs event time"),
        (
            declared(TumblingWindow, size=HOUR, n=Sum("at")),
            READINGS,
            TIMED,
            r"Mine\.n = Sum\('at'\): column 'at' is timestamp, and only integers",
        ),
        (
            declared(TumblingWindow, size=HOUR, window_end=Count()),
            READINGS,
            TIMED,
            "Mine: TumblingWindow adds the column 'window_end' to the output, but",
        ),
        (
            declared(Deduplicate, horizon=HOUR),
            EVENTS,
            {},
            r"Mine: horizon = datetime\.timedelta\(seconds=3600\) needs event time\nDeclare it in the pipeline: Pipeline\(time_mode=",
        ),
        (
            declared(Deduplicate, horizon=HOUR, output_duplicates=True),
            "user string, seq int, at timestamp, Duplicate_Number int",
            TIMED,
            r"Mine: output_duplicates = True adds the column 'duplicate_number' to the output, but the input has a column 'Duplicate_Number'",
        ),
        (
            declared(Latest, version="day"),
            CHANGES,
            {},
            r"Mine\.version names column 'day', which the input lacks; its columns are user string,",
        ),
        (
            declared(Latest, version="days"),
            "user string, seq int, days array<int>",
            {},
            r"Mine\.version names column 'days', which is array<int>; name columns of numbers",
        ),
        (
            declared(Latest, deleted="city", horizon=None),
            CHANGES,
            {},
            r"Mine\.deleted names column 'city', which is string; name a boolean column",
        ),
        (
            declared(Latest, deleted="gone", horizon=HOUR),
            CHANGES,
            {"time_mode": "none"},
            r"Mine\.horizon needs a clock",
        ),
        (Latest, SCORES, {"key": ["user", "seq", "score"]}, "Latest: all columns of the input are in the key"),
        (History, MOVES, {}, r"History: History needs event time"),
        (History, MOVES, {**TIMED, "key": ["user", "at"]}, "History: the event time is the key column 'at'; key="),
        (
            declared(History, deleted="gone"),
            MOVES,
            {**TIMED, "key": ["gone"]},
            "Mine: deleted is the key column 'gone'",
        ),
        (declared(History, deleted="city"), MOVES, TIMED, r"Mine\.deleted names column 'city', which is string"),
        (
            History,
            "user string, seq int, at timestamp, valid_to int",
            TIMED,
            "History: History adds the column 'valid_to' to the output, but the input has a column 'valid_to'",
        ),
        (TopN, SCORES, {}, r"TopN\.n is missing"),
        (declared(TopN, n=1, order="user"), SCORES, {}, r"Mine\.order names the key column 'user'"),
        (declared(TopN, n=1, order="rank"), "user string, seq int, rank int", {}, "Mine: TopN adds the column 'rank'"),
    ],
)
def test_a_processor_that_does_not_fit_the_pipeline_is_refused(
    processor: Any, schema: str, settings: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ready(processor, schema, **settings).run([])


@pytest.mark.parametrize("form", [lambda of: of, lambda of: of(), partial], ids=["class", "instance", "partial"])
def test_the_class_of_the_processor_sets_the_api(form: Any) -> None:
    given = {"name": "p", "start": DAY, "source": lambda spark, interval: None, "key": ["user"]}
    latest = declared(Latest, version="seq")
    assert Pipeline(processor=form(latest), **given).api == "arrow"
    with pytest.raises(UsageError, match="pipeline 'p': Mine is an ArrowProcessor; leave out api='pandas', or write"):
        Pipeline(processor=form(latest), api="pandas", **given)
    with pytest.raises(UsageError, match=r"Deduplicate\.horizon is missing"):
        Pipeline(processor=form(Deduplicate), **given)


class KeepsForAnHour(RunningAggregate):
    ttl_ms = 3_600_000
    n = Count()


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (RunningAggregate, "RunningAggregate declares no aggregates; give it class attributes such as"),
        (KeepsForAnHour, r"pipeline 'p': KeepsForAnHour\.ttl_ms needs time_mode='processing', but the pipeline has"),
        (type("Mine", (KeepsForAnHour,), {"ttl_ms": "1h"}), r"Mine\.ttl_ms is '1h'; write a number of milliseconds"),
        (type("Mine", (KeepsForAnHour,), {"ttl_ms": 0}), r"Mine\.ttl_ms is 0; write a number of milliseconds above 0"),
        (declared(TopN, n=1, order="v", ttl_ms=5), r"Mine\.ttl_ms needs time_mode='processing'"),
        (declared(TumblingWindow, size=HOUR), "Mine declares no aggregates; give it class attributes"),
        (declared(SessionWindow, gap=HOUR), "Mine declares no aggregates"),
        (declared(SlidingWindow, size=HOUR, slide=HOUR), "Mine declares no aggregates"),
    ],
)
def test_a_setting_is_refused_where_the_pipeline_is_declared(processor: Any, message: str) -> None:
    timed = {"time_mode": "none"} if "ttl_ms" in message else TIMED
    with pytest.raises(UsageError, match=message):
        bare_pipeline(processor, **timed)


def test_other_columns_than_the_derived_ones_are_refused() -> None:
    latest = ready(declared(Latest, version="seq"), EVENTS, output_schema="user string")
    with pytest.raises(ProcessorError, match=r"they must be the same\nThe processor derives its columns: leave out"):
        latest.run([("ann", 1, at(0))])


@pytest.mark.long("half a second", runs_in="ci")
def test_a_processor_class_of_a_main_script_can_be_unpickled_by_a_worker() -> None:
    """A worker that can't import the class's module gets the class by value: first without attributes, which follow."""
    code = (
        "import sys\nfrom datetime import timedelta\nfrom pyspark import cloudpickle\nfrom cairn.aggregates import Count, Sum\n"
        "from cairn.processors import Deduplicate, TumblingWindow\n"
        "class Once(Deduplicate):\n    horizon = timedelta(hours=1)\n"
        "class Hourly(TumblingWindow):\n    size = timedelta(hours=1)\n    z = Count()\n    a = Sum('v')\n"
        "sys.stdout.buffer.write(cloudpickle.dumps((Once, Hourly)))\n"
    )
    made = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    once, hourly = cloudpickle.loads(made.stdout)
    once.check_settings()
    assert (once.horizon, list(hourly.declared_aggregates)) == (HOUR, ["z", "a"])


def test_a_subclass_may_have_methods_and_private_names() -> None:
    class Base(Deduplicate):
        horizon = HOUR
        _note = "kept"

        def handleBatch(self, batch: Any) -> Any:
            return super().handleBatch(batch)

    class Last(Base):
        keep = "last"

    assert (Last.horizon, Last.keep) == (HOUR, "last")
