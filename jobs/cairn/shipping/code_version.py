"""Find the version and the name of a pipeline's code, to show them to people. Decisions use the code's hash instead."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cairn.pipeline import Pipeline

_TIMEOUT_S = 10


def code_version(pipeline: Pipeline) -> str | None:
    """Return the pipeline's `version`, or else `git describe` of the repository that contains the processor's file.

    The result is None if the pipeline has no `version` and git does not track the file.
    """
    if pipeline.version is not None:
        return pipeline.version
    file = _file_of(pipeline.processor)
    return None if file is None else git_version(file)


def code_reference(pipeline: Pipeline) -> str | None:
    """Return `module:NAME`, by which commands load this pipeline; None if no imported module has a name for it.

    `__main__` does not count, because another process would import another module by this name.
    """
    near = [getattr(part, "__module__", None) for part in (pipeline.source, pipeline.processor)]
    return _found(pipeline.name, tuple(filter(None, near)))


@functools.cache
def _found(name: str, near: tuple[str, ...]) -> str | None:
    from cairn.pipeline import Pipeline

    for module in dict.fromkeys([*near, *sys.modules]):
        names = {} if module == "__main__" else getattr(sys.modules.get(module), "__dict__", {})
        for constant, value in [*names.items()]:
            # Compare names, not identity: the caller's pipeline may be a copy with another field, such as the sink.
            if type(value) is Pipeline and value.name == name:
                return f"{module}:{constant}"
    return None


def begin_code_version(pipeline: Pipeline) -> Callable[[], str | None]:
    """Begin to compute `code_version` in a thread, and return a function that waits for the result.

    The two commands of git take tens of milliseconds. In this time the caller can ask the source and Spark.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="cairn-git")
    version = pool.submit(code_version, pipeline)
    pool.shutdown(wait=False)
    return version.result


@functools.cache
def git_version(file: Path) -> str | None:
    """Return `git describe` of the repository that contains a file, with `-dirty` if the repository has changes.

    Return None without git, or if the repository does not track the file. A virtual environment inside of a repository
    must not get that repository's version.
    """
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    return _git(file.parent, "describe", "--always", "--dirty", "--tags")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _file_of(processor: Any) -> Path | None:
    while isinstance(processor, functools.partial):
        processor = processor.func
    try:
        return Path(inspect.getfile(processor if callable(processor) else type(processor))).resolve()
    # Built-in objects, and objects that were typed at a prompt, have no file.
    except (TypeError, OSError):
        return None
