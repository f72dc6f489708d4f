"""Describe logs, checkpoints and the difference of two checkpoints as JSON values. Pure functions, for any front end.

Instants are ISO 8601 in UTC, sizes are bytes, ages are seconds, and digests are 16 hex digits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, date
from decimal import Decimal
from typing import Any

from state_backend.checkpoint.log import Entry, Log, base_of, interval_of, kind_of
from state_backend.formats.recorded_settings import without_settings
from state_backend.formats.types import ArrayType, AtomicType, DataType, MapType, StructType
from state_backend.values.handles import Handle, handles_in
from state_backend.values.hide_secrets import hide_all
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.records import (
    Content,
    KeyGroupState,
    Record,
    ShardManifest,
    StateDescriptor,
    SweepRecord,
    Tombstone,
)


def describe_log(log: Log, ids: Collection[int], written_ms: Mapping[int, int], *, now_ms: int) -> list[dict[str, Any]]:
    """Return one row for each entry in `ids`, newest first.

    In the rows, `code` is a short name of the code. `code_changed` is True if the code differs from that of the next
    lower id in `ids`; tombstones and sweeps have no code and are skipped.
    """
    rows, before = [], None
    for n in sorted(ids):
        entry = log.entries[n]
        row = _row(log, entry, (now_ms - written_ms[n]) // 1000 if n in written_ms else None)
        if isinstance(entry, Record):
            row["code_changed"] = before not in (None, entry.content.code_hash)
            before = entry.content.code_hash
        rows.append(row)
    return rows[::-1]


def code_name(content: Content) -> str:
    """Return a short name of a checkpoint's code: its version, else the first 8 digits of its hash."""
    return content.code_version or content.code_hash[:8]


def _row(log: Log, entry: Entry, age_s: int | None) -> dict[str, Any]:
    if isinstance(entry, SweepRecord):
        if entry.released is not None:
            return _columns(entry.id, None, "release", None, f"of checkpoint {entry.released}", age_s)
        return _columns(entry.id, None, "sweep", None, f"abandons {len(entry.abandoned)}", age_s)
    row = _columns(entry.id, interval_of(entry), kind_of(entry), base_of(entry), state_of(log, entry), age_s)
    if isinstance(entry, Tombstone):
        return row
    totals = entry.content.totals
    # Only value states count keys. Without a value state the number of keys is unknown.
    keys = totals.keys if any(state.kind == "value" for state in entry.content.states) else None
    return {
        **row,
        "keys": keys,
        "bytes": totals.state_bytes,
        "files": totals.state_files,
        "code": code_name(entry.content),
        "code_hash": entry.content.code_hash,
    }


def _columns(
    id: int, interval: Interval | None, kind: str, base: int | None, state: str, age_s: int | None
) -> dict[str, Any]:
    return {
        "id": id,
        "start": format_instant(interval.start) if interval is not None else None,
        "end": format_instant(interval.end) if interval is not None else None,
        "kind": kind,
        "base": base,
        "state": state,
        "keys": None,
        "bytes": None,
        "files": None,
        "code": None,
        "code_hash": None,
        "code_changed": False,
        "age_s": age_s,
    }


def state_of(log: Log, entry: Record | Tombstone) -> str:
    """Return the status of a checkpoint.

    It is `completed`, `stale by N`, `replaced by N`, `quarantined`, `descends from quarantined N`, or `dropped`. A
    quarantined checkpoint that a usable one has replaced is `replaced by N, quarantined`. A checkpoint whose interval ran
    again is `replaced by N`, also if both are stale: only the newest result of an interval is stale.
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


def newest_of_interval(log: Log, entry: Record | Tombstone) -> int | None:
    """Return the id of the newest later commit of the same interval that is not quarantined; None if there is none.

    The next interval starts from this commit, and not from `entry`.
    """
    interval = interval_of(entry)
    same = [e.id for e in log.commits_near(interval, after=entry.id) if interval_of(e) == interval]
    return next((n for n in reversed(same) if log.quarantine_above(n) is None), None)


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
        "start": format_instant(content.interval.start),
        "end": format_instant(content.interval.end),
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


def describe_difference(
    first: Record, manifests: Sequence[ShardManifest] | None, second: Record, others: Sequence[ShardManifest] | None
) -> dict[str, Any]:
    """Return the difference of two checkpoints.

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
    """Return True if the sources of two checkpoints recorded the same input."""
    if first.interval != second.interval:
        return False
    positions = first.source_position, second.source_position
    return positions[0] == positions[1] if all(positions) else None


def self_describing(value: Any, data_type: DataType) -> Any:
    """Return a decoded value of state in a form that says its type, as Arrow does: `plain` then prints both alike.

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
    """Return entry counts and digest, by which key groups are compared; None for a key group without entries.

    Byte counts are left out, because older releases did not record them.
    """
    return None if group is None else (group.entries, group.digest)


def _plain(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}


def summarise(record: Record) -> dict[str, Any]:
    """Return the most important figures of a checkpoint: ids, interval, counts and bytes."""
    content = record.content
    totals = content.totals
    return {
        "checkpoint": record.id,
        "base": content.base_id,
        "interval": str(content.interval),
        "changed_bytes": totals.changed_bytes,
        "uploaded_bytes": totals.uploaded_bytes,
        "state_bytes": totals.state_bytes,
        "state_files": totals.state_files,
        "keys": totals.keys,
        "keys_touched": totals.keys_touched,
        "input_rows": totals.input_rows,
        "output_rows": totals.output_rows,
        "late_rows": totals.late_rows,
    }
