"""Plan which files `settled/` must have, and write lost files again.

Settled files repeat facts of records and tombstones, so each settled file can be rebuilt from them. Readers list
`settled/commits/` and use the names of the files. If a settled file is lost, readers do not see its commit, and a sweep
could delete the output of that commit. To prevent that, every sweep writes lost settled files again before it looks for
files to delete. `cairn check` reports lost settled files.

If a sweep stops between two files, the next sweep writes the rest. Concurrent commits and clean-ups are safe: a sweep
creates a file only if it is absent, so it overwrites no newer file; and a clean-up rewrites a settled file only if the
file exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from state_backend.checkpoint.append_record import ends_of, settled_path, write_settled
from state_backend.checkpoint.log import Log, facts_of_entries, last_facts, outputs_of, read_whole_log
from state_backend.checkpoint.parallel import at_once
from state_backend.checkpoint.record_reader import Fact, sweep_command
from state_backend.formats import paths
from state_backend.ports.storage import Storage
from state_backend.values.errors import CorruptRecord
from state_backend.values.marks import AttemptEnd, Settled
from state_backend.values.records import OutputFile, SweepRecord, Tombstone


def plan_settled(log: Log) -> dict[str, Settled | AttemptEnd]:
    """Return the files that `settled/` must have, by path, for a log whose entries were all read."""
    facts = facts_of_entries(log.entries)
    current = {fact.id for fact in last_facts(facts) if fact.kind == "interval"}
    below = [entry for n, entry in log.entries.items() if n < log.head_id]
    planned: dict[str, Settled | AttemptEnd] = {}
    for fact in facts:
        if fact.id < log.head_id:
            planned[paths.settled(*fact)] = _settle(log, fact, current)
    for end in ends_of(below):
        planned.setdefault(settled_path(end), end)
    return planned


def _settle(log: Log, fact: Fact, current: set[int]) -> Settled:
    entry = log.entries[fact.id]
    outputs: tuple[OutputFile, ...] = ()
    collected = False
    if fact.kind == "interval" and not isinstance(entry, SweepRecord):
        outputs = outputs_of(entry)
        if fact.id not in current and isinstance(entry, Tombstone):
            # If the id is in `dropping`, a clean-up still has to delete the output files; else it has deleted them.
            collected = fact.id not in log.summary.dropping
            outputs = () if collected else outputs
    return Settled(
        id=fact.id,
        kind=fact.kind,  # type: ignore[arg-type]
        interval=fact.interval,
        outputs=outputs,
        collected=collected,
    )


def lost_settled(storage: Storage, log: Log, listed: Iterable[str]) -> dict[str, Settled | AttemptEnd]:
    """Return the files of `plan_settled` that do not exist, by path."""
    planned, there = plan_settled(log), {*listed}
    missing = [path for path in planned if path not in there]
    # A listing on a network disk may be some seconds old, so a file counts as lost only if a look-up by name fails.
    found = at_once(storage.stat, missing)
    return {path: planned[path] for path, info in zip(missing, found, strict=True) if info is None}


def lost_findings(storage: Storage, log: Log, listed: Iterable[str]) -> Iterator[str]:
    for path in lost_settled(storage, log, listed):
        yield f"{path} is missing: readers do not see the commit that it names\nTo write it again: {sweep_command(storage)}"


def rebuild_settled(storage: Storage, *, dry_run: bool = False) -> tuple[str, ...]:
    """Write lost files in `settled/` again, and return their paths. With `dry_run`, only return the paths."""
    log = read_whole_log(storage)
    lost = lost_settled(storage, log, [info.path for info in storage.list(paths.SETTLED)])
    if dry_run:
        return tuple(lost)
    write_settled(storage, lost.values())
    for path, info in zip(lost, at_once(storage.stat, lost), strict=True):
        if info is None:
            raise CorruptRecord(f"{storage.url}/{path} is not a file; remove what is there, then sweep again")
    return tuple(lost)
