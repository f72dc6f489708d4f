"""The schema of output files, in Spark's, Arrow's and the record's terms."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from state_backend.formats.types import UnsupportedType, parse_struct, walk
from state_backend.ports.storage import Storage
from state_backend.values.errors import CorruptRecord
from state_backend.values.handles import Handle


def struct_of(schema: dict[str, Any]) -> StructType:
    """PySpark changes the JSON of collated strings that it reads, and then can't read it again; so it gets a copy."""
    return StructType.fromJson(copy.deepcopy(schema))


def arrow_schema(schema: dict[str, Any]) -> pa.Schema:
    """Of the Parquet files that are written for a Spark schema."""
    arrow: pa.Schema = to_arrow_schema(struct_of(schema), timezone="UTC", prefers_large_types=False)
    return arrow


def recorded_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as the files have it and as it is recorded: without collations and classes, which files do not keep."""
    return schema_in(arrow_schema(schema))


def schema_in(arrow: pa.Schema) -> dict[str, Any]:
    """The Spark schema of a file."""
    json: dict[str, Any] = from_arrow_schema(arrow).jsonValue()
    return json


def from_record(schema: dict[str, Any], where: str) -> StructType:
    """A recorded schema as Spark's.

    Raises: CorruptRecord if it names a class: PySpark would unpickle it, and whoever can write into the bucket would run code here.
    """
    for path, found in walk(parse_struct(schema)):
        if isinstance(found, UnsupportedType) and not isinstance(found.to_json(), str):
            raise CorruptRecord(f"{where}: the recorded output schema has {found} at {path!r}, which is never recorded")
    return struct_of(schema)


def schema_of_file(storage: Storage, handle: Handle, local: Path) -> dict[str, Any]:
    """The Spark schema of an output file; ``local``: where it may be downloaded to.

    Raises: NotFound, CorruptFile, StorageUnavailable.
    """
    storage.download(handle, local)
    return schema_in(pq.read_schema(local))
