"""What names a durable file, and how much state lies where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

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
    """What a storage says of a file. ``generation`` changes with every write to the path. ``modified_ms``, by the storage's own
    clock: not before the file got this path, even if it is a link or a copy of an older one. ``crc32c`` is None where the storage
    keeps none (local files). ``behind_link``: `Storage.list` reached the file through a symbolic link to a folder, so `Storage.delete`
    refuses it."""

    path: str
    size_bytes: int
    generation: int
    modified_ms: int
    crc32c: int | None
    behind_link: bool = False


def check_path(path: str) -> str:
    """The path, if it names a file inside a root: printable non-empty segments between ``/``, none of them ``.``,
    ``..`` or the adapters' ``.tmp``, no backslash.

    Raises: UsageError for any other path: one from a record must never lead out.
    """
    segments = path.split("/")
    if not path.isprintable() or "\\" in path or any(s in ("", ".", "..", TEMP_FOLDER) for s in segments):
        raise UsageError(
            f"not a storage path: {path!r}; expected a relative path of printable segments separated by single '/', "
            f"none of them '.', '..' or '{TEMP_FOLDER}', and no backslash"
        )
    return path


def handles_in(value: object) -> Iterator[Handle]:
    """Every handle anywhere inside a record, a manifest, or a part of one. It goes by the types of their fields, so that a kind
    of file which is added to them later is protected and verified without being listed anywhere."""
    if isinstance(value, Handle):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from handles_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for name in _fields_with_handles(type(value)):
            yield from handles_in(getattr(value, name))


@cache
def _fields_with_handles(cls: type) -> tuple[str, ...]:
    return tuple(name for name, hint in get_type_hints(cls).items() if _holds_handles(hint, frozenset((cls,))))


def _holds_handles(hint: Any, above: frozenset[type]) -> bool:
    """``above``: the classes whose fields are being looked at, since a class may have fields of its own kind."""
    if hint is Handle or any(_holds_handles(inner, above) for inner in get_args(hint)):
        return True
    if not isinstance(hint, type) or not is_dataclass(hint) or hint in above:
        return False
    return any(_holds_handles(inner, above | {hint}) for inner in get_type_hints(hint).values())
