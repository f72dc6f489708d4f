"""Pipelines' folders for the pages in Airflow's UI, written without Spark: with a re-run that changed the result, what it left stale, a
quarantined checkpoint, a restored and a consolidated one; and one with a long past."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.log_growth import HOUR, Case, files_of, recent, settled_past, write_out
from state_backend.adapters.local_storage import LocalStorage
from state_backend.checkpoint.coordinator import CommitResult
from state_backend.checkpoint.rewind import rewind
from state_backend.ports.storage import Storage
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.records import (
    Content,
    InlineShard,
    KeyGroupState,
    LocalFile,
    Permissions,
    Record,
    RunRef,
    SchemaVersion,
    ShardManifest,
    StateDescriptor,
    Totals,
)
from state_backend.values.retention import KeepLast
from tests.support.checkpoints import Folder, content, day, run, sst

KIB, MIB = 1024, 1024 * 1024
STATES = (
    StateDescriptor(
        name="total",
        kind="value",
        state_id=1,
        ttl_ms=None,
        versions=(
            SchemaVersion(version=1, value=_struct := {"type": "struct", "fields": [{"name": "n", "type": "long"}]}, user_key=None),
            SchemaVersion(
                version=2,
                value={"type": "struct", "fields": [*_struct["fields"], {"name": "last", "type": "timestamp"}]},  # type: ignore[misc]
                user_key=None,
            ),
        ),
    ),
    StateDescriptor(
        name="<i>visits</i>",
        kind="list",
        state_id=2,
        ttl_ms=30 * 86_400_000,
        versions=(SchemaVersion(version=1, value=_struct, user_key=None),),
    ),
)
SKEW = (1.0, 0.9, 2.6, 1.1)


def run_id(day_number: int) -> str:
    """Of the run of a day, as Airflow names scheduled ones."""
    return f"scheduled__{day(day_number).end.isoformat()}"


class ShownFolder(Folder):
    """A folder whose checkpoints have figures that look like a pipeline's: they grow, and the third shard has most."""

    def day(self, number: int, attempt: str, **changes: Any) -> CommitResult:
        """Commits the n-th day."""
        shards = tuple(_shard(attempt, n, number, share) for n, share in enumerate(SKEW))
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
            state_bytes=40 * MIB + number * MIB,
            state_files=12 + number % 5,
            downloaded_bytes=0 if number % 3 else 8 * MIB,
            cached_bytes=32 * MIB,
        )
        phases = {"restore": 300_000 + 9000 * number, "process": 2_400_000 + 60_000 * number, "upload": 500_000}
        made: dict[str, Any] = {
            "shards": shards,
            "states": STATES,
            "totals": totals,
            "durations_us": phases,
            "parallelism": len(SKEW),
            "max_parallelism": 64,
            "run": run(run_id(number), changes.pop("clear_number", 0), changes.pop("try_number", 1)),
            "source_position": {"files": [f"day={day(number).start:%Y-%m-%d}/events.parquet"], "offset": 17 * number},
            "retention": KeepLast(100),
        }
        done = self.run(day(number), attempt, **made, **changes)
        self.coordinator.publish(None)
        self.coordinator.clean_up()
        return done


def _shard(attempt: str, shard: int, number: int, share: float) -> InlineShard:
    manifest = ShardManifest(
        shard=shard,
        key_groups=KeyGroupRange(first=16 * shard, last=16 * shard + 15),
        files=(),
        inline_files=(),
        segments=(),
        key_group_states=tuple(
            KeyGroupState(
                key_group=16 * shard + g,
                entries={"total": round((400 + 10 * number) * share)},
                digest=hash((attempt, shard)) % 2**63 if g == number % 16 else g,
                size_bytes=10_000,
            )
            for g in range(16)
        ),
    )
    return InlineShard(shard=shard, inline=manifest)


__all__ = ["HOUR", "LocalFile", "replace", "sst"]
