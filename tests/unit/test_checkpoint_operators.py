"""The operators that commit, validate, save and run ranges: what they ask, what they tell assets, and when they are due."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pendulum
import pytest
from airflow.sdk import Asset, AssetAlias, BaseOperator

from cairn_operators import (
    CommitCheckpointOperator,
    ValidateStateOperator,
    airflow_versions,
    backfill_pipeline,
    stateful_pipeline,
)
from cairn_operators.airflow_versions import (
    AirflowException,
    AirflowFailException,
    AirflowSkipException,
    DownstreamTasksSkipped,
)
from cairn_operators.data_interval import is_due, is_due_in
from cairn_operators.failures import StaleBase
from state_backend.checkpoint import publish_output
from state_backend.values import errors
from state_backend.values.operation_parameters import RunRange, TakeSavepoint, Validate
from state_backend.values.records import Permissions, RunRef
from tests.support.operator_calls import (
    OF_CODE,
    START,
    Events,
    checkpoint,
    context,
    micro_batch,
    pipeline_dag,
    record,
    request_in,
    run,
    savepoint,
    validate,
)


def test_a_sink_fails_the_task_of_its_own_interval_alone(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Retried, and cleaned up either way. Of an older interval the log says so."""
    own, asked = checkpoint(monkeypatch, record, sink_fails_for=7)
    with pytest.raises(AirflowException, match="SinkFailed: the sink of 'p' failed") as raised:
        run(own)
    assert not isinstance(raised.value, AirflowFailException) and asked[-1] == "clean up"
    older, asked = checkpoint(monkeypatch, record, sink_fails_for=3)
    assert run(older)["checkpoint"] == 7 and asked[-1] == "clean up" and "sink of 'p' failed" in capsys.readouterr().out


def refuse(error: Exception) -> Callable[[], Any]:
    def commit() -> Any:
        raise error

    return commit


@pytest.mark.parametrize(
    ("validated", "passed"),
    [
        (False, False),
        (True, False),
        ("full", True),
        ({"attempt": "a1", "mode": "full"}, True),
        # A person marked `validate` as success: it has the result of an earlier attempt or release, or none.
        ({"attempt": "a0", "mode": "full"}, False),
        ({"mode": "full"}, False),
        (None, False),
    ],
)
def test_the_checkpoint_task_commits_publishes_cleans_up_and_emits_asset_events(
    monkeypatch: pytest.MonkeyPatch, validated: Any, passed: bool
) -> None:
    """The sink's table may be an asset, for DAGs that read the table."""
    table, alias = Asset("s3://warehouse/clicks"), AssetAlias("clicks")
    operator, asked = checkpoint(monkeypatch, record, outlets=[table, alias], validated=validated)
    assert operator.outlets == [operator.asset, table, alias]
    events = Events()
    result = run(operator, context(outlet_events=events))
    assert asked == ["p", "commit a1", *["7 passed full"] * passed, "publish None of 7", "clean up"]
    assert (result["checkpoint"], result["base"], result["input_rows"]) == (7, 6, 6) and json.dumps(result)
    told = {**result, "rows": 7, "bytes": 2, "validated": passed or validated is True}
    assert [events[asset].extra for asset in operator.outlets] == [told, told, None]


@pytest.mark.parametrize("gate", [False, True])
def test_tasks_that_the_next_interval_waits_for_get_a_higher_priority_weight(gate: bool) -> None:
    dag = pipeline_dag(gate=gate, validate=True, savepoint={"folder": "/s"})
    weights = {task.task_id: task.priority_weight for task in dag.tasks}
    assert weights == {"checkpoint": 5, "validate": 4, "process": 3, "savepoint": 1}
    rules = [dag.get_task(name).weight_rule for name in ("checkpoint", "validate", "process")]
    assert rules == [micro_batch().weight_rule] * 3
    assert micro_batch(priority_weight=9).priority_weight == 9  # the user's own counts


@pytest.mark.parametrize("gate", [False, True])
def test_a_lost_attempt_is_not_retried_and_prints_a_clear_command(monkeypatch: pytest.MonkeyPatch, gate: bool) -> None:
    """Behind a gate the task before is the validation, which makes no attempt."""
    operator, asked = checkpoint(monkeypatch, refuse(errors.BaseMoved("the base is gone")))
    dag = stateful_pipeline("aircraft", "m:P", "file:///r", schedule="@daily", start_date=START, gate=gate)
    with pytest.raises(AirflowFailException) as caught:
        run(operator, context(task=dag.get_task("checkpoint")))
    assert str(caught.value).startswith("BaseMoved: the base is gone\n")
    assert "\nairflow tasks clear aircraft -t process -d -s 2013-01-05" in str(caught.value)
    assert asked == ["p", "commit a1"]


def test_the_checkpoint_task_calls_the_sink_of_the_pipeline_code(monkeypatch: pytest.MonkeyPatch) -> None:
    urls: list[str] = []

    def call_sink(at: Any, spark: None, *, after: Any, code: str) -> None:
        urls.append(at.url)
        publish_output.publish(at, "hook", in_order=True, code=code)

    pipeline = SimpleNamespace(sink=print, call_sink=call_sink)
    monkeypatch.setitem(sys.modules, "some_pipelines", SimpleNamespace(MINE=pipeline))
    operator, asked = checkpoint(monkeypatch, record, sink_of="some_pipelines:MINE")
    run(operator)
    assert urls == ["memory://r/p"] and "publish hook in order" in asked


def test_a_failed_validation_reports_its_findings_and_the_data_docs_page(fake: Callable[[str], Path]) -> None:
    fake('ok {"success": false, "findings": ["history: flights < 0"], "docs": "/docs/index.html", "keys": 3}')
    with pytest.raises(
        AirflowFailException, match=r"(?s)validation refused checkpoint 5.*- history: flights < 0.*/docs/index.html"
    ):
        run(validate())


def test_validation_and_savepoint_operators_send_their_arguments_to_the_driver(fake: Callable[[str], Path]) -> None:
    folder = fake('ok {"success": true, "findings": [], "docs": "d", "keys": 3}')
    gate = run(ValidateStateOperator(task_id="v", code="m:P", root="r", attempt="a1"))
    assert (gate["keys"], gate["attempt"]) == (3, "a1")
    assert request_in(folder) == Validate(**OF_CODE, attempt="a1")
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
def test_the_cadence_decides_if_validation_is_full_and_runs_expectations(
    fake: Callable[[str], Path], more: dict[str, Any], asked: dict[str, bool]
) -> None:
    """The interval ends five days after the start."""
    folder = fake('ok {"success": true, "findings": [], "docs": null, "keys": 3}')
    run(validate(**more))
    assert request_in(folder) == Validate(**OF_CODE, checkpoint="5", docs="/docs", **asked)


@pytest.mark.long("half a second", runs_in="ci")
def test_the_error_of_a_refused_attempt_or_checkpoint_describes_the_recovery(fake: Callable[[str], Path]) -> None:
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


def test_a_successful_validation_emits_its_result_as_an_asset_event(fake: Callable[[str], Path]) -> None:
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


def test_the_checkpoint_task_skips_downstream_tasks_that_are_not_due(monkeypatch: pytest.MonkeyPatch) -> None:
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


def backfill_task(**more: Any) -> Any:
    dag = backfill_pipeline("b", "m:P", "memory://operators", pipeline="p", **more)
    task = dag.get_task("backfill")
    task.first, task.last, task.reprocess = "2013-01-01", "2013-01-05T00:00+00:00", "none"
    task.permissions, task.only_plan = {"replace_overlapping": "False"}, "False"
    return task


def test_a_backfill_range_runs_in_one_driver_and_emits_an_event_per_checkpoint(
    fake: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(airflow_versions, "has", lambda name: name != "clear number of an active run")
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
    assert "mark the run as failed before you clear it" in capsys.readouterr().out  # Its second try may be a clear.
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


def test_a_range_runs_again_once_if_its_base_became_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [StaleBase("stale"), {"intervals": [], "checkpoint": 1}, StaleBase("a"), StaleBase("b")]
    monkeypatch.setattr(type(backfill_task()), "run_driver", mock.Mock(side_effect=answers))
    assert run(backfill_task())["checkpoint"] == 1
    with pytest.raises(StaleBase, match="b"):
        run(backfill_task())


@pytest.mark.parametrize("dry_run", [True, False], ids=["a dry run", "its checkpoint is dropped"])
def test_a_range_without_a_checkpoint_to_validate_skips_validation(fake: Callable[[str], Path], dry_run: bool) -> None:
    folder = fake(f'ok {{"intervals": [], "computed": 2, "checkpoint": 12, "dropped": {str(not dry_run).lower()}}}')
    task = backfill_task(validate={"docs": "/docs"})
    task.only_plan = str(dry_run)
    task >> BaseOperator(task_id="other", dag=task.dag)
    with pytest.raises(DownstreamTasksSkipped) as skipped:
        run(task)
    assert skipped.value.tasks == (["other", "validate"] if dry_run else ["validate"])
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
def test_a_backfill_range_with_invalid_parameters_fails_without_retry(change: dict[str, str], said: str) -> None:
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
    assert dag.get_task("checkpoint").validated.key == "return_value"  # Airflow passes None if the task has no result.


@pytest.mark.parametrize(
    ("begin", "end", "every", "due"),
    [
        (0, 1, timedelta(days=7), False),
        (5, 6, timedelta(days=7), False),
        (6, 7, timedelta(days=7), True),
        (7, 8, timedelta(days=7), False),
        (6.5, 7.5, timedelta(days=7), True),
        (13, 14, timedelta(days=7), True),
        (-1, 0, timedelta(days=7), False),
        (-8, -7, timedelta(days=7), False),
        (0, 0.5, timedelta(hours=6), True),
        (0, 1, timedelta(days=1), True),
    ],
)
def test_a_task_is_due_after_the_interval_in_which_a_multiple_of_its_cadence_ends(
    begin: float, end: float, every: timedelta, due: bool
) -> None:
    start = datetime(2013, 1, 1)
    assert is_due(start + timedelta(days=begin), start + timedelta(days=end), start, every) is due


@pytest.mark.parametrize("schedule", ["@daily", "0 6 * * *", timedelta(days=1)])
def test_a_weekly_task_is_due_once_a_week_in_summer_and_in_winter(schedule: Any) -> None:
    start = pendulum.datetime(2024, 1, 1, tz="Europe/Berlin")
    dag = pipeline_dag(schedule=schedule, start_date=start)
    day = (lambda n: start.add(days=n)) if isinstance(schedule, str) else (lambda n: start + timedelta(hours=24 * n))
    runs = [
        {"dag": dag, "data_interval_start": day(n).add(hours=6), "data_interval_end": day(n + 1).add(hours=6)}
        for n in range(365)
    ]
    assert [n for n, run in enumerate(runs) if is_due_in(run, timedelta(days=7))] == [*range(6, 365, 7)]
    assert all(is_due_in(run, None) for run in runs)
    for by_hand in (None, start):  # A run by hand of a DAG without schedule has no interval, or one without length.
        assert is_due_in({"dag": dag, "data_interval_start": by_hand, "data_interval_end": by_hand}, timedelta(days=7))
