"""A sweep and a commit that take turns at every storage call of both."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint import sweep as sweeping
from state_backend.checkpoint.sweep import sweep
from state_backend.formats import paths
from state_backend.ports.storage import Storage
from state_backend.shard.manifest import manifest_of
from state_backend.values.errors import CairnError, Swept
from state_backend.values.handles import handles_in
from state_backend.values.retention import KeepLast
from tests.support.checkpoints import PIPELINE, Folder, day, run, sst
from tests.support.faulty_storage import FaultyStorage

HOUR_MS = 3_600_000
Work = Callable[[Storage], object]


class Turns:
    """Who may call the storage: (name, how many calls) one after the other, then each to its end in the order of the first."""

    def __init__(self, schedule: list[tuple[str, int]]) -> None:
        rest = [(name, 1_000_000) for name, _ in schedule]
        self._schedule = [*schedule, *rest]
        self._done: set[str] = set()
        self._moved = threading.Condition()

    def take(self, name: str, call: Callable[[], Any]) -> Any:
        with self._moved:
            assert self._moved.wait_for(lambda: self._whose() == name, timeout=20)
            try:
                return call()
            finally:
                self._schedule[0] = (name, self._schedule[0][1] - 1)
                self._moved.notify_all()

    def end(self, name: str) -> None:
        with self._moved:
            self._done.add(name)
            self._moved.notify_all()

    def _whose(self) -> str | None:
        while self._schedule and (self._schedule[0][1] == 0 or self._schedule[0][0] in self._done):
            self._schedule.pop(0)
        return self._schedule[0][0] if self._schedule else None


class InTurn(FaultyStorage):
    def __init__(self, inner: Storage, turns: Turns, name: str) -> None:
        super().__init__(inner, {})
        self._turns, self._name = turns, name

    def _call(self, name: str, path: str, action: Callable[[], Any]) -> Any:
        return self._turns.take(self._name, lambda: super(InTurn, self)._call(name, path, action))


def together(storage: Storage, works: dict[str, Work], schedule: list[tuple[str, int]]) -> dict[str, object]:
    """What each returned or raised."""
    turns, results = Turns(schedule), dict[str, object]()

    def body(name: str) -> None:
        try:
            results[name] = works[name](InTurn(storage, turns, name))
        except BaseException as error:
            results[name] = error
        finally:
            turns.end(name)

    threads = [threading.Thread(target=body, args=(name,)) for name in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results.keys() == works.keys()
    return results


def scene() -> tuple[MemoryStorage, Folder]:
    """Day 1 is committed, day 2 prepared and silent for hours, and there is an orphan."""
    clock = {"ms": 0}
    storage = MemoryStorage(now_ms=lambda: clock["ms"])
    folder = Folder(storage, inline=False, policy=KeepLast(1))
    folder.run(day(1), "a1")
    folder.coordinator.publish(None)
    folder.prepare(day(2), "slow", keep=(sst("a1"),), run=run("slow"))
    storage.create(sst("crashed"), b"x")
    clock["ms"] = 3 * HOUR_MS
    return storage, folder


def do_sweep(storage: Storage) -> object:
    return sweep(storage, PIPELINE, now_ms=3 * HOUR_MS, min_age=timedelta(hours=2))


def do_commit(storage: Storage) -> object:
    """As the checkpoint task does it."""
    coordinator = Folder(storage, policy=KeepLast(1)).coordinator
    result = coordinator.commit("slow")
    coordinator.publish(None)
    coordinator.clean_up()
    return result


def calls_of(work: Work) -> int:
    watched = FaultyStorage(scene()[0], {})
    work(watched)
    return len(watched.calls)


def check(storage: MemoryStorage, folder: Folder, results: dict[str, object]) -> str:
    """Either the attempt was committed and has all its files, or it was swept; what was committed is there; the next
    interval can go on; a second sweep leaves exactly what is named."""
    there = {info.path for info in storage.list("")}
    log = folder.coordinator.log()
    for record in log.completed():
        needed = {h.path for h in handles_in(record)}
        needed |= {h.path for ref in record.content.shards for h in handles_in(manifest_of(ref, storage))}
        assert needed <= there, needed - there
    assert not isinstance(results["sweep"], BaseException)
    committed = log.of_attempt("slow") is not None
    if not committed:
        assert isinstance(results["commit"], Swept)
        with pytest.raises(Swept):
            folder.coordinator.commit("slow")
        assert folder.run(day(2), "next", keep=(sst("a1"),)).outcome == "committed"
        folder.coordinator.publish(None)
    else:
        assert not isinstance(results["commit"], BaseException)
    do_sweep(storage)
    left = folder.paths(paths.SHARED)
    owners = {paths.attempt_of(p) for p in left}
    assert owners == ({"a1", "slow"} if committed else {"a1", "next"})
    return "committed" if committed else "swept"


def all_schedules(commit_calls: int, sweep_calls: int) -> list[list[tuple[str, int]]]:
    both = [[("commit", i), ("sweep", k)] for i in range(commit_calls + 1) for k in range(sweep_calls + 1)]
    return [*both, *([("sweep", k), ("commit", i)] for [(_, i), (_, k)] in both)]


def test_two_switches_at_every_pair_of_calls() -> None:
    schedules = all_schedules(calls_of(do_commit), calls_of(do_sweep))
    seen = []
    for schedule in schedules:
        storage, folder = scene()
        seen.append(check(storage, folder, together(storage, {"commit": do_commit, "sweep": do_sweep}, schedule)))
    assert len(seen) == len(schedules) > 500
    assert min(seen.count("committed"), seen.count("swept")) > 50


def forgetful(plan: Callable[..., sweeping.SweepPlan]) -> Callable[..., sweeping.SweepPlan]:
    """A sweep that does not tell the log whom it abandons."""
    return lambda *args, **options: replace(plan(*args, **options), abandon=())


def test_a_sweep_that_does_not_tell_the_log_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself can fail: without the record some order of calls loses a committed checkpoint's files."""
    monkeypatch.setattr(sweeping, "plan_sweep", forgetful(sweeping.plan_sweep))
    schedules = all_schedules(calls_of(do_commit), 8)
    broken = 0
    for schedule in schedules[:: len(schedules) // 60]:
        storage, folder = scene()
        results = together(storage, {"commit": do_commit, "sweep": do_sweep}, schedule)
        try:
            check(storage, folder, results)
        except (AssertionError, CairnError, pytest.fail.Exception):
            broken += 1
    assert broken
