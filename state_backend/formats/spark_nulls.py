"""An encoder that stores NULL for values that do not fit a state's schema, where Spark stores NULL too.

Source: Spark's EvaluatePython.makeFromJava, and tests/conformance/test_casts.py, which runs a real Spark. Spark
    sometimes stores a value other than the user's (300 as a TINYINT becomes 44) or fails. This encoder refuses those
    values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from datetime import tzinfo
from decimal import Decimal
from typing import Any

from state_backend.formats.types import (
    INTEGER_BITS,
    SEQUENCES,
    ArrayType,
    AtomicType,
    DataType,
    DecimalType,
    MapType,
    Misfit,
    StructType,
    to_physical,
)
from state_backend.values.errors import StateTypeError

_LONG = range(-(1 << 63), 1 << 63)


def spark_stores_null(data_type: DataType, value: Any) -> bool:
    """Return True if Spark stores NULL for a value that does not fit the type."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    match data_type:
        case AtomicType("boolean" | "double" | "binary") | MapType():
            return True
        case AtomicType(name) if name in INTEGER_BITS:
            return not isinstance(plain, int) or isinstance(plain, bool) or plain not in _LONG
        case AtomicType("float"):
            return not isinstance(plain, float)
        case DecimalType():
            return not isinstance(plain, Decimal)
        case ArrayType():
            return not isinstance(plain, bytes | bytearray)
    return False


class MismatchCounts:
    """Counts of the values that did not fit the schema of their state, and were stored as NULL instead.

    `nulling_encoder` adds to the counts while a processor writes to the state of one shard. The counts are by state and
    field, with the first error message of each field.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._first: dict[tuple[str, str], str] = {}

    def add(self, state_name: str, path: str, message: str) -> None:
        self._counts[state_name, path] += 1
        self._first.setdefault((state_name, path), message)

    def as_mapping(self) -> Mapping[tuple[str, str], tuple[int, str]]:
        """Return, by state and field, (number of values that were stored as NULL instead, first error message)."""
        return {place: (count, self._first[place]) for place, count in self._counts.items()}


def nulling_encoder(
    state_name: str, schema: StructType, zone: tzinfo, encode: Callable[[Any], bytes], counts: MismatchCounts
) -> Callable[[Any], bytes]:
    """Return a row encoder that stores NULL for values for which Spark stores NULL, and counts these values.

    Rows that fit need no more time than with `encode` alone. Naive datetimes for timestamps are in `zone`.

    Raises:
        StateTypeError: The returned function gets a value that does not fit, and for which Spark does not store NULL.
    """

    def encode_or_null(row: Any) -> bytes:
        values = row if isinstance(row, (*SEQUENCES, dict)) else None
        try:
            if values is None and not isinstance(row, str | bytes):
                # The row may be encoded twice below, but an iterator can be read only once.
                row = values = list(row)
        except TypeError:
            pass
        try:
            return encode(row)
        except StateTypeError:
            if values is None:
                raise
            found: list[tuple[str, str]] = []
            fitting = encode(_fields(schema, values, zone, "", found))
            for path, message in found:
                counts.add(state_name, path, f"state {state_name!r} field {path!r}{message}")
            return fitting

    return encode_or_null


def _fields(schema: StructType, values: Any, zone: tzinfo, path: str, found: list[tuple[str, str]]) -> Any:
    dot = f"{path}." if path else ""
    if isinstance(values, dict):
        types = {f.name: f.type for f in schema.fields}
        return {
            name: _fitting(types[name], value, zone, f"{dot}{name}", found) if name in types else value
            for name, value in values.items()
        }
    if len(values) != len(schema.fields):
        return values
    return [
        _fitting(f.type, value, zone, f"{dot}{f.name}", found) for f, value in zip(schema.fields, values, strict=True)
    ]


def _fitting(data_type: DataType, value: Any, zone: tzinfo, path: str, found: list[tuple[str, str]]) -> Any:
    """Return the value, with None for each part for which Spark stores NULL. Add (path, message) of each to `found`."""
    if value is None:
        return None
    plain = value.tolist() if hasattr(value, "tolist") and not hasattr(value, "columns") else value
    match data_type:
        case ArrayType(element) if isinstance(plain, SEQUENCES):
            return [_fitting(element, item, zone, f"{path}.element", found) for item in plain]
        case MapType(_, of) if isinstance(value, dict):
            return {key: _fitting(of, item, zone, f"{path}.value", found) for key, item in value.items()}
        case StructType() if isinstance(value, (*SEQUENCES, dict)):
            return _fields(data_type, value, zone, path, found)
    try:
        to_physical(data_type, zone)(value)
    except Misfit as misfit:
        if spark_stores_null(data_type, value):
            found.append((path, misfit.text))
            return None
    return value
