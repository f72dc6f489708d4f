"""State on S3: every call of the adapter under every fault, compatible stores, and days of a pipeline beside a disk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args
from uuid import uuid4

import boto3
import pytest
from botocore.exceptions import ClientError
from typer.testing import CliRunner

from cairn.command.cli import app
from cairn.testing import PipelineTester
from state_backend.adapters import s3_storage
from state_backend.adapters.object_store import (
    ChecksumStore,
    Patience,
    etag_of,
    failure_of,
    generation_of,
    pieces_of,
    translate,
)
from state_backend.adapters.s3_storage import S3Cloud
from state_backend.checkpoint import leases
from state_backend.checkpoint.log import read_log
from state_backend.checkpoint.sweep_files import sweep
from state_backend.inspection.verify import verify_files, verify_pipeline
from state_backend.shard import snapshot
from state_backend.values.errors import (
    AlreadyExists,
    CairnError,
    NotFound,
    PermissionRefused,
    PreconditionFailed,
    StorageUnavailable,
    UsageError,
)
from state_backend.values.retention import KeepLast
from tests.support.accounts import DAYS, SCHEMA, accounts
from tests.support.checkpoints import day
from tests.support.environments import environment_with
from tests.support.faulty_proxy import Answer, FaultKind, Request
from tests.support.s3_server import BUCKET, S3Server, s3_server
from tests.support.storage_calls import LARGE, NEW, OLD, STEP_BYTES, generation, handle_of
from tests.support.tiers import REPOSITORY, at_tier

pytestmark = pytest.mark.s3

FAULTS: tuple[FaultKind, ...] = at_tier(
    fast=("lost",),
    ci=("503", "lost"),
    all=tuple(k for k in get_args(FaultKind) if k not in ("401", "403", "429", "trickled")),
)
# A stalled request takes `read_s`: enough for a busy machine, less than the deadline of the patient.
HURRY = Patience(deadline_s=0.3, connect_s=1.0, request_s=1.0, first_delay_s=0.01, longest_delay_s=0.05)
PATIENT = replace(HURRY, deadline_s=30.0, request_s=2.0)
# SeaweedFS has no KMS, and refuses a request whose signed preconditions are gone. The last test starts these tests.
OF_AMAZON = ("settings_reach", "ignores_conditions", "seaweedfs")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        # The first write of a process tests the server's preconditions, by requests that no test shall break.
        ChecksumStore(S3Cloud(BUCKET, "first")).create("a", NEW)
        yield server


@pytest.fixture(autouse=True)
def _small_parts(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_storage, "PART_BYTES", STEP_BYTES)
    monkeypatch.setattr(s3_storage, "COPIED_PART_BYTES", STEP_BYTES)
    monkeypatch.setattr(s3_storage, "SERVER_COPIES_BYTES", STEP_BYTES)


def fresh(patience: Patience | None = None) -> ChecksumStore:
    return ChecksumStore(S3Cloud(BUCKET, f"faults/{uuid4().hex}", patience=patience))


def calm(storage: ChecksumStore) -> ChecksumStore:
    """The same folder, without hurry."""
    return ChecksumStore(S3Cloud(BUCKET, storage.url.removeprefix(f"s3://{BUCKET}/")))


def test_a_delete_sent_again_succeeds_where_a_store_refuses_absent_files(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, forward = fresh(PATIENT), server.forward
    storage.create("a", OLD)

    def as_seaweedfs(request: Request) -> Answer:
        answer = forward(request)
        if request.method == "DELETE" and answer.status == 404:
            return Answer(status=412, body=b"<Error><Code>PreconditionFailed</Code></Error>")
        return answer

    monkeypatch.setattr(server, "forward", as_seaweedfs)
    with server.broken("lost", only=lambda request: request.method == "DELETE"):
        assert storage.delete("a") is True
    assert storage.stat("a") is None


def test_a_write_that_conflicts_with_another_write_is_retried_until_the_deadline(server: S3Server) -> None:
    storage = fresh(HURRY)
    server.conflicts = 1
    assert storage.create("a", NEW) == handle_of("a", NEW)
    server.conflicts = 10**9
    with pytest.raises(StorageUnavailable, match=r"HTTP 409 ConditionalRequestConflict for 0\.3 s; .*try again"):
        storage.create("b", NEW)
    server.conflicts = 0
    assert storage.stat("b") is None


def test_a_store_that_ignores_conditions_is_refused_by_name(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_storage, "_conditional", set())
    says, storage = r"the server http://127\.0\.0\.1:\d+ ignores the precondition of a conditional ", fresh()
    for ignored, what in (("PUT if-none-match", "create"), ("PUT if-match", "replace"), ("DELETE if-match", "delete")):
        monkeypatch.setattr(server, "ignores_conditions", {ignored})
        with pytest.raises(UsageError, match=says + what):
            storage.create("a", b"1")
    monkeypatch.setattr(server, "ignores_conditions", set())
    storage.create("a", b"1")
    assert [f.path for f in storage.list("")] == ["a"]
    before = len(server.requests)
    fresh().create("b", b"1")
    assert len(server.requests) == before + 1  # the bucket's server is asked once in a process


def test_a_renewed_lease_has_another_generation(server: S3Server) -> None:
    """A clean-up that saw the lease before its renewal must not delete it."""
    storage = fresh()
    storage.create("HEAD.json", b"")
    path = "leases/00000000000000000042-900-00000000-0000-0000-0000-000000000001.json"
    from state_backend.formats import record_codec
    from state_backend.values.marks import Lease

    lease = Lease(id=42, lease="00000000-0000-0000-0000-000000000001", seconds=900, holder="an export")
    storage.create(path, record_codec.encode(lease))
    seen = generation(storage, path)
    for renewals in (1, 2):
        assert leases.renew(storage, path)
        found = record_codec.decode(storage.read(path), path, Lease)
        assert found.holder == f"an export, renewals: {renewals}"
        with pytest.raises(PreconditionFailed):
            storage.delete(path, generation=seen)
        seen = generation(storage, path)
    storage.delete(path)
    assert not leases.renew(storage, path)


@pytest.mark.parametrize(
    ("status", "code", "error", "says"),
    [
        (403, "ExpiredToken", UsageError, "the credentials are refused: renew them"),
        (403, "SignatureDoesNotMatch", UsageError, "the credentials are refused"),
        (403, "RequestTimeTooSkewed", UsageError, "check this host's clock"),
        (403, "AccessDenied", PermissionRefused, "s3:PutObject"),
        (404, "NoSuchBucket", UsageError, "create it first"),
        (404, "NoSuchKey", NotFound, "does not exist"),
        (412, "PreconditionFailed", PreconditionFailed, "another process"),
        (409, "ConditionalRequestConflict", StorageUnavailable, "try again"),
        (503, "SlowDown", StorageUnavailable, "HTTP 503 SlowDown for 180 s; check the network"),
    ],
)
def test_each_refusal_has_an_error_with_its_next_step(
    server: S3Server, status: int, code: str, error: type[CairnError], says: str
) -> None:
    answer = {"Error": {"Code": code, "Message": "secret"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    storage = fresh()
    made = translate(storage.cloud, "read 'a'", failure_of(storage.cloud, ClientError(answer, "GetObject")), None)
    assert isinstance(made, error) and says in str(made) and "secret" not in str(made)


def test_without_credentials_the_error_names_ways_to_set_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "absent"))
    with pytest.raises(UsageError, match="set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        ChecksumStore(S3Cloud("some-bucket")).read("a")
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(UsageError, match="ProfileNotFound; expected credentials"):
        ChecksumStore(S3Cloud("some-bucket")).read("a")


def test_settings_reach_the_server(server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CAIRN_S3_REQUEST_PAYER", "requester")
    monkeypatch.setenv("CAIRN_S3_ENCRYPTION", "aws:kms")
    monkeypatch.setenv("CAIRN_S3_KMS_KEY_ID", "key-1")
    storage, before = fresh(), len(server.requests)
    (tmp_path / "file").write_bytes(LARGE)
    storage.create("a", NEW)
    storage.upload("large", tmp_path / "file")
    assert storage.read("a") == NEW and storage.read("large") == LARGE
    sent = server.requests[before:]
    assert {r.headers.get("x-amz-request-payer") for r in sent} == {"requester"}
    begun = [r for r in sent if r.headers.get("x-amz-server-side-encryption")]
    assert {r.headers["x-amz-server-side-encryption-aws-kms-key-id"] for r in begun} == {"key-1"} and len(begun) == 2
    assert generation(storage, "a") != generation(storage, "large")


def test_parts_of_a_failed_upload_are_removed(server: S3Server, tmp_path: Path) -> None:
    storage = fresh()
    (tmp_path / "file").write_bytes(LARGE)
    storage.create("a", NEW)
    with pytest.raises(AlreadyExists):
        storage.upload("a", tmp_path / "file")
    assert isinstance(storage.cloud, S3Cloud)
    found = storage.cloud._ask("list_multipart_uploads", Prefix=storage.url.removeprefix(f"s3://{BUCKET}/"))
    assert "Uploads" not in found


def test_parts_grow_so_that_ten_thousand_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_storage, "PART_BYTES", 2)
    monkeypatch.setattr(s3_storage, "PARTS_OF_ONE_SIZE", 2)
    pieces = [*pieces_of([b"0123456789", b"abcdef"], fresh().cloud.part_bytes)]
    assert pieces == [(b"01", False), (b"23", False), (b"4567", False), (b"89ab", False), (b"cdef", True)]
    assert [*pieces_of([], fresh().cloud.part_bytes)] == [(b"", True)]


def test_an_etag_survives_the_conversion_to_a_generation_and_back() -> None:
    for etag in ('"d41d8cd98f00b204e9800998ecf8427e"', '"d41d8cd98f00b204e9800998ecf8427e-37"', '"any text"'):
        assert etag_of(generation_of(etag)) == etag
    assert [etag_of(n) for n in (-1, 0, 7, 0xFF)] == [None] * 4


def test_checksums_are_compared_without_a_download(server: S3Server, tmp_path: Path) -> None:
    prefix = f"checksums/{uuid4().hex}"
    storage = ChecksumStore(S3Cloud(BUCKET, f"{prefix}/accounts"))
    PipelineTester(accounts(), input_schema=SCHEMA, root=f"s3://{BUCKET}/{prefix}").run(DAYS[1], day(1))
    content = read_log(storage).completed()[-1].content
    output = content.outputs[0].handle
    assert storage.checksum(output.path) == output.crc32c
    assert storage.checksum("absent") is None
    server.requests.clear()
    assert not verify_files(content, storage, work=tmp_path).findings
    assert not [
        r.target for r in server.requests if r.method == "GET" and "/output/" in r.target and "?" not in r.target
    ]
    client, where = (
        boto3.client("s3", endpoint_url=server.server_url),
        {"Bucket": BUCKET, "Key": f"{prefix}/accounts/{output.path}"},
    )
    # Another program copied the file, so the server keeps no crc32c of it.
    client.put_object(**where, Body=storage.read(output.path))
    words = ["check", "--fast", "--checksums", "--root", f"s3://{BUCKET}/{prefix}", "--pipeline", "accounts"]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0 and "1 file without a checksum on S3: only the size was compared" in told.stdout
    client.put_object(**where, **s3_storage._body(bytes(output.size_bytes)))
    assert verify_pipeline(storage).success
    (found,) = verify_pipeline(storage, checksums=True).checkpoints[0].findings
    assert found.startswith(f"{output.path}: expected crc32c {output.crc32c:08x}, found ")
    assert verify_files(content, storage, work=tmp_path).findings == (found,)


@pytest.fixture
def locked(server: S3Server) -> Iterator[tuple[Any, str]]:
    """A client, and a versioned bucket whose object lock keeps each version for a day."""
    client, bucket = boto3.client("s3", endpoint_url=server.server_url), f"locked-{uuid4().hex[:8]}"
    client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    rule = {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}}
    client.put_object_lock_configuration(
        Bucket=bucket, ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": rule}
    )
    yield client, bucket


def deleted_and_kept(client: Any, bucket: str) -> tuple[set[str], set[str]]:
    """Return the keys whose newest version is a delete marker, and the keys of all versions with bytes."""
    answer = client.list_object_versions(Bucket=bucket, MaxKeys=10_000)
    markers = {m["Key"] for m in answer.get("DeleteMarkers", ()) if m["IsLatest"]}
    return markers, {v["Key"] for v in answer["Versions"]}


def test_retention_deletes_on_a_bucket_with_object_lock(
    locked: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deletes succeed: they add delete markers. The bytes stay as older versions, until the lock ends and a rule deletes them."""
    monkeypatch.setattr(snapshot, "INLINE_FILE_BYTES", 0)
    client, bucket = locked
    root = f"s3://{bucket}/root"
    tester = PipelineTester(accounts(retention=KeepLast(2)), input_schema=SCHEMA, root=root)
    for n, rows in DAYS.items():
        tester.run(rows, day(n))
    storage = ChecksumStore(S3Cloud(bucket, "root/accounts"))
    assert len(read_log(storage).retained) == 2
    assert verify_pipeline(storage).success
    markers, kept = deleted_and_kept(client, bucket)
    assert any("/shared/" in key for key in markers) and markers <= kept
    assert not {info.path for info in storage.list("")} & {key.removeprefix("root/accounts/") for key in markers}
    version = next(v for v in client.list_object_versions(Bucket=bucket)["Versions"] if v["Key"] in markers)
    with pytest.raises(ClientError, match="AccessDenied"):
        client.delete_object(Bucket=bucket, Key=version["Key"], VersionId=version["VersionId"])
    assert not sweep(storage, "accounts", min_age=timedelta(0)).plan.delete
    assert tester.state("balance")


def test_a_refused_delete_is_reported_and_leaves_the_commit(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, refused = server.forward, True

    def forwarded(request: Request) -> Answer:
        if refused and request.method == "POST" and request.target.endswith("?delete"):
            errors = "".join(
                f"<Error>{key}<Code>AccessDenied</Code></Error>"
                for key in re.findall("<Key>.*?</Key>", request.body.decode())
            )
            return Answer(
                status=200,
                headers={"Content-Type": "application/xml"},
                body=f"<DeleteResult>{errors}</DeleteResult>".encode(),
            )
        return forward(request)

    monkeypatch.setattr(server, "forward", forwarded)
    prefix = f"refused-{uuid4().hex}"
    tester = PipelineTester(accounts(retention=KeepLast(2)), input_schema=SCHEMA, root=f"s3://{BUCKET}/{prefix}")
    storage = ChecksumStore(S3Cloud(BUCKET, f"{prefix}/accounts"))
    for n in (1, 2):
        tester.run(DAYS[n], day(n))
    for n in (3, 4):
        with pytest.raises(PermissionRefused, match="s3:DeleteObject"):
            tester.run(DAYS[n], day(n))
    assert [*read_log(storage).retained] == [3, 4]
    refused = False
    tester.run(DAYS[5], day(5))
    assert [*read_log(storage).retained] == [4, 5]
    assert verify_pipeline(storage).success
    assert not sweep(storage, "accounts", min_age=timedelta(0)).plan.delete


@pytest.mark.long("five minutes: installs SeaweedFS")
def test_seaweedfs_passes_these_tests_too(tmp_path: Path) -> None:
    """SeaweedFS is a server with its own implementation of S3's conditions. Its writers race without the proxy's lock."""
    python = environment_with(tmp_path, REPOSITORY / "tests/support/seaweedfs.lock")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "s3",
        "-k",
        f"not ({' or '.join(OF_AMAZON)})",
    ]
    environment = {**os.environ, "CAIRN_WEED": str(python.with_name("weed")), "CAIRN_TESTS": "ci"}
    tests = ["tests/contract/test_storage.py", "tests/integration/test_s3.py"]
    done = subprocess.run(
        [*command, *tests], env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
