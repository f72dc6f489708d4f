"""The command `cairn key`: the states and timers of one key, or its history."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from cairn.command.exit_codes import FINDINGS
from cairn.command.from_request import option_of
from cairn.command.options import AnyPipeline, AnyRoot, Json, States
from cairn.command.printing import print_json, print_table, print_text
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.formats.json_keys import parse_key, similar_keys
from state_backend.formats.types import StructType, parse_struct
from state_backend.inspection.describe import plain
from state_backend.inspection.key_entries import SearchedKey, read_keys
from state_backend.inspection.state_source import StateSource, find_state
from state_backend.state.layout import TIMERS_NAME
from state_backend.values.intervals import format_instant, from_ms, shown_ms
from state_backend.values.operation_parameters import STATE, ReplayKey

Key = tuple[Any, ...]
Entries = dict[str, list[dict[str, Any]]]


def key(
    key_: Annotated[str, option_of(ReplayKey, "key")],
    checkpoint: Annotated[str, typer.Argument(help=f"The state: {STATE}. Not used with --history.")] = "latest",
    root: AnyRoot = None,
    pipeline: AnyPipeline = None,
    states: States = None,
    history: Annotated[
        bool,
        typer.Option(
            "--history",
            help="Show instead the retained checkpoints that changed the key, with each change in any state or timer.",
        ),
    ] = False,
    all_: Annotated[
        bool,
        typer.Option(
            "--all",
            help="With --history: also list all output and late rows of the key, and those of dropped checkpoints whose output is current.",
        ),
    ] = False,
    as_json: Json = False,
) -> int:
    """Exit code 1 says that the key has no state, or that no retained checkpoint changed the key. Only the files that
    can hold the key are read, without Spark.
    """
    if history:
        from cairn.command.key_history import show_history  # Imported only here, since it loads Arrow and NumPy.

        return show_history(key_, root, pipeline, whole=all_, as_json=as_json)
    source = find_state(checkpoint, root=root, pipeline=pipeline)
    schema = parse_struct(source.content.key_schema)
    wanted = parse_key(key_, schema)
    found = look_up(source, [wanted], states)
    shown = _as_json(wanted, source, schema)
    entries = found.get(_name(shown), {})
    similar = [] if entries else _similar(source, wanted, schema, states)
    if as_json:
        print_json(
            {
                "checkpoint": source.checkpoint_id,
                "interval": str(source.content.interval),
                "status": source.status,
                "key": shown,
                "states": entries,
                "similar_keys": similar,
            }
        )
    elif entries:
        _print(source, shown, entries)
    else:
        print_text(f"{_make_title(source)} has no state of the key {json.dumps(shown, ensure_ascii=False)}")
        for other in similar:
            print_text(f"it has state of the key {json.dumps(other, ensure_ascii=False)}")
    return 0 if entries else FINDINGS


def look_up(source: StateSource, keys: Sequence[Key], states: Sequence[str] | None = None) -> dict[str, Entries]:
    """Return the unexpired entries of `keys`, by the key's text, then by state. `states`: Their names; None: all."""
    content, schema = source.content, parse_struct(source.content.key_schema)
    searched = [SearchedKey.of(key, schema, content.max_parallelism) for key in keys]
    wanted = {name: source.descriptor(name) for name in states or [*(d.name for d in content.states), TIMERS_NAME]}
    found: dict[str, Entries] = {}
    with work_folder("get") as work:
        read = read_keys(source, searched, [*filter(None, wanted.values())], open_storage(source.url), work)
        for key, entries in read:
            for name, state in wanted.items():
                rows = [{"expiry_ms": at} for at in entries.timers()] if state is None else entries.rows(name)
                for row in rows:
                    at_ms = row.pop("expiry_ms", None)
                    if state is not None and at_ms is not None and at_ms <= content.time.processing_time_ms:
                        continue
                    entry = {field: plain(value) for field, value in row.items()}
                    if at_ms is not None:
                        entry["expires_at"] = format_instant(from_ms(shown_ms(at_ms)))
                    found.setdefault(_name(key.named), {}).setdefault(name, []).append(entry)
    return found


def _make_title(source: StateSource) -> str:
    # The title contains the status of a stale, replaced or quarantined checkpoint. Without it, a reader would mistake
    # the table for the current state.
    return f"{source}" if source.status in (None, "completed") else f"{source}, {source.status}"


def _similar(source: StateSource, key: Key, schema: StructType, states: Sequence[str] | None) -> list[dict[str, Any]]:
    """Return keys that have state, and differ from `key` only in case, or by spaces or zeros at an end of a text."""
    others = [*similar_keys(key, schema)]
    shown = {_name(one): one for one in (_as_json(other, source, schema) for other in others)}
    found = look_up(source, others, states) if others else {}
    return [shown[name] for name in sorted(found)]


def _as_json(key: Key, source: StateSource, schema: StructType) -> dict[str, Any]:
    named: dict[str, Any] = plain(SearchedKey.of(key, schema, source.content.max_parallelism).named)
    return named


def _name(key: Mapping[str, Any]) -> str:
    return json.dumps([plain(value) for value in key.values()])


def _print(source: StateSource, key: dict[str, Any], entries: Entries) -> None:
    print_text(f"{_make_title(source)}, key {json.dumps(key, ensure_ascii=False)}")
    rows: list[tuple[Sequence[str], str]] = []
    for state, found in entries.items():
        for row in found:
            at, named = row.get("expires_at", ""), [name for name in ("user_key", "pos") if name in row]
            if state == TIMERS_NAME:
                rows.append(((state, f"fires at {at}", "", ""), ""))
                continue
            entry = json.dumps(row[named[0]], ensure_ascii=False) if named else ""
            rows.append(((state, entry, at, json.dumps(row["value"], ensure_ascii=False)), ""))
    print_table(("state", "entry", "expires", "value"), rows)
