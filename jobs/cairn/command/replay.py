"""The command `cairn replay`: run one key of one committed interval again, in this process."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from pprint import pformat
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cairn.command.exit_codes import FINDINGS
from cairn.command.options import LOCAL_SPARK, Json, spark_option
from cairn.command.printing import print_json, print_text
from cairn.command.terminal import Terminal
from state_backend.inspection.describe import plain
from state_backend.inspection.diff_lines import line_of
from state_backend.inspection.state_diff import describe_change
from state_backend.values.errors import UsageError
from state_backend.values.intervals import format_instant, from_ms, shown_ms
from state_backend.values.operation_parameters import ReplayKey

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from cairn.replay.compare_key import RowsDifference
    from cairn.replay.replay_key import Replay
    from cairn.replay.trace import Call, Use


_NOT_WRITTEN = "can't be written; give the name of a new file in a folder that exists"


def replay(
    request: ReplayKey,
    stop: Annotated[
        bool, typer.Option("--pdb", help="Stop at the first line of each handler, in pdb, Python's debugger.")
    ] = False,
    to_test: Annotated[
        Path | None,
        typer.Option(
            "--to-test",
            help="Write the replay as a test in Python into this new file; it needs neither root nor source.",
        ),
    ] = None,
    spark: Annotated[str, spark_option(" if the source needs it")] = LOCAL_SPARK,
    as_json: Json = False,
) -> int:
    """The state comes from the checkpoint that the interval started from, the rows from the source, clock and watermark
    from the records. Exit code 1 says that the results differ. Nothing is written below the root.
    """
    from cairn.replay.debug import Debugger
    from cairn.replay.replay_key import replay_key

    if to_test is not None and (os.path.lexists(to_test) or not to_test.absolute().parent.is_dir()):
        raise UsageError(f"{to_test} {_NOT_WRITTEN}")
    terminal = Terminal(spark, silent=as_json)
    pipeline = terminal.load(request)
    replays = partial(replay_key, pipeline, request.key, request.interval, request.root)
    opens = partial(terminal.connect, pipeline, "replay")
    if stop:
        debugger = Debugger()
        with debugger.running():
            found = replays(spark=opens, made=debugger.watch)
    else:
        found = replays(spark=opens)
    if as_json:
        print_json(describe_replay(found))
    else:
        for line in lines_of(found):
            print_text(line)
    if to_test is not None:
        try:
            with to_test.open("x", encoding="utf-8") as file:
                file.write(text_of_test(found, request.code))
        except OSError as error:
            raise UsageError(f"{to_test} {_NOT_WRITTEN}: {error}") from error
        if not as_json:
            print_text(f"the test is in {to_test}")
    return 0 if found.same else FINDINGS


def describe_replay(found: Replay) -> dict[str, Any]:
    record, compared = found.found.record, found.comparison
    return {
        "pipeline": found.pipeline.name,
        "key": plain(found.key.named),
        "checkpoint": record.id,
        "base": record.content.base_id,
        "start": format_instant(record.interval.start),
        "end": format_instant(record.interval.end),
        "with_spark": found.planned.with_spark,
        "calls": [
            {
                "handler": call.handler,
                "processing_time_ms": call.processing_time_ms,
                "watermark_ms": call.watermark_ms,
                "timer_ms": call.timer_ms,
                "rows": to_json_value(call.rows),
                "uses": [
                    {
                        "state": use.what,
                        "method": use.method,
                        "arguments": to_json_value(use.arguments),
                        "result": to_json_value(use.result),
                    }
                    for use in call.uses
                ],
                "output": to_json_value(call.output),
            }
            for call in found.run.calls
        ],
        "same": found.same,
        "state": [describe_change(change) for change in compared.state],
        "output": _rows_as_json(compared.output),
        "late": _rows_as_json(compared.late),
        "reasons": [*found.reasons],
        "notes": [*found.notes],
    }


def _rows_as_json(difference: RowsDifference) -> dict[str, Any] | None:
    if not difference.known:
        return None
    return {
        "only_committed": to_json_value(difference.only_committed),
        "only_replayed": to_json_value(difference.only_replayed),
        "other_order": difference.other_order,
        "other_types": [*difference.other_types],
    }


def lines_of(found: Replay) -> Iterator[str]:
    record = found.found.record
    content = record.content
    base = f"checkpoint {content.base_id}" if content.base_id is not None else "empty state"
    rows = len(found.planned.rows())
    yield (
        f"checkpoint {record.id} of {found.pipeline.name!r}, {content.interval}, key {_text(found.key.named)}: "
        f"{rows} row{'' if rows == 1 else 's'}, from {base}{', read with Spark' if found.planned.with_spark else ''}"
    )
    for number, call in enumerate(found.run.calls, 1):
        yield from _lines_of_call(number, call)
    if not found.run.calls:
        yield "no call: the key had no rows and no timer was due"
    for row in found.run.late.to_pylist():
        yield f"late {_text(row)}"
    for note in found.notes:
        yield f"note: {note}"
    yield from _lines_of_comparison(found)


def _lines_of_call(number: int, call: Call) -> Iterator[str]:
    times = ""
    if call.processing_time_ms >= 0:
        times = f", processing time {_instant(call.processing_time_ms)}, watermark {_instant(call.watermark_ms)}"
    timer = "" if call.timer_ms is None else f" of the timer {_instant(call.timer_ms)}"
    yield f"call {number}: {call.handler}{timer}{times}"
    for row in call.rows:
        yield f"  in    {_text(row)}"
    for use in call.uses:
        yield _line_of_use(use)
    for row in call.output:
        yield f"  out   {_text(row)}"


def _line_of_use(use: Use) -> str:
    sign = "read " if use.reads else "write"
    if use.what == "timer":
        sign = "timer"
        at = ", ".join(_instant(a) if isinstance(a, int) else _text(a) for a in use.arguments)
        listed = f" -> {', '.join(map(_instant, use.result))}" if isinstance(use.result, list) else ""
        return f"  {sign} {use.method}({at}){listed}"
    arguments = ", ".join(map(_text, use.arguments))
    result = f" -> {_text(use.result)}" if use.reads else ""
    return f"  {sign} {use.what}.{use.method}({arguments}){result}"


def _lines_of_comparison(found: Replay) -> Iterator[str]:
    compared = found.comparison
    yield "state: equals the committed state" if not compared.state else "state: differs from the committed state"
    for change in compared.state:
        described = describe_change(change)
        yield f"  {line_of({name: value for name, value in described.items() if name != 'key'})}"
    for what, difference in (("output", compared.output), ("late rows", compared.late)):
        if not difference.known:
            yield f"{what}: rows of the key can't be told apart in the committed files"
        elif difference.same:
            yield f"{what}: equal the committed rows" if what != "output" else "output: equals the committed output"
        else:
            yield (
                f"{what}: differ from the committed rows"
                if what != "output"
                else "output: differs from the committed output"
            )
        yield from (f"  - {_text(row)}" for row in difference.only_committed)
        yield from (f"  + {_text(row)}" for row in difference.only_replayed)
        if difference.other_order:
            yield "  the rows are equal, but in another order"
        yield from (f"  another type: {types}" for types in difference.other_types)
    yield from (f"because: {reason}" for reason in found.reasons)


def to_json_value(value: Any) -> Any:
    """Convert a value of user code to JSON values. A value of an unknown type becomes its text."""
    value = plain(value)
    if isinstance(value, dict):
        return {str(name): to_json_value(of) for name, of in value.items()}
    if isinstance(value, list):
        return [*map(to_json_value, value)]
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        return to_json_value(item())
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _text(value: Any) -> str:
    return json.dumps(to_json_value(value), ensure_ascii=False)


def _instant(ms: int) -> str:
    at: datetime = from_ms(shown_ms(ms))
    return format_instant(at)


_TEST = '''"""Checkpoint {id} of {pipeline!r}, {interval}: one key, as `cairn replay` ran it."""

{imports}

from cairn import Interval
from cairn.testing import PipelineTester
from {module} import {name} as PIPELINE

{values}

def test_{title}() -> None:
    tester = PipelineTester(PIPELINE, **SETTINGS)
    replayed = tester.replay(KEY, Interval(*INTERVAL), ROWS, **BEFORE)
    found = {{name: getattr(replayed, name) for name in EXPECTED}}
    assert {found} == {expected}
'''


def text_of_test(found: Replay, code: str) -> str:
    """Return a Python module with one test, which runs the key again and expects the replay's result.

    The test needs neither root nor source. `code`: The pipeline, as `module:NAME`.
    """
    from cairn.literal_state import in_utc, timers_of, values_of
    from cairn.rows.routing import INITIAL

    module, _, name = code.partition(":")
    planned, record, run = found.planned, found.found.record, found.run
    job, inputs, interval = planned.plan.job, planned.plan.inputs, record.interval
    settings = {"input_schema": _ddl_of(inputs.rows.schema)}
    if inputs.initial is not None:
        settings |= {"initial_state": planned.rows(INITIAL), "initial_schema": _ddl_of(inputs.initial.schema)}
    if found.pipeline.time_zone is None and job.zone != "UTC":
        settings["time_zone"] = job.zone
    before: dict[str, Any] = {"state": values_of(found.before), "timers": timers_of(found.before)}
    if job.event_time is not None:
        limits = {"watermark": job.event_time.base_ms, "late_until": job.event_time.late_ms}
        before |= {limit: from_ms(ms) for limit, ms in limits.items() if ms is not None}
    values = {
        "SETTINGS": settings,
        "KEY": found.key.named,
        "INTERVAL": (interval.start, interval.end),
        "ROWS": planned.rows(),
        "BEFORE": before,
        "EXPECTED": {
            "output": run.output.to_pylist(),
            "late": run.late.to_pylist(),
            "state": values_of(run.entries),
            "timers": timers_of(run.entries),
        },
    }
    text = ""
    for what, of in values.items():
        written = pformat(in_utc(of), width=100, sort_dicts=False)
        text += f"{what} = {written}\n".replace("\n ", "\n " + " " * len(f"{what} = "))
    imports = {
        "datetime": "import datetime",
        "Decimal": "from decimal import Decimal",
        "inf|nan": "from math import inf, nan",
        "StructType": "from pyspark.sql.types import *",
    }
    # Results with NaN are compared as text, because NaN does not equal itself.
    by_text = re.search(r"\bnan\b", text) is not None
    return _TEST.format(
        id=record.id,
        pipeline=found.pipeline.name,
        interval=interval,
        imports="\n".join(line for used, line in imports.items() if re.search(rf"\b({used})\b", text)),
        module=module,
        name=name,
        values=text,
        title=re.sub(r"\W+", "_", f"{found.pipeline.name}_{interval.start:%Y_%m_%dT%H%M}_checkpoint_{record.id}"),
        found="repr(found)" if by_text else "found",
        expected="repr(EXPECTED)" if by_text else "EXPECTED",
    )


def _ddl_of(schema: StructType) -> Any:
    """Return the DDL text of a schema, or the schema itself if DDL would lose a part of it, such as NOT NULL."""
    from cairn.spark.ddl import parse_ddl_locally

    ddl = schema.simpleString().removeprefix("struct<").removesuffix(">")
    with suppress(UsageError):
        return ddl if parse_ddl_locally(ddl) == schema else schema
    return schema
