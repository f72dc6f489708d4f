"""Compute the values of two pages: one checkpoint, and the comparison of two checkpoints.

Both come from `state_backend.inspection.describe`, which the command line uses too.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cairn_ui.checkpoint_list import Row, row_of
from cairn_ui.find_pipelines import PipelineRef
from cairn_ui.lineage import source
from cairn_ui.values import Reading
from state_backend.checkpoint.log import Log
from state_backend.checkpoint.newest_state import newest_state
from state_backend.inspection.describe import describe_checkpoint, describe_difference
from state_backend.inspection.status import with_refused_bases
from state_backend.ports.storage import Storage
from state_backend.shard.manifest import manifest_of
from state_backend.values.airflow_commands import backfill_command
from state_backend.values.errors import Rerun
from state_backend.values.records import Record, ShardManifest

# Largest number of output files on a page.
_LISTED = 200
# Largest number of key groups on a page.
_GROUPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One shard of a checkpoint."""

    shard: int
    first: int
    last: int
    entries: int
    bytes: int
    files: int
    entries_share: float
    bytes_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateVersion:
    """One version of a state's schema."""

    version: int
    value: str
    # Names and types of the fields of a map state's key, in the same form; None for other kinds of state.
    user_key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One state variable."""

    name: str
    kind: str
    # Time to live in ms; None without expiry.
    ttl_ms: int | None
    versions: tuple[StateVersion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """An action on a checkpoint: a command to copy, or a DAG that does the same."""

    title: str
    why: str
    command: str
    # The DAG that does the same; None if no DAG does it.
    dag_id: str | None = None
    # JSON with the parameters to trigger this DAG with; None without a DAG.
    conf: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """The values of the page of one checkpoint."""

    row: Row
    # Where the state came from, in two cases. If no interval computed the state: how it was made, such as "went back to
    # checkpoint 3". If a re-run of an interval reproduced an earlier state: "same result as checkpoint 3". None for
    # every other checkpoint.
    source: str | None
    # Why validation refused the checkpoint, or an earlier checkpoint from which it was computed; None if validation
    # refused neither.
    reason: str | None
    findings: tuple[str, ...]
    shards: tuple[Shard, ...]
    # Bytes of the largest shard divided by the mean of all shards; None with fewer than two shards.
    skew: float | None
    states: tuple[State, ...]
    source_position: str
    outputs: tuple[dict[str, Any], ...]
    more_outputs: int
    metadata: tuple[tuple[str, Any], ...]
    totals: tuple[tuple[str, Any], ...]
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One count or setting of two checkpoints."""

    name: str
    first: Any
    second: Any
    # Second value minus first value; None if a value is not a number.
    by: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The difference between two checkpoints."""

    first: int
    second: int
    same_state: bool
    same_code: bool
    changes: tuple[Change, ...]
    states: dict[str, list[str]]
    # Key group, entries in the first and entries in the second, for key groups that differ; None if the two have
    # different numbers of key groups.
    groups: tuple[tuple[int, int, int], ...] | None
    more_groups: int
    # Number and bytes of the state files that both have ("shared"), that only the first has ("only_first") and that
    # only the second has ("only_second").
    files: dict[str, dict[str, int]]
    command: str


def manifests_of(record: Record, storage: Storage) -> list[ShardManifest]:
    """Return the manifests of a checkpoint's shards. A manifest that is not part of the record is read from its file."""
    return [manifest_of(ref, storage) for ref in record.content.shards]


def detail_of(
    ref: PipelineRef,
    reading: Reading,
    record: Record,
    manifests: Sequence[ShardManifest],
    written_ms: int | None,
    docs: str | None,
    airflow: str | None = None,
) -> Detail:
    """Return the values of the page of one retained checkpoint."""
    said = describe_checkpoint(reading.log, record, manifests)
    shards = _shards(said["shards"])
    sizes = [s.bytes for s in shards]
    whole = sum(sizes)
    skew = max(sizes) * len(sizes) / whole if len(sizes) > 1 and whole else None
    names = [
        "attempt",
        "code_version",
        "code_hash",
        "digest",
        "parallelism",
        "max_parallelism",
        "time_mode",
        "watermark",
    ]
    names += ["late_watermark", "time_zone", "reproduces", "restored_from", "retention"]
    allowed = [name for name, granted in (said["permissions"] or {}).items() if granted]
    metadata = [(name.replace("_", " "), said[name]) for name in names if said[name] is not None]
    metadata += [("permissions", ", ".join(allowed))] if allowed else []
    return Detail(
        row=row_of(reading, record.id, written_ms, docs),
        source=source(reading.log, record.id),
        reason=said["reason"],
        findings=tuple(said["findings"]),
        shards=shards,
        skew=skew,
        states=tuple(_state(state) for state in said["states"]),
        source_position=json.dumps(said["source_position"], indent=2, default=str),
        outputs=tuple(said["outputs"][:_LISTED]),
        more_outputs=max(0, len(said["outputs"]) - _LISTED),
        metadata=tuple(metadata),
        totals=tuple((name.replace("_", " "), value) for name, value in said["totals"].items()),
        actions=actions_of(ref, reading.log, record, airflow),
    )


def actions_of(ref: PipelineRef, log: Log, record: Record, airflow: str | None = None) -> tuple[Action, ...]:
    """Return the commands that make sense for a retained checkpoint. The page only shows them."""
    newest = newest_state(log)
    stale = log.retained[record.id].stale_by if record.id in log.retained else None
    unusable = stale is not None or log.quarantine_above(record.id) is not None
    return (
        *(_restores(ref, str(record.id)) if newest is None or newest.id != record.id else ()),
        *((_savepoint(ref.root, ref.code, str(record.id)),) if ref.code is not None else ()),
        *_of_a_key(ref, log, record),
        *_judging(ref, log, record.id),
        *((_run_again(ref.name, ref.dag_id, log, record, airflow),) if unusable and ref.dag_id is not None else ()),
    )


def _restores(ref: PipelineRef, target: str) -> Iterator[Action]:
    for dag_id in ref.restore_dags:
        conf = json.dumps({"target": target})
        yield Action(
            title=f"Go back to checkpoint {target}",
            why="The DAG lists the checkpoints that it would discard. If there are any, it waits for a person to agree.",
            command=shlex.join(["airflow", "dags", "trigger", dag_id, "--conf", conf]),
            dag_id=dag_id,
            conf=conf,
        )
    if not ref.restore_dags:
        words = ["cairn", "restore", "--root", ref.root, "--pipeline", ref.name, "--checkpoint", target, "--dry-run"]
        yield Action(
            title=f"Go back to checkpoint {target}",
            why="Lists the checkpoints that it would discard; without --dry-run it restores. To restore from Airflow, add a DAG with "
            "restore_pipeline.",
            command=shlex.join(words),
        )


def _of_a_key(ref: PipelineRef, log: Log, record: Record) -> Iterator[Action]:
    number, where = str(record.id), ["--root", ref.root, "--pipeline", ref.name]
    yield Action(
        title="Look up a key",
        why="Shows the key's states and timers in this checkpoint. Replace KEY by the key: u1, or user=u1, or JSON.",
        command=shlex.join(["cairn", "get", "KEY", number, *where]),
    )
    yield Action(
        title="See what changed a key",
        why="Lists the retained checkpoints that changed the key, with each change.",
        command=shlex.join(["cairn", "history", "KEY", *where]),
    )
    base = record.content.base_id
    if ref.code is not None and record.content.kind == "interval" and (base is None or base in log.retained):
        yield Action(
            title="Replay its interval for a key",
            why="Runs the interval again for this key in one process, and writes nothing.",
            command=shlex.join(["cairn", "replay", "KEY", number, "--root", ref.root, "--code", ref.code]),
        )


def _judging(ref: PipelineRef, log: Log, target: int) -> Iterator[Action]:
    where = ["--root", ref.root, "--pipeline", ref.name]
    if ref.code is not None:
        yield Action(
            title="Validate it",
            why="Checks the files and the restored state, and evaluates the expectations. A checkpoint with findings is quarantined.",
            command=shlex.join(["cairn", "validate", str(target), "--root", ref.root, "--code", ref.code]),
        )
    if target in log.quarantined:
        yield Action(
            title="Release it",
            why="Ends the quarantine: intervals may start from this checkpoint again.",
            command=shlex.join(["cairn", "quarantine", str(target), *where, "--release"]),
        )
    elif log.quarantine_above(target) is None:
        yield Action(
            title="Quarantine it",
            why="No interval starts from this checkpoint or from its descendants. Without --dry-run the command refuses the checkpoint.",
            command=shlex.join(["cairn", "quarantine", str(target), *where, "--dry-run"]),
        )


def _savepoint(root: str, code: str, target: str) -> Action:
    words = ["cairn", "savepoint", "--root", root, "--code", code, "--checkpoint", target, "--to"]
    return Action(
        title="Keep it as a savepoint",
        why="Copies the checkpoint into a folder that Cairn never deletes. Replace DESTINATION with the URL of a new folder.",
        command=f"{shlex.join(words)} DESTINATION",
    )


def _run_again(pipeline: str, dag_id: str, log: Log, record: Record, airflow: str | None) -> Action:
    interval = record.content.interval
    again = with_refused_bases(
        log,
        pipeline,
        Rerun(first=interval.start, last=interval.start),
        interval.end - interval.start,
        record.content.pipeline_start_ms,
    )
    why = "No interval can start from this checkpoint. "
    if again.first != interval.start:
        why += (
            "The checkpoint before this interval can't be used either, so the command begins with an earlier interval. "
        )
    return Action(
        title="Run its interval again" if again.first == interval.start else "Run its interval and earlier ones again",
        why=f"{why}Later intervals may need a re-run too: the overview has the command for all of them.",
        command=backfill_command(dag_id, again, airflow),
    )


def comparison_of(
    ref: PipelineRef,
    first: Record,
    manifests: Sequence[ShardManifest],
    second: Record,
    others: Sequence[ShardManifest],
) -> Comparison:
    """Compare two retained checkpoints by their records and manifests. No state is read."""
    said = describe_difference(first, manifests, second, others)
    changes = [_change(name.replace("_", " "), *pair) for name, pair in said["totals"].items()]
    changes += [
        _change(name.replace("_", " "), *said[name]) for name in ("watermark", "parallelism", "max_parallelism")
    ]
    groups = None
    if said["key_groups"] is not None:
        groups = tuple(
            (g["key_group"], sum(g["first"].values()), sum(g["second"].values())) for g in said["key_groups"]
        )
    words = ["cairn", "diff", "--root", ref.root, "--pipeline", ref.name, str(first.id), str(second.id)]
    return Comparison(
        first=first.id,
        second=second.id,
        same_state=said["same_state"],
        same_code=said["same_code"],
        changes=tuple(sorted(changes, key=lambda c: c.first == c.second)),
        states=said["states"],
        groups=None if groups is None else groups[:_GROUPS],
        more_groups=max(0, len(groups or ()) - _GROUPS),
        files=said["files"],
        command=shlex.join(words),
    )


def _change(name: str, first: Any, second: Any) -> Change:
    numbers = isinstance(first, int) and isinstance(second, int)
    return Change(name=name, first=first, second=second, by=second - first if numbers else None)


def _shards(said: Sequence[dict[str, Any]]) -> tuple[Shard, ...]:
    most_bytes = max((s["bytes"] for s in said), default=0) or 1
    most_entries = max((s["entries"] for s in said), default=0) or 1
    return tuple(
        Shard(
            shard=s["shard"],
            first=s["key_groups"][0],
            last=s["key_groups"][1],
            entries=s["entries"],
            bytes=s["bytes"],
            files=len(s["files"]),
            entries_share=s["entries"] / most_entries,
            bytes_share=s["bytes"] / most_bytes,
        )
        for s in said
    )


def _state(said: dict[str, Any]) -> State:
    return State(
        name=said["name"],
        kind=said["kind"],
        ttl_ms=said["ttl_ms"],
        versions=tuple(
            StateVersion(
                version=v["version"],
                value=fields_of(v["value"]),
                user_key=None if v["user_key"] is None else fields_of(v["user_key"]),
            )
            for v in said["versions"]
        ),
    )


def fields_of(schema: dict[str, Any]) -> str:
    """Format the JSON of a Spark StructType as text such as `user string, points array<int>`."""
    return ", ".join(f"{f['name']} {_type(f['type'])}" for f in schema.get("fields", ()))


def _type(kind: Any) -> str:
    match kind:
        case {"type": "struct", "fields": fields}:
            return f"struct<{', '.join(f['name'] + ': ' + _type(f['type']) for f in fields)}>"
        case {"type": "array", "elementType": element}:
            return f"array<{_type(element)}>"
        case {"type": "map", "keyType": key, "valueType": value}:
            return f"map<{_type(key)}, {_type(value)}>"
    return str(kind)
