"""Questions about DataFrames of Spark Connect that cost no request: streaming, and the columns of routed rows."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark.sql.connect.proto")

from pyspark.sql.connect.proto import relations_pb2
from pyspark.sql.types import LongType, StructField, StructType

from cairn.rows.connect_frames import is_streaming
from cairn.spark_versions import with_schema


class Frame:
    """A frame of Spark Connect with a plan. The server says that the frame is streaming."""

    __module__ = "pyspark.sql.connect.dataframe"

    def __init__(self, relation: Any) -> None:
        self._plan = SimpleNamespace(plan=lambda client: relation)
        self.sparkSession = SimpleNamespace(client=None)
        self._cached_schema: Any = None
        self.asked = 0

    @property
    def isStreaming(self) -> bool:
        self.asked += 1
        return True


def file(relation: Any, *, streaming: bool = False) -> None:
    relation.read.data_source.format = "parquet"
    relation.read.is_streaming = streaming


def union(*parts: Callable[[Any], None]) -> Any:
    relation = relations_pb2.Relation()
    sides = (relation.project.input.set_op.left_input, relation.project.input.set_op.right_input)
    for part, side in zip(parts, sides, strict=True):
        part(side)
    return relation


def local(relation: Any) -> None:
    relation.local_relation.data = b"rows"


def table(relation: Any) -> None:
    relation.read.named_table.unparsed_identifier = "perhaps_a_view_of_a_stream"


def sql(relation: Any) -> None:
    relation.sql.query = "select 1"


def stream(relation: Any) -> None:
    file(relation, streaming=True)


def joined_with_a_stream(relation: Any) -> None:
    file(relation.join.left)
    stream(relation.join.right)


def unknown(relation: Any) -> None:
    """A relation without input of a later release of Spark."""
    relation.cached_remote_relation.relation_id = "1"


@pytest.mark.parametrize("other", [file, local])
def test_a_frame_of_files_and_local_rows_costs_no_request(other: Callable[[Any], None]) -> None:
    frame: Any = Frame(union(file, other))
    assert not is_streaming(frame)
    assert frame.asked == 0


@pytest.mark.parametrize("other", [table, sql, stream, joined_with_a_stream, unknown])
def test_the_server_is_queried_unless_the_plan_shows_only_files_and_local_rows(other: Callable[[Any], None]) -> None:
    frame: Any = Frame(union(file, other))
    assert is_streaming(frame)
    assert frame.asked == 1


def test_a_classic_frame_reports_streaming_itself_and_gets_no_cached_schema() -> None:
    classic: Any = SimpleNamespace(isStreaming=True, sparkSession=SimpleNamespace())
    assert is_streaming(classic)
    schema = StructType([StructField("n", LongType())])
    assert with_schema(classic, schema) is classic and not hasattr(classic, "_cached_schema")


def test_a_frame_of_connect_takes_the_schema() -> None:
    frame: Any = Frame(relations_pb2.Relation())
    schema = StructType([StructField("n", LongType())])
    assert with_schema(frame, schema)._cached_schema is schema
