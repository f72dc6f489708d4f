"""The cost of single parts: rocksdict alone, keyed state without Spark, and one shard's task without Spark."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

import google_crc32c
import numpy as np
import pyarrow as pa
import rocksdict

from benchmarks.engines import interval
from cairn.operations.intervals.run_interval import run_interval
from cairn.pipeline import Pipeline
from cairn.rows.arrange_rows import Arrangement
from cairn.rows.routing import route
from cairn.shard_jobs.interval import IntervalJob
from cairn.shard_jobs.run_on_shards import run_on_shards
from state_backend.adapters.rocks import EngineOptions, RocksStore
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.prepare_content import ShardAck
from state_backend.formats.key_columns import KeyColumns
from state_backend.formats.types import parse_struct
from state_backend.state.shard_state import ShardState
from state_backend.state.state_variables import ValueState
from state_backend.values.records import KeyGroupState, SchemaVersion, StateDescriptor

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")
_BATCH = 10_000
_KEY_GROUPS = 128


def rocksdict_rates(folder: Path, entries: int, rounds: int) -> dict[str, list[float]]:
    """Measure puts and sorted multi-gets per second, in batches of 10,000.

    Keys have 12 bytes and values 27 bytes, as in the section "row". The first round writes into an empty database and
    does not count.
    """
    keys = [(n % _KEY_GROUPS).to_bytes(2, "big") + b"\x01\x01" + n.to_bytes(8, "big") for n in range(entries)]
    keys.sort()
    database = rocksdict.Rdict(str(folder), EngineOptions().to_options())
    unlogged = rocksdict.WriteOptions()
    unlogged.disable_wal = True
    database.set_write_options(unlogged)
    rates: dict[str, list[float]] = {"puts_per_s": [], "gets_per_s": []}
    try:
        for number in range(rounds + 1):
            value = bytes([number]) * 27
            started_s = time.perf_counter()
            for batch in _batches(keys):
                changes = rocksdict.WriteBatch(raw_mode=True)
                for key in batch:
                    changes.put(key, value)
                database.write(changes)
            put_s = time.perf_counter() - started_s
            started_s = time.perf_counter()
            for batch in _batches(keys):
                database.get(batch)
            get_s = time.perf_counter() - started_s
            if number:
                rates["puts_per_s"].append(entries / put_s)
                rates["gets_per_s"].append(entries / get_s)
    finally:
        database.close()
    return rates


def copy_rates(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Measure the rates of copying a file of 256 MiB durably and of computing its crc32c, in megabytes per second.

    An upload on this machine can't be faster than these rates.
    """
    source, copy = folder / "source", folder / "copy"
    source.write_bytes(np.random.default_rng(20130101).bytes(256 * 1024 * 1024))
    size_mb = source.stat().st_size / 1e6
    rates: dict[str, list[float]] = {"copied_mb_per_s": [], "checked_mb_per_s": []}
    for _ in range(rounds):
        started_s = time.perf_counter()
        shutil.copyfile(source, copy)
        with copy.open("rb") as written:
            os.fsync(written.fileno())
        rates["copied_mb_per_s"].append(size_mb / (time.perf_counter() - started_s))
        started_s = time.perf_counter()
        google_crc32c.value(copy.read_bytes())
        rates["checked_mb_per_s"].append(size_mb / (time.perf_counter() - started_s))
        copy.unlink()
    source.unlink()
    return rates


def state_rates(folder: Path, keys: int, rounds: int) -> dict[str, list[float]]:
    """Measure updates per second of a value state of three longs, without Spark and user code.

    An update is: encode the key, prefetch, get, update, and flush.
    """

    def struct(*names: str) -> dict[str, Any]:
        fields = [{"name": name, "type": "long", "nullable": True, "metadata": {}} for name in names]
        return {"type": "struct", "fields": fields}

    version = SchemaVersion(version=1, value=struct("n", "total", "last"), user_key=None)
    total = StateDescriptor(name="total", kind="value", state_id=1, ttl_ms=None, versions=(version,))
    columns = KeyColumns(parse_struct(struct("k")))
    # The keys have the order in which Spark delivers them: by key group, then by key.
    ordered = [(group, (n,)) for group in range(_KEY_GROUPS) for n in range(group, keys, _KEY_GROUPS)]
    rates: dict[str, list[float]] = {"updates_per_s": []}
    groups: tuple[KeyGroupState, ...] = ()
    with RocksStore(folder) as store:
        for number in range(rounds + 1):
            started_s = time.perf_counter()
            state = ShardState(store, key_groups=groups, descriptors=[total], now_ms=0)
            value = ValueState(state, "total")
            for batch in _batches(ordered):
                groups_of = np.array([group for group, _ in batch], np.uint16)
                encoded = columns.encode([pa.array([key for _, (key,) in batch], pa.int64())])
                state.prefetch(groups_of, encoded)
                for (group, _), key in zip(batch, encoded.to_pylist(), strict=True):
                    state.set_key(group, key)
                    n, sum_, _ = value.get() or (0, 0, 0)
                    value.update((n + 1, sum_ + number, number))
                state.flush()
            if number:
                rates["updates_per_s"].append(keys / (time.perf_counter() - started_s))
            groups = state.key_group_states()
    return rates


def captured_shard(
    spark: SparkSession, pipeline: Pipeline, root: Path, number: int
) -> tuple[IntervalJob, list[pa.RecordBatch]]:
    """Run an interval of a pipeline with one shard, and return the shard's job and its Arrow batches in order."""
    routed: list[DataFrame] = []
    jobs: list[tuple[IntervalJob, Arrangement | None]] = []

    def keep_rows(*arguments: Any, **named: Any) -> DataFrame:
        routed.append(route(*arguments, **named))
        return routed[-1]

    def keep_job(spark: SparkSession, job: IntervalJob, placed: Any, arrangement: Arrangement | None) -> list[ShardAck]:
        jobs.append((job, arrangement))
        return run_on_shards(spark, job, placed, arrangement)

    with (
        patch("cairn.operations.intervals.process_interval.route", keep_rows),
        patch("cairn.operations.intervals.process_interval.run_on_shards", keep_job),
    ):
        run_interval(spark, pipeline, interval(number), str(root))
    # The batches have as many rows as those that Spark passes to a writer.
    batches = routed[0].toArrow().combine_chunks().to_batches(max_chunksize=_BATCH)
    job, arrangement = jobs[0]
    return job, batches if arrangement is None else list(arrangement.arrange(batches, partial(work_folder, "floor")))


def run_shard_s(job: IntervalJob, batches: list[pa.RecordBatch], number: int) -> float:
    """Run one shard's task in this process, and return the seconds of the phases process and timers.

    Args:
        job: The captured job.
        batches: The captured batches.
        number: A number that differs in each call, from 1,000 on, because files are named by it.
    """
    phases = job.run_shard(iter(batches), 0, number).durations_us
    return (phases["process"] + phases["timers"]) / 1e6


def _batches(rows: Sequence[T]) -> Iterator[list[T]]:
    for at in range(0, len(rows), _BATCH):
        yield list(rows[at : at + _BATCH])
