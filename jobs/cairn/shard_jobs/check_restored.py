"""Validate the shards of a checkpoint, a prepared attempt or a savepoint.

Each shard is restored into an empty folder, from the storage only, and read entry by entry.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from cairn.shard_jobs.run_on_shards import JobOnContent, rare_garbage_collection
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.rocks import EngineOptions, RocksStore
from state_backend.adapters.work_folders import work_folder
from state_backend.formats.types import parse_struct
from state_backend.shard.canonical_files import read_canonical
from state_backend.shard.manifest import manifest_of
from state_backend.shard.restore import restore_shard
from state_backend.state.check_shard import verify_shard
from state_backend.values.errors import NotFound, StateTypeError, StateUnusable
from state_backend.values.frozen import frozen
from state_backend.values.key_groups import range_of
from state_backend.values.marks import CanonicalFile
from state_backend.values.records import ShardManifest


@frozen
class ShardValidation:
    shard: int
    entries: int
    digest: int
    pid: int
    findings: tuple[str, ...]


@frozen
class ValidationJob(JobOnContent):
    """Job that validates the shards of one checkpoint, prepared attempt or savepoint."""

    root: str
    # The files of a canonical savepoint, which has no RocksDB files; else empty.
    canonical: tuple[CanonicalFile, ...]
    engine: EngineOptions

    def findings(self, shards: Sequence[ShardValidation]) -> tuple[str, ...]:
        """Return the findings of all shards.

        If no shard has a finding, compare the sums of the shards' entries and digests with the record. A difference is
        then the only finding.
        """
        findings = [finding for shard in shards for finding in shard.findings]
        entries, digest = sum(s.entries for s in shards), sum(s.digest for s in shards) % 2**64
        recorded = self.content
        if not findings and (entries, digest) != (recorded.totals.entries, recorded.digest):
            findings.append(
                f"the restored state has {entries} entries with digest {digest:016x}, but the record has {recorded.totals.entries} "
                f"entries with digest {recorded.digest:016x}"
            )
        return tuple(findings)

    def run_shard(self, batches: Iterator[pa.RecordBatch], shard: int, task: int) -> ShardValidation:
        """Restore one shard in a Spark task, and check its entries.

        If an error makes the shard unusable, return the error as a finding. `task`: Unused, because nothing is
        uploaded.
        """
        with rare_garbage_collection(), work_folder(f"validate-{shard}") as work:
            try:
                entries, digest, findings = (self._read if self.canonical else self._restore)(shard, work)
            except (StateUnusable, NotFound, StateTypeError) as error:
                entries, digest, findings = 0, 0, [f"shard {shard}: {error}"]
        return ShardValidation(shard=shard, entries=entries, digest=digest, pid=os.getpid(), findings=tuple(findings))

    def _restore(self, shard: int, work: Path) -> tuple[int, int, list[str]]:
        content, storage = self.content, open_storage(self.root)
        refs = self.refs_of(shard)
        if not refs:
            return 0, 0, []  # An empty canonical savepoint has neither files nor shards.
        manifest = manifest_of(refs[0], storage)
        restored = restore_shard(manifest.key_groups, [manifest], storage, work / "db", self.engine)
        with restored.store as store:
            entries, findings = verify_shard(
                store, manifest, content.states, content.key_schema, content.max_parallelism
            )
        return entries, manifest.digest, findings

    def _read(self, shard: int, work: Path) -> tuple[int, int, list[str]]:
        content = self.content
        owned = range_of(shard, content.parallelism, content.max_parallelism)
        with RocksStore(work / "db", self.engine) as store:
            states = read_canonical(
                self.canonical,
                content.states,
                parse_struct(content.key_schema),
                open_storage(self.root),
                store,
                work=work,
                owned=owned,
                max_parallelism=content.max_parallelism,
                recorded_max_parallelism=content.max_parallelism,
            )
            made = ShardManifest(
                shard=shard, key_groups=owned, files=(), inline_files=(), segments=(), key_group_states=states
            )
            entries, findings = verify_shard(store, made, content.states, content.key_schema, content.max_parallelism)
        return entries, made.digest, findings
