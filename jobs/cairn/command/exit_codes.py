"""Exit codes of `cairn`: 0 success, 1 findings, 2 a wrong call, 3 the storage failed or refused, 130 Ctrl-C."""

from __future__ import annotations

import functools
import logging
import signal
import threading
from collections.abc import Callable, Mapping
from typing import NoReturn, ParamSpec

import typer

from cairn.command.progress import CONTINUES, INTERRUPTED, after_stop
from state_backend.values.errors import (
    CairnError,
    NoSuchCheckpoint,
    PermissionRefused,
    RetryableError,
    StorageError,
    UsageError,
)
from state_backend.values.hide_secrets import hide

FINDINGS, USAGE, STORAGE = 1, 2, 3

P = ParamSpec("P")


def exit_codes(command: Callable[P, int], leaves: str = CONTINUES) -> Callable[P, None]:
    """Wrap a command, so that it exits with its return value, or with the exit code of a `CairnError`, which it prints.

    After Ctrl-C, print on stderr how much was done, and `leaves`: what remains, and which command continues. Other
    exceptions are not caught.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        in_main_thread = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, _on_ctrl_c) if in_main_thread else None
        try:
            code = command(*args, **kwargs)
        except CairnError as error:
            _print_error(error, kwargs)
            code = code_of(error)
        except KeyboardInterrupt as stop:
            typer.echo(hide(after_stop(stop, leaves)), err=True)
            code = INTERRUPTED
        finally:
            if before is not None:
                signal.signal(signal.SIGINT, before)
        raise typer.Exit(code)

    return run


def _on_ctrl_c(*_: object) -> NoReturn:
    # Switch off logs: Py4J logs a traceback for an interrupted call, but the user needs only the text of `after_stop`.
    logging.disable(logging.CRITICAL)
    raise KeyboardInterrupt


def code_of(error: CairnError) -> int:
    if isinstance(error, PermissionRefused | RetryableError | StorageError):
        return STORAGE
    return USAGE if isinstance(error, NoSuchCheckpoint | UsageError) else FINDINGS


def _print_error(error: CairnError, options: Mapping[str, object]) -> None:
    root, pipeline, message = options.get("root"), options.get("pipeline"), str(error)
    if isinstance(error, UsageError | NoSuchCheckpoint) and root and pipeline:
        other = _if_wrong(str(root), str(pipeline))
        message += "" if other in message else other
    for note in getattr(error, "__notes__", []):  # Long notes, such as a traceback, stand above the message.
        typer.echo(note, err=True)
    typer.echo(hide(f"{type(error).__name__}: {message}"), err=True)


def _if_wrong(root: str, pipeline: str) -> str:
    """Return a line with similar pipeline names below `root` if `pipeline` has no files there; else an empty text."""
    from state_backend.adapters.open_storage import join_url, open_storage
    from state_backend.inspection.find_pipelines import other_pipelines

    try:
        there = next(iter(open_storage(join_url(root, pipeline)).list("")), None)
    except CairnError:
        return ""
    return "" if there else other_pipelines(root, pipeline)
