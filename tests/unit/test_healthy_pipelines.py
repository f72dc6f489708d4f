"""No false alarm of expectations: intervals of four healthy pipelines, each validated in full, have no finding."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import Row

from cairn import ChangeExpectations, Cron, Pipeline
from cairn.testing import PipelineTester
from pipelines.aircraft import AIRCRAFT
from pipelines.aircraft import READ_SCHEMA as FLIGHTS
from pipelines.weather import READ_SCHEMA as OBSERVATIONS
from pipelines.weather import RECORDS, WEATHER
from tests.support.layout import REPOSITORY
from tests.support.tiers import at_tier

INTERVALS = at_tier(fast=3, ci=3, all=50)
DAY_MS = 86_400_000
KEPT = ChangeExpectations(no_row_lost=True)


class Ledger(StatefulProcessor):
    """Balances in cents, all bookings of seven days, a sum for each counterparty, and a statement three days after a booking."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._balance = handle.getValueState("balance", "amount decimal(18,2), bookings long, statement_ms long")
        self._bookings = handle.getListState("bookings", "amount decimal(18,2)", 7 * DAY_MS)
        self._partners = handle.getMapState("partners", "partner string", "amount decimal(18,2)")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        balance, bookings, statement_ms = self._balance.get() or (Decimal(0), 0, None)
        for row in rows:
            balance, bookings = balance + row.amount, bookings + 1
            self._bookings.appendValue((row.amount,))
            (before,) = self._partners.getValue((row.partner,)) or (Decimal(0),)
            self._partners.updateValue((row.partner,), (before + row.amount,))
        if statement_ms is None:
            statement_ms = timerValues.getCurrentProcessingTimeInMs() + 3 * DAY_MS
            self._handle.registerTimer(statement_ms)
        self._balance.update((balance, bookings, statement_ms))
        yield Row(account=key[0], amount=balance)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        balance, bookings, _ = self._balance.get()
        self._balance.update((balance, bookings, None))
        yield Row(account=key[0], amount=balance)


LEDGER = Pipeline(
    name="ledger",
    start=datetime(2024, 3, 25, 5, tzinfo=UTC),  # Clocks in Berlin change in the first week.
    source=lambda spark, interval: spark.createDataFrame([], "account string"),
    key=["account"],
    processor=Ledger,
    output_schema="account string, amount decimal(18,2)",
    schedule=Cron("0 6 * * 1-5", "Europe/Berlin"),
    time_zone="Europe/Berlin",
    parallelism=3,
    max_parallelism=16,
)


def bookings(n: int) -> list[tuple[str, Decimal, str]]:
    """Each booking of an account may be reversed in a later interval; some intervals have none."""
    chosen = random.Random(n)
    count = chosen.choice((0, 1, 5, 40))
    return [
        (f"a{chosen.randrange(30)}", Decimal(chosen.randrange(-99_999, 99_999)) / 100, f"p{chosen.randrange(9)}")
        for _ in range(count)
    ]


def landed(folder: Path, program: str, *words: str) -> None:
    command = [sys.executable, "-m", f"pipelines.{program}", "--to", str(folder), *words]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)


def rows_of(folder: Path) -> Callable[[int], list[dict[str, Any]]]:
    """The rows of the n-th file, as its program wrote them."""
    files = sorted(folder.rglob("*.parquet"))
    return lambda n: pq.ParquetFile(files[n]).read().to_pylist()


def rules(name: str) -> tuple[dict[str, list[Any]], dict[str, ChangeExpectations]]:
    """Expectations on each state, and on its change, of each kind that validation has."""
    import great_expectations.expectations as gxe

    def kept_pairs(column: str) -> ChangeExpectations:
        grows = gxe.ExpectColumnPairValuesAToBeGreaterThanB(
            column_A=f"now_{column}",
            column_B=f"before_{column}",
            or_equal=True,
            ignore_row_if="either_value_is_missing",
        )
        return ChangeExpectations(no_row_lost=True, least_rows=1.0, pairs=[grows])

    if name == "aircraft":
        assert AIRCRAFT.expectations is not None
        return AIRCRAFT.expectations(), {"history": kept_pairs("flights"), "routes": kept_pairs("flights")}
    if name == "weather":
        positive = gxe.ExpectColumnValuesToBeBetween(column="observations", min_value=1)
        return {"windows": [positive]}, {"$timers": KEPT}
    if name == "weather_records":
        state = "aggregates"
        return {state: [gxe.ExpectColumnValuesToBeUnique(column="key_origin")]}, {
            state: kept_pairs("observations_count")
        }
    positions = gxe.ExpectColumnValuesToBeBetween(column="pos", min_value=0)
    return (
        {"bookings": [positions, gxe.ExpectColumnValuesToNotBeNull(column="expires_at")]},
        {"balance": kept_pairs("bookings"), "partners": KEPT, "bookings": KEPT, "$timers": KEPT},
    )


@pytest.mark.long("ten seconds: it imports Great Expectations", runs_in="ci")
@pytest.mark.parametrize("name", ["aircraft", "weather", "weather_records", "ledger"])
def test_healthy_intervals_have_no_finding(name: str, tmp_path: Path) -> None:
    own = f"file://{tmp_path}/state"
    if name == "ledger":
        tester = PipelineTester(LEDGER, input_schema="account string, amount decimal(18,2), partner string", root=own)
        rows: Callable[[int], Any] = bookings
    elif name == "aircraft":
        landed(tmp_path / "in", "land_flights", "--days", str(INTERVALS))
        tester = PipelineTester(AIRCRAFT, input_schema=FLIGHTS, every=timedelta(days=1), root=own)
        rows = rows_of(tmp_path / "in")
    else:
        landed(tmp_path / "in", "land_weather", "--hours", str(INTERVALS))
        pipeline = WEATHER if name == "weather" else RECORDS
        tester = PipelineTester(pipeline, input_schema=OBSERVATIONS, every=timedelta(hours=1), root=own)
        rows = rows_of(tmp_path / "in")
    expectations, over_time = rules(name)
    expectations, over_time = rules(name)
    for n in range(INTERVALS):
        tester.run(rows(n))
        assert tester.validate(expectations, over_time) == [], n
    assert tester.checkpoints[-1].id == INTERVALS  # Retention has dropped some before it.
