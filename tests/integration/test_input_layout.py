"""How the input lies in files is nobody's business: the same rows give the same output and the same state."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.both_engines import run_under_cairn
from tests.support.differential_processors import (
    KEY,
    RESULT_SCHEMA,
    SCRIPT_SCHEMA,
    SCRIPT_STATES,
    Scripted,
    random_script,
)
from tests.support.spark_streaming import Case, write_batches

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

ENDS_MS = [1_704_067_200_000 + n * 3_600_000 for n in range(4)]


def test_split_merged_and_shuffled_files_give_the_same_rows_and_digest(spark: SparkSession, tmp_path: Path) -> None:
    """Three rows of a key share each ``seq``, and what they do depends on their order, which is that of their columns."""
    script = random_script(7, keys=9, ops=30, batches=len(ENDS_MS), prefixes=("", "long_"))
    case = Case(
        processor=Scripted,
        input_schema=SCRIPT_SCHEMA,
        output_schema=RESULT_SCHEMA,
        key=KEY,
        batches=[[(a, b, seq // 3, ts, op) for a, b, seq, ts, op in rows] for rows in script],
        states=SCRIPT_STATES,
    )
    whole = write_batches(spark, case, tmp_path / "whole")
    layouts = {"whole": whole} | {
        f"{parts} files": [_scattered(file, tmp_path / f"{parts}-{file.stem}", parts) for file in whole]
        for parts in (2, 7)
    }
    found = {}
    for name, files in layouts.items():
        outcome, records = run_under_cairn(spark, case, files, tmp_path / f"root {name}", ENDS_MS)
        found[name] = [
            (record.content.digest, rows, [f.handle.crc32c for f in record.content.outputs])
            for record, rows in zip(records, outcome.outputs, strict=True)
        ]
    assert found["2 files"] == found["whole"]
    assert found["7 files"] == found["whole"]
    assert len({digest for digest, *_ in found["whole"]}) == len(ENDS_MS)
    assert sum(len(rows) for _, rows, _ in found["whole"]) > 540


def _scattered(file: Path, folder: Path, parts: int) -> Path:
    """The rows of a file in another order, in several files."""
    table = pq.read_table(file)
    order: Sequence[int] = random.Random(parts).sample(range(table.num_rows), table.num_rows)
    folder.mkdir()
    for part in range(parts):
        pq.write_table(table.take(pa.array(order[part::parts], pa.int64())), folder / f"{parts - part:05d}.parquet")
    return folder
