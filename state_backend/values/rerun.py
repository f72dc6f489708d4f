"""Which intervals have to be run again: what a refusal or a plan asks for, as a value.

State knows pipelines and intervals. The command that runs them belongs to whoever schedules them: `airflow_commands` renders it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from state_backend.values.errors import UsageError
from state_backend.values.intervals import from_ms, to_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """The intervals that start from ``first`` to ``last``, both included, in their order. ``replace_overlapping``: they take the
    place of output that is cut otherwise, and need that permission. UsageError if ``last`` is before ``first``."""

    first: datetime
    last: datetime
    replace_overlapping: bool = False

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            object.__setattr__(self, name, from_ms(to_ms(getattr(self, name))))
        if self.last < self.first:
            raise UsageError(f"nothing can be run again from {self.first.isoformat()} back to {self.last.isoformat()}")

    def as_json(self) -> dict[str, Any]:
        """For a result file; ``from_json`` is the inverse."""
        first, last = self.first.isoformat(), self.last.isoformat()
        return {"first": first, "last": last, "replace_overlapping": self.replace_overlapping}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Rerun:
        """The inverse of ``as_json``."""
        first, last = datetime.fromisoformat(fields["first"]), datetime.fromisoformat(fields["last"])
        return cls(first=first, last=last, replace_overlapping=fields["replace_overlapping"])
