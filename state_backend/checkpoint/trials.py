"""Trials: what there is of them, and their removal. Running one is the business of whoever has the code.

What is on disk if one stops, line by line:

    trials/<name>.json     nothing else yet: a sweep finds the trial when its time is over
    fork, intervals        as for any pipeline, all below roots/<name>
    removal                what is left of roots/<name>; the record goes last, so that the next removal finds the rest
    after the removal      what the trial still writes if it runs: it stops before its next commit and removes that. If the trial dies
                           first, the next sweep finds roots/<name> without a record, and removes it

Production's folder is only read, but for a lease while its files are linked.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass

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
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.records import Trial, TrialBase

logger = logging.getLogger("cairn")

_ROUNDS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """A trial that was removed, or would be: its files and their bytes. Files that production has too are counted; they stay there."""

    name: str
    files: int
    bytes: int


def check_no_trial(root: str, doing: str) -> None:
    """Raises: UsageError if the root, or the folder below one, is a trial's: nothing is built on one. ``doing``: what was asked for."""
    before, found, _ = f"{root.rstrip('/')}/".partition(f"/{paths.TRIALS}/")
    if found:
        raise UsageError(
            f"{root} is the root of a trial, and nothing is built on one, no {doing}: it is removed after a time\n"
            f"Take production's root: {before}"
        )


def trials_url(root: str, pipeline: str) -> str:
    """The folder of a pipeline's trials."""
    return join_url(root, paths.TRIALS, pipeline)


def root_of_trial(root: str, pipeline: str, name: str) -> str:
    """The root that a trial has of its own."""
    return join_url(trials_url(root, pipeline), paths.trial_root(name))


def read_trial(root: str, pipeline: str, name: str) -> Trial | None:
    """What is recorded of a trial; None if there is none of that name."""
    return _read(open_storage(trials_url(root, pipeline)), paths.trial(name))


def find_trial(root: str, pipeline: str, name: str | None = None) -> Trial:
    """The trial of that name; None: the only one that there is. Raises: UsageError, naming what there is."""
    there = list_trials(root, pipeline)
    found = [t for t in there if name in (None, t.name)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(t.name for t in there)
    if not there:
        raise UsageError(f"pipeline {pipeline!r} has no trial below {root}\nMake one with cairn try")
    if name is not None:
        raise UsageError(f"pipeline {pipeline!r} has no trial {name!r} below {root}\nThere are: {names}")
    raise UsageError(f"pipeline {pipeline!r} has several trials below {root}; name one of: {names}")


def list_trials(root: str, pipeline: str) -> list[Trial]:
    """All trials of a pipeline, by name."""
    return trials_in(open_storage(trials_url(root, pipeline)))


def trials_in(storage: Storage) -> list[Trial]:
    """All trials in the folder of a pipeline's trials, by name."""
    listed = [info.path for info in storage.list(paths.TRIAL_RECORDS)]
    found = (_read(storage, path) for path in listed if paths.trial_name(path) is not None)
    return [trial for trial in found if trial is not None]


def write_trial(root: str, trial: Trial) -> None:
    """Records a trial, anew or with another end. Raises: UsageError if another process recorded or removed it meanwhile."""
    storage, path = open_storage(trials_url(root, trial.pipeline)), paths.trial(trial.name)
    there, data = storage.stat(path), record_codec.encode(trial)
    try:
        if there is None:
            storage.create(path, data)
        else:
            storage.replace(path, data, generation=there.generation)
    except (AlreadyExists, NotFound, PreconditionFailed) as error:
        raise UsageError(
            f"another process began, ended or removed trial {trial.name!r} of {trial.pipeline!r} at the same moment; try again"
        ) from error


def renew_trial(root: str, trial: Trial) -> bool:
    """Records another end of a trial. False if the trial was removed, also if another one of its name is there.

    Raises: StorageUnavailable if other processes wrote the record again and again meanwhile.
    """
    storage, path = open_storage(trials_url(root, trial.pipeline)), paths.trial(trial.name)
    for _ in range(_ROUNDS):
        info, there = storage.stat(path), _read(storage, path)
        if info is None or there is None or there.attempt != trial.attempt:
            return False
        with suppress(NotFound, PreconditionFailed):  # another try of the same trial, or its removal
            storage.replace(path, record_codec.encode(trial), generation=info.generation)
            return True
    raise StorageUnavailable(f"{storage.url}: others wrote {path} {_ROUNDS} times meanwhile; try again")


def check_same_trial(there: Trial, wanted: Trial) -> None:
    """Whether a trial can be gone on with: only its code and its end may be others.

    Raises: UsageError with the way out.
    """
    for what, before, now in (
        ("begins at", format_instant(there.span.start), format_instant(wanted.span.start)),
        ("has intervals of", f"{there.length_ms // 1000} s", f"{wanted.length_ms // 1000} s"),
        ("began from", _described(there.base), _described(wanted.base)),
    ):
        if before != now:
            raise UsageError(
                f"trial {there.name!r} of pipeline {there.pipeline!r} {what} {before}, and what is asked for {what} {now}\n"
                "Give the new one another --name, or remove that one first"
            )


def remove_trial(root: str, trial: Trial, *, dry_run: bool = False) -> Removed:
    """Removes all of a trial, its record last. The same call goes on where one stopped."""
    return remove_trial_named(root, trial.pipeline, trial.name, dry_run=dry_run)


def remove_trial_named(root: str, pipeline: str, name: str, *, dry_run: bool = False) -> Removed:
    """As `remove_trial`, also of what a removed trial wrote later. If another trial of that name begins meanwhile, its record goes
    too, and it stops with an error: some of its files may be gone."""
    folder = trials_url(root, pipeline)
    files, size_bytes = remove_all(root_of_trial(root, pipeline, name), dry_run=dry_run)
    if not dry_run:
        open_storage(folder).delete(paths.trial(name))
        remove_empty(folder, up_to=root)
    return Removed(name=name, files=files, bytes=size_bytes)


def sweep_trials(root: str, pipeline: str, *, now_ms: int | None = None, dry_run: bool = False) -> list[Removed]:
    """Removes the pipeline's trials whose time is over, and what removed trials wrote after their removal. ``now_ms``: milliseconds
    since the epoch; None: by the storage's clock. Behind a symbolic link nothing is removed."""
    try:
        # In this order: a trial writes its record before its first file, so that a root without a record is nobody's.
        folder = trials_url(root, pipeline)
        roots = [name for name in folders_in(folder, paths.TRIAL_ROOTS) if paths.is_name(name)]
        trials = {t.name: t for t in list_trials(root, pipeline)}
        # By name: a listing may miss the record of a trial that began some seconds ago.
        trials |= {name: t for name in {*roots} - {*trials} if (t := read_trial(root, pipeline, name)) is not None}
        if trials and now_ms is None:
            now_ms = storage_now_ms(open_storage(folder), dry_run=dry_run)
        over = {t.name for t in trials.values() if t.ends_ms < (now_ms or 0)} | ({*roots} - {*trials})
        removed = [remove_trial_named(root, pipeline, name, dry_run=dry_run) for name in sorted(over)]
        if over >= {*trials, *roots} and not dry_run:
            # A process that was killed may have left its reading of the storage's clock, or empty folders.
            open_storage(folder).delete(paths.CLOCK)
            remove_empty(folder, up_to=root)
        return removed
    except BehindLink as error:
        logger.warning("%s: no trial is removed: %s", pipeline, error)
        return []


def intervals_of_trial(trial: Trial) -> list[Interval]:
    """Its intervals, in the order of time."""
    length = trial.length_ms
    starts = range(trial.span.start_ms, trial.span.end_ms, length)
    return [Interval(from_ms(start), from_ms(start + length)) for start in starts]


def _described(base: TrialBase | None) -> str:
    if base is None:
        return "empty state"
    of = "" if base.savepoint is None else f" in the savepoint {base.savepoint}"
    return f"checkpoint {base.id}{of} with digest {base.digest:016x}"


def _read(storage: Storage, path: str) -> Trial | None:
    try:
        trial = record_codec.decode(storage.read(path), path, Trial)
    except NotFound:
        return None
    if path != paths.trial(trial.name):  # whoever removes the trial would remove another one
        raise CorruptRecord(f"{storage.url}/{path} is the record of trial {trial.name!r}; remove that file")
    return trial
