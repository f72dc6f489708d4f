"""`cairn replay` of a source that needs Spark: Spark only filters the rows of the key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from cairn.operations.intervals.plan_interval import in_zone_of
from cairn.operations.intervals.run_interval import run_interval
from cairn.pipeline import Interval
from cairn.replay.local_session import LocalSession
from cairn.replay.replay_key import replay_key
from state_backend.formats.types import parse_struct
from state_backend.inspection.key_entries import SearchedKey
from tests.support.accounts import SCHEMA, accounts, days_of, position_of
from tests.support.checkpoints import day

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
_KEY_FIELD = {"name": "k", "type": "string", "nullable": True, "metadata": {}}
ANN = SearchedKey.of(("ann",), parse_struct({"type": "struct", "fields": [_KEY_FIELD]}), 16)


def read_with_spark(spark: Any, interval: Interval) -> Any:
    rows = spark.createDataFrame(
        [(*row, {"n": row[1]}) for row in days_of(interval)], f"{SCHEMA}, more map<string, long>"
    )
    return rows.where("amount > 0"), position_of(interval)


TEXT_SCHEMA = "k string, s string, n int, l bigint, h smallint, d double, b boolean, day date, at timestamp"
# The clock of New York skips the second time, and shows the third one twice.
TIMES = (
    "2024-01-05 06:07:08",
    "2024-03-10 02:30:00.5",
    "2024-11-03T01:30:00",
    "2024-01-01T00:00:00.123456Z",
    "1999-12-31 23:59:59+05:30",
)
CSV = "k,s,n,l,h,d,b,day,at\n" + "".join(
    f"ann,{s},{n},{big},{h},{d},{b},{day},{at}\n"
    for s, n, big, h, d, b, day, at in (
        ("two words", 5, 2**63 - 1, -(2**15), "0.1", "true", "2024-02-29", TIMES[0]),
        ("'single'", -7, -(2**63), "007", "-12345678901234567.25", "false", "1970-01-01", TIMES[1]),
        (" spaces ", "-0", 0, 0, 3, "true", "2099-12-31", TIMES[2]),
        ("", "", "", "", "", "", "", TIMES[3]),
        ("ünïcode", 2**31 - 1, 1, 1, "1.7976931348623157", "false", "2000-01-01", TIMES[4]),
    )
)
JSON = "".join(
    f'{{"k": "ann", {more}, "at": "{at}"}}\n'
    for more, at in zip(
        (
            '"s": "", "n": 5, "l": 9223372036854775807, "h": -32768, "d": 1e-7, "b": true, "day": "2024-02-29"',
            '"s": "a\\n\\u00fc\\"b", "n": -7, "d": 3, "b": false, "other": {"x": [1]}',
            '"s": null, "n": null, "d": 0.1, "day": "1970-01-01"',
            '"d": 123456789012345.678, "b": null',
            '"s": "x", "h": 32767, "l": -9223372036854775808',
        ),
        TIMES,
        strict=True,
    )
)


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
@pytest.mark.parametrize(("name", "text"), [("rows.csv", CSV), ("rows.json", JSON)], ids=["csv", "json"])
def test_the_local_session_reads_csv_and_json_as_spark_does(
    spark: SparkSession, tmp_path: Path, name: str, text: str, zone: str
) -> None:
    (tmp_path / name).write_text(text)

    def read(session: Any) -> Any:
        reader = session.read.schema(TEXT_SCHEMA).option("header", True).option("mode", "FAILFAST")
        return (reader.csv if name.endswith("csv") else session.read.schema(TEXT_SCHEMA).json)(
            f"file://{tmp_path / name}"
        )

    with in_zone_of(spark, zone):
        wanted = read(spark).toArrow()
    found = read(LocalSession(zone)).rows_of(ANN, ["k"]).table
    # As numbers: Python calls two datetimes of different zones unequal in the hour that a clock repeats.
    instants = [table.column("at").cast(pa.int64()).to_pylist() for table in (found, wanted)]
    assert len(found) == 5 and instants[0] == instants[1]
    assert found.drop(["at"]).to_pylist() == wanted.drop(["at"]).to_pylist()


def test_replay_uses_spark_for_rows_that_only_spark_can_order(spark: SparkSession, tmp_path: Path) -> None:
    pipeline = replace(accounts(source=read_with_spark), parallelism=1)
    for n in (1, 2, 3):
        run_interval(spark, pipeline, day(n), f"file://{tmp_path}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for key, n, rows in (("ann", 2, 2), ("carl", 3, 0), ("dora", 2, 0)):
        found = replay_key(pipeline, key, day(n), f"file://{tmp_path}", spark=lambda: spark)
        assert (found.same, found.reasons, found.planned.with_spark) == (True, (), True), found.comparison
        assert len(found.planned.rows()) == rows
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
