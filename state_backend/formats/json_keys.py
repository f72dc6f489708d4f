"""Parser of keys as people write them on the command line: a JSON object with the key's columns.

`cairn diff` prints keys in this form.
"""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.types import ArrayType, AtomicType, DataType, DecimalType, StructType
from state_backend.values.errors import StateTypeError, UsageError

_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode_json_key(text: str, schema: StructType) -> bytes:
    """Encode a key that is written as JSON, such as `{"origin": "JFK"}`.

    In the JSON, binary values are strings of hex digits. Decimals and dates are strings. Timestamps are strings in ISO
    8601, with a time zone for `timestamp`.

    Args:
        text: The JSON object, with one field for each column of the key.
        schema: The schema of the key.

    Raises:
        UsageError: The text is no JSON object with exactly the key's columns, or a value does not fit its column.
    """
    try:
        given = json.loads(text, parse_float=Decimal)
    except ValueError as error:
        raise UsageError(f"--key {text!r} is not JSON: {error}; {_expected(schema)}") from None
    if not isinstance(given, dict) or given.keys() != {*schema.names}:
        raise UsageError(f"--key {text!r} does not name the key's columns; {_expected(schema)}")
    try:
        return KeyCodec(schema).encode(_struct(given, schema))
    except (StateTypeError, ValueError, TypeError, InvalidOperation) as error:
        raise UsageError(f"--key {text!r} does not fit: {error}; {_expected(schema)}") from None


def _expected(schema: StructType) -> str:
    columns = ", ".join(f'"{field.name}": {field.type}' for field in schema.fields)
    return f"expected {{{columns}}}"


def _struct(given: Any, schema: StructType) -> tuple[Any, ...]:
    if not isinstance(given, dict) or given.keys() != {*schema.names}:
        raise ValueError(f"{given!r} is no object with {', '.join(schema.names)}")
    return tuple(_value(given[field.name], field.type) for field in schema.fields)


def _value(given: Any, data_type: DataType) -> Any:
    if given is None:
        return None
    match data_type:
        case StructType():
            return _struct(given, data_type)
        case ArrayType(element, _):
            if not isinstance(given, list):
                raise ValueError(f"{given!r} is no list")
            return [_value(item, element) for item in given]
        case DecimalType():
            return Decimal(str(given))
        case AtomicType(name):
            return _atomic(given, name)
    raise ValueError(f"{data_type} can't be written as JSON")


def _atomic(given: Any, name: str) -> Any:
    match name:
        case "float" | "double":
            return _NUMBERS[given] if isinstance(given, str) and given in _NUMBERS else float(given)
        case "string":
            if not isinstance(given, str):
                raise ValueError(f"{given!r} is no text; write it in quotes")
            return given
        case "binary":
            return bytes.fromhex(given)
        case "date":
            return date.fromisoformat(given)
        case "timestamp":
            instant = datetime.fromisoformat(given)
            if instant.tzinfo is None:
                raise ValueError(f"{given!r} has no time zone; write it as in 2013-01-02T00:00:00Z")
            return instant.astimezone(UTC).replace(tzinfo=None)  # state has naive datetimes, here in UTC
        case "timestamp_ntz":
            return datetime.fromisoformat(given)
    if isinstance(given, Decimal):
        raise ValueError(f"{given} is no whole number")
    return given
