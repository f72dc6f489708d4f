"""CPU time and memory of this process and of all below it: Spark's JVM, its Python daemon and workers; and what such a process needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

ROOT = Path(__file__).resolve().parents[1]
T = TypeVar("T")


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


def cpu_s() -> dict[str, float]:
    """CPU seconds so far of this process and all below it, ended ones included, by kind: java or python."""
    found = {"java": 0.0, "python": 0.0}
    for seen in own_and_below():
        found["java" if seen.java else "python"] += seen.own_cpu_s + seen.ended_cpu_s
    return found


def with_cpu_s(work: Callable[[], T]) -> tuple[T, float]:
    """What the call returns, and the CPU seconds that it took of all processes."""
    before = sum(cpu_s().values())
    made = work()
    return made, sum(cpu_s().values()) - before


def child_environment(tmp: Path) -> dict[str, str]:
    """Spark's and Python's temporary files lie in the run's own folder; the same heap for either engine."""
    submit = f"--driver-memory 4g --driver-java-options -Djava.io.tmpdir={tmp} pyspark-shell"
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "plugins"), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {
        "TZ": "UTC",
        "TMPDIR": str(tmp),
        "SPARK_LOCAL_DIRS": str(tmp),
        "PYSPARK_SUBMIT_ARGS": submit,
        "PYTHONPATH": path,
    }
