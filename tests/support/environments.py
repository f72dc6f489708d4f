"""A Python with all packages of this one and some more, which only one test needs."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def environment_with(folder: Path, lock: Path) -> Path:
    """Makes it in ``folder / "venv"``; the path of its Python. ``lock``: names what is added, by hash."""
    python = folder / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    (site / "packages.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    uv, locked = str(Path(sys.executable).with_name("uv")), str(lock)
    command = [uv, "pip", "install", "-q", "--no-deps", "--require-hashes", "--python", str(python), "-r", locked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return python
