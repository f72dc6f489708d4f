"""Let the kernel end a child process when its parent dies, even if the parent was killed with SIGKILL.

Airflow tasks start drivers this way, so that no driver runs on after its task.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent(signal_number: int) -> Callable[[], None] | None:
    """Return a `preexec_fn` for `Popen`; None without Linux. The signal comes when the thread that called `Popen` ends.

    This function loads libc before the fork, because the child of a threaded process must not take locks.
    """
    if sys.platform != "linux":
        return None
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return None
    parent = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return ask
