"""A forgotten key on Spark: the next interval, and a re-run that leaves the key out; what holds without Spark is in tests/unit/test_erase.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from cairn.command.cli import app
from cairn.operations.intervals.run_interval import run_interval
from tests.support.counting import FEW_ROWS, counting, day, fresh_days
from tests.support.reading import read_output, read_state

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

PIPELINE = counting()


days = fresh_days({0: FEW_ROWS[0], 1: [("ann", "pear", 3), ("bob", "fig", 1)]})


@pytest.mark.parametrize("key", ["ann", None])
def test_a_re_run_on_spark_leaves_the_key_out(spark: SparkSession, tmp_path: Path, key: str | None) -> None:
    root, folder = str(tmp_path / "state"), tmp_path / "state" / PIPELINE.name
    for n in (0, 1):
        run_interval(spark, PIPELINE, day(n), root)
    words = ["erase", "--root", root, "--pipeline", PIPELINE.name, json.dumps({"user": key})]
    done = CliRunner().invoke(app, [*words, "--on-rerun", "filter", "--drop-checkpoints", "--rewrite-output", "--yes"])
    assert done.exit_code == 0, done.output
    records = [run_interval(spark, PIPELINE, day(n), root) for n in (0, 1)]
    others = {("ann",), ("bob",), (None,)} - {(key,)}
    assert {*read_state(folder, records[-1], "total", tmp_path / "work")} == others
    assert all(row["user"] != key for record in records for row in read_output(folder, record))
    assert records[0].content.totals.input_rows == 4 and len(records[0].content.filtered) == 1
    following = run_interval(spark, PIPELINE, day(2), root)
    assert following.content.base_id == records[-1].id and following.content.filtered == ()
