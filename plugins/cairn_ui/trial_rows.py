"""The rows and entries in which one interval of a trial differs from production's, read on demand by ``cairn compare`` in a process of its
own: what it needs of memory and time is bounded there, and the API server opens no store.

    plan        what is too much by the records alone is not begun
    run         one at a time; a process that takes too long, needs too much memory or says too much is ended
    keep        what was found, by the digests and checksums of both sides: the same question reads nothing again
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cairn_operators.driver_process import repo_root
from cairn_ui.find_pipelines import PipelineRef
from cairn_ui.human_units import count, size, span
from state_backend.adapters.die_with_parent import die_with_parent
from state_backend.inspection.compare_logs import IntervalDifference, Made
from state_backend.values.intervals import format_instant

EXAMPLES = 5
_OUT_OF_MEMORY = (
    "MemoryError",
    "bad_alloc",
    "malloc of size",
    "Memory allocation",
    "Cannot allocate",
    "start new thread",
)
_KEPT = 64
_ASKED_AGAIN_S = 60.0
"""A failure that may mend, such as a storage that does not answer, is shown this long before it is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one comparison may take. ``rows``, ``entries``: of both sides together. ``memory_bytes``: of the process's data.
    ``said_bytes``: of its answer."""

    rows: int = 1_000_000
    entries: int = 1_000_000
    output_bytes: int = 256 << 20
    seconds: float = 60.0
    memory_bytes: int = 2 << 30
    said_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What was found, as ``cairn compare --json`` says it; None with ``problem`` if nothing was. ``too_much``: by a limit, so that the
    command line is the place for it."""

    found: Mapping[str, Any] | None
    problem: str | None = None
    too_much: bool = False
    seconds: float = 0.0


class Busy(Exception):
    """Another comparison is under way."""


def command_of(ref: PipelineRef, trial: str, start: Any, key: Sequence[str]) -> list[str]:
    """The words of the command that compares this one interval, as a person types it."""
    words = ["cairn", "compare", trial, "--root", ref.root, "--pipeline", ref.name, "--interval", format_instant(start)]
    return words + [word for name in key for word in ("--key", name)]


def too_much(found: IntervalDifference, limits: Limits) -> str | None:
    """Why an interval is not compared here, by what its records say; None: it is. A pure function."""
    sides = [made for made in (found.old, found.new) if made is not None]
    files = [f for made in sides for f in made.outputs if (found.late if f.late else found.output) == "other"]
    rows, written = sum(f.rows for f in files), sum(f.handle.size_bytes for f in files)
    if rows > limits.rows:
        return f"both outputs together have {count(rows)} rows, and a page reads {count(limits.rows)} at most"
    if written > limits.output_bytes:
        return f"both outputs together have {size(written)}, and a page reads {size(limits.output_bytes)} at most"
    entries = sum(made.content.totals.entries for made in sides if made.content is not None)
    if found.state == "other" and entries > limits.entries:
        return f"both states together have {count(entries)} entries, and a page reads {count(limits.entries)} at most"
    return None


class Comparisons:
    """All comparisons of this process. Safe to use from several threads."""

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
        """What stands for the question, and its answer if it was found before or needs no reading."""
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
        """Runs the command and keeps what it found. Raises: Busy if another one is under way."""
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
    return (made.digest, made.retained, tuple((f.late, f.rows, f.handle.crc32c) for f in made.outputs))


def run_limited(words: Sequence[str], environment: Mapping[str, str], limits: Limits) -> Compared:
    """Runs ``words``, a ``cairn`` command, with ``--json`` and within the limits."""
    root, began_s = repo_root(), time.monotonic()
    path = os.pathsep.join(filter(None, [str(root / "jobs"), str(root), os.environ.get("PYTHONPATH")]))
    # One thread and one heap of each library, so that what is counted is what is used.
    slim = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    # Files, since a pipe is read into this process however much comes.
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "cairn.command.cli", *words[1:], "--limit", str(EXAMPLES), "--json"],
            cwd=root,
            env={**os.environ, **slim, **environment, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=errors,
            start_new_session=True,
            preexec_fn=_limited(limits.memory_bytes),  # noqa: PLW1509  system calls only, loaded before the fork
        )
        try:
            code = process.wait(limits.seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return Compared(found=None, problem=f"it took longer than {span(limits.seconds)}", too_much=True)
        texts = []
        for file in (said, errors):
            file.seek(0)
            texts.append(file.read(limits.said_bytes + 1))
    return answer_of(code, texts[0], texts[1].decode(errors="replace"), time.monotonic() - began_s, limits)


def answer_of(code: int, said: bytes, errors: str, took_s: float, limits: Limits) -> Compared:
    """What the process's end means. ``said``: the beginning of what it wrote, a byte more than the limit at most. A pure function."""
    if code == 0 and len(said) <= limits.said_bytes:
        return Compared(found=json.loads(said), seconds=took_s)
    if code == 0:
        problem = f"the examples take more than {size(limits.said_bytes)}"
        return Compared(found=None, problem=problem, too_much=True)
    if code < 0 or any(words in errors for words in _OUT_OF_MEMORY):
        # Where an allocation is refused, native code ends the process.
        return Compared(found=None, problem=f"it needed more than {size(limits.memory_bytes)} of memory", too_much=True)
    return Compared(found=None, problem=errors.strip()[-2000:] or f"the command ended with code {code}")


def _limited(memory_bytes: int) -> Callable[[], None]:
    dies = die_with_parent(signal.SIGKILL)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.nice(5)
        if dies is not None:
            dies()

    return limit
