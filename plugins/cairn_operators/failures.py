"""What Airflow shall do about a failure: retry, or fail for good because a retry can't help."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from airflow.sdk.exceptions import AirflowException, AirflowFailException

if TYPE_CHECKING:
    from state_backend.values.errors import CairnError


class UserCodeFailed(AirflowException):  # type: ignore[misc]
    """The pipeline's own code raised; `retries` gives it up sooner than what may pass with time."""


def failure_of(error: CairnError, dag_id: str) -> AirflowException:
    """The exception to raise for an error, with the command of this DAG that the error asks for."""
    from state_backend.values.airflow_commands import with_command

    return failure(type(error).__name__, with_command(str(error), dag_id, error.rerun))


def failure(type_name: str, message: str) -> AirflowException:
    """The exception to raise for an error of ``state_backend.values.errors``, given by the name of its class.

    Retried: what may pass by itself (storage, a lost race, data that lands late, user code that depends on the outside)
    and what this project does not know. For good: a wrong call, unusable state, a bug.
    """
    from state_backend.values import errors

    known = getattr(errors, type_name, None)
    text = f"{type_name}: {message}"
    may_pass = (errors.RetryableError, errors.AttemptLost, errors.UserCodeError)
    if isinstance(known, type) and issubclass(known, errors.CairnError) and not issubclass(known, may_pass):
        return AirflowFailException(text)
    if isinstance(known, type) and issubclass(known, errors.ProcessorError):
        return UserCodeFailed(text)
    return AirflowException(text)


def exit_failure(return_code: int) -> AirflowException:
    """The exception for a driver that ended without saying why. Nothing is committed by a driver, so a retry is safe."""
    if return_code < 0:
        try:
            name = signal.Signals(-return_code).name
        except ValueError:
            name = f"signal {-return_code}"
        return AirflowException(f"the Spark driver was killed ({name}); a retry begins again")
    return AirflowException(f"the Spark driver ended with code {return_code} and no result; its log is above")
