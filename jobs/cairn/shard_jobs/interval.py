"""One interval on one shard, and what the driver makes of all shards.

In each Spark task: restore -> process -> fire timers -> expire -> capture -> upload -> ack. Then once: all acks -> prepared.
In changelog mode there is a segment to upload, and no capture before it.
If a task stops at any point, its local folder and some files under the attempt are left; no record names them. If Spark
runs a task twice, both write under different names, and only the successful one's ack counts.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import TimerValues
from pyspark.sql.types import StructType

from cairn.runtime.arrow_runner import ArrowRunner
from cairn.runtime.input_batches import InputBatches
from cairn.runtime.input_rows import KeyedInput, row_slices
from cairn.runtime.keyed_runner import KeyedRunner
from cairn.runtime.output_file import LocalParquet
from cairn.runtime.output_rows import OutputRows
from cairn.runtime.output_schema import arrow_schema, recorded_schema, struct_of
from cairn.runtime.pandas_frames import OutputFrames, frame_slices, key_values, whole_frames
from cairn.runtime.processor_handle import row_maker
from cairn.runtime.routing import INITIAL, INPUT
from cairn.runtime.user_code import UserCode
from cairn.runtime.watermark import EventTime
from cairn.shard_jobs.shipping import ShippedProcessor
from state_backend.adapters.change_recorder import ChangeRecorder
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.rocks import EngineOptions
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.formats import paths, record_codec
from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.key_columns import KeyColumns
from state_backend.formats.types import parse_struct
from state_backend.ports.storage import Storage
from state_backend.shard.consolidation import consolidate, counted, most_bytes
from state_backend.shard.file_cache import open_cache
from state_backend.shard.manifest import INLINE_MANIFESTS_BYTES, changes_since, needed_manifest, plan_ref
from state_backend.shard.restore import RestoredShard, check_whole, restore_shard
from state_backend.shard.snapshot import (
    ChangelogOptions,
    Snapshot,
    append_segment,
    inline_budget_bytes,
    plan_changelog,
    record_changes,
    take_snapshot,
)
from state_backend.state.shard_state import ShardState
from state_backend.values.errors import CorruptFile, DamagedCopy, InvariantViolated, SourceError
from state_backend.values.intervals import Interval
from state_backend.values.key_groups import KeyGroupRange, range_of
from state_backend.values.records import (
    Content,
    InSegment,
    LogicalTime,
    OutputFile,
    Permissions,
    Prepared,
    RunRef,
    ShardChanges,
    ShardManifest,
    ShardRef,
    StateDescriptor,
    Totals,
)
from state_backend.values.retention import RetentionPolicy
from state_backend.values.zones import local_zone, zone_of

# Of which about so much is for segments, and never less than this for a shard's: those of a few keys need no file, and where
# manifests lie in files, whichever does not fit goes into one of those.
INLINE_SEGMENTS_BYTES, INLINE_SEGMENT_BYTES = 12 * 1024, 2 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSummary:
    """What the totals of a checkpoint need of one shard's manifest, so that the driver need not read those that did not change."""

    key_groups: KeyGroupRange
    entries: dict[str, int]
    digest: int
    size_bytes: int
    files: int


def summary_of(manifest: ShardManifest) -> ShardSummary:
    """Sums over a manifest's key groups and files; small SSTs inside it count as files."""
    entries: dict[str, int] = {}
    for group in manifest.key_group_states:
        for name, count in group.entries.items():
            entries[name] = entries.get(name, 0) + count
    return ShardSummary(
        key_groups=manifest.key_groups,
        entries=entries,
        digest=manifest.digest,
        size_bytes=manifest.size_bytes,
        files=len(manifest.handles) + sum(f.name.endswith(".sst") for f in manifest.inline_files),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardAck:
    """What a shard did. Manifest None: the shard did not change, and its manifest in the base stays right. ``changes``: where
    that lies in a file and the new one has the same files, all that is different. ``in_segment``: the new one lies in the file of
    its last segment. ``summary`` is of the manifest that counts now.

    ``late``: the file of its late rows. ``newest_event_us``: the latest event time it saw. ``durations_us`` by phase; ``pid``
    is the worker's process. Its base's bytes came from the storage (``downloaded_bytes``) or this host's cache.
    """

    shard: int
    manifest: ShardManifest | None
    summary: ShardSummary
    changes: ShardChanges | None
    output: OutputFile | None
    late: OutputFile | None
    newest_event_us: int | None
    input_rows: int
    keys_touched: int
    changed_bytes: int
    uploaded_bytes: int
    uploaded_files: int
    downloaded_bytes: int
    durations_us: dict[str, int]
    pid: int
    cached_bytes: int = 0
    in_segment: InSegment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalTask:
    """All that the shards of one attempt need; travels to the workers with the processor.

    ``base`` are the shards of the base checkpoint, any parallelism; empty for a start from nothing. ``dropped`` are states
    whose entries go. ``time`` is the clock that handlers see; the recorded watermark is known only when all shards are done.
    """

    pipeline: str
    pipeline_start_ms: int
    root: str
    attempt: str
    h0: int
    base_id: int | None
    base: tuple[ShardRef, ...]
    interval: Interval
    run: RunRef
    permissions: Permissions
    mode: str
    parallelism: int
    max_parallelism: int
    api: Literal["row", "pandas", "arrow"]
    key_schema: dict[str, Any]
    input_schema: dict[str, Any]
    initial_schema: dict[str, Any] | None
    output_schema: dict[str, Any]
    states: tuple[StateDescriptor, ...]
    dropped: tuple[StateDescriptor, ...]
    time: LogicalTime
    event_time: EventTime | None
    source_position: dict[str, Any]
    code_hash: str
    processor: ShippedProcessor
    engine: EngineOptions
    changelog: ChangelogOptions
    retention: RetentionPolicy
    plan_us: int

    @property
    def zone(self) -> str:
        """The time zone in which the processor runs on every host."""
        return self.time.zone or "UTC"

    # --- in a Spark task -----------------------------------------------------------------------------------------------------

    def run_shard(self, batches: Iterator[pa.RecordBatch], shard: int, task: int) -> ShardAck:
        """Processes the interval on one shard. ``task``: unique among everything that this attempt runs."""
        storage = open_storage(self.root)
        owned = range_of(shard, self.parallelism, self.max_parallelism)
        clock = _StopWatch()
        cache = open_cache(self.engine)
        manifests: list[ShardManifest] = []
        with (
            rare_garbage_collection(),
            local_zone(zone_of(self.zone)),
            work_folder(f"{self.pipeline}-{shard}") as work,
        ):
            try:
                with clock.phase("restore"):
                    manifests = [needed_manifest(ref, storage) for ref in self._overlapping(owned)]
                    restored = restore_shard(owned, manifests, storage, work / "db", self.engine, cache)
                try:
                    return self._process(batches, shard, task, owned, restored, storage, work, clock)
                finally:
                    restored.store.close()
            except CorruptFile as error:
                # It may be this host's copy that is damaged; another try fetches the files, and tells.
                handles = [f.handle for m in manifests for f in m.files]
                handles += [s.handle for m in manifests for s in m.segments if s.handle is not None]
                if cache is not None and cache.forget(storage.url, handles):
                    raise DamagedCopy(str(error)) from error
                raise

    def _overlapping(self, owned: KeyGroupRange) -> list[ShardRef]:
        """The shards of the base that hold some of these key groups, told without reading the manifests of the others."""
        count = len(self.base)
        return [ref for ref in self.base if range_of(ref.shard, count, self.max_parallelism).intersect(owned)]

    def _process(
        self,
        batches: Iterator[pa.RecordBatch],
        shard: int,
        task: int,
        owned: KeyGroupRange,
        restored: RestoredShard,
        storage: Storage,
        work: Path,
        clock: _StopWatch,
    ) -> ShardAck:
        base = self._changelog_base(restored, shard, owned)
        changes = record_changes(restored.store, base, work / "changes", self.changelog) if base is not None else None
        state = ShardState(
            restored.store,
            key_groups=restored.key_group_states,
            # A name that was dropped may be declared anew.
            descriptors=(*self.dropped, *self.states),
            now_ms=self.time.processing_time_ms,
            struct_factory=row_maker,
            zone=zone_of(self.zone).rules,
        )
        for descriptor in self.dropped:
            state.drop(descriptor)
        output = LocalParquet(arrow_schema(self.output_schema), work / "output.parquet")
        late = LocalParquet(arrow_schema(self.input_schema), work / "late.parquet")
        inputs = InputBatches(batches, owned, self.event_time, late)
        with clock.phase("process"):
            runner, keys = self._run_processor(inputs, state, output)
        if inputs.ticks != 1:
            raise InvariantViolated(
                f"shard {shard} got {inputs.ticks} ticks: rows were not placed one shard to a partition"
            )
        with clock.phase("timers"):
            runner.fire_timers()
            runner.close()
            state.expire()
        same_layout = len(self.base) == self.parallelism
        snapshot: Snapshot | None = None
        with clock.phase("upload"):
            path = paths.output(self.interval, self.attempt, shard, task)
            late_path = paths.output(self.interval, self.attempt, shard, task, late=True)
            output_file = output.finish(storage, path)
            late_file = late.finish(storage, late_path, late=True)
            if state.changed_bytes or not same_layout or self.mode == "full":
                snapshot = self._snapshot(restored, state, base, changes, storage, work, shard, task, owned)
        manifest = snapshot.manifest if snapshot else restored.base
        if manifest is None:
            raise InvariantViolated(f"shard {shard} did not change, and has no manifest in the base")
        return ShardAck(
            shard=shard,
            manifest=snapshot.manifest if snapshot else None,
            summary=summary_of(manifest),
            changes=self._changes(shard, restored, snapshot.manifest) if same_layout and snapshot else None,
            in_segment=snapshot.in_segment if snapshot else None,
            output=output_file,
            late=late_file,
            newest_event_us=inputs.newest_event_us,
            input_rows=inputs.input_rows,
            keys_touched=keys,
            changed_bytes=state.changed_bytes,
            uploaded_bytes=snapshot.uploaded_bytes if snapshot else 0,
            uploaded_files=snapshot.uploaded_files if snapshot else 0,
            downloaded_bytes=restored.downloaded_bytes,
            cached_bytes=restored.cached_bytes,
            durations_us=clock.durations_us,
            pid=os.getpid(),
        )

    def _snapshot(
        self,
        restored: RestoredShard,
        state: ShardState,
        base: ShardManifest | None,
        changes: ChangeRecorder | None,
        storage: Storage,
        work: Path,
        shard: int,
        task: int,
        owned: KeyGroupRange,
    ) -> Snapshot:
        key_group_states = state.key_group_states()
        most = most_bytes(restored.store, key_group_states, self.engine) if base else None
        if base and changes and plan_changelog(base, changes.content_bytes(), self.changelog, most_bytes=most):
            return append_segment(
                changes,
                storage,
                base=base,
                local=work / "segment",
                attempt=self.attempt,
                task=task,
                key_group_states=key_group_states,
                inline_budget_bytes=max(INLINE_SEGMENTS_BYTES // self.parallelism, INLINE_SEGMENT_BYTES),
                fits_record=lambda manifest: (
                    plan_ref(manifest, self._kept(shard, restored, manifest), self.parallelism) is not None
                ),
            )
        key_group_states = counted(restored.store, key_group_states)
        consolidate(
            restored.store,
            key_groups=key_group_states,
            options=self.engine,
            shard=shard,
            parallelism=self.parallelism,
            sequence=self.h0,
        )
        return take_snapshot(
            restored.store,
            storage,
            image=work / "image",
            attempt=self.attempt,
            shard=shard,
            task=task,
            key_groups=owned,
            key_group_states=key_group_states,
            opened=restored.opened,
            opened_inline=restored.opened_inline,
            full=self.mode == "full",
            inline_budget_bytes=inline_budget_bytes(self.parallelism),
            cache=open_cache(self.engine),
        )

    def _kept(self, shard: int, restored: RestoredShard, manifest: ShardManifest) -> ShardRef | None:
        """The ref to the file of the base's manifest with what has changed since, if that is all."""
        changes = self._changes(shard, restored, manifest) if len(self.base) == self.parallelism else None
        return None if changes is None else replace(self._base_ref(shard), changes=changes)

    def _changes(self, shard: int, restored: RestoredShard, manifest: ShardManifest) -> ShardChanges | None:
        ref = self._base_ref(shard)
        if restored.base is None or ref.manifest is None:
            return None
        return changes_since(ref.changes, restored.base, manifest)

    def _base_ref(self, shard: int) -> ShardRef:
        return next(ref for ref in self.base if ref.shard == shard)

    def _changelog_base(self, restored: RestoredShard, shard: int, owned: KeyGroupRange) -> ShardManifest | None:
        """What a segment can be added to: the base's manifest of the very same range, or nothing at all at the start. What was
        clipped or put together of several is in no files yet."""
        if self.mode != "changelog":
            return None
        if not self.base:
            return ShardManifest(
                shard=shard, key_groups=owned, files=(), inline_files=(), segments=(), key_group_states=()
            )
        return replace(restored.base, shard=shard) if restored.base is not None else None

    def _run_processor(
        self, inputs: InputBatches, state: ShardState, output: LocalParquet
    ) -> tuple[KeyedRunner | ArrowRunner, int]:
        """The processor after all input, and how many keys had any."""
        user_code = UserCode(self.interval, self.pipeline)
        if self.api == "arrow":
            columnar = ArrowRunner(
                self.processor,
                state,
                struct_of(self.key_schema),
                struct_of(self.input_schema),
                output,
                user_code,
                self._timer_values(self.time.watermark_ms),
            )
            columnar.process(inputs)
            return columnar, columnar.keys
        zone, frames = zone_of(self.zone), self.api == "pandas"
        slices_of = {
            kind: frame_slices(zone.name) if frames else row_slices(struct_of(schema))
            for kind, schema in ((INPUT, self.input_schema), (INITIAL, self.initial_schema))
            if schema is not None
        }
        keys = KeyCodec(parse_struct(self.key_schema), struct_factory=row_maker, zone=zone.rules)
        due_ms = (
            self.time.processing_time_ms if self.event_time is None else self.event_time.due_ms(self.interval.end_ms)
        )
        runner = KeyedRunner(
            self.processor,
            state,
            keys,
            OutputFrames(output, StructType.fromJson(self.output_schema), zone.name) if frames else OutputRows(output),
            user_code,
            time_mode=self.time.mode,
            timer_values=self._timer_values(self.time.watermark_ms),
            expired_values=self._timer_values(due_ms if self.event_time is not None else None),
            due_ms=due_ms,
        )
        rows = KeyedInput(
            inputs,
            KeyColumns(keys.schema),
            slices_of,
            state,
            key_values=key_values if frames else pa.Array.to_pylist,
            joined=whole_frames if frames else iter,
        )
        runner.process(rows)
        return runner, rows.keys

    def _timer_values(self, watermark_ms: int | None) -> TimerValues:
        """As Spark gives them: (-1, -1) without a clock, watermark 0 in processing time and before any event."""
        timed = self.time.mode != "none"
        return TimerValues(self.time.processing_time_ms, watermark_ms or 0) if timed else TimerValues(-1, -1)

    # --- once, when all shards have acked -----------------------------------------------------------------------------------------

    def finish(self, acks: list[ShardAck]) -> None:
        """Writes ``prepared.json``. Refuses acks that are not exactly one per shard."""
        acks = sorted(acks, key=lambda ack: ack.shard)
        if [ack.shard for ack in acks] != list(range(self.parallelism)):
            raise InvariantViolated(
                f"expected one ack of each of {self.parallelism} shards, got {[a.shard for a in acks]}"
            )
        expected_rows = self.source_position.get("counts", {}).get("rows")
        input_rows = sum(ack.input_rows for ack in acks)
        if expected_rows is not None and expected_rows != input_rows:
            raise SourceError(
                f"{self.pipeline} {self.interval}: the source counted {expected_rows} rows, but {input_rows} reached the "
                "processor; did the input change while it was read?"
            )
        storage = open_storage(self.root)
        previous = {ref.shard: ref for ref in self.base}
        check_whole([ack.summary.key_groups for ack in acks], self.max_parallelism)
        refs = self._refs(acks, previous, storage)
        outputs = tuple(file for ack in acks for file in (ack.output, ack.late) if file is not None)
        newest_event_us = max((ack.newest_event_us for ack in acks if ack.newest_event_us is not None), default=None)
        time_ = self.time
        if self.event_time is not None:
            time_ = self.event_time.recorded(time_, self.interval.end_ms, newest_event_us)
        content = Content(
            kind="interval",
            pipeline=self.pipeline,
            pipeline_start_ms=self.pipeline_start_ms,
            interval=self.interval,
            run=self.run,
            attempt=self.attempt,
            base_id=self.base_id,
            permissions=self.permissions,
            parallelism=self.parallelism,
            max_parallelism=self.max_parallelism,
            key_schema=self.key_schema,
            states=self.states,
            time=time_,
            source_position=self.source_position,
            code_hash=self.code_hash,
            totals=self._totals(acks, outputs),
            digest=sum(ack.summary.digest for ack in acks) % 2**64,
            shards=refs,
            outputs=outputs,
            durations_us={"plan": self.plan_us, **_slowest(acks)},
            worker_pids=tuple(ack.pid for ack in acks),
            retention=self.retention,
            output_schema=recorded_schema(self.output_schema),
        )
        files = [h for ack in acks if ack.manifest is not None for h in ack.manifest.handles]
        files += [*(ref.manifest for ref in refs if ref.manifest is not None), *(o.handle for o in outputs)]
        written = tuple(h for h in dict.fromkeys(files) if paths.attempt_of(h.path) == self.attempt)
        Coordinator(storage, self.pipeline).prepare(Prepared(h0=self.h0, content=content, written=written))

    def _refs(self, acks: list[ShardAck], previous: dict[int, ShardRef], storage: Storage) -> tuple[ShardRef, ...]:
        """What the record says of the shards. The file of a manifest that did not change is not read."""
        before = [previous.get(ack.shard) for ack in acks]
        known = [ack.manifest or (ref.inline if ref else None) for ack, ref in zip(acks, before, strict=True)]
        encoded = [record_codec.encode(m) if m is not None else b"" for m in known]
        if all(encoded) and sum(map(len, encoded)) <= INLINE_MANIFESTS_BYTES:
            return tuple(ShardRef(shard=m.shard, manifest=None, inline=m) for m in known if m is not None)
        refs = []
        for ack, ref, manifest, data in zip(acks, before, known, encoded, strict=True):
            kept = None
            if ref is not None and ref.manifest is not None and (ack.manifest is None or ack.changes is not None):
                kept = ref if ack.manifest is None else replace(ref, changes=ack.changes)
            new = kept if manifest is None else plan_ref(manifest, kept, self.parallelism)
            if new is None and manifest is not None and ack.in_segment is not None:
                last = manifest.segments[-1].handle
                new = ShardRef(shard=ack.shard, manifest=last, inline=None, in_segment=ack.in_segment)
            if new is None:
                handle = storage.create(paths.shared(self.attempt, ack.shard, 0, 0, "manifest"), data)
                new = ShardRef(shard=ack.shard, manifest=handle, inline=None)
            refs.append(new)
        return tuple(refs)

    def _totals(self, acks: list[ShardAck], outputs: tuple[OutputFile, ...]) -> Totals:
        entries: dict[str, int] = {}
        for ack in acks:
            for name, count in ack.summary.entries.items():
                entries[name] = entries.get(name, 0) + count
        values = [entries.get(d.name, 0) for d in self.states if d.kind == "value"]
        return Totals(
            input_rows=sum(a.input_rows for a in acks),
            output_rows=sum(o.rows for o in outputs if not o.late),
            late_rows=sum(o.rows for o in outputs if o.late),
            keys_touched=sum(a.keys_touched for a in acks),
            keys=max(values, default=0),
            entries=sum(entries.values()),
            changed_bytes=sum(a.changed_bytes for a in acks),
            uploaded_bytes=sum(a.uploaded_bytes for a in acks),
            uploaded_files=sum(a.uploaded_files for a in acks),
            downloaded_bytes=sum(a.downloaded_bytes for a in acks),
            cached_bytes=sum(a.cached_bytes for a in acks),
            state_bytes=sum(a.summary.size_bytes for a in acks),
            state_files=sum(a.summary.files for a in acks),
        )


def _slowest(acks: list[ShardAck]) -> dict[str, int]:
    """Microseconds of each phase on the shard where it took longest: shards run side by side."""
    return {
        phase: max(a.durations_us.get(phase, 0) for a in acks) for phase in ("restore", "process", "timers", "upload")
    }


class _StopWatch:
    def __init__(self) -> None:
        self.durations_us: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.monotonic_ns()
        try:
            yield
        finally:
            self.durations_us[name] = (time.monotonic_ns() - started) // 1000


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Python's collector looks at new objects by the hundreds, and now and then at all there are: with a batch of rows in
    hand and pandas imported that took two fifths of the time per key. Cycles in user code are still found, later."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
