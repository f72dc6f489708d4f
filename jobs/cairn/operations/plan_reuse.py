"""Decide whether a retry uses what an earlier try of the same run has prepared, by comparing hashes and options.

The decision is a pure function.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cairn.shipping.ship_processor import code_hash
from state_backend.checkpoint.decide_commit import plan_commit
from state_backend.checkpoint.log import Log
from state_backend.values.errors import AttemptLost, UsageError
from state_backend.values.intervals import Interval
from state_backend.values.records import Permissions, Prepared, RunRef

if TYPE_CHECKING:
    from cairn.pipeline import Pipeline
    from cairn.shard_jobs.interval import IntervalJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """An earlier try of the same run."""

    attempt: str
    options: Mapping[str, str]
    # What the try prepared; None if it prepared nothing or its files were deleted.
    prepared: Prepared | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """The inputs of this try, which decide what it would compute."""

    log: Log
    run: RunRef
    interval: Interval
    permissions: Permissions
    code_hash: str
    options: Mapping[str, str]
    source_position: Mapping[str, Any]
    initial_state: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Decision: commit the earlier attempt, and compute nothing."""

    attempt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Decision: compute the interval again."""

    reason: str


def plan_reuse(earlier: Earlier, now: Now) -> Reuse | Recompute:
    """Decide whether the earlier attempt can be used.

    Use it only if this try would compute the same and the attempt can still be committed. In doubt compute again.
    """
    if earlier.prepared is None:
        return Recompute(reason="it did not finish")
    content = earlier.prepared.content
    if (content.run.run_id, content.interval) != (now.run.run_id, now.interval):
        return Recompute(reason=f"it belongs to run {content.run.run_id!r}, {content.interval}")
    if content.run.clear_number != now.run.clear_number:
        return Recompute(reason="the run was cleared since, so the interval is computed again")
    changed = [
        f"{name} was {earlier.options.get(name, 'nothing')} and is now {now.options.get(name, 'nothing')}"
        for name in sorted({*earlier.options, *now.options})
        if earlier.options.get(name) != now.options.get(name)
    ]
    if content.permissions != now.permissions:
        changed.append(f"permissions were {content.permissions} and are now {now.permissions}")
    if content.code_hash != now.code_hash:
        changed.append(f"the processor's code was {content.code_hash[:12]} and is now {now.code_hash[:12]}")
    if changed:
        return Recompute(reason="; ".join(changed))
    if now.initial_state:
        return Recompute(reason="it read initial state, and Cairn can't tell whether that is the same")
    if not now.source_position:
        return Recompute(reason="the source records no position, so Cairn can't tell whether the input is the same")
    if content.source_position != now.source_position:
        return Recompute(reason="the source's position differs: the input has changed")
    try:
        plan_commit(now.log, earlier.prepared)
    except AttemptLost as error:
        return Recompute(reason=f"it can no longer be committed: {error}")
    return Reuse(attempt=earlier.attempt)


def options_of(task: IntervalJob, order_by: tuple[str, ...], source: str, runtime: str) -> dict[str, str]:
    """Return the settings that decide what a try computes and writes, besides code, input and base."""
    settings: dict[str, Any] = {
        "key": task.key_schema,
        "input": task.input_schema,
        "initial": task.initial_schema,
        "output": task.output_schema,
        "states": [task.states, task.dropped],
        "time": [task.time, task.event_time],
        "engine": task.engine,
        "changelog": task.changelog,
        "retention": task.retention,
        "order_by": order_by,
        **({"returning": task.returning} if task.returning else {}),
    }
    plain = {
        "mode": task.mode,
        "api": task.api,
        "parallelism": str(task.parallelism),
        "max_parallelism": str(task.max_parallelism),
        "zone": task.zone,
        "on_type_mismatch": task.on_type_mismatch,
        "source": source[:12],
        "runtime": runtime,
    }
    return plain | {name: _short(value) for name, value in settings.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultInputs:
    """Values that decide an interval's result, besides its base and the settings that `input_hash` reads itself.

    `input_hash` reads those settings, such as `time_mode` and `parallelism`, directly from the `Pipeline`.
    """

    code_hash: str
    # Position that the source records; empty if the source records none.
    source_position: Mapping[str, Any]
    input_schema: Any
    output_schema: Any
    key: Sequence[str]
    order_by: Sequence[str]
    zone: str
    source: str
    runtime: str
    permissions: Permissions


def input_hash(pipeline: Pipeline, inputs: ResultInputs) -> str | None:
    """Hash everything but the base that decides the result of an interval.

    The way in which the checkpoint is stored (mode, retention) does not count.

    Returns 32 hex digits; None if the source records no position, since equal hashes would not mean equal input.
    """
    if not inputs.source_position:
        return None
    parts = {
        "code": inputs.code_hash,
        "source": inputs.source,
        "runtime": inputs.runtime,
        "position": inputs.source_position,
        "input": inputs.input_schema,
        "output": inputs.output_schema,
        "key": [*inputs.key],
        "order_by": [*inputs.order_by],
        "zone": inputs.zone,
        "permissions": repr(inputs.permissions),
        "declared": repr(
            (
                *(pipeline.api, pipeline.time_mode, pipeline.event_time, pipeline.watermark_delay, pipeline.watermark),
                *(pipeline.parallelism, pipeline.max_parallelism, pipeline.engine, pipeline.changelog),
                pipeline.on_type_mismatch,
                # Without renamed fields, this adds nothing, so the hash equals those that older releases recorded.
                *([sorted(pipeline.renamed.items())] if pipeline.renamed else []),
            )
        ),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def source_hash(source: Any) -> str:
    """Return a SHA-256 hash (hex) of the source function's code and bound values.

    If the source can't be hashed, the result is random. So the input counts as changed.
    """
    try:
        return code_hash(source, "")
    except UsageError:
        return hashlib.sha256(uuid.uuid4().bytes).hexdigest()


def _short(value: Any) -> str:
    # Dicts are schemas, whose order does not count. Other values are dataclasses, whose repr contains all fields.
    text = json.dumps(value, sort_keys=True) if isinstance(value, dict) else repr(value)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
