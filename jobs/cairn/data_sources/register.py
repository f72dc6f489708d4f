"""Making a session know ``format("keyed_state")`` and ``format("keyed_output")``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cairn.data_sources.keyed_output import KeyedOutput
from cairn.data_sources.keyed_state import KeyedState

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Registers both data sources with this session, classic or Connect. Calling it again changes nothing."""
    for source in (KeyedState, KeyedOutput):
        spark.dataSource.register(source)
