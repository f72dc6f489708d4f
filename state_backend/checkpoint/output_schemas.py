"""Track the schemas of a pipeline's output and input, and check whether a new output schema may join the others.

An output file keeps its schema for ever, so one table must hold the rows of all files. The newest commit lists all
schemas, and each file names its schema by number. So no schema is lost when retention drops records.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from state_backend.checkpoint.log import Log
from state_backend.formats.table_schema import join_schemas
from state_backend.formats.types import StructType, parse_struct
from state_backend.values.errors import CorruptRecord, UsageError
from state_backend.values.intervals import Interval
from state_backend.values.records import Content, OutputFile, Record


def recorded_schemas(log: Log, *, late: bool = False) -> tuple[dict[str, Any], ...]:
    """Return all schemas that output has had, or with `late` those of the input, in the order of first use.

    The record of the newest commit lists them. That record is never a tombstone, because a commit retains itself.
    """
    newest = log.entry(max(log.retained, default=0))
    if not isinstance(newest, Record):
        return ()
    return newest.input_schemas if late else newest.output_schemas


def spelling(log: Log) -> tuple[str, ...]:
    """Return the names of all columns that the input has had, those of the first interval first."""
    return tuple(dict.fromkeys(f["name"] for schema in recorded_schemas(log, late=True) for f in schema["fields"]))


def newest_output(log: Log, *, late: bool = False) -> OutputFile | None:
    """Return one current output file of the latest interval that has such files; None if no interval has.

    With `late`, only files of late rows count; without it, only files of output rows.
    """
    outputs = ((interval, file) for interval, (_, files) in log.current_outputs().items() for file in files)
    mine = {interval: file for interval, file in outputs if file.late == late}
    return mine[max(mine)] if mine else None


def schema_of(file: OutputFile, recorded: tuple[dict[str, Any], ...]) -> StructType | None:
    """Return the schema of an output file: that with its number in `recorded`; None if the file has no number."""
    if file.schema_version is None:
        return None
    if not 1 <= file.schema_version <= len(recorded):
        raise CorruptRecord(
            f"{file.handle.path}: the record gives this file output schema {file.schema_version}, but the pipeline has only {len(recorded)}"
        )
    return parse_struct(recorded[file.schema_version - 1])


def check_output_schema(log: Log, pipeline: str, interval: Interval, declared: dict[str, Any]) -> None:
    """Raise `UsageError` if no table could hold the declared schema beside the current output of other intervals.

    A recorded schema that no current output has any more does not count. The current output of all intervals is read
    only if the declared schema clashes with some recorded schema.
    """
    recorded, made = recorded_schemas(log), parse_struct(declared)
    if not any(join_schemas(parse_struct(schema), made)[1] for schema in recorded):
        return
    others = [(other, files) for other, (_, files) in log.current_outputs().items() if not other.overlaps(interval)]
    for other, files in sorted(others, reverse=True):
        for file in files:
            there = None if file.late else schema_of(file, recorded)
            if there is not None and (clashes := join_schemas(there, made)[1]):
                fields = "; ".join(f"field {c.path!r}: recorded as {c.one}, declared as {c.other}" for c in clashes)
                raise UsageError(
                    f"pipeline {pipeline!r}: the new output_schema does not fit the output of {other}: {fields}; neither type holds all "
                    "values of the other\nDeclare the field as recorded, or add a field of another name. Or continue as a pipeline of "
                    "another name, with new output: cairn fork copies the state"
                )


def with_schemas(log: Log, content: Content) -> tuple[Content, tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]:
    """Return (content whose files name their schemas by number, all output schemas, all input schemas).

    The returned content has no schemas of its own, since the two lists have them.
    """
    output, read = recorded_schemas(log), recorded_schemas(log, late=True)
    numbers: dict[bool, int | None] = {False: None, True: None}
    if content.kind == "interval":
        if content.output_schema is not None:
            check_output_schema(log, content.pipeline, content.interval, content.output_schema)
            output, numbers[False] = _with(output, content.output_schema)
        if content.input_schema is not None:
            read, numbers[True] = _with(read, content.input_schema)
    files = tuple(replace(f, schema_version=numbers[f.late]) for f in content.outputs)
    return replace(content, outputs=files, output_schema=None, input_schema=None), output, read


def _with(schemas: tuple[dict[str, Any], ...], schema: dict[str, Any]) -> tuple[tuple[dict[str, Any], ...], int]:
    """Return the list with the schema, which is appended if it is new, and the schema's number from 1."""
    known = [*map(parse_struct, schemas)]
    if parse_struct(schema) in known:
        return schemas, known.index(parse_struct(schema)) + 1
    return (*schemas, schema), len(schemas) + 1
