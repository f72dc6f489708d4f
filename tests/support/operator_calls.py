"""Operators called without Airflow: what they are given, and a process that stands in for the driver."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG

from cairn.pipeline import Interval
from cairn_operators import (
    CommitCheckpointOperator,
    ProcessIntervalOperator,
    SavepointOperator,
    ValidateStateOperator,
    stateful_pipeline,
)
from state_backend.values import errors
from state_backend.values.operation_parameters import REQUESTS, from_json

START, END = datetime(2013, 1, 5, tzinfo=UTC), datetime(2013, 1, 6, tzinfo=UTC)
# Does what FAKE_DRIVER says, and leaves its arguments and process ids in FAKE_DRIVER_DIR.
FAKE_DRIVER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
what, folder = os.environ["FAKE_DRIVER"], Path(os.environ["FAKE_DRIVER_DIR"])
(folder / "arguments.json").write_text(json.dumps(sys.argv[1:]))
result = Path(sys.argv[sys.argv.index("--result") + 1])
print("a line", flush=True)
print('@cairn begun {"attempt": "a7", "options": {"mode": "full"}}', flush=True)
print("p [2013-01-05T00:00:00Z, 2013-01-06T00:00:00Z): half a", end=" ", flush=True)
print("line\\nto stderr", file=sys.stderr, flush=True)
print("no newline", end="", flush=True)
kind, _, text = what.partition(" ")
if kind == "ok":
    result.write_text(json.dumps({"ok": {"sink": "", **json.loads(text)}}))
elif kind == "error":
    result.write_text(json.dumps({"error": {"type": text, "message": "what went wrong"}}))
    sys.exit(1)
elif kind == "kill":
    result.write_text("{")
    os.kill(os.getpid(), signal.SIGKILL)
elif kind == "hang":
    if text == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "100"])
    (folder / "pids.tmp").write_text(f"{os.getpid()} {child.pid}")
    (folder / "pids.tmp").rename(folder / "pids")
    time.sleep(100)
elif kind == "exit":
    sys.exit(int(text))
"""


def context(**more: Any) -> dict[str, Any]:
    run = SimpleNamespace(run_id="r1", dag_id="aircraft", clear_number=2, logical_date=START)
    return {
        "data_interval_start": START,
        "data_interval_end": END,
        "dag_run": run,
        "dag": SimpleNamespace(start_date=datetime(2013, 1, 1, tzinfo=UTC)),
        "task": SimpleNamespace(task_id="process", downstream_list=[]),
        "ti": SimpleNamespace(
            try_number=3, xcom_push=lambda **_: None, get_task_states=lambda **_: {}, get_dr_count=lambda **_: 0
        ),
        **more,
    }


def run(operator: Any, where: dict[str, Any] | None = None) -> Any:
    # Past the decorator that warns about calls outside of a task runner.
    return type(operator).execute.__wrapped__(operator, where or context())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def pids(folder: Path, timeout_s: float = 20) -> list[int]:
    deadline_s = time.monotonic() + timeout_s
    while not (folder / "pids").exists():
        assert time.monotonic() < deadline_s, "the fake driver did not start"
        time.sleep(0.02)
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def gone(processes: list[int], timeout_s: float = 3) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while any(alive(pid) for pid in processes) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not any(alive(pid) for pid in processes)


class Events(dict[str, Any]):
    """As Airflow's accessor of outlets. The name is the key: an asset of Airflow 3.1 can't be hashed."""

    def __getitem__(self, outlet: Any) -> Any:
        told: list[Any] = []
        event = SimpleNamespace(add=lambda asset, extra: told.append((asset.uri, extra)), told=told, extra=None)
        return self.setdefault(outlet.name, event)


class Store(dict[str, Any]):
    """As Airflow's task state store."""

    def set(self, key: str, value: Any) -> None:
        self[key] = value


def answer(option: str) -> dict[str, Any]:
    return {"chosen_options": [option], "params_input": {}, "responded_by_user": {"id": "1", "name": "ann"}}


def micro_batch(**more: Any) -> ProcessIntervalOperator:
    return ProcessIntervalOperator(task_id="process", code="m:P", pipeline="p", root="memory://operators", **more)


def pipeline_dag(**more: Any) -> DAG:
    return stateful_pipeline("p", "m:P", "file:///r", **{"schedule": "@daily", "start_date": START, **more})


OF_CODE: Any = {"root": "r", "code": "m:P"}


def validate(**more: Any) -> ValidateStateOperator:
    return ValidateStateOperator(task_id="v", code="m:P", root="r", checkpoint="5", docs="/docs", **more)


def savepoint(**more: Any) -> SavepointOperator:
    return SavepointOperator(task_id="s", code="m:P", root="r", checkpoint="5", folder="file:///s", **more)


def request_in(folder: Path) -> Any:
    """Read the request that the fake driver got."""
    command, request, *_ = json.loads((folder / "arguments.json").read_text())
    return from_json(REQUESTS[command], request)


def connection(monkeypatch: pytest.MonkeyPatch, **parts: Any) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_CAIRN_SPARK", json.dumps(parts))


def checkpoint(
    monkeypatch: pytest.MonkeyPatch, commit: Callable[[], Any], *, sink_fails_for: int | None = None, **more: Any
) -> tuple[Any, list[str]]:
    """An operator that commits as told, and what else it was asked to do."""
    asked: list[str] = []

    def located(root: str, pipeline: str) -> Any:
        asked.append(pipeline)
        return SimpleNamespace(storage=None, url=f"{root}/{pipeline}")

    def committed(at: Any, attempt: str) -> Any:
        asked.append(f"commit {attempt}")
        record = commit()
        return SimpleNamespace(id=record.id, record=record, log=None)

    def publish(at: Any, hook: Any, *, in_order: bool = False, of: int | None = None, **_: Any) -> None:
        asked.append(f"publish {hook}{' in order' if in_order else ''}{'' if of is None else f' of {of}'}")
        if sink_fails_for is not None:
            raise errors.SinkFailed("the sink of 'p' failed", frozenset({sink_fails_for}))

    for name, stand_in in (
        ("location.locate", located),
        ("commit_attempt.commit", committed),
        ("publish_output.publish", publish),
        ("clean_up_dropped.try_clean_up", lambda *_: asked.append("clean up")),
        ("quarantine.mark_validated", lambda _, n, mode: asked.append(f"{n} passed {mode}")),
    ):
        monkeypatch.setattr(f"state_backend.checkpoint.{name}", stand_in)
    operator = CommitCheckpointOperator(task_id="checkpoint", pipeline="p", root="memory://r", attempt="a1", **more)
    return operator, asked


def record() -> Any:
    names = "changed_bytes uploaded_bytes state_bytes state_files keys keys_touched input_rows output_rows late_rows"
    totals = SimpleNamespace(**{name: number for number, name in enumerate(names.split())})
    return SimpleNamespace(
        id=7, content=SimpleNamespace(base_id=6, interval=Interval(START, END), totals=totals, durations_us={})
    )
