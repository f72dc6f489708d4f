"""Segments of the changelog: what is read is what was written, or an error; a replay does what the recorded writes did."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from state_backend.adapters import change_recorder
from state_backend.adapters.change_recorder import ChangeRecorder
from state_backend.adapters.rocks import RocksStore
from state_backend.formats import changelog
from state_backend.values.errors import CorruptFile, UnsupportedFormat
from tests.support.tiers import at_tier

keys = st.binary(max_size=4)
values = st.one_of(st.none(), st.binary(max_size=8))
ranges = st.tuples(keys, keys).filter(lambda r: r[0] < r[1])


def encoded(deleted: list[tuple[bytes, bytes]], entries: list[changelog.Pair]) -> bytes:
    file = io.BytesIO()
    assert changelog.write_segment(file, deleted, entries) == len(deleted) + len(entries)
    return file.getvalue()


def decoded(data: bytes) -> tuple[list[changelog.Pair], list[changelog.Pair]]:
    read: dict[int, list[changelog.Pair]] = {changelog.RANGES: [], changelog.ENTRIES: []}
    for kind, pairs in changelog.read_segment(io.BytesIO(data), "a segment"):
        read[kind] += pairs
    return read[changelog.RANGES], read[changelog.ENTRIES]


SEGMENT = encoded(
    [(b"\x00\x01", b"\x00\x02"), (b"", b"a")], [(b"", b""), (b"a", None), (b"b", b"\xff" * 300), (b"b\x00", b"x")]
)


@given(st.lists(ranges, max_size=5), st.dictionaries(keys, values, max_size=20))
def test_a_segment_is_read_as_it_was_written(
    deleted: list[tuple[bytes, bytes]], entries: dict[bytes, bytes | None]
) -> None:
    ascending = sorted(entries.items())
    assert decoded(encoded(deleted, ascending)) == (deleted, ascending)


def test_a_segment_of_many_blocks_is_read_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full by count, full by bytes, and an entry that is larger than a block."""
    monkeypatch.setattr(changelog, "_BLOCK_BYTES", 10_000)
    entries: list[changelog.Pair] = [(n.to_bytes(4, "big"), bytes(n % 90)) for n in range(10_000)]
    entries[5_000] = (entries[5_000][0], bytes(25_000))
    data = encoded([], entries)
    blocks = [len(pairs) for _, pairs in changelog.read_segment(io.BytesIO(data), "a segment")]
    assert len(blocks) > 10_000 * 45 // 10_000
    assert decoded(data) == ([], entries)


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_any_flipped_byte_is_found(mask: int) -> None:
    for at in range(len(SEGMENT)):
        damaged = bytearray(SEGMENT)
        damaged[at] ^= mask
        with pytest.raises((CorruptFile, UnsupportedFormat), match="a segment: "):
            decoded(bytes(damaged))


def test_a_segment_of_a_newer_format_is_refused() -> None:
    """S27."""
    with pytest.raises(UnsupportedFormat, match=r"another release of Cairn wrote format 2; .* reads format 1"):
        decoded(SEGMENT.replace(b"CAIRNLOG\x01", b"CAIRNLOG\x02"))


def test_any_truncation_and_anything_appended_is_found() -> None:
    for size in range(len(SEGMENT)):
        with pytest.raises(CorruptFile, match="a segment: "):
            decoded(SEGMENT[:size])
    with pytest.raises(CorruptFile, match="then the end of the file"):
        decoded(SEGMENT + b"\x00")


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        ([(changelog.ENTRIES, [(b"b", b""), (b"a", b"")])], "do not ascend"),
        ([(changelog.ENTRIES, [(b"a", b"")]), (changelog.ENTRIES, [(b"a", b"")])], "do not ascend"),
        ([(changelog.ENTRIES, [(b"a", b"")]), (changelog.RANGES, [(b"a", b"b")])], "kind 1 follows kind 2"),
        ([(4, [(b"a", b"")])], "kind 4"),
        ([(changelog.MANIFEST, [(b"", b"m")]), (changelog.ENTRIES, [(b"a", b"")])], "kind 2 follows kind 3"),
        ([(changelog.MANIFEST, [(b"", b"m")]), (changelog.MANIFEST, [(b"", b"m")])], "kind 3 follows kind 3"),
        ([(changelog.RANGES, [(b"b", b"b")])], "ends before it starts"),
        ([(changelog.RANGES, [(b"b", None)])], "ends before it starts"),
    ],
)
def test_a_segment_of_invalid_blocks_is_refused(blocks: list[tuple[int, list[changelog.Pair]]], says: str) -> None:
    """Right checksums, wrong content."""
    file = io.BytesIO(changelog.MAGIC)
    file.seek(0, io.SEEK_END)
    for kind, pairs in blocks:
        changelog._write_block(file, kind, len(pairs), changelog._pack(pairs))
    changelog._write_block(file, changelog.END, sum(len(pairs) for _, pairs in blocks), b"")
    with pytest.raises(CorruptFile, match=says):
        decoded(file.getvalue())


@pytest.mark.parametrize(
    ("count", "raw"), [(0, b"\x00" * 8), (2, b"\x00" * 8), (1, b"\x00\x00\x00\x01" * 2), (2**60, b"\x00" * 8)]
)
def test_a_block_whose_lengths_lie_is_refused(count: int, raw: bytes) -> None:
    file = io.BytesIO(changelog.MAGIC)
    file.seek(0, io.SEEK_END)
    changelog._write_block(file, changelog.ENTRIES, count, raw)
    with pytest.raises(CorruptFile, match="a segment: damaged block: "):
        decoded(file.getvalue())


writes = st.one_of(
    st.lists(st.tuples(keys, values), max_size=4).map(lambda changes: ("write", changes)),
    ranges.map(lambda r: ("delete_range", r)),
)


@settings(max_examples=at_tier(fast=20, ci=40, all=60), deadline=None)
@given(
    before=st.lists(st.tuples(keys, values), max_size=10), program=st.lists(writes, max_size=12), memory=st.booleans()
)
def test_a_replay_does_what_the_recorded_writes_did(
    before: list[changelog.Pair], program: list[tuple[str, list]], memory: bool
) -> None:
    """Over the same start, whatever the order of puts, deletes and deleted ranges, held in memory or spilled at each write."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if not memory:
            patch.setattr(change_recorder, "_MEMORY_BYTES", 1)
        recorder = ChangeRecorder(Path(folder) / "changes", limit_bytes=10**6)
        with RocksStore(Path(folder) / "first") as first, RocksStore(Path(folder) / "second") as second:
            first.write(before)
            second.write(before)
            first.recorder = recorder
            for call, arguments in program:
                if call == "write":
                    first.write(arguments)
                else:
                    first.delete_range(*arguments)
            size_bytes = recorder.content_bytes()
            deleted, entries = recorder.changes()
            ascending = list(entries)
            assert size_bytes is not None
            assert size_bytes >= changelog.content_bytes(deleted) + changelog.content_bytes(ascending)
            touched = {key for call, changes in program if call == "write" for key, _ in changes}
            assert [key for key, _ in ascending] == sorted({key for key, _ in ascending} & touched)
            for start, end in deleted:
                second.delete_range(start, end)
            second.write(ascending)
            assert list(second.scan(b"", None)) == list(first.scan(b"", None))
            assert (Path(folder) / "changes").exists() == (not memory and bool(touched))


def test_the_last_write_of_a_key_is_the_only_one_kept(tmp_path: Path) -> None:
    recorder = ChangeRecorder(tmp_path / "changes", limit_bytes=1000)
    for n in range(100):
        recorder.write([(b"key", b"%03d" % n), (b"gone", None)])
    assert recorder.content_bytes() == len(b"key099gone")
    assert list(recorder.changes()[1]) == [(b"gone", None), (b"key", b"099")]


def test_deleting_an_empty_range_records_no_change(tmp_path: Path) -> None:
    recorder = ChangeRecorder(tmp_path / "changes", limit_bytes=1000)
    recorder.write([(b"a", b"1")])
    recorder.delete_range(b"a", b"a")
    recorder.delete_range(b"b", b"a")
    deleted, entries = recorder.changes()
    assert (deleted, list(entries)) == ([], [(b"a", b"1")])


def test_the_change_recorder_gives_up_beyond_its_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_recorder, "_MEMORY_BYTES", 10_000)
    recorder = ChangeRecorder(tmp_path / "changes", limit_bytes=20_000)
    for n in range(1_000):
        recorder.write([(n.to_bytes(4, "big"), bytes(100))])
        assert len(recorder._net) <= 10_000 // 160
    assert recorder.content_bytes() is None
    assert sum(f.stat().st_size for f in (tmp_path / "changes").iterdir() if f.suffix == ".sst") < 40_000
