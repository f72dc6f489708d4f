"""The same on a Spark Connect server that lives longer than an interval."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import re
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from cairn.spark import session as spark_session
from cairn.spark_versions import has
from local_stack.owned_process import command_line, python_path
from state_backend.adapters.open_storage import open_storage
from state_backend.values.errors import StateUnusable
from state_backend.values.operation_parameters import ProcessInterval, Request, TakeSavepoint, Validate
from state_backend.values.records import Record, RunRef
from tests.support.coordinator import Coordinator
from tests.support.drivers import words_of
from tests.support.local_stack import SparkConnectServer
from tests.support.printed_commands import run_printed
from tests.support.reading import read_output
from tests.support.waiting import wait_until

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-that-only-the-server-knows"

PIPELINE = """
from datetime import UTC, datetime
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row
from cairn.pipeline import Pipeline
from pyspark.sql import functions as F
import helper_of_it
from helper_of_it import GREETING

def source(spark, interval):
    return told(spark.createDataFrame([("ann", 1), ("bob", 2)], "user string, amount long"))

def tell(user):
    return f"{helper_of_it.GREETING} VERSION"

def told(rows):
    return rows if "VERSION" == "one" else rows.withColumn("told", F.udf(tell)("user"))

class Greeter(StatefulProcessor):
    def init(self, handle):
        self._count = handle.getValueState("count", "n long")

    def handleInputRows(self, key, rows, timerValues):
        n = (self._count.get() or (0,))[0] + sum("told" not in row or row["told"] == f"{GREETING} VERSION" for row in rows)
        self._count.update((n,))
        yield Row(user=key[0], text=f"{GREETING} VERSION {n}")

def initial(spark):
    return spark.createDataFrame([("cid", 1)], "USER string, n long").groupBy("user")

PIPELINE = Pipeline(name="greeting", start=datetime(2024, 1, 1, tzinfo=UTC), source=source, key=["User"], initial_state=initial,
                    processor=Greeter, output_schema="user string, text string", max_parallelism=8)
"""


@pytest.fixture(scope="module")
def local_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server's Spark keeps its files."""
    return tmp_path_factory.mktemp("spark-local")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, local_dir: Path) -> Iterator[SparkConnectServer]:
    conf = {"spark.local.dir": str(local_dir)}
    with SparkConnectServer(ROOT, log_dir=tmp_path_factory.mktemp("spark-logs"), token=TOKEN, conf=conf) as running:
        yield running


def drive(
    folder: Path, server: str, request: Request, *, settings: dict[str, Any] | None = None, **call: str
) -> dict[str, Any]:
    """One driver process, as Airflow starts it; its result."""
    driver = start(folder, server, request, settings=settings, **call)
    output, _ = driver.communicate()
    assert TOKEN not in output
    result = folder / "result.json"
    assert result.exists(), output
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def start(
    folder: Path, server: str, request: Request, *, settings: dict[str, Any] | None = None, **call: str
) -> subprocess.Popen[str]:
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    path = python_path(folder, ROOT)
    words = words_of(request, spark=server, settings_on_stdin=server.startswith("sc://"), **call)
    driver = subprocess.Popen(
        [sys.executable, "-m", "cairn.driver.driver", *words, "--result", str(result)],
        env={
            **os.environ,
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(folder / "certificate.pem"),
        },
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert driver.stdin is not None
    driver.stdin.write(json.dumps(settings or {"token": TOKEN}))
    driver.stdin.close()
    driver.stdin = None
    return driver


def process(
    folder: Path, server: str, day: int, attempt: str, *, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    return drive(folder, server, interval_of(folder, day, attempt), settings=settings)


def of_code(folder: Path) -> dict[str, Any]:
    return {"root": str(folder / "root"), "code": "pipeline_of_it:PIPELINE"}


def interval_of(folder: Path, day: int, attempt: str, *, try_number: int = 1) -> ProcessInterval:
    return ProcessInterval(
        **of_code(folder),
        start=datetime(2024, 1, day, tzinfo=UTC),
        end=datetime(2024, 1, day + 1, tzinfo=UTC),
        run=RunRef(run_id=f"run-{day}", clear_number=0, try_number=try_number),
        attempt=attempt,
    )


def write_pipeline(folder: Path, version: str, greeting: str) -> None:
    (folder / "pipeline_of_it.py").write_text(PIPELINE.replace("VERSION", version))
    (folder / "helper_of_it.py").write_text(f"GREETING = {greeting!r}\n")
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)


@pytest.mark.long("half a minute")
def test_an_edited_processor_counts_from_the_next_interval_on(
    server: SparkConnectServer, local_dir: Path, tmp_path: Path
) -> None:
    """The server goes on running, and its workers have imported nothing of the user's: the processor's file, and one that
    it imports, are edited between intervals, and each time the hash in the record changes with them. Shuffle files don't pile up."""
    coordinator = Coordinator(open_storage(str(tmp_path / "root" / "greeting")), "greeting")
    hashes, texts = [], []
    for day, (version, greeting) in enumerate(
        [("one", "hello"), ("two", "hello"), ("two", "servus"), ("two", "servus")], start=1
    ):
        write_pipeline(tmp_path, version, greeting)
        result = process(tmp_path, server.url, day, f"attempt-{day}")
        assert "ok" in result, result
        record = coordinator.commit(f"attempt-{day}").record
        assert record is not None
        hashes.append(record.content.code_hash)
        files = [tmp_path / "root" / "greeting" / f.handle.path for f in record.content.outputs]
        texts.append(sorted(row["text"] for f in files for row in pq.read_table(f).to_pylist()))
    assert texts == [["hello one 1"] * 2, ["hello two 2"] * 2, ["servus two 3"] * 2, ["servus two 4"] * 2]
    assert len(set(hashes)) == 3
    assert hashes[2] == hashes[3]
    wait_until(lambda: not any(local_dir.rglob("shuffle_*")), 10, "no shuffle file is left")
    assert any(local_dir.rglob("blockmgr-*"))


@pytest.mark.long("half a minute of Spark")
def test_validation_runs_in_other_processes_than_the_writer(server: SparkConnectServer, tmp_path: Path) -> None:
    """A small state is restored in the driver of the validation itself, which is not the process that wrote the state."""
    write_pipeline(tmp_path, "one", "hello")
    process(tmp_path, server.url, 1, "attempt-1")
    record = Coordinator(open_storage(str(tmp_path / "root" / "greeting")), "greeting").commit("attempt-1").record
    assert record is not None
    result = drive(tmp_path, server.url, Validate(**of_code(tmp_path), checkpoint=str(record.id)))
    assert result["ok"]["success"], result
    assert result["ok"]["entries"] == 2
    assert result["ok"]["pids"]
    assert not set(result["ok"]["pids"]) & set(record.content.worker_pids)


@pytest.mark.long("half a minute of Spark; tests/unit/test_stateful_source.py has each operation")
def test_the_log_names_operations_that_see_one_interval_only(server: SparkConnectServer, tmp_path: Path) -> None:
    write_pipeline(tmp_path, "one", "hello")
    module = tmp_path / "pipeline_of_it.py"
    module.write_text(module.read_text().replace('amount long")', 'amount long").dropDuplicates(["user"])'))
    driver = start(tmp_path, server.url, interval_of(tmp_path, 1, "attempt-1"))
    output, _ = driver.communicate()
    assert "'greeting': the source has dropDuplicates or distinct (use cairn.processors.Deduplicate)" in output


LEAVES_ALL_BEHIND = """
def source(spark, interval):
    spark.udf.register("left_over", lambda: 1, "int") if not spark.catalog.functionExists("left_over") else print("SEEN: function")
    spark.range(1).createTempView("left_behind")
    print("SEEN:", spark.conf.get("spark.sql.shuffle.partitions"), spark.conf.get("left.behind", None))
    spark.conf.set("spark.sql.shuffle.partitions", "3")
    spark.conf.set("left.behind", "a setting")
    return spark.read.schema("user string, amount long").json("file://FOLDER/input.json")
"""


def test_a_driver_sees_nothing_of_the_driver_before(server: SparkConnectServer, tmp_path: Path) -> None:
    """Two corrections of one input within an hour: Spark's plan cache answered the second driver with the list of files, and their
    lengths, of the first. Views, functions and settings of a driver were there for the next one too."""
    write_pipeline(tmp_path, "one", "hello")
    module = tmp_path / "pipeline_of_it.py"
    before, _, after = module.read_text().partition("def source(spark, interval):")
    after = after[after.index("class Greeter") :]
    module.write_text(before + LEAVES_ALL_BEHIND.replace("FOLDER", str(tmp_path)) + after)
    for lines in (5, 10, 7, 23):
        (tmp_path / "input.json").write_text('{"user": "ann", "amount": 1}\n' * lines)
        driver = start(tmp_path, server.url, interval_of(tmp_path, 1, f"attempt-{lines}"))
        output, _ = driver.communicate()
        result = json.loads((tmp_path / "result.json").read_text())
        assert result.get("ok", result).get("input_rows") == lines, output
        assert [line for line in output.splitlines() if line.startswith("SEEN:")] == ["SEEN: 2 None"]


def test_artifacts_are_refused_in_sessions_with_shared_workers(server: SparkConnectServer, tmp_path: Path) -> None:
    write_pipeline(tmp_path, "one", "hello")
    module = tmp_path / "pipeline_of_it.py"
    module.write_text(
        module.read_text().replace(
            "    return spark.create", f"    spark.addArtifacts({str(module)!r}, file=True)\n    return spark.create"
        )
    )
    if not has("copies of Connect sessions"):  # Then each session has workers of its own.
        assert "ok" in process(tmp_path, server.url, 1, "own")
        return
    error = process(tmp_path, server.url, 1, "refused")["error"]
    assert error["type"] == "UsageError" and "Python workers of its own, set spark.sql.artifact" in error["message"]
    conf = {"token": TOKEN, "conf": {spark_session.ISOLATION: "true"}}
    assert "ok" in process(tmp_path, server.url, 1, "allowed", settings=conf)


# A client whose Python has neither Py4J nor RDDs, on a server that refuses what serverless platforms refuse. It notes each request.
LIMITED_CLIENT = """
import atexit, importlib.abc, os, sys
import grpc

class Lacking(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "py4j" or name == "pyspark.core":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

class Refused(grpc.RpcError):
    def __init__(self, text):
        self.text = text
    def code(self):
        return grpc.StatusCode.PERMISSION_DENIED
    def details(self):
        return self.text
    def trailing_metadata(self):
        return ()
    def __str__(self):
        return "PERMISSION_DENIED: " + self.text

class Limits(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamUnaryClientInterceptor):
    def look(self, proceed, details, request):
        method = details.method.rpartition("/")[2]
        asked = [pair.key for pair in request.operation.set.pairs] if method == "Config" else []
        with open("requests.txt", "a") as file:
            print(method, *asked, file=file)
        if method in ("AddArtifacts", "ArtifactStatus", "CloneSession", "Interrupt"):
            raise Refused(f"{method} is not supported here")
        if any(key not in ("spark.sql.session.timeZone", "spark.sql.artifact.isolation.enabled") for key in asked):
            raise Refused(f"[CONFIG_NOT_AVAILABLE] Configuration {asked[0]} is not available.")
        return proceed(details, request)
    intercept_unary_unary = intercept_unary_stream = intercept_stream_unary = look

def limited(make):
    return lambda *given, **named: grpc.intercept_channel(make(*given, **named), Limits())

sys.meta_path.insert(0, Lacking())
grpc.insecure_channel, grpc.secure_channel = limited(grpc.insecure_channel), limited(grpc.secure_channel)
atexit.register(lambda: open("modules.txt", "a").write("\\n".join(sys.modules) + "\\n"))
"""


def test_intervals_need_neither_py4j_nor_what_serverless_platforms_refuse(
    server: SparkConnectServer, tmp_path: Path
) -> None:
    """An interval of Airflow's driver and one of `cairn run`. docs/requests.md lists each request that they send."""
    write_pipeline(tmp_path, "one", "hello")
    (tmp_path / "sitecustomize.py").write_text(LIMITED_CLIENT)
    result = process(tmp_path, server.url, 1, "attempt-1")
    assert "ok" in result, result
    commit(tmp_path, "attempt-1")
    run = f"cairn run --code pipeline_of_it:PIPELINE --root {tmp_path}/root --every 1d"
    said = run_printed(run, tmp_path, PYTHONPATH=python_path(tmp_path, ROOT), CAIRN_SPARK=server.url)
    assert "checkpoint 2, 2 rows in" in said
    assert not {"py4j", "pyspark.core"} & {*(tmp_path / "modules.txt").read_text().splitlines()}
    sent = [line.split() for line in (tmp_path / "requests.txt").read_text().splitlines()]
    page = (ROOT / "docs" / "requests.md").read_text().partition("## Requests to a Connect server\n")[2]
    listed = re.findall(r"^\| `(\w+)`", page.partition("\n## ")[0], re.MULTILINE)
    methods = {method for method, *_ in sent}
    assert methods <= {*listed} and ("CloneSession" in methods) == has("copies of Connect sessions")
    assert [keys for method, *keys in sent if method == "Config"].count(["spark.sql.session.timeZone"]) == 2


def daemons_of(server: SparkConnectServer) -> dict[int, str]:
    """The Python daemons of a server, without their workers, each with the session that it belongs to; "default": all."""
    daemons = {pid for pid in server.pids() if "pyspark.daemon" in command_line(pid)}
    daemons -= {pid for pid in daemons if psutil.Process(pid).ppid() in daemons}
    return {pid: psutil.Process(pid).environ()["SPARK_JOB_ARTIFACT_UUID"] for pid in daemons}


def test_drivers_share_a_daemon_and_every_daemon_has_a_watcher(server: SparkConnectServer, tmp_path: Path) -> None:
    """Spark keeps the daemon until the server ends; ``test_idle_daemon.py`` shows the end that the watcher makes of it."""
    write_pipeline(tmp_path, "one", "hello")
    before = daemons_of(server)
    for attempt in range(3):
        process(tmp_path, server.url, 1, f"attempt-{attempt}")
    daemons = daemons_of(server)
    sessions = [session for pid, session in daemons.items() if pid not in before]
    shared = has("copies of Connect sessions")
    assert {*sessions} <= {"default"} if shared else len({*sessions} - {"default"}) == 3
    lines = [command_line(pid) for pid in server.pids()]
    watched = {int(line[-2]) for line in lines if any("pidfd_open" in word for word in line)}
    assert daemons and {*daemons} <= watched


@pytest.mark.long("ten seconds of Spark")
def test_a_savepoint_is_taken_on_the_server(server: SparkConnectServer, tmp_path: Path) -> None:
    write_pipeline(tmp_path, "one", "hello")
    process(tmp_path, server.url, 1, "attempt-1")
    Coordinator(open_storage(str(tmp_path / "root" / "greeting")), "greeting").commit("attempt-1")
    result = drive(tmp_path, server.url, TakeSavepoint(**of_code(tmp_path), folder=str(tmp_path / "savepoint")))
    assert result["ok"]["files"] >= 1
    assert (tmp_path / "savepoint" / "savepoint.json").exists()


def test_errors_and_crashes_of_user_code_come_through_the_server(server: SparkConnectServer, tmp_path: Path) -> None:
    write_pipeline(tmp_path, "one", "hello")
    file = tmp_path / "pipeline_of_it.py"
    file.write_text(file.read_text().replace("self._count.update((n,))", "raise KeyError('on purpose')"))
    error = process(tmp_path, server.url, 1, "attempt-1")["error"]
    assert error["type"] == "ProcessorError"
    assert "handleInputRows, key ('" in error["message"]
    assert "KeyError: 'on purpose'" in error["message"]
    # The shard, its phase and the stack come from another process, perhaps on another host.
    file.write_text(file.read_text().replace("raise KeyError('on purpose')", "__import__('ctypes').string_at(0)"))
    log, _ = start(tmp_path, server.url, interval_of(tmp_path, 1, "attempt-2")).communicate()
    error = json.loads((tmp_path / "result.json").read_text())["error"]
    assert error["type"] == "WorkerDied", log
    assert "crashed by SIGSEGV while processing keys from key group" in error["message"]
    assert "Fatal Python error: Segmentation fault" in log and "in handleInputRows" in log


def test_error_names_a_spark_connect_server_that_is_unreachable(tmp_path: Path) -> None:
    write_pipeline(tmp_path, "one", "hello")
    error = process(tmp_path, "sc://127.0.0.1:9", 1, "attempt-1", settings={"conf": {}})["error"]
    assert error["type"] == "StorageUnavailable"
    assert "sc://127.0.0.1:9" in error["message"]


@pytest.mark.long("ten seconds: a server of its own")
def test_token_is_sent_only_over_tls_and_a_wrong_token_is_refused(server: SparkConnectServer, tmp_path: Path) -> None:
    """The server behind a proxy that speaks TLS, as servers are run: the token is not sent without TLS, another one is refused for
    good, and so is a setting that the server does not let a session make."""
    write_pipeline(tmp_path, "one", "hello")
    with tls_proxy(server.port, tmp_path) as port:
        where = f"sc://localhost:{port}/;use_ssl=true"
        result = process(tmp_path, where, 1, "attempt-1")
        assert "ok" in result, result
        refused = process(tmp_path, where, 1, "attempt-2", settings={"token": "another"})["error"]
        without = process(tmp_path, where, 1, "attempt-5", settings={"token": None})["error"]
        static = process(
            tmp_path, where, 1, "attempt-3", settings={"token": TOKEN, "conf": {"spark.executor.memory": "2g"}}
        )["error"]
        unprotected = process(tmp_path, f"sc://another-host:{port}", 1, "attempt-4")["error"]
    assert {error["type"] for error in (refused, without, static, unprotected)} == {"UsageError"}
    assert f"the Spark Connect server at {where} refuses a session without a token" in without["message"]
    assert f"the Spark Connect server at {where} refuses this token" in refused["message"]
    assert "does not let a session set spark.executor.memory" in static["message"]
    assert "without encryption\nSet use_ssl" in unprotected["message"]


def test_a_driver_of_this_user_finds_the_token(
    server: SparkConnectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each name of this machine. A driver of another user, who can't read the file, is refused."""
    write_pipeline(tmp_path, "one", "hello")
    for day, host in enumerate(("127.0.0.1", "localhost"), start=1):
        result = process(tmp_path, f"sc://{host}:{server.port}", day, f"attempt-{day}", settings={"conf": {}})
        assert "ok" in result, result
        commit(tmp_path, f"attempt-{day}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    refused = process(tmp_path, server.url, 3, "attempt-3", settings={"conf": {}})["error"]
    assert refused["type"] == "UsageError" and "refuses a session without a token" in refused["message"]


def test_spark_ports_beside_connect_refuse_unauthenticated_requests(server: SparkConnectServer) -> None:
    """Spark's RPC, its block manager and the daemon of its Python workers listen beside Spark Connect: each asks who it is first."""
    listening = {
        connection.laddr.port
        for pid in server.pids()
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert server.port in listening and len(listening) >= 3
    answers = []
    for port in listening - {server.port}:
        with contextlib.suppress(ConnectionRefusedError):  # The daemon of an earlier session has ended since.
            answers.append(refusal_of_spark(port, b"\xac\xed\x00\x05 a Java object"))
    assert None not in answers and answers.count("RPC") == 2


def refusal_of_spark(port: int, body: bytes) -> str | None:
    """Who refuses an RPC of Spark's network layer: frame length, type 3, request id, body length, body. None: the RPC was read."""
    head, answer = b"\x03" + struct.pack("!qi", 7, len(body)), b""
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.settimeout(10)
        connection.sendall(struct.pack("!q", 8 + len(head) + len(body)) + head + body)
        while more := connection.recv(4096):
            answer += more
            if b"Expected SaslMessage" in answer:
                return "RPC"
            if answer.endswith(b"\x00\x00\x00\x03err"):
                return "Python"
            if len(answer) > 200:
                return None
    return None


@contextlib.contextmanager
def tls_proxy(port: int, folder: Path) -> Iterator[int]:
    """A port where TLS is taken off what goes to ``port``; ``certificate.pem`` in the folder is for localhost."""
    request = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run(
        ["openssl", *request.split(), "-keyout", "key.pem", "-out", "certificate.pem"],
        cwd=folder,
        check=True,
        capture_output=True,
    )

    async def serve(ready: Callable[[tuple[int, Callable[[], None]]], None]) -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    writer.write(data)
                    await writer.drain()
            writer.close()

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(pump(reader, back), pump(there, writer))

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
        context.set_alpn_protocols(["h2"])
        listening = await asyncio.start_server(take, "127.0.0.1", 0, ssl=context)
        ready((listening.sockets[0].getsockname()[1], lambda: loop.call_soon_threadsafe(stop.set)))
        await stop.wait()
        listening.close()

    found: queue.Queue[tuple[int, Callable[[], None]]] = queue.Queue()
    thread = threading.Thread(target=lambda: asyncio.run(serve(found.put)), daemon=True)
    thread.start()
    listens_at, end = found.get(timeout=10)
    yield listens_at
    end()
    thread.join(10)


# --- a driver that ends while its operation runs on the server --------------------------------------------------------------


class Slow:
    """The first try of an interval writes a sign of life every 50 ms until it may finish, or a minute; a later try is quick."""

    def __init__(self, folder: Path, server: str) -> None:
        self.folder, self.server = folder, server
        self.beat = folder / "beat"
        write_pipeline(folder, "one", "hello")
        file = folder / "pipeline_of_it.py"
        slowly = f"""import time, pathlib
        folder = pathlib.Path({str(folder)!r})
        for beat in range(0 if (folder / "quick").exists() else 1200):
            (folder / "beat").write_text(str(beat))
            time.sleep(0.05)
            if (folder / "finish").exists():
                break
        self._count.update((n,))"""
        file.write_text(file.read_text().replace("self._count.update((n,))", slowly))

    def start(self, **call: str) -> subprocess.Popen[str]:
        """A driver whose processor is at work on the server."""
        driver = start(self.folder, self.server, interval_of(self.folder, 1, "attempt-1"), **call)
        wait_until(self.beat.exists, 60, "the processor runs")
        (self.folder / "quick").touch()
        return driver

    def still_beats(self) -> bool:
        before = self.beat.read_text()
        time.sleep(0.5)
        return self.beat.read_text() != before

    def prepared(self, attempt: str) -> bool:
        return (self.folder / "root" / "greeting" / "attempts" / attempt / "prepared.json").exists()


def test_next_try_ends_the_spark_operation_of_a_killed_driver(server: SparkConnectServer, tmp_path: Path) -> None:
    """kill -9 of the driver leaves its operation running on the shared server; the next try ends its session. Its Python
    workers are killed, nothing of it is prepared, and the server stays."""
    session = str(uuid.uuid4())
    slow = Slow(tmp_path, server.url)
    driver = slow.start(session=session)
    driver.kill()
    driver.communicate()
    assert slow.still_beats(), "the operation ended by itself, so this shows nothing"

    result = drive(tmp_path, server.url, interval_of(tmp_path, 1, "attempt-2", try_number=2), former=session)
    assert "ok" in result, result
    wait_until(lambda: not slow.still_beats(), 20, "the operation of the first try has ended")
    assert not slow.prepared("attempt-1")
    record = commit(tmp_path, "attempt-2")
    assert record.content.run.try_number == 2


def test_sigterm_interrupts_the_operation(server: SparkConnectServer, tmp_path: Path) -> None:
    """What on_kill and a timeout send: the driver ends by itself, and so does its operation, long before its minute is over. A later
    driver of the same server works."""
    slow = Slow(tmp_path, server.url)
    driver = slow.start()
    driver.terminate()
    output, _ = driver.communicate(timeout=10)
    assert driver.returncode == 128 + signal.SIGTERM
    assert "SIGTERM: interrupted operations on the Spark server: " in output and "none were running" not in output
    wait_until(lambda: not slow.still_beats(), 20, "its operation has ended")
    assert not slow.prepared("attempt-1")
    assert "ok" in process(tmp_path, server.url, 1, "attempt-2")


@pytest.mark.long("half a minute of Spark")
def test_attempt_of_an_operation_without_driver_is_not_committed(server: SparkConnectServer, tmp_path: Path) -> None:
    """S8, S29, and two live writers: the killed driver's operation is not interrupted, runs beside the next try, and writes its last
    files after that is committed. Nobody prepares its attempt, so that it can't be committed, and the state is that of the second."""
    slow = Slow(tmp_path, server.url)
    driver = slow.start()
    driver.kill()
    driver.communicate()
    result = drive(tmp_path, server.url, interval_of(tmp_path, 1, "attempt-2", try_number=2))
    assert "ok" in result, result
    record = commit(tmp_path, "attempt-2")
    assert slow.still_beats(), "the first try was over before the second was committed, so this shows nothing"

    (tmp_path / "finish").touch()
    wait_until(
        lambda: list((tmp_path / "root").rglob("output/*/attempt-1/*.parquet")), 40, "the first try writes its files"
    )
    wait_until(lambda: not slow.still_beats(), 40, "the first try goes on to its end")
    assert not slow.prepared("attempt-1")
    with pytest.raises(StateUnusable, match=r"attempt attempt-1 .* did not finish"):
        commit(tmp_path, "attempt-1")
    log = Coordinator(open_storage(str(tmp_path / "root" / "greeting")), "greeting").log()
    assert [(r.id, r.content.attempt, r.content.digest) for r in log.completed()] == [
        (record.id, "attempt-2", record.content.digest)
    ]
    assert "ok" in process(tmp_path, server.url, 2, "attempt-3")
    after = commit(tmp_path, "attempt-3")
    assert after.content.base_id == record.id
    assert sorted(row["text"] for row in read_output(tmp_path / "root" / "greeting", after)) == ["hello one 2"] * 2


def commit(folder: Path, attempt: str) -> Record:
    record = Coordinator(open_storage(str(folder / "root" / "greeting")), "greeting").commit(attempt).record
    assert record is not None
    return record


# --- a driver that is its own Spark --------------------------------------------------------------------------------------------


def test_jvm_and_python_workers_die_with_the_task(tmp_path: Path) -> None:
    """kill -9 of the task's process takes the driver, its JVM, Spark's Python daemon, and the worker that is busy."""
    slow = Slow(tmp_path, "local[1]")
    arguments = words_of(interval_of(tmp_path, 1, "attempt-1"), spark="local[1]")
    code = f"from cairn_operators.driver_process import DriverProcess; DriverProcess('cairn.driver.driver').run({arguments}, print)"
    path = python_path(tmp_path, ROOT, ROOT / "plugins")
    task = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(slow.beat.exists, 120, "the processor runs")
        driver = next(pid for pid, _, parent in processes() if parent == task.pid)
        started = {pid for pid, session, _ in processes() if session == driver}
        assert len(started) >= 4, "driver, JVM, daemon, worker"
    finally:
        task.kill()
        task.wait()
    wait_until(lambda: not started & {pid for pid, *_ in processes()}, 20, "all that the task started is gone")
    assert not slow.still_beats()


def processes() -> Iterator[tuple[int, int, int]]:
    """Process, session, parent; of all that live."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent, _, session = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            if state != "Z":
                yield int(folder.name), int(session), int(parent)
