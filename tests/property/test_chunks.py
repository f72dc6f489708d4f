"""Intervals that one job computes are what they would be one by one: random histories of each processor, with kills."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cairn import testing
from cairn.aggregates import Max
from cairn.operations.erase_keys import erase_keys
from cairn.operations.intervals.plan_chunk import ChunkLimits
from cairn.operations.intervals.run_intervals import Outcome, run_intervals
from cairn.operations.savepoints import restore_savepoint, take_savepoint
from cairn.pipeline import Interval, Pipeline
from cairn.rows.local_rows import LocalRows
from cairn.shard_jobs.interval import IntervalJob
from cairn.spark.ddl import parse_ddl_locally
from state_backend.adapters.local_storage import LocalStorage
from state_backend.checkpoint.log import read_log
from state_backend.checkpoint.sweep_files import sweep
from state_backend.shard import snapshot
from state_backend.shard.manifest import manifest_of
from state_backend.values.operation_parameters import Erase
from state_backend.values.records import RunRef
from state_backend.values.retention import KeepLast
from state_backend.values.zones import zone_of
from tests.support import in_chunks
from tests.support.coordinator import coordinator_of
from tests.support.counting import DAY
from tests.support.counting import START as FIRST_DAY
from tests.support.every_processor import FORMS, HOUR, READY_MADE, SCHEMA, declared, row
from tests.support.faulty_storage import StopHere
from tests.support.history_pipeline import INPUT_SCHEMA, pipeline_of, rows_of
from tests.support.in_process import run_here
from tests.support.tiers import at_tier, long_after

SESSION: Any = testing.PlanningSession("UTC")
START = datetime.fromisoformat("2024-01-15T06:00Z")
INTERVALS = 12
TTL = "state with expiry"
# State of one form is state of any other.
NEXT_FORM = {"row": "pandas", "pandas": "arrow", "arrow": "row"}
CASES = [TTL, *FORMS, "Deduplicate, last", "TumblingWindow, lateness", *READY_MADE]


# By root. The histories do not hold them, since a source's hash covers the object that it is a method of.
TABLES: dict[Path, Table] = {}


@dataclass
class Table:
    """What a sink got last for each interval, in the order of these calls. Some calls fail after that."""

    rows: dict[Interval, Any] = field(default_factory=dict)
    fails: random.Random | None = None

    def put(self, _: Any, paths: Sequence[str], interval: Interval, checkpoint_id: int) -> None:
        self.rows.pop(interval, None)
        self.rows[interval] = (checkpoint_id, [Path(path).read_bytes() for path in paths])
        if self.fails and self.fails.random() < 0.1:
            raise StopHere


@dataclass
class History:
    """A pipeline, its input (rows of an interval by its number and version), and calls of `run_intervals`."""

    case: str
    seed: int
    folder: Path
    versions: dict[int, int] = field(default_factory=dict)
    # A call: its number, its intervals, and the interval after whose commit others change the state.
    turn: int = 0
    reprocess: Any = "changed"
    wanted: list[Interval] = field(default_factory=list)
    touched: Interval | None = None

    @property
    def intervals(self) -> list[Interval]:
        start, length = (FIRST_DAY, DAY) if self.case == TTL else (START, HOUR)
        return [Interval(start + n * length, start + (n + 1) * length) for n in range(INTERVALS)]

    def read(self, _: Any, interval: Interval) -> Any:
        number = self.intervals.index(interval)
        version = self.versions.get(number, 0)
        rows = rows_of(number + self.seed, version) if self.case == TTL else self._events(interval, number, version)
        schema = INPUT_SCHEMA if self.case == TTL else SCHEMA.format("timestamp")
        return LocalRows(rows, parse_ddl_locally(schema), zone_of("UTC"), "the input"), {
            "version": version,
            "files": [],
        }

    def _events(self, interval: Interval, number: int, version: int) -> list[Any]:
        """Rows of the interval and of hours before it, of which some are late."""
        chosen = random.Random(f"{self.seed}.{number}.{version}")
        return [
            row(
                interval.start + timedelta(minutes=chosen.randrange(-240, 60)),
                100 * number + n,
                f"u{chosen.randrange(6)}",
                chosen.choice([600, 1800, 7200]),
            )
            for n in range(chosen.choice([0, 1, 5, 25]))
        ]

    def pipeline(self) -> Pipeline:
        changed = self.turn > 0 and self.seed % 5 < 3
        if self.case == TTL:
            made = replace(pipeline_of("every", 1 + changed, self.folder, cached=True), source=self.read)
        else:
            rule = ("interval", "observed")[self.seed % 2]
            case = NEXT_FORM.get(self.case, self.case) if changed else self.case
            newer = {"splits_keys": False} | ({"newest": Max("seq")} if "Window" in case else {}) if changed else {}
            made = declared(case, START, newer, self.read, parallelism=2, max_parallelism=16, watermark=rule)
        engine = replace(made.engine, cache_dir=str(self.folder / "cache"), most_sorted_runs=3)
        return replace(made, engine=engine, retention=KeepLast(4 if self.seed % 4 == 3 else 40))

    def touch(self, root: Path, which: int = -1) -> int:
        """Restore a savepoint of a checkpoint, or forget a key. Return the number of the interval to go on with."""
        if self.seed % 3 == 2:
            key = ('{"user": "u3"}',)
            erase_keys(Erase(root=str(root), pipeline="every", key=key, on_rerun="filter"), dry_run=False)
            return 0
        pipeline, log = self.pipeline(), read_log(LocalStorage(root / "every"))
        record, to = log.completed()[which], f"{root} {log.head_id}"
        format: Any = ("native", "canonical")[self.seed % 3]
        take_savepoint.take_savepoint(SESSION, pipeline, str(root / "every"), record, to, format)
        restore_savepoint.restore_savepoint(SESSION, pipeline, str(root), to, attempt=f"restored {log.head_id}")
        return self.intervals.index(record.content.interval) + 1


@contextmanager
def dying(chosen: random.Random, dies: bool) -> Iterator[ExitStack]:
    """The process dies after a shard has processed an interval, or before or after a write to the storage."""
    left = chosen.randint(1, 12) if (by_interval := chosen.random() < 0.5) else chosen.randint(1, 250)
    after, dead = by_interval or chosen.random() < 0.5, False

    def counted(real: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            nonlocal left, dead
            left -= 1
            if dead or (not left and not after):
                dead = True
                raise StopHere
            found = real(*given, **options)
            if not left:
                dead = True
                raise StopHere
            return found

        return call

    writes = [(LocalStorage, name) for name in ("create", "upload", "replace", "delete")]
    with ExitStack() as stack:
        for where, name in ([(IntervalJob, "process")] if by_interval else writes) if dies else []:
            stack.enter_context(mock.patch.object(where, name, counted(getattr(where, name))))
        yield stack


def run(history: History, root: Path, chosen: random.Random, most: int, kills: int) -> int:
    """Call `run_intervals` until it ends. Return the number of jobs of several intervals, which are `most` at most."""
    pipeline, died, jobs = history.pipeline(), 0, 0
    if history.seed % 4 in (1, 2):
        pipeline = replace(pipeline, sink=TABLES[root].put)
    sizes = in_chunks.chunk_on_shards
    intervals, touched = history.wanted, history.touched

    def counted(*given: Any) -> Any:
        nonlocal jobs
        jobs += 1
        return sizes(*given)

    def stop(_: Any) -> None:
        if died < kills and chosen.random() < 0.1:
            raise StopHere

    def on_outcome(outcome: Outcome, _: Any) -> None:
        nonlocal intervals, touched
        if outcome.interval == touched:
            alive.close()
            # A restored state stands for its interval's result, so a later try begins after that interval.
            intervals, touched = intervals[history.touch(root) :], None
        stop(None)

    while True:
        limits = ChunkLimits(intervals=min(most, chosen.randint(2, 7)), seconds=chosen.choice([*[60] * 7, 0.1]))
        try:
            with (
                mock.patch.object(in_chunks, "chunk_on_shards", counted),
                in_chunks.without_spark(pipeline),
                dying(chosen, dies=died < kills) as alive,
            ):
                run_intervals(
                    SESSION,
                    pipeline,
                    intervals,
                    str(root),
                    reprocess=history.reprocess,
                    run=RunRef(run_id=f"run {history.turn}", clear_number=0, try_number=1 + died),
                    before_commit=stop,
                    on_outcome=on_outcome,
                    limits=limits,
                )
        except StopHere:
            died += 1
        else:
            return jobs


def compare(case: str, seed: int, tmp_path: Path, kills: int = 2) -> int:
    """Compare a history that was computed one by one with the same in chunks. Return the number of chunks.

    Every second pair of seeds uploads each file of a store. Else these small files go into the manifests.
    """
    with (
        mock.patch.object(snapshot, "INLINE_FILE_BYTES", 0 if (seed + 1) // 2 % 2 else snapshot.INLINE_FILE_BYTES),
        mock.patch.object(take_savepoint, "run_on_shards", run_here),
        mock.patch.object(restore_savepoint, "run_on_shards", run_here),
    ):
        return _compare(case, seed, tmp_path, kills)


def _compare(case: str, seed: int, tmp_path: Path, kills: int) -> int:
    chosen = random.Random(seed)
    alone, together, folder = tmp_path / "alone", tmp_path / "together", tmp_path / "host"
    folder.mkdir()
    history = History(case, seed, folder)
    pipeline, chunks, end = history.pipeline(), 0, chosen.randint(6, 8)
    # Chunks of 2, 4 and more intervals go on after one of these, unless the process dies before.
    history.wanted, history.touched = history.intervals[:end], history.intervals[chosen.choice([1, 3, 4, 5])]
    TABLES.update({alone: Table(), together: Table(fails=random.Random(seed) if kills else None)})
    for history.turn in range(2):
        assert run(history, alone, chosen, 1, 0) == 0
        chunks += run(history, together, chosen, 7, kills)
        assert [*TABLES[alone].rows.items()] == [*TABLES[together].rows.items()]
        first, which = end, -chosen.randint(1, 4)
        if not history.turn and chosen.random() < 0.5:
            first, _ = (history.touch(root, which) for root in (alone, together))
        expected, found = in_chunks.results(pipeline, alone), in_chunks.results(pipeline, together)
        for one, other in zip(expected, found, strict=True):
            assert one == other, (case, seed, history.turn)
        history.versions = {n: 1 for n in range(INTERVALS) if chosen.random() < 0.3}
        history.reprocess = chosen.choice(["changed", "all"])
        history.wanted, history.touched = history.intervals[chosen.choice([0, first, first]) :], None
    coordinator = coordinator_of(pipeline, str(together))
    log = coordinator.log()
    manifests = [manifest_of(ref, coordinator.at.storage) for r in log.completed() for ref in r.content.shards]
    # A restore copies files.
    named = {handle for manifest in manifests for handle in manifest.handles if "restored" not in handle.path}
    assert len({handle.crc32c for handle in named}) == len(named), "a file was uploaded twice"
    # A sweep leaves what the records name, and the pipeline goes on.
    sweep(coordinator.at.storage, "every", now_ms=4_102_444_800_000)
    found = in_chunks.results(pipeline, together)
    assert [one["digest"] for one in found] == [one["digest"] for one in in_chunks.results(pipeline, alone)]
    return chunks


@pytest.mark.parametrize("case", long_after(6, dict.fromkeys(CASES), "minutes"))
def test_intervals_run_in_a_chunk_give_the_same_results_as_run_one_by_one(case: str, tmp_path: Path) -> None:
    chunks, seeds = 0, at_tier(fast=1, ci=2, all=14)
    for seed in range(seeds):
        (folder := tmp_path / str(seed)).mkdir()
        chunks += compare(case, seed, folder)
    assert chunks > seeds
