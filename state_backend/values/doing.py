"""What this process is doing at the moment, for whoever explains its death."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_words: list[str] = []
_listeners: list[Callable[[str], None]] = []


@contextmanager
def heard_by(listener: Callable[[str], None]) -> Iterator[None]:
    """Call a function with the words of all open `doing` blocks, joined by commas, whenever they change in the block.

    They change when a `doing` begins or ends, and by `say_part`. The block's end calls it with an empty text.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
        listener("")


@contextmanager
def doing(words: str) -> Iterator[None]:
    """Say what the block does, such as `opening RocksDB`. It takes microseconds: say a phase, and not each key."""
    _words.append(words)
    _tell()
    try:
        yield
    finally:
        _words.pop()
        _tell()


def say_part(words: str) -> None:
    """Say which part the innermost `doing` block has come to, such as `processing key group 5`."""
    if _words:
        _words[-1] = words
        _tell()


def _tell() -> None:
    for listener in _listeners:
        listener(", ".join(_words))
