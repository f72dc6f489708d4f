"""Record, list and remove trials. `cairn.trials` runs them, since running needs the pipeline's code.

A trial has a record, trials/<name>.json, and a root of its own, roots/<name>. If a process dies during one of these
steps, the step leaves:

    1. write the record         only the record; a sweep removes the trial when its time is over
    2. fork, run intervals      the record, and the files of a pipeline below roots/<name>; the sweep removes both
    3. remove the trial         the record, and a part of roots/<name>. The record is deleted last, so that the next
                                removal finds the rest

Production's folder is only read, with one exception: the fork links or copies the files of a production checkpoint into
the trial's root, and holds a lease on the checkpoint meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta

from state_backend.adapters.open_storage import folders_in, join_url, open_storage, remove_all, remove_empty
from state_backend.checkpoint.storage_clock import storage_now_ms
from state_backend.formats import paths, record_codec
from state_backend.ports.storage import Storage
from state_backend.values.errors import (
    AlreadyExists,
    BehindLink,
    CorruptRecord,
    NotFound,
    PreconditionFailed,
    StorageUnavailable,
    UsageError,
)
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval, format_instant
from state_backend.values.marks import Trial, TrialBase

logger = logging.getLogger("cairn")

_ROUNDS = 100


@frozen
class Removed:
    name: str
    files: int
    bytes: int


def check_no_trial(root: str, doing: str) -> None:
    """Raise `UsageError` if `root` belongs to a trial, which is removed after a time. `doing`: for the message."""
    if (before := production_root(root)) != root:
        raise UsageError(
            f"{root} is the root of a trial, which is removed after a time. Not possible there: {doing}\n"
            f"Use production's root: {before}"
        )


def production_root(root: str) -> str:
    """Return production's root for the root of a trial, and any other root unchanged."""
    before, found, _ = f"{root.rstrip('/')}/".partition(f"/{paths.TRIALS}/")
    return before if found else root


def trials_url(root: str, pipeline: str) -> str:
    return join_url(root, paths.TRIALS, pipeline)


def root_of_trial(root: str, pipeline: str, name: str) -> str:
    """Return the URL of a trial's own root, which lies below production's `root`."""
    return join_url(trials_url(root, pipeline), paths.trial_root(name))


def read_trial(root: str, pipeline: str, name: str) -> Trial | None:
    return _read(open_storage(trials_url(root, pipeline)), paths.trial(name))


def find_trial(root: str, pipeline: str, name: str | None = None) -> Trial:
    """Return the trial of this name; with `name` None, the pipeline's only trial."""
    there = list_trials(root, pipeline)
    found = [t for t in there if name in (None, t.name)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(t.name for t in there)
    if not there:
        raise UsageError(f"pipeline {pipeline!r} has no trial below {root}\nStart one with cairn try")
    if name is not None:
        raise UsageError(f"pipeline {pipeline!r} has no trial {name!r} below {root}\nIts trials: {names}")
    raise UsageError(f"pipeline {pipeline!r} has several trials below {root}\nName one of them: {names}")


def list_trials(root: str, pipeline: str) -> list[Trial]:
    return trials_in(open_storage(trials_url(root, pipeline)))


def trials_in(storage: Storage) -> list[Trial]:
    listed = [info.path for info in storage.list(paths.TRIAL_RECORDS)]
    found = (_read(storage, path) for path in listed if paths.trial_name(path) is not None)
    return [trial for trial in found if trial is not None]


def create_trial(root: str, trial: Trial) -> None:
    """Write the record of a new trial, and then delete the files that a removed trial of this name may have left.

    The record comes first: of several processes that begin a trial of this name, only one creates the record, and the
    others delete nothing.
    """
    try:
        open_storage(trials_url(root, trial.pipeline)).create(paths.trial(trial.name), record_codec.encode(trial))
    except AlreadyExists as error:
        raise UsageError(
            f"another process began trial {trial.name!r} of {trial.pipeline!r} at the same time\n"
            "Give the new trial another name, or run the same command again to continue the other trial"
        ) from error
    remove_all(root_of_trial(root, trial.pipeline, trial.name))


def renew_trial(root: str, trial: Trial) -> bool:
    """Replace the record of a trial, for instance to let it live longer; return False if the trial was removed.

    The trial counts as removed also if a newer trial has its name.
    """
    storage, path = open_storage(trials_url(root, trial.pipeline)), paths.trial(trial.name)
    for _ in range(_ROUNDS):
        info, there = storage.stat(path), _read(storage, path)
        if info is None or there is None or there.attempt != trial.attempt:
            return False
        with suppress(NotFound, PreconditionFailed):  # another try changed the record, or a removal deleted it
            storage.replace(path, record_codec.encode(trial), generation=info.generation)
            return True
    raise StorageUnavailable(f"{storage.url}: other processes rewrote {path} {_ROUNDS} times in a row; try again")


def check_same_trial(there: Trial, wanted: Trial) -> None:
    """Raise `UsageError` unless the trial `there` can continue as `wanted`.

    Start, length of intervals and the base's state must be equal. Code and end may differ. So may the base's id:
    production may have computed an equal state again, or consolidated the checkpoint.
    """
    for what, before, now in (
        ("begins at", format_instant(there.span.start), format_instant(wanted.span.start)),
        ("has intervals of", f"{there.length_ms // 1000} s", f"{wanted.length_ms // 1000} s"),
        ("began from", _describe(there.base), _describe(wanted.base)),
    ):
        if before != now:
            raise UsageError(
                f"trial {there.name!r} of pipeline {there.pipeline!r} {what} {before}, but the new trial {what} {now}\n"
                "Give the new trial another name, or remove the existing trial first"
            )


def remove_trial(root: str, trial: Trial) -> Removed:
    """Remove all files of a trial, its record last. A repeated call continues a removal that stopped."""
    return remove_trial_named(root, trial.pipeline, trial.name)


def remove_trial_named(root: str, pipeline: str, name: str, *, dry_run: bool = False) -> Removed:
    """Remove the record and all files of the trial of this name.

    The trial's record may be removed already: a trial that still ran then may have written files after its removal. If
    another trial of this name begins during the removal, its record is deleted too. That trial stops with an error, and
    some of its files may be deleted.
    """
    folder = trials_url(root, pipeline)
    files, size_bytes = remove_all(root_of_trial(root, pipeline, name), dry_run=dry_run)
    if not dry_run:
        open_storage(folder).delete(paths.trial(name))
        remove_empty(folder, up_to=root)
    return Removed(name=name, files=files, bytes=size_bytes)


def sweep_trials(root: str, pipeline: str, *, now_ms: int | None = None, dry_run: bool = False) -> list[Removed]:
    """Remove the pipeline's trials whose time is over, and files that removed trials wrote after their removal.

    If a folder of trials lies behind a symbolic link, the function logs a warning and removes nothing behind the link.
    """
    try:
        # List the roots before the records: a trial writes its record before its first file. So a root without a record
        # belongs to a removed trial.
        folder = trials_url(root, pipeline)
        roots = [name for name in folders_in(folder, paths.TRIAL_ROOTS) if paths.is_name(name)]
        trials = {t.name: t for t in list_trials(root, pipeline)}
        # Look up other records by name: a listing may miss the record of a trial that began some seconds ago.
        trials |= {name: t for name in {*roots} - {*trials} if (t := read_trial(root, pipeline, name)) is not None}
        if trials and now_ms is None:
            now_ms = storage_now_ms(open_storage(folder), dry_run=dry_run)
        over = {t.name for t in trials.values() if t.ends_ms < (now_ms or 0)} | ({*roots} - {*trials})
        removed = [remove_trial_named(root, pipeline, name, dry_run=dry_run) for name in sorted(over)]
        if over >= {*trials, *roots} and not dry_run:
            # A killed process may have left empty folders, or the empty file `paths.CLOCK`: `storage_now_ms` writes
            # this file to get the time that the storage gives it.
            open_storage(folder).delete(paths.CLOCK)
            remove_empty(folder, up_to=root)
        return removed
    except BehindLink as error:
        logger.warning("%s: no trial is removed: %s", pipeline, error)
        return []


def intervals_of_trial(trial: Trial, ran: Iterable[Interval] = ()) -> list[Interval]:
    """Return a trial's intervals. `ran`: intervals that it has run, whose lengths may differ, such as days of 23 h."""
    there, found, at = {interval.start: interval for interval in ran}, list[Interval](), trial.span.start
    while at < trial.span.end:
        found.append(there.get(at) or Interval(at, at + timedelta(milliseconds=trial.length_ms)))
        at = found[-1].end
    return found


def _describe(base: TrialBase | None) -> str:
    if base is None:
        return "empty state"
    of = "" if base.savepoint is None else f" in the savepoint {base.savepoint}"
    return f"the state{of} with digest {base.digest:016x}"


def _read(storage: Storage, path: str) -> Trial | None:
    try:
        trial = record_codec.decode(storage.read(path), path, Trial)
    except NotFound:
        return None
    if path != paths.trial(trial.name):  # a removal of this trial would delete another trial's files
        raise CorruptRecord(
            f"{storage.url}/{path} contains the record of another trial, {trial.name!r}; remove this file"
        )
    return trial
