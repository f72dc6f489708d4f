"""Changelog mode against incremental, over the same hours in hourly and in five-minute intervals. No Spark.

    python -m benchmarks.changelog_history [--small]

Each interval restores every shard, changes keys that are drawn uniformly, writes what changed, prepares, commits and cleans up, by the
functions of a real interval, over local storage with its syncs and with the host's cache. ``per interval`` are means over all
intervals but the first, which loads the state. Objects and bytes are all that was created on the storage: state, manifests,
``prepared.json``, records and marks. ``restore`` is of all shards, one after the other, without the cache, mean over checkpoints.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.state_history import MAX_PARALLELISM, STATE, STATE_ID
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.rocks import EngineOptions
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.checkpoint.prepare_content import NO_TOTALS, ShardAck, prepare, summary_of
from state_backend.shard.changelog import ChangelogOptions, ShardChangelog
from state_backend.shard.consolidation import consolidate, counted, most_bytes
from state_backend.shard.file_cache import FileCache
from state_backend.shard.manifest import needed_manifest
from state_backend.shard.restore import RestoredShard, restore_shard
from state_backend.shard.snapshot import Snapshot, inline_budget_bytes, take_snapshot
from state_backend.state.layout import prefix
from state_backend.state.shard_state import ShardState
from state_backend.values.handles import Handle
from state_backend.values.intervals import Interval, to_ms
from state_backend.values.key_groups import range_of
from state_backend.values.records import (
    Content,
    LogicalTime,
    Permissions,
    RunRef,
    ShardManifest,
    ShardRef,
)
from state_backend.values.retention import KeepLast

Mode = Literal["incremental", "changelog"]
START = datetime(2024, 1, 1, tzinfo=UTC)
ENTRY_BYTES = 100


class CountedStorage(LocalStorage):
    """A local storage that counts what is created."""

    objects = 0
    bytes = 0

    def create(self, path: str, data: bytes) -> Handle:
        """As every storage does."""
        return self._counted(super().create(path, data))

    def upload(self, path: str, local: Path) -> Handle:
        """As every storage does."""
        return self._counted(super().upload(path, local))

    def _counted(self, handle: Handle) -> Handle:
        self.objects += 1
        self.bytes += handle.size_bytes
        return handle


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """``share`` of the ``keys`` changes per hour, over so many ``intervals`` of ``minutes`` each."""

    keys: int
    parallelism: int
    share: float
    minutes: int
    intervals: int


LOADS = tuple(
    Load(keys=200_000, parallelism=parallelism, share=share, minutes=minutes, intervals=intervals)
    for parallelism, share, minutes, intervals in (
        *((4, 0.001, 5, 24), (4, 0.01, 5, 48), (4, 0.1, 5, 24)),
        *((4, 0.01, 60, 24), (4, 0.1, 60, 12), (32, 0.01, 5, 8)),
    )
)
SMALL = (Load(keys=5_000, parallelism=2, share=0.01, minutes=5, intervals=3),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Per interval, means: changed and written bytes, objects, seconds; and of checkpoints: bytes, seconds of a cold restore."""

    changed_bytes: float
    written_bytes: float
    objects: float
    seconds: float
    cpu_seconds: float
    checkpoint_bytes: float
    restore_s: float


class CommittedHistory:
    """A pipeline of one mode, interval after interval."""

    def __init__(self, folder: Path, load: Load, mode: Mode) -> None:
        self.load, self.mode, self.folder = load, mode, folder
        self.storage = CountedStorage(folder / "storage")
        self.coordinator = Coordinator(self.storage, "history", policy=KeepLast(10))
        self.engine = EngineOptions(cache_dir=None)
        self.cache = FileCache(folder / "cache", 1024**3)
        self.number = 0

    def interval(self, keys: np.ndarray, seed: int) -> Content:
        """Writes a new random value to each key; the content that was committed."""
        start = START + self.number * timedelta(minutes=self.load.minutes)
        interval, attempt = Interval(start, start + timedelta(minutes=self.load.minutes)), f"a{self.number}"
        run = RunRef(run_id=attempt, clear_number=0, try_number=1)
        begun = self.coordinator.begin(
            interval, run=run, permissions=Permissions(), pipeline_start_ms=to_ms(START), attempt=attempt
        )
        base = begun.base.content.shards if begun.base is not None else ()
        rng = np.random.default_rng(seed)
        of_shard = (keys % MAX_PARALLELISM) * self.load.parallelism // MAX_PARALLELISM
        acks = [
            self._shard(shard, base, keys[of_shard == shard].tolist(), rng, attempt)
            for shard in range(self.load.parallelism)
        ]
        content = Content(
            kind="interval",
            pipeline="history",
            pipeline_start_ms=to_ms(START),
            interval=interval,
            run=run,
            attempt=attempt,
            base_id=begun.base.id if begun.base is not None else None,
            permissions=Permissions(),
            parallelism=self.load.parallelism,
            max_parallelism=MAX_PARALLELISM,
            key_schema={"type": "struct", "fields": []},
            states=(STATE,),
            time=LogicalTime(mode="none", processing_time_ms=interval.end_ms, watermark_ms=None),
            source_position={},
            code_hash="",
            totals=NO_TOTALS,
            digest=0,
            shards=(),
            outputs=(),
            durations_us={},
            worker_pids=(),
        )
        made = prepare(self.storage, content, acks, h0=begun.h0, base=base)
        self.coordinator.commit(attempt)
        self.coordinator.clean_up()
        self.number += 1
        return made

    @contextmanager
    def restored(
        self, shard: int, base: tuple[ShardRef, ...], cache: FileCache | None, work: Path
    ) -> Iterator[RestoredShard]:
        """A shard, open while the block runs."""
        manifests = [needed_manifest(ref, self.storage) for ref in base if ref.shard == shard]
        owned = range_of(shard, self.load.parallelism, MAX_PARALLELISM)
        made = restore_shard(owned, manifests, self.storage, work / "db", self.engine, cache)
        try:
            yield made
        finally:
            made.store.close()
            shutil.rmtree(work)

    def _shard(
        self, shard: int, base: tuple[ShardRef, ...], keys: list[int], rng: np.random.Generator, attempt: str
    ) -> ShardAck:
        work, owned = self.folder / "work", range_of(shard, self.load.parallelism, MAX_PARALLELISM)
        with self.restored(shard, base, self.cache, work) as restored:
            changes = None
            if self.mode == "changelog":
                nothing = ShardManifest(
                    shard=shard, key_groups=owned, files=(), inline_files=(), segments=(), key_group_states=()
                )
                changes = ShardChangelog(
                    restored.store,
                    restored.base or nothing,
                    work / "changes",
                    ChangelogOptions(),
                    base_ref=next((ref for ref in base if ref.shard == shard), None),
                    parallelism=self.load.parallelism,
                )
            state = ShardState(restored.store, key_groups=restored.key_group_states, descriptors=(STATE,), now_ms=0)
            for key in keys:
                stored = prefix(key % MAX_PARALLELISM, STATE_ID) + key.to_bytes(8, "big")
                state.write(stored, b"\x01" + rng.bytes(ENTRY_BYTES - len(stored) - 1))
            states = state.key_group_states()
            snapshot = self._captured(restored, state, changes, shard, work, attempt) if state.changed_bytes else None
            manifest = snapshot.manifest if snapshot else restored.base
            assert manifest is not None, (shard, states)
            return ShardAck(
                shard=shard,
                manifest=snapshot.manifest if snapshot else None,
                summary=summary_of(manifest),
                changes=snapshot.changes if snapshot else None,
                in_segment=snapshot.in_segment if snapshot else None,
                changed_bytes=state.changed_bytes,
                uploaded_bytes=snapshot.uploaded_bytes if snapshot else 0,
                uploaded_files=snapshot.uploaded_files if snapshot else 0,
                durations_us={},
                pid=0,
            )

    def _captured(
        self,
        restored: RestoredShard,
        state: ShardState,
        changes: ShardChangelog | None,
        shard: int,
        work: Path,
        attempt: str,
    ) -> Snapshot:
        states = state.key_group_states()
        if changes is not None and changes.fits(most_bytes(restored.store, states, self.engine)):
            return changes.append(self.storage, attempt=attempt, task=0, key_group_states=states)
        states = counted(restored.store, states)
        consolidate(
            restored.store,
            key_groups=states,
            options=self.engine,
            shard=shard,
            parallelism=self.load.parallelism,
            sequence=self.number,
        )
        return take_snapshot(
            restored.store,
            self.storage,
            image=work / "image",
            attempt=attempt,
            shard=shard,
            task=0,
            key_groups=range_of(shard, self.load.parallelism, MAX_PARALLELISM),
            key_group_states=states,
            opened=restored.opened,
            opened_inline=restored.opened_inline,
            full=False,
            inline_budget_bytes=inline_budget_bytes(self.load.parallelism),
            cache=self.cache,
        )

    def restore_seconds(self, shards: tuple[ShardRef, ...]) -> float:
        """How long a restore of all shards takes on a host without a cache."""
        seconds = 0.0
        for shard in range(self.load.parallelism):
            started = time.perf_counter()
            with self.restored(shard, shards, None, self.folder / "cold"):
                seconds += time.perf_counter() - started
        return seconds


def measured(folder: Path, load: Load, modes: tuple[Mode, ...] = ("incremental", "changelog")) -> dict[Mode, Found]:
    """The load in each mode, interval by interval in turn: a machine is not equally fast for minutes."""
    histories = {mode: CommittedHistory(folder / mode, load, mode) for mode in modes}
    for history in histories.values():
        history.folder.mkdir(parents=True)
        history.interval(np.arange(load.keys), 0)
        history.storage.objects = history.storage.bytes = 0
    rng = np.random.default_rng(7)
    count = load.intervals
    seconds: dict[Mode, list[float]] = {mode: [] for mode in modes}
    cpu_seconds: dict[Mode, list[float]] = {mode: [] for mode in modes}
    restores: dict[Mode, list[float]] = {mode: [] for mode in modes}
    state_bytes: dict[Mode, list[float]] = {mode: [] for mode in modes}
    changed_bytes = 0
    for number in range(1, count + 1):
        keys = rng.choice(load.keys, max(1, round(load.keys * load.share * load.minutes / 60)), replace=False)
        for mode, history in histories.items():
            started, cpu_started = time.perf_counter(), time.process_time()
            made = history.interval(keys, number)
            seconds[mode].append(time.perf_counter() - started)
            cpu_seconds[mode].append(time.process_time() - cpu_started)
            state_bytes[mode].append(made.totals.state_bytes)
            changed_bytes = changed_bytes + (made.totals.changed_bytes if mode == modes[0] else 0)
            if number % max(1, count // 6) == 0:
                restores[mode].append(history.restore_seconds(made.shards))
    return {
        mode: Found(
            changed_bytes=changed_bytes / count,
            written_bytes=history.storage.bytes / count,
            objects=history.storage.objects / count,
            seconds=statistics.mean(seconds[mode]),
            cpu_seconds=statistics.mean(cpu_seconds[mode]),
            checkpoint_bytes=statistics.mean(state_bytes[mode]),
            restore_s=statistics.mean(restores[mode]),
        )
        for mode, history in histories.items()
    }


def main(arguments: list[str] | None = None) -> int:
    """Prints a table: a row for each load and mode."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.changelog_history", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args(arguments)
    print(
        "| keys, shards, changed per hour, interval | mode | written to changed bytes | KB | objects | ms (CPU) "
        "| checkpoint MB | restore ms |\n|---|---|---|---|---|---|---|---|"
    )
    for load in SMALL if options.small else LOADS:
        folder = Path(tempfile.mkdtemp(prefix="cairn-changelog-"))
        try:
            for mode, found in measured(folder, load).items():
                print(
                    f"| {load.keys:,}, {load.parallelism}, {load.share:.1%}, {load.minutes} min | {mode} "
                    f"| {found.written_bytes / found.changed_bytes:.2f} | {found.written_bytes / 1000:.1f} "
                    f"| {found.objects:.1f} | {found.seconds * 1000:.0f} ({found.cpu_seconds * 1000:.0f}) "
                    f"| {found.checkpoint_bytes / 1e6:.1f} | {found.restore_s * 1000:.0f} |",
                    flush=True,
                )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
