"""What names a durable file, and how much state lies where."""

from __future__ import annotations

from dataclasses import dataclass

from state_backend.values.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """A file by content: path relative to its root (``/`` separators), size, and crc32c (unsigned, Castagnoli)."""

    path: str
    size_bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """What a storage says of a file. ``generation`` changes with every write to the path; ``modified_ms`` is the
    storage's own clock. ``crc32c`` is None where the storage keeps none (local files)."""

    path: str
    size_bytes: int
    generation: int
    modified_ms: int
    crc32c: int | None


def check_path(path: str) -> str:
    """The path itself, if it is a plain relative one: segments joined by ``/``, none empty, ``.`` or ``..``, and neither
    backslash nor control character. Else UsageError: a path from a record must never lead out of its root."""
    if not path or any(s in ("", ".", "..") for s in path.split("/")) or "\\" in path or any(ord(c) < 32 for c in path):
        raise UsageError(f"not a relative path inside the root: {path!r}")
    return path
