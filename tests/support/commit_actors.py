"""The processes of the explorer: what each does to a pipeline's folder, call by call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from state_backend.checkpoint.leases import give_back, take_lease
from state_backend.checkpoint.log import Log, attempt_of
from state_backend.checkpoint.newest_state import newest_state
from state_backend.checkpoint.plan_retention import DEFAULT_POLICY
from state_backend.checkpoint.sweep_files import sweep
from state_backend.ports.storage import Storage
from state_backend.values.errors import (
    AttemptLost,
    CheckpointDropped,
    StaleStateError,
    StateGapError,
    StateUnusable,
    UnknownOutcome,
    UsageError,
)
from state_backend.values.intervals import Interval
from state_backend.values.records import Forget, ForgottenKey, InlineShard, Permissions, Prepared, Record, RunRef
from state_backend.values.retention import RetentionPolicy
from tests.support.checkpoints import PIPELINE, content, day, manifest, run, sst, start_ms
from tests.support.commit_world import coordinator, hook_into, must, prepare, read_manifest
from tests.support.coordinator import Coordinator
from tests.support.interleavings import NOW_MS, Actor
from tests.support.log_in_memory import log_in_memory


def checkpoint_task(name: str, attempt: str, policy: RetentionPolicy) -> Actor:
    """What the `checkpoint` task of Airflow does with a prepared attempt."""

    def commit(storage: Storage) -> str:
        return coordinator(storage, policy).commit(attempt).outcome

    stages = (commit, *after_commit(policy))
    return Actor(name=name, stages=stages, may=(AttemptLost, UnknownOutcome), attempt=attempt)


def remembering_task(name: str, attempt: str, policy: RetentionPolicy) -> Actor:
    """The same by one coordinator, which goes on from what it has read and written itself, as the operator's does."""

    def everything(storage: Any) -> str:
        one = Coordinator(storage, PIPELINE, policy=policy, remembers=True)
        outcome = one.commit(attempt).outcome
        one.publish(hook_into(storage))
        one.clean_up()
        return outcome

    everything.publishes = True  # type: ignore[attr-defined]
    return Actor(name=name, stages=(everything,), may=(AttemptLost, UnknownOutcome), attempt=attempt)


def after_commit(policy: RetentionPolicy) -> tuple[Callable[[Any], None], ...]:
    def publish(storage: Any) -> None:
        coordinator(storage, policy).publish(hook_into(storage))

    def clean_up(storage: Any) -> None:
        coordinator(storage, policy).clean_up()

    publish.sees = _current  # type: ignore[attr-defined]
    return publish, clean_up


def _current(log: Log) -> tuple[Any, ...]:
    """Publishing asks a log for what is unpublished, and for what the newest record did; the rest it looks up by name."""
    head = log.entries[log.head_id]
    told = [(u.interval, u.id, attempt_of(log.entries[u.id])) for u in log.summary.unpublished]  # type: ignore[arg-type]
    own = (head.content.interval, head.content.kind, head.replaced) if isinstance(head, Record) else None
    return ("current", log.head_id, own, log.summary.levels, *told)


def whole_interval(
    name: str,
    interval: Interval,
    attempt: str,
    policy: RetentionPolicy,
    *,
    outputs: bool = True,
    permissions: Permissions = Permissions(),  # noqa: B008
) -> Actor:
    """`process`, then `checkpoint`."""

    def process(storage: Storage) -> None:
        prepare(storage, interval, attempt, run(f"run-of-{attempt}"), outputs=outputs, permissions=permissions)

    task = checkpoint_task(name, attempt, policy)
    return replace(task, stages=(process, *task.stages), may=(*task.may, StateUnusable))


def chunk_task(name: str, days: Sequence[tuple[Interval, str]], who: RunRef, policy: RetentionPolicy) -> Actor:
    """Computes several days at once, each from the day before, and commits them while each record is as planned."""

    def everything(storage: Any) -> str:
        one = Coordinator(storage, PIPELINE, policy=policy, remembers=True)
        begun = one.begin(days[0][0], permissions=Permissions(), pipeline_start_ms=start_ms())
        files = [
            h
            for ref in (begun.base.content.shards if begun.base else ())
            for h in read_manifest(ref, storage.read).handles
        ]
        planned = []
        for n, (interval, attempt) in enumerate(days):
            files = [*files, storage.create(sst(attempt), f"state of {attempt}".encode())]
            base_id = begun.h0 + n if n else begun.base.id if begun.base else None
            ref = InlineShard(shard=0, inline=manifest(files))
            made = content(interval, attempt, base_id, run=who, shards=(ref,))
            planned.append(Prepared(h0=begun.h0 + n, content=made))
        for done, prepared in enumerate(planned):
            one.prepare(prepared)
            try:
                created = one.commit(prepared.content.attempt).created(prepared.h0 + 1)
            except (AttemptLost, StateUnusable) as error:
                if not done:
                    raise
                return f"{done} of {len(planned)}, {type(error).__name__}"
            if not created:
                return f"{done + 1} of {len(planned)}"
        return f"all {len(planned)}"

    no_begin = (StateGapError, StaleStateError, StateUnusable, UsageError)
    may = (AttemptLost, UnknownOutcome, *no_begin)
    return Actor(name=name, stages=(everything,), may=may, attempt=days[0][1])


def rewinder(name: str, target: int, attempt: str, policy: RetentionPolicy, *, retracts: bool = False) -> Actor:
    def back(storage: Storage) -> str:
        how: Any = {"run": run(f"run-of-{attempt}"), "attempt": attempt, "retract_output": retracts}
        return coordinator(storage, policy).rewind(target, **how).outcome

    stages = (back, *after_commit(policy))
    return Actor(name=name, stages=stages, may=(AttemptLost, UnknownOutcome, StateUnusable), attempt=attempt)


def forgetter(name: str, attempt: str, policy: RetentionPolicy, *, drops: bool) -> Actor:
    """Forgets a key: the newest state in a file of its own, without any file of its base. ``drops``: all older checkpoints go."""

    def forget(storage: Storage) -> str:
        made = coordinator(storage, policy)
        log = made.log()
        newest = newest_state(log)
        assert newest is not None
        base = log.whole(newest.id).content
        new = storage.create(sst(attempt), f"state of {attempt}".encode())
        key = ForgottenKey(
            forget=attempt,
            salt="00",
            key_hash=attempt,
            key_group=0,
            max_parallelism=16,
            until_ms=log.summary.latest_end_ms,
            on_rerun="refuse",
        )
        forgotten = content(
            base.interval,
            attempt,
            newest.id,
            kind="forget",
            run=run(f"run-of-{attempt}"),
            shards=(InlineShard(shard=0, inline=manifest([new])),),
            forget=Forget(keys=(key,), drops=tuple(sorted(log.retained)) if drops else ()),
        )
        made.prepare(Prepared(h0=log.head_id, content=forgotten))
        return made.commit(attempt).outcome

    stages = (forget, *after_commit(policy))
    return Actor(name=name, stages=stages, may=(AttemptLost, UnknownOutcome, StateUnusable), attempt=attempt)


def sweeper(name: str = "sweep", min_age_ms: int = NOW_MS // 2) -> Actor:
    def work(storage: Storage) -> None:
        sweep(storage, PIPELINE, min_age=timedelta(milliseconds=min_age_ms))

    return Actor(name=name, stages=(work,), may=(UnknownOutcome,))


def cleaner(policy: RetentionPolicy, name: str = "cleaner") -> Actor:
    """A clean-up of a process that commits nothing."""
    return Actor(name=name, stages=after_commit(policy)[1:], may=(UnknownOutcome,))


def reader(checkpoint_id: int, name: str = "reader") -> Actor:
    """Reads all files of a checkpoint under a lease."""

    def work(storage: Storage) -> str:
        record = coordinator(storage, DEFAULT_POLICY).record(checkpoint_id)
        lease = take_lease(storage, checkpoint_id, "a test")
        if lease is None:
            return "without a lease"
        for ref in record.content.shards:
            for handle in [*([ref.manifest] if ref.manifest else []), *read_manifest(ref, storage.read).handles]:
                must(storage.stat(handle.path) is not None, "what a lease is on stays", handle.path)
        give_back(storage, lease)
        return "read"

    return Actor(name=name, stages=(work,), may=(CheckpointDropped, StateUnusable, UnknownOutcome))


def quarantiner(checkpoint_id: int, name: str = "quarantine") -> Actor:
    def work(storage: Storage) -> None:
        coordinator(storage, DEFAULT_POLICY).quarantine(checkpoint_id, "wrong")

    return Actor(name=name, stages=(work,), may=(UnknownOutcome,))


def releaser(checkpoint_id: int, name: str = "release") -> Actor:
    """A person who ends a quarantine, and tries again after a lost answer."""

    def work(storage: Storage) -> str:
        coordinator(storage, DEFAULT_POLICY).release(checkpoint_id)
        return "released"

    return Actor(name=name, stages=(work,), may=(UnknownOutcome, UsageError))


def careful(checkpoint_id: int, name: str = "careful") -> Actor:
    """Quarantines a checkpoint; then another host begins the next interval."""

    def begin(storage: Storage) -> str:
        interval = day(checkpoint_id + 1)
        made = coordinator(storage, DEFAULT_POLICY)
        begun = made.begin(interval, permissions=Permissions(), pipeline_start_ms=start_ms())
        base_id = begun.base.id if begun.base is not None else None
        must(base_id != checkpoint_id, "nothing begins on what was quarantined", base_id)
        return "begun"

    return Actor(name=name, stages=(*quarantiner(checkpoint_id).stages, begin), may=(UnknownOutcome, StateUnusable))


def viewer(days: int, name: str = "viewer") -> Actor:
    """Reads whose output of the first days is current, and compares that with the records that it saw."""

    def work(storage: Storage) -> str:
        log = coordinator(storage, DEFAULT_POLICY).log()
        whole = log_in_memory(log.entries)
        for n in range(1, days + 1):
            must(log.outputs_near(day(n)) == whole.outputs_near(day(n)), "a reader sees what is current", day(n))
        return "viewed"

    return Actor(name=name, stages=(work,))
