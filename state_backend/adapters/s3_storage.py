"""Storage on Amazon S3 and compatible stores: `s3://bucket/prefix`.

    <bucket>/<prefix>/<path>    one object per file; its metadata `cairn-write` is the uuid of the write that made it

A file's generation is its ETag, so a rewrite with the same bytes keeps the generation. Every write has a precondition:
`If-None-Match: *` creates, `If-Match` with the ETag replaces and deletes. A repeated request therefore overwrites
nothing. If the answer to a write was lost, the server refuses the repeat. Then the file's uuid shows whether this write
made the file. If the file is absent or has another uuid, the write raises `UnknownOutcome`.

Compatible stores may ignore preconditions. So the first write of a process to a bucket of such a store tries them first
(`_refuse_if_conditions_are_ignored`).
"""

from __future__ import annotations

import os
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace as changed
from pathlib import Path
from random import uniform
from typing import Any
from uuid import uuid4

import boto3
import google_crc32c
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    ProxyConnectionError,
    SSLError,
    TokenRetrievalError,
)

from state_backend.adapters.local_storage import CHUNK_BYTES, read_chunks, write_verified
from state_backend.adapters.uncertain_write import WRITE_KEY, ObjectStorage, Write, base64_of, unknown_outcome
from state_backend.adapters.work_folders import work_folder
from state_backend.ports.storage import Storage, check_path, check_prefix
from state_backend.values.environment import Variable
from state_backend.values.errors import (
    AlreadyExists,
    CairnError,
    CorruptFile,
    NotFound,
    PermissionRefused,
    PreconditionFailed,
    StorageUnavailable,
    UsageError,
)
from state_backend.values.frozen import frozen
from state_backend.values.handles import FileInfo, Handle

PART_BYTES = 16 * CHUNK_BYTES
"""Bytes of one part of a multipart upload. They stay in memory until the server confirms them. S3 takes at least 5 MiB
for each part but the last."""

PARTS_OF_ONE_SIZE = 1000
"""After this many parts, parts are twice as large, and so on: S3 takes at most 10,000 parts."""

COPIED_PART_BYTES = 1 << 30
"""Bytes that the server copies with one request. S3 takes at most 5 GiB."""

SERVER_COPIES_BYTES = CHUNK_BYTES
"""Only larger files are copied by the server: its four or more requests cost more than a read and a write of a small
file."""

BATCH = 1000
"""The number of files that one request deletes: the most that S3 accepts."""

_REFUSED_CREDENTIALS = (
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
)
_NO_CREDENTIALS = (
    CredentialRetrievalError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    TokenRetrievalError,
)
_NEVER_SENT = (
    *_NO_CREDENTIALS,
    ConnectTimeoutError,
    EndpointConnectionError,
    ParamValidationError,
    ProxyConnectionError,
)


@frozen
class Patience:
    """Time limits of requests and their retries, in seconds."""

    deadline_s: float = 180.0
    connect_s: float = 10.0
    # Timeout of the next bytes of an answer.
    read_s: float = 60.0
    first_delay_s: float = 0.5
    longest_delay_s: float = 20.0

    def delay_s(self, repeats: int) -> float:
        """Return a random delay before the next retry, in seconds. `repeats` is the number of earlier retries."""
        return uniform(0, min(self.first_delay_s * 2.0 ** min(repeats, 30), self.longest_delay_s))


class _Clients:
    """Clients of the AWS SDK, one for each process: a forked process can't share its parent's sockets."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._clients: dict[int, Any] = {}
        self._lock = threading.Lock()

    def of_this_process(self) -> Any:
        """Return the client of this process."""
        process = os.getpid()
        client = self._clients.get(process)
        if client is None:
            # A lock that another thread held during the fork is never released here: each process has its own lock.
            if process not in self._clients and self._clients:
                self._lock = threading.Lock()
                self._clients.clear()
            with self._lock:
                client = self._clients.get(process) or self._open()
                self._clients[process] = client
        return client

    def _open(self) -> Any:
        addressing = Variable.S3_ADDRESSING.given or Variable.S3_ADDRESSING.default
        client = boto3.session.Session().client(
            "s3",
            config=Config(
                connect_timeout=self._patience.connect_s,
                read_timeout=self._patience.read_s,
                # The SDK does not retry; `_send` does. All requests of a client share the SDK's quota of retries, and an outage
                # would use it up.
                retries={"total_max_attempts": 1},
                max_pool_connections=32,
                user_agent_extra="cairn",
                # Cairn gives and compares checksums itself.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": addressing},
            ),
        )
        return client


_clients: dict[tuple[str | None, ...], _Clients] = {}
_clients_lock = threading.Lock()
_LOGIN = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_PROFILE",
    "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_REGION",
    "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", Variable.S3_ADDRESSING,
)  # fmt: skip


def _of_environment(patience: Patience) -> _Clients:
    """Return the clients for the environment's login. A process may change the environment later."""
    login = (*(os.environ.get(name) for name in _LOGIN), str(patience))
    with _clients_lock:
        return _clients.setdefault(login, _Clients(patience))


# Endpoints and buckets, other than Amazon's, that have refused writes with a wrong precondition.
_conditional: set[tuple[str, str]] = set()


def open_url(url: str, *, google_key_file: str | None = None) -> S3Storage:
    """Open `s3://bucket/prefix` with the credentials that the AWS SDK finds."""
    bucket, _, prefix = url.removeprefix("s3://").rstrip("/").partition("/")
    return S3Storage(bucket, prefix)


class S3Storage(ObjectStorage):
    """Storage below `s3://<bucket>/<prefix>`; the prefix may be empty.

    Methods raise `UsageError` if there are no credentials, the server refuses them, the bucket does not exist, or the
    server ignores preconditions.
    """

    lists_what_is_there = True

    def __init__(self, bucket: str, prefix: str = "", *, patience: Patience | None = None) -> None:
        if not bucket or not all(c.isascii() and (c.isalnum() or c in "-._") for c in bucket):
            raise UsageError(f"not a bucket: {bucket!r}; expected s3://bucket or s3://bucket/prefix")
        self._root = f"{check_path(prefix)}/" if prefix else ""
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._patience = patience or Patience()
        self._clients = _of_environment(self._patience)
        self._bucket_seen = False
        payer = Variable.S3_REQUEST_PAYER.given
        self._payer = {"RequestPayer": payer} if payer else {}
        encryption, key = Variable.S3_ENCRYPTION.given, Variable.S3_KMS_KEY_ID.given
        self._encryption = {"ServerSideEncryption": encryption} if encryption else {}
        if key:
            self._encryption["SSEKMSKeyId"] = key

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, path: str, *, offset: int = 0) -> bytes:
        """Return the bytes of a file from `offset` on, as `Storage.read` specifies."""
        body = _Body(self, path, f"read {path!r} of {self.url}", offset)
        data = b"".join(body)
        if body.crc32c is not None and body.crc32c != (found := base64_of(google_crc32c.value(data))):
            raise StorageUnavailable(
                f"can't read {path!r} of {self.url}: the received bytes have crc32c {found}, expected {body.crc32c}; "
                "try again"
            )
        return data

    def download(self, handle: Handle, destination: Path) -> None:
        """Copy a file to a local path and check its bytes, as `Storage.download` specifies."""
        doing = f"download {handle.path!r} of {self.url}"
        write_verified(_Body(self, handle.path, doing), handle, destination, url=self.url)

    def stat(self, path: str) -> FileInfo | None:
        """Return the metadata of a file, or None if it is absent, as `Storage.stat` specifies."""
        found = self._look(path, f"stat {path!r} of {self.url}")
        return None if found is None else _info(path, found, found["ContentLength"])

    def checksum(self, path: str) -> int | None:
        """Return the checksum that S3 compared when the file was written, as `TellsChecksums.checksum` specifies."""
        found = self._look(path, f"read the checksum of {path!r} of {self.url}")
        told = None if found is None else _whole_crc32c(found)
        return None if told is None else int.from_bytes(b64decode(told), "big")

    def list(self, prefix: str) -> Iterator[FileInfo]:
        """Return the files whose path begins with a prefix, sorted by path, as `Storage.list` specifies.

        Objects whose names end in `/` are left out: consoles create them as folders.
        """
        return self._walk(self._root + check_prefix(prefix), f"list {prefix!r} of {self.url}")

    def folders(self, path: str) -> tuple[str, ...]:
        """Return the sorted names of the folders in a folder. The path "" is the storage itself."""
        start = self._root + (f"{check_path(path)}/" if path else "")
        doing, found = f"list the folders in {path!r} of {self.url}", set[str]()
        for page in self._pages(doing, Prefix=start, Delimiter="/"):
            found |= {item["Prefix"] for item in page.get("CommonPrefixes", ())}
        return tuple(sorted(name.removeprefix(start).rstrip("/") for name in found))

    def _walk(self, start: str, doing: str) -> Iterator[FileInfo]:
        for page in self._pages(doing, Prefix=start):
            for item in page.get("Contents", ()):
                if not item["Key"].endswith("/"):
                    yield _info(item["Key"].removeprefix(self._root), item, item["Size"])

    def _pages(self, doing: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        token: dict[str, str] = {}
        while True:
            try:
                page = self._send(doing, "list_objects_v2", None, **arguments, **token)
            except NotFound:
                raise UsageError(
                    f"can't {doing}: the bucket {self._bucket!r} does not exist; create it first"
                ) from None
            self._bucket_seen = True
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def _look(self, path: str, doing: str) -> dict[str, Any] | None:
        """Return the answer to a HEAD request, or None if the file is absent."""
        try:
            found = self._send(doing, "head_object", None, Key=self._name(path), ChecksumMode="ENABLED")
        except NotFound:
            self._require_bucket(doing)
            return None
        self._bucket_seen = True
        return found

    def _require_bucket(self, doing: str) -> None:
        """Raise `UsageError` if the bucket does not exist. S3 answers 404 to HEAD for a file and for a bucket."""
        if not self._bucket_seen:
            next(self._pages(doing, Prefix=self._root, MaxKeys=1))

    # --- writing ------------------------------------------------------------------------------------------------------

    def create(self, path: str, data: bytes) -> Handle:
        """Write a new file, as `Storage.create` specifies."""
        return self._write(path, (data,), None, f"create {path!r} of {self.url}")

    def upload(self, path: str, local: Path) -> Handle:
        """Write a new file from a local file, as `Storage.upload` specifies.

        A file of more than `PART_BYTES` is a multipart upload. If this process dies, its parts stay in the bucket, where
        no listing shows them, until a lifecycle rule of the bucket deletes them.
        """
        check_path(path)
        chunks = read_chunks(local, f"read {local} to upload it to {self.url}")
        return self._write(path, chunks, None, f"create {path!r} of {self.url}")

    def replace(self, path: str, data: bytes, *, generation: int) -> Handle:
        """Rewrite a file that still has the given generation, as `Storage.replace` specifies."""
        doing = f"replace {path!r} of {self.url}"
        etag = _etag(generation)
        if etag is None:
            raise self._mismatch(self._look(path, doing), doing)
        return self._write(path, (data,), etag, doing)

    def delete(self, path: str, *, generation: int | None = None) -> bool:
        """Delete one file; return False if it is absent. See `Storage.delete`.

        S3 gives the same answer for a deleted and for an absent file, so the method asks first.
        """
        doing = f"delete {path!r} of {self.url}"
        while (found := self._look(path, doing)) is not None:
            if generation is not None and _generation(found) != generation:
                raise self._mismatch(found, doing)
            write = Write()
            try:
                self._send(doing, "delete_object", write, Key=self._name(path), IfMatch=found["ETag"])
            except NotFound:
                return write.uncertain
            except PreconditionFailed:
                # Another process has rewritten the file since `_look`. SeaweedFS also gives this answer for an absent file, S3 gives 404.
                if not write.uncertain:
                    continue
                # An earlier attempt may have deleted the file before another process wrote a new one.
                if self._look(path, doing) is not None:
                    raise unknown_outcome(doing) from None
            return True
        return False

    def delete_many(self, paths: Sequence[str]) -> int:
        """Delete files, `BATCH` of them by one request, as `DeletesMany.delete_many` specifies."""
        doing = f"delete {len(paths)} files of {self.url}"
        for first in range(0, len(paths), BATCH):
            names = [{"Key": self._name(path)} for path in paths[first : first + BATCH]]
            answer = self._send(doing, "delete_objects", Write(), Delete={"Objects": names, "Quiet": True})
            if errors := answer.get("Errors"):
                raise self._translated(doing, ClientError({"Error": errors[0]}, "DeleteObjects"), None)
        return len(paths)

    def copy_from(self, source: Storage, handle: Handle, path: str) -> Handle:
        """Copy a file of another storage to a new file, as `Storage.copy_from` specifies.

        The server copies a file of more than `SERVER_COPIES_BYTES` if both storages have the same login. This method
        reads and writes all other files.
        """
        check_path(path)
        ours = isinstance(source, S3Storage) and source._clients is self._clients
        if not ours or handle.size_bytes <= SERVER_COPIES_BYTES:
            with work_folder("copy") as folder:
                source.download(handle, folder / "file")
                return self.upload(path, folder / "file")
        assert isinstance(source, S3Storage)
        doing = f"copy {handle.path!r} of {source.url} to {path!r} of {self.url}"
        found = source._look(handle.path, doing)
        if found is None:
            raise NotFound(f"can't {doing}: the file does not exist")
        size_bytes, crc32c = found["ContentLength"], _whole_crc32c(found) or base64_of(handle.crc32c)
        if (size_bytes, crc32c) != (handle.size_bytes, base64_of(handle.crc32c)):
            raise CorruptFile(
                f"{handle.path!r} of {source.url} is damaged: expected {handle.size_bytes} bytes with crc32c "
                f"{base64_of(handle.crc32c)}, found {size_bytes} bytes with crc32c {crc32c}; restore an older checkpoint, or put the "
                "file back from a copy"
            )

        def parts(upload: dict[str, str]) -> Iterator[dict[str, Any]]:
            for number, start in enumerate(range(0, size_bytes, COPIED_PART_BYTES), 1):
                end = min(start + COPIED_PART_BYTES, size_bytes) - 1
                answer = self._send(
                    doing, "upload_part_copy", None, **upload, PartNumber=number,
                    CopySource={"Bucket": source._bucket, "Key": source._name(handle.path)},
                    CopySourceIfMatch=found["ETag"], CopySourceRange=f"bytes={start}-{end}",
                )  # fmt: skip
                yield {"PartNumber": number, **_part(answer["CopyPartResult"])}

        copied = changed(handle, path=path)
        return self._in_parts(copied, parts, None, Write(), doing, whole_crc32c=lambda: handle.crc32c)

    def _write(self, path: str, chunks: Iterable[bytes], etag: str | None, doing: str) -> Handle:
        """Write a file."""
        name, pieces, write = self._name(path), _pieces(chunks), Write()
        first, whole = next(pieces)
        self._refuse_if_conditions_are_ignored(doing)
        crc32c = google_crc32c.value(first)
        if whole:
            handle = Handle(path=path, size_bytes=len(first), crc32c=crc32c)
            self._conditionally(
                doing, "put_object", write, path, etag, Key=name, **_body(first),
                ContentType="application/octet-stream", Metadata={WRITE_KEY: write.nonce}, **self._encryption,
            )  # fmt: skip
            return handle
        sent = Handle(path=path, size_bytes=0, crc32c=0)

        def parts(upload: dict[str, str]) -> Iterator[dict[str, Any]]:
            nonlocal sent
            data, number, last = first, 0, False
            while True:
                number += 1
                crc32c = google_crc32c.extend(sent.crc32c, data)
                sent = changed(sent, size_bytes=sent.size_bytes + len(data), crc32c=crc32c)
                answer = self._send(doing, "upload_part", None, **upload, PartNumber=number, **_body(data))
                yield {"PartNumber": number, **_part(answer)}
                if last:
                    return
                data, last = next(pieces)

        self._in_parts(Handle(path=path, size_bytes=0, crc32c=0), parts, etag, write, doing, lambda: sent.crc32c)
        return sent

    def _in_parts(
        self,
        handle: Handle,
        parts: Callable[[dict[str, str]], Iterator[dict[str, Any]]],
        etag: str | None,
        write: Write,
        doing: str,
        whole_crc32c: Callable[[], int],
    ) -> Handle:
        """Write a file by a multipart upload, which the last request makes visible, and return `handle`.

        If a part fails, the upload is aborted, and no file exists.
        """
        name = self._name(handle.path)
        self._refuse_if_conditions_are_ignored(doing)
        try:
            begun = self._send(
                doing, "create_multipart_upload", None, Key=name, ContentType="application/octet-stream",
                Metadata={WRITE_KEY: write.nonce}, ChecksumAlgorithm="CRC32C", ChecksumType="FULL_OBJECT",
                **self._encryption,
            )  # fmt: skip
        except NotFound:
            self._require_bucket(doing)
            raise
        upload = {"Key": name, "UploadId": begun["UploadId"]}
        try:
            sent = list(parts(upload))
            self._conditionally(
                doing, "complete_multipart_upload", write, handle.path, etag, **upload,
                ChecksumCRC32C=base64_of(whole_crc32c()), ChecksumType="FULL_OBJECT", MultipartUpload={"Parts": sent},
            )  # fmt: skip
        except BaseException:
            if not write.uncertain:
                with suppress(CairnError):
                    self._send(doing, "abort_multipart_upload", None, **upload)
            raise
        return handle

    def _conditionally(
        self, doing: str, operation: str, write: Write, path: str, etag: str | None, **arguments: Any
    ) -> None:
        """Send the request that makes a file visible, with its precondition."""
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        try:
            self._send(doing, operation, write, **arguments, **condition)
        except PreconditionFailed:
            self._settle(path, etag, write, doing)
        except NotFound:  # The bucket, the file to replace, or the multipart upload does not exist.
            if write.uncertain:
                self._settle(path, etag, write, doing)
                return
            self._require_bucket(doing)
            if etag is not None:
                raise
            raise StorageUnavailable(f"can't {doing}: the server lost the upload; try again") from None
        self._bucket_seen = True

    def _settle(self, path: str, etag: str | None, write: Write, doing: str) -> None:
        """Return if an earlier attempt of a refused write took effect."""
        if not write.uncertain:
            if etag is None:
                raise AlreadyExists(f"can't {doing}: the file exists already")
            raise self._mismatch(self._look(path, doing), doing)
        try:
            found = self._look(path, doing)
        except CairnError:
            found = None
        if found is None or found.get("Metadata", {}).get(WRITE_KEY) != write.nonce:
            raise unknown_outcome(doing)

    def _refuse_if_conditions_are_ignored(self, doing: str) -> None:
        """Raise `UsageError` if the server ignores preconditions. Amazon's own endpoints are not tested.

        The requests create a file twice, then replace and delete the file with a wrong ETag. The server must refuse all but
        the first.
        """
        client = self._client(doing)
        endpoint = client.meta.endpoint_url
        if endpoint.endswith((".amazonaws.com", ".amazonaws.com.cn")) or (endpoint, self._bucket) in _conditional:
            return
        name, refused = f"{self._root}{uuid4().hex}.probe", []
        try:
            for operation, arguments in (
                ("put_object", {**_body(b"1"), "IfNoneMatch": "*"}),
                ("put_object", {**_body(b"2"), "IfNoneMatch": "*"}),
                ("put_object", {**_body(b"3"), "IfMatch": '"0"'}),
                ("delete_object", {"IfMatch": '"0"'}),
            ):
                try:
                    self._send(doing, operation, None, Key=name, **arguments)
                    refused.append(False)
                except PreconditionFailed:
                    refused.append(True)
        except NotFound:
            self._require_bucket(doing)
            raise
        finally:
            with suppress(CairnError):
                self._send(doing, "delete_object", None, Key=name)
        if refused != [False, True, True, True]:
            ignored = ["create", "create", "replace", "delete"][refused.index(False, 1)]
            raise UsageError(
                f"can't {doing}: the server {endpoint} ignores the precondition of a conditional {ignored}\n"
                "Two writers could overwrite each other's files. Use a release of the server that supports conditional "
                "requests, or another storage"
            )
        _conditional.add((endpoint, self._bucket))

    # --- requests -----------------------------------------------------------------------------------------------------

    def _client(self, doing: str) -> Any:
        try:
            return self._clients.of_this_process()
        except (BotoCoreError, ValueError) as error:
            failure = error
        raise self._translated(doing, failure, None)

    def _send(self, doing: str, operation: str, write: Write | None, **arguments: Any) -> dict[str, Any]:
        """Send a request, and retry while a retry may help."""
        client, repeats = self._client(doing), 0
        deadline = time.monotonic() + self._patience.deadline_s
        while True:
            try:
                answer: dict[str, Any] = getattr(client, operation)(Bucket=self._bucket, **self._payer, **arguments)
                return answer
            except (ClientError, BotoCoreError) as error:
                failure: Exception = error
            if write is not None and not _without_effect(failure):
                write.uncertain = True
            if not _is_transient(failure) or time.monotonic() > deadline:
                break
            time.sleep(self._patience.delay_s(repeats))
            repeats += 1
        # Raise outside the except block: inside, the traceback would also show boto's error, which holds the request.
        raise self._translated(doing, failure, write)

    def _translated(self, doing: str, error: Exception, write: Write | None) -> CairnError:
        status, code = _answered(error) if isinstance(error, ClientError) else (None, "")
        if status == 412 or code == "PreconditionFailed":
            return PreconditionFailed(f"can't {doing}: another process has rewritten the file meanwhile")
        if code == "NoSuchBucket":
            return UsageError(f"can't {doing}: the bucket {self._bucket!r} does not exist; create it first")
        if status == 404 or code in ("NoSuchKey", "NoSuchUpload", "404"):
            return NotFound(f"can't {doing}: the file does not exist")
        if write is not None and write.uncertain:
            return unknown_outcome(doing, _said(error))
        reason = f"can't {doing}: {_said(error)}"
        if isinstance(error, _NO_CREDENTIALS):
            return UsageError(
                f"{reason}; expected credentials that the AWS SDK finds: set AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, and AWS_DEFAULT_REGION"
            )
        if code in _REFUSED_CREDENTIALS:
            return UsageError(f"{reason}; the credentials are refused: renew them, and check this host's clock")
        if status == 403 or code == "AccessDenied":
            return PermissionRefused(
                f"{reason}; give this identity s3:GetObject, s3:PutObject, s3:DeleteObject and s3:AbortMultipartUpload on "
                f"arn:aws:s3:::{self._bucket}/*, and s3:ListBucket on the bucket, then try again"
            )
        gave_up = f" for {self._patience.deadline_s:g} s" if _is_transient(error) else ""
        return StorageUnavailable(f"{reason}{gave_up}; check the network and the bucket, then try again")


class _Body:
    """The bytes of a file as they arrive, in pieces of `CHUNK_BYTES`.

    If a connection breaks, a new request continues where it broke, with the same ETag.
    """

    def __init__(self, storage: S3Storage, path: str, doing: str, offset: int = 0) -> None:
        self.crc32c: str | None = None
        self._storage = storage
        self._name = storage._name(path)
        self._doing = doing
        self._at = offset
        self._etag: str | None = None
        self._size_bytes: int | None = None

    def __iter__(self) -> Iterator[bytes]:
        patience, repeats = self._storage._patience, 0
        deadline = time.monotonic() + patience.deadline_s
        while self._size_bytes is None or self._at < self._size_bytes:
            try:
                for piece in self._answer():
                    repeats, deadline = 0, time.monotonic() + patience.deadline_s
                    yield piece
            except BotoCoreError as error:
                if time.monotonic() > deadline:
                    failure = self._storage._translated(self._doing, error, None)
                    break
                time.sleep(patience.delay_s(repeats))
                repeats += 1
        else:
            return
        raise failure

    def _answer(self) -> Iterator[bytes]:
        arguments: dict[str, Any] = {"ChecksumMode": "ENABLED"}
        if self._at:
            arguments["Range"] = f"bytes={self._at}-"
        if self._etag is not None:
            arguments["IfMatch"] = self._etag
        whole = not self._at
        try:
            answer = self._storage._send(self._doing, "get_object", None, Key=self._name, **arguments)
        except PreconditionFailed:
            raise StorageUnavailable(f"can't {self._doing}: the file was rewritten meanwhile; try again") from None
        except NotFound:
            self._storage._require_bucket(self._doing)
            raise
        self._storage._bucket_seen = True
        self._etag = answer["ETag"]
        self._size_bytes = self._at + answer["ContentLength"]
        if whole:
            self.crc32c = _whole_crc32c(answer)
        body = answer["Body"]
        try:
            while piece := body.read(CHUNK_BYTES):
                self._at += len(piece)
                yield piece
        finally:
            body.close()


def _is_transient(error: Exception) -> bool:
    """Return True if a retry of the same request may succeed."""
    if isinstance(error, ClientError):
        status, code = _answered(error)
        # 409: another write of the same file is under way. After that write, the precondition decides.
        return status in (408, 409, 429, 500, 502, 503, 504) or code in ("RequestTimeout", "SlowDown", "Throttling")
    return isinstance(error, HTTPClientError) and not isinstance(error, SSLError)


def _without_effect(error: Exception) -> bool:
    """Return True if the failed request certainly changed nothing, because it was refused or never sent."""
    if isinstance(error, ClientError):
        status, _ = _answered(error)
        return status is not None and status < 500 and status != 408
    return isinstance(error, _NEVER_SENT)


def _answered(error: ClientError) -> tuple[int | None, str]:
    """Return the HTTP status and S3's error code."""
    return (
        error.response.get("ResponseMetadata", {}).get("HTTPStatusCode"),
        str(error.response.get("Error", {}).get("Code", "")),
    )


def _pieces(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield the bytes in pieces for the parts of an upload, at least one piece. True marks the last piece."""
    waiting, number = bytearray(), 0
    for chunk in chunks:
        waiting += chunk
        while len(waiting) > (size := PART_BYTES << (number // PARTS_OF_ONE_SIZE)):
            yield bytes(waiting[:size]), False
            del waiting[:size]
            number += 1
    yield bytes(waiting), True


def _body(data: bytes) -> dict[str, Any]:
    """Return the arguments for bytes with their checksum.

    On a bucket with object lock, S3 demands that a request names the algorithm.
    """
    crc32c = base64_of(google_crc32c.value(data))
    return {"Body": data, "ChecksumAlgorithm": "CRC32C", "ChecksumCRC32C": crc32c}


def _whole_crc32c(answer: dict[str, Any]) -> str | None:
    """Return the base64 checksum of the whole file in an answer; None if the server reports none."""
    # A multipart upload may have a checksum of its parts' checksums. Some stores don't report the type of a checksum; the ETag of a
    # multipart upload has a hyphen.
    whole = (
        answer.get("ChecksumType", "COMPOSITE" if "-" in answer.get("ETag", "-") else "FULL_OBJECT") == "FULL_OBJECT"
    )
    crc32c = answer.get("ChecksumCRC32C")
    # The checksum of the parts' checksums ends with a hyphen and the number of parts.
    return crc32c if whole and crc32c is not None and "-" not in crc32c else None


def _part(answer: dict[str, Any]) -> dict[str, str]:
    return {name: answer[name] for name in ("ETag", "ChecksumCRC32C") if name in answer}


def _info(path: str, found: dict[str, Any], size_bytes: int) -> FileInfo:
    # HEAD reports whole seconds. The last millisecond of the second is never before the write.
    second = int(found["LastModified"].timestamp())
    return FileInfo(
        path=path, size_bytes=size_bytes, generation=_generation(found), modified_ms=second * 1000 + 999, crc32c=None
    )


def _generation(found: dict[str, Any]) -> int:
    """Return the ETag as a number, from which `_etag` gets the ETag back."""
    return int.from_bytes(found["ETag"].strip('"').encode(), "big")


def _etag(generation: int) -> str | None:
    """Return the quoted ETag of a generation; None if no ETag has this generation."""
    if generation <= 0:
        return None
    text = generation.to_bytes((generation.bit_length() + 7) // 8, "big")
    return f'"{text.decode()}"' if text.isascii() and text.decode().isprintable() else None


def _said(error: Exception) -> str:
    """Return a short reason for the failure, without URLs and headers."""
    if not isinstance(error, ClientError):
        return type(error).__name__
    status, code = _answered(error)
    return f"HTTP {status} {code}" if status is not None else code
