"""Compare the rows and entries of one interval of a trial with production's, for a page.

The comparison runs as a separate process, `cairn compare`, so the API server itself opens no RocksDB store.

1. If the records show that output or state is too large, the process is not started.
2. Only one process runs at a time. It is ended if it exceeds a limit of time, memory or size of its answer.
3. Results are kept in memory, by the digests and checksums of both sides. So the same comparison does not run twice.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cairn_ui.find_pipelines import PipelineRef
from cairn_ui.human_units import count, size, span
from cairn_ui.limited_process import Ended, run_module
from state_backend.inspection.compare_logs import IntervalDifference, Made
from state_backend.values.intervals import format_instant

# Number of rows and entries that a page shows for each kind of difference.
EXAMPLES = 5
# Largest number of results that are kept.
_KEPT = 64
# Seconds for which a failure is kept, such as that of a storage that does not answer. After that the comparison may run
# again.
_ASKED_AGAIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one comparison."""

    rows: int = 1_000_000
    entries: int = 1_000_000
    output_bytes: int = 256 << 20
    seconds: float = 60.0
    memory_bytes: int = 2 << 30
    said_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The result of one comparison."""

    # The answer of `cairn compare --json`; None if the comparison failed.
    found: Mapping[str, Any] | None
    # Why the comparison failed; None if it did not fail.
    problem: str | None = None
    too_much: bool = False
    seconds: float = 0.0


class Busy(Exception):
    """The error that another comparison is already running."""


def command_of(ref: PipelineRef, trial: str, start: Any, key: Sequence[str]) -> list[str]:
    """Return the words of the `cairn compare` command that compares one interval, as a person would type it."""
    words = ["cairn", "compare", trial, "--root", ref.root, "--pipeline", ref.name, "--interval", format_instant(start)]
    return words + [word for name in key for word in ("--key", name)]


def too_much(found: IntervalDifference, limits: Limits) -> str | None:
    """Return why the comparison of an interval would exceed the limits on rows, entries or bytes; None if it would not.

    The numbers of rows, bytes and entries come from the records. Output and state that are the same in production and
    trial, by checksum or digest, do not count.
    """
    sides = [made for made in (found.old, found.new) if made is not None]
    files = [f for made in sides for f in made.outputs if (found.late if f.late else found.output) == "other"]
    rows, written = sum(f.rows for f in files), sum(f.handle.size_bytes for f in files)
    if rows > limits.rows:
        return (
            f"the outputs of production and trial have {count(rows)} rows; a page compares at most {count(limits.rows)}"
        )
    if written > limits.output_bytes:
        return f"the outputs of production and trial have {size(written)}; a page compares at most {size(limits.output_bytes)}"
    entries = sum(made.content.totals.entries for made in sides if made.content is not None)
    if found.state == "other" and entries > limits.entries:
        return f"the states of production and trial have {count(entries)} entries; a page compares at most {count(limits.entries)}"
    return None


class Comparisons:
    """A cache of comparisons, which runs at most one comparison at a time. Several threads may use it at once."""

    def __init__(
        self,
        limits: Limits | None = None,
        run: Callable[[Sequence[str], Mapping[str, str], Limits], Compared] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or Limits()
        self._run = run or run_limited
        self._clock = clock
        self._lock = threading.Lock()
        self._running = threading.Lock()
        self._kept: OrderedDict[tuple[Any, ...], tuple[Compared, float]] = OrderedDict()

    def known(
        self, ref: PipelineRef, trial: str, found: IntervalDifference, key: Sequence[str]
    ) -> tuple[tuple[Any, ...], Compared | None]:
        """Look up the comparison of one interval in the cache."""
        asked = (ref.folder, trial, found.interval, tuple(key), _mark(found.old), _mark(found.new))
        why = too_much(found, self.limits)
        if why is not None:
            return asked, Compared(found=None, problem=why, too_much=True)
        with self._lock:
            compared, at_s = self._kept.get(asked, (None, 0.0))
            passing = compared is not None and compared.found is None and not compared.too_much
            if compared is None or (passing and self._clock() - at_s > _ASKED_AGAIN_S):
                return asked, None
            self._kept.move_to_end(asked)
            return asked, compared

    def compare(self, asked: tuple[Any, ...], words: Sequence[str], environment: Mapping[str, str]) -> Compared:
        """Run the command of a comparison, and keep its result."""
        if not self._running.acquire(blocking=False):
            raise Busy
        try:
            compared = self._run(words, environment, self.limits)
        finally:
            self._running.release()
        with self._lock:
            self._kept[asked] = (compared, self._clock())
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return compared


def _mark(made: Made | None) -> tuple[Any, ...] | None:
    if made is None:
        return None
    return (made.digest, made.state is not None, tuple((f.late, f.rows, f.handle.crc32c) for f in made.outputs))


def run_limited(words: Sequence[str], environment: Mapping[str, str], limits: Limits) -> Compared:
    """Run a `cairn` command with `--json` in a process whose time, memory and output are limited."""
    ended = run_module(
        ["cairn.command.cli", *words[1:], "--limit", str(EXAMPLES), "--json"],
        environment,
        seconds=limits.seconds,
        memory_bytes=limits.memory_bytes,
        said_bytes=limits.said_bytes,
    )
    if ended.code is None:
        return Compared(found=None, problem=f"the comparison took longer than {span(limits.seconds)}", too_much=True)
    return answer_of(ended, limits)


def answer_of(ended: Ended, limits: Limits) -> Compared:
    """Return the result of a `cairn compare` process that has ended."""
    if ended.code == 0 and len(ended.said) <= limits.said_bytes:
        return Compared(found=json.loads(ended.said), seconds=ended.seconds)
    if ended.code == 0:
        problem = f"the examples take more than {size(limits.said_bytes)}"
        return Compared(found=None, problem=problem, too_much=True)
    if ended.out_of_memory:
        return Compared(
            found=None, problem=f"the comparison needed more than {size(limits.memory_bytes)} of memory", too_much=True
        )
    said = ended.errors.strip()[-2000:]
    return Compared(found=None, problem=said or f"the comparison ended with exit code {ended.code}")
