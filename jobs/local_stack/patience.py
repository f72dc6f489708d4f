"""Limit on the time without progress, for programs that wait."""

from __future__ import annotations

from collections.abc import Hashable


class Patience:
    """Limit on the time between two signs of progress.

    A fixed limit on the whole wait fails on a slow machine. So only the time since the last sign of progress counts. If
    the machine needed long between earlier signs, the limit grows with that time.
    """

    def __init__(self, now_s: float, *, least_s: float, factor: float = 5) -> None:
        self._least_s = least_s
        self._factor = factor
        self._longest_s = 0.0
        self._moved_s = now_s
        self._signs: Hashable = None

    @property
    def limit_s(self) -> float:
        return max(self._least_s, self._factor * self._longest_s)

    def is_over(self, signs: Hashable, now_s: float) -> bool:
        if signs != self._signs:
            self._longest_s = max(self._longest_s, now_s - self._moved_s)
            self._moved_s, self._signs = now_s, signs
        return now_s - self._moved_s > self.limit_s
