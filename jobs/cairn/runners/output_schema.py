"""Conversions of the output schema between Spark's types, Arrow's types and the JSON that a record holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.types import StructType

from cairn.spark_versions import from_arrow_schema, struct_of, to_arrow_schema
from state_backend.formats.types import UnsupportedType, parse_struct, walk
from state_backend.ports.storage import Storage
from state_backend.values.errors import CorruptRecord
from state_backend.values.handles import Handle


def arrow_schema(schema: dict[str, Any]) -> pa.Schema:
    arrow: pa.Schema = to_arrow_schema(struct_of(schema))
    return arrow


def recorded_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return an output's schema as a checkpoint's record has it: the one that Spark reads from the Parquet files.

    Parquet files keep neither collations nor user-defined type classes. So the result has neither.
    """
    return schema_in(arrow_schema(schema))


def schema_in(arrow: pa.Schema) -> dict[str, Any]:
    """Return the Spark schema, in Spark's JSON form, that matches an Arrow schema."""
    json: dict[str, Any] = from_arrow_schema(arrow).jsonValue()
    return json


def from_record(schema: dict[str, Any], where: str) -> StructType:
    """Return the Spark schema for its JSON form in a record. `where`: The place of the schema, for errors."""
    for path, found in walk(parse_struct(schema)):
        if isinstance(found, UnsupportedType) and not isinstance(found.to_json(), str):
            raise CorruptRecord(
                f"{where}: the recorded output schema has the type {found} at {path!r}, which Cairn never records"
            )
    return struct_of(schema)


def schema_of_file(storage: Storage, handle: Handle, local: Path) -> dict[str, Any]:
    storage.download(handle, local)
    return schema_in(pq.read_schema(local))
