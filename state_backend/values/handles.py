"""The handle of a stored file (path, size and checksum), and a search for all handles in a record or manifest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from state_backend.values.errors import UsageError
from state_backend.values.frozen import frozen

# Adapters keep unfinished files in the folder of this name. Therefore no segment of a valid path has this name.
TEMP_FOLDER = ".tmp"


@frozen
class Handle:
    """The path of a durable file, with the size and checksum of its content."""

    path: str
    size_bytes: int
    crc32c: int

    def __post_init__(self) -> None:
        check_path(self.path)


@frozen
class FileInfo:
    path: str
    size_bytes: int
    # Every write of other bytes changes this number. After a write of the same bytes, it may be an earlier number.
    generation: int
    # A time by the storage's clock, in milliseconds since the epoch. It is never earlier than the moment when the file
    # got this path, even if the file is a link or a copy of an older file.
    modified_ms: int
    # The checksum of the content; None if the storage keeps no checksums (local files).
    crc32c: int | None
    # True if a folder in the path is a symbolic link.
    behind_link: bool = False


def check_path(path: str) -> str:
    """Return a path that is valid for a file below a root. Raise `UsageError` for any other path.

    A valid path consists of printable non-empty segments between `/`, without backslashes. No segment is `.`, `..` or
    the adapters' `.tmp`.
    """
    segments = path.split("/")
    if not path.isprintable() or "\\" in path or any(s in ("", ".", "..", TEMP_FOLDER) for s in segments):
        raise UsageError(
            f"not a storage path: {path!r}; expected a relative path of printable segments separated by single '/', "
            f"none of them '.', '..' or '{TEMP_FOLDER}', and no backslash"
        )
    return path


def handles_in(value: object) -> Iterator[Handle]:
    """Yield every handle anywhere inside a record, a manifest, or a part of one.

    The search follows the types of the fields. A field for a new kind of file is therefore found, protected and
    verified without being listed anywhere.
    """
    if isinstance(value, Handle):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from handles_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for name in fields_with_handles(type(value)):
            yield from handles_in(getattr(value, name))


@cache
def fields_with_handles(cls: type) -> tuple[str, ...]:
    return tuple(name for name, hint in get_type_hints(cls).items() if _holds_handles(hint, frozenset((cls,))))


def _holds_handles(hint: Any, above: frozenset[type]) -> bool:
    """Return True if a value of the type `hint` can contain a `Handle`.

    `above`: The classes that the search is inside of. They are not searched again, since a class may have fields of
    its own type, and the search would never end.
    """
    if hint is Handle or any(_holds_handles(inner, above) for inner in get_args(hint)):
        return True
    if not isinstance(hint, type) or not is_dataclass(hint) or hint in above:
        return False
    return any(_holds_handles(inner, above | {hint}) for inner in get_type_hints(hint).values())
