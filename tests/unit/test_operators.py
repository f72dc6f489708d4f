"""The operators against a fake driver: what they ask of it, what they make of its end, that it never outlives them."""

from __future__ import annotations

import datetime as datetime_module
import json
import os
import re
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

import pendulum
import pytest
from airflow.sdk import DAG

from cairn_operators import CommitCheckpointOperator, RunIntervalsOperator, restore_pipeline, stateful_pipeline
from cairn_operators.airflow_versions import (
    TIMETABLES,
    AirflowException,
    AirflowFailException,
    CronDataIntervalTimetable,
    DeltaDataIntervalTimetable,
    setting_of,
)
from cairn_operators.data_interval import check_ended, data_interval
from cairn_operators.driver_operator import _sessions
from cairn_operators.driver_process import DriverProcess, _in_groups
from cairn_operators.failures import exit_failure, failure
from cairn_operators.pipeline_source import pipeline_name_of
from dags.weather import weather
from state_backend.values.intervals import format_instant
from state_backend.values.operation_parameters import Call, ProcessInterval, Validate, from_json
from state_backend.values.records import Permissions, RunRef
from state_backend.values.schedule import Cron
from tests.support.airflow_schedule import timetable
from tests.support.drivers import words_of
from tests.support.operator_calls import START, Store, context, gone, micro_batch, pids, pipeline_dag, request_in, run


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
def test_a_retry_passes_the_attempt_of_the_earlier_try_to_the_driver(fake: Callable[[str], Path]) -> None:
    """What the driver said when it began is kept for the next try, also if this one fails; it is no line of the log."""

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


@pytest.mark.parametrize("why", [None, "replace_overlapping", "though_valid"])
def test_an_error_ends_with_the_repair_command_for_its_dag(fake: Callable[[str], Path], why: str | None) -> None:
    """The state backend knows the pipeline's name only; a person needs the DAG's. `cairn heal` can't repair all."""
    fake("error StaleStateError")
    operator = micro_batch(dag=DAG("daily", schedule=None))
    driver = Path(os.environ["FAKE_DRIVER_DIR"], "fake_driver.py")
    first, last = "2013-01-02T00:00:00", "2013-01-04T00:00:00"
    again = {"first": f"{first}+00:00", "last": f"{last}+00:00", **({why: True} if why else {})}
    driver.write_text(driver.read_text().replace('"what went wrong"', f'"what went wrong", "rerun": {again}'))
    with pytest.raises(AirflowFailException) as caught:
        run(operator)
    heal = f"cairn heal --root memory://operators --pipeline p --to {last}Z --dag daily"
    overlaps = " --replace-overlapping" if why == "replace_overlapping" else ""
    fill = f"cairn backfill --dag daily --from {first}Z --to {last}Z{overlaps}"
    assert str(caught.value) == f"StaleStateError: what went wrong\n{fill if why else heal}"


def test_driver_lines_reach_the_log_whole(fake: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_error_of_an_unknown_class_is_retried() -> None:
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
    for kind in ("scheduled", "backfill"):
        start_of(kind, datetime.now(tz=UTC) + timedelta(seconds=30))
        with pytest.raises(AirflowException, match="this host's clock says"):
            start_of(kind, end)


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
def test_a_schedule_without_data_intervals_is_passed_on_unchanged(schedule: str | None) -> None:
    assert pipeline_dag(schedule=schedule).schedule == schedule


def test_every_shipped_or_documented_dag_is_found_in_airflows_safe_mode() -> None:
    """Its safe mode skips a file that does not say both "dag" and "airflow", without a word."""
    root = Path(__file__).resolve().parents[2]
    shown = [file.read_text() for file in (root / "dags").glob("*.py")]
    for page in (root / "README.md", *(root / "docs").glob("*.md")):
        blocks = page.read_text().split("```python\n")[1:]
        shown += [code for code, *_ in (block.split("```") for block in blocks) if "cairn_operators" in code]
    assert len(shown) > 2
    for code in shown:
        assert {"dag", "airflow"} <= set(re.findall("dag|airflow", code.lower())), code


def test_a_permission_that_is_not_a_clear_boolean_is_refused() -> None:
    with pytest.raises(AirflowFailException, match="allow_gap is 'maybe'"):
        run(micro_batch(permissions={"allow_gap": "maybe"}))


@pytest.fixture
def sigterm_as_airflow_does() -> Iterator[Callable[[Any], None]]:
    before = signal.getsignal(signal.SIGTERM)
    yield lambda operator: signal.signal(signal.SIGTERM, lambda *_: operator.on_kill()) and None
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("manner", ["obedient", "stubborn"])
@pytest.mark.long("seconds", runs_in="ci")
def test_sigterm_stops_the_whole_process_group_of_the_driver(
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


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's PR_SET_PDEATHSIG, and looks at /proc")
@pytest.mark.parametrize("supervised", [False, True], ids=["task", "supervisor"])
@pytest.mark.long("seconds", runs_in="ci")
def test_the_driver_dies_with_a_killed_task_or_supervisor(fake: Callable[[str], Path], supervised: bool) -> None:
    """kill -9 of the supervisor: the kernel does not kill the task, which stops its driver, and another try will be started."""
    folder = fake("hang")
    code = "from cairn_operators.driver_process import DriverProcess; DriverProcess('fake_driver').run([], print)"
    if supervised:
        code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    driver, child = pids(folder)
    process.kill()
    process.wait()
    assert gone([driver, child], timeout_s=10) if supervised else gone([driver])


@pytest.mark.long("seconds", runs_in="ci")
def test_a_task_ends_with_its_driver_though_a_child_holds_the_pipe(fake: Callable[[str], Path], tmp_path: Path) -> None:
    fake("ok {}")
    driver = tmp_path / "fake_driver.py"
    driver.write_text("import subprocess; child = subprocess.Popen(['sleep', '100'])\n" + driver.read_text())
    start_s = time.monotonic()
    assert run(micro_batch())["attempt"]
    assert time.monotonic() - start_s < 10


def test_stateful_pipeline_wires_process_checkpoint_validate_savepoint_and_sweep() -> None:
    dag = pipeline_dag(
        validate={"docs": "/d"},
        savepoint={"folder": "file:///s/", "format": "canonical"},
        sweep={"cadence": timedelta(days=7), "min_age": timedelta(days=1)},
        pipeline="aircraft",
    )
    assert [task.task_id for task in dag.tasks if not task.doc_md] == []
    process, checkpoint, sweep = (dag.get_task(name) for name in ("process", "checkpoint", "sweep"))
    # The order of intervals is kept by the task itself.
    assert not process.depends_on_past and process.pipeline == "aircraft"
    assert process.downstream_task_ids == {"checkpoint"}
    assert checkpoint.downstream_task_ids == {"validate", "savepoint", "sweep"}
    savepoint = dag.get_task("savepoint")
    assert savepoint.format == "canonical" and savepoint.folder.startswith(
        "file:///s/aircraft/{{ data_interval_end | ds }}-"
    )
    assert (checkpoint.pipeline, checkpoint.root) == ("aircraft", "file:///r")
    for commit in (checkpoint, *(weather.get_task(f"{name}_checkpoint") for name in ("windows", "records"))):
        assert (commit.attempt.key, commit.sink_of.key) == ("attempt", "sink")
    assert (sweep.pipeline, sweep.cadence, sweep.min_age) == ("aircraft", timedelta(days=7), timedelta(days=1))


@pytest.mark.parametrize("savepoint", [{}, {"format": "canonical"}])
def test_a_savepoint_without_a_folder_is_refused_at_parse_time(savepoint: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="DAG p: savepoint has no 'folder', the URL of the folder for all savepoints"):
        pipeline_dag(savepoint=savepoint)


def test_a_checkpoint_task_without_a_process_task_needs_pipeline_and_root() -> None:
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
def test_task_settings_that_block_the_previous_run_are_refused(more: dict[str, Any]) -> None:
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


def test_a_dag_without_validation_and_savepoints_has_only_process_and_checkpoint() -> None:
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
