"""The retry policy of Cairn's tasks: short pauses at first, longer pauses later.

After a killed driver, a retry can begin at once. A failed server or a missing input may need minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from cairn_operators.airflow_versions import AirflowFailException, RetryDecision, RetryPolicy, has, own_pauses
from cairn_operators.failures import UserCodeFailed

_SECONDS = (5, 15, 60, 180, 300, 600, 600)
_LONGEST = timedelta(seconds=_SECONDS[-1])
RETRIES = len(_SECONDS)
# Largest number of retries after an exception of the user's code. Most of these exceptions are bugs, so the run should
# fail soon and show the bug.
USER_CODE_RETRIES = 3
_STILL_FAILS = f"the pipeline's code still fails after {USER_CODE_RETRIES} retries"
_OWN = {"retry_delay", "retry_exponential_backoff", "max_retry_delay", "retry_policy"}


class RetriesOverHalfAnHour(RetryPolicy):  # type: ignore[misc]
    """The retry policy with growing pauses: 5 and 15 seconds, 1, 3, 5 and 10 minutes, then every 10 minutes.

    The default of seven retries takes half an hour. An exception of the user's code is retried three times, 5 seconds
    apart.
    """

    def __init__(self, retries: int) -> None:
        self.retries = retries

    def evaluate(
        self, exception: BaseException, try_number: int, max_tries: int, context: Any | None = None
    ) -> RetryDecision:
        """Return whether and when Airflow tries the task again. Airflow calls this in the task's process.

        Airflow never makes more retries than the task's `retries`, even if this method returns a retry.
        """
        failure = failures_since_clear(self.retries, max_tries, try_number)
        if isinstance(exception, UserCodeFailed):
            if failure > USER_CODE_RETRIES:
                return RetryDecision.fail(_STILL_FAILS)
            return RetryDecision.retry(timedelta(seconds=_SECONDS[0]))
        seconds = _SECONDS[min(failure, RETRIES) - 1]
        return RetryDecision.retry(timedelta(seconds=seconds), f"retry {failure} of {self.retries} in {seconds} s")


def failures_since_clear(retries: int, max_tries: int, try_number: int) -> int:
    """Return how often the task has failed since it was last cleared, including now. `retries`: The task's setting."""
    # When a task is cleared, Airflow keeps `try_number`, and sets `max_tries` to the tries so far plus `retries`.
    return max(1, retries - max_tries + try_number)


def check_failures(error: UserCodeFailed, task: Any, ti: Any) -> None:
    """Raise `AirflowFailException` if user code has failed too often. On an Airflow with retry policies, do nothing.

    A task whose retry arguments the user has changed is retried as often as these arguments say.
    """
    if has("retry policy"):  # `RetriesOverHalfAnHour` limits the retries.
        return
    has_cairns_pauses = all(getattr(task, name) == value for name, value in own_pauses(_LONGEST).items())
    failures = failures_since_clear(task.retries, ti.max_tries, ti.try_number)
    if has_cairns_pauses and failures > USER_CODE_RETRIES:
        raise AirflowFailException(f"{error}\n{_STILL_FAILS}") from error


def retry_arguments(own: Mapping[str, Any] | None = None, retries: int = RETRIES) -> dict[str, Any]:
    """Return a task's arguments: those in `own`, and the retries that `stateful_pipeline` gives its tasks.

    Use this function for operators in your own DAGs. A `retry_delay`, `retry_exponential_backoff`, `max_retry_delay` or
    `retry_policy` in `own` replaces Cairn's retry policy.

    Args:
        own: Your arguments of the task; None for none.
        retries: Number of retries if `own` has no `retries`. With 0 retries, no retry policy is set.
    """
    arguments = {"retries": retries, "retry_delay": timedelta(seconds=_SECONDS[0]), **(own or {})}
    if _OWN & {*(own or {})} or not arguments["retries"]:
        return arguments
    if has("retry policy"):
        arguments["retry_policy"] = RetriesOverHalfAnHour(arguments["retries"])
    else:
        arguments |= own_pauses(_LONGEST)
    return arguments
