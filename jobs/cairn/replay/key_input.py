"""Read the input rows and the initial state of one key for one interval.

The source is first called with a stand-in for Spark (`LocalSession`). If it needs more, it is called with a real
session, where Spark only filters: by the hash of the key, before the rows leave Spark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from cairn.operations.intervals.plan_interval import Attempt, IntervalPlan, in_zone_of, plan_interval
from cairn.operations.intervals.read_source import Read, read_source
from cairn.pipeline import Pipeline
from cairn.replay.local_session import LocalFrame, LocalSession, NeedsSpark
from cairn.rows.local_rows import LocalRows, route_locally
from cairn.rows.routing import INITIAL, INPUT, TICK, Inputs, key_columns, route_in_order
from state_backend.adapters.open_storage import join_url
from state_backend.checkpoint.begin_attempt import Begun
from state_backend.formats.key_columns import KeyColumns
from state_backend.formats.spark_hash import key_hasher
from state_backend.inspection.key_entries import SearchedKey
from state_backend.values.errors import SourceError, UsageError
from state_backend.values.frozen import frozen

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OpenSpark = Callable[[], "SparkSession"]


@frozen
class PlannedKey:
    """A planned interval with the input of one key."""

    plan: IntervalPlan
    batches: tuple[pa.RecordBatch, ...]  # The key's rows, of input and initial state.
    session: Any  # The Spark session, or the `LocalSession` in its place.
    read: Read  # What the source returned.

    @property
    def with_spark(self) -> bool:
        return not isinstance(self.session, LocalSession)

    def rows(self, kind: int = INPUT) -> list[dict[str, Any]]:
        """Return the key's rows of the input, or with `INITIAL` of the initial state, in the processor's order."""
        name = {INPUT: "__input", INITIAL: "__initial"}[kind]
        found: list[dict[str, Any]] = []
        for batch in self.batches:
            if name in batch.schema.names:
                kinds = batch.column("__kind")
                found += batch.column(name).filter(pc.equal(kinds, pa.scalar(kind, kinds.type))).to_pylist()
        return found


def plan_key(
    pipeline: Pipeline,
    root: str,
    attempt: Attempt,
    begun: Begun,
    key: SearchedKey,
    *,
    zone: str,
    spark: OpenSpark | None,
) -> PlannedKey:
    """Call the source, and plan the interval for one key. Try without Spark first.

    `attempt`, `begun`: The interval, and its base. Nothing is prepared or uploaded. `spark`: Opens a session if the
    source needs one; None raises `UsageError` then.
    """
    try:
        return _plan(LocalSession(zone), pipeline, root, attempt, begun, key)
    except NeedsSpark as error:
        if spark is None:
            raise UsageError(f"the source of pipeline {pipeline.name!r} needs Spark: it uses {error}") from None
    except SourceError:
        # The error may come from a function of PySpark that needs a JVM. So try again with a real session.
        if spark is None:
            raise
    session = spark()
    with in_zone_of(session, zone):
        return _plan(session, pipeline, root, attempt, begun, key)


def _plan(session: Any, pipeline: Pipeline, root: str, attempt: Attempt, begun: Begun, key: SearchedKey) -> PlannedKey:
    with in_zone_of(session, pipeline.time_zone):
        read = read_source(session, pipeline, attempt.interval, root)
        return plan_read_key(session, pipeline, root, attempt, begun, key, read)


def plan_read_key(
    session: Any, pipeline: Pipeline, root: str, attempt: Attempt, begun: Begun, key: SearchedKey, read: Read
) -> PlannedKey:
    """Plan an interval for one key, over rows that the source has returned (`read`).

    `attempt`: Describes the interval for the plan. Nothing is prepared or uploaded under its uuid.
    """
    plan = plan_interval(session, pipeline, join_url(root, pipeline.name), replace(attempt, read=read), begun, None)
    inputs, most = plan.inputs, pipeline.max_parallelism
    if isinstance(session, LocalSession):
        batches = _batches_here(inputs, key, most)
    else:
        batches = _batches_of_spark(session, inputs, key, most)
    return PlannedKey(plan=plan, batches=tuple(batches), session=session, read=read)


def _batches_here(inputs: Inputs, key: SearchedKey, max_parallelism: int) -> list[pa.RecordBatch]:
    rows: Any = inputs.rows
    initial: Any = inputs.initial
    return route_locally(
        _rows_of(rows, key, inputs.key),
        _rows_of(initial, key, inputs.initial_key or inputs.key) if initial is not None else None,
        key=inputs.key,
        initial_key=inputs.initial_key,
        order_by=inputs.order_by,
        parallelism=1,
        max_parallelism=max_parallelism,
    )[0]


def _rows_of(rows: Any, key: SearchedKey, names: Any) -> LocalRows:
    frame = rows if isinstance(rows, LocalFrame) else LocalFrame.of_rows(rows)
    return frame.rows_of(key, names)


def _batches_of_spark(
    spark: SparkSession, inputs: Inputs, key: SearchedKey, max_parallelism: int
) -> list[pa.RecordBatch]:
    hashed = key_hasher(key.schema)(key.values)

    def filtered(rows: DataFrame, names: Any) -> DataFrame:
        columns = ", ".join(f"`{name.replace('`', '``')}`" for name in names)
        return rows.where(f"xxhash64({columns}) = {hashed}L" if hashed >= 0 else f"xxhash64({columns}) = ({hashed}L)")

    few = replace(
        inputs,
        rows=filtered(inputs.rows, inputs.key),
        initial=None if inputs.initial is None else filtered(inputs.initial, inputs.initial_key or inputs.key),
    )
    table = route_in_order(spark, few, parts=[b""], max_parallelism=max_parallelism).toArrow()
    # Spark has filtered by the key's hash, which another key may share. So compare the encoded keys here.
    names, encoder, batches = key_columns(len(inputs.key)), KeyColumns(key.schema), []
    for batch in table.drop_columns(["__part"]).combine_chunks().to_batches():
        encoded = encoder.encode([batch.column(name) for name in names])
        wanted = pc.or_(
            pc.equal(encoded, pa.scalar(key.encoded, pa.binary())),
            pc.equal(batch.column("__kind"), pa.scalar(TICK, pa.int8())),
        )
        batches.append(batch.filter(wanted))
    return [batch for batch in batches if batch.num_rows]
