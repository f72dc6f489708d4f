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
from state_backend.values.errors import DamagedCopy


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


def test_a_copy_that_stays_damaged_ends_the_job_after_one_try_more_than_there_are_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = []

    def damaged(*_: Any) -> Any:
        tries.append(1)
        raise DamagedCopy("damaged")

    monkeypatch.setattr(run_on_shards, "collect_once", damaged)
    job: Any = SimpleNamespace(parallelism=2, refs_of=lambda shard: (), with_refs=lambda refs: None)
    with pytest.raises(DamagedCopy):
        run_on_shards.run_on_shards(SimpleNamespace(), job, lambda ticks: SimpleNamespace())  # type: ignore[arg-type]
    assert len(tries) == 3
