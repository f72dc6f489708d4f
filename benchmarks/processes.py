"""CPU time and memory of this process and of all below it: Spark's JVM, its Python daemon and workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One process. ``own_cpu_s``: user and system time. ``ended_cpu_s``: of children of it that have ended, and that it has waited for.
    ``resident_bytes``: its memory."""

    pid: int
    java: bool
    own_cpu_s: float
    ended_cpu_s: float
    resident_bytes: int


def own_and_below() -> Iterator[Seen]:
    """This process first, then those below it that live."""
    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        try:
            with process.oneshot():
                times = process.cpu_times()
                yield Seen(
                    pid=process.pid,
                    java=process.name() == "java",
                    own_cpu_s=times.user + times.system,
                    ended_cpu_s=times.children_user + times.children_system,
                    resident_bytes=process.memory_info().rss,
                )
        except psutil.Error:  # it has just ended
            continue
