"""``format("keyed_state")``: state as a table, and the sink that an interval's rows are written to.

Reading: options ``root``, ``pipeline``, ``state``, and ``checkpoint`` ("latest", an id, or an interval end); one partition
per shard, each restored into an empty folder from the storage only. Or the folder of a savepoint for ``checkpoint``, without
``root`` and ``pipeline``; of a canonical one the partitions are its files.

    key struct | value struct | user_key struct (maps) | position long (lists) | expires_at timestamp | key_group int | shard int

``state="$timers"`` gives ``key | expires_at | key_group | shard``; ``state="$check"`` restores each shard, walks all of it, and
gives one row per shard with what was found wrong.

Writing is for the runtime: the rows are routed batches and the option ``task`` is what each partition runs. Spark hands the
acks of exactly the successful task attempts to ``commit``, which prepares the attempt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType, TimestampType

from jobs.runtime.interval_task import ShardAck, work_folder
from jobs.runtime.shipping import unship
from jobs.which_checkpoint import parse_checkpoint
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.adapters.rocks import EngineOptions
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.checkpoint.savepoints import read_savepoint
from state_backend.formats.canonical import read_tables, state_schema, timers_schema
from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.schema_evolution import row_reader
from state_backend.formats.types import parse_struct
from state_backend.manifest import needed_manifest
from state_backend.restore import restore_shard
from state_backend.state.entries import StoredEntry, read_entries, read_timers
from state_backend.state.verify import verify_shard
from state_backend.values.errors import StateUnusable, UsageError
from state_backend.values.intervals import from_ms
from state_backend.values.records import CanonicalFile, Record, Savepoint, ShardRef, StateDescriptor

TIMERS, CHECK = "$timers", "$check"
_ROWS_PER_BATCH = 10_000


@dataclass
class _Ack(WriterCommitMessage):
    ack: ShardAck


class _TaskWriter(DataSourceArrowWriter):
    def __init__(self, option: str) -> None:
        self._option = option

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        return _Ack(unship(self._option).run_shard(iterator, context.partitionId(), context.taskAttemptId()))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        unship(self._option).finish([m.ack for m in messages if isinstance(m, _Ack)])

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Nothing is undone here: a task that is still running could write after it. The sweeper removes an attempt's files."""


@dataclass
class _Shard(InputPartition):
    ref: ShardRef
    max_parallelism: int
    key_schema: dict[str, Any]
    states: tuple[StateDescriptor, ...]


class KeyedState(DataSource):
    """The data source; its options are in the module's docstring."""

    @classmethod
    def name(cls) -> str:
        return "keyed_state"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return _TaskWriter(self.options["task"])

    def schema(self) -> StructType:
        savepoint = self._savepoint()
        return _table_schema(_record_of(savepoint) if savepoint else self._record(), self._option("state"))

    def reader(self, schema: StructType) -> DataSourceReader:
        savepoint, state = self._savepoint(), self._option("state")
        if savepoint is None:
            return _StateReader(self._root(), self._record(), state, schema)
        folder = str(self.options["checkpoint"])
        if savepoint.format == "native":
            return _StateReader(folder, _record_of(savepoint), state, schema)
        return _CanonicalReader(folder, savepoint, state, schema)

    def _savepoint(self) -> Savepoint | None:
        checkpoint = str(self.options.get("checkpoint", ""))
        return read_savepoint(open_storage(checkpoint)) if "/" in checkpoint else None

    def _record(self) -> Record:
        checkpoint = self.options.get("checkpoint", "latest")
        coordinator = Coordinator(open_storage(self._root()), self._option("pipeline"))
        return coordinator.record(parse_checkpoint(checkpoint))

    def _root(self) -> str:
        return join_url(self._option("root"), self._option("pipeline"))

    def _option(self, name: str) -> str:
        value = self.options.get(name)
        if value is None:
            raise UsageError(
                f'format("keyed_state") needs the option {name!r}: root, pipeline, state, and checkpoint if not the latest'
            )
        return str(value)


def _descriptor(record: Record, name: str) -> StateDescriptor:
    for descriptor in record.content.states:
        if descriptor.name == name:
            return descriptor
    names = ", ".join([d.name for d in record.content.states] + [TIMERS])
    raise UsageError(
        f"pipeline {record.content.pipeline!r} has no state {name!r} in checkpoint {record.id}; it has {names}"
    )


def _table_schema(record: Record, name: str) -> StructType:
    key = StructField("key", StructType.fromJson(record.content.key_schema), False)
    place = [StructField("key_group", IntegerType(), False), StructField("shard", IntegerType(), False)]
    expires_at = StructField("expires_at", TimestampType(), True)
    if name == CHECK:
        return StructType(
            [
                place[1],
                StructField("entries", LongType(), False),
                StructField("pid", LongType(), False),
                StructField("finding", StringType(), True),
            ]
        )
    if name == TIMERS:
        return StructType([key, expires_at, *place])
    descriptor = _descriptor(record, name)
    version = descriptor.versions[-1]
    fields = [key, StructField("value", StructType.fromJson(version.value), False)]
    if version.user_key is not None:
        fields.append(StructField("user_key", StructType.fromJson(version.user_key), False))
    if descriptor.kind == "list":
        fields.append(StructField("position", LongType(), False))
    return StructType([*fields, expires_at, *place])


def _record_of(savepoint: Savepoint) -> Record:
    return Record(id=savepoint.checkpoint_id, retained=(), reproduces=None, content=savepoint.content)


@dataclass
class _File(InputPartition):
    file: CanonicalFile


class _CanonicalReader(DataSourceReader):
    """The files of a canonical savepoint as the table that a checkpoint gives."""

    def __init__(self, folder: str, savepoint: Savepoint, state: str, schema: StructType) -> None:
        if state == CHECK:
            raise UsageError(f"{folder} is a canonical savepoint: restoring it checks it, {CHECK} can't")
        self._folder, self._schema, self._savepoint, self._state = folder, schema, savepoint, state

    def partitions(self) -> Sequence[InputPartition]:
        return [_File(file) for file in self._savepoint.files if file.state == self._state]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _File)
        storage, file, content = open_storage(self._folder), partition.file, self._savepoint.content
        arrow = to_arrow_schema(self._schema, timezone="UTC", prefers_large_types=False)
        key_schema = parse_struct(content.key_schema)
        descriptor = next((d for d in content.states if d.name == self._state), None)
        stored = timers_schema(key_schema) if descriptor is None else state_schema(descriptor, key_schema)
        with work_folder(f"read-{file.shard}-") as work:
            storage.download(file.handle, work / "file")
            for table in read_tables(work / "file", stored, None, f"{self._folder}/{file.handle.path}"):
                columns = {name: table[name] for name in table.column_names}
                columns["expires_at"] = table["expires_at_ms"].cast(pa.timestamp("ms", "UTC"))
                columns["shard"] = pa.array([file.shard] * table.num_rows, pa.int32())
                chosen = pa.table({name: columns[name] for name in arrow.names})
                yield from chosen.cast(arrow).to_batches()


class _StateReader(DataSourceReader):
    def __init__(self, root: str, record: Record, state: str, schema: StructType) -> None:
        self._root = root
        self._record = record
        self._state = state
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        content = self._record.content
        return [_Shard(ref, content.max_parallelism, content.key_schema, content.states) for ref in content.shards]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Shard)
        storage = open_storage(self._root)
        arrow = to_arrow_schema(self._schema, timezone="UTC", prefers_large_types=False)
        with work_folder(f"read-{partition.ref.shard}-") as work:
            if self._state == CHECK:
                yield _batch(list(_findings(partition, storage, work)), arrow)
                return
            manifest = needed_manifest(partition.ref, storage)
            restored = restore_shard(manifest.key_groups, [manifest], storage, work / "db", EngineOptions())
            try:
                rows: list[tuple[Any, ...]] = []
                for row in self._rows(partition, restored.store):
                    rows.append(row)
                    if len(rows) == _ROWS_PER_BATCH:
                        yield _batch(rows, arrow)
                        rows = []
                if rows:
                    yield _batch(rows, arrow)
            finally:
                restored.store.close()

    def _rows(self, partition: _Shard, store: Any) -> Iterator[tuple[Any, ...]]:
        keys = KeyCodec(parse_struct(partition.key_schema))
        shard = partition.ref.shard
        if self._state == TIMERS:
            for key_group, key, expiry_ms in read_timers(store):
                yield keys.decode(key), from_ms(expiry_ms), key_group, shard
            return
        descriptor = _descriptor(self._record, self._state)
        version = descriptor.versions[-1]
        decode = row_reader(descriptor.name, descriptor.versions)
        user_keys = KeyCodec(parse_struct(version.user_key)) if version.user_key is not None else None
        now_ms = self._record.content.time.processing_time_ms

        def columns(entry: StoredEntry) -> tuple[Any, ...]:
            row: list[Any] = [entry.key, decode(entry.row)]
            if user_keys is not None:
                row.append(entry.user_key)
            if entry.position is not None:
                row.append(entry.position)
            expires_at = None if entry.expiry_ms is None else from_ms(entry.expiry_ms)
            return (*row, expires_at, entry.key_group, shard)

        for entry in read_entries(store, descriptor, keys, user_keys):
            if entry.expiry_ms is None or entry.expiry_ms > now_ms:
                yield columns(entry)


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


def _batch(rows: list[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    columns = [
        pa.array([_arrow_value(v, f.type) for v in column], type=f.type)
        for f, column in zip(schema, zip(*rows, strict=True), strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _arrow_value(value: Any, data_type: pa.DataType) -> Any:
    """Rows of state are tuples by position; Arrow takes structs by name, all the way down."""
    if value is None:
        return None
    if pa.types.is_struct(data_type):
        return {f.name: _arrow_value(v, f.type) for f, v in zip(data_type, value, strict=True)}
    if pa.types.is_list(data_type):
        return [_arrow_value(v, data_type.value_type) for v in value]
    if pa.types.is_map(data_type):
        return [(_arrow_value(k, data_type.key_type), _arrow_value(v, data_type.item_type)) for k, v in value.items()]
    return value
