"""How code reaches the workers, and which code it was.

A Spark server lives longer than one interval, and its workers may have imported yesterday's processor. So the user's modules
travel by value with every task: an edited file counts from the next interval on. The runtime itself is imported by the
workers; a task refuses to run on a server whose runtime differs from the driver's.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pyspark import cloudpickle

import jobs
import state_backend
from state_backend.values.errors import UsageError

_RUNTIME = (
    "jobs.arrow_processor",
    "jobs.running_aggregate",
    "jobs.runtime",
    "jobs.over_time",
    "jobs.pipeline",
    "jobs.read_plan",
    "jobs.run_interval",
    "jobs.driver",
    "jobs.savepoint",
    "jobs.restore",
    "jobs.spark",
    "jobs.streaming",
    "jobs.validate",
    "jobs.which_checkpoint",
    "state_backend",
    "cairn_operators",
)


def user_modules(cls: Any) -> list[ModuleType]:
    """The module of a class or function and what it imports, directly or not, of modules that neither Python, an installed package nor
    this runtime brings; sorted by name. Import statements are read from the sources, since a constant that was imported
    leaves no trace of where it came from."""
    found: dict[str, ModuleType] = {}
    pending = [cls.__module__]
    while pending:
        name = pending.pop()
        module = sys.modules.get(name)
        if module is None or name in found or not _is_users(module):
            continue
        found[name] = module
        pending += _imported(module)
    return [found[name] for name in sorted(found)]


def _imported(module: ModuleType) -> Iterator[str]:
    """Names of modules that a module's source may import, at the top or in a function."""
    package = module.__package__ or ""
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = (
                importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                if node.level
                else str(node.module)
            )
            yield parent
            yield from (f"{parent}.{alias.name}" for alias in node.names)


def code_hash(cls: Any) -> str:
    """SHA-256, hex, over the sources of the user's modules that a class or function needs."""
    digest = hashlib.sha256(cls.__qualname__.encode())
    for module in user_modules(cls):
        digest.update(module.__name__.encode() + b"\0")
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()


def ship(task: object, processor: type | None) -> str:
    """The task as an option of a data source: pickled, with the processor's modules by value."""
    modules = [m for m in user_modules(processor) if m.__name__ != "__main__"] if processor else []
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        names = [m.__name__ for m in modules]
        payload = cloudpickle.dumps((runtime_version(), names, cloudpickle.dumps(task)))
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    return base64.b64encode(payload).decode()


def unship(option: str) -> Any:
    """The task, in a worker. UsageError if the worker's runtime is another version."""
    version, users, task = cloudpickle.loads(base64.b64decode(option))
    if version != runtime_version():
        raise UsageError(
            "the Spark server runs another version of this project than the driver; restart the server, so that its workers "
            f"import the current one (driver {version}, server {runtime_version()})"
        )
    # A worker may have imported one of the user's modules for an earlier interval, by an import inside a function.
    for name in users:
        sys.modules.pop(name, None)
    return cloudpickle.loads(task)


@cache
def runtime_version() -> str:
    """16 hex digits over the sources that workers import, as this process found them (read at first use)."""
    digest = hashlib.sha256()
    for root, pattern in (
        *((path, "**/*.py") for path in state_backend.__path__),
        *((path, "runtime/**/*.py") for path in jobs.__path__),
        *((path, "*.py") for path in jobs.__path__),
    ):
        for file in sorted(Path(root).glob(pattern)):
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _is_users(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    name = module.__name__
    if file is None or any(name == r or name.startswith(r + ".") for r in _RUNTIME):
        return False
    return not any(Path(file).is_relative_to(folder) for folder in _installed())


@cache
def _installed() -> tuple[str, ...]:
    return tuple(sysconfig.get_path(p) for p in ("stdlib", "platstdlib", "purelib", "platlib"))
