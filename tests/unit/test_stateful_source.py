"""Plans of Spark Connect that compare rows with each other, without a server. tests/integration/test_sources_page.py has those of classic Spark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.connect import functions as F
from pyspark.sql.connect.dataframe import DataFrame
from pyspark.sql.connect.plan import SQL, Read
from pyspark.sql.connect.window import Window

from cairn import Pipeline
from cairn.errors import UsageError
from cairn.operations.intervals import stateful_source
from cairn.operations.intervals.stateful_source import (
    DEDUPLICATE,
    RANGE_JOIN,
    TIME_WINDOW,
    WINDOW_FUNCTION,
    stateful_operations,
    warn_of_stateful_source,
)
from cairn.processors import Deduplicate
from tests.support.bare_pipeline import bare_pipeline
from tests.support.stateful_plans import stateful_frames

SESSION: Any = SimpleNamespace(client=SimpleNamespace(), session_id="one")


def frame(plan: Any) -> DataFrame:
    return DataFrame(plan, SESSION)


FRAMES = stateful_frames(frame(Read("events")), frame(Read("others")), F, Window, lambda text: frame(SQL(text)))


@pytest.mark.parametrize("name", FRAMES)
def test_a_plan_of_connect(name: str) -> None:
    rows, expected = FRAMES[name]
    assert stateful_operations(rows) == expected


def pipeline(**settings: Any) -> Pipeline:
    once = type("Once", (Deduplicate,), {"horizon": None})
    return bare_pipeline(once, name="orders", key=["user"], api="arrow", **settings)


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stateful_source, "_warned", set())


def test_a_process_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        warn_of_stateful_source(pipeline(), FRAMES["dropDuplicates"][0])
    (warning,) = caplog.messages
    assert warning.startswith(f"pipeline 'orders': the source has {DEDUPLICATE}. In a source")
    assert warning.endswith("set Pipeline(stateful_source='allow')")


def test_a_warning_names_every_operation(caplog: pytest.LogCaptureFixture) -> None:
    both = FRAMES["window function"][0].groupBy(F.window("at", "1 hour")).count()
    assert stateful_operations(both) == [WINDOW_FUNCTION, TIME_WINDOW]
    assert stateful_operations(frame(SQL("select distinct a from x join y on x.at < y.at"))) == [
        DEDUPLICATE,
        RANGE_JOIN,
    ]


def test_an_intended_use_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_stateful_source(pipeline(stateful_source="allow"), FRAMES["dropDuplicates"][0])
    warn_of_stateful_source(pipeline(), object())  # Its plan can't be read.
    assert caplog.messages == []
    with pytest.raises(UsageError, match="stateful_source='never' is not one of warn, allow"):
        pipeline(stateful_source="never")
