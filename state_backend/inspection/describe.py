"""Describe logs, checkpoints and the difference of two checkpoints as JSON values. Pure functions, for any front end.

Instants are ISO 8601 in UTC, sizes are bytes, ages are seconds, and digests are 16 hex digits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, date
from decimal import Decimal
from typing import Any

from state_backend.checkpoint.log import Log, base_of, interval_of, kind_of, run_of
from state_backend.formats.recorded_settings import without_settings
from state_backend.formats.types import ArrayType, AtomicType, DataType, MapType, StructType
from state_backend.values.handles import Handle, handles_in
from state_backend.values.hide_secrets import hide_all
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.marks import Trial
from state_backend.values.records import (
    Content,
    InlineShard,
    Kept,
    KeyGroupState,
    Record,
    ShardManifest,
    ShardRef,
    StateDescriptor,
    SweepRecord,
    Tombstone,
)


def describe_log(log: Log, ids: Collection[int], written_ms: Mapping[int, int], *, now_ms: int) -> list[dict[str, Any]]:
    """Return one row for each entry in `ids`, newest first. `written_ms`: when the entries' files were written.

    In the rows, `code` is a short name of the code. `code_changed` is True if the code differs from that of the next
    lower id in `ids`; tombstones and sweeps have no code and are skipped.
    """
    load_states(log, ids)
    rows, before = [], None
    for n in sorted(ids):
        row = describe_entry(log, n, written_ms.get(n), now_ms=now_ms)
        if row["code_hash"] is not None:
            row["code_changed"] = before not in (None, row["code_hash"])
            before = row["code_hash"]
        rows.append(row)
    return rows[::-1]


def load_states(log: Log, ids: Collection[int]) -> None:
    """Load what `state_of` needs about the given entries, with many requests at the same time.

    Without this call, `state_of` would send the requests one after the other.
    """
    log.entries.load([*ids])
    found = [interval_of(e) for n in ids if not isinstance(e := log.entries[n], SweepRecord)]
    if found:
        log.entries.facts(Interval(min(i.start for i in found), max(i.end for i in found)), log.summary.levels)


def code_name(content: Content) -> str:
    return content.code_version or content.code_hash[:8]


def start_and_end(interval: Interval) -> dict[str, str]:
    return {"start": format_instant(interval.start), "end": format_instant(interval.end)}


def keys_of(record: Record) -> int | None:
    """Return the number of keys with a value state; None if the processor declares no value state."""
    return record.content.totals.keys if any(s.kind == "value" for s in record.content.states) else None


def describe_entry(
    log: Log, checkpoint_id: int, written_ms: int | None = None, *, now_ms: int | None = None
) -> dict[str, Any]:
    """Return one entry of the log as a row. Values that a tombstone or a sweep does not have are None."""
    entry = log.entries[checkpoint_id]
    row: dict[str, Any] = dict.fromkeys(_COLUMNS)
    row |= {"id": checkpoint_id, "code_changed": False, "retained": False}
    if written_ms is not None:
        row |= {"committed": _instant(written_ms), "age_s": None if now_ms is None else (now_ms - written_ms) // 1000}
    if isinstance(entry, SweepRecord):
        if entry.released is not None:
            return row | {"kind": "release", "state": f"of checkpoint {entry.released}"}
        return row | {"kind": "sweep", "state": f"abandons {len(entry.abandoned)}"}
    row |= start_and_end(interval_of(entry)) | {
        "kind": kind_of(entry),
        "base": base_of(entry),
        "state": state_of(log, entry),
        "run": _plain(run_of(entry)),
    }
    if isinstance(entry, Tombstone):
        return row | {"origin": "restored" if entry.kind == "restore" else None}
    content = entry.content
    return row | {
        "keys": keys_of(entry),
        "bytes": content.totals.state_bytes,
        "files": content.totals.state_files,
        "code": code_name(content),
        "code_hash": content.code_hash,
        "retained": checkpoint_id in log.retained,
        "origin": origin_of(entry),
        "mode": None if content.kind == "restore" else _mode(content),
        "totals": _plain(content.totals),
        "durations_us": content.durations_us,
    }


_COLUMNS = (
    *("id", "start", "end", "kind", "base", "state", "keys", "bytes", "files", "code", "code_hash", "code_changed"),
    *("age_s", "committed", "retained", "run", "origin", "mode", "totals", "durations_us"),
)


def origin_of(record: Record) -> str | None:
    """Return where a checkpoint's state came from, if that is worth a remark.

    If no interval computed the state, the text says how it was made, such as "went back to checkpoint 3". If a re-run
    reproduced an earlier state of its interval, the text is "same result as checkpoint 3". All others: None.
    """
    match record.content:
        case Content(kind="consolidate", base_id=base):
            return f"checkpoint {base}, consolidated"
        case Content(kind="forget", base_id=base):
            return f"checkpoint {base} without forgotten keys"
        case Content(kind="restore", restored_from=None, base_id=int(base)):
            return f"went back to checkpoint {base}"
        case Content(kind="restore", restored_from=savepoint) as content:
            return f"{'forked' if savepoint is None else 'restored'} from {source_of(content)}"
    return None if record.reproduces is None else f"same result as checkpoint {record.reproduces}"


def source_of(content: Content) -> str:
    """Return where a `restore` record got its state from."""
    if content.restored_from is not None:
        return f"savepoint {content.restored_from}"
    return f"checkpoint {content.base_id}" if content.base_id is not None else "another pipeline"


def _mode(content: Content) -> str:
    """Return how a checkpoint stored its state: "changelog" (segments), "full" (all files are new) or "incremental"."""
    if any(map(_has_segments, content.shards)):
        return "changelog"
    new = content.totals.uploaded_files
    return "full" if new and new >= content.totals.state_files else "incremental"


def _has_segments(ref: ShardRef) -> bool:
    if isinstance(ref, InlineShard):
        return bool(ref.inline.segments)
    return ref.in_segment is not None or bool(ref.changes is not None and ref.changes.segments)


def state_of(log: Log, entry: Record | Tombstone) -> str:
    """Return the status of a checkpoint.

    It is `completed`, `stale by N`, `replaced by N`, `quarantined`, `descends from quarantined N`, or `dropped`. A
    quarantined checkpoint that a usable one has replaced is `replaced by N, quarantined`. A checkpoint whose interval
    ran again is `replaced by N`, also if both are stale: only the newest result of an interval is stale.
    """
    if entry.id in log.quarantined:
        newest = newest_of_interval(log, entry)
        return "quarantined" if newest is None else f"replaced by {newest}, quarantined"
    if entry.id not in log.retained:
        return "dropped"
    refused = log.quarantine_above(entry.id)
    if refused is not None:
        return f"descends from quarantined {refused}"
    newest = newest_of_interval(log, entry)
    if newest is not None:
        return f"replaced by {newest}"
    stale_by = log.retained[entry.id].stale_by
    return "completed" if stale_by is None else f"stale by {stale_by}"


def newest_of_interval(log: Log, entry: Record | Tombstone | Kept) -> int | None:
    """Return the id of the newest later commit of the same interval that no quarantine spoils; None if there is none.

    No quarantined checkpoint is among it and its ancestors. The next interval starts from it, and not from `entry`.
    """
    interval = interval_of(entry)
    same = [e.id for e in log.commits_near(interval, after=entry.id) if interval_of(e) == interval]
    return next((n for n in reversed(same) if log.quarantine_above(n) is None), None)


def reads_of(content: Content) -> list[dict[str, str | None]]:
    """Return what an interval read of other pipelines. `root` is None for an upstream below the pipeline's own root."""
    words = {True: "tracked", False: "not tracked by choice"}
    edges = [(e.pipeline, e.root, e.reads, words[e.tracked]) for e in (read.edge for read in content.inputs)]
    by_itself = [(one.pipeline, one.root, None, "not tracked") for one in content.untracked]
    return [dict(zip(("pipeline", "root", "reads", "tracked"), one, strict=True)) for one in edges + by_itself]


def in_words(read: Mapping[str, str | None]) -> str:
    below, what = read["root"] and f" below {read['root']}", read["reads"] and f" ({read['reads']})"
    return f"{read['pipeline']}{below or ''}{what or ''}: {read['tracked']}"


def describe_checkpoint(log: Log, record: Record, manifests: Sequence[ShardManifest]) -> dict[str, Any]:
    """Return the content of a record, shard by shard, with paths and sizes of its files."""
    content = record.content
    refused = log.quarantine_above(record.id)
    return {
        "id": record.id,
        "pipeline": content.pipeline,
        "kind": content.kind,
        "state": state_of(log, record),
        "reason": log.quarantined[refused].reason if refused is not None else None,
        "findings": list(log.quarantined[refused].findings) if refused is not None else [],
        **start_and_end(content.interval),
        "base": content.base_id,
        "reproduces": record.reproduces,
        "restored_from": content.restored_from,
        "attempt": content.attempt,
        "run": _plain(content.run),
        "permissions": _plain(content.permissions),
        "retention": None if content.retention is None else repr(content.retention),
        "schedule": None if content.schedule is None else str(content.schedule),
        "parallelism": content.parallelism,
        "max_parallelism": content.max_parallelism,
        "time_mode": content.time.mode,
        "watermark": _instant(content.time.watermark_ms),
        "late_watermark": _instant(content.time.late_watermark_ms),
        "time_zone": content.time.zone,
        "source_position": hide_all(content.source_position),  # older releases recorded credentials too
        "reads": reads_of(content),
        "code_hash": content.code_hash,
        "code_version": content.code_version,
        "digest": f"{content.digest:016x}",
        "totals": _plain(content.totals),
        "durations_us": content.durations_us,
        "states": [_state(d) for d in content.states],
        "shards": [
            {
                "shard": m.shard,
                "key_groups": [m.key_groups.first, m.key_groups.last],
                "entries": m.entries,
                "bytes": m.size_bytes,
                "digest": f"{m.digest:016x}",
                "files": [_file(h) for h in dict.fromkeys([*handles_in(ref), *handles_in(m)])],
            }
            for ref, m in zip(content.shards, manifests, strict=True)
        ],
        "outputs": [{**_file(o.handle), "rows": o.rows, "late": o.late} for o in content.outputs],
    }


def describe_trial(trial: Trial) -> dict[str, Any]:
    base = trial.base
    return {
        "name": trial.name,
        "pipeline": trial.pipeline,
        "code": trial.code,
        "code_hash": trial.code_hash,
        "code_version": trial.code_version,
        **start_and_end(trial.span),
        "interval_seconds": trial.length_ms / 1000,
        "base": None if base is None else base.id,
        "savepoint": None if base is None else base.savepoint,
        "kept_until": format_instant(from_ms(trial.ends_ms)),
    }


def describe_difference(
    first: Record, manifests: Sequence[ShardManifest] | None, second: Record, others: Sequence[ShardManifest] | None
) -> dict[str, Any]:
    """Return the difference of two checkpoints, whose manifests are `manifests` and `others`.

    `key_groups` in the result lists the key groups whose entry counts or digest differ, with the number of entries of
    each state on both sides. It is None if a side has no manifests, or if the numbers of key groups differ.
    """
    a, b = first.content, second.content
    comparable = a.max_parallelism == b.max_parallelism and manifests is not None and others is not None
    before, after = ({h for m in ms or () for h in handles_in(m)} for ms in (manifests, others))
    groups = {s.key_group: s for m in manifests or () for s in m.key_group_states}
    groups_after = {s.key_group: s for m in others or () for s in m.key_group_states}
    states, states_after = ({d.name: _state(d) for d in c.states} for c in (a, b))
    return {
        "first": first.id,
        "second": second.id,
        "intervals": [str(a.interval), str(b.interval)],
        "same_state": (a.digest, states) == (b.digest, states_after),
        "same_code": a.code_hash == b.code_hash,
        "code": [code_name(a), code_name(b)],
        "same_input": same_input(a, b),
        "watermark": [_instant(c.time.watermark_ms) for c in (a, b)],
        "parallelism": [a.parallelism, b.parallelism],
        "max_parallelism": [a.max_parallelism, b.max_parallelism],
        "totals": {name: [value, _plain(b.totals)[name]] for name, value in _plain(a.totals).items()},
        "states": {
            "added": sorted(states_after.keys() - states.keys()),
            "removed": sorted(states.keys() - states_after.keys()),
            "changed": sorted(n for n in states.keys() & states_after.keys() if states[n] != states_after[n]),
        },
        "key_groups": [
            {
                "key_group": g,
                "first": groups[g].entries if g in groups else {},
                "second": groups_after[g].entries if g in groups_after else {},
            }
            for g in sorted(groups.keys() | groups_after.keys())
            if _content(groups.get(g)) != _content(groups_after.get(g))
        ]
        if comparable
        else None,
        "files": {
            "shared": _sizes(before & after),
            "only_first": _sizes(before - after),
            "only_second": _sizes(after - before),
        },
    }


def same_input(first: Content, second: Content) -> bool | None:
    if first.interval != second.interval:
        return False
    positions = first.source_position, second.source_position
    return positions[0] == positions[1] if all(positions) else None


def self_describing(value: Any, data_type: DataType) -> Any:
    """Return a decoded value of state in the form that Arrow returns, so that `plain` prints both in the same way.

    A codec decodes a TIMESTAMP to a naive datetime in UTC: the result has the zone UTC. A TIMESTAMP_NTZ stays without
    zone. A struct is a dict by the names of its fields; as the key of a map it stays a tuple, which can be hashed.
    """
    match data_type:
        case _ if value is None:
            return None
        case StructType(fields):
            return {f.name: self_describing(v, f.type) for f, v in zip(fields, value, strict=True)}
        case ArrayType(element):
            return [self_describing(item, element) for item in value]
        case MapType(key, of):
            return {_map_key(k, key): self_describing(v, of) for k, v in value.items()}
        case AtomicType("timestamp"):
            return value.replace(tzinfo=UTC)
    return value


def _map_key(value: Any, data_type: DataType) -> Any:
    if isinstance(data_type, StructType) and value is not None:
        return tuple(_map_key(v, f.type) for f, v in zip(data_type.fields, value, strict=True))
    return self_describing(value, data_type)


def plain(value: Any) -> Any:
    """Return a value of state as a JSON value: bytes as hex digits, decimals as text, dates and times in ISO 8601."""
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
        case bytes() | bytearray():
            return bytes(value).hex()
        case Decimal():
            return str(value)
        case date():  # Also matches `datetime`, a subclass of `date`.
            return value.isoformat()
        case tuple() | list():
            return [plain(item) for item in value]
        case dict():
            return {key if isinstance(key, str) else str(plain(key)): plain(item) for key, item in value.items()}
    return value


def _sizes(handles: set[Handle]) -> dict[str, int]:
    return {"files": len(handles), "bytes": sum(h.size_bytes for h in handles)}


def _file(handle: Handle) -> dict[str, Any]:
    return {"path": handle.path, "bytes": handle.size_bytes, "crc32c": f"{handle.crc32c:08x}"}


def _state(descriptor: StateDescriptor) -> dict[str, Any]:
    return {
        "name": descriptor.name,
        "kind": descriptor.kind,
        "ttl_ms": descriptor.ttl_ms,
        "versions": [
            {"version": v.version, "value": without_settings(v.value), "user_key": v.user_key}
            for v in descriptor.versions
        ],
    }


def _instant(ms: int | None) -> str | None:
    return None if ms is None else format_instant(from_ms(ms))


def _content(group: KeyGroupState | None) -> tuple[dict[str, int], int] | None:
    return None if group is None else (group.entries, group.digest)


def _plain(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}


def summarise(record: Record) -> dict[str, Any]:
    """Return the most important figures of a checkpoint: ids, interval, counts and bytes."""
    content = record.content
    counts = {name: getattr(content.totals, name) for name in COUNTS}
    return {"checkpoint": record.id, "base": content.base_id, "interval": str(content.interval), **counts}


COUNTS = (
    *("changed_bytes", "uploaded_bytes", "state_bytes", "state_files", "keys", "keys_touched"),
    *("input_rows", "output_rows", "late_rows"),
)
