"""The decision of a table sink: which rows of the table does one call of the sink replace?"""

from __future__ import annotations

from collections.abc import Mapping

from state_backend.values.intervals import Interval


def plan_publication(
    stored: Mapping[Interval, int], interval: Interval, checkpoint_id: int, *, is_replaced: bool = False
) -> frozenset[Interval] | None:
    """Return the intervals whose rows the call deletes; None if the call must change nothing.

    A call is old in two cases. The table has this checkpoint or a newer checkpoint of the interval. Or an overlapping interval
    has a newer checkpoint, which replaced this output.

    A call that is not old deletes the rows of its interval, and the rows of overlapping intervals with an older checkpoint. Rows
    of the same checkpoint stay: a commit of an hour that replaces a day makes one call for the hour and one for the day.

    The call for a replaced interval deletes only this interval's rows, and newer checkpoints of other intervals do not make the
    call old. Otherwise the call for the day could delete the hour's old rows before the call for the hour inserts the new rows.

    Args:
        stored: The newest checkpoint of each interval in the table; at least of the intervals that overlap.
        interval: The interval of the call.
        checkpoint_id: The checkpoint of the call.
        is_replaced: True if the commit of another interval replaced the interval's output.
    """
    near = {other: n for other, n in stored.items() if other.overlaps(interval)}
    if near.pop(interval, 0) >= checkpoint_id:
        return None
    if is_replaced:
        return frozenset({interval})
    if any(n > checkpoint_id for n in near.values()):
        return None
    return frozenset({interval, *(other for other, n in near.items() if n < checkpoint_id)})
