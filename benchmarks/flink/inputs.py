"""The batches that Flink and ours read: the same rows, as Parquet for ours and as plain bytes for Flink's sources."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

# Big-endian, as Java reads them.
ROW = np.dtype([("k", ">i8"), ("v", ">i8"), ("payload", "S64")])
STATE = np.dtype([(name, ">i8") for name in ("k", "n", "total", "low", "high", "last")] + [("payload", "S64")])
SOURCES = 2
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz0123456789", "S1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Batches of ``part`` as many rows as there are keys. ``drawn``: *uniform*, each key of a batch once; *random*, keys repeat by chance;
    *zipf*, by 1 / rank. ``batches``: None for the number of the scale."""

    part: float
    drawn: Literal["uniform", "random", "zipf"]
    batches: int | None = None

    @property
    def name(self) -> str:
        """As reports call it."""
        return f"{self.part:.0%} {self.drawn}"


def draw(random: np.random.Generator, keys: int, rows: int, drawn: str) -> npt.NDArray[np.int64]:
    """``rows`` keys of 0..keys-1, in random order. Which keys are the frequent ones differs from batch to batch only by chance."""
    if drawn == "uniform":
        return random.permutation(keys)[:rows]
    if drawn == "random":
        return random.integers(0, keys, rows)
    reached = np.cumsum(1 / np.arange(1, keys + 1))
    ranks = np.searchsorted(reached, random.random(rows) * reached[-1])
    # Multiplied by an odd number that shares no factor with it, so that frequent keys do not lie side by side.
    step = next(n for n in range(keys // 3 | 1, 2 * keys + 3, 2) if np.gcd(n, keys) == 1)
    return ranks.clip(max=keys - 1) * step % keys


def in_order_per_key(rows: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """The rows with every key where it was, and the rows of one key among themselves sorted by value, then payload: the order in which
    ours gets them, so that "last" means the same in both."""
    sorted_rows = rows[np.lexsort((rows["payload"], rows["v"], rows["k"]))]
    ordered = np.empty_like(rows)
    ordered[np.argsort(rows["k"], kind="stable")] = sorted_rows
    return ordered


def write_batches(folder: Path, keys: int, batches: int, workload: Workload) -> list[Path]:
    """``NNN.parquet`` and ``NNN-P.bin`` for each source P: batch 0 has every key once, and so has the one behind the last, which is
    for reading the state. Returns the Parquet files of batches 0 to ``batches``."""
    random = np.random.default_rng(20130101)
    files = []
    for number in range(batches + 2):
        whole = number in (0, batches + 1)
        rows = np.empty(keys if whole else max(1, round(keys * workload.part)), ROW)
        rows["k"] = random.permutation(keys) if whole else draw(random, keys, len(rows), workload.drawn)
        rows["v"] = random.integers(-1_000_000, 1_000_000, len(rows))
        rows["payload"] = random.choice(_LETTERS, (len(rows), 64)).view("S64")[:, 0]
        rows = in_order_per_key(rows)
        for source in range(SOURCES):
            rows[rows["k"] % SOURCES == source].tofile(folder / f"{number:03d}-{source}.bin")
        if number <= batches:
            files.append(folder / f"{number:03d}.parquet")
            columns = {"k": rows["k"].astype(np.int64), "v": rows["v"].astype(np.int64)}
            pq.write_table(pa.table({**columns, "payload": rows["payload"].astype(str)}), files[-1])
    return files


def read_state(files: list[Path]) -> pa.Table:
    """The state that Flink's tasks wrote down, sorted by key."""
    rows = np.concatenate([np.fromfile(file, STATE) for file in files])
    rows = rows[np.argsort(rows["k"], kind="stable")]
    numbers = {name: rows[name].astype(np.int64) for name in STATE.names or () if name != "payload"}
    return pa.table({**numbers, "payload": rows["payload"].astype(str)})
