"""Consolidation: a shard's files are merged on purpose, so that their number and bytes stay flat over a history of any length.

Every interval leaves one more sorted run of files, and in the older ones whatever it replaced. Two rules hold against that,
both carried out when the shard is captured, so that what they write is uploaded once:

1. More than ``most_sorted_runs``: the newest are merged, as many as cost least per run that goes. Such a merge writes little,
   but leaves the oldest run, and what is obsolete there.
2. More than ``most_obsolete_percent`` of the live bytes obsolete: the whole shard is rewritten. Shards that take the same load
   reach that limit together, so each waits for its turn, one interval in eight, and for its part of the budget of bytes; past
   a quarter more it waits for neither.

Neither begins without room for its output on the local disk; nothing is lost by waiting but bytes and time.

Source: sorted runs and merges of the newest ones are RocksDB's universal compaction. Left to itself it picks by size alone,
for all shards at once: it uploaded 3.6 times the changed bytes over 300 batches, where leveled compaction took 13.6.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from state_backend.adapters.rocks import EngineOptions, RocksStore, SortedRun
from state_backend.state.layout import TIMERS_NAME
from state_backend.values.records import KeyGroupState, StateDescriptor

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
    most_records: int,
    options: EngineOptions,
    shard: int,
    parallelism: int,
    sequence: int,
    free_bytes: int,
) -> Consolidation:
    """What to merge of a shard's runs, newest first. ``most_records``: at most how many records its live state can have;
    ``sequence`` counts intervals; ``free_bytes`` is the room on the local disk."""
    if len(runs) < 2:
        return _NOTHING
    turns = min(TURNS, parallelism)
    budget_bytes = options.consolidation_bytes // -(-parallelism // turns)
    total_bytes = sum(run.size_bytes for run in runs)
    obsolete = obsolete_bytes(runs, most_records)
    live_bytes = total_bytes - obsolete
    put_off: Literal["turn", "budget", "disk"] | None = None
    if _is_paid(runs, options) and obsolete * 100 >= options.most_obsolete_percent * live_bytes:
        urgent = obsolete * 80 >= options.most_obsolete_percent * live_bytes
        if total_bytes > free_bytes:
            put_off = "disk"
        elif not urgent and sequence % turns != shard % turns:
            put_off = "turn"
        elif not urgent and live_bytes > budget_bytes:
            put_off = "budget"
        else:
            return Consolidation(merged_runs=len(runs), written_bytes=live_bytes, whole=True)
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


def obsolete_bytes(runs: Sequence[SortedRun], most_records: int) -> int:
    """About how many bytes of a shard's files are of records that were replaced or deleted since.

    All puts but one per live record are obsolete. What deletions do not account for was replaced by a newer run, and weighs
    what newer records weigh: small counters that are rewritten in every interval say nothing of the large values beside
    them. The rest is taken to lie in the oldest run."""
    oldest, newer = runs[-1], runs[:-1]
    newer_bytes = sum(run.size_bytes for run in newer)
    newer_entries = sum(run.entries for run in newer)
    deletions = sum(run.deletions for run in runs)
    puts = newer_entries + oldest.entries - deletions
    newer_puts = newer_entries - sum(run.deletions for run in newer)
    obsolete = puts - max(0, min(most_records, puts - deletions))
    replaced = min(max(obsolete - deletions, 0), newer_puts)
    found = replaced * newer_bytes / max(newer_entries, 1)
    found += (obsolete - replaced) * oldest.size_bytes / max(oldest.entries, 1)
    return min(int(found), newer_bytes + oldest.size_bytes)


def _is_paid(runs: Sequence[SortedRun], options: EngineOptions) -> bool:
    """Whether changes since the last rewriting are a fair part of what it writes, so that no misjudged count can make a shard
    rewrite itself in every turn."""
    oldest, newer = runs[-1], runs[:-1]
    deleted_bytes = sum(run.deletions for run in newer) * oldest.size_bytes / max(oldest.entries, 1)
    changed_bytes = sum(run.size_bytes for run in newer) + deleted_bytes
    return changed_bytes * 400 >= options.most_obsolete_percent * oldest.size_bytes


def most_records(key_groups: Iterable[KeyGroupState], descriptors: Iterable[StateDescriptor]) -> int:
    """At most how many records of the store the counted entries make, with positions of lists and indexes of times."""
    per_entry = {d.name: 1 + (d.ttl_ms is not None) + (d.kind == "list") for d in descriptors}
    per_entry[TIMERS_NAME] = 2
    return sum(count * per_entry.get(name, 2) for s in key_groups for name, count in s.entries.items())


def consolidate(
    store: RocksStore,
    *,
    key_groups: Sequence[KeyGroupState],
    descriptors: Sequence[StateDescriptor],
    options: EngineOptions,
    shard: int,
    parallelism: int,
    sequence: int,
) -> Consolidation:
    """Merges what is due, and returns what that was. Flushes the store."""
    runs = store.sorted_runs()
    plan = plan_consolidation(
        runs,
        most_records=most_records(key_groups, descriptors),
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
