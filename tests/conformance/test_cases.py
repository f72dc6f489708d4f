"""Keys of every type, initial states, nested outputs and deleted states, under Spark and here."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance import cases
from tests.support.both_engines import run_both
from tests.support.spark_streaming import Case, skip_on

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

AT = datetime(2024, 3, 10, 7, 30, 0, 123456, tzinfo=UTC)
KEY = (5, 2**40, 0.5, 0.25, date(2024, 3, 10), AT, Decimal("1.50"), b"\x00\xff", True, "one")
NULLS = (*(None,) * (len(KEY) - 1), "nulls")
NUMBERS_NULL = (None, None, None, None, *KEY[4:-1], "numbers")
TIMED = [[(0, *KEY), (1, *KEY), (2, *NULLS)], [(0, *KEY), (1, *NUMBERS_NULL), (2, *NULLS)]]


def keys(processor: type, api: str, batches: Any) -> Case:
    return Case(
        processor=processor,
        input_schema=f"seq int, {cases.KEY_TYPES}",
        output_schema="s string, out string",
        key=cases.KEY_NAMES,
        batches=batches,
        states={},
        api=api,
    )


def by_k(processor: type, api: str, **changes: Any) -> Case:
    given: dict[str, Any] = {
        "input_schema": "seq int, k string, n int",
        "output_schema": "k string, out string",
        "batches": [[(0, "a", 5), (1, "a", 6), (2, "b", 1), (3, "", 0)], [(0, "b", 7), (1, "c", 2)]],
        "states": {},
    }
    return Case(processor=processor, key=["k"], api=api, **{**given, **changes})


def initial(processor: type, api: str) -> Case:
    rows = [("a", 100, "x"), ("only", 7, "é"), ("c", 3, "y")]
    return by_k(processor, api, initial_schema="k string, start int, s string", initial=rows, states={"all": "list"})


def outputs(processor: type, api: str) -> Case:
    rows = [[(0, "a", 1, 0.5, date(2024, 1, 1), AT), (1, "a", 2, None, None, AT), (2, "b", None, 1.5, None, None)]]
    return by_k(
        processor,
        api,
        input_schema="seq int, k string, n bigint, x double, day date, t timestamp",
        output_schema=cases.COMPOSITE_OUTPUT,
        batches=rows * 2,
    )


CASES = {
    "row-keys": keys(cases.Keys, "row", TIMED),
    # Spark files the state of a null number under NaN, once for each row; see the docs.
    "pandas-keys": keys(cases.KeysInFrames, "pandas", [[row for row in rows if row[-1] == "one"] for rows in TIMED]),
    "pandas-equal": keys(cases.Equal, "pandas", [[(0, *KEY), (1, *KEY)]]),
    "row-initial": initial(cases.Initial, "row"),
    "pandas-initial": initial(cases.InitialInFrames, "pandas"),
    "row-outputs": outputs(cases.Outputs, "row"),
    "pandas-outputs": outputs(cases.OutputsInFrames, "pandas"),
    "row-deleting": by_k(cases.Deleting, "row"),
    "pandas-deleting": by_k(cases.DeletingInFrames, "pandas"),
}
# Each case takes two queries. These cases show least that other tests do not show.
LONG = {
    "pandas-keys",
    "row-keys",
    "row-outputs",
    "row-initial",
    "pandas-outputs",
    "pandas-initial",
    "pandas-deleting",
    "pandas-equal",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long("two queries of Spark for each case")) if name in LONG else name
        for name in CASES
    ],
)
def test_each_case_gives_what_sparks_operator_gives(spark: SparkSession, tmp_path: Path, name: str) -> None:
    if name in ("pandas-initial", "pandas-keys"):
        skip_on("4.0", "elements of lists and keys of frames are NumPy's numbers")
    both = run_both(spark, CASES[name], tmp_path)
    assert all(both.spark.outputs), "Spark emitted nothing"
    differences = both.differences()
    assert differences == [], "\n".join(differences)


def test_zeros_as_user_keys_are_one_entry_here_and_two_under_spark(spark: SparkSession, tmp_path: Path) -> None:
    """docs/compared-with-spark.md names the difference."""
    both = run_both(spark, by_k(cases.ZerosInMaps, "row", batches=[[(0, "a", 1)]]), tmp_path)
    assert [row["out"] for row in both.cairn.outputs[0]] == ["[('0.0', 2)]"]
    assert [row["out"] for row in both.spark.outputs[0]] == ["[('-0.0', 2), ('0.0', 1)]"]
