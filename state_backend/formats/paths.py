"""Builders and parsers of every durable path.

docs/design.md draws a pipeline's folder ("What is on disk"). To learn the storage's time, a process creates a file
`clock` in this folder, reads the time of the file, and deletes the file.

A savepoint's own folder contains

    savepoint.json                                                 written last; without it, this is no savepoint
    claimed.json                                                   a pipeline has taken over the savepoint
    shared/<savepoint>/<shard>-<task>-<n>.sst                      native
    <savepoint>/state-<name>/<shard>-<task>-<n>.parquet            canonical, and <savepoint>/timers/…

The folder .trials/<pipeline>, beside the pipelines' folders, contains the trials. No pipeline can have such a name.

    trials/<name>.json                                             a trial's record: written first, deleted last
    roots/<name>/<pipeline>/…                                      the files of the trial, as in a pipeline's folder

`<interval>` is `20130101T000000000Z_20130102T000000000Z`. These names sort by time, and all their characters are
allowed in shells, URLs and file systems.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, date, datetime
from functools import lru_cache
from urllib.parse import quote

from state_backend.values.errors import UsageError
from state_backend.values.intervals import Interval

CHECKPOINTS = "checkpoints/"
SHARED = "shared/"
ATTEMPTS = "attempts/"
FAILING = "failing/"
OUTPUT = "output/"
PUBLISHED = "published/"
QUARANTINE = "quarantine/"
VALIDATED = "validated/"
LEASES = "leases/"
MARKS = (PUBLISHED, VALIDATED, QUARANTINE)
HEAD = "HEAD.json"
CLOCK = "clock"
SETTLED = "settled/"
SETTLED_COMMITS = "settled/commits/"
SETTLED_ATTEMPTS = "settled/attempts/"
NAMES = "settled/names/"
SETTLED_DAYS = (1, 32, 1024, 32_768, 4_000_000)
"""Lengths in days of the periods that have a folder of settled commits.

A settled commit is in the folder of the period in which its interval starts. The period has the shortest of these
lengths that is at least the interval's length. So a search for commits that overlap a given interval must list only the
periods that overlap the interval, and the period before them.
"""
SAVEPOINT_RECORD = "savepoint.json"
CLAIM = "claimed.json"
TRIALS = ".trials"
TRIAL_RECORDS = "trials/"
TRIAL_ROOTS = "roots"

_DAY_MS = 86_400_000
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_ID = re.compile(r"([0-9]{20})\.json")
_MARK = re.compile(r"published/[^/]+/([0-9]{1,20})\.json")
_OF_SAVEPOINT = re.compile(
    r"shared/[^/]+/[0-9]+-[0-9]+-[0-9]+\.sst|[^/]+/(state-[^/]+|timers)/[0-9]{5,}-[0-9]+-[0-9]+\.parquet"
)
_VALIDATED = re.compile(r"validated/([0-9]{20})-(fast|full)\.json")
_LEASE = re.compile(r"leases/([0-9]{20})-([0-9]{1,12})-[0-9a-f-]{36}\.json")
_SETTLED = re.compile(
    r"settled/commits/[0-9]+d-[0-9-]+/([0-9]{8}T[0-9]{9}Z)_([0-9]{8}T[0-9]{9}Z)-([0-9]{1,20})"
    r"-(interval|consolidate|restore|forget|replaced)\.json"
)
_TRIAL = re.compile(r"trials/([A-Za-z0-9][A-Za-z0-9_.-]{0,99})\.json")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")

_INTERVAL = r"[0-9]{8}T[0-9]{9}Z_[0-9]{8}T[0-9]{9}Z"
_KINDS: dict[str, tuple[tuple[str, re.Pattern[str]], ...]] = {
    "checkpoints": (("record", re.compile(r"checkpoints/[0-9]{20}\.json")),),
    "HEAD.json": (("head", re.compile(r"HEAD\.json")),),
    "settled": (
        ("settled", _SETTLED),
        ("attempt-end", re.compile(r"settled/attempts/[^/.][^/]*\.json")),
        ("names", re.compile(r"settled/names/[^/.][^/]*\.json")),
    ),
    "clock": (("clock", re.compile(r"clock")),),
    "shared": (("state", re.compile(r"shared/[^/]+/[^/.][^/]*\.(sst|log|manifest)")),),
    "attempts": (
        ("prepared", re.compile(r"attempts/[^/]+/prepared\.json")),
        ("refused", re.compile(r"attempts/[^/]+/refused\.json")),
    ),
    "failing": (("failing", re.compile(r"failing/[^/]+/[^/]+/[^/.][^/]*\.parquet")),),
    "output": (("output", re.compile(rf"output/{_INTERVAL}/[^/]+/[^/.][^/]*\.parquet")),),
    "published": (("published", re.compile(rf"published/{_INTERVAL}/[0-9]{{1,20}}\.json")),),
    "validated": (("validated", _VALIDATED),),
    "quarantine": (("quarantine", re.compile(r"quarantine/[0-9]{20}\.json")),),
    "leases": (("lease", _LEASE),),
}
"""For each first segment of a path below a pipeline's folder: the kinds of files, and a pattern of their paths."""


def check_name(name: str) -> str:
    """Return the name of a pipeline, savepoint or trial if it can be part of a path.

    Raises:
        UsageError: The name has other characters than letters, digits and `_ . -`, contains `..`, does not begin with a
            letter or digit, or is longer than 100 characters.
    """
    if not is_name(name):
        raise UsageError(
            f"{name!r} can't be a name here: use at most 100 letters, digits, '_', '-' and '.', with a letter or digit first"
        )
    return name


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and ".." not in name


def record(checkpoint_id: int) -> str:
    return f"{CHECKPOINTS}{checkpoint_id:020d}.json"


def record_id(path: str) -> int | None:
    match = _ID.fullmatch(path.removeprefix(CHECKPOINTS))
    return int(match[1]) if match else None


def kind_of(path: str) -> str | None:
    """Return the kind of a file below a pipeline's folder, or None if Cairn writes no files of that name.

    Readers ignore files without a kind. `cairn check` and sweeps report these files.
    """
    named = _KINDS.get(path.split("/", 1)[0], ())
    return next((kind for kind, name in named if name.fullmatch(path)), None)


def trial_name(path: str) -> str | None:
    match = _TRIAL.fullmatch(path)
    return match[1] if match else None


def trial(name: str) -> str:
    """Return the path of a trial's record, relative to the folder of the pipeline's trials."""
    return f"{TRIAL_RECORDS}{check_name(name)}.json"


def trial_root(name: str) -> str:
    """Return the path of a trial's root, relative to the folder of the pipeline's trials."""
    return f"{TRIAL_ROOTS}/{check_name(name)}"


def prepared(attempt: str) -> str:
    return f"{ATTEMPTS}{attempt}/prepared.json"


def refused(attempt: str) -> str:
    return f"{ATTEMPTS}{attempt}/refused.json"


def failing_of(attempt: str) -> str:
    """Return the folder of all rows of the attempt's state that failed an expectation."""
    return f"{FAILING}{attempt}/"


def failing(attempt: str, check: str) -> str:
    """Return the folder of the rows that failed one check."""
    return f"{FAILING}{attempt}/{check}/"


def shared(attempt: str, shard: int, task: int, number: int, suffix: str) -> str:
    """Return the path of a shard's SST, segment or manifest. `number` counts the files of the Spark task `task`."""
    return f"{SHARED}{attempt}/{shard}-{task}-{number}.{suffix}"


def attempt_of(path: str) -> str | None:
    """Return the attempt in the path of a state, attempt, output or failing-rows file, or None for other paths."""
    parts = path.split("/")
    if parts[0] in ("shared", "attempts") and len(parts) == 3:
        return parts[1]
    if parts[0] == "failing" and len(parts) == 4:
        return parts[1]
    return parts[2] if parts[0] == "output" and len(parts) == 4 else None


def output(interval: Interval, attempt: str, shard: int, task: int, *, late: bool = False) -> str:
    """Return the path of the file with a shard's output rows or, if `late` is true, with its late rows.

    The name contains the number `task` of the Spark task, because two tries at one shard must write two files.
    """
    return f"{OUTPUT}{interval_name(interval)}/{attempt}/{'late' if late else 'part'}-{shard:05d}-{task}.parquet"


def canonical(savepoint: str, state: str | None, shard: int, task: int, number: int) -> str:
    """Return the path of a canonical file in a savepoint's folder. `state`: None for timers. `task`: the Spark task."""
    return f"{savepoint}/{_state_folder(state)}/{shard:05d}-{task}-{number}.parquet"


def exported(state: str | None, shard: int, number: int) -> str:
    """Return the path of a file in an export's folder. `state`: the state's name; None for the timers."""
    return f"{_state_folder(state)}/{shard:05d}-{number}.parquet"


def _state_folder(state: str | None) -> str:
    return "timers" if state is None else f"state-{quote(state, safe='')}"


def is_of_savepoint(path: str) -> bool:
    """Return True if the path is that of a native or canonical state file in a savepoint's folder."""
    return _OF_SAVEPOINT.fullmatch(path) is not None


def published(interval: Interval, checkpoint_id: int) -> str:
    return f"{PUBLISHED}{interval_name(interval)}/{checkpoint_id}.json"


def published_id(path: str) -> int | None:
    """Return the id of a commit from the path of its file in `published/`; None for other paths."""
    match = _MARK.fullmatch(path)
    return int(match[1]) if match else None


def settled(interval: Interval, checkpoint_id: int, kind: str) -> str:
    """Return the path of the file in `settled/commits/` that tells what a commit did to an interval.

    `kind` is `replaced` if the commit replaced the interval's earlier output; otherwise the kind of the commit:
    `interval`, `consolidate`, `restore` or `forget`.
    """
    folder = _settled_folder(settled_level(interval), _period(settled_level(interval), interval.start_ms))
    return f"{folder}{interval_name(interval)}-{checkpoint_id}-{kind}.json"


@lru_cache(maxsize=4096)
def parse_settled(path: str) -> tuple[Interval, int, str] | None:
    """Parse the path of a file in `settled/commits/`, which `settled` built.

    Returns:
        The interval, the id of the commit's record, and what the commit did: `interval`, `consolidate`, `restore`,
        `forget` or `replaced`. None if the path is not that of a file in `settled/commits/`.
    """
    match = _SETTLED.fullmatch(path)
    if match is None:
        return None
    return Interval(_instant(match[1]), _instant(match[2])), int(match[3]), match[4]


def settled_level(interval: Interval) -> int:
    """Return the index in `SETTLED_DAYS` (1, 32, … days) of the first length that is at least the interval's length."""
    length_ms = interval.end_ms - interval.start_ms
    return next(n for n, days in enumerate(SETTLED_DAYS) if length_ms <= days * _DAY_MS)


def settled_folders(interval: Interval, levels: Iterable[int]) -> list[str]:
    """Return the folders in `settled/commits/` that may hold files about intervals that overlap a given interval.

    There is a folder for each period of 1 day, and folders for longer periods (`SETTLED_DAYS`) for longer intervals.

    Args:
        interval: The given interval.
        levels: Indexes into `SETTLED_DAYS`, which lists the lengths of periods in days (1, 32, 1024, …). Folders of
            other lengths are left out. A record's summary lists the levels of all intervals in the log.
    """
    return [
        _settled_folder(level, period)
        for level in levels
        for period in range(
            _period(level, interval.start_ms - SETTLED_DAYS[level] * _DAY_MS + 1),
            _period(level, interval.end_ms - 1) + 1,
        )
    ]


def _period(level: int, ms: int) -> int:
    return ms // (SETTLED_DAYS[level] * _DAY_MS)


def _settled_folder(level: int, period: int) -> str:
    """Return the folder of a period, such as `settled/commits/32d-2012-12-06/`: its length in days and its first day.

    A period that begins before the year 1 has the first day of the year 1 in its name.
    """
    first_day = max(period * SETTLED_DAYS[level], date.min.toordinal() - _EPOCH_DAY)
    return f"{SETTLED_COMMITS}{SETTLED_DAYS[level]}d-{date.fromordinal(_EPOCH_DAY + first_day).isoformat()}/"


def names(folder: str) -> str:
    """Return the path of the file that lists the names in a folder, for storages whose listings may miss new files.

    The folder is `settled/commits/<period>/`, `quarantine/`, `leases/`, or a folder of a plain copy, which is a copy
    of the output outside of the pipeline's folder. In a plain copy the path begins with `_names/`: Spark and other
    readers ignore names that begin with `_`.
    """
    ours = folder.startswith((SETTLED_COMMITS, QUARANTINE, LEASES))
    return f"{NAMES if ours else '_names/'}{folder.rstrip('/').rpartition('/')[2]}.json"


def attempt_end(attempt: str) -> str:
    return f"{SETTLED_ATTEMPTS}{attempt}.json"


def ended_attempt(path: str) -> str | None:
    return path.removeprefix(SETTLED_ATTEMPTS).removesuffix(".json") if kind_of(path) == "attempt-end" else None


def quarantined_id(path: str) -> int | None:
    """Return the id of a checkpoint from the path of its quarantine mark; None for other paths."""
    return record_id(path.removeprefix(QUARANTINE)) if kind_of(path) == "quarantine" else None


def quarantine(checkpoint_id: int) -> str:
    return f"{QUARANTINE}{checkpoint_id:020d}.json"


def validated(checkpoint_id: int, mode: str) -> str:
    """Return the path of the mark which says that a checkpoint passed validation."""
    return f"{VALIDATED}{checkpoint_id:020d}-{mode}.json"


def validated_id(path: str) -> tuple[int, str] | None:
    """Return (id, mode) from the path of a checkpoint's mark that it passed validation; None for other paths."""
    match = _VALIDATED.fullmatch(path)
    return (int(match[1]), match[2]) if match else None


def lease(checkpoint_id: int, seconds: int, lease: str) -> str:
    """Return the path of a lease on a checkpoint.

    A clean-up only lists the leases and does not read them, so the name contains all that it needs. The lease lasts
    `seconds` after its last write.
    """
    return f"{LEASES}{checkpoint_id:020d}-{seconds}-{lease}.json"


def leased_id(path: str) -> tuple[int, int] | None:
    """Return (checkpoint id, seconds that the lease lasts) from the path of a lease; None for other paths."""
    match = _LEASE.fullmatch(path)
    return (int(match[1]), int(match[2])) if match else None


def marked_id(path: str) -> int | None:
    """Return the id of the checkpoint in the path of a mark: a file in `published/`, `validated/` or `quarantine/`."""
    validated = validated_id(path)
    if validated is not None:
        return validated[0]
    return quarantined_id(path) or published_id(path)


def interval_name(interval: Interval) -> str:
    """Return an interval as a folder's name: start and end in UTC, to the millisecond. The names sort by time."""
    return f"{_compact(interval.start)}_{_compact(interval.end)}"


def _instant(text: str) -> datetime:
    return datetime.strptime(f"{text[:-1]}000", "%Y%m%dT%H%M%S%f").replace(tzinfo=UTC)


def _compact(instant: datetime) -> str:
    return f"{instant.year:04d}" + instant.strftime("%m%dT%H%M%S") + f"{instant.microsecond // 1000:03d}Z"
