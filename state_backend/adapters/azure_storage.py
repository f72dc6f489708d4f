"""Storage on Azure Blob Storage: `az://container/prefix`, or `abfss://container@account.dfs.core.windows.net/prefix`.

Both forms go through the account's Blob endpoint. A file's generation is its ETag. Azure computes no crc32c. So a
write puts the checksum of its bytes into the file's metadata, and Azure compares an MD5 of each request with the bytes
that arrive. If the answer to a write is lost, the uuid in the metadata shows whether the file is from this write. The
server's copy of a file gets the checksum of the source, whose ETag the server compares.

Accounts with a hierarchical namespace store folders as files, which listings leave out.
"""

from __future__ import annotations

import json
import logging
import os
from base64 import b64encode
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import requests
from azure.core import MatchConditions
from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError, ServiceRequestError
from azure.core.pipeline.transport import RequestsTransport
from azure.identity import ClientSecretCredential, DefaultAzureCredential
from azure.storage.blob import BlobBlock, BlobClient, BlobPrefix, BlobSasPermissions, ContainerClient, generate_blob_sas
from requests.adapters import HTTPAdapter

from state_backend.adapters.local_storage import CHUNK_BYTES
from state_backend.adapters.object_store import (
    Answer,
    ChecksumStore,
    Cloud,
    Failure,
    Found,
    Interrupted,
    LostUpload,
    Page,
    Patience,
    Refusal,
    Write,
    clients_of,
    etag_of,
    generation_of,
    info_of,
    never_connected,
    send,
)
from state_backend.values.environment import Variable
from state_backend.values.errors import PermissionRefused, UsageError
from state_backend.values.handles import FileInfo, Handle

PART_BYTES = 16 * CHUNK_BYTES
"""Bytes of one block of an upload, which stay in memory until the server confirms them."""

SERVER_COPIES_BYTES = 256 << 20
"""The largest file that the server copies with one request."""

_WRITE, _CRC32C = "cairn_write", "cairn_crc32c"  # Names in metadata can't have hyphens.
_LOGIN = (
    "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE",
)  # fmt: skip
_EXPECTED = (
    "expected a login: set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT with AZURE_STORAGE_KEY or "
    "AZURE_STORAGE_SAS_TOKEN, or give this host or pod a managed identity"
)
# The SDK logs each request at level INFO.
logging.getLogger("azure").setLevel(logging.WARNING)


def open_url(url: str, *, credentials: Mapping[str, str] | None = None) -> ChecksumStore:
    scheme, _, rest = url.rstrip("/").partition("://")
    container, _, prefix = rest.partition("/")
    name, _, host = container.partition("@")
    if (scheme == "abfss") != bool(host):
        raise UsageError(
            f"not a container: {container!r}; expected az://container/prefix or "
            "abfss://container@account.dfs.core.windows.net/prefix"
        )
    return ChecksumStore(AzureCloud(name, prefix, host=host, credentials=credentials))


class AzureCloud(Cloud):
    """Requests to a container. `host`: the host in an `abfss` URL; empty: the host of the login's account."""

    scheme = "az"
    batch = 256

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        host: str = "",
        credentials: Mapping[str, str] | None = None,
        patience: Patience | None = None,
    ) -> None:
        super().__init__(bucket, prefix, patience=patience)
        if host:
            self.url = f"abfss://{bucket}@{host}/{prefix}".rstrip("/")
        file = (credentials or {}).get(Variable.AZURE_LOGIN) or Variable.AZURE_LOGIN.given
        try:
            login = (
                json.loads(Path(file).read_text()) if file else {n: os.environ[n] for n in _LOGIN if n in os.environ}
            )
        except (OSError, ValueError):
            raise UsageError(f"can't log in to Azure: {Variable.AZURE_LOGIN} names no JSON file: {file}") from None
        key = ("azure", bucket, host, self.patience, *login.items())
        self._clients = clients_of(key, (), partial(_open, bucket, host, login, self.patience))

    def _container(self) -> ContainerClient:
        client: ContainerClient = self._clients.of_this_process()
        return client

    def _blob(self, path: str) -> BlobClient:
        return self._container().get_blob_client(self.name(path))

    def head(self, path: str, timeout_s: float) -> Found:
        properties = self._blob(path).get_blob_properties()
        return Found(self._info(properties), _crc32c(properties), properties.metadata.get(_WRITE))

    def get(self, path: str, at: int, generation: int | None, timeout_s: float) -> Answer:
        body = self._blob(path).download_blob(
            offset=at or None, **({} if generation is None else _condition(generation))
        )
        told = body.properties
        return Answer(told.size, generation_of(told.etag), _crc32c(told), lambda size, _: body.read(size), lambda: None)

    def page(self, start: str, token: str | None, timeout_s: float, *, delimiter: str = "", limit: int = 0) -> Page:
        asked: dict[str, Any] = {"name_starts_with": start, "include": ["metadata"], "results_per_page": limit or None}
        container = self._container()
        listed = container.walk_blobs(delimiter=delimiter, **asked) if delimiter else container.list_blobs(**asked)
        pages: Any = listed.by_page(continuation_token=token)
        found = list(next(pages, ()))
        files = [
            self._info(one)
            for one in found
            if not isinstance(one, BlobPrefix)
            and not one.name.endswith("/")
            and (one.metadata or {}).get("hdi_isfolder") != "true"
        ]
        return Page(files, [one.name for one in found if isinstance(one, BlobPrefix)], pages.continuation_token or None)

    def put(self, handle: Handle, data: bytes, nonce: str, generation: int, timeout_s: float) -> None:
        self._blob(handle.path).upload_blob(
            data, length=len(data), metadata=_metadata(nonce, handle), validate_content=True, overwrite=True,
            **_condition(generation),
        )  # fmt: skip

    def begin(self, path: str, nonce: str, generation: int, timeout_s: float) -> _Blocks:
        return _Blocks(self, path, nonce, generation)

    def copy(self, source: AzureCloud, found: Found, handle: Handle, write: Write, doing: str) -> None:
        send(self, doing, self._copy_once, source, found, handle, write, write=write)

    def _copy_once(self, source: AzureCloud, found: Found, handle: Handle, write: Write, timeout_s: float) -> None:
        original, given = source._blob(found.info.path), dict[str, Any]()
        url, credential = original.url, original.credential
        if hasattr(credential, "account_key"):
            until = datetime.now(UTC) + timedelta(hours=1)
            url += "?" + generate_blob_sas(
                str(original.account_name), original.container_name, original.blob_name, expiry=until,
                account_key=credential.account_key, permission=BlobSasPermissions(read=True),
            )  # fmt: skip
        elif hasattr(credential, "get_token"):
            token = credential.get_token("https://storage.azure.com/.default").token
            given["source_authorization"] = f"Bearer {token}"
        self._blob(handle.path).start_copy_from_url(
            url, requires_sync=True, metadata=_metadata(write.nonce, handle), match_condition=MatchConditions.IfMissing,
            source_etag=etag_of(found.info.generation), source_match_condition=MatchConditions.IfNotModified, **given,
        )  # fmt: skip

    def remove(self, path: str, generation: int, timeout_s: float) -> None:
        self._blob(path).delete_blob(**_condition(generation))

    def remove_many(self, waiting: set[str], gone: set[str], timeout_s: float) -> None:
        paths = sorted(waiting)
        answers = self._container().delete_blobs(*map(self.name, paths), raise_on_any_failure=False)
        failed = None
        for path, answer in zip(paths, answers, strict=False):
            missing = answer.headers.get("x-ms-error-code") == "ContainerNotFound"
            if answer.status_code not in (200, 202, 404) or missing:
                failed = failed or HttpResponseError(response=answer)
                continue
            gone |= {path} if answer.status_code != 404 else set()
            waiting.discard(path)
        if failed is not None or waiting:
            raise failed or Interrupted("the server answered only a part of the batch")

    def copies_from(self, source: AzureCloud, handle: Handle) -> bool:
        return source.url.split("/")[2] == self.url.split("/")[2] and 0 < handle.size_bytes <= SERVER_COPIES_BYTES

    def part_bytes(self, number: int) -> int:
        return PART_BYTES

    def failure(self, error: Exception) -> Failure | None:
        # If the SDK can't parse an error of the server or a proxy, it raises another error while it handles this one.
        found: BaseException | None = error
        while found is not None and not isinstance(found, AzureError):
            found = found.__context__
        if found is None:
            return None
        error = found
        status = error.status_code if isinstance(error, HttpResponseError) else None
        code = _code(error)
        if not isinstance(error, HttpResponseError):
            sent = not (isinstance(error, ServiceRequestError) and never_connected(error.inner_exception))
            return Failure(said=type(error).__name__, repeat="yes", may_have_effect=sent)
        kind: Any = "other"
        if code == "ContainerNotFound":
            kind = "no bucket"
        elif status == 404:  # The SDK's class is no help: it also means an unreadable source of a copy.
            kind = "absent"
        elif code in ("BlobAlreadyExists", "ConditionNotMet", "TargetConditionNotMet"):
            kind = "precondition"
        refused: Refusal | None = None
        if status is None and isinstance(error, ClientAuthenticationError):
            refused = UsageError, _EXPECTED
        elif status == 401 or code in ("AuthenticationFailed", "InvalidAuthenticationInfo"):
            refused = UsageError, "the credentials are refused: renew them, and check this host's clock"
        elif status == 403:
            advice = f"give this identity the role Storage Blob Data Contributor on the container {self.bucket!r}"
            refused = PermissionRefused, f"{advice}, wait some minutes, then try again"
        transient = status in (None, 408, 429, 500, 502, 503, 504) and refused is None
        return Failure(
            said=f"HTTP {status} {code}".rstrip() if status is not None else type(error).__name__,
            kind=kind,
            repeat="yes" if transient else "for permission" if code == "AuthorizationPermissionMismatch" else "no",
            may_have_effect=refused is None and (status is None or status < 400 or status >= 500 or status == 408),
            refused=refused,
        )

    def _info(self, properties: Any) -> FileInfo:
        path = properties.name.removeprefix(self.root)
        return info_of(path, properties.size, properties.etag, properties.last_modified)


class _Blocks:
    """An upload of a file in blocks. If `finish` is never called, Azure deletes the blocks after a week."""

    def __init__(self, cloud: AzureCloud, path: str, nonce: str, generation: int) -> None:
        self._cloud, self._path, self._nonce, self._generation = cloud, path, nonce, generation
        self._blocks: list[BlobBlock] = []

    def send(self, data: bytes, last: bool, timeout_s: float) -> None:
        """Send the next block. Azure demands that the ids of all blocks of a file have the same length."""
        block = b64encode(f"{self._nonce}{len(self._blocks):06}".encode()).decode()
        self._cloud._blob(self._path).stage_block(block, data, length=len(data), validate_content=True)
        self._blocks.append(BlobBlock(block))

    def finish(self, handle: Handle, timeout_s: float) -> None:
        """Make a file of the blocks. Raise `LostUpload` if another write of the file has discarded the blocks."""
        try:
            self._cloud._blob(self._path).commit_block_list(
                self._blocks, metadata=_metadata(self._nonce, handle), **_condition(self._generation)
            )
        except HttpResponseError as error:
            if _code(error) == "InvalidBlockList":
                raise LostUpload from None
            raise

    def abort(self, timeout_s: float) -> None:
        """Do nothing: readers don't see the blocks, and Azure deletes them after a week."""


def _open(bucket: str, host: str, login: Mapping[str, str], patience: Patience) -> ContainerClient:
    # The SDK must not repeat requests, because `send` does.
    calm = {"retry_total": 0, "connection_timeout": patience.connect_s, "read_timeout": patience.request_s}
    session = requests.Session()
    for scheme in ("https:", "http:"):
        session.mount(f"{scheme}//", HTTPAdapter(pool_maxsize=32))
    given: dict[str, Any] = {
        **calm, "transport": RequestsTransport(session=session, session_owner=False, **calm), "max_single_get_size": 4 * CHUNK_BYTES, "max_chunk_get_size": 4 * CHUNK_BYTES,
        "max_single_put_size": 2 * PART_BYTES, "user_agent": "cairn",
    }  # fmt: skip
    text, account, *secrets, client, tenant, secret, _ = map(login.get, _LOGIN)
    try:
        if text and not host:
            return ContainerClient.from_connection_string(text, bucket, **given)
        if not host and not account:
            raise UsageError(f"az://{bucket} names no account; {_EXPECTED}")
        endpoint = f"https://{host.replace('.dfs.', '.blob.', 1) or f'{account}.blob.core.windows.net'}"
        credential: Any = next(filter(None, secrets), None)
        if credential is None and tenant and client and secret:
            credential = ClientSecretCredential(tenant, client, secret, **calm)
        elif credential is None:
            credential = DefaultAzureCredential(managed_identity_client_id=client)
        return ContainerClient(endpoint, bucket, credential, **given)
    except ValueError:  # The connection string may hold a key, so no message shows it.
        raise UsageError(f"can't log in to Azure: AZURE_STORAGE_CONNECTION_STRING is not usable; {_EXPECTED}") from None


def _condition(generation: int) -> dict[str, Any]:
    """Return the precondition that the file has this generation, or, for generation 0, that the file is absent."""
    if generation == 0:
        return {"match_condition": MatchConditions.IfMissing}
    return {"etag": etag_of(generation), "match_condition": MatchConditions.IfNotModified}


def _metadata(nonce: str, handle: Handle) -> dict[str, str]:
    return {_WRITE: nonce, _CRC32C: f"{handle.crc32c:08x}"}


def _code(error: Exception) -> str:
    """Return Azure's error code. In the answer to a batch, only a header has the code."""
    code = getattr(error, "error_code", None)
    if code is None and getattr(error, "response", None) is not None:
        code = error.response.headers.get("x-ms-error-code")  # type: ignore[attr-defined]
    return str(getattr(code, "value", code or ""))


def _crc32c(properties: Any) -> int | None:
    text = (properties.metadata or {}).get(_CRC32C)
    return None if text is None else int(text, 16)
