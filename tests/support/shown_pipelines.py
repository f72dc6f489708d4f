"""Pipelines' folders for the pages in Airflow's UI, written without Spark. Figures grow from day to day, and the third shard has most."""

from __future__ import annotations

from typing import Any

from state_backend.checkpoint.commit_attempt import CommitResult
from state_backend.checkpoint.rewind import rewind
from state_backend.ports.storage import Storage
from state_backend.values.airflow_runs import DagSchedule
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.records import (
    InlineFile,
    InlineShard,
    KeyGroupState,
    Permissions,
    SchemaVersion,
    ShardManifest,
    StateDescriptor,
    Totals,
)
from state_backend.values.retention import KeepLast
from tests.support.checkpoints import Folder, day, run

KIB, MIB = 1024, 1024 * 1024
SKEW = (1.0, 0.9, 2.6, 1.1)
_COUNT = {"type": "struct", "fields": [{"name": "n", "type": "long"}]}
_GROWN = {"type": "struct", "fields": [{"name": "n", "type": "long"}, {"name": "last", "type": "timestamp"}]}
STATES = (
    StateDescriptor(
        name="total",
        kind="value",
        state_id=1,
        ttl_ms=None,
        versions=(
            SchemaVersion(version=1, value=_COUNT, user_key=None),
            SchemaVersion(version=2, value=_GROWN, user_key=None),
        ),
    ),
    StateDescriptor(
        name="<i>visits</i>",
        kind="list",
        state_id=2,
        ttl_ms=30 * 86_400_000,
        versions=(SchemaVersion(version=1, value=_COUNT, user_key=None),),
    ),
)


def plan(**changes: Any) -> DagSchedule:
    """That of a DAG which has runs up to day 9. The next one is due when day 10 has ended."""
    said = {"paused": False, "asked_end": day(9).end, "next_due": day(10).end, "running": 0}
    return DagSchedule(**(said | changes))


def run_id(number: int) -> str:
    """Of the run of a day; Airflow makes none by hand whose id begins otherwise."""
    return f"manual__{day(number).end.isoformat()}"


class ShownFolder:
    """A pipeline's folder, a day a checkpoint."""

    def __init__(self, storage: Storage) -> None:
        self.folder = Folder(storage)
        self.coordinator = self.folder.coordinator

    def day(self, number: int, attempt: str | None = None, *, clear_number: int = 0, **changes: Any) -> CommitResult:
        """Commits the n-th day. Another attempt's name is another result."""
        attempt = attempt or f"day-{number}"
        rows = 40_000 + 1700 * number
        totals = Totals(
            input_rows=rows,
            output_rows=rows // 4,
            late_rows=number % 3,
            keys_touched=900 + 40 * number,
            keys=20_000 + 700 * number,
            entries=31_000 + 900 * number,
            changed_bytes=600 * KIB,
            uploaded_bytes=700 * KIB + 9 * KIB * number,
            uploaded_files=5,
            state_bytes=(40 + number) * MIB,
            state_files=12 + number % 5,
            downloaded_bytes=0 if number % 3 else 8 * MIB,
            cached_bytes=32 * MIB,
        )
        made: dict[str, Any] = {
            "shards": tuple(_shard(attempt, n, number, share) for n, share in enumerate(SKEW)),
            "states": STATES,
            "totals": totals,
            "durations_us": {
                "restore": 300_000 + 9000 * number,
                "process": 2_400_000 + 60_000 * number,
                "upload": 500_000,
            },
            "parallelism": len(SKEW),
            "max_parallelism": 16 * len(SKEW),
            "run": run(run_id(number), clear_number, 1 + clear_number),
            "source_position": {"files": [f"day={day(number).start:%Y-%m-%d}/events.parquet"], "offset": 17 * number},
            "retention": KeepLast(100),
            **changes,
        }
        done = self.folder.run(day(number), attempt, **made)
        self.coordinator.publish(None)
        self.coordinator.clean_up()
        return done

    def back_to(self, checkpoint: int) -> int:
        """Rewinds; the id of the restored checkpoint."""
        attempt = f"back-to-{checkpoint}"
        discards = frozenset(n for n in self.coordinator.log().retained if n > checkpoint)
        ref = run(f"manual__{attempt}")
        return rewind(
            self.coordinator.at, checkpoint, run=ref, attempt=attempt, permissions=Permissions(), agreed=discards
        ).id


def _shard(attempt: str, shard: int, number: int, share: float) -> InlineShard:
    seed = sum(attempt.encode())
    manifest = ShardManifest(
        shard=shard,
        key_groups=KeyGroupRange(first=16 * shard, last=16 * shard + 15),
        files=(),
        inline_files=(InlineFile(name="CURRENT", data=bytes(round(2000 * share))),),
        segments=(),
        key_group_states=tuple(
            KeyGroupState(
                key_group=16 * shard + g,
                entries={"total": round((400 + 10 * number) * share)},
                digest=seed + shard if g == number % 16 else g,
                size_bytes=10_000,
            )
            for g in range(16)
        ),
    )
    return InlineShard(shard=shard, inline=manifest)


def eventful(storage: Storage) -> ShownFolder:
    """Nine days; the fourth is run again with another result, with it the fifth; then back to day 8's state, and day 9 anew, which validation
    refuses.

    Ids: 1–6 days 1–6 · 7, 8 days 4 and 5 again (5 and 6 become stale) · 9, 10, 11 days 6, 7 and 8 · 12 day 9 · 13 back to 11 · 14
    day 9 again, quarantined.
    """
    shown = ShownFolder(storage)
    for number in range(1, 7):
        shown.day(number)
    shown.coordinator.mark_validated(3, "full")
    shown.day(4, "day-4-again", clear_number=1)
    shown.day(5, "day-5-again", clear_number=1)
    for number in (6, 7, 8):
        shown.day(number, f"day-{number}-again", clear_number=1 if number == 6 else 0)
    shown.coordinator.mark_validated(11, "fast")
    shown.coordinator.mark_validated(11, "full")
    shown.day(9)
    assert shown.back_to(11) == 13
    assert shown.day(9, "day-9-again", clear_number=1).id == 14
    shown.coordinator.quarantine(
        14, "full validation: 2 findings", ("total: 3 keys are negative", "<b>visits</b> is empty")
    )
    return shown


def steady(storage: Storage, days: int = 30) -> ShownFolder:
    """A month without an event."""
    shown = ShownFolder(storage)
    for number in range(1, days + 1):
        shown.day(number)
    shown.coordinator.mark_validated(days, "full")
    return shown
