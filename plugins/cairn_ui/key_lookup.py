"""Look up one key of a checkpoint for a page: its state, its history, and the command that replays its interval.

A process of its own reads the state (`cairn.command.look_up_key`), with limits of time, memory and size. The process
reads the key from its standard input, because other users of the host can read arguments. One process runs at a time, and
Cairn keeps nothing.
"""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cairn_ui.find_pipelines import PipelineRef
from cairn_ui.human_units import size, span
from cairn_ui.limited_process import Ended, run_module

MODULE = "cairn.command.look_up_key"
# A form with a longer key is refused. Airflow's API server would otherwise hold the whole form in its memory.
MOST_KEY_BYTES = 64 << 10
_SECONDS, _MEMORY_BYTES, _SAID_BYTES = 30.0, 1 << 30, 1 << 20
# In characters: the page cuts longer keys and errors, and shows no replay command for a longer key.
_MOST_VALUE = 2000
_MOST_COMMAND = 4000


class Busy(Exception):
    """The error that another look-up is already running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry of the key's state as the page shows it: texts, without markup."""

    state: str
    place: str
    expires: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a look-up."""

    typed: str
    # The key as JSON; None if the look-up failed.
    key: str | None = None
    entries: tuple[Entry, ...] = ()
    steps: tuple[tuple[str, ...], ...] = ()
    more: bool = False
    # The command that replays the checkpoint's interval for the key; None if it ran no processor, or if the key is too
    # long for a command.
    replay: str | None = None
    # Why the look-up failed; None if it did not fail.
    problem: str | None = None
    too_much: bool = False
    seconds: float = 0.0


_running = threading.Lock()


def look_up(ref: PipelineRef, checkpoint: int, typed: str, environment: Mapping[str, str]) -> Found:
    """Look up a key in a checkpoint."""
    if not _running.acquire(blocking=False):
        raise Busy
    try:
        asked = {"root": ref.root, "pipeline": ref.name, "checkpoint": checkpoint, "key": typed}
        ended = run_module(
            [MODULE],
            environment,
            seconds=_SECONDS,
            memory_bytes=_MEMORY_BYTES,
            said_bytes=_SAID_BYTES,
            given=json.dumps(asked).encode(),
        )
    finally:
        _running.release()
    return found_in(ref, typed, ended)


def found_in(ref: PipelineRef, typed: str, ended: Ended) -> Found:
    """Return the result of a look-up whose process has ended. A pure function."""
    if ended.code is None:
        problem = f"The look-up took longer than {span(_SECONDS)}. The command line has no such limit."
        return Found(typed=typed, problem=problem, too_much=True)
    if ended.out_of_memory:
        problem = f"The look-up needed more than {size(_MEMORY_BYTES)} of memory. The command line has no such limit."
        return Found(typed=typed, problem=problem, too_much=True)
    if ended.code != 0:
        problem = ended.errors.strip()[-_MOST_VALUE:] or f"The look-up ended with exit code {ended.code}"
        return Found(typed=typed, problem=problem)
    if len(ended.said) > _SAID_BYTES:
        problem = (
            f"State and history of this key take more than {size(_SAID_BYTES)}. The command line has no such limit."
        )
        return Found(typed=typed, problem=problem, too_much=True)
    said: dict[str, Any] = json.loads(ended.said)
    key = json.dumps(said["key"], ensure_ascii=False)
    return Found(
        typed=typed,
        key=_cut(key),
        entries=tuple(
            Entry(state=state, place=place, expires=expires, value=value)
            for state, place, expires, value in said["states"]
        ),
        steps=tuple(map(tuple, said["history"])),
        more=said["more"],
        replay=_replay(ref, key, said["replay"]),
        seconds=ended.seconds,
    )


def _replay(ref: PipelineRef, key: str, checkpoint: int | None) -> str | None:
    if checkpoint is None or len(key) > _MOST_COMMAND:
        return None
    code = ref.code or "module:NAME"
    return shlex.join(["cairn", "replay", key, str(checkpoint), "--root", ref.root, "--code", code])


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_VALUE else f"{text[:_MOST_VALUE]}… ({len(text):,} characters)"
