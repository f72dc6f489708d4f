"""Tell what a Python worker of Spark was doing when a signal ended it.

Spark gives each worker a file for the stacks of Python's fault handler. If the worker dies, the executor puts the
file's content into the task's error, which reaches the driver from any host. In a crash, Python writes its stack there.
The kernel's out-of-memory killer leaves no time for a stack. So each phase of a task first writes a line into the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from cairn.spark_versions import fault_handler_file
from state_backend.values.doing import heard_by
from state_backend.values.errors import WorkerDied

# With this setting in a session, Spark gives each Python worker a file for the fault handler.
FAULT_HANDLER = "spark.sql.execution.pyspark.udf.faulthandler.enabled"
_DIED = re.compile(
    r"Python worker exited unexpectedly \(crashed\)(?:: (.*?))?(?=\n\s*at |\nCaused by: |\nDriver stack|\. Consider|\Z)",
    re.DOTALL,
)
_LINE = re.compile(r"\Acairn: (.*)\n?")
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}


@contextmanager
def last_words(who: str) -> Iterator[None]:
    """Within the block, keep the phase that `doing` tells in the worker's file for stacks. `who`: Begins the line."""
    opened = fault_handler_file()  # Keep it open: if it were closed, another file would get its descriptor.

    def write(words: str) -> None:
        if opened is not None:
            # Write through the fault handler's descriptor: the fault handler then writes its stack after this text.
            file = opened.fileno()
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, f"cairn: {who}: {words}\n".encode() if words else b"")

    with heard_by(write):
        yield


def explain_death(text: str) -> WorkerDied | None:
    """Return the error that explains the death of a Python worker; None if Spark's text does not report a death.

    If the fault handler wrote a stack, the stack is a note of the error.
    """
    died = _DIED.search(text)
    if died is None:
        return None
    told = died[1] or ""
    line = _LINE.match(told)
    who, _, words = line[1].partition(": ") if line else ("", "", "")
    stack = told[line.end() if line else 0 :].strip()
    signal = next((name for words_, name in _SIGNALS.items() if f"Fatal Python error: {words_}" in stack), None)
    worker = f"the Python worker of {who}" if who else "a Python worker of Spark"
    how = f"crashed by {signal}" if signal else "was killed"
    error = WorkerDied(
        f"{worker} {how}{f' while {words}' if words else ''}; nothing was committed\n"
        + (
            "The stack of Python's fault handler names the code that crashed. If the next try crashes there again, report it with the stack"
            if signal
            else "It left no stack, as after SIGKILL: mostly the kernel's out-of-memory killer (see dmesg, or the pod's status "
            "OOMKilled), or a person\nGive executors more memory, or each less to do: a greater parallelism, a smaller "
            "write_buffer_bytes"
        )
        + ("" if who or signal else f"\nTo see the shard and its phase, set {FAULT_HANDLER}=true in the session")
    )
    if stack:
        error.add_note(stack)
    return error
