"""What both object stores share: names of objects, and writes whose answer may be lost."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass, field
from uuid import uuid4

from state_backend.ports.storage import check_path
from state_backend.values.errors import CairnError, NotFound, PreconditionFailed, UnknownOutcome, UsageError

_MAX_NAME_BYTES = 1024
WRITE_KEY = "cairn-write"
"""The metadata key of an object that holds the uuid of the write that made the object."""


@dataclass(slots=True)
class Write:
    """A write and its retries."""

    nonce: str = field(default_factory=lambda: uuid4().hex)
    uncertain: bool = False


class ObjectStorage:
    """Base of storages whose files are objects with the names `<root><path>`."""

    _root: str

    def _name(self, path: str) -> str:
        name = self._root + check_path(path)
        if len(name.encode()) > _MAX_NAME_BYTES:
            raise UsageError(f"{name!r} is longer than {_MAX_NAME_BYTES} bytes; use a shorter name")
        return name

    def _mismatch(self, found: object, doing: str) -> CairnError:
        if found is None:
            return NotFound(f"can't {doing}: the file does not exist")
        return PreconditionFailed(f"can't {doing}: another process has rewritten the file meanwhile")


def unknown_outcome(doing: str, found: str = "the server's answer was lost") -> UnknownOutcome:
    """Return the error of a write that may have taken effect."""
    return UnknownOutcome(
        f"can't tell whether this took effect: {doing} ({found}); check the file before you try again"
    )


def base64_of(crc32c: int) -> str:
    """Return a checksum as object stores write it: the base64 of its four bytes, the most significant byte first."""
    return b64encode(crc32c.to_bytes(4, "big")).decode()
