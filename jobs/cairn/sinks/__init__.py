"""Sinks that keep a table of another system equal to a pipeline's output.

Example:
    Pipeline(..., sink=sinks.delta("file:///data/tables/clicks"))
"""

from __future__ import annotations

from cairn.sinks.bigquery import bigquery
from cairn.sinks.delta import delta
from cairn.sinks.iceberg import iceberg
from cairn.sinks.postgres import postgres
from cairn.sinks.table_sink import TableSink

__all__ = ["TableSink", "bigquery", "delta", "iceberg", "postgres"]
