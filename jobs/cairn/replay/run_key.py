"""Run the processor for one key, over a store that holds only this key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from cairn.replay.trace import Call, Trace, TracedFactory
from cairn.shard_jobs.interval import IntervalJob
from cairn.shard_jobs.run_on_shards import StopWatch
from cairn.shipping.ship_processor import processor_on_driver
from state_backend.adapters.rocks import EngineOptions, RocksStore
from state_backend.checkpoint.forgotten_keys import is_key
from state_backend.inspection.key_entries import KeyEntries, SearchedKey, Stored, entries_in, entries_of
from state_backend.shard.restore import RestoredShard
from state_backend.state import layout
from state_backend.values.frozen import frozen
from state_backend.values.key_groups import range_of
from state_backend.values.records import KeyGroupState
from state_backend.values.zones import local_zone, zone_of


@dataclass(frozen=True, slots=True)
class InProcess:
    """A factory of processors for shards that run in this process.

    A Spark worker would import the processor's modules anew. This factory uses the modules that this process has
    imported, including what a test has patched in them.
    """

    processor: Any
    pipeline: str

    def __call__(self) -> Any:
        return processor_on_driver(self.processor, self.pipeline)


@frozen
class KeyRun:
    calls: list[Call]
    entries: KeyEntries
    output: pa.Table
    late: pa.Table


def run_key(
    job: IntervalJob,
    processor: Any,
    batches: Sequence[pa.RecordBatch],
    base: KeyEntries,
    key: SearchedKey,
    work: Path,
    *,
    made: Callable[[Any], None] = lambda processor: None,
) -> KeyRun:
    """Run the processor for one key as a shard's task does. `base`: The key's entries. `made`: Gets the processor."""
    trace = Trace()
    factory: Any = TracedFactory(processor, job.content.pipeline, trace, made)
    job = replace(job, processor=factory)
    if any(r.base and is_key(r.key, key.encoded) for r in job.returning):
        base = entries_of(key, job.content.states, ())
    with local_zone(zone_of(job.zone)), closing(RocksStore(work / "db", EngineOptions(cache_dir=None))) as store:
        store.write([*base.stored, *((index, b"") for index in index_keys(base.stored))])
        restored = RestoredShard(store=store, key_group_states=(counts_of(base, key.group),))
        owned = range_of(0, 1, job.max_parallelism)
        computed = job.compute(iter(batches), job.open_state(restored), owned, work, StopWatch())
        return KeyRun(
            calls=trace.calls,
            entries=entries_in(store, key, job.content.states),
            output=computed.output.read(),
            late=computed.late.read(),
        )


def index_keys(stored: Sequence[Stored]) -> list[bytes]:
    """Return the keys of the entries in RocksDB that index these `stored` entries by time: timers and expiring ones."""
    found = []
    for stored_key, entry in stored:
        if stored_key[2] == layout.TIMERS:
            found.append(layout.timer_index_key(stored_key))
        elif not layout.is_positions(entry) and (index_key := layout.expiry_key(stored_key, entry)) is not None:
            found.append(index_key)
    return found


def counts_of(entries: KeyEntries, group: int) -> KeyGroupState:
    """Return the number of the key's entries per state, as for a key group. The digest is 0: nothing compares it."""
    names = {d.state_id: d.name for d in entries.states.values()} | {layout.TIMERS: layout.TIMERS_NAME}
    found = [
        names[key[2]] for key, entry in entries.stored if key[2] == layout.TIMERS or not layout.is_positions(entry)
    ]
    return KeyGroupState(key_group=group, entries=dict(Counter(found)), digest=0)
