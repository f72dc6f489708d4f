"""Validation by way of Spark and Great Expectations: over time, as a gate, of savepoints, and of what is damaged."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote
from uuid import uuid4

import pytest
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import Row
from typer.testing import CliRunner

from cairn.command.cli import app
from cairn.data_sources import keyed_state
from cairn.data_sources.keyed_state import KeyedState
from cairn.operations.intervals.plan_interval import Attempt
from cairn.operations.intervals.process_interval import process_interval
from cairn.operations.intervals.run_interval import run_interval
from cairn.operations.savepoints.take_savepoint import take_savepoint
from cairn.operations.validation.validate_checkpoint import Validation
from cairn.pipeline import ChangeExpectations, Interval, Pipeline
from cairn.testing import PipelineTester
from pipelines.aircraft import AIRCRAFT, READ_SCHEMA
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.open_storage import join_url
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.savepoints import read_savepoint
from state_backend.values import errors
from state_backend.values.records import Record, RunRef
from tests.support.coordinator import coordinator_of
from tests.support.counting import DAYS, START, counting, day, fresh_days, read_days
from tests.support.spark_tables import state_table
from tests.support.tiers import long_after
from tests.support.validating import validate_attempt, validate_checkpoint, validate_savepoint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

USERS = [f"user-{n}" for n in range(40)]


class Forgetful(StatefulProcessor):
    """A total per user, which the amount 0 removes; what the user did last is forgotten after two days."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._total = handle.getValueState("total", "sum long")
        self._last = handle.getValueState("last", "item string", 2 * 86_400_000)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            total = self._total.get()
            if row.amount == 0:
                self._total.clear()
            else:
                self._total.update(((total[0] if total else 0) + row.amount,))
                self._last.update((row.item,))
        yield Row(user=key[0])


def forgetful(over_time: dict[str, ChangeExpectations], **more: Any) -> Pipeline:
    made = Pipeline(
        name="forgetful",
        start=START,
        source=read_days,
        key=["user"],
        processor=Forgetful,
        output_schema="user string",
        parallelism=2,
        max_parallelism=16,
        expectations_over_time=lambda: over_time,
    )
    return replace(made, **more)


days = fresh_days({})


@pytest.fixture(scope="module")
def three_days(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Record]]:
    """40 users on day 0; on day 1 three of them are removed and one is new; on day 2 nobody comes, and what day 0 left of
    ``last`` expires."""
    root = str(tmp_path_factory.mktemp("three-days"))
    DAYS[day(0).start] = [(user, "fig", 5) for user in USERS]
    DAYS[day(1).start] = [*((user, "", 0) for user in USERS[:3]), ("new", "kiwi", 1)]
    records = [run_interval(spark, forgetful({}), day(n), root) for n in range(3)]
    DAYS.clear()
    return root, records


def validated(
    spark: SparkSession,
    three_days: tuple[str, list[Record]],
    n: int,
    over_time: dict[str, ChangeExpectations],
    **more: Any,
) -> Validation:
    root, records = three_days
    return validate_checkpoint(spark, forgetful(over_time), root, records[n], dry_run=True, **more)


def test_row_counts_outside_the_bounds_and_lost_rows_are_reported(
    spark: SparkSession, three_days: tuple[str, list[Record]], tmp_path: Path
) -> None:
    """40 rows become 38: within 0.9 .. 1.1, not above 0.96. Three totals were removed on purpose, which only ``removable`` tells
    from a loss; the lost keys are named, in the Data Docs too. What expired is not lost."""
    bounds = ChangeExpectations(least_rows=0.9, most_rows=1.1)
    strict = ChangeExpectations(least_rows=0.96, no_row_lost=True)
    found = validated(spark, three_days, 1, {"total": strict, "last": bounds}, docs=tmp_path)
    shrunk, lost = found.findings
    assert shrunk.startswith("state 'total': expect_table_row_count_to_be_between") and "38" in shrunk
    assert lost.startswith("state 'total over time': expect_column_values_to_be_null lost_row")
    assert all(f'"key_user":"user-{n}"' in lost for n in range(3))
    reports = {s.state: (s.expectations, s.failed) for s in found.states}
    assert (reports["total"], reports["last"]) == ((2, 2), (1, 0))
    pages = "".join(page.read_text() for page in tmp_path.rglob("*.html"))
    assert "user-2" in pages and "lost_row" in pages
    assert found.docs is not None and "expect" in Path(found.docs).read_text()
    first = {page for page in (tmp_path / "forgetful" / "validations").rglob("*.html")}
    kept = ChangeExpectations(
        no_row_lost=True, removable="key.user in ('user-0', 'user-1', 'user-2') and value.sum = 5"
    )
    again = validated(spark, three_days, 1, {"total": kept}, docs=tmp_path)
    assert again.success and again.docs is not None and again.docs not in map(str, first) and Path(again.docs).exists()
    assert first < {page for page in (tmp_path / "forgetful" / "validations").rglob("*.html")}, "earlier pages stay"
    expired = validated(spark, three_days, 2, {"last": ChangeExpectations(no_row_lost=True)})
    assert expired.success and [s.entries for s in expired.states if s.state == "last"] == [1]


def test_expectations_on_pairs_see_each_rows_fate(spark: SparkSession, three_days: tuple[str, list[Record]]) -> None:
    """Expectations of Great Expectations' own on both states side by side; one that is wrong about them fails."""
    import great_expectations.expectations as gxe

    right = [
        gxe.ExpectColumnValuesToBeInSet(column="fate", value_set=["kept", "new", "lost"]),
        gxe.ExpectTableRowCountToEqual(value=41),
        gxe.ExpectColumnPairValuesToBeEqual(
            column_A="before_sum", column_B="now_sum", ignore_row_if="either_value_is_missing"
        ),
    ]
    wrong = gxe.ExpectColumnValuesToNotBeInSet(column="fate", value_set=["new"])
    found = validated(spark, three_days, 1, {"total": ChangeExpectations(pairs=[*right, wrong])})
    assert [f.split(":")[1] for f in found.findings] == [" expect_column_values_to_not_be_in_set fate"]
    assert found.expectations == 4


class Losing(StatefulProcessor):
    """Each row adds to every kind of state. On a row with the item "lose", the user loses that many rows of each kind. On a row with
    the item "wrong", one row of each kind becomes wrong: negative, or another time."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._total = handle.getValueState("total", "sum long")
        self._amounts = handle.getListState("amounts", "amount long")
        self._items = handle.getMapState("items", "item string", "seen long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if row.item not in ("lose", "wrong"):
                self._total.update((row.amount,))
                self._amounts.appendValue((row.amount,))
                self._items.updateValue((row.item,), (1,))
                self._handle.registerTimer((row.amount + 1) * 86_400_000 + int(START.timestamp() * 1000))
                continue
            wrong, last = row.item == "wrong", slice(-row.amount, None)
            amounts = list(self._amounts.get())
            kept = [*amounts[: -row.amount], *([(-1,)] if wrong else [])]
            self._amounts.put(kept) if kept else self._amounts.clear()
            items = sorted(item for (item,) in self._items.keys())[last]  # noqa: SIM118  # A map state is no mapping.
            for timer in sorted(self._handle.listTimers())[last]:
                self._handle.deleteTimer(timer)
                if wrong:
                    self._handle.registerTimer(timer + 3_600_000)
            if wrong:
                self._total.update((-1,))
                self._items.updateValue((items[0],), (-1,))
            else:
                self._total.clear()
                for item in items:
                    self._items.removeKey((item,))
        yield Row(user=key[0])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield from ()


EIGHT = [f"user-{n}" for n in range(8)]
# What day 1 takes from which users. Each user has 1 value, and 10 elements, pairs and timers. One timer of each user fires on day 1.
LOSSES = {
    "one row": [(EIGHT[0], "lose", 1)],
    "all but one": [(EIGHT[0], "lose", 9)],
    "half": [(user, "lose", 10) for user in EIGHT[:4]],
    "all": [(user, "lose", 10) for user in EIGHT],
    "wrong value": [(EIGHT[0], "wrong", 1)],
}
OF_USER = {
    "total": lambda n: {'{"key_user":"user-0"}'},
    "amounts": lambda n: {f'{{"key_user":"user-0","pos":{pos}}}' for pos in range(10 - n, 10)},
    "items": lambda n: {f'{{"key_user":"user-0","user_key_item":"item-{item}"}}' for item in range(10 - n, 10)},
    # The timer of 3 January has fired, so it is not lost.
    "$timers": lambda n: {
        f'{{"key_user":"user-0","expires_at":"2024-01-{day:02}T00:00:00.000Z"}}' for day in range(max(13 - n, 4), 13)
    },
}


@pytest.fixture(scope="module")
def losses(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Record]]:
    """On day 0 eight users have ten rows of each kind. Day 1 runs once for each loss, always from the checkpoint of day 0."""
    root, pipeline, records = str(tmp_path_factory.mktemp("losses")), forgetful({}, processor=Losing), {}
    DAYS[day(0).start] = [(user, f"item-{n}", n + 1) for user in EIGHT for n in range(10)]
    run_interval(spark, pipeline, day(0), root)
    for loss, rows in LOSSES.items():
        DAYS[day(1).start] = rows
        records[loss] = run_interval(spark, pipeline, day(1), root)
    DAYS.clear()
    return root, records


def keys_in(finding: str) -> list[str]:
    """The keys that a finding names."""
    return re.findall(r"{[^{}]*}", finding.partition("; keys: ")[2])


@pytest.mark.parametrize(
    "loss",
    [
        loss if loss in ("one row", "wrong value") else pytest.param(loss, marks=pytest.mark.long("ten seconds"))
        for loss in LOSSES
    ],
)
def test_planted_losses_of_each_kind_of_state_are_found(
    spark: SparkSession, losses: tuple[str, dict[str, Record]], loss: str
) -> None:
    """Elements are joined by position, pairs by user key and timers by time: each row of the base has one row beside it. A wrong time of
    a timer is the loss of the right one; other wrong values keep their rows, and break a rule about the value."""
    import great_expectations.expectations as gxe

    root, records = losses
    record = records[loss]
    assert record.content.base_id == 1
    rows = {"total": 8, "amounts": 80, "items": 80, "$timers": 80 + (loss == "wrong value")}

    def no_loss(state: str, removable: str | None = None) -> ChangeExpectations:
        one_beside_each = gxe.ExpectTableRowCountToEqual(value=rows[state])
        return ChangeExpectations(no_row_lost=True, removable=removable, pairs=[one_beside_each])

    def values() -> dict[str, list[Any]]:
        columns = {"total": "sum", "amounts": "amount", "items": "seen"}
        return {state: [gxe.ExpectColumnValuesToBeBetween(column=c, min_value=1)] for state, c in columns.items()}

    def found(removable: str | None = None) -> dict[str, str]:
        over_time = {state: no_loss(state, removable) for state in rows}
        pipeline = forgetful(over_time, processor=Losing, expectations=values)
        findings = validate_checkpoint(spark, pipeline, root, record, dry_run=True).findings
        return {finding.split("'")[1]: finding for finding in findings}

    by_state = found()
    if loss == "wrong value":
        assert sorted(by_state) == ["$timers over time", "amounts", "items", "total"]
        assert all(": 1 of " in finding or "; 1 of " in finding for finding in by_state.values())
        keys = {
            '{"key_user":"user-0"}',
            '{"key_user":"user-0","pos":9}',
            '{"key_user":"user-0","user_key_item":"item-9"}',
        }
        assert {keys_in(by_state[state])[0] for state in ("total", "amounts", "items")} == keys
        assert keys_in(by_state["$timers over time"]) == [
            '{"key_user":"user-0","expires_at":"2024-01-12T00:00:00.000Z"}'
        ]
        return
    assert sorted(by_state) == sorted(f"{state} over time" for state in rows)
    users, lost = len(LOSSES[loss]), LOSSES[loss][0][2]
    for state, named in OF_USER.items():
        finding, number = by_state[f"{state} over time"], users * len(named(lost))
        assert f": {number} of {rows[state]} rows fail; keys: " in finding
        assert len(keys_in(finding)) == min(number, 20) and (f" and {number - 20} more; " in finding) == (number > 20)
        stored = spark.read.parquet(finding.rpartition("all rows: ")[2])
        found_keys = {row.lost_row for row in stored.collect()}
        assert len(found_keys) == number and {*keys_in(finding)} <= found_keys
        if users == 1:
            assert found_keys == named(lost)
    assert found(removable="key.user like 'user-_'") == {}


def test_cairn_validate_quarantines_a_failed_checkpoint_but_not_in_a_dry_run(
    spark: SparkSession, losses: tuple[str, dict[str, Record]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial of expectations marks nothing; without --dry-run the checkpoint is quarantined, and the command that repairs is printed."""
    root, record = shutil.copytree(losses[0], tmp_path / "root"), losses[1]["one row"]
    pipeline = forgetful({"total": ChangeExpectations(no_row_lost=True)}, processor=Losing)
    monkeypatch.setattr("cairn.command.terminal.load_code", lambda code: pipeline)
    words = ["validate", str(record.id), "--root", str(root), "--code", "module:NAME"]
    tried = CliRunner().invoke(app, [*words, "--dry-run", "--docs", str(tmp_path / "docs")])
    assert tried.exit_code == 1 and "finding: state 'total over time': " in tried.stdout
    assert Path(tried.stdout.partition("Data Docs: ")[2].splitlines()[0]).exists()
    assert coordinator_of(pipeline, str(root)).log().quarantined == {}
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 1 and f"checkpoint {record.id} of {day(1)} is quarantined" in refused.stdout
    assert [*coordinator_of(pipeline, str(root)).log().quarantined] == [record.id]
    whole = CliRunner().invoke(app, ["validate", "1", *words[2:], "--fast", "--json"])
    assert whole.exit_code == 0 and json.loads(whole.stdout)["success"]


def test_a_state_that_is_new_is_compared_one_interval_later(spark: SparkSession, tmp_path: Path) -> None:
    """The base does not have it. The rules about the state itself hold at once."""
    import great_expectations.expectations as gxe

    def rules() -> dict[str, list[Any]]:
        return {"total": [gxe.ExpectTableRowCountToEqual(value=1)]}

    over_time = {"total": ChangeExpectations(least_rows=1.0, no_row_lost=True)}
    after = forgetful(over_time, processor=Losing, expectations=rules)
    DAYS[day(0).start], DAYS[day(1).start] = [("ann", "fig", 1)], [("ann", "fig", 2)]
    run_interval(spark, forgetful({}, processor=OnlyLast), day(0), str(tmp_path))
    counts = []
    for n in (1, 2):
        record = run_interval(spark, after, day(n), str(tmp_path))
        found = validate_checkpoint(spark, after, str(tmp_path), record)
        assert found.success
        counts.append(found.expectations)
    assert counts == [1, 3]


class OnlyLast(StatefulProcessor):
    """The processor before it got more states."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._last = handle.getValueState("last", "item string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self._last.update((row.item,))
        yield Row(user=key[0])


@pytest.mark.parametrize("in_memory", [True, False])
def test_each_state_is_read_once_and_data_docs_are_built_once(
    spark: SparkSession,
    losses: tuple[str, dict[str, Record]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_memory: bool,
) -> None:
    """Three expectations on the state and three on its changes. In memory, each shard of both checkpoints is restored once for all states. On
    Spark, it is restored once for each state."""
    import great_expectations.expectations as gxe
    from great_expectations.data_context import EphemeralDataContext

    from cairn.operations.validation import arrow_tables

    reads, builds, restored = tmp_path / "reads", list[int](), list[int]()
    reads.mkdir()
    build, read_shard = EphemeralDataContext.build_data_docs, arrow_tables.read_shard

    class Counted(KeyedState):
        def reader(self, schema: Any) -> Any:
            return _Counted(super().reader(schema), str(reads))

    def counted(self: Any, **more: Any) -> Any:
        builds.append(1)
        return build(self, **more)

    def counted_restore(source: Any, states: Any, shard: int, *more: Any) -> Any:
        restored.append(shard)
        return read_shard(source, states, shard, *more)

    monkeypatch.setattr(keyed_state, "KeyedState", Counted)
    monkeypatch.setattr(EphemeralDataContext, "build_data_docs", counted)
    monkeypatch.setattr(arrow_tables, "read_shard", counted_restore)

    def rules() -> dict[str, list[Any]]:
        return {s: [gxe.ExpectColumnValuesToNotBeNull(column="key_user")] for s in ("total", "items")}

    over_time = {s: ChangeExpectations(least_rows=0.1, most_rows=9.0, no_row_lost=True) for s in ("total", "items")}
    pipeline = forgetful(over_time, processor=Losing, expectations=rules)
    if not in_memory:
        pipeline = replace(pipeline, expectations_memory_bytes=1000)
    found = validate_checkpoint(spark, pipeline, losses[0], losses[1]["half"], docs=tmp_path / "docs", dry_run=True)
    assert (found.expectations, len(found.findings), builds) == (6, 2, [1])
    of_both = [*range(pipeline.parallelism)] * 2
    assert (restored == of_both) == in_memory
    assert len([*reads.iterdir()]) == (0 if in_memory else 2 * len(of_both))  # states, checkpoints and shards
    assert found.docs is not None
    page = Path(found.docs).read_text()
    assert page.count("<tr") == 1 + 2 + 6 and page.count('<tr class="failed"') == 2
    assert "{&quot;key_user&quot;:&quot;user-0&quot;}" in page and "✓" in page
    links = {unquote(link) for link in re.findall(r'href="([^"]*)"', page)}
    assert len(links) == 4 and all((Path(found.docs).parent / link).exists() for link in links)


class _Counted(DataSourceReader):
    """A reader that leaves a file for each partition that it reads."""

    def __init__(self, inner: Any, folder: str) -> None:
        self._inner, self._folder = inner, folder

    def partitions(self) -> Any:
        return self._inner.partitions()

    def read(self, partition: Any) -> Any:
        (Path(self._folder) / str(uuid4())).touch()
        yield from self._inner.read(partition)


@pytest.mark.long("seconds of Spark")
def test_the_tester_evaluates_spark_expectations_with_a_given_session(spark: SparkSession) -> None:
    import great_expectations.expectations as gxe

    tester = PipelineTester(forgetful({}, processor=Losing), input_schema="user string, item string, amount long")
    tester.run([(user, "fig", 1) for user in USERS[:3]])
    tester.run([("user-0", "lose", 1), ("user-1", "lose", 1)])
    removable = ChangeExpectations(no_row_lost=True, removable="key.user = 'user-0' and value.sum = 1")
    matches = gxe.ExpectColumnValuesToMatchRegex(column="key_user", regex="^user-[0-9]$")
    (found,) = tester.validate({"total": [matches]}, {"total": removable}, spark=spark)
    assert (found.column, found.rows, found.keys) == ("lost_row", 1, ('{"key_user":"user-1"}',))


IN_EVERY_TABLE = ["expires_at", "key_group", "shard"]
COLUMNS = {
    "total": (["key_user", "sum"], ["key_user", "before_expires_at", "before_sum", "now_expires_at", "now_sum"]),
    "amounts": (
        ["key_user", "amount", "pos"],
        ["key_user", "pos", "before_expires_at", "before_amount", "now_expires_at", "now_amount"],
    ),
    "items": (
        ["key_user", "seen", "user_key_item"],
        ["key_user", "user_key_item", "before_expires_at", "before_seen", "now_expires_at", "now_seen"],
    ),
    "$timers": (["key_user"], ["key_user", "expires_at", "before_expires_at", "now_expires_at"]),
}


@pytest.mark.parametrize("state", COLUMNS)
def test_tables_of_expectations_have_the_columns_of_the_docs(
    spark: SparkSession, losses: tuple[str, dict[str, Record]], state: str
) -> None:
    """docs/validation.md lists them; so does the message about an expectation of another column."""
    import great_expectations.expectations as gxe

    root, record = losses[0], losses[1]["one row"]

    def wrong() -> list[Any]:  # Great Expectations takes each expectation once.
        return [gxe.ExpectColumnValuesToBeNull(column="nothing")]

    own, beside = COLUMNS[state]
    for columns, more in (
        ([*own, *IN_EVERY_TABLE], {"expectations": lambda: {state: wrong()}, "expectations_over_time": None}),
        ([*beside, "fate", "lost_row"], {"expectations_over_time": lambda: {state: ChangeExpectations(pairs=wrong())}}),
    ):
        pipeline = forgetful({}, processor=Losing, **more)
        with pytest.raises(errors.UsageError, match=re.escape(f"The columns of the table are {', '.join(columns)}\n")):
            validate_checkpoint(spark, pipeline, root, record, dry_run=True)


def test_the_documented_expectations_pass_on_the_example_pipeline(spark: SparkSession, tmp_path: Path) -> None:
    """The block in the docs, with the states of the example pipeline."""
    text = (Path(__file__).parents[2] / "docs" / "validation.md").read_text()
    (block,) = [b.split("```")[0] for b in text.split("```python\n")[1:]]
    scope: dict[str, Any] = {}
    exec(compile(block.replace("Pipeline(..., ", "dict("), "validation.md", "exec"), scope)
    pipeline = replace(AIRCRAFT, **scope["PIPELINE"])
    tester = PipelineTester(pipeline, input_schema=READ_SCHEMA, every=timedelta(days=1), root=str(tmp_path))
    names = {"tailnum": "N14228", "origin": "EWR", "dest": "IAH", "departed": True, "arrived": True}
    for n in range(2):
        at = datetime(2013, 1, 1 + n, 6)
        delays = {"departure_delay_minutes": 2, "arrival_delay_minutes": 11}
        record = tester.run([names | delays | {"scheduled_departure": at}]).record
    assert record is not None
    assert tester.validate() == []
    found = validate_checkpoint(spark, pipeline, str(tmp_path), record)
    assert (found.findings, found.expectations) == ((), 5)


def read_days_at_one(spark: SparkSession, interval: Interval) -> DataFrame:
    return read_days(spark, interval).withColumn("at", F.lit(interval.start + timedelta(hours=1)))


def test_timers_of_event_time_expire_by_the_watermark(spark: SparkSession, tmp_path: Path) -> None:
    """A timer behind the watermark can't have fired, though the interval ended later. bob's timer fired on day 1, ann's is lost."""
    pipeline = forgetful(
        {"$timers": ChangeExpectations(no_row_lost=True)},
        processor=Losing,
        source=read_days_at_one,
        time_mode="event",
        event_time="at",
        watermark_delay=timedelta(0),
    )
    DAYS[day(0).start] = [("ann", "fig", 1), ("ann", "lime", 1), ("bob", "fig", -1)]
    DAYS[day(1).start] = [("ann", "lose", 1)]
    _, record = (run_interval(spark, pipeline, day(n), str(tmp_path)) for n in range(2))
    (lost,) = validate_checkpoint(spark, pipeline, str(tmp_path), record, dry_run=True).findings
    assert '{"key_user":"ann","expires_at":"2024-01-03T00:00:00.000Z"}' in lost and ": 1 of " in lost


def test_an_invalid_expectation_quarantines_nothing(spark: SparkSession, three_days: tuple[str, list[Record]]) -> None:
    root, records = three_days
    for over_time, said in (
        ({"totl": ChangeExpectations(least_rows=1.0)}, "'totl', but no such state exists; its states are"),
        ({"total": ChangeExpectations(no_row_lost=True, removable="value.smu = 1")}, "smu"),
    ):
        with pytest.raises(Exception, match=said):
            validate_checkpoint(spark, forgetful(over_time), root, records[1])
    assert coordinator_of(forgetful({}), root).log().quarantined == {}


# --- the gate ------------------------------------------------------------------------------------------------------------------


def prepare(spark: SparkSession, pipeline: Pipeline, n: int, root: str) -> str:
    attempt = f"attempt-of-day-{n}"
    run = RunRef(run_id=f"run-{n}", clear_number=0, try_number=1)
    process_interval(spark, pipeline, locate(root, pipeline.name), Attempt(id=attempt, interval=day(n), run=run))
    return attempt


def test_an_attempt_that_fails_the_validation_gate_is_not_committed(spark: SparkSession, tmp_path: Path) -> None:
    """The attempt is read and examined before it is committed. A refused one is neither committed nor published, also if somebody
    tries; a new attempt is."""
    published: list[int] = []
    pipeline, root = counting(sink=lambda spark, files, interval, id: published.append(id)), str(tmp_path)
    DAYS[day(0).start] = [(user, "fig", 5) for user in USERS]
    coordinator = coordinator_of(pipeline, root)
    attempt = prepare(spark, pipeline, 0, root)
    assert state_table(spark, root, "total", attempt=attempt).count() == len(USERS)

    def at_most(highest: int) -> Pipeline:
        def expectations() -> dict[str, list[Any]]:
            import great_expectations.expectations as gxe

            return {"total": [gxe.ExpectColumnValuesToBeBetween(column="sum", max_value=highest)]}

        return counting(expectations=expectations)

    found = validate_attempt(spark, at_most(5), root, attempt)
    assert (found.success, found.expectations, found.checkpoint_id) == (True, 1, None)
    assert coordinator.commit(attempt).id == 1
    DAYS[day(1).start] = [(USERS[0], "fig", 5)]
    refused = prepare(spark, pipeline, 1, root)
    assert len(validate_attempt(spark, at_most(5), root, refused).findings) == 1
    with pytest.raises(errors.ValidationRefused, match="expect_column_values_to_be_between"):
        coordinator.commit(refused)
    coordinator.publish(pipeline.sink_hook(spark, join_url(root, "counting")))
    assert (coordinator.log().head_id, published) == (1, [1])
    assert run_interval(spark, pipeline, day(1), root).id == 2
    late = prepare(spark, pipeline, 2, root)
    coordinator.commit(late)  # before its validation
    assert validate_attempt(spark, at_most(5), root, late).findings and {*coordinator.log().quarantined} == {3}
    with pytest.raises(errors.StateUnusable, match="did not finish"):
        validate_attempt(None, pipeline, root, "no-such-attempt", fast=True)


# --- damage, by way of Spark ---------------------------------------------------------------------------------------------------


def flip_in(folder: Path, handle_path: str) -> Callable[[], None]:
    """Flips a bit of a file; what puts it back."""
    file = folder / handle_path
    whole = file.read_bytes()
    at = random.Random(handle_path).randrange(len(whole))
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    return lambda: file.write_bytes(whole) and None


@pytest.mark.parametrize("small", long_after(1, [True, False], "seconds of Spark"))
def test_fast_and_full_validation_find_a_flipped_bit_in_checkpoints_and_savepoints(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, small: bool
) -> None:
    """Fast needs no session; both find a flipped bit in files of a checkpoint and of both kinds of savepoint, and pass what is
    whole. A refused checkpoint is quarantined, and the interval is run again from the one before."""
    if not small:  # Spark restores the state.
        monkeypatch.setattr("cairn.operations.validation.validate_checkpoint._SMALL_STATE_BYTES", -1)
    pipeline, root = counting(), str(tmp_path / "root")
    folder = tmp_path / "root" / "counting"
    rng = random.Random(3)
    for n in range(2):
        # Values without repetition, so that files are too large to lie in the record.
        DAYS[day(n).start] = [(f"{user}-{rng.random()}", f"{rng.random()}" * 3, n) for user in USERS * 20]
        record = run_interval(spark, pipeline, day(n), root)
    whole = validate_checkpoint(None, pipeline, root, record, fast=True)
    full = validate_checkpoint(spark, pipeline, root, record)
    assert (whole.findings, full.findings, full.entries) == ((), (), record.content.totals.entries)
    assert whole.entries == 0 and sum(s.entries for s in whole.states) == full.entries
    assert full.table()[0].split() == ["state", "entries", "expectations", "failed"]
    with pytest.raises(errors.UsageError, match="needs a Spark session"):
        validate_checkpoint(None, pipeline, root, record)
    for format in ("native", "canonical"):
        to = tmp_path / format
        take_savepoint(spark, pipeline, str(folder), record, str(to), format)
        for mode, session in (("fast", None), ("full", spark)):
            found = validate_savepoint(session, pipeline, str(to), fast=mode == "fast")
            assert (found.findings, found.checkpoint_id) == ((), record.id)
        savepoint = read_savepoint(LocalStorage(to))
        handles = [f.handle for f in savepoint.files]
        handles += [f.handle for ref in savepoint.content.shards if ref.inline for f in ref.inline.files]
        put_back = flip_in(to, handles[0].path)
        for mode, session in (("fast", None), ("full", spark)):
            assert handles[0].path in validate_savepoint(session, pipeline, str(to), fast=mode == "fast").findings[0]
        put_back()
    files = [f.handle for ref in record.content.shards if ref.inline for f in ref.inline.files]
    handle = next(handle for handle in files if record.content.attempt in handle.path)
    flip_in(folder, handle.path)
    docs = tmp_path / "docs"
    found = validate_checkpoint(None, pipeline, root, record, fast=True, dry_run=True, docs=docs)
    assert handle.path in found.findings[0] and found.docs is not None and handle.path in Path(found.docs).read_text()
    assert coordinator_of(pipeline, root).log().quarantined == {}
    shutil.rmtree(docs)
    docs.touch()  # A folder can't be made here. The checkpoint is quarantined all the same.
    assert validate_checkpoint(spark, pipeline, root, record, docs=docs).docs is None
    with pytest.raises(errors.StateUnusable, match="quarantine"):
        run_interval(spark, pipeline, day(2), root)
    again = run_interval(spark, pipeline, day(1), root)
    assert again.content.base_id == 1
    assert validate_checkpoint(spark, pipeline, root, again).success
