"""RocksDB store of one shard. This is the only module that imports rocksdict.

rocksdict raises every failure as a plain `Exception`. This module turns each into an error of this project. Every
iteration ends with a status check: at a corrupt block, an iterator ends without an error, as if no more keys followed.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol

import rocksdict
from rocksdict import Rdict

from state_backend.adapters.rocks_metadata import borrow_metadata
from state_backend.adapters.work_folders import FULL_DISK
from state_backend.formats.rocksdb_manifest import live_ssts
from state_backend.values.doing import doing
from state_backend.values.errors import CorruptFile, StorageUnavailable, UsageError
from state_backend.values.frozen import frozen

MIB = 1024 * 1024
GIB = 1024 * MIB
SST_SUFFIX = ".sst"
# Size of a block before compression. RocksDB reads and unpacks a whole block for one key.
_BLOCK_BYTES = 16 * 1024
_SCAN_ROWS, _SCAN_BYTES = 4096, 16 * MIB
# _RUNS_WITHIN_INTERVAL is the number of sorted runs at which RocksDB itself starts merges, because more runs would
# make reads slow. Only an interval that fills that many write buffers reaches this number. RocksDB then merges at
# most _RUNS_PER_MERGE runs at once.
_RUNS_WITHIN_INTERVAL, _RUNS_PER_MERGE = 32, 8
# After this many unwanted keys in a row, `read_wanted` seeks the next wanted key instead of passing more keys.
_UNWANTED_KEYS = 32
# If lookups of at least _SHARED_KEYS keys take more than _DISK_S for each key, their blocks come from the disk. A disk
# serves many reads at once in little more time than one. So later lookups are spread over _READERS threads.
_SHARED_KEYS, _DISK_S, _READERS = 128, 15e-6, 16
# An open store whose MANIFEST is larger than this is opened again between two intervals.
_MANIFEST_BYTES = 4 * 1024
_ANY_RATIO = 1_000_000_000
_ANY_BYTES = 1 << 60
_FILES_OF_A_SHARD = 64
# Each thread of a merge writes files of its own, so it should have some tens of milliseconds of work.
_LEAST_BYTES_OF_A_THREAD = 8 * MIB
_TABLE_PROPERTIES = re.compile(r"(# entries|# deletions|# range deletions|raw key size|raw value size)=(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Settings of one shard's RocksDB: memory, files, compaction and the host's file cache.

    Attributes:
        write_buffer_bytes: Bytes of writes that RocksDB keeps in memory before it writes them to a file.
        block_cache_bytes: The most bytes of memory for blocks that RocksDB has read from files.
        target_file_bytes: The size at which a merge of files begins a new file. Smaller files mean smaller uploads.
        bloom_bits_per_key: Bits for each key in the Bloom filter. More bits make look-ups of absent keys faster.
        background_jobs: The most merges and flushes at the same time, and the most threads of a merge.
        compression: Compression of new files: "lz4" or "zstd". With "zstd", files of text are a quarter smaller, but an
            interval that reads few of many keys needs more CPU.
        most_sorted_runs: If a shard has more sorted runs of RocksDB than this at the end of an interval, Cairn merges
            the newest runs.
        most_obsolete_percent: If the bytes of deleted and replaced entries exceed this percentage of a shard's live
            bytes, Cairn rewrites the shard in one of the next eight intervals.
        consolidation_bytes: The most bytes that all shards together rewrite in one interval because of
            `most_obsolete_percent`.
        cache_dir: The folder where a host keeps state files for later intervals. None: no cache. `{temp}` stands for
            the host's folder for temporary files, and `{uid}` for the user's id.
        cache_bytes: The most bytes that the cache keeps. The cache also leaves at least as much disk space free as it
            takes.
        metadata_dir: A folder in memory for small files that RocksDB syncs whenever it opens a shard, less than 1 MB
            for each. None: these files lie beside the state.
    """

    write_buffer_bytes: int = 64 * MIB
    block_cache_bytes: int = 64 * MIB
    target_file_bytes: int = 64 * MIB
    bloom_bits_per_key: int = 10
    background_jobs: int = 2
    compression: Literal["lz4", "zstd"] = "lz4"
    most_sorted_runs: int = 12
    most_obsolete_percent: int = 80
    consolidation_bytes: int = 16 * GIB
    cache_dir: str | None = "{temp}/cairn-cache-{uid}"
    cache_bytes: int = 20 * GIB
    metadata_dir: str | None = "/dev/shm"

    def __post_init__(self) -> None:
        if self.compression not in ("lz4", "zstd"):
            raise UsageError(f"compression={self.compression!r}: expected 'lz4' or 'zstd'")
        if self.most_sorted_runs < 2 or self.most_obsolete_percent < 1:
            raise UsageError(
                f"most_sorted_runs={self.most_sorted_runs} and most_obsolete_percent={self.most_obsolete_percent}: "
                "expected at least 2 and 1; less would rewrite all state in every interval"
            )

    def cache_folder(self) -> Path | None:
        """Return `cache_dir` with this host's temp folder and user id filled in; None for no cache."""
        if self.cache_dir is None:
            return None
        return Path(self.cache_dir.replace("{temp}", tempfile.gettempdir()).replace("{uid}", str(os.getuid())))

    def to_options(self) -> rocksdict.Options:
        table = rocksdict.BlockBasedOptions()
        table.set_bloom_filter(self.bloom_bits_per_key, False)
        table.set_block_cache(rocksdict.Cache(self.block_cache_bytes))
        table.set_block_size(_BLOCK_BYTES)
        table.set_format_version(6)
        universal = rocksdict.UniversalCompactOptions()
        universal.max_size_amplification_percent = _ANY_RATIO
        # A merge holds one block of every run in memory, and a block is at least as large as its largest entry. Merges
        # of few runs at once need less memory.
        universal.max_merge_width = _RUNS_PER_MERGE
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compaction_style(rocksdict.DBCompactionStyle.universal())
        options.set_universal_compaction_options(universal)
        options.set_level_zero_file_num_compaction_trigger(_RUNS_WITHIN_INTERVAL)
        options.set_level_zero_slowdown_writes_trigger(2 * _RUNS_WITHIN_INTERVAL)
        options.set_level_zero_stop_writes_trigger(4 * _RUNS_WITHIN_INTERVAL)
        if self.compression == "zstd":
            # zstd level 1. Level 3, RocksDB's default, compacted 15 % slower and saved 1.4 % more.
            options.set_compression_type(rocksdict.DBCompressionType.zstd())
            options.set_compression_options(-14, 1, 0, 0)
        else:
            options.set_compression_type(rocksdict.DBCompressionType.lz4())
        options.set_block_based_table_factory(table)
        options.set_write_buffer_size(self.write_buffer_bytes)
        options.set_target_file_size_base(self.target_file_bytes)
        options.set_max_background_jobs(self.background_jobs)
        options.set_max_subcompactions(self.background_jobs)
        options.set_keep_log_file_num(1)
        # By default, RocksDB allocates 4 MiB for the file MANIFEST. With `metadata_dir`, this file lies in a folder in
        # memory, such as /dev/shm, so each open store would take 4 MiB of memory.
        options.set_manifest_preallocation_size(64 * 1024)
        options.set_stats_dump_period_sec(0)
        options.set_stats_persist_period_sec(0)
        return options


class Recorder(Protocol):
    """An object that a `RocksStore` calls after each write, such as `ChangeRecorder`."""

    def write(self, changes: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Take note of changes that were just written."""

    def delete_range(self, start: bytes, end: bytes) -> None:
        """Take note that all keys with start <= key < end were just deleted."""

    def close(self) -> None:
        """Stop the recorder: it will get no more changes."""


@frozen
class SortedRun:
    """A sorted run: one file of level 0, or all files of a deeper level. No key is in two files of a run."""

    size_bytes: int
    entries: int
    deletions: int
    raw_bytes: int  # size of all keys and values before compression


class Stride:
    """The number of entries to read at once so that they have about `size_bytes`.

    Sizes are unknown before a read. So the number begins at 4 and follows the sizes of the entries read last.
    """

    __slots__ = ("_most", "_size_bytes", "rows")

    def __init__(self, *, size_bytes: int, most: int) -> None:
        self.rows = 4
        self._size_bytes, self._most = size_bytes, most

    def seen(self, rows: int, size_bytes: int) -> None:
        fitting = self._size_bytes * rows // size_bytes if size_bytes else self._most
        self.rows = max(1, min(4 * self.rows, fitting, self._most))


class RocksStore:
    """A sorted map of bytes to bytes in one directory. Not thread-safe.

    If the process crashes, all changes since the last `capture` are lost.
    """

    def __init__(self, directory: Path, options: EngineOptions = EngineOptions(), *, partial: bool = False) -> None:
        """Open the store, or create an empty one. `partial`: also open a store in which SSTs are missing."""
        self.directory = directory
        self.recorder: Recorder | None = None
        self._options = options
        self._reading = _Failures(f"can't read the state in {directory}")
        self._writing = _Failures(f"can't write the state in {directory}")
        opened = options.to_options()
        # With paranoid checks, RocksDB refuses to open a store in which files are missing.
        opened.set_paranoid_checks(not partial)
        files = len(list(directory.glob(f"*{SST_SUFFIX}")))
        if files and not (directory / "CURRENT").exists():
            raise CorruptFile(
                f"can't open the state in {directory}: found {files} files, but no CURRENT; does another process have it open?"
            )
        # By default, RocksDB starts 16 threads to open files. For a few files, starting the threads takes longer than
        # opening.
        opened.set_max_file_opening_threads(min(16, 1 + files // 32))
        self._metadata = borrow_metadata(directory, options.metadata_dir)
        if self._metadata is not None:
            opened.set_db_paths([rocksdict.DBPath(str(directory), _ANY_BYTES)])
        folder = self._metadata.folder if self._metadata is not None else directory
        try:
            with doing("opening RocksDB"), _Failures(f"can't open the state in {directory}"):
                if (folder / "CURRENT").exists():
                    manifest = folder / _manifest_in(folder)
                    live_ssts(manifest.read_bytes(), manifest.name)
                # Without the third argument, rocksdict takes the options from a file OPTIONS in the folder, if there is
                # one. The file has no bits of the Bloom filter, so new files would have no filter.
                self._db = Rdict(str(folder), opened, {"default": opened})
        except BaseException:
            self._return_metadata()
            raise
        unlogged = rocksdict.WriteOptions()
        # RocksDB writes no write-ahead log: a checkpoint takes all writes of an interval, or the store is deleted. So
        # no process would ever read the log.
        unlogged.disable_wal = True
        self._db.set_write_options(unlogged)
        # A merge changes RocksDB's options until the store is opened again.
        self._changed_options = False
        self._readers: ThreadPoolExecutor | None = None

    def __enter__(self) -> RocksStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def get(self, key: bytes) -> bytes | None:
        with self._reading:
            value: bytes | None = self._db.get(key)
        return value

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key; None for an absent key. Ascending keys are fastest."""
        wanted, share, began = list(keys), -(-len(keys) // _READERS), time.monotonic()
        with self._reading:
            if self._readers is not None and len(wanted) >= _SHARED_KEYS:
                parts = (wanted[at : at + share] for at in range(0, len(wanted), share))
                return [*chain.from_iterable(self._readers.map(self._db.get, parts))]
            values: list[bytes | None] = self._db.get(wanted)
        if self._readers is None and time.monotonic() - began > _DISK_S * max(len(wanted), _SHARED_KEYS):
            self._readers = ThreadPoolExecutor(_READERS)
        return values

    def write(self, changes: Iterable[tuple[bytes, bytes | None]]) -> None:
        pairs = list(changes)
        self.write_columns([key for key, _ in pairs], [value for _, value in pairs])

    def write_columns(
        self, keys: Sequence[bytes], values: Sequence[bytes | None], deletions: int | None = None
    ) -> None:
        """Write `values[i]` under `keys[i]` in one atomic batch. The value None deletes the key."""
        batch = rocksdict.WriteBatch(raw_mode=True)
        if deletions is None:
            deletions = values.count(None)
        if deletions == len(values):
            deque(map(batch.delete, keys), maxlen=0)
        elif deletions:
            for key, value in zip(keys, values, strict=True):
                if value is None:
                    batch.delete(key)
                else:
                    batch.put(key, value)
        else:
            deque(map(batch.put, keys, values), maxlen=0)
        with self._writing:
            self._db.write(batch)
        if self.recorder is not None:
            self.recorder.write(list(zip(keys, values, strict=True)))

    def scan(self, start: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        """Yield the entries with start <= key < end, ascending. A write during the scan may show in later entries.

        The scan reads chunks, and no iterator stays open between them: it would keep the store locked after `close`.
        """
        for keys, values in self.chunks(start, end):
            yield from zip(keys, values, strict=True)

    def chunks(
        self, start: bytes, end: bytes | None, *, rows: int = _SCAN_ROWS, most_bytes: int = _SCAN_BYTES
    ) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Yield the entries of `scan` in chunks, each as a list of keys and a list of values."""
        ended = False
        while not ended:
            keys, values, ended = self.read_range(start, end, rows=rows, most_bytes=most_bytes)
            if keys:
                yield keys, values
                start = keys[-1] + b"\x00"

    def read_range(
        self, start: bytes, end: bytes | None, *, rows: int = _SCAN_ROWS, most_bytes: int = _SCAN_BYTES
    ) -> tuple[list[bytes], list[bytes], bool]:
        """Return (keys, values, True if no more follow) of the first entries with start <= key < end, ascending."""
        keys: list[bytes] = []
        values: list[bytes] = []
        read = _before(end)
        with self._reading:
            iterator = self._db.iter(read)
            iterator.seek(start)
            key, value, next_ = iterator.key, iterator.value, iterator.next
            add_key, add_value = keys.append, values.append
            # key() returns None after the last key. Without a call of valid(), each entry costs one call less.
            while (at := key()) is not None:
                if len(keys) >= rows or most_bytes <= 0:
                    return keys, values, False
                entry = value()
                add_key(at)
                add_value(entry)
                most_bytes -= len(at) + len(entry)
                next_()
            iterator.status()
        return keys, values, True

    def read_keys(self, start: bytes, end: bytes, *, rows: int = sys.maxsize) -> tuple[list[bytes], bool]:
        """Return (keys, True if no more follow) in half the time that `read_range` takes for keys and values."""
        read = _before(end)
        with self._reading:
            keys: list[bytes] = list(islice(self._db.keys(from_key=start, read_opt=read), rows))
            if len(keys) == rows:
                return keys, False
            # The iterator of `keys` also ends, without an error, at a damaged block. A second iterator tells the two
            # cases apart.
            last = self._db.iter(read)
            last.seek(keys[-1] if keys else start)
            if keys:
                last.next()
            if last.valid():
                return keys, False
            last.status()
        return keys, True

    def last_key(self, start: bytes, end: bytes) -> bytes | None:
        read = _before(end)
        with self._reading:
            iterator = self._db.iter(read)
            iterator.seek_to_last()
            last: bytes | None = iterator.key()
            if last is None:
                iterator.status()
        return last if last is not None and last >= start else None

    def read_wanted(self, wanted: Sequence[bytes], most_bytes: int = sys.maxsize) -> list[bytes | None]:
        """Return the values (None: absent) of ascending keys, up to `most_bytes`, by one scan from the first key on."""
        entries: list[bytes | None] = []
        if not wanted:
            return entries
        read = _before(wanted[-1] + b"\x00")
        with self._reading:
            iterator = self._db.iter(read)
            seek, key, value, next_ = iterator.seek, iterator.key, iterator.value, iterator.next
            seek(wanted[0])
            stored = key()
            for at in wanted:
                if stored != at:
                    unwanted = 0
                    while stored is not None and stored < at:
                        unwanted += 1
                        if unwanted % _UNWANTED_KEYS:
                            next_()
                        else:
                            seek(at)
                        stored = key()
                    if stored != at:
                        # If `wanted` has a key twice, the iterator has already passed the key. The key's value is
                        # copied from the first time.
                        entries.append(entries[-1] if entries and wanted[len(entries) - 1] == at else None)
                        continue
                entry = value()
                entries.append(entry)
                most_bytes -= len(entry)
                if most_bytes <= 0:
                    return entries
                next_()
                stored = key()
            if stored is None:
                iterator.status()
        return entries

    def read_prefixes(
        self, prefixes: Sequence[bytes], rows: int = sys.maxsize
    ) -> tuple[list[bytes], list[bytes], list[int]]:
        """Read up to `rows` entries below each prefix; prefixes must ascend. Return keys, entries, counts by prefix."""
        keys: list[bytes] = []
        values: list[bytes] = []
        counts: list[int] = []
        with self._reading:
            iterator = self._db.iter(rocksdict.ReadOptions())
            seek, key, value, next_ = iterator.seek, iterator.key, iterator.value, iterator.next
            add_key, add_value = keys.append, values.append
            at: bytes | None = b""
            for prefix in prefixes:
                begin, rows_left = len(keys), rows
                # A seek is rarely needed: the next prefix's entries usually follow the last entry that was read.
                if at is not None and at < prefix:
                    seek(prefix)
                    at = key()
                while at is not None and at.startswith(prefix) and rows_left:
                    add_key(at)
                    add_value(value())
                    next_()
                    at = key()
                    rows_left -= 1
                counts.append(len(keys) - begin)
                if at is None:
                    iterator.status()
        return keys, values, counts

    def delete_range(self, start: bytes, end: bytes) -> None:
        with self._writing:
            self._db.delete_range(start, end)
        if self.recorder is not None:
            self.recorder.delete_range(start, end)

    def copy_range(self, destination: RocksStore, start: bytes, end: bytes | None) -> None:
        """Copy the entries with start <= key < end to a store on the same disk that has no keys in this range.

        The entries go into new SSTs, which the destination takes over: ordinary writes would be flushed and merged too.
        """
        read = _before(end)
        files: list[str] = []
        with _Failures(f"can't copy from {self.directory} to {destination.directory}"):
            self._db.flush()
            iterator = self._db.iter(read)
            iterator.seek(start)
            valid, key, value, next_ = iterator.valid, iterator.key, iterator.value, iterator.next
            while valid():
                files.append(str(self.directory / f"copied-{len(files)}"))
                writer = rocksdict.SstFileWriter(self._options.to_options())
                writer.open(files[-1])
                put = writer.__setitem__
                while valid() and writer.file_size() < self._options.target_file_bytes:
                    for _ in range(_SCAN_ROWS):
                        put(key(), value())
                        next_()
                        if not valid():
                            break
                writer.finish()
            iterator.status()
            if files:
                moved = rocksdict.IngestExternalFileOptions()
                moved.set_move_files(True)
                destination._db.ingest_external_file(files, moved)

    def sorted_runs(self, *, flushed: bool = True) -> list[SortedRun]:
        """Wait for compactions that run, and return the sorted runs, newest first. `flushed`: flush memory first."""
        runs = []
        with self._reading:
            if flushed:
                self._db.flush()
            self._await_compactions(600.0)
            for level, files in groupby(self._db.live_files(), key=lambda file: file["level"]):
                # After an open, RocksDB knows the sums of a level's counts, but not the counts of each file.
                counts = _table_properties(self._db, f"-at-level{level}")
                raw_bytes = counts["raw key size"] + counts["raw value size"]
                of_level = list(files)
                size_bytes = sum(f["size"] for f in of_level)
                whole = {"size": size_bytes, "num_entries": counts["# entries"], "num_deletions": counts["# deletions"]}
                runs += [
                    SortedRun(
                        size_bytes=f["size"],
                        entries=f["num_entries"],
                        deletions=f["num_deletions"],
                        raw_bytes=raw_bytes * f["size"] // size_bytes,
                    )
                    for f in ([whole] if level else of_level)
                ]
        return runs

    def range_deletions(self) -> int:
        with self._reading:
            return _table_properties(self._db, "")["# range deletions"]

    def merge_newest(self, count: int) -> None:
        """Merge the newest `count` sorted runs into one, and wait for the end.

        RocksDB has no call that merges given runs. So the options below make universal compaction pick exactly these
        runs: the present number of runs triggers a compaction, runs of any size qualify, and the width is fixed.
        """
        runs = self.sorted_runs()
        if not 2 <= count < len(runs):
            raise UsageError(f"can't merge {count} of {len(runs)} sorted runs in {self.directory}")
        universal = f"size_ratio={_ANY_RATIO};min_merge_width={count};max_merge_width={count}"
        universal += f";max_size_amplification_percent={_ANY_RATIO};"
        self._changed_options = True
        with _Failures(f"can't compact the state in {self.directory}"):
            self._db.set_options(
                {
                    "compaction_options_universal": f"{{{universal}}}",
                    "level0_file_num_compaction_trigger": str(len(runs)),
                }
            )
            self._await_compactions(600.0 + sum(run.size_bytes for run in runs[:count]) / MIB)

    def _await_compactions(self, deadline_s: float) -> None:
        started = time.monotonic()
        while True:
            if self._db.property_int_value("rocksdb.background-errors"):
                self._db.flush()  # raises the error of the background job
                raise StorageUnavailable(f"a compaction in {self.directory} failed; is the local disk full or failing?")
            if not self._db.property_int_value("rocksdb.compaction-pending") and not self._db.property_int_value(
                "rocksdb.num-running-compactions"
            ):
                return
            if time.monotonic() - started > deadline_s:
                raise StorageUnavailable(
                    f"compactions in {self.directory} did not end within {deadline_s:.0f} s; is the local disk slow or failing? try again"
                )
            time.sleep(0.001)

    def compact(self) -> None:
        """Merge all sorted runs into one, without deleted entries, in files of up to 4 times `target_file_bytes`.

        RocksDB gives each thread at least one whole file to write. So for a shard of few files, the target size is
        lowered until each thread has a file: otherwise an interval with a merge would take much longer than others.
        """
        needed_bytes = sum(run.size_bytes for run in self.sorted_runs())
        free_bytes = shutil.disk_usage(self.directory).free
        if needed_bytes > free_bytes:
            raise StorageUnavailable(
                f"can't compact the state in {self.directory}: it may write {needed_bytes} bytes, and the disk has "
                f"{free_bytes} left; free some space, or set TMPDIR to a folder on a larger disk"
            )
        options = rocksdict.CompactOptions()
        options.set_bottommost_level_compaction(rocksdict.BottommostLevelCompaction.force())
        least_bytes = self._options.target_file_bytes
        target_bytes = max(least_bytes, min(4 * least_bytes, needed_bytes // _FILES_OF_A_SHARD))
        part_bytes = needed_bytes // self._options.background_jobs
        if part_bytes >= _LEAST_BYTES_OF_A_THREAD:
            target_bytes = min(target_bytes, part_bytes)
        with _Failures(f"can't compact the state in {self.directory}"):
            if target_bytes != least_bytes:
                self._changed_options = True
                self._db.set_options({"target_file_size_base": str(target_bytes)})
            self._db.compact_range(None, None, options)
            self._await_compactions(600.0)  # Raises the errors of the compaction's jobs; `compact_range` does not.

    def capture(self, destination: Path) -> tuple[list[Path], list[Path]]:
        """Flush all entries to files, hard-link them into a new folder, and return (SSTs, metadata files) there.

        The method waits for compactions that the flush started. Otherwise chance would decide whether the next
        checkpoint uploads small or merged files. RocksDB's own checkpoint call can't be used, because it refuses a
        store whose metadata are in another folder. Its protection against concurrent writes is not needed: the caller
        is the only writer, and no background job is running.
        """
        with _Failures(f"can't capture the state in {self.directory}"):
            self._db.flush()
            self._await_compactions(600.0)
            destination.mkdir(parents=True)
            ssts = [destination / name.lstrip("/") for name in sorted(f["name"] for f in self._db.live_files())]
            for sst in ssts:
                _link_or_copy(self.directory / sst.name, sst)
            folder = self._metadata.folder if self._metadata is not None else self.directory
            small = [
                shutil.copyfile(folder / name, destination / name)
                for name in ("CURRENT", _manifest_in(folder), "rocksdict-config.json")
            ]
        return ssts, small

    def refresh(self) -> None:
        """Open a captured store again if it would otherwise differ from one that was restored from the capture.

        The stores differ if merges have changed this store's options, or if its MANIFEST has grown: each flush appends
        to it, and every checkpoint copies it. RocksDB writes a new, short MANIFEST when a store is opened.
        """
        folder = self._metadata.folder if self._metadata is not None else self.directory
        if self._changed_options or (folder / _manifest_in(folder)).stat().st_size > _MANIFEST_BYTES:
            self.close()
            RocksStore.__init__(self, self.directory, self._options)

    def close(self) -> None:
        """Close the store and its recorder. A second call does nothing."""
        if self.recorder is not None:
            self.recorder.close()
        if self._readers is not None:
            self._readers.shutdown()
        try:
            with suppress(rocksdict.DbClosedError):
                self._db.close()
        except Exception as error:  # rocksdict raises the error of a failed compaction again
            raise _translate(error, f"can't close the state in {self.directory}") from error
        finally:
            self._return_metadata()

    def _return_metadata(self) -> None:
        if self._metadata is not None:
            self._metadata.give_back()
            self._metadata = None


class _Failures:
    """Turn rocksdict's errors in the block into errors of this project.

    This is a class, because a generator-based context manager takes 1 µs, as long as a single read.
    """

    __slots__ = ("_doing",)

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, StorageUnavailable):
            raise _translate(error, self._doing) from error


def _table_properties(db: Rdict, level: str) -> dict[str, int]:
    table = db.property_value(f"rocksdb.aggregated-table-properties{level}") or ""
    return {name: int(number) for name, number in _TABLE_PROPERTIES.findall(table)}


def _before(end: bytes | None) -> rocksdict.ReadOptions:
    """Return options for an iterator that ends before `end`. Keep them as long as the iterator: they own its bound."""
    read = rocksdict.ReadOptions()
    if end is not None:
        read.set_iterate_upper_bound(end)
    return read


def _link_or_copy(source: Path, destination: Path) -> None:
    try:
        os.link(source, destination)
    except OSError as error:  # some file systems have no hard links
        if error.errno not in (errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EXDEV):
            raise
        shutil.copyfile(source, destination)


def _manifest_in(folder: Path) -> str:
    """Return the name of the MANIFEST that RocksDB would open, if it lies in the folder."""
    current = (folder / "CURRENT").read_bytes()
    if not re.fullmatch(rb"MANIFEST-[0-9]+\n", current):
        raise CorruptFile(f"CURRENT names {current[:60]!r}, expected a MANIFEST in its folder")
    return current.decode().strip()


def _translate(error: Exception, doing: str) -> Exception:
    text = str(error)
    if isinstance(error, CorruptFile):
        return CorruptFile(f"{doing}: {text}")
    if "No space left" in text or "Disk quota" in text:
        return StorageUnavailable(f"{doing}: {FULL_DISK}: {text}")
    if any(word in text for word in ("Corruption", "checksum", "No such file", "magic number", "truncated")):
        return CorruptFile(f"{doing}: {text}")
    return StorageUnavailable(f"{doing}: {text}")
