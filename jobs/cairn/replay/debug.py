"""Stop in the handlers of a processor with pdb, and launch configurations of editors."""

from __future__ import annotations

import inspect
import pdb
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

HANDLERS = ("handleInputRows", "handleInitialState", "handleExpiredTimer", "handleBatch", "handleExpiredTimers")


class Debugger:
    """A pdb (Python's debugger) that stops at the first line of each handler that the user's own classes define."""

    def __init__(self) -> None:
        self._pdb = pdb.Pdb(nosigint=True)
        self._pdb.reset()

    def watch(self, processor: Any) -> None:
        for name in HANDLERS:
            method = inspect.unwrap(getattr(type(processor), name, None) or getattr(processor, name, None) or print)
            code = getattr(method, "__code__", None)
            # Handlers of the base classes are skipped, because they do nothing.
            if code is not None and not method.__module__.startswith(("pyspark.", "cairn.arrow_processor")):
                self._pdb.set_break(code.co_filename, code.co_firstlineno, funcname=code.co_name)

    @contextmanager
    def running(self) -> Iterator[None]:
        frame: Any = sys._getframe()
        # `botframe` is the lowest frame. Without it, pdb would stop at the next line, not at the next breakpoint.
        self._pdb.botframe = frame
        before = sys.gettrace()
        try:
            self._pdb.set_continue()
            sys.settrace(self._pdb.trace_dispatch)
            yield
        except BaseException:
            if getattr(self._pdb, "quitting", False):
                raise KeyboardInterrupt from None
            raise
        finally:
            sys.settrace(before)
            self._pdb.clear_all_breaks()
