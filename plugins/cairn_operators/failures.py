"""Choose the exception for a failure: one that Airflow retries, or one that fails the task for good."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from airflow.sdk.exceptions import AirflowException, AirflowFailException

if TYPE_CHECKING:
    from state_backend.values.errors import CairnError


class UserCodeFailed(AirflowException):  # type: ignore[misc]
    """An exception for a failure in the pipeline's own code. `retries` gives such a task fewer retries than others."""


def failure_of(error: CairnError, dag_id: str) -> AirflowException:
    """Return the exception to raise for an error. Its message has the command that runs the needed intervals.

    Args:
        error: The error.
        dag_id: The DAG that the command names.
    """
    from state_backend.values.airflow_commands import with_command

    return failure(type(error).__name__, with_command(str(error), dag_id, error.rerun))


def failure(type_name: str, message: str) -> AirflowException:
    """Return the exception to raise for an error that is given by the name of its class.

    Airflow retries an error that may pass by itself: of storage, of a lost attempt, of late data, or of user code. It
    also retries an error whose class is not in `state_backend.values.errors`. A wrong call, unusable state or a bug
    fails the task for good.

    Args:
        type_name: Name of the error's class.
        message: Message of the error.
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
    """Return the exception for a driver that ended without a result.

    A retry is safe: it takes what the driver committed or prepared, and computes the rest again.

    Args:
        return_code: Exit code of the process; negative for the signal that killed it.
    """
    if return_code < 0:
        try:
            name = signal.Signals(-return_code).name
        except ValueError:
            name = f"signal {-return_code}"
        return AirflowException(f"the Spark driver was killed ({name}); a retry begins again")
    return AirflowException(f"the Spark driver ended with code {return_code} and no result; its log is above")
