"""What two tables differ in: by key, as whole rows, per column, and over changed columns."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from state_backend.inspection.compare_runs import summarise_changes
from state_backend.inspection.compare_tables import ColumnChange, compare_tables
from state_backend.inspection.state_diff import Entry, EntryChange

NAN = float("nan")
NOON, LATER = datetime(2024, 1, 1, 12, tzinfo=UTC), datetime(2024, 1, 1, 13, tzinfo=UTC)


def table(*rows: tuple[Any, Any], names: tuple[str, ...] = ("k", "v")) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [[] for _ in names]
    return pa.table({name: list(column) for name, column in zip(names, columns, strict=True)})


@pytest.mark.parametrize(
    ("old", "new", "key", "changed", "only_old", "only_new", "columns"),
    [
        # The order of rows means nothing; null is null and NaN is NaN.
        ([(1, NAN), (None, 2.0)], [(None, 2.0), (1, NAN)], ["k"], 0, 0, 0, []),
        ([(1, 1.0), (2, 2.0)], [(2, 2.5), (1, 1.0)], ["k"], 1, 0, 0, [("v", 1, 0.5, 0.5)]),
        ([(1, 1.0), (2, 2.0)], [(2, 2.5), (1, 1.0)], [], 0, 1, 1, []),
        ([(1, 1.0)], [(1, None)], ["k"], 1, 0, 0, [("v", 1, None, None)]),
        ([(1, "a")], [(1, "b")], ["k"], 1, 0, 0, [("v", 1, None, None)]),
        ([(1, [1, 2])], [(1, [1, 3])], ["k"], 1, 0, 0, [("v", 1, None, None)]),
        ([(1, {"a": [1]})], [(1, {"a": [1]})], ["k"], 0, 0, 0, []),
        ([(1, NOON)], [(1, LATER)], ["k"], 1, 0, 0, [("v", 1, 3600.0, 3600.0)]),
        ([(1, date(2024, 1, 1))], [(1, date(2024, 1, 3))], ["k"], 1, 0, 0, [("v", 1, 172_800.0, 172_800.0)]),
        ([(1, Decimal("1.50"))], [(1, Decimal("2.00"))], ["k"], 1, 0, 0, [("v", 1, 0.5, 0.5)]),
        # A key of several rows: those are equal as a whole, or not at all.
        ([(1, 1), (1, 1), (2, 2)], [(1, 1), (1, 3), (2, 2)], ["k"], 0, 1, 1, []),
        ([(1, 1), (1, 1)], [(1, 1)], [], 0, 1, 0, []),
        ([(1, 1)], [], ["k"], 0, 1, 0, []),
        ([], [(1, 1)], ["k"], 0, 0, 1, []),
        # Another type of equal values is no change of a value.
        ([(1, 1), (2, 2)], [(1, 1.0), (2, 4.0)], ["k"], 1, 0, 0, [("v", 1, 2.0, 2.0)]),
    ],
)
def test_differing_rows_are_counted_by_key_and_by_column(
    old: list[Any], new: list[Any], key: list[str], changed: int, only_old: int, only_new: int, columns: list[Any]
) -> None:
    found = compare_tables(table(*old), table(*new), key)
    assert (len(found.changed), len(found.only_old), len(found.only_new)) == (changed, only_old, only_new)
    assert found.columns == tuple(
        ColumnChange(name=n, changed=c, mean=pytest.approx(m) if m is not None else None, largest=most)
        for n, c, m, most in columns
    )
    assert found.rows().num_rows == changed + only_old + only_new


def test_a_comparison_lists_schema_changes_example_rows_and_all_differing_rows() -> None:
    old = pa.table({"k": [1, 2, 3], "v": [1, 2, 3], "gone": ["x", "y", "z"]})
    new = pa.table({"k": [1, 3, 4], "v": [1, 5, 4], "more": [True, True, False]})
    found = compare_tables(old, new, ["k"])
    assert (found.added, found.removed, found.retyped) == (("more",), ("gone",), ())
    assert not found.same and compare_tables(old, old).same
    assert found.examples(1) == [
        {"change": "changed", "key": {"k": 3}, "columns": {"v": [3, 5]}},
        {"change": "only_old", "row": {"k": 2, "v": 2, "gone": "y"}},
        {"change": "only_new", "row": {"k": 4, "v": 4, "more": False}},
    ]
    assert found.rows().to_pylist()[1:] == [
        {"change": "only_old", "old": {"k": 2, "v": 2, "gone": "y"}, "new": None},
        {"change": "only_new", "old": None, "new": {"k": 4, "v": 4, "more": False}},
    ]


def entry(change: str, before: Any, after: Any, state: str = "s", key: str = "a") -> EntryChange:
    sides = [None if v is None else Entry(value=v, expiry_ms=v.pop("expiry", None)) for v in (before, after)]
    return EntryChange(
        state=state,
        change=change,
        key={"k": key},
        user_key=None,
        position=None,
        before=sides[0],
        after=sides[1],  # type: ignore[arg-type]
    )


def test_entries_are_counted_by_state_and_field() -> None:
    changes = [
        entry("changed", {"n": 1, "t": "x"}, {"n": 4, "t": "x", "new": 7}),
        entry("changed", {"n": 1, "t": "x", "expiry": 5}, {"n": 2, "t": "y", "expiry": 9}),
        entry("added", None, {"n": 1}),
        entry("removed", {"at_ms": 10}, None, "$timers"),
        entry("added", None, {"at_ms": 30}, "$timers"),
        entry("added", None, {"at_ms": 30}, "$timers", "b"),
    ]
    states = {s["state"]: s for s in summarise_changes(changes, 1)}
    assert [states["s"][name] for name in ("added", "removed", "changed")] == [1, 0, 2] and len(
        states["s"]["examples"]
    ) == 1
    fields = {f["name"]: (f["changed"], f["mean"], f["largest"]) for f in states["s"]["fields"]}
    assert fields == {"n": (2, 2.0, 3), "t": (1, None, None), "new": (1, None, None), "expires at, in ms": (1, 4.0, 4)}
    timers = states["$timers"]
    assert (timers["added"], timers["removed"], timers["changed"]) == (1, 0, 1)
    assert [(f["name"], f["largest"]) for f in timers["fields"]] == [("at_ms", 20)]
