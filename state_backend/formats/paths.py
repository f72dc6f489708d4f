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
"""Lengths, in days, of the periods with a folder of settled commits.

A settled commit is in the folder of the period in which its interval starts. The length is the shortest that is not below the interval's. So a
query for an interval lists two or three folders of each length."""
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
    "output": (("output", re.compile(rf"output/{_INTERVAL}/[^/]+/[^/.][^/]*\.parquet")),),
    "published": (("published", re.compile(rf"published/{_INTERVAL}/[0-9]{{1,20}}\.json")),),
    "validated": (("validated", _VALIDATED),),
    "quarantine": (("quarantine", re.compile(r"quarantine/[0-9]{20}\.json")),),
    "leases": (("lease", _LEASE),),
}
"""By first segment: the kinds of files below a pipeline's folder, and their names."""


def check_name(name: str) -> str:
    """Raise UsageError unless the name of a pipeline or savepoint can be part of a path: letters, digits, ``_ . -``, at most 100."""
    if not is_name(name):
        raise UsageError(f"{name!r} can't be a name here: use letters, digits, '_', '-' and '.', at most 100")
    return name


def is_name(name: str) -> bool:
    """Return True for a name that `check_name` accepts."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def record(checkpoint_id: int) -> str:
    """Return the path of a checkpoint's record."""
    return f"{CHECKPOINTS}{checkpoint_id:020d}.json"


def record_id(path: str) -> int | None:
    """Return the id in a path of the log, or None if the path is no record's."""
    match = _ID.fullmatch(path.removeprefix(CHECKPOINTS))
    return int(match[1]) if match else None


def kind_of(path: str) -> str | None:
    """Return the kind of a file below a pipeline's folder, or None: no part of Cairn writes files of that name there.

    Readers ignore files without a kind. `cairn verify` and sweeps report these files.
    """
    named = _KINDS.get(path.split("/", 1)[0], ())
    return next((kind for kind, name in named if name.fullmatch(path)), None)


def trial_name(path: str) -> str | None:
    """Return the trial whose record has this path, or None if the path is no trial's record."""
    match = _TRIAL.fullmatch(path)
    return match[1] if match else None


def trial(name: str) -> str:
    """Return the path of a trial's record in the folder of the pipeline's trials. Raises UsageError as ``check_name``."""
    return f"{TRIAL_RECORDS}{check_name(name)}.json"


def trial_root(name: str) -> str:
    """Return the path of the root of a trial's pipeline in the folder of the pipeline's trials. Raises UsageError as ``check_name``."""
    return f"{TRIAL_ROOTS}/{check_name(name)}"


def prepared(attempt: str) -> str:
    """Return the path of the record of an attempt that is prepared and not yet committed."""
    return f"{ATTEMPTS}{attempt}/prepared.json"


def refused(attempt: str) -> str:
    """Return the path of the mark that validation refused an attempt before its commit."""
    return f"{ATTEMPTS}{attempt}/refused.json"


def shared(attempt: str, shard: int, task: int, number: int, suffix: str) -> str:
    """Return the path of a shard's immutable file. ``suffix``: sst, log or manifest."""
    return f"{SHARED}{attempt}/{shard}-{task}-{number}.{suffix}"


def attempt_of(path: str) -> str | None:
    """Return the attempt that the path is of, or None."""
    parts = path.split("/")
    if parts[0] in ("shared", "attempts") and len(parts) == 3:
        return parts[1]
    return parts[2] if parts[0] == "output" and len(parts) == 4 else None


def output(interval: Interval, attempt: str, shard: int, task: int, *, late: bool = False) -> str:
    """Return the path of a shard's output file or late rows. ``task`` is Spark's task, because two tries at a shard write two files."""
    return f"{OUTPUT}{interval_name(interval)}/{attempt}/{'late' if late else 'part'}-{shard:05d}-{task}.parquet"


def canonical(savepoint: str, state: str | None, shard: int, task: int, number: int) -> str:
    """Return the path of a file of a state's rows, or of the timers (None). State names may be any text and are %-encoded."""
    return f"{savepoint}/{_state_folder(state)}/{shard:05d}-{task}-{number}.parquet"


def exported(state: str | None, shard: int, number: int) -> str:
    """Return the path of a file of a state's rows in an export's folder."""
    return f"{_state_folder(state)}/{shard:05d}-{number}.parquet"


def _state_folder(state: str | None) -> str:
    return "timers" if state is None else f"state-{quote(state, safe='')}"


def is_of_savepoint(path: str) -> bool:
    """Return True if this system writes files of that name in a savepoint's folder: native or canonical state."""
    return _OF_SAVEPOINT.fullmatch(path) is not None


def published(interval: Interval, checkpoint_id: int) -> str:
    """Return the path of the mark that the sink hook has run for the interval's output in this checkpoint."""
    return f"{PUBLISHED}{interval_name(interval)}/{checkpoint_id}.json"


def published_id(path: str) -> int | None:
    """Return the id in a published mark's path, or None if the path is no such mark."""
    match = _MARK.fullmatch(path)
    return int(match[1]) if match else None


def settled(interval: Interval, checkpoint_id: int, kind: str) -> str:
    """Return the path of a settled commit. ``kind``: as ``Settled.kind``."""
    folder = _settled_folder(settled_level(interval), _period(settled_level(interval), interval.start_ms))
    return f"{folder}{interval_name(interval)}-{checkpoint_id}-{kind}.json"


@lru_cache(maxsize=4096)
def parse_settled(path: str) -> tuple[Interval, int, str] | None:
    """Return interval, id and kind in a settled commit's path, or None if the path is no settled commit's."""
    match = _SETTLED.fullmatch(path)
    if match is None:
        return None
    return Interval(_instant(match[1]), _instant(match[2])), int(match[3]), match[4]


def settled_level(interval: Interval) -> int:
    """Return the index of the interval's length in ``SETTLED_DAYS``."""
    length_ms = interval.end_ms - interval.start_ms
    return next(n for n, days in enumerate(SETTLED_DAYS) if length_ms <= days * _DAY_MS)


def settled_folders(interval: Interval, levels: Iterable[int]) -> list[str]:
    """Return the folders with all settled commits of those lengths that overlap the interval."""
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
    """Return the folder by the date of the period's first day. A period that begins before the year 1 has that year's first day."""
    first_day = max(period * SETTLED_DAYS[level], date.min.toordinal() - _EPOCH_DAY)
    return f"{SETTLED_COMMITS}{SETTLED_DAYS[level]}d-{date.fromordinal(_EPOCH_DAY + first_day).isoformat()}/"


def names(folder: str) -> str:
    """Return the path of the file that lists the names in a folder.

    The folder is ``settled/commits/<period>/``, ``quarantine/``, ``leases/``, or a folder of a plain copy, whose readers ignore names that
    begin with ``_``.
    """
    ours = folder.startswith((SETTLED_COMMITS, QUARANTINE, LEASES))
    return f"{NAMES if ours else '_names/'}{folder.rstrip('/').rpartition('/')[2]}.json"


def attempt_end(attempt: str) -> str:
    """Return the path of the file that says how an attempt ended."""
    return f"{SETTLED_ATTEMPTS}{attempt}.json"


def ended_attempt(path: str) -> str | None:
    """Return the attempt in the path of an attempt's end, or None if the path is no such file."""
    return path.removeprefix(SETTLED_ATTEMPTS).removesuffix(".json") if kind_of(path) == "attempt-end" else None


def quarantined_id(path: str) -> int | None:
    """Return the checkpoint in a quarantine mark's path, or None if the path is no such mark."""
    return record_id(path.removeprefix(QUARANTINE)) if kind_of(path) == "quarantine" else None


def quarantine(checkpoint_id: int) -> str:
    """Return the path of the mark that a checkpoint was refused after its commit."""
    return f"{QUARANTINE}{checkpoint_id:020d}.json"


def validated(checkpoint_id: int, mode: str) -> str:
    """Return the path of the mark that a checkpoint passed validation in this mode."""
    return f"{VALIDATED}{checkpoint_id:020d}-{mode}.json"


def validated_id(path: str) -> tuple[int, str] | None:
    """Return id and mode in a validated mark's path, or None if the path is no such mark."""
    match = _VALIDATED.fullmatch(path)
    return (int(match[1]), match[2]) if match else None


def lease(checkpoint_id: int, seconds: int, lease: str) -> str:
    """Return the path of a lease on a checkpoint. The name holds all that a clean-up needs, because a clean-up only lists leases."""
    return f"{LEASES}{checkpoint_id:020d}-{seconds}-{lease}.json"


def leased_id(path: str) -> tuple[int, int] | None:
    """Return the checkpoint of a lease, and the lease's seconds after its last write; None if the path is no lease."""
    match = _LEASE.fullmatch(path)
    return (int(match[1]), int(match[2])) if match else None


def marked_id(path: str) -> int | None:
    """Return the checkpoint of a published, validated or quarantine mark; None if the path is no mark."""
    validated = validated_id(path)
    if validated is not None:
        return validated[0]
    return quarantined_id(path) or published_id(path)


def interval_name(interval: Interval) -> str:
    """Return an interval as a folder's name: start and end in UTC, to the millisecond, in the order of time."""
    return f"{_compact(interval.start)}_{_compact(interval.end)}"


def _instant(text: str) -> datetime:
    return datetime.strptime(f"{text[:-1]}000", "%Y%m%dT%H%M%S%f").replace(tzinfo=UTC)


def _compact(instant: datetime) -> str:
    return f"{instant.year:04d}" + instant.strftime("%m%dT%H%M%S") + f"{instant.microsecond // 1000:03d}Z"
