"""Let the kernel end a child whose parent is gone, also when the parent was killed with -9 and could not do it."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent(signal_number: int) -> Callable[[], None] | None:
    """A ``preexec_fn`` for ``Popen``: the child gets the signal when the thread that started it ends. None where the
    system has no such thing; the caller's own clean-up has to do there.

    libc is loaded here, before the fork: the child of a threaded process must not take locks. The check of the parent
    closes the gap in which the parent dies before the child has asked for the signal.
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
