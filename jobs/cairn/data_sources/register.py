"""Registration of the formats `keyed_state` and `keyed_output` with a Spark session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cairn.data_sources.keyed_output import KeyedOutput
from cairn.data_sources.keyed_state import KeyedState

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register_data_sources(spark: SparkSession) -> None:
    """Register the formats `keyed_state` and `keyed_output` with a session. A second call changes nothing."""
    for source in (KeyedState, KeyedOutput):
        spark.dataSource.register(source)
