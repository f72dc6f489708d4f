"""Storage on Amazon S3 and compatible stores: `s3://bucket/prefix`.

A file's generation is its ETag, so a rewrite with the same bytes keeps the generation. Preconditions are
`If-None-Match: *` to create, and `If-Match` with the ETag to replace and delete.

Compatible stores may ignore preconditions. So the first write of a process to a bucket of such a store tries them first
(`before_write`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

import boto3
import botocore.session
import google_crc32c
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    ProxyConnectionError,
    SSLError,
    TokenRetrievalError,
)

from state_backend.adapters.local_storage import CHUNK_BYTES
from state_backend.adapters.object_store import (
    WRITE_KEY,
    Answer,
    ChecksumStore,
    Clients,
    Cloud,
    Failure,
    Found,
    LostUpload,
    Page,
    Patience,
    Refusal,
    Write,
    aborted_on_error,
    base64_of,
    clients_of,
    crc32c_of,
    etag_of,
    generation_of,
    info_of,
    require_bucket,
    send,
)
from state_backend.values.environment import Variable
from state_backend.values.errors import CairnError, NotFound, PermissionRefused, PreconditionFailed, UsageError
from state_backend.values.handles import Handle

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


_LOGIN = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_PROFILE",
    "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_REGION",
    "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", Variable.S3_ADDRESSING,
)  # fmt: skip


def _open(patience: Patience, given: Mapping[str, str]) -> Any:
    addressing = Variable.S3_ADDRESSING.given or Variable.S3_ADDRESSING.default
    core = botocore.session.Session(profile=given.get("AWS_PROFILE"))
    if "AWS_CONFIG_FILE" in given:
        core.set_config_variable("config_file", given["AWS_CONFIG_FILE"])
    session = boto3.session.Session(botocore_session=core, region_name=given.get("AWS_DEFAULT_REGION"))
    return session.client(
        "s3",
        endpoint_url=given.get("AWS_ENDPOINT_URL_S3"),
        config=Config(
            connect_timeout=patience.connect_s,
            read_timeout=patience.request_s,
            # The SDK must not repeat requests, because `send` does. All requests of a client share the SDK's quota of
            # retries, and an outage would use it up.
            retries={"total_max_attempts": 1},
            max_pool_connections=32,
            user_agent_extra="cairn",
            # Cairn gives and compares checksums itself.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": addressing},
        ),
    )


# The (endpoint, bucket) pairs, other than Amazon's, for which `before_write` has found that preconditions work.
_conditional: set[tuple[str, str]] = set()


def open_url(url: str, *, credentials: Mapping[str, str] | None = None) -> ChecksumStore:
    """Open a storage with the given credentials, or with those that the AWS SDK finds."""
    return ChecksumStore(S3Cloud.at(url, credentials=credentials))


class S3Cloud(Cloud):
    scheme = "s3"
    batch = 1000
    tells_absence = False

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        credentials: Mapping[str, str] | None = None,
        patience: Patience | None = None,
    ) -> None:
        super().__init__(bucket, prefix, patience=patience)
        given = dict(credentials or {})
        opens = partial(_open, self.patience, given)
        self._clients = Clients(opens) if given else clients_of(("s3", self.patience), _LOGIN, opens)
        if given:  # Read the files of the credentials now: the caller may delete them.
            send(self, f"open {self.url}", lambda _: self._clients.of_this_process())
        payer = Variable.S3_REQUEST_PAYER.given
        self._payer = {"RequestPayer": payer} if payer else {}
        encryption, key = Variable.S3_ENCRYPTION.given, Variable.S3_KMS_KEY_ID.given
        self._encryption = {"ServerSideEncryption": encryption} if encryption else {}
        if key:
            self._encryption["SSEKMSKeyId"] = key

    def _ask(self, operation: str, timeout_s: float = 0.0, /, **arguments: Any) -> dict[str, Any]:
        client = self._clients.of_this_process()
        answer: dict[str, Any] = getattr(client, operation)(Bucket=self.bucket, **self._payer, **arguments)
        return answer

    def head(self, path: str, timeout_s: float) -> Found:
        answer = self._ask("head_object", Key=self.name(path), ChecksumMode="ENABLED")
        info = info_of(path, answer["ContentLength"], answer["ETag"], answer["LastModified"])
        return Found(info, _whole_crc32c(answer), answer.get("Metadata", {}).get(WRITE_KEY))

    def get(self, path: str, at: int, generation: int | None, timeout_s: float) -> Answer:
        arguments = {"Range": f"bytes={at}-"} if at else {}
        if generation is not None:
            arguments |= _condition(generation)
        answer = self._ask("get_object", Key=self.name(path), ChecksumMode="ENABLED", **arguments)
        body = answer["Body"]
        return Answer(
            answer["ContentLength"],
            generation_of(answer["ETag"]),
            _whole_crc32c(answer),
            lambda size, _: body.read(size),
            body.close,
        )

    def page(self, start: str, token: str | None, timeout_s: float, *, delimiter: str = "", limit: int = 0) -> Page:
        arguments: dict[str, Any] = {"ContinuationToken": token} if token else {}
        arguments |= {"MaxKeys": limit} if limit else {}
        page = self._ask("list_objects_v2", Prefix=start, Delimiter=delimiter, **arguments)
        files = [
            info_of(item["Key"].removeprefix(self.root), item["Size"], item["ETag"], item["LastModified"])
            for item in page.get("Contents", ())
            if not item["Key"].endswith("/")
        ]
        folders = [item["Prefix"] for item in page.get("CommonPrefixes", ())]
        return Page(files, folders, page["NextContinuationToken"] if page.get("IsTruncated") else None)

    def put(self, handle: Handle, data: bytes, nonce: str, generation: int, timeout_s: float) -> None:
        self._ask("put_object", Key=self.name(handle.path), **_body(data), **self._new(nonce), **_condition(generation))

    def begin(self, path: str, nonce: str, generation: int, timeout_s: float) -> _Upload:
        begun = self._ask(
            "create_multipart_upload", Key=self.name(path), ChecksumAlgorithm="CRC32C", ChecksumType="FULL_OBJECT",
            **self._new(nonce),
        )  # fmt: skip
        where = {"Key": self.name(path), "UploadId": begun["UploadId"]}
        return _Upload(partial(self._ask, **where), _condition(generation))

    def _new(self, nonce: str) -> dict[str, Any]:
        return {"ContentType": "application/octet-stream", "Metadata": {WRITE_KEY: nonce}, **self._encryption}

    def copy(self, source: S3Cloud, found: Found, handle: Handle, write: Write, doing: str) -> None:
        name = {"Bucket": source.bucket, "Key": source.name(found.info.path)}
        upload = send(self, doing, self.begin, handle.path, write.nonce, 0)
        with aborted_on_error(self, upload, write, doing):
            for start in range(0, handle.size_bytes, COPIED_PART_BYTES):
                end = min(start + COPIED_PART_BYTES, handle.size_bytes) - 1
                copied = {"CopySource": name, "CopySourceIfMatch": etag_of(found.info.generation)}
                copied["CopySourceRange"] = f"bytes={start}-{end}"
                send(self, doing, upload.copy, copied)
            send(self, doing, upload.finish, handle, write=write)

    def remove(self, path: str, generation: int, timeout_s: float) -> None:
        self._ask("delete_object", Key=self.name(path), **_condition(generation))

    def remove_many(self, waiting: set[str], gone: set[str], timeout_s: float) -> None:
        names = [{"Key": self.name(path)} for path in waiting]
        answer = self._ask("delete_objects", Delete={"Objects": names, "Quiet": True})
        if errors := answer.get("Errors"):
            raise ClientError({"Error": errors[0]}, "DeleteObjects")
        gone |= waiting

    def copies_from(self, source: S3Cloud, handle: Handle) -> bool:
        return source._clients is self._clients and handle.size_bytes > SERVER_COPIES_BYTES

    def part_bytes(self, number: int) -> int:
        return PART_BYTES << (number // PARTS_OF_ONE_SIZE)

    def before_write(self, doing: str) -> None:
        """Raise `UsageError` if the server ignores preconditions. Amazon's own endpoints are not tested.

        A test creates a file twice, then replaces and deletes it with a wrong ETag: only the first may succeed.
        """
        endpoint = send(self, doing, lambda _: self._clients.of_this_process().meta.endpoint_url)
        if endpoint.endswith((".amazonaws.com", ".amazonaws.com.cn")) or (endpoint, self.bucket) in _conditional:
            return
        name, refused = f"{self.root}{uuid4().hex}.probe", []
        try:
            for operation, arguments in (
                ("put_object", {**_body(b"1"), "IfNoneMatch": "*"}),
                ("put_object", {**_body(b"2"), "IfNoneMatch": "*"}),
                ("put_object", {**_body(b"3"), "IfMatch": '"0"'}),
                ("delete_object", {"IfMatch": '"0"'}),
            ):
                try:
                    send(self, doing, self._ask, operation, Key=name, **arguments)
                    refused.append(False)
                except PreconditionFailed:
                    refused.append(True)
        except NotFound:
            require_bucket(self, doing)
            raise
        finally:
            with suppress(CairnError):
                send(self, doing, self._ask, "delete_object", Key=name)
        if refused != [False, True, True, True]:
            ignored = ["create", "create", "replace", "delete"][refused.index(False, 1)]
            raise UsageError(
                f"can't {doing}: the server {endpoint} ignores the precondition of a conditional {ignored}\n"
                "Two writers could overwrite each other's files. Use a release of the server that supports conditional "
                "requests, or another storage"
            )
        _conditional.add((endpoint, self.bucket))

    def failure(self, error: Exception) -> Failure | None:
        if isinstance(error, ClientError):
            return self._refusal(error)
        if not isinstance(error, BotoCoreError | ValueError):  # boto raises ValueError for an endpoint that is no URL.
            return None
        lost = isinstance(error, HTTPClientError | IncompleteReadError) and not isinstance(error, SSLError)
        advice = (
            "expected credentials that the AWS SDK finds: set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "and AWS_DEFAULT_REGION"
        )
        return Failure(
            said=type(error).__name__,
            repeat="yes" if lost else "no",
            may_have_effect=not isinstance(error, _NEVER_SENT),
            refused=(UsageError, advice) if isinstance(error, _NO_CREDENTIALS) else None,
        )

    def _refusal(self, error: ClientError) -> Failure:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = str(error.response.get("Error", {}).get("Code", ""))
        kind: Any = "other"
        if status == 412 or code == "PreconditionFailed":
            kind = "precondition"
        elif code == "NoSuchBucket":
            kind = "no bucket"
        elif status == 404 or code in ("NoSuchKey", "404"):
            kind = "absent"
        refused: Refusal | None = None
        if code in _REFUSED_CREDENTIALS:
            refused = UsageError, "the credentials are refused: renew them, and check this host's clock"
        elif status == 403 or code == "AccessDenied":
            advice = (
                "give this identity s3:GetObject, s3:PutObject, s3:DeleteObject and s3:AbortMultipartUpload on "
                f"arn:aws:s3:::{self.bucket}/*, and s3:ListBucket on the bucket, then try again"
            )
            refused = PermissionRefused, advice
        # 409: another write of the same file is under way. After that write, the precondition decides.
        transient = status in (408, 409, 429, 500, 502, 503, 504)
        transient = transient or code in ("RequestTimeout", "SlowDown", "Throttling")
        return Failure(
            said=f"HTTP {status} {code}" if status is not None else code,
            kind=kind,
            repeat="yes" if transient else "no",
            # In an answer to `remove_many`, the error for a file has no status. The file was not deleted.
            may_have_effect=status is not None and (status >= 500 or status == 408),
            refused=refused,
        )


class _Upload:
    def __init__(self, ask: Callable[..., dict[str, Any]], condition: dict[str, Any]) -> None:
        self._ask, self._condition = ask, condition
        self._parts: list[dict[str, Any]] = []

    def send(self, data: bytes, last: bool, timeout_s: float) -> None:
        self._add(self._ask("upload_part", PartNumber=len(self._parts) + 1, **_body(data)))

    def copy(self, copied: dict[str, Any], timeout_s: float) -> None:
        self._add(self._ask("upload_part_copy", PartNumber=len(self._parts) + 1, **copied)["CopyPartResult"])

    def finish(self, handle: Handle, timeout_s: float) -> None:
        try:
            self._ask(
                "complete_multipart_upload", ChecksumCRC32C=base64_of(handle.crc32c), ChecksumType="FULL_OBJECT",
                MultipartUpload={"Parts": self._parts}, **self._condition,
            )  # fmt: skip
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") == "NoSuchUpload":
                raise LostUpload from None
            raise

    def abort(self, timeout_s: float) -> None:
        self._ask("abort_multipart_upload")

    def _add(self, answer: dict[str, Any]) -> None:
        part: dict[str, Any] = {name: answer[name] for name in ("ETag", "ChecksumCRC32C") if name in answer}
        self._parts.append(part | {"PartNumber": len(self._parts) + 1})


def _condition(generation: int) -> dict[str, Any]:
    """Return the precondition that the file has this generation, or, for generation 0, that the file is absent."""
    return {"IfNoneMatch": "*"} if generation == 0 else {"IfMatch": etag_of(generation)}


def _body(data: bytes) -> dict[str, Any]:
    """Return the arguments of a request that uploads bytes with their checksum.

    On a bucket with object lock, S3 demands that a request names the algorithm.
    """
    crc32c = base64_of(google_crc32c.value(data))
    return {"Body": data, "ChecksumAlgorithm": "CRC32C", "ChecksumCRC32C": crc32c}


def _whole_crc32c(answer: dict[str, Any]) -> int | None:
    """Return the checksum of the whole file in an answer; None if the server reports none."""
    # The checksum of a multipart upload may be one of its parts' checksums (COMPOSITE). If a store does not report the
    # type of a checksum, a hyphen in the ETag shows that the file came from a multipart upload.
    whole = (
        answer.get("ChecksumType", "COMPOSITE" if "-" in answer.get("ETag", "-") else "FULL_OBJECT") == "FULL_OBJECT"
    )
    crc32c = answer.get("ChecksumCRC32C")
    # A checksum of the parts' checksums ends with a hyphen and the number of parts.
    return crc32c_of(crc32c) if whole and crc32c is not None and "-" not in crc32c else None
