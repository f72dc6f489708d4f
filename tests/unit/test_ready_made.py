"""Ready-made processors: small examples of each, and declarations that are refused.

Their laws beside oracles in SQL: tests/property/test_ready_made_laws.py.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cairn import Pipeline
from cairn.errors import UsageError
from cairn.processors import Deduplicate
from cairn.testing import PipelineTester

DAY = datetime(2024, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
TIMED = {"time_mode": "event", "event_time": "at", "watermark_delay": 2 * HOUR, "watermark": "interval"}


def at(hour: int, minute: int = 0) -> datetime:
    return DAY + timedelta(hours=hour, minutes=minute)


def declared(base: type, **settings: Any) -> type:
    return type("Mine", (base,), settings)


def ready(processor: Any, schema: str, **settings: Any) -> PipelineTester:
    pipeline = Pipeline(
        name="ready",
        start=DAY,
        source=lambda spark, interval: None,
        processor=processor,
        api="arrow",
        **{"key": ["user"], "order_by": ["seq"], **settings},
    )
    return PipelineTester(pipeline, input_schema=schema)


def seqs(rows: list[dict[str, Any]], *names: str) -> list[Any]:
    """Return the rows' numbers, or tuples of the number and other columns."""
    return sorted((row["seq"], *(row[name] for name in names)) if names else row["seq"] for row in rows)


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


def test_the_last_row_of_a_horizon_waits_for_its_end() -> None:
    once = ready(declared(Deduplicate, horizon=HOUR, keep="last"), EVENTS, **TIMED)
    rows = [("ann", 1, at(0, 5)), ("ann", 2, at(0, 40)), ("ann", 3, at(0, 20)), ("ann", 4, at(1, 10))]
    assert seqs(once.run(rows).output) == [2]  # Row 4 opened the next horizon.
    assert once.state("waiting")[0]["row"] == {"seq": 4, "at": at(1, 10)}
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


def test_more_horizons_in_a_batch_than_rounds() -> None:
    once = ready(declared(Deduplicate, horizon=timedelta(minutes=1)), EVENTS, **TIMED)
    rows = [("ann", seq, at(0) + timedelta(seconds=30 * seq)) for seq in range(100)]
    assert seqs(once.run(rows).output) == list(range(0, 100, 2))


def test_a_late_row_is_put_aside() -> None:
    once = ready(declared(Deduplicate, horizon=HOUR), EVENTS, **{**TIMED, "watermark_delay": timedelta(0)})
    once.run()
    late = once.run([("ann", 1, at(0, 30)), ("ann", 2, at(1, 30))])
    assert (seqs(late.output), seqs(late.late)) == ([2], [1])


@pytest.mark.parametrize("change", [timedelta(hours=3), timedelta(minutes=10)])
def test_another_horizon_counts_for_open_ones(change: timedelta) -> None:
    once = ready(declared(Deduplicate, horizon=HOUR), EVENTS, **{**TIMED, "watermark_delay": timedelta(0)})
    once.run([("ann", 1, at(0, 30))])
    once.deploy(
        ready(declared(Deduplicate, horizon=change), EVENTS, **{**TIMED, "watermark_delay": timedelta(0)}).pipeline
    )
    kept = [seqs(once.run([("ann", hour, at(hour, 20))]).output) for hour in range(1, 5)]
    assert kept == ([[], [], [], [4]] if change > HOUR else [[1], [2], [3], [4]])
    for _ in range(4):
        once.run()
    assert once.state("seen") == [] and once.timers() == []


def test_the_time_may_be_a_part_of_the_key() -> None:
    last = ready(declared(Deduplicate, horizon=HOUR, keep="last"), EVENTS, **TIMED, key=["user", "seq", "at"])
    assert last.run([("ann", 1, at(0, 5))] * 3).output == []
    for _ in range(2):
        last.run()
    assert last.run().output == [{"user": "ann", "seq": 1, "at": at(0, 5)}]


# --- declarations that are refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "settings", "message"),
    [
        (
            Deduplicate,
            {},
            r"Mine\.horizon is missing; write horizon = timedelta\(days=7\), or horizon = None to remember",
        ),
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
    ],
)
def test_a_wrong_setting_is_refused_where_the_class_is_declared(base: type, settings: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        declared(base, **settings)


@pytest.mark.parametrize(
    ("processor", "schema", "settings", "message"),
    [
        (Deduplicate, EVENTS, TIMED, r"Deduplicate\.horizon is missing"),
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
    ],
)
def test_a_processor_that_does_not_fit_the_pipeline_is_refused(
    processor: Any, schema: str, settings: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ready(processor, schema, **settings).run([])


def test_a_subclass_may_have_methods_and_private_names() -> None:
    class Base(Deduplicate):
        horizon = HOUR
        _note = "kept"

        def handleBatch(self, batch: Any) -> Any:
            return super().handleBatch(batch)

    class Last(Base):
        keep = "last"

    assert (Last.horizon, Last.keep) == (HOUR, "last")
