"""Lines of a long program for a person: at most 80 columns wide, and never far apart."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Self

WIDTH = 80
_INDENT = " " * 10


def fold(text: str, *, indent: str = "") -> str:
    """Break a text into lines of at most 80 columns. A longer word, such as a path, stays whole."""
    lines = [
        textwrap.fill(line, WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    ]
    return "\n".join(lines).replace("\n", f"\n{indent}")


class ProgressLines:
    """Lines with the seconds since the program's start, and a line after each long silence.

    Within a `with` block, a thread fills silences: it prints the present activity and its duration.
    """

    def __init__(
        self,
        *,
        silence_s: float = 7,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] = lambda text: print(text, flush=True),
    ) -> None:
        self._silence_s = silence_s
        self._clock = clock
        self._write = write
        self._began_s = self._said_s = self._activity_s = clock()
        self._activity = ""
        self._lock = Lock()
        self._ended = Event()
        self._filler = Thread(target=self._fill, name="progress lines", daemon=True)

    def say(self, text: str) -> None:
        """Print a text with the seconds since the program's start."""
        with self._lock:
            self._said_s = self._clock()
            self._write(f"{self._said_s - self._began_s:6.1f} s  {fold(text, indent=_INDENT)}")

    def do(self, activity: str) -> None:
        """Set the text that names the running task. It is printed only after a silence."""
        if activity != self._activity:
            self._activity, self._activity_s = activity, self._clock()

    def fill_silence(self) -> None:
        """Print the running task and its duration so far, if no line was printed for `silence_s` seconds."""
        now_s = self._clock()
        if self._activity and now_s - self._said_s >= self._silence_s:
            self.say(f"… {self._activity}: {now_s - self._activity_s:.0f} s so far")

    def _fill(self) -> None:
        while not self._ended.wait(0.5):
            with suppress(OSError):  # The output is closed. The main thread gets the same error.
                self.fill_silence()

    def __enter__(self) -> Self:
        self._filler.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._filler.join()
