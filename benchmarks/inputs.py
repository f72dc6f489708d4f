"""The input: Parquet files of (k bigint, v bigint), one per batch, the same for both engines and in every run of the suite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

_SEED = 20130101
_OLDEST_S = 1_600_000_000


def write_batches(folder: Path, keys_of_batches: Iterator[npt.NDArray[np.int64]]) -> list[Path]:
    """A file per batch with random values. Modification times ascend by a minute: streaming takes the oldest file first."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(_SEED)
    files = []
    for number, keys in enumerate(keys_of_batches):
        file = folder / f"batch-{number:05d}.parquet"
        pq.write_table(pa.table({"k": keys, "v": random.integers(-1_000_000, 1_000_000, len(keys))}), file)
        os.utime(file, (_OLDEST_S + 60 * number,) * 2)
        files.append(file)
    return files


def every_key_once(keys: int, batches: int) -> Iterator[npt.NDArray[np.int64]]:
    """Each batch has one row of every key, in random order."""
    random = np.random.default_rng(_SEED + 1)
    for _ in range(batches):
        yield random.permutation(keys).astype(np.int64)


def load_then_append(keys: int, preload: int, appends: int, batches: int) -> Iterator[npt.NDArray[np.int64]]:
    """First ``preload`` rows of each key, then ``appends`` rows of each key in every further batch."""
    for number in range(batches):
        yield np.tile(np.arange(keys, dtype=np.int64), preload if number == 0 else appends)


def load_then_update(keys: int, intervals: int) -> Iterator[npt.NDArray[np.int64]]:
    """``intervals`` batches of new keys, ``keys`` in all, then one batch of as many rows as each, on keys drawn from all."""
    per_batch = keys // intervals
    for number in range(intervals):
        yield np.arange(number * per_batch, (number + 1) * per_batch, dtype=np.int64)
    yield np.random.default_rng(_SEED + 2).integers(0, keys, per_batch)
