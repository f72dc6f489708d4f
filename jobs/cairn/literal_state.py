"""Convert Python values to the stored entries of one key, and back, for `PipelineTester.replay`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cairn.runners.processor_handle import row_maker
from cairn.shard_jobs.interval import IntervalJob
from state_backend.adapters.rocks import EngineOptions, RocksStore
from state_backend.formats.types import parse_struct
from state_backend.inspection.key_entries import KeyEntries, SearchedKey, entries_in
from state_backend.state.shard_state import ShardState
from state_backend.state.state_variables import ListState, MapState, ValueState
from state_backend.state.timers import register_timer
from state_backend.values.errors import UsageError
from state_backend.values.intervals import from_ms, to_ms
from state_backend.values.records import StateDescriptor
from state_backend.values.similar_names import similar_to

State = Mapping[str, Sequence[Mapping[str, Any]]]
_USER_KEY = "user_key_"


def entries_from(
    job: IntervalJob, key: SearchedKey, state: State, timers: Iterable[datetime | int], work: Path
) -> KeyEntries:
    """Return the entries of one key, as RocksDB stores them, for values of states and timers. `work`: A new folder."""
    descriptors = {d.name: d for d in job.content.states}
    with closing(RocksStore(work, EngineOptions(cache_dir=None))) as store:
        shard = ShardState(
            store,
            key_groups=(),
            descriptors=job.content.states,
            now_ms=job.content.time.processing_time_ms,
            struct_factory=row_maker,
        )
        shard.set_key(key.group, key.encoded)
        for name, rows in state.items():
            if name not in descriptors:
                raise UsageError(
                    f"the processor of {job.content.pipeline!r} declares no state {name!r}\n"
                    f"Its states: {', '.join(descriptors)}{similar_to(name, [*descriptors])}"
                )
            _write(shard, descriptors[name], rows)
        for at in timers:
            register_timer(shard, at if isinstance(at, int) else to_ms(at))
        shard.flush()
        return entries_in(store, key, job.content.states)


def _write(shard: ShardState, descriptor: StateDescriptor, rows: Sequence[Mapping[str, Any]]) -> None:
    version = descriptor.versions[-1]
    names = parse_struct(version.value).names
    user_names = parse_struct(version.user_key).names if version.user_key is not None else ()
    known = {*names, *(f"{_USER_KEY}{name}" for name in user_names), "expires_at"}
    for row in rows:
        if unknown := [name for name in row if name not in known]:
            raise UsageError(
                f"state {descriptor.name!r}: an entry has {', '.join(map(repr, unknown))}, but its fields are {', '.join(sorted(known))}"
            )
        if descriptor.ttl_ms is not None and "expires_at" in row:
            # An entry expires `ttl_ms` after the processing time of its write. So the write gets a matching time.
            shard.now_ms = to_ms(row["expires_at"]) - descriptor.ttl_ms
        value = tuple(row.get(name) for name in names)
        if descriptor.kind == "list":
            ListState(shard, descriptor.name).append_value(value)
        elif descriptor.kind == "map":
            user_key = tuple(row.get(f"{_USER_KEY}{name}") for name in user_names)
            MapState(shard, descriptor.name).update_value(user_key, value)
        else:
            ValueState(shard, descriptor.name).update(value)


def values_of(entries: KeyEntries) -> dict[str, list[dict[str, Any]]]:
    """Return the entries of a key by state, as `PipelineTester.replay` takes and returns them.

    An entry is a dict with the columns of the value, the columns of a map's user key as `user_key_<name>`, and
    `expires_at` if it expires. States without entries are left out.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for name in entries.states:
        for row in entries.rows(name):
            flat = {f"{_USER_KEY}{column}": value for column, value in row.get("user_key", {}).items()}
            flat |= row["value"]
            if "expiry_ms" in row:
                flat["expires_at"] = _time_of(row["expiry_ms"])
            found.setdefault(name, []).append(flat)
    return found


def in_utc(value: Any) -> Any:
    """Return a value with all instants in UTC, also nested ones, so that equal values have equal texts."""
    match value:
        case datetime() if value.tzinfo is not None:
            return value.astimezone(UTC)
        case dict():
            return {name: in_utc(of) for name, of in value.items()}
        case list() | tuple():
            return type(value)(map(in_utc, value))
    return value


def timers_of(entries: KeyEntries) -> list[datetime | int]:
    return [_time_of(ms) for ms in entries.timers()]


def _time_of(ms: int) -> datetime | int:
    """Return a time as a datetime in UTC, or the milliseconds since the epoch if no datetime can hold it."""
    try:
        return from_ms(ms)
    except (ValueError, OverflowError, OSError):
        return ms
