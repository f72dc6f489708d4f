"""Google Cloud Storage under faults, call by call and request by request; then a pipeline on it, beside one on disk."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace as changed
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import unquote, urlsplit
from urllib.request import Request as UrlRequest
from urllib.request import urlopen
from uuid import uuid4

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.api_core.exceptions import from_http_status
from google.auth.credentials import AnonymousCredentials

from state_backend.adapters import gcs_storage
from state_backend.adapters.gcs_storage import EMULATOR_VARIABLE, GcsStorage
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.object_store import Patience
from state_backend.values.errors import (
    AlreadyExists,
    CairnError,
    CorruptFile,
    NotFound,
    PermissionRefused,
    StorageUnavailable,
    UnknownOutcome,
    UsageError,
)
from tests.support.faulty_proxy import FaultKind, Request
from tests.support.gcs_server import BUCKET, GcsServer, gcs_server
from tests.support.storage_calls import LARGE, NEW, STEP_BYTES, generation, handle_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
def storage(small_steps: None) -> GcsStorage:
    return in_a_hurry(deadline_s=1.2)


def in_a_hurry(*, deadline_s: float) -> GcsStorage:
    """In a folder of its own."""
    patience = changed(HURRY, deadline_s=deadline_s)
    return GcsStorage(BUCKET, f"faults/{uuid4().hex}", patience=patience)


def folder_of(storage: GcsStorage) -> str:
    return storage.url.removeprefix(f"gs://{BUCKET}/")


def calm(storage: GcsStorage) -> GcsStorage:
    """The same folder, without hurry."""
    return GcsStorage(BUCKET, folder_of(storage))


# --- every call under every fault -----------------------------------------------------------------------------------------


def test_of_many_deletes_only_those_that_failed_are_sent_again(
    storage: GcsStorage, monkeypatch: pytest.MonkeyPatch
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
    paths = [f"many/{n:03d}" for n in range(GcsStorage.batch + 2)]
    for path in paths[-4:]:
        storage.create(path, b"")
    assert storage.delete_many(paths) == 4 and asked == [GcsStorage.batch, 1, 2]
    assert not [*storage.list("many/")]


# --- uploads and downloads ------------------------------------------------------------------------------------------------


def test_an_upload_goes_on_where_the_server_stopped_taking(
    storage: GcsStorage, server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs_storage, "STEP_BYTES", 4 * STEP_BYTES)
    data = os.urandom(9 * STEP_BYTES)
    (tmp_path / "file").write_bytes(data)
    monkeypatch.setattr(server, "takes_at_most", STEP_BYTES)
    assert storage.upload("a", tmp_path / "file") == handle_of("a", data)
    assert storage.read("a") == data


def test_a_piece_that_arrives_twice_is_stored_once(storage: GcsStorage, server: GcsServer, tmp_path: Path) -> None:
    """The server gets both the request that timed out and the client's repeat of it."""
    (tmp_path / "file").write_bytes(LARGE)

    def taken_before(request: Request) -> bool:
        if request.method == "PUT" and "upload_id" in request.target:
            server.forward(request)
        return False

    with server.broken("500", only=taken_before):
        assert storage.upload("a", tmp_path / "file") == handle_of("a", LARGE)
    assert storage.read("a") == LARGE


def test_an_upload_whose_session_is_gone_can_be_begun_again(
    storage: GcsStorage, server: GcsServer, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(LARGE)

    def forgotten(r: Request) -> bool:
        if r.headers.get("content-range", "").startswith(f"bytes {STEP_BYTES}-"):
            server.forget_sessions()
        return False

    with (
        server.broken("500", only=forgotten),
        pytest.raises(StorageUnavailable, match="lost the upload"),
    ):
        storage.upload("a", tmp_path / "file")
    assert storage.stat("a") is None
    assert storage.upload("a", tmp_path / "file") == handle_of("a", LARGE)


def test_of_two_uploads_in_steps_one_wins(storage: GcsStorage, server: GcsServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(LARGE)

    def overtaken(r: Request) -> bool:
        if r.headers.get("content-range", "").endswith(f"/{len(LARGE)}") and storage.stat("a") is None:
            storage.create("a", NEW)
        return False

    with server.broken("500", only=overtaken), pytest.raises(AlreadyExists):
        storage.upload("a", tmp_path / "file")
    assert storage.read("a") == NEW


def test_a_download_goes_on_where_the_connection_broke(storage: GcsStorage, server: GcsServer, tmp_path: Path) -> None:
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


def test_a_file_rewritten_during_its_download_is_not_mixed(
    storage: GcsStorage, server: GcsServer, tmp_path: Path
) -> None:
    first, second = os.urandom(3_000_000), os.urandom(3_000_000)
    patient = calm(storage)
    # Enough for a busy machine; the download ends when it sees another generation.
    storage = GcsStorage(BUCKET, folder_of(storage), patience=changed(HURRY, deadline_s=10.0, request_s=2.0))
    handle = patient.create("a", first)

    def rewritten(r: Request) -> bool:
        if "range" in r.headers and b"alt=media" in r.target.encode():
            patient.replace("a", second, generation=generation(patient, "a"))
        return "alt=media" in r.target

    with server.broken("truncated", only=rewritten), pytest.raises(NotFound):
        storage.download(handle, tmp_path / "got")
    assert not (tmp_path / "got").exists()


# --- what is wrong with the set-up ----------------------------------------------------------------------------------------


def every_call(storage: GcsStorage, folder: Path) -> list[Callable[[], object]]:
    (folder / "file").touch()
    return [
        lambda: storage.read("a"),
        lambda: storage.create("a", b""),
        lambda: storage.replace("a", b"", generation=7),
        lambda: storage.upload("a", folder / "file"),
        lambda: storage.download(handle_of("a", b""), folder / "got"),
        lambda: storage.copy_from(storage, handle_of("a", b""), "b"),
        lambda: storage.stat("a"),
        lambda: list(storage.list("")),
        lambda: storage.delete("a"),
        lambda: storage.delete("a", generation=7),
    ]


@pytest.mark.parametrize(
    ("kind", "error", "advice"),
    [("401", UsageError, "GOOGLE_APPLICATION_CREDENTIALS"), ("403", PermissionRefused, "Storage Object User")],
)
def test_refused_identities_are_told_what_to_do(
    storage: GcsStorage, server: GcsServer, tmp_path: Path, kind: FaultKind, error: type[CairnError], advice: str
) -> None:
    storage = GcsStorage(BUCKET, folder_of(storage), patience=changed(HURRY, permission_s=0.0))
    for call in every_call(storage, tmp_path):
        with server.broken(kind, times=10), pytest.raises(error, match=advice):
            call()


def test_a_permission_that_was_just_granted_is_waited_for(
    storage: GcsStorage, server: GcsServer, tmp_path: Path
) -> None:
    """Not all servers know of it at once; and some kinds of overload are told by 403 too."""
    with server.broken("403", times=3) as refused:
        assert storage.create("a", b"1") == handle_of("a", b"1")
    assert refused.struck == 3
    error = from_http_status(403, "", errors=[{"reason": "userRateLimitExceeded", "message": "slow down"}])
    assert gcs_storage._is_transient(error)
    assert not gcs_storage._is_refusal(error)


def test_without_credentials_the_ways_to_give_them_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(EMULATOR_VARIABLE, raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
    for call in every_call(GcsStorage("some-bucket"), tmp_path):
        with pytest.raises(UsageError, match="gcloud auth application-default login"):
            call()


def test_a_process_is_who_the_key_file_in_its_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
        storage = GcsStorage("some-bucket", patience=HURRY)
        found.append(storage._clients)
        assert storage._client()._credentials.service_account_email == email
        with pytest.raises(CairnError) as raised:
            storage.read("a")  # nobody gives it a token
        told = "".join(traceback.format_exception(raised.value))
        assert pem.splitlines()[3] not in told and "token_uri" not in told
    assert found[0] is found[2] is not found[1]


def test_credentials_go_to_the_server_and_nowhere_else(server: GcsServer) -> None:
    class Token(AnonymousCredentials):  # type: ignore[misc]
        def before_request(self, request: object, method: str, url: str, headers: dict[str, str]) -> None:
            headers["authorization"] = "Bearer s3cret"

    storage = GcsStorage(BUCKET, "token", credentials=Token(), project="billed", patience=HURRY)
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
    GcsStorage(BUCKET).create(path, b"1")
    assert GcsStorage(BUCKET).read(path) == b"1"


def test_names_too_long_for_the_server_are_a_wrong_call(storage: GcsStorage) -> None:
    with pytest.raises(UsageError, match="shorter"):
        storage.create("ü" * 600, b"")


def test_a_list_of_many_pages(storage: GcsStorage, server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_folders_that_the_console_made_are_no_files(storage: GcsStorage, server: GcsServer) -> None:
    storage.create("checkpoints/1", b"")
    marker = json.dumps({"name": f"{folder_of(storage)}/checkpoints/"}).encode()
    url = f"{server.url}/upload/storage/v1/b/{BUCKET}/o?uploadType=multipart"
    body = b"--x\r\nContent-Type: application/json\r\n\r\n" + marker + b"\r\n--x\r\n\r\n\r\n--x--\r\n"
    urlopen(UrlRequest(url, body, {"Content-Type": "multipart/related; boundary=x"}), timeout=5).close()
    assert len(list(GcsStorage(BUCKET).list(folder_of(storage)))) == 1
    assert [info.path for info in storage.list("")] == ["checkpoints/1"]


# --- a pipeline -----------------------------------------------------------------------------------------------------------


@pytest.mark.spark
@pytest.mark.long("20 seconds")
def test_intervals_on_the_server_leave_what_they_leave_on_disk(
    spark: SparkSession, server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same digests, state and output, read by Spark from either; with faults strewn over the requests."""
    from cairn.data_sources.keyed_output import KeyedOutput
    from cairn.data_sources.keyed_state import KeyedState
    from cairn.operations.intervals.run_interval import run_interval
    from cairn.operations.savepoints.restore_savepoint import restore_savepoint
    from cairn.operations.savepoints.take_savepoint import take_savepoint
    from tests.support.counting import DAYS, counting, day

    # What Python workers see; the JVM was perhaps started before the server.
    monkeypatch.setitem(spark.sparkContext.environment, EMULATOR_VARIABLE, server.url)
    monkeypatch.setitem(
        DAYS, day(0).start, [("ann", "pear", 1), ("bob", "fig", 5), ("ann", "fig", 2), (None, "fig", 9)]
    )
    monkeypatch.setitem(DAYS, day(1).start, [("ann", "pear", 3), ("eve", "kiwi", 4)])
    for source in (KeyedOutput, KeyedState):
        spark.dataSource.register(source)

    def read(root: str, kind: str, **options: str) -> list[str]:
        reader = spark.read.format(kind).option("root", root).option("pipeline", "counting").options(**options)
        return sorted(str(row) for row in reader.load().collect())

    bucket, disk = f"gs://{BUCKET}/pipelines/{uuid4().hex}", str(tmp_path)
    found = {}
    for root in (bucket, disk):
        with (
            server.broken("503", skip=3, times=2) as refused,
            server.broken("lost", skip=15) as lost,
            server.broken("reset", skip=30) as reset,
        ):
            records = [run_interval(spark, counting(), day(n), root) for n in range(2)]
        assert [fault.struck for fault in (refused, lost, reset)] == ([2, 1, 1] if root == bucket else [0, 0, 0])
        # A savepoint beside it, a pipeline that starts from the savepoint, and its next interval.
        take_savepoint(spark, counting(), f"{root}/counting", records[1], f"{root}/savepoint")
        restore_savepoint(spark, counting(), f"{root}/new", f"{root}/savepoint")
        records.append(run_interval(spark, counting(), day(2), f"{root}/new"))
        found[root] = (
            [record.content.digest for record in records],
            [read(root, "keyed_state", state=name) for name in ("total", "items", "amounts", "$timers")],
            read(root, "keyed_output"),
            read(f"{root}/new", "keyed_output"),
        )
    assert found[bucket] == found[disk]
    assert [len(rows) for rows in found[bucket][2:]] == [5, 2]
    files = [
        info.path.partition("/")[0] for info in GcsStorage(BUCKET, f"{bucket[6 + len(BUCKET) :]}/counting").list("")
    ]
    assert {"checkpoints", "output", "published"} <= set(files)


@pytest.mark.long("twenty seconds")
@pytest.mark.spark
def test_a_query_on_the_server_never_shows_half_an_interval(
    spark: SparkSession, server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A re-run is committed after a query was planned: while the older files are there it shows the older result, all of it; when
    they are cleaned up it fails and says to ask again. A query that is planned then shows the newer one, all of it."""
    from cairn.data_sources.keyed_output import KeyedOutput, _OutputReader
    from cairn.operations.coordinator_of import coordinator_of
    from cairn.operations.intervals.run_interval import run_interval
    from state_backend.checkpoint.coordinator import Coordinator
    from state_backend.values.retention import KeepLast
    from tests.support.counting import DAYS, counting, day

    monkeypatch.setitem(spark.sparkContext.environment, EMULATOR_VARIABLE, server.url)
    root = f"gs://{BUCKET}/half/{uuid4().hex}"
    spark.dataSource.register(KeyedOutput)

    def committed(amount: int) -> None:
        monkeypatch.setitem(DAYS, day(0).start, [(f"user-{n}", "fig", amount) for n in range(40)])
        run_interval(spark, counting(), day(0), root)

    def planned() -> tuple[_OutputReader, list[object]]:
        source = KeyedOutput({"root": root, "pipeline": "counting"})
        reader = source.reader(source.schema())
        return reader, list(reader.partitions())

    def totals(reader: _OutputReader, partitions: list[object]) -> list[set[int]]:
        return [{row["total"] for batch in reader.read(p) for row in batch.to_pylist()} for p in partitions]

    committed(1)
    reader, partitions = planned()
    assert len(partitions) == 2  # one file for each shard
    first = totals(reader, partitions[:1])
    committed(2)
    assert first + totals(reader, partitions[1:]) == [{1}, {1}]
    assert totals(*planned()) == [{2}, {2}]
    table = spark.read.format("keyed_output").option("root", root).option("pipeline", "counting").load()
    assert {row.total for row in table.collect()} == {2}
    reader, partitions = planned()
    assert totals(reader, partitions[:1]) == [{2}]
    committed(3)
    coordinator = Coordinator(GcsStorage(BUCKET, root[6 + len(BUCKET) :] + "/counting"), "counting", policy=KeepLast(1))
    monkeypatch.setattr(Coordinator, "of", lambda *_, **__: coordinator)
    committed(4)
    coordinator_of(counting(), root).clean_up()
    with pytest.raises(StorageUnavailable, match=r"a re-run replaced .* while this query ran"):
        totals(reader, partitions[1:])
    assert totals(*planned()) == [{4}, {4}]


# --- copies ---------------------------------------------------------------------------------------------------------------


def test_a_copy_within_the_server_moves_no_bytes(storage: GcsStorage, server: GcsServer, tmp_path: Path) -> None:
    handle = storage.create("large", LARGE)
    target = GcsStorage(BUCKET, f"copies/{uuid4().hex}", patience=HURRY)
    before = len(server.requests)
    assert target.copy_from(storage, handle, "here") == handle_of("here", LARGE)
    assert all(len(r.body) < 1000 and "alt=media" not in r.target for r in server.requests[before:])
    assert storage.delete("large")
    assert target.read("here") == LARGE
    with pytest.raises(NotFound, match="large"):
        target.copy_from(storage, handle, "there")
    storage.create("large", NEW)
    with pytest.raises(CorruptFile, match=f"expected {len(LARGE)} bytes"):
        target.copy_from(storage, handle, "there")
    with pytest.raises(AlreadyExists, match="here"):
        target.copy_from(storage, handle_of("large", NEW), "here")
    assert [info.path for info in target.list("")] == ["here"]


def test_a_copy_from_elsewhere(storage: GcsStorage, tmp_path: Path) -> None:
    disk = LocalStorage(tmp_path / "disk")
    assert storage.copy_from(disk, disk.create("a", LARGE), "b") == handle_of("b", LARGE)
    assert storage.read("b") == LARGE


@pytest.mark.long("ten seconds")
def test_a_trial_on_the_server_moves_no_state_and_leaves_nothing(server: GcsServer) -> None:
    """Forked, tried, compared, deployed for the past, removed. The fork copies within the server: each file by one request, and no byte of
    state comes here or goes there."""
    from functools import partial

    from cairn import testing
    from cairn.operations.coordinator_of import coordinator_of
    from cairn.trials.compare_trial import compare_trial
    from cairn.trials.promote_trial import plan_promotion, promote_past
    from state_backend.adapters.open_storage import open_storage
    from state_backend.checkpoint.trials import find_trial, list_trials, remove_trial
    from tests.support.counting import DAYS, day
    from tests.support.trials import CHANGED, OLD, SESSION, run, try_days

    root = f"gs://{BUCKET}/trials/{uuid4().hex}"
    production = GcsStorage(BUCKET, f"{root.removeprefix(f'gs://{BUCKET}/')}/counting")

    def objects() -> dict[str, tuple[int, int]]:
        return {info.path: (info.size_bytes, generation(production, info.path)) for info in production.list("")}

    DAYS.update({day(n).start: [(f"user {i}", "fig", i) for i in range(0, 4000, 1 + 100 * (n > 0))] for n in range(3)})
    try:
        run(OLD, root, range(3))
        before, marks = objects(), dict[str, int]()

        def on_shards(*given: Any) -> Any:
            marks.setdefault("forked", len(server.requests))
            return testing._on_shards(CHANGED.processor, *given)

        def planned(_: Any) -> None:
            marks["planned"] = len(server.requests)

        tried = try_days(CHANGED, root, [1, 2], on_plan=planned, on_shards=on_shards)
        assert tried.trial.base is not None and objects() == before
        fork = server.requests[marks["planned"] : marks["forked"]]
        copies = [r for r in fork if r.method == "POST" and ("/rewriteTo/" in r.target or "/copyTo/" in r.target)]
        state = [path for path in before if path.startswith("shared/")]
        assert len(copies) == len(set(unquote(r.target) for r in copies)) and 0 < len(copies) <= len(state)
        moved = [r for r in fork if ".sst" in unquote(r.target) and ("alt=media" in r.target or "/upload/" in r.target)]
        assert not moved and sum(len(r.body) for r in fork) < 100_000
        # The rest: records, the lease, the trial's own record, leftovers of a removed trial with this name, and the first interval's requests
        # before its shards; whatever the size of the state.
        assert len(fork) - 2 * len(copies) <= 84, len(fork)

        began = len(server.requests)
        _, found = compare_trial(root, "counting", None, ["user", "kind"], 1)
        assert {s.state for s in found.states} == {"total", "seen_at", "$timers"} and not found.outputs
        print(f"fork {len(fork)} requests, {len(copies)} of them copies; comparison {len(server.requests) - began}")

        plan = plan_promotion(SESSION, CHANGED, root, past=True)
        promote_past(SESSION, CHANGED, root, plan, on_shards=partial(testing._on_shards, CHANGED.processor))
        assert coordinator_of(OLD, root).log().head_id == 5
        assert compare_trial(root, "counting", None, [], 1)[1].same
        there = objects()
        remove_trial(root, find_trial(root, "counting"))
        assert not list_trials(root, "counting") and not [*open_storage(f"{root}/.trials").list("")]
        assert objects() == there and not [path for path in there if path.startswith("leases/")]
    finally:
        DAYS.clear()
