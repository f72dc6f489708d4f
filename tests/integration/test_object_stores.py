"""Every call of each cloud's adapter under every fault, two writers, lost answers, damaged bytes, and a wrong set-up."""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from urllib.parse import unquote
from uuid import uuid4

import pytest

from state_backend.adapters import azure_storage, gcs_storage, s3_storage
from state_backend.adapters.object_store import Found, ObjectStore, Patience
from state_backend.adapters.open_storage import open_storage
from state_backend.inspection.verify import verify_pipeline
from state_backend.shard.transfer import download_all, upload_all
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
from tests.support.coordinator import coordinator_of
from tests.support.counting import DAYS, day
from tests.support.faulty_proxy import Answer, FaultKind, FaultyProxy, Request
from tests.support.server_crash import STORES, Store
from tests.support.storage_calls import CALLS, LARGE, NEW, OLD, STEP_BYTES, Call, at_once, generation, handle_of
from tests.support.tiers import at_tier
from tests.support.trials import OLD as PIPELINE
from tests.support.trials import run

# A stalled request takes `request_s`: enough for a busy machine, less than the deadline of the patient.
HURRY = Patience(
    deadline_s=0.5, permission_s=0.0, connect_s=1.0, request_s=1.0, first_delay_s=0.01, longest_delay_s=0.05
)
PATIENT = replace(HURRY, deadline_s=30.0, request_s=2.0)
FAULTS: tuple[FaultKind, ...] = at_tier(
    fast=("lost",),
    ci=("503", "lost", "truncated"),
    all=tuple(kind for kind in get_args(FaultKind) if kind not in ("401", "403", "429", "trickled")),
)
MISSING_BUCKET = "no-such-bucket"


class Cloud:
    """A running server, and storages on it."""

    def __init__(self, store: Store, server: FaultyProxy) -> None:
        self.store, self.server = store, server

    def fresh(self, patience: Patience | None = HURRY) -> ObjectStore:
        return self.store.open(f"faults/{uuid4().hex}", patience=patience)

    def calm(self, storage: ObjectStore) -> ObjectStore:
        """Return the same folder, without hurry."""
        return self.store.open(storage.cloud.root.rstrip("/"))

    def prepared(self, storage: ObjectStore, folder: Path) -> None:
        folder.mkdir()
        storage = self.calm(storage)
        storage.create("old", OLD)
        storage.create("large", LARGE)
        (folder / "small").write_bytes(NEW)
        (folder / "large").write_bytes(LARGE)

    def stored(self, storage: ObjectStore, path: str) -> bytes | None:
        # One request: a delete that the server got before the caller gave up may still take effect between two.
        try:
            return self.calm(storage).read(path)
        except NotFound:
            return None


@pytest.fixture(scope="module", params=[pytest.param(name, marks=getattr(pytest.mark, name)) for name in STORES])
def cloud(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    store = STORES[request.param]
    with store.running() as server:
        yield Cloud(store, server)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_storage, "STEP_BYTES", STEP_BYTES)
    monkeypatch.setattr(azure_storage, "PART_BYTES", STEP_BYTES)
    for name in ("PART_BYTES", "COPIED_PART_BYTES", "SERVER_COPIES_BYTES"):
        monkeypatch.setattr(s3_storage, name, STEP_BYTES)


def only_of(storage: ObjectStore) -> Callable[[Request], bool]:
    folder = storage.cloud.root.rstrip("/")
    return lambda r: folder in unquote(r.target) or folder.encode() in r.body


def writes(r: Request) -> bool:
    return r.method in ("PUT", "POST")


def downloads(r: Request) -> bool:
    # Google's metadata is asked for by GET.
    return "alt=media" in r.target if "/storage/v1/" in r.target else r.method == "GET"


@pytest.mark.parametrize("kind", FAULTS)
def test_a_call_with_a_failed_request_still_takes_effect_once(cloud: Cloud, tmp_path: Path, kind: FaultKind) -> None:
    """One request of a call fails, each in turn. The call succeeds, and has its effect exactly once."""

    def check(call: Call) -> int:
        for at in range(20):
            storage, folder = cloud.fresh(PATIENT), tmp_path / f"{call.name} {at}"
            cloud.prepared(storage, folder)
            with cloud.server.broken(kind, skip=at, only=only_of(storage)) as planned:
                got = call.run(storage, folder)
            assert call.returns(cloud.calm(storage), folder, got), (call.name, at)
            assert cloud.stored(storage, call.path) == call.after, (call.name, at)
            assert {file.name for file in folder.iterdir()} <= {"large", "small", "got"}
            if planned.struck == 0:  # the call has no more requests
                return at
        pytest.fail(f"{call.name} does not end")

    assert at_once([(call,) for call in CALLS], check) >= 18


@pytest.mark.parametrize("kind", FAULTS)
def test_a_lasting_failure_raises_unavailable_or_unknown_outcome(cloud: Cloud, tmp_path: Path, kind: FaultKind) -> None:
    """StorageUnavailable means that nothing was changed, UnknownOutcome that the file is the old or the new one; nothing
    secret is in either."""

    def check(call: Call, skip: int) -> int:
        storage, folder, error = cloud.fresh(), tmp_path / f"{call.name} {skip}", None
        cloud.prepared(storage, folder)
        with cloud.server.broken(kind, skip=skip, times=10**9, only=only_of(storage)):
            try:
                got = call.run(storage, folder)
            except CairnError as caught:
                error = caught
        case = f"{call.name}, from request {skip} on: {error!r}"
        found = cloud.stored(storage, call.path)
        match error:
            case None:
                assert call.returns(cloud.calm(storage), folder, got), case
                assert found == call.after, case
                return 0
            case StorageUnavailable():
                assert found == call.before, case
            case UnknownOutcome():
                assert found in (call.before, call.after), case
                assert call.before != call.after, case
            case _:
                pytest.fail(case)
        told = "".join(traceback.format_exception(error))
        assert storage.url in str(error)
        assert not any(secret in told for secret in (cloud.server.url, "Signature", "sig=", "upload_id"))
        assert not (folder / "got").exists()
        return 1

    assert at_once([(call, skip) for call in CALLS for skip in range(4)], check) >= len(CALLS)


def test_a_refused_retry_recognizes_the_file_that_its_first_request_wrote(cloud: Cloud) -> None:
    """The answer to the first request was lost, and the second one finds the file: it is this call's, not another's."""
    storage, kinds = cloud.fresh(PATIENT), ("lost", "lost 503", "stalled after")
    for kind in kinds:
        with cloud.server.broken(kind, only=writes) as planned:
            assert storage.create(kind, NEW) == handle_of(kind, NEW)
        assert planned.struck == 1
        with cloud.server.broken(kind, only=writes):
            storage.replace(kind, OLD, generation=generation(storage, kind))
        assert storage.read(kind) == OLD


def test_a_retry_after_a_reset_has_an_unknown_outcome_if_another_writer_came_between(cloud: Cloud) -> None:
    """A reset connection may have delivered: the other's file may stand where ours stood before. But a refusal for load
    surely changed nothing."""
    storage = cloud.fresh(PATIENT)
    other = cloud.calm(storage)

    def overtaken(r: Request) -> bool:
        if not writes(r) or b"theirs" in r.body:
            return False
        if other.stat(path) is None:
            other.create(path, b"theirs")
        else:
            other.replace(path, other.read(path) + b" again", generation=generation(other, path))
        return True

    path = "reset"
    with cloud.server.broken("reset", only=overtaken), pytest.raises(UnknownOutcome, match="reset"):
        storage.create(path, b"ours")
    with cloud.server.broken("reset", only=overtaken), pytest.raises(UnknownOutcome, match="reset"):
        storage.replace(path, b"ours", generation=generation(storage, path))
    path = "429"
    with cloud.server.broken("429", only=overtaken), pytest.raises(AlreadyExists, match="429"):
        storage.create(path, b"ours")
    with cloud.server.broken("429", only=overtaken), pytest.raises(PreconditionFailed, match="429"):
        storage.replace(path, b"ours", generation=generation(storage, path))
    assert storage.read(path).startswith(b"theirs again")


def test_a_retried_delete_does_not_delete_a_newer_file(cloud: Cloud) -> None:
    """S13: the first request took effect, its answer was lost, and somebody made the file again before the second."""
    storage = cloud.fresh(PATIENT)
    other = cloud.calm(storage)
    for given in (False, True):
        storage.create("a", OLD)
        wanted = generation(storage, "a") if given else None
        deletes: list[int] = []

        def second(r: Request, deletes: list[int] = deletes) -> bool:
            if r.method == "DELETE":
                deletes.append(1)
                if len(deletes) == 2:
                    other.create("a", NEW)
            return r.method == "DELETE"

        with cloud.server.broken("lost", only=second), pytest.raises(UnknownOutcome):
            storage.delete("a", generation=wanted)
        assert storage.read("a") == NEW
        assert storage.delete("a")


def test_bytes_that_are_damaged_on_the_way_up_leave_no_file(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, forward = cloud.fresh(), cloud.server.forward
    for name, data in (("small", b"payload"), ("large", b"payload" * STEP_BYTES)):
        (tmp_path / name).write_bytes(data)

        def damaged(request: Request) -> Any:
            body = request.body.replace(b"payload", b"payIoad", 1)
            return forward(replace(request, body=body) if writes(request) else request)

        with monkeypatch.context() as patch:
            patch.setattr(cloud.server, "forward", damaged)
            for _ in range(2):
                with pytest.raises(StorageUnavailable):
                    storage.upload(name, tmp_path / name)
                assert storage.stat(name) is None
        assert storage.upload(name, tmp_path / name) == handle_of(name, data)


def test_a_copy_within_the_server_moves_no_bytes(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, target = cloud.fresh(PATIENT), cloud.fresh(PATIENT)
    handle = storage.create("large", LARGE)
    before = len(cloud.server.requests)
    assert target.copy_from(storage, handle, "here") == handle_of("here", LARGE)
    for request in cloud.server.requests[before:]:
        assert len(request.body) < 2000 and not downloads(request), request.target
    if cloud.store is STORES["azure"]:
        assert target.cloud.head("here", 1.0).crc32c == handle.crc32c
    assert storage.delete("large") and target.read("here") == LARGE
    with pytest.raises(NotFound, match="large"):
        target.copy_from(storage, handle, "there")
    storage.create("large", NEW * 1000)
    with pytest.raises(CorruptFile, match=f"expected {len(LARGE)} bytes"):
        target.copy_from(storage, handle, "there")
    with pytest.raises(AlreadyExists, match="here"):
        target.copy_from(storage, handle_of("large", NEW * 1000), "here")
    # As a server does that reports checksums: the size alone would fit.
    other = replace(storage.cloud.head("large", 1.0).info, size_bytes=len(LARGE))
    monkeypatch.setattr(storage.cloud, "head", lambda *_: Found(other, 0))
    with pytest.raises(CorruptFile, match=r"found .* bytes with crc32c 00000000"):
        target.copy_from(storage, handle, "there")
    assert [info.path for info in target.list("")] == ["here"]


def test_a_copy_fails_if_its_source_is_rewritten_meanwhile(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error must not be that the destination exists: `copy_output` would then skip a file that is not there."""
    storage = cloud.fresh(PATIENT)
    handle = storage.create("large", LARGE)
    head = storage.cloud.head
    before = head("large", 1.0)
    storage.replace("large", NEW * 1000, generation=generation(storage, "large"))
    forward = cloud.server.forward

    def as_s3(request: Request) -> Answer:
        """moto copies whatever the source is now."""
        if "x-amz-copy-source-if-match" in request.headers:
            return Answer(status=412, body=b"<Error><Code>PreconditionFailed</Code></Error>")
        return forward(request)

    with monkeypatch.context() as patch:
        patch.setattr(cloud.server, "forward", as_s3)
        patch.setattr(storage.cloud, "head", lambda path, time_s: before if path == "large" else head(path, time_s))
        with pytest.raises((StorageUnavailable, NotFound)):
            storage.copy_from(storage, handle, "there")
    assert storage.stat("there") is None


def test_a_file_rewritten_during_its_download_is_not_mixed(cloud: Cloud, tmp_path: Path) -> None:
    storage, first = cloud.fresh(PATIENT), threading.Lock()
    handle = storage.create("a", os.urandom(9 << 20))

    def rewritten(r: Request) -> bool:
        at = r.headers.get("x-ms-range", r.headers.get("range", "bytes=0-"))
        if downloads(r) and not at.startswith("bytes=0-") and first.acquire(blocking=False):
            storage.replace("a", NEW, generation=generation(storage, "a"))
        return downloads(r)

    by_generation = cloud.store is STORES["gcs"]  # Google finds no file of the first generation.
    error, says = (
        (NotFound, "does not exist") if by_generation else (StorageUnavailable, "was rewritten meanwhile; try again")
    )
    with cloud.server.broken("truncated", only=rewritten), pytest.raises(error, match=says):
        storage.download(handle, tmp_path / "got")
    assert not (tmp_path / "got").exists()


def test_many_parallel_transfers_move_the_right_bytes_despite_faults(cloud: Cloud, tmp_path: Path) -> None:
    storage, server = cloud.fresh(None), cloud.server
    files = {f"f{n}": os.urandom(n * 10_000) for n in range(30)}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with server.broken("503", times=10), server.broken("reset", times=10, skip=20):
        handles = upload_all(storage, [(f"shared/{name}", tmp_path / name) for name in files])
    with server.broken("truncated", times=10):
        download_all(storage, [(h, tmp_path / "got" / h.path) for h in handles])
    assert handles == [handle_of(f"shared/{name}", data) for name, data in files.items()]
    for name, data in files.items():
        assert (tmp_path / "got" / "shared" / name).read_bytes() == data


def _in_a_child(storage: ObjectStore, number: int) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: storage.create(f"child/{number}/{n}", b"%d" % n), range(20)))
        assert list(pool.map(lambda n: storage.read(f"parent/{n}"), range(4))) == [b"0", b"1", b"2", b"3"]


def test_a_storage_survives_a_fork(cloud: Cloud) -> None:
    """Spark forks its workers: parent and children go on with one storage, and none reads another's answers."""
    storage = cloud.fresh(None)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: storage.create(f"parent/{n}", b"%d" % n), range(4)))
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_in_a_child, args=(storage, n)) for n in range(3)]
    for child in children:
        child.start()
    _in_a_child(storage, 3)
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert len(list(storage.list("child/"))) == 80


# --- what is wrong with the set-up ----------------------------------------------------------------------------------------


def every_call(storage: ObjectStore, folder: Path) -> list[Callable[[], object]]:
    (folder / "file").touch()
    return [
        lambda: storage.read("a"),
        lambda: storage.create("a", b""),
        lambda: storage.replace("a", b"", generation=0x61),
        lambda: storage.replace("a", b"", generation=-1),
        lambda: storage.upload("a", folder / "file"),
        lambda: storage.download(handle_of("a", b""), folder / "got"),
        lambda: storage.copy_from(storage, handle_of("a", b""), "b"),
        lambda: storage.copy_from(storage, handle_of("a", LARGE), "b"),
        lambda: storage.stat("a"),
        lambda: list(storage.list("")),
        lambda: storage.delete("a"),
        lambda: storage.delete("a", generation=0x61),
    ]


def test_every_call_on_a_missing_bucket_is_refused_with_its_name(cloud: Cloud, tmp_path: Path) -> None:
    """F65: a bad root is an error of its own, never an empty storage."""
    for number in range(12):
        storage = ObjectStore(type(cloud.fresh().cloud)(f"{MISSING_BUCKET}-{number}", "a"))
        with pytest.raises(UsageError, match=f"{MISSING_BUCKET}-{number}' does not exist; create it first"):
            every_call(storage, tmp_path)[number]()


def test_a_denied_request_is_reported_with_the_permission_to_grant(cloud: Cloud, tmp_path: Path) -> None:
    # A busy machine may take a second for an answer: a repeat after a timeout could no longer tell what took effect.
    storage = cloud.fresh(replace(PATIENT, connect_s=30.0, request_s=30.0))
    for call in every_call(storage, tmp_path):
        with cloud.server.broken("403", times=10), pytest.raises(PermissionRefused, match="give this identity"):
            call()
    with cloud.server.broken("403", times=10), pytest.raises(PermissionRefused, match="give this identity"):
        storage.delete_many(["a"])


# --- days of a pipeline ---------------------------------------------------------------------------------------------------


def test_intervals_on_a_faulty_object_store_give_the_digests_of_a_local_disk(cloud: Cloud, tmp_path: Path) -> None:
    """Ten days, re-runs and a trial, with faults strewn over the requests: equal digests and rows."""
    DAYS.update({day(n).start: [(f"user {i}", "fig", i + n) for i in range(0, 400, 1 + n)] for n in range(10)})
    found, server = [], cloud.server
    try:
        for root in (cloud.fresh().url, f"file://{tmp_path}"):
            with (
                server.broken("503", skip=3, times=2),
                server.broken("lost", skip=35),
                server.broken("reset", skip=60),
                server.broken("truncated", skip=90, only=lambda r: r.method == "GET"),
            ):
                records = [r for days in (range(6), range(4, 6), range(6, 10)) for r in run(PIPELINE, root, days)]
            log = coordinator_of(PIPELINE, root).log()
            found.append(
                (
                    [(one.checkpoint, one.interval) for one in records],
                    [(one.id, one.content.interval, one.content.digest) for one in log.completed()],
                )
            )
            assert not verify_pipeline(open_storage(f"{root}/counting")).findings
    finally:
        DAYS.clear()
    assert found[0] == found[1]
