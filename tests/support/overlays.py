"""Older versions of PySpark and Airflow, each in a folder that holds nothing but the packages whose versions differ.

First on `PYTHONPATH`, a folder hides those packages of the environment; all other packages are the environment's own.
`python -m tests.support.overlays airflow-3.2.2 pyspark-4.1.4` installs overlays, and prints what `PYTHONPATH` needs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from local_stack.owned_process import python_path

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = REPOSITORY / ".cache/overlays"
LOCKS = {lock.stem: lock for lock in sorted(Path(__file__).with_suffix("").glob("*.lock"))}
PYSPARKS = [name for name in LOCKS if name.startswith("pyspark-")]


def environment(name: str, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a process that imports an overlay. Skip the test if it is not installed."""
    if not (FOLDERS / name).exists():
        pytest.skip(f"{name} is not installed: python -m tests.support.overlays {name}")
    return {**inherited, "PYTHONPATH": python_path(FOLDERS / name)}


def install(name: str) -> Path:
    """Install an overlay unless it is there by the same lock. A folder that exists is whole: it gets its name at the end."""
    folder = FOLDERS / name
    if folder.exists():
        if (folder / "lock").is_file() and (folder / "lock").read_bytes() == LOCKS[name].read_bytes():
            return folder
        shutil.rmtree(folder)
    FOLDERS.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=FOLDERS))
    try:
        uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--python", sys.executable]
        how = ["--no-deps", "--no-build-isolation", "--require-hashes"]
        command = [*uv, *how, "--target", str(made / "new"), "-r", str(LOCKS[name])]
        # uv trusts its own certificate authorities. If that fails, it tries the machine's, as `make setup` does.
        if subprocess.run(command, check=False).returncode:
            subprocess.run(command, check=True, env={**os.environ, "UV_SYSTEM_CERTS": "true"})
        shutil.copy(LOCKS[name], made / "new/lock")
        try:
            (made / "new").rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
    finally:
        shutil.rmtree(made)
    return folder


if __name__ == "__main__":
    if not sys.argv[1:] or {*sys.argv[1:]} - LOCKS.keys():
        sys.exit(f"name overlays from {', '.join(LOCKS)}, not {' '.join(sys.argv[1:]) or 'none'}")
    print(os.pathsep.join(str(install(name)) for name in sys.argv[1:]))
