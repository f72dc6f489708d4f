"""Import the state of another system: write rows of all states to shards, then write `prepared.json`.

The rows are placed in shards by key. A row has all entries of one key in one state, so the rows need no order. Their
columns:

    __key_group int | state int | key struct
    | entries_<n> array<struct<[user_key struct,] value struct, expires_at_ms long>>
    | timers array<long>, ascending

`state` is the position n of the state in `content.states`, and only the column `entries_<n>` is filled. `state` is -1
for timers, and null for a tick (the row that starts a shard's task).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.shard_jobs.acks import ack_of
from cairn.shard_jobs.run_on_shards import JobOnContent, StopWatch, rare_garbage_collection
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.rocks import EngineOptions, RocksStore
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.prepare_content import ShardAck
from state_backend.formats.key_columns import key_groups as key_groups_of
from state_backend.formats.types import parse_struct
from state_backend.shard.canonical_files import EntryWriter
from state_backend.shard.snapshot import inline_budget_bytes, take_snapshot
from state_backend.state.canonical_columns import StateRows, TimerRows, keys_of
from state_backend.values.errors import InvariantViolated
from state_backend.values.frozen import frozen
from state_backend.values.key_groups import range_of

TIMERS = -1


@frozen
class ImportJob(JobOnContent):
    """Job that writes imported rows to shards."""

    root: str
    source: str
    engine: EngineOptions

    def run_shard(self, batches: Iterator[pa.RecordBatch], shard: int, task: int) -> ShardAck:
        """Write a shard with the imported rows, in a Spark task. If the task stops, no record names its files."""
        clock, content = StopWatch(), self.content
        owned = range_of(shard, content.parallelism, content.max_parallelism)
        key_schema = parse_struct(content.key_schema)
        with (
            rare_garbage_collection(),
            clock.phase("import", "importing the state of a streaming query"),
            work_folder(f"import-{shard}") as work,
            RocksStore(work / "db", self.engine) as store,
        ):
            writer = EntryWriter(store, key_schema, owned, content.max_parallelism)
            readers: list[Any] = [StateRows(descriptor, key_schema) for descriptor in content.states]
            readers.append(TimerRows(key_schema))  # This reader has the index -1, the value of `TIMERS`.
            for batch in batches:
                table = pa.Table.from_batches([batch])
                for n in pc.unique(table["state"].drop_null()).to_pylist():
                    mine = table.filter(pc.equal(table["state"], n))
                    self._take(writer, readers[n], n, mine)
            snapshot = take_snapshot(
                store,
                open_storage(self.root),
                image=work / "image",
                attempt=content.attempt,
                shard=shard,
                task=task,
                key_groups=owned,
                key_group_states=writer.stored.accounts.states(),
                inline_budget_bytes=inline_budget_bytes(content.parallelism),
            )
        return ack_of(shard, snapshot, None, clock.durations_us)

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
        groups = key_groups_of(keys_of(table), parse_struct(self.content.key_schema), self.content.max_parallelism)
        if (groups != np.repeat(np.asarray(rows["__key_group"].combine_chunks()), lengths)).any():
            raise InvariantViolated(f"{self.source}: rows reached shards that do not own the rows' keys")
        located, every = reader.to_entries(table), np.ones(len(items), np.bool_)
        if n == TIMERS:
            writer.put_timers(located, groups, every)
        else:
            writer.put_entries(self.content.states[n], located, groups, every)
