"""A pipeline whose shards are real RocksDB state on a real disk, committed like any other, without Spark."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

from state_backend.adapters.local_storage import LocalStorage
from state_backend.checkpoint.commit_attempt import CommitResult
from state_backend.checkpoint.plan_retention import DEFAULT_POLICY
from state_backend.formats import paths, record_codec
from state_backend.formats.spark_hash import key_group
from state_backend.formats.types import parse_struct
from state_backend.ports.storage import Storage
from state_backend.shard.changelog_store import ChangelogOptions
from state_backend.shard.manifest import needed_manifest
from state_backend.state.shard_state import ShardState
from state_backend.state.state_variables import ValueState
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.records import FiledShard, InlineShard, OutputFile, Permissions, Prepared
from state_backend.values.retention import RetentionPolicy
from tests.support.chains import Chain
from tests.support.checkpoints import PIPELINE, content, day, start_ms
from tests.support.coordinator import Coordinator
from tests.support.shards import KEY_SCHEMA, KEYS, STATES

MAX_PARALLELISM, PARALLELISM = 16, 2
PATIENT = ChangelogOptions(max_share_of_state=1e9)


def output_of(n: int, values: dict[str, int], *, late: bool = False) -> bytes:
    """What the n-th day emits; the same in every try."""
    return f"day {n}: {sorted(values.items())} late={late}".encode()


class RealPipeline:
    """``root`` holds the folder of the pipeline ``counting``, unless that is another ``storage``, and local work.
    ``inline``: manifests lie in the records."""

    def __init__(
        self,
        root: Path,
        *,
        inline: bool = False,
        policy: RetentionPolicy = DEFAULT_POLICY,
        storage: Storage | None = None,
    ) -> None:
        self.root = root
        self.storage: Storage = storage if storage is not None else LocalStorage(root / PIPELINE)
        self.coordinator = Coordinator(self.storage, PIPELINE, policy=policy)
        self.inline = inline

    def run(self, n: int, attempt: str, values: dict[str, int]) -> CommitResult:
        """Processes the n-th day: sets the values of keys, writes one output and one late file, and commits."""
        self.prepare(n, attempt, values)
        result = self.coordinator.commit(attempt)
        self.coordinator.publish(None)
        self.coordinator.clean_up()
        return result

    def prepare(
        self, n: int, attempt: str, values: dict[str, int], *, mode: Literal["incremental", "changelog"] = "incremental"
    ) -> Prepared:
        """What the process task does of the n-th day. A changelog's segments lie in files."""
        interval = day(n)
        begun = self.coordinator.begin(interval, permissions=Permissions(), pipeline_start_ms=start_ms())
        base = [needed_manifest(ref, self.storage) for ref in begun.base.content.shards] if begun.base else []
        work = self.root / "work" / attempt
        shutil.rmtree(work, ignore_errors=True)  # a try that died left it
        chain = Chain(work, self.storage, max_parallelism=MAX_PARALLELISM, changelog=PATIENT)
        chain.manifests, chain.now_ms = base, interval.end_ms

        def change(state: ShardState, owned: KeyGroupRange) -> None:
            for key, value in values.items():
                group = key_group((key,), parse_struct(KEY_SCHEMA), MAX_PARALLELISM)
                if group in owned:
                    state.set_key(group, KEYS.encode((key,)))
                    ValueState(state, "value").update((value, key))
            state.flush()

        manifests = chain.step(PARALLELISM, mode, change, attempt=attempt)
        shutil.rmtree(work)
        if self.inline:
            refs = [InlineShard(shard=m.shard, inline=m) for m in manifests]
        else:
            handles = [
                self.storage.create(paths.shared(attempt, m.shard, 0, 0, "manifest"), record_codec.encode(m))
                for m in manifests
            ]
            refs = [FiledShard(shard=n, manifest=h) for n, h in enumerate(handles)]
        outputs = [
            OutputFile(
                handle=self.storage.create(
                    paths.output(interval, attempt, 0, 0, late=late), output_of(n, values, late=late)
                ),
                rows=1,
                late=late,
            )
            for late in (False, True)
        ]
        made = content(
            interval,
            attempt,
            begun.base.id if begun.base else None,
            parallelism=PARALLELISM,
            max_parallelism=MAX_PARALLELISM,
            key_schema=KEY_SCHEMA,
            states=STATES,
            digest=sum(m.digest for m in manifests) % 2**64,
            shards=tuple(refs),
            outputs=tuple(outputs),
        )
        entries = sum(m.entries for m in manifests)
        totals = replace(
            made.totals,
            entries=entries,
            keys=entries,
            state_bytes=sum(m.size_bytes for m in manifests),
            state_files=sum(len(m.files) for m in manifests),
        )
        prepared = Prepared(h0=begun.h0, content=replace(made, totals=totals))
        self.coordinator.prepare(prepared)
        return prepared

    def path(self, name: str) -> Path:
        """Where a file of the pipeline lies on the disk."""
        return self.root / PIPELINE / name
