"""The digest of rows: of their values alone, whatever their order, their batches, their buffers and their widths."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_backend.formats.content_digest import digest_of

AT = datetime(2024, 1, 1, tzinfo=UTC)
COLUMNS = {
    "int": pa.array([1, None, -7, 1], pa.int32()),
    "long": pa.array([2**62, None, 0, -1]),
    "byte": pa.array([1, None, -128, 2], pa.int8()),
    "yes": pa.array([True, None, False, True]),
    "float": pa.array([0.5, None, float("nan"), -0.5], pa.float32()),
    "double": pa.array([1e300, None, float("nan"), 0.1]),
    "decimal": pa.array([Decimal("1.50"), None, Decimal("-2.25"), Decimal("1e27")], pa.decimal128(38, 2)),
    "text": pa.array(["a", None, "", "äb" * 40]),
    "bytes": pa.array([b"\0", None, b"", b"x" * 33]),
    "day": pa.array([date(2024, 1, 1), None, date(1600, 3, 1), date(1970, 1, 1)]),
    "at": pa.array([AT, None, AT + timedelta(microseconds=1), AT], pa.timestamp("us", "UTC")),
    "local": pa.array([AT.replace(tzinfo=None), None, datetime(1900, 1, 1), datetime(2024, 1, 1)], pa.timestamp("us")),
    "time": pa.array([time(1, 2), None, time(23, 59), time(0)], pa.time64("us")),
    "length": pa.array([timedelta(1), None, timedelta(0), timedelta(-1)], pa.duration("us")),
    "list": pa.array([[1, 2], None, [], [2, 1]]),
    "lists": pa.array([[[1], [2, 3]], None, [[]], [[1, 2], [3]]]),
    "map": pa.array([[("a", 1), ("b", 2)], None, [], [("a", None)]], pa.map_(pa.string(), pa.int64())),
    "struct": pa.array([{"x": 1, "y": "q"}, None, {"x": None, "y": None}, {"x": 2, "y": ""}]),
    "void": pa.nulls(4),
}
ROWS = pa.table(COLUMNS)


def test_order_batches_and_parquet_do_not_count() -> None:
    whole = digest_of(ROWS)
    assert whole == digest_of(ROWS.take([3, 0, 2, 1])) != 0
    assert whole == sum(digest_of(ROWS.slice(n, 1)) for n in range(4)) % 2**64  # slices have offsets in their buffers
    assert digest_of(ROWS.slice(0, 0)) == 0
    sink = pa.BufferOutputStream()
    pq.write_table(ROWS, sink, row_group_size=1)
    assert digest_of(pq.read_table(pa.BufferReader(sink.getvalue())).cast(ROWS.schema)) == whole
    assert whole == 5592392944869298120  # the same with each version of PyArrow and NumPy


@pytest.mark.parametrize("name", [*COLUMNS])
def test_different_values_and_column_names_give_different_digests(name: str) -> None:
    rows = [digest_of(pa.table({name: COLUMNS[name].slice(n, 1)})) for n in range(4)]
    assert len({*rows}) == (1 if name == "void" else len({repr(value) for value in COLUMNS[name].to_pylist()}))
    assert digest_of(pa.table({"other": COLUMNS[name]})) != digest_of(pa.table({name: COLUMNS[name]}))


def test_a_wider_type_has_the_same_content_and_another_meaning_has_not() -> None:
    def digest(values: list[object], type_: pa.DataType) -> int:
        return digest_of(pa.table({"c": pa.array(values, type_)}))

    assert digest([1, None], pa.int32()) == digest([1, None], pa.int64())
    assert digest([0.5], pa.float32()) == digest([0.5], pa.float64())
    same = [AT], [AT.replace(tzinfo=None)], [1704067200000000]
    kinds = pa.timestamp("us", "UTC"), pa.timestamp("us"), pa.int64()
    assert len({digest([*values], kind) for values, kind in zip(same, kinds, strict=True)}) == 3
    pairs = [[("a", 1), ("b", 2)]], [[("b", 2), ("a", 1)]]
    assert len({digest([*pair], pa.map_(pa.string(), pa.int64())) for pair in pairs}) == 1
