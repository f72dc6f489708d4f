"""Writes to an object store, where the answer to a write may be lost."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass, field
from uuid import uuid4

from state_backend.values.errors import UnknownOutcome

WRITE_KEY = "cairn-write"
"""The metadata key of an object that holds the uuid of the write that made the object."""


@dataclass(slots=True)
class Write:
    """A write and its retries."""

    nonce: str = field(default_factory=lambda: uuid4().hex)
    uncertain: bool = False


def unknown_outcome(doing: str, found: str = "the server's answer was lost") -> UnknownOutcome:
    """Return the error of a write that may have taken effect."""
    return UnknownOutcome(
        f"can't tell whether this took effect: {doing} ({found}); check the file before you try again"
    )


def base64_of(crc32c: int) -> str:
    """Return a checksum as object stores write it: the base64 of its four bytes, the most significant byte first."""
    return b64encode(crc32c.to_bytes(4, "big")).decode()
