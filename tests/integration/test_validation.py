"""Validation by way of Spark and Great Expectations: over time, as a gate, of savepoints, and of what is damaged."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import Row

from cairn.data_sources.keyed_state import KeyedState
from cairn.operations.coordinator_of import coordinator_of
from cairn.operations.plan_interval import Attempt
from cairn.operations.process_interval import process_interval
from cairn.operations.run_interval import run_interval
from cairn.operations.take_savepoint import take_savepoint
from cairn.operations.validate import Validation, validate_attempt, validate_checkpoint, validate_savepoint
from cairn.pipeline import OverTime, Pipeline
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.open_storage import join_url
from state_backend.checkpoint.savepoints import read_savepoint
from state_backend.values import errors
from state_backend.values.records import Record, RunRef
from tests.support.counting import DAYS, START, counting, day, read_days

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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


def forgetful(over_time: dict[str, OverTime], **more: Any) -> Pipeline:
    return Pipeline(
        name="forgetful",
        start=START,
        source=read_days,
        key=["user"],
        processor=Forgetful,
        output_schema="user string",
        parallelism=2,
        max_parallelism=16,
        expectations_over_time=lambda: over_time,
        **more,
    )


@pytest.fixture(autouse=True)
def _days() -> Iterator[None]:
    DAYS.clear()
    yield
    DAYS.clear()


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
    spark: SparkSession, three_days: tuple[str, list[Record]], n: int, over_time: dict[str, OverTime], **more: Any
) -> Validation:
    root, records = three_days
    return validate_checkpoint(spark, forgetful(over_time), root, records[n], quarantine=False, **more)


def test_rows_grow_within_bounds_and_none_is_lost(
    spark: SparkSession, three_days: tuple[str, list[Record]], tmp_path: Path
) -> None:
    """40 rows become 38: within 0.9 .. 1.1, not above 0.96. Three totals were removed on purpose, which only ``removable`` tells
    from a loss; the lost keys are named, in the Data Docs too. What expired is not lost."""
    bounds = OverTime(least_rows=0.9, most_rows=1.1)
    strict = OverTime(least_rows=0.96, no_row_lost=True)
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
    kept = OverTime(no_row_lost=True, removable="key.user in ('user-0', 'user-1', 'user-2') and value.sum = 5")
    again = validated(spark, three_days, 1, {"total": kept}, docs=tmp_path)
    assert again.success and again.docs is not None and again.docs not in map(str, first) and Path(again.docs).exists()
    assert first < {page for page in (tmp_path / "forgetful" / "validations").rglob("*.html")}, "earlier pages stay"
    expired = validated(spark, three_days, 2, {"last": OverTime(no_row_lost=True)})
    assert expired.success and [s.entries for s in expired.states if s.state == "last"] == [1]


def test_pairs_are_what_became_of_each_row(spark: SparkSession, three_days: tuple[str, list[Record]]) -> None:
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
    found = validated(spark, three_days, 1, {"total": OverTime(pairs=[*right, wrong])})
    assert [f.split(":")[1] for f in found.findings] == [" expect_column_values_to_not_be_in_set fate"]
    assert found.expectations == 4


def test_a_wrong_expectation_is_not_bad_data(spark: SparkSession, three_days: tuple[str, list[Record]]) -> None:
    root, records = three_days
    for over_time, said in (
        ({"totl": OverTime(least_rows=1.0)}, "'totl', which is not there; its states are"),
        ({"total": OverTime(no_row_lost=True, removable="value.smu = 1")}, "smu"),
    ):
        with pytest.raises(Exception, match=said):
            validate_checkpoint(spark, forgetful(over_time), root, records[1])
    with pytest.raises(errors.UsageError, match="least_rows"):
        OverTime(least_rows=2.0, most_rows=1.0)
    assert coordinator_of(forgetful({}), root).log().quarantined == {}


# --- the gate ------------------------------------------------------------------------------------------------------------------


def prepare(spark: SparkSession, pipeline: Pipeline, n: int, root: str) -> str:
    attempt = f"attempt-of-day-{n}"
    run = RunRef(run_id=f"run-{n}", clear_number=0, try_number=1)
    process_interval(spark, pipeline, root, Attempt(id=attempt, interval=day(n), run=run))
    return attempt


def test_a_gate_lets_only_what_is_right_be_committed(spark: SparkSession, tmp_path: Path) -> None:
    """The attempt is read and examined before it is committed. A refused one is neither committed nor published, also if somebody
    tries; a new attempt is."""
    published: list[int] = []
    pipeline, root = counting(sink=lambda spark, files, interval, id: published.append(id)), str(tmp_path)
    DAYS[day(0).start] = [(user, "fig", 5) for user in USERS]
    coordinator = coordinator_of(pipeline, root)
    attempt = prepare(spark, pipeline, 0, root)
    spark.dataSource.register(KeyedState)
    reader = spark.read.format("keyed_state").option("root", root).option("pipeline", "counting")
    assert reader.option("attempt", attempt).option("state", "total").load().count() == len(USERS)

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
    with pytest.raises(errors.StateUnusable, match="did not finish"):
        validate_attempt(None, pipeline, root, "no-such-attempt", mode="fast")


# --- damage, by way of Spark ---------------------------------------------------------------------------------------------------


def flip_in(folder: Path, handle_path: str) -> Callable[[], None]:
    """Flips a bit of a file; what puts it back."""
    file = folder / handle_path
    whole = file.read_bytes()
    at = random.Random(handle_path).randrange(len(whole))
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    return lambda: file.write_bytes(whole) and None


def test_modes_on_checkpoints_and_savepoints(spark: SparkSession, tmp_path: Path) -> None:
    """Fast needs no session; both find a flipped bit in files of a checkpoint and of both kinds of savepoint, and pass what is
    whole. A refused checkpoint is quarantined, and the interval is run again from the one before."""
    pipeline, root = counting(), str(tmp_path / "root")
    folder = tmp_path / "root" / "counting"
    rng = random.Random(3)
    for n in range(2):
        # Values without repetition, so that files are too large to lie in the record.
        DAYS[day(n).start] = [(f"{user}-{rng.random()}", f"{rng.random()}" * 3, n) for user in USERS * 20]
        record = run_interval(spark, pipeline, day(n), root)
    whole = validate_checkpoint(None, pipeline, root, record, mode="fast")
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
            found = validate_savepoint(session, pipeline, str(to), mode=mode)
            assert (found.findings, found.checkpoint_id) == ((), record.id)
        savepoint = read_savepoint(LocalStorage(to))
        handles = [f.handle for f in savepoint.files]
        handles += [f.handle for ref in savepoint.content.shards if ref.inline for f in ref.inline.files]
        put_back = flip_in(to, handles[0].path)
        for mode, session in (("fast", None), ("full", spark)):
            assert handles[0].path in validate_savepoint(session, pipeline, str(to), mode=mode).findings[0]
        put_back()
    files = [f.handle for ref in record.content.shards if ref.inline for f in ref.inline.files]
    handle = next(handle for handle in files if record.content.attempt in handle.path)
    flip_in(folder, handle.path)
    found = validate_checkpoint(None, pipeline, root, record, mode="fast", quarantine=False)
    assert handle.path in found.findings[0]
    assert coordinator_of(pipeline, root).log().quarantined == {}
    validate_checkpoint(spark, pipeline, root, record)
    with pytest.raises(errors.StateUnusable, match="quarantine"):
        run_interval(spark, pipeline, day(2), root)
    again = run_interval(spark, pipeline, day(1), root)
    assert again.content.base_id == 1
    assert validate_checkpoint(spark, pipeline, root, again).success
