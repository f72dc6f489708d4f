"""The operators against a fake driver: what they ask of it, what they make of its end, that it never outlives them."""

from __future__ import annotations

import datetime as datetime_module
import importlib
import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import boto3
import pendulum
import pytest
from airflow.sdk import DAG, Asset, AssetAlias, BaseHook, BaseOperator
from airflow.sdk.execution_time.task_runner import _serialize_rendered_fields
from moto import mock_aws

import cairn_operators
from cairn.pipeline import Interval
from cairn_operators import (
    CommitCheckpointOperator,
    ProcessIntervalOperator,
    RunIntervalsOperator,
    SavepointOperator,
    ValidateStateOperator,
    backfill_pipeline,
    driver_operator,
    restore_pipeline,
    stateful_pipeline,
)
from cairn_operators.airflow_versions import (
    TIMETABLES,
    AirflowException,
    AirflowFailException,
    AirflowNotFoundException,
    AirflowSkipException,
    CronDataIntervalTimetable,
    DeltaDataIntervalTimetable,
    DownstreamTasksSkipped,
    setting_of,
)
from cairn_operators.data_interval import check_ended, data_interval, is_due
from cairn_operators.driver_operator import _sessions
from cairn_operators.driver_process import DriverProcess, _in_groups
from cairn_operators.failures import exit_failure, failure
from cairn_operators.hidden_settings import hide_secrets
from cairn_operators.pipeline_source import pipeline_name_of
from cairn_operators.spark_location import _texts, spark_location, spark_url
from cairn_operators.storage_connection import as_storage_identity, storage_credentials
from cairn_provider import get_provider_info
from state_backend.checkpoint import publish_output
from state_backend.values import errors
from state_backend.values.intervals import format_instant
from state_backend.values.operation_parameters import (
    REQUESTS,
    Call,
    ProcessInterval,
    RunRange,
    TakeSavepoint,
    Validate,
    from_json,
)
from state_backend.values.records import Permissions, RunRef
from state_backend.values.schedule import Cron
from tests.support.airflow_names import DagSerialization, as_object, needs
from tests.support.airflow_schedule import timetable
from tests.support.drivers import words_of
from tests.support.operator_calls import END, FAKE_DRIVER, START, Events, context, gone, pids, run

AZURE = "spark.hadoop.fs.azure.account.key.store.dfs.core.windows.net"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes the driver do the given thing; returns the directory where it leaves its traces."""
    (tmp_path / "fake_driver.py").write_text(FAKE_DRIVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_DRIVER_DIR", str(tmp_path))
    monkeypatch.setenv("AIRFLOW_CONN_CAIRN_SPARK", '{"conn_type": "spark_connect", "host": "sc://h", "port": 7}')
    monkeypatch.setattr("cairn_operators.driver_operator.DriverOperator.driver_module", "fake_driver")
    monkeypatch.setattr("cairn_operators.earlier_runs._previous", lambda *_: None)

    def behave(what: str) -> Path:
        monkeypatch.setenv("FAKE_DRIVER", what)
        return tmp_path

    return behave


def micro_batch(**more: Any) -> ProcessIntervalOperator:
    return ProcessIntervalOperator(task_id="process", code="m:P", pipeline="p", root="memory://operators", **more)


def pipeline_dag(**more: Any) -> DAG:
    return stateful_pipeline("p", "m:P", "file:///r", **{"schedule": "@daily", "start_date": START, **more})


# --- what the driver is asked, and its answer ---------------------------------------------------------------------------


def test_process_passes_the_run_and_returns_the_attempt(fake: Callable[[str], Path]) -> None:
    folder = fake('ok {"input_rows": 842, "attempt": "ignored"}')
    result = run(
        micro_batch(permissions={"allow_gap": "True", "allow_stale_base": "False", "replace_overlapping": "True"})
    )
    request = request_in(folder)
    assert request == ProcessInterval(
        root="memory://operators",
        code="m:P",
        pipeline="p",
        start=datetime(2013, 1, 5, tzinfo=UTC),
        end=datetime(2013, 1, 6, tzinfo=UTC),
        attempt=request.attempt,
        run=RunRef(run_id="r1", clear_number=2, try_number=3),
        permissions=Permissions(allow_gap=True, replace_overlapping=True),
    )
    asked = json.loads((folder / "arguments.json").read_text())
    assert from_json(Call, asked[asked.index("--call") + 1]).spark == "sc://h:7"
    assert result == {"input_rows": 842, "sink": "", "attempt": request.attempt}
    assert run(micro_batch())["attempt"] != request.attempt


@pytest.mark.long("seconds", runs_in="ci")
def test_a_pipeline_beside_its_dag_is_found(
    fake: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow puts the bundle, in the run's version, on the path of the task's process; the driver is another process. There too it
    comes last: what is called like a module of Python takes nobody's place."""
    bundle = tmp_path / "bundle at version 7"
    bundle.mkdir()
    (bundle / "beside_its_dag.py").write_text("import statistics\nPIPELINE = statistics.mean([5])\n")
    (bundle / "statistics.py").write_text("raise ImportError('not this one')")
    monkeypatch.syspath_prepend(str(bundle))
    folder = fake('ok {"attempt": "a"}')
    driver = folder / "fake_driver.py"
    driver.write_text(
        driver.read_text().replace('print("a line"', 'print(os.environ["CAIRN_PYTHON_PATH"])\nprint("a line"')
    )
    lines: list[str] = []
    process = DriverProcess("fake_driver")
    process.run([], lines.append)
    assert str(bundle) in lines[0].split(os.pathsep)
    assert not [entry for entry in lines[0].split(os.pathsep) if "site-packages" in entry or "lib/python" in entry]

    monkeypatch.undo()
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "cairn.driver.driver"),
            *words_of(Validate(root="memory://x", code="beside_its_dag:PIPELINE")),
            *("--result", str(tmp_path / "result.json")),
        ],
        env={**os.environ, "CAIRN_PYTHON_PATH": lines[0]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "'beside_its_dag:PIPELINE' is a int, not a Pipeline" in ran.stdout, ran.stderr


@pytest.mark.long("half a second", runs_in="ci")
def test_a_retry_tells_the_driver_of_the_earlier_try(fake: Callable[[str], Path]) -> None:
    """What the driver said when it began is kept for the next try, also if this one fails; it is no line of the log."""

    class Store(dict[str, Any]):
        def set(self, key: str, value: Any) -> None:
            self[key] = value

    store = Store()
    folder = fake("error StorageUnavailable")
    with pytest.raises(AirflowException):
        run(micro_batch(), context(task_state_store=store))
    assert request_in(folder).earlier is None
    assert store == {"cairn_attempt": {"attempt": "a7", "options": {"mode": "full"}}}

    fake('ok {"attempt": "a7", "reused": true}')
    assert run(micro_batch(), context(task_state_store=store))["attempt"] == "a7"
    assert request_in(folder).earlier == store["cairn_attempt"]

    run(micro_batch(reuse_prepared=False), context(task_state_store=store))
    assert request_in(folder).earlier is None


@pytest.mark.parametrize("overlaps", [False, True])
def test_commands_in_errors_repair_the_pipeline_in_its_dag(fake: Callable[[str], Path], overlaps: bool) -> None:
    """The state backend knows the pipeline's name only; a person needs the DAG's. `cairn heal` replaces no other boundaries."""
    fake("error StaleStateError")
    operator = micro_batch(dag=DAG("daily", schedule=None))
    driver = Path(os.environ["FAKE_DRIVER_DIR"], "fake_driver.py")
    first, last = "2013-01-02T00:00:00", "2013-01-04T00:00:00"
    again = {"first": f"{first}+00:00", "last": f"{last}+00:00", "replace_overlapping": overlaps}
    driver.write_text(driver.read_text().replace('"what went wrong"', f'"what went wrong", "rerun": {again}'))
    with pytest.raises(AirflowFailException) as caught:
        run(operator)
    heal = f"cairn heal --root memory://operators --pipeline p --to {last}Z --dag daily"
    fill = f"cairn backfill --dag daily --from {first}Z --to {last}Z --replace-overlapping"
    assert str(caught.value) == f"StaleStateError: what went wrong\n{fill if overlaps else heal}"


def test_lines_reach_the_log_whole(fake: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    fake("ok {}")
    lines: list[str] = []
    operator = micro_batch()
    log = SimpleNamespace(info=lambda text, *more: lines.append(text % more), warning=lines.append)
    monkeypatch.setattr(type(operator), "log", log)
    run(operator)
    said = [line for line in lines if not line.startswith("Airflow ")]  # what an old Airflow lacks
    # The interval stands once at the top, and not in each line of the driver.
    assert said[0] == "p [2013-01-05T00:00:00Z, 2013-01-06T00:00:00Z)"
    assert said[2:-1] == ["a line", "half a line", "to stderr", "no newline"]
    assert re.fullmatch(r"[0-9.]+ s: start [0-9.]+, order [0-9.]+", lines[-1])  # where the time went, last


def test_lines_of_sparks_jvm_stand_in_groups_and_its_errors_do_not() -> None:
    warn, error = "26/11/30 05:13:52 WARN Utils: x", "26/11/30 05:13:52 ERROR Utils: y"
    lines = ["::group::Spark", 'Setting default log level to "WARN".', warn, "\tat a.b", "::endgroup::"]
    assert [*_in_groups([*lines[1:4], error, "\tat c", "p: done", warn])] == [
        *lines, error, "\tat c", "p: done", "::group::Spark", warn, "::endgroup::"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "expected", "message"),
    [
        ("error StorageUnavailable", AirflowException, "StorageUnavailable: what went wrong"),
        ("error BaseMoved", AirflowException, "BaseMoved: what went wrong"),
        ("error SourceError", AirflowException, "SourceError: what went wrong"),
        ("error ProcessorError", AirflowException, "ProcessorError: what went wrong"),
        ("error Py4JError", AirflowException, "Py4JError: what went wrong"),
        ("error annotations", AirflowException, "annotations: what went wrong"),
        ("error PermissionRefused", AirflowFailException, "PermissionRefused: what went wrong"),
        ("error UsageError", AirflowFailException, "UsageError: what went wrong"),
        ("error StateSchemaError", AirflowFailException, "StateSchemaError: what went wrong"),
        ("error StaleStateError", AirflowFailException, "StaleStateError: what went wrong"),
        ("error InvariantViolated", AirflowFailException, "InvariantViolated: what went wrong"),
        ("kill", AirflowException, "the Spark driver was killed (SIGKILL); a retry is safe"),
        ("exit 3", AirflowException, "the Spark driver ended with code 3 and no result"),
        ("exit 0", AirflowException, "the Spark driver ended with code 0 and no result"),
    ],
)
def test_a_drivers_failure_is_retried_or_final_by_its_kind(
    fake: Callable[[str], Path], what: str, expected: type, message: str
) -> None:
    fake(what)
    with pytest.raises(AirflowException) as caught:
        run(micro_batch())
    assert isinstance(caught.value, AirflowFailException) == (expected is AirflowFailException)
    assert str(caught.value).startswith(message)


def test_unknown_names_are_retried() -> None:
    assert not isinstance(failure("NoSuchClass", "m"), AirflowFailException)
    assert str(exit_failure(-250)).startswith("the Spark driver was killed (signal 250)")


def test_a_run_without_interval_is_refused() -> None:
    for missing in ({"data_interval_start": None}, {"data_interval_end": None}, {"data_interval_end": START}):
        with pytest.raises(AirflowFailException, match="cairn backfill --dag aircraft"):
            data_interval(context(**missing))


@pytest.mark.parametrize(
    ("zone", "now", "last"),
    [
        ("America/New_York", "2024-03-10T07:30Z", "2024-03-09T07:00:00Z"),
        ("Europe/Berlin", "2024-03-31T01:30Z", "2024-03-30T01:00:00Z"),
        ("Australia/Sydney", "2024-10-05T16:30Z", "2024-10-04T16:00:00Z"),
    ],
)
def test_a_manual_run_after_a_skipped_time_names_the_last_interval(zone: str, now: str, last: str) -> None:
    """Airflow 3.3 gives such a run an interval without length."""
    dag = pipeline_dag(schedule="0 2 * * *", start_date=datetime(2024, 1, 1, tzinfo=ZoneInfo(zone)))
    of_airflow = timetable(Cron("0 2 * * *", zone)).infer_manual_data_interval(
        run_after=pendulum.instance(datetime.fromisoformat(now))
    )
    assert of_airflow.start == of_airflow.end
    with pytest.raises(AirflowFailException, match="skips the local time") as refused:
        data_interval(context(data_interval_start=of_airflow.start, data_interval_end=of_airflow.end, dag=dag))
    assert str(refused.value).splitlines()[-1] == f"cairn backfill --dag aircraft --from {last} --to {last}"


def test_a_manual_run_of_an_interval_that_has_not_ended_is_refused() -> None:
    """Airflow 3.3 gives this interval to a manual run in the hour that clocks repeat; the scheduled run has it too."""
    schedule = Cron("0 1 * * *", "America/New_York")
    repeated = datetime(2024, 11, 3, 5, 30, tzinfo=UTC)
    of_airflow = timetable(schedule).infer_manual_data_interval(run_after=pendulum.instance(repeated))
    assert of_airflow.end > repeated
    dag = pipeline_dag()
    today = datetime.now(tz=UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    start, end = today - timedelta(days=6), today + timedelta(days=1)

    def start_of(kind: str, ends: datetime) -> Any:
        run_of = SimpleNamespace(run_id="r1", dag_id="aircraft", run_type=kind)
        return check_ended(context(data_interval_start=start, dag_run=run_of, dag=dag), ends)

    with pytest.raises(AirflowFailException, match="its input is not complete") as refused:
        start_of("manual", end)
    before = format_instant(start - timedelta(days=1))
    assert str(refused.value).splitlines()[-1] == f"cairn backfill --dag aircraft --from {before} --to {before}"
    start_of("manual", today)
    start_of("scheduled", end)


def same(timetable: Any) -> tuple[Any, ...]:
    return type(timetable), *(str(setting_of(timetable, name)) for name in ("expression", "timezone", "delta"))


@pytest.mark.parametrize(
    ("schedule", "intervals"),
    [
        ("@daily", CronDataIntervalTimetable("@daily", timezone="America/New_York")),
        ("0 6 * * *", CronDataIntervalTimetable("0 6 * * *", timezone="America/New_York")),
        (timedelta(hours=6), DeltaDataIntervalTimetable(timedelta(hours=6))),
    ],
)
def test_a_cron_text_has_data_intervals_whatever_airflow_is_set_to(
    monkeypatch: pytest.MonkeyPatch, schedule: Any, intervals: Any
) -> None:
    """In a default Airflow each of these ticks, and the interval of a run has no length."""
    monkeypatch.setenv("AIRFLOW__SCHEDULER__CREATE_CRON_DATA_INTERVALS", "False")
    monkeypatch.setenv("AIRFLOW__SCHEDULER__CREATE_DELTA_DATA_INTERVALS", "False")
    start = datetime(2013, 1, 1, tzinfo=ZoneInfo("America/New_York"))
    dag = pipeline_dag(schedule=schedule, start_date=start)
    assert same(dag.timetable) == same(intervals)
    ticks = DAG("ticks", schedule=schedule, start_date=start)
    with pytest.raises(AirflowFailException, match="has no length") as refused:
        data_interval(context(data_interval_end=START, dag=ticks))
    # What it says to write is what works.
    proposed = str(refused.value).partition("schedule=")[2].partition(f" (from {TIMETABLES})")[0]
    scope = {
        "datetime": datetime_module,
        **{t.__name__: t for t in (CronDataIntervalTimetable, DeltaDataIntervalTimetable)},
    }
    assert same(eval(proposed, scope)) == same(intervals)


@pytest.mark.parametrize("schedule", ["@once", None])
def test_a_schedule_without_intervals_stays(schedule: str | None) -> None:
    assert pipeline_dag(schedule=schedule).schedule == schedule


def test_airflow_looks_into_every_dag_that_is_shown() -> None:
    """Its safe mode skips a file that does not say both "dag" and "airflow", without a word."""
    root = Path(__file__).resolve().parents[2]
    shown = [file.read_text() for file in (root / "dags").glob("*.py")]
    for page in (root / "README.md", *(root / "docs").glob("*.md")):
        blocks = page.read_text().split("```python\n")[1:]
        shown += [code for code, *_ in (block.split("```") for block in blocks) if "cairn_operators" in code]
    assert len(shown) > 2
    for code in shown:
        assert {"dag", "airflow"} <= set(re.findall("dag|airflow", code.lower())), code


def test_a_permission_is_a_clear_yes() -> None:
    with pytest.raises(AirflowFailException, match="allow_gap is 'maybe'"):
        run(micro_batch(permissions={"allow_gap": "maybe"}))


# --- the driver never outlives the task -----------------------------------------------------------------------------------


@pytest.fixture
def sigterm_as_airflow_does() -> Iterator[Callable[[Any], None]]:
    before = signal.getsignal(signal.SIGTERM)
    yield lambda operator: signal.signal(signal.SIGTERM, lambda *_: operator.on_kill()) and None
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("manner", ["obedient", "stubborn"])
@pytest.mark.long("seconds", runs_in="ci")
def test_sigterm_stops_the_whole_group(
    fake: Callable[[str], Path], sigterm_as_airflow_does: Callable[[Any], None], manner: str
) -> None:
    folder = fake(f"hang {manner}")
    operator = micro_batch()
    sigterm_as_airflow_does(operator)

    def kill() -> None:
        pids(folder)
        os.kill(os.getpid(), signal.SIGTERM)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(SystemExit):
        run(operator)
    killer.join()
    assert gone(pids(folder))


def test_on_kill_after_the_end_does_nothing(fake: Callable[[str], Path]) -> None:
    fake("ok {}")
    operator = micro_batch()
    operator.on_kill()
    run(operator)
    operator.on_kill()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's PR_SET_PDEATHSIG")
@pytest.mark.long("seconds", runs_in="ci")
def test_the_driver_dies_with_a_killed_task(fake: Callable[[str], Path]) -> None:
    folder = fake("hang")
    code = "from cairn_operators.driver_process import DriverProcess; DriverProcess('fake_driver').run([], print)"
    task = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    driver, _ = pids(folder)
    task.kill()
    task.wait()
    assert gone([driver])


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.long("seconds", runs_in="ci")
def test_the_task_stops_its_driver_when_its_supervisor_is_gone(fake: Callable[[str], Path]) -> None:
    """kill -9 of the supervisor: the kernel does not kill the task, and another try will be started."""
    folder = fake("hang")
    task = "from cairn_operators.driver_process import DriverProcess; DriverProcess('fake_driver').run([], print)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {task!r}])"
    supervisor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    both = pids(folder)
    supervisor.kill()
    supervisor.wait()
    assert gone(both, timeout_s=10)


@pytest.mark.long("seconds", runs_in="ci")
def test_a_driver_whose_children_hold_the_pipe_ends(fake: Callable[[str], Path], tmp_path: Path) -> None:
    fake("ok {}")
    driver = tmp_path / "fake_driver.py"
    driver.write_text("import subprocess; child = subprocess.Popen(['sleep', '100'])\n" + driver.read_text())
    start_s = time.monotonic()
    assert run(micro_batch())["attempt"]
    assert time.monotonic() - start_s < 10


# --- the checkpoint task ----------------------------------------------------------------------------------------------------


def checkpoint(
    monkeypatch: pytest.MonkeyPatch, commit: Callable[[], Any], *, sink_fails_for: int | None = None, **more: Any
) -> tuple[Any, list[str]]:
    """An operator that commits as told, and what else it was asked to do."""
    asked: list[str] = []

    def located(root: str, pipeline: str) -> Any:
        asked.append(pipeline)
        return SimpleNamespace(storage=None, url=f"{root}/{pipeline}")

    def committed(at: Any, attempt: str) -> Any:
        asked.append(f"commit {attempt}")
        record = commit()
        return SimpleNamespace(id=record.id, record=record, log=None)

    def publish(at: Any, hook: Any, *, in_order: bool = False, **_: Any) -> None:
        asked.append(f"publish {hook}{' in order' if in_order else ''}")
        if sink_fails_for is not None:
            raise errors.SinkFailed("the sink of 'p' failed", frozenset({sink_fails_for}))

    for name, stand_in in (
        ("location.locate", located),
        ("commit_attempt.commit", committed),
        ("publish_output.publish", publish),
        ("clean_up_dropped.try_clean_up", lambda *_: asked.append("clean up")),
    ):
        monkeypatch.setattr(f"state_backend.checkpoint.{name}", stand_in)
    operator = CommitCheckpointOperator(task_id="checkpoint", pipeline="p", root="memory://r", attempt="a1", **more)
    return operator, asked


def record() -> Any:
    names = "changed_bytes uploaded_bytes state_bytes state_files keys keys_touched input_rows output_rows late_rows"
    totals = SimpleNamespace(**{name: number for number, name in enumerate(names.split())})
    return SimpleNamespace(
        id=7, content=SimpleNamespace(base_id=6, interval=Interval(START, END), totals=totals, durations_us={})
    )


def test_a_sink_fails_the_task_of_its_own_interval_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retried, and cleaned up either way. Of an older interval the log says so."""
    own, asked = checkpoint(monkeypatch, record, sink_fails_for=7)
    with pytest.raises(AirflowException, match="SinkFailed: the sink of 'p' failed") as raised:
        run(own)
    assert not isinstance(raised.value, AirflowFailException) and asked[-1] == "clean up"
    older, asked = checkpoint(monkeypatch, record, sink_fails_for=3)
    assert run(older)["checkpoint"] == 7 and asked[-1] == "clean up"


def refuse(error: Exception) -> Callable[[], Any]:
    def commit() -> Any:
        raise error

    return commit


@pytest.mark.parametrize("validated", [False, True])
def test_checkpoint_commits_publishes_cleans_up_and_tells_each_asset(
    monkeypatch: pytest.MonkeyPatch, validated: bool
) -> None:
    """The sink's table may be an asset, for DAGs that read the table."""
    table, alias = Asset("s3://warehouse/clicks"), AssetAlias("clicks")
    operator, asked = checkpoint(monkeypatch, record, outlets=[table, alias], validated=validated)
    assert operator.outlets == [operator.asset, table, alias]
    events = Events()
    result = run(operator, context(outlet_events=events))
    assert asked == ["p", "commit a1", "publish None", "clean up"]
    assert (result["checkpoint"], result["base"], result["input_rows"]) == (7, 6, 6) and json.dumps(result)
    told = {**result, "rows": 7, "bytes": 2, "validated": validated}
    assert [events[asset].extra for asset in operator.outlets] == [told, told, None]


@pytest.mark.parametrize("gate", [False, True])
def test_what_the_next_interval_waits_for_gets_a_worker_slot_first(gate: bool) -> None:
    dag = pipeline_dag(gate=gate, validate=True, savepoint={"folder": "/s"})
    weights = {task.task_id: task.priority_weight for task in dag.tasks}
    assert weights == {"checkpoint": 5, "validate": 4, "process": 3, "savepoint": 1}
    rules = [dag.get_task(name).weight_rule for name in ("checkpoint", "validate", "process")]
    assert rules == [micro_batch().weight_rule] * 3
    assert micro_batch(priority_weight=9).priority_weight == 9  # the user's own counts


@pytest.mark.parametrize("gate", [False, True])
def test_a_lost_attempt_fails_for_good_and_says_what_to_clear(monkeypatch: pytest.MonkeyPatch, gate: bool) -> None:
    """Behind a gate the task before is the validation, which makes no attempt."""
    operator, asked = checkpoint(monkeypatch, refuse(errors.BaseMoved("the base is gone")))
    dag = stateful_pipeline("aircraft", "m:P", "file:///r", schedule="@daily", start_date=START, gate=gate)
    with pytest.raises(AirflowFailException) as caught:
        run(operator, context(task=dag.get_task("checkpoint")))
    assert str(caught.value).startswith("BaseMoved: the base is gone\n")
    assert "\nairflow tasks clear aircraft -t process -d -s 2013-01-05" in str(caught.value)
    assert asked == ["p", "commit a1"]


def test_the_sink_is_looked_up_only_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    urls: list[str] = []

    def call_sink(at: Any, spark: None, *, after: Any, code: str) -> None:
        urls.append(at.url)
        publish_output.publish(at, "hook", in_order=True, code=code)

    pipeline = SimpleNamespace(sink=print, call_sink=call_sink)
    monkeypatch.setitem(sys.modules, "some_pipelines", SimpleNamespace(MINE=pipeline))
    operator, asked = checkpoint(monkeypatch, record, sink_of="some_pipelines:MINE")
    run(operator)
    assert urls == ["memory://r/p"] and "publish hook in order" in asked


# --- validation and savepoints --------------------------------------------------------------------------------------------


OF_CODE: Any = {"root": "r", "code": "m:P"}


def validate(**more: Any) -> ValidateStateOperator:
    return ValidateStateOperator(task_id="v", code="m:P", root="r", checkpoint="5", docs="/docs", **more)


def savepoint(**more: Any) -> SavepointOperator:
    return SavepointOperator(task_id="s", code="m:P", root="r", checkpoint="5", folder="file:///s", **more)


def test_validation_names_its_findings(fake: Callable[[str], Path]) -> None:
    fake('ok {"success": false, "findings": ["history: flights < 0"], "docs": "/docs/index.html", "keys": 3}')
    with pytest.raises(
        AirflowFailException, match=r"(?s)validation refused checkpoint 5.*- history: flights < 0.*/docs/index.html"
    ):
        run(validate())


def request_in(folder: Path) -> Any:
    """Read the request that the fake driver got."""
    command, request, *_ = json.loads((folder / "arguments.json").read_text())
    return from_json(REQUESTS[command], request)


def test_validation_and_savepoint_arguments(fake: Callable[[str], Path]) -> None:
    folder = fake('ok {"success": true, "findings": [], "docs": "d", "keys": 3}')
    assert run(validate())["keys"] == 3
    assert request_in(folder) == Validate(**OF_CODE, checkpoint="5", docs="/docs")
    run(savepoint(cadence=None))
    assert request_in(folder) == TakeSavepoint(**OF_CODE, checkpoint="5", folder="file:///s")
    run(savepoint(cadence=None, consolidate=True))
    assert request_in(folder) == TakeSavepoint(**OF_CODE, checkpoint="5", folder="file:///s", consolidate=True)


WEEK = timedelta(days=7)


@pytest.mark.parametrize(
    ("more", "asked"),
    [
        pytest.param({"fast": True}, {"fast": True}, id="fast always"),
        pytest.param({"fast": True, "full_every": timedelta(days=5)}, {}, id="full five days after the start"),
        pytest.param({"fast": True, "full_every": WEEK}, {"fast": True}, id="fast off the cadence"),
        pytest.param({"full_every": WEEK}, {}, id="full without fast"),
        pytest.param({"expectations_every": None}, {}, id="expectations always"),
        pytest.param({"expectations_every": WEEK}, {"without_expectations": True}, id="proven off the cadence too"),
    ],
)
def test_what_is_validated_on_and_off_a_cadence(
    fake: Callable[[str], Path], more: dict[str, Any], asked: dict[str, bool]
) -> None:
    """The interval ends five days after the start."""
    folder = fake('ok {"success": true, "findings": [], "docs": null, "keys": 3}')
    run(validate(**more))
    assert request_in(folder) == Validate(**OF_CODE, checkpoint="5", docs="/docs", **asked)


@pytest.mark.long("half a second", runs_in="ci")
def test_a_refused_attempt_and_a_refused_checkpoint_say_what_to_do(fake: Callable[[str], Path]) -> None:
    folder = fake(
        'ok {"success": false, "findings": ["f"], "docs": null, "published": [{"id": 5, "interval": "[a, b)"}], "rerun": '
        '{"first": "2013-01-02T00:00:00+00:00", "last": "2013-01-04T00:00:00+00:00", "replace_overlapping": false}}'
    )
    gate = ValidateStateOperator(task_id="v", code="m:P", root="r", attempt="uuid")
    with pytest.raises(
        AirflowFailException,
        match=r"(?s)validation refused attempt uuid.*The attempt is neither committed nor published",
    ):
        run(gate)
    assert request_in(folder) == Validate(**OF_CODE, attempt="uuid")
    with pytest.raises(
        AirflowFailException, match=r"(?s)- \[a, b\) \(checkpoint 5\)\nRemove the cause.*\ncairn heal --root r "
    ):
        run(validate())
    fake('ok {"success": false, "findings": ["f"], "docs": null, "published": [], "rerun": null}')
    with pytest.raises(AirflowFailException) as nothing_published:
        run(validate())
    assert str(nothing_published.value).endswith(
        "- none\nRemove the cause. Then clear the process tasks of this run and of later runs with downstream."
    ) and "Data Docs" not in str(nothing_published.value)
    with pytest.raises(AirflowFailException, match="validation refused savepoint file:///s"):
        run(ValidateStateOperator(task_id="v", code="m:P", root="r", savepoint="file:///s"))
    with pytest.raises(ValueError, match="one of checkpoint, attempt and savepoint"):
        ValidateStateOperator(task_id="v", code="m:P", root="r", savepoint="file:///s", attempt="a")


def test_the_asset_is_told_of_what_was_validated(fake: Callable[[str], Path]) -> None:
    fake('ok {"success": true, "findings": [], "docs": null, "keys": 3, "checkpoint": 5, "mode": "full", "entries": 7}')
    operator = validate(pipeline="p")
    events = Events()
    run(operator, context(outlet_events=events))
    assert events[operator.asset].extra == {
        "checkpoint": 5,
        "mode": "full",
        "entries": 7,
        "expectations": None,
        "validated": True,
    }
    assert operator.outlets == [CommitCheckpointOperator(task_id="c", pipeline="p", root="r", attempt="a").asset]
    fake('ok {"success": false, "findings": ["f"], "docs": null}')
    events = Events()
    with pytest.raises(AirflowFailException):
        run(operator, context(outlet_events=events))
    assert not events


def test_a_savepoint_off_the_cadence_is_skipped() -> None:
    with pytest.raises(AirflowSkipException):
        run(savepoint(cadence=timedelta(days=7)))


def test_what_is_not_due_is_skipped_where_the_checkpoint_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process starts only to skip itself. What the task returns is there all the same."""
    committing, _ = checkpoint(monkeypatch, record)
    dag = pipeline_dag(
        start_date=datetime(2013, 1, 1, tzinfo=UTC),
        validate=True,
        savepoint={"folder": "memory://s"},
        sweep={"cadence": timedelta(days=1)},
    )
    task = dag.get_task("checkpoint")
    task.attempt, task.sink_of = committing.attempt, ""
    returned: dict[str, Any] = {}
    ti = SimpleNamespace(try_number=1, xcom_push=lambda key, value: returned.update({key: value}))
    where = {"dag": dag, "task": task, "ti": ti}
    with pytest.raises(DownstreamTasksSkipped) as skipped:
        run(task, context(**where))
    assert skipped.value.tasks == ["savepoint"]
    assert returned["return_value"]["checkpoint"] == returned["checkpoint"] == 7
    week = datetime(2013, 1, 8, tzinfo=UTC)
    ended = context(**where, data_interval_start=week - timedelta(days=1), data_interval_end=week)
    assert run(task, ended)["checkpoint"] == 7

    # Of a checkpoint that retention has dropped there is nothing to validate and nothing to copy.
    monkeypatch.setattr("state_backend.checkpoint.commit_attempt.commit", lambda *_: DROPPED)
    for when in (ended, context(**where)):  # The savepoint is due after the first interval, but not after the second.
        with pytest.raises(DownstreamTasksSkipped) as skipped:
            run(task, when)
        assert sorted(skipped.value.tasks) == ["savepoint", "validate"] and returned["return_value"] == {
            "checkpoint": 7
        }


DROPPED = SimpleNamespace(id=7, record=None, log=None)


# --- a range -------------------------------------------------------------------------------------------------------------------------


def backfill_task(**more: Any) -> Any:
    dag = backfill_pipeline("b", "m:P", "memory://operators", pipeline="p", **more)
    task = dag.get_task("backfill")
    task.first, task.last, task.reprocess = "2013-01-01", "2013-01-05T00:00+00:00", "none"
    task.permissions, task.only_plan = {"replace_overlapping": "False"}, "False"
    return task


def test_a_range_goes_through_one_driver_and_tells_each_checkpoint(fake: Callable[[str], Path]) -> None:
    folder = fake('ok {"intervals": [{}, {}, {}, {}, {}], "computed": 2, "kept": 3, "checkpoint": 9}')
    driver = folder / "fake_driver.py"
    told = {"checkpoint": 8, "interval": "i", "output_rows": 3, "state_bytes": 4}
    line = f"print('@cairn committed {json.dumps(told)}')\nprint('@cairn committed {json.dumps({'checkpoint': 9})}')\n"
    driver.write_text(driver.read_text().replace('print("a line"', f'{line}print("a line"'))
    task, events = backfill_task(), Events()
    assert run(task, context(outlet_events=events)) == {
        "intervals": 5,
        "computed": 2,
        "kept": 3,
        "checkpoint": 9,
        "sink": "",
    }
    assert request_in(folder) == RunRange(
        root="memory://operators",
        code="m:P",
        pipeline="p",
        first="2013-01-01",
        last="2013-01-05T00:00+00:00",
        reprocess="none",
        permissions=Permissions(),
        run=RunRef(run_id="r1", clear_number=2, try_number=3),
    )
    assert events[task.alias].told == [
        ("cairn://p/", {**told, "rows": 3, "bytes": 4, "validated": False}),
        ("cairn://p/", {"checkpoint": 9, "validated": False}),
    ]


def test_a_dry_run_of_a_range_validates_nothing(fake: Callable[[str], Path]) -> None:
    folder = fake('ok {"intervals": [], "computed": 2, "kept": 3, "checkpoint": null}')
    task = backfill_task(validate={"docs": "/docs"})
    task.only_plan = "True"
    ti = SimpleNamespace(try_number=1, xcom_push=lambda **_: None)
    with pytest.raises(DownstreamTasksSkipped) as skipped:
        run(task, context(ti=ti))
    assert skipped.value.tasks == ["validate"]
    alone = backfill_task()
    alone.only_plan = "True"
    assert run(alone)["checkpoint"] is None
    assert request_in(folder).dry_run


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"first": "yesterday"}, "first is 'yesterday'"),
        ({"reprocess": "some"}, "expected one of changed, none, all"),
        ({"only_plan": "perhaps"}, "expected true or false"),
    ],
)
def test_a_range_that_makes_no_sense_fails_for_good(change: dict[str, str], said: str) -> None:
    task = backfill_task()
    for name, value in change.items():
        setattr(task, name, value)
    with pytest.raises(AirflowFailException, match=said):
        run(task)


def test_a_gate_stands_between_process_and_checkpoint() -> None:
    dag = pipeline_dag(schedule=None, gate=True, validate={"fast": True})
    assert dag.get_task("process").downstream_task_ids == {"validate", "checkpoint"}
    assert dag.get_task("validate").downstream_task_ids == {"checkpoint"}
    assert dag.get_task("validate").attempt == dag.get_task("checkpoint").attempt
    assert dag.get_task("validate").attempt.key == "attempt"
    assert dag.get_task("validate").fast
    assert dag.get_task("checkpoint").validated


@pytest.mark.parametrize(
    ("days", "every", "due"),
    [
        (1, timedelta(days=7), False),
        (6, timedelta(days=7), False),
        (7, timedelta(days=7), True),
        (8, timedelta(days=7), False),
        (14, timedelta(days=7), True),
        (0, timedelta(days=7), False),
        (-7, timedelta(days=7), False),
        (0.5, timedelta(hours=6), True),
        (1, timedelta(days=1), True),
        (3, None, True),
    ],
)
def test_a_full_checkpoint_is_due_by_the_days_since_the_start(days: float, every: timedelta | None, due: bool) -> None:
    start = datetime(2013, 1, 1, tzinfo=UTC)
    assert is_due(start + timedelta(days=days), start, every) is due
    assert is_due(pendulum.instance(start + timedelta(days=days)), pendulum.instance(start), every) is due


# --- where Spark is -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "url"),
    [
        ("spark://host:7077", "spark://host:7077"),
        ("spark://host", "spark://host"),
        ("spark://[::1]:7077", "spark://[::1]:7077"),
        ("spark://spark%3A%2F%2Fhost:7077", "spark://host:7077"),
        ("spark://local%5B2%5D", "local[2]"),
        ("spark://yarn", "yarn"),
        ("yarn://", "yarn"),
        ("k8s://host:6443", "k8s://host:6443"),
        ("k8s://https://host:443", "k8s://https://host:443"),
        ("spark://k8s://host:443", "k8s://host:443"),
        ("spark://k8s%3A%2F%2Fhttps%3A%2F%2Fhost:443", "k8s://https://host:443"),
        ("sc://host:15002", "sc://host:15002"),
        ("sc://host", "sc://host:15002"),
        ("sc://[::1]", "sc://[::1]:15002"),
        ("sc://host:9/;use_ssl=true;user_id=me", "sc://host:9/;use_ssl=true;user_id=me"),
        ("sc://host:9/?use_ssl=true", "sc://host:9/;use_ssl=true"),
        ("spark-connect://host:9", "sc://host:9"),
    ],
)
def test_a_connection_uri_keeps_its_scheme(monkeypatch: pytest.MonkeyPatch, uri: str, url: str) -> None:
    """Airflow takes the URI apart, and stores the scheme as the type of the connection."""
    monkeypatch.setenv("AIRFLOW_CONN_CAIRN_SPARK", uri)
    assert spark_location("cairn_spark").url == url


@pytest.mark.parametrize(
    ("name", "value", "hidden"),
    [
        (AZURE, "k", True),
        ("spark.hadoop.fs.s3a.access.key", "k", True),
        ("spark.hadoop.fs.s3a.secret.key", "k", True),
        ("spark.ssl.keyStorePassword", "k", True),
        ("spark.authenticate.secret", "k", True),
        ("spark.hadoop.fs.gs.auth.access.token", "k", True),
        ("spark.driver.extraJavaOptions", "-Djdbc.password=k", True),
        ("spark.executorEnv.DATABASE", "jdbc:postgresql://h/d?user=u&password=k", True),
        ("spark.executorEnv.PIN", "1234", False),
        ("spark.sql.shuffle.partitions", "8", False),
        ("spark.executor.memory", "4g", False),
        ("spark.task.maxFailures", 4, False),
        ("spark.speculation", True, False),
    ],
)
def test_airflow_shows_no_secret_of_spark_conf(name: str, value: Any, hidden: bool) -> None:
    """As the worker sends rendered fields to the API, and as the database stores the DAG."""
    dag = pipeline_dag(spark_conf={name: value})
    task = dag.get_task("process")
    expected = {name: "***" if hidden else value}
    stored = DagSerialization.to_dict(dag)["dag"]["tasks"]
    assert [as_object(t["__var"]["spark_conf"]) for t in stored if "spark_conf" in t["__var"]] == [expected]
    for day in ("a", "b"):  # two runs of one process
        copy = task.prepare_for_execution()
        copy.render_template_fields({"day": day, "params": dict(dag.params)})
        assert as_object(_serialize_rendered_fields(copy)["spark_conf"]) == expected
        assert _texts("spark_conf", copy.spark_conf) == {name: str(value).lower() if value is True else str(value)}


def test_secrets_are_found_by_the_pattern_that_spark_would_use() -> None:
    conf = {"spark.redaction.regex": "(?i)pin", "spark.executorEnv.PIN": "1234", "spark.a.password": "p", "spark.b": ""}
    shown = {name: str(value) for name, value in hide_secrets(conf).items()}
    assert shown == {**conf, "spark.executorEnv.PIN": "***", "spark.a.password": "***"}
    assert str(hide_secrets({"spark.redaction.regex": "(", "spark.a.token": "t"})["spark.a.token"]) == "***"
    by_value = {"spark.a.url": "jdbc:postgresql://host?password=p", "spark.b.url": "jdbc:postgresql://host"}
    shown = {name: str(value) for name, value in hide_secrets(by_value).items()}
    assert shown == {**by_value, "spark.a.url": "***"}


def test_templates_of_hidden_settings_are_rendered_for_each_run() -> None:
    task = micro_batch(spark_conf={AZURE: "key-of-{{ day }}"})
    for day in ("a", "b"):
        copy = task.prepare_for_execution()
        copy.render_template_fields({"day": day})
        assert _texts("spark_conf", copy.spark_conf) == {AZURE: f"key-of-{day}"}


def test_a_secret_that_another_task_returned_is_hidden() -> None:
    result = SimpleNamespace(resolve=lambda context: context["key"])  # what Airflow asks of an XComArg
    copy = micro_batch(spark_conf={AZURE: result, "spark.task.cpus": result}).prepare_for_execution()
    copy.render_template_fields({"key": "k"})
    assert as_object(_serialize_rendered_fields(copy)["spark_conf"]) == {AZURE: "***", "spark.task.cpus": "k"}
    assert _texts("spark_conf", copy.spark_conf) == {AZURE: "k", "spark.task.cpus": "k"}


def connection(monkeypatch: pytest.MonkeyPatch, **parts: Any) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_CAIRN_SPARK", json.dumps(parts))


def test_a_token_and_configuration_reach_the_driver_by_its_stdin_only(
    fake: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = fake('ok {"attempt": "a"}')
    driver = folder / "fake_driver.py"
    driver.write_text(
        driver.read_text().replace('print("a line"', '(folder / "stdin").write_text(sys.stdin.read())\nprint("a line"')
    )
    extra = {"use_ssl": True, "conf": '{"spark.hadoop.fs.secret": "s3cret", "spark.sql.shuffle.partitions": 4}'}
    connection(monkeypatch, conn_type="spark_connect", host="sc://h", port=7, login="me", password="t0ken", extra=extra)
    with caplog.at_level("DEBUG"):
        given = {"spark.sql.shuffle.partitions": 8, "spark.speculation": True, AZURE: "{{ p }}"}
        task = micro_batch(spark_conf=given)
        task.render_template_fields({"p": "azure=key"})
        result = run(task)
    asked = json.loads((folder / "arguments.json").read_text())
    assert from_json(Call, asked[asked.index("--call") + 1]).spark == "sc://h:7/;use_ssl=true;user_id=me"
    assert json.loads((folder / "stdin").read_text()) == {
        "token": "t0ken",
        "conf": {
            "spark.hadoop.fs.secret": "s3cret",
            "spark.sql.shuffle.partitions": "8",
            "spark.speculation": "true",
            AZURE: "azure=key",
        },
    }
    for secret in ("t0ken", "s3cret", "azure=key"):
        assert all(secret not in told for told in (*asked, caplog.text, json.dumps(result)))


@pytest.mark.parametrize(
    ("parts", "url", "token"),
    [
        (
            {"conn_type": "spark_connect", "host": "sc://h:9/;token=t0ken;use_ssl=true"},
            "sc://h:9/;use_ssl=true",
            "t0ken",
        ),
        ({"conn_type": "spark_connect", "host": "h", "extra": {"token": "t0ken"}}, "sc://h:15002", "t0ken"),
        ({"conn_type": "generic", "host": "sc://h", "port": 9}, "sc://h:9", None),
        ({"conn_type": "generic", "host": "spark://h", "port": 7077}, "spark://h:7077", None),
        ({"conn_type": "spark", "host": "h1:7077,h2:7077"}, "spark://h1:7077,h2:7077", None),
        ({"conn_type": "spark", "host": "mesos://zk://host", "port": 2181}, "mesos://zk://host:2181", None),
        ({"conn_type": "spark", "host": "local-cluster[2,1,1024]"}, "local-cluster[2,1,1024]", None),
        ({"conn_type": "spark"}, "local[*]", None),
    ],
)
def test_connections_as_people_have_them(
    monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any], url: str, token: str | None
) -> None:
    connection(monkeypatch, **parts)
    found = spark_location("cairn_spark")
    assert (found.url, found.token) == (url, token)
    assert "t0ken" not in repr(found)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"conn_type": "spark", "host": "local[2]", "password": "t"}, "a Spark master such as .* takes none"),
        ({"conn_type": "spark", "host": "local[2]", "extra": {"conf": "spark.a=b"}}, "conf is not a JSON object like"),
        ({"conn_type": "spark", "host": "local[2]", "extra": {"conf": {"spark.a": None}}}, "spark.a is a NoneType"),
    ],
)
def test_a_spark_connection_that_cannot_be_meant_is_refused(
    monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any], says: str
) -> None:
    connection(monkeypatch, **parts)
    with pytest.raises(AirflowFailException, match=says):
        spark_location("cairn_spark")


@needs("form of a connection")
@pytest.mark.long("seconds", runs_in="ci")
def test_airflow_knows_the_connection_types_and_all_else_that_the_provider_brings() -> None:
    """What `airflow providers list`, `airflow connections add` and the form in the UI ask. A type that nobody declares is stored as
    generic."""
    script = """
import json, warnings
warnings.simplefilter("ignore")
from airflow.plugins_manager import get_plugin_info
from airflow.providers_manager import ProvidersManager
found = ProvidersManager()
print(json.dumps([
    found.providers["cairn-state"].version, sorted({"spark", "spark_connect"} & {*found.hooks}),
    sorted(name for name in found.connection_form_widgets if "spark" in name), found.field_behaviours["spark_connect"]["relabeling"],
    [link for link in found.extra_links_class_names if "cairn" in link], sorted(p["name"] for p in get_plugin_info(["name"]) if p["name"].startswith("cairn")),
]))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    version, types, fields, labels, links, plugins = json.loads(ran.stdout.splitlines()[-1])
    assert version == importlib.metadata.version("cairn-state")
    assert types == ["spark", "spark_connect"]
    assert fields == ["extra__spark__conf", "extra__spark_connect__conf", "extra__spark_connect__use_ssl"]
    assert labels == {"password": "Token", "login": "User id"}
    assert links == ["cairn_operators.data_docs_link.DataDocsLink"]
    assert plugins == ["cairn_checkpoints", "cairn_data_docs"]


def test_the_provider_lists_the_modules_of_all_operators() -> None:
    (operators,) = get_provider_info()["operators"]
    listed = operators["python-modules"]
    for module in listed:
        importlib.import_module(module)
    public = [getattr(cairn_operators, name) for name in cairn_operators.__all__]
    made = {thing.__module__ for thing in public if isinstance(thing, type) and issubclass(thing, BaseOperator)}
    assert listed == sorted(made)


def test_spark_without_connection_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(conn_id: str) -> None:
        raise AirflowNotFoundException(conn_id)

    monkeypatch.setattr(BaseHook, "get_connection", missing)
    assert spark_location("cairn_spark").url == "local[*]"
    with pytest.raises(AirflowFailException) as raised:
        spark_location("big spark")
    (command,) = (line for line in str(raised.value).splitlines() if line.startswith("airflow connections add"))
    assert "no connection 'big spark'" in str(raised.value) and shlex.split(command)[3] == "big spark"
    with pytest.raises(AirflowFailException, match="has type 'http'; expected spark_connect or spark"):
        spark_url("http", "h", 1)


# --- who it is on Google Cloud Storage -------------------------------------------------------------------------------------

SECRET = "s3cret-of-the-key"
KEY = {"type": "service_account", "client_email": "me@project", "private_key": SECRET}


@pytest.mark.parametrize(
    "extra",
    [
        {"keyfile_dict": KEY, "project": "mine"},
        {"keyfile_dict": json.dumps(KEY), "project": "mine"},
        {
            "extra__google_cloud_platform__keyfile_dict": json.dumps(KEY),
            "extra__google_cloud_platform__project": "mine",
        },
    ],
)
def test_a_key_reaches_the_driver_by_a_file_of_its_own_and_nothing_else(
    fake: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, extra: dict[str, Any]
) -> None:
    """Not the log, the command line, the result, the templated fields; and nothing is left of it."""
    (tmp_path / "fake_driver.py").write_text(
        "import json, os, stat, sys\nfrom pathlib import Path\n"
        "key = Path(os.environ['GOOGLE_APPLICATION_CREDENTIALS'])\n"
        "seen = {'path': str(key), 'mode': stat.S_IMODE(key.stat().st_mode), 'folder': stat.S_IMODE(key.parent.stat().st_mode),"
        " 'key': json.loads(key.read_text()), 'project': os.environ['GOOGLE_CLOUD_PROJECT'],"
        " 'cmdline': Path('/proc/self/cmdline').read_text(), 'environ': Path('/proc/self/environ').read_text()}\n"
        "Path(os.environ['FAKE_DRIVER_DIR'], 'seen.json').write_text(json.dumps(seen))\n"
        "print('a line', flush=True)\n"
        "Path(sys.argv[sys.argv.index('--result') + 1]).write_text(json.dumps({'ok': {'input_rows': 1, 'sink': ''}}))\n"
    )
    fake("")
    monkeypatch.setenv("AIRFLOW_CONN_MY_GOOGLE", json.dumps({"conn_type": "google_cloud_platform", "extra": extra}))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    lines: list[str] = []
    operator = micro_batch(storage_conn_id="my_google")
    monkeypatch.setattr(type(operator), "log", SimpleNamespace(info=lambda text, *more: lines.append(text % more)))
    result = run(operator)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert (seen["key"], seen["project"], seen["mode"], seen["folder"]) == (KEY, "mine", 0o600, 0o700)
    templated = [str(getattr(operator, name)) for name in type(operator).template_fields]
    for told in (
        *lines,
        seen["cmdline"],
        seen["environ"].replace(os.environ["AIRFLOW_CONN_MY_GOOGLE"], ""),
        json.dumps(result),
        *templated,
    ):
        assert SECRET not in told
    assert not Path(seen["path"]).parent.exists()
    assert "GOOGLE_APPLICATION_CREDENTIALS" not in os.environ


def test_the_checkpoint_task_is_the_connection_while_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = str(tmp_path / "key.json")
    extra = {"key_path": key}
    monkeypatch.setenv("AIRFLOW_CONN_MY_GOOGLE", json.dumps({"conn_type": "google_cloud_platform", "extra": extra}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "another")
    operator, asked = checkpoint(
        monkeypatch,
        lambda: asked.append(os.environ["GOOGLE_APPLICATION_CREDENTIALS"]) or record(),
        storage_conn_id="my_google",
    )
    run(operator, context(outlet_events=Events()))
    assert key in asked
    assert os.environ["GOOGLE_APPLICATION_CREDENTIALS"] == "another"


def test_a_misspelt_parameter_of_a_run_is_refused_before_a_driver_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Airflow would take `{"dryrun": true}` for a configuration of something else, and run for real."""
    params = ["from", "to", "reprocess", "replace_overlapping", "dry_run"]
    for conf, meant in (
        ({"dryrun": True}, "dry_run"),
        ({"Dry-Run": True}, "dry_run"),
        ({"form": "2024-01-01"}, "from"),
    ):
        asked = context(dag_run=SimpleNamespace(conf=conf), dag=SimpleNamespace(params=params))
        monkeypatch.setattr(driver_operator, "get_current_context", lambda asked=asked: asked)
        with pytest.raises(AirflowFailException, match=f"no parameter of this DAG\nDid you mean '{meant}'"):
            micro_batch().run_driver(Validate(**OF_CODE))
    for fine in ({}, {"from": "2024-01-01", "ticket": "OPS-1"}):
        driver_operator.check_conf(fine, params)


def test_a_connection_without_a_key_leaves_the_default_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_MY_GOOGLE", json.dumps({"conn_type": "google_cloud_platform"}))
    for conn_id in (None, "my_google"):
        with storage_credentials(conn_id) as environment:
            assert environment == {}


def amazon(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Declare the connection `my_amazon`."""
    monkeypatch.setenv("AIRFLOW_CONN_MY_AMAZON", json.dumps({"conn_type": "aws", **fields}))
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)


def test_the_keys_of_an_amazon_connection_are_in_a_private_file(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {"region_name": "eu-west-1", "endpoint_url": "http://store", "aws_session_token": "a-token"}
    amazon(monkeypatch, login="AKIA", password=SECRET, extra=extra)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of the worker")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the worker")
    with storage_credentials("my_amazon") as environment:
        assert SECRET not in str(environment) and "a-token" not in str(environment)
        file = Path(environment["AWS_CONFIG_FILE"])
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert (
            file.parent.parent.name == f"cairn-work-{os.geteuid()}"
        )  # The next task deletes it if this one is killed.
    assert not file.exists()
    with as_storage_identity("my_amazon"):
        session = boto3.session.Session()
        found = session.get_credentials().get_frozen_credentials()
        assert (found.access_key, found.secret_key, found.token) == ("AKIA", SECRET, "a-token")
        assert (session.region_name, session.client("s3").meta.endpoint_url) == ("eu-west-1", "http://store")
    assert os.environ["AWS_ACCESS_KEY_ID"] == "of the worker" and "AWS_CONFIG_FILE" not in os.environ


@pytest.mark.long("half a second", runs_in="ci")
def test_the_role_of_an_amazon_connection_is_taken_with_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    role = "arn:aws:iam::123456789012:role/state"
    amazon(monkeypatch, extra={"aws_access_key_id": "AKIA", "aws_secret_access_key": SECRET, "role_arn": role})
    with mock_aws(), as_storage_identity("my_amazon"):
        session = boto3.session.Session(region_name="us-east-1")
        assert (
            session.client("sts")
            .get_caller_identity()["Arn"]
            .startswith(role.replace(":iam:", ":sts:").replace(":role/", ":assumed-role/"))
        )
        assert session.get_credentials().method == "assume-role"


def test_a_profile_of_the_worker_and_a_connection_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = {"verify": None, "use_ssl": True}
    amazon(monkeypatch, extra={"profile_name": "state", "region_name": "eu-west-1", **defaults})
    wanted = {"AWS_PROFILE": "state", "AWS_DEFAULT_REGION": "eu-west-1", "AWS_REGION": "eu-west-1"}
    with storage_credentials("my_amazon") as environment:
        assert environment == wanted
    amazon(monkeypatch)
    with storage_credentials("my_amazon") as environment:
        assert environment == {}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"login": "acc", "password": SECRET}, {"AZURE_STORAGE_ACCOUNT": "acc", "AZURE_STORAGE_KEY": SECRET}),
        ({"login": "acc", "extra": {"sas_token": SECRET}}, {"AZURE_STORAGE_ACCOUNT": "acc", "AZURE_STORAGE_SAS_TOKEN": SECRET}),
        ({"extra": {"connection_string": SECRET}}, {"AZURE_STORAGE_CONNECTION_STRING": SECRET}),
        (
            {"host": "https://acc.blob.core.windows.net", "login": "app", "password": SECRET, "extra": {"tenant_id": "t"}},
            {
                "AZURE_STORAGE_ACCOUNT": "acc", "AZURE_TENANT_ID": "t", "AZURE_CLIENT_ID": "app",
                "AZURE_CLIENT_SECRET": SECRET,
            },
        ),
        (
            {"host": "acc.blob.core.windows.net", "extra": {"managed_identity_client_id": "m"}},
            {"AZURE_STORAGE_ACCOUNT": "acc", "AZURE_CLIENT_ID": "m"},
        ),
    ],
)  # fmt: skip
def test_the_login_of_a_microsoft_connection_is_in_a_private_file(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], wanted: dict[str, str]
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_MY_MICROSOFT", json.dumps({"conn_type": "wasb", **fields}))
    with storage_credentials("my_microsoft") as environment:
        file = Path(environment.pop("CAIRN_AZURE_LOGIN"))
        assert json.loads(file.read_text()) == wanted and environment == {}
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert not file.exists()


GOOGLE_IS_UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"keyfile_dict": "no json"}, "keyfile_dict is not the JSON of a key file"),
    ({"keyfile_dict": "[1]"}, "keyfile_dict is not the JSON of a key file"),
    ({"key_secret_name": "x"}, "key_secret_name, which Cairn does not support. Give key_path or keyfile_dict"),
    ({"impersonation_chain": "x"}, "impersonation_chain"),
]
NOT_OURS = {"verify": False, "use_ssl": True, "config_kwargs": {"a": 1}}


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        *(("google_cloud_platform", {"extra": extra}, says) for extra, says in GOOGLE_IS_UNUSABLE),
        ("aws", {"login": "AKIA"}, "has one key of two: give an access key"),
        ("aws", {"extra": {"role_arn": "arn"}}, "role_arn but no keys"),
        ("aws", {"extra": NOT_OURS}, "has config_kwargs, verify, which Cairn does not support. Give login"),
        ("aws", {"login": "A", "password": f"{SECRET}\nrole_arn = x"}, "a line break in a key or in role_arn"),
        ("wasb", {}, "names no account: give its name as login"),
        ("wasb", {"host": "acc.blob.core.usgovcloudapi.net"}, "Leave the host out, and give a root that names it"),
        ("wasb", {"login": "acc", "extra": {"proxies": "x"}}, "proxies, which Cairn does not support. Give login and"),
        ("ftp", {}, "has the type 'ftp'; storage_conn_id takes a connection of type google_cloud_platform or aws or"),
    ],
)
def test_a_connection_that_cannot_be_used_is_told_without_its_keys(
    monkeypatch: pytest.MonkeyPatch, kind: str, fields: dict[str, Any], says: str
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_MINE", json.dumps({"conn_type": kind, **fields}))
    with pytest.raises(AirflowFailException, match=says) as raised, storage_credentials("mine"):
        pass
    assert SECRET not in str(raised.value)


# --- the wiring -----------------------------------------------------------------------------------------------------------


def test_pipeline_wires_everything() -> None:
    dag = pipeline_dag(
        validate={"docs": "/d"},
        savepoint={"folder": "file:///s/", "format": "canonical"},
        sweep={"cadence": timedelta(days=7), "min_age": timedelta(days=1)},
        pipeline="aircraft",
    )
    assert [task.task_id for task in dag.tasks if not task.doc_md] == []
    process = dag.get_task("process")
    # The order of intervals is kept by the task itself.
    assert not process.depends_on_past and process.pipeline == "aircraft"
    assert process.downstream_task_ids == {"checkpoint"}
    assert dag.get_task("checkpoint").downstream_task_ids == {"validate", "savepoint", "sweep"}
    assert dag.get_task("savepoint").format == "canonical"
    checkpoint_task = dag.get_task("checkpoint")
    assert (checkpoint_task.pipeline, checkpoint_task.root) == ("aircraft", "file:///r")
    assert (checkpoint_task.attempt.key, checkpoint_task.sink_of.key) == ("attempt", "sink")
    sweep = dag.get_task("sweep")
    assert (sweep.pipeline, sweep.cadence, sweep.min_age) == ("aircraft", timedelta(days=7), timedelta(days=1))


@pytest.mark.parametrize("savepoint", [{}, {"format": "canonical"}])
def test_a_savepoint_without_a_folder_is_refused_at_parse_time(savepoint: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="DAG p: savepoint has no 'folder', the URL of the folder for all savepoints"):
        pipeline_dag(savepoint=savepoint)


def test_a_checkpoint_task_without_a_process_task_is_told_the_pipeline() -> None:
    with pytest.raises(ValueError, match=r'pass attempt=process.output\["attempt"\]'):
        CommitCheckpointOperator(task_id="checkpoint", attempt="a1")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("P = Pipeline(name='clicks', parallelism=2)", "clicks"),
        ("P: Pipeline = cairn.Pipeline(name='clicks')\nraise ImportError", "clicks"),
        ("P = Pipeline(name='old')\nQ = Pipeline(name='other')\nP = Pipeline(name='clicks')", "clicks"),
        ("P = Pipeline(name=NAME)", None),
        ("P = make()", None),
        ("Q = Pipeline(name='clicks')", None),
        ("P = Pipeline(name=", None),
        (None, None),
    ],
)
def test_the_name_of_a_pipeline_is_read_without_an_import(
    source: str | None, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lonely.py").write_text(source) if source is not None else None
    assert pipeline_name_of("lonely:P", otherwise="the_dag") == (name or "the_dag")
    made = dict(root="file:///r", schedule="@daily", start_date=START)
    assert stateful_pipeline("d", "lonely:P", **made).get_task("process").pipeline == (name or "d")
    if name is None:
        with pytest.raises(ValueError, match=r"can't read the name .* Give the name to the operator: pipeline="):
            restore_pipeline("r", "lonely:P", "file:///r")
    else:
        assert restore_pipeline("r", "lonely:P", "file:///r").get_task("restore").pipeline == name
    assert "lonely" not in sys.modules


BERLIN = CronDataIntervalTimetable("0 6 * * 1-5", timezone="Europe/Berlin")
HOURS = DeltaDataIntervalTimetable(timedelta(hours=1))


@pytest.mark.parametrize(
    ("source", "intervals"),
    [
        ("P = Pipeline(name='p', schedule=Cron('0 6 * * 1-5', 'Europe/Berlin'))", BERLIN),
        ("P = cairn.Pipeline(schedule=cairn.Cron('0 6 * * 1-5', zone='Europe/Berlin'))", BERLIN),
        ("P = Pipeline(schedule=datetime.timedelta(hours=1))", HOURS),
        ("HOUR = timedelta(minutes=60)\nP = Pipeline(schedule=HOUR)", HOURS),
        ("P = Pipeline(schedule='0 6 * * 1-5', start=datetime(2024, 1, 1, tzinfo=ZoneInfo('Europe/Berlin')))", BERLIN),
        (
            "S = datetime(2024, 1, 1, tzinfo=timezone.utc)\nP = Pipeline(schedule='@daily', start=S)",
            CronDataIntervalTimetable("0 0 * * *", timezone="UTC"),
        ),
    ],
)
def test_a_dag_takes_the_schedule_of_its_pipeline(
    source: str, intervals: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "scheduled.py").write_text(source)
    made = stateful_pipeline("d", "scheduled:P", "file:///r", start_date=START)
    assert same(made.timetable) == same(intervals)
    assert made.start_date == START and "scheduled" not in sys.modules
    # The same schedule in the DAG file is fine, another schedule is a mistake, and an asset has no intervals to compare.
    stateful_pipeline("d", "scheduled:P", "file:///r", schedule=intervals, start_date=START)
    stateful_pipeline("d", "scheduled:P", "file:///r", schedule=None, start_date=START)
    with pytest.raises(
        ValueError, match=r"DAG d has the schedule cron '5 4 \* .* Leave out schedule= in stateful_pipeline"
    ):
        stateful_pipeline("d", "scheduled:P", "file:///r", schedule="5 4 * * *", start_date=START)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("P = Pipeline(name='p')", "scheduled:P declares none"),
        ("P = Pipeline(name='p', schedule=None)", "scheduled:P declares none"),
        ("P = make(name='p')", "the source of 'scheduled' has no P = Pipeline"),
        ("P = Pipeline(**MORE)", "the source of 'scheduled' has no P = Pipeline"),
        ("Q = Pipeline()", "the source of 'scheduled' has no P = Pipeline"),
        ("P = Pipeline(schedule=daily())", r"schedule=daily\(\) can't be read without an import"),
        ("P = Pipeline(schedule='@daily', start=START)", "start=START can't be read without an import"),
        ("P = Pipeline(schedule=P)\n", "schedule=P can't be read"),
        ("P = Pipeline(schedule='six o clock', start=datetime(2024, 1, 1, tzinfo=UTC))", "no cron expression"),
        ("P = Pipeline(", "the source of 'scheduled' can't be read"),
        (None, "there is no source of a module 'scheduled'"),
    ],
)
def test_a_dag_without_a_schedule_is_refused(
    source: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "scheduled.py").write_text(source) if source is not None else None
    with pytest.raises(
        ValueError, match=rf"(?s)DAG d has no schedule: .*{said}.* Give stateful_pipeline\(…, schedule="
    ):
        stateful_pipeline("d", "scheduled:P", "file:///r", start_date=START)
    # What can't be read is no reason to refuse a schedule that the DAG has.
    stateful_pipeline("d", "scheduled:P", "file:///r", schedule="@daily", start_date=START)


@pytest.mark.parametrize(
    "more", [{"max_active_tis_per_dag": 1}, {"depends_on_past": True}, {"wait_for_downstream": True}]
)
def test_what_would_keep_the_run_before_from_starting_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="depends_on_past and max_active_tis_per_dag"):
        micro_batch(**more)


def run_intervals_task(mode: str) -> RunIntervalsOperator:
    return RunIntervalsOperator(
        task_id="process",
        code="m:P",
        pipeline="p",
        root="/r",
        first="2013-01-01",
        last="2013-01-05",
        every=timedelta(days=1),
        mode=mode,
    )


@pytest.mark.parametrize("make", [lambda mode: micro_batch(mode=mode), run_intervals_task])
def test_an_unknown_mode_is_refused_at_parse_time_and_a_template_is_rendered(make: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match="process: mode 'fast' is not one of incremental, full, changelog"):
        make("fast")
    task = make("{{ params.mode }}")
    task.render_template_fields({"params": {"mode": "full"}})
    assert task.mode == "full"


def test_pipeline_without_validation_and_savepoints() -> None:
    dag = pipeline_dag(storage_conn_id="g", process={"retries": 9})
    assert {task.storage_conn_id for task in dag.tasks} == {"g"}
    assert {task.task_id for task in dag.tasks} == {"process", "checkpoint"}
    assert dag.get_task("process").retries == 9


def test_a_retry_ends_the_session_of_the_try_before(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, str] = {}
    store = SimpleNamespace(get=kept.get, set=kept.__setitem__)
    for number in (1, 2, 3):
        before = kept.get("cairn_spark_session")
        running = {"ti": SimpleNamespace(try_number=number), "task_state_store": store}
        monkeypatch.setattr("cairn_operators.driver_operator.get_current_context", lambda running=running: running)
        session, former = _sessions()
        assert (former, kept["cairn_spark_session"]) == (before, session)
        assert session != before
