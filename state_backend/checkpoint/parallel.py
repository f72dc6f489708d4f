"""Run small reads in parallel: an object store answers one in about 25 ms, and eight parallel ones too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

PARALLELISM = 8


def at_once(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Call `work` for each item with up to `PARALLELISM` threads, and return the results in the order of the items.

    After an error, no further call begins. The function waits for the running calls and raises the error of the first
    of the items that failed.
    """
    every, failed = list(items), Event()
    if len(every) < 2:
        return [work(item) for item in every]
    # Handing an item to a thread costs as much as a small read from a disk, so a thread takes several items at once.
    size = max(1, len(every) // (8 * PARALLELISM))
    parts = [every[n : n + size] for n in range(0, len(every), size)]

    def of_part(part: list[T]) -> list[R]:
        try:
            return [work(item) for item in part if not failed.is_set()]
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(PARALLELISM, thread_name_prefix="cairn-log") as pool:
        return [result for done in pool.map(of_part, parts) for result in done]
