"""What an owner expects of a state beside the one before it. Importing this imports neither Spark nor Great Expectations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from state_backend.values.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class OverTime:
    """Expectations of one state of a checkpoint, given the checkpoint that it started from.

    least_rows, most_rows: bounds of the number of rows, as multiples of what it was before (0.9: at most a tenth less).
    no_row_lost: a row that was there is there still, by its key and user key or position. What has expired since may be
        gone, and so may rows for which ``removable`` holds.
    removable: an SQL condition on the row as it was, as in ``"value.closed and key.region = 'eu'"``: what the processor removes on
        purpose. The state itself does not tell a removal from a loss.
    pairs: Great Expectations expectations on the two states side by side, a row for each row of either: ``key_<field>``,
        ``user_key_<field>``, ``position``, ``before_<field>`` and ``now_<field>`` of the value, ``before_expires_at``,
        ``now_expires_at``, and ``fate``: kept, new, expired, removed or lost.
    """

    least_rows: float | None = None
    most_rows: float | None = None
    no_row_lost: bool = False
    removable: str | None = None
    pairs: Sequence[Any] = ()

    def __post_init__(self) -> None:
        low, high = self.least_rows, self.most_rows
        if (low is not None and low < 0) or (high is not None and high < (low or 0)):
            raise UsageError(f"least_rows={low} and most_rows={high}: expected 0 <= least_rows <= most_rows")
        if self.removable is not None and not self.no_row_lost:
            raise UsageError("removable says which rows may be lost, so it needs no_row_lost=True")

    @property
    def needs_pairs(self) -> bool:
        """Whether the two states have to be joined, and not only counted."""
        return self.no_row_lost or bool(self.pairs)
