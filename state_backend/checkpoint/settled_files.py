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
from state_backend.checkpoint.log import Log, facts_of_all, outputs_of, read_whole_log
from state_backend.checkpoint.older_records import Fact, sweep_command
from state_backend.checkpoint.parallel import at_once
from state_backend.formats import paths
from state_backend.ports.storage import Storage
from state_backend.values.errors import CorruptRecord
from state_backend.values.records import AttemptEnd, OutputFile, Record, Settled, SweepRecord, Tombstone


def plan_settled(log: Log) -> dict[str, Settled | AttemptEnd | None]:
    """The files that `settled/` must have, by path, for a log whose entries were all read.

    None stands for a file whose content the log no longer says: the list of output files is only in that file, since an older release
    wrote the tombstone. A log whose newest record has no summary has no such files yet.
    """
    if log.past is None:
        return {}
    whole = Log(dict(log.entries.items()))
    current = {checkpoint_id for checkpoint_id, _ in whole.current_outputs().values()}
    below = [entry for n, entry in whole.entries.items() if n < log.head_id]
    planned: dict[str, Settled | AttemptEnd | None] = {}
    for fact in facts_of_all(whole):
        if fact.id < log.head_id:
            planned[paths.settled(*fact)] = _settled(log, fact, current)
    for end in ends_of(below):
        planned.setdefault(settled_path(end), end)
    return planned


def _settled(log: Log, fact: Fact, current: set[int]) -> Settled | None:
    entry = log.entries[fact.id]
    outputs: tuple[OutputFile, ...] | None = ()
    collected = False
    if fact.kind == "interval" and not isinstance(entry, SweepRecord):
        outputs = _outputs(entry)
        if fact.id not in current and isinstance(entry, Tombstone):
            # A clean-up still has to delete the files of a dropping id; those of any other id are deleted.
            collected = fact.id not in log.summary.dropping
            outputs = () if collected else outputs or ()
    if outputs is None:
        return None
    return Settled(
        id=fact.id,
        kind=fact.kind,  # type: ignore[arg-type]
        interval=fact.interval,
        outputs=outputs,
        collected=collected,
    )


def _outputs(entry: Record | Tombstone) -> tuple[OutputFile, ...] | None:
    """The output files that a commit made; None if a tombstone does not say."""
    if isinstance(entry, Record) or entry.outputs:
        return outputs_of(entry)
    return entry.made


def lost_settled(storage: Storage, log: Log, listed: Iterable[str]) -> dict[str, Settled | AttemptEnd | None]:
    """The files of ``plan_settled`` that are not there. ``listed``: paths that were listed after the log was read."""
    planned, there = plan_settled(log), {*listed}
    missing = [path for path in planned if path not in there]
    # A listing on a network disk may be some seconds old, so a file counts as lost only if a look-up by its name finds nothing.
    found = at_once(storage.stat, missing)
    return {path: planned[path] for path, info in zip(missing, found, strict=True) if info is None}


def lost_findings(storage: Storage, log: Log, listed: Iterable[str]) -> Iterator[str]:
    """A sentence for each file in `settled/` that is lost."""
    for path, file in lost_settled(storage, log, listed).items():
        if file is None and not _may_be_without_output(storage, log, path):
            yield _unknown_outputs(path)
        else:
            yield f"{path} is missing: to readers, what it says did not happen\nWrite the file anew: {sweep_command(storage)}"


def rebuild_settled(storage: Storage, *, dry_run: bool = False) -> tuple[str, ...]:
    """Writes lost files in `settled/` anew; their paths.

    Raises: CorruptRecord if the log can't be read, or no longer says what was in a lost file; then that file is not written.
    """
    log = read_whole_log(storage)
    lost = lost_settled(storage, log, [info.path for info in storage.list(paths.SETTLED)])
    for path, file in lost.items():
        if file is None and not _may_be_without_output(storage, log, path):
            raise CorruptRecord(_unknown_outputs(path))
    if dry_run:
        return tuple(lost)
    write_settled(storage, [file if file is not None else _without_output(path) for path, file in lost.items()])
    for path, info in zip(lost, at_once(storage.stat, lost), strict=True):
        if info is None:
            raise CorruptRecord(f"{storage.url}/{path} is no file; remove what is there, then sweep again")
    return tuple(lost)


def _without_output(path: str) -> Settled:
    parsed = paths.parse_settled(path)
    assert parsed is not None
    interval, checkpoint_id, _ = parsed
    return Settled(id=checkpoint_id, kind="interval", interval=interval)


def _may_be_without_output(storage: Storage, log: Log, path: str) -> bool:
    """True if the interval has no output file of that attempt: then it made none."""
    settled = _without_output(path)
    entry = log.entries[settled.id]
    assert isinstance(entry, Tombstone)
    folder = paths.output(settled.interval, entry.attempt, 0, 0).rpartition("/")[0]
    return next(iter(storage.list(f"{folder}/")), None) is None


def _unknown_outputs(path: str) -> str:
    return (
        f"{path} is missing, and only that file listed the interval's output, since an older release wrote the record. Put the file "
        "back from a copy, or run the interval again; until then no sweep deletes anything"
    )
