"""The batches for Flink and Cairn: the same rows, as Parquet for Cairn and as plain bytes for Flink's sources."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

# The numbers are big-endian, because Java reads and writes them so.
ROW = np.dtype([("k", ">i8"), ("v", ">i8"), ("payload", "S64")])
STATE = np.dtype([(name, ">i8") for name in ("k", "n", "total", "low", "high", "last")] + [("payload", "S64")])
SOURCES = 2
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz0123456789", "S1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The size of the batches, and the choice of their keys.

    Attributes:
        part: The rows of a batch, as a part of the number of keys.
        drawn: "uniform" gives each key of a batch one row. "random" lets keys repeat by chance. "zipf" draws keys by 1
            / rank.
        batches: The number of batches; None for that of the scale.
    """

    part: float
    drawn: Literal["uniform", "random", "zipf"]
    batches: int | None = None

    @property
    def name(self) -> str:
        """Return the name of the workload in reports."""
        return f"{self.part:.0%} {self.drawn}"


def draw(random: np.random.Generator, keys: int, rows: int, drawn: str) -> npt.NDArray[np.int64]:
    """Draw keys from 0 to `keys` - 1, in random order.

    With "zipf", the same keys are frequent in all batches.
    """
    if drawn == "uniform":
        return random.permutation(keys)[:rows]
    if drawn == "random":
        return random.integers(0, keys, rows)
    reached = np.cumsum(1 / np.arange(1, keys + 1))
    ranks = np.searchsorted(reached, random.random(rows) * reached[-1])
    # Multiply the ranks by a number without a common factor with `keys`, so that frequent keys are not neighbours.
    step = next(n for n in range(keys // 3 | 1, 2 * keys + 3, 2) if np.gcd(n, keys) == 1)
    return ranks.clip(max=keys - 1) * step % keys


def in_order_per_key(rows: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Sort the rows of each key by value and then by payload. Every key keeps its positions.

    Cairn processes rows in this order, so the field `last` has the same meaning in both engines.
    """
    sorted_rows = rows[np.lexsort((rows["payload"], rows["v"], rows["k"]))]
    ordered = np.empty_like(rows)
    ordered[np.argsort(rows["k"], kind="stable")] = sorted_rows
    return ordered


def write_batches(folder: Path, keys: int, batches: int, workload: Workload) -> list[Path]:
    """Write `NNN.parquet` and, for each source P, `NNN-P.bin` for each batch.

    Batch 0 has every key once. The batch after the last also has every key once; it is for reading the state, and has
    no Parquet file.

    Returns:
        The Parquet files of the batches 0 to `batches`.
    """
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
    """Read the state that Flink's tasks wrote, sorted by key."""
    rows = np.concatenate([np.fromfile(file, STATE) for file in files])
    rows = rows[np.argsort(rows["k"], kind="stable")]
    numbers = {name: rows[name].astype(np.int64) for name in STATE.names or () if name != "payload"}
    return pa.table({**numbers, "payload": rows["payload"].astype(str)})
