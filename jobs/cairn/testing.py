"""Tests of pipelines in milliseconds, without Spark and Airflow.

    from cairn.testing import PipelineTester

    def test_clicks_are_counted():
        tester = PipelineTester(CLICKS, input_schema="user string, at timestamp")
        first = tester.run([("ann", datetime(2024, 1, 1, 0, 10)), ("bob", datetime(2024, 1, 1, 0, 20))])
        assert first.output == [{"user": "ann", "clicks": 1}, {"user": "bob", "clicks": 1}]
        assert tester.state("clicks") == [{"key_user": "ann", "n": 1}, {"key_user": "bob", "n": 1}]

An interval runs the same code as in production. `process_interval` plans it. `IntervalJob.run_shard` restores each
shard's base, runs the processor and uploads the state. `commit` commits. Only the source and Spark's JVM are
replaced: the test passes the rows, and this module places and sorts them as Spark would.

So every interval is a restart: no processor object survives from one interval to the next.
"""

from __future__ import annotations

import itertools
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from cairn.change_expectations import ChangeExpectations
from cairn.literal_state import State, entries_from, in_utc, timers_of, values_of
from cairn.operations.intervals.plan_interval import Attempt
from cairn.operations.intervals.process_interval import process_interval
from cairn.operations.intervals.read_source import Read
from cairn.operations.validation.checks import Check, FailingRows
from cairn.operations.validation.evaluate_expectations import try_expectations
from cairn.operations.validation.expectation_suites import OVER_TIME
from cairn.pipeline import Interval, Pipeline
from cairn.replay.key_input import plan_read_key
from cairn.replay.local_session import LocalSession, PlanningSession
from cairn.replay.replay_key import replay_key
from cairn.replay.run_key import InProcess, KeyRun, run_key
from cairn.rows.column_names import ColumnNames
from cairn.rows.local_rows import LocalRows, route_locally, sorted_rows
from cairn.rows.routing import Inputs, key_schema_of
from cairn.shard_jobs.interval import IntervalJob
from cairn.spark.ddl import parse_ddl_locally
from cairn.spark_versions import struct_of
from state_backend.adapters.memory_storage import forget_memory
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.begin_attempt import Begun
from state_backend.checkpoint.clean_up_dropped import clean_up
from state_backend.checkpoint.commit_attempt import commit as commit_attempt
from state_backend.checkpoint.find_checkpoint import record_of
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import read_log, read_newest
from state_backend.checkpoint.prepare_content import ShardAck
from state_backend.checkpoint.publish_output import publish
from state_backend.formats.json_keys import parse_key
from state_backend.formats.types import StructType as KeySchema
from state_backend.formats.types import parse_struct
from state_backend.inspection.key_entries import SearchedKey
from state_backend.inspection.state_source import StateSource
from state_backend.inspection.state_table import read_table
from state_backend.state.layout import TIMERS_NAME
from state_backend.values.errors import StateUnusable, UsageError
from state_backend.values.intervals import from_ms, to_ms
from state_backend.values.records import NO_PERMISSIONS, Permissions, Record, own_run
from state_backend.values.schedule import interval_from, no_boundary
from state_backend.values.zones import zone_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

__all__ = ["Clock", "Finding", "PipelineTester", "ReplayedKey", "TestedInterval"]

_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Clocks after a committed or prepared interval.

    Attributes:
        processing_time: The interval's end.
        watermark: Watermark of event time; None before the first event and in other time modes.
        late_until: In the next interval, rows with this event time or an earlier one are late. None means that no row
            is late.
    """

    processing_time: datetime
    watermark: datetime | None
    late_until: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TestedInterval:
    """One processed interval.

    Attributes:
        interval: The interval.
        output: Output rows as dicts, shard after shard, in the order in which each shard wrote them. Instants are
            datetimes in UTC.
        late: Late rows, in the same form.
        clock: The clocks after this interval.
        input_rows: Number of input rows.
        record: The checkpoint's record; None if `run` was called with `commit=False`.
    """

    __test__ = False  # Without this line pytest would collect the class as a test.

    interval: Interval
    output: list[dict[str, Any]]
    late: list[dict[str, Any]]
    clock: Clock
    input_rows: int
    record: Record | None

    def frame(self) -> pd.DataFrame:
        """Return the output rows as a pandas DataFrame."""
        return pd.DataFrame(self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An expectation that the state does not meet. As text it is the sentence of production's validation.

    Attributes:
        state: Name of the state.
        over_time: True if the expectation is about the table of changes since the base.
        expectation: Type of the expectation, such as "expect_column_values_to_be_between".
        column: The column or columns; empty for an expectation on a whole table.
        expected: The expected values, such as "min_value=1".
        observed: The observed values, such as "3 of 40 rows fail".
        rows: Number of failing rows; 0 if the expectation is not about single rows.
        keys: Keys of up to 20 failing rows, each as JSON, in ascending order.
    """

    state: str
    over_time: bool
    expectation: str
    column: str
    expected: str
    observed: str
    rows: int
    keys: tuple[str, ...]

    @classmethod
    def _of(cls, check: Check) -> Finding:
        failing = check.failing
        return cls(
            state=check.table.removesuffix(OVER_TIME),
            over_time=check.table.endswith(OVER_TIME),
            expectation=check.what,
            column=check.column,
            expected=check.expected,
            observed=check.observed,
            rows=0 if failing is None else failing.number,
            keys=() if failing is None else failing.keys,
        )

    def __str__(self) -> str:
        failing = FailingRows(number=self.rows, keys=self.keys) if self.keys else None
        table = f"{self.state}{OVER_TIME if self.over_time else ''}"
        told = {"what": self.expectation, "column": self.column, "expected": self.expected, "observed": self.observed}
        return Check(table=table, **told, success=False, failing=failing).finding


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedKey:
    """One interval of one key, as `PipelineTester.replay` ran it.

    Attributes:
        output: Output rows as dicts. Instants are datetimes in UTC.
        late: Late rows, in the same form.
        state: The key's entries after the interval, by the state's name. An entry is a dict with the columns of the
            value, the columns of a map's user key as `user_key_<name>`, and `expires_at` if it expires. States without
            entries are left out.
        timers: The times of the key's timers, ascending.
        handlers: The names of the processor's methods that were called, in order.
        same: True if the result equals the committed one; None without a committed result.
        reasons: Possible reasons of a difference.
    """

    output: list[dict[str, Any]]
    late: list[dict[str, Any]]
    state: dict[str, list[dict[str, Any]]]
    timers: list[datetime | int]
    handlers: list[str]
    same: bool | None
    reasons: list[str]

    @classmethod
    def _of(cls, run: KeyRun, same: bool | None, reasons: Sequence[str]) -> ReplayedKey:
        return cls(
            output=in_utc(run.output.to_pylist()),
            late=in_utc(run.late.to_pylist()),
            state=values_of(run.entries),
            timers=timers_of(run.entries),
            handlers=[call.handler for call in run.calls],
            same=same,
            reasons=[*reasons],
        )


class PipelineTester:
    """Runner that processes intervals of a pipeline in this process.

    Args:
        pipeline: The pipeline under test.
        input_schema: Schema of the rows that you give to `run` instead of the source's rows: DDL or a `StructType`.
        every: Length of an interval, if `run` gets no interval. None: as the pipeline's schedule says, or an hour.
        initial_state: Rows that replace those of `Pipeline.initial_state`.
        initial_schema: Schema of `initial_state`. Give both or neither.
        root: Root for the state. A second tester on this root continues from the first tester's checkpoints. None: the
            state is in memory.
        time_zone: Time zone of the simulated Spark session, used if the pipeline names no zone.
        mode: How checkpoints are stored: "incremental", "full" or "changelog".
        call_sink: True calls the pipeline's sink after each commit, with None for the Spark session.

    Raises:
        UsageError: A schema can't be read, or only Spark can order one of its columns (maps, variants, collated
            strings, geometries).
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        input_schema: str | StructType,
        every: timedelta | None = None,
        initial_state: Any = None,
        initial_schema: str | StructType | None = None,
        root: str | None = None,
        time_zone: str = "UTC",
        mode: Literal["incremental", "full", "changelog"] = "incremental",
        call_sink: bool = False,
    ) -> None:
        self.every = every
        self.mode = mode
        self._zone = zone_of(pipeline.time_zone or time_zone)
        self._session_zone = time_zone
        self._call_sink = call_sink
        self._schema = _schema(input_schema, "input_schema")
        self._where = f"PipelineTester({pipeline.name!r})"
        LocalRows([], self._schema, self._zone, f"{self._where}: the input")
        self._names = ColumnNames(
            names=tuple(self._schema.names), case_sensitive=False, what=f"{self._where}: the input"
        )
        self._initial = self._initial_rows(pipeline, initial_state, initial_schema)
        self._alone = root is None
        self._ended: datetime | None = None
        if root is None:
            root = f"memory://tester-{next(_numbers)}"
            weakref.finalize(self, forget_memory, root)
        self.root = root
        self.pipeline = pipeline
        self._at = locate(root, pipeline.name)

    def _initial_rows(self, pipeline: Pipeline, rows: Any, schema: str | StructType | None) -> LocalRows | None:
        if (rows is None) != (schema is None):
            raise UsageError(f"{self._where}: initial_state and initial_schema go together; give both or neither")
        if rows is None or schema is None:
            return None
        if pipeline.initial_state is None:
            raise UsageError(
                f"{self._where}: initial_state is given, but the pipeline declares no initial_state, so its processor would never get these rows"
            )
        return LocalRows(rows, _schema(schema, "initial_schema"), self._zone, f"{self._where}: the initial state")

    # --- running intervals --------------------------------------------------------------------------------------------

    def run(
        self,
        rows: Any = (),
        interval: Interval | None = None,
        *,
        position: dict[str, Any] | None = None,
        commit: bool = True,
        mode: Literal["incremental", "full", "changelog"] | None = None,
        permissions: Permissions = NO_PERMISSIONS,
    ) -> TestedInterval:
        """Process one interval and commit it.

        Args:
            rows: Dicts, tuples or Rows in any order, a pandas DataFrame or an Arrow table. Naive datetimes of a
                TIMESTAMP column are wall time in the session's zone, as under Spark.
            interval: The interval; None for the next one. An interval that has run before runs again, from the same
                checkpoint.
            position: The position that the source would record; None for no position.
            commit: False drops the attempt after its last row, as if its driver had died then.
            mode: How the checkpoint is stored; None for the tester's mode.
            permissions: Refused actions that the caller allows, such as `Permissions(allow_stale_base=True)`.

        Raises:
            CairnError: The same errors as in `run_interval`.
        """
        interval = interval or self.next_interval
        if not isinstance(rows, LocalRows):
            rows = LocalRows(rows, self._schema, self._zone, f"{self._where}: {interval}")
        identifier = str(uuid.uuid4())
        attempt = Attempt(
            id=identifier,
            interval=interval,
            mode=mode or self.mode,
            run=own_run(f"tester__{identifier}"),
            permissions=permissions,
        )
        pipeline = self._as_run(rows, position)
        session: Any = PlanningSession(self._session_zone)
        here = partial(_on_shards, pipeline.processor)
        before, after = read_newest(self._at.storage), None
        prepared = process_interval(session, pipeline, self._at, attempt, before=before, on_shards=here)
        content, record = prepared.content, None
        if commit:
            result = commit_attempt(self._at, identifier, prepared=prepared, before=before)
            record, after = result.record or record_of(self._at, result.id), result.log
            self._ended = max(interval.end, self._ended or interval.end)
            content = record.content
            if self._call_sink:
                pipeline.call_sink(self._at, None, after=after)
            else:
                publish(self._at, None, after=after)
        files = [(f.late, self._read(f.handle)) for f in content.outputs]
        if commit:
            clean_up(self._at.storage, after)
        return TestedInterval(
            interval=interval,
            output=[row for late, found in files if not late for row in found],
            late=[row for late, found in files if late for row in found],
            clock=_clock(content.time),
            input_rows=content.totals.input_rows,
            record=record,
        )

    def replay(
        self,
        key: Mapping[str, Any] | tuple[Any, ...] | str,
        interval: Interval,
        rows: Any = None,
        *,
        state: State | None = None,
        timers: Sequence[datetime | int] = (),
        watermark: datetime | None = None,
        late_until: datetime | None = None,
    ) -> ReplayedKey:
        """Run one interval for one key, and commit nothing.

        With `state`, the interval starts from the given entries, and no root is read. Without `state`, the interval
        must be committed below the tester's root. It starts from its recorded base, and the result is compared with the
        committed one, as by `cairn replay`.

        Args:
            key: The key: its values by column, a tuple of its values, or a text as for `cairn replay KEY`.
            interval: The interval.
            rows: The input rows, in any order. Rows of other keys are left out. None: without `state`, the rows that
                the pipeline's source returns without Spark; with `state`, no rows.
            state: The key's entries before the interval, in the form of `ReplayedKey.state`.
            timers: The key's timers before the interval: datetimes, or milliseconds since the epoch.
            watermark: The watermark before the interval, with `state` and `time_mode="event"`.
            late_until: Rows with this event time or an earlier one are late, with `state` and `time_mode="event"`.

        Raises:
            CairnError: The same errors as in `run`.
            UsageError: The key or an entry does not fit, or the source needs Spark.
            StateUnusable: The checkpoint or its base is dropped.
        """
        given = self._given_rows(rows, interval)
        if state is not None:
            clock = (watermark, late_until)
            return self._replay_from(key, interval, given or self._given_rows((), interval), state, timers, clock)
        record = next((r for r in reversed(self.checkpoints) if r.interval == interval), None)
        pipeline = self.pipeline
        if given is not None:
            pipeline = self._as_run(given, record.content.source_position if record is not None else None)
        schema = parse_struct(record.content.key_schema) if record is not None else None
        wanted: Any = key if schema is None or isinstance(key, str) else _key_values(key, schema)
        found = replay_key(pipeline, wanted, interval, self.root)
        return ReplayedKey._of(found.run, found.same, found.reasons)

    def _given_rows(self, rows: Any, interval: Interval) -> LocalRows | None:
        if rows is None or isinstance(rows, LocalRows):
            return rows
        return LocalRows(rows, self._schema, self._zone, f"{self._where}: {interval}")

    def _replay_from(
        self,
        key: Any,
        interval: Interval,
        rows: Any,
        state: State,
        timers: Sequence[datetime | int],
        clock: tuple[datetime | None, datetime | None],
    ) -> ReplayedKey:
        pipeline = self._as_run(rows, None)
        if self._initial is None or interval.start != pipeline.start:
            pipeline = replace(pipeline, initial_state=None)
        key_schema = parse_struct(key_schema_of(self._schema, self._names.find_key(pipeline.key)).jsonValue())
        values = parse_key(key, key_schema) if isinstance(key, str) else _key_values(key, key_schema)
        searched = SearchedKey.of(values, key_schema, pipeline.max_parallelism)
        attempt = Attempt(id="replay", interval=interval, run=own_run("replay"))
        begun = Begun(h0=0, base=None)
        session = LocalSession(self._session_zone)
        read = Read(rows=rows, position={})
        planned = plan_read_key(session, pipeline, self.root, attempt, begun, searched, read)
        job = planned.plan.job
        if job.event_time is not None:
            watermark_ms, late_ms = (None if at is None else to_ms(at) for at in clock)
            event_time = replace(job.event_time, base_ms=watermark_ms, late_ms=late_ms)
            time = replace(job.content.time, watermark_ms=watermark_ms)
            job = replace(job, event_time=event_time, content=replace(job.content, time=time))
        with work_folder("tester") as work:
            base = entries_from(job, searched, state, timers, work / "base")
            (work / "run").mkdir()
            run = run_key(job, pipeline.processor, planned.batches, base, searched, work / "run")
        return ReplayedKey._of(run, None, ())

    def rescale(self, parallelism: int) -> None:
        """Change the number of shards from the next interval on.

        Args:
            parallelism: Number of shards.
        """
        self.pipeline = replace(self.pipeline, parallelism=parallelism)

    def deploy(self, pipeline: Pipeline) -> None:
        """Replace the pipeline from the next interval on: other code or settings over the same state.

        Args:
            pipeline: The new declaration.

        Raises:
            UsageError: The new pipeline has another name. State belongs to the name.
        """
        if pipeline.name != self.pipeline.name:
            raise UsageError(
                f"{self._where}: deploy got pipeline {pipeline.name!r}, but state belongs to the name; use the same name, or make "
                "another tester"
            )
        self.pipeline = pipeline
        self._zone = zone_of(pipeline.time_zone or self._session_zone)

    # --- reading results ----------------------------------------------------------------------------------------------

    @property
    def next_interval(self) -> Interval:
        """The interval that `run` processes by default.

        It starts at the newest end of a committed interval, or at the pipeline's start. It is as long as `every` says,
        or as the pipeline's schedule says.

        Raises:
            UsageError: The schedule has no interval that starts there.
        """
        # If the tester made the root itself, in memory (`_alone`), no other process commits there. So the tester knows
        # the newest end without reading the log.
        start = self._ended
        if not self._alone:
            start = max((kept.interval.end for kept in read_newest(self._at.storage).kept), default=None)
        start = start or self.pipeline.start
        schedule = self.pipeline.declared_schedule
        if self.every is not None or schedule is None:
            return Interval(start, start + (self.every or timedelta(hours=1)))
        if (found := interval_from(schedule, start)) is None:
            raise UsageError(f"{self._where}: {no_boundary(schedule, start)}\nPass the interval to run, or give every=")
        return found

    @property
    def checkpoints(self) -> list[Record]:
        """Records of the completed checkpoints, the oldest first."""
        return sorted(self._log().completed(), key=lambda record: record.id)

    @property
    def clock(self) -> Clock:
        """The clocks after the newest checkpoint.

        Raises:
            StateUnusable: The pipeline has no checkpoint yet.
        """
        return _clock(self._record("latest").content.time)

    def state(self, name: str, checkpoint: str | int | datetime = "latest") -> list[dict[str, Any]]:
        """Return the rows of a state, ordered by key.

        Args:
            name: Name of the state.
            checkpoint: "latest", an id, or the end of an interval.

        Returns:
            A dict for each row: key columns as `key_<name>`, a map's user key columns as `user_key_<name>`, a list's
                `pos`, and the columns of the value. A state with a time to live also has `expires_at`.

        Raises:
            UsageError: The checkpoint has no state of this name.
            StateUnusable: There is no such checkpoint.
        """
        record = self._record(checkpoint)
        source = StateSource.of_record(self._at.url, record)
        descriptor, storage = source.descriptor(name), open_storage(source.url)
        found: list[pa.Table] = []
        for shard in range(record.content.parallelism):
            with work_folder("tester") as work:
                found += read_table(source, name, shard, storage, work)
        timed = descriptor is None or descriptor.ttl_ms is not None
        rows = [row for table in found for row in table.to_pylist()]
        key = struct_of(record.content.key_schema)
        user_key = descriptor.versions[-1].user_key if descriptor is not None else None
        ordered = sorted_rows(
            rows, [("key", key), *([("user_key", struct_of(user_key))] if user_key is not None else [])]
        )
        return [_flat(row, timed=timed) for row in ordered]

    def timers(self, checkpoint: str | int | datetime = "latest") -> list[dict[str, Any]]:
        """Return the timers that have not fired, ordered by key.

        Args:
            checkpoint: "latest", an id, or the end of an interval.

        Returns:
            A dict for each timer: key columns as `key_<name>`, and `expires_at`.
        """
        return self.state(TIMERS_NAME, checkpoint)

    def validate(
        self,
        expectations: Mapping[str, Sequence[Any]] | None = None,
        expectations_over_time: Mapping[str, ChangeExpectations] | None = None,
        *,
        checkpoint: str | int | datetime = "latest",
        spark: SparkSession | None = None,
    ) -> list[Finding]:
        """Evaluate expectations on the state, as production's validation does, and mark nothing.

        Without a Spark session this process evaluates the expectations that docs/validation.md lists.

        Args:
            expectations: Great Expectations expectations by the state's name. None: those of the pipeline, if
                `expectations_over_time` is None too.
            expectations_over_time: Limits on the change since the base, by the state's name. None: those of the
                pipeline, if `expectations` is None too.
            checkpoint: "latest", an id, or the end of an interval.
            spark: A session that evaluates the expectations, also those that need Spark.

        Returns:
            A finding for each expectation that the state does not meet.

        Raises:
            UsageError: There are no expectations, an expectation can't be evaluated, or it needs Spark.
            StateUnusable: There is no such checkpoint.
        """
        pipeline = self.pipeline
        if expectations is not None or expectations_over_time is not None:
            own, over = dict(expectations or {}), dict(expectations_over_time or {})
            pipeline = replace(pipeline, expectations=lambda: own, expectations_over_time=lambda: over)
        if pipeline.expectations is None and pipeline.expectations_over_time is None:
            raise UsageError(
                f"{self._where}: the pipeline declares no expectations\nGive expectations to validate, or to the pipeline"
            )
        record = self._record(checkpoint)
        base_id = record.content.base_id
        base = self._record(base_id) if base_id is not None and base_id in self._log().retained else None
        checks = try_expectations(
            pipeline, self._at.url, record, base, zone=self._session_zone, spark=spark, who=self._where
        )
        return [Finding._of(check) for check in checks if not check.success]

    # --- internals ----------------------------------------------------------------------------------------------------

    def _as_run(self, rows: LocalRows, position: dict[str, Any] | None) -> Pipeline:
        source: Any = _Given((rows, position) if position is not None else rows)
        initial: Any = None
        if self.pipeline.initial_state is not None:

            def initial(session: Any) -> Any:
                if self._initial is None:
                    raise UsageError(
                        f"{self._where}: the pipeline reads its initial state with Spark\nGive its rows to the tester: "
                        "PipelineTester(..., initial_state=rows, initial_schema=schema)"
                    )
                return self._initial

        # Without `cache_dir=None` the test would write into the file cache of the pipelines that run on this host.
        engine = replace(self.pipeline.engine, cache_dir=None)
        return replace(self.pipeline, source=source, initial_state=initial, engine=engine)

    def _log(self) -> Any:
        return read_log(self._at.storage)

    def _record(self, checkpoint: str | int | datetime) -> Record:
        try:
            return record_of(self._at, checkpoint)
        except StateUnusable:
            if self._log().completed():
                raise
            raise StateUnusable(f"{self._where}: the pipeline has no checkpoint yet; run an interval first") from None

    def _read(self, handle: Any) -> list[dict[str, Any]]:
        with work_folder("tester") as work:
            local = work / "file.parquet"
            self._at.storage.download(handle, local)
            rows: list[dict[str, Any]] = pq.read_table(local).to_pylist()
        return rows


class _Given:
    """The source of a pipeline under test: it returns the rows that the test gave, for any interval."""

    def __init__(self, read: Any) -> None:
        self._read = read

    def __call__(self, session: Any, interval: Interval) -> Any:
        return self._read

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Cairn hashes the source as a part of the interval's input hash. For that, `source_hash` calls this method, as
        # pickle does. This error makes `source_hash` return a random hash, without hashing all rows, which would be
        # slow. A random hash is enough in a test: no later try of the interval compares it.
        raise TypeError("rows of a test have no lasting value")


def _on_shards(processor: Any, session: Any, job: IntervalJob, inputs: Inputs) -> list[ShardAck]:
    rows: Any = inputs.rows
    initial: Any = inputs.initial
    shards = route_locally(
        rows,
        initial,
        key=inputs.key,
        initial_key=inputs.initial_key,
        order_by=inputs.order_by,
        parallelism=job.parallelism,
        max_parallelism=job.max_parallelism,
    )
    here: Any = InProcess(processor, job.content.pipeline)
    job = replace(job, processor=here)
    return [
        job.with_refs(job.refs_of(shard)).run_shard(iter(batches), shard, shard) for shard, batches in enumerate(shards)
    ]


def _schema(schema: str | StructType, what: str) -> StructType:
    if not isinstance(schema, str):
        return schema
    try:
        return parse_ddl_locally(schema)
    except UsageError as error:
        raise UsageError(f"PipelineTester: {what} is {error}") from None


def _key_values(key: Any, schema: KeySchema) -> tuple[Any, ...]:
    if not isinstance(key, Mapping):
        return tuple(key)
    if key.keys() != {*schema.names}:
        raise UsageError(f"the key {dict(key)!r} must have exactly the columns {', '.join(schema.names)}")
    return tuple(key[name] for name in schema.names)


def _clock(time: Any) -> Clock:
    return Clock(
        processing_time=from_ms(time.processing_time_ms),
        watermark=None if time.watermark_ms is None else from_ms(time.watermark_ms),
        late_until=None if time.watermark_ms is None else from_ms(time.late_until_ms),
    )


def _flat(row: dict[str, Any], *, timed: bool) -> dict[str, Any]:
    flat = {f"key_{name}": value for name, value in row["key"].items()}
    flat |= {f"user_key_{name}": value for name, value in row.get("user_key", {}).items()}
    flat |= {"pos": row["pos"]} if "pos" in row else {}
    flat |= row.get("value", {})
    return flat | ({"expires_at": row["expires_at"]} if timed else {})
