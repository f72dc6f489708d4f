"""Which files `settled/` must have, and how a sweep writes lost ones anew.

Settled files repeat facts of records and tombstones, so each settled file can be rebuilt from these. Readers list `settled/commits/` and
go by the names of its files: if a settled file is lost, its interval looks as if it was never committed, and a sweep could delete
the interval's output. To prevent that, every sweep writes lost settled files anew before it looks for files to delete. `cairn verify`
names lost settled files.

What is on disk if a sweep stops between two files: some are there again, and the next sweep writes the rest. A committer or clean-up
beside it is safe: files are created if absent, so a file that somebody rewrote since stays; and a clean-up rewrites a settled file
only if the file is there.
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
from state_backend.values.records import AttemptEnd, OutputFile, Settled, SweepRecord, Tombstone


def plan_settled(log: Log) -> dict[str, Settled | AttemptEnd]:
    """Return the files that `settled/` must have, by path, for a log whose entries were all read."""
    facts = facts_of_entries(log.entries)
    current = {fact.id for fact in last_facts(facts) if fact.kind == "interval"}
    below = [entry for n, entry in log.entries.items() if n < log.head_id]
    planned: dict[str, Settled | AttemptEnd] = {}
    for fact in facts:
        if fact.id < log.head_id:
            planned[paths.settled(*fact)] = _settled(log, fact, current)
    for end in ends_of(below):
        planned.setdefault(settled_path(end), end)
    return planned


def _settled(log: Log, fact: Fact, current: set[int]) -> Settled:
    entry = log.entries[fact.id]
    outputs: tuple[OutputFile, ...] = ()
    collected = False
    if fact.kind == "interval" and not isinstance(entry, SweepRecord):
        outputs = outputs_of(entry)
        if fact.id not in current and isinstance(entry, Tombstone):
            # A clean-up still has to delete the files of a dropping id; those of any other id are deleted.
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
    """The files of ``plan_settled`` that are not there. ``listed``: paths that were listed after the log was read."""
    planned, there = plan_settled(log), {*listed}
    missing = [path for path in planned if path not in there]
    # A listing on a network disk may be some seconds old, so a file counts as lost only if a look-up by its name finds nothing.
    found = at_once(storage.stat, missing)
    return {path: planned[path] for path, info in zip(missing, found, strict=True) if info is None}


def lost_findings(storage: Storage, log: Log, listed: Iterable[str]) -> Iterator[str]:
    """A sentence for each file in `settled/` that is lost."""
    for path in lost_settled(storage, log, listed):
        yield f"{path} is missing: readers miss the commit that the file names\nWrite the file anew: {sweep_command(storage)}"


def rebuild_settled(storage: Storage, *, dry_run: bool = False) -> tuple[str, ...]:
    """Write lost files in `settled/` anew, and return their paths.

    Raises:
        CorruptRecord: The log can't be read, or a path in `settled/` is no file.
    """
    log = read_whole_log(storage)
    lost = lost_settled(storage, log, [info.path for info in storage.list(paths.SETTLED)])
    if dry_run:
        return tuple(lost)
    write_settled(storage, lost.values())
    for path, info in zip(lost, at_once(storage.stat, lost), strict=True):
        if info is None:
            raise CorruptRecord(f"{storage.url}/{path} is no file; remove what is there, then sweep again")
    return tuple(lost)
