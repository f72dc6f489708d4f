"""Track the schemas of a pipeline's output, and check whether a new schema may follow. Pure functions over the log.

Output files are never rewritten, so readers must be able to read all earlier rows in every new schema. The newest
commit lists all schemas, oldest first, and each output file names its schema by number. So no schema is lost when
retention drops records.
"""

from __future__ import annotations

from typing import Any

from state_backend.checkpoint.log import Log, interval_of, kind_of
from state_backend.formats.schema_evolution import compare_schemas
from state_backend.formats.types import parse_struct
from state_backend.values.errors import UsageError
from state_backend.values.records import Content, OutputFile, Record, SweepRecord


def recorded_schemas(log: Log) -> tuple[dict[str, Any], ...]:
    """Return all schemas that output has had, oldest first.

    The record of the newest commit lists them. That record is never a tombstone, because a commit retains itself.
    """
    newest = log.entry(max(log.retained, default=0))
    return newest.output_schemas if isinstance(newest, Record) else ()


def newest_output(log: Log, *, late: bool = False) -> OutputFile | None:
    """Return one current output file of the newest commit that has such files; None if no commit has.

    With `late`, only files of late rows count; without it, only files of output rows.
    """
    for checkpoint_id in range(log.head_id, 0, -1):
        entry = log.entries[checkpoint_id]
        if isinstance(entry, SweepRecord) or kind_of(entry) != "interval":
            continue
        if log.publication_of(interval_of(entry)) == checkpoint_id:
            files = [file for file in log.outputs(checkpoint_id) if file.late == late]
            if files:
                return files[0]
    return None


def output_so_far(log: Log) -> dict[str, Any] | None:
    """Return the newest output schema; None if no interval was committed."""
    schemas = recorded_schemas(log)
    return schemas[-1] if schemas else None


def check_output_schema(pipeline: str, recorded: dict[str, Any], declared: dict[str, Any]) -> None:
    """Raise `UsageError` if rows of the recorded schema can't be read in the declared schema.

    The rules are those of state schemas (`schema_evolution.py`).

    Raises:
        UsageError: The declared schema can't follow the recorded schema.
    """
    refused = compare_schemas(parse_struct(recorded), parse_struct(declared)).refused
    if refused:
        raise UsageError(
            f"pipeline {pipeline!r}: the new output_schema does not fit the existing output: {'; '.join(refused)}\n"
            "Or continue as a pipeline of another name, with new output: cairn fork copies the state"
        )


def next_schemas(log: Log, content: Content) -> tuple[dict[str, Any], ...]:
    """Return the recorded schemas, and the content's output schema at the end if it differs from the newest.

    Raises:
        UsageError: The content's output schema can't follow the newest recorded schema.
    """
    schemas, declared = recorded_schemas(log), content.output_schema
    if content.kind != "interval" or declared is None:
        return schemas
    if schemas:
        if parse_struct(schemas[-1]) == parse_struct(declared):
            return schemas
        check_output_schema(content.pipeline, schemas[-1], declared)
    return (*schemas, declared)
