"""The operator that goes back: what it asks, what it validates, what it commits, and that a retry completes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cairn_operators import RestoreStateOperator, airflow_versions, restore_pipeline
from cairn_operators.airflow_versions import AirflowFailException
from cairn_operators.ask_person import agreed_key
from cairn_operators.request_of import run_of
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.savepoints import claim_savepoint
from state_backend.values.marks import Claim
from state_backend.values.operation_parameters import Restore, Validate
from state_backend.values.records import Prepared, Record
from tests.support.airflow_names import TaskAsking
from tests.support.checkpoints import PIPELINE, Folder, content, day
from tests.support.coordinator import Coordinator
from tests.support.operator_calls import Store, answer, run
from tests.support.operator_calls import context as task_context

ROOT = "memory://restore"
OF_CODE: Any = {"root": ROOT, "code": "m:P", "pipeline": PIPELINE}


@pytest.fixture
def folder() -> Iterator[Folder]:
    """Days 1 to 4, as checkpoints 1 to 4."""
    for name in (PIPELINE, "trial"):
        storage = open_storage(f"{ROOT}/{name}")
        for info in list(storage.list("")):
            storage.delete(info.path)
    made = Folder(open_storage(f"{ROOT}/{PIPELINE}"), days=4)
    yield made


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of a driver that finds everything well; ``findings`` on it makes it refuse."""

    class Calls(list[Any]):
        findings: tuple[str, ...] = ()

    calls = Calls()

    def run_driver(self: Any, request: Any) -> dict[str, Any]:
        calls.append(request)
        return {"success": not calls.findings, "findings": calls.findings, "checkpoint": 77}

    monkeypatch.setattr(RestoreStateOperator, "run_driver", run_driver)
    return calls


def operator(target: str, **more: Any) -> RestoreStateOperator:
    return RestoreStateOperator(task_id="restore", code="m:P", pipeline=PIPELINE, root=ROOT, target=target, **more)


def context(**more: Any) -> dict[str, Any]:
    made = task_context(**{"task_state_store": Store(), **more})
    made["ti"].id = "ti"
    return made


def park(made: RestoreStateOperator, where: dict[str, Any]) -> TaskAsking:
    with pytest.raises(TaskAsking) as caught:
        run(made, where)
    return caught.value


def newest(folder: Folder) -> Record:
    return folder.coordinator.log().completed()[-1]


@pytest.mark.parametrize("target", [" 2 ", day(2).end.isoformat()])
def test_a_rewind_asks_validates_and_commits_once(
    folder: Folder, driver: list[Any], asked: list[dict[str, Any]], target: str
) -> None:
    made, where = operator(target, pipeline_dag_id="daily"), context()
    parked = park(made, where)
    assert asked[0]["options"] == ["Approve", "Reject"] and asked[0]["ti_id"] == "ti"
    assert "- `It discards 2 checkpoint(s):`\n  - `3 of" in asked[0]["body"]
    # The DAG that restores is another than the one to run again.
    assert "--pipeline counting --to 2024-01-04T00:00:00Z --dag daily" in asked[0]["body"]
    assert asked[0]["params"] == {}
    assert not driver and folder.coordinator.log().head_id == 4

    result = made.after_answer(where, answer("Approve"), **parked.kwargs)
    assert result == {"kind": "rewind", "checkpoint": 5, "discarded": [3, 4]}
    assert driver == [Validate(**OF_CODE, checkpoint="2")]
    content = newest(folder).content
    assert (content.kind, content.base_id, content.interval) == ("restore", 2, day(2))
    assert {i for i, r in folder.coordinator.log().retained.items() if r.stale_by == 5} == {3, 4}

    # A retry of the same run: agreed already, and there is nothing left to do.
    assert run(made, where)["checkpoint"] == 5
    assert len(asked) == 1 and folder.coordinator.log().head_id == 5


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (answer("Reject"), "ann has rejected the restore"),
        ({**answer("Reject"), "responded_by_user": None}, "somebody has rejected the restore"),
        ({"error": "no answer", "error_type": "timeout"}, "no person has answered: timeout"),
    ],
)
def test_without_consent_nothing_is_restored(
    folder: Folder, driver: list[Any], asked: list[Any], event: dict[str, Any], message: str
) -> None:
    made, where = operator("2"), context()
    parked = park(made, where)
    with pytest.raises(AirflowFailException, match=message):
        made.after_answer(where, event, **parked.kwargs)
    # A later try asks again.
    assert park(made, where) and not driver and folder.coordinator.log().head_id == 4 and len(asked) == 2


@pytest.mark.usefixtures("asked")
def test_a_restore_fails_if_a_checkpoint_is_committed_during_its_approval(folder: Folder, driver: list[Any]) -> None:
    made, where = operator("2"), context()
    parked = park(made, where)
    folder.run(day(5), "a5")
    with pytest.raises(AirflowFailException, match="discard more checkpoints than were agreed to: 5"):
        made.after_answer(where, answer("Approve"), **parked.kwargs)
    assert not driver and folder.coordinator.log().head_id == 5


def test_a_retry_asks_again_if_it_would_discard_more(folder: Folder, driver: list[Any], asked: list[Any]) -> None:
    made, where = operator("2"), context()
    where["task_state_store"].set(key := agreed_key(where, made._agreed_key), [3, 4])
    folder.run(day(5), "a5")
    assert park(made, where).kwargs == {"agreed": [3, 4, 5]} and not driver and newest(folder).id == 5
    where["task_state_store"].set(key, [3, 4, 5])
    assert run(made, where)["checkpoint"] == 6 and len(asked) == 1


def test_a_rewind_that_discards_nothing_needs_no_approval(folder: Folder, driver: list[Any], asked: list[Any]) -> None:
    assert run(operator("4"), context()) == {"kind": "rewind", "checkpoint": 5, "discarded": []}
    assert not asked and driver == [Validate(**OF_CODE, checkpoint="4")]
    assert newest(folder).content.base_id == 4


IGNORED: Any = (
    ("/s", {"fork_as": "b"}),
    ("/s", {"retract_output": True}),
    ("2", {"fork_as": "b", "retract_output": True}),
)


@pytest.mark.parametrize(("target", "more"), IGNORED)
def test_retract_output_and_fork_as_are_refused_for_a_target_that_ignores_them(target: str, more: Any) -> None:
    with pytest.raises(AirflowFailException, match=r"leave (fork_as out|out retract_output)"):
        operator(target, **more)._kind()


def test_retracting_output_needs_approval(folder: Folder, driver: list[Any], asked: list[Any]) -> None:
    """Also if no checkpoint is discarded, and if a person agreed to discard checkpoints before `retract_output` was set."""
    run(operator("2", ask=False), context())
    made, where = operator("2", retract_output=True), context()
    where["dag_run"].clear_number += 1
    where["task_state_store"].set(agreed_key(where, operator("2")._agreed_key), [3, 4])
    parked = park(made, where)
    assert parked.kwargs == {"agreed": []} and "It retracts the output of 2 interval(s):" in asked[0]["body"]
    assert asked[0]["subject"] == f"{PIPELINE}: discard 0 newer checkpoint(s), and delete the output of 2 interval(s)?"
    assert made.after_answer(where, answer("Approve"), **parked.kwargs)["checkpoint"] == 6
    assert {*folder.coordinator.log().current_outputs()} == {day(1), day(2)}
    assert {*folder.coordinator.unpublished()} >= {(day(3), 6), (day(4), 6)}


def test_a_refused_state_is_not_restored(folder: Folder, driver: Any) -> None:
    driver.findings = ("value: 3 entries, 4 are recorded",)
    with pytest.raises(AirflowFailException, match=r"(?s)validation refused checkpoint 2.*- value: 3 entries"):
        run(operator("2", ask=False), context())
    assert folder.coordinator.log().head_id == 4


def test_validation_can_be_left_out(folder: Folder, driver: list[Any]) -> None:
    assert run(operator("2", ask=False, validate=False), context())["checkpoint"] == 5
    assert not driver and newest(folder).content.base_id == 2


@pytest.mark.usefixtures("driver")
def test_a_fork_leaves_the_pipeline_as_it_is(folder: Folder, asked: list[Any]) -> None:
    made, where = operator("2", fork_as="trial"), context()
    assert run(made, where) == {"kind": "fork", "checkpoint": 1, "discarded": []}
    assert not asked and folder.coordinator.log().head_id == 4
    trial = Coordinator(open_storage(f"{ROOT}/trial"), "trial")
    assert trial.record("latest").content.digest == folder.coordinator.record(2).content.digest
    assert run(made, where)["checkpoint"] == 1 and trial.log().head_id == 1


def test_a_commit_during_validation_is_neither_forked_nor_discarded(folder: Folder, monkeypatch: Any) -> None:
    validated: list[Any] = []

    def run_driver(self: Any, request: Any) -> dict[str, Any]:
        validated.append(request.checkpoint)
        folder.run(day(n := folder.coordinator.log().head_id + 1), f"a{n}")  # Another interval is committed meanwhile.
        return {"success": True, "findings": ()}

    monkeypatch.setattr(RestoreStateOperator, "run_driver", run_driver)
    run(operator("latest", fork_as="trial"), context())
    trial = Coordinator(open_storage(f"{ROOT}/trial"), "trial")
    assert validated == ["4"] and folder.coordinator.log().head_id == 5
    assert trial.record("latest").content.interval == day(4)
    with pytest.raises(AirflowFailException, match="did not agree to discard these checkpoints: 6"):
        run(operator("2", ask=False), context())


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("of", "ids"), [("saved", [2, 3, 4]), ("a2", [3, 4])])
def test_a_savepoint_is_validated_and_restored_by_the_driver_after_approval(
    driver: list[Any], asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, of: str, ids: list[int]
) -> None:
    """It holds the state at the end of day 2: what the pipeline has for days 3 and 4 would be discarded, and for day 2 if that is
    another state."""
    saved = SimpleNamespace(content=content(day(2), of, kind="restore"))
    monkeypatch.setattr("state_backend.checkpoint.savepoints.read_savepoint", lambda storage: saved)
    made, where = operator("/savepoints/day2", claim="CLAIM"), context()
    parked = park(made, where)
    assert f"This discards {len(ids)} checkpoint(s): {', '.join(map(str, ids))}." in asked[0]["body"]
    result = made.after_answer(where, answer("Approve"), **parked.kwargs)
    assert result == {"kind": "savepoint", "checkpoint": 77, "discarded": ids}
    assert driver == [
        Validate(**OF_CODE, savepoint="/savepoints/day2"),
        Restore(
            **OF_CODE, savepoint="/savepoints/day2", claim="CLAIM", attempt=made._attempt(where), run=run_of(where)
        ),
    ]


@pytest.mark.parametrize("claim", ["NO_CLAIM", "CLAIM"])
@pytest.mark.parametrize("half_deleted", [False, True])
def test_a_retry_reuses_the_savepoint_restore_that_an_earlier_try_committed(
    folder: Folder,
    asked: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    claim: str,
    half_deleted: bool,
) -> None:
    """The driver commits, and is killed before it says so. Nobody is asked to discard that result, and the savepoint may be gone by
    now: with CLAIM the driver only deletes what is left of it."""
    saved = SimpleNamespace(content=content(day(4), "saved", kind="restore"))
    monkeypatch.setattr("state_backend.checkpoint.savepoints.read_savepoint", lambda storage: saved)
    calls: list[Any] = []

    def run_driver(self: Any, request: Any) -> dict[str, Any]:
        calls.append(request)
        attempt = request.attempt
        if folder.coordinator.log().of_attempt(attempt) is None:
            folder.coordinator.prepare(Prepared(h0=4, content=content(day(4), attempt, kind="restore")))
            folder.coordinator.commit(attempt)
            raise RuntimeError("killed")
        return {"checkpoint": 5}

    monkeypatch.setattr(RestoreStateOperator, "run_driver", run_driver)
    made, where = operator(str(tmp_path), claim=claim, validate=False), context()
    parked = park(made, where)
    with pytest.raises(RuntimeError, match="killed"):
        made.after_answer(where, answer("Approve"), **parked.kwargs)
    if half_deleted:
        claim_savepoint(LocalStorage(tmp_path), Claim(savepoint="saved", owner="us", attempt=made._attempt(where)))
    monkeypatch.undo()
    monkeypatch.setattr(RestoreStateOperator, "run_driver", run_driver)
    monkeypatch.setattr(airflow_versions, "has", lambda name: name != "clear number of an active run")
    where["ti"].try_number += 1
    assert run(made, where) == {"kind": "savepoint", "checkpoint": 5, "discarded": []}
    assert len(asked) == 1 and folder.coordinator.log().head_id == 5
    assert len(calls) == 1 + (half_deleted and claim == "CLAIM")
    assert "mark the run as failed before you clear it" in capsys.readouterr().out


def test_a_savepoint_that_another_attempt_claimed_is_left_alone(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(RestoreStateOperator, "run_driver", lambda self, request: calls.append(request))
    made, where = operator(str(tmp_path), claim="CLAIM", validate=False), context()
    attempt = made._attempt(where)
    folder.coordinator.prepare(Prepared(h0=4, content=content(day(4), attempt, kind="restore")))
    folder.coordinator.commit(attempt)
    claim_savepoint(LocalStorage(tmp_path), Claim(savepoint="saved", owner="us", attempt="another"))
    assert run(made, where) == {"kind": "savepoint", "checkpoint": 5, "discarded": []}
    assert calls == []


def test_a_cleared_run_restores_again(folder: Folder, driver: list[Any], asked: list[Any]) -> None:
    made, where = operator("2"), context()
    made.after_answer(where, answer("Approve"), **park(made, where).kwargs)
    folder.run(day(3), "once more")
    cleared = context()
    cleared["dag_run"].clear_number = 1
    parked = park(made, cleared)
    assert made.after_answer(cleared, answer("Approve"), **parked.kwargs)["discarded"] == [6]
    assert len(asked) == 2 and newest(folder).content.base_id == 2


@pytest.mark.parametrize(
    ("target", "more", "message"),
    [
        ("9", {}, "the log has no checkpoint 9"),
        ("yesterday", {}, "neither 'latest', nor an id"),
        ("2024-01-03T00:00:00", {}, "has no time zone"),
        ("2030-01-01T00:00:00+00:00", {}, "no usable checkpoint 2030"),
        ("/no/such/savepoint", {}, "savepoint"),
        ("/no/such/savepoint", {"fork_as": "x"}, "leave fork_as out"),
    ],
)
@pytest.mark.usefixtures("folder", "driver")
def test_a_restore_to_an_unknown_or_invalid_target_is_refused(target: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(AirflowFailException, match=message):
        run(operator(target, **more), context())


def test_restore_pipeline_makes_an_unscheduled_dag_with_target_and_fork_params() -> None:
    dag = restore_pipeline("restore_p", "m:P", ROOT, pipeline="p", restore={"ask": False})
    task = dag.get_task("restore")
    assert (task.target, task.fork_as, task.ask) == ("{{ params.target }}", "{{ params.fork_as or '' }}", False)
    assert set(dag.params) == {"target", "fork_as"} and dag.schedule is None
