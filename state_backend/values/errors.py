"""Errors, grouped by what the caller does next.

Every message says what happened, where, what was expected, what was found, and what to do. Each group is a class. An
Airflow operator can therefore choose between a retry, a final failure and a question to a person without parsing the
message.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from state_backend.values.frozen import frozen
from state_backend.values.hide_secrets import hide


@frozen
class Rerun:
    """The intervals that an error or a plan asks to run again.

    A `Rerun` holds no command, because the command depends on the scheduler: `airflow_commands` formats the command for
    Airflow.

    Attributes:
        first: Start of the first interval.
        last: Start of the last interval, which is included.
        replace_overlapping: True if the intervals replace output of intervals with other boundaries, and so need that
            permission.
        though_valid: True if the last interval's result is valid, so that `cairn heal` would not run it.
    """

    first: datetime
    last: datetime
    replace_overlapping: bool = False
    though_valid: bool = False

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            object.__setattr__(self, name, getattr(self, name).astimezone(UTC))
        if self.last < self.first:
            raise UsageError(
                f"the first interval to run, {self.first.isoformat()}, is later than the last, {self.last.isoformat()}"
            )

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, as in the file in which a driver returns its result to the operator."""
        return asdict(self) | {"first": self.first.isoformat(), "last": self.last.isoformat()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Rerun:
        """Build a `Rerun` from the fields that `as_json` returned."""
        return cls(**fields | {name: datetime.fromisoformat(fields[name]) for name in ("first", "last")})


class CairnError(Exception):
    """Base class of every error that Cairn raises on purpose.

    What to do:
        Read the end of the message: it names the next step. `cairn status` prints the command that repairs the
        pipeline.

    Attributes:
        rerun: The intervals to run again, which the message names too. The operators and the command line add the
            command for these intervals to the message. None if running intervals again does not help.
    """

    def __init__(self, *args: object, rerun: Rerun | None = None) -> None:
        super().__init__(*args)
        self.rerun = rerun

    def __str__(self) -> str:
        """Return the message without credentials."""
        return hide(super().__str__())

    def __repr__(self) -> str:
        """Return class and message without credentials."""
        return hide(super().__repr__())

    def add_note(self, note: str) -> None:
        """Add a note without credentials. Notes hold tracebacks of user code, whose errors may quote a URL."""
        super().add_note(hide(note))


# --- Wait and retry: the same call may succeed later. -----------------------------------------------------------------


class RetryableError(CairnError):
    """A failure after which the caller may repeat the call: nothing was changed, or the change is idempotent.

    What to do:
        Repeat the command. In Airflow, wait for the retries of the task.
    """


class StorageUnavailable(RetryableError):
    """The storage, a Spark server, Airflow or a disk does not answer, is overloaded or is full.

    What to do:
        Check the server, the network or the disk that the message names. Then repeat the command. In Airflow, clear the
        task after the last retry.
    """


class WorkerDied(RetryableError):
    """A Python worker of Spark crashed or was killed.

    A crash leaves a stack beside the message. Without a stack, the worker was killed, mostly for lack of memory.

    What to do:
        If the worker was killed, give executors more memory, or make `parallelism` greater. If each retry crashes,
        report the stack.
    """


class CheckpointDropped(RetryableError):
    """During a read, retention dropped the checkpoint, or a commit replaced the output.

    What to do:
        Repeat the query or the command. If you named a checkpoint, choose another from `cairn checkpoints`. For a long
        query over `keyed_state`, set `option("hold", "2h")`: the checkpoint's files then stay for two hours.
    """


class SinkFailed(RetryableError):
    """The pipeline's sink raised an exception for some intervals.

    The checkpoints of these intervals stay committed.

    What to do:
        Repair the sink, or the system that the sink writes to. Each retry of the task `checkpoint`, and each later
        checkpoint, calls the sink again. To call the sink now, type `cairn publish --code MODULE:NAME`. See
        docs/sinks.md.

    Attributes:
        ids: The commits whose output is missing from the sink. If the pipeline publishes in order, these include the
            commits behind the failed one, which were not tried.
    """

    def __init__(self, message: str, ids: frozenset[int] = frozenset()) -> None:
        super().__init__(message)
        self.ids = ids


class UnknownOutcome(RetryableError):
    """The storage did not say if a write took effect. Code that catches this error must delete nothing.

    What to do:
        Repeat the command. The next try reads the storage first, and so learns if the write took effect. Delete no file
        by hand.
    """


# --- Begin again: the attempt at an interval is lost, but a new attempt may succeed. ----------------------------------


class AttemptLost(CairnError):
    """This attempt at an interval can no longer be committed. A new attempt may process the interval again.

    What to do:
        Run the interval again. In Airflow, clear the task `process` of the failed run: the log of the task `checkpoint`
        has the command. Without Airflow, repeat the command that failed.
    """


class Fenced(AttemptLost):
    """Another attempt was the first to commit this interval or an interval that overlaps it.

    What to do:
        Type `cairn checkpoints` and find the checkpoint that the message names. If this checkpoint has the result that
        you want, do nothing. Otherwise clear the task `process` of the failed run, with its downstream tasks.
    """


class BaseMoved(AttemptLost):
    """This attempt started from a checkpoint from which its interval may no longer start.

    What to do:
        If the message has a `cairn heal` command, run that command first. Then clear the task `process` of the failed
        run, with its downstream tasks.
    """


class Swept(AttemptLost):
    """A sweep declared this attempt dead after the attempt began, and may have deleted its files.

    What to do:
        Clear the task `process` of the failed run, with its downstream tasks. If the task worked for longer
        than `--min-age` of `cairn sweep` (default: 3 days), sweep with a larger `--min-age` from now on.
    """


# --- Restore or re-run: the requested state can't be used. ------------------------------------------------------------


class StateUnusable(CairnError):
    """State is missing, damaged, or must not be used. The message names the checkpoint to restore or the next step.

    What to do:
        Type `cairn status`: it prints the command that repairs the pipeline. Type `cairn checkpoints` to see which
        checkpoints are usable.
    """


class CorruptFile(StateUnusable):
    """A file of a checkpoint or savepoint is missing or truncated, or its checksum or content is wrong.

    What to do:
        Type `cairn pause`, then `cairn check`. Each finding names a checkpoint or an interval. If only checkpoints
        before the newest one have findings, the pipeline can go on: unpause the DAG. To repair the damage, put the file
        back from a backup, and unpause the DAG. Without a backup, run the earliest interval with a finding and all
        later ones again. In Airflow, `cairn backfill` does this, and unpauses the DAG. Or go back to a checkpoint
        without findings that ends at or before the start of that interval: type `cairn restore ID --dry-run`, read what
        the command would discard, and then type `--yes` in place of `--dry-run`.
    """


class DamagedCopy(CorruptFile):
    """The host's cached copy of a file can't be read.

    Cairn deletes a damaged copy and downloads the file again. This error says that several such tries have failed.

    What to do:
        Check the disk that holds the host's cache, `EngineOptions.cache_dir` (docs/settings.md#engineoptions). Then
        repeat the command, or clear the task.
    """


class CorruptRecord(CorruptFile):
    """A record, manifest or other metadata file can't be decoded.

    What to do:
        Type `cairn pause`, and keep the damaged file outside of the root. Put the file back from a backup, or from an
        older version of the object in the bucket. Then type `cairn check` to find other damaged files. Without a
        backup, begin in another root: restore a savepoint there, or process all intervals from `Pipeline.start` again.
        If the pipeline has a sink, first read docs/upgrade.md#ids-that-begin-again.
    """


class StateGapError(StateUnusable):
    """No checkpoint ends where the interval starts. The message names the command that fills the gap.

    What to do:
        Run the `cairn` command in the message: it runs the missing intervals in order.
    """


class NoSuchCheckpoint(StateGapError):
    """No retained checkpoint matches the request. The message names the retained checkpoints.

    What to do:
        Type `cairn checkpoints`, and name one of its checkpoints: by id, by the end of its interval, or `latest`.
    """


class StaleStateError(StateUnusable):
    """The checkpoint before the interval is stale. The message names the intervals to run again.

    What to do:
        Run the `cairn` command in the message: it runs the stale intervals again, in order. In Airflow, the task
        `process` waits up to a day (`wait_timeout`) for these runs before it fails. Its log has the command.
    """


class NotAsTried(StateUnusable):
    """A promotion computed another result for an interval than the trial that it promotes.

    Cairn does not commit this interval.

    What to do:
        Remove the trial with `cairn trials --remove`. Then try the code again with `cairn try`. See docs/trying.md.
    """


class ValidationRefused(StateUnusable):
    """Validation found an error in a checkpoint or in a prepared attempt.

    Cairn has quarantined the checkpoint, or will not commit the attempt.

    What to do:
        Read the findings in the log of the task `validate`. If the data are right, change the expectation. Otherwise
        repair the input or the code. Then clear the task `process` of the failed run, with its downstream tasks. `cairn
        status` shows the later intervals that must run again.
    """


# --- Fix the call: the pipeline, its options or its data must change. -------------------------------------------------


class UsageError(CairnError):
    """The call, the pipeline or the configuration is wrong. The same call will fail again.

    What to do:
        Change what the message names: an argument, the pipeline's declaration, a connection or a setting. Then clear
        the task.
    """


class UnsupportedFormat(UsageError):
    """Another release of Cairn wrote a file in a format that this release does not read.

    What to do:
        Leave the file unchanged: it is not damaged. Install the release of Cairn that the message names, or a newer
        one.
    """


class PermissionRefused(UsageError):
    """The storage denies access.

    What to do:
        Grant the right that the message names. Then repeat the command, or clear the task.
    """


class BehindLink(PermissionRefused):
    """A path leads through a symbolic link out of the root. Cairn changes nothing behind such a link.

    What to do:
        Remove the symbolic link, or put the folder itself in place of the link. See docs/storage.md#symbolic-links.
    """


class StateSchemaError(UsageError):
    """A state's declaration can't be stored or conflicts with the recorded schema of the state.

    What to do:
        Change the declaration in the processor's `init`. docs/state-schema.md lists the changes that are allowed, and
        shows how to rename a field.
    """


class StateTypeError(UsageError, TypeError):
    """A value does not fit its state's schema. The message names the state, the field and both types.

    What to do:
        Convert the value in the processor to the type of the field. To store NULL where Spark stores NULL, set
        `Pipeline(on_type_mismatch="null")`. If this error stops an interval, Cairn raises it as a `ProcessorError`.
    """


class KeyTypeError(UsageError):
    """A key column has a type that can't be a key, such as a map or a string with a collation.

    What to do:
        Cast the key column in the source to a type that docs/reference.md#keys lists, such as STRING or BIGINT.
    """


# --- Fix the pipeline's code or its input: the code or the input of an interval is wrong. -----------------------------


class UserCodeError(CairnError):
    """The pipeline's own code failed on the data of an interval. Nothing was committed.

    What to do:
        Repair the pipeline's code or its input. Then run the interval again, or clear the task.
    """


class SourceError(UserCodeError):
    """The input of an interval is missing, unreadable, or lacks a column.

    What to do:
        If the input has not arrived yet, wait: Airflow retries the task. Otherwise repair the file, or the source's
        code, and clear the task. Spark's stack trace is in the log of the task or of the Spark Connect server. If the
        variable `CAIRN_SPARK_LOG` is `error`, `cairn run` prints it.
    """


class InputNotReady(SourceError):
    """An interval reads a result of another pipeline that is not committed yet, or that is out of date.

    What to do:
        Wait until the other pipeline has committed; without Airflow, run it first. The message has the command that
        shows what the other pipeline waits for.

    Attributes:
        awaited: What a waiting task needs to look again (`chains.pin_inputs.Awaited`).
    """

    def __init__(self, message: str, awaited: Any = None) -> None:
        super().__init__(message)
        self.awaited = awaited


class ProcessorError(UserCodeError):
    """The processor raised an exception or yielded a wrong result.

    What to do:
        The message names the call, the key and the interval, and has the traceback of your code. Repair the processor,
        and test it with `PipelineTester` (docs/testing.md). Then clear the task.
    """


# --- Report a bug: the cause is a bug in Cairn. -----------------------------------------------------------------------


class InvariantViolated(CairnError):
    """An internal check of Cairn failed. The cause is a bug of Cairn.

    What to do:
        Report the message and the output of `cairn check` as a bug. Change no file of the pipeline by hand.
    """


# --- Internal results of the storage: Cairn's own code handles these errors, so you should not see them. --------------


class StorageError(CairnError):
    """Base class of errors of the storage that Cairn's own code must handle.

    What to do:
        Report the message and the output of `cairn check` as a bug.
    """


class NotFound(StorageError):
    """The storage has no file with the path that the message names.

    What to do:
        Report the message and the output of `cairn check`, which names missing files, as a bug.
    """


class AlreadyExists(StorageError):
    """A new file could not be created, because a file already has that path.

    What to do:
        Run the command again. Report the message as a bug, even if the second run succeeds.
    """


class PreconditionFailed(StorageError):
    """A write or a deletion failed, because another process has changed the file.

    What to do:
        Run the command again. Report the message as a bug, even if the second run succeeds.
    """
