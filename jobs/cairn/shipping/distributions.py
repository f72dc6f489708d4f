"""Find the installed distribution of a module's file, and compute a digest of the distribution's files.

<folder>/pandas/core/frame.py           a module's file
<folder>/pandas-2.3.3.dist-info/RECORD  names the file, with its SHA-256
"""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
from functools import cache
from pathlib import Path, PurePath

from state_backend.values.frozen import frozen

_CODE = (".py", ".so", ".pyd")
_SEEN: dict[str, InstalledDistribution] = {}  # By name: the results of `distribution_here`.
_LISTED: set[str] = set()  # The folders whose distributions `_infos` has listed.


@frozen
class InstalledDistribution:
    name: str
    version: str
    digest: str  # SHA-256 over the names and hashes of its code files; empty without the file RECORD.
    is_pure: bool  # True if it has no compiled files, so that the digest is equal on every platform.


@cache
def distribution_of(file: str, module: str) -> InstalledDistribution | None:
    """Return the distribution that installed a module's file; None if no distribution lists the file."""
    folder = _site_folder(file, module)
    if folder is None:
        return None
    relative, top = PurePath(file).relative_to(folder).as_posix(), module.partition(".")[0]
    # First try distributions with the module's name, which usually have the file: to read the metadata of all, such as
    # 150 distributions, would take about 0.1 s.
    word, infos = _first_word(top), _infos(folder)
    for info in (*(i for w, i in infos if w == word), *(i for w, i in infos if w != word)):
        files, names = _contents(info)
        if relative in files or top in names:
            return _installed_at(info)
    return None


def listed_folders() -> frozenset[str]:
    """Return the folders whose distributions this process has listed. An installation changes their modified time."""
    return frozenset(_LISTED)


@cache
def _infos(folder: Path) -> tuple[tuple[str, Path], ...]:
    _LISTED.add(str(folder))
    infos = sorted((*folder.glob("*.dist-info"), *folder.glob("*.egg-info")))
    return tuple((_first_word(info.name), info) for info in infos)


@cache
def _contents(info: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return (files, modules) of a distribution. One of the two sets is empty.

    `files` are the installed files by the distribution's RECORD. Without RECORD, `modules` are the top-level modules
    that `top_level.txt` lists.
    """
    found = importlib.metadata.Distribution.at(info)
    record = found.read_text("RECORD")
    if record is None:
        return frozenset(), frozenset((found.read_text("top_level.txt") or "").split())
    return frozenset(row[0] for row in csv.reader(record.splitlines()) if row), frozenset()


@cache
def _installed_at(info: Path) -> InstalledDistribution:
    return _describe(importlib.metadata.Distribution.at(info))


def distribution_here(name: str) -> InstalledDistribution | None:
    """Return the distribution of this name in this process; None if the distribution is not installed.

    The first result is kept for the life of the process, because the process may have imported that version's modules.
    """
    if name not in _SEEN:
        try:
            _SEEN[name] = _describe(importlib.metadata.distribution(name))
        except importlib.metadata.PackageNotFoundError:
            return None
    return _SEEN[name]


def _describe(found: importlib.metadata.Distribution) -> InstalledDistribution:
    record, wheel = found.read_text("RECORD"), found.read_text("WHEEL") or ""
    digest = ""
    if record is not None:
        # Only code files below the site folder count. Scripts and files that an installer adds differ between hosts.
        code = sorted((row[0], row[1]) for row in csv.reader(record.splitlines()) if row and row[0].endswith(_CODE))
        lines = "".join(f"{path}\0{sha256}\n" for path, sha256 in code if not path.startswith(("..", "/")))
        digest = hashlib.sha256(lines.encode()).hexdigest()
    return InstalledDistribution(
        name=found.name, version=found.version, digest=digest, is_pure="Root-Is-Purelib: true" in wheel
    )


def _site_folder(file: str, module: str) -> Path | None:
    """Return the folder that contains the module's top-level package; None if the path is too short."""
    path = Path(file)
    depth = module.count(".") + (path.stem == "__init__")
    return path.parents[depth] if len(path.parents) > depth else None


def _first_word(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_").partition("_")[0]
