"""The retry policy of Cairn's tasks: soon at first, then less and less often.

A killed driver needs no pause. A server or an input may need minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from airflow.sdk import RetryDecision, RetryPolicy

from cairn_operators.failures import UserCodeFailed

_SECONDS = (5, 15, 60, 180, 300, 600, 600)
RETRIES = len(_SECONDS)
# An exception of the user's code is mostly a bug. With few retries the run fails soon and shows it.
USER_CODE_RETRIES = 3
_OWN = {"retry_delay", "retry_exponential_backoff", "max_retry_delay", "retry_policy"}


class RetriesOverHalfAnHour(RetryPolicy):  # type: ignore[misc]
    """The retry policy with growing pauses: 5 and 15 seconds, 1, 3, 5 and 10 minutes, then every 10 minutes.

    The default of seven retries takes half an hour. An exception of the user's code is retried three times, 5 seconds
    apart.

    Args:
        retries: The number of retries of the task.
    """

    def __init__(self, retries: int) -> None:
        self.retries = retries

    def evaluate(
        self, exception: BaseException, try_number: int, max_tries: int, context: Any | None = None
    ) -> RetryDecision:
        """Return whether and when Airflow tries the task again. Airflow calls this in the task's process.

        Airflow makes no more retries than the task's `retries`, whatever the decision.

        Args:
            exception: The exception of the failed try.
            try_number: Number of the failed try. A clear does not reset it.
            max_tries: Number of retries that Airflow allows, counted like `try_number`. A clear raises it.
            context: Airflow's context of the task; not used.
        """
        # A clear does not reset `try_number`: Airflow sets `max_tries` to the tries so far plus the retries. So
        # `failure` is the number of failures since the clear.
        failure = max(1, self.retries - max_tries + try_number)
        if isinstance(exception, UserCodeFailed):
            if failure > USER_CODE_RETRIES:
                return RetryDecision.fail(f"an exception of the pipeline's code, after {USER_CODE_RETRIES} retries")
            return RetryDecision.retry(timedelta(seconds=_SECONDS[0]))
        seconds = _SECONDS[min(failure, RETRIES) - 1]
        return RetryDecision.retry(timedelta(seconds=seconds), f"retry {failure} of {self.retries} in {seconds} s")


def retry_arguments(own: Mapping[str, Any] | None = None, retries: int = RETRIES) -> dict[str, Any]:
    """Return the arguments of a task: those of its user, and the retries that `stateful_pipeline` gives its tasks.

    Use it for operators that are not made by `stateful_pipeline`. A `retry_delay`, `retry_exponential_backoff`,
    `max_retry_delay` or `retry_policy` in `own` replaces Cairn's retry policy.

    Args:
        own: The user's arguments of the task.
        retries: Number of retries if `own` does not give it; 0 sets no policy.
    """
    arguments = {"retries": retries, "retry_delay": timedelta(seconds=_SECONDS[0]), **(own or {})}
    if not _OWN & {*(own or {})} and arguments["retries"]:
        arguments["retry_policy"] = RetriesOverHalfAnHour(arguments["retries"])
    return arguments
