"""Processes of different versions of Python and Spark: who refuses whom, before anything is computed.

These are two rows of the table in `docs/upgrade.md` (*While versions differ*). The others: a task and its driver
(`test_operation_requests.py`), files of a newer version (`test_record_codec.py`), the executors of a master
(`tests/integration/test_cluster.py`) and those of a Connect server (`test_shipping.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyspark
import pytest

from cairn import spark_versions
from cairn.spark import session as spark_session
from cairn.spark.first_cause import first_cause
from cairn.spark.session import connect
from cairn.spark_versions import TRIED_SERVERS, check_classic, check_server, version_of
from state_backend.values.errors import StorageUnavailable, UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OWN = pyspark.__version__
OTHER = "4.0.5" if version_of(OWN) != (4, 0) else "4.1.4"


@pytest.mark.parametrize("client", TRIED_SERVERS, ids=str)
@pytest.mark.parametrize("server", ["3.5.9", "4.0.5", "4.1.1-amzn-0", "4.2.1", "4.3.0", "4.4.0"])
def test_a_connect_server_of_an_untried_version_is_refused(
    client: tuple[int, int], server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`createDataFrame` of a newer client fails on 4.0 and 4.1; no client was tried with the Spark that comes next."""
    monkeypatch.setattr(spark_versions, "VERSION", client)
    if client <= version_of(server) <= (4, 3) or (client, server) == ((4, 3), "4.2.1"):
        check_server(SimpleNamespace(version=server))
    else:
        with pytest.raises(
            UsageError,
            match=rf"(?s)runs Spark {server}, .* PySpark {OWN}\. .*not tried.*pyspark\[connect\]==\d\.\d\.\*",
        ):
            check_server(SimpleNamespace(version=server))


def test_a_session_of_an_untried_pair_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting is changed, and the error is not taken for that of a server that is gone."""
    monkeypatch.setattr(spark_session, "_remote_session", lambda _: SimpleNamespace(client=None, version="9.1.0"))
    monkeypatch.setattr(spark_session, "_made_with_shared_workers", lambda *_: True)
    monkeypatch.setattr(spark_session, "_check_listening", lambda _: None)
    monkeypatch.setattr(spark_session, "set_retries", lambda _, **__: None)
    with pytest.raises(UsageError, match=f"runs Spark 9.1.0, and this driver PySpark {OWN}"):
        connect("sc://h", "test")


def test_versions_of_a_classic_cluster_may_differ_in_the_last_number_only() -> None:
    major, minor = version_of(OWN)
    check_classic("an executor", f"{major}.{minor}.99")
    with pytest.raises(
        UsageError, match=f"^an executor runs Spark {OTHER}, and this driver PySpark {OWN}.*\n.*=={OTHER[:3]}"
    ):
        check_classic("an executor", OTHER)


@contextmanager
def page(text: str) -> Iterator[str]:
    """The page of a standalone master."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{{host}}:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("shown", "error", "says"),
    [
        (OTHER, UsageError, f"the master spark://127.0.0.1:7077 runs Spark {OTHER}, and this driver PySpark {OWN}"),
        (OWN, StorageUnavailable, f"accepts no driver of PySpark {OWN}: it does not run, or runs another version"),
        (None, StorageUnavailable, f"accepts no driver of PySpark {OWN}: it does not run, or runs another version"),
    ],
    ids=["another version", "own version", "no page"],
)
@pytest.mark.parametrize("attributes", ['"version" style="margin-right: 15px;"', '"version me-3"'], ids=["4.0", "4.3"])
def test_an_unresponsive_master_is_reported_with_its_version_or_as_unavailable(
    attributes: str, shown: str | None, error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a master of another version, which can't read what the driver says."""
    with page(f"<span class={attributes}>{shown}</span>" if shown else "") as at:
        monkeypatch.setattr(spark_session, "_MASTER_PAGE", at)
        refused = spark_session._not_registered("spark://127.0.0.1:7077")
    assert type(refused) is error and says in str(refused)


SAYS = """Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times: PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] \
Python in worker has different version: 3.12 than that in driver: 3.11, PySpark cannot run with different minor versions.
Please check environment variables PYSPARK_PYTHON and PYSPARK_DRIVER_PYTHON are correctly set."""


def test_a_python_mismatch_between_workers_and_driver_names_both_versions() -> None:
    with pytest.raises(UsageError) as raised, first_cause():
        raise RuntimeError(SAYS)
    assert str(raised.value).startswith(
        "Spark's workers run Python 3.12, and the driver Python 3.11. Both need the same"
    )


@pytest.mark.spark
def test_executors_with_another_spark_or_python_version_are_refused(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark_session._check_executors(spark, "spark://h:7077")
    monkeypatch.setattr(spark_versions, "VERSION", (4, 9))
    with pytest.raises(UsageError, match=f"an executor of spark://h:7077 runs Spark {OWN}"):
        spark_session._check_executors(spark, "spark://h:7077")
    monkeypatch.setattr(spark.sparkContext, "pythonVer", "3.9")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(UsageError, match=f"Spark's workers run Python {here}, and the driver Python 3.9"):
        spark_session._check_executors(spark, "spark://h:7077")


ASKED = """
import sys
from cairn.spark.session import connect
spark = connect("local[1]", "test", conf={"spark.pyspark.python": sys.argv[1]})
spark.sparkContext.parallelize([0], 1).map(str).collect()
"""


@pytest.mark.spark
@pytest.mark.long("seconds: a JVM of its own", runs_in="ci")
def test_workers_run_the_python_of_the_setting(tmp_path: Path) -> None:
    """PySpark reads it only in a program that spark-submit starts."""
    python, used = tmp_path / "python", tmp_path / "used"
    python.write_text(f'#!/bin/sh\ntouch "{used}"\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", ASKED, str(python)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0 and used.exists(), done.stderr
