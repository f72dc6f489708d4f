"""Run small reads in parallel: an object store answers one in about 25 ms, and eight at once in the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

PARALLELISM = 8


def at_once(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Call `work` for each item with up to `PARALLELISM` threads, and return the results in the order of the items.

    If a call raises, the function waits for the calls that have begun and raises the first error.
    """
    every = list(items)
    if len(every) < 2:
        return [work(item) for item in every]
    # Handing an item to a thread costs as much as a small read from a disk, so a thread takes several items at once.
    size = max(1, len(every) // (8 * PARALLELISM))
    parts = [every[n : n + size] for n in range(0, len(every), size)]
    with ThreadPoolExecutor(min(PARALLELISM, len(parts)), thread_name_prefix="cairn-log") as pool:
        return [result for done in pool.map(lambda part: [work(item) for item in part], parts) for result in done]
