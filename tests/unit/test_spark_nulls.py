"""NULL for values that do not fit a state: where Spark stores NULL, counted and logged; elsewhere the value is refused."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, timedelta
from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row

from cairn.testing import PipelineTester
from state_backend.formats.row_codec import RowCodec
from state_backend.formats.spark_nulls import MismatchCounts, nulling_encoder
from state_backend.formats.types import parse_struct
from state_backend.values.errors import ProcessorError, StateTypeError, UsageError
from tests.support.bare_pipeline import bare_pipeline
from tests.support.schema_json import array, mapping, struct

NESTED = struct(a="integer", s="string")
TYPES: dict[str, Any] = {
    "n": "integer",
    "b": "binary",
    "f": "float",
    "d": "decimal(10,2)",
    "s": "string",
    "day": "date",
    "list": array("integer"),
    "map": mapping("string", "integer"),
    "row": NESTED,
}


@pytest.mark.parametrize(
    ("name", "value", "stored"),
    [
        ("n", 5, 5),
        ("n", "5", None),
        ("n", True, None),
        ("n", 1 << 63, None),
        ("n", 1 << 40, "refused"),  # Spark stores the lowest 32 bits
        ("b", [1, 2], None),
        ("f", 1e300, "refused"),  # Spark stores infinity
        ("f", Decimal("1.5"), None),
        ("d", 1.5, None),
        ("d", Decimal("1e10"), "refused"),  # Spark fails
        ("s", (1,), "refused"),  # Spark stores the name of a Java object
        ("day", "2024-01-01", "refused"),  # Spark fails
        ("day", date(2024, 1, 1), date(2024, 1, 1)),
        ("list", [1, "x", None], [1, None, None]),
        ("list", "ab", None),
        ("list", b"ab", "refused"),  # Spark stores the bytes as numbers
        ("map", {"a": 1, "b": "x"}, {"a": 1, "b": None}),
        ("map", [("a", 1)], None),
        ("row", ("x", 2), (None, "2")),
        ("row", 5, "refused"),  # Spark fails
    ],
)
def test_null_is_stored_where_spark_stores_null(name: str, value: Any, stored: Any) -> None:
    field = {"name": name, "type": TYPES[name], "nullable": True, "metadata": {}}
    schema, counts = parse_struct({"type": "struct", "fields": [field]}), MismatchCounts()
    codec = RowCodec("total", schema, 1)
    encode = nulling_encoder("total", schema, UTC, codec.encode, counts)
    for row in ((value,), {name: value}, iter([value])):
        if stored == "refused":
            with pytest.raises(StateTypeError):
                encode(row)
        else:
            assert codec.decode(encode(row)) == (stored,)
    assert bool(counts.as_mapping()) == (stored not in ("refused", value))


class Remembers(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.last = handle.getValueState("last", "n int")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        for row in rows:
            self.last.update((row.text,))
            yield Row(k=key[0], n=self.last.get()[0])

    def close(self) -> None:
        pass


REMEMBERS = bare_pipeline(Remembers, output_schema="k string, n int")


def test_the_log_counts_the_values_that_became_null(caplog: pytest.LogCaptureFixture) -> None:
    days = {"input_schema": "k string, text string", "every": timedelta(days=1)}
    with pytest.raises(ProcessorError, match=r"expected int, found str '1'(?s:.*)on_type_mismatch='null'"):
        PipelineTester(REMEMBERS, **days).run([("a", "1")])
    tester = PipelineTester(replace(REMEMBERS, on_type_mismatch="null"), **days)
    with caplog.at_level("WARNING", "cairn"):
        done = tester.run([("a", "1"), ("b", "2"), ("c", "3")])
    assert {row["n"] for row in done.output} == {None}
    (told,) = [message for message in caplog.messages if "stored NULL" in message]
    assert (
        "stored NULL for 3 values that do not fit; the first: state 'last' field 'n': expected int, found str" in told
    )
    with pytest.raises(UsageError, match="on_type_mismatch='null' needs api='row' or 'pandas'"):
        replace(REMEMBERS, on_type_mismatch="null", api="arrow")
