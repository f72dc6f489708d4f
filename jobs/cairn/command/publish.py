"""The command `cairn publish`: call the sink again, or skip an interval's output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from cairn.command.options import AnyPipeline, Json, Root, open_log
from cairn.command.printing import print_json, print_text
from cairn.command.terminal import load_code
from cairn.operations.place import check_name
from cairn.operations.publish_group import publish_group
from cairn.pipeline import Pipeline as Declaration
from cairn.sinks.table_sink import Publication, TableSink, owner_of, published_output
from state_backend.checkpoint.choose_base import lines_of
from state_backend.checkpoint.location import Location
from state_backend.checkpoint.log import read_log
from state_backend.checkpoint.publish_output import skip_publication, unpublished
from state_backend.values.airflow_commands import command_line
from state_backend.values.day_or_instant import parse_instant
from state_backend.values.environment import Variable
from state_backend.values.errors import UsageError
from state_backend.values.intervals import Interval, format_instant
from state_backend.values.operation_parameters import OfCode


def publish(
    root: Root,
    pipeline: AnyPipeline = None,
    intervals: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INTERVAL",
            help="Only the intervals with these starts, with time zone, as in 2024-01-04T00:00Z; left out: all unpublished "
            "ones. Not with --check or --rebuild.",
        ),
    ] = None,
    code: Annotated[
        str,
        typer.Option(
            envvar=Variable.CODE, help="module:NAME of the Pipeline whose sink is called; not needed for --skip."
        ),
    ] = "",
    skip: Annotated[
        bool, typer.Option("--skip", help="Mark the output of INTERVAL as published, and call no sink; needs INTERVAL.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Compare the table of a table sink of cairn.sinks with the output; change nothing."
        ),
    ] = False,
    rebuild: Annotated[
        bool,
        typer.Option(
            "--rebuild", help="Empty the table of a table sink of cairn.sinks, and fill it from the current output."
        ),
    ] = False,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            help="Let --rebuild also delete rows that are not of this output, and take over the table of this pipeline in "
            "another root. Without --yes, it stops there.",
        ),
    ] = False,
    group: Annotated[
        str | None,
        typer.Option("--group", help="Call the sinks of all pipelines of this group for what fits together."),
    ] = None,
    as_json: Json = False,
) -> int:
    if group is not None:
        if intervals or skip or check or rebuild:
            raise UsageError("--group takes no intervals, --skip, --check or --rebuild")
        return _publish_group(root, group, as_json)
    if pipeline is None:
        raise UsageError("--pipeline is missing: name the pipeline, or a group with --group")
    at, log = open_log(root, pipeline)
    if check or rebuild:
        if intervals or skip or (check and rebuild):
            raise UsageError("give one of --check, --rebuild, --skip and intervals")
        declared = _load_declaration(code, pipeline)
        if rebuild and declared.group is not None and unpublished(at):
            # The rebuild would also publish the output that waits, without the output of other members that fits it.
            raise _refused(
                declared, f"{code} has output that waits for group {declared.group!r}. First publish the group:", root
            )
        if not isinstance(declared.sink, TableSink):
            raise UsageError(f"--check and --rebuild need a sink of cairn.sinks, but {code} has another sink or none")
        if check:
            return _check(declared.sink, declared.name, at, as_json)
        if not log.head_id:
            raise UsageError(
                f"{at.storage.url} has no checkpoint, so the command does not empty the table; check --root"
            )
        return _rebuild(declared.sink, declared, at, yes=yes, as_json=as_json)
    skipped: list[tuple[Interval, int]] = []
    published: list[tuple[Interval, int]] = []
    only = [parse_instant("interval", text) for text in intervals or ()]
    if skip and not only:
        raise UsageError("--skip needs intervals: give the start of each, as in 2024-01-04T00:00Z")
    if skip:
        skipped = skip_publication(at, only)
    else:
        declared = _load_declaration(code, pipeline)
        if declared.group is not None and not only:
            why = f"{code} is in group {declared.group!r}. To publish an interval alone, name its start. To publish what fits together:"
            raise _refused(declared, why, root)
        published = declared.call_sink(at, None, only=only or None, code=code)
    if as_json:
        return print_json({"published": _describe(published), "skipped": _describe(skipped)})
    for what, outputs in (("published", published), ("skipped", skipped)):
        if outputs:
            print_text(f"{what}:{lines_of(f'{interval} (checkpoint {n})' for interval, n in outputs)}")
    if not published and not skipped:
        print_text("all output is published already")
    return 0


def _refused(declared: Declaration, why: str, root: str) -> UsageError:
    command = command_line("publish", group=declared.group, root=root)
    return UsageError(f"{why}\n{command}")


def _publish_group(root: str, name: str, as_json: bool) -> int:
    published, waiting, why = publish_group(root, name, load_code)
    if as_json:
        shown = [{"pipeline": member, "id": n, "interval": str(interval)} for member, interval, n in published]
        return print_json({"published": shown, "waiting": waiting, "why": why})
    if published:
        print_text(f"published:{lines_of(f'{member} {i} (checkpoint {n})' for member, i, n in published)}")
    print_text(f"{waiting} outputs wait: {why}" if waiting else "all output of the group is published")
    return 0


def _describe(outputs: Iterable[tuple[Interval, int]]) -> list[dict[str, Any]]:
    return [{"id": n, "interval": str(interval)} for interval, n in outputs]


def _load_declaration(code: str, pipeline: str) -> Declaration:
    if not code:
        raise UsageError("--code is missing: give module:NAME of the pipeline whose sink is called")
    return check_name(load_code(code), OfCode(root="", code=code, pipeline=pipeline))


def _current(name: str, at: Location, *, late: bool) -> list[Publication]:
    outputs = read_log(at.storage).current_outputs()
    if not outputs:
        return []
    owner = owner_of(name, at.url, late=late)
    return [published_output(owner, at.url, i, n, files, late=late) for i, (n, files) in sorted(outputs.items())]


def _check(sink: TableSink, name: str, at: Location, as_json: bool) -> int:
    told: list[dict[str, Any]] = []
    lines: list[str] = []
    intervals = 0
    for table, late in sink.each_table():
        current, what = _current(name, at, late=late), "late rows" if late else "output"
        found, intervals = table.check(current), len(current)
        told += [
            {
                "table": repr(table),
                "start": format_instant(d.interval.start),
                "end": format_instant(d.interval.end),
                "rows_of_output": d.expected,
                "rows_of_table": d.found,
            }
            for d in found
        ]
        if found:
            lines += [f"{table!r} differs from the {what} of {len(found)} interval(s):", *map(str, found)]
        else:
            lines.append(f"{table!r} is equal to the {what} of {intervals} interval(s)")
    if as_json:
        print_json({"intervals": intervals, "differences": told})
    else:
        print_text("\n".join(lines))
    return 1 if told else 0


def _rebuild(sink: TableSink, declared: Declaration, at: Location, *, yes: bool, as_json: bool) -> int:
    others = [] if yes else filter(None, (_others(table, at, late) for table, late in sink.each_table()))
    if asked := [*others]:
        raise UsageError("\n".join([*asked, "Nothing was done. To agree, run the same command with --yes"]))
    published: list[tuple[Interval, int]] = []
    lines: list[str] = []
    for table, late in sink.each_table():
        table.clear(owner_of(declared.name, at.url, late=late), takes_over=yes)
        current = _current(declared.name, at, late=late)
        for publication in current:
            table.publish(publication)
        published += [(publication.interval, publication.checkpoint_id) for publication in current]
        lines.append(f"{table!r} has the {'late rows' if late else 'output'} of {len(current)} interval(s)")
    # The tables have this output now. So these calls change no table, and only record that the output is published.
    declared.call_sink(at, None, only=[interval.start for interval, _ in unpublished(at)])
    if as_json:
        return print_json({"published": _describe(sorted({*published})), "skipped": []})
    print_text("\n".join(lines))
    return 0


def _others(table: TableSink, at: Location, late: bool) -> str | None:
    """Return a text about rows that a rebuild would delete although the pipeline has not written them; None if none."""
    outputs = read_log(at.storage).current_outputs()
    ours = {i: sum(file.rows for file in files if file.late == late) for i, (_, files) in outputs.items()}
    counts = table.row_counts()
    others = sum(max(n - ours.get(interval, 0), 0) if interval else n for interval, n in counts.items())
    if not others:
        return None
    what = "late rows" if late else "output"
    return f"{table!r} has {sum(counts.values()):,} rows, {others:,} more than the {what} of {at.pipeline!r}; the command would delete all"
