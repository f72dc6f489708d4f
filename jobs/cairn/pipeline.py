"""The declaration of a pipeline: what a user writes beside the processor. Importing it imports no Spark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from cairn.change_expectations import OverTime
from cairn.rows.column_names import plain_name
from state_backend.adapters.rocks import EngineOptions
from state_backend.formats.paths import check_name
from state_backend.shard.changelog import ChangelogOptions
from state_backend.values.errors import UsageError
from state_backend.values.intervals import Interval, to_ms
from state_backend.values.key_groups import check_parallelism
from state_backend.values.records import Record
from state_backend.values.retention import RetentionPolicy, check_retention, default_retention
from state_backend.values.zones import zone_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, GroupedData, SparkSession
    from pyspark.sql.streaming import StatefulProcessor
    from pyspark.sql.types import StructType

    from cairn.arrow_processor import ArrowProcessor

__all__ = ["Interval", "OverTime", "Pipeline"]

Processor: TypeAlias = "type | Callable[[], Any] | StatefulProcessor | ArrowProcessor"
Source = Callable[["SparkSession", Interval], "DataFrame | tuple[DataFrame, dict[str, Any]]"]
Sink = Callable[["SparkSession | None", list[str], Interval, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One named stateful job.

    name: names the pipeline's folder under the root; letters, digits, ``_ . -``.
    start: the instant at which history begins. Only the interval that starts here starts from empty state.
    source: ``(spark, interval) -> DataFrame``, or with a JSON-able source position that the checkpoint records. If the
        position has ``counts.rows``, it must be the number of rows that reach the processor.
    key: column names, or plain columns as ``F.col("user")``; rows with equal values, nulls included, share state.
    processor: a PySpark ``StatefulProcessor``, unmodified: its class, an instance, a ``functools.partial`` of the class, or a
        function without parameters that returns one. As under Spark each task, and ``init`` on the driver, works on a copy of
        its own. Arguments count as code: they are values that can be pickled, or UsageError names the one that can't.
    api: which interface the processor implements: "row" (PySpark rows), "pandas" (DataFrames), or "arrow" (the tables of
        many keys; ``cairn.arrow_processor``).
    output_schema: of the rows that the processor yields: DDL or a ``StructType``.
    time_mode: "none", "processing" (the clock is the interval's end) or "event".
    event_time, watermark_delay, watermark: for "event": the timestamp column; how far behind the newest event a row may be;
        and whether the watermark follows the events seen ("observed": Spark's rule) or the interval's end ("interval").
    on_type_mismatch: what happens to a value that does not fit its state's schema. "error" stops the interval and names the state and
        the field. "null" stores NULL where Spark stores NULL without a word, and logs how many values of each field became NULL; for
        pipelines that come from Spark streaming. Row and pandas API.
    time_zone: the zone in which the processor runs, on every host: of naive datetimes in state and frames, and of TZ. Default:
        that of the Spark session (UTC through Airflow). Once an interval has run, another one must be named here.
    order_by: the rows of one key arrive sorted by these columns (default: the event time), then by all others, so their
        order is always the same.
    initial_state: ``(spark) -> DataFrame`` with the key columns and what ``handleInitialState`` is to get, or that grouped by the
        key, as Spark takes it; used in the interval that starts at ``start``, and only there.
    parallelism, max_parallelism: shards now, and key groups for ever.
    sink: ``(spark or None, output paths, interval, checkpoint id)``, called after the commit, idempotent by checkpoint id. Where it raises,
        its interval is tried again with each later checkpoint, and others go on; with ``sink_in_order`` later intervals wait.
        No paths: the interval has no output, or none any more, since an interval that is cut otherwise replaced it.
    changelog: in mode "changelog", how long changes stay segments until a checkpoint writes files.
    retention: which checkpoints stay: ``KeepLast``, ``KeepPerDay`` or ``KeepYounger``, put together by ``AnyOf`` and ``AllOf``. Each
        interval's commit records it, and everybody else's commits go by the newest record. Default: every interval of the last two
        days, the one that ends each day for 35 days, and ten in any case.
    engine: memory of each shard's RocksDB, when its files are merged, and the host's cache of them.
    expectations: ``() -> {state name: [Great Expectations expectations]}`` for validation; imported only there.
    expectations_over_time: ``() -> {state name: OverTime}``: what each state may have become since the checkpoint before.
    version: what people call this code, as in "2.1"; checkpoints record it, and it changes no result. Default: what ``git describe``
        says of the processor's folder, if it is in a repository.
    """

    name: str
    start: datetime
    source: Source
    key: Sequence[str | Column]
    processor: Processor
    output_schema: str | StructType
    api: Literal["row", "pandas", "arrow"] = "row"
    time_mode: Literal["none", "processing", "event"] = "processing"
    event_time: str | None = None
    watermark_delay: timedelta | None = None
    watermark: Literal["observed", "interval"] = "observed"
    on_type_mismatch: Literal["error", "null"] = "error"
    time_zone: str | None = None
    order_by: Sequence[str] = ()
    initial_state: Callable[[SparkSession], DataFrame | GroupedData] | None = None
    parallelism: int = 2
    max_parallelism: int = 128
    sink: Sink | None = None
    sink_in_order: bool = False
    expectations: Callable[[], Mapping[str, Sequence[Any]]] | None = None
    expectations_over_time: Callable[[], Mapping[str, OverTime]] | None = None
    engine: EngineOptions = field(default_factory=EngineOptions)
    changelog: ChangelogOptions = field(default_factory=ChangelogOptions)
    retention: RetentionPolicy | None = None
    version: str | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        self._check_start()
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
        ):
            if value not in known:
                raise UsageError(f"pipeline {self.name!r}: {name}={value!r} is not one of {', '.join(known)}")
        if self.api == "arrow" and self.on_type_mismatch == "null":
            raise UsageError(f"pipeline {self.name!r}: on_type_mismatch='null' needs api='row' or 'pandas'")
        if self.api == "arrow" and self.initial_state is not None:
            raise UsageError(f"pipeline {self.name!r}: initial_state needs api='row' or 'pandas'")
        if self.retention is not None:
            check_retention(self.retention, f"pipeline {self.name!r}: retention")
        if self.time_zone is not None:
            zone_of(self.time_zone)
        self._check_event_time()

    def _check_start(self) -> None:
        try:
            to_ms(self.start)
        except UsageError as error:
            raise UsageError(
                f"pipeline {self.name!r}: start: {error}, as in start=datetime(2024, 1, 1, tzinfo=UTC)"
            ) from None

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
                f"pipeline {self.name!r}: watermark_delay is {self.watermark_delay}, less than nothing; give 0 or more"
            )

    def retention_of(self, interval: Interval) -> RetentionPolicy:
        """What the commit of this interval records."""
        return self.retention or default_retention(interval.end - interval.start)

    def sink_hook(self, spark: SparkSession | None, root_url: str) -> Callable[[Record], None] | None:
        """The sink as the coordinator calls it, with one record."""
        sink = self.sink
        if sink is None:
            return None

        def hook(record: Record) -> None:
            files = [f"{root_url}/{f.handle.path}" for f in record.content.outputs if not f.late]
            sink(spark, files, record.content.interval, record.id)

        return hook
