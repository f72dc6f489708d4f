"""Reader of RocksDB's MANIFEST.

It reads the SSTs of a store with their key ranges. It refuses a MANIFEST on which RocksDB would crash, spin or
overwrite files: RocksDB itself checks too little before it acts.

    log      blocks of 32 KiB: (masked crc32c u32 LE, size u16 LE, kind u8, payload) …; up to 6 zeros at a block's end
             kind: 1 a whole record, 2 its first, 3 a middle, 4 its last piece
    record   a version edit: (tag varint, value of the tag) …
    new file level, number, size, smallest key, largest key, two sequence numbers, (field, bytes) … until field 1

Each key has 8 more bytes, its sequence number and kind. The reader refuses a log with an unknown tag, except if RocksDB
marks the tag as ignorable.

Source: RocksDB's `db/log_format.h`, `db/version_edit.cc`, `db/version_edit_handler.cc` and `db/version_builder.cc`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import google_crc32c

from state_backend.values.errors import CorruptFile
from state_backend.values.frozen import frozen

_BLOCK_BYTES = 32 * 1024
_HEADER = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_IGNORABLE = 1 << 13
_LOG, _NEXT_FILE, _LAST_SEQUENCE, _DELETED_FILE, _PREVIOUS_LOG, _LEAST_LOG, _NEW_FILE = 2, 3, 4, 6, 9, 10, 103
# The tags of version edits whose value is a number. Tags 200 to 202 are left out: only a store with several column
# families writes them, and Cairn's stores have one column family. So the reader refuses a MANIFEST with these tags.
_NUMBERS = (_LOG, _NEXT_FILE, _LAST_SEQUENCE, _PREVIOUS_LOG, _LEAST_LOG, 203, 300)
_TEXTS = (1,)
# Fields of a new file's entry. One field concerns the whole store: the number of the least write-ahead log to keep.
_FIELDS_END, _LEAST_LOG_FIELD, _EPOCH, _SEQUENCE_BYTES = 1, 3, 13, 8
_MOST_FILES, _MOST_SEQUENCE = 1 << 62, (1 << 56) - 1


@frozen
class SstSpan:
    """A live SST of a store, as RocksDB's file MANIFEST describes it.

    Attributes:
        number: The number in the file's name: 12 for `000012.sst`.
        level: The level in RocksDB's tree.
        smallest: The smallest key in the SST. A deleted range counts with its start.
        largest: The largest key in the SST. A deleted range counts with its end.
        epoch: RocksDB's epoch number. In level 0, the file with the greater epoch is newer. 0 if the MANIFEST has no
            epoch for the SST.
        last_sequence: The greatest sequence number of the SST's entries.
    """

    number: int
    level: int
    smallest: bytes
    largest: bytes
    epoch: int
    last_sequence: int

    def touches(self, start: bytes, end: bytes | None) -> bool:
        """Return True if the SST may have a key with start <= key < end. `end` None: any key from `start` on."""
        return self.largest >= start and (end is None or self.smallest < end)


def live_ssts(log: bytes, name: str) -> tuple[SstSpan, ...]:
    """Return the live SSTs of the store that the MANIFEST `log` describes, by number, if RocksDB can open the store.

    Raises:
        CorruptFile: The log, called `name` in the message, is damaged, has unknown parts, or contradicts itself.
    """
    live: dict[int, SstSpan] = {}
    numbers = {_NEXT_FILE: 0, _LAST_SEQUENCE: 0}
    greatest_log = 0
    try:
        for record in _records(log):
            for edit in _edits(record):
                if isinstance(edit, SstSpan):
                    if edit.number in live:
                        raise ValueError(f"two files have the number {edit.number}")
                    live[edit.number] = edit
                elif edit[0] == _DELETED_FILE:
                    live.pop(edit[1], None)
                elif edit[0] in numbers:
                    numbers[edit[0]] = edit[1]
                else:
                    greatest_log = max(greatest_log, edit[1])
        spans = tuple(span for _, span in sorted(live.items()))
        _check(spans, numbers[_NEXT_FILE], numbers[_LAST_SEQUENCE], greatest_log)
    except (IndexError, ValueError, struct.error) as error:
        raise CorruptFile(f"{name} is not a MANIFEST that RocksDB can open: {error}") from error
    return spans


def _check(spans: Sequence[SstSpan], next_file: int, last_sequence: int, greatest_log: int) -> None:
    """Raise ValueError if the numbers or key ranges in a MANIFEST contradict each other.

    RocksDB takes the next file number for its new write-ahead log. If the MANIFEST has a greater log number, RocksDB
    deletes the new log as obsolete while it opens the store, and crashes.
    """
    last_file = max((span.number for span in spans), default=0)
    if not max(last_file + 1, greatest_log) <= next_file < _MOST_FILES:
        raise ValueError(f"the next file is {next_file}, the last file {last_file}, the last log {greatest_log}")
    greatest = max((span.last_sequence for span in spans), default=0)
    if not greatest <= last_sequence <= _MOST_SEQUENCE:
        raise ValueError(f"the last sequence number is {last_sequence}, and a file has {greatest}")
    # The files of a level make one sorted run. In level 0, the files of one epoch make a run. Two neighbours may share
    # a key: there, a range deletion ends before the key. In level 0, files without an epoch may overlap: RocksDB
    # chooses their order.
    runs: dict[tuple[int, int], SstSpan] = {}
    for span in sorted(spans, key=lambda span: (span.smallest, span.largest)):
        run = (span.level, 0 if span.level else span.epoch)
        before = runs.get(run)
        if before is not None and before.largest > span.smallest and run != (0, 0):
            raise ValueError(f"files {before.number} and {span.number} of level {span.level} overlap")
        runs[run] = span


def mentions(log: bytes, name: str, text: bytes) -> bool:
    """Return True if a record of a MANIFEST contains some bytes, such as a key. Records about deleted files count too.

    Args:
        log: The content of the MANIFEST.
        name: The name of the MANIFEST, for the message.
        text: The bytes to search.

    Raises:
        CorruptFile: The log, called `name` in the message, is damaged.
    """
    try:
        return any(text in record for record in _records(log))
    except (IndexError, ValueError, struct.error) as error:
        raise CorruptFile(f"{name}: not a MANIFEST that can be followed: {error}") from error


def _records(log: bytes) -> Iterator[bytes]:
    """Yield the records of a MANIFEST, joined from their pieces. Raise ValueError for a damaged or missing piece."""
    at, gathered, last = 0, b"", _LAST
    while at < len(log):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _HEADER.size:
            at += left
            continue
        crc, size, kind = _HEADER.unpack_from(log, at)
        payload = log[at + _HEADER.size : at + _HEADER.size + size]
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or len(payload) < size or crc != _masked_crc(kind, payload):
            raise ValueError(f"the record at byte {at} is damaged, or its kind {kind} is unknown")
        if (kind in (_MIDDLE, _LAST)) == (last in (_WHOLE, _LAST)):
            raise ValueError(f"a piece is missing before the record at byte {at}")
        at, last = at + _HEADER.size + size, kind
        gathered = payload if kind in (_WHOLE, _FIRST) else gathered + payload
        if kind in (_WHOLE, _LAST):
            yield gathered
    if last not in (_WHOLE, _LAST):
        raise ValueError("the last record has no end")


def _masked_crc(kind: int, payload: bytes) -> int:
    crc: int = google_crc32c.value(bytes([kind]) + payload)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _edits(record: bytes) -> Iterator[SstSpan | tuple[int, int]]:
    """Yield the changes in one record of a MANIFEST: an `SstSpan` for a new file, (tag, number) for other changes."""
    at = 0
    while at < len(record):
        tag, at = number_at(record, at)
        if tag in _NUMBERS:
            number, at = number_at(record, at)
            if tag in (_NEXT_FILE, _LAST_SEQUENCE, _LOG, _PREVIOUS_LOG, _LEAST_LOG):
                yield tag, number
        elif tag in _TEXTS or tag & _IGNORABLE:
            _, at = _text(record, at)
        elif tag == _DELETED_FILE:
            _, at = number_at(record, at)
            number, at = number_at(record, at)
            yield tag, number
        elif tag == _NEW_FILE:
            level, at = number_at(record, at)
            number, at = number_at(record, at)
            _, at = number_at(record, at)
            smallest, at = _text(record, at)
            largest, at = _text(record, at)
            _, at = number_at(record, at)
            last_sequence, at = number_at(record, at)
            epoch = 0
            while True:
                tag, at = number_at(record, at)
                if tag == _FIELDS_END:
                    break
                text, at = _text(record, at)
                if tag == _EPOCH:
                    epoch, _ = number_at(text, 0)
                elif tag == _LEAST_LOG_FIELD:
                    yield _LEAST_LOG, int.from_bytes(text, "little")
            yield SstSpan(
                number=number,
                level=level,
                smallest=smallest[:-_SEQUENCE_BYTES],
                largest=largest[:-_SEQUENCE_BYTES],
                epoch=epoch,
                last_sequence=last_sequence,
            )
        else:
            raise ValueError(f"a version edit has the unknown tag {tag}")


def number_at(data: bytes, at: int) -> tuple[int, int]:
    """Return (the varint that begins at offset `at`, the offset behind it)."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")


def _text(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = number_at(data, at)
    if at + size > len(data):
        raise ValueError("a text is cut off")
    return data[at : at + size], at + size
