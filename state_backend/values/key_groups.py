"""Key groups and shards: the mapping of keys to shards.

Source: Flink's KeyGroupRangeAssignment. The hash is Spark's `xxhash64`, so Spark can route rows with SQL.
"""

from __future__ import annotations

from collections.abc import Iterable

from state_backend.values.errors import StateUnusable, UsageError
from state_backend.values.frozen import frozen

MAX_MAX_PARALLELISM = 32_768


@frozen
class KeyGroupRange:
    """The key groups `first .. last`, both included."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last < MAX_MAX_PARALLELISM:
            raise UsageError(f"key groups {self.first} .. {self.last} are not a valid range")

    def __str__(self) -> str:
        return f"key groups {self.first} .. {self.last}"

    def __contains__(self, key_group: int) -> bool:
        return self.first <= key_group <= self.last

    def __len__(self) -> int:
        return self.last - self.first + 1

    def intersect(self, other: KeyGroupRange) -> KeyGroupRange | None:
        first, last = max(self.first, other.first), min(self.last, other.last)
        return KeyGroupRange(first=first, last=last) if first <= last else None


def check_parallelism(parallelism: int, max_parallelism: int) -> None:
    if not 1 <= parallelism <= max_parallelism <= MAX_MAX_PARALLELISM:
        raise UsageError(
            f"parallelism {parallelism} and max_parallelism {max_parallelism} must satisfy "
            f"1 <= parallelism <= max_parallelism <= {MAX_MAX_PARALLELISM}"
        )


def shard_of(key_group: int, parallelism: int, max_parallelism: int) -> int:
    """Return the shard, 0 .. parallelism-1, that owns a key group."""
    return key_group * parallelism // max_parallelism


def range_of(shard: int, parallelism: int, max_parallelism: int) -> KeyGroupRange:
    """Return the key groups of a shard: exactly those that `shard_of` maps to the shard."""
    first = -(-shard * max_parallelism // parallelism)
    last = -(-(shard + 1) * max_parallelism // parallelism) - 1
    return KeyGroupRange(first=first, last=last)


def check_whole(ranges: Iterable[KeyGroupRange], max_parallelism: int) -> None:
    """Raise `StateUnusable` unless the shards' ranges cover every key group, 0 .. max_parallelism-1, exactly once."""
    at = 0
    for shard in sorted(ranges, key=lambda r: r.first):
        if shard.first != at:
            raise StateUnusable(
                f"the checkpoint's shards leave out or repeat key groups: expected a shard that begins at {at}, found {shard}"
            )
        at = shard.last + 1
    if at != max_parallelism:
        raise StateUnusable(f"the checkpoint's shards end at key group {at - 1}; expected {max_parallelism - 1}")
