"""Compare the rows and entries of one interval of a trial with production's, in a process of its own.

The process runs `cairn compare`. Its memory and time are limited, and the API server opens no store.

    plan        a comparison that is too large by the records alone does not begin
    run         one comparison at a time; a process that exceeds its time, memory or answer is ended
    keep        results, by the digests and checksums of both sides: the same question reads nothing again
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
    """The limits of one comparison.

    Attributes:
        rows: Rows of both sides together.
        entries: Entries of both sides' states together.
        output_bytes: Bytes of both sides' output files together.
        seconds: Time of the process.
        memory_bytes: Memory for the data of the process (RLIMIT_DATA).
        said_bytes: Size of the answer.
    """

    rows: int = 1_000_000
    entries: int = 1_000_000
    output_bytes: int = 256 << 20
    seconds: float = 60.0
    memory_bytes: int = 2 << 30
    said_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The result of one comparison.

    Attributes:
        found: The answer of `cairn compare --json`; None without a result.
        problem: Why there is no result.
        too_much: A limit was exceeded, so the comparison belongs on the command line.
        seconds: Duration of the process.
    """

    found: Mapping[str, Any] | None
    problem: str | None = None
    too_much: bool = False
    seconds: float = 0.0


class Busy(Exception):
    """The error that another comparison is already running."""


def command_of(ref: PipelineRef, trial: str, start: Any, key: Sequence[str]) -> list[str]:
    """Return the words of the command that compares one interval, as a person types it.

    Args:
        ref: The pipeline.
        trial: Name of the trial.
        start: Start of the interval.
        key: Columns that identify a row.
    """
    words = ["cairn", "compare", trial, "--root", ref.root, "--pipeline", ref.name, "--interval", format_instant(start)]
    return words + [word for name in key for word in ("--key", name)]


def too_much(found: IntervalDifference, limits: Limits) -> str | None:
    """Return why an interval exceeds the limits, by its records alone; None if it does not. Pure.

    Only output and states that differ by checksum or digest count.
    """
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
    """A cache of the comparisons of this process, which runs one comparison at a time. Safe for several threads.

    Args:
        limits: Limits of each comparison; None for the defaults.
        run: Runs the command; None for `run_limited`.
        clock: Returns seconds.
    """

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
        """Return the key of a question in the cache, and its answer.

        The answer is None if the comparison has to run. A failure is forgotten after 60 s, unless a limit was exceeded.

        Args:
            ref: The pipeline.
            trial: Name of the trial.
            found: How the interval's results compare by digests and checksums.
            key: Columns that identify a row.
        """
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
        """Run the command of a comparison, and keep its result.

        Args:
            asked: The key of the question, from `known`.
            words: The command.
            environment: Variables to add to the environment of the process.

        Raises:
            Busy: Another comparison is running.
        """
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
    """Run a `cairn` command with `--json` in a process that keeps within the limits.

    Args:
        words: The command.
        environment: Variables to add to the environment of the process.
        limits: The limits.
    """
    root, began_s = repo_root(), time.monotonic()
    path = os.pathsep.join(filter(None, [str(root / "jobs"), str(root), os.environ.get("PYTHONPATH")]))
    # Each library gets one thread and the common heap. Otherwise reserved but unused memory would count against the
    # limit.
    slim = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    # The output goes to files. A pipe would bring all of it into this process, however much it is.
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
    """Return the result of a process that has ended. Pure.

    Args:
        code: Exit code of the process; negative for the signal that killed it.
        said: Beginning of its output: at most one byte more than the limit.
        errors: Its error output.
        took_s: Its duration in seconds.
        limits: The limits.
    """
    if code == 0 and len(said) <= limits.said_bytes:
        return Compared(found=json.loads(said), seconds=took_s)
    if code == 0:
        problem = f"the examples take more than {size(limits.said_bytes)}"
        return Compared(found=None, problem=problem, too_much=True)
    if code < 0 or any(words in errors for words in _OUT_OF_MEMORY):
        # Native code ends the process when the memory limit refuses an allocation.
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
