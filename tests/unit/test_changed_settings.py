"""What a live pipeline does with changed settings of a ready-made processor, as docs/ready-made.md says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cairn import Interval
from cairn.aggregates import ApproxDistinct, Count, First, Max, RunningAggregate, Sum
from cairn.errors import StateSchemaError, UsageError
from cairn.processors import (
    Deduplicate,
    Funnel,
    History,
    IntervalJoin,
    Latest,
    LookupJoin,
    SessionWindow,
    SlidingWindow,
    TopN,
    TumblingWindow,
)
from cairn.testing import PipelineTester
from state_backend.formats.recorded_settings import without_settings
from state_backend.state.plan_state_schemas import StatePlan, plan_states
from state_backend.values.records import StateDescriptor
from tests.support.bare_pipeline import bare_pipeline

START = datetime(2024, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
SCHEMA = "k string, at timestamp, v long, w long"
WITH_DELETES = f"{SCHEMA}, gone boolean"
TIMED = {"time_mode": "event", "event_time": "at", "watermark_delay": timedelta(0), "watermark": "interval"}


def at(hour: int, minute: int = 0) -> datetime:
    return START + timedelta(hours=hour, minutes=minute)


def outputs(
    folder: Path,
    old: type,
    new: type,
    before: Sequence[list[tuple[Any, ...]]],
    after: Sequence[list[tuple[Any, ...]]],
    schemas: tuple[str, str] = (SCHEMA, SCHEMA),
    **settings: Any,
) -> list[list[tuple[Any, ...]]]:
    """Run hours with the old processor and the following hours with the new one; return the new one's output, sorted."""
    found = []
    for n, rows in enumerate([*before, *after]):
        changed = n >= len(before)
        pipeline = bare_pipeline(new if changed else old, **settings)
        tester = PipelineTester(pipeline, input_schema=schemas[changed], every=HOUR, root=f"file://{folder}")
        made = tester.run(rows, Interval(START + n * HOUR, START + (n + 1) * HOUR)).output
        if changed:
            found.append(sorted(tuple(row.values()) for row in made))
    return found


def with_setting(base: type, **settings: Any) -> type:
    return type(base.__name__, (base,), settings)


class Totals(RunningAggregate):
    n = Count()
    total = Sum("v")


class MoreTotals(Totals):
    other = Sum("w")
    most = Max("v")


class OtherColumn(RunningAggregate):
    n = Count()
    total = Sum("w")


class OtherFunction(RunningAggregate):
    n = Count()
    total = Max("v")


@pytest.mark.parametrize(
    ("new", "row"),
    [
        # A new aggregate counts from the first row after the change on.
        (MoreTotals, ("a", 2, 3, 20, 2)),
        (OtherFunction, ("a", 2, 2)),
    ],
)
def test_a_new_aggregate_counts_from_the_first_row_after_the_change(
    new: type, row: tuple[Any, ...], tmp_path: Path
) -> None:
    assert outputs(tmp_path, Totals, new, [[("a", at(0), 1, 10)]], [[("a", at(1), 2, 20)]]) == [[row]]


class FourHours(Deduplicate):
    horizon = 4 * HOUR


class EightHours(Deduplicate):
    horizon = 8 * HOUR


class TwoHours(Deduplicate):
    horizon = 2 * HOUR


@pytest.mark.parametrize(("new", "hours"), [(EightHours, [8]), (TwoHours, [2, 4, 6, 8])])
def test_a_new_horizon_holds_for_keys_that_are_remembered(new: type, hours: list[int], tmp_path: Path) -> None:
    after = [[("a", at(n, 30), n, 0)] if n in (2, 4, 6, 8) else [] for n in range(1, 10)]
    found = outputs(tmp_path, FourHours, new, [[("a", at(0), 0, 0)]], after, **TIMED)
    assert [row[1].hour for rows in found for row in rows] == hours


class Ever(Deduplicate):
    horizon = None


class FourHoursLast(FourHours):
    keep = "last"


def test_a_shorter_horizon_emits_the_last_row_of_a_key_that_gets_another_row(tmp_path: Path) -> None:
    before, after = [[(key, at(0), 0, 0) for key in "ab"]], [[("a", at(1, 10), 1, 0)], [], []]
    found = outputs(tmp_path, FourHoursLast, with_setting(TwoHours, keep="last"), before, after, **TIMED)
    assert found == [[("a", at(1, 10), 1, 0)], [], [("b", at(0), 0, 0)]]


@pytest.mark.parametrize("clock", [{}, {"order_by": ["at"]}])
def test_keys_remembered_for_ever_are_kept_when_a_horizon_is_added(clock: dict[str, Any], tmp_path: Path) -> None:
    """A horizon that comes later holds for new keys."""
    after = [[("a", at(n, 30), n, 0), ("b", at(n, 30), n, 0)] for n in range(1, 7)]
    found = outputs(tmp_path, Ever, FourHours, [[("a", at(0), 0, 0)]], after, **TIMED, **clock)
    assert [(row[0], row[1].hour) for rows in found for row in rows] == [("b", 1), ("b", 5)]


def test_a_timer_of_an_earlier_horizon_forgets_no_key(tmp_path: Path) -> None:
    """The key got its state without a horizon, while the timer of a horizon was there."""
    hours: list[tuple[type, list[tuple[Any, ...]]]] = [
        (FourHours, [("a", at(0), 0, 0)]),
        (Ever, [("a", at(1, 30), 0, 0)]),
        (EightHours, []),
        (EightHours, []),
        (EightHours, []),
        (EightHours, [("a", at(5, 30), 0, 0)]),
    ]
    for n, (processor, rows) in enumerate(hours):
        pipeline = bare_pipeline(processor, **TIMED)
        tester = PipelineTester(pipeline, input_schema=SCHEMA, every=HOUR, root=f"file://{tmp_path}")
        output = tester.run(rows, Interval(at(n), at(n + 1))).output
        assert len(output) == (n == 0)


class TwoBest(TopN):
    n = 2
    order = "v desc"


def test_a_larger_top_n_does_not_bring_back_dropped_rows(tmp_path: Path) -> None:
    before = [[("a", at(0), v, 0) for v in (5, 4, 3)]]
    (found,) = outputs(tmp_path, TwoBest, with_setting(TwoBest, n=3), before, [[("a", at(1), 1, 0)]])
    assert sorted(row[2] for row in found) == [1, 4, 5]


class ShortWindows(TumblingWindow):
    size = 2 * HOUR
    n = Count()


class Session(SessionWindow):
    gap = 2 * HOUR
    total = Sum("v")


class Sliding(SlidingWindow):
    size, slide = 4 * HOUR, 2 * HOUR
    n = Count()


class Steps(Funnel):
    step, steps, within = "v", (1, 2), HOUR


class Pairs(IntervalJoin):
    left, right, lower, upper = "l", "r", timedelta(0), HOUR


class OtherPairs(Pairs):
    how = "left"


class Lookup(LookupJoin):
    facts, table = "l", "r"


class OtherLookup(LookupJoin):
    facts, table = "r", "l"


EARLY, LATE = {"early": True}, {"allowed_lateness": HOUR}
FIRST, FIRST_KNOWN = (
    with_setting(RunningAggregate, total=First("v", ignore_nulls=ignore_nulls)) for ignore_nulls in (False, True)
)
TWO_INPUTS = "kind string, k string, at timestamp, l_v long, r_v long"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (Totals, OtherColumn, "made with total = Sum('v'), but the code has total = Sum('w')"),
        (
            Session,
            with_setting(Session, gap=3 * HOUR, total=Sum("w")),
            "made with total = Sum('v'), but the code has total = Sum('w')",
        ),
        (
            ShortWindows,
            with_setting(ShortWindows, size=4 * HOUR),
            "made with size = 2:00:00, but the code has size = 4:00:00",
        ),
        (Sliding, with_setting(Sliding, slide=HOUR), "made with slide = 2:00:00, but the code has slide = 1:00:00"),
        (Steps, with_setting(Steps, steps=(1, 3)), "made with steps = (1, 2), but the code has steps = (1, 3)"),
        (TwoBest, with_setting(TwoBest, order="w desc"), "made with order = v desc, but the code has order = w desc"),
        (Pairs, OtherPairs, "made with how = inner, but the code has how = left"),
        (Lookup, OtherLookup, "made with facts = l, but the code has facts = r"),
        (FIRST, FIRST_KNOWN, "First('v', ignore_nulls=False), but the code has total = First('v', ignore_nulls=True)"),
        (FIRST_KNOWN, FIRST, "First('v', ignore_nulls=True), but the code has total = First('v', ignore_nulls=False)"),
        *(
            (old, new, says)
            for base in (ShortWindows, Sliding, Session)
            for old, new, says in (
                (base, with_setting(base, **EARLY), "made with early = False, but the code has early = True"),
                (with_setting(base, **EARLY), base, "made with early = True, but the code has early = False"),
                (
                    base,
                    with_setting(base, **LATE),
                    "allowed_lateness = 0:00:00, but the code has allowed_lateness = 1:00:00",
                ),
                (
                    with_setting(base, **LATE),
                    base,
                    "allowed_lateness = 1:00:00, but the code has allowed_lateness = 0:00:00",
                ),
            )
        ),
        (
            with_setting(Latest, version="v"),
            with_setting(Latest, version="w"),
            "made with version = v, but the code has version = w",
        ),
        (
            with_setting(Latest),
            with_setting(Latest, version="w"),
            "made with version = None, but the code has version = w",
        ),
        (
            with_setting(Latest),
            with_setting(Latest, deleted="gone", horizon=None),
            "made with deleted other than gone, but the code has deleted = gone",
        ),
        (
            with_setting(History),
            with_setting(History, deleted="gone"),
            "made with deleted other than gone, but the code has deleted = gone",
        ),
        (
            FourHours,
            FourHoursLast,
            "state 'seen': its entries were made with keep = first, but the code has keep = last; nothing would read",
        ),
        (
            FourHoursLast,
            FourHours,
            "state 'waiting': its entries were made with keep = last, but the code has keep = first; nothing would read",
        ),
    ],
)
def test_settings_that_give_the_state_its_meaning_can_not_change(
    old: type, new: type, says: str, tmp_path: Path
) -> None:
    """The state would mix entries of both: windows that overlap, a sum of two columns."""
    joins = old in (Pairs, Lookup)
    schema, row = (
        (TWO_INPUTS, ("l", "a", at(0, 30), 1, None)) if joins else (WITH_DELETES, ("a", at(0, 30), 1, 2, False))
    )
    settings = {} if old in (Totals, TwoBest) else {**TIMED, "watermark_delay": HOUR}
    assert outputs(tmp_path / "same", old, old, [[row]], [[]], (schema, schema), **settings) is not None
    with pytest.raises(StateSchemaError, match=re.escape(says)):
        outputs(tmp_path / "changed", old, new, [[row]], [[]], (schema, schema), **settings)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (with_setting(Latest, version="v"), with_setting(Latest, version=("v",))),
        (with_setting(Latest, version="v"), with_setting(Latest, version=["v asc"])),
    ],
)
def test_a_setting_in_another_spelling_counts_as_unchanged(old: type, new: type, tmp_path: Path) -> None:
    assert outputs(tmp_path, old, new, [[("a", at(0), 2, 0)]], [[("a", at(1), 1, 0)]]) == [[]]


@pytest.mark.parametrize("base", [Latest, History])
def test_a_deletion_column_that_is_new_in_the_input_is_accepted(base: type, tmp_path: Path) -> None:
    new = with_setting(base, deleted="gone", **({"horizon": None} if base is Latest else {}))
    schemas = (f"{SCHEMA}, active boolean", f"{SCHEMA}, active boolean, gone boolean")
    before, after = [[("a", at(0, 10), 1, 0, True)]], [[("a", at(1, 10), 1, 0, True, True)]]
    (rows,) = outputs(tmp_path, base, new, before, after, schemas, **TIMED)
    assert len(rows) == 1


CHANGED = [
    (with_setting(Latest, version="v"), with_setting(Latest, version="w")),
    (with_setting(History), with_setting(History, deleted="gone")),
    (ShortWindows, with_setting(ShortWindows, **EARLY)),
    (Sliding, with_setting(Sliding, **LATE)),
    (Session, with_setting(Session, **EARLY)),
    (FIRST, FIRST_KNOWN),
    (FourHours, FourHoursLast),
]


@pytest.mark.parametrize(("old", "new"), CHANGED)
def test_settings_are_added_to_state_of_older_code_and_then_can_not_change(
    old: type, new: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A re-run with newer code leaves the same state, so later checkpoints stay valid. From then on, changes are refused."""
    row = ("a", at(0, 30), 1, 2, False)

    def run(processor: type, hour: int) -> None:
        pipeline = bare_pipeline(processor, **{**TIMED, "watermark_delay": HOUR})
        tester = PipelineTester(pipeline, input_schema=WITH_DELETES, every=HOUR, root=f"file://{tmp_path}")
        tester.run([row] if hour == 0 else [], Interval(at(hour), at(hour + 1)))

    def without(declared: StateDescriptor) -> StateDescriptor:
        versions = [replace(v, value=without_settings(v.value)) for v in declared.versions]
        return replace(declared, versions=tuple(versions))

    def older_plan(pipeline: str, recorded: Any, declared: Any, **changes: Any) -> StatePlan:
        return plan_states(pipeline, recorded, [without(d) for d in declared], **changes)

    with monkeypatch.context() as older:
        older.setattr("cairn.operations.intervals.plan_interval.plan_states", older_plan)
        for hour in range(3):
            run(old, hour)
    run(old, 0)
    run(old, 3)
    with pytest.raises(StateSchemaError, match="its entries were made with"):
        run(new, 4)


def test_a_new_input_column_is_accepted_and_a_changed_column_type_is_refused(tmp_path: Path) -> None:
    short, long = "k string, v long", "k string, v long, z string"
    rows = [("a", 1), ("b", 1)]
    assert outputs(tmp_path / "more", Latest, Latest, [rows], [[("a", 2, "z")]], (short, long), order_by=["v"]) == [
        [("a", 2, "z")]
    ]
    with pytest.raises(UsageError, match="field 'v': recorded as bigint, declared as string"):
        outputs(tmp_path / "type", Latest, Latest, [rows], [[("a", "2")]], (short, "k string, v string"))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("int", "bigint", None),
        ("decimal(5,1)", "decimal(9,1)", None),
        ("int", "double", "of integers, but the code has n = ApproxDistinct('v') of floats"),
        ("decimal(5,1)", "decimal(5,2)", "of decimals of scale 1, but the code has n = ApproxDistinct('v') of dec"),
        ("date", "timestamp", "of date, but the code has n = ApproxDistinct('v') of timestamp"),
        ("timestamp", "string", "of timestamp, but the code has n = ApproxDistinct('v') of text or binary"),
    ],
)
def test_a_column_type_with_other_hashes_is_refused(old: str, new: str, says: str | None, tmp_path: Path) -> None:
    """A sketch would count each value again."""
    different, schemas = with_setting(RunningAggregate, n=ApproxDistinct("v")), (f"k int, v {old}", f"k int, v {new}")
    values = {"date": START.date(), "timestamp": START, "string": "x"}
    before, after = ([[(1, values.get(of, 1))]] for of in (old, new))
    with pytest.raises(StateSchemaError, match=re.escape(says)) if says else nullcontext():
        assert outputs(tmp_path, different, different, before, after, schemas) == [[(1, 1)]]
