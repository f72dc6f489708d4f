"""The storage port over an object store. A `Cloud` has the requests of one provider.

    <bucket>/<prefix>/<path>    one object per file; its metadata `cairn-write` is the uuid of the write that made it

Every write has a precondition: the file is absent, or still has the given generation. So a repeated request overwrites
nothing. If the server's answer to a write is lost, the server refuses the repeat. Then the uuid shows whether this
write made the file. If neither can be shown, the write raises `UnknownOutcome`.

A method of `Cloud` sends a request once. `send` repeats the request while that may help. Error messages contain no
URLs, because the URL of an upload session is a credential.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from dataclasses import replace as changed
from datetime import datetime
from itertools import count
from pathlib import Path
from random import uniform
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeVar
from uuid import uuid4

import google_crc32c
import urllib3

from state_backend.adapters.local_storage import CHUNK_BYTES, mismatch, read_chunks, write_verified
from state_backend.adapters.work_folders import work_folder
from state_backend.ports.storage import Storage, check_path, check_prefix
from state_backend.values.errors import (
    AlreadyExists,
    CairnError,
    CorruptFile,
    NotFound,
    PreconditionFailed,
    StorageUnavailable,
    UnknownOutcome,
    UsageError,
)
from state_backend.values.frozen import frozen
from state_backend.values.handles import FileInfo, Handle

WRITE_KEY = "cairn-write"
"""The metadata key of an object that holds the uuid of the write that made the object."""

_MAX_NAME_BYTES = 1024

R = TypeVar("R")


@frozen
class Patience:
    deadline_s: float = 180.0  # how long a failed request is repeated
    # How long a refused request is repeated if a new permission may take effect late.
    permission_s: float = 30.0
    connect_s: float = 10.0
    # Timeout of one request: of its answer, or of the next bytes of a file.
    request_s: float = 60.0
    first_delay_s: float = 0.5
    longest_delay_s: float = 20.0

    def delay_s(self, repeats: int) -> float:
        return uniform(0, min(self.first_delay_s * 2.0 ** min(repeats, 30), self.longest_delay_s))


@dataclass(slots=True)
class Write:
    """A write and its retries."""

    nonce: str = field(default_factory=lambda: uuid4().hex)  # the uuid of the write
    uncertain: bool = False  # True: a request without an answer may have taken effect


class Found(NamedTuple):
    info: FileInfo
    # Checksum of the object; None if the server does not say. `info` has it only if the cloud's listings have it too.
    crc32c: int | None
    # Uuid of the write that made the object; None if the answer does not say or another program made it.
    nonce: str | None = None

    def matches(self, handle: Handle) -> bool:
        """Return True if the size is that of the handle, and the checksum too, if the server knows it."""
        return self.info.size_bytes == handle.size_bytes and self.crc32c in (None, handle.crc32c)

    def __str__(self) -> str:
        return _bytes_of(self.info.size_bytes, self.crc32c)


class Page(NamedTuple):
    files: Sequence[FileInfo]
    folders: Iterable[str]
    # Where the next page begins; None after the last page.
    token: str | None


class Answer(NamedTuple):
    """The server's answer to a read: the metadata of the file, and its bytes as they arrive."""

    # The number of bytes that follow; None if the server does not say.
    size_bytes: int | None
    generation: int | None
    crc32c: int | None
    # Returns at most the given number of bytes. It may raise if they arrive after the given `time.monotonic()`.
    read: Callable[[int, float], bytes]
    close: Callable[[], None]


class Upload(Protocol):
    """An upload of a file in parts. The file does not exist before `finish`."""

    def send(self, data: bytes, last: bool, timeout_s: float) -> None:
        """Send the next part, or the same part again after an error."""

    def finish(self, handle: Handle, timeout_s: float) -> Found | None:
        """Make the file visible. Return what the server stored, if it says so."""

    def abort(self, timeout_s: float) -> None:
        """Cancel the upload, and delete the parts that were uploaded."""


# The class of the error for a refused login or permission, and the advice at the end of its message.
Refusal = tuple[type[CairnError], str]


@frozen
class Failure:
    said: str  # the error in a few words, for messages
    kind: Literal["absent", "no bucket", "precondition", "other", "unknown"] = "other"
    # "for permission": repeat the request for `Patience.permission_s`. "yes": for `Patience.deadline_s`.
    repeat: Literal["no", "for permission", "yes"] = "no"
    # False: the request changed nothing, because it was refused or never sent.
    may_have_effect: bool = True
    refused: Refusal | None = None  # set if the server refused the login or the permission


class Interrupted(Exception):
    """The server's answer is incomplete. `send` repeats the request, which then continues where it ended."""


class LostUpload(Exception):
    """The server does not know the upload any more. It must be begun again."""


class Cloud(ABC):
    """The requests of one cloud provider, for the files below `<scheme>://<bucket>/<prefix>`.

    A method sends a request once, and raises the errors of the provider's library. A `handle` names the file to write.
    """

    scheme: ClassVar[str]
    # The most files that one request deletes.
    batch: ClassVar[int]
    # False: the server's answer to a deletion does not tell whether the file existed.
    tells_absence: ClassVar[bool] = True

    def __init__(self, bucket: str, prefix: str = "", *, patience: Patience | None = None) -> None:
        if not bucket or not all(c.isascii() and (c.isalnum() or c in "-._") for c in bucket):
            raise UsageError(
                f"not a bucket: {bucket!r}; expected {self.scheme}://bucket or {self.scheme}://bucket/prefix"
            )
        self.root = f"{check_path(prefix)}/" if prefix else ""
        self.url = f"{self.scheme}://{bucket}/{prefix}".rstrip("/")
        self.bucket = bucket
        self.patience = patience or Patience()
        # True once an answer has shown that the bucket exists.
        self.bucket_seen = False

    @classmethod
    def at(cls, url: str, **options: Any) -> Self:
        bucket, _, prefix = url.removeprefix(f"{cls.scheme}://").rstrip("/").partition("/")
        return cls(bucket, prefix, **options)

    def name(self, path: str) -> str:
        name = self.root + check_path(path)
        if len(name.encode()) > _MAX_NAME_BYTES:
            raise UsageError(f"{name!r} is longer than {_MAX_NAME_BYTES} bytes; use a shorter name")
        return name

    @abstractmethod
    def head(self, path: str, timeout_s: float) -> Found: ...

    @abstractmethod
    def get(self, path: str, at: int, generation: int | None, timeout_s: float) -> Answer:
        """Begin to read a file at byte `at`. With a generation, fail if the file has another generation."""

    @abstractmethod
    def page(self, start: str, token: str | None, timeout_s: float, *, delimiter: str = "", limit: int = 0) -> Page:
        """Return one page of a listing of `start`; with a delimiter, of its folders too. `limit`: the most; 0: any."""

    @abstractmethod
    def put(self, handle: Handle, data: bytes, nonce: str, generation: int, timeout_s: float) -> Found | None:
        """Write a file if it has this generation (0: is absent). Return what the server stored; None if unknown."""

    @abstractmethod
    def begin(self, path: str, nonce: str, generation: int, timeout_s: float) -> Upload: ...

    @abstractmethod
    def copy(self, source: Self, found: Found, handle: Handle, write: Write, doing: str) -> Found | None:
        """Let the server copy the file `found` of `source` to `handle.path`, by several requests through `send`."""

    @abstractmethod
    def remove(self, path: str, generation: int, timeout_s: float) -> None: ...

    @abstractmethod
    def remove_many(self, waiting: set[str], gone: set[str], timeout_s: float) -> None:
        """Delete the files in `waiting`. Take a path out when it is done; add it to `gone` if the file existed."""

    @abstractmethod
    def failure(self, error: Exception) -> Failure | None:
        """Return what an error of a request means; None if the error is not of the provider's library."""

    @abstractmethod
    def copies_from(self, source: Self, handle: Handle) -> bool:
        """Return True if the server may read the source with this login, and its copy is cheaper than a transfer."""

    @abstractmethod
    def part_bytes(self, number: int) -> int:
        """Return the size of part `number`, from 0, of an upload. A file that fits in part 0 needs one request."""

    def is_generation(self, generation: int) -> bool:
        return etag_of(generation) is not None

    def before_write(self, doing: str) -> None:  # noqa: B027
        """Raise `UsageError` if the server ignores preconditions. Do nothing if it is known to respect them."""


class ObjectStore:
    """The storage port over a cloud.

    Methods raise `UsageError` if there are no credentials, the server refuses them, or the bucket does not exist.
    """

    lists_what_is_there = True

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.url = cloud.url

    def read(self, path: str, *, offset: int = 0) -> bytes:
        body = _Body(self.cloud, path, f"read {path!r} of {self.url}", offset)
        data = b"".join(body)
        if body.crc32c not in (None, found := google_crc32c.value(data)):
            raise StorageUnavailable(
                f"can't read {path!r} of {self.url}: the received bytes have crc32c {found:08x}, expected {body.crc32c:08x}; "
                "try again"
            )
        return data

    def download(self, handle: Handle, destination: Path) -> None:
        body = _Body(self.cloud, handle.path, f"download {handle.path!r} of {self.url}")
        write_verified(body, handle, destination, url=self.url)

    def stat(self, path: str) -> FileInfo | None:
        found = look(self.cloud, path, f"stat {path!r} of {self.url}")
        return None if found is None else found.info

    def list(self, prefix: str) -> Iterator[FileInfo]:
        """Yield all files, without objects whose names end in `/`, which web consoles create as folders."""
        start, doing = self.cloud.root + check_prefix(prefix), f"list {prefix!r} of {self.url}"
        return (file for page in _pages(self.cloud, start, doing) for file in page.files)

    def folders(self, path: str) -> tuple[str, ...]:
        """Return the sorted names of the folders in a folder, without listing the files in these folders."""
        start = self.cloud.root + (f"{check_path(path)}/" if path else "")
        doing, found = f"list the folders in {path!r} of {self.url}", set[str]()
        for page in _pages(self.cloud, start, doing, delimiter="/"):
            found |= {*page.folders}
        return tuple(sorted(name.removeprefix(start).rstrip("/") for name in found))

    def create(self, path: str, data: bytes) -> Handle:
        return _write(self.cloud, path, (data,), 0, f"create {path!r} of {self.url}")

    def upload(self, path: str, local: Path) -> Handle:
        """Write a new file from a local file, a large one in parts.

        If this process dies, the parts stay in the bucket, where no listing shows them, until the server or a lifecycle
        rule of the bucket deletes them.
        """
        check_path(path)
        chunks = read_chunks(local, f"read {local} to upload it to {self.url}")
        return _write(self.cloud, path, chunks, 0, f"create {path!r} of {self.url}")

    def replace(self, path: str, data: bytes, *, generation: int) -> Handle:
        doing = f"replace {path!r} of {self.url}"
        if not self.cloud.is_generation(generation):
            raise mismatch(look(self.cloud, path, doing), doing)
        return _write(self.cloud, path, (data,), generation, doing)

    def delete(self, path: str, *, generation: int | None = None) -> bool:
        """Without a given generation, read the file's generation first, so that a retry can't delete a newer file."""
        doing, cloud = f"delete {path!r} of {self.url}", self.cloud
        if generation is not None and cloud.tells_absence and cloud.is_generation(generation):
            return _delete(cloud, path, generation, doing)
        while (found := look(cloud, path, doing)) is not None:
            if generation not in (None, found.info.generation):
                raise mismatch(found, doing)
            # The file was rewritten after its generation was read: read the generation again.
            with suppress(PreconditionFailed):
                return _delete(cloud, path, found.info.generation, doing)
        return False

    def delete_many(self, paths: Sequence[str]) -> int:
        """Delete files without their generations, because no process ever writes files of these names again."""
        doing, gone = f"delete {len(paths)} files of {self.url}", set[str]()
        for first in range(0, len(paths), self.cloud.batch):
            waiting = set(paths[first : first + self.cloud.batch])
            send(self.cloud, doing, self.cloud.remove_many, waiting, gone, write=Write())
        return len(gone)

    def copy_from(self, source: Storage, handle: Handle, path: str) -> Handle:
        """Let the server copy a large file if both storages have the same login. Otherwise download and upload it."""
        check_path(path)
        cloud, of = self.cloud, source.cloud if isinstance(source, ObjectStore) else None
        if not (isinstance(of, type(cloud)) and cloud.copies_from(of, handle)):
            with work_folder("copy") as folder:
                source.download(handle, folder / "file")
                return self.upload(path, folder / "file")
        doing, write = f"copy {handle.path!r} of {source.url} to {path!r} of {self.url}", Write()
        copied = changed(handle, path=path)
        found = look(of, handle.path, doing)
        if found is None:
            raise mismatch(found, doing)
        if not found.matches(handle):
            raise CorruptFile(
                f"{handle.path!r} of {source.url} is damaged: expected {_bytes_of(handle.size_bytes, handle.crc32c)}, found {found}; restore an older "
                "checkpoint, or put the file back from a copy"
            )
        cloud.before_write(doing)
        try:
            stored = cloud.copy(of, found, copied, write, doing)
        except (NotFound, PreconditionFailed, LostUpload) as error:
            if isinstance(error, NotFound) and not write.uncertain:
                require_bucket(cloud, doing)
                raise
            if isinstance(error, PreconditionFailed) and not write.uncertain and look(cloud, path, doing) is None:
                raise StorageUnavailable(f"can't {doing}: the source was rewritten meanwhile; try again") from None
            stored = _settle(cloud, error, path, 0, write, doing)
        return compared(cloud, stored, copied, 0, doing)


class ChecksumStore(ObjectStore):
    def checksum(self, path: str) -> int | None:
        found = look(self.cloud, path, f"read the checksum of {path!r} of {self.url}")
        return None if found is None else found.crc32c


def _pages(cloud: Cloud, start: str, doing: str, *, delimiter: str = "", limit: int = 0) -> Iterator[Page]:
    token = None
    while True:
        try:
            page = send(cloud, doing, cloud.page, start, token, delimiter=delimiter, limit=limit)
        except NotFound:
            raise _no_bucket(cloud, doing) from None
        cloud.bucket_seen = True
        yield page
        if not (token := page.token):
            return


def look(cloud: Cloud, path: str, doing: str) -> Found | None:
    try:
        found = send(cloud, doing, cloud.head, path)
    except NotFound:
        require_bucket(cloud, doing)
        return None
    cloud.bucket_seen = True
    return found


def require_bucket(cloud: Cloud, doing: str) -> None:
    """Raise `UsageError` if the bucket does not exist, after the server answered that a file does not.

    The server gives the same answer for both. A listing of one file tells the two cases apart.
    """
    if not cloud.bucket_seen:
        next(_pages(cloud, cloud.root, doing, limit=1))


def _no_bucket(cloud: Cloud, doing: str) -> UsageError:
    return UsageError(f"can't {doing}: the bucket {cloud.bucket!r} does not exist; create it first")


def _delete(cloud: Cloud, path: str, generation: int, doing: str) -> bool:
    write = Write()
    try:
        send(cloud, doing, cloud.remove, path, generation, write=write)
    except NotFound:
        if not write.uncertain:
            require_bucket(cloud, doing)
        return write.uncertain
    except PreconditionFailed:
        found = look(cloud, path, doing)
        # An earlier request may have deleted the file before another process wrote a new one.
        if found is not None:
            raise (unknown_outcome(doing) if write.uncertain else mismatch(found, doing)) from None
        return write.uncertain
    return True


def _write(cloud: Cloud, path: str, chunks: Iterable[bytes], generation: int, doing: str) -> Handle:
    cloud.name(path)
    pieces, write = pieces_of(chunks, cloud.part_bytes), Write()
    data, whole = next(pieces)
    handle = Handle(path=path, size_bytes=len(data), crc32c=google_crc32c.value(data))
    cloud.before_write(doing)
    try:
        if whole:
            stored = send(cloud, doing, cloud.put, handle, data, write.nonce, generation, write=write)
        else:
            upload = send(cloud, doing, cloud.begin, path, write.nonce, generation)
            with aborted_on_error(cloud, upload, write, doing):
                send(cloud, doing, upload.send, data, False)
                for data, last in pieces:
                    crc32c = google_crc32c.extend(handle.crc32c, data)
                    handle = changed(handle, size_bytes=handle.size_bytes + len(data), crc32c=crc32c)
                    send(cloud, doing, upload.send, data, last)
                stored = send(cloud, doing, upload.finish, handle, write=write)
    except (NotFound, PreconditionFailed, LostUpload) as error:
        stored = _settle(cloud, error, path, generation, write, doing)
    return compared(cloud, stored, handle, generation, doing)


def pieces_of(chunks: Iterable[bytes], part_bytes: Callable[[int], int]) -> Iterator[tuple[bytes, bool]]:
    """Yield (bytes, True if they are the last) for each part of an upload. `part_bytes(n)`: the size of part n."""
    waiting, number = bytearray(), 0
    for chunk in chunks:
        waiting += chunk
        while len(waiting) > (size := part_bytes(number)):
            yield bytes(waiting[:size]), False
            del waiting[:size]
            number += 1
    yield bytes(waiting), True


@contextmanager
def aborted_on_error(cloud: Cloud, upload: Upload, write: Write, doing: str) -> Iterator[None]:
    """Abort the upload after an error in the block, unless the request to finish it may have taken effect."""
    try:
        yield
    except BaseException:
        if not write.uncertain:
            with suppress(CairnError):
                send(cloud, doing, upload.abort)
        raise


def _settle(cloud: Cloud, error: Exception, path: str, generation: int, write: Write, doing: str) -> Found:
    """Find out if a write took effect, after the server refused its last request.

    A request is repeated if its answer is lost. If the first request did write the file, the server refuses the repeat,
    because the file's generation is no longer `generation`.
    """
    if write.uncertain:
        try:
            found = look(cloud, path, doing)
        except CairnError:
            found = None
        if found is None or found.nonce != write.nonce:
            raise unknown_outcome(doing)
        return found
    if isinstance(error, PreconditionFailed):
        if generation == 0:
            raise AlreadyExists(f"can't {doing}: the file exists already")
        raise mismatch(look(cloud, path, doing), doing)
    if isinstance(error, NotFound):  # The bucket or the file to replace does not exist.
        next(_pages(cloud, cloud.root, doing, limit=1))
        if generation != 0:
            raise error
    elif generation == 0 and look(cloud, path, doing) is not None:
        raise AlreadyExists(f"can't {doing}: the file exists already")
    raise StorageUnavailable(f"can't {doing}: the server lost the upload; try again")


def compared(cloud: Cloud, stored: Found | None, handle: Handle, generation: int, doing: str) -> Handle:
    """Return the handle if the server stored its bytes. Else raise an error, and delete the file if it is new."""
    cloud.bucket_seen = True
    if stored is None or stored.matches(handle):
        return handle
    problem = f"can't {doing}: expected {_bytes_of(handle.size_bytes, handle.crc32c)}, the server has {stored}"
    if generation != 0:
        raise UnknownOutcome(f"{problem}; check the file before you go on")
    try:
        send(cloud, doing, cloud.remove, handle.path, stored.info.generation, write=Write(uncertain=True))
    except NotFound:
        pass
    except PreconditionFailed:
        raise unknown_outcome(doing) from None
    raise StorageUnavailable(f"{problem}; they were deleted, try again")


def send(
    cloud: Cloud, doing: str, request: Callable[..., R], *arguments: Any, write: Write | None = None, **options: Any
) -> R:
    """Call `request` with a timeout as its last argument, and repeat the call after an error while that may help."""
    patience, began_s = cloud.patience, time.monotonic()
    ends_s = {"no": 0.0, "for permission": began_s + patience.permission_s, "yes": began_s + patience.deadline_s}
    for repeats in count():
        left_s = ends_s["yes"] - time.monotonic()
        try:
            return request(*arguments, max(0.01, min(patience.request_s, left_s)), **options)
        except (CairnError, LostUpload) as error:
            lost = write is not None and write.uncertain and not isinstance(error, LostUpload)
            raised: Exception = unknown_outcome(doing, str(error)) if lost else error
            break
        except Exception as error:
            raised = error
        failure = failure_of(cloud, raised)
        if write is not None and failure.may_have_effect:
            write.uncertain = True
        delay_s = patience.delay_s(repeats)
        if time.monotonic() + delay_s >= ends_s[failure.repeat]:
            raised = translate(cloud, doing, failure, write) or raised
            break
        time.sleep(delay_s)
    # Raise outside the except block: inside, the traceback would also show the cause, which holds URLs and the
    # request.
    raise raised


def failure_of(cloud: Cloud, error: Exception) -> Failure:
    if isinstance(error, Interrupted):
        return Failure(said=str(error), repeat="yes")
    return cloud.failure(error) or Failure(said=type(error).__name__, kind="unknown")


def translate(cloud: Cloud, doing: str, failure: Failure, write: Write | None) -> CairnError | None:
    """Return the error to raise for a failed request; None if the library's own error tells more."""
    if failure.kind in ("absent", "precondition"):
        return mismatch(failure.kind == "precondition", doing)
    if failure.kind == "no bucket":
        return _no_bucket(cloud, doing)
    if write is not None and write.uncertain:
        return unknown_outcome(doing, failure.said)
    if failure.kind == "unknown":
        return None
    kind, advice = failure.refused or (StorageUnavailable, "check the network and the bucket, then try again")
    gave_up = f" for {cloud.patience.deadline_s:g} s" if failure.repeat == "yes" else ""
    return kind(f"can't {doing}: {failure.said}{gave_up}; {advice}")


class _Body:
    """The bytes of a file as they arrive, in pieces of `CHUNK_BYTES`.

    If a connection breaks, a new request continues where it broke, with the same generation.
    """

    def __init__(self, cloud: Cloud, path: str, doing: str, offset: int = 0) -> None:
        # The checksum of the whole file, which comes with the file's first byte; None if the server does not say.
        self.crc32c: int | None = None
        self._cloud, self._path, self._doing, self._at = cloud, path, doing, offset
        self._answer: Answer | None = None
        self._generation: int | None = None
        self._size_bytes: int | None = None
        self._piece = bytearray()

    def __iter__(self) -> Iterator[bytes]:
        try:
            while piece := send(self._cloud, self._doing, self._next_piece):
                self._piece.clear()
                yield piece
        except PreconditionFailed:
            raise StorageUnavailable(f"can't {self._doing}: the file was rewritten meanwhile; try again") from None
        except NotFound:
            require_bucket(self._cloud, self._doing)
            raise
        finally:
            self._close()

    def _close(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    def _next_piece(self, timeout_s: float) -> bytes:
        until_s = time.monotonic() + timeout_s
        try:
            while len(self._piece) < CHUNK_BYTES and self._at != self._size_bytes:
                answer = self._answer or self._open(timeout_s)
                data = answer.read(CHUNK_BYTES - len(self._piece), until_s)
                if time.monotonic() > until_s:
                    raise Interrupted("the server answers too slowly")
                self._at += len(data)
                self._piece += data
                if not data and self._size_bytes is None:
                    self._size_bytes = self._at
                elif not data and self._at != self._size_bytes:
                    raise Interrupted("the server's answer ended early")
        except Exception:
            self._close()
            raise
        return bytes(self._piece)

    def _open(self, timeout_s: float) -> Answer:
        answer = self._answer = self._cloud.get(self._path, self._at, self._generation, timeout_s)
        if self._size_bytes is None and answer.size_bytes is not None:
            self._size_bytes = self._at + answer.size_bytes
        if not self._at:
            self.crc32c = answer.crc32c
        self._generation = self._generation if answer.generation is None else answer.generation
        self._cloud.bucket_seen = True
        return answer


class Clients:
    """Clients with one login, one for each process: a forked process can't share its parent's sockets."""

    def __init__(self, open_client: Callable[[], Any]) -> None:
        self._open = open_client
        self._clients: dict[int, Any] = {}
        self._lock = threading.Lock()

    def of_this_process(self) -> Any:
        process = os.getpid()
        client = self._clients.get(process)
        if client is None:
            # If another thread held the lock during a fork, the child's copy is never released. So make a new lock.
            if process not in self._clients and self._clients:
                self._lock = threading.Lock()
                self._clients.clear()
            with self._lock:
                client = self._clients.get(process) or self._open()
                self._clients[process] = client
        return client


_clients: dict[Any, Clients] = {}
_clients_lock = threading.Lock()


def clients_of(key: Any, variables: Iterable[str], open_client: Callable[[], Any]) -> Clients:
    """Return this process's clients for a login, which all storages with this login share.

    `key` and the present values of the environment variables `variables` identify the login.
    """
    login = (key, *(os.environ.get(name) for name in variables))
    with _clients_lock:
        return _clients.setdefault(login, Clients(open_client))


def _bytes_of(size_bytes: int, crc32c: int | None) -> str:
    return f"{size_bytes} bytes with crc32c {crc32c or 0:08x}"


def unknown_outcome(doing: str, found: str = "the server's answer was lost") -> UnknownOutcome:
    return UnknownOutcome(
        f"can't tell whether this took effect: {doing} ({found}); check the file before you try again"
    )


def generation_of(etag: str) -> int:
    """Return an ETag as a number, from which `etag_of` gets the ETag back."""
    return int.from_bytes(etag.strip('"').encode(), "big")


def info_of(path: str, size_bytes: int, etag: str, modified: datetime) -> FileInfo:
    # S3 and Azure report whole seconds. The last millisecond of the second is never before the write.
    modified_ms = int(modified.timestamp()) * 1000 + 999
    generation = generation_of(etag)
    return FileInfo(path=path, size_bytes=size_bytes, generation=generation, modified_ms=modified_ms, crc32c=None)


def etag_of(generation: int) -> str | None:
    """Return the quoted ETag of a generation; None if no ETag has this generation."""
    if generation <= 0:
        return None
    text = generation.to_bytes((generation.bit_length() + 7) // 8, "big")
    return f'"{text.decode()}"' if text.isascii() and text.decode().isprintable() else None


def never_connected(error: BaseException | None) -> bool:
    """Return True if an error of the library `requests` says that the request was never sent."""
    reason = getattr(error.args[0], "reason", None) if error is not None and error.args else None
    return isinstance(reason, urllib3.exceptions.NewConnectionError | urllib3.exceptions.ConnectTimeoutError)


def base64_of(crc32c: int) -> str:
    """Return a checksum as object stores write it: the base64 of its four bytes, the most significant byte first."""
    return b64encode(crc32c.to_bytes(4, "big")).decode()


def crc32c_of(text: str | None) -> int | None:
    return None if text is None else int.from_bytes(b64decode(text), "big")
