"""Many intervals of five minutes, with kills, lost answers, full disks and refusals. At the end the state is that of an undisturbed
run, and the log names each file. 40 intervals on a disk; with CAIRN_TESTS=all a week of 2,016, and a day of 288 on S3."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest

from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.rocks import EngineOptions
from state_backend.adapters.s3_storage import S3Storage
from state_backend.checkpoint.sweep_files import sweep
from state_backend.inspection.verify import verify_pipeline
from state_backend.ports.storage import Storage
from state_backend.values.errors import StorageUnavailable, UnknownOutcome, ValidationRefused
from state_backend.values.intervals import Interval
from state_backend.values.retention import KeepYounger
from tests.support.checkpoints import PIPELINE, START
from tests.support.faulty_storage import Fault, FaultyStorage, StopHere, lost_answer_at, stop_at
from tests.support.reading import unnamed_files
from tests.support.real_shards import RealPipeline
from tests.support.s3_server import BUCKET, s3_server
from tests.support.tiers import ALL

A_DAY = 288 if ALL else 20
KEYS = [f"key-{n}" for n in range(40)]
FAR_MS = 4_102_444_800_000  # the year 2100: what nobody needs is old


def five_minutes(n: int) -> Interval:
    return Interval(START + (n - 1) * timedelta(minutes=5), START + n * timedelta(minutes=5))


def values_of(n: int) -> dict[str, int]:
    chance = random.Random(n)
    return {key: chance.randrange(1000) for key in chance.sample(KEYS, 5)}


@dataclass
class Week:
    """A pipeline that is run try by try, each try a process of its own."""

    root: Path
    chance: random.Random
    storage: Storage
    seen: dict[str, int] = field(default_factory=dict)
    requests: list[int] = field(default_factory=list)
    tries: int = 0

    @property
    def memory(self) -> Path:
        return self.root / "memory"

    def interval(self, n: int) -> None:
        """Runs an interval until a try of it has come to its end."""
        for number in range(100):
            what, plan = self._disturbance()
            storage = FaultyStorage(self.storage, plan)
            engine = EngineOptions(metadata_dir=str(self.memory))
            pipeline = RealPipeline(
                self.root,
                storage=storage,
                policy=KeepYounger(timedelta(minutes=75)),
                interval_of=five_minutes,
                engine=engine,
            )
            self.tries += 1
            attempt = f"{n}-{self.tries}"
            try:
                pipeline.prepare(n, attempt, values_of(n))
                if what == "refused":
                    pipeline.coordinator.refuse(attempt, "a test says so")
                pipeline.coordinator.commit(attempt)
                pipeline.coordinator.publish(lambda record: None)
                pipeline.coordinator.clean_up()
            except (StopHere, StorageUnavailable, UnknownOutcome, ValidationRefused) as error:
                self.seen[type(error).__name__] = self.seen.get(type(error).__name__, 0) + 1
                shutil.rmtree(self.root / "work", ignore_errors=True)
                continue
            if not plan and number == 0:
                self.requests.append(len(storage.calls))
            return
        raise AssertionError(f"interval {n} never came to its end")

    def _disturbance(self) -> tuple[str, dict[int, Fault]]:
        if self.chance.random() > 0.15:
            return "nothing", {}
        at, when = self.chance.randrange(60), self.chance.choice(["before", "after"])
        what = self.chance.choice(["killed", "killed", "no answer", "full disk", "refused"])
        plans: dict[str, dict[int, Fault]] = {
            "killed": stop_at(at, when),  # type: ignore[arg-type]
            "no answer": lost_answer_at(at, when),  # type: ignore[arg-type]
            "full disk": {n: Fault(error=StorageUnavailable("no space"), when="before") for n in range(at, at + 1000)},
            "refused": {},
        }
        return what, plans[what]


def run_week(root: Path, storage: Storage, chance: random.Random, intervals: int) -> Week:
    week = Week(root, chance, storage)
    week.memory.mkdir(parents=True)
    for n in range(1, intervals + 1):
        week.interval(n)
        if chance.random() < 0.02:
            week.interval(chance.randint(max(1, n - 11), n))  # cleared by somebody, and the same again
        if n % A_DAY == 0:
            sweep(week.storage, PIPELINE, now_ms=FAR_MS)
    return week


@pytest.mark.long("seconds", runs_in="ci")
def test_a_week_of_five_minutes(tmp_path: Path) -> None:
    check_week(tmp_path, LocalStorage(tmp_path / "disturbed" / PIPELINE), 2016 if ALL else 40)


@pytest.mark.s3
@pytest.mark.long("minutes: a day of 288 intervals")
def test_a_day_of_five_minutes_on_s3(tmp_path: Path) -> None:
    with s3_server():
        check_week(tmp_path, S3Storage(BUCKET, f"five-minutes/{PIPELINE}"), A_DAY)


def check_week(tmp_path: Path, storage: Storage, intervals: int) -> None:
    # The state at the end of an undisturbed week is what was set last of each key, here in one interval.
    last: dict[str, int] = {}
    for n in range(1, intervals + 1):
        last |= values_of(n)
    undisturbed = RealPipeline(tmp_path / "undisturbed")
    wanted = undisturbed.run(1, "all", last).record
    week = run_week(tmp_path / "disturbed", storage, random.Random(7), intervals)
    assert week.seen.keys() == {"StopHere", "StorageUnavailable", "UnknownOutcome", "ValidationRefused"}

    log = RealPipeline(week.root, storage=week.storage).coordinator.log()
    newest = max(log.completed(), key=lambda r: r.content.interval.end)
    assert newest.content.interval == five_minutes(intervals)
    assert wanted is not None and newest.content.digest == wanted.content.digest
    assert newest.content.totals.entries == len(KEYS)
    verified = verify_pipeline(week.storage, work=tmp_path / "verify")
    assert verified.success, verified

    assert len(log.current_outputs()) == intervals
    assert unnamed_files(week.storage, log) == set()
    assert list(week.memory.iterdir()) == []
    # Ten of the first and of the last that nothing disturbed; the first three have fewer checkpoints behind them.
    first, late = (sum(found) / 10 for found in (week.requests[20:30], week.requests[-10:]))
    assert late <= 1.25 * first, (first, late)
    print(f"{week.seen}; requests of an interval {week.requests[:3]} at the start, {week.requests[-3:]} at the end")
