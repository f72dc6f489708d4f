"""Import of state from a Structured Streaming query with `transformWithState`, and export to a new query.

`from_streaming_checkpoint` reads a query's checkpoint through Spark's own `statestore` source and commits the
checkpoint as a pipeline's state: values, lists, maps, timers, expiry times, and the event-time watermark.
`initial_state_of` makes the `initialState` of a new query from a checkpoint or savepoint. `continue_from_savepoint`
makes the processor that takes this initial state.

The import loses the query's position in its source, because a pipeline reads its source by interval. The export loses
the watermark and the remaining time to live of entries: each entry of the new query has its whole time to live again.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping
from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from cairn.data_sources.keyed_state import KeyedState
from cairn.operations.intervals.plan_interval import content_before, declared_states
from cairn.pipeline import Interval, Pipeline
from cairn.rows.routing import place
from cairn.shard_jobs.import_streaming import TIMERS, ImportJob
from cairn.shard_jobs.run_on_shards import run_on_shards
from cairn.shipping.ship_processor import code_hash
from cairn.spark.first_cause import first_cause
from state_backend.checkpoint.begin_attempt import begin_restore
from state_backend.checkpoint.clean_up_dropped import try_clean_up
from state_backend.checkpoint.commit_attempt import commit
from state_backend.checkpoint.find_checkpoint import record_of
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.prepare_content import prepare
from state_backend.formats.canonical_tables import fits_parquet
from state_backend.formats.types import ArrayType, DataType, MapType, parse_struct
from state_backend.formats.types import StructType as Struct
from state_backend.inspection.state_source import find_state
from state_backend.state.layout import TIMERS_NAME
from state_backend.values.errors import SourceError, StateSchemaError, UsageError
from state_backend.values.records import LogicalTime, Record, StateDescriptor, own_run

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, GroupedData, SparkSession

log = logging.getLogger("cairn")

_TIME_MODES = {"notime": "none", "none": "none", "processingtime": "processing", "eventtime": "event"}
_KINDS = {"ValueState": "value", "ListState": "list", "MapState": "map"}
_HELD = "__state"
Types = Mapping[str, tuple[Struct, Struct | None]]


def from_streaming_checkpoint(
    spark: SparkSession,
    pipeline: Pipeline,
    path: str,
    root: str,
    interval: Interval,
    *,
    batch_id: int | None = None,
    operator_id: int = 0,
) -> Record:
    """Commit the state of a streaming query after a batch as the pipeline's state at the end of `interval`.

    The next interval starts from this state. State that the pipeline has for later intervals becomes stale. The
    pipeline must declare the query's key, its time mode, and its states with the same names, kinds and types. A state
    that the pipeline declares and the query does not have begins empty.

    Args:
        spark: A session, classic or Spark Connect.
        pipeline: The pipeline that gets the state.
        path: The query's `checkpointLocation`. The import only reads it. The query must not run during the import.
        root: URL or absolute path of the folder that holds the pipelines.
        interval: The interval whose end the state belongs to.
        batch_id: The batch of the query after which the state is taken; None for its last committed batch.
        operator_id: Number of the `transformWithState` operator in the query.

    Returns:
        The new record, of kind `restore`.

    Raises:
        SourceError: The checkpoint is missing or can't be read.
        UsageError: The checkpoint does not fit the pipeline. Nothing is committed.
        StateSchemaError: A state of the query does not fit the pipeline's declaration. Nothing is committed.

    Example:
        hour = Interval(datetime(2024, 1, 1, 8, tzinfo=UTC), datetime(2024, 1, 1, 9, tzinfo=UTC))
        from_streaming_checkpoint(spark, CLICKS, "gs://streams/clicks/checkpoint", "gs://state", hour)
    """
    if pipeline.api == "arrow":
        raise UsageError(
            f"pipeline {pipeline.name!r}: its api is 'arrow', but the processor of a streaming query has api='row' or 'pandas'"
        )
    properties, last = _operator(spark, path, operator_id)
    batch = last if batch_id is None else batch_id
    _check_mode(pipeline, path, properties)
    states = declared_states(spark, pipeline)
    variables = {v["stateName"]: _KINDS.get(v["stateVariableType"]) for v in properties["stateVariables"]}
    _check_states(pipeline, path, states, variables)
    reader = _StateReader(spark, path, batch, operator_id)
    frames = {n: reader.state(d.name) for n, d in enumerate(states) if d.name in variables}
    timers = None if pipeline.time_mode == "none" else reader.timers()
    key_schema = _key_schema(pipeline, path, [*frames.values(), *([timers] if timers is not None else [])])
    at, attempt = locate(root, pipeline.name), str(uuid.uuid4())
    run = own_run(f"import__{attempt}")
    before = content_before(pipeline, interval, attempt, run, code_hash(pipeline.processor, pipeline.name))
    content = replace(
        before,
        kind="restore",
        key_schema=key_schema.jsonValue(),
        states=states,
        time=_time_of(spark, before.time, path, batch),
        source_position={"streaming_checkpoint": path, "batch": batch},
    )
    begun = begin_restore(at, content, pipeline_start_ms=content.pipeline_start_ms)
    job = ImportJob(root=at.url, source=path, content=content, engine=pipeline.engine)
    rows = [_entries(frame, n, states[n], path) for n, frame in frames.items()]
    if timers is not None:
        lists = timers.groupBy("key").agg(F.array_sort(F.collect_list("expiration_timestamp_ms")).alias("timers"))
        rows.append(lists.withColumn("state", F.lit(TIMERS)))
    hashed = F.xxhash64(*[F.col("key").getField(name) for name in pipeline.key])
    key_group = F.pmod(hashed, F.lit(pipeline.max_parallelism)).cast("int")
    keyed = [frame.withColumn("__key_group", key_group) for frame in rows]
    placed = partial(place, spark, keyed, max_parallelism=pipeline.max_parallelism)
    with first_cause():
        acks = run_on_shards(spark, job, lambda parts: placed(parts=parts))
    prepare(at, content, acks, h0=begun.h0)
    record = record_of(at, commit(at, attempt).id)
    try_clean_up(at.storage)
    log.info(
        "%s: checkpoint %d is batch %d of the streaming query in %s: the state at the end of %s, %d entries",
        *(pipeline.name, record.id, batch, path, interval, record.content.totals.entries),
    )
    return record


def _time_of(spark: SparkSession, time: LogicalTime, path: str, batch: int) -> LogicalTime:
    if time.mode != "event":
        return time
    # The next interval uses two watermarks, as the query's next batch would. `watermark_ms` is the watermark that the
    # imported batch committed: the processor sees it. `late_watermark_ms` is the older watermark with which the
    # imported batch ran: it decides which rows are late. Both are 0 before the first event.
    return replace(
        time,
        watermark_ms=_read_journal(spark, f"{path}/commits/{batch}")["nextBatchWatermarkMs"],
        late_watermark_ms=_read_journal(spark, f"{path}/offsets/{batch}")["batchWatermarkMs"],
    )


class _StateReader:
    """Reader of a query's states, as they were after one batch, through Spark's `statestore` source."""

    def __init__(self, spark: SparkSession, path: str, batch: int, operator_id: int) -> None:
        self._spark, self._path = spark, path
        self._options = {"batchId": str(batch), "operatorId": str(operator_id)}

    def state(self, name: str) -> DataFrame:
        return self._load(stateVarName=name, flattenCollectionTypes="false")

    def timers(self) -> DataFrame:
        return self._load(readRegisteredTimers="true")

    def _load(self, **options: str) -> DataFrame:
        try:
            return self._spark.read.format("statestore").options(**self._options, **options).load(self._path)
        except Exception as error:
            raise SourceError(
                f"the streaming checkpoint {self._path} can't be read: {_first_line(error)}\n"
                "Check the path and the batch. The query must not run during the import"
            ) from error


def _operator(spark: SparkSession, path: str, operator_id: int) -> tuple[dict[str, Any], int]:
    """Return (properties of the query's `transformWithState` operator, id of the query's last committed batch)."""
    what = f"{path} is not the checkpoint of a streaming query with state"
    try:
        rows = spark.read.format("state-metadata").load(path).collect()
    except Exception as error:
        raise SourceError(f"{what}: {_first_line(error)}") from error
    if not rows:
        raise SourceError(f"{what}: it has no operator metadata; pass the query's checkpointLocation")
    for row in rows:
        if row.operatorId == operator_id and row.operatorName.startswith("transformWithState"):
            properties: dict[str, Any] = json.loads(row.operatorProperties)
            return properties, row.maxBatchId
    there = ", ".join(f"{row.operatorId}, a {row.operatorName}" for row in rows)
    raise UsageError(
        f"operator {operator_id} of the query in {path} is not a transformWithState; the query has {there}"
    )


def _read_journal(spark: SparkSession, file: str) -> dict[str, Any]:
    (journal,) = spark.read.text(file, wholetext=True).collect()
    said: dict[str, Any] = json.loads(journal.value.splitlines()[1])
    return said


def _check_mode(pipeline: Pipeline, path: str, properties: dict[str, Any]) -> None:
    mode = _TIME_MODES.get(str(properties["timeMode"]).lower())
    if mode != pipeline.time_mode:
        raise UsageError(
            f"pipeline {pipeline.name!r}: time_mode is {pipeline.time_mode!r}, but the query in {path} runs with "
            f"{properties['timeMode']}; declare the query's time mode"
        )


def _check_states(
    pipeline: Pipeline, path: str, states: tuple[StateDescriptor, ...], variables: dict[str, str | None]
) -> None:
    declared = {d.name: d.kind for d in states}
    for name, kind in variables.items():
        if name.startswith("$"):
            continue
        if declared.get(name) != kind:
            raise StateSchemaError(
                f"pipeline {pipeline.name!r}: the query in {path} has the {kind} state {name!r}, which is "
                f"{'not' if name not in declared else f'differently (as a {declared[name]} state)'} declared in init(); declare the query's state, or its entries would be lost"
            )


def _key_schema(pipeline: Pipeline, path: str, frames: list[DataFrame]) -> StructType:
    if not frames:
        raise UsageError(
            f"pipeline {pipeline.name!r} and the query in {path} have no state in common; declare one of its states"
        )
    found = frames[0].schema["key"].dataType
    if not isinstance(found, StructType) or [*map(str.lower, found.names)] != [*map(str.lower, pipeline.key)]:
        raise UsageError(
            f"pipeline {pipeline.name!r}: key is {list(pipeline.key)}, but the query in {path} groups by {found.simpleString()}; declare the query's key"
        )
    return found


def _entries(frame: DataFrame, n: int, descriptor: StateDescriptor, path: str) -> DataFrame:
    """Return the rows of state number `n` of the query as `ImportJob` takes them: key, `n`, and the key's entries."""
    column = {"value": "value", "list": "list_value", "map": "map_value"}[descriptor.kind]
    found: Any = frame.schema[column].dataType
    match descriptor.kind:
        case "value":
            held, value = F.array(column), found
        case "list":
            held, value = F.col(column), found.elementType
        case _:
            held, value = F.map_entries(column), found.valueType
    expires = value.names == ["value", "ttlExpirationMs"] and isinstance(value["value"].dataType, StructType)
    version = descriptor.versions[-1]
    _check_type(path, descriptor.name, value["value"].dataType if expires else value, version.value)
    if version.user_key is not None:
        _check_type(path, f"{descriptor.name} (user key)", found.keyType, version.user_key)

    def entry(each: Column) -> Column:
        stored = each.getField("value") if descriptor.kind == "map" else each
        fields = [
            (stored.getField("value") if expires else stored).alias("value"),
            (stored.getField("ttlExpirationMs") if expires else F.lit(None).cast("long")).alias("expires_at_ms"),
        ]
        if descriptor.kind == "map":
            fields.append(each.getField("key").alias("user_key"))
        return F.struct(*fields)

    return frame.select("key", F.lit(n).alias("state"), F.transform(held, entry).alias(f"entries_{n}"))


def _check_type(path: str, what: str, found: StructType, declared: dict[str, Any]) -> None:
    theirs, ours = parse_struct(found.jsonValue()), parse_struct(declared)
    if str(theirs) != str(ours):
        raise StateSchemaError(
            f"state {what}: the query in {path} has {theirs}, but init() declares {ours}; declare the query's types"
        )
    if not fits_parquet(ours):
        raise StateSchemaError(f"state {what}: {ours} has a struct without fields, which can't be imported")


def initial_state_of(
    spark: SparkSession, savepoint: str, *, root: str | None = None, pipeline: str | None = None
) -> GroupedData:
    """Make the initial state of a streaming query whose processor is `continue_from_savepoint(Processor, savepoint)`.

    Args:
        spark: The session in which the new query will run.
        savepoint: URL of a savepoint's folder. If `root` and `pipeline` are given, `savepoint` names a checkpoint of
            that pipeline instead: "latest", an id, or the end of an interval.
        root: URL of the folder that holds the pipelines; None for a savepoint.
        pipeline: Name of the pipeline; None for a savepoint.

    Returns:
        One row for each key: the key's columns, and one more column with all states and timers of the key.

    Raises:
        UsageError: There is no such savepoint.
        StateGapError: There is no such checkpoint.

    Example:
        rows.groupBy("user").transformWithState(
            statefulProcessor=continue_from_savepoint(Clicks, savepoint)(),
            initialState=initial_state_of(spark, savepoint),
            ...,
        )
    """
    spark.dataSource.register(KeyedState)
    source = find_state(savepoint, root=root, pipeline=pipeline)
    if any(name == _HELD for name in (f["name"] for f in source.content.key_schema["fields"])):
        raise UsageError(
            f"{source} has a key column {_HELD!r}, but the column with the state has this name; rename the key column"
        )
    kinds = {d.name: d.kind for d in source.content.states} | {TIMERS_NAME: "timers"}
    frames = []
    for n, (name, kind) in enumerate(kinds.items()):
        reader = spark.read.format("keyed_state").option("state", name)
        if source.savepoint is None:
            reader = reader.option("checkpoint", str(source.checkpoint_id))
        table = reader.load(source.url)
        frames.append(table.groupBy("key").agg(_gather(kind).alias(f"held_{n}")))
    rows = reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), frames).groupBy("key")
    held = rows.agg(*[F.first(f"held_{n}", ignorenulls=True).alias(f"held_{n}") for n in range(len(kinds))])
    state = F.struct(*[F.col(f"held_{n}").alias(name) for n, name in enumerate(kinds)])
    keys = [field["name"] for field in source.content.key_schema["fields"]]
    return held.select(*[F.col("key").getField(k).alias(k) for k in keys], state.alias(_HELD)).groupBy(*keys)


def _gather(kind: str) -> Column:
    """Return an aggregation that collects a key's entries of one state, or its timers, into one column."""
    if kind == "value":
        return F.first("value")
    if kind == "list":
        in_order = F.array_sort(
            F.collect_list(F.struct("pos", "value")), lambda a, b: F.signum(a["pos"] - b["pos"]).cast("int")
        )
        return F.transform(in_order, lambda element: element["value"])
    if kind == "map":
        return F.collect_list(F.struct("user_key", "value"))
    return F.array_sort(F.collect_list(F.unix_millis("expires_at")))


def continue_from_savepoint(
    processor: type, savepoint: str, *, root: str | None = None, pipeline: str | None = None
) -> type:
    """Return a subclass of a processor for a new streaming query that begins with the state of a savepoint.

    The caller passes an instance of the subclass to `transformWithState`, and as `initialState` the result of
    `initial_state_of`: one row for each key, with all states and timers of the key. Spark calls the subclass's
    `handleInitialState` with each row, and this method writes the key's states and timers. It replaces the processor's
    own `handleInitialState`. Spark's workers need the package `cairn` on their path.

    Args:
        processor: The processor's class, a `StatefulProcessor` of PySpark's row interface.
        savepoint: The savepoint that `initial_state_of` gets. Here only the types of the states are read from it. It
            is the URL of a savepoint's folder. If `root` and `pipeline` are given, `savepoint` names a checkpoint of
            that pipeline instead: "latest", an id, or the end of an interval.
        root: URL of the folder that holds the pipelines; None for a savepoint.
        pipeline: Name of the pipeline; None for a savepoint.
    """
    states = find_state(savepoint, root=root, pipeline=pipeline).content.states
    types = {d.name: (parse_struct(d.versions[-1].value), _user_key(d)) for d in states}

    class Continuing(processor):  # type: ignore[misc]
        def init(self, handle: Any) -> None:
            self._cairn_handle = _Remembering(handle)
            super().init(self._cairn_handle)

        def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
            self._cairn_handle.put_back(initialState[_HELD], types)

    Continuing.__name__ = Continuing.__qualname__ = f"Continuing{processor.__name__}"
    return Continuing


def _user_key(descriptor: StateDescriptor) -> Struct | None:
    user_key = descriptor.versions[-1].user_key
    return parse_struct(user_key) if user_key is not None else None


class _Remembering:
    """Wrapper of a processor's handle that remembers the states that the processor declares."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._states: dict[str, tuple[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def getValueState(self, stateName: str, *rest: Any, **named: Any) -> Any:
        return self._remember(stateName, "value", self._handle.getValueState(stateName, *rest, **named))

    def getListState(self, stateName: str, *rest: Any, **named: Any) -> Any:
        return self._remember(stateName, "list", self._handle.getListState(stateName, *rest, **named))

    def getMapState(self, stateName: str, *rest: Any, **named: Any) -> Any:
        return self._remember(stateName, "map", self._handle.getMapState(stateName, *rest, **named))

    def _remember(self, name: str, kind: str, state: Any) -> Any:
        self._states[name] = kind, state
        return state

    def put_back(self, held: Any, types: Types) -> None:
        for at_ms in held[TIMERS_NAME] or ():
            self._handle.registerTimer(at_ms)
        for name, (value, user_key) in types.items():
            what = held[name]
            if what is None:
                continue
            kind, state = self._states.get(name, ("", None))
            if kind == "value":
                state.update(_as_state(value, what))
            elif kind == "list":
                state.put([_as_state(value, element) for element in what])
            elif kind == "map" and user_key is not None:
                for entry in what:
                    state.updateValue(_as_state(user_key, entry["user_key"]), _as_state(value, entry["value"]))
            else:
                raise UsageError(
                    f"the initial state has a state {name!r}, which the query's processor does not declare in this form; declare it as in the pipeline"
                )


def _as_state(data_type: DataType, value: Any) -> Any:
    """Convert a value from a row of initial state to the form that states take: structs to tuples, maps to dicts."""
    if value is None:
        return None
    match data_type:
        case Struct():
            return tuple(_as_state(f.type, value[f.name]) for f in data_type.fields)
        case ArrayType():
            return [_as_state(data_type.element, item) for item in value]
        case MapType():
            pairs = value.items() if isinstance(value, dict) else value
            return {_as_state(data_type.key, k): _as_state(data_type.value, v) for k, v in pairs}
    return value


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
