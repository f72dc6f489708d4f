"""Limits on how a state may change from one checkpoint to the next.

Importing this module imports neither Spark nor Great Expectations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from state_backend.values.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeExpectations:
    """Expectations that compare a state of a checkpoint with the same state of its base.

    Attributes:
        least_rows: The fewest rows of the state, as a multiple of its rows in the base. 0.9 allows the loss of a tenth.
        most_rows: The most rows of the state, as a multiple of its rows in the base.
        no_row_lost: True requires that each row of the base still exists; its values may change. Rows that have
            expired, timers that have fired, and rows that match `removable` may be missing.
        removable: SQL condition that selects the rows of the base which the processor deletes on purpose, such as
            `"value.closed and key.region = 'eu'"`.
        pairs: Great Expectations expectations on a table that joins the states of base and checkpoint. Each row of
            either state has one row in this table.

    Example:
        ChangeExpectations(least_rows=0.9, most_rows=1.5, no_row_lost=True, removable="value.closed")

    Raises:
        UsageError: The limits contradict each other, or `removable` is given without `no_row_lost`.
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
            raise UsageError("removable allows some rows to be missing, so it needs no_row_lost=True")

    @property
    def needs_pairs(self) -> bool:
        """True if validation must join the base's state and the new state row by row.

        If false, validation only counts the rows of both states.
        """
        return self.no_row_lost or bool(self.pairs)
