"""What a worker's tasks leave behind is out of the collector's sight, but not for ever; elsewhere nothing is."""

from __future__ import annotations

import gc

import pytest
from pyspark import TaskContext

from cairn.shard_jobs.run_on_shards import rare_garbage_collection


def test_outside_a_worker_objects_are_frozen_only_during_the_block() -> None:
    with rare_garbage_collection():
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()


@pytest.mark.long("seconds", runs_in="ci")
def test_a_worker_unfreezes_objects_once_in_32_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TaskContext, "get", staticmethod(object))
    # Blocks of two threads that overlap, as in another test of this process, can leave their thresholds behind.
    gc.set_threshold(700, 10, 10)
    thresholds = gc.get_threshold()
    frozen = []
    for _ in range(32):
        with rare_garbage_collection():
            assert gc.get_threshold() != thresholds
        assert gc.get_threshold() == thresholds
        frozen.append(gc.get_freeze_count())
    assert frozen.count(0) == 1
    gc.unfreeze()
