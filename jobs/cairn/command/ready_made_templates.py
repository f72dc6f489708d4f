"""Parts of the pipelines that `cairn new --template` writes: one for each ready-made processor, with its sample data.

The parts are those of `new_pipeline_templates.PARTS`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cairn.command.new_pipeline_templates import SOURCE

_SOURCES = '''def read_$name(spark: SparkSession, interval: Interval) -> tuple[DataFrame, dict[str, Any]]:
    """Return FIRST and SECOND that arrived in ``[start, end)``, whenever they happened, and the files of both."""
    default = Path(__file__).resolve().parents[2] / "data" / "$name"
    folder = Path(os.environ.get("CAIRN_$constant") or default)
    inputs: dict[str, DataFrame] = {}
    files = []
    for kind, schema in SCHEMAS.items():
        path = folder / f"{kind}-{interval.start:$file_format}.json"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise SourceError(f"the {kind} rows of {interval} are missing: {error}; put them into {path}") from None
        inputs[kind] = spark.read.schema(schema).option("mode", "FAILFAST").json(f"file://{path}")
        files.append({"path": path.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    return union_by_kind(inputs, shared=["$key", "at"]), {"files": files}

'''
_TIME = """    time_mode="event",
    event_time="at",
    # The watermark is the end of the interval minus this delay. A row (in windows: the end of its window) at or
    # before the watermark of the previous interval is late: Cairn writes it to the files of late rows.
    watermark_delay=timedelta(hours=1),
    watermark="interval",
"""
_SHARDS = """


def test_another_number_of_shards_and_a_lost_try_change_nothing(tester: PipelineTester) -> None:
    tester.run([ROW for n in range(20)])
    before = tester.state("$state")
    assert before
    tester.run([LOST], commit=False)
    tester.rescale(3)
    assert tester.state("$state") == before"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyMadeTemplate:
    """A pipeline of a ready-made processor."""

    key: str
    parts: Mapping[str, str]
    # For each kind of input, a function that makes the columns of a row without the key and the event time. The kind is
    # empty if there is one input.
    rows: Mapping[str, Callable[[random.Random], dict[str, Any]]]
    keys: int = 40
    repeats: float = 0.0


def _parts(
    about: str,
    rows: str,
    columns: str,
    processor: str,
    tests: str,
    *,
    state: str,
    expectation: str,
    spans: bool = True,
    timed: bool = True,
    aggregates: str = "",
) -> dict[str, str]:
    """Return the parts of a pipeline with one input."""
    name = processor.partition("(")[0].removeprefix("class ")
    base = processor.partition("(")[2].partition(")")[0]
    imported = f"from cairn.aggregates import {aggregates}\n" if aggregates else ""
    return {
        "about": about,
        "imports": f"from datetime import UTC, datetime{', timedelta' if spans or timed else ''}\n"
        "from pathlib import Path\nfrom typing import Any\n",
        "imports_more": "from pyspark.sql import DataFrame, SparkSession\n",
        "imports_own": imported,
        "imports_after": f"from cairn.processors import {base}\n",
        "schemas": f'INPUT_SCHEMA = "{columns}"',
        "constants": "\n",
        "source": SOURCE.replace("ROWS", rows),
        "files": "one file",
        "processor": processor,
        "class": name,
        "state": state,
        "expectations": f"            {expectation},",
        "output": "",
        "time": _TIME if timed else "",
        "tests": tests.replace("$state", state),
    }


def _joined(
    about: str,
    schemas: Mapping[str, str],
    columns: str,
    processor: str,
    tests: str,
    *,
    state: str,
    expectation: str,
) -> dict[str, str]:
    """Return the parts of a pipeline with two inputs."""
    first, second = schemas
    made = _parts(about, "", "", processor, tests, state=state, expectation=expectation)
    base = processor.partition("(")[2].partition(")")[0]
    of_kind = "".join(f'    "{kind}": "$key string, {schema}, at timestamp",\n' for kind, schema in schemas.items())
    return made | {
        "imports_after": f"from cairn.processors import {base}, union_by_kind\n",
        "schemas": f"SCHEMAS = {{\n{of_kind}}}\n# The union of both inputs, as the processor gets it.\n"
        f'INPUT_SCHEMA = "$key string, at timestamp, {columns}, kind string"',
        "source": _SOURCES.replace("FIRST", f"{first}s").replace("SECOND", f"{second}s"),
        "files": f"two files ({first}s and {second}s)",
    }


_DEDUPE = ReadyMadeTemplate(
    key="event_id",
    keys=100_000,
    repeats=0.05,
    rows={"": lambda chance: {"page": chance.choice("abcdef")}},
    parts=_parts(
        "each event once. An event that comes again within seven days is left out.",
        "events",
        "$key string, page string, at timestamp",
        '''class Once(Deduplicate):
    """The first row of each $key within seven days."""

    horizon = timedelta(days=7)

''',
        """def test_an_event_that_comes_again_is_left_out(tester: PipelineTester) -> None:
    first = tester.run([("e1", "a", at(5)), ("e1", "a", at(5)), ("e2", "b", at(10))])
    assert sorted(row["$key"] for row in first.output) == ["e1", "e2"]
    assert [row["$key"] for row in tester.run([("e1", "a", at(5)), ("e3", "a", at(59))]).output] == ["e3"]
    assert [row["duplicates"] for row in tester.state("seen")] == [2, 0, 0]"""
        + _SHARDS.replace("ROW", '(f"e{n}", "a", at(n))').replace("LOST", '("e1", "a", at(59))'),
        state="seen",
        expectation='gxe.ExpectColumnValuesToBeBetween(column="duplicates", min_value=0)',
    ),
)
_WINDOWS = ReadyMadeTemplate(
    key="sensor",
    rows={"": lambda chance: {"celsius": round(chance.gauss(15, 5), 1)}},
    parts=_parts(
        "aggregates of the readings of each $key and hour.",
        "readings",
        "$key string, celsius double, at timestamp",
        '''class Hourly(TumblingWindow):
    """Aggregates of each hour. A window is emitted when the watermark passes its end."""

    size = timedelta(hours=1)
    readings = Count()
    mean = Mean("celsius")
    highest = Max("celsius")

''',
        """def test_a_window_is_put_out_when_the_watermark_passes_its_end(tester: PipelineTester) -> None:
    tester.run([("s1", 5.0, at(10)), ("s1", 9.0, at(50)), ("s2", 1.0, at(20))])
    windows = tester.run().output
    assert sorted((row["readings"], row["highest"]) for row in windows) == [(1, 1.0), (2, 9.0)]
    assert tester.state("windows") == tester.timers() == []


def test_a_reading_before_the_watermark_is_late(tester: PipelineTester) -> None:
    tester.run()
    tester.run()
    assert [row["$key"] for row in tester.run([("s1", 5.0, at(1))]).late] == ["s1"]"""
        + _SHARDS.replace("ROW", '(f"s{n}", 1.0, at(n))').replace("LOST", '("s1", 1.0, at(59))'),
        state="windows",
        expectation='gxe.ExpectColumnValuesToNotBeNull(column="user_key_window_start")',
        aggregates="Count, Max, Mean",
    ),
)
_CLICKS = "$key string, page string, at timestamp"
_SESSIONS = ReadyMadeTemplate(
    key="visitor",
    rows={"": lambda chance: {"page": chance.choice(["home", "search", "cart", "payment"])}},
    parts=_parts(
        "sessions of each $key: rows without a pause of 20 minutes.",
        "clicks",
        _CLICKS,
        '''class Sessions(SessionWindow):
    """Aggregates of each session. A session is emitted when the watermark passes its end."""

    gap = timedelta(minutes=20)
    clicks = Count()
    pages = ApproxDistinct("page")

''',
        """def test_a_pause_ends_a_session(tester: PipelineTester) -> None:
    tester.run([("ann", "home", at(0)), ("ann", "cart", at(15)), ("ann", "home", at(50)), ("bob", "home", at(5))])
    output = [row for _ in range(2) for row in tester.run().output]
    assert sorted((row["$key"], row["clicks"]) for row in output) == [("ann", 1), ("ann", 2), ("bob", 1)]
    assert tester.state("sessions") == tester.timers() == []


def test_a_late_click_joins_two_sessions(tester: PipelineTester) -> None:
    tester.run([("ann", "home", at(0)), ("ann", "cart", at(30))])
    assert [row["clicks"] for row in tester.run([("ann", "search", at(15))]).output] == [3]"""
        + _SHARDS.replace("ROW", '(f"v{n}", "home", at(n))').replace("LOST", '("v1", "home", at(59))'),
        state="sessions",
        expectation='gxe.ExpectColumnValuesToNotBeNull(column="user_key_session_start")',
        aggregates="ApproxDistinct, Count",
    ),
)
_FUNNEL = ReadyMadeTemplate(
    key="visitor",
    rows=_SESSIONS.rows,
    parts=_parts(
        "the way of each $key from the cart to the payment, completed or abandoned.",
        "clicks",
        _CLICKS,
        '''class Checkout(Funnel):
    """One row for each checkout. A checkout without payment is emitted when an hour has passed."""

    step = "page"
    steps = ("cart", "payment")
    within = timedelta(hours=1)

''',
        """def test_a_checkout_is_completed_or_abandoned(tester: PipelineTester) -> None:
    tester.run([("ann", "cart", at(5)), ("ann", "payment", at(40)), ("bob", "home", at(6)), ("bob", "cart", at(7))])
    output = [row for _ in range(4) for row in tester.run().output]
    found = sorted((row["$key"], row["is_completed"], row["last_step"]) for row in output)
    assert found == [("ann", True, "payment"), ("bob", False, "cart")]
    assert tester.state("rows") == tester.timers() == []"""
        + _SHARDS.replace("ROW", '(f"v{n}", "cart", at(n))').replace("LOST", '("v1", "payment", at(59))'),
        state="rows",
        expectation='gxe.ExpectColumnValuesToNotBeNull(column="at")',
    ),
)
_LATEST = ReadyMadeTemplate(
    key="customer",
    rows={"": lambda chance: {"city": chance.choice(["Oslo", "Rome", "Bern"]), "is_deleted": chance.random() < 0.02}},
    parts=_parts(
        "the newest row of each $key.",
        "changes",
        "$key string, city string, is_deleted boolean, at timestamp",
        '''class Newest(Latest):
    """The newest row of each $key by its time. Cairn remembers a deleted $key for 30 days."""

    version = "at"
    deleted = "is_deleted"
    horizon = timedelta(days=30)

''',
        """def test_an_older_row_changes_nothing(tester: PipelineTester) -> None:
    tester.run([("ann", "Oslo", False, at(30)), ("ann", "Rome", False, at(10))])
    assert [row["city"] for row in tester.state("latest")] == ["Oslo"]
    assert tester.run([("ann", "Rome", False, at(20))]).output == []


def test_a_deleted_row_leaves_the_table(tester: PipelineTester) -> None:
    tester.run([("ann", "Oslo", False, at(10))])
    (gone,) = tester.run([("ann", "Oslo", True, at(20))]).output
    assert (gone["$key"], gone["city"], gone["is_deleted"]) == ("ann", None, True)"""
        + _SHARDS.replace("ROW", '(f"c{n}", "Oslo", False, at(n))').replace("LOST", '("c1", "Rome", False, at(59))'),
        state="latest",
        expectation='gxe.ExpectColumnValuesToBeUnique(column="key_$key")',
        timed=False,
    ),
)
_HISTORY = ReadyMadeTemplate(
    key="customer",
    rows=_LATEST.rows,
    parts=_parts(
        "the history of each $key, with valid_from and valid_to.",
        "changes",
        "$key string, city string, is_deleted boolean, at timestamp",
        '''class Versions(History):
    """The versions of each $key, with the time in which each version is valid."""

    deleted = "is_deleted"

''',
        """def test_a_late_row_ends_the_version_before_it(tester: PipelineTester) -> None:
    tester.run([("ann", "Oslo", False, at(10)), ("ann", "Rome", False, at(30))])
    # The output has the changed versions only: Rome did not change.
    versions = tester.run([("ann", "Bern", False, at(20))]).output
    found = [(row["city"], row["valid_from"].minute, row["valid_to"].minute) for row in versions]
    assert sorted(found) == [("Bern", 20, 30), ("Oslo", 10, 20)]"""
        + _SHARDS.replace("ROW", '(f"c{n}", "Oslo", False, at(n))').replace("LOST", '("c1", "Rome", False, at(59))'),
        state="changes",
        expectation='gxe.ExpectColumnValuesToNotBeNull(column="at")',
        spans=False,
    ),
)
_TOPN = ReadyMadeTemplate(
    key="game",
    keys=8,
    rows={"": lambda chance: {"player": f"player{chance.randrange(30)}", "score": chance.randrange(1000)}},
    parts=_parts(
        "the three best scores of each $key.",
        "scores",
        "$key string, player string, score int, at timestamp",
        '''class Best(TopN):
    """The three best scores of each $key; of equal scores, the earlier one."""

    n = 3
    order = ("score desc", "at")

''',
        """def test_the_best_scores_are_put_out_when_they_change(tester: PipelineTester) -> None:
    tester.run([("chess", "ann", 50, at(1)), ("chess", "bob", 70, at(2)), ("chess", "cid", 60, at(3))])
    best = tester.run([("chess", "eve", 65, at(4)), ("chess", "dan", 10, at(5))]).output
    assert [(row["rank"], row["player"]) for row in best] == [(1, "bob"), (2, "eve"), (3, "cid")]
    assert tester.run([("chess", "dan", 20, at(6))]).output == []"""
        + _SHARDS.replace("ROW", '(f"g{n}", "ann", n, at(n))').replace("LOST", '("g1", "bob", 99, at(59))'),
        state="top",
        expectation='gxe.ExpectColumnValuesToNotBeNull(column="score")',
        spans=False,
        timed=False,
    ),
)
_JOIN = ReadyMadeTemplate(
    key="order_id",
    keys=400,
    rows={
        "order": lambda chance: {"amount": chance.randrange(1, 100)},
        "payment": lambda chance: {"paid": chance.randrange(1, 100)},
    },
    parts=_joined(
        "orders with their payments of the next six hours.",
        {"order": "amount int", "payment": "paid int"},
        "order_amount int, payment_paid int",
        '''class PaidOrders(IntervalJoin):
    """Each order with each of its payments. An order without payment is emitted when six hours have passed."""

    left, right = "order", "payment"
    lower, upper = timedelta(0), timedelta(hours=6)
    how = "left"

''',
        """def test_a_payment_finds_its_order(tester: PipelineTester) -> None:
    tester.run([("o1", at(5), 80, None, "order")])
    (pair,) = tester.run([("o1", at(50), None, 70, "payment")]).output
    assert (pair["$key"], pair["order_amount"], pair["payment_paid"]) == ("o1", 80, 70)


def test_an_order_without_payment_is_put_out_later(tester: PipelineTester) -> None:
    tester.run([("o1", at(5), 80, None, "order")])
    output = [row for _ in range(8) for row in tester.run().output]
    assert [(row["order_amount"], row["payment_paid"]) for row in output] == [(80, None)]
    assert tester.state("left") == tester.timers() == []"""
        + _SHARDS.replace("ROW", '(f"o{n}", at(n), n, None, "order")').replace(
            "LOST", '("o1", at(59), None, 1, "payment")'
        ),
        state="left",
        expectation='gxe.ExpectColumnValuesToNotBeNull(column="order_at")',
    ),
)
_LOOKUP = ReadyMadeTemplate(
    key="product",
    rows={
        "sale": lambda chance: {"pieces": chance.randrange(1, 9)},
        "price": lambda chance: {"euro": chance.randrange(1, 100)},
    },
    parts=_joined(
        "sales with the price that was valid at the time of each sale.",
        {"sale": "pieces int", "price": "euro int"},
        "sale_pieces int, price_euro int",
        '''class PricedSales(LookupJoin):
    """Each sale with the newest price as of the sale's time. It is emitted when the watermark passes this time."""

    facts, table = "sale", "price"

''',
        """def test_a_late_price_counts_from_its_time_on(tester: PipelineTester) -> None:
    tester.run(
        [("shoe", at(5), None, 50, "price"), ("shoe", at(15), 1, None, "sale"), ("shoe", at(25), 2, None, "sale")]
    )
    output = tester.run([("shoe", at(20), None, 60, "price")]).output
    assert sorted((row["sale_pieces"], row["price_euro"]) for row in output) == [(1, 50), (2, 60)]
    assert [row["price_euro"] for row in tester.state("versions")] == [60]


def test_a_sale_before_the_first_price_has_none(tester: PipelineTester) -> None:
    tester.run([("shoe", at(15), 1, None, "sale"), ("shoe", at(20), None, 60, "price")])
    assert [row["price_euro"] for row in tester.run().output] == [None]"""
        + _SHARDS.replace("ROW", '(f"p{n}", at(n), None, n, "price")').replace(
            "LOST", '("p1", at(59), None, 1, "price")'
        ),
        state="versions",
        expectation='gxe.ExpectColumnValuesToBeBetween(column="price_euro", min_value=0)',
    ),
)
READY_MADE = {
    "dedupe": _DEDUPE,
    "windows": _WINDOWS,
    "sessions": _SESSIONS,
    "funnel": _FUNNEL,
    "latest": _LATEST,
    "history": _HISTORY,
    "topn": _TOPN,
    "join": _JOIN,
    "lookup": _LOOKUP,
}
