"""Input files of the suite: one Parquet file with the columns `k bigint, v bigint` for each batch.

The files are the same for both engines and in every run of the suite.
"""

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
    """Write one file with random values for each batch.

    The modification times ascend by one minute, because Spark's streaming reads the oldest file first.

    Args:
        folder: The folder to create.
        keys_of_batches: The keys of each batch, one for each row.
    """
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
    """Yield batches with one row for every key, in random order."""
    random = np.random.default_rng(_SEED + 1)
    for _ in range(batches):
        yield random.permutation(keys).astype(np.int64)


def load_then_append(keys: int, preload: int, appends: int, batches: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield a batch with `preload` rows of each key, then batches with `appends` rows of each key."""
    for number in range(batches):
        yield np.tile(np.arange(keys, dtype=np.int64), preload if number == 0 else appends)


def load_then_update(keys: int, intervals: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield batches of new keys and one batch of updates.

    The first `intervals` batches hold `keys` new keys in all. The last batch has as many rows as each of these batches.
    Its keys are drawn at random from all keys.
    """
    per_batch = keys // intervals
    for number in range(intervals):
        yield np.arange(number * per_batch, (number + 1) * per_batch, dtype=np.int64)
    yield np.random.default_rng(_SEED + 2).integers(0, keys, per_batch)
