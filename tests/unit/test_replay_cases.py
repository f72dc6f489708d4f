"""`cairn replay` of checkpoints that count no longer, and of pipelines that changed: each case says what it knows and what it can't."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row
from typer.testing import CliRunner

from cairn.command.cli import app
from cairn.pipeline import Interval, Pipeline
from cairn.replay.replay_key import Replay, replay_key
from cairn.testing import PipelineTester
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.rewind import fork, rewind
from state_backend.values.errors import NoSuchCheckpoint, StateUnusable, UsageError
from state_backend.values.retention import KeepLast
from tests.support.accounts import DAYS, SCHEMA, Accounts, accounts, at, position_of, read_only
from tests.support.checkpoints import day, run
from tests.support.coordinator import Coordinator, coordinator_of
from tests.support.replayed import Wider

RUN = run("by-hand")


class History:
    """Intervals of accounts below a folder. The source gives the rows of the last run of an interval."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.root = f"file://{folder}"
        self.rows: dict[Interval, Any] = {}
        self.pipeline: Pipeline = accounts(source=self.read, **settings)
        self.tester = PipelineTester(self.pipeline, input_schema=SCHEMA, root=self.root)

    def read(self, spark: Any, interval: Interval) -> Any:
        return spark.createDataFrame(self.rows[interval], SCHEMA), position_of(interval)

    def run(self, n: int, rows: Any = None, **more: Any) -> None:
        self.rows[day(n)] = DAYS[n] if rows is None else rows
        self.tester.run(self.rows[day(n)], day(n), position=position_of(day(n)), **more)

    def deploy(self, **changes: Any) -> None:
        self.pipeline = replace(self.pipeline, **changes)
        self.tester.deploy(self.pipeline)

    def replay(self, key: str, which: str | Interval) -> Replay:
        return replay_key(self.pipeline, key, which, self.root)


def late(history: History) -> None:
    history.run(1)
    history.run(2, [("ann", 1, at(3))])
    history.run(3, [("ann", 1, at(4))])
    history.run(4, [("ann", 2, at(1)), ("ann", 3, at(4, 13))])


def other_late(history: History) -> None:
    late(history)
    history.rows[day(4)] = [("ann", 7, at(1)), ("ann", 3, at(4, 13))]


def rerun(history: History) -> None:
    history.run(1)
    history.run(2)
    history.run(1, [("ann", 6, at(1))])


def dropped(history: History) -> None:
    history.deploy(retention=KeepLast(2))
    for n in (1, 2, 3, 4):
        history.run(n)


def restored(history: History) -> None:
    for n in (1, 2, 3):
        history.run(n)
    rewind(coordinator_of(history.pipeline, history.root).at, 2, run=RUN, attempt="back")
    history.run(3, [("ann", 3, at(3))])


def quarantined(history: History) -> None:
    history.run(1)
    history.run(2)
    history.run(3)
    Coordinator(open_storage(f"{history.root}/accounts"), "accounts").quarantine(1, "by hand")


def forgotten(history: History) -> None:
    history.run(1)
    history.run(2)
    words = ["erase", "--root", history.root, "--pipeline", "accounts", '{"account": "ann"}', "--yes"]
    done = CliRunner().invoke(app, [*words, "--on-rerun", "filter"])
    assert done.exit_code == 0, done.output
    history.run(2)


def rescaled(history: History) -> None:
    history.run(1)
    history.tester.rescale(5)
    history.run(2)


class Anonymous(Accounts):
    """Puts out rows without the key."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        for row in super().handleInputRows(key, rows, timerValues):
            yield Row(balance=row.balance)


def new_schema(history: History) -> None:
    history.run(1)
    history.deploy(processor=Wider)
    history.run(2)


def forgotten_base(history: History) -> None:
    history.run(1)
    history.run(2)
    history.deploy(source=lambda spark, interval: spark.table("elsewhere"))


EVENT_TIME = {"time_mode": "event", "event_time": "at", "watermark_delay": timedelta(hours=1), "order_by": ()}
CASES: dict[str, tuple[Callable[[History], None], dict[str, Any], str, str, Any]] = {
    "late rows": (late, EVENT_TIME, "ann", "4", {"late": 1, "same": True}),
    "other late rows": (other_late, EVENT_TIME, "ann", "4", {"same": False}),
    "a replaced result": (
        rerun,
        {},
        "ann",
        "1",
        {"same": False, "notes": "checkpoint 1 is replaced by 3", "reasons": "other settings: "},
    ),
    "the result that replaced it": (rerun, {}, "ann", "3", {"same": True}),
    "the current result of its interval": (rerun, {}, "ann", "2024-01-01", {"id": 3, "same": True}),
    "a stale result": (rerun, {}, "ann", "2", {"same": True, "notes": "checkpoint 2 is stale by 3"}),
    "a stale base": (
        rerun,
        {},
        "ann",
        "2024-01-02",
        {
            "same": True,
            "notes": "its base, checkpoint 1, is replaced by 3; the replay starts from it, as the interval did",
        },
    ),
    "a dropped checkpoint": (dropped, {}, "ann", "2", (StateUnusable, "checkpoint 2 .* is dropped: its state, code")),
    "a dropped interval": (dropped, {}, "ann", "2024-01-01", (StateUnusable, "checkpoint 1 .* is dropped: its state")),
    "a dropped base": (dropped, {}, "ann", "3", (StateUnusable, "started from checkpoint 2, which is dropped")),
    "a retained base": (dropped, {}, "ann", "4", {"same": True}),
    "no such interval": (
        rerun,
        {},
        "ann",
        "2024-02-01",
        (NoSuchCheckpoint, "no checkpoint of an interval that starts at"),
    ),
    "no such checkpoint": (
        rerun,
        {},
        "ann",
        "17",
        (NoSuchCheckpoint, r"no checkpoint 17\nIntervals that can be replayed: 1"),
    ),
    "a restore": (restored, {}, "ann", "4", (UsageError, "checkpoint 4 is of kind restore, which ran no processor")),
    "an interval whose state was restored": (restored, {}, "ann", "2024-01-02", {"id": 2, "same": True}),
    "an interval after a restore": (restored, {}, "ann", "2024-01-03", {"id": 5, "same": True}),
    "a quarantined base": (
        quarantined,
        {},
        "ann",
        "2",
        {"same": True, "notes": "its base, checkpoint 1, is quarantined"},
    ),
    "a quarantined result": (quarantined, {}, "bob", "1", {"same": True, "notes": "checkpoint 1 is quarantined"}),
    "a forgotten key": (
        forgotten,
        {},
        "ann",
        "2024-01-02",
        {"same": True, "output": 0, "notes": "left out keys that `cairn erase` removed"},
    ),
    "other keys than the forgotten one": (forgotten, {}, "bob", "2024-01-02", {"same": True}),
    "no key columns in the output": (
        rerun,
        {"processor": Anonymous, "output_schema": "balance long"},
        "ann",
        "3",
        {"same": True, "notes": "the output has no key columns, so its rows can't be compared"},
    ),
    "other shards": (rescaled, {}, "ann", "2", {"same": True, "notes": "the interval ran on 5 shards"}),
    "a new schema": (new_schema, {}, "ann", "2", {"same": True}),
    "an older schema": (new_schema, {}, "ann", "1", {"same": False, "reasons": "other code: "}),
    "a source that needs Spark": (forgotten_base, {}, "ann", "2", (UsageError, "needs Spark: it uses spark.table")),
    "a key that does not fit": (rerun, {}, '{"user": 1}', "1", (UsageError, "does not fit")),
    "no instant": (rerun, {}, "ann", "yesterday", (UsageError, "INTERVAL 'yesterday' is not a date")),
}


@pytest.mark.parametrize("case", CASES)
def test_each_checkpoint_is_replayed_or_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    act, settings, key, which, wanted = CASES[case]
    history = History(tmp_path, **settings)
    act(history)
    if isinstance(wanted, tuple):
        with read_only(tmp_path), pytest.raises(wanted[0], match=wanted[1]):
            history.replay(key, which)
    else:
        with read_only(tmp_path):
            found = history.replay(key, which)
        for name, value in wanted.items():
            match name:
                case "output" | "late":
                    assert getattr(found.run, name).num_rows == value
                case "id":
                    assert found.found.record.id == value
                case "notes" | "reasons":
                    assert any(value in text for text in getattr(found, name)), getattr(found, name)
                case _:
                    assert getattr(found, name) == value, found.comparison


@pytest.mark.long("half a second", runs_in="ci")
def test_an_interval_of_a_fork_can_be_replayed(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.run(1)
    history.run(2)
    source, into = (open_storage(f"{history.root}/{name}") for name in ("accounts", "forked"))
    fork(source, 1, Coordinator(into, "forked").at, run=RUN, attempt="fork")
    forked = History(tmp_path, name="forked")
    forked.run(2)
    found = forked.replay("ann", "2024-01-02")
    assert (found.same, found.found.record.content.base_id) == (True, 1)
    with pytest.raises(UsageError, match="is of kind restore"):
        forked.replay("ann", "1")


def test_replay_of_a_pipeline_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateUnusable, match="has no checkpoint below"):
        replay_key(accounts(), "ann", "1", f"file://{tmp_path}")
