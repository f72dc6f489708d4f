"""Older versions of PySpark, each in a folder that holds nothing else.

First on `PYTHONPATH`, the folder hides the PySpark of the environment; all other packages are the environment's own.
`python -m tests.support.spark_overlays 4.1.4` installs a version, and prints its folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pyspark
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = REPOSITORY / ".cache/spark"
LOCKED = {
    block.partition(" ")[0]: f"pyspark=={block}"
    for block in Path(__file__).with_name("spark.lock").read_text().split("pyspark==")[1:]
    if block[0].isdigit()
}


def overlay(version: str) -> Path:
    """Return the folder of a version. Skip the test if the version is not installed."""
    folder = FOLDERS / version
    if not folder.exists():
        pytest.skip(f"PySpark {version} is not installed: python -m tests.support.spark_overlays {version}")
    return folder


def environment(version: str, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a process that imports this version of PySpark."""
    paths = [str(overlay(version)), inherited.get("PYTHONPATH", "")]
    return {**inherited, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def path_of_this_version() -> list[str]:
    """Return the folder of the version that this process imports; nothing if it is the environment's own PySpark."""
    return [str(Path(pyspark.__file__).parents[1])] if pyspark.__version__ in LOCKED else []


def install(version: str) -> Path:
    """Install a version unless it is there. A folder that exists is whole: it gets its name at the end."""
    folder = FOLDERS / version
    if folder.exists():
        return folder
    FOLDERS.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{version}-", dir=FOLDERS))
    try:
        (made / "lock").write_text(LOCKED[version])
        uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--python", sys.executable]
        how = ["--no-deps", "--no-build-isolation", "--require-hashes"]
        command = [*uv, *how, "--target", str(made / "new"), "-r", str(made / "lock")]
        # As `make setup` does: uv trusts its own authorities first, then the machine's.
        if subprocess.run(command, check=False).returncode:
            subprocess.run(command, check=True, env={**os.environ, "UV_SYSTEM_CERTS": "true"})
        try:
            (made / "new").rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
    finally:
        shutil.rmtree(made)
    return folder


if __name__ == "__main__":
    unknown = [version for version in sys.argv[1:] if version not in LOCKED]
    if unknown or not sys.argv[1:]:
        sys.exit(f"name versions of PySpark from {', '.join(LOCKED)}, not {' '.join(unknown) or 'none'}")
    for wanted in sys.argv[1:]:
        print(install(wanted))
