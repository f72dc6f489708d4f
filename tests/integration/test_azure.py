"""What only Azure does: its two forms of URL, its logins, its errors, and folders of accounts with a hierarchical namespace."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from azure.core.exceptions import ClientAuthenticationError, HttpResponseError, ServiceRequestError
from azure.identity import ClientSecretCredential, DefaultAzureCredential

from state_backend.adapters import azure_storage
from state_backend.adapters.azure_storage import AzureCloud
from state_backend.adapters.object_store import ChecksumStore, failure_of, translate
from state_backend.adapters.open_storage import open_storage
from state_backend.values.errors import (
    AlreadyExists,
    CairnError,
    NotFound,
    PermissionRefused,
    PreconditionFailed,
    StorageUnavailable,
    UsageError,
)
from tests.support.azure_server import BUCKET, KEY, VARIABLE, azure_server
from tests.support.faulty_proxy import Answer, FaultyProxy, Request
from tests.support.storage_calls import LARGE, NEW, STEP_BYTES, handle_of

pytestmark = pytest.mark.azure


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyProxy]:
    with azure_server() as server:
        yield server


def fresh() -> ChecksumStore:
    return ChecksumStore(AzureCloud(BUCKET, f"own/{uuid4().hex}"))


def test_folders_of_a_hierarchical_namespace_are_no_files(server: FaultyProxy) -> None:
    storage = fresh()
    assert isinstance(storage.cloud, AzureCloud)
    storage.create("a/b", NEW)
    for path, metadata in (("a", {"hdi_isfolder": "true"}), ("c/", {})):
        storage.cloud._container().upload_blob(storage.cloud.root + path, b"", metadata=metadata)
    assert [file.path for file in storage.list("")] == ["a/b"]
    assert storage.folders("") == ("a", "c")


def test_upload_whose_blocks_azure_has_dropped_is_lost_or_comes_second(
    server: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Azure drops all other blocks of a name when somebody writes a file of this name. Azurite keeps the blocks."""
    monkeypatch.setattr(azure_storage, "PART_BYTES", STEP_BYTES)
    storage, forward = fresh(), server.forward
    (tmp_path / "file").write_bytes(LARGE)

    def without_blocks(request: Request) -> Answer:
        if "comp=blocklist" not in request.target:
            return forward(request)
        body = b"<?xml version='1.0'?><Error><Code>InvalidBlockList</Code><Message>gone</Message></Error>"
        return Answer(status=400, headers={"x-ms-error-code": "InvalidBlockList"}, body=body)

    with monkeypatch.context() as patch:
        patch.setattr(server, "forward", without_blocks)
        with pytest.raises(StorageUnavailable, match="lost the upload; try again"):
            storage.upload("a", tmp_path / "file")
        storage.create("b", NEW)
        with pytest.raises(AlreadyExists, match="the file exists already"):
            storage.upload("b", tmp_path / "file")
    assert storage.upload("a", tmp_path / "file") == handle_of("a", LARGE)


def test_failed_delete_in_a_batch_is_reported(server: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, forward = fresh(), server.forward
    for path in ("a", "b"):
        storage.create(path, NEW)

    def refused(request: Request) -> Answer:
        answer = forward(request)
        body = answer.body.replace(b"HTTP/1.1 202 Accepted", b"HTTP/1.1 403 Forbidden", 1)
        return Answer(status=answer.status, headers=answer.headers, body=body)

    def short(request: Request) -> Answer:
        answer = forward(request)
        first, mark, _ = answer.body.partition(b"Content-ID: 1")
        end = answer.body[answer.body.rindex(b"--batch") :]
        return Answer(
            status=answer.status,
            headers=answer.headers,
            body=first.rpartition(b"--batch")[0] + end if mark else answer.body,
        )

    with monkeypatch.context() as patch:
        patch.setattr(server, "forward", refused)
        with pytest.raises(PermissionRefused, match="Storage Blob Data Contributor"):
            storage.delete_many(["a", "b"])
    for path in ("a", "b"):
        storage.create(path, NEW)
    with monkeypatch.context() as patch:  # A part of the answer is missing; the next request deletes the rest.
        patch.setattr(server, "forward", short)
        assert storage.delete_many(["a", "b"]) == 1
    assert not [*storage.list("")]


def answer_of(status: int) -> Any:
    """What the SDK's errors need of an answer."""
    return SimpleNamespace(reason="", headers={}, content_type="", status_code=status, text=lambda: "")


@pytest.mark.parametrize(
    ("status", "code", "error", "says"),
    [
        (403, "AuthenticationFailed", UsageError, "the credentials are refused: renew them"),
        (403, "AuthorizationFailure", PermissionRefused, "Storage Blob Data Contributor"),
        (403, "AuthorizationPermissionMismatch", PermissionRefused, "wait some minutes"),
        (404, "ContainerNotFound", UsageError, "create it first"),
        (404, "BlobNotFound", NotFound, "does not exist"),
        (409, "BlobAlreadyExists", PreconditionFailed, "another process"),
        (412, "ConditionNotMet", PreconditionFailed, "another process"),
        (412, "TargetConditionNotMet", PreconditionFailed, "another process"),
        (412, "SourceConditionNotMet", StorageUnavailable, "HTTP 412 SourceConditionNotMet"),
        (403, "CannotVerifyCopySource", PermissionRefused, "Storage Blob Data Contributor"),
        (412, "LeaseIdMissing", StorageUnavailable, "HTTP 412 LeaseIdMissing; check the network"),
        (503, "ServerBusy", StorageUnavailable, "HTTP 503 ServerBusy for 180 s; check the network"),
    ],
)
def test_each_refusal_has_an_error_with_its_next_step(
    server: FaultyProxy, status: int, code: str, error: type[CairnError], says: str
) -> None:
    answer: Any = HttpResponseError(message="secret", response=answer_of(status))
    answer.error_code = code
    storage = fresh()
    made = translate(storage.cloud, "read 'a'", failure_of(storage.cloud, answer), None)
    assert isinstance(made, error) and says in str(made) and "secret" not in str(made)


def test_sdk_errors_are_classified_by_whether_the_request_may_have_had_an_effect(server: FaultyProxy) -> None:
    cloud = fresh().cloud
    made = failure_of(cloud, ClientAuthenticationError("no login"))
    assert made.refused is not None and "AZURE_STORAGE_ACCOUNT" in made.refused[1] and not made.may_have_effect
    assert failure_of(cloud, HttpResponseError(response=answer_of(202))).may_have_effect
    assert failure_of(cloud, ServiceRequestError("lost")).may_have_effect
    assert failure_of(cloud, KeyError()).kind == "unknown"


def test_login_selects_the_credential(server: FaultyProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url = "abfss://box@acc.dfs.core.windows.net/state"

    def credential(url: str, **login: str) -> Any:
        file = tmp_path / uuid4().hex
        file.write_text(json.dumps(login))
        storage: Any = open_storage(url, credentials={"CAIRN_AZURE_LOGIN": str(file)})
        file.unlink()  # The login is read while the file exists.
        assert storage.url == url
        client = storage.cloud._container()
        assert client.url.startswith("https://acc.blob.core.windows.net/box")
        return client.credential or client.url

    assert credential(url, AZURE_STORAGE_KEY=KEY).account_key == KEY
    assert credential("az://box", AZURE_STORAGE_ACCOUNT="acc", AZURE_STORAGE_KEY=KEY).account_name == "acc"
    assert credential(url, AZURE_STORAGE_SAS_TOKEN="sv=1&sig=s").endswith("box?sv=1&sig=s")
    service = {"AZURE_TENANT_ID": "t", "AZURE_CLIENT_ID": "c", "AZURE_CLIENT_SECRET": "s"}
    assert isinstance(credential(url, **service), ClientSecretCredential)
    assert isinstance(credential(url), DefaultAzureCredential)
    with pytest.raises(UsageError, match="CAIRN_AZURE_LOGIN names no JSON file"):
        open_storage(url, credentials={"CAIRN_AZURE_LOGIN": str(tmp_path / "absent")})
    for wrong in ("az://box@acc/state", "abfss://box/state"):
        with pytest.raises(UsageError, match="not a container"):
            open_storage(wrong)
    with monkeypatch.context() as patch:
        patch.delenv(VARIABLE)
        with pytest.raises(UsageError, match="az://box names no account; expected a login"):
            open_storage("az://box").read("a")
        patch.setenv(VARIABLE, f"AccountKey={KEY}")
        with pytest.raises(UsageError, match="AZURE_STORAGE_CONNECTION_STRING is not usable") as raised:
            open_storage("az://box").read("a")
        assert KEY not in str(raised.value)
    assert os.environ[VARIABLE]
