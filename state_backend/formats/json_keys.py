"""Parser of keys as people write them on the command line: `u1`, `user=u1`, or a JSON object with the key's columns.

`cairn diff --json` prints keys as JSON objects.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.types import ArrayType, AtomicType, DataType, DecimalType, StructType
from state_backend.values.errors import StateTypeError, UsageError

_WHOLE = ("byte", "short", "integer", "long")
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def keys_of_json(text: str, schema: StructType, *, for_spark: bool = False) -> list[tuple[Any, ...]]:
    """Return a list with the key that is written as a JSON object, such as `{"origin": "JFK"}`.

    In the JSON, binary values are strings of hex digits. Decimals and dates are strings. Timestamps are strings in ISO
    8601, with a time zone for `timestamp`. `for_spark`: accept a list of keys too, and UTC instants without a zone.

    Raises:
        UsageError: A key is no JSON object with exactly the key's columns, or a value does not fit its column.
    """
    try:
        given = json.loads(text, parse_float=Decimal)
    except ValueError as error:
        raise UsageError(f"key {text!r} is not JSON: {error}; {_explain_expected(schema)}") from None
    given = given if for_spark and isinstance(given, list) else [given]
    if not all(isinstance(one, dict) and one.keys() == {*schema.names} for one in given):
        raise UsageError(f"key {text!r} does not name the key's columns; {_explain_expected(schema)}")
    codec = KeyCodec(schema)
    try:
        keys = [_struct(one, schema, for_spark) for one in given]
        for key in keys:
            codec.encode(key)
    except (StateTypeError, ValueError, TypeError, OverflowError, InvalidOperation) as error:
        raise UsageError(f"key {text!r} does not fit: {error}; {_explain_expected(schema)}") from None
    return keys


def parse_key(text: str, schema: StructType) -> tuple[Any, ...]:
    """Parse a key as a person writes it.

    That is a JSON object as for `keys_of_json`; `column=value` for each column, with commas between them; or only
    the value, if the key has one column.

    Raises:
        UsageError: The text does not name the key's columns, or a value does not fit its column.
    """
    try:
        if text.lstrip().startswith("{"):
            return _struct(json.loads(text, parse_float=Decimal), schema)
        values = _values_of_text(text, schema)
        key = tuple(_value(_from_text(values[f.name], f.type), f.type) for f in schema.fields)
        KeyCodec(schema).encode(key)
    except (StateTypeError, ValueError, TypeError, InvalidOperation) as error:
        raise UsageError(f"the key {text!r} does not fit: {error}; {_explain_expected(schema)}") from None
    return key


def _values_of_text(text: str, schema: StructType) -> dict[str, str]:
    names = schema.names
    if len(names) == 1:
        return {names[0]: text.removeprefix(f"{names[0]}=")}
    parts = dict(part.partition("=")[::2] for part in text.split(","))
    if parts.keys() != {*names}:
        raise ValueError(f"write {','.join(f'{name}=…' for name in names)}")
    return parts


def _from_text(text: str, data_type: DataType) -> Any:
    """Convert the text of one column to the value that JSON would hold, such as an int for a `long`."""
    match data_type:
        case AtomicType(name) if name in _WHOLE:
            return int(text)
        case AtomicType("boolean"):
            return {"true": True, "false": False}[text.lower()] if text.lower() in ("true", "false") else text
        case StructType() | ArrayType():
            return json.loads(text, parse_float=Decimal)
    return text


def similar_keys(key: tuple[Any, ...], schema: StructType) -> Iterator[tuple[Any, ...]]:
    """Yield keys that differ from a key in the case of one text, in spaces around it, or in zeros before a number."""
    for n, (value, field) in enumerate(zip(key, schema.fields, strict=True)):
        if isinstance(value, str) and field.type == AtomicType("string"):
            stripped = value.strip()
            others = [value.lower(), value.upper(), value.capitalize(), value.title(), stripped]
            if stripped.isdecimal():
                others += [str(int(stripped)), *(stripped.zfill(width) for width in range(len(stripped), 13))]
            for other in dict.fromkeys(others):
                if other != value:
                    yield (*key[:n], other, *key[n + 1 :])


def _explain_expected(schema: StructType) -> str:
    columns = ", ".join(f'"{field.name}": {field.type}' for field in schema.fields)
    return f"expected {{{columns}}}"


def _struct(given: Any, schema: StructType, for_spark: bool = False) -> tuple[Any, ...]:
    if not isinstance(given, dict) or given.keys() != {*schema.names}:
        raise ValueError(f"{given!r} is no object with {', '.join(schema.names)}")
    return tuple(_value(given[field.name], field.type, for_spark) for field in schema.fields)


def _value(given: Any, data_type: DataType, for_spark: bool = False) -> Any:
    if given is None:
        return None
    match data_type:
        case StructType():
            return _struct(given, data_type, for_spark)
        case ArrayType(element, _):
            if not isinstance(given, list):
                raise ValueError(f"{given!r} is no list")
            return [_value(item, element, for_spark) for item in given]
        case DecimalType():
            return Decimal(str(given))
        case AtomicType(name):
            return _atomic(given, name, for_spark)
    raise ValueError(f"{data_type} can't be written as JSON")


def _atomic(given: Any, name: str, for_spark: bool) -> Any:
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
            if instant.tzinfo is None and for_spark:
                return instant
            if instant.tzinfo is None:
                raise ValueError(f"{given!r} has no time zone; write it as in 2013-01-02T00:00:00Z")
            return instant.astimezone(UTC).replace(tzinfo=None)  # state has naive datetimes, here in UTC
        case "timestamp_ntz":
            return datetime.fromisoformat(given)
    if isinstance(given, Decimal):
        raise ValueError(f"{given} is no whole number")
    return given
