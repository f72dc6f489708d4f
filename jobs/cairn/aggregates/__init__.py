"""A ready-made processor that keeps running aggregates per key.

It outputs a row for each key that has rows in the interval. The aggregates cover all intervals so far.

    class DelayTotals(RunningAggregate):
        flights = Count()
        delay = Sum("arr_delay")
        worst = Max("arr_delay")
        mean = Mean("arr_delay")
        last_dest = Last("dest")
        carriers = ApproxDistinct("carrier", relative_error=0.02)

Nulls are ignored as in SQL: a sum, minimum, maximum or mean of no values is null.

Doubles are added one by one in the order of the rows, never as partial sums. So the boundaries of batches and intervals
do not change even the last bit of a result.

The state is one value state `aggregates` with the fields `<aggregate>_<part>`. An aggregate that is declared later
starts empty and leaves the other aggregates as they are.
"""

from cairn.aggregates.definitions import (
    Aggregate,
    ApproxDistinct,
    Count,
    First,
    Last,
    Max,
    Mean,
    Min,
    StdDev,
    Sum,
    Variance,
)
from cairn.aggregates.running_aggregate import RunningAggregate

__all__ = [
    "Aggregate",
    "ApproxDistinct",
    "Count",
    "First",
    "Last",
    "Max",
    "Mean",
    "Min",
    "RunningAggregate",
    "StdDev",
    "Sum",
    "Variance",
]
