"""Storage on Google Cloud Storage: `gs://bucket/prefix`, or a server that STORAGE_EMULATOR_HOST names.

A file's generation is Google's own. A large file is sent through an upload session, which continues after a failure.
"""

from __future__ import annotations

import functools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from email import message_from_bytes
from http.client import HTTPException
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import google.auth
import requests
import urllib3
from google.api_core.client_info import ClientInfo
from google.api_core.exceptions import GoogleAPICallError, from_http_response, from_http_status
from google.auth.credentials import AnonymousCredentials, Credentials, with_scopes_if_required
from google.auth.exceptions import GoogleAuthError, TransportError
from google.auth.transport.requests import AuthorizedSession
from google.cloud.storage import Blob, Bucket, Client
from google.oauth2 import credentials as oauth2
from google.oauth2 import service_account
from requests.adapters import HTTPAdapter

from state_backend.adapters.local_storage import CHUNK_BYTES
from state_backend.adapters.object_store import (
    WRITE_KEY,
    Answer,
    Clients,
    Cloud,
    Failure,
    Found,
    Interrupted,
    LostUpload,
    ObjectStore,
    Page,
    Patience,
    Refusal,
    Write,
    base64_of,
    clients_of,
    crc32c_of,
    never_connected,
    send,
)
from state_backend.values.errors import PermissionRefused, StorageUnavailable, UsageError
from state_backend.values.handles import FileInfo, Handle

STEP_BYTES = 8 * CHUNK_BYTES
"""Bytes of an upload session that one request sends, a multiple of 256 KiB as the server demands.

They stay in memory until the server confirms them."""

_OVERLOAD = ("rateLimitExceeded", "userRateLimitExceeded", "quotaExceeded")
_TRANSIENT = (408, 429, 500, 502, 503, 504)
_LOST = (requests.RequestException, urllib3.exceptions.HTTPError, HTTPException, ConnectionError, TimeoutError)
_RENEW = "the credentials are refused: renew them, or set GOOGLE_APPLICATION_CREDENTIALS to another key file"
_FOLDERS = "prefixes,nextPageToken"
_LISTED = "items(name,size,generation,timeCreated,crc32c),nextPageToken"


EMULATOR_VARIABLE = "STORAGE_EMULATOR_HOST"
SCOPES = ["https://www.googleapis.com/auth/devstorage.read_write"]


class Session(AuthorizedSession):  # type: ignore[misc]
    """HTTP session that reads a whole answer within the timeout of its request.

    The timeout of the requests library begins again with every byte that arrives.
    """

    def send(
        self, request: requests.PreparedRequest, *, timeout: float, stream: bool = False, **options: Any
    ) -> requests.Response:
        until = time.monotonic() + timeout
        response: requests.Response = super().send(request, timeout=timeout, stream=True, **options)
        if not stream or response.status_code >= 400:
            body = BytesIO()
            with response:
                while data := receive(response, CHUNK_BYTES, until, decode=True):
                    body.write(data)
            body.seek(0)
            response.raw = body
        return response


def receive(response: requests.Response, at_most: int, until_s: float, *, decode: bool) -> bytes:
    data: bytes = response.raw.read1(at_most, decode_content=decode)
    if time.monotonic() > until_s:
        raise requests.ReadTimeout("the server answers too slowly")
    return data


def open_client(emulator: str | None, credentials: Credentials | None) -> Client:
    """Return a client. Threads may share the client's session, as they do in Google's own transfer manager.

    If `credentials` is None, the client uses the default credentials; with an `emulator`, a test server's URL, none.
    """
    session = Session(credentials or _identity(emulator))
    session.mount("https://", adapter := HTTPAdapter(pool_maxsize=32))
    session.mount("http://", adapter)
    return Client(
        project=None,
        credentials=session.credentials,
        _http=session,
        client_info=ClientInfo(user_agent="cairn"),
        client_options={"api_endpoint": emulator} if emulator else None,
    )


def _identity(emulator: str | None) -> Credentials:
    if emulator:
        return AnonymousCredentials()
    try:
        return google.auth.default(scopes=SCOPES)[0]
    except GoogleAuthError as error:
        problem = type(error).__name__
    raise UsageError(
        f"can't log in to Google Cloud Storage ({problem}): expected application default credentials\n"
        "Set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run: gcloud auth application-default login\n"
        f"For a test server set {EMULATOR_VARIABLE}"
    )


_KEYS: dict[str, Callable[..., Credentials]] = {
    "service_account": service_account.Credentials.from_service_account_info,
    "authorized_user": oauth2.Credentials.from_authorized_user_info,
}


def credentials_in(key_file: str) -> Credentials:
    try:
        key = json.loads(Path(key_file).read_bytes())
        return _KEYS[key["type"]](key, scopes=SCOPES)
    except (OSError, ValueError, KeyError, TypeError, GoogleAuthError) as error:
        raise UsageError(
            f"can't log in to Google Cloud Storage: the key file is not usable ({type(error).__name__})\n"
            f"Expected the JSON of a key of type {' or '.join(_KEYS)}"
        ) from None


def open_url(url: str, *, credentials: Mapping[str, str] | None = None) -> ObjectStore:
    """Open `gs://bucket/prefix` with the key in a file, or with application default credentials."""
    key_file = (credentials or {}).get("GOOGLE_APPLICATION_CREDENTIALS")
    return ObjectStore(GcsCloud.at(url, credentials=credentials_in(key_file) if key_file else None))


class GcsCloud(Cloud):
    scheme = "gs"
    batch = 100

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        credentials: Credentials | None = None,
        project: str | None = None,
        patience: Patience | None = None,
    ) -> None:
        super().__init__(bucket, prefix, patience=patience)
        self._project = project
        emulator = os.environ.get(EMULATOR_VARIABLE) or None
        if emulator and "://" not in emulator:
            emulator = f"http://{emulator}"
        given = None if credentials is None else with_scopes_if_required(credentials, SCOPES)
        opens = functools.partial(open_client, emulator, given)
        variables = ("GOOGLE_APPLICATION_CREDENTIALS",)
        self._clients = clients_of(("gcs", emulator), variables, opens) if given is None else Clients(opens)

    def _client(self) -> Client:
        client: Client = self._clients.of_this_process()
        return client

    def head(self, path: str, timeout_s: float) -> Found:
        blob = self._blob(path)
        blob.reload(timeout=timeout_s, retry=None)
        return self._found(blob)

    def get(self, path: str, at: int, generation: int | None, timeout_s: float) -> Answer:
        name = quote(self.name(path), safe="")
        parameters = {"alt": "media"} | ({"generation": str(generation)} if generation is not None else {})
        if self._project is not None:
            parameters["userProject"] = self._project
        response: requests.Response = self._client()._http.get(
            f"{self._client().api_endpoint}/download/storage/v1/b/{self.bucket}/o/{name}",
            params=parameters,
            headers={"Accept-Encoding": "identity"} | ({"Range": f"bytes={at}-"} if at else {}),
            stream=True,
            timeout=timeout_s,
        )
        if response.status_code >= 400:
            raise from_http_response(response)
        if response.status_code != (206 if at else 200):
            response.close()
            raise StorageUnavailable("the server can't continue the interrupted download; try again")
        told = response.headers
        length = told.get("Content-Length", None if at else told.get("x-goog-stored-content-length"))
        hashes = dict(h.strip().split("=", 1) for h in told.get("x-goog-hash", "").split(",") if h)
        stored = told.get("x-goog-generation")
        return Answer(
            None if length is None else int(length),
            None if stored is None else int(stored),
            crc32c_of(hashes.get("crc32c")),
            functools.partial(receive, response, decode=False),
            response.close,  # The connection is used again if nothing was left to read.
        )

    def page(self, start: str, token: str | None, timeout_s: float, *, delimiter: str = "", limit: int = 0) -> Page:
        found = self._client().list_blobs(
            self._bucket_of(), prefix=start, delimiter=delimiter or None, page_token=token,
            fields=_FOLDERS if delimiter else _LISTED, page_size=limit or None, timeout=timeout_s, retry=None,
        )  # fmt: skip
        blobs = tuple(next(found.pages, ()))
        files = [self._found(blob).info for blob in blobs if not blob.name.endswith("/")]
        return Page(files, found.prefixes, found.next_page_token)

    def put(self, handle: Handle, data: bytes, nonce: str, generation: int, timeout_s: float) -> Found:
        blob = self._blob(handle.path, nonce)
        blob.upload_from_string(
            data, content_type="application/octet-stream", if_generation_match=generation, checksum="crc32c",
            timeout=timeout_s, retry=None,
        )  # fmt: skip
        return self._found(blob)

    def begin(self, path: str, nonce: str, generation: int, timeout_s: float) -> _Session:
        url: str = self._blob(path, nonce).create_resumable_upload_session(
            content_type="application/octet-stream", if_generation_match=generation, checksum=None,
            timeout=timeout_s, retry=None,
        )  # fmt: skip
        return _Session(self, url)

    def copy(self, source: GcsCloud, found: Found, handle: Handle, write: Write, doing: str) -> Found:
        token: str | None = None

        def rewrite(timeout_s: float) -> Blob:
            # The request names the source's generation: if the source was rewritten, the server answers 404. So a
            # failed precondition (412) can only concern the destination.
            nonlocal token
            pinned = source._blob(found.info.path, generation=found.info.generation)
            copy = self._blob(handle.path, write.nonce)
            token = copy.rewrite(pinned, token=token, if_generation_match=0, timeout=timeout_s, retry=None)[0]
            return copy

        copy = send(self, doing, rewrite, write=write)
        while token is not None:
            copy = send(self, doing, rewrite, write=write)
        return self._found(copy)

    def remove(self, path: str, generation: int, timeout_s: float) -> None:
        self._blob(path).delete(if_generation_match=generation, timeout=timeout_s, retry=None)

    def remove_many(self, waiting: set[str], gone: set[str], timeout_s: float) -> None:
        """Send one batch request that deletes files.

        Source: https://cloud.google.com/storage/docs/batch
        """
        every, boundary = sorted(waiting), uuid4().hex
        payer = "" if self._project is None else f"?userProject={quote(self._project, safe='')}"
        parts = [
            f"--{boundary}\r\nContent-Type: application/http\r\nContent-ID: <{n}>\r\n\r\n"
            f"DELETE /storage/v1/b/{self.bucket}/o/{quote(self.name(path), safe='')}{payer} HTTP/1.1\r\n\r\n\r\n"
            for n, path in enumerate(every)
        ]
        response = self._client()._http.post(
            f"{self._client().api_endpoint}/batch/storage/v1", data="".join([*parts, f"--{boundary}--\r\n"]).encode(),
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
            raise failure or Interrupted("the server answered only a part of the batch")

    def copies_from(self, source: GcsCloud, handle: Handle) -> bool:
        return source._clients is self._clients

    def part_bytes(self, number: int) -> int:
        return STEP_BYTES

    def is_generation(self, generation: int) -> bool:
        return generation > 0

    def failure(self, error: Exception) -> Failure | None:
        if isinstance(error, GoogleAPICallError):
            return self._refusal(error)
        refused: Refusal | None = None
        if isinstance(error, GoogleAuthError):
            may_have_effect = False
            if not isinstance(error, TransportError) and not error.retryable:
                refused = UsageError, _RENEW
        elif isinstance(error, _LOST):
            may_have_effect = not (isinstance(error, requests.ConnectionError) and never_connected(error))
        else:
            return None
        repeat: Any = "yes" if refused is None else "no"
        return Failure(said=type(error).__name__, repeat=repeat, may_have_effect=may_have_effect, refused=refused)

    def _refusal(self, error: GoogleAPICallError) -> Failure:
        status, told = error.code, [e for e in error.errors if isinstance(e, dict)]
        refused: Refusal | None = None
        # Some 403 answers mean an overload, and not a lack of permission.
        if status == 403 and not any(e.get("reason") in _OVERLOAD for e in told):
            advice = f"give this identity the role Storage Object User on the bucket {self.bucket!r}"
            refused = PermissionRefused, f"{advice}, wait some minutes, then try again"
        elif status == 401:
            refused = UsageError, _RENEW
        repeat: Any = "for permission" if refused else "yes"
        message = next((f": {e['message']}" for e in told if e.get("message")), "")
        return Failure(
            said=f"HTTP {status}{message}",
            kind="absent" if status in (404, 410) else "precondition" if status == 412 else "other",
            repeat=repeat if status == 403 or status in _TRANSIENT else "no",
            may_have_effect=status is None or status >= 500 or status == 408,
            refused=refused,
        )

    def _bucket_of(self) -> Bucket:
        return self._client().bucket(self.bucket, user_project=self._project)

    def _blob(self, path: str, nonce: str | None = None, generation: int | None = None) -> Blob:
        blob = self._bucket_of().blob(self.name(path), generation=generation)
        if nonce is not None:
            blob.metadata = {WRITE_KEY: nonce}
        return blob

    def _found(self, blob: Blob) -> Found:
        info = FileInfo(
            path=blob.name.removeprefix(self.root),
            size_bytes=blob.size or 0,  # Some servers leave out a size of 0.
            generation=blob.generation,
            modified_ms=int(blob.time_created.timestamp() * 1000),
            crc32c=crc32c_of(blob.crc32c),
        )
        return Found(info, info.crc32c, (blob.metadata or {}).get(WRITE_KEY))


class _Session:
    """An upload session. To repeat a request, first ask the server how many bytes it has, and send only the rest.

    Source: https://cloud.google.com/storage/docs/performing-resumable-uploads
    """

    def __init__(self, cloud: GcsCloud, url: str) -> None:
        self._cloud, self._url = cloud, url
        self._at = 0  # offset in the file of `_data`
        self._data = b""  # the piece that is being sent
        self._tried = False  # True: a request has sent the piece, and may have had effect

    def send(self, data: bytes, last: bool, timeout_s: float) -> None:
        """Send a piece. The last one waits for `finish`, since its request makes the file visible."""
        self._data = data
        if not last:
            self._push("*", {}, timeout_s)
            self._at, self._tried = self._at + len(data), False

    def finish(self, handle: Handle, timeout_s: float) -> Found:
        made = self._push(str(handle.size_bytes), {"x-goog-hash": f"crc32c={base64_of(handle.crc32c)}"}, timeout_s)
        if made is None:
            raise Interrupted("the server stored only a part of the bytes")
        info = FileInfo(
            path=handle.path,
            size_bytes=int(made.get("size", 0)),
            generation=int(made["generation"]),
            modified_ms=0,
            crc32c=crc32c_of(made.get("crc32c")),
        )
        return Found(info, info.crc32c)

    def abort(self, timeout_s: float) -> None:
        """Do nothing: the server deletes a session that is never completed."""

    def _push(self, total: str, headers: dict[str, str], timeout_s: float) -> dict[str, Any] | None:
        """Send the bytes that the server lacks. Return the stored file's metadata; None if the file is not complete."""
        end, has = self._at + len(self._data), self._at
        if self._tried:
            made, has = self._ask(b"", f"bytes */{total}", headers, timeout_s)
            if made is not None:
                return made
        self._tried = True
        if not self._at <= has <= end:
            raise LostUpload  # The server has lost bytes that it had stored.
        made = None
        if has < end:
            made, has = self._ask(self._data[has - self._at :], f"bytes {has}-{end - 1}/{total}", headers, timeout_s)
        if made is None and has != end:
            raise Interrupted("the server stored only a part of the bytes")
        return made

    def _ask(
        self, body: bytes, content_range: str, headers: dict[str, str], timeout_s: float
    ) -> tuple[dict[str, Any] | None, int]:
        """Send bytes. Return (the stored file's metadata or None if bytes are missing, bytes that the server has)."""
        response = self._cloud._client()._http.put(
            self._url, data=body, headers={**headers, "Content-Range": content_range}, timeout=timeout_s,
            allow_redirects=False,
        )  # fmt: skip
        if response.status_code in (200, 201):
            made: dict[str, Any] = response.json()
            return made, self._at + len(self._data)
        if response.status_code in (404, 410):
            raise LostUpload
        if response.status_code != 308:
            raise from_http_response(response)
        return None, int(response.headers.get("Range", "bytes=0--1").rpartition("0-")[2]) + 1


def _answers_of(batch: requests.Response) -> Iterator[tuple[int, int, str]]:
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
