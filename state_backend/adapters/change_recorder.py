"""What was written to a store since some moment, as net effects: of each key the last write, whatever came before it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path

from state_backend.adapters.rocks import MIB, EngineOptions, RocksStore
from state_backend.formats.changelog import Pair, content_bytes

_MEMORY_BYTES = 16 * MIB
# Two Python objects and a place in a dictionary.
_ENTRY_BYTES = 160
_SPILL = EngineOptions(write_buffer_bytes=8 * MIB, block_cache_bytes=MIB, bloom_bits_per_key=1)


class ChangeRecorder:
    """Told of every write by the ``RocksStore`` whose ``recorder`` it is.

    Deleted ranges come before entries in a replay, so an entry is forgotten when a range that holds it is deleted. Memory
    is bounded: from 16 MiB on, changes lie in a store of their own in ``folder``, which need not exist. Past about
    ``limit_bytes`` nothing more is kept: so much will not become a segment.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._net: dict[bytes, bytes | None] = {}
        self._ranges: list[tuple[bytes, bytes]] = []
        self._new_ranges: list[tuple[bytes, bytes]] = []
        # At least what the entries in memory take; brought down to what they do when it goes past a bound.
        self._held_bytes = 0
        self._spilled: RocksStore | None = None
        self._spilled_bytes = 0
        self._given_up = False

    def write(self, changes: Sequence[Pair]) -> None:
        """Takes writes over, a value of None for a deletion."""
        if self._given_up:
            return
        self._forget_deleted()
        self._net.update(changes)
        self._held_bytes += content_bytes(changes) + _ENTRY_BYTES * len(changes)
        if self._held_bytes > _MEMORY_BYTES:
            self._held_bytes = content_bytes(self._net.items()) + _ENTRY_BYTES * len(self._net)
            # Half, so that the next look is not at the next write.
            if self._held_bytes > _MEMORY_BYTES // 2:
                self._spill()

    def delete_range(self, start: bytes, end: bytes) -> None:
        """Takes over that every key from ``start`` on and before ``end`` was deleted."""
        if not self._given_up and start < end:
            self._ranges.append((start, end))
            self._new_ranges.append((start, end))

    def content_bytes(self) -> int | None:
        """Bytes of keys and values to replay, an upper bound once they were spilled; None: more than the limit."""
        self._forget_deleted()
        total = self._spilled_bytes + content_bytes(self._net.items()) + content_bytes(self._ranges)
        return None if self._given_up or total > self._limit_bytes else total

    def changes(self) -> tuple[list[tuple[bytes, bytes]], Iterator[Pair]]:
        """Deleted ranges in their order, then entries to put or delete, ascending by key."""
        self._forget_deleted()
        if self._spilled is None:
            return self._ranges, iter(sorted(self._net.items()))
        self._spill()
        return self._ranges, ((key, held[1:] if held else None) for key, held in self._spilled.scan(b"", None))

    def close(self) -> None:
        """Gives up: what changed is forgotten, and nothing more is recorded. The folder stays; its owner deletes it."""
        self._given_up = True
        self._net.clear()
        if self._spilled is not None:
            self._spilled.close()

    def _forget_deleted(self) -> None:
        """Drops the entries that later deletions of ranges have removed. This happens once for all new ranges, since it sorts the
        entries, and a dropped state deletes one range in each key group."""
        if not self._new_ranges:
            return
        keys = sorted(self._net)
        for start, end in self._new_ranges:
            for key in keys[bisect_left(keys, start) : bisect_left(keys, end)]:
                self._net.pop(key, None)
            if self._spilled is not None:
                self._spilled.delete_range(start, end)
        self._new_ranges.clear()

    def _spill(self) -> None:
        """Moves the entries from memory into a RocksDB in the folder, which sorts them and lets the last write of a key win. Gives
        up beyond the limit."""
        if self._spilled is None:
            self._spilled = RocksStore(self._folder, _SPILL)
        self._spilled.write((key, b"" if value is None else b"\x01" + value) for key, value in self._net.items())
        self._spilled_bytes += content_bytes(self._net.items())
        self._net.clear()
        self._held_bytes = 0
        if self._spilled_bytes > self._limit_bytes:
            self.close()
