"""What errors of Spark's client mean, and the tag by which a task's operations are found again."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyspark
import pytest
from pyspark.sql.types import StructField, StructType, YearMonthIntervalType
from typer.testing import CliRunner

from cairn.command import spark_server
from cairn.command.airflow_rest import explain_errors
from cairn.command.cli import app
from cairn.operations.intervals.read_source import input_errors, read_source
from cairn.spark import server_command as server_command_module
from cairn.spark import session as spark_session
from cairn.spark.first_cause import first_cause
from cairn.spark.local_server_secret import find_secret, kept_secret, new_secret
from cairn.spark.server_command import server_command
from cairn.spark.session import (
    _made_with_shared_workers,
    _properties,
    _with_token,
    check_running,
    collect_once,
    connect,
    end_session,
    explain,
    master_conf,
)
from cairn.spark_versions import clean_up_setting
from state_backend.values.errors import ProcessorError, SourceError, StorageUnavailable, UsageError
from tests.support.checkpoints import day
from tests.support.counting import counting
from tests.support.waiting import wait_until

CLEAN_UP = clean_up_setting(connect=False)


class Settings:
    """A session's settings. ``says``: why none can be changed."""

    def __init__(self, before: str | None = None, says: str | None = None) -> None:
        self.held, self.says = {} if before is None else {CLEAN_UP: before}, says
        self.conf = self

    def get(self, name: str, default: str | None) -> str | None:
        return self.held.get(name, default)

    def set(self, name: str, value: str) -> None:
        if self.says is not None:
            raise RuntimeError(self.says)
        self.held[name] = value

    def unset(self, name: str) -> None:
        del self.held[name]


@pytest.mark.parametrize("before", [None, "false"])
def test_shuffle_files_of_one_query_are_deleted(before: str | None) -> None:
    """It is planned with the setting, and runs without. One that fails leaves it, rather than ask a server that may be gone."""
    session: Any = Settings(before)
    there, seen = dict(session.held), list[Any]()

    def query() -> Any:
        seen.append(session.held.get(CLEAN_UP))
        return SimpleNamespace(collect=lambda: seen.append(session.held.get(CLEAN_UP)) or ["row"])

    assert cast(Any, collect_once(session, query)) == ["row"]
    assert seen == ["true", before] and session.held == there
    with pytest.raises(ZeroDivisionError) as raised:
        collect_once(session, lambda: cast(Any, 1 / 0))
    assert session.held == {CLEAN_UP: "true"} and raised.value.__context__ is None


def test_a_query_runs_if_the_server_forbids_the_shuffle_clean_up_setting() -> None:
    refused: Any = Settings(says=f'[CANNOT_MODIFY_CONFIG] "{CLEAN_UP}"')
    frame: Any = SimpleNamespace(collect=lambda: ["row"])
    assert cast(Any, collect_once(refused, lambda: frame)) == ["row"] and not refused.held
    lost: Any = Settings(says="StatusCode.UNAVAILABLE: failed to connect to all addresses")
    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        collect_once(lost, lambda: frame)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[OPERATION_CANCELED] Operation has been canceled. SQLSTATE: HY008", "was interrupted"),
        ("[SPARK_JOB_CANCELLED] Job 0 cancelled", "was interrupted"),
        ("StatusCode.UNAVAILABLE: failed to connect to all addresses", "lost its Spark Connect server"),
        ("[INVALID_HANDLE.SESSION_CHANGED] The handle is invalid.", "lost its Spark Connect server"),
        ("[NO_ACTIVE_SESSION] No active Spark session found.", "lost its Spark Connect server"),
        ("Cannot call methods on a stopped SparkContext", "lost its Spark Connect server"),
        ("[RESPONSE_ALREADY_RECEIVED] OPERATION_NOT_FOUND on the server but", "lost its Spark Connect server"),
        ("[RETRIES_EXCEEDED] The maximum number of retries has been exceeded.", "lost its Spark Connect server"),
    ],
)
def test_a_lost_server_or_operation_is_worth_a_retry(text: str, what: str) -> None:
    error = explain(RuntimeError(text + "\n\tat org.apache.spark.Something"), "sc://h:7")
    assert isinstance(error, StorageUnavailable)
    assert f"at sc://h:7 {what}" in str(error) and text in str(error) and "org.apache" not in str(error)


def test_the_error_of_a_lost_server_includes_the_grpc_details() -> None:
    class RpcError(Exception):
        def details(self) -> str:
            return "connection refused"

    assert "connection refused" in str(
        explain(RpcError("<RPC that terminated with:\n\tStatusCode.UNAVAILABLE"), "sc://h")
    )
    given_up = RuntimeError("[RETRIES_EXCEEDED] The maximum number of retries has been exceeded.")
    given_up.__cause__ = RpcError()  # as PySpark 4.0 raises it
    assert "was restarted: connection refused\n" in str(explain(given_up, "sc://h"))
    within = '<_InactiveRpcError of RPC that terminated with:\n\tstatus = StatusCode.UNAVAILABLE\n\tdetails = "Socket closed"\n>'
    told = str(explain(RuntimeError(within), "sc://h"))
    assert told.endswith("was restarted: Socket closed\nNothing was committed. Try again")


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (ProcessorError("user code said UNAVAILABLE"), "sc://h:7"),
        (RuntimeError("UNAVAILABLE"), "local[2]"),
        (RuntimeError("something else"), "sc://h:7"),
    ],
)
def test_errors_not_caused_by_a_lost_server_stay_unchanged(error: Exception, where: str) -> None:
    assert explain(error, where) is error


def test_a_source_is_not_blamed_for_a_lost_server() -> None:
    def lost(*_: Any) -> Any:
        raise RuntimeError("[SESSION_CLOSED] the server went")

    with pytest.raises(RuntimeError, match="the server went"):
        read_source(cast(Any, None), counting(source=lost), day(1), "root")


def test_a_url_that_names_a_session_is_refused() -> None:
    with pytest.raises(UsageError, match=r"sc://h:7: the URL names a Spark session.*\nTake session_id out of the URL"):
        connect("sc://h:7/;token=secret;session_id=0b1c2d3e-0000-0000-0000-000000000000", "test")


def server_of(patch: pytest.MonkeyPatch, settings: Any = lambda *_: None, **calls: Any) -> Any:
    """The client of a session without a server."""
    none = lambda *_: None  # noqa: E731
    client = SimpleNamespace(close=none, release_session=none, set_retry_policies=none, _on_exit=none, **calls)
    empty = SimpleNamespace(client=client, conf=SimpleNamespace(set=settings))
    patch.setattr("pyspark.sql.connect.session.SparkSession", lambda connection: empty)
    patch.setattr(spark_session, "connect_channel", none)
    return client


@pytest.mark.parametrize(
    ("says", "shared"),
    [
        (None, True),
        ("[CONFIG_NOT_AVAILABLE] spark.sql.artifact.isolation.enabled is not available", False),
        ("StatusCode.UNIMPLEMENTED: Method not found: CloneSession", False),
    ],
)
def test_sessions_share_python_workers_only_if_the_server_allows_cloning(
    monkeypatch: pytest.MonkeyPatch, says: str | None, shared: bool
) -> None:
    copies: list[str] = []

    def copy(session: str) -> Any:
        if says is not None:
            raise RuntimeError(says)
        copies.append(session)
        return client

    client = server_of(monkeypatch, clone=copy)
    url = "sc://h:7/;user_id=me;session_id=0b1c2d3e-0000-0000-0000-000000000000"
    assert _made_with_shared_workers(url, None) == shared
    assert copies == ["0b1c2d3e-0000-0000-0000-000000000000"] * shared


def test_a_lost_server_fails_the_request_for_shared_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any) -> None:
        raise RuntimeError("StatusCode.UNAVAILABLE: failed to connect to all addresses")

    server_of(monkeypatch, settings=lost)
    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        _made_with_shared_workers("sc://h:7/;session_id=u", None)


def test_configuration_reaches_a_jvm_by_a_file_of_this_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Java reads back what was written, and nothing of it is in an argument."""
    conf = {"spark.a b": "x=y: \\ #\u00e9\U0001f600\n z", "spark.b": "plain"}
    monkeypatch.delenv("PYSPARK_SUBMIT_ARGS", raising=False)
    with _properties(conf):
        arguments = os.environ["PYSPARK_SUBMIT_ARGS"].split()
        file = Path(arguments[arguments.index("--properties-file") + 1])
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        read = {}
        for line in file.read_text().splitlines():
            key, _, value = line.partition("=")
            units = (re.sub(r"\\u(....)", lambda m: chr(int(m[1], 16)), text) for text in (key, value))
            key, value = (text.encode("utf-16", "surrogatepass").decode("utf-16") for text in units)
            read[key] = value
        assert read == conf and not any("spark.b" in argument for argument in arguments)
    assert "PYSPARK_SUBMIT_ARGS" not in os.environ and not file.exists()


STARTS_A_JVM = """
from cairn.spark import session
session.require_java = lambda _: None
session.connect("local[1]", "test", conf={"spark.b": "c"})
"""


@pytest.mark.long("seconds", runs_in="ci")
def test_a_process_that_is_killed_while_its_jvm_starts_leaves_work_folders_only(tmp_path: Path) -> None:
    """The next task deletes abandoned work folders."""
    program, temp = tmp_path / "spark" / "bin" / "spark-submit", tmp_path / "temp"
    program.parent.mkdir(parents=True)
    temp.mkdir()
    program.write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/started.new\nmv {tmp_path}/started.new {tmp_path}/started\nexec sleep 60\n"
    )
    program.chmod(0o755)
    environment = {
        **os.environ,
        "SPARK_HOME": str(tmp_path / "spark"),
        "TMPDIR": str(temp),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    process = subprocess.Popen([sys.executable, "-c", STARTS_A_JVM], env=environment)
    try:
        wait_until((tmp_path / "started").exists, 60, "a JVM starts")
        process.kill()
        process.wait()
        assert [folder.name for folder in temp.iterdir()] == [f"cairn-work-{os.geteuid()}"]
        left = {folder.name.split("-")[1] for folder in (temp / f"cairn-work-{os.geteuid()}").iterdir()}
        assert left == {"conf", "gateway"}
    finally:
        process.kill()
        process.wait()
        if (tmp_path / "started").exists():
            os.kill(int((tmp_path / "started").read_text()), signal.SIGKILL)


def test_ending_a_session_of_a_local_master_does_nothing() -> None:
    end_session("local[2]", "0b1c2d3e-0000-0000-0000-000000000000")


def test_a_py4j_error_is_reported_as_its_java_exception_and_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first line names the call by a number."""

    def source(*_: Any) -> Any:
        raise RuntimeError(
            "An error occurred while calling o161.load.\n: org.example.DriverException: no connection\n\tat a.B.c(B.java)\n"
            "Caused by: java.net.ConnectException: refused\n"
        )

    with pytest.raises(SourceError) as raised:
        read_source(cast(Any, None), counting(source=source), day(1), "root")
    assert str(raised.value).endswith(
        "the source raised org.example.DriverException: no connection; caused by java.net.ConnectException: refused"
    )


# --- sources -----------------------------------------------------------------------------------------------------------------------


class Frame:
    """What a source may return, as far as it is looked at before the rows are."""

    isStreaming = False
    select = unionByName = None

    def __init__(self, *columns: StructField, streaming: bool = False) -> None:
        self.schema, self.isStreaming = StructType([*columns]), streaming


@pytest.mark.parametrize(
    ("returns", "says"),
    [
        (5, "the source returned a int; it must return a DataFrame, or a DataFrame and its position"),
        (None, "the source returned None; it must return a DataFrame"),
        (Frame(streaming=True), "a streaming DataFrame, which has no end; read the interval's rows with spark.read"),
        ((Frame(), "offset 5"), "the source's position must be a dict of JSON values: it is a str"),
        ((Frame(), {"at": float("nan")}), "the source's position must be a dict of JSON values: Out of range"),
        (
            Frame(StructField("m", YearMonthIntervalType(1, 1))),
            "column 'm' is interval month; interval month can't be passed to Python; in the source, drop the column",
        ),
    ],
)
def test_a_source_that_returns_no_usable_dataframe_or_position_is_refused(returns: Any, says: str) -> None:
    with pytest.raises(SourceError) as raised:
        read_source(cast(Any, None), counting(source=lambda *_: returns), day(1), "root")
    assert str(raised.value).startswith(f"pipeline 'counting', {day(1)}: ") and says in str(raised.value)


@pytest.mark.parametrize(
    ("spark_says", "error", "says"),
    [
        (
            '[CANNOT_MODIFY_STATIC_CONFIG] Cannot modify "spark.executor.memory"',
            UsageError,
            "does not let a session set spark.executor.memory: .*\nSet it where the server is started",
        ),
        (
            '[CONFIG_NOT_AVAILABLE] Cannot modify "spark.sql.session.timeZone"',
            UsageError,
            "does not let a session set spark.sql.session.timeZone: .*\nSet it where the server is started",
        ),
        (
            "UNAUTHENTICATED: Invalid authentication token",
            UsageError,
            "refuses a session without a token: .*\nSet .* password",
        ),
        (
            "Deadline exceeded\n\tat org.x",
            StorageUnavailable,
            r"no Spark Connect server answers at .*: Deadline exceeded\nStart that server\nOr name another",
        ),
    ],
)
def test_server_refusals_name_a_remedy(monkeypatch: pytest.MonkeyPatch, spark_says: str, error: Any, says: str) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError(spark_says)

    session = SimpleNamespace(client=None, version=pyspark.__version__, conf=SimpleNamespace(set=refuse))
    monkeypatch.setattr(spark_session, "_remote_session", lambda _: session)
    monkeypatch.setattr(spark_session, "_made_with_shared_workers", lambda *_: True)
    monkeypatch.setattr(spark_session, "_check_listening", lambda _: None)
    monkeypatch.setattr(spark_session, "set_retries", lambda _, **__: None)
    with pytest.raises(error, match=f"the Spark Connect server at sc://h {says}|{says}"):
        connect("sc://h", "test", conf={"spark.executor.memory": "1g"})


def test_a_connection_to_a_missing_server_fails_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(
        StorageUnavailable,
        match=f"no Spark Connect server answers at sc://127.0.0.1:{port}: .*refused\nStart one on this machine: cairn spark --port {port}\n",
    ):
        connect(f"sc://127.0.0.1:{port}", "test")


def test_a_stopped_session_is_refused() -> None:
    with pytest.raises(UsageError, match="the Spark session has been stopped; pass a running session"):
        check_running(cast(Any, SimpleNamespace(is_stopped=True)))


@pytest.fixture
def without_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)


def test_without_java_the_command_that_installs_it_is_named(without_java: None) -> None:
    with pytest.raises(UsageError, match=r"Spark master 'local\[2\]' needs a Java 17\+ runtime.*\nRun: make java"):
        connect("local[2]", "test")
    result = CliRunner().invoke(app, ["spark"])
    assert (result.exit_code, "the PATH has no java\nRun: make java" in result.stderr) == (2, True)


def test_errors_of_an_installed_wheel_advise_no_make_target(
    without_java: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user of the wheel was told to run `make java`, and has no Makefile."""
    monkeypatch.setattr("cairn.spark.java_runtime.__file__", str(tmp_path / "a/b/cairn/spark/java_runtime.py"))
    with pytest.raises(
        UsageError, match=r"needs a Java 17\+ runtime, .* no java\nInstall OpenJDK 17 or later"
    ) as caught:
        connect("local[2]", "test")
    assert "make" not in str(caught.value)
    with (
        pytest.raises(StorageUnavailable, match="give the address of yours") as unheard,
        explain_errors("http://h", "d"),
    ):
        raise OSError("refused")
    assert "make" not in str(unheard.value)


@pytest.mark.parametrize("master", ["local[2]", "spark://host:7077", "yarn", "k8s://https://host"])
def test_logs_of_a_master_have_no_progress_bars(master: str) -> None:
    """Only a local master had its bars off: a cluster's driver wrote hundreds of them into the task's log."""
    assert master_conf(master)["spark.ui.showConsoleProgress"] == "false"
    assert ("spark.driver.host" in master_conf(master)) == (master == "local[2]")


@pytest.fixture
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("SPARK_CONNECT_AUTHENTICATE_TOKEN", raising=False)
    return tmp_path


@pytest.mark.usefixtures("state_home")
def test_the_secret_of_a_server_is_for_its_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        with kept_secret("spark-connect", 7, "s3cret") as file:
            assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)) == (0o600, 0o700)
            assert find_secret("spark-connect", 7) == "s3cret"
            assert find_secret("spark-connect", 8) is None and find_secret("airflow", 7) is None
            file.chmod(0o640)
            with pytest.raises(UsageError, match="other users can read"):
                find_secret("spark-connect", 7)
            file.chmod(0o600)
            monkeypatch.setattr(os, "getuid", lambda: 4321)
            with pytest.raises(UsageError, match="other users can read"):
                find_secret("spark-connect", 7)
    finally:
        os.umask(before)
    assert not file.exists() and find_secret("spark-connect", 7) is None


def test_a_file_in_the_place_of_the_secret_is_replaced(state_home: Path) -> None:
    """A server that was killed left the file, or it is a link. A server that ends leaves the file of the next one."""
    with kept_secret("spark-connect", 7, "old") as file:
        file.unlink()
        (state_home / "precious").write_text("kept")
        file.symlink_to(state_home / "precious")
        with kept_secret("spark-connect", 7, "new"):
            assert find_secret("spark-connect", 7) == "new" and not file.is_symlink()
            file.write_text("of a third server\n")
        assert find_secret("spark-connect", 7) == "of a third server"
    assert (state_home / "precious").read_text() == "kept"
    assert len({new_secret() for _ in range(9)}) == 9 and len(new_secret()) >= 40


@pytest.mark.usefixtures("state_home")
@pytest.mark.parametrize(
    ("where", "given", "url", "token"),
    [
        ("sc://127.0.0.1:7", "t", "sc://127.0.0.1:7", "t"),
        ("sc://[::1]:7", "t", "sc://[::1]:7", "t"),
        ("sc://localhost:7", "t", "sc://localhost:7", "t"),
        ("sc://h:7/;use_ssl=true", "t", "sc://h:7/;use_ssl=true", "t"),
        ("sc://h:7/;use_ssl=true;token=t%20u", None, "sc://h:7/;use_ssl=true", "t u"),
        ("sc://127.0.0.1:7/;token=t", None, "sc://127.0.0.1:7/", "t"),
        # The server of this user listens on 127.0.0.1: no other program gets the token.
        ("sc://127.0.0.1", None, "sc://127.0.0.1", "kept"),
        ("sc://localhost", None, "sc://127.0.0.1", "kept"),
        ("sc://localhost:15002/;user_id=me", None, "sc://127.0.0.1:15002/;user_id=me", "kept"),
        ("sc://localhost/;use_ssl=true", None, "sc://localhost/;use_ssl=true", None),
        ("sc://h", None, "sc://h", None),
        ("sc://127.0.0.1:7", None, "sc://127.0.0.1:7", None),
    ],
)
def test_a_stored_token_goes_to_a_local_server_only(where: str, given: str | None, url: str, token: str | None) -> None:
    with kept_secret("spark-connect", 15002, "kept"):
        assert _with_token(where, given) == (url, token)


@pytest.mark.usefixtures("state_home")
def test_a_token_is_not_sent_unprotected(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("h", "0.0.0.0", "localhost.example", "127.0.0.1.example"):
        with pytest.raises(UsageError, match=r"would be sent to .* without encryption"):
            _with_token(f"sc://{host}:7", "t")
    monkeypatch.setenv("SPARK_CONNECT_AUTHENTICATE_TOKEN", "of the environment")
    assert _with_token("sc://127.0.0.1", None) == ("sc://127.0.0.1", "of the environment")
    assert _with_token("sc://127.0.0.1", "t") == ("sc://127.0.0.1", "t")


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ("a place for its token", "Set XDG_STATE_HOME to a folder that you may write to"),
        ("PySpark", "PySpark is not installed here; install Cairn with the extra `spark`"),
    ],
)
def test_cairn_spark_names_the_prerequisite_that_its_server_lacks(
    lacks: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    if lacks == "PySpark":
        monkeypatch.setattr(server_command_module, "find_spec", lambda _: None)
    else:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(spark_server, "answers", lambda _: False)
    monkeypatch.setattr(spark_server.signal, "signal", lambda *_: None)
    result = CliRunner().invoke(app, ["spark"])
    assert (result.exit_code, says in result.stderr) == (2, True)


def test_spark_authentication_is_on_for_a_local_master_only() -> None:
    """tests/integration/test_connect.py shows that the ports do. A cluster's secret is the cluster's own."""
    assert "spark.authenticate=true" in server_command(7, "local[*]", 2)
    assert "spark.authenticate=true" not in server_command(7, "spark://h:7077", 2)
    assert spark_session._LOCAL_CONF["spark.authenticate"] == "true"
    assert not [word for word in server_command(7, "local[2]", 2) if "token" in word.lower()]


@pytest.mark.parametrize(
    ("program", "answers", "code", "says"),
    [
        ("", [True], 2, "port 15002 is in use by another process; use another port, as in: cairn spark --port 15003"),
        ("raise SystemExit(7)", [False] * 1000, 3, "the Spark server ended with code 7; see its output above"),
        ("import time; time.sleep(60)", [False] * 1000, 3, "does not answer on port 15002 after two minutes"),
        ("raise SystemExit(7)", [False, True], 3, "the Spark server ended with code 7; see its output above"),
    ],
)
@pytest.mark.usefixtures("state_home")
def test_cairn_spark_reports_why_its_server_did_not_come_up(
    monkeypatch: pytest.MonkeyPatch, program: str, answers: list[bool], code: int, says: str
) -> None:
    if "sleep" in program:
        clock = SimpleNamespace(monotonic=iter([0, 200]).__next__, sleep=time.sleep)
        monkeypatch.setattr(spark_server, "time", clock)
    given = iter(answers)
    monkeypatch.setattr(spark_server, "answers", lambda _: next(given))
    monkeypatch.setattr(spark_server, "server_command", lambda *_: [sys.executable, "-I", "-c", program])
    monkeypatch.setattr(spark_server.signal, "signal", lambda *_: None)
    result = CliRunner().invoke(app, ["spark"])
    assert (result.exit_code, says in result.stderr) == (code, True), result.output


def test_a_worker_without_our_packages_is_told_what_to_install() -> None:
    with pytest.raises(UsageError) as raised, first_cause():
        raise RuntimeError("Traceback\nModuleNotFoundError: No module named 'rocksdict'\n\tat org.apache.spark.X")
    first, second, *_ = str(raised.value).splitlines()
    assert first == "a Python worker of Spark lacks the package rocksdict"
    assert second.startswith("Install what Cairn needs where executors run: pip install ")


GARBAGE = """An error occurred while calling o161.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure
\tat org.apache.spark.scheduler.DAGScheduler.failJob(DAGScheduler.scala:9)
Caused by: org.apache.spark.SparkException: [FAILED_READ_FILE.NO_HINT] Encountered error while reading file file:///x.json. SQLSTATE: KD001
\tat org.apache.spark.sql.execution.FileScanRDD.next(FileScanRDD.scala:5)
\t... 17 more
"""


def test_the_java_stack_of_an_unreadable_input_file_is_only_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever calls it sees no cause with a hundred lines above; who wants those asks the logger."""
    with caplog.at_level("DEBUG", "cairn.spark"), pytest.raises(SourceError) as raised, input_errors("clicks", day(1)):
        raise RuntimeError(GARBAGE)
    seen = "".join(traceback.format_exception(raised.value))
    assert "FileScanRDD.scala" not in seen and "FileScanRDD.scala" in caplog.text
    assert str(raised.value).startswith(
        f"pipeline 'clicks', {day(1)}: an input file can't be read: Encountered error while reading file file:///x.json."
    )
    assert str(raised.value).endswith("Nothing was committed\n" + MEND)


MEND = "Fix the file, or fix the schema and options in the source, or leave the file out of the source"
RENAMED = """Caused by: java.lang.IllegalArgumentException: CSV header does not conform to the schema.
 Header: energy
 Schema: kwh
Expected: kwh but found: energy
CSV file: file:///x.csv
\tat org.apache.spark.sql.catalyst.csv.CSVHeaderChecker.checkHeaderColumnNames(CSVHeaderChecker.scala:5)
"""
NO_NUMBER = """Caused by: org.apache.spark.SparkException: [MALFORMED_RECORD_IN_PARSING.WITHOUT_SUGGESTION] Malformed records: [ann,null]. SQLSTATE: 22023
\tat org.apache.spark.sql.X.parse(X.scala:1)
Caused by: org.apache.spark.sql.catalyst.util.BadRecordException: java.lang.NumberFormatException: For input string: "abc"
\t... 19 more
Caused by: java.lang.NumberFormatException: For input string: "abc"
\tat java.base/java.lang.Integer.parseInt(Integer.java:1)
"""


@pytest.mark.parametrize(
    ("stack", "because"),
    [
        (
            RENAMED,
            [
                "IllegalArgumentException: CSV header does not conform to the schema. Header: energy Schema: kwh "
                "Expected: kwh but found: energy CSV file: file:///x.csv"
            ],
        ),
        (
            NO_NUMBER,
            [
                "SparkException: [MALFORMED_RECORD_IN_PARSING.WITHOUT_SUGGESTION] Malformed records: [ann,null].",
                'BadRecordException: java.lang.NumberFormatException: For input string: "abc"',
            ],
        ),
        ("", []),
    ],
)
def test_an_input_file_that_can_not_be_read_tells_why(stack: str, because: list[str]) -> None:
    with pytest.raises(SourceError) as raised, input_errors("clicks", day(1)):
        raise RuntimeError(GARBAGE + stack)
    assert str(raised.value).splitlines()[1:] == [*(f"Because: {cause}" for cause in because), MEND]


def test_an_error_that_is_not_about_the_input_passes_unchanged() -> None:
    with pytest.raises(RuntimeError, match="executor lost"), input_errors("clicks", day(1)):
        raise RuntimeError("executor lost")


@pytest.mark.parametrize(("wanted", "level", "hint"), [("", "OFF", True), ("error", "ERROR", False)])
def test_cairn_run_sets_the_spark_log_level_from_cairn_spark_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, level: str, hint: bool
) -> None:
    """Spark would write a stack trace of its own for each task that fails, above the message."""
    levels: list[str] = []
    session = SimpleNamespace(sparkContext=SimpleNamespace(setLogLevel=levels.append))

    def fail(*_: Any, **__: Any) -> Any:
        raise SourceError("an input file can't be read")

    monkeypatch.setattr(spark_session, "connect", lambda *_, **__: session)
    monkeypatch.setattr("cairn.operations.intervals.run_range.run_intervals", fail)
    run = ["run", "--code", "pipelines.aircraft:AIRCRAFT", "--root", str(tmp_path), "--every", "1d"]
    result = CliRunner().invoke(app, run, env={"CAIRN_SPARK_LOG": wanted})
    assert (result.exit_code, levels) == (1, [level])
    wrong = CliRunner().invoke(app, run, env={"CAIRN_SPARK_LOG": "loud"})
    assert (wrong.exit_code, "set it to one of off, error, warn, info" in wrong.stderr) == (2, True)
    hinted = "For Spark's own stack trace, run the same command with CAIRN_SPARK_LOG=error"
    _starting, _ready, *said = result.stderr.splitlines()
    assert said == [hinted] * hint + ["SourceError: an input file can't be read"]
