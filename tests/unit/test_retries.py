"""When a task is tried again by default, and how to say otherwise."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from airflow.sdk import RetryAction
from airflow.sdk.exceptions import AirflowException

from cairn_operators import backfill_pipeline, stateful_pipeline
from cairn_operators.failures import UserCodeFailed, exit_failure, failure
from cairn_operators.retries import RETRIES, RetriesOverHalfAnHour, retry_arguments


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


@pytest.mark.parametrize("before", [0, 3, 40])
@pytest.mark.parametrize(
    "error",
    [failure("StorageUnavailable", "x"), failure("SourceError", "x"), failure("ValueError", "x"), exit_failure(-9)],
)
def test_a_killed_driver_is_back_soon_and_a_server_has_half_an_hour_also_after_a_clear(
    error: AirflowException, before: int
) -> None:
    found = delays(error, before=before)
    assert found[0] == 5 and all(a <= b for a, b in pairwise(found))
    assert timedelta(minutes=25) < timedelta(seconds=sum(found)) < timedelta(minutes=35)


def test_more_retries_than_the_default_come_at_the_last_pace_and_fewer_end_sooner() -> None:
    error = failure("StorageUnavailable", "x")
    assert delays(error, 9)[-3:] == [600] * 3
    assert delays(error, 2) == [5, 15]


@pytest.mark.parametrize("before", [0, 40])
def test_an_exception_of_the_users_code_is_not_tried_for_half_an_hour(before: int) -> None:
    error = failure("ProcessorError", "x")
    assert isinstance(error, UserCodeFailed)
    assert delays(error, before=before) == [5, 5, 5]


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
def test_a_delay_of_the_users_own_is_taken_instead(
    own: dict[str, Any] | None, retries: int, delay: int, policy: bool
) -> None:
    found = retry_arguments(own)
    assert (found["retries"], found["retry_delay"]) == (retries, timedelta(seconds=delay))
    assert ("retry_policy" in found) == policy


def test_every_task_of_the_factories_has_it() -> None:
    start = datetime(2024, 1, 1, tzinfo=UTC)
    daily = stateful_pipeline(
        "p", "m:P", "file:///r", schedule="@daily", start_date=start, savepoint={"folder": "file:///s"},
        sweep={"cadence": timedelta(days=1)}, validate={"retry_delay": timedelta(seconds=1)},
    )  # fmt: skip
    assert {task.task_id: task.has_retry_policy for task in daily.tasks} == {
        "process": True, "checkpoint": True, "validate": False, "savepoint": True, "sweep": True,
    }  # fmt: skip
    again = backfill_pipeline("b", "m:P", "file:///r", every=timedelta(days=1), pipeline="p", validate=True)
    assert all(task.has_retry_policy and task.retries == RETRIES for task in again.tasks)
