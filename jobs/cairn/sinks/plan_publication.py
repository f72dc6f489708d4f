"""The decision of a table sink: which rows of the table does one call of the sink replace?"""

from __future__ import annotations

from collections.abc import Mapping

from state_backend.values.intervals import Interval


def plan_publication(
    stored: Mapping[Interval, int], interval: Interval, checkpoint_id: int
) -> frozenset[Interval] | None:
    """Return the intervals whose rows the call deletes; None if the call must change nothing.

    A call is old if the table has an equal or newer checkpoint of the interval, or a newer checkpoint of an overlapping interval:
    the checkpoint that replaced the call's output. A call replaces the rows of overlapping intervals that are older. Rows of
    the same checkpoint stay: one commit can have a call for its own interval, and a call for each interval that it replaced.

    Args:
        stored: The newest checkpoint of each interval in the table; at least of the intervals that overlap.
        interval: The interval of the call.
        checkpoint_id: The checkpoint of the call.
    """
    near = {other: n for other, n in stored.items() if other.overlaps(interval)}
    if near.pop(interval, 0) >= checkpoint_id or any(n > checkpoint_id for n in near.values()):
        return None
    return frozenset({interval, *(other for other, n in near.items() if n < checkpoint_id)})
