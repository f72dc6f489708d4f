"""Decide whether a retry uses what an earlier try of the same run has prepared, by comparing hashes and options.

The decision is a pure function.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cairn.shipping.ship_processor import code_hash as hash_of_code
from cairn.shipping.ship_processor import runtime_version
from state_backend.checkpoint.decide_commit import plan_commit
from state_backend.checkpoint.log import Log
from state_backend.values.errors import AttemptLost, UsageError
from state_backend.values.records import Content, Prepared

if TYPE_CHECKING:
    from cairn.pipeline import Pipeline
    from cairn.shard_jobs.interval import IntervalJob


def why_recompute(
    log: Log,
    earlier: Prepared | None,
    then: Mapping[str, str],
    content: Content,
    now: Mapping[str, str],
    *,
    initial_state: bool,
) -> str | None:
    """Return why the interval is computed again, although an earlier try of the same run began an attempt.

    Return None if this try would compute the same and the earlier attempt can still be committed. In doubt, return a
    reason. `earlier`: What that try prepared; None if it prepared nothing or its files were deleted. `then`, `now`: The
    settings of that try and of this one (`options_of`). `content`: This try's content before its shards run.
    `initial_state`: True if this try reads initial state.
    """
    if earlier is None:
        return "it did not finish"
    found = earlier.content
    if (found.run.run_id, found.interval) != (content.run.run_id, content.interval):
        return f"it belongs to run {found.run.run_id!r}, {found.interval}"
    if found.run.clear_number != content.run.clear_number:
        return "the run was cleared since, so the interval is computed again"
    changed = [
        f"{name} was {then.get(name, 'nothing')} and is now {now.get(name, 'nothing')}"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
    if found.permissions != content.permissions:
        changed.append(f"permissions were {found.permissions} and are now {content.permissions}")
    if found.code_hash != content.code_hash:
        changed.append(f"the processor's code was {found.code_hash[:12]} and is now {content.code_hash[:12]}")
    if changed:
        return "; ".join(changed)
    if initial_state:
        return "it read initial state, and Cairn can't tell whether that is the same"
    if not content.source_position:
        return "the source records no position, so Cairn can't tell whether the input is the same"
    if found.source_position != json.loads(json.dumps(content.source_position)):  # With lists, not tuples.
        return "the source's position differs: the input has changed"
    try:
        plan_commit(log, earlier)
    except AttemptLost as error:
        return f"it can no longer be committed: {error}"
    return None


def options_of(job: IntervalJob, source: str) -> dict[str, str]:
    """Return the settings, by name, that decide a result besides code, input and base. `source`: The source's hash."""
    content = job.content
    settings: dict[str, Any] = {
        "key": content.key_schema,
        "input": job.input_schema,
        "initial": job.initial_schema,
        "output": job.output_schema,
        "states": [content.states, job.dropped],
        "time": [content.time, job.event_time],
        "engine": job.engine,
        "changelog": job.changelog,
        "retention": content.retention,
        "order_by": job.order_by,
        **({"returning": job.returning} if job.returning else {}),
    }
    plain = {
        "mode": job.mode,
        "api": job.api,
        "parallelism": str(job.parallelism),
        "max_parallelism": str(job.max_parallelism),
        "zone": job.zone,
        "on_type_mismatch": job.on_type_mismatch,
        "source": source[:12],
        "runtime": runtime_version(),
    }
    return plain | {name: _short(value) for name, value in settings.items()}


def input_hash(
    pipeline: Pipeline,
    code_hash: str,
    position: Mapping[str, Any],
    input_schema: dict[str, Any],
    output_schema: dict[str, Any],
    zone: str,
) -> str | None:
    """Hash everything but the base that decides the result of an interval.

    The hash covers the version of Cairn (`runtime_version`), but not the versions of Python and Spark, and not the way
    in which the checkpoint is stored (mode, retention).

    Returns 32 hex digits; None if the source records no position, since equal hashes would not mean equal input.
    """
    if not position:
        return None
    parts = {
        "code": code_hash,
        "source": source_hash(pipeline.source),
        "runtime": runtime_version(),
        "position": position,
        "input": input_schema,
        "output": output_schema,
        **settings_of(pipeline, zone),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def settings_of(pipeline: Pipeline, zone: str) -> dict[str, Any]:
    """Return the pipeline's settings that decide a result besides code, source and output schema, as JSON values."""
    return {
        "key": [*pipeline.key],
        "order_by": [*pipeline.order_by],
        "zone": zone,
        "declared": repr((*pipeline.hashed(), sorted(pipeline.renamed.items()))),
    }


def source_hash(source: Any) -> str:
    """Return a SHA-256 hash (hex) of the source function's code and bound values.

    If the source can't be hashed, the result is random. So the input counts as changed.
    """
    try:
        return hash_of_code(source, "")
    except UsageError:
        return hashlib.sha256(uuid.uuid4().bytes).hexdigest()


def _short(value: Any) -> str:
    # Dicts are schemas, whose order does not count. Other values are dataclasses, whose repr contains all fields.
    text = json.dumps(value, sort_keys=True) if isinstance(value, dict) else repr(value)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
