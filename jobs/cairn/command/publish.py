"""The command `cairn publish`: call the sink again, or skip an interval's output."""

from __future__ import annotations

from typing import Annotated

import typer

from cairn.command.options import Json, Pipeline, Root, open_log
from cairn.command.printing import print_json, print_text
from cairn.command.state_commands import load_code, start_of
from state_backend.adapters.open_storage import join_url
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.values.errors import UsageError


def publish(
    root: Root,
    pipeline: Pipeline,
    code: Annotated[
        str,
        typer.Option(
            envvar="CAIRN_CODE", help="module:NAME of the Pipeline whose sink is called; not needed for --skip."
        ),
    ] = "",
    retry: Annotated[
        list[str] | None,
        typer.Option(
            help="Only the interval that starts then, 2024-01-04T00:00Z; may be repeated. Left out: all unpublished ones."
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(help="Mark the interval that starts then as published without the sink; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Call the sink for output that it has not accepted yet, or mark output as published without the sink."""
    storage, _ = open_log(root, pipeline)
    coordinator = Coordinator(storage, pipeline)
    skipped: list[int] = []
    published: list[int] = []
    if skip:
        skipped = coordinator.skip_publication([start_of("--skip", text) for text in skip])
    if retry or not skip:
        if not code:
            raise UsageError("--code is missing: give module:NAME of the pipeline whose sink is called")
        declared = load_code(code)
        only = [start_of("--retry", text) for text in retry] if retry else None
        hook = declared.sink_hook(None, join_url(root, pipeline))
        published = coordinator.publish(hook, in_order=declared.sink_in_order, only=only, code=code)
    if as_json:
        return print_json({"published": published, "skipped": skipped})
    for what, ids in (("published", published), ("skipped", skipped)):
        if ids:
            print_text(f"{what}: {', '.join(f'checkpoint {n}' for n in ids)}")
    if not published and not skipped:
        print_text("all output is published already")
    return 0
