"""A copy of the repository that tests may write pipelines into."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def copy_layout(folder: Path) -> Path:
    """What a pipeline needs, with this environment as its ``.venv``."""
    folder.mkdir(exist_ok=True)
    for name in ("jobs", "plugins", "state_backend", "dags", "tests/support"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    support = (f"tests/support/{name}.py" for name in ("__init__", "layout", "messages"))  # what conftest imports
    for name in ("pyproject.toml", "tests/__init__.py", "tests/conftest.py", *support):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def environment_of(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a command in the copy, whose modules come before the repository's own."""
    return {**os.environ, **more, "PYTHONPATH": f"{folder}/jobs:{folder}/plugins:{folder}"}


def run_there(folder: Path, command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    """A command in the copy; its output as text, errors among it."""
    environment = environment_of(folder, **more)
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )


PUBLIC = {
    "cairn",
    "cairn.aggregates",
    "cairn.arrow_processor",
    "cairn.errors",
    "cairn.pandas_with_state",
    "cairn.processors",
    "cairn.sinks",
    "cairn.testing",
    "cairn_operators",
}


def remove(file: Path, _: Path | None = None) -> None:
    file.unlink()


def truncate(file: Path, _: Path | None = None) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path, _: Path | None = None) -> None:
    file.write_bytes(b"")


def flip(file: Path, _: Path | None = None) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
