"""When Airflow tries a task again: soon, as a killed driver needs no more, then less and less often, as a server or an input takes time."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from airflow.sdk import RetryDecision, RetryPolicy

from cairn_operators.failures import UserCodeFailed

_SECONDS = (5, 15, 60, 180, 300, 600, 600)
RETRIES = len(_SECONDS)
# An exception of the pipeline's own code is most often a mistake in it: whoever waits for the run learns of it soon.
USER_CODE_RETRIES = 3
_OWN = {"retry_delay", "retry_exponential_backoff", "max_retry_delay", "retry_policy"}


class RetriesOverHalfAnHour(RetryPolicy):  # type: ignore[misc]
    """The retries of a task with ``retries`` of them: after 5 and 15 seconds, 1, 3, 5 and 10 minutes, then every 10 minutes. Seven of
    them, the default, take half an hour. An exception of the user's code is retried three times, 5 seconds apart."""

    def __init__(self, retries: int) -> None:
        self.retries = retries

    def evaluate(
        self, exception: BaseException, try_number: int, max_tries: int, context: Any | None = None
    ) -> RetryDecision:
        """Airflow calls this in the task's process; what it decides is at most the task's ``retries``."""
        # Both numbers go on counting over a clear: Airflow then sets max_tries to the tries so far and the retries.
        failure = max(1, self.retries - max_tries + try_number)
        if isinstance(exception, UserCodeFailed):
            if failure > USER_CODE_RETRIES:
                return RetryDecision.fail(f"an exception of the pipeline's code, after {USER_CODE_RETRIES} retries")
            return RetryDecision.retry(timedelta(seconds=_SECONDS[0]))
        seconds = _SECONDS[min(failure, RETRIES) - 1]
        return RetryDecision.retry(timedelta(seconds=seconds), f"retry {failure} of {self.retries} in {seconds} s")


def retry_arguments(own: Mapping[str, Any] | None = None, retries: int = RETRIES) -> dict[str, Any]:
    """The arguments of a task with those of its user: what ``stateful_pipeline`` gives its tasks, for who wires operators by hand. A delay of the user's own is every retry's: no policy then."""
    arguments = {"retries": retries, "retry_delay": timedelta(seconds=_SECONDS[0]), **(own or {})}
    if not _OWN & {*(own or {})} and arguments["retries"]:
        arguments["retry_policy"] = RetriesOverHalfAnHour(arguments["retries"])
    return arguments
