"""Choose the exception that a failed task raises: one that Airflow retries, or one that fails the task for good."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cairn_operators.airflow_versions import AirflowException, AirflowFailException, conf
from cairn_operators.pipeline_source import pipeline_name_of

if TYPE_CHECKING:
    from state_backend.values.errors import CairnError, Rerun


class UserCodeFailed(AirflowException):  # type: ignore[misc]
    """The exception for an error in the pipeline's own code, which Airflow retries at most three times."""


class InputMissing(AirflowException):  # type: ignore[misc]
    """The exception for an input that another pipeline has not committed. A task that can wait for the input defers.

    `awaited`: The input to wait for, as the JSON of a `state_backend.chains.pin_inputs.Awaited`.
    """

    def __init__(self, message: str, awaited: str) -> None:
        super().__init__(message)
        self.awaited = awaited


class StaleBase(AirflowFailException):  # type: ignore[misc]
    """The exception for a base checkpoint that is stale, or that was computed from input that was replaced since."""


def repair(task: Any, again: Rerun, *, chain: bool = False) -> str:
    """Return the command that repairs the intervals `again` of a task's pipeline, with `chain` its upstreams first."""
    from state_backend.values.airflow_commands import repair_command

    dag_id, airflow = getattr(task, "dag_of_pipeline", task.dag_id), conf.get("api", "base_url", fallback=None)
    pipeline = getattr(task, "pipeline", None) or pipeline_name_of(task.code, otherwise=dag_id)
    return repair_command(task.root, pipeline, again, dag_id=dag_id, airflow=airflow, chain=chain)


def failure_of(error: CairnError, task: Any) -> AirflowException:
    """Return the exception that a task raises for an error of Cairn, with a repair command if the error has one."""
    command = "" if error.rerun is None else f"\n{repair(task, error.rerun)}"
    return failure(type(error).__name__, f"{error}{command}")


@contextmanager
def convert_errors(task: Any) -> Iterator[None]:
    """Convert an error of Cairn that the `with` block raises to the exception from `failure_of`."""
    from state_backend.values.errors import CairnError

    try:
        yield
    except CairnError as error:
        raise failure_of(error, task) from error


def failure(type_name: str, message: str, awaited: str | None = None) -> AirflowException:
    """Return the exception with which a task fails, for an error whose class has the name `type_name`.

    `awaited`: The input that the task can wait for, as in `InputMissing`; None for any other error.

    Airflow retries the task if the error may pass: the storage failed, an attempt was lost, user code or its input
    failed, or `state_backend.values.errors` has no such class. The task fails for good if the call is wrong or state is
    unusable.
    """
    from state_backend.values import errors

    if type_name == errors.StaleStateError.__name__:
        return StaleBase(f"{type_name}: {message}")
    known = getattr(errors, type_name, None)
    text = f"{type_name}: {message}"
    if awaited is not None:
        return InputMissing(text, awaited)
    may_pass = (errors.RetryableError, errors.AttemptLost, errors.UserCodeError)
    if isinstance(known, type) and issubclass(known, errors.CairnError) and not issubclass(known, may_pass):
        return AirflowFailException(text)
    if isinstance(known, type) and issubclass(known, errors.ProcessorError):
        return UserCodeFailed(text)
    return AirflowException(text)


def exit_failure(return_code: int) -> AirflowException:
    """Return the exception for a driver that ended without a result.

    Airflow retries the task. The retry keeps what the dead driver had committed or prepared, and computes the rest.
    """
    if return_code < 0:
        name = next((one.name for one in signal.Signals if one == -return_code), f"signal {-return_code}")
        return AirflowException(f"the Spark driver was killed ({name}); a retry is safe")
    return AirflowException(f"the Spark driver ended with code {return_code} and no result; its log is above")
