"""Plan one interval: read the source, check the pipeline against its state, and describe the work of each shard."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import StructType, TimestampNTZType, TimestampType

from cairn.arrow_processor import ArrowProcessor
from cairn.operations.intervals.plan_reuse import input_hash, options_of, source_hash
from cairn.operations.intervals.read_source import Read, arrow_schema_json, check_types, read_source
from cairn.operations.intervals.what_changed import MadeOf, as_json
from cairn.pipeline import Interval, Pipeline
from cairn.rows.column_names import ColumnNames, check_spelling, grouping_names
from cairn.rows.routing import Inputs, key_schema_of
from cairn.rows.watermark import EventTime, event_time_of
from cairn.runners.output_schema import recorded_schema
from cairn.runners.processor_handle import ArrowDeclaringHandle, DeclaringHandle, InputColumns
from cairn.runners.user_code import describe_error
from cairn.shard_jobs.interval import IntervalJob
from cairn.shipping.code_version import begin_code_version, code_reference
from cairn.shipping.ship_processor import code_of_one_call, name_of, processor_on_driver, ship_processor
from cairn.spark.ddl import parse_ddl
from cairn.spark.session import SESSION_ZONE
from cairn.spark_versions import grouping_of, struct_of
from state_backend.chains.judge_inputs import Chains, followed_in
from state_backend.checkpoint.begin_attempt import Begun
from state_backend.checkpoint.log import Log
from state_backend.checkpoint.output_schemas import check_output_schema, recorded_schemas, spelling
from state_backend.checkpoint.prepare_content import NO_TOTALS
from state_backend.formats.types import DataType as KeyType
from state_backend.formats.types import names_and_types, parse_struct, with_nulls_of
from state_backend.state.plan_state_schemas import StatePlan, plan_states
from state_backend.values.errors import CairnError, ProcessorError, SourceError, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.inputs import followed_after
from state_backend.values.intervals import format_instant, to_ms
from state_backend.values.records import NO_PERMISSIONS, Content, LogicalTime, Permissions, RunRef, StateDescriptor
from state_backend.values.zones import Zone, zone_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger("cairn")

MODES = ("incremental", "full", "changelog")


@frozen
class Attempt:
    id: str
    interval: Interval
    run: RunRef
    mode: str = "incremental"
    permissions: Permissions = NO_PERMISSIONS
    # The attempt of an earlier try of the same run: its id, and by name the settings that decided its result
    # (`options_of`). If nothing has changed since, `process_interval` returns that attempt and computes nothing. None
    # without an earlier attempt.
    earlier: tuple[str, Mapping[str, str]] | None = None
    # Rows and position that the source has already returned; None if the source must still be asked.
    read: Read | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"mode {self.mode!r} is not one of {', '.join(MODES)}")


@frozen
class IntervalPlan:
    job: IntervalJob
    inputs: Inputs
    options: Mapping[str, str]  # The settings that decide the result (`options_of`), for a later try of the same run.


@code_of_one_call()
def plan_interval(
    spark: SparkSession, pipeline: Pipeline, url: str, attempt: Attempt, begun: Begun, chains: Chains | None
) -> IntervalPlan:
    """Call the source and the processor's `init`, check both against the base checkpoint, and return the plan.

    `url`: URL of the pipeline's folder. `begun`: The base checkpoint, and the log when the attempt began. `chains`: The
    logs of the upstreams as this attempt has read them; None without upstreams, or if the attempt is never committed.
    """
    root = url.rpartition("/")[0]
    version = begin_code_version(pipeline)
    base = begun.base.content if begun.base is not None else None
    zone = plan_zone(pipeline.name, pipeline.time_zone, spark.conf.get(SESSION_ZONE), base.time.zone if base else None)
    read = attempt.read or read_source(spark, pipeline, attempt.interval, root, chains)
    rows = _spell(spark, pipeline, read.rows, begun.spelling, base)
    names = _names_of(spark, rows.schema, f"pipeline {pipeline.name!r}: the input")
    key = names.find_key(pipeline.key)
    key_schema = key_schema_of(rows.schema, key)
    event_time = _event_time(pipeline, names, rows.schema, zone, base)
    output_schema = _output_schema(spark, pipeline, rows.schema)
    if begun.log is not None:
        _check_output(spark, begun.log, pipeline, attempt.interval, output_schema)
    _check_sink(pipeline, output_schema, rows.schema)
    initial, initial_key = _initial_state(spark, pipeline, key_schema) if base is None else (None, [])
    initial_key_schema = key_schema_of(initial.schema, initial_key) if initial is not None else None
    # Pickle the processor before `init` runs on the driver: the workers must not get an object that `init` has changed.
    processor = ship_processor(pipeline.processor, pipeline.name)
    _check_unchanged(pipeline, base, key_schema, names)
    key_schema = _as_recorded(key_schema, initial_key_schema, base)
    states = _plan_states(spark, pipeline, base, key_schema, rows.schema)
    order_by = tuple(map(names.find, pipeline.order_by or ([event_time.column] if event_time is not None else [])))
    hashed = _input_hash(spark, pipeline, attempt.interval, read, processor.code_hash, output_schema)
    input_schema = arrow_schema_json(rows.schema.jsonValue())
    job = IntervalJob(
        content=replace(
            content_before(pipeline, attempt.interval, attempt.id, attempt.run, processor.code_hash),
            base_id=begun.base.id if begun.base is not None else None,
            permissions=attempt.permissions,
            key_schema=key_schema.jsonValue(),
            states=states.states,
            time=LogicalTime(
                mode=pipeline.time_mode,
                processing_time_ms=attempt.interval.end_ms,
                watermark_ms=event_time.base_ms if event_time is not None else None,
                zone=zone.name,
            ),
            source_position=read.position,
            inputs=read.inputs,
            followed=followed_after(followed_in(begun.log), read.inputs),
            fresh_at=chains.fresh_at(root, pipeline.name, read.inputs) if read.inputs and chains is not None else None,
            untracked=read.untracked,
            retention=pipeline.retention_of(attempt.interval),
            output_schema=recorded_schema(output_schema.jsonValue()),
            input_schema=recorded_schema(input_schema),
            # `returning` lists keys that `cairn erase` removed, and that this interval's rows or base may still hold.
            # The shards leave these keys out. An attempt before `cairn erase` may have had the same code and input, but
            # another result. So the record gets an input hash only if `returning` is empty.
            input_hash=hashed if not begun.returning else None,
            code_version=version(),
            filtered=tuple(sorted({r.key.forget for r in begun.returning})),
        ),
        root=url,
        h0=begun.h0,
        base=base.shards if base is not None else (),
        base_parallelism=len(base.shards) if base is not None else 0,
        mode=attempt.mode,
        api=pipeline.api,
        on_type_mismatch=pipeline.on_type_mismatch,
        input_schema=input_schema,
        initial_schema=arrow_schema_json(initial.schema.jsonValue()) if initial is not None else None,
        output_schema=output_schema.jsonValue(),
        dropped=states.dropped,
        order_by=order_by,
        event_time=event_time,
        processor=processor,
        engine=pipeline.engine,
        changelog=pipeline.changelog,
        returning=begun.returning,
    )
    return IntervalPlan(
        job=job,
        inputs=Inputs(rows=rows, initial=initial, key=key, initial_key=initial_key, order_by=order_by),
        options=options_of(job, source_hash(pipeline.source)),
    )


def plan_next(pipeline: Pipeline, attempt: Attempt, begun: Begun, last: IntervalPlan) -> IntervalPlan | None:
    """Return the plan of the interval after `last` as a changed copy of that plan; None if it can't be such a copy.

    A copy saves time: source and processor are not checked again. After None, the caller calls `plan_interval`.
    """
    read, job, content = attempt.read, last.job, last.job.content
    if read is None or read.untracked or begun.returning or begun.base is None:
        return None
    if read.rows.schema != last.inputs.rows.schema or attempt.permissions != content.permissions:
        return None
    event_time, zone = event_time_after(job, begun.base.content.time), content.time.zone
    assert zone is not None
    content = replace(
        content,
        interval=attempt.interval,
        attempt=attempt.id,
        base_id=begun.base.id,
        time=replace(
            content.time,
            processing_time_ms=attempt.interval.end_ms,
            watermark_ms=event_time.base_ms if event_time is not None else None,
        ),
        source_position=read.position,
        inputs=read.inputs,
        followed=followed_after(content.followed, read.inputs),
        fresh_at=None,
        retention=pipeline.retention_of(attempt.interval),
        input_hash=input_hash(pipeline, content.code_hash, read.position, job.input_schema, job.output_schema, zone),
    )
    job = replace(job, content=content, h0=begun.h0, event_time=event_time)
    return replace(last, job=job, inputs=replace(last.inputs, rows=read.rows))


def event_time_after(job: IntervalJob, base: LogicalTime) -> EventTime | None:
    """Return the job's event-time settings, with the watermarks recorded in `base`; None without event time."""
    of = job.event_time
    return None if of is None else event_time_of(of.column, of.delay_ms, of.rule, base, of.wall_zone)


def content_before(pipeline: Pipeline, interval: Interval, attempt: str, run: RunRef, code_hash: str) -> Content:
    """Return the fields of an attempt's content that the pipeline alone determines. All other fields are empty."""
    return Content(
        kind="interval",
        pipeline=pipeline.name,
        pipeline_start_ms=to_ms(pipeline.start),
        interval=interval,
        run=run,
        attempt=attempt,
        base_id=None,
        permissions=NO_PERMISSIONS,
        parallelism=pipeline.parallelism,
        max_parallelism=pipeline.max_parallelism,
        key_schema={},
        states=(),
        time=LogicalTime(mode=pipeline.time_mode, processing_time_ms=interval.end_ms, watermark_ms=None),
        source_position={},
        code_hash=code_hash,
        totals=NO_TOTALS,
        digest=0,
        shards=(),
        outputs=(),
        durations_us={},
        worker_pids=(),
        retention=pipeline.retention,
        code=code_reference(pipeline),
        schedule=pipeline.declared_schedule,
        group=pipeline.group,
    )


def would_be_made_of(spark: SparkSession, pipeline: Pipeline, interval: Interval, read: Read) -> MadeOf:
    """Return everything, except the base, that would decide the interval's result if a run computed it now.

    The caller compares the returned input hash with that of a committed result. If both are equal, the result stays.
    The input hash is None if it can't be computed, since the source records no position or the interval reads initial
    state.
    """
    processor = ship_processor(pipeline.processor, pipeline.name)
    output_schema = _output_schema(spark, pipeline, read.rows.schema)
    hashed = _input_hash(spark, pipeline, interval, read, processor.code_hash, output_schema)
    return MadeOf(
        code_hash=processor.code_hash,
        code_version=pipeline.version,
        position=as_json(read.position),
        input_hash=hashed,
        by_build=processor.by_build,
    )


def _input_hash(
    spark: SparkSession,
    pipeline: Pipeline,
    interval: Interval,
    read: Read,
    code_hash: str,
    output_schema: StructType,
) -> str | None:
    if pipeline.initial_state is not None and interval.start == pipeline.start:
        return None  # No hash: rows of initial state have no position to compare.
    session_zone = spark.conf.get(SESSION_ZONE)
    return input_hash(
        pipeline,
        code_hash,
        read.position,
        arrow_schema_json(read.rows.schema.jsonValue()),
        output_schema.jsonValue(),
        zone_of(session_zone if pipeline.time_zone is None else pipeline.time_zone).name,
    )


def check_fits(
    spark: SparkSession, pipeline: Pipeline, interval: Interval, read: Read, content: Content, log: Log
) -> None:
    """Raise an error if the pipeline can't continue from the state with the record `content`. Compute no rows.

    These are the checks of planning an interval: time zone, output schema, key, event time and state schemas. `read`:
    The source's answer for `interval`, which has the input's schema.
    """
    with in_zone_of(spark, pipeline.time_zone):
        zone = plan_zone(pipeline.name, pipeline.time_zone, spark.conf.get(SESSION_ZONE), content.time.zone)
        schema = _spell(spark, pipeline, read.rows, spelling(log), content).schema
        output_schema = _output_schema(spark, pipeline, schema)
        _check_output(spark, log, pipeline, interval, output_schema)
        _check_sink(pipeline, output_schema, schema)
        names = _names_of(spark, schema, f"pipeline {pipeline.name!r}: the input")
        key_schema = key_schema_of(schema, names.find_key(pipeline.key))
        _check_unchanged(pipeline, content, key_schema, names)
        _event_time(pipeline, names, schema, zone, content)
        _plan_states(spark, pipeline, content, _as_recorded(key_schema, None, content), schema)


@contextmanager
def in_zone_of(spark: SparkSession, wanted: str | None) -> Iterator[None]:
    """Set the session's time zone to `wanted` within the block; None leaves the zone as it is."""
    if wanted is None:
        yield
        return
    before = spark.conf.get(SESSION_ZONE)
    spark.conf.set(SESSION_ZONE, wanted)
    try:
        yield
    finally:
        spark.conf.set(SESSION_ZONE, before)


def plan_zone(pipeline: str, wanted: str | None, session: str, recorded: str | None) -> Zone:
    """Return the time zone of an interval: the pipeline's (`wanted`), or the session's if the pipeline has none (None).

    Raise `UsageError` if the pipeline has none, and the session's zone is not the `recorded` zone of the base.
    """
    zone = zone_of(session if wanted is None else wanted)
    if wanted is None and recorded not in (None, zone.name):
        raise UsageError(
            f"pipeline {pipeline!r}: so far it ran in the time zone {recorded!r}, but this Spark session has {zone.name!r}\n"
            f"Set spark.sql.session.timeZone to {recorded!r}, or declare a zone in the pipeline: Pipeline(time_zone={zone.name!r}, ...)"
        )
    return zone


def declared_states(spark: SparkSession, pipeline: Pipeline) -> tuple[StateDescriptor, ...]:
    """Return the states that the processor's `init` declares when no checkpoint exists.

    Do not call this for `api="arrow"`: there `init` could read the key and input schemas, which are empty here.
    """
    return _plan_states(spark, pipeline, None, StructType(), StructType()).states


def _output_schema(spark: SparkSession, pipeline: Pipeline, input_schema: StructType) -> StructType:
    """Return the schema of the output: the declared schema, or the schema that the processor derives from its input."""
    schema = pipeline.output_schema
    if schema is None:
        schema = _derived_output(spark, pipeline, input_schema)
    elif isinstance(schema, str):
        try:
            schema = parse_ddl(spark, schema)
        except UsageError as error:
            raise UsageError(f"pipeline {pipeline.name!r}: output_schema is {error}") from error
    elif not isinstance(schema, StructType):
        raise UsageError(
            f"pipeline {pipeline.name!r}: output_schema is a {type(schema).__name__}; it must be DDL or a StructType"
        )
    twice = [name for name in dict.fromkeys(schema.names) if schema.names.count(name) > 1]
    if twice:
        raise UsageError(
            f"pipeline {pipeline.name!r}: output_schema names {', '.join(twice)} more than once; give each column a name of its own"
        )
    check_spelling(schema, _case_sensitive(spark), f"pipeline {pipeline.name!r}: output_schema")
    return schema


def _derived_output(spark: SparkSession, pipeline: Pipeline, input_schema: StructType) -> StructType:
    names = _names_of(spark, input_schema, f"pipeline {pipeline.name!r}: the input")
    key_schema = key_schema_of(input_schema, names.find_key(pipeline.key))
    handle = _declaring_handle(spark, pipeline, key_schema, input_schema)
    try:
        processor = _processor(spark, pipeline, input_schema)
        derived: StructType | None = (
            processor.deriveOutputSchema(handle) if isinstance(processor, ArrowProcessor) else None
        )
    except (CairnError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ProcessorError(
            f"pipeline {pipeline.name!r}: {name_of(pipeline.processor)}.deriveOutputSchema failed on the driver: {describe_error(error)}"
        ) from error
    if derived is None:
        raise UsageError(
            f"pipeline {pipeline.name!r}: output_schema is missing, and {name_of(pipeline.processor)} does not derive it\n"
            "Declare the columns of the output, as in output_schema='user string, clicks bigint'"
        )
    return derived


def _check_output(spark: SparkSession, log: Log, pipeline: Pipeline, interval: Interval, declared: StructType) -> None:
    earlier = (f["name"] for schema in recorded_schemas(log) for f in schema["fields"])
    check_spelling(declared, _case_sensitive(spark), f"pipeline {pipeline.name!r}: output_schema", earlier)
    check_output_schema(log, pipeline.name, interval, recorded_schema(declared.jsonValue()))


def _check_sink(pipeline: Pipeline, output_schema: StructType, input_schema: StructType) -> None:
    """Raise `UsageError` if the sink's table can't have an output column, or its table of late rows an input column."""
    taken = [name for name in output_schema.names if name.lower() == getattr(pipeline.sink, "folder_column", None)]
    if taken:
        raise UsageError(
            f"the output of {pipeline.name!r} has a column {taken[0]!r}, but copy_output names its folders interval=…, and readers "
            "take the column from these names\nRename the column in output_schema"
        )
    if pipeline.sink is not None and not callable(pipeline.sink):
        for table, late in pipeline.sink.each_table():
            schema, rows = (input_schema, "late rows") if late else (output_schema, "output")
            # Compare without case: most table formats ignore case, and so do most readers of the other formats.
            check_spelling(schema, False, f"pipeline {pipeline.name!r}: the table of its {rows}")
            table.check_columns(pipeline.name, schema.names, late=late)


def _spell(
    spark: SparkSession, pipeline: Pipeline, rows: DataFrame, recorded: Sequence[str], base: Content | None
) -> DataFrame:
    """Return the input rows with their columns as the first interval spelled them, if the session ignores case.

    `recorded`: The recorded names of input columns. Records of older releases lack them, so the names of the key, and
    of states that keep whole rows, are taken too.
    """
    names = _names_of(spark, rows.schema, f"pipeline {pipeline.name!r}: the input")
    known = [*recorded]
    if base is not None:
        kept = base.states if pipeline.api == "arrow" and pipeline.output_schema is None else ()
        for schema in (base.key_schema, *(state.versions[-1].value for state in kept)):
            known += [field["name"] for field in schema["fields"]]
    spelled = names.spell(known)
    return rows if spelled == rows.schema.names else rows.toDF(*spelled)


def _case_sensitive(spark: SparkSession) -> bool:
    return str(spark.conf.get("spark.sql.caseSensitive", "false")).lower() == "true"


def _names_of(spark: SparkSession, schema: StructType, what: str) -> ColumnNames:
    return ColumnNames(names=tuple(schema.names), case_sensitive=_case_sensitive(spark), what=what)


def _event_time(
    pipeline: Pipeline, names: ColumnNames, schema: StructType, zone: Zone, base: Content | None
) -> EventTime | None:
    if pipeline.time_mode != "event" or pipeline.event_time is None or pipeline.watermark_delay is None:
        return None
    column, delay = names.find(pipeline.event_time), pipeline.watermark_delay
    if column not in schema.names or not isinstance(schema[column].dataType, TimestampType | TimestampNTZType):
        found = schema[column].dataType.simpleString() if column in schema.names else "no such column"
        raise SourceError(
            f"pipeline {pipeline.name!r}: event_time={pipeline.event_time!r} must be a timestamp column of the input; found {found}"
        )
    time_ = base.time if base is not None else None
    wall_zone = zone.name if isinstance(schema[column].dataType, TimestampNTZType) else None
    event_time = event_time_of(column, delay // timedelta(milliseconds=1), pipeline.watermark, time_, wall_zone)
    # A base of an older release has no event zone. Then assume that the column had the same type.
    recorded = time_ and (time_.event_zone or (time_.zone if wall_zone else None))
    if recorded not in (None, event_time.zone):
        raise UsageError(
            f"pipeline {pipeline.name!r}: the event time {column!r} ({schema[column].dataType.simpleString()}) is in zone {event_time.zone!r}, but the state's watermark and timers are in zone {recorded!r}\n"
            "Restore the pipeline's old time_zone or the column's old type: timestamp is in 'UTC', timestamp_ntz in the time_zone\n"
            "Or give the pipeline another name to begin with empty state"
        )
    return event_time


def _initial_state(
    spark: SparkSession, pipeline: Pipeline, key_schema: StructType
) -> tuple[DataFrame | None, list[str]]:
    """Return (rows of the initial state, names of their key columns). Return (None, []) without initial state."""
    if pipeline.initial_state is None:
        return None, []
    what = f"pipeline {pipeline.name!r}: the initial state"
    given: Any = pipeline.initial_state(spark)
    grouping = grouping_of(given)
    grouped_by = None if grouping is None else grouping_names(grouping, what)
    initial: DataFrame = given if grouping is None else grouping.frame
    names = _names_of(spark, initial.schema, what)
    key = names.find_key(pipeline.key)
    if grouped_by is not None and list(map(names.find, grouped_by)) != key:
        raise UsageError(
            f"{what} is grouped by {', '.join(grouped_by)}, but the pipeline's key is {', '.join(pipeline.key)}; group it by the key"
        )
    check_types(initial.schema, what)
    initial_key = key_schema_of(initial.schema, key)
    if [t for _, t in _key_types(initial_key.jsonValue())] != [t for _, t in _key_types(key_schema.jsonValue())]:
        raise SourceError(
            f"{what}'s key is {initial_key.simpleString()}, but the input's key is {key_schema.simpleString()}; cast one of them"
        )
    return initial, key


def _plan_states(
    spark: SparkSession, pipeline: Pipeline, base: Content | None, key_schema: StructType, input_schema: StructType
) -> StatePlan:
    handle = _declaring_handle(spark, pipeline, key_schema, input_schema)
    try:
        processor = _processor(spark, pipeline, input_schema)
        processor.init(handle)
        processor.close()
    except (CairnError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ProcessorError(
            f"pipeline {pipeline.name!r}: {name_of(pipeline.processor)}.init failed on the driver: {describe_error(error)}"
        ) from error
    for state in handle.declared.values():
        for schema in (state.versions[-1].user_key, state.versions[-1].value):
            if schema is not None:
                what = f"pipeline {pipeline.name!r}: state {state.name!r}"
                check_spelling(struct_of(schema), _case_sensitive(spark), what)
    follows = isinstance(processor, ArrowProcessor) and processor._states_follow_settings
    if follows and (pipeline.dropped or pipeline.renamed):
        raise UsageError(
            f"pipeline {pipeline.name!r}: dropped and renamed are for fields that your own processor declares; the fields of "
            f"{name_of(pipeline.processor)} follow its settings and its input: leave dropped and renamed out"
        )
    plan = plan_states(
        pipeline.name,
        base.states if base is not None else (),
        tuple(handle.declared.values()),
        deleted=handle.deleted,
        dropped=None if follows else pipeline.dropped,
        renamed=pipeline.renamed,
    )
    for warning in plan.warnings:
        log.warning("%s: %s", pipeline.name, warning)
    if plan.undeclared:
        log.warning(
            "%s: states that the processor no longer declares, but that are kept: %s; to drop a state, call deleteIfExists in init()",
            *(pipeline.name, ", ".join(plan.undeclared)),
        )
    return plan


def _processor(spark: SparkSession, pipeline: Pipeline, input_schema: StructType) -> Any:
    processor = processor_on_driver(pipeline.processor, pipeline.name)
    if isinstance(processor, ArrowProcessor) and not _case_sensitive(spark):
        processor._spell_columns(input_schema.names)
    return processor


def _declaring_handle(
    spark: SparkSession, pipeline: Pipeline, key_schema: StructType, input_schema: StructType
) -> DeclaringHandle:
    def parse(ddl: str) -> StructType:
        return parse_ddl(spark, ddl)

    if pipeline.api != "arrow":
        return DeclaringHandle(parse, pipeline.time_mode)
    names = _names_of(spark, input_schema, f"pipeline {pipeline.name!r}: the input")
    event_time = None if pipeline.event_time is None else names.find(pipeline.event_time)
    order_by = tuple(map(names.find, pipeline.order_by))
    columns = InputColumns(key_schema=key_schema, input_schema=input_schema, event_time=event_time, order_by=order_by)
    return ArrowDeclaringHandle(parse, pipeline.time_mode, columns)


def _check_unchanged(pipeline: Pipeline, base: Content | None, key_schema: StructType, names: ColumnNames) -> None:
    if base is None:
        return
    for what, now, recorded in pipeline.changed_since(base):
        raise _refuse_change(pipeline, what, now, recorded)
    before, now_types = (
        [(names.fold(n), t) for n, t in _key_types(s)] for s in (base.key_schema, key_schema.jsonValue())
    )
    if before != now_types:
        raise _refuse_change(pipeline, "the key", parse_struct(key_schema.jsonValue()), parse_struct(base.key_schema))


def _refuse_change(pipeline: Pipeline, what: str, now: object, recorded: object) -> UsageError:
    keeping = (
        "To keep the state, take a canonical savepoint, and restore it into a pipeline of another name with the new max_parallelism\n"
        if what == "max_parallelism"
        else ""
    )
    now, recorded = (format_instant(at) if isinstance(at, datetime) else at for at in (now, recorded))
    return UsageError(
        f"pipeline {pipeline.name!r}: {what} is {now}, but its state was made with {recorded}; it can't change\n"
        f"Set it back, or give the pipeline another name to begin with empty state\n{keeping}"
        "If you never changed it, another pipeline of this name writes below the same root: rename one of the two"
    )


def _key_types(schema: dict[str, Any]) -> list[tuple[str, KeyType]]:
    """Return (name, type) of each key column. The types leave out comments and nullability at any depth."""
    return [(f.name, names_and_types(f.type)) for f in parse_struct(schema).fields]


def _as_recorded(key_schema: StructType, initial: StructType | None, base: Content | None) -> StructType:
    """Return the key's schema, nullable wherever the key's schema in the initial state or in the base is nullable.

    The state also contains the keys of the initial state and of the base, and readers trust the recorded schema.
    """
    key: KeyType = parse_struct(key_schema.jsonValue())
    others = [*([initial.jsonValue()] if initial is not None else []), *([base.key_schema] if base is not None else [])]
    made = key
    for other in others:
        made = with_nulls_of(made, parse_struct(other))
    return key_schema if made == key else struct_of(made.to_json())
