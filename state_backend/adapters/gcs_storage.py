"""Storage on Google Cloud Storage: `gs://bucket/prefix`, or a server that STORAGE_EMULATOR_HOST names.

    <bucket>/<prefix>/<path>    one object per file; its metadata `cairn-write` is the uuid of the write that made it

Every write has a precondition on the generation (0: the file is absent), so a repeated request overwrites nothing. If
the server's answer to a write is lost, the repeat is refused, because the file is there now. Then the uuid shows
whether this write or another process made the file. If neither can be shown, the write raises `UnknownOutcome`.

A step is one request, `STEP_BYTES` of an upload, or `CHUNK_BYTES` of a download, with all retries (see `Patience`).
Error messages contain no URLs, because the URL of an upload session is a credential.
"""

from __future__ import annotations

import functools
import json
import os
import re
import time
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from dataclasses import replace as changed
from datetime import datetime
from email import message_from_bytes
from http.client import HTTPException
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote
from uuid import uuid4

import google_crc32c
import requests
import urllib3
from google.api_core.exceptions import GoogleAPICallError, RetryError, from_http_response, from_http_status
from google.api_core.retry import Retry
from google.auth.credentials import Credentials, with_scopes_if_required
from google.auth.exceptions import GoogleAuthError, TransportError
from google.auth.transport.requests import AuthorizedSession
from google.cloud.storage import Blob, Bucket

from state_backend.adapters.gcs_connections import (
    EMULATOR_VARIABLE,
    SCOPES,
    Connection,
    Connections,
    connections_of_environment,
    credentials_in,
    received,
)
from state_backend.adapters.local_storage import CHUNK_BYTES, read_chunks, write_verified
from state_backend.adapters.uncertain_write import WRITE_KEY, ObjectStorage, Write, base64_of, unknown_outcome
from state_backend.adapters.work_folders import work_folder
from state_backend.ports.storage import Storage, check_path, check_prefix
from state_backend.values.errors import (
    AlreadyExists,
    CairnError,
    CorruptFile,
    NotFound,
    PermissionRefused,
    PreconditionFailed,
    StorageUnavailable,
    UnknownOutcome,
    UsageError,
)
from state_backend.values.frozen import frozen
from state_backend.values.handles import FileInfo, Handle

STEP_BYTES = 8 * CHUNK_BYTES
"""Bytes of an upload session that one request sends, a multiple of 256 KiB as the server demands.

They stay in memory until the server confirms them."""

BATCH = 100
"""The number of files that one request deletes: the most that the server accepts."""

_OVERLOAD = ("rateLimitExceeded", "userRateLimitExceeded", "quotaExceeded")
_TRANSIENT = (408, 429, 500, 502, 503, 504)
_FOLDERS = "prefixes,nextPageToken"
_LISTED = "items(name,size,generation,timeCreated,crc32c),nextPageToken"

R = TypeVar("R")


@frozen
class Patience:
    """Time limits of requests and their retries, in seconds."""

    deadline_s: float = 180.0
    permission_s: float = 30.0
    request_s: float = 60.0
    first_delay_s: float = 0.5
    longest_delay_s: float = 20.0


@dataclass(frozen=True, slots=True)
class _Stored:
    """A file as the server describes it after a write."""

    size_bytes: int
    crc32c: int | None
    generation: int

    @staticmethod
    def of(blob: Blob) -> _Stored:
        return _Stored(blob.size or 0, _crc32c(blob.crc32c), blob.generation)


def open_url(url: str, *, google_key_file: str | None = None) -> GcsStorage:
    """Open `gs://bucket/prefix` with the key in a file, or with application default credentials."""
    bucket, _, prefix = url.removeprefix("gs://").rstrip("/").partition("/")
    return GcsStorage(bucket, prefix, credentials=credentials_in(google_key_file) if google_key_file else None)


class GcsStorage(ObjectStorage):
    """Storage below `gs://<bucket>/<prefix>`; the prefix may be empty.

    Methods raise `UsageError` if there are no credentials, the server refuses them, or the bucket does not exist.
    """

    lists_what_is_there = True

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        credentials: Credentials | None = None,
        project: str | None = None,
        patience: Patience | None = None,
    ) -> None:
        if not bucket or quote(bucket, safe="") != bucket:
            raise UsageError(f"not a bucket: {bucket!r}; expected gs://bucket or gs://bucket/prefix")
        self._root = f"{check_path(prefix)}/" if prefix else ""
        self.url = f"gs://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._project = project
        self._patience = patience or Patience()
        self._bucket_seen = False
        emulator = os.environ.get(EMULATOR_VARIABLE) or None
        if emulator and "://" not in emulator:
            emulator = f"http://{emulator}"
        if credentials is None:
            self._connections = connections_of_environment(emulator, os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"))
        else:
            self._connections = Connections(emulator, with_scopes_if_required(credentials, SCOPES))

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, path: str, *, offset: int = 0) -> bytes:
        """Return the bytes of a file from `offset` on, as `Storage.read` specifies."""
        with self._body(path, f"read {path!r} of {self.url}", offset) as body:
            data = b"".join(body)
            if body.crc32c not in (None, google_crc32c.value(data)):
                raise StorageUnavailable(
                    f"can't read {path!r} of {self.url}: the received bytes have crc32c {google_crc32c.value(data):08x}, "
                    f"expected {body.crc32c:08x}; try again"
                )
            return data

    def download(self, handle: Handle, destination: Path) -> None:
        """Copy a file to a local path and check its bytes, as `Storage.download` specifies."""
        with self._body(handle.path, f"download {handle.path!r} of {self.url}") as body:
            write_verified(body, handle, destination, url=self.url)

    def stat(self, path: str) -> FileInfo | None:
        """Return the metadata of a file, or None if it is absent, as `Storage.stat` specifies."""
        with self._connections.lent() as google:
            blob = self._look(google, path, f"stat {path!r} of {self.url}")
        return None if blob is None else self._info(blob)

    def list(self, prefix: str) -> Iterator[FileInfo]:
        """Return the files whose path begins with a prefix, sorted by path, as `Storage.list` specifies.

        Objects whose names end in `/` are left out: Google's console creates them as folders.
        """
        return self._walk(self._root + check_prefix(prefix), f"list {prefix!r} of {self.url}")

    def folders(self, path: str) -> tuple[str, ...]:
        """Return the sorted names of the folders in a folder. The path "" is the storage itself.

        The server answers with one name for all files of a folder, so the cost does not grow with these files.
        """
        start = self._root + (f"{check_path(path)}/" if path else "")
        found, token = set[str](), None
        while True:

            def page(timeout_s: float, token: str | None = token) -> tuple[set[str], str | None]:
                listed = google.client.list_blobs(
                    self._bucket_of(google), prefix=start, delimiter="/", page_token=token, fields=_FOLDERS,
                    timeout=timeout_s, retry=None,
                )  # fmt: skip
                next(listed.pages, None)
                return set(listed.prefixes), listed.next_page_token

            with self._connections.lent() as google:
                prefixes, token = self._send(f"list the folders in {path!r} of {self.url}", page)
            found |= prefixes
            if not token:
                return tuple(sorted(name.removeprefix(start).rstrip("/") for name in found))

    def _walk(self, start: str, doing: str) -> Iterator[FileInfo]:
        token: str | None = None
        while True:
            with self._connections.lent() as google:
                blobs, token = self._page(google, start, token, doing)
            yield from (self._info(blob) for blob in blobs if not blob.name.endswith("/"))
            if not token:
                return

    def _page(
        self, google: Connection, start: str, token: str | None, doing: str, size: int | None = None
    ) -> tuple[Sequence[Blob], str | None]:
        def page(timeout_s: float) -> tuple[Sequence[Blob], str | None]:
            found = google.client.list_blobs(
                self._bucket_of(google), prefix=start, page_token=token, fields=_LISTED, page_size=size, timeout=timeout_s,
                retry=None,
            )  # fmt: skip
            return tuple(next(found.pages, ())), found.next_page_token

        try:
            answer = self._send(doing, page)
        except NotFound:
            raise UsageError(f"can't {doing}: the bucket {self._bucket!r} does not exist; create it first") from None
        self._bucket_seen = True
        return answer

    def _look(self, google: Connection, path: str, doing: str) -> Blob | None:
        blob = self._blob(google, path)
        try:
            self._send(doing, lambda timeout_s: blob.reload(timeout=timeout_s, retry=None))
        except NotFound:
            self._require_bucket(google, doing)
            return None
        return blob

    def _require_bucket(self, google: Connection, doing: str) -> None:
        """Raise `UsageError` if the bucket does not exist, after the server answered 404.

        The server answers 404 for an absent file and for an absent bucket. This method lists one file to tell the two
        cases apart. It sends no request if an earlier answer has shown that the bucket exists.
        """
        if not self._bucket_seen:
            self._page(google, self._root, None, doing, size=1)

    @contextmanager
    def _body(self, path: str, doing: str, offset: int = 0) -> Iterator[_Body]:
        with self._connections.lent() as google:
            name = quote(self._name(path), safe="")
            url = f"{google.client.api_endpoint}/download/storage/v1/b/{self._bucket}/o/{name}"
            if self._project is not None:
                url += f"?userProject={quote(self._project, safe='')}"
            body = _Body(google.session, url, functools.partial(self._send, doing), offset)
            try:
                yield body
            except NotFound:
                self._require_bucket(google, doing)
                raise
            finally:
                body.close()

    # --- writing ------------------------------------------------------------------------------------------------------

    def create(self, path: str, data: bytes) -> Handle:
        """Write a new file, as `Storage.create` specifies."""
        return self._write(path, (data,), 0, f"create {path!r} of {self.url}")

    def upload(self, path: str, local: Path) -> Handle:
        """Write a new file from a local file, as `Storage.upload` specifies.

        A file of more than `STEP_BYTES` is sent through an upload session, which continues after a failure.
        """
        check_path(path)
        chunks = read_chunks(local, f"read {local} to upload it to {self.url}")
        return self._write(path, chunks, 0, f"create {path!r} of {self.url}")

    def replace(self, path: str, data: bytes, *, generation: int) -> Handle:
        """Rewrite a file that still has the given generation, as `Storage.replace` specifies."""
        doing = f"replace {path!r} of {self.url}"
        if generation <= 0:  # The server would take 0 for "create the file if it is absent".
            with self._connections.lent() as google:
                raise self._mismatch(self._look(google, path, doing), doing)
        return self._write(path, (data,), generation, doing)

    def delete(self, path: str, *, generation: int | None = None) -> bool:
        """Delete one file; return False if it is absent. `Storage.delete` describes the arguments and the errors.

        Without a generation, this method reads the file's generation first. So a repeated request can't delete a newer file.
        """
        doing = f"delete {path!r} of {self.url}"
        with self._connections.lent() as google:
            if generation is not None and generation > 0:
                return self._delete(google, path, generation, doing)
            while (found := self._look(google, path, doing)) is not None:
                if generation is not None:
                    raise self._mismatch(found, doing)
                # The file was rewritten after its generation was read: read the generation again.
                with suppress(PreconditionFailed):
                    return self._delete(google, path, found.generation, doing)
            return False

    def delete_many(self, paths: Sequence[str]) -> int:
        """Delete files, `BATCH` of them by one request, as `DeletesMany.delete_many` specifies.

        The requests have no generation, because no process ever writes files of these names again.
        """
        doing, gone = f"delete {len(paths)} files of {self.url}", set[str]()
        with self._connections.lent() as google:
            for first in range(0, len(paths), BATCH):
                waiting = set(paths[first : first + BATCH])
                self._send(doing, functools.partial(self._delete_batch, google, waiting, gone), Write())
        return len(gone)

    def _delete_batch(self, google: Connection, waiting: set[str], gone: set[str], timeout_s: float) -> None:
        """Send one batch request that deletes files.

        Source: https://cloud.google.com/storage/docs/batch
        """
        every, boundary = sorted(waiting), uuid4().hex
        payer = "" if self._project is None else f"?userProject={quote(self._project, safe='')}"
        parts = [
            f"--{boundary}\r\nContent-Type: application/http\r\nContent-ID: <{n}>\r\n\r\n"
            f"DELETE /storage/v1/b/{self._bucket}/o/{quote(self._name(path), safe='')}{payer} HTTP/1.1\r\n\r\n\r\n"
            for n, path in enumerate(every)
        ]
        response = google.session.post(
            f"{google.client.api_endpoint}/batch/storage/v1", data="".join([*parts, f"--{boundary}--\r\n"]).encode(),
            headers={"Content-Type": f"multipart/mixed; boundary={boundary}"}, timeout=timeout_s, allow_redirects=False,
        )  # fmt: skip
        if response.status_code != 200:
            raise from_http_response(response)
        failure = None
        for n, status, body in _answers_of(response):
            if status in (200, 204, 404):
                gone |= {every[n]} if status != 404 else set()
                waiting.discard(every[n])
            else:
                failure = failure or _failure(status, body)
        if failure is not None or waiting:
            raise failure or requests.ConnectionError("the server answered only a part of the batch")

    def _delete(self, google: Connection, path: str, generation: int, doing: str) -> bool:
        write, blob = Write(), self._blob(google, path)

        def remove(timeout_s: float) -> None:
            blob.delete(if_generation_match=generation, timeout=timeout_s, retry=None)

        try:
            self._send(doing, remove, write)
        except NotFound:
            if not write.uncertain:
                self._require_bucket(google, doing)
            return write.uncertain
        except PreconditionFailed:
            if write.uncertain:  # An earlier request may have deleted the file before another process wrote a new one.
                raise unknown_outcome(doing) from None
            if (found := self._look(google, path, doing)) is None:
                return False
            raise self._mismatch(found, doing) from None
        return True

    def copy_from(self, source: Storage, handle: Handle, path: str) -> Handle:
        """Copy a file of another storage to a new file, as `Storage.copy_from` specifies.

        If both storages log in with the same default credentials, or `source` is this storage, Google's server copies
        the file. Otherwise one login might not have access to both storages. So this method downloads the file from
        `source` into a local folder, and uploads it from there.
        """
        check_path(path)
        if not (isinstance(source, GcsStorage) and source._connections is self._connections):
            with work_folder("copy") as folder:
                source.download(handle, folder / "file")
                return self.upload(path, folder / "file")
        doing, write = f"copy {handle.path!r} of {source.url} to {path!r} of {self.url}", Write()
        with self._connections.lent() as google:
            original = source._look(google, handle.path, doing)
            if original is None:
                raise NotFound(f"can't {doing}: the file does not exist")
            if (original.size or 0, _crc32c(original.crc32c)) != (handle.size_bytes, handle.crc32c):
                raise CorruptFile(
                    f"{handle.path!r} of {source.url} is damaged: expected {handle.size_bytes} bytes with crc32c "
                    f"{handle.crc32c:08x}, found {original.size or 0} bytes with crc32c {_crc32c(original.crc32c) or 0:08x}; "
                    f"restore an older checkpoint, or put the file back from a copy"
                )
            # The generation of the source is pinned. A source that is rewritten meanwhile is then not found (404), and
            # a failed precondition (412) can only concern the destination.
            pinned = source._bucket_of(google).blob(original.name, generation=original.generation)
            copy, token = self._blob(google, path, write), None

            def rewrite(timeout_s: float) -> str | None:
                answer = copy.rewrite(pinned, token=token, if_generation_match=0, timeout=timeout_s, retry=None)
                return None if answer[0] is None else str(answer[0])

            try:
                while token := self._send(doing, rewrite, write):
                    pass
            except PreconditionFailed:
                return self._compared(
                    google, self._settled(google, path, 0, write, doing), changed(handle, path=path), 0, doing
                )
            except NotFound:
                if write.uncertain:
                    raise unknown_outcome(doing) from None
                self._page(google, self._root, None, doing, size=1)
                raise
            return self._compared(google, _Stored.of(copy), changed(handle, path=path), 0, doing)

    def _write(self, path: str, chunks: Iterable[bytes], generation: int, doing: str) -> Handle:
        """Write a file."""
        self._name(path)
        steps, write = _steps(chunks), Write()
        data, whole = next(steps)
        handle = Handle(path=path, size_bytes=len(data), crc32c=google_crc32c.value(data))
        with self._connections.lent() as google:
            try:
                if whole:
                    stored = self._insert(google, data, handle, generation, write, doing)
                else:
                    session = self._begin(google, path, generation, write, doing)
                    stored = self._push(google, session, data, 0, None, write, doing)
                    for data, last in steps:
                        at, crc32c = handle.size_bytes, google_crc32c.extend(handle.crc32c, data)
                        handle = changed(handle, size_bytes=at + len(data), crc32c=crc32c)
                        stored = self._push(google, session, data, at, handle if last else None, write, doing)
            except PreconditionFailed:
                stored = self._settled(google, path, generation, write, doing)
            except NotFound:  # 404: the bucket or the upload session does not exist.
                if write.uncertain:
                    stored = self._settled(google, path, generation, write, doing)
                else:
                    self._page(google, self._root, None, doing, size=1)
                    raise StorageUnavailable(f"can't {doing}: the server lost the upload; try again") from None
            return self._compared(google, stored, handle, generation, doing)

    def _insert(
        self, google: Connection, data: bytes, handle: Handle, generation: int, write: Write, doing: str
    ) -> _Stored:
        def insert(timeout_s: float) -> _Stored:
            blob = self._blob(google, handle.path, write)
            blob.upload_from_string(
                data, content_type="application/octet-stream", if_generation_match=generation, checksum="crc32c",
                timeout=timeout_s, retry=None,
            )  # fmt: skip
            return _Stored.of(blob)

        return self._send(doing, insert, write)

    def _begin(self, google: Connection, path: str, generation: int, write: Write, doing: str) -> str:
        """Begin an upload session, and return its URL.

        The server deletes a session that is never completed, and the session leaves no file.
        """

        def begin(timeout_s: float) -> str:
            url: str = self._blob(google, path, write).create_resumable_upload_session(
                content_type="application/octet-stream", if_generation_match=generation, checksum=None,
                timeout=timeout_s, retry=None,
            )  # fmt: skip
            return url

        return self._send(doing, begin)

    def _push(
        self, google: Connection, session: str, data: bytes, at: int, whole: Handle | None, write: Write, doing: str
    ) -> _Stored:
        """Send one piece of an upload session.

        A repeat first asks the server how many bytes it has, and continues from there.

        Source: https://cloud.google.com/storage/docs/performing-resumable-uploads
        """
        end, total = at + len(data), "*" if whole is None else str(whole.size_bytes)
        headers = {} if whole is None else {"x-goog-hash": f"crc32c={base64_of(whole.crc32c)}"}
        tried = False

        def put(body: bytes, content_range: str, timeout_s: float) -> tuple[_Stored | None, int]:
            """Send bytes, and return the stored file (None if bytes are missing) and how many bytes the server has."""
            response = google.session.put(
                session, data=body, headers={**headers, "Content-Range": content_range}, timeout=timeout_s,
                allow_redirects=False,
            )  # fmt: skip
            if response.status_code in (200, 201):
                made = response.json()
                return _Stored(int(made.get("size", 0)), _crc32c(made.get("crc32c")), int(made["generation"])), end
            if response.status_code != 308:
                raise from_http_response(response)
            return None, int(response.headers.get("Range", "bytes=0--1").rpartition("0-")[2]) + 1

        def push(timeout_s: float) -> _Stored:
            nonlocal tried
            has = at
            if tried:
                made, has = put(b"", f"bytes */{total}", timeout_s)
                if made is not None:
                    return made
            tried = True
            if not at <= has <= end:
                raise StorageUnavailable(f"can't {doing}: the server lost a part of the upload; try again")
            if has < end:
                made, has = put(data[has - at :], f"bytes {has}-{end - 1}/{total}", timeout_s)
                if made is not None:
                    return made
            if whole is not None or has != end:
                raise requests.ConnectionError("the server stored only a part of the bytes")
            return _Stored(end, None, 0)

        return self._send(doing, push, None if whole is None else write)

    def _settled(self, google: Connection, path: str, generation: int, write: Write, doing: str) -> _Stored:
        """Find out if a write took effect, after the server refused the write's last request.

        A request is repeated if its answer is lost. If the first request did write the file, the server refuses the
        repeat, because the file's generation is no longer `generation`.
        """
        if not write.uncertain:
            if generation == 0:
                raise AlreadyExists(f"can't {doing}: the file exists already")
            raise self._mismatch(self._look(google, path, doing), doing)
        try:
            found = self._look(google, path, doing)
        except CairnError:
            found = None
        if found is None or (found.metadata or {}).get(WRITE_KEY) != write.nonce:
            raise unknown_outcome(doing)
        return _Stored.of(found)

    def _compared(self, google: Connection, stored: _Stored, handle: Handle, generation: int, doing: str) -> Handle:
        """Check that the server stored the expected bytes, and return `handle`.

        If the write created a file with other bytes, the file is deleted. If the write replaced a file, the file stays.
        """
        self._bucket_seen = True
        if (stored.size_bytes, stored.crc32c) == (handle.size_bytes, handle.crc32c):
            return handle
        problem = (
            f"can't {doing}: expected {handle.size_bytes} bytes with crc32c {handle.crc32c:08x}, the server has "
            f"{stored.size_bytes} bytes with crc32c {stored.crc32c or 0:08x}"
        )
        if generation != 0:
            raise UnknownOutcome(f"{problem}; check the file before you go on")
        blob = self._blob(google, handle.path)

        def remove(timeout_s: float) -> None:
            blob.delete(if_generation_match=stored.generation, timeout=timeout_s, retry=None)

        try:
            self._send(doing, remove, Write(uncertain=True))
        except NotFound:
            pass
        except PreconditionFailed:
            raise unknown_outcome(doing) from None
        raise StorageUnavailable(f"{problem}; they were deleted, try again")

    # --- requests -----------------------------------------------------------------------------------------------------

    def _send(self, doing: str, request: Callable[[float], R], write: Write | None = None) -> R:
        """Send a request, and retry while a retry may help."""
        patience, began = self._patience, time.monotonic()
        deadline = began + patience.deadline_s

        def may_pass(error: BaseException) -> bool:
            waiting = _is_refusal(error) and time.monotonic() < began + patience.permission_s
            return waiting or _is_transient(error)

        def attempt() -> R:
            try:
                return request(max(0.01, min(patience.request_s, deadline - time.monotonic())))
            except Exception as error:
                if write is not None and not _without_effect(error):
                    write.uncertain = True
                raise

        retry = Retry(
            predicate=may_pass,
            initial=patience.first_delay_s,
            maximum=patience.longest_delay_s,
            multiplier=2.0,
            timeout=patience.deadline_s,
        )
        try:
            answer: R = retry(attempt)()
            return answer
        except RetryError as error:
            failure = error.cause or error
        except Exception as error:
            failure = error
        # The error is raised outside the except blocks: otherwise its traceback would show the cause with its URLs.
        raise self._translated(doing, failure, write)

    def _translated(self, doing: str, error: BaseException, write: Write | None) -> BaseException:
        status = error.code if isinstance(error, GoogleAPICallError) else None
        if status in (404, 410):
            return NotFound(f"can't {doing}: the file does not exist")
        if status == 412:
            return PreconditionFailed(f"can't {doing}: another process has rewritten the file meanwhile")
        if write is not None and write.uncertain:
            return unknown_outcome(doing, _said(error))
        if isinstance(error, CairnError):
            return error
        reason = f"can't {doing}: {_said(error)}"
        if status == 401 or (isinstance(error, GoogleAuthError) and not _is_transient(error)):
            return UsageError(
                f"{reason}; the credentials are refused: renew them, or set GOOGLE_APPLICATION_CREDENTIALS to another key file"
            )
        if _is_refusal(error):
            return PermissionRefused(
                f"{reason}; give this identity the role Storage Object User on the bucket {self._bucket!r}, wait some "
                "minutes, then try again"
            )
        if status is not None or _is_transient(error):
            gave_up = f" for {self._patience.deadline_s:g} s" if _is_transient(error) else ""
            return StorageUnavailable(f"{reason}{gave_up}; check the network and the bucket, then try again")
        return error

    def _bucket_of(self, google: Connection) -> Bucket:
        return google.client.bucket(self._bucket, user_project=self._project)

    def _blob(self, google: Connection, path: str, write: Write | None = None) -> Blob:
        blob = self._bucket_of(google).blob(self._name(path))
        if write is not None:
            blob.metadata = {WRITE_KEY: write.nonce}
        return blob

    def _info(self, blob: Blob) -> FileInfo:
        self._bucket_seen = True
        created: datetime = blob.time_created
        return FileInfo(
            path=blob.name.removeprefix(self._root),
            size_bytes=blob.size or 0,  # Some servers leave out a size of 0.
            generation=blob.generation,
            modified_ms=int(created.timestamp() * 1000),
            crc32c=_crc32c(blob.crc32c),
        )


class _Body:
    """The bytes of a file as they arrive, in pieces of `CHUNK_BYTES`.

    If a connection breaks, a new request continues where it broke, with the same generation.
    """

    def __init__(
        self, session: AuthorizedSession, url: str, send: Callable[[Callable[[float], bytes]], bytes], offset: int = 0
    ) -> None:
        self.crc32c: int | None = None
        self._session = session
        self._url = url
        self._send = send
        self._response: requests.Response | None = None
        self._generation: str | None = None
        self._at = offset
        self._size_bytes: int | None = None
        self._piece = bytearray()

    def __iter__(self) -> Iterator[bytes]:
        while piece := self._send(self._next_piece):
            self._piece.clear()
            yield piece

    def close(self) -> None:
        """Close the answer. Its connection is used again if nothing was left to read."""
        if self._response is not None:
            self._response.close()
            self._response = None

    def _next_piece(self, timeout_s: float) -> bytes:
        until = time.monotonic() + timeout_s
        try:
            while len(self._piece) < CHUNK_BYTES and self._at != self._size_bytes:
                response = self._response or self._open(timeout_s)
                data = received(response, CHUNK_BYTES - len(self._piece), until, decode=False)
                self._at += len(data)
                self._piece += data
                if not data and self._size_bytes is None:
                    self._size_bytes = self._at
                elif not data and self._at != self._size_bytes:
                    raise requests.ConnectionError("the server's answer ended early")
        except Exception:
            self.close()
            raise
        return bytes(self._piece)

    def _open(self, timeout_s: float) -> requests.Response:
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={self._at}-"} if self._at else {})
        parameters = {"alt": "media"} | ({"generation": self._generation} if self._generation else {})
        response: requests.Response = self._session.get(
            self._url, params=parameters, headers=headers, stream=True, timeout=timeout_s
        )
        self._response = response
        if response.status_code != (206 if self._at else 200):
            if response.status_code < 400:
                raise StorageUnavailable("the server can't continue the interrupted download; try again")
            raise from_http_response(response)
        if not self._at:
            length = response.headers.get("Content-Length", response.headers.get("x-goog-stored-content-length"))
            self._size_bytes = None if length is None else int(length)
            self._generation = response.headers.get("x-goog-generation")
            hashes = dict(h.strip().split("=", 1) for h in response.headers.get("x-goog-hash", "").split(",") if h)
            self.crc32c = _crc32c(hashes.get("crc32c"))
        return response


def _answers_of(batch: requests.Response) -> Iterator[tuple[int, int, str]]:
    """Parse the answer to a batch request."""
    head = f"Content-Type: {batch.headers.get('Content-Type', '')}\r\n\r\n"
    for part in message_from_bytes(head.encode() + batch.content).walk():
        number = re.search(r"(\d+)>?$", part.get("Content-ID", ""))
        status = re.match(r"HTTP/\S+ (\d{3})", text := "" if part.is_multipart() else str(part.get_payload()))
        if number is not None and status is not None:
            yield int(number[1]), int(status[1]), text.replace("\r\n", "\n").partition("\n\n")[2]


def _failure(status: int, body: str) -> GoogleAPICallError:
    """Return the exception for a failed part of a batch, like `from_http_response` for a whole answer."""
    try:
        told = json.loads(body)["error"]
        return from_http_status(status, str(told.get("message", "")), errors=told.get("errors", ()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return from_http_status(status, "")


def _steps(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield the bytes in pieces of `STEP_BYTES`, at least one piece. True marks the last piece."""
    waiting = bytearray()
    for chunk in chunks:
        waiting += chunk
        while len(waiting) > STEP_BYTES:
            yield bytes(waiting[:STEP_BYTES]), False
            del waiting[:STEP_BYTES]
    yield bytes(waiting), True


def _is_transient(error: BaseException) -> bool:
    """Return True if a retry of the same request may succeed."""
    if isinstance(error, GoogleAPICallError):
        return error.code in _TRANSIENT or (error.code == 403 and not _is_refusal(error))
    if isinstance(error, GoogleAuthError):
        return isinstance(error, TransportError) or error.retryable
    return isinstance(
        error, requests.RequestException | urllib3.exceptions.HTTPError | HTTPException | ConnectionError | TimeoutError
    )


def _is_refusal(error: BaseException) -> bool:
    """Return True if the error says that a permission is missing. Some 403 answers mean an overload instead."""
    if not isinstance(error, GoogleAPICallError) or error.code != 403:
        return False
    return not any(isinstance(e, dict) and e.get("reason") in _OVERLOAD for e in error.errors)


def _without_effect(error: Exception) -> bool:
    """Return True if the failed request certainly changed nothing, because it was refused or never sent."""
    if isinstance(error, GoogleAPICallError):
        return error.code is not None and error.code < 500 and error.code != 408
    if isinstance(error, requests.ConnectionError) and error.args:
        reason = getattr(error.args[0], "reason", None)
        return isinstance(reason, urllib3.exceptions.NewConnectionError | urllib3.exceptions.ConnectTimeoutError)
    return isinstance(error, GoogleAuthError | CairnError)


def _said(error: BaseException) -> str:
    """Return a short reason for the failure, without URLs."""
    if not isinstance(error, GoogleAPICallError):
        return str(error) if isinstance(error, CairnError) else type(error).__name__
    told = next((str(e["message"]) for e in error.errors if isinstance(e, dict) and e.get("message")), "")
    return f"HTTP {error.code}{': ' + told if told else ''}"


def _crc32c(text: str | None) -> int | None:
    return None if text is None else int.from_bytes(b64decode(text), "big")
