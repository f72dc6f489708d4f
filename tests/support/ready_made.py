"""Ready-made processors without Spark: rows at times, and what a processor makes of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from cairn.testing import PipelineTester
from tests.support.bare_pipeline import bare_pipeline

DAY = datetime(2024, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
TIMED = {"time_mode": "event", "event_time": "at", "watermark_delay": 2 * HOUR, "watermark": "interval"}


def at(hour: int, minute: int = 0) -> datetime:
    return DAY + timedelta(hours=hour, minutes=minute)


def declared(base: type, **settings: Any) -> type:
    return type("Mine", (base,), settings)


def ready(processor: Any, schema: str, **settings: Any) -> PipelineTester:
    made = {"name": "ready", "start": DAY, "api": "arrow", "key": ["user"], "order_by": ["seq"], **settings}
    return PipelineTester(bare_pipeline(processor, **made), input_schema=schema)


def seqs(rows: list[dict[str, Any]], *names: str) -> list[Any]:
    """Return the rows' numbers, or tuples of the number and other columns."""
    return sorted((row["seq"], *(row[name] for name in names)) if names else row["seq"] for row in rows)
