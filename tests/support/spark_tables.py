"""The tables of a pipeline's state and output, as Spark reads them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.data_sources.keyed_output import KeyedOutput
from cairn.data_sources.keyed_state import KeyedState
from cairn.pipeline import Interval

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def state_table(
    spark: SparkSession, root: Path | str, state: str, *, pipeline: str = "counting", **more: str
) -> DataFrame:
    """``more``: options, such as ``checkpoint``."""
    spark.dataSource.register(KeyedState)
    options = {"root": str(root), "pipeline": pipeline, "state": state, **more}
    return spark.read.format("keyed_state").options(**options).load()


def output_rows(
    spark: SparkSession, root: Path, interval: Interval | None = None, *, pipeline: str = "counting", late: bool = False
) -> list[tuple[Any, ...]]:
    """The current output rows, or the late rows, of an interval or of all, sorted."""
    spark.dataSource.register(KeyedOutput)
    options = {"root": str(root), "pipeline": pipeline, "late": str(late).lower()}
    if interval is not None:
        options |= {"start": interval.start.isoformat(), "end": interval.end.isoformat()}
    return sorted(map(tuple, spark.read.format("keyed_output").options(**options).load().collect()), key=str)
