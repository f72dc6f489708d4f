"""Calls into the user's processor: what goes wrong there is told with the pipeline, the call, the key and the interval."""

from __future__ import annotations

import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from state_backend.values.errors import (
    CairnError,
    InvariantViolated,
    ProcessorError,
    RetryableError,
    StateTypeError,
    StateUnusable,
)
from state_backend.values.intervals import Interval


class UserCode:
    """The processor's calls in one interval of a pipeline. ``offers_null``: the pipeline could store NULL for values that do not fit."""

    def __init__(self, interval: Interval, pipeline: str, *, offers_null: bool = False) -> None:
        self._interval = interval
        self._pipeline = pipeline
        self._offers_null = offers_null

    @contextmanager
    def call(self, name: str, key: Any = None) -> Iterator[None]:
        """Around one call. Too slow for every key: there, ``failed`` in an ``except``.

        Raises: ProcessorError for whatever the call raises.
        """
        try:
            yield
        except BaseException as error:
            self.failed(name, key, error)

    def failed(self, name: str, key: Any, error: BaseException) -> NoReturn:
        """Raises: ProcessorError, naming pipeline, key and interval, with the traceback of what user code raised; the engine's own
        errors as they are."""
        if isinstance(error, InvariantViolated | StateUnusable | RetryableError):
            raise error
        where = f"{name}, key {tuple(key)!r}" if key is not None else name
        trace = user_traceback(error)
        what = f"pipeline {self._pipeline!r}: {where}, interval {self._interval}: {described(error)}"
        if self._offers_null and isinstance(error, StateTypeError):
            what += "\nTo store NULL where Spark does, set Pipeline(on_type_mismatch='null')"
        raised = ProcessorError(printable(what))
        # As a note, since Spark passes on neither causes nor the frames of what it takes for its own. It prints causes too, and
        # can't send what is not UTF-8: the traceback is all that goes on.
        raised.add_note(textwrap.indent(printable(trace), "  "))
        raise raised from (error if printable(trace) == trace else None)


def described(error: BaseException) -> str:
    """An error in a line for a message: its type, unless it is ours, and what it says; whatever its ``__str__`` does."""
    text = user_text(error)
    if isinstance(error, CairnError):
        return text
    told = f"{type(error).__name__}: {text}"
    if isinstance(error, Exception):
        return told
    return f"{told}; a processor must not end the process that it runs in: raise an exception instead"


def user_text(error: BaseException) -> str:
    """What an error says, as UTF-8 can have it."""
    try:
        return printable(str(error))
    except BaseException as broken:
        return f"<its __str__ raised {type(broken).__name__}>"


def printable(text: str) -> str:
    """Text that can be encoded as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def iterable(results: Any, call: str) -> Any:
    """What a handler returned, if it can be iterated."""
    if results is None:
        raise TypeError(f"{call} returned None; it must return an iterator of its output, iter([]) for none")
    return results


def user_traceback(error: BaseException) -> str:
    """The traceback of an error without the runtime's own frames, which begin it."""
    formatted = traceback.TracebackException.from_exception(error)
    ours = str(Path(__file__).parent)
    users = [frame for frame in formatted.stack if not frame.filename.startswith(ours)]
    formatted.stack[:] = users or formatted.stack[:]
    return "".join(formatted.format()).rstrip()
