"""The RocksDB engine of one shard. The only module that imports rocksdict.

All of rocksdict's failures are plain ``Exception`` and are turned into ours here. Iterations end with a status check: the
plain iterator stops silently at a corrupt block, which would read as "no more keys".
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import rocksdict
from rocksdict import Rdict

from state_backend.values.errors import CorruptFile, InvariantViolated, StorageUnavailable

MIB = 1024 * 1024
SST_SUFFIX = ".sst"
# What a checkpoint of RocksDB holds beside SSTs and is needed to open it. OPTIONS (we bring our own) and the empty log are not.
_NEEDED = ("CURRENT", "MANIFEST-", "rocksdict-config.json")
_SCAN_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Memory and file sizes of one shard's RocksDB. Compaction is universal: with small batches of updates it uploads a
    few times the changed bytes over any history, where leveled compaction goes past ten times."""

    write_buffer_bytes: int = 64 * MIB
    block_cache_bytes: int = 64 * MIB
    target_file_bytes: int = 64 * MIB
    bloom_bits_per_key: int = 10
    universal_trigger_files: int = 8
    universal_size_amplification_percent: int = 100
    background_jobs: int = 2

    def to_options(self) -> rocksdict.Options:
        """rocksdict's own options."""
        table = rocksdict.BlockBasedOptions()
        table.set_bloom_filter(self.bloom_bits_per_key, False)
        table.set_block_cache(rocksdict.Cache(self.block_cache_bytes))
        table.set_block_size(16 * 1024)
        table.set_format_version(6)
        universal = rocksdict.UniversalCompactOptions()
        universal.max_size_amplification_percent = self.universal_size_amplification_percent
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compaction_style(rocksdict.DBCompactionStyle.universal())
        options.set_universal_compaction_options(universal)
        options.set_level_zero_file_num_compaction_trigger(self.universal_trigger_files)
        options.set_compression_type(rocksdict.DBCompressionType.lz4())
        options.set_block_based_table_factory(table)
        options.set_write_buffer_size(self.write_buffer_bytes)
        options.set_target_file_size_base(self.target_file_bytes)
        options.set_max_background_jobs(self.background_jobs)
        options.set_keep_log_file_num(1)
        options.set_stats_dump_period_sec(0)
        options.set_stats_persist_period_sec(0)
        options.set_skip_stats_update_on_db_open(True)
        return options


class Recorder(Protocol):
    """Whoever keeps a record of what is written to a store."""

    def write(self, changes: Sequence[tuple[bytes, bytes | None]]) -> None: ...

    def delete_range(self, start: bytes, end: bytes) -> None: ...

    def close(self) -> None: ...


class RocksStore:
    """A sorted map of bytes to bytes in one directory. Not thread-safe; nothing is durable before ``capture``.

    ``recorder``, if one is set, is told of each write after it was made, and closed with the store.
    """

    def __init__(self, directory: Path, options: EngineOptions = EngineOptions()) -> None:
        """Opens what is in ``directory``, or an empty store. Raises CorruptFile if it is damaged."""
        self.directory = directory
        self.recorder: Recorder | None = None
        try:
            self._db = Rdict(str(directory), options.to_options())
        except Exception as error:
            raise _translated(error, f"can't open the state in {directory}") from error
        unlogged = rocksdict.WriteOptions()
        unlogged.disable_wal = (
            True  # an interval is captured whole or thrown away, so a log would be written for nobody
        )
        self._db.set_write_options(unlogged)

    def __enter__(self) -> RocksStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get(self, key: bytes) -> bytes | None:
        try:
            value: bytes | None = self._db.get(key)
        except Exception as error:
            raise _translated(error, f"can't read the state in {self.directory}") from error
        return value

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """One answer per key, in order; one multi-get, fastest for sorted keys."""
        try:
            values: list[bytes | None] = self._db.get(list(keys))
        except Exception as error:
            raise _translated(error, f"can't read the state in {self.directory}") from error
        return values

    def write(self, changes: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Puts and deletes (value None), applied together."""
        batch = rocksdict.WriteBatch(raw_mode=True)
        changes = list(changes)
        for key, value in changes:
            if value is None:
                batch.delete(key)
            else:
                batch.put(key, value)
        try:
            self._db.write(batch)
        except Exception as error:
            raise _translated(error, f"can't write the state in {self.directory}") from error
        if self.recorder is not None:
            self.recorder.write(changes)

    def scan(self, start: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        """Entries with start <= key < end (None: to the last), ascending. Each chunk sees the store as it is when the chunk
        is read; no iterator stays open between chunks, since an open one would keep the store locked after ``close``."""
        while True:
            chunk = self._chunk(start, end)
            yield from chunk
            if len(chunk) < _SCAN_ROWS:
                return
            start = chunk[-1][0] + b"\x00"

    def _chunk(self, start: bytes, end: bytes | None) -> list[tuple[bytes, bytes]]:
        chunk: list[tuple[bytes, bytes]] = []
        read = rocksdict.ReadOptions()
        if end is not None:
            read.set_iterate_upper_bound(end)
        try:
            iterator = self._db.iter(read)
            iterator.seek(start)
            valid, key, value, next_ = iterator.valid, iterator.key, iterator.value, iterator.next
            while valid():
                chunk.append((key(), value()))
                if len(chunk) == _SCAN_ROWS:
                    return chunk
                next_()
            iterator.status()
        except Exception as error:
            raise _translated(error, f"can't read the state in {self.directory}") from error
        return chunk

    def delete_range(self, start: bytes, end: bytes) -> None:
        """Removes start <= key < end."""
        try:
            self._db.delete_range(start, end)
        except Exception as error:
            raise _translated(error, f"can't write the state in {self.directory}") from error
        if self.recorder is not None:
            self.recorder.delete_range(start, end)

    def compact(self) -> None:
        """Merges everything into as few files as the target size allows, and drops what is deleted."""
        options = rocksdict.CompactOptions()
        options.set_bottommost_level_compaction(rocksdict.BottommostLevelCompaction.force())
        try:
            self._db.flush()
            self._db.compact_range(None, None, options)
        except Exception as error:
            raise _translated(error, f"can't compact the state in {self.directory}") from error

    def capture(self, destination: Path, *, deadline_s: float = 600.0) -> tuple[list[Path], list[Path]]:
        """Flushes, lets compactions that the flush started end (else whether the next checkpoint uploads small files or
        merged ones would be a matter of luck), and hard-links a consistent image into ``destination``, which must not exist.

        Returns the SSTs and the small files that are needed to open the image, each sorted by name.
        """
        try:
            self._db.flush()
            started = time.monotonic()
            while self._db.property_int_value("rocksdb.compaction-pending") or self._db.property_int_value(
                "rocksdb.num-running-compactions"
            ):
                if time.monotonic() - started > deadline_s:
                    raise StorageUnavailable(f"compactions in {self.directory} did not end within {deadline_s:.0f} s")
                time.sleep(0.001)
            rocksdict.Checkpoint(self._db).create_checkpoint(str(destination))
        except StorageUnavailable:
            raise
        except Exception as error:
            raise _translated(error, f"can't capture the state in {self.directory}") from error
        files = sorted(destination.iterdir())
        ssts = [f for f in files if f.suffix == SST_SUFFIX]
        small = [f for f in files if f.name.startswith(_NEEDED)]
        if len(small) != len(_NEEDED):
            raise InvariantViolated(f"an image of RocksDB in {destination} holds {[f.name for f in files]}")
        return ssts, small

    def close(self) -> None:
        """Releases the directory's lock. May be called twice."""
        if self.recorder is not None:
            self.recorder.close()
        with suppress(rocksdict.DbClosedError):
            self._db.close()


def _translated(error: Exception, doing: str) -> Exception:
    text = str(error)
    if "No space left" in text or "Disk quota" in text:
        return StorageUnavailable(f"{doing}: the local disk is full: {text}")
    if any(word in text for word in ("Corruption", "checksum", "No such file", "magic number", "truncated")):
        return CorruptFile(f"{doing}: {text}")
    return StorageUnavailable(f"{doing}: {text}")
