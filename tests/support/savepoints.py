"""Savepoints without Spark: a shard or two with state of every kind, and the tasks called as Spark would call them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from cairn.shard_jobs.fill_from_savepoint import RestoreJob
from cairn.shard_jobs.write_savepoint import SavepointJob
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.rocks import EngineOptions
from state_backend.checkpoint.location import Location
from state_backend.checkpoint.rewind import as_restored
from state_backend.checkpoint.savepoints import read_savepoint
from state_backend.formats.spark_hash import key_group
from state_backend.formats.types import parse_struct
from state_backend.shard.manifest import manifest_of
from state_backend.shard.restore import restore_shard
from state_backend.state.check_shard import verify_shard
from state_backend.state.shard_state import ShardState
from state_backend.state.state_variables import ListState, MapState, ValueState
from state_backend.state.timers import register_timer
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.marks import Savepoint
from state_backend.values.records import Content, InlineShard, Prepared, Record, RunRef, ShardManifest
from tests.support.chains import Chain
from tests.support.checkpoints import content, day, start_ms
from tests.support.coordinator import Coordinator
from tests.support.in_process import run_here
from tests.support.shards import KEY_SCHEMA, KEYS, STATES

Format = Literal["native", "canonical"]
MAX_PARALLELISM = 16
USERS = ["", "a", "b", "\x00", "ä", None, *(f"user-{n}" for n in range(60))]


def some_state(state: ShardState, users: list[Any], *, now_ms: int = 0) -> None:
    """Entries of every kind, with and without expiry, nulls and timers, for the users of this shard."""
    value, value_ttl = ValueState(state, "value"), ValueState(state, "value_ttl")
    elements, elements_ttl = ListState(state, "list"), ListState(state, "list_ttl")
    entries, entries_ttl = MapState(state, "map"), MapState(state, "map_ttl")
    for n, user in enumerate(users):
        state.set_key(key_group((user,), parse_struct(KEY_SCHEMA), MAX_PARALLELISM), KEYS.encode((user,)))
        value.update((n, user))
        value_ttl.update((None, "x" * n))
        elements.append_list([(i, None) for i in range(n % 4 + 1)])
        elements_ttl.append_value((n, "\x00"))
        for other in users[: n % 5]:
            entries.update_value((other,), (n, other))
        entries_ttl.update_value((user,), (None, None))
        for timer in range(n % 3):
            register_timer(state, now_ms + 10 * timer - 5)


class SmallPipeline:
    """A pipeline's folder with one checkpoint of day 1 whose state ``fill`` made, over real files."""

    def __init__(
        self,
        folder: Path,
        *,
        parallelism: int = 2,
        fill: Callable[[ShardState, list[Any]], None] = some_state,
        name: str = "p",
    ) -> None:
        self.folder, self.url, self.name = folder, str(folder / "root" / name), name
        self.storage = LocalStorage(Path(self.url))
        self.coordinator = Coordinator(self.storage, name)
        chain = Chain(folder / f"make-{name}", self.storage, max_parallelism=MAX_PARALLELISM)
        key = parse_struct(KEY_SCHEMA)

        def change(state: ShardState, owned: KeyGroupRange) -> None:
            fill(state, [u for u in USERS if key_group((u,), key, MAX_PARALLELISM) in owned])

        manifests = chain.step(parallelism, "full", change, attempt="made")
        made = content(
            day(1),
            "made",
            parallelism=parallelism,
            max_parallelism=MAX_PARALLELISM,
            pipeline=name,
            key_schema=KEY_SCHEMA,
            states=STATES,
            digest=chain.digest,
            shards=tuple(InlineShard(shard=m.shard, inline=m) for m in manifests),
        )
        made = replace(made, totals=replace(made.totals, entries=chain.entries))
        self.coordinator.prepare(Prepared(h0=0, content=made))
        self.record = self.coordinator.commit("made").record
        assert self.record is not None

    def take(self, to: Path, format: Format, record: Record | None = None) -> Savepoint:
        made = record or self.record
        assert made is not None
        return take(self.url, made, to, format)


def take(root: str, record: Record, to: Path, format: Format) -> Savepoint:
    job = SavepointJob(
        root=root,
        destination=str(to),
        savepoint=f"savepoint-{to.name}",
        format=format,
        checkpoint_id=record.id,
        content=record.content,
        engine=EngineOptions(),
    )
    job.finish(run_here(None, job, first_task=7))
    return read_savepoint(LocalStorage(to))


def restore_task(root: Path, source: Path, attempt: str, parallelism: int, max_parallelism: int) -> RestoreJob:
    """As ``restore_savepoint`` plans it for a pipeline whose folder is ``root``."""
    savepoint = read_savepoint(LocalStorage(source))
    coordinator = Coordinator(LocalStorage(root), root.name)
    begun = coordinator.begin_restore(savepoint.content, pipeline_start_ms=start_ms())
    if savepoint.format == "native":
        parallelism, max_parallelism = savepoint.content.parallelism, savepoint.content.max_parallelism
    made = as_restored(
        savepoint.content,
        pipeline=root.name,
        run=RunRef(run_id=f"restore__{attempt}", clear_number=0, try_number=1),
        attempt=attempt,
    )
    made = replace(
        made,
        pipeline_start_ms=start_ms(),
        parallelism=parallelism,
        max_parallelism=max_parallelism,
        restored_from=savepoint.savepoint,
        retention=None,
    )
    return RestoreJob(
        root=str(root), source=str(source), savepoint=savepoint, made=made, h0=begun.h0, engine=EngineOptions()
    )


def prepare(job: RestoreJob) -> None:
    at = Location(root=str(Path(job.root).parent), pipeline=job.made.pipeline, storage=LocalStorage(Path(job.root)))
    job.finish(at, run_here(None, job, first_task=70))


def restore(
    root: Path, source: Path, attempt: str = "restored", parallelism: int = 2, max_parallelism: int = MAX_PARALLELISM
) -> Record:
    """A committed restore record."""
    prepare(restore_task(root, source, attempt, parallelism, max_parallelism))
    record = Coordinator(LocalStorage(root), root.name).commit(attempt).record
    assert record is not None
    return record


def findings(root: Path, made: Content, work: Path) -> list[str]:
    """What is wrong with the shards of a checkpoint when all of them are restored and walked."""
    storage, found = LocalStorage(root), []
    for ref in made.shards:
        manifest: ShardManifest = manifest_of(ref, storage)
        directory = work / f"verify-{root.name}-{made.attempt}-{ref.shard}"
        with restore_shard(manifest.key_groups, [manifest], storage, directory, EngineOptions()).store as store:
            found += verify_shard(store, manifest, made.states, made.key_schema, made.max_parallelism)[1]
    return found
