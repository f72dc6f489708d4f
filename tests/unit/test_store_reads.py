"""What the store reads by scans: the same as one key at a time, and a damaged file is never taken for the end."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from state_backend.adapters import rocks
from state_backend.adapters.rocks import RocksStore
from state_backend.values.errors import CorruptFile


@pytest.mark.parametrize("seed", range(4))
def test_scans_find_what_single_reads_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Also if the blocks seem to come from the disk, so that several threads look up keys."""
    monkeypatch.setattr(rocks, "_DISK_S", (1.0, -1.0)[seed % 2])
    random_ = random.Random(seed)
    held: dict[bytes, bytes] = {}
    with RocksStore(tmp_path / "db") as store:
        for _ in range(10):
            for key in [random_.randbytes(random_.choice([1, 2, 2, 3])) for _ in range(random_.choice([3, 800]))]:
                if random_.random() < 0.7:
                    held[key] = random_.randbytes(random_.choice([0, 1, 9]))
                    store.write([(key, held[key])])
                else:
                    held.pop(key, None)
                    store.write([(key, None)])
            start, end = sorted([random_.randbytes(1), random_.randbytes(2)])
            if random_.random() < 0.3:
                store.delete_range(start, end)
                held = {key: value for key, value in held.items() if not start <= key < end}
            if random_.random() < 0.5:
                store.sorted_runs()
            there = sorted(held)
            some = {random_.randbytes(2) for _ in range(random_.choice([0, 1, 500]))}
            wanted = sorted([*some, *random_.choices([*there, b"a"], k=random_.choice([0, 1, 500]))])
            expected = [held.get(key) for key in wanted]
            assert store.read_wanted(wanted) == store.get_many(wanted) == expected
            most_bytes = random_.randint(1, 100)
            few = store.read_wanted(wanted, most_bytes)
            # Of a key that comes again the entry is in memory once.
            sizes = [
                0 if again == key else len(value or b"")
                for again, key, value in zip([b"", *wanted], wanted, few, strict=False)
            ]
            assert few == expected[: len(few)]
            assert len(few) == len(wanted) or sum(sizes) >= most_bytes > sum(sizes[:-1])
            within = [key for key in there if start <= key < end]
            assert store.read_keys(start, end) == (within, True)
            for rows in (1, max(1, len(within))):
                keys, ended = store.read_keys(start, end, rows=rows)
                assert keys == within[:rows]
                assert not ended or len(keys) == len(within)
                keys, values, ended = store.read_range(start, end, rows=rows)
                assert (keys, ended) == (within[:rows], len(within) <= rows)
                assert values == [held[key] for key in keys]
            keys, _, ended = store.read_range(start, end, most_bytes=most_bytes)
            sizes = [len(key) + len(held[key]) for key in within[: len(keys)]]
            assert keys == within[: len(keys)] and ended is (len(keys) == len(within))
            assert ended or sum(sizes) >= most_bytes > sum(sizes[:-1])
            prefixes = sorted({bytes([random_.randrange(256)]) for _ in range(random_.choice([1, 40]))})
            for most in (sys.maxsize, 2):
                keys, values, counts = store.read_prefixes(prefixes, most)
                below = [[key for key in there if key.startswith(prefix)][:most] for prefix in prefixes]
                assert keys == [*chain.from_iterable(below)]
                assert values == [held[key] for key in keys]
                assert counts == [len(part) for part in below]


_KEYS = [n.to_bytes(4, "big") for n in range(0, 40_000, 2)]


@pytest.mark.parametrize(
    "read",
    [
        lambda store: [store.get_many(_KEYS[:1]), store.get_many(_KEYS)],
        lambda store: store.read_wanted(_KEYS),
        lambda store: store.read_keys(b"", b"\xff"),
        lambda store: store.read_keys(b"", b"\xff", rows=len(_KEYS) + 1),
        lambda store: store.read_prefixes([b"\0"]),
        lambda store: list(store.scan(b"", None)),
    ],
    ids=["get", "wanted", "keys", "many keys", "prefixes", "scan"],
)
def test_a_read_of_a_damaged_block_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr(rocks, "_DISK_S", -1.0)
    with RocksStore(tmp_path / "db") as store:
        store.write([(key, key * 3) for key in _KEYS])
        store.sorted_runs()
    (victim,) = (tmp_path / "db").glob("*.sst")
    data = bytearray(victim.read_bytes())
    data[len(data) // 3] ^= 1
    victim.write_bytes(data)
    with RocksStore(tmp_path / "db") as store, pytest.raises(CorruptFile, match="block checksum mismatch"):
        read(store)
