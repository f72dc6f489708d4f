"""Calls into the user's processor: what goes wrong there is told with the call, the key and the interval."""

from __future__ import annotations

import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from state_backend.values.errors import CairnError, InvariantViolated, ProcessorError, RetryableError, StateUnusable
from state_backend.values.intervals import Interval


class UserCode:
    """The processor's calls in one interval."""

    def __init__(self, interval: Interval) -> None:
        self._interval = interval

    @contextmanager
    def call(self, name: str, key: Any = None) -> Iterator[None]:
        """Around one call; ProcessorError for what it raises. Too slow for every key: there, ``failed`` in an ``except``."""
        try:
            yield
        except Exception as error:
            self.failed(name, key, error)

    def failed(self, name: str, key: Any, error: Exception) -> NoReturn:
        """Raises what user code raised as ProcessorError, which names key and interval; its traceback comes along. The
        engine's own errors pass as they are."""
        if isinstance(error, InvariantViolated | StateUnusable | RetryableError):
            raise error
        where = f"{name}, key {tuple(key)!r}" if key is not None else name
        what = str(error) if isinstance(error, CairnError) else f"{type(error).__name__}: {error}"
        raised = ProcessorError(f"{where}, interval {self._interval}: {what}")
        # As a note, since Spark passes on neither causes nor the frames of what it takes for its own.
        raised.add_note(textwrap.indent(user_traceback(error), "  "))
        raise raised from error


def iterable(results: Any, call: str) -> Any:
    """What a handler returned, if it can be iterated."""
    if results is None:
        raise TypeError(f"{call} returned None; it must return an iterator of its output, iter([]) for none")
    return results


def user_traceback(error: Exception) -> str:
    """The traceback of an error without the runtime's own frames, which begin it."""
    formatted = traceback.TracebackException.from_exception(error)
    ours = str(Path(__file__).parent)
    users = [frame for frame in formatted.stack if not frame.filename.startswith(ours)]
    formatted.stack[:] = users or formatted.stack[:]
    return "".join(formatted.format()).rstrip()
