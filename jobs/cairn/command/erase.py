"""The command `cairn erase`: remove keys from the newest state, and list the places that may still hold them.

It needs neither Spark nor Airflow.
"""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer

from cairn.command.options import DryRun, Json, Pipeline, Root
from cairn.operations.erase_keys import ForgetOptions, Forgot, newest_content, plan_forget
from cairn.operations.erase_keys import forget as forget_keys
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.adapters.rocks import EngineOptions
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.checkpoint.trials import check_no_trial
from state_backend.formats.json_keys import encode_json_key
from state_backend.formats.types import parse_struct
from state_backend.inspection.places_of_keys import Left, Place, places_of
from state_backend.state.layout import TIMERS_NAME
from state_backend.values.errors import UsageError

_SALT_BYTES = 16


class OnRerun(StrEnum):
    """Values of `--on-rerun`: what happens to an interval that would bring a removed key back into the state."""

    refuse = "refuse"
    filter = "filter"


def erase(
    root: Root,
    pipeline: Pipeline,
    key: Annotated[list[str], typer.Argument(help='Keys to remove, as JSON: \'{"user": "u1"}\'.')],
    on_rerun: Annotated[
        OnRerun,
        typer.Option(
            help="What to do with an interval that would bring a key back: refuse it, or filter the key out of it."
        ),
    ] = OnRerun.refuse,
    drop_checkpoints: Annotated[
        bool, typer.Option("--drop-checkpoints", help="Also drop checkpoints whose files may hold the key.")
    ] = False,
    rewrite_output: Annotated[
        bool, typer.Option("--rewrite-output", help="Also rewrite files of output and late rows that contain the key.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Agree to remove the key; it can't be brought back.")] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> int:
    """Remove keys from all states and timers, and list the places that may still hold them."""
    check_no_trial(root, "erase")
    coordinator = Coordinator(open_storage(join_url(root, pipeline)), pipeline)
    schema = parse_struct(newest_content(coordinator).key_schema)
    encoded = list(dict.fromkeys(encode_json_key(text, schema) for text in key))
    options = ForgetOptions(drop_checkpoints=drop_checkpoints, rewrite_output=rewrite_output, on_rerun=on_rerun.value)
    engine = EngineOptions(cache_dir=None)
    if dry_run or not yes:
        planned = plan_forget(coordinator, encoded, options, engine)
        if not dry_run:
            raise UsageError(
                f"{_lines(planned, options, done=False)}\nNothing was done. To agree, run the same command with --yes"
            )
        found = planned
    else:
        found = forget_keys(
            coordinator,
            encoded,
            options,
            engine,
            new_attempt=lambda: str(uuid.uuid4()),
            new_salt=lambda: secrets.token_hex(_SALT_BYTES),
        )
    left = Left(
        dropped=found.dropped if not dry_run else (),
        holding=found.holding,
        output_rewritten=rewrite_output,
        unknown_output=found.outputs.unknown,
    )
    texts = {text for one in key for text in _texts(json.loads(one))}
    places = places_of(root, pipeline, encoded, texts, left)
    if as_json:
        typer.echo(json.dumps(_described(found, places, dry_run=dry_run), indent=2))
        return 0
    typer.echo(_lines(found, options, done=not dry_run))
    typer.echo("places that may still hold the key:")
    for place in places:
        typer.echo(f"  {place}")
    return 0


def _lines(found: Forgot, options: ForgetOptions, *, done: bool) -> str:
    def would(verb: str) -> str:
        return verb if done else f"would be {verb}"

    lines = []
    if done:
        lines.append(
            f"checkpoint {found.checkpoint} of {found.interval} has the state of checkpoint {found.base} without the key"
        )
    named = {("timers" if name == TIMERS_NAME else name): count for name, count in found.entries.items()}
    entries = ", ".join(f"{count} in {name}" for name, count in sorted(named.items()))
    total = sum(found.entries.values())
    lines.append(
        f"{total} entries {would('removed')}{f': {entries}' if entries else ''}; {found.shards} shards {would('rewritten')}"
    )
    if options.drop_checkpoints:
        lines.append(f"checkpoints {would('dropped')}: {', '.join(map(str, found.dropped)) or 'none'}")
    if options.rewrite_output:
        lines.append(f"output files {would('rewritten')}: {found.outputs.files}, {found.outputs.rows} rows of the key")
    after = "refused" if options.on_rerun == "refuse" else "run without the key"
    lines.append(f"an interval that would bring the key back is {after}")
    return "\n".join(lines)


def _described(found: Forgot, places: list[Place], *, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "checkpoint": found.checkpoint,
        "base": found.base,
        "interval": str(found.interval),
        "entries": found.entries,
        "shards": found.shards,
        "dropped": list(found.dropped),
        "holding": list(found.holding),
        "output_files": found.outputs.files,
        "output_rows": found.outputs.rows,
        "places": [{"what": p.what, "where": p.where, "then": p.then} for p in places],
    }


def _texts(value: Any) -> Iterator[str]:
    """Yield the parts of a key by which a search finds the key in the findings of validations.

    A string is yielded as it is. A number or boolean is yielded with its field name, as findings write it.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner)
            if isinstance(inner, int | float | bool):
                yield f'"key_{name}":{json.dumps(inner)}'
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, str):
        yield value
