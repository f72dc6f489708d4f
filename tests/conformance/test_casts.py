"""What Python values become in state, under Spark and under Cairn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conformance.casts import TYPES, Puts
from tests.conformance.generator import DIFFERENT, WRITTEN_ROWS
from tests.support.both_engines import run_both, run_under_cairn
from tests.support.spark_streaming import Case

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

# Stored right by Spark, so stored here, and read back as the same.
SAME = {
    "boolean": ["True", "np.bool_(True)", "None"],
    "tinyint": ["5", "np.int64(-128)"],
    "int": ["5", "np.int8(5)", "np.uint64(5)"],
    "bigint": ["2**63 - 1"],
    "float": ["1.5", "1.1", "np.float32(1.1)", "float('nan')", "-0.0"],
    "double": ["1.5", "np.float32(1.1)", "float('inf')", "-0.0"],
    "string": [
        *("'x'", "5", "np.int64(5)", "True", "D('1.50')", "D('1E+3')", "D('1E-7')", "1.5", "1e10", "1e-5", "-0.0"),
        *("123456789.125", "np.float32(1.1)", "np.str_('q')", "float('nan')", "float('inf')"),
    ],
    "binary": ["b'ab'", "'é'", "bytearray(b'x')"],
    "date": [
        *("date(2024, 1, 1)", "datetime(2024, 1, 1, 23, 59)", "pd.Timestamp('2024-01-01 05:00')", "date(1, 1, 1)"),
        *("datetime(2024, 1, 1, 23, tzinfo=timezone(timedelta(hours=-9)))", "np.datetime64('2024-01-01')"),
    ],
    "timestamp": [
        *("datetime(2024, 1, 1, 5, 6, 7, 8)", "datetime(2024, 1, 1, 5, tzinfo=UTC)", "datetime(1800, 1, 1)"),
        *("pd.Timestamp('2024-01-01', tz='Asia/Tokyo')", "np.datetime64('2024-01-01T05')"),
        "datetime(2024, 1, 1, 5, tzinfo=timezone(timedelta(hours=-9)))",
    ],
    "timestamp_ntz": [
        *("datetime(2024, 1, 1, 5, 6, 7, 8)", "datetime(2024, 1, 1, 5, tzinfo=timezone(timedelta(hours=-9)))"),
        "pd.Timestamp('2024-01-01', tz='Asia/Tokyo')",
    ],
    "decimal": ["D('1.50')", "D('1.555')", "D('-1.555')", "D('1.5549')", "D('1.545')", "D(5)"],
    "wide": ["D('1.5')", "D('1E-7')"],
    "array": ["['a']", "('a',)", "[1, True, None]", "None", "[]", "[D('1.0')]"],
    "map": ["{'a': 1}", "{5: 1}", "{}", "None", "{'a': None}", "{'a': np.int64(1)}"],
    "struct": ["(1, 'x')", "Row(a=1, b='x')", "{'a': 1, 'b': 'x'}", "{'b': 'x'}", "[1, 'x']", "Named(1, 'x')", "None"],
}
# Spark stores NULL or another value for these without a word; Cairn refuses them, naming state, field and value.
REFUSED = {
    "boolean": ["1", "'true'"],
    "tinyint": ["300", "-129"],
    "smallint": ["40000"],
    "int": ["True", "5.0", "'5'", "D(5)", "np.float64(5)"],
    "float": ["1e300", "D('1.5')"],
    "double": ["D('1.5')", "'1.5'", "True"],
    "string": ["b'ab'", "date(2024, 1, 1)", "[1, 2]", "(1,)", "{}"],
    "binary": ["5", "[1, 2]"],
    "date": ["'2024-01-01'", "5"],
    "timestamp": ["date(2024, 1, 1)", "5"],
    "timestamp_ntz": ["date(2024, 1, 1)"],
    "decimal": ["1.5", "'1.5'", "True"],
    "array": ["'ab'"],
    "map": ["{'a': True}", "[('a', 1)]"],
    "struct": ["('1', 2)"],
}
# Spark stores NULL, fails, or stores another value; Cairn stores what was meant.
TAKEN = {
    "double": [("1", "1.0")],
    "float": [("1", "1.0")],
    "decimal": [("5", "Decimal('5.00')")],
    "timestamp": [("pd.NaT", "None")],
    "date": [("date(1582, 10, 10)", "datetime.date(1582, 10, 10)")],
}
# Whole rows: any iterable is one by position.
ROWS = {
    "string": ["'x'", "iter(['g'])", "(c for c in 'x')", "{'q'}", "Row('q')", "Row(z='q')", "['q']", "deque(['q'])", "range(1)"],
    "pair": ["'xy'", "Row(b='1', a='2')", "Named('1', '2')", "iter('xy')", "['x', 'y']", "(None, 'x')"],
}  # fmt: skip
REFUSED_ROWS = {"string": ["5", "None"]}


# Values of one type in fields of every other type.
MISFITS = ["True", "300", "2**40", "2**63", "5.0", "'x'", "b'ab'", "D(5)", "date(2024, 1, 1)", "[[1]]", "{'a': [1]}"]


@pytest.mark.long("a quarter of a minute of Spark")
def test_python_values_in_state_match_spark_or_a_documented_difference(spark: SparkSession, tmp_path: Path) -> None:
    expectations = [
        *((name, f"({value},)", "same") for name, values in SAME.items() for value in values),
        *((name, f"({value},)", "refused") for name, values in REFUSED.items() for value in values),
        *((name, f"({value},)", result) for name, values in TAKEN.items() for value, result in values),
        *((name, row, "same") for name, rows in ROWS.items() for row in rows),
        *((name, row, "refused") for name, rows in REFUSED_ROWS.items() for row in rows),
        *((name, f"({value},)", "as Spark") for name in TYPES if name not in ("pair", "struct") for value in MISFITS),
        ("int", "pd.DataFrame({'a': ['x']})", "as Spark"),
    ]
    case = Case(
        processor=Puts,
        input_schema="n int, type string, expression string",
        output_schema="n int, type string, expression string, result string",
        key=("n",),
        order_by=("n",),
        batches=[[(n, name, expression) for n, (name, expression, _) in enumerate(expectations)]],
        states={},
    )
    both = run_both(spark, case, tmp_path)
    nulls, _records = run_under_cairn(
        *(spark, case, both.files, tmp_path / "nulls", both.spark.processing_times_ms), on_type_mismatch="null"
    )
    theirs, ours, nulled = (
        {row["n"]: row["result"] for row in engine.outputs[0]} for engine in (both.spark, both.cairn, nulls)
    )
    found = []
    for n, (name, expression, expected) in enumerate(expectations):
        # Spark's own answer is looked at too: the table in the docs is about it.
        refused_there = theirs[n].startswith("refused") or theirs[n].startswith("(None,)")
        if ours[n] == "refused: StateTypeError":
            # With on_type_mismatch="null" NULL, wherever it is inside the value, exactly where Spark has NULL.
            null_there = "None" in theirs[n] and not theirs[n].startswith("refused")
            if nulled[n] != (theirs[n] if null_there else ours[n]):
                found.append(f"{name} <- {expression}, NULL: Spark {theirs[n]}, Cairn {nulled[n]}")
        elif nulled[n] != ours[n]:
            found.append(f"{name} <- {expression}: {ours[n]}, and with NULLs {nulled[n]}")
        no_row = WRITTEN_ROWS in DIFFERENT and name == "struct" and theirs[n].startswith("refused")
        if expected == "as Spark" or (no_row and expression.startswith(("(Row(", "(Named("))):
            continue
        if expected == "same":
            right = ours[n] == theirs[n] and (
                expression == "(None,)" or not theirs[n].startswith(("refused", "(None,) "))
            )
        elif expected == "refused":
            right = ours[n] == "refused: StateTypeError" and theirs[n] != ours[n]
        else:
            right = ours[n].startswith(f"({expected},)") and (refused_there or theirs[n] != ours[n])
        if not right:
            found.append(f"{name} <- {expression}, {expected}: Spark {theirs[n]}, Cairn {ours[n]}")
    assert found == []
