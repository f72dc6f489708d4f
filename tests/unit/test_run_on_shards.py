"""What a Spark task tells a shard's job."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from cairn.rows.routing import PART
from cairn.shard_jobs import run_on_shards


class Job:
    """Answers with its arguments."""

    def with_refs(self, refs: Any) -> Job:
        return self

    def run_shard(self, batches: Iterator[pa.RecordBatch], shard: int, task: int) -> tuple[int, int]:
        return shard, task


def test_each_attempt_of_a_task_names_its_files_by_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark repeats a failed task, and may run a slow one twice at a time: same partition, another attempt."""
    context = SimpleNamespace(partitionId=lambda: 2, taskAttemptId=lambda: 71)
    monkeypatch.setattr(run_on_shards, "TaskContext", SimpleNamespace(get=lambda: context))
    monkeypatch.setattr(run_on_shards, "end_idle_daemon", lambda: None)
    monkeypatch.setattr(run_on_shards, "unship", lambda shipped: (Job(), None))
    tick = pa.RecordBatch.from_pydict({PART: [zlib.compress(pickle.dumps(()))]})
    [found] = run_on_shards._run_shard("", iter([tick]))
    assert pickle.loads(found["ack"][0].as_py()) == (2, 71)
