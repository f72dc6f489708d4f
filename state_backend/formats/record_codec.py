"""Codec of records: one JSON object in an envelope, decoded strictly.

    {"cairn": "<type>", "format": 1, "release": "0.1.0", "crc32c": "<8 hex digits>", "body": {...}}

Records, tombstones, `prepared.json` and savepoints repeat names for many shards and files. So records, tombstones and
`prepared.json` are gzipped beyond 16 KiB; `zcat` shows them. `crc32c` is over the body as compact JSON with sorted
keys. `release` names the release that wrote the file, for error messages only; old files have no `release`.

`CorruptRecord` names the file in all these cases: a wrong checksum, a missing or duplicate field, a wrong type, a
number that JSON does not allow, a path that leaves its root, impossible ids or shards. `UnsupportedFormat` means
another format, or an unknown type or field under a right checksum. Every later format keeps `cairn`, `format` and
`release` in this place.

The format is JSON and not pickle: a reader must never run code from a bucket that other people can write to.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

import google_crc32c
from pydantic import ConfigDict, TypeAdapter, ValidationError

from state_backend.formats.paths import check_name
from state_backend.values.errors import CorruptRecord, UsageError
from state_backend.values.handles import fields_with_handles
from state_backend.values.key_groups import MAX_MAX_PARALLELISM, KeyGroupRange, check_parallelism
from state_backend.values.marks import (
    AttemptEnd,
    Claim,
    Head,
    Lease,
    Names,
    Published,
    Quarantine,
    Refused,
    Released,
    Savepoint,
    Settled,
    Trial,
    Validated,
)
from state_backend.values.records import (
    Content,
    InlineFile,
    KeyGroupState,
    LocalFile,
    Prepared,
    Record,
    ShardChanges,
    ShardManifest,
    SweepRecord,
    Tombstone,
)
from state_backend.values.release import RELEASE, is_newer, unsupported

FORMAT = 1
MAX_BYTES = 64 * 1024 * 1024
_PLAIN_BYTES = 16 * 1024
# Every gzip file of Cairn begins with these bytes. The reader compares all of them, because gzip's own checksum does
# not cover the header, so damage there would go unnoticed.
_GZIP_HEADER = b"\x1f\x8b\x08" + bytes(6) + b"\x03"

_TYPES: dict[str, type] = {
    "checkpoint": Record,
    "sweep": SweepRecord,
    "tombstone": Tombstone,
    "prepared": Prepared,
    "manifest": ShardManifest,
    "quarantine": Quarantine,
    "released": Released,
    "refused": Refused,
    "validated": Validated,
    "published": Published,
    "settled": Settled,
    "attempt-end": AttemptEnd,
    "head": Head,
    "names": Names,
    "lease": Lease,
    "savepoint": Savepoint,
    "claim": Claim,
    "trial": Trial,
}
_NAMES = {cls: name for name, cls in _TYPES.items()}
_CONFIG = ConfigDict(strict=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")

# Integer fields of records must be in 0 .. 2^63 - 1, with two exceptions: fields in _SIGNED may also be negative, and
# fields in _BITS are unsigned integers of that many bits.
_SIGNED = {
    "until_ms",
    "latest_end_ms",
    "watermark_ms",
    "late_watermark_ms",
    "pipeline_start_ms",
    "processing_time_ms",
    "ttl_ms",
}
_BITS = {"digest": 64, "crc32c": 32}
# The bytes that `encode` writes before the body of a file, and the pattern of those (at most 200) after the body.
_BEGIN, _MOST_END = b'{"body":', 200
_END = re.compile(rb',"cairn":"([a-z-]+)","crc32c":"([0-9a-f]{8})","format":1,"release":"[^"]*"\}\Z')
# With these patterns `decode_content` finds the content and the id of a record.
_CONTENT, _ID = re.compile(r'\{"content":'), re.compile(r',"id":(\d+),')
# The names of a store's files. A store has no write-ahead log: RocksDB would replay it.
_LOCAL_NAME = re.compile(r"[0-9]{1,19}\.sst|CURRENT|MANIFEST-[0-9]{1,19}|rocksdict-config\.json")

# Fields that `_check` skips: their constructors or `_check_groups` check them, or they hold the user's own JSON.
_NOT_WALKED = (
    *("interval", "key_groups", "key_group_states", "source_position", "value", "user_key", "key_schema"),
    *("output_schema", "output_schemas", "input_schema", "input_schemas"),
)

T = TypeVar("T")


def encode(value: object) -> bytes:
    """Return the bytes of a file that holds a record, a manifest, `prepared.json` or another value of `_TYPES`.

    The bytes are a JSON object with type, format, checksum and the value, gzipped for long records. `decode` reads
    these bytes.

    Raises:
        UsageError: The value holds something that JSON does not allow, such as NaN in a source position.
    """
    return _encoded(value)[0]


def encode_and_decode(value: T) -> tuple[bytes, T]:
    """Return the bytes of a value, and what `decode` reads from them: tuples in a source position become lists."""
    data, compact = _encoded(value)
    try:
        found: T = _adapter(cast(Any, type(value))).validate_json(compact)
    except ValidationError as error:
        raise UsageError(f"can't write {_NAMES[type(value)]}: {_first_problem(error)}") from None
    _check(found)
    return data, found


def _encoded(value: object) -> tuple[bytes, bytes]:
    try:
        if isinstance(value, Record | Prepared | Savepoint):
            _compact(value.content.source_position)  # raises for NaN, which pydantic would write as null
        body = _adapter(cast(Any, type(value))).dump_python(value, mode="json")
        compact = _compact(body)
    except (TypeError, ValueError) as error:
        name = _NAMES[type(value)]
        raise UsageError(f"can't write {name} as JSON: {error}; a source position may hold only JSON values") from None
    name = _NAMES[type(value)]
    others = {"cairn": name, "crc32c": f"{google_crc32c.value(compact):08x}", "format": FORMAT, "release": RELEASE}
    data = _BEGIN + compact + b"," + _compact(others)[1:]
    if len(data) > MAX_BYTES:
        raise UsageError(
            f"{_NAMES[type(value)]} would have {len(data)} bytes, and Cairn reads at most {MAX_BYTES}: nothing is written\n"
            "Let the source return a shorter position, such as an offset instead of a list of files; or retain fewer checkpoints"
        )
    long = len(data) > _PLAIN_BYTES and isinstance(value, Record | Prepared | Tombstone)
    return _gzip(data) if long else data, compact


def decode(data: bytes, path: str, *expected: type[T]) -> T:
    """Return the value in `data`, which must be one of the `expected` types.

    Raises:
        CorruptRecord: The file is damaged or has another type. The message names the path and the problem.
        UnsupportedFormat: Another release of Cairn wrote the file in a format that this release does not read.
    """
    envelope, plain = _envelope(data, path)
    release = envelope.get("release")
    cls = _TYPES.get(envelope["cairn"]) if isinstance(envelope["cairn"], str) else None
    if cls is not None and cls not in expected:
        raise _another_type(path, expected, envelope)
    try:
        # If the body's bytes have the checksum, they are compact JSON already. Usually this saves the encoding.
        compact = _body_of(plain, envelope["cairn"]) or _compact(envelope["body"])
    except (UnicodeEncodeError, RecursionError) as error:
        raise CorruptRecord(f"{path}: not a record: {error}") from None
    found = f"{google_crc32c.value(compact):08x}"
    if envelope["crc32c"] != found:
        raise CorruptRecord(f"{path}: crc32c of the body is {found}, expected {envelope['crc32c']!r}")
    if cls is None:
        if isinstance(envelope["cairn"], str) and release is not None and is_newer(release):
            raise unsupported(
                path, f"a {envelope['cairn'][:100]!r} record", f"format {FORMAT} without such records", release
            )
        raise _another_type(path, expected, envelope)
    try:
        value: T = _adapter(cast(Any, cls)).validate_json(compact)
        _check(value)
    except ValidationError as error:
        unknown = _unknown_field(error)
        if unknown is not None:
            raise unsupported(path, f"the field {unknown}", f"format {FORMAT} without that field", release) from None
        raise CorruptRecord(f"{path}: {_first_problem(error)}") from None
    except UsageError as error:
        raise CorruptRecord(f"{path}: {error}") from None
    return value


def decode_content(data: bytes, path: str) -> tuple[int, Content] | None:
    """Return (id, content) of a checkpoint's record without decoding its lists of other checkpoints, to save time.

    With a thousand retained checkpoints, the lists are 99 % of a record. The checksum covers them too. Return None for
    bytes that `encode` would not write for a record: `decode` then raises the error.
    """
    try:
        text = (_body_of(_gunzip(data) if data[:1] == _GZIP_HEADER[:1] else data, _NAMES[Record]) or b"").decode()
        begin = _CONTENT.match(text)
        if begin is None:
            return None
        _, until = _STRICT.raw_decode(text, begin.end())
        following = _ID.match(text, until)
        if following is None:
            return None
        content: Content = _adapter(Content).validate_json(text[begin.end() : until])
        _check(content)
    except (ValueError, RecursionError):  # Also pydantic's ValidationError.
        return None
    except UsageError as error:
        raise CorruptRecord(f"{path}: {error}") from None
    return int(following[1]), content


def _body_of(plain: bytes, name: str) -> bytes | None:
    """Return the bytes of the body; None if they are not what `encode` writes for a value of the type `name`."""
    end = _END.search(plain, max(0, len(plain) - _MOST_END))
    if end is None or not plain.startswith(_BEGIN) or end[1].decode() != name:
        return None
    body = plain[len(_BEGIN) : end.start()]
    return body if f"{google_crc32c.value(body):08x}" == end[2].decode() else None


def _envelope(data: bytes, path: str) -> tuple[dict[str, Any], bytes]:
    if len(data) > MAX_BYTES:
        raise CorruptRecord(f"{path}: {len(data)} bytes; a record has at most {MAX_BYTES}")
    try:
        if data[:1] == _GZIP_HEADER[:1]:
            data = _gunzip(data)
        envelope = json.loads(data, object_pairs_hook=_no_duplicates, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise CorruptRecord(f"{path}: not a record: {error}") from None
    if not isinstance(envelope, dict) or not {"cairn", "format"} <= envelope.keys():
        raise CorruptRecord(f"{path}: not a record: expected the fields cairn, format, release, crc32c, body")
    release, format = envelope.get("release"), envelope["format"]
    if "release" in envelope and not isinstance(release, str):
        raise CorruptRecord(f"{path}: not a record: its release is {release!r}")
    if type(format) is int and format > FORMAT:
        raise unsupported(path, f"format {str(format)[:40]}", f"format {FORMAT}", release)
    if type(format) is not int or format != FORMAT:
        raise CorruptRecord(f"{path}: not a record: its format is {format!r}, expected {FORMAT}")
    if envelope.keys() - {"release"} != {"cairn", "format", "crc32c", "body"}:
        raise CorruptRecord(f"{path}: not a record: expected the fields cairn, format, release, crc32c, body")
    return envelope, data


def _another_type(path: str, expected: tuple[type, ...], envelope: dict[str, Any]) -> CorruptRecord:
    wanted = " or ".join(_NAMES[cls] for cls in expected)
    return CorruptRecord(f"{path}: expected a {wanted} record, found {envelope['cairn']!r}")


def _check(value: Any) -> None:
    """Check values that have the right type but are impossible.

    Examples are negative counts, repeated ids, missing shards and local file names that lead to another folder. For
    speed, `_to_check` finds the fields to check only once for each class.
    """
    cls = type(value)
    if cls is tuple:
        for item in value:
            _check(item)
    elif cls is dict:
        for key, number in value.items():
            _check_number(key, number)
    elif is_dataclass(cls):
        if (check := _CHECKS.get(cls)) is not None:
            check(value)
        numbers, inner = _to_check(cls)
        for name, least, beyond in numbers:
            number = getattr(value, name)
            if number is not None and not least <= number < beyond:
                _check_number(name, number)
        for name in inner:
            _check(getattr(value, name))


def _check_retained(value: Record | SweepRecord) -> None:
    ids = [0, *(r.id for r in value.retained), value.id + 1]
    _require(all(a < b for a, b in pairwise(ids)), f"its retained ids do not ascend within 1 .. {value.id}")
    _require(
        [k.id for k in value.summary.kept] == [r.id for r in value.retained],
        "its summary lists other checkpoints than it retains",
    )


def _check_manifest(manifest: ShardManifest) -> None:
    _check_groups(manifest.key_group_states, manifest.key_groups)
    names = [*(f.name for f in manifest.files), *(f.name for f in manifest.inline_files)]
    _require(len({*names}) == len(names), "two files have the same local name")


def _check_changes(changes: ShardChanges) -> None:
    _check_groups(changes.key_group_states, KeyGroupRange(first=0, last=MAX_MAX_PARALLELISM - 1))


def _check_local_name(file: LocalFile | InlineFile) -> None:
    _require(_LOCAL_NAME.fullmatch(file.name) is not None, f"it names a local file {file.name[:100]!r}")


def _check_content(content: Content) -> None:
    check_name(content.pipeline)
    check_parallelism(content.parallelism, content.max_parallelism)
    shards = [ref.shard for ref in content.shards]
    _require(
        shards in ([], [*range(content.parallelism)]),
        f"it lists shards {shards[:20]}, expected each of {content.parallelism} shards",
    )
    for what in ([d.name for d in content.states], [d.state_id for d in content.states]):
        _require(len({*what}) == len(what), "two states share a name or an id")


def _check_groups(states: tuple[KeyGroupState, ...], owned: KeyGroupRange) -> None:
    """Check all key-group states of one shard at once, which is faster than one by one: there may be thousands."""
    groups = [owned.first - 1, *(s.key_group for s in states), owned.last + 1]
    _require(all(a < b for a, b in pairwise(groups)), f"its key groups do not ascend within {owned}")
    counts, digests = [n for s in states for n in s.entries.values()], [s.digest for s in states]
    sizes = [s.size_bytes for s in states if s.size_bytes is not None]
    for name, numbers in (("entries", counts), ("digest", digests), ("size_bytes", sizes)):
        for number in (min(numbers, default=0), max(numbers, default=0)):
            _check_number(name, number)


def _check_number(name: str, number: int) -> None:
    least, beyond = _bounds(name)
    _require(
        least <= number < beyond,
        f"{name} is {number if abs(number) < 2**70 else 'a huge number'}, which is out of range",
    )


def _bounds(name: str) -> tuple[int, int]:
    return -(2**63) if name in _SIGNED else 0, 2 ** _BITS.get(name, 63)


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise UsageError(problem)


_CHECKS: dict[type, Callable[[Any], None]] = {
    Record: _check_retained,
    SweepRecord: _check_retained,
    Content: _check_content,
    ShardManifest: _check_manifest,
    ShardChanges: _check_changes,
    LocalFile: _check_local_name,
    InlineFile: _check_local_name,
}


@cache
def _to_check(cls: type) -> tuple[tuple[tuple[str, int, int], ...], tuple[str, ...]]:
    """Return a dataclass's integer fields with their bounds, and the fields that may hold more values to check."""
    numbers, inner = [], []
    for name, hint in get_type_hints(cls).items():
        if name in _NOT_WALKED:
            continue
        if hint is int or hint == int | None:
            numbers.append((name, *_bounds(name)))
        elif any(is_dataclass(part) or part in (dict, Mapping) for part in _parts(hint)):
            inner.append(name)
    return tuple(numbers), tuple(inner)


def _parts(hint: Any) -> Iterator[Any]:
    """Yield a type hint and all type hints inside it, each without its parameters in brackets.

    For `dict[str, tuple[int, ...]]`, these are `dict`, `str`, `tuple`, `int` and `...`.
    """
    yield get_origin(hint) or hint
    for inner in get_args(hint):
        yield from _parts(inner)


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    _be_strict(cls)
    return TypeAdapter(cls)


def build_adapters() -> None:
    """Build the pydantic adapters of all types, and find the fields to check and to search for handles.

    Before it forks, a process calls this once for all its children.
    """
    for cls in _TYPES.values():
        _adapter(cls)
    for part in _classes():
        _to_check(part)
        fields_with_handles(part)


def _be_strict(hint: Any) -> None:
    """Set pydantic's strict configuration on every dataclass that a type hint contains.

    Pydantic reads the configuration from the class. The classes in `values` set none: they don't know their codec.
    """
    if isinstance(hint, type) and is_dataclass(hint) and "__pydantic_config__" not in vars(hint):
        hint.__pydantic_config__ = _CONFIG  # type: ignore[attr-defined]
        for inner in get_type_hints(hint).values():
            _be_strict(inner)
    for inner in get_args(hint):
        _be_strict(inner)


def _compact(body: object) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _gzip(data: bytes) -> bytes:
    deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    end = struct.pack("<II", zlib.crc32(data), len(data))
    return _GZIP_HEADER + deflate.compress(data) + deflate.flush() + end


def _gunzip(data: bytes) -> bytes:
    inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        plain = inflate.decompress(data, MAX_BYTES)
    except zlib.error as error:
        raise ValueError(f"gzip: {error}") from None
    if not data.startswith(_GZIP_HEADER) or not inflate.eof or inflate.unused_data:
        raise ValueError(f"gzip: truncated, too large (more than {MAX_BYTES} bytes), or not written by Cairn")
    return plain


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a field is named twice")
    return result


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"JSON does not allow the number {name}")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"the number {text[:20]} is too large")
    return number


_STRICT = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_number, parse_float=_finite)


def _unknown_field(error: ValidationError) -> str | None:
    """Return the path of a field that a newer release has added, or None if the file has another problem.

    If pydantic reports unknown fields and no other problem, the result is the first unknown field. If pydantic reports
    other problems too, the result is the first unknown field whose name does not exist in any class of this release.
    Unknown fields with an existing name are skipped then, because they prove nothing: if a value may have one of
    several types, pydantic tries each type, and reports the fields of the right type as unknown in all other types.
    """
    problems = error.errors(include_url=False, include_input=False)
    extra = [p["loc"] for p in problems if p["type"] in ("extra_forbidden", "unexpected_keyword_argument")]
    if len(extra) < len(problems):
        extra = [loc for loc in extra if loc[-1] not in _field_names()]
    return ".".join(str(part) for part in extra[0])[:100] if extra else None


@cache
def _field_names() -> frozenset[str]:
    return frozenset(name for cls in _classes() for name in get_type_hints(cls))


def _classes() -> set[Any]:
    """Return the dataclasses of all record types, and all dataclasses in their fields."""
    seen: set[Any] = set()
    todo: list[Any] = [*_TYPES.values()]
    while todo:
        cls = todo.pop()
        if isinstance(cls, type) and is_dataclass(cls) and cls not in seen:
            seen.add(cls)
            todo += [part for hint in get_type_hints(cls).values() for part in _parts(hint)]
    return seen


def _first_problem(error: ValidationError) -> str:
    # If a value may have one of several types, pydantic tries each type and reports the problems of all. The problem
    # with the longest path belongs to the type that fits best, so the message names that problem.
    first = max(error.errors(include_url=False, include_input=False), key=lambda problem: len(problem["loc"]))
    return f"field {'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
