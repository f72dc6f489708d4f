"""Every call of the storage port, with its effect, for tests that break the requests of a server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import google_crc32c

from state_backend.ports.storage import DeletesMany, Storage
from state_backend.values.handles import Handle
from tests.support.s3_server import SEAWEEDFS

# Like S3, SeaweedFS refuses smaller parts of a multipart upload. moto is told to take them.
STEP_BYTES = 5 * 1024 * 1024 if SEAWEEDFS else 256 * 1024
OLD, NEW, LARGE = b"old" * 100, b"new" * 200, os.urandom(2 * STEP_BYTES + 77)


def paths(storage: Storage, prefix: str) -> list[str]:
    return [info.path for info in storage.list(prefix)]


def generation(storage: Storage, path: str) -> int:
    info = storage.stat(path)
    assert info is not None
    return info.generation


def _many(storage: Storage) -> DeletesMany:
    assert isinstance(storage, DeletesMany)
    return storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of the port on a storage where ``old`` exists: what it does to which file, if it takes effect."""

    name: str
    run: Callable[[Storage, Path], object]
    returns: Callable[[Storage, Path, object], bool]
    path: str = "old"
    before: bytes | None = OLD
    after: bytes | None = OLD


def handle_of(path: str, data: bytes) -> Handle:
    return Handle(path=path, size_bytes=len(data), crc32c=google_crc32c.value(data))


def creating(name: str, data: bytes, run: Callable[[Storage, Path], object]) -> Call:
    made = handle_of("new", data)
    return Call(name=name, run=run, returns=lambda _, __, got: got == made, path="new", before=None, after=data)


CALLS = [
    Call(name="read", run=lambda s, _: s.read("old"), returns=lambda _, __, got: got == OLD),
    Call(name="stat", run=lambda s, _: s.stat("old"), returns=lambda s, _, got: got == s.stat("old") is not None),
    Call(
        name="stat of nothing",
        run=lambda s, _: s.stat("new"),
        returns=lambda _, __, got: got is None,
        path="new",
        before=None,
        after=None,
    ),
    Call(name="list", run=lambda s, _: list(s.list("o")), returns=lambda s, _, got: got == [s.stat("old")]),
    Call(
        name="download",
        run=lambda s, folder: s.download(handle_of("large", LARGE), folder / "got"),
        returns=lambda _, folder, __: (folder / "got").read_bytes() == LARGE,
    ),
    creating("create", NEW, lambda s, _: s.create("new", NEW)),
    creating("upload", NEW, lambda s, folder: s.upload("new", folder / "small")),
    creating("upload in steps", LARGE, lambda s, folder: s.upload("new", folder / "large")),
    creating("copy", LARGE, lambda s, _: s.copy_from(s, handle_of("large", LARGE), "new")),
    Call(
        name="replace",
        run=lambda s, _: s.replace("old", NEW, generation=generation(s, "old")),
        returns=lambda _, __, got: got == handle_of("old", NEW),
        after=NEW,
    ),
    Call(name="delete", run=lambda s, _: s.delete("old"), returns=lambda _, __, got: got is True, after=None),
    Call(
        name="delete many",
        run=lambda s, _: _many(s).delete_many(["old", "absent"]),
        returns=lambda _, __, got: got in (0, 1, 2),  # after a lost answer the repeat finds nothing; S3 does not tell
        after=None,
    ),
    Call(
        name="delete a generation",
        run=lambda s, _: s.delete("old", generation=generation(s, "old")),
        returns=lambda _, __, got: got is True,
        after=None,
    ),
]


def at_once(cases: Iterable[tuple[object, ...]], check: Callable[..., int]) -> int:
    """Runs the cases in threads, since most of their time is waiting; the sum of what they return."""
    with ThreadPoolExecutor(8) as pool:
        return sum(done.result() for done in [pool.submit(check, *case) for case in cases])
