"""What this process is doing at the moment, so that the driver can say it if the process dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_words: list[str] = []
_listeners: list[Callable[[str], None]] = []


@contextmanager
def heard_by(listener: Callable[[str], None]) -> Iterator[None]:
    """Within the block, call `listener` whenever a `doing` block begins or ends, or `say_part` is called.

    The argument is the words of all open `doing` blocks, joined by commas; at the end of this block, an empty text.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
        listener("")


@contextmanager
def doing(words: str) -> Iterator[None]:
    """Tell the listener of `heard_by` what this block does. It costs microseconds, so don't use it for single keys."""
    _words.append(words)
    _tell()
    try:
        yield
    finally:
        _words.pop()
        _tell()


def say_part(words: str) -> None:
    """Give the innermost open `doing` block new words, such as `processing key group 5`, and call the listener."""
    if _words:
        _words[-1] = words
        _tell()


def _tell() -> None:
    for listener in _listeners:
        listener(", ".join(_words))
