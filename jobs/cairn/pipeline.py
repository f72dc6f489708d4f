"""Declaration of a pipeline. Importing this module does not import Spark."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from cairn.change_expectations import ChangeExpectations
from cairn.rows.column_names import plain_name
from state_backend.adapters.rocks import MIB, EngineOptions
from state_backend.formats.paths import check_name
from state_backend.shard.changelog_store import ChangelogOptions
from state_backend.values.errors import UsageError
from state_backend.values.intervals import Interval, to_ms
from state_backend.values.key_groups import check_parallelism
from state_backend.values.records import Content, Record
from state_backend.values.retention import RetentionPolicy, check_retention, default_retention
from state_backend.values.schedule import Cron, Every, Schedule, are_same, schedule_of
from state_backend.values.time_bounds import check_length_of_time
from state_backend.values.zones import name_of, zone_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, GroupedData, SparkSession
    from pyspark.sql.streaming import StatefulProcessor
    from pyspark.sql.types import StructType

    from cairn.arrow_processor import ArrowProcessor
    from cairn.sinks.table_sink import TableSink
    from state_backend.checkpoint.location import Location
    from state_backend.checkpoint.log import Log

__all__ = ["ChangeExpectations", "Interval", "Pipeline"]

# What a change of a setting does to the state and results that are there, in the metadata of the setting's field.
# The change is refused: the recorded state was made with the value.
FIXED = {"fixed": True}
# The value decides results: it belongs to the input hash, in the order of the fields.
HASHED = {"hashed": True}

Processor: TypeAlias = "type | Callable[[], Any] | StatefulProcessor | ArrowProcessor"
Source = Callable[["SparkSession", Interval], "DataFrame | tuple[DataFrame, dict[str, Any]]"]
Sink = Callable[["SparkSession | None", list[str], Interval, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A stateful batch pipeline: a source, a key, a processor and a start.

    Attributes:
        name: Name of the pipeline and of its folder below the root: letters, digits, `_ . -`. A pipeline with another
            name has other state.
        start: Start of the first interval, with a time zone. You can't change it later.
        source: Function that returns the rows: `(spark, interval) -> DataFrame`, or `-> (DataFrame, position)`.
        key: Columns whose values identify a state, by name or as `F.col("user")`. You can't change names and types.
        processor: A `StatefulProcessor` or `ArrowProcessor`. Give its class, an instance, a `functools.partial` of the
            class, or a function without parameters that returns an instance.
        output_schema: Schema of the rows that the processor yields: DDL or a `StructType`. None: the processor derives
            the schema from the input, as ready-made processors do.
        api: Form in which the processor gets rows: "row" (PySpark rows), "pandas" (DataFrames) or "arrow" (tables of
            many keys). The class of an `ArrowProcessor` sets "arrow" itself. A function that returns one needs
            `api="arrow"`.
        time_mode: Clock of timers: "none", "processing" (the interval's end) or "event" (the watermark). You can't
            change it later.
        schedule: Where intervals begin and end: a cron text or preset in the time zone of `start`, `Cron(text, zone)`,
            or a timedelta. The DAG must have the same schedule. None: the schedule of the DAG. Without a DAG, each
            interval is then as long as the one before.
        event_time: Timestamp column with the time of a row, for `time_mode="event"`.
        watermark_delay: Time by which the watermark lags the newest event or interval's end, for `time_mode="event"`.
        watermark: What the watermark follows: with "observed", the newest event seen, as in Spark; with "interval", the
            interval's end.
        on_type_mismatch: What happens to a value that does not fit its state's schema, in the row and pandas forms.
            "error" stops the interval. "null" stores NULL as Spark does, and logs a count for each field.
        dropped: Fields that you remove from states, such as `["total.n"]`. Their values are lost.
        renamed: New names of fields of states, such as `{"total.n": "clicks"}`. The fields keep their values.
        stateful_source: "warn" logs a warning if the source compares rows, as `dropDuplicates` does. "allow" does not.
        read_ahead: True: one Spark job may compute several intervals. If the source reads what this pipeline writes,
            pass False, or it misses the newest rows. A run with False is slower.
        time_zone: Time zone of datetimes without one. It may change between two intervals, unless event times are
            TIMESTAMP_NTZ. None: the zone of the Spark session (UTC through Airflow), which must not change.
        order_by: Columns by which Cairn sorts the rows of one key. Default: the event time.
        initial_state: Function that returns state to begin with: `(spark) -> DataFrame` with the key columns and the
            columns for `handleInitialState`, or this DataFrame grouped by the key.
        parallelism: Number of shards, and so of Spark tasks. It may change between two intervals.
        max_parallelism: Number of key groups, the upper limit of `parallelism`. You can't change it later.
        sink: Function that Cairn calls after the commit, at least once: `(spark or None, output paths, interval,
            checkpoint id)`. `cairn.sinks` has ready-made sinks.
        sink_in_order: True: the sink gets an interval only after it has accepted all earlier ones.
        group: Name of a group of pipelines. `cairn publish --group` calls all their sinks, and commits call none.
        expectations: `() -> {state name: [Great Expectations expectations]}`, for validation of a state.
        expectations_over_time: `() -> {state name: ChangeExpectations}`, for validation of a state's changes.
        expectations_memory_bytes: The most bytes of states for which the driver evaluates expectations. Above this
            limit, Spark evaluates them. 0: always Spark.
        engine: Settings of each shard's RocksDB, and of the host's file cache.
        changelog: Limits for checkpoints in mode "changelog".
        retention: Policy that decides which checkpoints Cairn keeps. None: the default policy.
        version: Name of this code for people, such as "2.1". It does not affect results. Default: the output of `git
            describe` for the processor's folder.

    Raises:
        UsageError: An attribute has a wrong type or value, or two attributes contradict each other.

    Example:
        CLICKS = Pipeline(
            name="clicks",
            start=datetime(2024, 1, 1, tzinfo=UTC),
            source=read_clicks,
            key=["user"],
            processor=Clicks,
            output_schema="user string, clicks bigint",
        )
    """

    name: str
    start: datetime = field(metadata=FIXED)
    source: Source
    key: Sequence[str | Column]
    processor: Processor
    output_schema: str | StructType | None = None
    api: Literal["row", "pandas", "arrow"] = field(default="row", metadata=HASHED)
    time_mode: Literal["none", "processing", "event"] = field(default="processing", metadata=FIXED | HASHED)
    schedule: str | timedelta | Schedule | None = None
    event_time: str | None = field(default=None, metadata=HASHED)
    watermark_delay: timedelta | None = field(default=None, metadata=HASHED)
    watermark: Literal["observed", "interval"] = field(default="observed", metadata=HASHED)
    dropped: Sequence[str] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    stateful_source: Literal["warn", "allow"] = "warn"
    read_ahead: bool = True
    time_zone: str | None = None
    order_by: Sequence[str] = ()
    initial_state: Callable[[SparkSession], DataFrame | GroupedData] | None = None
    parallelism: int = field(default=2, metadata=HASHED)
    max_parallelism: int = field(default=128, metadata=FIXED | HASHED)
    sink: Sink | TableSink | None = None
    sink_in_order: bool = False
    group: str | None = None
    expectations: Callable[[], Mapping[str, Sequence[Any]]] | None = None
    expectations_over_time: Callable[[], Mapping[str, ChangeExpectations]] | None = None
    expectations_memory_bytes: int = 512 * MIB
    engine: EngineOptions = field(default_factory=EngineOptions, metadata=HASHED)
    changelog: ChangelogOptions = field(default_factory=ChangelogOptions, metadata=HASHED)
    on_type_mismatch: Literal["error", "null"] = field(default="error", metadata=HASHED)
    retention: RetentionPolicy | None = None
    version: str | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.group is not None:
            check_name(self.group)
        self._check_start()
        self._check_schedule()
        check_parallelism(self.parallelism, self.max_parallelism)
        if isinstance(self.key, str):
            raise UsageError(f"pipeline {self.name!r}: key must be a list of columns, as in key=[{self.key!r}]")
        if not all(isinstance(column, str) for column in self.key):
            object.__setattr__(self, "key", [plain_name(column, f"pipeline {self.name!r}: key") for column in self.key])
        if not self.key or len(set(self.key)) != len(self.key):
            raise UsageError(
                f"pipeline {self.name!r}: key must name one or more different columns, not {list(self.key)!r}"
            )
        if not callable(self.processor) and not hasattr(self.processor, "init"):
            raise UsageError(
                f"pipeline {self.name!r}: processor is a {type(self.processor).__name__}\nIt must be a StatefulProcessor's class, "
                "an instance, a functools.partial of the class, or a function that returns one"
            )
        for name, value, known in (
            ("api", self.api, ("row", "pandas", "arrow")),
            ("time_mode", self.time_mode, ("none", "processing", "event")),
            ("watermark", self.watermark, ("observed", "interval")),
            ("on_type_mismatch", self.on_type_mismatch, ("error", "null")),
            ("stateful_source", self.stateful_source, ("warn", "allow")),
        ):
            if value not in known:
                raise UsageError(f"pipeline {self.name!r}: {name}={value!r} is not one of {', '.join(known)}")
        self._take_api_of_processor()
        if self.api == "arrow" and self.on_type_mismatch == "null":
            raise UsageError(f"pipeline {self.name!r}: on_type_mismatch='null' needs api='row' or 'pandas'")
        if self.api == "arrow" and self.initial_state is not None:
            raise UsageError(f"pipeline {self.name!r}: initial_state needs api='row' or 'pandas'")
        if self.retention is not None:
            check_retention(self.retention, f"pipeline {self.name!r}: retention")
        if self.time_zone is not None:
            zone_of(self.time_zone)
        self._check_event_time()
        self._check_changed_fields()
        if hasattr(self._processor_class, "check_pipeline") and self.api == "arrow":
            self._processor_class.check_pipeline(self)

    def _check_start(self) -> None:
        try:
            to_ms(self.start)
        except UsageError as error:
            raise UsageError(
                f"pipeline {self.name!r}: start: {error}, as in start=datetime(2024, 1, 1, tzinfo=UTC)"
            ) from None

    def _check_schedule(self) -> None:
        if self.schedule is None:
            return
        try:
            object.__setattr__(self, "schedule", schedule_of(self.schedule, name_of(self.start.tzinfo)))
        except UsageError as error:
            raise UsageError(f"pipeline {self.name!r}: schedule: {error}") from None

    def _check_changed_fields(self) -> None:
        what = f"pipeline {self.name!r}"
        if isinstance(self.dropped, str) or not all("." in str(name) for name in self.dropped):
            raise UsageError(f"{what}: dropped is {self.dropped!r}; list states with fields, as in dropped=['total.n']")
        for name, new in self.renamed.items():
            struct, dot, _ = name.rpartition(".")
            if not dot or not new or "." in new:
                raise UsageError(
                    f"{what}: renamed has {name!r}: {new!r}; give the old name with the state, and the new name without, as in "
                    "renamed={'total.n': 'clicks'}"
                )
            if f"{struct}.{new}" in self.renamed:
                raise UsageError(
                    f"{what}: renamed has {name!r}: {new!r}, but renames {new!r} too; give {name!r} its last name at once"
                )

    @property
    def _processor_class(self) -> Any:
        # A `functools.partial` has the class as `func`.
        given: Any = getattr(self.processor, "func", self.processor)
        return given if isinstance(given, type) else type(given)

    def _take_api_of_processor(self) -> None:
        processor = self._processor_class
        if not hasattr(processor, "handleBatch"):
            return
        if self.api == "pandas":
            raise UsageError(
                f"pipeline {self.name!r}: {processor.__name__} is an ArrowProcessor; leave out api='pandas', or write api='arrow'"
            )
        object.__setattr__(self, "api", "arrow")

    def _check_event_time(self) -> None:
        given = {"event_time": self.event_time, "watermark_delay": self.watermark_delay}
        if self.time_mode != "event":
            useless = [name for name, value in given.items() if value is not None]
            if useless:
                raise UsageError(
                    f"pipeline {self.name!r}: {' and '.join(useless)} needs time_mode='event', not {self.time_mode!r}"
                )
            return
        missing = [name for name, value in given.items() if value is None]
        if missing:
            raise UsageError(
                f"pipeline {self.name!r}: time_mode='event' needs {' and '.join(missing)}, as in "
                "event_time='ts', watermark_delay=timedelta(hours=1)"
            )
        if self.watermark_delay is not None and self.watermark_delay < timedelta(0):
            raise UsageError(
                f"pipeline {self.name!r}: watermark_delay is {self.watermark_delay}, which is negative; give 0 or more"
            )
        if self.watermark_delay is not None:
            check_length_of_time(f"pipeline {self.name!r}: watermark_delay", self.watermark_delay)

    def hashed(self) -> tuple[Any, ...]:
        """Return the values of the settings that decide results, for the input hash."""
        return tuple(getattr(self, setting.name) for setting in fields(self) if "hashed" in setting.metadata)

    def changed_since(self, content: Content) -> Iterator[tuple[str, Any, Any]]:
        """Yield name, value and recorded value of each fixed setting that differs from the value in a record."""
        recorded = content.settings
        for name in (setting.name for setting in fields(self) if "fixed" in setting.metadata):
            if getattr(self, name) != recorded[name]:
                yield name, getattr(self, name), recorded[name]

    @property
    def declared_schedule(self) -> Schedule | None:
        """The declared schedule as a value; None if the pipeline declares none."""
        return self.schedule if isinstance(self.schedule, Cron | Every) else None

    def scheduled_by(self, schedule: Schedule, who: str) -> Pipeline:
        """Return the pipeline with the schedule of the scheduler that runs it.

        Args:
            schedule: The schedule of the scheduler.
            who: Name of the scheduler, for the message.

        Raises:
            UsageError: The pipeline declares another schedule.
        """
        own = self.declared_schedule
        if own is not None and not are_same(own, schedule):
            raise UsageError(
                f"pipeline {self.name!r} declares the schedule {own}, but the schedule of {who} is {schedule}\n"
                "Make them the same, or declare no schedule: the pipeline then takes that of its DAG"
            )
        return self if own is not None else replace(self, schedule=schedule)

    def retention_of(self, interval: Interval) -> RetentionPolicy:
        """Return the retention policy that the commit of an interval records.

        Args:
            interval: The interval. The default policy depends on its length.
        """
        return self.retention or default_retention(interval.end - interval.start)

    def call_sink(
        self,
        at: Location,
        spark: SparkSession | None,
        *,
        after: Log | None = None,
        only: Collection[datetime] | None = None,
        code: str | None = None,
    ) -> list[tuple[Interval, int]]:
        """Call the sink for every current output that the sink has not accepted, as `publish` does.

        Without a sink, all output counts as published. A member of a group publishes nothing here, unless `only` names
        intervals. A sink of `cairn.sinks` deletes the rows of replaced intervals in the transaction that inserts the
        new rows, so its calls for replaced intervals come last.

        Args:
            at: The pipeline's location.
            spark: The session that the sink gets; None if there is no session.
            after: The log as the caller's own commit left it.
            only: Starts of the intervals to publish; None for all.
            code: The pipeline as `module:NAME`, for the commands in the error message; None for the recorded name.

        Returns:
            Of each published output the interval, and the id of the commit that made or replaced it.

        Raises:
            SinkFailed: The sink raised for some interval.
        """
        from state_backend.checkpoint.publish_output import publish

        if self.group is not None and self.sink is not None and only is None:
            return []
        return publish(
            at,
            self.sink_hook(spark, at.url),
            after=after,
            in_order=self.sink_in_order,
            replaced_last=self.sink is not None and not callable(self.sink),
            only=only,
            code=code,
        )

    def sink_hook(self, spark: SparkSession | None, root_url: str) -> Callable[[Record], None] | None:
        """Return the sink as a function of one record, as `publish` calls it.

        Args:
            spark: The session that the sink gets; None if there is no session.
            root_url: URL of the pipeline's folder.

        Returns:
            The function; None for a pipeline without a sink. A sink that is a function gets no paths of late rows.
        """
        sink, name = self.sink, self.name
        if sink is None:
            return None
        if not callable(sink):
            from cairn.sinks.table_sink import owner_of, published_output
            from state_backend.checkpoint.publish_output import ReplacedOutput

            def publish(record: Record) -> None:
                content, replaced = record.content, isinstance(record, ReplacedOutput)
                for table, late in sink.each_table():
                    owner = owner_of(name, root_url, late=late)
                    made = published_output(owner, root_url, content.interval, record.id, content.outputs, late=late)
                    table.publish(replace(made, replaced=replaced))

            return publish

        def hook(record: Record) -> None:
            files = [f"{root_url}/{f.handle.path}" for f in record.content.outputs if not f.late]
            sink(spark, files, record.content.interval, record.id)

        return hook
