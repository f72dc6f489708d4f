"""Calls into the user's processor, whose errors are reported with the pipeline, the call, the key and the interval."""

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

_OURS = str(Path(__file__).parent)


class UserCode:
    """A wrapper of the calls into the user's processor during one interval. It adds to errors where they happened."""

    def __init__(self, interval: Interval, pipeline: str, *, offers_null: bool = False) -> None:
        self._interval = interval
        self._pipeline = pipeline
        self._offers_null = offers_null

    @contextmanager
    def call(self, name: str, key: Any = None) -> Iterator[None]:
        """Run one call of user code in the `with` block, and turn its exception into a ProcessorError.

        The context manager is too slow to wrap the call for every key. Code that runs for every key calls `fail` in an
        `except` clause instead.
        """
        try:
            yield
        except BaseException as error:
            self.fail(name, key, error)

    def fail(self, name: str, key: Any, error: BaseException) -> NoReturn:
        """Raise a ProcessorError for `error` that names the pipeline, the call `name`, the key and the interval.

        The user code's traceback becomes a note of it. An error of the storage or of stored state is raised unchanged.
        """
        if isinstance(error, InvariantViolated | StateUnusable | RetryableError):
            raise error
        where = f"{name}, key {tuple(key)!r}" if key is not None else name
        trace = user_traceback(error)
        first, line_break, more = describe_error(error).partition("\n")
        what = (
            f"pipeline {self._pipeline!r}: {where}, interval {self._interval}: {first}{_place(error)}{line_break}{more}"
        )
        if self._offers_null and isinstance(error, StateTypeError):
            what += "\nTo store NULL instead of such values, as Spark does, set Pipeline(on_type_mismatch='null')"
        raised = ProcessorError(printable(what))
        # If Spark simplifies tracebacks, its report to the driver leaves out an error's `__cause__`. So a note of
        # `raised` holds the traceback of the user's code. If Spark does not simplify tracebacks, its report contains
        # the cause, and Spark fails if that text can't be encoded as UTF-8. So the cause is set only if it can be.
        raised.add_note(textwrap.indent(printable(trace), "  "))
        raise raised from (error if printable(trace) == trace else None)


def describe_error(error: BaseException) -> str:
    """Return an error as "type: text", or only its text for an error of Cairn. Never raise, even if `__str__` does."""
    text = user_text(error)
    if isinstance(error, CairnError):
        return text
    told = f"{type(error).__name__}: {text}"
    if isinstance(error, Exception):
        return told
    return f"{told}; a processor must not end its process: raise an exception instead"


def user_text(error: BaseException) -> str:
    """Return the text of an error as valid UTF-8, or a note if its `__str__` raises."""
    try:
        return printable(str(error))
    except BaseException as broken:
        return f"<its __str__ raised {type(broken).__name__}>"


def printable(text: str) -> str:
    """Return the text with backslash escapes for characters that UTF-8 can't encode, such as lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


def iterable(results: Any, call: str) -> Any:
    """Return `results` unchanged. Raise `TypeError` if the handler (`call`) returned None instead of an iterator."""
    if results is None:
        raise TypeError(
            f"{call} returned None; it must return an iterator of its output, or iter([]) if it has no output"
        )
    return results


def _place(error: BaseException) -> str:
    """Return the last line of user code in an error's traceback, such as ` (clicks.py:54)`; empty without user code."""
    users = _users_frames(traceback.extract_tb(error.__traceback__))
    return f" ({Path(users[-1].filename).name}:{users[-1].lineno})" if users else ""


def _users_frames(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    return [frame for frame in stack if not frame.filename.startswith(_OURS)]


def user_traceback(error: BaseException) -> str:
    """Return the formatted traceback of an error, without frames of this package if other frames remain."""
    formatted = traceback.TracebackException.from_exception(error)
    formatted.stack[:] = _users_frames(formatted.stack) or formatted.stack[:]
    return "".join(formatted.format()).rstrip()
