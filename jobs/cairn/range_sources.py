"""Sources that return the rows of several intervals by one query. Importing this module does not import Spark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from state_backend.values.errors import SourceError
from state_backend.values.intervals import Interval

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["RangeSource", "range_source"]

INTERVAL = "cairn_interval"


@dataclass(frozen=True, slots=True)
class RangeSource:
    """A source that Cairn calls once for several intervals; make it with `range_source`.

    Attributes:
        function: `(spark, intervals) -> (DataFrame, positions)`, with one position for each interval.
    """

    function: Callable[..., tuple[DataFrame, Sequence[dict[str, Any]]]]

    def __call__(self, spark: SparkSession, interval: Interval) -> tuple[DataFrame, dict[str, Any]]:
        """Return (rows, position) of one interval, as a source for one interval does."""
        rows, (position,) = self._ask(spark, [interval])
        if INTERVAL in rows.schema.names:
            rows = rows.where(f"{number_of_interval([interval])} is not null").drop(INTERVAL)
        return rows, position

    def read(self, spark: SparkSession, intervals: Sequence[Interval]) -> tuple[DataFrame, Sequence[dict[str, Any]]]:
        """Return (rows, positions): a DataFrame with `cairn_interval` as last column, and a position for each interval.

        Raises:
            SourceError: The function's result has another form, or the rows have no TIMESTAMP column `cairn_interval`.
        """
        rows, positions = self._ask(spark, intervals)
        types = {field.name: field.dataType.simpleString() for field in rows.schema}
        if (found := types.pop(INTERVAL, "no such column")) != "timestamp":
            raise SourceError(
                f"the rows of a range_source need the column {INTERVAL}, a TIMESTAMP within the interval of the row; found {found}"
            )
        return rows.select(*(f"`{name.replace('`', '``')}`" for name in types), INTERVAL), positions

    def _ask(self, spark: SparkSession, intervals: Sequence[Interval]) -> tuple[Any, Sequence[dict[str, Any]]]:
        read: Any = self.function(spark, [*intervals])
        if not isinstance(read, tuple) or len(read) != 2 or not isinstance(read[1], list | tuple):
            raise SourceError("a range_source must return a DataFrame and a list with the position of each interval")
        if len(read[1]) != len(intervals):
            raise SourceError(f"the range_source returned {len(read[1])} positions for {len(intervals)} intervals")
        return read


def range_source(
    function: Callable[[SparkSession, Sequence[Interval]], tuple[DataFrame, Sequence[dict[str, Any]]]],
) -> RangeSource:
    """Make a source that reads several intervals by one query. Use this function as a decorator.

    It makes a run of many small intervals faster: Spark plans one query instead of a union of one for each interval.

    Args:
        function: `(spark, intervals) -> (DataFrame, positions)`. The intervals follow each other; often there is only
            one. The DataFrame holds the rows of all intervals. Its column `cairn_interval`, a TIMESTAMP, has an instant
            in the row's interval, such as the interval's start. For one interval, the column may be missing. Processors
            don't see the column. The positions are a list with the source position of each interval.

    Returns:
        A source for `Pipeline(source=...)`.

    Example:
        @range_source
        def read_clicks(spark, intervals):
            first, last = intervals[0].start, intervals[-1].end
            rows = spark.read.parquet("/data/clicks").where((F.col("landed") >= first) & (F.col("landed") < last))
            return rows.withColumn("cairn_interval", F.col("landed")), [{"until": str(i.end)} for i in intervals]
    """
    return RangeSource(function)


def number_of_interval(intervals: Sequence[Interval]) -> str:
    """Return an SQL expression for the index of a row's interval: four bytes, from 0. Rows outside raise an error.

    The indexes are bytes in an array. Spark compiles a query anew if an integer in it changes, but not for such bytes.
    """
    bounds = ", ".join(f"{at}L" for at in [*(one.start_ms * 1000 for one in intervals), intervals[-1].end_ms * 1000])
    numbers = ", ".join(f"X'{number:08x}'" for number in range(len(intervals)))
    passed = f"nullif(size(filter(array({bounds}), at -> at <= unix_micros({INTERVAL}))), 0)"
    said = f"a row of the source has a {INTERVAL} outside of the intervals that were asked for"
    return f"coalesce(try_element_at(array({numbers}), {passed}), cast(raise_error('{said}') as binary))"
