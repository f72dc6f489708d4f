"""Answer questions about DataFrames of Spark Connect without a request to the server.

For a request, the server would analyse the whole plan and list the input files again, which takes tens of milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cairn.spark_versions import connect_plan, is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_RELATION = "spark.connect.Relation"
# Relations that read no other relation, and are never streaming.
_BATCH = frozenset({"local_relation", "cached_local_relation", "chunked_cached_local_relation", "range"})


def is_streaming(frame: DataFrame) -> bool:
    """Return True if the DataFrame is streaming. Ask the server only if the plan does not show the answer."""
    if is_connect(frame) and _is_batch(connect_plan(frame)):
        return False
    return bool(frame.isStreaming)


def _is_batch(relation: Any) -> bool:
    """Return True if a relation of Spark Connect's protocol is certainly not streaming.

    A table, a view or the result of an SQL text may be streaming: only the server knows.
    """
    kind = relation.WhichOneof("rel_type")
    if kind == "read":
        return relation.read.WhichOneof("read_type") == "data_source" and not relation.read.is_streaming
    if kind in _BATCH:
        return True
    below = [*_relations_below(relation)]
    return bool(below) and all(map(_is_batch, below))


def _relations_below(message: Any) -> Iterator[Any]:
    for part in parts_of(message):
        if part.DESCRIPTOR.full_name == _RELATION:
            yield part
        else:
            yield from _relations_below(part)


def parts_of(message: Any) -> Iterator[Any]:
    """Yield the messages that a protobuf message contains directly."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            yield from (part for part in value.values() if hasattr(part, "DESCRIPTOR"))
        elif hasattr(value, "DESCRIPTOR"):
            yield value
        else:
            yield from value
