"""The vectorised running aggregate that is measured. A module of its own: the other processors do not need the runtime's
aggregates."""

from __future__ import annotations

from cairn.aggregates import Count, Max, Min, RunningAggregate, Sum

TOTALS_SCHEMA = "k bigint, n bigint, total bigint, low bigint, high bigint"


class Totals(RunningAggregate):
    n = Count()
    total = Sum("v")
    low = Min("v")
    high = Max("v")
