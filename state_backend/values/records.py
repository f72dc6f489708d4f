"""The content of the log and of attempts, as JSON files: shards, results of attempts, records, tombstones.

These classes only hold values. `formats/record_codec.py` encodes and decodes them, and `checkpoint/` decides about
them. Times are UTC datetimes, durations are whole microseconds, and digests are unsigned 64-bit sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any, Literal

from state_backend.values.errors import UsageError
from state_backend.values.frozen import frozen
from state_backend.values.handles import Handle
from state_backend.values.inputs import Followed, FreshAt, InputRead, Untracked
from state_backend.values.intervals import Interval, from_ms
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.retention import RetentionPolicy
from state_backend.values.schedule import Schedule

Kind = Literal["interval", "consolidate", "restore", "forget", "sweep"]
StateKind = Literal["value", "list", "map", "timers"]
OnRerun = Literal["refuse", "filter"]
TimeMode = Literal["none", "processing", "event"]
ValidationMode = Literal["fast", "full"]

# --- The state of a shard. --------------------------------------------------------------------------------------------


@frozen
class SchemaVersion:
    """One schema with which values of a state were written. Schemas are Spark's `StructType` as JSON.

    Attributes:
        version: The number of the schema, which each entry stores.
        user_key: The schema of the map's keys; None if the state is no map.
    """

    version: int
    value: dict[str, Any]
    user_key: dict[str, Any] | None


@frozen
class StateDescriptor:
    """The recorded declaration of one state variable.

    Attributes:
        state_id: The byte that stands for the state in every stored key. No state with another name gets this byte.
        ttl_ms: Milliseconds until an entry expires; None if entries never expire.
        versions: All schemas that entries of the state may have been written with.
    """

    name: str
    kind: StateKind
    state_id: int
    ttl_ms: int | None
    versions: tuple[SchemaVersion, ...]


@frozen
class LocalFile:
    """A RocksDB file of one shard, and the file in `shared/` that holds its bytes.

    Attributes:
        name: The name of the file inside the RocksDB store, like `000012.sst`. The number is local to one store: two
            restores of one checkpoint write different files with the same number.
    """

    name: str
    handle: Handle


@frozen
class InlineFile:
    """A small RocksDB file whose bytes the manifest itself contains. No other manifest shares the file."""

    name: str
    data: bytes


@frozen
class Segment:
    """The changes of one interval to one shard (`formats/changelog.py`), in a file below `shared/`.

    The bytes of a small segment are inline instead: the manifest itself contains them.

    Attributes:
        handle: The file below `shared/`; None for an inline segment.
        data: The bytes of an inline segment; None for a segment in a file.
        content_bytes: The size of the changed keys and values before compression. This size determines the cost of a
            replay, and the thresholds for consolidation apply to it.
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
        return self.handle.size_bytes if self.handle is not None else len(self.data or b"")


@frozen
class KeyGroupState:
    """The counts and the digest of one key group.

    Attributes:
        entries: The number of values, list elements and map pairs by state name. The timers count as `$timers`.
        digest: The sum of the hashes of all entries.
        size_bytes: The size of all stored keys and values before compression, including those of indexes and of the
            positions of lists; None if it was not counted.
    """

    key_group: int
    entries: dict[str, int]
    digest: int
    size_bytes: int | None = None


@frozen
class ShardManifest:
    """All that is needed to open one shard: the files, and the segments to replay on top of them in order.

    Attributes:
        segments: The changelog segments, in the order of their replay.
        key_group_states: The non-empty key groups, ascending.
    """

    shard: int
    key_groups: KeyGroupRange
    files: tuple[LocalFile, ...]
    inline_files: tuple[InlineFile, ...]
    segments: tuple[Segment, ...]
    key_group_states: tuple[KeyGroupState, ...]

    @property
    def handles(self) -> tuple[Handle, ...]:
        """The files below `shared/` that a restore of the shard reads: RocksDB files and changelog segments.

        Files and segments whose bytes the manifest itself contains are left out.
        """
        return (*(f.handle for f in self.files), *(s.handle for s in self.segments if s.handle is not None))

    @property
    def files_bytes(self) -> int:
        """The bytes of the shard's RocksDB files, those below `shared/` and those in the manifest, without segments."""
        return sum(f.handle.size_bytes for f in self.files) + sum(len(f.data) for f in self.inline_files)

    @property
    def size_bytes(self) -> int:
        return self.files_bytes + sum(s.size_bytes for s in self.segments)

    @property
    def entries(self) -> int:
        return sum(sum(s.entries.values()) for s in self.key_group_states)

    @property
    def digest(self) -> int:
        """The digest of the shard: the sum of its key groups' digests modulo 2**64."""
        return sum(s.digest for s in self.key_group_states) % 2**64


@frozen
class ShardChanges:
    """The changes of a shard since its manifest file was written by an earlier checkpoint.

    A record may name an earlier checkpoint's manifest file and add these changes. So a commit need not write the whole
    manifest again.

    Attributes:
        key_group_states: The key groups that changed, ascending. One that became empty is listed without `entries`.
    """

    segments: tuple[Segment, ...]
    key_group_states: tuple[KeyGroupState, ...]


@frozen
class InSegment:
    """The place of a manifest that is stored at the end of the file of the shard's newest changelog segment.

    Such a manifest lists all segments of the shard but the newest: it can't contain the checksum of its own file. The
    reader appends the newest segment to the manifest, with the numbers in this class.

    Attributes:
        offset: The byte at which the manifest begins.
    """

    offset: int
    changes: int
    content_bytes: int


@frozen
class InlineShard:
    """A shard of a checkpoint whose manifest lies in the record itself.

    The fields that are always None appear in the JSON, so that it has the same fields as that of a `FiledShard`.
    """

    shard: int
    inline: ShardManifest
    manifest: None = None
    changes: None = None
    in_segment: None = None


@frozen
class FiledShard:
    """A shard of a checkpoint whose manifest lies in a file, which several checkpoints may share.

    Attributes:
        changes: The changes of the shard since an earlier checkpoint wrote the file; None if there are none.
        in_segment: The place of the manifest in a changelog segment; None if the file holds only the manifest.
        inline: Always None. `InlineShard` has the manifest here.
    """

    shard: int
    manifest: Handle
    changes: ShardChanges | None = None
    in_segment: InSegment | None = None
    inline: None = None


# A shard in a checkpoint's record. `manifest.manifest_of` reads the manifest of either class.
ShardRef = InlineShard | FiledShard


# --- The result of an attempt. ----------------------------------------------------------------------------------------


@frozen
class RunRef:
    """One try of one Airflow run. The pair (clear_number, try_number) orders the tries of a run."""

    run_id: str
    clear_number: int
    try_number: int


def own_run(run_id: str) -> RunRef:
    return RunRef(run_id=run_id, clear_number=0, try_number=1)


@frozen
class Permissions:
    """The permissions with which an attempt began. The record keeps them, since they explain the state.

    Attributes:
        allow_gap: Start from the newest earlier usable checkpoint if no checkpoint ends where the interval starts, or
            all that end there are quarantined.
        allow_stale_base: Start from a stale checkpoint.
        allow_quarantined: For rewinds and forks: use a quarantined checkpoint. Quarantine marks on the used checkpoint
            and its bases do not apply to the new checkpoint.
        replace_overlapping: Replace the output of overlapping intervals that have other boundaries. Their output is no
            longer current after the commit. In the record of a rewind: the output of later intervals is no longer
            current either (`retract_output`).
    """

    allow_gap: bool = False
    allow_stale_base: bool = False
    allow_quarantined: bool = False
    replace_overlapping: bool = False

    @classmethod
    def from_texts(cls, given: Mapping[str, bool | str]) -> Permissions:
        """Return the permissions from bools or texts by name; a Jinja template gives true, false, or nothing."""
        names = {field.name for field in fields(cls)}
        for name, value in given.items():
            if name not in names:
                raise UsageError(f"{name} is not a permission; expected some of {', '.join(sorted(names))}")
            if str(value).strip().lower() not in ("true", "false", ""):
                raise UsageError(f"{name} is {value!r}; expected true or false")
        return cls(**{name: str(value).strip().lower() == "true" for name, value in given.items()})


NO_PERMISSIONS = Permissions()


@frozen
class OutputFile:
    """One immutable Parquet file of an attempt, with output rows or late rows.

    Attributes:
        schema_version: The position, from 1, of the file's schema in the newest record's `output_schemas`, or in its
            `input_schemas` for late rows. None before the commit, and for files of releases that did not record it.
        digest: The digest of the rows' values (`formats/content_digest.py`). None for files of releases that did not
            record it.
    """

    handle: Handle
    rows: int
    late: bool = False
    schema_version: int | None = None
    digest: int | None = None


@frozen
class LogicalTime:
    """The clock of an interval, and the watermarks with which the next interval begins.

    Attributes:
        watermark_ms: The watermark that handlers of the next interval see; None outside event time.
        late_watermark_ms: Rows of the next interval up to this event time are late. None means `watermark_ms`.
        zone: The time zone in which the processor ran; None if it was not recorded.
        event_zone: The time zone of event times, watermarks and timers; "UTC" if event times are instants. None outside
            event time, or if it was not recorded.
    """

    mode: TimeMode
    processing_time_ms: int
    watermark_ms: int | None
    late_watermark_ms: int | None = None
    zone: str | None = None
    event_zone: str | None = None

    @property
    def late_until_ms(self) -> int | None:
        return self.watermark_ms if self.late_watermark_ms is None else self.late_watermark_ms

    @property
    def fired_until_ms(self) -> int:
        """The time up to which timers fired in the interval, in milliseconds since the epoch.

        With `Pipeline(watermark="observed")`, this is `late_watermark_ms`: the watermark that the base recorded.
        """
        return (self.late_until_ms or 0) if self.mode == "event" else self.processing_time_ms


@frozen
class Totals:
    """Counts of an interval and of the resulting state.

    Attributes:
        output_rows: Rows of output, without late rows.
        late_rows: Late rows.
        keys: The number of keys in the value state with the most entries; 0 without a value state.
        changed_bytes: Size of the keys and values of the entries that the interval changed.
        uploaded_bytes: Bytes of state that the interval wrote to the storage.
        state_bytes: Size of all files of the state.
        state_files: Number of files of the state.
        downloaded_bytes: Bytes that the restore of the base read from the storage.
        cached_bytes: Bytes that the restore of the base took from the hosts' file caches.
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


@frozen
class ForgottenKey:
    """A key that `cairn erase` removed, without the key itself.

    Attributes:
        forget: The uuid of the attempt that removed the key.
        salt: Random bytes as hex digits, new for each record, so that equal keys have different hashes in other
            records.
        key_hash: SHA-256, as hex digits, of the salt's bytes and the encoded key.
        until_ms: The latest end of all intervals that were committed before the removal, in milliseconds since the
            epoch. A re-run of an interval that starts before this time may read rows with the key, and so bring the key
            back.
        on_rerun: The effect on such a re-run. "refuse": it is refused. "filter": its shards leave the key out.
    """

    forget: str
    salt: str
    key_hash: str
    key_group: int
    max_parallelism: int
    until_ms: int
    on_rerun: OnRerun


@frozen
class RewrittenOutput:
    """The output of one commit after `cairn erase` has removed the rows of the forgotten keys.

    Attributes:
        outputs: All output files of the commit after the removal: new files, and old files without rows of these keys.
        replaces: The paths of the old files with rows of these keys, which are deleted.
    """

    id: int
    interval: Interval
    outputs: tuple[OutputFile, ...]
    replaces: tuple[str, ...]


@frozen
class Forget:
    """The part of a `Content` about keys that `cairn erase` removed.

    Attributes:
        keys: In a `forget` record: the keys that the commit removes. In a `restore` record or a savepoint: the keys
            that were removed from the state before it was copied.
        drops: The ids of the checkpoints that a `forget` commit drops, whatever the retention policy says, because
            their files may hold the keys.
        rewritten: The output of earlier commits without the rows of the keys.
    """

    keys: tuple[ForgottenKey, ...]
    drops: tuple[int, ...] = ()
    rewritten: tuple[RewrittenOutput, ...] = ()


@frozen
class Content:
    """The result of an attempt, before and after its commit.

    Attributes:
        interval: The processed interval, to whose end the state belongs.
        attempt: The uuid of the attempt.
        base_id: The checkpoint from which the attempt started; None for empty state.
        key_schema: The key columns, a `StructType` as JSON.
        source_position: The source's own JSON about the input that it read; empty if the source gave none.
        code_hash: A hash of the processor's source code and of the user's modules that the processor imports.
        outputs: The files of output rows and of late rows.
        durations_us: Microseconds by phase. The phases within a shard are those of the slowest shard.
        worker_pids: The processes that wrote the shards.
        restored_from: The savepoint that a `restore` record restored; None for all other records.
        retention: The policy by which the commit chose the retained checkpoints. Later commits use this policy until an
            interval brings another. None means the default policy of releases that did not record the policy.
        output_schema: The schema of the output rows as Spark reads it from the files, a `StructType` as JSON. None
            after the commit, because the record has the schema in `output_schemas`. Older attempts have None too.
        input_schema: The schema of the input rows and of late rows, in the same form. None after the commit, and in
            older attempts.
        input_hash: 32 hex digits that hash code, settings and input (`input_hash` of `plan_reuse.py`).
            Intervals with equal hashes and equal bases have equal results. None if the hash is unknown.
        code_version: The name of the code for people: the pipeline's `version`, or else git's description of the code's
            folder. None if both are missing.
        code: The pipeline's declaration as `module:NAME`, for printed commands. None if no module names the object.
        schedule: The schedule of the intervals from this commit on. None: neither the pipeline nor its DAG gave one.
        forget: The keys that a `forget` record removes, or that the restored state never holds; None for other records.
        filtered: The uuids of the attempts of `cairn erase` whose keys the shards of this attempt left out.
        inputs: What the attempt read of other pipelines. Empty without declared upstreams, and in older records.
        followed: The upstreams that this result or an earlier one has read, so that a reader of this record knows all.
        fresh_at: The ends of the logs if the attempt found no stale result; None if it found one or did not look.
        untracked: The pipelines that the source read without declaring them as upstreams, as far as Cairn noticed.
        group: The group of pipelines whose sinks are called together; None without one.
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
    input_schema: dict[str, Any] | None = None
    input_hash: str | None = None
    code_version: str | None = None
    code: str | None = None
    schedule: Schedule | None = None
    forget: Forget | None = None
    filtered: tuple[str, ...] = ()
    inputs: tuple[InputRead, ...] = ()
    followed: tuple[Followed, ...] = ()
    fresh_at: FreshAt | None = None
    untracked: tuple[Untracked, ...] = ()
    group: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the pipeline that the content records, by the names that `Pipeline` gives them."""
        return {
            "name": self.pipeline,
            "start": from_ms(self.pipeline_start_ms),
            "parallelism": self.parallelism,
            "max_parallelism": self.max_parallelism,
            "time_mode": self.time.mode,
            "time_zone": self.time.zone,
            "retention": self.retention,
            "schedule": self.schedule,
            "version": self.code_version,
        }


@frozen
class Prepared:
    """The content of `prepared.json`: an attempt whose shards have all finished.

    Attributes:
        h0: The highest id in the log when the attempt began; 0 for an empty log.
        written: Every file of the attempt, so that a commit need not read all manifests; None if not recorded.
    """

    h0: int
    content: Content
    written: tuple[Handle, ...] | None = None


# --- The log and the marks beside it. ---------------------------------------------------------------------------------


@frozen
class Retained:
    """A checkpoint that a record retains.

    Attributes:
        stale_by: The id of the commit that made the checkpoint stale; None if it is not stale.
    """

    id: int
    stale_by: int | None


@frozen
class Unpublished:
    """An interval whose output the user's sink may not have got yet.

    Attributes:
        id: The commit that made or replaced the interval's output.
    """

    interval: Interval
    id: int


@frozen
class Superseded:
    """A retained checkpoint that was replaced: its interval has a later commit with another state.

    Attributes:
        by: The ids of the later commits of the same interval that left another state.
    """

    id: int
    by: tuple[int, ...]


@frozen
class Kept:
    """The facts about a retained checkpoint that planning needs without reading the checkpoint's record.

    Attributes:
        base_id: The checkpoint from which the attempt started; None for empty state.
        quarantine_allowed: True if the commit had the permission `allow_quarantined`. Then quarantine of its base or of
            earlier ancestors does not apply to this checkpoint.
        watermark_ms: The watermark after the interval, as in `LogicalTime`.
        late_watermark_ms: The event time up to which rows of the next interval are late, as in `LogicalTime`.
        descriptors_hash: A hash of the state's declarations: names, kinds, schemas, expiry and key.
    """

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


@frozen
class Judged:
    """A checkpoint that is quarantined or descends from a quarantined checkpoint.

    Attributes:
        by: The id of the nearest quarantined checkpoint among the checkpoint itself and its ancestors.
    """

    id: int
    by: int


@frozen
class Forgotten:
    """A key that `cairn erase` removed, as the summary lists it.

    Attributes:
        id: The id of the record that removed the key. No checkpoint with this id or a higher one holds entries that the
            key got from rows before `key.until_ms`.
    """

    id: int
    key: ForgottenKey


@frozen
class Summary:
    """The facts about earlier records that a reader of the newest record needs without reading those records.

    Attributes:
        dropping: Earlier ids that are no longer retained or whose output was replaced, and whose files may still exist.
        unpublished: Intervals whose output the user's sink may not have got yet.
        marks: The ids of the checkpoints that had a file in `quarantine/` when the record was written, because
            validation refused them.
        refused: The checkpoints that are quarantined or descend from a quarantined checkpoint, among the retained
            checkpoints and the commits in `Superseded.by`. The commits in `by` are included because a replaced
            checkpoint is used again if all commits in its `by` are quarantined.
        levels: Numbers of the folder groups in `settled/commits/` that have files. The files are grouped by the length
            of their intervals: up to 1 day in group 0, up to 32 days in group 1, and so on (`paths.SETTLED_DAYS`). A
            look-up skips the folders of all other groups.
        kept: The facts about all retained checkpoints, by id, including the record itself.
        latest_end_ms: The latest end of all intervals that were ever committed, including this one. No committed
            interval overlaps an interval that starts at or after this time.
        replaced_outputs: The ids of commits whose output is no longer current. Only retained checkpoints and ids in
            `dropping` are listed.
        settled: The number of files that `settled/commits/` must have for this commit and all earlier ones. If a
            listing shows fewer, a file is lost.
        forgotten: All keys that `cairn erase` removed, including those of this record.
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


@frozen
class Record:
    """The file of one commit in the log. The newest record's `retained` lists the checkpoints that count.

    Attributes:
        reproduces: The earlier commit of the same interval that left the same state. In this case the commit made no
            checkpoint stale. None if there is no such commit.
        output_schemas: All schemas that the pipeline's output has had so far, oldest first. Readers use the list of the
            newest commit for all files.
        input_schemas: All schemas that the input has had so far, oldest first. Late rows have the input's columns.
        replaced: Other intervals whose output is no longer current after this commit: intervals with other boundaries
            that overlap, or the later intervals whose output a rewind retracts.
        summary: The facts about earlier records.
    """

    id: int
    retained: tuple[Retained, ...]
    reproduces: int | None
    content: Content
    output_schemas: tuple[dict[str, Any], ...] = ()
    input_schemas: tuple[dict[str, Any], ...] = ()
    replaced: tuple[Interval, ...] = ()
    summary: Summary = field(default_factory=Summary)

    @property
    def interval(self) -> Interval:
        return self.content.interval

    @property
    def rewritten(self) -> tuple[Interval, ...]:
        """The intervals whose output the commit of `cairn erase` rewrote."""
        forget = self.content.forget if self.content.kind == "forget" else None
        return () if forget is None else tuple(one.interval for one in forget.rewritten)


# `SweepRecord.sweep` is this text and a checkpoint's id in the record that the release of a quarantined checkpoint
# adds.
RELEASE = "release of checkpoint "


@frozen
class SweepRecord:
    """The record of a sweep in the log, or of a release, after which a quarantined checkpoint is usable again.

    Once this record is in the log, the attempts in `abandoned` can't be committed.

    The record is no checkpoint. It copies `retained` from the record before it.

    Attributes:
        sweep: The uuid of the sweep. In the record of a release: `RELEASE`, followed by the checkpoint's id.
    """

    id: int
    retained: tuple[Retained, ...]
    sweep: str
    abandoned: tuple[str, ...]
    summary: Summary = field(default_factory=Summary)

    @property
    def released(self) -> str | None:
        """The id of the checkpoint whose release added the record; None for a sweep's record."""
        return self.sweep.removeprefix(RELEASE) if self.sweep.startswith(RELEASE) else None


@frozen
class Tombstone:
    """The short form of a record that is no longer retained.

    The tombstone keeps the facts that later decisions about bases, stale checkpoints, fenced attempts and current
    output need.

    Attributes:
        base_id: The checkpoint from which the attempt started; None for empty state. Also None if the commit had the
            permission `allow_quarantined`: quarantine of the base does not apply to this checkpoint then.
        watermark_ms: The watermark after the interval, as in `LogicalTime`.
        late_watermark_ms: The event time up to which rows of the next interval are late, as in `LogicalTime`.
        reproduces: The id of the earlier commit of the same interval that left the same state; None without one.
        input_hash: The input hash of the commit; None if it is unknown.
        descriptors_hash: A hash of the state's declarations: names, kinds, schemas, expiry and key.
        outputs: The output files of the commit. If the commit's file in `settled/commits/` is lost, a sweep writes that
            file again with this list. A clean-up may have deleted the output files themselves.
        replace_overlapping: True if the commit had this permission.
        inputs: What the commit's attempt read of other pipelines.
        rewritten: The intervals whose output the commit of `cairn erase` rewrote.
    """

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
    inputs: tuple[InputRead, ...] = ()
    rewritten: tuple[Interval, ...] = ()
