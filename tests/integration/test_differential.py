"""The same processors under Spark's ``transformWithState`` and under Cairn: output rows and state must agree.

Where they mean to differ, the test says exactly how. What of Cairn's side needs no comparison is in
``tests/unit/test_handle.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row

from state_backend.values.intervals import from_ms
from tests.support.both_engines import Both, run_both
from tests.support.differential_processors import KEY, RESULT_SCHEMA, SCRIPT_SCHEMA, SCRIPT_STATES, Scripted
from tests.support.spark_streaming import Case, Rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

Key = tuple[Any, ...]
# Per key and batch: what is called, and the repr of what it must give.
Contract = dict[Key, list[list[tuple[str, str]]]]

ROW_CONTRACT: Contract = {
    ("value", 1): [
        [
            ("type(key).__name__, key", "('tuple', ('value', 1))"),
            ("v.exists(), v.get()", "(False, None)"),
            ("v.update((1, 'one'))", "None"),
            ("v.exists(), v.get()", "(True, (1, 'one'))"),
            ("type(v.get()).__name__", "'tuple'"),
            ("v.update((None, None))", "None"),
            ("v.exists(), v.get()", "(True, (None, None))"),
            ("v.clear()", "None"),
            ("v.exists(), v.get()", "(False, None)"),
            ("v.clear()", "None"),
            ("v.update(Row(n=2, s='row'))", "None"),
            ("v.get()", "(2, 'row')"),
            ("v.update([3, 'list'])", "None"),
            ("v.get()", "(3, 'list')"),
            ("v.update((np.int64(4), np.str_('numpy')))", "None"),
            ("v.get()", "(4, 'numpy')"),
            ("v.update(None)", "'TypeError'"),
            ("v.update(5)", "'TypeError'"),
            ("v.get()", "(4, 'numpy')"),
        ],
        [("v.get()", "(4, 'numpy')"), ("v.clear()", "None")],
        [("v.get()", "None")],
    ],
    ("list", 1): [
        [
            ("l.exists(), list(l.get())", "(False, [])"),
            ("l.appendValue((1, 'a'))", "None"),
            ("l.appendList([(2, 'b'), (None, None)])", "None"),
            ("l.exists(), list(l.get())", "(True, [(1, 'a'), (2, 'b'), (None, None)])"),
            ("type(next(l.get())).__name__", "'tuple'"),
            ("l.put([(9, 'z')])", "None"),
            ("l.appendValue((10, 'y'))", "None"),
            ("l.get()", "[(9, 'z'), (10, 'y')]"),
            ("[(n, list(l.get())) for n, _ in l.get()]", "[(9, [(9, 'z'), (10, 'y')]), (10, [(9, 'z'), (10, 'y')])]"),
            ("l.clear()", "None"),
            ("l.exists(), list(l.get())", "(False, [])"),
            ("l.appendValue((np.int32(11), 'x'))", "None"),
            ("l.appendValue(None)", "'TypeError'"),
        ],
        [("l.get()", "[(11, 'x')]"), ("l.appendValue((12, 'w'))", "None"), ("l.get()", "[(11, 'x'), (12, 'w')]")],
        [("l.get()", "[(11, 'x'), (12, 'w')]"), ("l.put([(1, 'only')])", "None"), ("l.get()", "[(1, 'only')]")],
    ],
    ("map", 1): [
        [
            ("m.exists(), m.containsKey(('p',)), m.getValue(('p',))", "(False, False, None)"),
            ("m.updateValue(('p',), (1, 'one'))", "None"),
            ("m.getValue(('p',))", "Row(n=1, s='one')"),
            ("m.exists(), m.containsKey(('p',)), m.containsKey(('q',))", "(True, True, False)"),
            ("m.updateValue(('q',), (None, None))", "None"),
            ("m.getValue(('q',))", "Row(n=None, s=None)"),
            ("m.updateValue((None,), (0, 'null is a user key'))", "None"),
            ("m.getValue((None,)).s", "'null is a user key'"),
            ("sorted(m.keys(), key=repr)", "[('p',), ('q',), (None,)]"),
            ("sorted(m.values(), key=repr)", "[(0, 'null is a user key'), (1, 'one'), (None, None)]"),
            ("sorted(m.iterator(), key=repr)[0]", "(('p',), (1, 'one'))"),
            ("{type(x).__name__ for x in m.keys()} | {type(x).__name__ for x in m.values()}", "{'tuple'}"),
            ("m.removeKey(('q',))", "None"),
            ("m.removeKey(('nothing',))", "None"),
            ("sorted(m.keys(), key=repr)", "[('p',), (None,)]"),
            ("m.updateValue(('p',), None)", "'TypeError'"),
            ("[m.updateValue(k, (5, 'while iterated')) for k in list(m.keys())]", "[None, None]"),
            ("list(m.values())", "[(5, 'while iterated'), (5, 'while iterated')]"),
        ],
        [("m.getValue(('p',)).n", "5"), ("m.clear()", "None"), ("m.exists(), list(m.iterator())", "(False, [])")],
        [("m.exists()", "False"), ("m.updateValue(('',), (1, ''))", "None"), ("m.getValue(('',))", "Row(n=1, s='')")],
    ],
    # A value that lives 1 ms lives to the end of its batch, one that lives an hour longer than the test.
    ("ttl", 1): [
        [
            *((f"{p}v.update((1, 'v'))", "None") for p in ("brief_", "long_")),
            *((f"{p}l.appendList([(1, 'l'), (2, 'l')])", "None") for p in ("brief_", "long_")),
            *((f"{p}m.updateValue(('u',), (1, 'm'))", "None") for p in ("brief_", "long_")),
            ("brief_v.get(), list(brief_l.get()), brief_m.getValue(('u',)).n", "((1, 'v'), [(1, 'l'), (2, 'l')], 1)"),
        ],
        [
            ("brief_v.exists(), brief_v.get()", "(False, None)"),
            ("brief_l.exists(), list(brief_l.get())", "(False, [])"),
            ("brief_m.exists(), brief_m.getValue(('u',)), list(brief_m.iterator())", "(False, None, [])"),
            ("long_v.get(), list(long_l.get()), long_m.getValue(('u',)).n", "((1, 'v'), [(1, 'l'), (2, 'l')], 1)"),
            ("brief_l.appendValue((3, 'l'))", "None"),
            ("long_l.appendValue((3, 'l'))", "None"),
            ("brief_l.get()", "[(3, 'l')]"),
            ("brief_m.updateValue(('w',), (2, 'm'))", "None"),
            ("brief_m.keys()", "[('w',)]"),
        ],
        [("brief_l.exists(), brief_m.exists()", "(False, False)"), ("len(list(long_l.get()))", "3")],
    ],
    # What is registered for the past or for now fires in the same batch; what a handler registers, in the next at the earliest.
    ("timer", 1): [
        [
            ("h.registerTimer(now + 9), h.registerTimer(now + 9)", "(None, None)"),
            ("h.registerTimer(now + 7), h.deleteTimer(now + 7), h.deleteTimer(now + 7)", "(None, None, None)"),
            (
                "h.registerTimer(now - 100_000), h.registerTimer(now), h.registerTimer(now + 3_600_000)",
                "(None, None, None)",
            ),
            ("sorted(t - now for t in h.listTimers())", "[-100000, 0, 9, 3600000]"),
            ("fire.update(('h.registerTimer(now - 5)',))", "None"),
        ],
        [("sorted(h.listTimers())[-1] > now, len(list(h.listTimers()))", "(True, 3)"), ("fire.clear()", "None")],
        [("len(list(h.listTimers()))", "1")],
    ],
    # DELETING: what it deletes while timers fire does not fire any more; under Spark it does.
    ("timer", 2): [
        [
            ("fire.update(('h.deleteTimer(now - 1)',))", "None"),
            ("h.registerTimer(now - 2), h.registerTimer(now - 1)", "(None, None)"),
        ]
    ],
    ("timer", 3): [
        [("fire.update(('[v.update((at - now, None)), v.get()]',))", "None"), ("h.registerTimer(now - 3)", "None")],
        [("v.get()", "(-3, None)")],
    ],
    # pandas and aware instants are instants; what has no zone is in the session's, UTC.
    ("when", 1): [
        [
            ("when.update((pd.Timestamp('2024-01-02T03:04:05.000006'), pd.Timestamp('2024-01-02'), None))", "None"),
            ("when.get()", "(datetime.datetime(2024, 1, 2, 3, 4, 5, 6), datetime.datetime(2024, 1, 2, 0, 0), None)"),
            ("when.update((pd.Timestamp('2024-01-02T03:00+02:00'), None, pd.Timestamp('2024-01-02').date()))", "None"),
            ("when.get()", "(datetime.datetime(2024, 1, 2, 1, 0), None, datetime.date(2024, 1, 2))"),
        ]
    ],
    # MISTAKE: a value of the wrong type raises; Spark stores NULL.
    ("mistake", 1): [[("v.update(('x', 's'))", "'TypeError'"), ("v.get()", "None")]],
    ("mistake", 2): [[("v.update((1.5, 's'))", "'TypeError'"), ("v.get()", "None")]],
    # Within its handler a timer is still there: registering it again is no change.
    ("timer", 4): [
        [("fire.update(('h.registerTimer(at)',))", "None"), ("h.registerTimer(now - 4)", "None")],
        [("list(h.listTimers())", "[]")],
    ],
    (None, None): [
        [("v.update((1, 'null is a key'))", "None"), ("h.registerTimer(now)", "None")],
        [("key, v.get()", "((None, None), (1, 'null is a key'))")],
    ],
    (None, 1): [[("v.get()", "None"), ("v.update((2, 'so is half a null'))", "None")], [("v.get()[0]", "2")]],
    ("", 0): [[("key", "('', 0)"), ("skip", "'skip'"), ("v.update((1, 'unread'))", "")], [("v.get()", "None")]],
    ("time", 1): [[("wm, now > 1_500_000_000_000", "(0, True)")]],
    # Output fields go by name: what is missing is null. What is too much is dropped by Spark, and refused by us.
    ("out", 1): [[("Row(result='x', b=1, a='out')", "x")]],
}


@pytest.mark.long("half a minute of Spark; the histories of tests/conformance compare the same calls")
def test_row_api_calls_equal_sparks_except_deleted_timers_and_wrong_types(spark: SparkSession, tmp_path: Path) -> None:
    """Values, lists, maps, expiry, timers, keys and rows in processing time: both give what the contract says."""
    both = run_both(spark, _case(Scripted, _script(ROW_CONTRACT)), tmp_path)
    differences = both.differences()
    assert {d.split(", item")[0].split("key ")[1] for d in differences} == {
        *("['timer', 2]", "['mistake', 1]", "['mistake', 2]"),
        *("(('mistake', 1), ())", "(('mistake', 2), ())"),
    }
    # Spark fires what a handler deleted, and holds nulls that nobody put there.
    assert len([d for d in differences if "'timer', 2" in d and d.endswith("Cairn nothing")]) == 3
    nulls = [e for e in both.spark.states["v"] if e[0][0] == "mistake"]
    assert sorted(nulls) == [(("mistake", n), (), (None, "s"), None) for n in (1, 2)]
    _meets(both, ROW_CONTRACT)
    fired = [[r["result"] for r in rows if r["call"] == "timer" and r["b"] == 1] for rows in both.cairn.outputs]
    now = both.cairn.processing_times_ms[0]
    assert [len(results) for results in fired] == [2, 2, 0]
    pending = [now - 100_000, now, now + 9, now + 3_600_000]
    assert fired[0][0] == f"('Row', Row(a='timer', b=1), {pending[0]}, {pending})"


class CountPerWindow(StatefulProcessor):
    """Rows per key so far; a key is a window's."""

    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "rows long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        count = (self._count.get() or (0,))[0] + sum(1 for _ in rows)
        self._count.update((count,))
        yield Row(window=key[0], count=count, watermark=timerValues.getCurrentWatermarkInMs())


@pytest.mark.long("twenty seconds of Spark")
def test_lateness_uses_the_watermark_one_interval_before_that_of_handlers(spark: SparkSession, tmp_path: Path) -> None:
    """Filtered by the watermark that handlers see, the counts of window 0 would be 3, 4, 5. From the first batch on: events up to
    1970 are late at once, and neither they nor an empty batch, or one of late rows only, move a watermark back."""
    seconds = [
        [-5, 0, 1, 2, 20],
        [3, 4, 5, 6, 30],
        [7, 19, None, 20.001],
        [],
        [1, 19],
        [31, 30, 29.999],
        [-1, None, 29, 90],
    ]
    batches = [
        [(0, n, None if s is None else from_ms(round(s * 1000))) for n, s in enumerate(batch)] for batch in seconds
    ]
    case = Case(
        processor=CountPerWindow,
        input_schema="window int, seq long, at timestamp",
        output_schema="window int, count long, watermark long",
        key=["window"],
        batches=batches,
        states={"count": "value"},
        time_mode="event",
        event_time="at",
        watermark_delay=timedelta(seconds=0),
    )
    both = run_both(spark, case, tmp_path)
    assert both.differences() == []
    counts = [[row["count"] for row in rows] for rows in both.cairn.outputs]
    assert counts == [[3], [8], [10], [], [], [11], [13]]
    times = [record.content.time for record in both.records]
    assert [t.watermark_ms for t in times] == [20_000, 30_000, 30_000, 30_000, 30_000, 31_000, 90_000]
    assert [t.late_watermark_ms for t in times] == [0, 20_000, 30_000, 30_000, 30_000, 30_000, 31_000]


def _script(contract: Contract) -> list[Rows]:
    """The rows that make the calls, batch by batch."""
    batches = max(map(len, contract.values()))
    return [
        [(*key, seq, None, op) for key, calls in contract.items() for seq, (op, _) in enumerate(_at(calls, n))]
        for n in range(batches)
    ]


def _at(calls: list[list[tuple[str, str]]], batch: int) -> list[tuple[str, str]]:
    return calls[batch] if batch < len(calls) else []


def _meets(both: Both, contract: Contract) -> None:
    """Each call gave what was expected; none of a key that comes behind a ``skip`` gave anything."""
    for n, rows in enumerate(both.cairn.outputs):
        found: dict[Key, list[tuple[str, str]]] = {}
        for row in rows:
            if row["seq"] is not None or row["a"] == "out":
                found.setdefault((row["a"], row["b"]), []).append((row["call"], row["result"]))
        for key, calls in contract.items():
            assert found.get(key, []) == list(_read(_at(calls, n))), f"batch {n}, key {key}"


def _read(calls: list[tuple[str, str]]) -> Iterator[tuple[str | None, str]]:
    for op, result in calls:
        yield (None if op.startswith("Row(") else op), result
        if op == "skip":
            return


def _case(processor: type, batches: list[Rows], **changes: Any) -> Case:
    settings: dict[str, Any] = {
        "processor": processor,
        "input_schema": SCRIPT_SCHEMA,
        "output_schema": RESULT_SCHEMA,
        "key": KEY,
        "batches": batches,
        "states": SCRIPT_STATES,
    }
    return Case(**settings | changes)
