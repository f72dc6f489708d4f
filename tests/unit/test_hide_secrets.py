"""Credentials of each kind, texts that only look like one, and the places where a text leaves a process."""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cairn.command.cli import app, main
from cairn.command.exit_codes import exit_codes
from cairn.driver import driver_host
from cairn.operations.intervals.read_source import read_source
from cairn.spark.local_server_secret import checked_token
from cairn.spark.session import _with_token
from cairn_operators import ValidateStateOperator
from cairn_operators.airflow_versions import AirflowException
from cairn_operators.driver_process import DriverProcess
from cairn_operators.lineage_datasets import inputs_of
from cairn_operators.request_of import request_of
from cairn_ui.next_steps import after_error
from cairn_ui.render_template import environment, instants, render
from state_backend.adapters.memory_storage import forget_memory
from state_backend.adapters.open_storage import open_storage
from state_backend.values.errors import StorageUnavailable, UsageError
from state_backend.values.hide_secrets import hide, hide_all, hide_in
from state_backend.values.operation_parameters import Validate
from tests.support.checkpoints import PIPELINE, Folder, day
from tests.support.counting import DAYS
from tests.support.drivers import words_of
from tests.support.layout import REPOSITORY
from tests.support.trials import OLD, SESSION, read

SECRET = "pl4nt3d-S3cr3t"
PLANTED = [
    f"sc://spark.example:15002/;token={SECRET}",
    f"sc://spark.example:15002/;use_ssl=true;token={SECRET};user_id=me",
    f"sc://spark.example:15002?token={SECRET}",
    f"http://admin:{SECRET}@airflow.example:8080/api",
    f"https://{SECRET}@git.example/team",
    f"s3://AKIAEXAMPLE:{SECRET}@bucket/state",
    f"s3://AKIAEXAMPLE:a/b+{SECRET}@bucket/state",
    f"postgresql://me:{SECRET}@db/name",
    f"postgresql://me:p@{SECRET}@db/name",
    f"https://account.blob.example/c/b.csv?sv=2022&sig={SECRET}&se=2030",
    f"https://bucket.example/k?X-Amz-Credential={SECRET}&X-Amz-Signature={SECRET}&X-Amz-Security-Token={SECRET}",
    f"https://bucket.example/k?AWSAccessKeyId={SECRET}&Signature={SECRET}",
    f"host=db password={SECRET} user=me",
    f"host=db password='with space {SECRET}' user=me",
    f"AccountName=a;AccountKey={SECRET};Suffix=x",
    f"Invalid header value b'Bearer {SECRET}\\n'",
    f"Authorization: Basic {SECRET}",
    f'{{"access_token": "{SECRET}", "X-Amz-Security-Token": "{SECRET}", "conf": {{}}}}',
    f"{{'spark.hadoop.fs.s3a.secret.key': 1, 'password': '{SECRET}'}}",
    f"spark.hadoop.fs.s3a.secret.key={SECRET} --conf spark.ssl.keyPassword={SECRET}",
    f"cairn heal --spark 'sc://h:1/;token={SECRET}' --to 2024-01-01",
    f"--airflow-token {SECRET} --to x",
    f"AWS_SECRET_ACCESS_KEY={SECRET} cairn run",
]
HARMLESS = [
    "sc://spark.example:15002/;use_ssl=true;user_id=me@example.com",
    "abfss://container@account.dfs.core.windows.net/state",
    "s3://bucket/2024:01/a@b.csv",
    "http://localhost:8080/users/a@b",
    "http://[::1]:8080/users/a@b",
    "gs://bucket/token=7/part-0.parquet",
    "postgresql://me@db/name",
    "Its token:     /home/me/.local/state/cairn/spark-connect.host.15002",
    "Put the token of a user who may edit DAG x into the environment variable CAIRN_AIRFLOW_TOKEN",
    "Basic processors get one row; a Bearer token is sent with TLS only",
    "cairn heal --root file:///data/state --pipeline clicks --to 2024-01-01",
    "[2024-01-01T00:00:00Z, 2024-01-01T01:00:00Z): checkpoint 1",
    """cairn erase '{"token": "t-1"}' '{"device_token": "t-2"}' --yes""",
    'assignee="a" sigma=3 design=b; signal = 4',
]


@pytest.mark.parametrize("text", PLANTED)
def test_a_credential_is_hidden_and_the_rest_of_the_text_stays(text: str) -> None:
    assert SECRET not in hide(text) and "***" in hide(text)
    assert hide(hide(text)) == hide(text)
    assert hide(f"cannot open {text!r}; try again").endswith("; try again")


@pytest.mark.parametrize("text", HARMLESS)
def test_a_text_without_a_credential_stays(text: str) -> None:
    assert hide(text) == text


def test_credentials_in_nested_values_are_hidden_and_types_stay() -> None:
    value = {"files": [PLANTED[9], "a.csv"], "count": 3, "at": (1, None)}
    hidden = hide_all(value)
    assert SECRET not in str(hidden) and hidden["files"][1] == "a.csv" and hidden["count"] == 3
    assert hidden["at"] == (1, None)
    Offset = namedtuple("Offset", "file at")
    assert hide_all([Offset("s3://a:b@c/d?sig=x&e=1", 1)]) == [("s3://***@c/d?sig=***&e=1", 1)]


@pytest.mark.parametrize("text", PLANTED)
def test_errors_and_log_lines_hide_credentials(text: str, caplog: pytest.LogCaptureFixture) -> None:
    error = StorageUnavailable(f"no answer from {text}")
    error.add_note(f"tried {text}")
    error.args = (f"{error.args[0]}; again {text}",)
    foreign = OSError(f"refused by {text}")
    foreign.__cause__ = ValueError(text)
    hide_in(foreign)
    with caplog.at_level(logging.INFO, "cairn"):
        logging.getLogger("cairn").warning("lost %s", text)
        try:
            raise RuntimeError(text)
        except RuntimeError:
            logging.getLogger("cairn").exception("failed")
    # PySpark's formatter of JSON, and others, read the exception itself.
    raised = [str(record.exc_info) for record in caplog.records if record.exc_info]
    logged: Any = [*caplog.messages, caplog.text, *raised]
    said = [str(error), repr(error), *error.__notes__, str(foreign), str(foreign.__cause__), *logged]
    assert not [one for one in said if SECRET in one]


def test_log_lines_stay_text_beside_a_logger_of_pyspark(caplog: pytest.LogCaptureFixture) -> None:
    """pytest adds its handler to loggers that do not propagate, and PySpark's give it a formatter of JSON."""
    from pyspark.logger import PySparkLogger

    logger: Any = PySparkLogger.getLogger("does not propagate")
    logger.addHandler(caplog.handler)
    logging.getLogger("cairn").warning("lost %s", "a file")
    logger.removeHandler(caplog.handler)
    assert caplog.text.endswith("lost a file\n")


def test_every_module_logs_to_a_logger_that_hides_credentials() -> None:
    files = [
        path for folder in ("state_backend", "jobs/cairn", "plugins") for path in (REPOSITORY / folder).rglob("*.py")
    ]
    named = {name for path in files for name in re.findall(r"= logging\.getLogger\(([^)]*)\)", path.read_text())}
    assert named == {'"cairn"', '"cairn.spark"'}


# --- places ---------------------------------------------------------------------------------------------------------

ADDRESSED = [text for text in PLANTED if "://" in text.split()[0] and SECRET in text.split()[0]]
ROOT = ["--root", "memory://secrets", "--pipeline", PIPELINE]
HEAL = ["heal", *ROOT, "--to", "2024-01-04"]


@pytest.fixture
def folder() -> Iterator[Folder]:
    made = Folder(open_storage(f"memory://secrets/{PIPELINE}"))
    made.run(day(1), "a1", source_position=hide_all({"files": ADDRESSED}))
    yield made
    forget_memory("memory://secrets")


@pytest.mark.parametrize(
    "url", [url for url in ADDRESSED if re.search("h:|15002[/?];?token|admin:|AKIAEXAMPLE:p|sig=", url)]
)
@pytest.mark.parametrize(
    "words",
    [
        ["status", "--pipeline", "p", "--root"],
        ["status", "--root"],
        [*HEAL, "--airflow"],
        [*HEAL, "--code", "tests.support.trials:OLD", "--dry-run", "--every", "1d", "--spark"],
        ["run", "--code", "tests.support.trials:OLD", "--every", "1d", "--root", "memory://secrets-of-runs", "--spark"],
        ["diff"],
        ["status", *ROOT],
        [],
    ],
)
def test_the_command_line_prints_no_credential_of_its_words(
    folder: Folder, words: list[str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.spark.session.require_java", refuse)
    monkeypatch.setattr("cairn.spark.session._check_listening", refuse)
    done = CliRunner().invoke(app, [*words, url], env={"COLUMNS": "400"})
    said = f"{done.output} {done.exception!r} {''.join(traceback.format_exception(*done.exc_info or (None,) * 3))}"
    assert done.exit_code and SECRET not in said and ("***" in said or "no answer from" in said)
    forget_memory("memory://secrets-of-runs")


def refuse(where: str) -> None:
    raise StorageUnavailable(f"no answer from {where}")


@pytest.mark.parametrize("token", [f"{SECRET}\nmore", f"{SECRET}\x00", f"{SECRET}é"])
def test_a_token_that_cannot_be_sent_is_refused_without_being_printed(
    folder: Folder, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAIRN_AIRFLOW_TOKEN", token.replace("\x00", "\x7f"))
    done = CliRunner().invoke(app, [*HEAL, "--dag", "d"])
    assert done.exit_code == 2 and SECRET not in done.output and "CAIRN_AIRFLOW_TOKEN is no token" in done.output
    with pytest.raises(UsageError, match="the token of the Spark server is no token"):
        _with_token("sc://localhost:1", token)
    assert checked_token(f" {SECRET}\n", "the token") == SECRET
    assert checked_token("\n", "the token") is None


def test_after_ctrl_c_the_command_is_printed_without_its_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["cairn", "run", "--code", "m:P", "--spark", PLANTED[0]])
    one = typer.Typer()
    one.command()(exit_codes(stopped))
    done = CliRunner().invoke(one, [])
    assert done.exit_code == 130 and "--spark" in done.output and SECRET not in done.output


def test_records_marks_pages_and_lineage_have_no_credential(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source's position, a reason to quarantine or to refuse, and what older releases have recorded."""
    pipeline = replace(OLD, source=lambda spark, interval: (read(spark, interval)[0], {"files": ADDRESSED}))
    DAYS[day(0).start] = [("ann", "pear", 1)]
    position = read_source(SESSION, pipeline, day(0), "root").position
    assert "***" in str(position)
    folder.run(day(2), "a2", source_position={"files": ADDRESSED})
    folder.coordinator.quarantine(2, ADDRESSED[0], tuple(ADDRESSED))
    folder.coordinator.refuse("a3", ADDRESSED[0], tuple(ADDRESSED))
    storage = folder.storage
    marks = [
        storage.read(f.path).decode() for f in storage.list("") if f.path.startswith(("quarantine", "attempts/a3"))
    ]
    record = next(r for r in folder.coordinator.log().completed() if r.id == 1)
    lineage = inputs_of(record.content.source_position)
    shown = CliRunner().invoke(app, ["checkpoints", "2", *ROOT])
    page = render(
        "error.html",
        base="",
        ui="",
        status=404,
        detail=str(ADDRESSED),
        refusal=after_error(404, None),
        running=False,
        now=day(0).start,
    )
    assert len(marks) == 2 and lineage and "***" in shown.output and "***" in page
    page += environment().from_string("<p title='{{ one }}'>{{ many }}</p>").render(one=ADDRESSED[0], many=ADDRESSED[4])
    texts = [str(position), *marks, str(lineage), shown.output, page, instants(str(ADDRESSED))]
    assert not [text for text in texts if SECRET in text]


def test_the_process_title_hides_credentials_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    title: list[str] = []
    monkeypatch.setitem(sys.modules, "setproctitle", SimpleNamespace(setproctitle=title.append))
    for argv in (["cairn", "--version"], ["cairn", "--version", "--spark", PLANTED[0]]):
        monkeypatch.setattr("sys.argv", argv)
        with pytest.raises(SystemExit):
            main()
    assert len(title) == 1 and "***" in title[0] and SECRET not in title[0]


def test_no_driver_starts_with_credentials_among_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template may have put them into the root when the task runs."""
    monkeypatch.setattr(DriverProcess, "run", lambda *_: pytest.fail("a driver started"))
    monkeypatch.setenv("AIRFLOW_CONN_CAIRN_SPARK", "spark://h")
    operator = ValidateStateOperator(task_id="t", code="m:P", root="gs://b/{{ x }}", checkpoint="1")
    operator.root = ADDRESSED[5]
    with pytest.raises(AirflowException, match="contains credentials") as raised:
        operator.run_driver(request_of(Validate, operator, checkpoint="1"))
    assert SECRET not in str(raised.value)


@pytest.mark.long("seconds", runs_in="ci")
def test_a_driver_s_lines_result_and_title_have_no_credential(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines are also those of Spark and of user code. The result becomes XComs, or the error of the task."""
    title: list[str] = []
    monkeypatch.setitem(sys.modules, "setproctitle", SimpleNamespace(setproctitle=title.append))
    request: Any = SimpleNamespace(
        task="t", module="cairn.driver.driver", arguments=words_of(Validate(root=ADDRESSED[5], code="m:P"))
    )
    driver_host._set_title(request)
    (tmp_path / "leaking_driver.py").write_text(
        f"import sys, json\nfrom pathlib import Path\nprint({ADDRESSED!r}, flush=True)\n"
        f"from cairn.driver import driver\n"
        f"def fail(request, place): raise ValueError({str(ADDRESSED)!r})\n"
        "driver._operation = lambda request: fail\nsys.exit(driver.main())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("AIRFLOW__CAIRN__WARM_DRIVERS", "False")
    lines: list[str] = []
    sent = words_of(Validate(root="memory://x", code="m:P", checkpoint="1"))
    with pytest.raises(AirflowException) as raised:
        DriverProcess("leaking_driver").run(sent, lines.append)
    assert "***" in str(raised.value) and "***" in str(lines) and "***" in str(title)
    assert not [text for text in (str(raised.value), *lines, *title) if SECRET in text]


def test_source_offsets_that_differ_only_in_a_hidden_part_stay_different() -> None:
    """Else a run over a range would keep a result whose input has changed."""
    DAYS[day(0).start] = [("ann", "pear", 1)]

    def position_of(page: str) -> dict[str, Any]:
        position = {"url": f"https://host/events?page_token={page}"}
        pipeline = replace(OLD, source=lambda spark, interval: (read(spark, interval)[0], position))
        return read_source(SESSION, pipeline, day(0), "root").position

    assert position_of("a") != position_of("b") and position_of("a") == position_of("a")
