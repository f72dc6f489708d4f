"""What names a durable file, and how much state lies where."""

from __future__ import annotations

from dataclasses import dataclass

from state_backend.values.errors import UsageError

TEMP_FOLDER = ".tmp"
"""No path may have a segment of this name: adapters keep unfinished files there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """A file by content: path relative to its root (``/`` separators), size, and crc32c (unsigned, Castagnoli)."""

    path: str
    size_bytes: int
    crc32c: int

    def __post_init__(self) -> None:
        check_path(self.path)


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
    """The path, if it names a file inside a root: printable non-empty segments between ``/``, none of them ``.``,
    ``..`` or the adapters' ``.tmp``, no backslash. UsageError otherwise: a path from a record must never lead out."""
    segments = path.split("/")
    if not path.isprintable() or "\\" in path or any(s in ("", ".", "..", TEMP_FOLDER) for s in segments):
        raise UsageError(
            f"not a storage path: {path!r}; expected a relative path of printable segments separated by single '/', "
            f"none of them '.', '..' or '{TEMP_FOLDER}', and no backslash"
        )
    return path
