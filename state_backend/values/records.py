"""What is written down: the content of attempts, checkpoints, tombstones and marks.

These are values only. ``formats/record_codec.py`` turns them into bytes and back, strictly; ``checkpoint/`` decides about
them. Times are UTC datetimes, durations whole microseconds, digests unsigned 64-bit sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from state_backend.values.errors import UsageError
from state_backend.values.handles import Handle
from state_backend.values.intervals import Interval
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.retention import RetentionPolicy

Kind = Literal["interval", "consolidate", "restore", "forget", "sweep"]
StateKind = Literal["value", "list", "map", "timers"]
OnRerun = Literal["refuse", "filter"]
TimeMode = Literal["none", "processing", "event"]
ValidationMode = Literal["fast", "full"]

# --- what a shard's state is ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaVersion:
    """One schema that values of a state were written with. Schemas are Spark's ``StructType`` as JSON."""

    version: int
    value: dict[str, Any]
    user_key: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDescriptor:
    """A state variable. ``state_id`` is its byte in every key; it is never given to another name."""

    name: str
    kind: StateKind
    state_id: int
    ttl_ms: int | None
    versions: tuple[SchemaVersion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFile:
    """A RocksDB file: the name that the DB knows it by, and the shared file that holds its bytes. The number in the name
    is local: two restores of one checkpoint write different files under the same number."""

    name: str
    handle: Handle


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineFile:
    """A small file that belongs to this manifest alone, carried in it."""

    name: str
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Changes that a shard has beside its files (``formats/changelog.py``): in a shared file, or small ones inline.

    ``changes``: deleted ranges and entries. ``content_bytes``: their keys and values before compression, which is what a
    replay costs and thresholds count.
    """

    handle: Handle | None
    data: bytes | None
    changes: int
    content_bytes: int

    def __post_init__(self) -> None:
        if (self.handle is None) == (self.data is None):
            raise UsageError("a changelog segment is either in a file or inline: expected one of handle and data")

    @property
    def size_bytes(self) -> int:
        """Bytes as stored."""
        return self.handle.size_bytes if self.handle is not None else len(self.data or b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyGroupState:
    """What one key group holds: entries by state name (values, list elements, map entries; timers are ``$timers``), and
    the sum of the hashes of all of them.

    ``size_bytes``: keys and values of all its records, indexes and positions of lists included, before compression, as
    ``layout.record_bytes`` counts them; None: not counted."""

    key_group: int
    entries: dict[str, int]
    digest: int
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardManifest:
    """All that is needed to open one shard: files, then segments to replay in their order. ``key_group_states`` lists the
    non-empty key groups, ascending."""

    shard: int
    key_groups: KeyGroupRange
    files: tuple[LocalFile, ...]
    inline_files: tuple[InlineFile, ...]
    segments: tuple[Segment, ...]
    key_group_states: tuple[KeyGroupState, ...]

    @property
    def handles(self) -> tuple[Handle, ...]:
        """Every shared file that the shard needs."""
        return (*(f.handle for f in self.files), *(s.handle for s in self.segments if s.handle is not None))

    @property
    def files_bytes(self) -> int:
        """Bytes of shared and inlined files, without segments."""
        return sum(f.handle.size_bytes for f in self.files) + sum(len(f.data) for f in self.inline_files)

    @property
    def size_bytes(self) -> int:
        """Bytes of state, all included."""
        return self.files_bytes + sum(s.size_bytes for s in self.segments)

    @property
    def entries(self) -> int:
        """Entries of all states."""
        return sum(sum(s.entries.values()) for s in self.key_group_states)

    @property
    def digest(self) -> int:
        """Of the shard's entries; see `KeyGroupState`."""
        return sum(s.digest for s in self.key_group_states) % 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardChanges:
    """What is other than in a manifest's file since that was written: all segments that there are now, and the key groups
    that changed, ascending; one that became empty has no entries."""

    segments: tuple[Segment, ...]
    key_group_states: tuple[KeyGroupState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InSegment:
    """Where in a segment's file a manifest begins, and what that segment, the last one of that manifest, has."""

    offset: int
    changes: int
    content_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineShard:
    """A shard whose manifest lies in the record. The fields that are None are in the JSON, beside those of `FiledShard`."""

    shard: int
    inline: ShardManifest
    manifest: None = None
    changes: None = None
    in_segment: None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FiledShard:
    """A shard whose manifest lies in the file ``manifest``, which several checkpoints may share.

    ``changes``: what differs from that file; None: nothing. ``in_segment``: the file is a changelog segment with the manifest at
    its end; None: it holds the manifest alone.
    """

    shard: int
    manifest: Handle
    changes: ShardChanges | None = None
    in_segment: InSegment | None = None
    inline: None = None


# A shard of a checkpoint, as its record names it. `manifest.manifest_of` reads either form.
ShardRef = InlineShard | FiledShard


# --- what an attempt did -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRef:
    """Which try of which Airflow run this is. Order of tries within one run: (clear_number, try_number)."""

    run_id: str
    clear_number: int
    try_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """What the caller allowed at begin; recorded, since it explains the state. ``allow_quarantined`` is for rewinds and forks:
    somebody vouches for the state, so that marks on what it was made from count no more. ``replace_overlapping``: output of
    intervals that overlap this one, cut otherwise, is no longer current once this one is committed."""

    allow_gap: bool = False
    allow_stale_base: bool = False
    allow_quarantined: bool = False
    replace_overlapping: bool = False

    @classmethod
    def from_texts(cls, given: Mapping[str, bool | str]) -> Permissions:
        """Read permissions whose values may come from templates: true, false, or empty for false.

        Raises:
            UsageError: A name is no permission, or a value is none of these.
        """
        names = {field.name for field in fields(cls)}
        for name, value in given.items():
            if name not in names:
                raise UsageError(f"{name} is no permission; expected some of {', '.join(sorted(names))}")
            if str(value).strip().lower() not in ("true", "false", ""):
                raise UsageError(f"{name} is {value!r}; expected true or false")
        return cls(**{name: str(value).strip().lower() == "true" for name, value in given.items()})


NO_PERMISSIONS = Permissions()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """One immutable Parquet file of an attempt; late rows lie apart. ``schema_version``: which of the ``output_schemas`` of its
    record, from 1; None: not recorded (late rows, and attempts that are not committed)."""

    handle: Handle
    rows: int
    late: bool = False
    schema_version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalTime:
    """The clock of the interval, and the watermarks that the one after it begins with: handlers see ``watermark_ms``, rows up to
    ``late_watermark_ms`` are late (None: those up to ``watermark_ms``). Both are None outside event time. ``zone``: the time zone
    in which the processor ran; None: not recorded."""

    mode: TimeMode
    processing_time_ms: int
    watermark_ms: int | None
    late_watermark_ms: int | None = None
    zone: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts of the interval and of the state that it left.

    ``changed_bytes``: keys and values of the entries that the interval changed; ``uploaded_bytes``: what was written to the
    storage for them; ``state_bytes``: all files of the state; ``state_files``: how many there are; ``keys``: entries of the
    fullest value state, so the keys that hold it, and 0 where a pipeline has none. ``downloaded_bytes`` and ``cached_bytes``: what
    the restore took from the storage, and from the caches of hosts.
    """

    input_rows: int
    output_rows: int
    late_rows: int
    keys_touched: int
    keys: int
    entries: int
    changed_bytes: int
    uploaded_bytes: int
    uploaded_files: int
    state_bytes: int
    state_files: int
    downloaded_bytes: int = 0
    cached_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgottenKey:
    """A key that `cairn forget` removed, without the key itself.

    Attributes:
        forget: The uuid of the attempt that removed the key.
        salt: Random bytes as hex digits, new for each record.
        key_hash: SHA-256, as hex digits, of the salt's bytes and the encoded key.
        key_group: The key's group among ``max_parallelism`` groups.
        until_ms: The latest end of an interval that was committed before, in milliseconds since the epoch. Rows of earlier time may
            bring the key back.
        on_rerun: What happens to an attempt that would bring the key back: it is refused, or its shards leave the key out.
    """

    forget: str
    salt: str
    key_hash: str
    key_group: int
    max_parallelism: int
    until_ms: int
    on_rerun: OnRerun


@dataclass(frozen=True, slots=True, kw_only=True)
class RewrittenOutput:
    """All output files of commit ``id`` of ``interval`` without the rows of forgotten keys.

    ``replaces``: the paths of the earlier files that have such rows.
    """

    id: int
    interval: Interval
    outputs: tuple[OutputFile, ...]
    replaces: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """The part of a content about forgotten keys.

    Attributes:
        keys: The keys that a ``forget`` record removes. Of a ``restore`` record or savepoint: the keys that its state never holds, since
            they were removed where the state comes from.
        drops: The checkpoints that the commit drops, whatever the retention policy says, because their files may hold the keys.
        rewritten: The output files that replace those of earlier commits.
    """

    keys: tuple[ForgottenKey, ...]
    drops: tuple[int, ...] = ()
    rewritten: tuple[RewrittenOutput, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What an attempt made, before and after it is committed. ``base_id`` is None for a start from empty.

    ``source_position`` is the source's own JSON; ``durations_us`` are microseconds by phase, where a shard's phases are those of the
    slowest shard; ``code_hash`` is over the sources of the processor and what it imports from the user's own modules; ``worker_pids`` are the processes that wrote.
    ``restored_from``: the id of the savepoint whose state a ``restore`` record is. ``retention``: the policy by which the commit chose
    what stays, and by which later ones do until an interval brings another; None: the default of before it was recorded.
    ``output_schema``: that of output rows, as
    Spark reads it from the files, a ``StructType`` as JSON; None in older attempts, and once it is committed, since the record's
    ``output_schemas`` have it. ``input_hash``: 32 hex digits over code, settings and input (`cairn.operations.plan_reuse.input_hash`): an
    interval with equal ones from an equal base has the same result; None: that can't be told.
    ``code_version``: what people call that code: the pipeline's ``version``, else what git says of its folder; None: neither.
    ``forget``: forgotten keys; None: the content says nothing of any. ``filtered``: the uuids of the forgets whose keys the shards of
    this attempt left out.
    """

    kind: Kind
    pipeline: str
    pipeline_start_ms: int
    interval: Interval
    run: RunRef
    attempt: str
    base_id: int | None
    permissions: Permissions
    parallelism: int
    max_parallelism: int
    key_schema: dict[str, Any]
    states: tuple[StateDescriptor, ...]
    time: LogicalTime
    source_position: dict[str, Any]
    code_hash: str
    totals: Totals
    digest: int
    shards: tuple[ShardRef, ...]
    outputs: tuple[OutputFile, ...]
    durations_us: dict[str, int]
    worker_pids: tuple[int, ...]
    restored_from: str | None = None
    retention: RetentionPolicy | None = None
    output_schema: dict[str, Any] | None = None
    input_hash: str | None = None
    code_version: str | None = None
    forget: Forget | None = None
    filtered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """All shards of an attempt have acked. ``h0`` is the highest id at its begin (0: none). ``written``: every state and output file
    of the attempt, so that a commit need not read all manifests; None: not recorded."""

    h0: int
    content: Content
    written: tuple[Handle, ...] | None = None


# --- the log ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Retained:
    """A checkpoint that is completed as of the record that lists it, and the id that made it stale, if any."""

    id: int
    stale_by: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpublished:
    """The sink hook may still have to run: for ``interval``, whose output commit ``id`` made or replaced."""

    interval: Interval
    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Superseded:
    """Commits ``by`` of the same interval, later than checkpoint ``id``, left another state."""

    id: int
    by: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What planning asks of a retained checkpoint, so that its record need not be read. Fields as in `Content` and `Tombstone`;
    ``quarantine_allowed``: whoever restored it was allowed to go back to a quarantined one, whose marks count no more. ``descriptors_hash``: as in `Tombstone`."""

    id: int
    kind: Kind
    interval: Interval
    attempt: str
    base_id: int | None
    quarantine_allowed: bool
    digest: int
    watermark_ms: int | None
    late_watermark_ms: int | None
    descriptors_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Checkpoint ``id`` is or descends from the quarantined checkpoint ``by``, the nearest one."""

    id: int
    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """A forgotten key, and the id of the record from which on no checkpoint holds the key's entries of before ``key.until_ms``."""

    id: int
    key: ForgottenKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a reader of the newest record still has to know of all records below it, so that it reads none of them.

    ``dropping``: ids below it that are no longer retained or whose output was replaced, and whose files may still be there.
    ``unpublished``: intervals whose mark in ``published/`` may be missing. ``superseded``: of the retained ids. ``marks``: the
    quarantined ids that were known; ``refused``: what they mean for the retained ids and for those that superseded one. ``levels``:
    the lengths of intervals that there are, as ``paths.SETTLED_DAYS`` numbers them.

    ``kept``: all that are retained, the record itself included, by id. ``latest_end_ms``: the latest end of an interval that was ever committed, this commit's included, so that
    nothing overlaps an interval that starts there. ``replaced_outputs``: of the retained and the dropping ids those whose output is no
    longer current. ``settled``: how many files in ``settled/commits/`` this commit and all below have, so that a listing of all tells
    whether one is lost. ``forgotten``: every forgotten key, the record's own included.
    """

    dropping: tuple[int, ...] = ()
    unpublished: tuple[Unpublished, ...] = ()
    superseded: tuple[Superseded, ...] = ()
    marks: tuple[int, ...] = ()
    refused: tuple[Judged, ...] = ()
    levels: tuple[int, ...] = ()
    kept: tuple[Kept, ...] = ()
    latest_end_ms: int = -(2**62)
    replaced_outputs: tuple[int, ...] = ()
    settled: int = 0
    forgotten: tuple[Forgotten, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One entry of the log. The head (highest id) says which ids are completed: those in its ``retained``. ``reproduces``:
    the commit of the same interval that left the same state; then nothing became stale. ``output_schemas``: all that output of the
    pipeline has had up to here, oldest first; the newest commit's count for all files. ``replaced``: intervals of other cuts whose
    output is not current from here on."""

    id: int
    retained: tuple[Retained, ...]
    reproduces: int | None
    content: Content
    output_schemas: tuple[dict[str, Any], ...] = ()
    replaced: tuple[Interval, ...] = ()
    summary: Summary = field(default_factory=Summary)

    @property
    def interval(self) -> Interval:
        """The content's."""
        return self.content.interval


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRecord:
    """Names the attempts that a sweep abandons: none of them can be committed after it. It is no checkpoint, but it is in
    the log, and carries ``retained`` forward."""

    id: int
    retained: tuple[Retained, ...]
    sweep: str
    abandoned: tuple[str, ...]
    summary: Summary = field(default_factory=Summary)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """What stays of a record that is no longer retained: enough for lineage, staleness, fencing and current output. ``base_id``
    is None also where its marks count no more. ``replace_overlapping`` is its permission. ``outputs``: the output
    files that the commit made, from which a sweep can write a lost ``Settled`` anew; a clean-up may have deleted these files.
    ``input_hash``: the content's."""

    id: int
    kind: Kind
    interval: Interval
    run: RunRef
    attempt: str
    base_id: int | None
    digest: int
    watermark_ms: int | None
    descriptors_hash: str
    reproduces: int | None
    outputs: tuple[OutputFile, ...]
    late_watermark_ms: int | None = None
    replace_overlapping: bool = False
    input_hash: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What a commit below the newest did to one interval; its path says the same, so that a listing answers most questions.

    ``kind``: the commit's, or ``replaced``: it took the output of that interval away. ``outputs``: current output outlives the
    record, and its files are named here. ``collected``: they were replaced, and the files are deleted.
    """

    id: int
    kind: Kind | Literal["replaced"]
    interval: Interval
    outputs: tuple[OutputFile, ...] = ()
    collected: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """Where the log says what became of an attempt: the record of its commit, or of the sweep that abandoned it."""

    attempt: str
    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The log has at least this id. Rewritten after commits, and nobody relies on it being the newest."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names of files that a listing of the folder must not miss. Code that lists the folder adds these names to the listing, since the
    listing may be some seconds old. The folder may have more files."""

    folder: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """A checkpoint that validation refused, and why."""

    id: int
    reason: str
    findings: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A prepared attempt that validation refused, and why: it is never committed."""

    attempt: str
    reason: str
    findings: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """A checkpoint that validation found right: its files, or its restored state too. Retention keeps the newest usable one of
    each mode."""

    id: int
    mode: ValidationMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Somebody reads this checkpoint, and its files stay for ``seconds`` after the lease was last written, or until it is given back.
    ``lease``: a uuid. ``holder``: for people, what reads it and where."""

    id: int
    lease: str
    seconds: int
    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The sink hook has run for this checkpoint."""

    id: int
    interval: Interval


# --- savepoints ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalFile:
    """One Parquet file of a canonical savepoint: rows of ``state`` (``$timers`` for the timers) in the order of their key
    groups and keys, from one shard, behind those of the file listed before it. ``key_groups``: the shard's."""

    state: str
    shard: int
    key_groups: KeyGroupRange
    handle: Handle
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Savepoint:
    """Self-contained and owned by the user: every handle is relative to the savepoint's own directory. Native: the state is
    in the content's shards. Canonical: in ``files``, and the content has no shards."""

    savepoint: str
    format: Literal["native", "canonical"]
    checkpoint_id: int
    content: Content
    files: tuple[CanonicalFile, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Lies in a savepoint that somebody took over: ``owner`` is the URL of their pipeline's folder, ``attempt`` the one that
    restores it. Nobody else restores it from then on, since the owner may delete it."""

    savepoint: str
    owner: str
    attempt: str


# --- trials --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialBase:
    """What a trial began from: checkpoint ``id`` of production, or of the pipeline that the savepoint at the URL ``savepoint`` was
    taken of, with the digest of its state."""

    id: int
    digest: int
    savepoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Intervals of a pipeline that were run with other code beside it, in a root of their own.

    ``code``: module:NAME of the pipeline that was tried, with its hash and version as in `Content`. ``span``: from the start of the
    first interval to the end of the last one, each ``length_ms`` long. ``attempt``: the uuid of the fork. ``base``: None for a start
    from empty. ``ends_ms``: from then on a sweep removes it, in milliseconds since the epoch.
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
