"""What errors of Spark's client mean, and the tag by which a task's operations are found again."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from cairn.operations.read_source import read_source
from cairn.pipeline import Interval, Pipeline
from cairn.spark_session import _properties, _session_url, explain, interrupt_former, operation_tag
from state_backend.values.errors import ProcessorError, SourceError, StorageUnavailable
from tests.support.checkpoints import day
from tests.support.counting import counting


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[OPERATION_CANCELED] Operation has been canceled. SQLSTATE: HY008", "was interrupted"),
        ("[SPARK_JOB_CANCELLED] Job 0 cancelled", "was interrupted"),
        ("StatusCode.UNAVAILABLE: failed to connect to all addresses", "lost its Spark Connect server"),
        ("[INVALID_HANDLE.SESSION_CHANGED] The handle is invalid.", "lost its Spark Connect server"),
        ("[NO_ACTIVE_SESSION] No active Spark session found.", "lost its Spark Connect server"),
        ("Cannot call methods on a stopped SparkContext", "lost its Spark Connect server"),
    ],
)
def test_a_lost_server_or_operation_is_worth_a_retry(text: str, what: str) -> None:
    error = explain(RuntimeError(text + "\n\tat org.apache.spark.Something"), "sc://h:7")
    assert isinstance(error, StorageUnavailable)
    assert f"at sc://h:7 {what}" in str(error) and text in str(error) and "org.apache" not in str(error)


def test_what_grpc_says_is_in_its_details() -> None:
    class RpcError(Exception):
        def details(self) -> str:
            return "connection refused"

    assert "connection refused" in str(
        explain(RpcError("<RPC that terminated with:\n\tStatusCode.UNAVAILABLE"), "sc://h")
    )


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (ProcessorError("user code said UNAVAILABLE"), "sc://h:7"),
        (RuntimeError("UNAVAILABLE"), "local[2]"),
        (RuntimeError("something else"), "sc://h:7"),
    ],
)
def test_other_errors_stay_as_they_are(error: Exception, where: str) -> None:
    assert explain(error, where) is error


def test_a_source_is_not_blamed_for_a_lost_server() -> None:
    def lost(*_: Any) -> Any:
        raise RuntimeError("[SESSION_CLOSED] the server went")

    start = datetime(2024, 1, 1, tzinfo=UTC)
    pipeline = Pipeline(name="p", start=start, source=lost, key=["a"], processor=object, output_schema="a int")
    with pytest.raises(RuntimeError, match="the server went"):
        read_source(cast(Any, None), pipeline, Interval(start, start + timedelta(days=1)))


def test_a_tag_is_one_task_of_one_deployment() -> None:
    tag = operation_tag("p/process", "gs://b/prod", "dag/run,1/process/-1")
    assert tag == operation_tag("p/process", "gs://b/prod", "dag/run,1/process/-1")
    others = [
        ("p/process", "gs://b/test", "dag/run,1/process/-1"),
        ("p/process", "gs://b/prod", "dag/run,2/process/-1"),
    ]
    assert tag not in {operation_tag(*other) for other in others}
    assert tag.startswith("cairn-p/process-") and "," not in tag, "Spark separates tags by commas"


def test_a_session_is_shared_whatever_else_the_url_says() -> None:
    shared = _session_url("sc://h:7/;use_ssl=true;user_id=me", "p/process", 5)
    assert shared.startswith("sc://h:7/;use_ssl=true;user_id=me;session_id=")
    assert shared.endswith(_session_url("sc://h:7", "p/process", 5).partition(";")[2])
    own = "sc://h:7/;session_id=0b1c2d3e-0000-0000-0000-000000000000"
    assert _session_url(own, "p/process", 5) == own


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
        assert read == conf
    assert "PYSPARK_SUBMIT_ARGS" not in os.environ and not file.exists()


def test_only_a_shared_server_has_anything_to_interrupt() -> None:
    assert interrupt_former("local[2]", "p/process", "tag") == []


def test_an_error_that_came_through_py4j_is_told_in_java_s_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first line names the call by a number."""

    def source(*_: Any) -> Any:
        raise RuntimeError(
            "An error occurred while calling o161.load.\n: org.example.DriverException: no connection\n\tat a.B.c(B.java)\n"
            "Caused by: java.net.ConnectException: refused\n"
        )

    with pytest.raises(SourceError) as raised:
        read_source(cast(Any, None), counting(source=source), day(1))
    assert str(raised.value).endswith(
        "the source raised org.example.DriverException: no connection; caused by java.net.ConnectException: refused"
    )
