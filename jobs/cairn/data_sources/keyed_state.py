"""Spark data source `format("keyed_state")`, which reads a state as a table.

docs/state-table.md describes the options and columns. `load` resolves "latest" once. The option `checkpoint` may also
name the folder of a savepoint, and `attempt` an attempt that is prepared and not committed. `state="$check"` restores
each shard and checks it entry by entry: it gives one row for each shard, and one more row for each problem.

The table has one partition for each shard. Each partition restores its shard into an empty folder from the storage
only. Partitions of a canonical savepoint read the savepoint's files. With the options `key`, `shard` and `key_group`,
other shards are not restored. Spark's own filters do not limit what is read; `cairn.data_sources.state_selection` says
why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType, TimestampType

from cairn.data_sources.check_options import check_options
from cairn.data_sources.state_selection import ReadPlan, parse_numbers, plan_read
from cairn.spark_versions import struct_of, to_arrow_schema
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.rocks import EngineOptions
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.leases import take_lease
from state_backend.formats.json_keys import keys_of_json
from state_backend.formats.types import parse_struct
from state_backend.inspection.state_source import Part, StateSource, find_state
from state_backend.inspection.state_table import read_table
from state_backend.shard.manifest import needed_manifest
from state_backend.shard.restore import restore_shard
from state_backend.state.check_shard import verify_shard
from state_backend.state.layout import TIMERS_NAME
from state_backend.values.day_or_instant import parse_duration
from state_backend.values.errors import CairnError, StateUnusable, UsageError
from state_backend.values.records import ShardRef, StateDescriptor

TIMERS, CHECK = TIMERS_NAME, "$check"
_OPTIONS = frozenset(
    {"root", "pipeline", "path", "state", "checkpoint", "attempt", "key", "key_group", "shard", "hold"}
)
_ROWS_PER_BATCH = 10_000


@dataclass
class _Shard(InputPartition):
    ref: ShardRef
    max_parallelism: int
    key_schema: dict[str, Any]
    states: tuple[StateDescriptor, ...]


@dataclass
class _Part(InputPartition):
    shard: int
    part: Part


class KeyedState(DataSource):
    """The data source `keyed_state`. The module's docstring lists its options."""

    _found: StateSource | None = None

    @classmethod
    def name(cls) -> str:
        return "keyed_state"

    def schema(self) -> StructType:
        try:
            check_options(self.name(), self.options, _OPTIONS)
            self._plan()
            return _table_schema(self._source(), self._state())
        except CairnError as error:
            # Spark shows the whole traceback above the message. A user who mistyped an option has no use for the
            # traceback.
            raise error.with_traceback(None) from None

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of the table. Spark calls this method after the method `schema`.

        The reader reads the checkpoint, attempt or savepoint for which the method `schema` returned the columns, even
        if "latest" now names another checkpoint. With the option `state="$check"`, the reader checks each shard instead
        of reading a state.
        """
        source, state = self._source(), self._state()
        if state != CHECK:
            return _TableReader(source, state, schema, self._plan())
        if source.canonical:
            raise UsageError(f"{source} is a canonical savepoint, which $check can't read; to check it, restore it")
        return _CheckReader(source, schema)

    def _plan(self) -> ReadPlan:
        content, given = self._source().content, self.options
        keys, groups, shards = given.get("key"), given.get("key_group"), given.get("shard")
        return plan_read(
            content,
            keys=None if keys is None else keys_of_json(keys, parse_struct(content.key_schema), for_spark=True),
            key_groups=None if groups is None else parse_numbers(groups, "key_group"),
            shards=None if shards is None else parse_numbers(shards, "shard"),
        )

    def _source(self) -> StateSource:
        """Return the checkpoint, attempt or savepoint, resolved at the first call.

        Spark calls `schema` first, and sends this object with the resolved source to the process that calls `reader`.
        So "latest" means the same checkpoint in both calls.
        """
        if self._found is None:
            options = self.options
            self._found = find_state(
                str(options.get("checkpoint", "latest")),
                root=options.get("root"),
                pipeline=options.get("pipeline"),
                path=options.get("path"),
                attempt=options.get("attempt"),
            )
            if "hold" in options and self._found.savepoint is None and self._found.checkpoint_id:
                lasts = parse_duration(str(options["hold"]))
                if take_lease(open_storage(self._found.url), self._found.checkpoint_id, "a query", lasts) is None:
                    raise UsageError(
                        f"hold: Cairn can't write a lease to {self._found.url}/leases\nAllow the reader to write there, or leave out "
                        "hold and read before retention drops the checkpoint"
                    )
        return self._found

    def _state(self) -> str:
        state = self.options.get("state")
        if state is None:
            names = ", ".join([d.name for d in self._source().content.states] + [TIMERS])
            raise UsageError(f'format("keyed_state") needs the option "state", one of: {names}')
        return str(state)


def _table_schema(source: StateSource, name: str) -> StructType:
    # The column's metadata name the source, so a user of the DataFrame can see which checkpoint "latest" meant.
    shard = StructField("shard", IntegerType(), False, {"source": str(source)})
    place = [StructField("key_group", IntegerType(), False), shard]
    if name == CHECK:
        return StructType(
            [
                place[1],
                StructField("entries", LongType(), False),
                StructField("pid", LongType(), False),
                StructField("finding", StringType(), True),
            ]
        )
    fields = [StructField("key", struct_of(source.content.key_schema), False)]
    descriptor = source.descriptor(name)
    if descriptor is not None:
        version = descriptor.versions[-1]
        fields.append(StructField("value", struct_of(version.value), False))
        if version.user_key is not None:
            fields.append(StructField("user_key", struct_of(version.user_key), False))
        if descriptor.kind == "list":
            fields.append(StructField("pos", LongType(), False))
    return StructType([*fields, StructField("expires_at", TimestampType(), True), *place])


class _TableReader(DataSourceReader):
    def __init__(self, source: StateSource, state: str, schema: StructType, plan: ReadPlan) -> None:
        self._source, self._state, self._schema, self._plan = source, state, schema, plan

    def partitions(self) -> Sequence[InputPartition]:
        content = self._source.content
        return [_Part(shard, self._plan.part_of(shard, content)) for shard in self._plan.shards]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, _Part):  # Spark calls `read` once with None if there are no partitions.
            return
        arrow = to_arrow_schema(self._schema)
        storage = open_storage(self._source.url)
        with work_folder(f"read-{partition.shard}") as work:
            for table in read_table(self._source, self._state, partition.shard, storage, work, partition.part):
                yield from table.select(arrow.names).cast(arrow).to_batches(_ROWS_PER_BATCH)


class _CheckReader(DataSourceReader):
    def __init__(self, source: StateSource, schema: StructType) -> None:
        self._source, self._schema = source, schema

    def partitions(self) -> Sequence[InputPartition]:
        content = self._source.content
        return [_Shard(ref, content.max_parallelism, content.key_schema, content.states) for ref in content.shards]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Shard)
        arrow = to_arrow_schema(self._schema)
        with work_folder(f"check-{partition.ref.shard}") as work:
            rows = list(_findings(partition, open_storage(self._source.url), work))
        columns = [pa.array(column, field.type) for field, column in zip(arrow, zip(*rows, strict=True), strict=True)]
        yield pa.RecordBatch.from_arrays(columns, schema=arrow)


def _findings(partition: _Shard, storage: Any, work: Any) -> Iterator[tuple[Any, ...]]:
    import os

    shard, pid = partition.ref.shard, os.getpid()
    try:
        manifest = needed_manifest(partition.ref, storage)
        restored = restore_shard(manifest.key_groups, [manifest], storage, work / "db", EngineOptions())
    except StateUnusable as error:
        yield shard, 0, pid, str(error)
        return
    try:
        entries, findings = verify_shard(
            restored.store, manifest, partition.states, partition.key_schema, partition.max_parallelism
        )
    finally:
        restored.store.close()
    yield shard, entries, pid, None
    for finding in findings:
        yield shard, entries, pid, finding
