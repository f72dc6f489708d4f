"""The content of the JSON files beside the log: indexes and marks of checkpoints, savepoints, and trials.

Like those in `records.py`, these classes only hold values.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from state_backend.values.frozen import frozen
from state_backend.values.handles import Handle
from state_backend.values.intervals import Interval
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.records import Content, Kind, OutputFile, ValidationMode


@frozen
class Settled:
    """The content of a file in `settled/commits/`: the effect of an earlier commit on one interval.

    The path of the file repeats id, kind and interval. A listing of paths therefore answers most questions.

    Attributes:
        kind: The kind of the commit; `replaced` if the commit is of another interval and replaced the output that an
            older commit had made of this interval.
        outputs: The output files of the commit. They are repeated here, because retention may drop the commit's record
            while its output is current.
        collected: True if a later commit replaced these output files, and a clean-up has deleted them.
    """

    id: int
    kind: Kind | Literal["replaced"]
    interval: Interval
    outputs: tuple[OutputFile, ...] = ()
    collected: bool = False


@frozen
class AttemptEnd:
    """The content of a file in `settled/attempts/`: which record ended an attempt.

    Attributes:
        id: The id of the attempt's commit, or of the record of the sweep that abandoned the attempt.
    """

    attempt: str
    id: int


@frozen
class Head:
    """The content of `HEAD.json`: an id that the log contains.

    Writers update the file after commits. The id may be an older one, so readers look for later records.
    """

    id: int


@frozen
class Names:
    """The content of a file in `settled/names/`: names of files that a listing of a folder must not miss.

    On a network disk, a listing may be some seconds old. Code that lists the folder adds these names to the result. The
    folder may contain more files.

    Attributes:
        folder: The path of the folder, with a `/` at the end.
    """

    folder: str
    names: tuple[str, ...]


@frozen
class Quarantine:
    """The mark on a checkpoint that validation or a person refused.

    Attributes:
        reason: Why the checkpoint is refused, for people.
        findings: A sentence for each problem that validation found.
        dropped: True after a person has dropped the checkpoint: the next commit does not retain it.
        releasing: True while a release is under way. Until its end, the quarantine counts, and commits are refused.
    """

    id: int
    reason: str
    findings: tuple[str, ...] = field(default=())
    dropped: bool = False
    releasing: bool = False


@frozen
class Released:
    """The content of a quarantine mark after a release: the checkpoint counts as usable again.

    The mark stays, because a missing mark would look like a lost file.
    """

    id: int
    reason: str
    findings: tuple[str, ...] = field(default=())


@frozen
class Refused:
    """The mark on a prepared attempt that validation refused. The attempt is never committed."""

    attempt: str
    reason: str
    findings: tuple[str, ...] = field(default=())


@frozen
class Validated:
    """The mark on a checkpoint that passed validation.

    For each mode, retention keeps the newest checkpoint that has this mark. Checkpoints that are quarantined or descend
    from a quarantined checkpoint do not count.

    Attributes:
        mode: `fast` if validation checked the files, `full` if validation also restored and checked the state.
    """

    id: int
    mode: ValidationMode


@frozen
class Lease:
    """A file that keeps a checkpoint's files while a long reader reads them.

    Attributes:
        seconds: Seconds that the lease lasts after its last write. The reader renews the lease, or ends it early by
            deleting the file.
        holder: A text for people: the reader, its host and its process.
    """

    id: int
    lease: str
    seconds: int
    holder: str


@frozen
class Published:
    """The content of a file in `published/`: the sink has the interval's output of commit `id`, or need not get it."""

    id: int
    interval: Interval


@frozen
class CanonicalFile:
    """One Parquet file of a canonical savepoint, with rows of one state from one shard.

    Rows ascend by key group and key, within each file and from file to file in `Savepoint.files`.

    Attributes:
        state: The name of the state; `$timers` for the timers.
    """

    state: str
    shard: int
    key_groups: KeyGroupRange
    handle: Handle
    rows: int


@frozen
class Savepoint:
    """A copy of the state that belongs to the user. Every handle is relative to the savepoint's own folder.

    Attributes:
        format: `native`: the content's shards hold the state. `canonical`: `files` do, and the content has no shards.
    """

    savepoint: str
    format: Literal["native", "canonical"]
    checkpoint_id: int
    content: Content
    files: tuple[CanonicalFile, ...] = ()


@frozen
class Claim:
    """The content of `claimed.json` in a savepoint's folder: the pipeline that has taken over the savepoint.

    Only this pipeline restores the savepoint from then on, because it may delete the files.

    Attributes:
        owner: The URL of the pipeline's folder.
        attempt: The uuid of the attempt that restores the savepoint.
    """

    savepoint: str
    owner: str
    attempt: str


@frozen
class TrialBase:
    """The state that a trial began from.

    Attributes:
        id: A checkpoint of production or, with `savepoint`, of the pipeline from which the savepoint was taken.
        digest: The digest of the state.
        savepoint: The URL of the savepoint; None if the trial began from a checkpoint.
    """

    id: int
    digest: int
    savepoint: str | None = None


@frozen
class Trial:
    """The record of a trial: intervals of a pipeline that other code processes, in a root of their own.

    Attributes:
        code: The tried pipeline, as module:NAME.
        code_hash: The hash of the tried code, as in `Content`.
        code_version: The name of the tried code for people, as in `Content`.
        span: The time from the start of the first interval to the end of the last interval.
        length_ms: The length of the first interval in milliseconds.
        attempt: The uuid of the attempt that forked production's state into the trial. It tells trials of one name
            apart.
        base: The state that the trial began from; None for empty state.
        ends_ms: The time from which a sweep removes the trial, in milliseconds since the epoch.
    """

    name: str
    pipeline: str
    code: str
    code_hash: str
    code_version: str | None
    span: Interval
    length_ms: int
    attempt: str
    base: TrialBase | None
    ends_ms: int
