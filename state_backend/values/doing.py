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
    """Tell listeners what the block does, such as `opening RocksDB`. It takes microseconds: don't call it per key."""
    _words.append(words)
    _tell()
    try:
        yield
    finally:
        _words.pop()
        _tell()


def say_part(words: str) -> None:
    """Replace the words of the innermost `doing` block, such as by `processing key group 5`."""
    if _words:
        _words[-1] = words
        _tell()


def _tell() -> None:
    for listener in _listeners:
        listener(", ".join(_words))
