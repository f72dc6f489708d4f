"""Checkpoints without Spark: small contents, logs, and a pipeline folder in memory that commits like the real one."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import google_crc32c

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint.commit_attempt import CommitResult
from state_backend.checkpoint.log import kept_of
from state_backend.formats import paths, record_codec
from state_backend.ports.storage import Storage
from state_backend.values.handles import Handle
from state_backend.values.intervals import Interval
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.marks import Trial
from state_backend.values.records import (
    Content,
    FiledShard,
    InlineFile,
    InlineShard,
    KeyGroupState,
    LocalFile,
    LogicalTime,
    OutputFile,
    Permissions,
    Prepared,
    Record,
    Retained,
    RunRef,
    SchemaVersion,
    Segment,
    ShardManifest,
    StateDescriptor,
    Summary,
    Totals,
)
from tests.support.coordinator import Coordinator

START = datetime(2024, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)
PIPELINE = "counting"
STATES = (
    StateDescriptor(
        name="total",
        kind="value",
        state_id=1,
        ttl_ms=None,
        versions=(SchemaVersion(version=1, value={"type": "struct"}, user_key=None),),
    ),
)


def day(n: int) -> Interval:
    """The n-th day, from 1."""
    return Interval(START + (n - 1) * DAY, START + n * DAY)


def start_ms() -> int:
    return day(1).start_ms


def run(run_id: str = "run", clear_number: int = 0, try_number: int = 1) -> RunRef:
    return RunRef(run_id=run_id, clear_number=clear_number, try_number=try_number)


def content(interval: Interval, attempt: str, base_id: int | None = None, **changes: Any) -> Content:
    """Digest: by default the attempt's own, so that two attempts differ unless a test says otherwise."""
    made = Content(
        kind="interval",
        pipeline=PIPELINE,
        pipeline_start_ms=start_ms(),
        interval=interval,
        run=run(f"run-of-{attempt}"),
        attempt=attempt,
        base_id=base_id,
        permissions=Permissions(),
        parallelism=1,
        max_parallelism=16,
        key_schema={"type": "struct", "fields": []},
        states=STATES,
        time=LogicalTime(mode="processing", processing_time_ms=interval.end_ms, watermark_ms=None),
        source_position={"files": []},
        code_hash="0" * 16,
        totals=Totals(
            input_rows=1,
            output_rows=1,
            late_rows=0,
            keys_touched=1,
            keys=1,
            entries=1,
            changed_bytes=1,
            uploaded_bytes=1,
            uploaded_files=1,
            state_bytes=1,
            state_files=1,
        ),
        digest=sum(ord(c) << 8 * n for n, c in enumerate(attempt)) % 2**64,
        shards=(),
        outputs=(),
        durations_us={"process": 1},
        worker_pids=(1,),
    )
    return replace(made, **changes)


def record(
    id: int,
    interval: Interval,
    base_id: int | None = None,
    retained: dict[int, int | None] | None = None,
    **changes: Any,
) -> Record:
    """A record of attempt ``a<id>``; by default it retains all up to itself."""
    reproduces = changes.pop("reproduces", None)
    kept = {n: None for n in range(1, id + 1)} if retained is None else retained
    made = Record(
        id=id,
        retained=tuple(Retained(id=i, stale_by=by) for i, by in kept.items()),
        reproduces=reproduces,
        content=content(interval, changes.pop("attempt", f"a{id}"), base_id, **changes),
    )
    # The others are as this record: who asks about them asks a log (`log_in_memory`), or a folder.
    return replace(made, summary=Summary(kept=tuple(replace(kept_of(made), id=n) for n in kept)))


def manifest(files: list[Handle], digest: int = 0) -> ShardManifest:
    """Of shared files; those that end with ``.log`` are segments."""
    logs = [h for h in files if h.path.endswith(".log")]
    return ShardManifest(
        shard=0,
        key_groups=KeyGroupRange(first=0, last=15),
        files=tuple(LocalFile(name=f"{n:06d}.sst", handle=h) for n, h in enumerate(files) if h not in logs),
        inline_files=(InlineFile(name="CURRENT", data=b"\x00\xff"),),
        segments=tuple(Segment(handle=h, data=None, changes=1, content_bytes=2) for h in logs),
        key_group_states=(KeyGroupState(key_group=3, entries={"total": 1}, digest=digest),),
    )


class Folder:
    """A pipeline's folder. Attempts write ``sst`` or ``log`` files; manifests lie inline or in files of their own."""

    def __init__(
        self, storage: Storage | None = None, *, days: int = 0, inline: bool = True, suffix: str = "sst", **options: Any
    ) -> None:
        """``days``: so many are committed, from day 1 on, by the attempts a1, a2, ..."""
        self.storage = storage if storage is not None else MemoryStorage()
        self.options = options
        self.inline = inline
        self.suffix = suffix
        self.coordinator = Coordinator(self.storage, PIPELINE, **options)
        for n in range(1, days + 1):
            self.run(day(n), f"a{n}")

    @property
    def memory(self) -> MemoryStorage:
        assert isinstance(self.storage, MemoryStorage)
        return self.storage

    def over(self, storage: Storage) -> Coordinator:
        """Another process, over the same or a faulty storage."""
        return Coordinator(storage, PIPELINE, **self.options)

    def prepare(
        self, interval: Interval, attempt: str, *, keep: tuple[str, ...] = (), h0: int | None = None, **changes: Any
    ) -> Prepared:
        """Begins, writes one new shared file and one output, and prepares. ``keep``: shared files of the base to go on
        with. ``base_id`` and ``h0`` are those of a real begin unless given."""
        begun = None
        if "base_id" not in changes or h0 is None:
            begun = self.coordinator.begin(
                interval, permissions=changes.get("permissions", Permissions()), pipeline_start_ms=start_ms()
            )
        base_id = changes.pop("base_id", begun.base.id if begun and begun.base else None)
        new = self.storage.create(sst(attempt, self.suffix), f"state of {attempt}".encode())
        old = [self.handle(path) for path in keep]
        output = self.storage.create(paths.output(interval, attempt, 0, 0), f"output of {attempt}".encode())
        made = manifest([*old, new])
        if self.inline:
            ref = InlineShard(shard=0, inline=made)
        else:
            handle = self.storage.create(paths.shared(attempt, 0, 0, 0, "manifest"), record_codec.encode(made))
            ref = FiledShard(shard=0, manifest=handle)
        changes.setdefault("shards", (ref,))
        changes.setdefault("outputs", (OutputFile(handle=output, rows=1),))
        made_content = content(interval, attempt, base_id, **changes)
        prepared = Prepared(h0=h0 if h0 is not None else (begun.h0 if begun else 0), content=made_content)
        self.coordinator.prepare(prepared)
        return prepared

    def run(self, interval: Interval, attempt: str, **changes: Any) -> CommitResult:
        """Prepares and commits."""
        self.prepare(interval, attempt, **changes)
        return self.coordinator.commit(attempt)

    def publish_and_clean_up(self) -> None:
        """What the checkpoint task does after a commit."""
        self.coordinator.publish(None)
        self.coordinator.clean_up()

    def handle(self, path: str) -> Handle:
        data = self.storage.read(path)
        return Handle(path=path, size_bytes=len(data), crc32c=google_crc32c.value(data))

    def paths(self, prefix: str = "") -> set[str]:
        """All files, but for those that say again, by name, what the log says."""
        return files_in(self.storage, prefix)


def files_in(storage: Storage, prefix: str = "") -> set[str]:
    """All files, but for those that say again, by name, what the log says."""
    again = (paths.HEAD, paths.SETTLED)
    return {info.path for info in storage.list(prefix) if not info.path.startswith(again)}


def sst(attempt: str, suffix: str = "sst") -> str:
    """The shared file that ``Folder.prepare`` writes for an attempt."""
    return paths.shared(attempt, 0, 0, 0, suffix)


def trial_of(span: Interval, *, ends_ms: int) -> Trial:
    """A trial of one day that began from nothing; ``ends_ms``: when a sweep may remove it."""
    return Trial(
        name="trial",
        pipeline=PIPELINE,
        code="module:NAME",
        code_hash="0",
        code_version=None,
        span=span,
        length_ms=86_400_000,
        attempt="fork",
        base=None,
        ends_ms=ends_ms,
    )
