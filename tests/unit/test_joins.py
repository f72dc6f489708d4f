"""The ready-made joins: small examples, and declarations that are refused. Their laws: tests/property/test_join_laws.py."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.errors import ProcessorError, UsageError
from cairn.processors import IntervalJoin, LookupJoin, union_by_kind
from cairn.spark.ddl import parse_ddl_locally
from cairn.testing import PipelineTester
from tests.support.bare_pipeline import bare_pipeline

DAY = datetime(2024, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
TIMED = {"time_mode": "event", "event_time": "at", "watermark_delay": 2 * HOUR, "watermark": "interval"}
ORDERS = "id string, kind string, at timestamp, order_amount int, payment_paid int"
CLOSE: dict[str, Any] = {"left": "order", "right": "payment", "lower": -HOUR, "upper": HOUR}
PRICES = "id string, kind string, at timestamp, sale_pieces int, price_euro int, price_gone boolean"
AS_OF: dict[str, Any] = {"facts": "sale", "table": "price"}


def at(hour: int, minute: int = 0) -> datetime:
    return DAY + timedelta(hours=hour, minutes=minute)


def joined(base: type, schema: str, settings: dict[str, Any], **pipeline: Any) -> PipelineTester:
    made = {"start": DAY, "api": "arrow", "key": ["id"], **TIMED, **pipeline}
    return PipelineTester(bare_pipeline(type("Mine", (base,), settings), **made), input_schema=schema)


def orders(how: str, **pipeline: Any) -> PipelineTester:
    return joined(IntervalJoin, ORDERS, {**CLOSE, "how": how}, **pipeline)


def order(minute: int, amount: int, key: str | None = "a") -> tuple[Any, ...]:
    return (key, "order", at(0, minute), amount, None)


def payment(minute: int, paid: int, key: str | None = "a") -> tuple[Any, ...]:
    return (key, "payment", at(0, minute), None, paid)


def pairs(rows: list[dict[str, Any]]) -> list[Any]:
    return sorted(((row["order_amount"], row["payment_paid"]) for row in rows), key=repr)


def test_a_pair_is_put_out_with_its_later_row() -> None:
    close = orders("inner")
    assert pairs(close.run([order(0, 1), order(0, 1), payment(50, 10), payment(30, 20, "b")]).output) == [(1, 10)] * 2
    # 01:00 is exactly one hour after the orders; 01:01 is more.
    assert pairs(close.run([payment(60, 30), payment(61, 40)]).output) == [(1, 30)] * 2
    assert [len(close.state(name)) for name in ("left", "right")] == [2, 4]
    assert close.run().output == close.run().output == close.run().output == []
    assert close.state("left") == close.state("right") == close.timers() == []


def test_the_output_has_the_columns_of_both_sides() -> None:
    (row,) = orders("full").run([order(0, 1), payment(5, 2)]).output
    expected = {"id": "a", "order_at": at(0), "order_amount": 1, "payment_at": at(0, 5), "payment_paid": 2}
    assert row == expected and list(row) == list(expected)


@pytest.mark.parametrize(
    ("how", "alone"), [("inner", []), ("left", [(1, None)]), ("right", [(None, 9)]), ("full", [(1, None), (None, 9)])]
)
@pytest.mark.long("half a second", runs_in="ci")
def test_an_outer_join_outputs_an_unmatched_row_once_no_match_can_come(how: str, alone: list[Any]) -> None:
    outer = orders(how)
    # The partner of the order of minute 40 comes one interval later.
    assert outer.run([order(0, 1), order(40, 2)]).output == []
    assert pairs(outer.run([payment(90, 3), payment(110, 9)]).output) == [(2, 3)]
    assert pairs([row for _ in range(3) for row in outer.run().output]) == alone
    assert outer.state("left") == outer.state("right") == outer.timers() == []


@pytest.mark.parametrize(("how", "alone"), [("inner", []), ("full", [(1, None), (2, None), (None, 3)])])
def test_a_null_matches_nothing(how: str, alone: list[Any]) -> None:
    rows = [order(0, 1, None), payment(0, 3, None), ("a", "order", None, 2, None)]
    assert pairs(orders(how).run(rows).output) == alone


def test_a_negative_upper_bound_joins_only_earlier_rows_of_the_right_side() -> None:
    before = joined(IntervalJoin, ORDERS, {**CLOSE, "lower": -HOUR, "upper": timedelta(minutes=-10), "how": "left"})
    output = before.run([order(60, 1), payment(49, 2), payment(51, 3), payment(0, 4)]).output
    output += before.run().output + before.run().output + before.run().output
    assert pairs(output) == [(1, 2), (1, 4)]


@pytest.mark.parametrize("how", ["inner", "full"])
def test_rows_of_one_key_in_many_batches_are_all_joined(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.runners.arrow_runner.ROUND_ROWS", 1)
    rows = [order(n % 60, n) for n in range(20)] + [payment(n % 60, n) for n in range(20)]
    assert len(orders(how).run(rows).output) == 400


def test_a_changed_join_range_applies_to_rows_already_in_state() -> None:
    close = joined(IntervalJoin, ORDERS, {**CLOSE, "upper": 5 * HOUR, "how": "left"})
    close.run([order(0, 1), order(0, 3, "b")])
    shorter = joined(IntervalJoin, ORDERS, {**CLOSE, "upper": timedelta(minutes=30), "how": "left"})
    close.deploy(shorter.pipeline)
    assert pairs(close.run([payment(40, 2)]).output) == []
    assert pairs(close.run().output) == [(1, None)]
    assert [pairs(close.run().output) for _ in range(4)] == [[], [], [], [(3, None)]]
    assert close.state("left") == close.state("right") == close.timers() == []


def test_a_row_of_another_kind_stops_the_interval() -> None:
    with pytest.raises(
        ProcessorError, match=r"Mine: a row of key id='b' has kind 'refund'; the kinds are 'order' and 'p"
    ):
        orders("inner").run([order(0, 1), ("b", "refund", at(0), None, None), ("c", None, at(0), None, None)])


def test_times_too_far_apart_for_63_bits_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their distance times the number of keys does not fit into 63 bits."""
    rows = [
        (f"k{n}", kind, when, n, n)
        for n in range(50)
        for kind in ("order", "payment")
        for when in (DAY, DAY.replace(year=9000))
    ]
    assert len(orders("inner").run(rows).output) == 100


# --- LookupJoin -------------------------------------------------------------------------------------------------------


def sale(hour: int, minute: int, pieces: int, key: str | None = "a") -> tuple[Any, ...]:
    return (key, "sale", at(hour, minute), pieces, None, None)


def price(hour: int, minute: int, euro: int, gone: bool | None = None, key: str | None = "a") -> tuple[Any, ...]:
    return (key, "price", at(hour, minute), None, euro, gone)


def sales(rows: list[dict[str, Any]]) -> list[Any]:
    return sorted((row["sale_pieces"], row["price_euro"]) for row in rows)


def test_a_fact_gets_the_version_of_its_time() -> None:
    as_of = joined(LookupJoin, PRICES, AS_OF, watermark_delay=HOUR)
    assert as_of.run([sale(0, 9, 1), sale(0, 10, 2), sale(0, 30, 3), price(0, 10, 50)]).output == []
    # The version of 00:20 is late, but within the delay.
    output = as_of.run([price(0, 20, 60), price(1, 30, 70), sale(1, 40, 4)]).output
    assert sales(output) == [(1, None), (2, 50), (3, 60)]
    assert [row["price_euro"] for row in as_of.state("versions")] == [60, 70]
    assert sales(as_of.run([sale(2, 1, 5)]).output) == [(4, 70)]
    assert [row["price_euro"] for row in as_of.state("versions")] == [70]
    assert sales(as_of.run().output) == [(5, 70)]
    assert as_of.state("facts") == as_of.timers() == []


def test_without_a_watermark_delay_facts_are_output_in_their_own_interval() -> None:
    as_of = joined(LookupJoin, PRICES, {**AS_OF, "how": "inner"}, watermark_delay=timedelta(0))
    rows = [sale(0, 30, 1), price(0, 10, 50), sale(0, 5, 2), sale(0, 30, 3, None), price(0, 1, 9, key=None)]
    assert sales(as_of.run(rows).output) == [(1, 50)]
    late = as_of.run([price(0, 40, 60), sale(1, 30, 4)])
    assert (sales(late.output), [row["price_euro"] for row in late.late]) == ([(4, 50)], [60])


def test_of_table_versions_with_equal_time_the_last_arrived_is_joined() -> None:
    as_of = joined(LookupJoin, PRICES + ", seq int", AS_OF, watermark_delay=HOUR, order_by=["seq"])
    as_of.run([(*price(0, 10, 50), 2), (*price(0, 10, 40), 1), (*sale(0, 10, 1), 3)])
    (row,) = as_of.run([(*price(0, 10, 60), 0)]).output
    assert (row["price_euro"], row["price_seq"], row["sale_seq"]) == (60, 0, 3)
    assert len(as_of.state("versions")) == 1


@pytest.mark.parametrize(
    "rows",
    [
        [sale(0, 35, 1), sale(0, 55, 2), sale(0, 15, 3)],
        [price(0, 10, 1), price(0, 20, 2), price(0, 5, 3), sale(0, 7, 1)],
        [price(0, 10, 1), price(0, 20, 2, gone=True), price(0, 30, 3)],
    ],
    ids=["facts", "versions", "a deletion"],
)
def test_the_batches_of_a_key_do_not_change_the_state(rows: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    digests = set()
    for most in (1, 2, 65_536):
        monkeypatch.setattr("cairn.runners.arrow_runner.ROUND_ROWS", most)
        lookup = joined(LookupJoin, PRICES, {**AS_OF, "deleted": "price_gone"})
        ran = lookup.run(rows)
        assert ran.record is not None and len(lookup.timers()) == 1
        digests.add(ran.record.content.digest)
    assert len(digests) == 1


@pytest.mark.parametrize(("how", "found"), [("left", [(1, 50), (2, None), (3, 70)]), ("inner", [(1, 50), (3, 70)])])
def test_a_deleted_key_has_no_version(how: str, found: list[Any]) -> None:
    as_of = joined(LookupJoin, PRICES, {**AS_OF, "deleted": "price_gone", "how": how}, watermark_delay=HOUR)
    rows = [price(0, 10, 50), price(0, 20, 60, True), price(0, 40, 70, False)]
    as_of.run([*rows, sale(0, 15, 1), sale(0, 30, 2), sale(0, 50, 3)])
    output = as_of.run().output
    assert sales(output) == found and "price_gone" not in output[0]
    as_of.run([price(1, 30, 0, True)])
    as_of.run()
    assert as_of.state("versions") == as_of.timers() == []


@pytest.mark.parametrize(
    ("base", "settings", "message"),
    [
        (IntervalJoin, {"left": "order"}, r"Mine\.right is missing; name the value of the column 'kind'"),
        (IntervalJoin, {**CLOSE, "left": 1}, r"Mine\.left is 1; name the value of the column 'kind'"),
        (
            IntervalJoin,
            {**CLOSE, "left": "Payment"},
            r"Mine: left is 'Payment' and right is 'payment'; each input needs",
        ),
        (IntervalJoin, {**CLOSE, "lower": 5}, r"Mine\.lower is 5; write lower = timedelta\(hours=1\)"),
        (IntervalJoin, {"left": "a", "right": "b", "lower": HOUR}, r"Mine\.upper is missing; write upper = "),
        (IntervalJoin, {**CLOSE, "lower": 2 * HOUR}, r"Mine\.lower is .* more than upper = .*; no rows would match"),
        (
            IntervalJoin,
            {**CLOSE, "how": "outer"},
            r"Mine\.how is 'outer'; write one of 'inner', 'left', 'right', 'full'",
        ),
        (IntervalJoin, {**CLOSE, "horizon": HOUR}, r"Mine\.horizon is no setting of IntervalJoin"),
        (LookupJoin, {"facts": "sale"}, r"Mine\.table is missing"),
        (LookupJoin, {**AS_OF, "how": "full"}, r"Mine\.how is 'full'; write one of 'left', 'inner'"),
        (LookupJoin, {**AS_OF, "deleted": True}, r'Mine\.deleted is True; .* as in deleted = "price_is_deleted"'),
    ],
)
def test_a_wrong_setting_is_refused_where_the_class_is_declared(base: type, settings: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        type("Mine", (base,), settings)


@pytest.mark.parametrize(
    ("base", "schema", "settings", "pipeline", "message"),
    [
        (IntervalJoin, ORDERS, {}, {}, r"Mine\.left is missing"),
        (
            IntervalJoin,
            ORDERS,
            CLOSE,
            dict.fromkeys(["event_time", "watermark_delay"]) | {"time_mode": "none", "watermark": "observed"},
            "Mine: IntervalJoin needs event time",
        ),
        (IntervalJoin, ORDERS, CLOSE, {"key": ["id", "at"]}, "Mine: the event time is the key column 'at'"),
        (
            IntervalJoin,
            ORDERS,
            CLOSE,
            {"key": ["kind"]},
            "Mine: IntervalJoin needs the string column 'kind' in the input",
        ),
        (IntervalJoin, ORDERS.replace("kind", "sort"), CLOSE, {}, "Mine: IntervalJoin needs the string column 'kind'"),
        (
            IntervalJoin,
            ORDERS + ", order_at int",
            CLOSE,
            {},
            "Mine: IntervalJoin adds the column 'order_at' to the output, but the output has a column 'order_at'",
        ),
        (
            IntervalJoin,
            ORDERS + ", order_time timestamp",
            CLOSE,
            {"event_time": "order_time"},
            "Mine: the event time is column 'order_time', which by its name belongs to 'order' alone; give both inputs",
        ),
        (
            LookupJoin,
            PRICES,
            {**AS_OF, "deleted": "gone"},
            {},
            r"Mine\.deleted names column 'gone', which the table lacks; name a boolean column of the table: .* price_gone",
        ),
        (
            LookupJoin,
            PRICES,
            {**AS_OF, "deleted": "price_euro"},
            {},
            r"Mine\.deleted names column 'price_euro', which is int; name a boolean column of the table",
        ),
    ],
)
def test_a_join_that_does_not_fit_the_pipeline_is_refused(
    base: type, schema: str, settings: Any, pipeline: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        joined(base, schema, settings, **pipeline).run([])


@pytest.mark.parametrize(
    ("schemas", "message"),
    [
        ({}, "union_by_kind: there is no input"),
        ({"order": "amount int"}, "input 'order' lacks the shared column 'a_b'; its columns are amount"),
        ({"order": "a_b int", "payment": "a_b string"}, "'a_b' is int in one input, but string in input 'payment'"),
        ({"order": "a_b int, kind string"}, "input 'order' has a column 'kind'; rename it"),
        ({"a": "a_b int, B int"}, "column 'B' of input 'a' becomes 'a_B', which is a shared column; rename the column"),
        (
            {"order_line": "a_b int, price int", "order": "a_b int, line_count int"},
            "column 'line_count' of input 'order' becomes 'order_line_count', which would count as a column of input 'order_line'; rename",
        ),
    ],
)
def test_inputs_that_have_no_union_are_refused(schemas: dict[str, str], message: str) -> None:
    inputs = {kind: SimpleNamespace(schema=parse_ddl_locally(schema)) for kind, schema in schemas.items()}
    with pytest.raises(UsageError, match=message):
        union_by_kind(inputs, shared=["a_b"])
