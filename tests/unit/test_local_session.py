"""The stand-in for Spark: it reads what Spark would read, or says that Spark is needed."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cairn.replay.local_session import LocalFrame, LocalSession, NeedsSpark
from state_backend.formats.types import parse_struct
from state_backend.inspection.key_entries import SearchedKey
from state_backend.values.errors import StateTypeError
from tests.support.schema_json import struct

KEY = SearchedKey.of(("ann",), parse_struct(struct(k="string")), 16)
SESSION = LocalSession("UTC")


def write(folder: Path, name: str = "rows.parquet", **columns: Any) -> str:
    pq.write_table(pa.table(columns), folder / name, row_group_size=2)
    return f"file://{folder / name}"


def rows(frame: LocalFrame) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = frame.rows_of(KEY, ["k"]).table.to_pylist()
    return found


def test_the_rows_of_a_key_are_read_from_files(tmp_path: Path) -> None:
    at = pa.array([datetime(2024, 1, n, tzinfo=UTC) for n in (1, 2, 3)], pa.timestamp("us", "UTC"))
    first = write(tmp_path, k=["ann", "bob", "ann"], n=[1, 2, 3], at=at)
    frame = SESSION.read.parquet(first)
    assert frame.schema.simpleString() == "struct<k:string,n:bigint,at:timestamp>" and not frame.isStreaming
    assert [row["n"] for row in rows(frame)] == [1, 3]
    assert rows(frame.select("n", "k")) == [{"n": 1, "k": "ann"}, {"n": 3, "k": "ann"}]
    coarse = write(tmp_path, "coarse.parquet", k=["ann"], at=at[1:2].cast(pa.timestamp("ms", "UTC")))
    declared = SESSION.read.schema("k string, at timestamp, gone double").parquet(first, coarse)
    assert rows(declared) == [{"k": "ann", "at": at[day].as_py(), "gone": None} for day in (0, 2, 1)]


def test_a_frame_of_rows_keeps_its_types(tmp_path: Path) -> None:
    frame = SESSION.createDataFrame([("ann", Decimal("1.50"), date(2024, 1, 1))], "k string, d decimal(5,2), day date")
    assert rows(frame) == [{"k": "ann", "d": Decimal("1.50"), "day": date(2024, 1, 1)}]


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda s, path: s.sql("select 1"), "spark.sql"),
        (lambda s, path: s.read.json(path), "text files without a schema"),
        (lambda s, path: s.read.option("mergeSchema", "true").parquet(path), "options of Parquet files"),
        (lambda s, path: s.read.schema("k string").csv(path, sep=";"), "the options sep"),
        (lambda s, path: s.read.schema("k string, _corrupt_record string").json(path), "text files without a schema"),
        (lambda s, path: s.read.format("csv"), "spark.read.format"),
        (lambda s, path: s.read.parquet(path).where("n = 1"), "DataFrame.where"),
        (lambda s, path: s.read.parquet(path).select("*"), "select of expressions"),
        (lambda s, path: s.read.parquet(path).select("n", "n"), "select of expressions"),
        (lambda s, path: s.read.parquet("gs://bucket/rows.parquet"), "files of gs"),
        (
            lambda s, path: s.read.parquet(str(Path(path).parent).removeprefix("file:")),
            "is not the name of one local file",
        ),
        (lambda s, path: s.read.parquet(path.replace("rows", "*")), "is not the name of one local file"),
        (lambda s, path: rows(s.read.schema("k string, n int").parquet(path)), "column 'n' is int64 in the file"),
        (
            lambda s, path: s.read.schema("k string, n map<string, int>").parquet(path),
            "a column of type map<string,int>",
        ),
        (lambda s, path: s.read.schema("k nonsense").parquet(path), "nonsense"),
        (lambda s, path: s.createDataFrame([("ann",)]), "createDataFrame without a schema"),
        (lambda s, path: s.createDataFrame([("ann",)], "k map<string, int>"), "only Spark can sort"),
    ],
)
def test_unsupported_reads_and_methods_raise_needs_spark(tmp_path: Path, use: Any, says: str) -> None:
    path = write(tmp_path, k=["ann"], n=[1])
    with pytest.raises(NeedsSpark) as raised:
        use(SESSION, path)
    assert says in str(raised.value)


def test_files_that_spark_would_read_otherwise_need_spark(tmp_path: Path) -> None:
    nanos = write(tmp_path, "nanos.parquet", k=["ann"], at=pa.array([1], pa.timestamp("ns")))
    unsigned = write(tmp_path, "unsigned.parquet", k=["ann"], n=pa.array([1], pa.uint32()))
    other = write(tmp_path, "other.parquet", k=["ann"], m=[1])
    plain = write(tmp_path, "plain.parquet", k=["ann"], n=[1])
    for paths in ([nanos], [unsigned], [plain, other]):
        with pytest.raises(NeedsSpark):
            SESSION.read.parquet(*paths)


def test_a_key_column_of_another_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateTypeError, match="don't fit the recorded key"):
        rows(SESSION.read.parquet(write(tmp_path, k=[1], n=[1])))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", 'k,n\n"ann",1\n'),
        ("a.csv", "k,n\nan\\n,1\n"),
        ("a.csv", "k,n\nann,1,2\n"),
        ("a.csv", "k,n\nann\n"),
        ("a.csv", "k,n\nann,+1\n"),
        ("a.csv", "k,n\nann, 1\n"),
        ("a.csv", "k,n\nann,2147483648\n"),
        ("a.csv", "k\nann\r\n"),
        ("a.csv", "k\nann\n\n"),
        ("a.csv", "k,m\nann,1\n"),
        ("a.csv", "k,n\n\udcfc,1\n"),  # an ü in Latin-1
        ("a.csv.gz", "k,n\nann,1\n"),
        ("a.json", '{"k": "ann", "n": 1.0}\n'),
        ("a.json", '{"k": 5}\n'),
        ("a.json", '{"K": "ann"}\n'),
        ("a.json", '{"k": "ann", "k": "bob"}\n'),
        ("a.json", "{'k': 'ann'}\n"),
        ("a.json", '["ann"]\n'),
        ("a.json", '{"k": "ann", "n": NaN}\n'),
        ("a.json", '{"k": "ann"\n'),
        ("a.json", '{"k": "\\ud800"}\n'),
    ],
)
def test_an_ambiguous_text_file_needs_spark(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    reader = SESSION.read.schema("k string" if text.startswith("k\n") else "k string, n int").option("header", True)
    read = reader.csv if ".csv" in name else SESSION.read.schema("k string, n int").json
    with pytest.raises(NeedsSpark):
        read(f"file://{tmp_path / name}")


def test_a_plain_text_file_needs_no_spark(tmp_path: Path) -> None:
    (path := tmp_path / "a.csv").write_text("k,at\nann,2024-01-01 05:00:00\nbob,\n")
    berlin = LocalSession("Europe/Berlin").read.csv(f"file://{path}", schema="k string, at timestamp", header=True)
    assert rows(berlin) == [{"k": "ann", "at": datetime(2024, 1, 1, 4, tzinfo=UTC)}]
