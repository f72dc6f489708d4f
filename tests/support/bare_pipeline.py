"""Pipelines of one processor, whose source nobody reads."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from cairn.pipeline import Pipeline

START = datetime(2024, 1, 1, tzinfo=UTC)


def bare_pipeline(processor: Any = object, **settings: Any) -> Pipeline:
    """Return a pipeline, by default with the key `k`. One of `object` never runs."""
    given: dict[str, Any] = {"name": "p", "start": START, "source": lambda spark, interval: None, "key": ["k"]}
    if processor is object:
        given["output_schema"] = "k string"
    return Pipeline(processor=processor, **given | settings)
