"""Generated processors that change all that they yielded, stored, read or received, under Spark and here: no difference.

A sample of 75 programs; with CAIRN_TESTS=all all 2,000: ``CAIRN_TESTS=all pytest tests/conformance/test_mutations.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conformance.mutations import run_columns, run_query
from tests.support.tiers import ALL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LONG = ALL
# 1,600 programs in eight queries, four of each API, and 400 of the vectorised API.
PROGRAMS, SEEDS, COLUMNS = (200, range(4), range(400)) if LONG else (30, range(1), range(15))


@pytest.mark.long("half a minute of Spark")
@pytest.mark.spark
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("api", ["row", "pandas"])
def test_mutating_processors_give_what_spark_gives(spark: SparkSession, tmp_path: Path, api: str, seed: int) -> None:
    programs, rows, differences = run_query(spark, api, seed, PROGRAMS, tmp_path)
    assert differences == [], "\n".join(line[:1000] for line in differences[:20])
    assert programs == PROGRAMS and rows > 10 * PROGRAMS


def test_mutating_arrow_processors_give_unchanged_results() -> None:
    assert run_columns(COLUMNS) == []
