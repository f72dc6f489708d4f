"""Records as bytes: one JSON object in an envelope, decoded strictly.

    {"cairn": "<type>", "format": 1, "crc32c": "<8 hex digits>", "body": {...}}

``crc32c`` is over the body as compact JSON with sorted keys. An unknown type or version, a wrong checksum, a missing,
extra or twice-named field, a wrong type, a path that leaves its root: each is a ``CorruptRecord`` that names the file. JSON
and not a pickle, because reading a bucket that somebody else can write must never run their code.
"""

from __future__ import annotations

import json
from dataclasses import is_dataclass
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_type_hints

import google_crc32c
from pydantic import ConfigDict, TypeAdapter, ValidationError

from state_backend.values.errors import CorruptRecord, UsageError
from state_backend.values.records import (
    Claim,
    Prepared,
    Published,
    Quarantine,
    Record,
    Refused,
    Savepoint,
    ShardManifest,
    SweepRecord,
    Tombstone,
    Validated,
)

FORMAT = 1
MAX_BYTES = 64 * 1024 * 1024

_TYPES: dict[str, type] = {
    "checkpoint": Record,
    "sweep": SweepRecord,
    "tombstone": Tombstone,
    "prepared": Prepared,
    "manifest": ShardManifest,
    "quarantine": Quarantine,
    "refused": Refused,
    "validated": Validated,
    "published": Published,
    "savepoint": Savepoint,
    "claim": Claim,
}
_NAMES = {cls: name for name, cls in _TYPES.items()}
_CONFIG = ConfigDict(strict=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")

T = TypeVar("T")


def encode(value: object) -> bytes:
    """The durable bytes of a record, manifest or mark."""
    body = _adapter(cast(Any, type(value))).dump_python(value, mode="json")
    envelope = {
        "cairn": _NAMES[type(value)],
        "format": FORMAT,
        "crc32c": f"{google_crc32c.value(_compact(body)):08x}",
        "body": body,
    }
    return json.dumps(envelope, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def decode(data: bytes, path: str, *expected: type[T]) -> T:
    """The value in ``data``, one of the ``expected`` types; ``path`` is for the error only.

    Raises: CorruptRecord, naming the path and what is wrong with it.
    """
    if len(data) > MAX_BYTES:
        raise CorruptRecord(f"{path}: {len(data)} bytes; a record has at most {MAX_BYTES}")
    try:
        envelope = json.loads(data, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CorruptRecord(f"{path}: not a record: {error}") from None
    if not isinstance(envelope, dict) or set(envelope) != {"cairn", "format", "crc32c", "body"}:
        raise CorruptRecord(f"{path}: not a record: expected the fields cairn, format, crc32c, body")
    wanted = " or ".join(_NAMES[cls] for cls in expected)
    cls = _TYPES.get(envelope["cairn"]) if isinstance(envelope["cairn"], str) else None
    if cls not in expected or cls is None:
        raise CorruptRecord(f"{path}: expected a {wanted} record, found {envelope['cairn']!r}")
    if type(envelope["format"]) is not int or envelope["format"] != FORMAT:
        raise CorruptRecord(
            f"{path}: format {envelope['format']!r} is unknown here (known: {FORMAT}); written by a newer version?"
        )
    try:
        found = f"{google_crc32c.value(_compact(envelope['body'])):08x}"
    except UnicodeEncodeError as error:
        raise CorruptRecord(f"{path}: not a record: {error}") from None
    if envelope["crc32c"] != found:
        raise CorruptRecord(f"{path}: crc32c of the body is {found}, the record says {envelope['crc32c']!r}")
    try:
        value: T = _adapter(cast(Any, cls)).validate_json(json.dumps(envelope["body"]))
    except (ValidationError, UsageError) as error:
        raise CorruptRecord(f"{path}: {_first_problem(error)}") from None
    return value


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    _be_strict(cls)
    return TypeAdapter(cls)


def _be_strict(hint: Any) -> None:
    """Gives every dataclass reachable from a type hint the strict configuration: pydantic reads it from the class, and the
    values themselves should not have to know by what they are encoded."""
    if isinstance(hint, type) and is_dataclass(hint) and "__pydantic_config__" not in vars(hint):
        hint.__pydantic_config__ = _CONFIG  # type: ignore[attr-defined]
        for inner in get_type_hints(hint).values():
            _be_strict(inner)
    for inner in get_args(hint):
        _be_strict(inner)


def _compact(body: object) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a field is named twice")
    return result


def _first_problem(error: ValidationError | UsageError) -> str:
    if isinstance(error, UsageError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    return f"field {'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
