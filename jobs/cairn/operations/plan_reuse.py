"""Whether a retry may take what an earlier try of the same run has prepared, instead of computing it again. A pure function."""

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
    """What is known of an earlier try: its attempt, the options that it ran with, and what it prepared (None: it did not
    get there, or it is gone)."""

    attempt: str
    options: Mapping[str, str]
    prepared: Prepared | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """What this try would compute. ``options``: `options_of`; ``log``: as it is now; ``initial_state``: whether the pipeline
    reads rows of initial state, which no position describes."""

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
    """Commit that attempt; nothing is computed."""

    attempt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Why the earlier try's result does not do."""

    reason: str


def plan_reuse(earlier: Earlier, now: Now) -> Reuse | Recompute:
    """Reuse only what this try would compute too and could commit. In doubt it is computed again."""
    if earlier.prepared is None:
        return Recompute(reason="it had not finished")
    content = earlier.prepared.content
    if (content.run.run_id, content.interval) != (now.run.run_id, now.interval):
        return Recompute(reason=f"it belongs to run {content.run.run_id!r}, {content.interval}")
    if content.run.clear_number != now.run.clear_number:
        return Recompute(reason="the run was cleared since, so that it is computed again on purpose")
    changed = [
        f"{name} was {earlier.options.get(name, 'nothing')}, is {now.options.get(name, 'nothing')}"
        for name in sorted({*earlier.options, *now.options})
        if earlier.options.get(name) != now.options.get(name)
    ]
    if content.permissions != now.permissions:
        changed.append(f"permissions were {content.permissions}, are {now.permissions}")
    if content.code_hash != now.code_hash:
        changed.append(f"the processor's code was {content.code_hash[:12]}, is {now.code_hash[:12]}")
    if changed:
        return Recompute(reason="; ".join(changed))
    if now.initial_state:
        return Recompute(reason="it took initial state, and whether that is the same can't be told")
    if not now.source_position:
        return Recompute(
            reason="the source records no position, so that it can't be told whether the input is the same"
        )
    if content.source_position != now.source_position:
        return Recompute(reason="the source's position is another: the input has changed")
    try:
        plan_commit(now.log, earlier.prepared)
    except AttemptLost as error:
        return Recompute(reason=f"it can't be committed any more: {error}")
    return Reuse(attempt=earlier.attempt)


def options_of(task: IntervalJob, order_by: tuple[str, ...], source: str, runtime: str) -> dict[str, str]:
    """What besides the processor's code, input and base decides what a try computes and writes, short enough to be kept: names and
    numbers as they are, schemas and settings as 12 hex digits of a hash. ``source``: `source_hash`."""
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
    """Everything that decides the result of an interval, except the base and the pipeline's own settings.

    Attributes:
        code_hash: Hash of the processor and of the user's modules that it imports.
        source_position: Position that the source records; empty if the source records none.
        zone: Name of the time zone in which the processor runs.
        source: Hash of the source function.
        runtime: Versions of Python and of the libraries that user code sees.
    """

    code_hash: str
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
    """Hash everything but the base that decides the result of an interval. The checkpoint's form (mode, retention) does not count.

    Returns:
        32 hex digits; None if the source records no position, since equal hashes would not mean equal input.
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
            )
        ),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def source_hash(source: Any) -> str:
    """SHA-256, hex, over the code that reads the input and what was bound to it. Where that has no lasting value, it differs every
    time, and the input counts as changed."""
    try:
        return code_hash(source, "")
    except UsageError:
        return hashlib.sha256(uuid.uuid4().bytes).hexdigest()


def _short(value: Any) -> str:
    # Values are dataclasses of plain values: their repr says all there is. Dicts are schemas, in any order.
    text = json.dumps(value, sort_keys=True) if isinstance(value, dict) else repr(value)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
