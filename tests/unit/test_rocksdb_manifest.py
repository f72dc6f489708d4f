"""What makes a MANIFEST one that RocksDB can open: the framing of its records, and files and numbers that agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from state_backend.adapters.rocks import RocksStore
from state_backend.formats.rocksdb_manifest import live_ssts
from state_backend.values.errors import CorruptFile
from tests.support.version_edits import edit, log_of, piece, text

LOG, NEXT, LAST, DELETED, PREVIOUS_LOG, LEAST_LOG = 2, 3, 4, 6, 9, 10
FIRST_PIECE, MIDDLE_PIECE, LAST_PIECE = 2, 3, 4


def file(number: int, level: int, smallest: bytes, largest: bytes, epoch: int = 1, fields: bytes = b"") -> bytes:
    """The part of a version edit that adds a file of 100 bytes whose greatest sequence number is 7."""
    head = edit(103, level, number, 100) + text(smallest + bytes(8)) + text(largest + bytes(8)) + edit(5, 7)
    return head + fields + (edit(13) + text(edit(epoch)) if epoch else b"") + edit(1)


WHOLE = edit(LOG, 4, PREVIOUS_LOG, 0, NEXT, 10, LAST, 7)
LEAST_LOG_11 = edit(3) + text((11).to_bytes(8, "little"))


@pytest.mark.parametrize(
    ("edits", "files"),
    [
        ([], 0),
        ([file(8, 6, b"a", b"c"), file(9, 6, b"d", b"f")], 2),
        ([file(8, 6, b"a", b"c"), file(9, 6, b"c", b"f")], 2),  # a deleted range ends before c
        ([file(8, 6, b"a", b"f"), file(9, 5, b"b", b"c")], 2),
        ([file(8, 0, b"a", b"f", epoch=1), file(9, 0, b"b", b"c", epoch=2)], 2),
        ([file(8, 0, b"a", b"f", epoch=0), file(9, 0, b"b", b"c", epoch=0)], 2),  # before RocksDB 7.9
        ([file(8, 0, b"a", b"f"), edit(DELETED, 0, 8) + file(8, 6, b"a", b"f")], 1),  # moved to another level
        ([edit(LEAST_LOG, 10)], 0),
    ],
    ids=["empty", "neighbours", "one key", "two levels", "two epochs", "no epochs", "moved", "a log"],
)  # fmt: skip
def test_files_that_do_not_overlap_are_accepted(edits: list[bytes], files: int) -> None:
    assert len(live_ssts(log_of(*edits, WHOLE), "it")) == files


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        ([file(8, 6, b"a", b"c"), file(9, 6, b"b", b"f")], "files 8 and 9 of level 6 overlap"),
        ([file(8, 6, b"d", b"f"), file(9, 6, b"a", b"e")], "files 9 and 8 of level 6 overlap"),
        ([file(8, 0, b"a", b"f"), file(9, 0, b"b", b"c")], "files 8 and 9 of level 0 overlap"),
        ([file(8, 6, b"a", b"c"), file(8, 0, b"d", b"f")], "two files have the number 8"),
        ([file(10, 6, b"a", b"c")], "the next file is 10, the last file 10"),
        ([edit(LOG, 11)], "the last log 11"),
        ([edit(PREVIOUS_LOG, 11)], "the last log 11"),
        ([edit(LEAST_LOG, 11)], "the last log 11"),
        # What shrinking parallelism once copied from one shard's MANIFEST to another's: RocksDB deleted its new log, and crashed.
        ([file(8, 6, b"a", b"c", fields=LEAST_LOG_11)], "the last log 11"),
        ([file(8, 6, b"a", b"c"), WHOLE, edit(LAST, 6)], "the last sequence number is 6, and a file has 7"),
        ([WHOLE, edit(LAST, 1 << 56)], "the last sequence number is 72057594037927936"),
        ([WHOLE, edit(NEXT, 1 << 62)], "the next file is 4611686018427387904"),
        ([edit(LOG) + b"\xff" * 10 + b"\x01"], "too long"),
        ([edit(200, 1)], "unknown tag 200"),
    ],
)  # fmt: skip
def test_files_and_numbers_that_contradict_each_other_are_refused(edits: list[bytes], says: str) -> None:
    records = edits if WHOLE in edits else [*edits, WHOLE]
    with pytest.raises(CorruptFile, match=f"^the MANIFEST is not a MANIFEST that RocksDB can open: .*{says}"):
        live_ssts(log_of(*records), "the MANIFEST")


@pytest.mark.parametrize(
    ("log", "says"),
    [
        (log_of(WHOLE)[:-1], "byte 0 is damaged"),
        (log_of(WHOLE)[:5], "unpack"),
        (log_of(WHOLE, WHOLE)[:-1] + b"\x00", "byte 15 is damaged"),
        (log_of(WHOLE) + bytes(20), "kind 0 is unknown"),
        (log_of(WHOLE) + piece(6, b""), "kind 6 is unknown"),
        (piece(LAST_PIECE, WHOLE), "a piece is missing before the record at byte 0"),
        (log_of(WHOLE) + piece(MIDDLE_PIECE, WHOLE), "a piece is missing before the record at byte 15"),
        (piece(FIRST_PIECE, WHOLE) + log_of(WHOLE), "a piece is missing before the record at byte 15"),
        (piece(FIRST_PIECE, WHOLE) + piece(FIRST_PIECE, WHOLE), "a piece is missing before the record at byte 15"),
        (log_of(WHOLE) + piece(FIRST_PIECE, WHOLE), "the last record has no end"),
    ],
)  # fmt: skip
def test_a_log_with_damaged_record_framing_is_refused(log: bytes, says: str) -> None:
    with pytest.raises(CorruptFile, match=says):
        live_ssts(log, "it")


def test_pieces_of_a_record_are_joined() -> None:
    record = file(8, 6, b"a", b"c") + WHOLE
    log = piece(FIRST_PIECE, record[:2]) + piece(MIDDLE_PIECE, record[2:3]) + piece(LAST_PIECE, record[3:])
    assert [sst.number for sst in live_ssts(log, "it")] == [8]


@pytest.mark.parametrize("tail", range(8))
def test_a_record_begins_in_the_next_block_if_no_header_fits_in_this_one(tail: int) -> None:
    size = 32 * 1024 - 7 - tail
    filling = edit(1 << 13, size - 5) + bytes(size - 5)  # a tag that readers ignore, in two bytes, and its text
    record = file(8, 6, b"a", b"c") + WHOLE
    rest = piece(FIRST_PIECE, b"") + piece(LAST_PIECE, record) if tail == 7 else bytes(tail) + log_of(record)
    assert [sst.number for sst in live_ssts(log_of(filling) + rest, "it")] == [8]


def test_records_of_rocksdb_that_cross_blocks_are_read(tmp_path: Path) -> None:
    keys = [bytes([0, n]) + bytes(20_000) for n in range(4)]
    with RocksStore(tmp_path / "db") as store:
        for key in keys:
            store.write([(key, b"v")])
            store.sorted_runs()
        _, small = store.capture(tmp_path / "image")
    (manifest,) = (f for f in small if f.name.startswith("MANIFEST-"))
    ssts = live_ssts(manifest.read_bytes(), "it")
    assert [(sst.smallest, sst.largest) for sst in ssts] == [(key, key) for key in keys]
