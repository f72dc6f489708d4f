"""State that was somebody else's becomes a pipeline's: rows of all states, placed by key, are written to shards, then *prepared*.

A row brings all of one key's state of one kind, so that nothing depends on the order in which rows come:

    __key_group int | state int | key struct | entries_<n> array<struct<[user_key struct,] value struct, expires_at_ms long>>
    | timers array<long>, ascending

``state`` is n, the place of the state in ``states``, whose column alone is filled; -1: the timers'. Null: a tick.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.shard_jobs.interval import rare_garbage_collection
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.rocks import SST_SUFFIX, EngineOptions, RocksStore
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.formats.spark_hash import key_groups as key_groups_of
from state_backend.formats.types import parse_struct
from state_backend.shard.canonical_files import EntryWriter
from state_backend.shard.manifest import write_manifests
from state_backend.shard.restore import check_whole
from state_backend.shard.snapshot import Snapshot, inline_budget_bytes, take_snapshot
from state_backend.state.canonical_columns import StateRows, TimerRows
from state_backend.values.errors import InvariantViolated
from state_backend.values.key_groups import range_of
from state_backend.values.records import Content, Prepared, Totals

TIMERS = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportAck:
    """A shard that is there."""

    shard: int
    snapshot: Snapshot
    rows: int
    duration_us: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportTask:
    """Travels to the workers. ``content``: the record's, without what only the shards can say; ``source``: what rows are called in
    errors."""

    root: str
    source: str
    h0: int
    content: Content
    engine: EngineOptions

    def run_shard(self, batches: Iterator[pa.RecordBatch], shard: int, task: int) -> ImportAck:
        """Makes one shard. On disk if it stops: files of the attempt that no record names."""
        started_ns = time.monotonic_ns()
        content = self.content
        owned = range_of(shard, content.parallelism, content.max_parallelism)
        key_schema = parse_struct(content.key_schema)
        with (
            rare_garbage_collection(),
            work_folder(f"import-{shard}") as work,
            RocksStore(work / "db", self.engine) as store,
        ):
            writer = EntryWriter(store, content.states, key_schema, owned, content.max_parallelism)
            readers: list[Any] = [StateRows(descriptor, key_schema) for descriptor in content.states]
            readers.append(TimerRows(key_schema))  # the place -1
            rows = 0
            for batch in batches:
                table = pa.Table.from_batches([batch])
                for n in pc.unique(table["state"].drop_null()).to_pylist():
                    mine = table.filter(pc.equal(table["state"], n))
                    rows += mine.num_rows
                    self._take(writer, readers[n], n, mine)
            snapshot = take_snapshot(
                store,
                open_storage(self.root),
                image=work / "image",
                attempt=content.attempt,
                shard=shard,
                task=task,
                key_groups=owned,
                key_group_states=writer.state.key_group_states(),
                opened=(),
                opened_inline=frozenset(),
                full=True,
                inline_budget_bytes=inline_budget_bytes(content.parallelism),
            )
        duration_us = (time.monotonic_ns() - started_ns) // 1000
        return ImportAck(shard=shard, snapshot=snapshot, rows=rows, duration_us=duration_us, pid=os.getpid())

    def _take(self, writer: EntryWriter, reader: StateRows | TimerRows, n: int, rows: pa.Table) -> None:
        held = rows["timers" if n == TIMERS else f"entries_{n}"].combine_chunks()
        lengths = pc.list_value_length(held).to_numpy(zero_copy_only=False)
        items, first = held.flatten(), np.cumsum(lengths) - lengths
        count = np.repeat(lengths, lengths)
        columns = {
            "key": rows["key"].combine_chunks().take(pa.array(np.repeat(np.arange(len(held)), lengths))),
            "position": pa.array(np.arange(len(items)) - np.repeat(first, lengths)),
            "next_position": pa.array(count),
            "key_group": pa.array(np.zeros(len(items), np.int32)),
        }
        if n == TIMERS:
            columns["expires_at_ms"] = items
        else:
            columns |= dict(zip((f.name for f in items.type), items.flatten(), strict=True))
            version = self.content.states[n].versions[-1].version
            columns["schema_version"] = pa.array(np.full(len(items), version, np.int32))
        table = pa.table(
            [columns[name].cast(reader.schema.field(name).type) for name in reader.schema.names], reader.schema
        )
        if not len(table):
            return
        groups = key_groups_of(
            reader.keys_of(table), parse_struct(self.content.key_schema), self.content.max_parallelism
        )
        if (groups != np.repeat(np.asarray(rows["__key_group"].combine_chunks()), lengths)).any():
            raise InvariantViolated(f"{self.source}: rows came to shards that are not their keys'")
        located, every = reader.located(table), np.ones(len(items), np.bool_)
        if n == TIMERS:
            writer.put_timers(located, groups, every)
        else:
            writer.put_entries(self.content.states[n], located, groups, every)

    def finish(self, acks: list[ImportAck]) -> None:
        """Writes ``prepared.json``."""
        acks = sorted(acks, key=lambda ack: ack.shard)
        if [ack.shard for ack in acks] != list(range(self.content.parallelism)):
            raise InvariantViolated(f"expected an ack of each of {self.content.parallelism} shards, got {len(acks)}")
        storage = open_storage(self.root)
        manifests = [ack.snapshot.manifest for ack in acks]
        check_whole([m.key_groups for m in manifests], self.content.max_parallelism)
        entries: dict[str, int] = {}
        for state in (s for m in manifests for s in m.key_group_states):
            for name, count in state.entries.items():
                entries[name] = entries.get(name, 0) + count
        values = [entries.get(d.name, 0) for d in self.content.states if d.kind == "value"]
        totals = Totals(
            input_rows=0,
            output_rows=0,
            late_rows=0,
            keys_touched=0,
            keys=max(values, default=0),
            entries=sum(entries.values()),
            changed_bytes=0,
            uploaded_bytes=sum(ack.snapshot.uploaded_bytes for ack in acks),
            uploaded_files=sum(ack.snapshot.uploaded_files for ack in acks),
            state_bytes=sum(m.size_bytes for m in manifests),
            state_files=sum(len(m.files) + sum(f.name.endswith(SST_SUFFIX) for f in m.inline_files) for m in manifests),
        )
        content = replace(
            self.content,
            totals=totals,
            digest=sum(m.digest for m in manifests) % 2**64,
            shards=write_manifests(manifests, self.content.attempt, storage),
            durations_us={"import": max(ack.duration_us for ack in acks)},
            worker_pids=tuple(ack.pid for ack in acks),
        )
        Coordinator(storage, content.pipeline).prepare(Prepared(h0=self.h0, content=content))
