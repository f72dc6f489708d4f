"""Consolidation: merge a shard's files, so that their number and bytes stay bounded over any number of intervals.

Every interval adds one sorted run of files, and the entries that it replaces stay in the older runs. Two rules limit
this growth, at the end of an interval, before the checkpoint uploads the shard's new files:

1. More than `most_sorted_runs` runs: the newest runs are merged. The number of merged runs is the one with the lowest
   cost per removed run. Such a merge writes little, but the oldest run and its obsolete entries stay.
2. Obsolete bytes above `most_obsolete_percent` of the live bytes: the whole shard is rewritten. Shards with equal load
   would all exceed the limit in the same interval. So a rewrite waits for two conditions. It must be the shard's turn,
   which comes every eighth interval, and more often if there are fewer than eight shards. And the rewrite must not
   write more than the shard's byte budget: `consolidation_bytes` divided by the number of shards that have their turn
   in the same interval. A shard that exceeds the limit by a quarter is rewritten at once, out of turn and with any
   number of bytes.

Live bytes are counted for each key group when entries are written and deleted (`KeyGroupState.size_bytes`). RocksDB
counts the bytes of its files in the same way, before compression. The difference is obsolete: replaced entries, deleted
entries and deletion markers.

Neither rule starts a merge if the local disk lacks room for the output. A delayed merge costs only time and bytes.

Source: sorted runs and merges of the newest ones are RocksDB's universal compaction. RocksDB itself would pick the runs
by size alone, and all shards would merge in the same intervals. Over 300 batches, checkpoints uploaded 3.6 times the
changed bytes with universal compaction, and 13.6 times with leveled compaction.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from state_backend.adapters.rocks import EngineOptions, RocksStore, SortedRun
from state_backend.state.layout import key_group_bounds, record_bytes
from state_backend.values.frozen import frozen
from state_backend.values.records import KeyGroupState

TURNS = 8
# `plan_consolidation` selects the merge with the lowest cost. A merge of the w newest runs that writes b bytes has the
# cost b / (w - 1) ** _WIDTH_BIAS. With a bias of 1.0, a merge of only the two newest, small runs would often cost
# least. The next interval would merge the result with one new run, and write the same bytes again. A higher bias makes
# wide merges cheaper, and wide merges are needed less often. Measured with 1.4 and `most_sorted_runs=13`: over 70 to
# 110 equal batches, merges wrote each byte 1.1 times on average.
_WIDTH_BIAS = 1.4


@frozen
class Consolidation:
    """Plan of one shard's merge at the end of an interval.

    Every interval adds a sorted run: files that RocksDB searches as one, because no key is in two of them. `whole`: the
    merge rewrites all runs of the shard.
    """

    merged_runs: int
    # The most bytes that the merge writes.
    written_bytes: int
    whole: bool = False
    # The reason why a merge that is needed waits for a later interval. `turn`: shards are rewritten in turn, each every
    # eighth interval, or more often if there are fewer than eight shards. `budget`: the merge would write more than the
    # shard's part of `EngineOptions.consolidation_bytes`. `disk`: the local disk lacks room. None: no merge waits.
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
    """Plan which of a shard's sorted runs to merge at the end of an interval.

    All runs are merged if the shard has too many obsolete bytes (`options.most_obsolete_percent`). Below 1.25 times
    that share, this rewrite waits for the shard's turn and for its budget (see `put_off`). Otherwise, the newest runs
    are merged if there are more than `options.most_sorted_runs`. No merge reads more than `free_bytes`.

    `runs`: newest first. `live_raw_bytes`: the bytes of the keys and values that count, before compression.
    `sequence`: a number that rises from interval to interval and decides whose turn it is.
    """
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
    # Every read searches all runs, so many runs make the pipeline slow. With more than twice the allowed number of
    # runs, a merge may write more than `budget_bytes`, the shard's part of `consolidation_bytes`.
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
    """Estimate the bytes of a shard's files after a rewrite.

    The estimate multiplies `live_raw_bytes` (keys and values before compression) by the compression ratio of the oldest
    run, or of all runs together if that is smaller. If the live entries compress otherwise than most of the files, the
    shard is rewritten too early, but only once: afterwards its only run has the right ratio.
    """
    oldest, size_bytes = runs[-1], sum(run.size_bytes for run in runs)
    density = min(size_bytes / max(sum(run.raw_bytes for run in runs), 1), oldest.size_bytes / max(oldest.raw_bytes, 1))
    return int(live_raw_bytes * density)


def _is_paid(runs: Sequence[SortedRun], options: EngineOptions) -> bool:
    """Return True if a shard with range deletions has changed enough since its last rewrite to justify another.

    After a split of a shard, both halves have the files of the whole shard, so about half of their bytes are obsolete.
    If that were enough for a rewrite, all shards would upload their whole state in one interval. So the newer runs must
    also have changed a part of the oldest run, the result of the last rewrite. The part is a quarter of
    `most_obsolete_percent`: with the default of 80, the changed bytes must be 20 % of the oldest run's bytes.
    """
    oldest, newer = runs[-1], runs[:-1]
    deleted_bytes = sum(run.deletions for run in newer) * oldest.size_bytes / max(oldest.entries, 1)
    changed_bytes = sum(run.size_bytes for run in newer) + deleted_bytes
    return changed_bytes * 400 >= options.most_obsolete_percent * oldest.size_bytes


def most_bytes(store: RocksStore, key_groups: Sequence[KeyGroupState], options: EngineOptions) -> int | None:
    """Return the most bytes that a shard's files and segments may take together before a rewrite is urgent.

    A rewrite removes obsolete entries. Normally it waits for the shard's turn (one interval in eight), and until it
    fits the shard's part of `EngineOptions.consolidation_bytes`. An urgent rewrite does not wait. In changelog mode, a
    shard above the limit uploads SSTs instead of a segment, because only SSTs can be rewritten.

    Returns the limit in bytes; None for no limit. There is no limit in three cases. First: a key group has no byte
    count, because an older release wrote it. Second: the shard has no file. Third: the shard's files hold range
    deletions, as after a split of the shard, and few entries have changed since its last rewrite. In the third case
    `plan_consolidation` does not rewrite the shard.
    """
    sizes = [s.size_bytes for s in key_groups]
    runs = store.sorted_runs(flushed=False)
    if None in sizes or not runs or (store.range_deletions() and not _is_paid(runs, options)):
        return None
    return live_bytes(runs, sum(size or 0 for size in sizes)) * (80 + options.most_obsolete_percent) // 80


def count_bytes(store: RocksStore, key_groups: Sequence[KeyGroupState]) -> tuple[KeyGroupState, ...]:
    """Return the key-group states, with a byte count for each key group.

    Older releases recorded no byte counts. For a key group without one, all its entries are read and counted.
    """
    counted = []
    for state in key_groups:
        size_bytes = state.size_bytes
        if size_bytes is None:
            entries = store.scan(*key_group_bounds(state.key_group, state.key_group))
            size_bytes = sum(record_bytes(key, data) for key, data in entries)
        counted.append(replace(state, size_bytes=size_bytes))
    return tuple(counted)


def consolidate(
    store: RocksStore,
    *,
    key_groups: Sequence[KeyGroupState],
    options: EngineOptions,
    shard: int,
    parallelism: int,
    sequence: int,
) -> Consolidation:
    """Flush the store, merge the sorted runs that `plan_consolidation` selects, and return the executed plan.

    The job of each shard calls this function after the rows of an interval, before the shard's new files are uploaded.
    Merges of the newest runs may happen in every interval. A rewrite of all files of a shard waits for the shard's
    turn: every eighth interval (`TURNS`), or every `parallelism` intervals if that is less. `sequence` decides whose
    turn it is. A shard whose obsolete bytes exceed their limit by a quarter does not wait.
    """
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
