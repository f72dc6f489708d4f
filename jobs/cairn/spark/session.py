"""Open and end Spark sessions, on a Spark Connect server (`sc://host:port`) or a master (`local[2]`, `spark://...`)."""

from __future__ import annotations

import atexit
import logging
import os
import re
import shlex
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlsplit
from urllib.request import urlopen

from cairn.spark.class_archive import jvm_options_in_use
from cairn.spark.first_cause import first_cause
from cairn.spark.java_runtime import require_java
from cairn.spark.last_words import FAULT_HANDLER
from cairn.spark.local_server_secret import LOOPBACK, check_address, checked_token, find_secret
from cairn.spark_versions import (
    PYSPARK,
    check_classic,
    check_jvm,
    check_server,
    clean_up_setting,
    connect_channel,
    connect_client,
    connect_session,
    context_of,
    ctrl_c_kept,
    forget_exit,
    gateway_in,
    has,
    is_connect,
    is_stopped,
    set_retries,
    version_here,
)
from state_backend.adapters.work_folders import work_folder
from state_backend.values.environment import Variable, environment
from state_backend.values.errors import CairnError, StorageUnavailable, UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

log = logging.getLogger("cairn")

SESSION_ZONE = "spark.sql.session.timeZone"
# With this setting, instants in rows are datetimes in UTC without a zone, whatever the machine's zone is.
_CONF = {SESSION_ZONE: "UTC"}
# This setting turns a cache off, so that `spark.table` lists the files of a table anew for each query. Then a later
# interval of the same session sees later files. A session on a Connect server can't set it.
FRESH_TABLES = {"spark.sql.filesourceTableRelationCacheSize": "0"}
# Settings of a session with a master's URL. A session on a Connect server can't set them.
_MASTER_CONF = {
    "spark.ui.showConsoleProgress": "false",  # The progress bar overwrites Cairn's log lines.
    **FRESH_TABLES,
    FAULT_HANDLER: "true",
}
_LOCAL_CONF = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "8",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Without authentication, Spark's own ports accept Java objects from every user of the machine. A local master makes
    # the secret itself.
    "spark.authenticate": "true",
}
# By default Spark's client retries a dead server for ten minutes, but Airflow's retries are the better place to wait.
# With these settings the client gives up after about 25 seconds: enough for a busy server, or a proxy that restarts.
_PATIENCE = {"max_retries": 6, "max_backoff": 10_000}
_LOST = (
    "UNAVAILABLE",
    "SESSION_CHANGED",
    "SESSION_NOT_FOUND",
    "SESSION_CLOSED",
    "NO_ACTIVE_SESSION",
    "stopped SparkContext",
    "[RETRIES_EXCEEDED]",
    "[RESPONSE_ALREADY_RECEIVED]",
)
# Sessions in which this setting is "false" share Python workers. For any other session, Spark starts a Python daemon on
# each executor, which takes seconds of CPU and 35 MiB.
ISOLATION = "spark.sql.artifact.isolation.enabled"


_EXCLUDED_RULES = "spark.sql.adaptive.optimizer.excludedRules"
_EMPTY_RELATION = "org.apache.spark.sql.execution.adaptive.AQEPropagateEmptyRelation"


class SessionOnDemand:
    """A Spark session that opens at its first use."""

    def __init__(self, opens: Callable[[], SparkSession], conf: Mapping[str, str] = MappingProxyType({})) -> None:
        self._opens = opens
        self._opened: SparkSession | None = None
        self.zone = (_CONF | dict(conf))[SESSION_ZONE]

    def session(self) -> SparkSession:
        if self._opened is None:
            self._opened = self._opens()
        return self._opened


def open_now(spark: SparkSession | SessionOnDemand) -> SparkSession:
    return spark.session() if isinstance(spark, SessionOnDemand) else spark


def zone_of_session(spark: SparkSession | SessionOnDemand) -> str:
    """Return the name of the session's time zone. This opens no session."""
    if isinstance(spark, SessionOnDemand):
        return spark.zone
    return spark.conf.get(SESSION_ZONE) or _CONF[SESSION_ZONE]


def connect(
    where: str,
    app_name: str,
    *,
    session_id: str | None = None,
    own_workers: bool = False,
    token: str | None = None,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    if where.startswith("sc://"):
        if ";session_id=" in where:
            raise UsageError(
                f"{where.partition(';')[0].rstrip('/')}: the URL names a Spark session, in which a driver could read the old input of "
                "another one; every driver opens a session of its own\nTake session_id out of the URL"
            )
        where, token = _with_token(where, token)
    check_address(where, f"put the server's token into the environment variable {Variable.SPARK_TOKEN}")
    if where.startswith("sc://"):
        _check_listening(where)
        try:
            return _open_remote_session(
                _with_session(where, session_id or str(uuid.uuid4())), token, conf or {}, own_workers=own_workers
            )
        except CairnError:
            raise
        except Exception as error:
            if name := next((key for key in _CONF | dict(conf or {}) if f'"{key}"' in str(error)), None):
                raise UsageError(
                    f"the Spark Connect server at {where} does not let a session set {name}: {_first_line(error)}\nSet it "
                    "where the server is started"
                ) from None
            refusals = ("UNAUTHENTICATED", "PERMISSION_DENIED", "Invalid authentication token")
            if any(word in str(error) for word in refusals):
                raise UsageError(
                    f"the Spark Connect server at {where} refuses {'this token' if token else 'a session without a token'}: "
                    f"{_first_line(error)}\nSet the server's token as the password of the connection, or in the environment variable "
                    "SPARK_CONNECT_AUTHENTICATE_TOKEN"
                ) from None
            raise StorageUnavailable(_no_answer(where, _first_line(error))) from error
    require_java(f"Spark master {where!r}")
    builder = SparkSession.builder.master(where).appName(app_name)
    given = dict(conf or {})
    for key, value in master_conf(where).items():
        if key not in given:
            builder = builder.config(key, value)
    with _properties(given), jvm_options_in_use(), ctrl_c_kept(), work_folder("gateway") as folder, gateway_in(folder):
        try:
            session = builder.getOrCreate()
        except Exception as error:
            if where.startswith("spark://") and "stopped SparkContext" in str(error):
                raise _not_registered(where) from error
            raise
    check_jvm(session)
    # PySpark itself reads this setting only in a program that `spark-submit` starts.
    python = session.sparkContext.getConf().get("spark.pyspark.python")
    if python and (not where.startswith("local") or "spark.pyspark.python" in given):
        session.sparkContext.pythonExec = python
    if not where.startswith("local"):
        _send_runtime(session)
        _check_executors(session, where)
    return session


def _check_executors(session: SparkSession, where: str) -> None:
    """Raise an error if an executor has another version of Python or of Spark than this driver.

    A job with one task asks for the version of Spark. Before a worker runs any code, Spark itself compares the versions
    of Python. The job costs little: the next job needs the executor and the Python worker that it starts anyway.
    """
    log.info("asking an executor of %s for its versions; this waits until the cluster has a free one", where)
    with first_cause():
        (runs,) = session.sparkContext.parallelize([0], 1).map(version_here).collect()
    check_classic(f"an executor of {where}", runs)


# The web page on which a standalone master shows its version, unless it was started with another port.
_MASTER_PAGE = "http://{host}:8080"


def _not_registered(where: str) -> CairnError:
    """Return the error for a standalone master that has not accepted this driver.

    A master of another Spark version can't read the driver's message, and does not answer. Only the master's web page
    says its version.
    """
    host = urlsplit(where.partition(",")[0]).hostname or ""
    with suppress(OSError, HTTPException), urlopen(_MASTER_PAGE.format(host=host), timeout=5) as page:
        if found := re.search(rb'class="version\b[^>]*>\s*(\d+\.\d+[\w.]*)', page.read()):
            try:
                check_classic(f"the master {where}", found[1].decode())
            except UsageError as error:
                return error
    return StorageUnavailable(
        f"the Spark master at {where} accepts no driver of PySpark {PYSPARK}: it does not run, or runs another "
        "version of Spark. Its page, by default on port 8080, shows its version\n"
        "Start the master, or install its version of PySpark where drivers run"
    )


def master_conf(where: str) -> dict[str, str]:
    """Return Cairn's Spark settings for a session on a master. A setting of the user with the same name wins."""
    return _CONF | _MASTER_CONF | (_LOCAL_CONF if where.startswith("local") else {})


def collect_once(
    spark: SparkSession, made: Callable[[], DataFrame], executed: Callable[[DataFrame], None] | None = None
) -> list[Row]:
    """Collect the rows of the frame that `made` returns, and delete the frame's shuffle files after the query.

    By default Spark deletes shuffle files when Java's garbage collector finds that nothing refers to them. Until then,
    large intervals in one session can fill the disk. The frame must not be collected a second time, because a second
    query needs the files. `executed`: Function that gets the frame after the query, to look at its executed plan.

    Source: SPARK-47764, SPARK-52777.
    """
    remote = is_connect(spark)
    found: list[Row] | None = None
    with ExitStack() as settings:
        if executed is not None:
            # Without this rule, the executed plan keeps all scans, even one that is joined with an empty table.
            excluded = ""
            with suppress(Exception):  # A server may forbid to read the setting: then `_set` leaves it as it is.
                excluded = spark.conf.get(_EXCLUDED_RULES, None) or ""
            rules = ",".join(filter(None, [excluded, _EMPTY_RELATION]))
            settings.enter_context(_set(spark, _EXCLUDED_RULES, rules))
        # A classic session reads the setting when the frame is made. A Connect server reads the setting when the query
        # runs.
        with _set(spark, clean_up_setting(connect=remote), "true"):
            frame: Any = made()
            found = frame.collect() if remote else None
        if found is None:
            found = frame.collect()
        if executed is not None:
            executed(frame)
    return found


@contextmanager
def _set(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    """Set a Spark setting within the block. If the server forbids the setting, the block runs without it.

    If the block fails, the setting is not reset. On a lost server, the reset would delay the caller by half a minute,
    and the error of the reset would hide the failure.
    """
    before, allowed = None, True
    try:
        before = spark.conf.get(name, None)
        spark.conf.set(name, value)
    except Exception as error:
        if name not in str(error):
            raise
        log.debug("the Spark server does not let a session set %s: %s", name, error)
        allowed = False
    yield
    if allowed:
        # The block has succeeded, so an error of this reset is ignored. For example, the server may have died since.
        with suppress(Exception):
            spark.conf.unset(name) if before is None else spark.conf.set(name, before)


def _send_runtime(session: SparkSession) -> None:
    """Send Cairn's own modules to the executors. Compiled packages are not sent, and must be installed there."""
    from cairn.shipping.user_modules import runtime_archive

    # An executor fetches the archive when it starts, perhaps late in the session. So keep it until this process ends.
    until_exit = ExitStack()
    atexit.register(until_exit.close)
    archive = until_exit.enter_context(work_folder("runtime")) / "cairn-runtime.zip"
    runtime_archive(archive)
    session.sparkContext.addPyFile(str(archive))


@contextmanager
def _properties(conf: Mapping[str, str]) -> Iterator[None]:
    """Pass Spark's configuration to a local JVM in a file that only this user can read.

    PySpark would pass the configuration as process arguments, which every user of the machine can read.
    """
    if not conf:
        yield
        return
    with work_folder("conf") as folder:  # Only this user can open the folder.
        file = folder / "spark.conf"
        file.touch(mode=0o600)
        file.write_text("".join(f"{_property(key)}={_property(value)}\n" for key, value in conf.items()))
        arguments = f"--load-spark-defaults --properties-file {shlex.quote(str(file))}"
        own = os.environ.get("PYSPARK_SUBMIT_ARGS") or "pyspark-shell"
        with environment({"PYSPARK_SUBMIT_ARGS": f"{arguments} {own}"}):
            yield


def _property(text: str) -> str:
    r"""Escape a text for a Java properties file.

    Characters beyond ASCII and characters with a meaning in such a file become `\uXXXX`.
    """
    return "".join(
        c
        if c.isascii() and (c.isalnum() or c in "._-/,@")
        # A character beyond the first 65,536 becomes two such escapes.
        else "".join(f"\\u{unit}" for unit in c.encode("utf-16-be").hex(" ", 2).split())
        for c in text
    )


def _with_token(where: str, given: str | None) -> tuple[str, str | None]:
    """Return (URL without a token, token or None).

    The token is the first of these that exists: the given token, the token in the URL, the token in the environment,
    and the secret of a server that this user runs on this machine.
    """
    address, *parameters = where.split(";")
    within = next((unquote(p[6:]) for p in parameters if p.startswith("token=")), None)
    where = ";".join([address, *(p for p in parameters if p and not p.startswith("token="))])
    url, tls = urlsplit(address), ";use_ssl=true" in where
    if given is not None and not tls and url.hostname not in LOOPBACK:
        raise UsageError(
            f"the token would be sent to {where} without encryption\nSet use_ssl in the connection's extra, or name the host localhost "
            "if the server runs on this machine"
        )
    token = checked_token(given or within or Variable.SPARK_TOKEN.given, "the token of the Spark server")
    if token is None and not tls and url.hostname in LOOPBACK:
        token = find_secret("spark-connect", url.port or 15002)
        if token is not None and url.hostname == "localhost":
            # The server listens on 127.0.0.1. The name localhost also stands for ::1, where another user may listen.
            where = where.replace("localhost", "127.0.0.1", 1)
    return where, token


def _open_remote_session(url: str, token: str | None, conf: Mapping[str, str], *, own_workers: bool) -> SparkSession:
    """Open a session on a Connect server, and set its configuration.

    The session shares Python workers with others if the server allows it, unless `own_workers` or a `conf` with
    `ISOLATION` forbids it.
    """
    shared = ISOLATION not in conf and not own_workers and _made_with_shared_workers(url, token)
    session = _remote_session(connect_channel(url, token, LOOPBACK))
    set_retries(session.client, **_PATIENCE)
    check_server(session)
    if shared:
        remote = cast(Any, session)
        remote.addArtifact = remote.addArtifacts = _refuse_artifacts
    for key, value in (_CONF | dict(conf)).items():
        session.conf.set(key, value)
    if FAULT_HANDLER not in conf:
        with suppress(Exception):  # A server may forbid it. Then an error about a dead worker does not name the shard.
            session.conf.set(FAULT_HANDLER, "true")
    return session


def _made_with_shared_workers(url: str, token: str | None) -> bool:
    """Make the session of the URL on the server, so that it shares Python workers with other sessions.

    Return False if the server refuses. Spark reads the setting `ISOLATION` when it makes a session, but a client can
    set it only later. So the session is made as a copy of an empty session that has the setting.
    """
    if not has("copies of Connect sessions"):
        return False
    channel = connect_channel(_with_session(url, str(uuid.uuid4())), token, LOOPBACK)
    empty: Any = connect_session(channel, registered=False)
    set_retries(empty.client, **_PATIENCE)
    try:
        empty.conf.set(ISOLATION, "false")
        copy = empty.client.clone(url.rpartition("session_id=")[2])
        forget_exit(copy)
        copy.close()
    except Exception as error:
        if is_lost(error):
            raise
        # A refused token is reported when the session itself is opened.
        log.debug("the Spark server gives each session Python workers of its own: %s", error)
        return False
    finally:
        with suppress(Exception):
            empty.client.release_session()
        empty.client.close()
    return True


def shares_workers(spark: SparkSession) -> bool:
    """Return True for a session whose Python workers also run tasks of other sessions, and keep their modules."""
    return is_connect(spark) and vars(spark).get("addArtifact") is _refuse_artifacts


def _refuse_artifacts(*_: Any, **__: Any) -> None:
    raise UsageError(
        "this Spark session shares its Python workers with other sessions, which would see its artifacts too\n"
        f"To give each session Python workers of its own, set {ISOLATION}=true in spark_conf or in the connection's extra"
    )


def _remote_session(channel: Any) -> SparkSession:
    # `SparkSession.builder.remote` sets this variable too. With it, `pyspark.sql.functions` makes columns for Connect.
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
    session = connect_session(channel)
    atexit.register(_release, session.client)
    return session


def _release(client: Any) -> None:
    """End the session at the exit of this process, without a retry: the server may have stopped."""
    with suppress(Exception):
        set_retries(client, max_retries=0)
        client.release_session()


def end_session(where: str, session_id: str, *, token: str | None = None) -> None:
    """End the session of an earlier driver, which may have been killed, and the operations that it left running.

    If that fails, only log the error. The remaining operations do no harm: they write under their own attempt, which no
    reader uses.
    """
    if not where.startswith("sc://"):
        return
    where, token = _with_token(where, token)
    _check_listening(where)
    try:
        interrupted = _interrupt(_with_session(where, session_id), token, release=True)
    except Exception as error:
        log.warning("the operations of an earlier try could not be interrupted: %s", _first_line(error))
    else:
        if interrupted:
            log.info("interrupted operations of an earlier try on the Spark server: %s", ", ".join(interrupted))


def interrupt_on_sigterm(session: SparkSession, where: str, *, token: str | None = None) -> None:
    """Let SIGTERM interrupt the session's operations on the Connect server and end this process with code 143.

    Call this function from the main thread. A Python signal handler would run only after the main thread's current
    call, such as a wait for Spark. So the signal's number goes into a pipe at once, and another thread, with its own
    client, reads the pipe and interrupts the operations.
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
                "SIGTERM: interrupted operations on the Spark server: %s",
                ", ".join(_interrupt(url, token, release=False)) or "none were running",
            )
        finally:
            os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, name="interrupt-on-sigterm", daemon=True).start()
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)


def explain(error: Exception, where: str) -> Exception:
    """Return a `StorageUnavailable` if the Connect server `where` was lost or has interrupted the operation.

    Return any other error unchanged.
    """
    if not where.startswith("sc://") or isinstance(error, CairnError):
        return error
    if _is_cancelled(error):
        what = "was interrupted, by a later try of the same task or by a person"
    elif is_lost(error):
        what = "lost its Spark Connect server, which has stopped or was restarted"
    else:
        return error
    return StorageUnavailable(
        f"the operation at {where} {what}: {_first_line(error)}\nNothing was committed. Try again"
    )


def is_lost(error: Exception) -> bool:
    """Return True if the server is dead, has lost the session, or has interrupted the operation.

    Neither the input nor the code is the cause of such an error.
    """
    return _is_cancelled(error) or any(sign in str(error) for sign in _LOST)


def check_running(session: SparkSession) -> None:
    """Raise an error for a stopped session, classic or of Spark Connect."""
    if is_stopped(session):
        raise UsageError(
            "the Spark session has been stopped; pass a running session, such as SparkSession.builder.getOrCreate()"
        )


def use_this_python(session: SparkSession) -> None:
    """Run the Python workers of a local session with this Python, unless the environment names another one.

    Spark's default is the `python3` of the PATH, which lacks the packages of a virtual environment that is not on the
    PATH.
    """
    context = context_of(session)
    if context is None or not str(getattr(context, "master", "")).startswith("local"):
        return
    if not any(os.environ.get(name) for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")):
        context.pythonExec = sys.executable


def _is_cancelled(error: Exception) -> bool:
    return "OPERATION_CANCELED" in str(error) or "SPARK_JOB_CANCELLED" in str(error)


def _with_session(where: str, session_id: str) -> str:
    address, _, parameters = where.partition("/;")
    kept = [p for p in parameters.split(";") if p and not p.startswith("session_id=")]
    return ";".join([f"{address.rstrip('/')}/", *kept, f"session_id={session_id}"])


def _interrupt(url: str, token: str | None, *, release: bool) -> list[str]:
    """Interrupt the operations of a session, and end the session if `release` is True. Return the operations' ids."""
    client = connect_client(connect_channel(url, token, LOOPBACK))
    try:
        set_retries(client, **_PATIENCE)
        interrupted = client.interrupt_all() or []
        if release:
            try:
                client.release_session()
            except Exception as error:
                # Spark 4.1 raises an error until the interrupted operations have ended, but it forgets the session.
                log.info("the session of an earlier try was not released: %s", _first_line(error))
        return interrupted
    finally:
        client.close()


def _first_line(error: Exception) -> str:
    # The text of a gRPC error is in `details`. The error's `str` begins with a line about the Python object.
    details = getattr(error, "details", None)
    text = str(details()) if callable(details) else str(error)
    # The text of another error may quote a gRPC error, with the line about the Python object first.
    if text.startswith("<_") and (found := re.search(r'details = "(.+)"', text)):
        text = found[1]
    # PySpark 4.0 raises RETRIES_EXCEEDED with the error of the last try as its cause.
    if ("[RETRIES_EXCEEDED]" in text or not text) and isinstance(error.__cause__, Exception):
        return _first_line(error.__cause__)
    return (text.strip().splitlines() or [type(error).__name__])[0]


def _check_listening(where: str) -> None:
    """Raise an error if no server listens at the address. Spark's client would raise one only after its retries."""
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
        "Or name another server, in the Airflow connection or with --spark of cairn run"
    )
