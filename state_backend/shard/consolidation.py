"""Consolidation: a shard's files are merged on purpose, so that their number and bytes stay flat over a history of any length.

Every interval leaves one more sorted run of files, and in the older ones whatever it replaced. Two rules hold against that,
both carried out when the shard is captured, so that what they write is uploaded once:

1. More than ``most_sorted_runs``: the newest are merged, as many as cost least per run that goes. Such a merge writes little,
   but leaves the oldest run, and what is obsolete there.
2. More than ``most_obsolete_percent`` of the live bytes obsolete: the whole shard is rewritten. Shards that take the same load
   reach that limit together, so each waits for its turn, one interval in eight, and for its part of the budget of bytes; past
   a quarter more it waits for neither.

Live bytes are counted, for each key group, as records are written and deleted (``KeyGroupState.size_bytes``); RocksDB counts
the bytes of its files in the same way, before compression. The difference is obsolete: what was replaced, what was deleted, and
the deletions themselves.

Neither begins without room for its output on the local disk; nothing is lost by waiting but bytes and time.

Source: sorted runs and merges of the newest ones are RocksDB's universal compaction. Left to itself it picks by size alone,
for all shards at once: it uploaded 3.6 times the changed bytes over 300 batches, where leveled compaction took 13.6.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from state_backend.adapters.rocks import EngineOptions, RocksStore, SortedRun
from state_backend.state.layout import key_group_bounds, record_bytes
from state_backend.values.records import KeyGroupState

TURNS = 8
# A merge of w runs that writes b bytes costs b / (w - 1) ** _WIDTH_BIAS. Cost alone (1.0) would go for two small runs again and
# again; with 1.3 to 1.4 a history of 70 to 110 equal batches above its oldest run was rewritten least, for 12 runs 1.1 times.
_WIDTH_BIAS = 1.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Consolidation:
    """How many of the newest runs to merge (0: none), and at most how many bytes that writes. ``whole``: that is all of them, so
    that the shard is rewritten and nothing obsolete stays. ``put_off`` says what a merge
    that is due still waits for."""

    merged_runs: int
    written_bytes: int
    whole: bool = False
    put_off: Literal["turn", "budget", "disk"] | None = None


_NOTHING = Consolidation(merged_runs=0, written_bytes=0)


def plan_consolidation(
    runs: Sequence[SortedRun],
    *,
    live_raw_bytes: int,
    ranges_deleted: bool,
    options: EngineOptions,
    shard: int,
    parallelism: int,
    sequence: int,
    free_bytes: int,
) -> Consolidation:
    """What to merge of a shard's runs, newest first. ``live_raw_bytes``: what all live records take before compression;
    ``ranges_deleted``: the files hold a deleted range; ``sequence`` counts intervals; ``free_bytes`` is the room on the local
    disk."""
    if len(runs) < 2:
        return _NOTHING
    turns = min(TURNS, parallelism)
    budget_bytes = options.consolidation_bytes // -(-parallelism // turns)
    total_bytes = sum(run.size_bytes for run in runs)
    rewritten_bytes = min(live_bytes(runs, live_raw_bytes), total_bytes)
    obsolete = total_bytes - rewritten_bytes
    put_off: Literal["turn", "budget", "disk"] | None = None
    if (
        not ranges_deleted or _is_paid(runs, options)
    ) and obsolete * 100 >= options.most_obsolete_percent * rewritten_bytes:
        urgent = obsolete * 80 >= options.most_obsolete_percent * rewritten_bytes
        if total_bytes > free_bytes:
            put_off = "disk"
        elif not urgent and sequence % turns != shard % turns:
            put_off = "turn"
        elif not urgent and rewritten_bytes > budget_bytes:
            put_off = "budget"
        else:
            return Consolidation(merged_runs=len(runs), written_bytes=rewritten_bytes, whole=True)
    if len(runs) <= options.most_sorted_runs:
        return Consolidation(merged_runs=0, written_bytes=0, put_off=put_off)
    # Far too many runs cost every read: then a merge past the budget is the lesser evil.
    allowed_bytes = budget_bytes if len(runs) <= 2 * options.most_sorted_runs else total_bytes
    written, cheapest = 0, (0.0, 0, 0)
    for width, run in enumerate(runs, 1):
        written += run.size_bytes
        if written > min(allowed_bytes, free_bytes):
            break
        if width > 1:
            cost = written / (width - 1) ** _WIDTH_BIAS
            cheapest = min(cheapest, (cost, width, written)) if cheapest[1] else (cost, width, written)
    if not cheapest[1]:
        put_off = "disk" if written > free_bytes else "budget"
    _, width, written = cheapest
    return Consolidation(merged_runs=width, written_bytes=written, whole=width == len(runs), put_off=put_off)


def live_bytes(runs: Sequence[SortedRun], live_raw_bytes: int) -> int:
    """About how many bytes a shard's files would have after a rewriting.

    The live records are compressed as far as the oldest run is, since after a rewriting that run is the whole shard; or as far as
    all runs are, where that is further. If either misleads, because the live records are of another kind than most of the files,
    the shard is rewritten too early once, and from then on its oldest run tells the truth."""
    oldest, size_bytes = runs[-1], sum(run.size_bytes for run in runs)
    density = min(size_bytes / max(sum(run.raw_bytes for run in runs), 1), oldest.size_bytes / max(oldest.raw_bytes, 1))
    return int(live_raw_bytes * density)


def _is_paid(runs: Sequence[SortedRun], options: EngineOptions) -> bool:
    """Whether changes since the last rewriting are a fair part of what it writes. A shard that was split holds the files of both
    halves: to rewrite all shards at once for that would upload the whole state in one interval."""
    oldest, newer = runs[-1], runs[:-1]
    deleted_bytes = sum(run.deletions for run in newer) * oldest.size_bytes / max(oldest.entries, 1)
    changed_bytes = sum(run.size_bytes for run in newer) + deleted_bytes
    return changed_bytes * 400 >= options.most_obsolete_percent * oldest.size_bytes


def most_bytes(store: RocksStore, key_groups: Sequence[KeyGroupState], options: EngineOptions) -> int | None:
    """The most bytes that files and segments of a shard may take together: past them its rewriting waits for nothing. None: not
    known, since not all key groups are counted, or there is no file yet; or a deleted range waits for more changes, so that to write
    files would not lead to a rewriting."""
    sizes = [s.size_bytes for s in key_groups]
    runs = store.sorted_runs(flushed=False)
    if None in sizes or not runs or (store.range_deletions() and not _is_paid(runs, options)):
        return None
    return live_bytes(runs, sum(size or 0 for size in sizes)) * (80 + options.most_obsolete_percent) // 80


def counted(store: RocksStore, key_groups: Sequence[KeyGroupState]) -> tuple[KeyGroupState, ...]:
    """The same with the bytes of each key group. Those that an older version wrote are read whole for that, once."""
    return tuple(
        s if s.size_bytes is not None else replace(s, size_bytes=_scanned(store, s.key_group)) for s in key_groups
    )


def _scanned(store: RocksStore, key_group: int) -> int:
    return sum(record_bytes(key, data) for key, data in store.scan(*key_group_bounds(key_group, key_group)))


def consolidate(
    store: RocksStore,
    *,
    key_groups: Sequence[KeyGroupState],
    options: EngineOptions,
    shard: int,
    parallelism: int,
    sequence: int,
) -> Consolidation:
    """Merges what is due, and returns what that was. Flushes the store. ``key_groups``: of all the store's state, ``counted``."""
    runs = store.sorted_runs()
    plan = plan_consolidation(
        runs,
        live_raw_bytes=sum(s.size_bytes or 0 for s in key_groups),
        ranges_deleted=store.range_deletions() > 0,
        options=options,
        shard=shard,
        parallelism=parallelism,
        sequence=sequence,
        free_bytes=shutil.disk_usage(store.directory).free,
    )
    if plan.whole:
        store.compact()
    elif plan.merged_runs:
        store.merge_newest(plan.merged_runs)
    return plan
