"""One process at a pipeline's log, as tests write it: its location, its policy, and what it has read and written."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Any
from unittest import mock

from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint import (
    begin_attempt,
    clean_up_dropped,
    commit_attempt,
    find_checkpoint,
    prepared_attempts,
    publish_output,
)
from state_backend.checkpoint import quarantine as marks
from state_backend.checkpoint import rewind as rewinding
from state_backend.checkpoint.begin_attempt import Begun
from state_backend.checkpoint.clean_up_dropped import CleanUp
from state_backend.checkpoint.commit_attempt import CommitResult
from state_backend.checkpoint.location import Location
from state_backend.checkpoint.log import Log, read_log, read_newest
from state_backend.ports.storage import Storage
from state_backend.values.intervals import Interval
from state_backend.values.records import Content, Permissions, Prepared, Record, ValidationMode
from state_backend.values.retention import RetentionPolicy
from state_backend.values.schedule import Schedule


class Coordinator:
    """``remembers``: hands the read log and what it has written on to the next step, as `run_interval` does."""

    def __init__(
        self, storage: Storage, pipeline: str, *, policy: RetentionPolicy | None = None, remembers: bool = False
    ) -> None:
        self.at = Location(root=storage.url.removesuffix(f"/{pipeline}"), pipeline=pipeline, storage=storage)
        self.storage, self.pipeline, self.policy, self.remembers = storage, pipeline, policy, remembers
        self.before: Log | None = None
        self.after: Log | None = None
        self.written: Prepared | None = None

    def log(self) -> Log:
        return read_log(self.storage, self.before)

    def begin(
        self, interval: Interval, *, permissions: Permissions, pipeline_start_ms: int, schedule: Schedule | None = None
    ) -> Begun:
        if self.remembers:
            self.before = read_newest(self.storage, self.before)
        return begin_attempt.begin(
            self.at,
            interval,
            permissions=permissions,
            pipeline_start_ms=pipeline_start_ms,
            schedule=schedule,
            log=self.before,
        )

    def begin_restore(self, content: Content, *, pipeline_start_ms: int) -> Begun:
        return begin_attempt.begin_restore(self.at, content, pipeline_start_ms=pipeline_start_ms)

    def prepare(self, prepared: Prepared) -> Prepared:
        made = prepared_attempts.create_prepared(self.at, prepared)
        self.written = made if self.remembers else None
        return made

    def load_prepared(self, attempt: str) -> Prepared:
        return prepared_attempts.load_prepared(self.at, attempt)

    def commit(self, attempt: str) -> CommitResult:
        written = self.written if self.written is not None and self.written.content.attempt == attempt else None
        made = commit_attempt.commit(self.at, attempt, prepared=written, before=self.before, policy=self.policy)
        if self.remembers and made.log is not None:
            self.before = self.after = made.log
        return made

    def publish(self, hook: Any, **how: Any) -> list[tuple[Interval, int]]:
        return publish_output.publish(self.at, hook, after=self.after, **how)

    def unpublished(self) -> list[tuple[Interval, int]]:
        return publish_output.unpublished(self.at)

    def clean_up(self) -> CleanUp:
        after, self.after = self.after, None
        return clean_up_dropped.clean_up(self.storage, after)

    def rewind(self, target: int, **how: Any) -> CommitResult:
        with self._policy_of_rewinds():
            return rewinding.rewind(self.at, target, **how)

    def fork(self, source: Storage, target: Any, **how: Any) -> CommitResult:
        """``target`` of ``source`` as the state of this pipeline; the files are copied one by one."""
        one_by_one = mock.patch.object(rewinding, "take_over", partial(rewinding.take_over, parallelism=1))
        with self._policy_of_rewinds(), one_by_one:
            return rewinding.fork(source, target, self.at, **how)

    def _policy_of_rewinds(self) -> Any:
        return mock.patch.object(rewinding, "commit", partial(commit_attempt.commit, policy=self.policy))

    def record(self, which: str | int | datetime) -> Record:
        return find_checkpoint.record_of(self.at, which)

    def quarantine(self, checkpoint_id: int, reason: str, findings: tuple[str, ...] = ()) -> None:
        marks.quarantine_checkpoint(self.at, checkpoint_id, reason, findings)

    def release(self, checkpoint_id: int) -> None:
        marks.release_checkpoint(self.at, checkpoint_id)

    def drop_quarantined(self, checkpoint_id: int) -> None:
        marks.drop_quarantined(self.at, checkpoint_id)

    def mark_validated(self, checkpoint_id: int, mode: ValidationMode) -> None:
        marks.mark_validated(self.at, checkpoint_id, mode)

    def refuse(self, attempt: str, reason: str, findings: tuple[str, ...] = ()) -> None:
        prepared_attempts.refuse(self.at, attempt, reason, findings)


def coordinator_of(pipeline: Any, root: str, *, remembers: bool = False) -> Coordinator:
    """The same, of a declared pipeline below a root."""
    return Coordinator(open_storage(join_url(root, pipeline.name)), pipeline.name, remembers=remembers)
