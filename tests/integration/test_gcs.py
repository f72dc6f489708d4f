"""What only Google Cloud Storage does: uploads in steps, downloads of one generation, logins, and folders of its console."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterator
from dataclasses import replace as changed
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit
from urllib.request import Request as UrlRequest
from urllib.request import urlopen
from uuid import uuid4

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.api_core.exceptions import from_http_status
from google.auth.credentials import AnonymousCredentials

from state_backend.adapters import gcs_storage
from state_backend.adapters.gcs_storage import EMULATOR_VARIABLE, GcsCloud
from state_backend.adapters.object_store import ObjectStore, Patience, failure_of
from state_backend.values.errors import (
    AlreadyExists,
    CairnError,
    StorageUnavailable,
    UnknownOutcome,
    UsageError,
)
from tests.support.faulty_proxy import FaultKind, Request
from tests.support.gcs_server import BUCKET, GcsServer, gcs_server
from tests.support.storage_calls import LARGE, NEW, STEP_BYTES, handle_of

pytestmark = pytest.mark.gcs

HURRY = Patience(deadline_s=1.2, request_s=0.2, first_delay_s=0.01, longest_delay_s=0.05)
FAULTS: tuple[FaultKind, ...] = tuple(kind for kind in get_args(FaultKind) if kind not in ("401", "403"))


@pytest.fixture(scope="module")
def server() -> Iterator[GcsServer]:
    with gcs_server() as server:
        yield server


@pytest.fixture
def small_steps(server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_storage, "STEP_BYTES", STEP_BYTES)


@pytest.fixture
def storage(small_steps: None) -> ObjectStore:
    return in_a_hurry(deadline_s=1.2)


def in_a_hurry(*, deadline_s: float) -> ObjectStore:
    """In a folder of its own."""
    patience = changed(HURRY, deadline_s=deadline_s)
    return ObjectStore(GcsCloud(BUCKET, f"faults/{uuid4().hex}", patience=patience))


def folder_of(storage: ObjectStore) -> str:
    return storage.url.removeprefix(f"gs://{BUCKET}/")


def calm(storage: ObjectStore) -> ObjectStore:
    """The same folder, without hurry."""
    return ObjectStore(GcsCloud(BUCKET, folder_of(storage)))


def test_of_many_deletes_only_those_that_failed_are_sent_again(
    storage: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers in any order."""
    storage = calm(storage)
    asked: list[int] = []

    def answers(response: Any) -> Any:
        parts = [*answers_of(response)]
        asked.append(len(parts))
        return [(parts[0][0], 503, ""), *parts[:0:-1]] if len(asked) == 1 else parts

    answers_of = gcs_storage._answers_of
    monkeypatch.setattr(gcs_storage, "_answers_of", answers)
    paths = [f"many/{n:03d}" for n in range(GcsCloud.batch + 2)]
    for path in paths[-4:]:
        storage.create(path, b"")
    assert storage.delete_many(paths) == 4 and asked == [GcsCloud.batch, 1, 2]
    assert not [*storage.list("many/")]


def test_an_upload_resumes_after_the_bytes_that_the_server_accepted(
    storage: ObjectStore, server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs_storage, "STEP_BYTES", 4 * STEP_BYTES)
    data = os.urandom(9 * STEP_BYTES)
    (tmp_path / "file").write_bytes(data)
    monkeypatch.setattr(server, "takes_at_most", STEP_BYTES)
    assert storage.upload("a", tmp_path / "file") == handle_of("a", data)
    assert storage.read("a") == data


def test_an_upload_whose_session_is_gone_can_be_begun_again(
    storage: ObjectStore, server: GcsServer, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(LARGE)

    def forgotten(r: Request) -> bool:
        if r.headers.get("content-range", "").startswith(f"bytes {STEP_BYTES}-"):
            server.forget_sessions()
        return False

    with server.broken("500", only=forgotten), pytest.raises(StorageUnavailable, match="lost the upload"):
        storage.upload("a", tmp_path / "file")
    assert storage.stat("a") is None
    assert storage.upload("a", tmp_path / "file") == handle_of("a", LARGE)


def test_a_resumable_upload_loses_to_an_earlier_create(storage: ObjectStore, server: GcsServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(LARGE)

    def overtaken(r: Request) -> bool:
        if r.headers.get("content-range", "").endswith(f"/{len(LARGE)}") and storage.stat("a") is None:
            storage.create("a", NEW)
        return False

    with server.broken("500", only=overtaken), pytest.raises(AlreadyExists):
        storage.upload("a", tmp_path / "file")
    assert storage.read("a") == NEW


def test_a_download_goes_on_where_the_connection_broke(storage: ObjectStore, server: GcsServer, tmp_path: Path) -> None:
    data = os.urandom(5_000_000)
    handle = calm(storage).create("a", data)
    before = len(server.requests)
    with server.broken("truncated", times=3):
        storage.download(handle, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == data
    starts = [int(r.headers.get("range", "bytes=0-")[6:-1]) for r in server.requests[before:]]
    assert len(starts) == 4
    assert starts == sorted(set(starts))
    assert starts[3] >= 4_000_000
    assert all("generation=" in r.target for r in server.requests[before + 1 :])


def test_a_permission_that_was_just_granted_is_waited_for(
    storage: ObjectStore, server: GcsServer, tmp_path: Path
) -> None:
    """Not all servers know of it at once; and some kinds of overload are told by 403 too."""
    with server.broken("403", times=3) as refused:
        assert storage.create("a", b"1") == handle_of("a", b"1")
    assert refused.struck == 3
    error = from_http_status(403, "", errors=[{"reason": "userRateLimitExceeded", "message": "slow down"}])
    overload = failure_of(storage.cloud, error)
    assert overload.repeat == "yes" and overload.refused is None and not overload.may_have_effect


def test_without_credentials_the_error_names_the_login_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(EMULATOR_VARIABLE, raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
    with pytest.raises(UsageError, match="gcloud auth application-default login"):
        ObjectStore(GcsCloud("some-bucket")).read("a")


def test_the_environments_key_file_sets_the_service_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a task hands it to the driver. Another file is another identity; the same one shares connections."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    monkeypatch.delenv(EMULATOR_VARIABLE, raising=False)
    found = []
    for name in ("first", "second", "first"):
        file = tmp_path / name
        email = f"{name}@project.iam.gserviceaccount.com"
        made = {"type": "service_account", "client_email": email, "private_key": pem, "private_key_id": "1"}
        file.write_text(json.dumps({**made, "token_uri": "http://127.0.0.1:1/token", "project_id": "p"}))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
        storage = ObjectStore(GcsCloud("some-bucket", patience=HURRY))
        assert isinstance(storage.cloud, GcsCloud)
        found.append(storage.cloud._clients)
        assert storage.cloud._client()._credentials.service_account_email == email
        with pytest.raises(CairnError) as raised:
            storage.read("a")  # nobody gives it a token
        told = "".join(traceback.format_exception(raised.value))
        assert pem.splitlines()[3] not in told and "token_uri" not in told
    assert found[0] is found[2] is not found[1]


def test_credentials_go_to_the_server_and_nowhere_else(server: GcsServer) -> None:
    class Token(AnonymousCredentials):  # type: ignore[misc]
        def before_request(self, request: object, method: str, url: str, headers: dict[str, str]) -> None:
            headers["authorization"] = "Bearer s3cret"

    storage = ObjectStore(GcsCloud(BUCKET, "token", credentials=Token(), project="billed", patience=HURRY))
    path = uuid4().hex
    storage.create(path, b"1")
    assert storage.read(path) == b"1"
    # The client asks for the bucket's place in a thread of its own, whenever it gets to it.
    ours = [r for r in server.requests if not r.target.startswith(f"/storage/v1/b/{BUCKET}?") and "billed" in r.target]
    assert len(ours) == 2
    assert [r.headers["authorization"] for r in ours] == ["Bearer s3cret"] * 2
    with server.broken("500", times=100), pytest.raises(UnknownOutcome) as caught:
        storage.create("b", b"")
    assert "s3cret" not in "".join(traceback.format_exception(caught.value)) + repr(storage)


def test_an_emulator_may_be_named_without_a_scheme(server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EMULATOR_VARIABLE, server.url.removeprefix("http://"))
    path = uuid4().hex
    ObjectStore(GcsCloud(BUCKET)).create(path, b"1")
    assert ObjectStore(GcsCloud(BUCKET)).read(path) == b"1"


def test_file_names_too_long_for_the_server_are_refused(storage: ObjectStore) -> None:
    with pytest.raises(UsageError, match="shorter"):
        storage.create("ü" * 600, b"")


def test_a_listing_reads_every_page(storage: ObjectStore, server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"shared/{n:02d}" for n in range(7)]
    for name in reversed(names):
        calm(storage).create(name, b"")
    forward, pages = server.forward, []

    def short(request: Request) -> object:
        if request.method == "GET" and urlsplit(request.target).path.endswith("/o"):
            pages.append(request)
            request = changed(request, target=f"{request.target}&maxResults=3")
        return forward(request)

    monkeypatch.setattr(server, "forward", short)
    assert [info.path for info in storage.list("shared/")] == names
    assert len(pages) == 3


def test_folders_that_the_console_made_are_no_files(storage: ObjectStore, server: GcsServer) -> None:
    storage.create("checkpoints/1", b"")
    marker = json.dumps({"name": f"{folder_of(storage)}/checkpoints/"}).encode()
    url = f"{server.url}/upload/storage/v1/b/{BUCKET}/o?uploadType=multipart"
    body = b"--x\r\nContent-Type: application/json\r\n\r\n" + marker + b"\r\n--x\r\n\r\n\r\n--x--\r\n"
    urlopen(UrlRequest(url, body, {"Content-Type": "multipart/related; boundary=x"}), timeout=5).close()
    assert len(list(ObjectStore(GcsCloud(BUCKET)).list(folder_of(storage)))) == 1
    assert [info.path for info in storage.list("")] == ["checkpoints/1"]
