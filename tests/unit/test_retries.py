"""When a task is tried again by default, and how to say otherwise."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.models.taskinstance import TaskInstance

from cairn_operators import backfill_pipeline, stateful_pipeline
from cairn_operators.airflow_versions import AirflowException, AirflowFailException, has, own_pauses
from cairn_operators.failures import UserCodeFailed, exit_failure, failure
from cairn_operators.retries import RETRIES, RetriesOverHalfAnHour, check_failures, retry_arguments
from tests.support.airflow_names import RetryAction, needs


def delays(error: BaseException, retries: int = RETRIES, before: int = 0) -> list[float]:
    """The seconds before each retry. ``before``: tries that were made until the task was cleared."""
    policy, found = RetriesOverHalfAnHour(retries), []
    for try_number in range(before + 1, before + retries + 1):
        decision = policy.evaluate(error, try_number, before + retries)
        if decision.action == RetryAction.FAIL:
            break
        assert decision.action == RetryAction.RETRY and decision.retry_delay is not None
        found.append(decision.retry_delay.total_seconds())
    return found


@needs("retry policy")
@pytest.mark.parametrize("before", [0, 3, 40])
@pytest.mark.parametrize(
    "error",
    [failure("StorageUnavailable", "x"), failure("SourceError", "x"), failure("ValueError", "x"), exit_failure(-9)],
)
def test_retries_start_after_5_seconds_and_last_half_an_hour_even_after_a_clear(
    error: AirflowException, before: int
) -> None:
    found = delays(error, before=before)
    assert found[0] == 5 and all(a <= b for a, b in pairwise(found))
    assert timedelta(minutes=25) < timedelta(seconds=sum(found)) < timedelta(minutes=35)


@needs("retry policy")
def test_extra_retries_repeat_the_longest_delay_and_fewer_retries_end_sooner() -> None:
    error = failure("StorageUnavailable", "x")
    assert delays(error, 9)[-3:] == [600] * 3
    assert delays(error, 2) == [5, 15]


@needs("retry policy")
@pytest.mark.parametrize("before", [0, 40])
def test_an_exception_of_user_code_is_retried_three_times_after_5_seconds(before: int) -> None:
    error = failure("ProcessorError", "x")
    assert isinstance(error, UserCodeFailed)
    assert delays(error, before=before) == [5, 5, 5]


# The seconds of the pauses of seven retries, each between the two rows, on an Airflow without policies.
PAUSES = {
    (3, 1): ([15, 30, 60, 120, 240, 480, 600], [30, 60, 120, 240, 480, 600, 600]),
    (3, 2): ([5, 15, 45, 135, 405, 600, 600], [10, 30, 90, 270, 600, 600, 600]),
}


@pytest.mark.parametrize("version", [(3, 1), pytest.param((3, 2), marks=needs("factor of pauses"))])
def test_retries_last_half_an_hour_on_an_airflow_without_retry_policies(version: tuple[int, int]) -> None:
    """Airflow's own function computes the pauses. With 3.1 the factor is always 2, for which True stands."""
    task = SimpleNamespace(**own_pauses(timedelta(minutes=10), version))
    if has("factor of pauses") and task.retry_exponential_backoff is True:
        task.retry_exponential_backoff = 2.0
    least, most = PAUSES[version]
    for day in range(1, 32):
        found = []
        for try_number in range(1, RETRIES + 1):
            failed = SimpleNamespace(
                task=task, dag_id="rides", task_id="process", logical_date=datetime(2024, 1, day, tzinfo=UTC),
                try_number=try_number, end_date=datetime(2024, 2, 1, tzinfo=UTC), retry_delay_override=None,
            )  # fmt: skip
            found.append((TaskInstance.next_retry_datetime(failed) - failed.end_date).total_seconds())
        assert all(a <= b <= c for a, b, c in zip(least, found, most, strict=True))
        assert 25 * 60 < sum(found) < 37 * 60


@pytest.mark.parametrize(
    ("tries", "before", "own", "ends"),
    [(3, 0, {}, False), (4, 0, {}, True), (8, 5, {}, False), (9, 5, {}, True), (7, 0, {"retry_delay": 1}, False)],
)
def test_user_code_is_retried_three_times_on_an_airflow_without_retry_policies(
    monkeypatch: pytest.MonkeyPatch, tries: int, before: int, own: dict[str, int], ends: bool
) -> None:
    """`before`: tries until the task was cleared."""
    monkeypatch.setattr("cairn_operators.retries.has", lambda name: False)
    task = SimpleNamespace(**(retry_arguments() | own))
    ti = SimpleNamespace(try_number=tries, max_tries=before + RETRIES)
    with pytest.raises(AirflowFailException, match="still fails after 3 retries") if ends else nullcontext():
        check_failures(UserCodeFailed("x"), task, ti)


@pytest.mark.parametrize(
    ("own", "retries", "delay", "policy"),
    [
        (None, RETRIES, 5, True),
        ({"retries": 9}, 9, 5, True),
        ({"retries": 0}, 0, 5, False),
        ({"retry_delay": timedelta(seconds=1)}, RETRIES, 1, False),
        ({"retry_exponential_backoff": 2}, RETRIES, 5, False),
    ],
)
def test_retry_settings_of_the_user_replace_the_defaults(
    own: dict[str, Any] | None, retries: int, delay: int, policy: bool
) -> None:
    found = retry_arguments(own)
    assert found["retries"] == retries
    if has("retry policy") or not policy:
        assert ("retry_policy" in found, found["retry_delay"]) == (policy, timedelta(seconds=delay))
    else:
        assert found.items() >= own_pauses(timedelta(minutes=10)).items()


def grows(task: Any) -> bool:
    return bool(task.has_retry_policy if has("retry policy") else task.retry_exponential_backoff)


def test_every_task_of_the_dag_factories_gets_the_default_retries() -> None:
    start = datetime(2024, 1, 1, tzinfo=UTC)
    daily = stateful_pipeline(
        "p", "m:P", "file:///r", schedule="@daily", start_date=start, savepoint={"folder": "file:///s"},
        sweep={"cadence": timedelta(days=1)}, validate={"retry_delay": timedelta(seconds=1)},
    )  # fmt: skip
    assert {task.task_id: grows(task) for task in daily.tasks} == {
        "process": True, "checkpoint": True, "validate": False, "savepoint": True, "sweep": True,
    }  # fmt: skip
    again = backfill_pipeline("b", "m:P", "file:///r", every=timedelta(days=1), pipeline="p", validate=True)
    assert all(grows(task) and task.retries == RETRIES for task in again.tasks)
