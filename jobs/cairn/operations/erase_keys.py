"""Remove keys from the newest state, in a commit of its own (`cairn erase`). This needs no Spark.

`forget` rewrites shards and output, prepares, commits, exchanges the names of output files (`rewrite_outputs.py`), and
cleans up. docs/design-state.md says what a stop in each step leaves ("Forget a key").

If the process stops in any step, intervals can still start from the newest state. To continue, call `forget` with the
same arguments. Before the commit it begins again with a new attempt. After the commit it only does the steps left.
"""

from __future__ import annotations

import json
import secrets
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cairn.shard_jobs.acks import ack_of
from state_backend.adapters.rocks import EngineOptions
from state_backend.adapters.work_folders import work_folder
from state_backend.chains.erased_keys import followed_without
from state_backend.chains.judge_inputs import followed_in
from state_backend.checkpoint.clean_up_dropped import clean_up
from state_backend.checkpoint.commit_attempt import commit
from state_backend.checkpoint.dropped_checkpoint import telling_drops
from state_backend.checkpoint.forgotten_keys import is_free_of, is_key, key_hash, returning_keys
from state_backend.checkpoint.location import Location, locate
from state_backend.checkpoint.log import Log, read_log
from state_backend.checkpoint.newest_state import newest_state
from state_backend.checkpoint.prepare_content import ShardAck, prepare
from state_backend.checkpoint.rewind import as_restored
from state_backend.checkpoint.rewrite_outputs import OutputsWithout, exchange_outputs, write_outputs_without
from state_backend.checkpoint.trials import check_no_trial
from state_backend.formats.json_keys import keys_of_json
from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.spark_hash import key_group
from state_backend.formats.types import parse_struct
from state_backend.inspection.places_of_keys import Left, places_of
from state_backend.ports.storage import Storage
from state_backend.shard.manifest import may_hold_group, mentions_key, needed_manifest
from state_backend.shard.restore import RestoredShard, restore_shard
from state_backend.shard.rewrite_shard import rewrite_without
from state_backend.shard.snapshot import inline_budget_bytes, take_snapshot
from state_backend.state.check_shard import verify_shard
from state_backend.state.forget_keys import remove_keys
from state_backend.values.errors import AttemptLost, CheckpointDropped, CorruptFile, NotFound, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.inputs import Followed
from state_backend.values.intervals import Interval, format_instant, from_ms
from state_backend.values.operation_parameters import Erase
from state_backend.values.records import Content, Forget, ForgottenKey, Record, ShardManifest, own_run

_SALT_BYTES = 16
_TRIES = 5

Keys = tuple[tuple[int, bytes], ...]


@frozen
class Forgot:
    # Id of the new checkpoint; None from `plan_forget`.
    checkpoint: int | None
    base: int  # Id of the checkpoint from whose state the keys are removed.
    interval: Interval  # The interval of `base`.
    # Number of removed entries by state, with the timers as `$timers`; empty if an earlier call committed.
    entries: dict[str, int]
    shards: int  # Number of rewritten shards; 0 if an earlier call committed.
    dropped: tuple[int, ...]  # Ids of the older checkpoints that the commit drops, because their files may hold a key.
    holding: tuple[int, ...]  # Ids of the checkpoints that stay, although their files may hold a key.
    outputs: OutputsWithout


def erase_keys(request: Erase, *, dry_run: bool) -> dict[str, Any]:
    """Remove the request's keys from the newest state. A dry run only plans the removal.

    Return a report as JSON values: what is removed, and the places that may still hold the keys.
    """
    check_no_trial(request.root, "erase")
    at = locate(request.root, request.pipeline)
    schema = parse_struct(newest_content(at).key_schema)
    encode = KeyCodec(schema).encode
    encoded = list(dict.fromkeys(encode(key) for text in request.key for key in keys_of_json(text, schema)))
    engine = EngineOptions(cache_dir=None)
    if dry_run:
        found = plan_forget(at, encoded, request, engine)
    else:
        found = forget(
            at,
            encoded,
            request,
            engine,
            new_attempt=lambda: str(uuid.uuid4()),
            new_salt=lambda: secrets.token_hex(_SALT_BYTES),
        )
    left = Left(
        dropped=() if dry_run else found.dropped,
        holding=found.holding,
        output_rewritten=request.rewrite_output,
        unknown_output=found.outputs.unknown,
    )
    texts = {text for one in request.key for text in _texts(json.loads(one))}
    return {
        "dry_run": dry_run,
        "checkpoint": found.checkpoint,
        "base": found.base,
        "interval": str(found.interval),
        "entries": found.entries,
        "shards": found.shards,
        "dropped": [*found.dropped],
        "holding": [*found.holding],
        "output_files": found.outputs.files,
        "output_rows": found.outputs.rows,
        "places": [one._asdict() for one in places_of(request.root, request.pipeline, encoded, texts, left)],
    }


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts by which a key (`value`, as JSON) is searched in the findings of earlier validations.

    A string is yielded as it is. A number or boolean is yielded with its field name, as findings write both.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner)
            if isinstance(inner, int | float | bool):
                yield f'"key_{name}":{json.dumps(inner)}'
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, str):
        yield value


def newest_content(at: Location) -> Content:
    """Return the record content of the newest usable checkpoint. Its key schema encodes keys that callers remove."""
    return _newest(read_log(at.storage), at.pipeline).content


def plan_forget(at: Location, encoded: Collection[bytes], request: Erase, engine: EngineOptions) -> Forgot:
    """Return what `forget` would do with the same arguments (`checkpoint` is None). Write nothing.

    This reads the shards that may hold the keys, and all output if `request.rewrite_output` is set.
    """
    storage, log = at.storage, read_log(at.storage)
    record = _newest(log, at.pipeline)
    _check_policy(log, record, request)
    _left_out(log, record, encoded)
    content, entries = record.content, Counter[str]()
    keys = locate_keys(encoded, content)
    shards = _shards_with(content, keys, storage)
    for manifest in shards:
        with work_folder(f"forget-{manifest.shard}") as work, _open(manifest, storage, work, engine) as restored:
            entries.update(remove_keys(restored.store, restored.key_group_states, content.states, keys).entries)
    outputs = _outputs_without(storage, log, encoded, content, request, None)
    suspects = find_suspected(log, encoded, storage, engine)
    return _forgot(None, record, request, entries, len(shards), suspects, outputs)


def forget(
    at: Location,
    encoded: Collection[bytes],
    request: Erase,
    engine: EngineOptions,
    *,
    new_attempt: Callable[[], str],
    new_salt: Callable[[], str],
) -> Forgot:
    """Remove keys from the newest state, and commit that state as a checkpoint of its own.

    If an earlier call has committed the same removal, only do the steps that the earlier call did not finish.
    `encoded`: The keys, as `KeyCodec` encodes them. `new_attempt`, `new_salt`: Make a try's uuid, and a salt to hash
    keys.
    """
    storage = at.storage
    for tried in range(_TRIES):
        exchange_outputs(storage, read_log(storage))
        log = read_log(storage)  # Read again: the log from before the exchange names files that are now deleted.
        done = _forgotten_before(log, encoded, request, storage, engine)
        if done is None:
            try:
                done = _attempt(at, log, encoded, request, engine, new_attempt(), new_salt())
            except (
                AttemptLost,
                CheckpointDropped,
                NotFound,
            ):  # `NotFound`: a file is gone, because another commit replaced its output or dropped its checkpoint.
                if tried == _TRIES - 1 or read_log(at.storage).head_id == log.head_id:
                    raise
                continue
            exchange_outputs(storage, read_log(at.storage))
        clean_up(at.storage)
        return done
    raise AssertionError("unreachable")


def _newest(log: Log, pipeline: str) -> Record:
    newest = newest_state(log)
    if newest is None:
        raise UsageError(f"pipeline {pipeline!r} has no usable state to remove a key from; run an interval first")
    return log.whole(newest.id)


def _check_policy(log: Log, record: Record, request: Erase) -> None:
    until = from_ms(log.summary.latest_end_ms)
    if request.on_rerun == "refuse" and record.content.interval.end < until:
        raise UsageError(
            f"the newest state ends at {format_instant(record.content.interval.end)}, so intervals up to {format_instant(until)} must "
            "run again, but --on-rerun refuse would refuse them, because they would bring the key back\n"
            "Run these intervals first, or add --on-rerun filter, so that they leave the key out"
        )


def _left_out(log: Log, record: Record, encoded: Collection[bytes]) -> tuple[str, ...]:
    """Return the attempt uuids of earlier forgets, committed after `record`, whose keys this forget removes again.

    The checkpoint of each of these earlier forgets is quarantined now. So this forget starts from the older checkpoint
    of `record`, which may still hold the keys that the earlier forgets removed. Raise `UsageError` if `encoded` lacks
    one of them.
    """
    found = []
    for forgotten in returning_keys(log, None, record.id):
        if not any(is_key(forgotten.key, key) for key in encoded):
            raise UsageError(
                f"the newest usable state is checkpoint {record.id}, but a later checkpoint that is not usable, {forgotten.id}, forgot another "
                "key\nName that key too"
            )
        found.append(forgotten.key.forget)
    return tuple(sorted({*found}))


def _attempt(
    at: Location, log: Log, encoded: Collection[bytes], request: Erase, engine: EngineOptions, attempt: str, salt: str
) -> Forgot:
    storage, record = at.storage, _newest(log, at.pipeline)
    _check_policy(log, record, request)
    content, keys = record.content, locate_keys(encoded, record.content)
    left_out = _left_out(log, record, encoded)
    # The base checkpoint needs no lease: if another commit drops it, this attempt can't be committed anyway.
    with telling_drops(storage, record.id):
        rewritten = {m.shard for m in _shards_with(content, keys, storage)}
        acks, entries = [], Counter[str]()
        for ref in content.shards:
            manifest = needed_manifest(ref, storage)
            if ref.shard in rewritten:
                ack, removed = _rewritten(manifest, content, keys, storage, attempt, engine)
                entries.update(removed)
            else:
                ack = ack_of(ref.shard, None, manifest, {})
            acks.append(ack)
        outputs = _outputs_without(storage, log, encoded, content, request, attempt)
        suspects = find_suspected(log, encoded, storage, engine)
        restored = as_restored(
            content, pipeline=content.pipeline, run=own_run(f"forget__{attempt}"), attempt=attempt, base_id=record.id
        )
        made = replace(
            restored,
            kind="forget",
            input_hash=None,
            filtered=left_out,
            followed=_followed(log, encoded, request, outputs),
            forget=Forget(
                keys=_forgotten_keys(log, keys, content, request, attempt, salt),
                drops=suspects if request.drop_checkpoints else (),
                rewritten=outputs.rewritten,
            ),
        )
        prepare(at, made, acks, h0=log.head_id, base=content.shards)
        committed = commit(at, attempt)
    return _forgot(committed.id, record, request, entries, len(rewritten), suspects, outputs)


def _forgot(
    checkpoint: int | None,
    base: Record,
    request: Erase,
    entries: Counter[str],
    shards: int,
    suspects: tuple[int, ...],
    outputs: OutputsWithout,
) -> Forgot:
    return Forgot(
        checkpoint=checkpoint,
        base=base.id,
        interval=base.content.interval,
        entries=dict(entries),
        shards=shards,
        dropped=suspects if request.drop_checkpoints else (),
        holding=() if request.drop_checkpoints else suspects,
        outputs=outputs,
    )


def _followed(log: Log, encoded: Collection[bytes], request: Erase, outputs: OutputsWithout) -> tuple[Followed, ...]:
    """Return the upstreams that the new record names.

    If the output was rewritten, each upstream lists its own erasures of the same keys, which make no result stale then.
    """
    if not request.rewrite_output or outputs.unknown:
        return followed_in(log)
    return followed_without(log.entries.root, log, encoded)


def _forgotten_keys(
    log: Log, keys: Keys, content: Content, request: Erase, attempt: str, salt: str
) -> tuple[ForgottenKey, ...]:
    """Return a `ForgottenKey` with salt and hash for each of `keys`, for the new record.

    A key that was forgotten before keeps its salt, so its hash stays the same; another key gets `salt`. In the log, the
    new `ForgottenKey` replaces the old one.
    """
    found = []
    for group, key in keys:
        before = next((f.key.salt for f in log.summary.forgotten if is_key(f.key, key)), salt)
        found.append(
            ForgottenKey(
                forget=attempt,
                salt=before,
                key_hash=key_hash(before, key),
                key_group=group,
                max_parallelism=content.max_parallelism,
                until_ms=log.summary.latest_end_ms,
                on_rerun=request.on_rerun,
            )
        )
    return tuple(found)


def _forgotten_before(
    log: Log, encoded: Collection[bytes], request: Erase, storage: Storage, engine: EngineOptions
) -> Forgot | None:
    """Return the result of an earlier call of `forget` that has already done what `request` asks; else None.

    The earlier call must have committed the newest state, and removed all of these keys with the same `on_rerun`. The
    request must have no further output to rewrite and no checkpoint to drop. After None, `forget` makes a new commit.
    """
    newest = newest_state(log)
    record = log.whole(newest.id) if newest is not None and newest.kind == "forget" else None
    if record is None or record.content.forget is None or record.content.base_id is None:
        return None
    said = record.content.forget.keys
    if not all(any(is_key(f, key) and f.on_rerun == request.on_rerun for f in said) for key in encoded):
        return None
    outputs = _outputs_without(storage, log, encoded, record.content, request, None)
    suspects = find_suspected(log, encoded, storage, engine)
    if outputs.rewritten or (request.drop_checkpoints and suspects):
        return None
    if _followed(log, encoded, request, outputs) != followed_in(log):
        return None
    return Forgot(
        checkpoint=record.id,
        base=record.content.base_id,
        interval=record.content.interval,
        entries={},
        shards=0,
        dropped=record.content.forget.drops,
        holding=suspects,
        outputs=outputs,
    )


def locate_keys(encoded: Collection[bytes], content: Content) -> Keys:
    """Return (key group, encoded key) for each encoded key. `content` records the number of key groups."""
    schema = parse_struct(content.key_schema)
    codec = KeyCodec(schema)
    return tuple((key_group(codec.decode(key), schema, content.max_parallelism), key) for key in encoded)


def _shards_with(content: Content, keys: Keys, storage: Storage) -> list[ShardManifest]:
    manifests = [needed_manifest(ref, storage) for ref in content.shards]
    return [manifest for manifest in manifests if _concerns(manifest, keys)]


def _concerns(manifest: ShardManifest, keys: Keys) -> bool:
    """Return True if the shard's files may hold one of the keys."""
    if any(may_hold_group(manifest, group) for group in {group for group, _ in keys}):
        return True
    inline = [segment.data or b"" for segment in manifest.segments]
    return any(mentions_key(manifest, key) or any(key in data for data in inline) for _, key in keys)


@contextmanager
def _open(manifest: ShardManifest, storage: Storage, work: Path, engine: EngineOptions) -> Iterator[RestoredShard]:
    # The callers turn the host's file cache off in `engine`: the cache would keep a copy of files that hold the key.
    restored = restore_shard(manifest.key_groups, [manifest], storage, work / "db", engine)
    try:
        yield restored
    finally:
        restored.store.close()


def _rewritten(
    manifest: ShardManifest, content: Content, keys: Keys, storage: Storage, attempt: str, engine: EngineOptions
) -> tuple[ShardAck, dict[str, int]]:
    owned = manifest.key_groups
    with work_folder(f"forget-{manifest.shard}") as work:
        restored = restore_shard(owned, [manifest], storage, work / "db", engine)
        rewritten, removed = rewrite_without(restored, owned, content.states, keys, work / "without", engine)
        with rewritten.store as store:
            snapshot = take_snapshot(
                store,
                storage,
                image=work / "image",
                attempt=attempt,
                shard=manifest.shard,
                task=0,
                key_groups=owned,
                key_group_states=rewritten.key_group_states,
                inline_budget_bytes=inline_budget_bytes(content.parallelism),
            )
            _, problems = verify_shard(
                store, snapshot.manifest, content.states, content.key_schema, content.max_parallelism
            )
    if problems:
        raise CorruptFile(
            f"shard {manifest.shard} is damaged after the removal of the key: {'; '.join(problems[:3])}\n"
            "Nothing is committed. Validate the newest checkpoint, and continue from an older one"
        )
    return ack_of(manifest.shard, snapshot, None, {}, restored), removed.entries


def find_suspected(log: Log, encoded: Collection[bytes], storage: Storage, engine: EngineOptions) -> tuple[int, ...]:
    """Return the ids of the retained checkpoints whose files may hold one of the keys.

    A checkpoint is also returned if only deleted or replaced entries in its files may hold a key. For a key that was
    forgotten before, `forgotten_keys.is_free_of` decides from the log which checkpoints don't hold the key.
    """
    known: dict[bytes, bool] = {}
    found = []
    for record in log.completed():
        keys = locate_keys([key for key in encoded if not is_free_of(log, record, key)], record.content)
        with telling_drops(storage, record.id):
            try:
                suspected = bool(keys) and _is_suspected(record, keys, storage, engine, known)
            except CorruptFile:
                if record.id not in log.quarantined:
                    raise
                suspected = True  # Damage is a reason of a quarantine. Nobody can tell whether the files hold a key.
        if suspected:
            found.append(record.id)
    return tuple(found)


def _is_suspected(
    record: Record, keys: Keys, storage: Storage, engine: EngineOptions, known: dict[bytes, bool]
) -> bool:
    for ref in record.content.shards:
        manifest = needed_manifest(ref, storage)
        files = repr((keys, manifest.files, manifest.segments, manifest.inline_files)).encode()
        if files not in known:
            known[files] = _concerns(manifest, keys) and _may_hold(manifest, keys, record.content, storage, engine)
        if known[files]:
            return True
    return False


def _may_hold(manifest: ShardManifest, keys: Keys, content: Content, storage: Storage, engine: EngineOptions) -> bool:
    if manifest.segments or any(mentions_key(manifest, key) for _, key in keys):
        return True
    with work_folder(f"forget-{manifest.shard}") as work, _open(manifest, storage, work, engine) as restored:
        runs = restored.store.sorted_runs()
        if len(runs) > 1 or any(run.deletions for run in runs):
            return True
        return remove_keys(restored.store, restored.key_group_states, content.states, keys).found


def _outputs_without(
    storage: Storage, log: Log, encoded: Collection[bytes], content: Content, request: Erase, attempt: str | None
) -> OutputsWithout:
    if not request.rewrite_output:
        return OutputsWithout(rewritten=(), files=0, rows=0, unknown=())
    with work_folder("forget-output") as work:
        return write_outputs_without(storage, log, encoded, parse_struct(content.key_schema), attempt, work)
