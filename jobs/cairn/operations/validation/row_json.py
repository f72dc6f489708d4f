"""The JSON of rows, with the same text as Spark's `to_json`."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, tzinfo
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from state_backend.values.zones import zone_of

_ESCAPED = r'["\\\x00-\x1f]'


def has_json(kind: pa.DataType) -> bool:
    """Return True if `row_json` can write values of a type."""
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_date(kind)
        or pa.types.is_timestamp(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_binary(kind)
    )


def row_json(table: pa.Table, names: Sequence[str], zone: str) -> pa.Array:
    parts: list[Any] = []
    for n, name in enumerate(names):
        parts += [pa.scalar(f"{'{' if n == 0 else ','}{_quote(name)}:"), _values(table[name], zone)]
    return pc.binary_join_element_wise(*parts, pa.scalar("}"), pa.scalar(""))


def _values(column: pa.ChunkedArray, zone: str) -> pa.Array:
    values, kind = column.combine_chunks(), column.type
    if isinstance(values, pa.ChunkedArray):  # For a column without chunks, `combine_chunks` returns no array.
        values = pa.array([], kind)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        written = values.cast(pa.string())
    elif pa.types.is_string(kind) and not pc.any(pc.match_substring_regex(values, _ESCAPED)).as_py():
        written = pc.binary_join_element_wise('"', values, '"', "")
    else:
        # A call for each value is slow, but only failing rows get here, and they are few.
        to_json = _to_json(kind, zone)
        written = pa.array([None if value is None else to_json(value) for value in values.to_pylist()], pa.string())
    return pc.fill_null(written, "null")


def _to_json(kind: pa.DataType, zone: str) -> Callable[[Any], str]:
    if pa.types.is_decimal(kind):
        return str
    if pa.types.is_date(kind):
        return lambda value: f'"{date.isoformat(value)}"'
    if pa.types.is_timestamp(kind):
        return (lambda value: f'"{_instant(value, zone_of(zone).rules)}"') if kind.tz is not None else _wall_time
    if pa.types.is_binary(kind):
        return lambda value: f'"{base64.b64encode(value).decode()}"'
    return _quote


def _instant(value: datetime, zone: tzinfo) -> str:
    local = value.astimezone(UTC).astimezone(zone)
    text = local.replace(tzinfo=None).isoformat(timespec="milliseconds")
    offset = f"{local:%z}"
    return f"{text}Z" if offset == "+0000" else f"{text}{offset[:3]}:{offset[3:5]}"


def _wall_time(value: datetime) -> str:
    return f'"{value.isoformat(timespec="milliseconds")}"'


def _quote(text: str) -> str:
    """Return a text as a JSON string in Spark's form: capitals for hexadecimal digits, and no escapes beyond ASCII."""
    written = json.dumps(text, ensure_ascii=False)
    return re.sub(r"\\\\|\\u([0-9a-f]{4})", lambda m: m[0] if m[1] is None else f"\\u{m[1].upper()}", written)
