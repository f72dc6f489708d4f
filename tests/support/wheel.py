"""The wheel of this repository's sources."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.layout import REPOSITORY

UV = str(Path(sys.executable).with_name("uv"))


def build_wheel(folder: Path) -> Path:
    """Build the wheel in a folder, from a copy of the sources.

    A build writes `_version.py` beside the sources. In the repository, that would change Cairn's code while other tests run it.
    """
    sources = folder / "sources"
    for name in _ran("git", "ls-files", cwd=REPOSITORY).splitlines():
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, sources / name)
    _ran(
        UV, "build", "--wheel", "--no-build-isolation", "--python", sys.executable, "-o", str(folder), str(sources), cwd=folder
    )  # fmt: skip
    (wheel,) = folder.glob("cairn_state-*.whl")
    return wheel


def _ran(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout
