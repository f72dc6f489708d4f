"""Record a store's writes during an interval, which become the interval's changelog segment.

Only the last write of each key is kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path

from state_backend.adapters.rocks import MIB, EngineOptions, RocksStore
from state_backend.formats.changelog import Pair, content_bytes

_MEMORY_BYTES = 16 * MIB
# Bytes of memory that one change takes besides its content: two Python objects and a place in a dictionary.
_ENTRY_BYTES = 160
_SPILL = EngineOptions(write_buffer_bytes=8 * MIB, block_cache_bytes=MIB, bloom_bits_per_key=1)


class ChangeRecorder:
    """Net changes of the `RocksStore` that has this object as its `recorder`.

    A replay of the changes deletes all ranges first, and then writes the entries. So the recorder forgets each entry
    that a later range deletion covers. Above 16 MiB, entries move from memory to a RocksDB in `folder`.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._net: dict[bytes, bytes | None] = {}
        self._ranges: list[tuple[bytes, bytes]] = []
        self._applied_ranges = 0
        # Upper bound of the bytes of entries in memory. It may be too high, because each write of the same key adds to
        # it. When it exceeds 16 MiB, `write` counts all bytes again and stores the exact number here.
        self._held_bytes = 0
        self._spilled: RocksStore | None = None
        self._spilled_bytes = 0
        self._given_up = False

    def write(self, changes: Sequence[Pair]) -> None:
        if self._given_up:
            return
        self._forget_deleted()
        self._net.update(changes)
        self._held_bytes += content_bytes(changes) + _ENTRY_BYTES * len(changes)
        if self._held_bytes > _MEMORY_BYTES:
            self._held_bytes = content_bytes(self._net.items()) + _ENTRY_BYTES * len(self._net)
            # Counting all entries takes time. If more than half of the memory is really used, the next count would come
            # soon, so the entries move to disk now.
            if self._held_bytes > _MEMORY_BYTES // 2:
                self._spill()

    def delete_range(self, start: bytes, end: bytes) -> None:
        if not self._given_up and start < end:
            self._ranges.append((start, end))

    def content_bytes(self) -> int | None:
        self._forget_deleted()
        total = self._spilled_bytes + content_bytes(self._net.items()) + content_bytes(self._ranges)
        return None if self._given_up or total > self._limit_bytes else total

    def changes(self) -> tuple[list[tuple[bytes, bytes]], Iterator[Pair]]:
        """Return the deleted ranges in their order, and the last writes of entries, ascending by key."""
        self._forget_deleted()
        if self._spilled is None:
            return self._ranges, iter(sorted(self._net.items()))
        self._spill()
        return self._ranges, ((key, held[1:] if held else None) for key, held in self._spilled.scan(b"", None))

    def close(self) -> None:
        """Forget all changes and record no more. The folder stays; its owner deletes it."""
        self._given_up = True
        self._net.clear()
        if self._spilled is not None:
            self._spilled.close()

    def _forget_deleted(self) -> None:
        """Remove the entries that range deletions since the last call cover. Sort the entries only once for all."""
        if self._applied_ranges == len(self._ranges):
            return
        keys = sorted(self._net)
        for start, end in self._ranges[self._applied_ranges :]:
            for key in keys[bisect_left(keys, start) : bisect_left(keys, end)]:
                self._net.pop(key, None)
            if self._spilled is not None:
                self._spilled.delete_range(start, end)
        self._applied_ranges = len(self._ranges)

    def _spill(self) -> None:
        """Move the entries from memory to a RocksDB in the folder. Above `limit_bytes`, stop recording."""
        if self._spilled is None:
            self._spilled = RocksStore(self._folder, _SPILL)
        self._spilled.write((key, b"" if value is None else b"\x01" + value) for key, value in self._net.items())
        self._spilled_bytes += content_bytes(self._net.items())
        self._net.clear()
        self._held_bytes = 0
        if self._spilled_bytes > self._limit_bytes:
            self.close()
