"""Call a pipeline's source.

An error of the source becomes a `SourceError` that names the pipeline, the interval and the next step.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import CalendarIntervalType, DataType, StructType, YearMonthIntervalType

from cairn.operations.intervals.read_upstreams import output_alone, read_output, read_upstreams
from cairn.operations.intervals.stateful_source import warn_of_stateful_source
from cairn.operations.intervals.untracked_reads import combines_rows, untracked_in
from cairn.operations.output_files import noticing
from cairn.pipeline import Interval, Pipeline
from cairn.range_sources import INTERVAL, RangeSource
from cairn.rows.connect_frames import is_streaming
from cairn.rows.local_rows import LocalRows
from cairn.runners.user_code import user_traceback
from cairn.shipping.ship_processor import pickle_by_value
from cairn.spark.session import is_lost, shares_workers
from cairn.upstream_sources import Upstreams
from state_backend.chains.judge_inputs import Chains
from state_backend.chains.pin_inputs import Reader
from state_backend.values.errors import CairnError, SourceError, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.hide_secrets import hide_all
from state_backend.values.inputs import InputRead, Untracked

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger("cairn.spark")

_UNREADABLE = re.compile(r"\[FAILED_READ_FILE[.A-Z_]*\] ([^\n]*?)(?:\s*SQLSTATE: \w+)?(?:\n|$)")
_JAVA_FRAME = re.compile(r"\s*(at [\w.$/<>]+\([^)]*\)|\.\.\. \d+ more|JVM stacktrace:)\s*$")
# Matches a cause in a Java stack trace: the class without its package, and the message up to the first stack frame.
_CAUSE = re.compile(
    r"^Caused by: (?:[\w$]+\.)*([\w$]+): (.*?)(?=^\s*(?:at |\.\.\. \d+ more)|^Caused by: |\Z)", re.M | re.S
)
# Matches Spark's data exceptions, SQLSTATE class 22, such as a failed cast or a division by zero, and `raise_error`.
_BAD_DATA = re.compile(r"(\[[A-Z_.]+\] [^\n]*)SQLSTATE: (?:22\w{3}|P0001)")


@frozen
class Read:
    # The interval's rows. If one query reads several intervals: the rows of all of them.
    rows: DataFrame
    # The position that the source records; empty if it records none.
    position: dict[str, Any]
    waited_ns: int = 0  # How long the caller waited for the source.
    inputs: tuple[InputRead, ...] = ()
    untracked: tuple[Untracked, ...] = ()
    # The intervals of one query, and their rows with the column `INTERVAL`; None if the query reads only this interval.
    together: tuple[Sequence[Interval], DataFrame] | None = None


def read_source(
    spark: SparkSession, pipeline: Pipeline, interval: Interval, root: str, chains: Chains | None = None
) -> Read:
    """Call the source, and return its answer. `chains`: Keeps the upstreams' logs; None reads all logs anew."""
    inputs: tuple[InputRead, ...] = ()
    with _asking(spark, pipeline, interval) as (where, noticed):
        if isinstance(pipeline.source, Upstreams):
            reader = _reader(pipeline, interval, root)
            read, inputs = read_upstreams(spark, pipeline.source, reader, pipeline.output_schema, chains or Chains())
        else:
            read = pipeline.source(spark, interval)
        rows, position = read if isinstance(read, tuple) and len(read) == 2 else (read, {})
        if not _is_frame(rows):
            raise SourceError(
                f"{where}: the source returned {_describe(read)}; it must return a DataFrame, or a DataFrame and its position"
            )
        schema = rows.schema  # Spark Connect analyses the query only when its schema is read.
    _check_rows(pipeline, rows, schema, where)
    return Read(rows=rows, position=_shown(position, where), inputs=inputs, untracked=_untracked(rows, noticed))


def reads_ranges(source: object) -> bool:
    """Return True if one query of this source can read the rows of several intervals."""
    return isinstance(source, RangeSource) or (isinstance(source, Upstreams) and output_alone(source) is not None)


def read_range(spark: SparkSession, pipeline: Pipeline, intervals: Sequence[Interval], root: str) -> list[Read]:
    """Ask a source for consecutive intervals by one query. Return one answer for each interval.

    The answers end before the first interval that an upstream has not committed. Raise `SourceError` if the query
    aggregates, joins or limits rows: such a query could mix rows of different intervals.
    """
    with _asking(spark, pipeline, intervals[0]) as (where, noticed):
        if isinstance(pipeline.source, Upstreams):
            rows, read = read_output(spark, pipeline.source, [_reader(pipeline, one, root) for one in intervals])
        else:
            assert isinstance(pipeline.source, RangeSource)
            rows, positions = pipeline.source.read(spark, intervals)
            read = [(position, ()) for position in positions]
            if combines_rows(rows):
                raise SourceError("an aggregate, a join or a limit in its query can combine rows of several intervals")
        inner = rows.drop(INTERVAL)
    _check_rows(pipeline, inner, inner.schema, where)
    untracked, together = _untracked(rows, noticed), (intervals[: len(read)], rows)
    return [
        Read(rows=inner, position=_shown(position, where), inputs=inputs, untracked=untracked, together=together)
        for position, inputs in read
    ]


def _reader(pipeline: Pipeline, interval: Interval, root: str) -> Reader:
    schedule, start = pipeline.declared_schedule, pipeline.start
    return Reader(root=root, pipeline=pipeline.name, interval=interval, schedule=schedule, start=start)


@contextmanager
def _asking(spark: SparkSession, pipeline: Pipeline, interval: Interval) -> Iterator[tuple[str, set[Untracked]]]:
    """Turn an error in the block into a `SourceError`. Yield (begin of messages, set).

    The set gets the pipelines whose output files the source lists in the block (`output_files`).
    """
    where = f"pipeline {pipeline.name!r}, {interval}"
    try:
        with noticing() as noticed:
            _send_code(spark, pipeline)
            yield where, noticed
            _send_code(spark, pipeline)  # Now with the modules that the source has imported itself.
    except CairnError:
        raise
    except Exception as error:
        if is_lost(error):
            raise
        told = _unreadable(where, error) or f"{where}: the source raised {_told(error)}"
        if "PicklingError" in type(error).__name__ and shares_workers(spark):
            told += "\nTo let Spark send only the names of UDFs, set spark.sql.artifact.isolation.enabled=true in spark_conf"
        raised = SourceError(told)
        # Leave the frames of this module out of the traceback that the user sees.
        for _ in range(2):
            inner = error.__traceback__.tb_next if error.__traceback__ is not None else None
            error.with_traceback(inner or error.__traceback__)
        raised.add_note(textwrap.indent(without_java(user_traceback(error)), "  "))
        log.debug("what the source raised", exc_info=error)
        raise raised from None


def _send_code(spark: SparkSession, pipeline: Pipeline) -> None:
    for function in (pipeline.source, pipeline.initial_state) if shares_workers(spark) else ():
        with suppress(UsageError):  # A function that can't be hashed.
            pickle_by_value(function)


def _check_rows(pipeline: Pipeline, rows: Any, schema: StructType, where: str) -> None:
    if is_streaming(rows):
        raise SourceError(
            f"{where}: the source returned a streaming DataFrame, which has no end; read the interval's rows with spark.read"
        )
    check_types(schema, f"{where}: the input")
    warn_of_stateful_source(pipeline, rows)


def _shown(position: Any, where: str) -> dict[str, Any]:
    """Return a position without secrets, because pages show it. Raise `SourceError` if it is no dict of JSON values."""
    try:
        if not isinstance(position, dict):
            raise TypeError(f"it is {_describe(position)}, not a dict")
        json.dumps(position, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SourceError(f"{where}: the source's position must be a dict of JSON values: {error}") from None
    shown: dict[str, Any] = hide_all(position)
    if shown != position:
        # Positions that differ only in a hidden part, such as a page's token in a URL, are still different inputs.
        shown["hidden"] = hashlib.sha256(json.dumps(position, sort_keys=True).encode()).hexdigest()[:12]
    return shown


def _untracked(rows: Any, noticed: set[Untracked]) -> tuple[Untracked, ...]:
    try:
        noticed |= untracked_in(rows)
    except Exception as error:  # The record only notes these pipelines, so an error must not fail the interval.
        log.debug("the plan of the source could not be read: %s", error)
    return tuple(sorted(noticed, key=lambda read: (read.root, read.pipeline)))


def without_java(text: str) -> str:
    """Remove the lines of Java stack traces from a traceback. Spark's errors contain such lines in their text."""
    return "\n".join(line for line in text.splitlines() if not _JAVA_FRAME.match(line))


def check_types(schema: StructType, what: str) -> None:
    for field in schema.fields:
        found = next(_not_for_python(field.dataType), None)
        if found is not None:
            raise SourceError(
                f"{what}'s column {field.name!r} is {field.dataType.simpleString()}; {found} can't be passed to Python; "
                "in the source, drop the column, or cast it to STRING"
            )


def arrow_schema_json(data_type: Any) -> Any:
    """Return a schema as `jsonValue()` gives it, with all void types made nullable.

    Spark says that the elements of an empty array literal are void and not nullable. Arrow refuses this combination.
    """
    if isinstance(data_type, dict):
        changed = {name: arrow_schema_json(value) for name, value in data_type.items()}
        for of, nullable in (("elementType", "containsNull"), ("valueType", "valueContainsNull"), ("type", "nullable")):
            if changed.get(of) == "void" and nullable in changed:
                changed[nullable] = True
        return changed
    return [*map(arrow_schema_json, data_type)] if isinstance(data_type, list) else data_type


@contextmanager
def input_errors(pipeline: str, interval: Interval) -> Iterator[None]:
    """Turn Spark's errors about input files and values into a `SourceError`, within the block that computes the rows.

    Spark reads the input only when it computes. Spark's error contains a hundred lines of Java stack traces, so it goes
    only to the logger `cairn.spark`, at level DEBUG.
    """
    try:
        yield
    except CairnError:
        raise
    except Exception as error:
        told = _unreadable(f"pipeline {pipeline!r}, {interval}", error)
        if told is None:
            raise
        log.debug("what Spark said", exc_info=error)
        raise SourceError(told) from None


def _unreadable(where: str, error: Exception) -> str | None:
    """Return the relevant lines of Spark's error about an input; None for an error about something else."""
    text = str(error)
    for pattern, what, way_out in (
        (
            _UNREADABLE,
            "an input file can't be read",
            "Fix the file, or fix the schema and options in the source, or leave the file out of the source",
        ),
        (_BAD_DATA, "the input can't be computed", "Fix the rows, or fix the expressions in the source"),
    ):
        if found := pattern.search(text):
            causes = "".join(f"\nBecause: {cause}" for cause in _causes_below(text[found.end() :]))
            return f"{where}: {what}: {found[1].strip()} Nothing was committed{causes}\n{way_out}"
    return None


def _causes_below(text: str) -> list[str]:
    """Return the last three different "Caused by" messages of a Java stack trace, in their order, one line each."""
    causes: list[str] = []
    for found in _CAUSE.finditer(text):
        said = " ".join(line.strip() for line in found[2].splitlines())
        said = re.sub(r"\s*SQLSTATE: \w+", "", said).strip()
        # A Java exception often repeats its cause's message. Leave out a message that an outer cause contains.
        if said and not any(said in known for known in causes):
            causes.append(f"{found[1]}: {said if len(said) <= 400 else f'{said[:397]}...'}")
    return causes[-3:]


def _told(error: Exception) -> str:
    """Return the message of an exception in one line.

    An exception of Py4J yields Java's message and its cause, because Py4J's own first line names only an object number.
    """
    lines = str(error).strip().splitlines() or ["no message"]
    if not lines[0].startswith("An error occurred while calling") or len(lines) == 1:
        return f"{type(error).__name__}: {lines[0]}"
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    said = lines[1].removeprefix(": ")
    return f"{said}; caused by {causes[-1]}" if causes else said


def _is_frame(value: Any) -> bool:
    # Classic DataFrames and those of Spark Connect both have these attributes. `isinstance` would need an import of
    # Spark Connect, and `hasattr` would ask the server: `schema` and `isStreaming` are properties.
    missing = object()
    return isinstance(value, LocalRows) or all(
        inspect.getattr_static(value, name, missing) is not missing
        for name in ("schema", "isStreaming", "select", "unionByName")
    )


def _not_for_python(data_type: DataType) -> Iterator[str]:
    if isinstance(data_type, YearMonthIntervalType | CalendarIntervalType):
        yield data_type.simpleString()
    inner = [getattr(data_type, name, None) for name in ("elementType", "keyType", "valueType")]
    if isinstance(data_type, StructType):
        inner = [f.dataType for f in data_type.fields]
    for part in inner:
        if isinstance(part, DataType):
            yield from _not_for_python(part)


def _describe(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
