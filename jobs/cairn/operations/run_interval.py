"""One interval of a pipeline: plan it, run it on Spark, commit it.

``process_interval`` is what Airflow's ``process`` task does, up to *prepared*; ``commit_attempt`` is what ``checkpoint`` does,
without Spark; ``run_interval`` does both, for use without Airflow.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

from pyspark.sql.types import StructType, TimestampNTZType, TimestampType

from cairn.operations.plan_reuse import Earlier, Now, Recompute, made_of, options_of, plan_reuse, source_hash
from cairn.operations.read_source import arrow_schema_json, check_types, input_errors, read_source
from cairn.pipeline import Interval, Pipeline
from cairn.processors.output_schema import recorded_schema, schema_of_file
from cairn.processors.processor_handle import ArrowDeclaringHandle, DeclaringHandle
from cairn.processors.user_code import described
from cairn.rows.arrange_rows import plan_arrangement
from cairn.rows.column_names import ColumnNames, grouping_names
from cairn.rows.routing import key_schema_of, route
from cairn.rows.watermark import EventTime, event_time_of
from cairn.shard_jobs.interval import IntervalJob
from cairn.shard_jobs.run_on_shards import StopWatch, run_on_shards
from cairn.shipping.code_version import code_version
from cairn.shipping.ship_processor import name_of, processor_on_driver, runtime_version, ship_processor
from cairn.spark.session import check_running, use_this_python
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.checkpoint.output_schemas import check_output_schema
from state_backend.checkpoint.prepare_content import ShardAck, mismatches_in_words
from state_backend.formats.types import DataType as KeyType
from state_backend.formats.types import names_and_types, parse_struct, with_nulls_of
from state_backend.inspection.verify import offering_sound
from state_backend.state.plan_states import StatePlan, plan_states
from state_backend.values.errors import (
    CairnError,
    CorruptFile,
    ProcessorError,
    SinkFailed,
    SourceError,
    StateUnusable,
    UsageError,
)
from state_backend.values.intervals import format_instant, from_ms, to_ms
from state_backend.values.phases import in_words
from state_backend.values.records import (
    Content,
    LogicalTime,
    OutputFile,
    Permissions,
    Prepared,
    Record,
    RunRef,
    StateDescriptor,
)
from state_backend.values.zones import Zone, zone_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger("cairn")

MODES = ("incremental", "full", "changelog")
_SESSION_ZONE = "spark.sql.session.timeZone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The rows of an interval before they are routed. ``key``, ``initial_key``: what the key's columns are called in each, in the
    key's order."""

    rows: DataFrame
    initial: DataFrame | None
    key: Sequence[str]
    initial_key: Sequence[str]
    order_by: Sequence[str]


OnShards: TypeAlias = "Callable[[SparkSession, IntervalJob, Inputs], list[ShardAck]]"


def run_interval(
    spark: SparkSession,
    pipeline: Pipeline,
    interval: Interval,
    root: str,
    mode: str = "incremental",
    *,
    allow_gap: bool = False,
    allow_stale_base: bool = False,
    replace_overlapping: bool = False,
    run: RunRef | None = None,
) -> Record:
    """Processes one interval and commits it; returns the committed checkpoint's record.

    root: ``file:///...`` or an absolute path; the pipeline's folder is made below it.
    mode: "incremental", "full" or "changelog": what the checkpoint writes. Any may follow any.
    replace_overlapping: output of intervals that overlap this one, cut otherwise, is not current any more once this one is
        committed; without it such an interval is refused.
    Raises: the errors of ``state_backend.values.errors``; nothing is committed then, unless it was the sink that failed.
    """
    attempt = str(uuid.uuid4())
    run = run or RunRef(run_id=f"direct__{attempt}", clear_number=0, try_number=1)
    permissions = Permissions(
        allow_gap=allow_gap, allow_stale_base=allow_stale_base, replace_overlapping=replace_overlapping
    )
    coordinator = coordinator_of(pipeline, root, remembers=True)
    process_interval(
        spark,
        pipeline,
        interval,
        root,
        mode,
        attempt=attempt,
        run=run,
        permissions=permissions,
        coordinator=coordinator,
    )
    clock, began_ns = StopWatch(), time.monotonic_ns()
    with clock.phase("commit"):
        result = coordinator.commit(attempt)
    finish_commit(spark, pipeline, coordinator, result.id, root, clock)
    spent = in_words(clock.durations_us, (time.monotonic_ns() - began_ns) // 1000)
    log.info("%s %s: checkpoint %d: %s", pipeline.name, interval, result.id, spent)
    return result.record or coordinator.record(result.id)


def finish_commit(
    spark: SparkSession,
    pipeline: Pipeline,
    coordinator: Coordinator,
    checkpoint_id: int,
    root: str,
    clock: StopWatch | None = None,
) -> None:
    """Publishes what waits for the sink, and deletes what nobody needs any more. ``clock``: gets how long each took.

    Raises: SinkFailed if the output of this checkpoint is not published; of others that is logged.
    """
    failed, clock = None, clock or StopWatch()
    try:
        with clock.phase("publish"):
            hook = pipeline.sink_hook(spark, join_url(root, pipeline.name))
            coordinator.publish(hook, in_order=pipeline.sink_in_order)
    except SinkFailed as error:
        failed = error
    try:
        with clock.phase("clean_up"):
            coordinator.clean_up()
    except CorruptFile as error:  # of another checkpoint: this one counts
        log.warning("%s: nothing was deleted, since it can't be told what is needed: %s", pipeline.name, error)
    if failed is not None:
        if checkpoint_id in failed.ids:
            raise failed
        log.warning("%s: %s", pipeline.name, failed)


def process_interval(
    spark: SparkSession,
    pipeline: Pipeline,
    interval: Interval,
    root: str,
    mode: str,
    *,
    attempt: str,
    run: RunRef,
    permissions: Permissions,
    coordinator: Coordinator | None = None,
    earlier: tuple[str, Mapping[str, str]] | None = None,
    on_begin: Callable[[Mapping[str, str]], None] | None = None,
    on_shards: OnShards | None = None,
    read: Read | None = None,
) -> Prepared:
    """Runs the interval on Spark, from its base to *prepared*. Nothing is committed.

    earlier: attempt and options of an earlier try of the same run; what that prepared is returned, and nothing is computed,
        if it is what would be computed now (``cairn.operations.plan_reuse``).
    on_begin: gets the options of this attempt once it is decided that it is computed.
    on_shards: brings the rows to the shards, and runs the job on each; None: Spark does.
    read: what the source said, if it was asked before; None: it is asked now.
    """
    check_running(spark)
    use_this_python(spark)
    # The source runs in the pipeline's zone too: it may read instants from text.
    with in_zone_of(spark, pipeline.time_zone):
        return _process_interval(
            spark,
            pipeline,
            interval,
            root,
            mode,
            attempt=attempt,
            run=run,
            permissions=permissions,
            coordinator=coordinator,
            earlier=earlier,
            on_begin=on_begin,
            on_shards=on_shards or _on_spark,
            read=read,
        )


@contextmanager
def in_zone_of(spark: SparkSession, wanted: str | None) -> Iterator[None]:
    if wanted is None:
        yield
        return
    before = spark.conf.get(_SESSION_ZONE)
    spark.conf.set(_SESSION_ZONE, wanted)
    try:
        yield
    finally:
        spark.conf.set(_SESSION_ZONE, before)


def _process_interval(
    spark: SparkSession,
    pipeline: Pipeline,
    interval: Interval,
    root: str,
    mode: str,
    *,
    attempt: str,
    run: RunRef,
    permissions: Permissions,
    coordinator: Coordinator | None,
    earlier: tuple[str, Mapping[str, str]] | None,
    on_begin: Callable[[Mapping[str, str]], None] | None,
    on_shards: OnShards,
    read: Read | None,
) -> Prepared:
    if mode not in MODES:
        raise UsageError(f"mode {mode!r} is not one of {', '.join(MODES)}")
    started_ns = time.monotonic_ns() - (read.waited_ns if read is not None else 0)
    pipeline_root = join_url(root, pipeline.name)
    coordinator = coordinator or coordinator_of(pipeline, root)
    begun = coordinator.begin(
        interval, run=run, permissions=permissions, pipeline_start_ms=to_ms(pipeline.start), attempt=attempt
    )
    base = begun.base.content if begun.base is not None else None
    log.info(
        "%s %s: attempt %s, from %s",
        pipeline.name,
        interval,
        attempt,
        f"checkpoint {begun.base.id} ({base.totals.entries} entries)" if begun.base and base else "empty state",
    )
    zone = plan_zone(pipeline.name, pipeline.time_zone, spark.conf.get(_SESSION_ZONE), base.time.zone if base else None)
    output_schema = _output_schema(spark, pipeline)
    _check_output(pipeline, coordinator, begun.output, output_schema)
    rows, position = read_source(spark, pipeline, interval) if read is None else (read.rows, read.position)
    names = _names_of(spark, rows, f"pipeline {pipeline.name!r}: the input")
    key = names.find_key(pipeline.key)
    key_schema = key_schema_of(rows.schema, key)
    event_time = _event_time(pipeline, names, rows.schema, base)
    initial, initial_key = _initial_state(spark, pipeline, key_schema) if base is None else (None, [])
    initial_key_schema = key_schema_of(initial.schema, initial_key) if initial is not None else None
    # Before init runs on the driver, so that nothing that it does reaches the workers.
    processor = ship_processor(pipeline.processor, pipeline.name)
    _check_unchanged(pipeline, base, key_schema, names)
    key_schema = _as_recorded(key_schema, initial_key_schema, base)
    plan = _plan_states(spark, pipeline, base, key_schema, rows.schema)
    if position:
        log.info("%s %s: source position %s", pipeline.name, interval, position)
    job = IntervalJob(
        pipeline=pipeline.name,
        pipeline_start_ms=to_ms(pipeline.start),
        root=pipeline_root,
        attempt=attempt,
        h0=begun.h0,
        base_id=begun.base.id if begun.base is not None else None,
        base=base.shards if base is not None else (),
        base_parallelism=len(base.shards) if base is not None else 0,
        interval=interval,
        run=run,
        permissions=permissions,
        mode=mode,
        parallelism=pipeline.parallelism,
        max_parallelism=pipeline.max_parallelism,
        api=pipeline.api,
        on_type_mismatch=pipeline.on_type_mismatch,
        key_schema=key_schema.jsonValue(),
        input_schema=arrow_schema_json(rows.schema.jsonValue()),
        initial_schema=arrow_schema_json(initial.schema.jsonValue()) if initial is not None else None,
        output_schema=output_schema.jsonValue(),
        states=plan.states,
        dropped=plan.dropped,
        time=LogicalTime(
            mode=pipeline.time_mode,
            processing_time_ms=interval.end_ms,
            watermark_ms=event_time.base_ms if event_time is not None else None,
            zone=zone.name,
        ),
        event_time=event_time,
        source_position=position,
        code_hash=processor.code_hash,
        processor=processor,
        engine=pipeline.engine,
        changelog=pipeline.changelog,
        retention=pipeline.retention_of(interval),
        plan_us=0,
        made_of=_made_of(spark, pipeline, interval, rows, position, processor.code_hash, permissions, output_schema),
        code_version=code_version(pipeline),
    )
    order_by = tuple(map(names.find, pipeline.order_by or ([event_time.column] if event_time is not None else [])))
    options = options_of(job, order_by, source_hash(pipeline.source), runtime_version())
    if earlier is not None and (reused := _reuse(coordinator, job, options, *earlier)) is not None:
        return reused
    if on_begin is not None:
        on_begin(options)
    inputs = Inputs(rows=rows, initial=initial, key=key, initial_key=initial_key, order_by=order_by)
    with offering_sound(open_storage(pipeline_root), begun.base), input_errors(pipeline.name, interval):
        planned_ns = time.monotonic_ns()
        acks = on_shards(spark, job, inputs)
        spark_us = (time.monotonic_ns() - planned_ns) // 1000
        prepared = replace(job, plan_us=(planned_ns - started_ns) // 1000).finish(acks, spark_us, coordinator)
    totals = prepared.content.totals
    log.info(
        "%s %s: prepared: %d bytes downloaded, %d from caches; %d rows in, %d out, %d keys touched, %d bytes changed, %d uploaded, "
        "state %d bytes in %d files",
        *(pipeline.name, interval, totals.downloaded_bytes, totals.cached_bytes),
        *(totals.input_rows, totals.output_rows, totals.keys_touched),
        *(totals.changed_bytes, totals.uploaded_bytes, totals.state_bytes, totals.state_files),
    )
    for text in mismatches_in_words(acks):
        log.warning("%s %s: %s", pipeline.name, interval, text)
    # The last line: where the time went, for who asks why an interval was slow.
    phases = prepared.content.durations_us | {"prepare": (time.monotonic_ns() - planned_ns) // 1000 - spark_us}
    log.info("%s %s: %s", pipeline.name, interval, in_words(phases, (time.monotonic_ns() - started_ns) // 1000))
    return prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What a source said of an interval: `read_source`. ``waited_ns``: how long the interval had to wait for it."""

    rows: DataFrame
    position: dict[str, Any]
    waited_ns: int = 0


def would_be_made_of(
    spark: SparkSession, pipeline: Pipeline, interval: Interval, read: Read, permissions: Permissions
) -> str | None:
    """What `Content.made_of` would be of a result that was computed now; None: it can't be told.

    Raises: UsageError for a processor that can't be hashed or sent, or an output schema that can't be parsed.
    """
    code_hash = ship_processor(pipeline.processor, pipeline.name).code_hash
    output_schema = _output_schema(spark, pipeline)
    return _made_of(spark, pipeline, interval, read.rows, read.position, code_hash, permissions, output_schema)


def _made_of(
    spark: SparkSession,
    pipeline: Pipeline,
    interval: Interval,
    rows: DataFrame,
    position: dict[str, Any],
    code_hash: str,
    permissions: Permissions,
    output_schema: StructType,
) -> str | None:
    if pipeline.initial_state is not None and interval.start == pipeline.start:
        return None  # whether its rows are the same can't be told
    session_zone = spark.conf.get(_SESSION_ZONE)
    return made_of(
        pipeline,
        code_hash=code_hash,
        source_position=position,
        input_schema=arrow_schema_json(rows.schema.jsonValue()),
        output_schema=output_schema.jsonValue(),
        key=pipeline.key,
        order_by=pipeline.order_by,
        zone=zone_of(session_zone if pipeline.time_zone is None else pipeline.time_zone).name,
        source=source_hash(pipeline.source),
        runtime=runtime_version(),
        permissions=permissions,
    )


def _on_spark(spark: SparkSession, job: IntervalJob, inputs: Inputs) -> list[ShardAck]:
    arrangement = plan_arrangement(
        inputs.rows.schema,
        inputs.initial.schema if inputs.initial is not None else None,
        key=inputs.key,
        initial_key=inputs.initial_key,
        order_by=inputs.order_by,
    )

    def routed(parts: Sequence[bytes]) -> DataFrame:
        return route(
            spark,
            inputs.rows,
            inputs.initial,
            key=inputs.key,
            initial_key=inputs.initial_key,
            order_by=inputs.order_by,
            parts=parts,
            max_parallelism=job.max_parallelism,
            in_order=arrangement is None,
        )

    return run_on_shards(spark, job, routed, arrangement)


def _reuse(
    coordinator: Coordinator, job: IntervalJob, options: Mapping[str, str], attempt: str, earlier: Mapping[str, str]
) -> Prepared | None:
    """What the earlier attempt prepared, if it will do; None: compute. The log says which, and why."""
    try:
        prepared = coordinator.load_prepared(attempt)
    except StateUnusable:
        prepared = None
    decision = plan_reuse(
        Earlier(attempt=attempt, options=earlier, prepared=prepared),
        Now(
            log=coordinator.log(),
            run=job.run,
            interval=job.interval,
            permissions=job.permissions,
            code_hash=job.code_hash,
            options=options,
            source_position=json.loads(json.dumps(job.source_position)),  # as it was written down
            initial_state=job.initial_schema is not None,
        ),
    )
    if isinstance(decision, Recompute):
        log.info(
            "%s %s: attempt %s of an earlier try is not used: %s",
            *(job.pipeline, job.interval, attempt, decision.reason),
        )
        return None
    assert prepared is not None
    log.info(
        "%s %s: an earlier try (%d) has prepared attempt %s: base, code, options and input are unchanged, so it is used; nothing is "
        "computed again",
        *(job.pipeline, job.interval, prepared.content.run.try_number, attempt),
    )
    return prepared


def check_fits(
    spark: SparkSession, pipeline: Pipeline, read: Read, content: Content, output: dict[str, Any] | None
) -> None:
    """Whether an interval of this pipeline could start from a state, and its output stand beside what there is: what planning one
    looks at. Computes nothing.

    output: the newest schema that output has had; None: there is none.
    Raises: UsageError, ProcessorError, as `process_interval`, before its first row.
    """
    with in_zone_of(spark, pipeline.time_zone):
        plan_zone(pipeline.name, pipeline.time_zone, spark.conf.get(_SESSION_ZONE), content.time.zone)
        if output is not None:
            check_output_schema(pipeline.name, output, recorded_schema(_output_schema(spark, pipeline).jsonValue()))
        names = _names_of(spark, read.rows, f"pipeline {pipeline.name!r}: the input")
        key_schema = key_schema_of(read.rows.schema, names.find_key(pipeline.key))
        _check_unchanged(pipeline, content, key_schema, names)
        _event_time(pipeline, names, read.rows.schema, content)
        _plan_states(spark, pipeline, content, _as_recorded(key_schema, None, content), read.rows.schema)


def plan_zone(pipeline: str, wanted: str | None, session: str, recorded: str | None) -> Zone:
    """The time zone that an interval runs in: the one that the pipeline names, else the session's.

    Raises:
        UsageError: the pipeline names none, and the interval before ran in another than the session's: what a processor computes
            from wall time would depend on who runs it.
    """
    zone = zone_of(session if wanted is None else wanted)
    if wanted is None and recorded not in (None, zone.name):
        raise UsageError(
            f"pipeline {pipeline!r}: it ran in the time zone {recorded!r} so far, and this Spark session is in {zone.name!r}\n"
            f"Set spark.sql.session.timeZone to {recorded!r}, or name a zone in the pipeline: Pipeline(time_zone={zone.name!r}, ...)"
        )
    return zone


def coordinator_of(pipeline: Pipeline, root: str, *, remembers: bool = False) -> Coordinator:
    """The coordinator of the pipeline's folder under a root."""
    return Coordinator(open_storage(join_url(root, pipeline.name)), pipeline.name, remembers=remembers)


def parse_ddl(spark: SparkSession, ddl: str) -> StructType:
    """A DDL schema, parsed by Spark. Raises: UsageError, quoting one that can't be."""
    parse: Any = getattr(spark, "_parse_ddl", None) or spark.sparkContext._parse_ddl
    try:
        schema = parse(ddl)
    except UsageError:  # a test's own parser has said it already
        raise
    except Exception as error:
        raise UsageError(f"not a schema: {ddl!r}: {str(error).strip().splitlines()[0]}") from error
    if not isinstance(schema, StructType):
        raise UsageError(
            f"not a schema of columns: {ddl!r}; write each column as name and type, as in 'user string, n long'"
        )
    return schema


def _output_schema(spark: SparkSession, pipeline: Pipeline) -> StructType:
    schema = pipeline.output_schema
    if isinstance(schema, str):
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
    return schema


def _check_output(
    pipeline: Pipeline, coordinator: Coordinator, so_far: dict[str, Any] | OutputFile | None, declared: StructType
) -> None:
    """Raises: UsageError if output that is there could not be read with what is declared now."""
    if isinstance(so_far, OutputFile):
        with work_folder("schema") as work:
            so_far = schema_of_file(coordinator.storage, so_far.handle, work / "file.parquet")
    if so_far is not None:
        check_output_schema(pipeline.name, so_far, recorded_schema(declared.jsonValue()))


def _names_of(spark: SparkSession, rows: DataFrame, what: str) -> ColumnNames:
    case_sensitive = str(spark.conf.get("spark.sql.caseSensitive", "false")).lower() == "true"
    return ColumnNames(names=tuple(rows.schema.names), case_sensitive=case_sensitive, what=what)


def _event_time(pipeline: Pipeline, names: ColumnNames, schema: StructType, base: Content | None) -> EventTime | None:
    if pipeline.time_mode != "event" or pipeline.event_time is None or pipeline.watermark_delay is None:
        return None
    column, delay = names.find(pipeline.event_time), pipeline.watermark_delay
    if column not in schema.names or not isinstance(schema[column].dataType, TimestampType | TimestampNTZType):
        found = schema[column].dataType.simpleString() if column in schema.names else "no such column"
        raise SourceError(
            f"pipeline {pipeline.name!r}: event_time={pipeline.event_time!r} must be a timestamp column of the input; found {found}"
        )
    time_ = base.time if base is not None else None
    return event_time_of(column, delay // timedelta(milliseconds=1), pipeline.watermark, time_)


def _initial_state(
    spark: SparkSession, pipeline: Pipeline, key_schema: StructType
) -> tuple[DataFrame | None, list[str]]:
    """The initial state's rows, and what the key's columns are called there."""
    if pipeline.initial_state is None:
        return None, []
    what = f"pipeline {pipeline.name!r}: the initial state"
    given: Any = pipeline.initial_state(spark)
    grouped_by = grouping_names(given, what)
    initial: DataFrame = given._df if grouped_by is not None else given
    names = _names_of(spark, initial, what)
    key = names.find_key(pipeline.key)
    if grouped_by is not None and list(map(names.find, grouped_by)) != key:
        raise UsageError(
            f"{what} is grouped by {', '.join(grouped_by)}; the pipeline's key is {', '.join(pipeline.key)}"
        )
    check_types(initial.schema, what)
    initial_key = key_schema_of(initial.schema, key)
    if [t for _, t in _key_types(initial_key.jsonValue())] != [t for _, t in _key_types(key_schema.jsonValue())]:
        raise SourceError(
            f"{what}'s key is {initial_key.simpleString()}, the input's {key_schema.simpleString()}; cast one of them"
        )
    return initial, key


def declared_states(spark: SparkSession, pipeline: Pipeline) -> tuple[StateDescriptor, ...]:
    """What the pipeline's processor (of the row or pandas API) declares, as for an interval that starts empty."""
    return _plan_states(spark, pipeline, None, StructType(), StructType()).states


def _plan_states(
    spark: SparkSession, pipeline: Pipeline, base: Content | None, key_schema: StructType, input_schema: StructType
) -> StatePlan:
    def parse(ddl: str) -> StructType:
        return parse_ddl(spark, ddl)

    if pipeline.api == "arrow":
        handle: DeclaringHandle = ArrowDeclaringHandle(parse, pipeline.time_mode, key_schema, input_schema)
    else:
        handle = DeclaringHandle(parse, pipeline.time_mode)
    try:
        processor = processor_on_driver(pipeline.processor, pipeline.name)
        processor.init(handle)
        processor.close()
    except (CairnError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ProcessorError(
            f"pipeline {pipeline.name!r}: {name_of(pipeline.processor)}.init on the driver: {described(error)}"
        ) from error
    plan = plan_states(
        pipeline.name, base.states if base is not None else (), tuple(handle.declared.values()), deleted=handle.deleted
    )
    for warning in plan.warnings:
        log.warning("%s: %s", pipeline.name, warning)
    if plan.undeclared:
        log.warning(
            "%s: no longer declared, but kept: %s; deleteIfExists in init() drops a state",
            *(pipeline.name, ", ".join(plan.undeclared)),
        )
    return plan


def _check_unchanged(pipeline: Pipeline, base: Content | None, key_schema: StructType, names: ColumnNames) -> None:
    if base is None:
        return
    for what, recorded, now in (
        ("max_parallelism", base.max_parallelism, pipeline.max_parallelism),
        ("time_mode", base.time.mode, pipeline.time_mode),
        ("start", format_instant(from_ms(base.pipeline_start_ms)), format_instant(from_ms(to_ms(pipeline.start)))),
    ):
        if recorded != now:
            raise _changed(pipeline, what, now, recorded)
    before, now_types = (
        [(names.folded(n), t) for n, t in _key_types(s)] for s in (base.key_schema, key_schema.jsonValue())
    )
    if before != now_types:
        raise _changed(pipeline, "the key", parse_struct(key_schema.jsonValue()), parse_struct(base.key_schema))


def _changed(pipeline: Pipeline, what: str, now: object, recorded: object) -> UsageError:
    keeping = (
        "To keep the state, take a canonical savepoint and restore it under another name, which may have another max_parallelism\n"
        if what == "max_parallelism"
        else ""
    )
    return UsageError(
        f"pipeline {pipeline.name!r}: {what} is {now}, but its state was made with {recorded}; it can't change\n"
        f"Set it back, or give the pipeline another name to begin anew\n{keeping}"
        "If it never was otherwise, another pipeline of this name writes below the same root: rename one of the two"
    )


def _key_types(schema: dict[str, Any]) -> list[tuple[str, KeyType]]:
    """Names and types of key columns, whatever comments they have and whether they are NOT NULL, at any depth."""
    return [(f.name, names_and_types(f.type)) for f in parse_struct(schema).fields]


def _as_recorded(key_schema: StructType, initial: StructType | None, base: Content | None) -> StructType:
    """The key's schema, nullable where that of the initial state or of the base is: the state has their keys too, and who reads it
    goes by what is recorded."""
    key: KeyType = parse_struct(key_schema.jsonValue())
    others = [*([initial.jsonValue()] if initial is not None else []), *([base.key_schema] if base is not None else [])]
    made = key
    for other in others:
        made = with_nulls_of(made, parse_struct(other))
    return key_schema if made == key else StructType.fromJson(made.to_json())
