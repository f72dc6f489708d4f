"""The declaration of a pipeline: what a user writes beside the processor. Importing it imports no Spark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from state_backend.adapters.rocks import EngineOptions
from state_backend.formats.paths import check_name
from state_backend.values.errors import UsageError
from state_backend.values.intervals import Interval, to_ms
from state_backend.values.key_groups import check_parallelism
from state_backend.values.records import Record

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Interval", "Pipeline"]

Source = Callable[["SparkSession", Interval], "DataFrame | tuple[DataFrame, dict[str, Any]]"]
Sink = Callable[["SparkSession | None", list[str], Interval, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One named stateful job.

    name: names the pipeline's folder under the root; letters, digits, ``_ . -``.
    start: the instant at which history begins. Only the interval that starts here starts from empty state.
    source: ``(spark, interval) -> DataFrame``, or with a JSON-able source position that the checkpoint records. If the
        position has ``counts.rows``, it must be the number of rows that reach the processor.
    key: column names; rows with equal values, nulls included, share state.
    processor: a PySpark ``StatefulProcessor`` class, unmodified.
    api: which of its interfaces the processor implements: "row", "pandas" or "arrow".
    output_schema: DDL of the rows that the processor yields.
    time_mode: "none", "processing" (the clock is the interval's end) or "event".
    order_by: the rows of one key arrive sorted by these columns, then by all others, so their order is always the same.
    parallelism, max_parallelism: shards now, and key groups for ever.
    sink: ``(spark or None, output paths, interval, checkpoint id)``, called after the commit, idempotent by checkpoint id.
    expectations: ``() -> {state name: [Great Expectations expectations]}`` for validation; imported only there.
    """

    name: str
    start: datetime
    source: Source
    key: Sequence[str]
    processor: type
    output_schema: str
    api: Literal["row", "pandas", "arrow"] = "row"
    time_mode: Literal["none", "processing", "event"] = "processing"
    event_time: str | None = None
    watermark_delay: timedelta | None = None
    watermark: Literal["observed", "interval"] = "observed"
    order_by: Sequence[str] = ()
    parallelism: int = 2
    max_parallelism: int = 128
    sink: Sink | None = None
    expectations: Callable[[], Mapping[str, Sequence[Any]]] | None = None
    engine: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        check_name(self.name)
        to_ms(self.start)
        check_parallelism(self.parallelism, self.max_parallelism)
        if not self.key or len(set(self.key)) != len(self.key):
            raise UsageError(
                f"pipeline {self.name!r}: key must name one or more different columns, not {list(self.key)!r}"
            )
        if self.api != "row":
            raise UsageError(f"pipeline {self.name!r}: api={self.api!r} is not built yet; use 'row'")
        if self.time_mode == "event":
            raise UsageError(f"pipeline {self.name!r}: time_mode='event' is not built yet; use 'processing' or 'none'")

    def sink_hook(self, spark: SparkSession | None, root_url: str) -> Callable[[Record], None] | None:
        """The sink as the coordinator calls it, with one record."""
        sink = self.sink
        if sink is None:
            return None

        def hook(record: Record) -> None:
            files = [f"{root_url}/{f.handle.path}" for f in record.content.outputs if not f.late]
            sink(spark, files, record.content.interval, record.id)

        return hook
