"""The vectorised running aggregate that the benchmarks measure.

It has a module of its own, because the other processors do not need `cairn.aggregates`.
"""

from __future__ import annotations

from cairn.aggregates import Count, Max, Min, RunningAggregate, Sum

TOTALS_SCHEMA = "k bigint, n bigint, total bigint, low bigint, high bigint"


class Totals(RunningAggregate):
    n = Count()
    total = Sum("v")
    low = Min("v")
    high = Max("v")
