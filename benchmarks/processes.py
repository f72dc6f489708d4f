"""CPU time and memory of this process and its descendants, such as Spark's JVM, Python daemon and workers.

The module also has the environment variables for a process that a benchmark starts.
"""

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
    """The CPU time and memory of one process.

    Attributes:
        pid: The process id.
        java: True if the process is a JVM.
        own_cpu_s: The user and system time of the process, in seconds.
        ended_cpu_s: The user and system time of its children that have ended and that it has waited for, in seconds.
        resident_bytes: The resident memory of the process.
    """

    pid: int
    java: bool
    own_cpu_s: float
    ended_cpu_s: float
    resident_bytes: int


def own_and_below() -> Iterator[Seen]:
    """Yield this process first, and then its running descendants."""
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
        except psutil.Error:  # The process has just ended.
            continue


def cpu_s() -> dict[str, float]:
    """Return the CPU seconds so far of this process and its descendants, by kind: "java" or "python".

    Descendants that have ended count for the process that waited for them.
    """
    found = {"java": 0.0, "python": 0.0}
    for seen in own_and_below():
        found["java" if seen.java else "python"] += seen.own_cpu_s + seen.ended_cpu_s
    return found


def with_cpu_s(work: Callable[[], T]) -> tuple[T, float]:
    """Call the function, and return its result and the CPU seconds of all processes during the call."""
    before = sum(cpu_s().values())
    made = work()
    return made, sum(cpu_s().values()) - before


def child_environment(tmp: Path) -> dict[str, str]:
    """Return the environment of a run's process.

    The temporary files of Spark and Python lie in the run's own folder. Both engines have the same heap.
    """
    submit = f"--driver-memory 4g --driver-java-options -Djava.io.tmpdir={tmp} pyspark-shell"
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "plugins"), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {
        "TZ": "UTC",
        "TMPDIR": str(tmp),
        "SPARK_LOCAL_DIRS": str(tmp),
        "PYSPARK_SUBMIT_ARGS": submit,
        "PYTHONPATH": path,
    }
