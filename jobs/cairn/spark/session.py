"""Sessions on a Spark Connect server (``sc://host:port``) or any master (``local[2]``, ``spark://...``)."""

from __future__ import annotations

import atexit
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlsplit

from cairn.spark.local_server_secret import LOOPBACK, find_secret
from state_backend.values.errors import CairnError, StorageUnavailable, UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

    from cairn.spark.connect_channel import ConnectChannel

log = logging.getLogger("cairn")

# Instants in rows are naive UTC, whatever the machine's zone.
_CONF = {"spark.sql.session.timeZone": "UTC"}
_LOCAL_CONF = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",  # it writes over our own lines
    "spark.sql.shuffle.partitions": "8",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Spark's own ports read Java objects from every user of the machine otherwise. A local master makes the secret itself.
    "spark.authenticate": "true",
}
# A server that is gone: Spark's client would try again for ten minutes, Airflow's own retry is the better place to wait.
# With these the tries end after about 25 seconds: enough for a busy server, or a proxy that is started anew.
_PATIENCE = {"max_retries": 6, "max_backoff": 10_000}
_LOST = (
    "UNAVAILABLE",
    "SESSION_CHANGED",
    "SESSION_NOT_FOUND",
    "SESSION_CLOSED",
    "NO_ACTIVE_SESSION",
    "stopped SparkContext",
)
# Spark itself ends an operation whose client is gone after `spark.connect.execute.manager.detachedTimeout` (5 minutes), so
# an older operation still runs only if its driver does.
_HOURS_BACK = 24
# At most this many sessions of one name in an hour. A Connect server closes a session that was idle for its timeout (default: 1 h).
# With a timeout of one minute a server closes up to 60 sessions in an hour.
_SESSIONS_OF_AN_HOUR = 64


def connect(
    where: str,
    app_name: str,
    *,
    shared_as: str | None = None,
    token: str | None = None,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Open a session on a Spark Connect server or a master.

    Args:
        token: A Connect server's token. Without ``use_ssl=true`` in the URL the token is sent to this machine only. None: the token of a server
            that this user runs on this machine is used.
        conf: Spark's configuration by name. Its values reach neither process arguments nor logs.
        shared_as: Drivers of this name that start within one hour share a session on a Connect server: only the first driver waits seconds for
            Python workers. The name lives one hour, because the server closes a session for good after an hour without use. If the server
            has closed this hour's session, a new session takes its place.

    Raises:
        StorageUnavailable: The server can't be reached.
        UsageError: There is no Java runtime for a master.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    if where.startswith("sc://"):
        where, token = _with_token(where, token)
        _check_listening(where)
        try:
            return _open_remote_session(where, shared_as, token, _CONF | dict(conf or {}))
        except Exception as error:
            if name := next((key for key in conf or {} if f'"{key}"' in str(error)), None):
                raise UsageError(
                    f"the Spark Connect server at {where} does not let a session set {name}: {_first_line(error)}; set it where the "
                    "server is started"
                ) from None
            if _is_refused(error):
                raise UsageError(
                    f"the Spark Connect server at {where} refuses {'this token' if token else 'a session without a token'}: "
                    f"{_first_line(error)}; put the server's token into the connection, as its password, or into the environment as "
                    "SPARK_CONNECT_AUTHENTICATE_TOKEN"
                ) from None
            raise StorageUnavailable(_no_answer(where, _first_line(error))) from error
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        raise UsageError(
            f"Spark master {where!r} needs a Java 17+ runtime, and there is no java on the PATH; run 'make java'"
        )
    builder = SparkSession.builder.master(where).appName(app_name)
    given = dict(conf or {})
    for key, value in (_CONF | (_LOCAL_CONF if where.startswith("local") else {})).items():
        if key not in given:
            builder = builder.config(key, value)
    with _properties(given):
        session = builder.getOrCreate()
    if not where.startswith("local"):
        _send_runtime(session)
    return session


def collect_once(spark: SparkSession, made: Callable[[], DataFrame]) -> list[Row]:
    """Collect the frame of ``made``, and delete its shuffle files after the query.

    By default Spark deletes shuffle files when Java's collector finds no reference to them. Large intervals in one session fill the disk
    earlier. The frame must not be collected a second time, because a second query needs the files.

    Source: SPARK-47764, SPARK-52777.
    """
    remote = type(spark).__module__.startswith("pyspark.sql.connect")
    # A classic session reads the setting when the frame is made, a server when the query runs.
    with _set(spark, f"spark.sql.{'connect' if remote else 'classic'}.shuffleDependency.fileCleanup.enabled", "true"):
        frame: Any = made()
        found: list[Row] | None = frame.collect() if remote else None
    if found is None:
        found = frame.collect()
    return found


@contextmanager
def _set(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    """Set a Spark setting within the block. A server that forbids the setting goes on without it.

    After a failure the setting stays: a lost server would delay the caller by half a minute, and its answer would hide the failure.
    """
    before, allowed = None, True
    try:
        before = spark.conf.get(name, None)
        spark.conf.set(name, value)
    except Exception as error:
        if name not in str(error):
            raise
        log.debug("%s is not set: %s", name, error)
        allowed = False
    yield
    if allowed:
        # The block has succeeded, even if the server is gone now.
        with suppress(Exception):
            spark.conf.unset(name) if before is None else spark.conf.set(name, before)


def _send_runtime(session: SparkSession) -> None:
    """Send this project's own modules to the executors, in the driver's version. Compiled packages must be installed there."""
    from cairn.shipping.user_modules import runtime_archive

    # Executors fetch the archive whenever they start. So the file stays as long as this process.
    folder = tempfile.mkdtemp(prefix="cairn-runtime-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    archive = Path(folder, "cairn-runtime.zip")
    runtime_archive(archive)
    session.sparkContext.addPyFile(str(archive))


@contextmanager
def _properties(conf: Mapping[str, str]) -> Iterator[None]:
    """Write Spark's configuration for a local JVM to a file that only this user can read.

    PySpark would pass the configuration as arguments, which everybody on the machine can read.
    """
    if not conf:
        yield
        return
    before = os.environ.get("PYSPARK_SUBMIT_ARGS")
    with tempfile.TemporaryDirectory(prefix="cairn-conf-") as folder:  # which is this user's only
        file = Path(folder, "spark.conf")
        file.touch(mode=0o600)
        file.write_text("".join(f"{_property(key)}={_property(value)}\n" for key, value in conf.items()))
        arguments = f"--load-spark-defaults --properties-file {shlex.quote(str(file))}"
        os.environ["PYSPARK_SUBMIT_ARGS"] = f"{arguments} {before or 'pyspark-shell'}"
        try:
            yield
        finally:
            if before is None:
                del os.environ["PYSPARK_SUBMIT_ARGS"]
            else:
                os.environ["PYSPARK_SUBMIT_ARGS"] = before


def _property(text: str) -> str:
    """Escape a text for a Java properties file: characters beyond ASCII, and those with a meaning there, become ``\\uXXXX``."""
    return "".join(
        c if c.isascii() and (c.isalnum() or c in "._-/,@") else "".join(f"\\u{unit:04x}" for unit in _utf16(c))
        for c in text
    )


def _utf16(character: str) -> list[int]:
    data = character.encode("utf-16-be")
    return [int.from_bytes(data[n : n + 2]) for n in range(0, len(data), 2)]


def _with_token(where: str, given: str | None) -> tuple[str, str | None]:
    """Return the URL without a token in it, and the token.

    The token is the given one, that of the URL or of the environment, or that of a server which this user runs on this machine.
    """
    address, *parameters = where.split(";")
    within = next((unquote(p[6:]) for p in parameters if p.startswith("token=")), None)
    where = ";".join([address, *(p for p in parameters if p and not p.startswith("token="))])
    url, tls = urlsplit(address), ";use_ssl=true" in where
    if given is not None and not tls and url.hostname not in LOOPBACK:
        raise UsageError(
            f"the token of {where} would be sent unprotected; set use_ssl in the connection's extra, or name the host localhost if it "
            "is this machine"
        )
    token = given or within or os.environ.get("SPARK_CONNECT_AUTHENTICATE_TOKEN")
    if token is None and not tls and url.hostname in LOOPBACK:
        token = find_secret("spark-connect", url.port or 15002)
        if token is not None and url.hostname == "localhost":
            # The server listens on 127.0.0.1. localhost stands for ::1 too, where another user may listen.
            where = where.replace("localhost", "127.0.0.1", 1)
    return where, token


def _channel(url: str, token: str | None) -> ConnectChannel:
    # gRPC and Spark's client are imported only where a server is.
    from cairn.spark.connect_channel import ConnectChannel

    return ConnectChannel(url, token)


def _open_remote_session(where: str, shared_as: str | None, token: str | None, conf: Mapping[str, str]) -> SparkSession:
    """Open the first session of this hour that the server has not closed, and configure it."""
    if shared_as is None or ";session_id=" in where:
        return _configured_session(where, token, conf)
    hour = _hour()
    urls = [_session_url(where, shared_as, hour, number) for number in range(_SESSIONS_OF_AN_HOUR)]
    for url in urls[:-1]:
        try:
            return _configured_session(url, token, conf)
        except Exception as error:
            if not _is_closed(error):
                raise
    return _configured_session(urls[-1], token, conf)


def _configured_session(url: str, token: str | None, conf: Mapping[str, str]) -> SparkSession:
    session = _remote_session(_channel(url, token))
    _be_impatient(session.client)
    try:
        for key, value in conf.items():
            session.conf.set(key, value)
    except Exception as error:
        if _is_closed(error):
            remote = cast(Any, session)
            # The server has closed the session. A request to release the session would fail too.
            remote.release_session_on_close = False
            remote.stop()
        raise
    return session


def _remote_session(channel: ConnectChannel) -> SparkSession:
    from pyspark.sql.connect.session import SparkSession as RemoteSession

    # As SparkSession.builder.remote does: Spark's functions are those of Connect then.
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
    return cast("SparkSession", RemoteSession.builder.channelBuilder(channel).getOrCreate())


def _is_closed(error: Exception) -> bool:
    return "SESSION_CLOSED" in str(error)


def _is_refused(error: Exception) -> bool:
    return any(word in str(error) for word in ("UNAUTHENTICATED", "PERMISSION_DENIED", "Invalid authentication token"))


def operation_tag(shared_as: str, root: str, task: str) -> str:
    """Return the tag of all tries of one task on a Connect server. The tag depends on the root, because deployments may share a server and names."""
    return f"cairn-{shared_as}-{uuid.uuid5(uuid.NAMESPACE_URL, f'cairn:{root}:{task}')}".replace(",", "_")


def interrupt_former(where: str, shared_as: str, tag: str, *, token: str | None = None) -> list[str]:
    """Interrupt the operations that an earlier driver left running under this tag, and return their ids.

    Searches the sessions that drivers of this name began in the last 24 hours, because an interrupt affects one session, and a driver that was
    killed with -9 interrupts nothing. Only for retries: each session costs some milliseconds. A failure is logged and not raised: a former
    operation writes under its own attempt, and nobody reads that attempt.
    """
    if not where.startswith("sc://") or ";session_id=" in where:
        return []
    where, token = _with_token(where, token)
    _check_listening(where)
    found: list[str] = []
    now = _hour()
    try:
        for hour in range(now, now - _HOURS_BACK, -1):
            found += _interrupt_sessions(where, shared_as, hour, tag, token, recent=hour >= now - 1)
    except Exception as error:
        log.warning("an earlier try can't be interrupted: %s", _first_line(error))
    if found:
        log.info("interrupted what an earlier try still ran on the Spark server: %s", ", ".join(found))
    return found


def _interrupt_sessions(
    where: str, shared_as: str, hour: int, tag: str, token: str | None, *, recent: bool
) -> list[str]:
    """Interrupt the operations with a tag in the sessions of one hour.

    Args:
        hour: Hours since the epoch.
        recent: Also interrupt in the sessions that replaced closed sessions of this hour. Leave out for older hours: Spark creates a
            session when a request names a session that does not exist.

    Returns:
        The ids of the interrupted operations.
    """
    for number in range(_SESSIONS_OF_AN_HOUR if recent else 1):
        try:
            return _interrupt(_session_url(where, shared_as, hour, number), tag, token)
        except Exception as error:
            # Nothing runs in a session that the server has closed.
            if not _is_closed(error):
                raise
    return []


def interrupt_on_sigterm(session: SparkSession, where: str, tag: str, *, token: str | None = None) -> None:
    """Let SIGTERM interrupt this tag's operations on the Connect server, and end this process with code 143.

    Call this from a program's main thread. A Python signal handler would wait until the main thread leaves its present call. Instead, the
    signal's number arrives in a pipe at once, and a thread with its own client interrupts the operations.
    """
    if not where.startswith("sc://"):
        return
    where, token = _with_token(where, token)
    url = _with_session(where, session.session_id)
    read, write = os.pipe()
    os.set_blocking(write, False)

    def wait() -> None:
        while signal.SIGTERM not in os.read(read, 64):
            pass
        try:
            log.info(
                "SIGTERM: interrupted on the Spark server: %s", ", ".join(_interrupt(url, tag, token)) or "nothing ran"
            )
        finally:
            os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, name="interrupt-on-sigterm", daemon=True).start()
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)


def explain(error: Exception, where: str) -> Exception:
    """Return the meaning of a client error for a server that is gone, was restarted or was told to stop; any other error unchanged."""
    if not where.startswith("sc://") or isinstance(error, CairnError):
        return error
    if _is_cancelled(error):
        what = "was interrupted, by a later try of the same task or by a person"
    elif is_lost(error):
        what = "lost its Spark Connect server, which is gone or was started anew"
    else:
        return error
    return StorageUnavailable(
        f"the operation at {where} {what}: {_first_line(error)}\nNothing was committed; try again"
    )


def is_lost(error: Exception) -> bool:
    """Return True if the session's server is gone or ended the operation: a fault of neither input nor code."""
    return _is_cancelled(error) or any(sign in str(error) for sign in _LOST)


def check_running(session: SparkSession) -> None:
    """Raise UsageError for a stopped session, classic or of Spark Connect."""
    context = getattr(session, "_sc", None)
    stopped = context._jsc is None if context is not None else getattr(session, "is_stopped", False)
    if stopped:
        raise UsageError(
            "the Spark session was stopped; pass one that runs, as from SparkSession.builder.getOrCreate()"
        )


def use_this_python(session: SparkSession) -> None:
    """Run the workers of a local session with this Python, unless PYSPARK_PYTHON names another.

    Spark's default is the ``python3`` of the PATH, without the packages of a virtual environment that is not on the PATH.
    """
    context = getattr(session, "_sc", None)
    if context is None or not str(getattr(context, "master", "")).startswith("local"):
        return
    if not any(os.environ.get(name) for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")):
        context.pythonExec = sys.executable


def _is_cancelled(error: Exception) -> bool:
    return "OPERATION_CANCELED" in str(error) or "SPARK_JOB_CANCELLED" in str(error)


def _session_url(where: str, shared_as: str, hour: int, number: int = 0) -> str:
    """Return the URL of a session.

    Args:
        hour: Hours since the epoch.
        number: 0 for the first session of this name and hour; the server has closed all sessions with smaller numbers.
    """
    if ";session_id=" in where:
        return where
    name = f"cairn:{shared_as}:{hour}" + (f":{number}" if number else "")
    return _with_session(where, str(uuid.uuid5(uuid.NAMESPACE_URL, name)))


def _with_session(where: str, session_id: str) -> str:
    address, _, parameters = where.partition("/;")
    kept = [p for p in parameters.split(";") if p and not p.startswith("session_id=")]
    return ";".join([f"{address.rstrip('/')}/", *kept, f"session_id={session_id}"])


def _hour() -> int:
    return int(time.time() // 3600)


def _interrupt(url: str, tag: str, token: str | None) -> list[str]:
    from pyspark.sql.connect.client import SparkConnectClient

    client = SparkConnectClient(_channel(url, token))
    try:
        _be_impatient(client)
        return client.interrupt_tag(tag) or []
    finally:
        client.close()


def _be_impatient(client: Any) -> None:
    from pyspark.sql.connect.client.retries import DefaultPolicy

    client.set_retry_policies([DefaultPolicy(**_PATIENCE)])


def _first_line(error: Exception) -> str:
    # gRPC's own errors say it in "details", under a line of Python's.
    details = getattr(error, "details", None)
    text = str(details()) if callable(details) else str(error)
    # Where another error has its text, it has the line of Python's first.
    if text.startswith("<_") and (found := re.search(r'details = "(.+)"', text)):
        text = found[1]
    return (text.strip().splitlines() or [type(error).__name__])[0]


def _check_listening(where: str) -> None:
    """Name a server that does not listen at once, instead of after the client's retries."""
    address = urlsplit(where)
    try:
        socket.create_connection((address.hostname or "", address.port or 15002), timeout=10).close()
    except OSError as error:
        raise StorageUnavailable(_no_answer(where, str(error))) from None


def _no_answer(where: str, why: str) -> str:
    address = urlsplit(where)
    here = address.hostname in ("localhost", "127.0.0.1", "::1")
    start = f"Start one on this machine: cairn spark --port {address.port or 15002}" if here else "Start that server"
    return (
        f"no Spark Connect server answers at {where}: {why}\n{start}\n"
        "Or name another one: in the Airflow connection, or by --spark of cairn run"
    )
