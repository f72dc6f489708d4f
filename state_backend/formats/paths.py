"""Every durable path is built, and read back, here.

    checkpoints/00000000000000000042.json                            the log
    HEAD.json                                                        the log has at least this id
    settled/commits/1d-2013-01-01/<interval>-<id>-<kind>.json        what a commit did, by the day that its interval starts in
    settled/attempts/<attempt>.json                                  which record says what became of it
    settled/names/<folder>.json                                      on disks: files that a listing of the folder must not miss
    shared/<attempt>/<shard>-<task>-<n>.sst|.log|.manifest           immutable
    attempts/<attempt>/prepared.json
    output/<interval>/<attempt>/part-<shard>-<task>.parquet, late-<shard>-<task>.parquet
    published/<interval>/<id>.json
    quarantine/00000000000000000042.json
    validated/00000000000000000042-full.json                         or -fast
    attempts/<attempt>/refused.json
    leases/00000000000000000042-900-<lease>.json                     somebody reads checkpoint 42; ends after 900 s without renewal
    clock                                                            there for a moment: its time is the storage's

and in a savepoint's own folder

    savepoint.json                                                   written last; without it the folder is no savepoint
    claimed.json                                                     somebody took it over
    shared/<savepoint>/<shard>-<task>-<n>.sst                        native
    <savepoint>/state-<name>/<shard>-<task>-<n>.parquet              canonical, and <savepoint>/timers/…

and beside the pipelines' folders, in .trials/<pipeline>, which no pipeline can be named like

    trials/<name>.json                                               written first, deleted last
    roots/<name>/<pipeline>/…                                        all of the above, of a trial

``<interval>`` is ``20130101T000000000Z_20130102T000000000Z``: sorts by time, and has no character that a shell, a URL or a
file system minds.
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
"""A settled commit lies in a folder for the period in which its interval starts. Periods are as many days long as the shortest of
these that the interval is not longer than, so that a question about some interval is answered by two or three folders a length."""
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
    r"-(interval|consolidate|restore|replaced)\.json"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def check_name(name: str) -> str:
    """A pipeline or savepoint name that can stand in a path: letters, digits, ``_ . -``, at most 100. Raises: UsageError if not."""
    if not is_name(name):
        raise UsageError(f"{name!r} can't be a name here: use letters, digits, '_', '-' and '.', at most 100")
    return name


def is_name(name: str) -> bool:
    """True for a name that `check_name` accepts."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def record(checkpoint_id: int) -> str:
    """Of a checkpoint's record, by its id."""
    return f"{CHECKPOINTS}{checkpoint_id:020d}.json"


def record_id(path: str) -> int | None:
    """The id that a path of the log names, or None if it is none of ours."""
    match = _ID.fullmatch(path.removeprefix(CHECKPOINTS))
    return int(match[1]) if match else None


def trial(name: str) -> str:
    """Of what is recorded of a trial, in the folder of the pipeline's trials. Raises: UsageError as ``check_name``."""
    return f"{TRIAL_RECORDS}{check_name(name)}.json"


def trial_root(name: str) -> str:
    """Of the root that a trial's pipeline lies in, in the folder of the pipeline's trials. Raises: UsageError as ``check_name``."""
    return f"{TRIAL_ROOTS}/{check_name(name)}"


def prepared(attempt: str) -> str:
    """Of what an attempt made, before it is committed."""
    return f"{ATTEMPTS}{attempt}/prepared.json"


def refused(attempt: str) -> str:
    """Of the mark that validation refused an attempt before its commit."""
    return f"{ATTEMPTS}{attempt}/refused.json"


def shared(attempt: str, shard: int, task: int, number: int, suffix: str) -> str:
    """``suffix`` is sst, log or manifest."""
    return f"{SHARED}{attempt}/{shard}-{task}-{number}.{suffix}"


def attempt_of(path: str) -> str | None:
    """The attempt in whose scope a path lies, or None."""
    parts = path.split("/")
    if parts[0] in ("shared", "attempts") and len(parts) == 3:
        return parts[1]
    return parts[2] if parts[0] == "output" and len(parts) == 4 else None


def output(interval: Interval, attempt: str, shard: int, task: int, *, late: bool = False) -> str:
    """Of a shard's output file, or of its late rows. ``task`` is Spark's, so that two tries at a shard write two files."""
    return f"{OUTPUT}{interval_name(interval)}/{attempt}/{'late' if late else 'part'}-{shard:05d}-{task}.parquet"


def canonical(savepoint: str, state: str | None, shard: int, task: int, number: int) -> str:
    """A file of a state's rows, or of the timers (None). Names of states may be any text; in paths they are %-encoded."""
    return f"{savepoint}/{_state_folder(state)}/{shard:05d}-{task}-{number}.parquet"


def exported(state: str | None, shard: int, number: int) -> str:
    """The same of an export, which is a folder of its own."""
    return f"{_state_folder(state)}/{shard:05d}-{number}.parquet"


def _state_folder(state: str | None) -> str:
    return "timers" if state is None else f"state-{quote(state, safe='')}"


def is_of_savepoint(path: str) -> bool:
    """Whether files of that name, in a savepoint's folder, are written by this system: state, native or canonical."""
    return _OF_SAVEPOINT.fullmatch(path) is not None


def published(interval: Interval, checkpoint_id: int) -> str:
    """Of the mark that the sink hook has run for this interval's output, as this checkpoint made it."""
    return f"{PUBLISHED}{interval_name(interval)}/{checkpoint_id}.json"


def published_id(path: str) -> int | None:
    """The id whose sink hook a path says has run, or None if it is none of ours."""
    match = _MARK.fullmatch(path)
    return int(match[1]) if match else None


def settled(interval: Interval, checkpoint_id: int, kind: str) -> str:
    """``kind``: as ``Settled.kind``."""
    folder = _settled_folder(settled_level(interval), _period(settled_level(interval), interval.start_ms))
    return f"{folder}{interval_name(interval)}-{checkpoint_id}-{kind}.json"


@lru_cache(maxsize=4096)
def parse_settled(path: str) -> tuple[Interval, int, str] | None:
    """Interval, id and kind that a path says were settled, or None if it is none of ours."""
    match = _SETTLED.fullmatch(path)
    if match is None:
        return None
    return Interval(_instant(match[1]), _instant(match[2])), int(match[3]), match[4]


def settled_level(interval: Interval) -> int:
    """The index of the interval's length in ``SETTLED_DAYS``."""
    length_ms = interval.end_ms - interval.start_ms
    return next(n for n, days in enumerate(SETTLED_DAYS) if length_ms <= days * _DAY_MS)


def settled_folders(interval: Interval, levels: Iterable[int]) -> list[str]:
    """The folders in which everything lies that was settled of those lengths and overlaps the interval."""
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
    """By the date of the period's first day; one that begins before the year 1 has that year's first."""
    first_day = max(period * SETTLED_DAYS[level], date.min.toordinal() - _EPOCH_DAY)
    return f"{SETTLED_COMMITS}{SETTLED_DAYS[level]}d-{date.fromordinal(_EPOCH_DAY + first_day).isoformat()}/"


def names(folder: str) -> str:
    """Of the file that names what is in a folder: ``settled/commits/<period>/``, ``quarantine/``, ``leases/``, or one of a plain copy,
    whose readers skip what begins with ``_``."""
    ours = folder.startswith((SETTLED_COMMITS, QUARANTINE, LEASES))
    return f"{NAMES if ours else '_names/'}{folder.rstrip('/').rpartition('/')[2]}.json"


def attempt_end(attempt: str) -> str:
    """Of the file that says how an attempt ended."""
    return f"{SETTLED_ATTEMPTS}{attempt}.json"


def ended_attempt(path: str) -> str | None:
    """The attempt that a path says has ended, or None if it is none of ours."""
    name = path.removeprefix(SETTLED_ATTEMPTS)
    return name.removesuffix(".json") if name != path and name.endswith(".json") and "/" not in name else None


def quarantine(checkpoint_id: int) -> str:
    """Of the mark that a checkpoint was refused after its commit."""
    return f"{QUARANTINE}{checkpoint_id:020d}.json"


def validated(checkpoint_id: int, mode: str) -> str:
    """Of the mark that a checkpoint passed validation in this mode."""
    return f"{VALIDATED}{checkpoint_id:020d}-{mode}.json"


def validated_id(path: str) -> tuple[int, str] | None:
    """The id and the mode that a path says were validated, or None if it is none of ours."""
    match = _VALIDATED.fullmatch(path)
    return (int(match[1]), match[2]) if match else None


def lease(checkpoint_id: int, seconds: int, lease: str) -> str:
    """Of a lease on a checkpoint. What a clean-up must know stands in the name, so that one listing tells it."""
    return f"{LEASES}{checkpoint_id:020d}-{seconds}-{lease}.json"


def leased_id(path: str) -> tuple[int, int] | None:
    """The checkpoint that a lease is on and for how many seconds after it was last written, or None if that is no lease."""
    match = _LEASE.fullmatch(path)
    return (int(match[1]), int(match[2])) if match else None


def marked_id(path: str) -> int | None:
    """The checkpoint that a mark speaks of: published, validated or quarantined. None if the path is no mark."""
    validated = validated_id(path)
    if validated is not None:
        return validated[0]
    return record_id(path.removeprefix(QUARANTINE)) if path.startswith(QUARANTINE) else published_id(path)


def interval_name(interval: Interval) -> str:
    """An interval as a name of a folder: start and end in UTC, to the millisecond, in the order of time."""
    return f"{_compact(interval.start)}_{_compact(interval.end)}"


def _instant(text: str) -> datetime:
    return datetime.strptime(f"{text[:-1]}000", "%Y%m%dT%H%M%S%f").replace(tzinfo=UTC)


def _compact(instant: datetime) -> str:
    return f"{instant.year:04d}" + instant.strftime("%m%dT%H%M%S") + f"{instant.microsecond // 1000:03d}Z"
