"""RocksDB's own MANIFEST, as far as it says which SST holds which keys, and how to leave some SSTs out of it.

    log      blocks of 32 KiB: (masked crc32c u32 LE, size u16 LE, kind u8, payload) …; fewer than 7 bytes at the end are zeros
             kind: 1 a whole record, 2 its first, 3 a middle, 4 its last piece
    record   a version edit: (tag varint, what belongs to the tag) …
    new file level, number, size, smallest key, largest key, two sequence numbers, (field, bytes) … until field 1

Keys are there with 8 bytes of sequence number and kind behind them. Tags that are not known here make the whole log unreadable
to us, except those that RocksDB marks as ignorable.

Source: RocksDB's ``db/log_format.h`` and ``db/version_edit.cc``.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import google_crc32c

from state_backend.values.errors import CorruptFile

_BLOCK_BYTES = 32 * 1024
_HEADER = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_IGNORABLE = 1 << 13
_DELETED_FILE, _NEW_FILE = 6, 103
# Not 200 to 202: a store has one column family here.
_NUMBERS = (2, 3, 4, 9, 10, 203, 300)
_TEXTS = (1,)
_FIELDS_END, _SEQUENCE_BYTES = 1, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SstSpan:
    """A live SST: its number (of ``000012.sst``), its level, and the least and the greatest key in it, range deletions included."""

    number: int
    level: int
    smallest: bytes
    largest: bytes


def live_spans(log: bytes, name: str) -> list[SstSpan]:
    """The SSTs that the store consists of, by number.

    Raises: CorruptFile, with ``name``, for a log that can't be followed.
    """
    live: dict[int, SstSpan] = {}
    try:
        for record in _records(log):
            for edit in _edits(record):
                if isinstance(edit, SstSpan):
                    live[edit.number] = edit
                else:
                    live.pop(edit, None)
    except (IndexError, ValueError, struct.error) as error:
        raise CorruptFile(f"{name}: not a MANIFEST that can be followed: {error}") from error
    return [span for _, span in sorted(live.items())]


def without(log: bytes, spans: Collection[SstSpan]) -> bytes:
    """The log with one more record, which deletes these files."""
    edit = b"".join(_varint(_DELETED_FILE) + _varint(span.level) + _varint(span.number) for span in spans)
    return log + _framed(edit, len(log)) if spans else log


def _records(log: bytes) -> Iterator[bytes]:
    at, gathered = 0, b""
    while at < len(log):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _HEADER.size:
            at += left
            continue
        crc, size, kind = _HEADER.unpack_from(log, at)
        payload = log[at + _HEADER.size : at + _HEADER.size + size]
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or len(payload) < size or crc != _masked_crc(kind, payload):
            raise ValueError(f"a record at {at} is damaged or of kind {kind}")
        at += _HEADER.size + size
        gathered = payload if kind in (_WHOLE, _FIRST) else gathered + payload
        if kind in (_WHOLE, _LAST):
            yield gathered


def _framed(record: bytes, at: int) -> bytes:
    """A record as it stands in a log behind ``at`` bytes."""
    framed, first = b"", True
    while True:
        left = _BLOCK_BYTES - (at + len(framed)) % _BLOCK_BYTES
        if left < _HEADER.size:
            framed += bytes(left)
            continue
        piece, record = record[: left - _HEADER.size], record[left - _HEADER.size :]
        kind = (_FIRST if record else _WHOLE) if first else (_MIDDLE if record else _LAST)
        framed += _HEADER.pack(_masked_crc(kind, piece), len(piece), kind) + piece
        if not record:
            return framed
        first = False


def _masked_crc(kind: int, payload: bytes) -> int:
    crc: int = google_crc32c.value(bytes([kind]) + payload)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _edits(record: bytes) -> Iterator[SstSpan | int]:
    """The files that a version edit adds, and the numbers of those that it deletes; all else is passed by."""
    at = 0
    while at < len(record):
        tag, at = _number(record, at)
        if tag in _NUMBERS:
            _, at = _number(record, at)
        elif tag in _TEXTS or tag & _IGNORABLE:
            _, at = _text(record, at)
        elif tag == _DELETED_FILE:
            _, at = _number(record, at)
            number, at = _number(record, at)
            yield number
        elif tag == _NEW_FILE:
            level, at = _number(record, at)
            number, at = _number(record, at)
            _, at = _number(record, at)
            smallest, at = _text(record, at)
            largest, at = _text(record, at)
            for _ in range(2):
                _, at = _number(record, at)
            while True:
                field, at = _number(record, at)
                if field == _FIELDS_END:
                    break
                _, at = _text(record, at)
            smallest, largest = smallest[:-_SEQUENCE_BYTES], largest[:-_SEQUENCE_BYTES]
            yield SstSpan(number=number, level=level, smallest=smallest, largest=largest)
        else:
            raise ValueError(f"a version edit has the tag {tag}")


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _text(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = _number(data, at)
    if at + size > len(data):
        raise ValueError("it is cut off")
    return data[at : at + size], at + size


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
