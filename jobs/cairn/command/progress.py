"""Progress bars, and the message after Ctrl-C."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnProgress = Callable[[int, int], None]
INTERRUPTED = 130

# Messages after Ctrl-C, by what remains of the command's work. {command} is the command as the user typed it.
CHANGED_NOTHING = "The command changed nothing. To begin again, run:\n{command}"
CONTINUES = "To continue, run:\n{command}"
REMOVE_FIRST = "The files of this export are incomplete. Delete its folder, then run:\n{command}"


class Stopped(KeyboardInterrupt):
    """Ctrl-C with a message of its own, which `after_stop` prints instead of the general one of the command."""


@contextmanager
def progress(doing: str, things: str) -> Iterator[OnProgress]:
    """Show a progress bar on stderr while the `with` block runs, if it is a terminal. Yield `on_progress(done, total)`.

    If Ctrl-C ends the block, its exception gets a note such as "copying: 3 of 8 shards were done", from `doing` and
    `things`.
    """
    counted = (0, 0)
    show, close = _bar(doing) if sys.stderr.isatty() else (lambda done, total: None, lambda: None)

    def on_progress(done: int, total: int) -> None:
        nonlocal counted
        counted = done, total
        show(done, total)

    try:
        yield on_progress
    except KeyboardInterrupt as stop:
        if counted[1]:
            stop.add_note(f"{doing}: {counted[0]:,} of {counted[1]:,} {things} were done")
        raise
    finally:
        close()


def after_stop(stop: KeyboardInterrupt, leaves: str) -> str:
    """Return the message after Ctrl-C: how much was done, then what remains and what to type (`leaves`, a template)."""
    own = str(stop) if isinstance(stop, Stopped) else leaves.format(command=shlex.join(["cairn", *sys.argv[1:]]))
    return "\n".join(["Stopped by Ctrl-C", *getattr(stop, "__notes__", []), own])


def _bar(doing: str) -> tuple[OnProgress, Callable[[], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(doing, total=None)
    bar.start()
    return lambda done, total: bar.update(task, completed=done, total=total), bar.stop
