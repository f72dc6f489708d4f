"""Process one interval on each shard, and write `prepared.json` with the results of all shards.

Each Spark task: restore -> process -> fire timers -> expire -> flush the store to files -> upload -> ack. The driver,
once all tasks have ended: all acks -> prepared.json. In changelog mode, a task uploads a segment instead of files.

If a task stops, it leaves a local folder, and files that no record names. If Spark runs a task twice, each run writes
under other names, and only the successful run's ack counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import TimerValues

from cairn.rows.forgotten_rows import ForgottenRows
from cairn.rows.input_batches import InputBatches
from cairn.rows.output_file import LocalParquet
from cairn.rows.routing import INITIAL, INPUT
from cairn.rows.watermark import EventTime
from cairn.runners.arrow_runner import ArrowRunner
from cairn.runners.input_rows import KeyedInput, row_slices
from cairn.runners.keyed_runner import KeyedRunner
from cairn.runners.output_rows import OutputRows
from cairn.runners.output_schema import arrow_schema
from cairn.runners.pandas_frames import OutputFrames, frame_slices, key_values, whole_frames
from cairn.runners.processor_handle import Clock, InputColumns, row_maker
from cairn.runners.user_code import UserCode
from cairn.shard_jobs.acks import ack_of
from cairn.shard_jobs.run_on_shards import JobOnContent, StopWatch, rare_garbage_collection
from cairn.shipping.ship_processor import ShippedProcessor
from cairn.spark_versions import struct_of
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.rocks import EngineOptions
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.forgotten_keys import Returning, is_key
from state_backend.checkpoint.location import Location
from state_backend.checkpoint.prepare_content import ShardAck, prepare, slowest
from state_backend.formats import paths
from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.key_columns import KeyColumns
from state_backend.formats.types import parse_struct
from state_backend.ports.storage import Storage
from state_backend.shard.changelog_store import ChangelogOptions, ShardChangelog
from state_backend.shard.consolidation import consolidate, count_bytes, most_bytes
from state_backend.shard.file_cache import damage_of_copies, open_cache
from state_backend.shard.manifest import may_hold_group, needed_manifest
from state_backend.shard.restore import RestoredShard, restore_shard
from state_backend.shard.rewrite_shard import rewrite_without
from state_backend.shard.snapshot import Snapshot, inline_budget_bytes, take_snapshot
from state_backend.state.expiry import expire
from state_backend.state.forget_keys import find_keys
from state_backend.state.shard_state import ShardState
from state_backend.values.errors import InvariantViolated, ProcessorError, SourceError
from state_backend.values.frozen import frozen
from state_backend.values.key_groups import KeyGroupRange, range_of
from state_backend.values.records import LogicalTime, Prepared, ShardManifest, ShardRef, StateDescriptor
from state_backend.values.zones import local_zone, zone_of


@frozen
class Computed:
    """The result of the processor on one shard, besides the changed state."""

    inputs: InputBatches  # The rows that were read, with their counts and newest event time.
    keys: int  # Number of keys that had input.
    output: LocalParquet
    late: LocalParquet  # The late rows.


@frozen
class ShardTask:
    shard: int
    task: int  # Id of the Spark task, which makes the names of its files unique.
    owned: KeyGroupRange
    storage: Storage
    work: Path
    clock: StopWatch


@frozen
class IntervalJob(JobOnContent):
    """Job that processes one interval. The driver sends the job to the workers, with the processor in it.

    `content` is the content of the attempt before its shards run: no shards, no output, no counts.
    """

    root: str
    h0: int  # The highest id in the log when the attempt began.
    base: tuple[ShardRef, ...]  # The shards of the base checkpoint.
    # Number of shards of the base checkpoint; 0 if the interval starts from empty state.
    base_parallelism: int
    mode: str
    api: Literal["row", "pandas", "arrow"]
    on_type_mismatch: Literal["error", "null"]
    input_schema: dict[str, Any]
    # The schema of the rows of initial state; None if the interval reads none.
    initial_schema: dict[str, Any] | None
    output_schema: dict[str, Any]
    dropped: tuple[StateDescriptor, ...]  # The states that the processor's `init` deletes.
    # The event-time column, and the watermarks that decide which rows are late and which timers fire; None unless the
    # time mode is "event".
    event_time: EventTime | None
    order_by: tuple[str, ...]
    processor: ShippedProcessor
    engine: EngineOptions
    changelog: ChangelogOptions
    returning: tuple[Returning, ...] = ()  # Forgotten keys that the base's state or the input may bring back.

    @property
    def zone(self) -> str:
        return self.content.time.zone or "UTC"

    def refs_of(self, shard: int) -> tuple[ShardRef, ...]:
        owned, count = range_of(shard, self.parallelism, self.max_parallelism), self.base_parallelism
        return tuple(r for r in self.base if range_of(r.shard, count, self.max_parallelism).intersect(owned))

    def with_refs(self, refs: tuple[ShardRef, ...]) -> IntervalJob:
        return replace(self, base=refs)

    def run_shard(self, batches: Iterator[pa.RecordBatch], shard: int, task: int) -> ShardAck:
        with self.open_shard(shard, task) as (restored, at):
            return self.process(batches, restored, at)

    @contextmanager
    def open_shard(self, shard: int, task: int) -> Iterator[tuple[RestoredShard, ShardTask]]:
        """Restore the shard from the base checkpoint, in a work folder that exists during the block."""
        storage = open_storage(self.root)
        owned = range_of(shard, self.parallelism, self.max_parallelism)
        clock = StopWatch()
        cache = open_cache(self.engine)
        manifests: list[ShardManifest] = []
        with (
            rare_garbage_collection(),
            local_zone(zone_of(self.zone)),
            work_folder(f"{self.content.pipeline}-{shard}") as work,
            damage_of_copies(cache, storage.url, manifests),
        ):
            with clock.phase(
                "restore",
                f"restoring from checkpoint {self.content.base_id}" if self.content.base_id else "opening empty state",
            ):
                manifests += [needed_manifest(ref, storage) for ref in self.refs_of(shard)]
                restored = restore_shard(owned, manifests, storage, work / "db", self.engine, cache)
                restored = self._without_forgotten(restored, owned, work)
            try:
                yield restored, ShardTask(shard=shard, task=task, owned=owned, storage=storage, work=work, clock=clock)
            finally:
                restored.store.close()

    def _without_forgotten(self, restored: RestoredShard, owned: KeyGroupRange, work: Path) -> RestoredShard:
        """Rewrite the shard's files without forgotten keys if the base may hold such keys; else return `restored`.

        To delete the keys' entries in RocksDB would not suffice: the base's files would still contain the entries, and
        the new checkpoint would share the files. After a change of the parallelism, so may the files of other shards.
        """
        states, schema = (*self.dropped, *self.content.states), parse_struct(self.content.key_schema)
        keys: set[tuple[int, bytes]] = set()
        concerned = False
        for forgotten in (r.key for r in self.returning if r.base):
            groups = [s.key_group for s in restored.key_group_states]
            if forgotten.max_parallelism == self.max_parallelism:
                groups = [forgotten.key_group] if forgotten.key_group in owned else []
                concerned |= restored.opened is not None and may_hold_group(restored.opened, forgotten.key_group)
            concerned |= bool(groups)
            for group in groups:
                found = find_keys(restored.store, states, schema, group, partial(is_key, forgotten))
                keys |= {(group, key) for key in found}
        if not concerned:
            return restored
        return rewrite_without(restored, owned, states, keys, work / "db-without", self.engine)[0]

    def open_state(self, restored: RestoredShard) -> ShardState:
        """Return the state of a restored shard, without the states that the processor's `init` deletes."""
        state = ShardState(
            restored.store,
            key_groups=restored.key_group_states,
            descriptors=self.content.states,
            now_ms=self.content.time.processing_time_ms,
            struct_factory=row_maker,
            zone=zone_of(self.zone).rules,
            nulls_for_misfits=self.on_type_mismatch == "null",
        )
        for descriptor in self.dropped:
            state.stored.drop(descriptor)
        return state

    def process(self, batches: Iterator[pa.RecordBatch], restored: RestoredShard, at: ShardTask) -> ShardAck:
        """Process the interval on a restored shard, upload its checkpoint and output, and return the shard's ack."""
        changelog = self._changelog(restored, at)
        state = self.open_state(restored)
        computed = self.compute(batches, state, at.owned, at.work, at.clock)
        inputs = computed.inputs
        same_layout = self.base_parallelism == self.parallelism
        snapshot: Snapshot | None = None
        with at.clock.phase("upload", "taking the checkpoint"):
            path, late_path = (
                paths.output(self.content.interval, self.content.attempt, at.shard, at.task, late=late)
                for late in (False, True)
            )
            output_file = computed.output.finish(at.storage, path)
            late_file = computed.late.finish(at.storage, late_path, late=True)
            if state.stored.changed_bytes or not same_layout or self.mode == "full" or restored.base is None:
                snapshot = self._snapshot(restored, state, changelog, at)
        return replace(
            ack_of(at.shard, snapshot, restored.base, at.clock.durations_us, restored),
            outputs=tuple(file for file in (output_file, late_file) if file is not None),
            newest_event_us=inputs.newest_event_us,
            input_rows=inputs.input_rows,
            keys_touched=computed.keys,
            changed_bytes=state.stored.changed_bytes,
            mismatches=state.mismatches.as_mapping() if state.mismatches is not None else {},
        )

    def compute(
        self, batches: Iterator[pa.RecordBatch], state: ShardState, owned: KeyGroupRange, work: Path, clock: StopWatch
    ) -> Computed:
        """Run the processor over all input, fire due timers, and delete expired entries. Write only local files."""
        output = LocalParquet(arrow_schema(self.output_schema), work / "output.parquet")
        late = LocalParquet(arrow_schema(self.input_schema), work / "late.parquet")
        forgotten = [r.key for r in self.returning if r.rows]
        key_schema = parse_struct(self.content.key_schema)
        filter_ = ForgottenRows(forgotten, key_schema, self.max_parallelism) if forgotten else None
        inputs = InputBatches(batches, owned, self.event_time, late, filter_)
        with clock.phase("process", "processing rows"):
            runner, keys = self._run_processor(inputs, state, output)
        if inputs.ticks != 1:
            raise InvariantViolated(
                f"the shard of {owned} got {inputs.ticks} ticks instead of 1: Spark did not place each shard in a partition of its own"
            )
        with clock.phase("timers", "firing timers"):
            runner.fire_timers()
            runner.close()
            expire(state)
        return Computed(inputs=inputs, keys=keys, output=output, late=late)

    def _snapshot(
        self, restored: RestoredShard, state: ShardState, changelog: ShardChangelog | None, at: ShardTask
    ) -> Snapshot:
        key_group_states, attempt = state.key_group_states(), self.content.attempt
        if changelog and changelog.fits(most_bytes(restored.store, key_group_states, self.engine)):
            return changelog.append(at.storage, attempt=attempt, task=at.task, key_group_states=key_group_states)
        with at.clock.phase("consolidate", "merging files"):
            key_group_states = count_bytes(restored.store, key_group_states)
            consolidate(
                restored.store,
                key_groups=key_group_states,
                options=self.engine,
                shard=at.shard,
                parallelism=self.parallelism,
                sequence=self.h0,
            )
        return take_snapshot(
            restored.store,
            at.storage,
            image=at.work / "image",
            attempt=attempt,
            shard=at.shard,
            task=at.task,
            key_groups=at.owned,
            key_group_states=key_group_states,
            opened=restored.opened if self.mode != "full" else None,
            inline_budget_bytes=inline_budget_bytes(self.parallelism),
            cache=open_cache(self.engine),
        )

    def _changelog(self, restored: RestoredShard, at: ShardTask) -> ShardChangelog | None:
        """Return the recorder that writes the shard's changes as a segment; None if the shard must upload SSTs instead.

        A segment can follow only a base manifest with the same key groups, or a shard that starts empty. After a change
        of parallelism, no manifest describes the store, which was put together from parts of other shards: so the
        method returns None. In other modes than "changelog" it returns None too.
        """
        base, ref = restored.base, None
        if not self.base_parallelism:
            base = ShardManifest(
                shard=at.shard, key_groups=at.owned, files=(), inline_files=(), segments=(), key_group_states=()
            )
        elif self.base_parallelism == self.parallelism:
            ref = next(ref for ref in self.base if ref.shard == at.shard)
        if self.mode != "changelog" or base is None:
            return None
        return ShardChangelog(
            restored.store,
            replace(base, shard=at.shard),
            at.work / "changes",
            self.changelog,
            base_ref=ref,
            parallelism=self.parallelism,
        )

    def _run_processor(
        self, inputs: InputBatches, state: ShardState, output: LocalParquet
    ) -> tuple[KeyedRunner | ArrowRunner, int]:
        """Run the processor over all input. Return (its runner, number of keys that had input)."""
        offers_null = self.api != "arrow" and self.on_type_mismatch == "error"
        user_code = UserCode(self.content.interval, self.content.pipeline, offers_null=offers_null)
        due_ms = (
            self.content.time.processing_time_ms
            if self.event_time is None
            else self.event_time.due_ms(self.content.interval.end_ms)
        )
        clock = Clock(
            mode=self.content.time.mode,
            now=self._timer_values(self.content.time.watermark_ms),
            expired=self._timer_values(due_ms if self.event_time is not None else None),
            due_ms=due_ms,
        )
        if self.api == "arrow":
            columns = InputColumns(
                key_schema=struct_of(self.content.key_schema),
                input_schema=struct_of(self.input_schema),
                event_time=None if self.event_time is None else self.event_time.column,
                late_ms=None if self.event_time is None else self.event_time.late_ms,
                order_by=self.order_by,
            )
            columnar = ArrowRunner(self.processor, state, columns, output, user_code, clock, zone_of(self.zone).rules)
            columnar.process(inputs)
            return columnar, columnar.keys
        zone, frames = zone_of(self.zone), self.api == "pandas"
        slices_of = {
            kind: frame_slices(zone.name) if frames else row_slices(struct_of(schema))
            for kind, schema in ((INPUT, self.input_schema), (INITIAL, self.initial_schema))
            if schema is not None
        }
        keys = KeyCodec(parse_struct(self.content.key_schema), struct_factory=row_maker, zone=zone.rules)
        runner = KeyedRunner(
            self.processor,
            state,
            keys,
            OutputFrames(output, struct_of(self.output_schema), zone.name)
            if frames
            else OutputRows(output, zone.rules),
            user_code,
            clock,
        )
        rows = KeyedInput(
            inputs,
            KeyColumns(keys.schema),
            slices_of,
            state,
            key_values=key_values if frames else pa.Array.to_pylist,
            joined=whole_frames if frames else iter,
            refused=self._refusal,
        )
        runner.process(rows)
        return runner, rows.keys

    def _refusal(self, value: str) -> ProcessorError:
        """Return the error about an input value (`value`, in words) that the processor's form (`api`) can't hold."""
        holds = f"Python holds the years 1 to 9999 only, in the time zone {self.zone!r}"
        forms = "the Arrow form (api='arrow')"
        if self.api == "pandas":
            holds = "pandas holds instants of the years 1678 to 2261 only"
            forms = f"the row form (api='row') or {forms}"
        return ProcessorError(
            f"pipeline {self.content.pipeline!r}: {value}, interval {self.content.interval}: {holds}\n"
            f"Use {forms}, or convert the column in the source, for example to a text"
        )

    def _timer_values(self, watermark_ms: int | None) -> TimerValues:
        """Return the times that the processor sees, as `TimerValues`. Both are -1 if the time mode is "none"."""
        timed = self.content.time.mode != "none"
        return TimerValues(self.content.time.processing_time_ms, watermark_ms or 0) if timed else TimerValues(-1, -1)

    def time_after(self, newest_event_us: int | None) -> LogicalTime:
        """Return the times that the checkpoint records. `newest_event_us`: The rows' newest event time, if any."""
        time_ = self.content.time
        if self.event_time is None:
            return time_
        return self.event_time.advance(time_, self.content.interval.end_ms, newest_event_us)

    def finish(self, at: Location, acks: list[ShardAck], plan_us: int = 0, spark_us: int = 0) -> Prepared:
        content = self.content
        expected_rows = content.source_position.get("counts", {}).get("rows")
        input_rows = sum(ack.input_rows for ack in acks)
        if expected_rows is not None and expected_rows != input_rows:
            raise SourceError(
                f"{content.pipeline} {content.interval}: the source counted {expected_rows} rows, but {input_rows} reached the "
                "processor\nThe input may have changed while it was read. Run the interval again"
            )
        newest_event_us = max((ack.newest_event_us for ack in acks if ack.newest_event_us is not None), default=None)
        # The time that the slowest shard did not use is Spark's: Spark plans the query, waits for cores, shuffles, and
        # fetches the acks.
        durations_us = {"plan": plan_us, "spark": max(0, spark_us - sum(slowest(acks).values()))}
        made = replace(content, time=self.time_after(newest_event_us), durations_us=durations_us)
        return prepare(at, made, acks, h0=self.h0, base=self.base)
