"""The command `cairn diff`: what changed from one checkpoint or savepoint to another."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from cairn.command.options import PUT_BACK, AnyPipeline, AnyRoot, Json, States
from cairn.command.printing import measure, print_json, print_table, print_text
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.inspection.describe import describe_difference
from state_backend.inspection.diff_lines import line_of
from state_backend.inspection.state_diff import describe_change, diff_states, manifests_of
from state_backend.inspection.state_source import StateSource, find_state
from state_backend.values.errors import CorruptFile, NotFound
from state_backend.values.human_units import size
from state_backend.values.operation_parameters import STATE
from state_backend.values.records import Record


def diff(
    first: Annotated[str, typer.Argument(help=f"The state before: {STATE}.")],
    second: Annotated[str, typer.Argument(help="The state after, named in the same way.")] = "latest",
    root: AnyRoot = None,
    pipeline: AnyPipeline = None,
    states: States = None,
    limit: Annotated[int, typer.Option(min=0, help="How many entries that differ to list; all are counted.")] = 20,
    fast: Annotated[
        bool, typer.Option("--fast", help="Read no state: compare only totals and lists of files.")
    ] = False,
    as_json: Json = False,
) -> int:
    """The command compares digests, and reads entries only of the key groups that differ."""
    sources = [find_state(which, root=root, pipeline=pipeline) for which in (first, second)]
    found = _metadata_diff(sources)
    if not fast:
        found["entries"], found["changes"] = _entry_diff(sources, states, limit)
    if as_json:
        print_json(found)
    else:
        _print_diff(found)
    return 0


def _metadata_diff(sources: Sequence[StateSource]) -> dict[str, Any]:
    sides: list[Any] = []
    for source in sources:
        manifests = None
        if not source.canonical:
            try:
                manifests = manifests_of(source, open_storage(source.url))
            except NotFound as error:
                raise CorruptFile(f"{source}: a manifest is missing: {error}\n{PUT_BACK}") from error
        sides += [Record(id=source.checkpoint_id, retained=(), reproduces=None, content=source.content), manifests]
    return describe_difference(*sides)


def _entry_diff(
    sources: Sequence[StateSource], states: Sequence[str] | None, limit: int
) -> tuple[dict[str, dict[str, int]], list[dict[str, Any]]]:
    counts: dict[str, dict[str, int]] = {}
    listed: list[dict[str, Any]] = []
    with ExitStack() as stack:
        work = stack.enter_context(work_folder("diff"))
        for source in sources:
            stack.enter_context(source.held("a comparison"))
        for change in diff_states(sources[0], sources[1], work, states=states or None):
            of_state = counts.setdefault(change.state, dict.fromkeys(("added", "removed", "changed"), 0))
            of_state[change.change] += 1
            if len(listed) < limit:
                listed.append(describe_change(change))
    return counts, listed


def _growth(name: str, growth: int) -> str:
    return "" if not growth else f"{'+' if growth > 0 else '-'}{measure(name, abs(growth))}"


def _print_diff(found: dict[str, Any]) -> None:
    state, code = ("the same" if found[name] else "another" for name in ("same_state", "same_code"))
    names = "" if found["same_code"] else f" ({found['code'][0]}, then {found['code'][1]})"
    before, after = found["intervals"]
    inputs = {True: "from the same input", False: "from other input", None: "the source recorded no input position"}
    print_text(
        f"checkpoint {found['first']} of {before} to {found['second']} of {after}: {state} state, by {code} code{names}, {inputs[found['same_input']]}"
    )
    rows = []
    for name, (before, after) in found["totals"].items():
        rows.append(((name, measure(name, before), measure(name, after), _growth(name, after - before)), ""))
    print_table(("", str(found["first"]), str(found["second"]), "change"), rows)
    for what, names in found["states"].items():
        if names:
            print_text(f"states {what}: {', '.join(names)}")
    for what, sizes in found["files"].items():
        print_text(f"files {what.replace('_', ' ')}: {sizes['files']} with {size(sizes['bytes'])}")
    groups, sizes = found["key_groups"], found["max_parallelism"]
    if groups is not None:
        print_text(f"key groups that differ: {len(groups)} of {sizes[0]}")
    elif sizes[0] != sizes[1]:
        print_text(f"key groups can't be compared: the numbers of key groups are {sizes[0]} and {sizes[1]}")
    for name, counts in found.get("entries", {}).items():
        print_text(f"{name}: " + ", ".join(f"{count:,} {what}" for what, count in counts.items() if count))
    for change in found.get("changes", ()):
        print_text(line_of(change))
    hidden = sum(sum(c.values()) for c in found.get("entries", {}).values()) - len(found.get("changes", ()))
    if hidden:
        print_text(f"not listed: {hidden:,} more; a larger --limit lists them")
