"""A task that waits for another pipeline: the deferral, the trigger, and what the task does afterwards."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.driver.driver import _describe_error
from cairn_operators import (
    ProcessIntervalOperator,
    RunIntervalsOperator,
    earlier_runs,
    upstream_trigger,
    wait_for_input,
)
from cairn_operators import process_data_interval as process
from cairn_operators.airflow_versions import AirflowFailException
from cairn_operators.driver_process import _read_result
from cairn_operators.previous_checkpoint_trigger import PreviousCheckpointTrigger
from cairn_operators.upstream_trigger import UpstreamTrigger
from cairn_ui.database_runs import _kept_for_later
from state_backend.adapters.memory_storage import forget_memory
from state_backend.adapters.open_storage import open_storage
from state_backend.chains.judge_inputs import Chains
from state_backend.chains.pin_inputs import Reader, check_earlier, pin
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import read_log
from state_backend.checkpoint.quarantine import quarantine_checkpoint, release_checkpoint
from state_backend.formats import paths
from state_backend.values.errors import InputNotReady, StaleStateError
from state_backend.values.inputs import Edge
from state_backend.values.records import OutputFile
from tests.support.airflow_names import TaskDeferred
from tests.support.checkpoints import PIPELINE, Folder, day
from tests.support.predecessor import Airflow, before, folder

__all__ = ["folder"]  # a fixture
ROOT, UP = "memory://predecessor", "memory://upstreams"
EDGE = Edge(pipeline="sales", root=UP)
READER = Reader(root=ROOT, pipeline=PIPELINE, interval=day(3), schedule=None)


class World(Airflow):
    """The run of day 3 also reads day 3 of `sales`, which has days 1 and 2. Its driver only looks at its input."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Folder, result: Path) -> None:
        super().__init__(monkeypatch, folder)
        self.runs, self.drivers, self.now_s, self.folder = [], 0, time.time(), folder
        self.reader, self.computes_s = READER, 0
        clock = SimpleNamespace(time=lambda: self.now_s, time_ns=lambda: int(self.now_s * 1e9))
        monkeypatch.setattr(wait_for_input, "time", clock)
        monkeypatch.setattr(upstream_trigger, "_FIRST_LOOK_S", 0.01)
        monkeypatch.setattr(earlier_runs, "_previous", lambda *_: None)
        for module in (wait_for_input, process):
            monkeypatch.setattr(module, "as_storage_identity", lambda _: nullcontext())

        def run_driver(task: Any, *_: Any, **__: Any) -> dict[str, Any]:
            self.drivers += 1
            self.now_s += self.computes_s
            try:
                check_earlier(Chains(), self.reader, read_log(folder.storage))
                pin(Chains(), self.reader, EDGE)
            except (InputNotReady, StaleStateError) as error:
                result.write_text(json.dumps({"error": _describe_error(error)}))
                _read_result(result, 1, task)
            return {"ran": True, "sink": "", "intervals": [], "checkpoint": 1}

        for operator in (ProcessIntervalOperator, RunIntervalsOperator):
            monkeypatch.setattr(operator, "run_driver", run_driver)
        forget_memory(UP)
        self.sales = Folder(open_storage(f"{UP}/sales"), days=2)

    def commit(self, folder: Folder, n: int, attempt: str, rows: int = 1, **more: Any) -> None:
        handle = folder.storage.create(paths.output(day(n), attempt, 1, 0), b"rows")
        folder.run(day(n), attempt, outputs=(OutputFile(handle=handle, rows=1, digest=rows),), **more)

    def defers(self, call: Callable[[], Any]) -> Any:
        with pytest.raises(TaskDeferred) as deferred:
            call()
        return deferred.value


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Folder) -> World:
    return World(monkeypatch, folder, tmp_path / "result")


def fires(deferred: Any, *steps: Callable[[], object]) -> str:
    """Why the trigger fires, which the triggerer makes anew. It does not fire before the last step."""
    _, arguments = deferred.trigger.serialize()
    trigger = UpstreamTrigger(**json.loads(json.dumps(arguments)))

    async def go() -> str:
        waiting = asyncio.ensure_future(anext(trigger.run()))
        for step in steps:
            await asyncio.sleep(0.1)
            assert not waiting.done()
            step()
        return str((await asyncio.wait_for(waiting, 10)).payload["why"])

    return asyncio.run(go())


def test_process_waits_until_its_input_is_there(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    deferred = world.defers(world.begin)
    said = capsys.readouterr().out
    assert (
        f"for another pipeline: InputNotReady: pipeline '{PIPELINE}', {day(3)}: it reads sales {day(3)}: the up" in said
    )
    assert f"cairn status --root {UP} --pipeline sales" in said
    assert _kept_for_later(SimpleNamespace(next_kwargs=deferred.kwargs))["waits"] in said
    # Between the driver's reading and the trigger's start, another day was committed.
    world.sales.run(day(1), "b1", digest=world.sales.coordinator.record(1).content.digest)
    assert fires(deferred, lambda: world.sales.run(day(3), "a3")) == "sales has what the interval reads"
    # Meanwhile, a person has cleared the run of the interval before.
    world.runs = [before("running", "running", None, clear=1)]
    assert isinstance(world.defers(lambda: world.resume(deferred, 60)).trigger, PreviousCheckpointTrigger)
    world.runs = []
    assert world.drivers == 1 and world.resume(deferred, 60)["ran"]


def test_a_release_or_the_timeout_ends_a_wait_for_input(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_trigger, "_JUDGE_EVERY_S", 0.05)
    world.sales.run(day(3), "a3")
    quarantine_checkpoint(locate(UP, "sales"), 3, "too few rows")
    deferred = world.defers(world.begin)
    assert f"sales {day(3)}: its result is out of date: " in deferred.kwargs["waits"]
    with pytest.raises(AirflowFailException, match="waited 1:00:00 for another pipeline"):
        world.resume(deferred, 3600)
    assert fires(deferred, lambda: release_checkpoint(locate(UP, "sales"), 3)).startswith("sales has")


def test_a_task_with_a_storage_connection_checks_its_input_without_a_driver(world: World) -> None:
    made = world.made
    world.made = lambda: setattr(task := made(), "storage_conn_id", "gcs") or task  # type: ignore[method-assign, func-returns-value]
    world.operator = world.made()
    first = world.defers(world.begin)
    assert (first.trigger.url, first.trigger.until_ms) == (None, int(world.now_s * 1000) + 30_000)
    second = world.defers(lambda: world.resume(first, 1800))
    assert second.trigger.until_ms == int(world.now_s * 1000) + 300_000 and world.drivers == 1
    second.trigger.until_ms = 0
    assert fires(second) == "it is time to look again"
    with pytest.raises(
        AirflowFailException, match=r"waited 1:00:00 for .*it reads sales .*\n.*cairn status .*\n.*\nairflow"
    ):
        world.resume(second, 1800)
    world.sales.run(day(3), "a3")
    assert world.resume(second, 1)["ran"]


def test_an_interval_behind_a_corrected_input_waits_for_heal(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    def day_2(attempt: str) -> None:
        read, _ = pin(Chains(), replace(READER, interval=day(2)), EDGE)
        world.commit(world.folder, 2, attempt, inputs=(read,))

    same = world.sales.coordinator.record(2).content.digest
    world.commit(world.sales, 2, "b2", rows=1, digest=same)
    day_2("r2")
    world.commit(world.sales, 2, "c2", rows=2, digest=same)
    deferred = world.defers(world.begin)
    assert isinstance(deferred.trigger, PreviousCheckpointTrigger) and deferred.kwargs["by_input"]
    said = capsys.readouterr().out
    assert f"sales {day(2)} was changed by checkpoint 4 after it was read" in said
    assert f"cairn heal --root {ROOT} --pipeline {PIPELINE} --to 2024-01-02T00:00:00Z --dag d --chain" in said
    world.defers(lambda: world.resume(deferred, 60))
    assert world.drivers == 1
    day_2("r3")
    world.sales.run(day(3), "a3")
    assert world.resume(deferred, 60)["ran"]


def test_a_range_waits_too_and_a_dry_run_is_refused(world: World) -> None:
    def begin(**more: Any) -> Any:
        more |= {"first": "2024-01-03", "last": "2024-01-04", "wait_timeout": timedelta(hours=1)}
        world.operator = RunIntervalsOperator(task_id="backfill", code="m:P", pipeline=PIPELINE, root=ROOT, **more)
        return world.begin()

    with pytest.raises(AirflowFailException, match="it reads sales"):
        begin(dry_run=True)
    deferred = world.defers(begin)
    world.sales.run(day(3), "a3")
    world.made = lambda: world.operator  # type: ignore[method-assign]
    assert fires(deferred).startswith("sales has")
    # Day 3 took three hours. The wait for day 4 begins after that, and goes on while nothing is committed.
    world.reader, world.computes_s = replace(READER, interval=day(4)), 3 * 3600
    deferred = world.defers(lambda: world.resume(deferred, 60))
    world.computes_s = 0
    deferred = world.defers(lambda: world.resume(deferred, 1800))
    with pytest.raises(AirflowFailException, match="waited 1:00:00 for another pipeline"):
        world.resume(deferred, 1800)
    world.sales.run(day(4), "a4")
    assert world.resume(deferred, 0)["ran"]
