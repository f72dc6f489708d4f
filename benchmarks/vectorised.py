"""Lists, maps, timers and expiry in the vectorised API beside the row API, on one shard without Spark.

    python -m benchmarks.vectorised [--keys 100000] [--rows 1000000] [--rounds 5] [--only append,timers]

Each workload runs a first interval that fills the state. Further intervals of the same size are measured. The figures
are CPU and wall time of the phases process and timers. These begin with sorted Arrow batches of 10,000 rows. They end
with output in a Parquet file and state in RocksDB's files.

The two APIs take turns. After each interval their digests and outputs must be equal. The program prints medians, and
the ratio of the vectorised API's rate to the row API's rate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, TimerValues
from pyspark.sql.types import LongType, Row, StructField, StructType

from cairn.arrow_processor import ArrowProcessor, BatchResult, KeyedBatch, with_keys
from cairn.rows.input_batches import InputBatches
from cairn.rows.output_file import LocalParquet
from cairn.rows.routing import INPUT, key_columns
from cairn.runners.arrow_runner import ArrowRunner
from cairn.runners.input_rows import KeyedInput, row_slices
from cairn.runners.keyed_runner import KeyedRunner
from cairn.runners.output_rows import OutputRows
from cairn.runners.processor_handle import Clock, DeclaringHandle, InputColumns, row_maker
from cairn.runners.user_code import UserCode
from cairn.shard_jobs.interval import rare_garbage_collection
from cairn.spark.ddl import parse_ddl_locally
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.rocks import RocksStore
from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.key_columns import KeyColumns
from state_backend.formats.types import parse_struct
from state_backend.state.expiry import expire
from state_backend.state.shard_state import ShardState
from state_backend.values.intervals import Interval
from state_backend.values.key_groups import KeyGroupRange

KEY = StructType([StructField("k", LongType())])
INPUT_SCHEMA = StructType([StructField("k", LongType()), StructField("v", LongType())])
OUTPUT = pa.schema([("k", pa.int64()), ("n", pa.int64())])
KEY_GROUPS, BATCH_ROWS = 128, 10_000
HOUR_MS = 3_600_000
_BEGIN = datetime(2024, 1, 1, tzinfo=UTC)
_INTERVAL = Interval(_BEGIN, _BEGIN + timedelta(hours=1))
_Samples = dict[tuple[str, str], list[tuple[float, float]]]


class _Rows(StatefulProcessor):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        yield Row(k=key[0], n=self.take([row.v for row in rows], timerValues))

    def take(self, values: list[int], time: TimerValues) -> int:
        raise NotImplementedError


class _Columns(ArrowProcessor):
    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        n = self.take(batch, batch.rows.select(["v"]))
        return BatchResult(output=with_keys(batch, pa.table({"n": n})))

    def take(self, batch: KeyedBatch, values: pa.Table) -> Any:
        raise NotImplementedError


class RowAppend(_Rows):
    """Append each key's rows to its list."""

    def init(self, handle: Any) -> None:
        self.list = handle.getListState("list", "v bigint")

    def take(self, values: list[int], time: TimerValues) -> int:
        self.list.appendList([(v,) for v in values])
        return len(values)


class ColumnAppend(_Columns):
    """Append each key's rows to its list: the same as `RowAppend`, in the vectorised API."""

    init = RowAppend.init

    def take(self, batch: KeyedBatch, values: pa.Table) -> Any:
        self.list.appendList(batch.key_of_row, values)
        return np.diff(batch.row_offsets)


class RowLatest(_Rows):
    """Read each key's list, and replace it by the newest ten rows."""

    init = RowAppend.init

    def take(self, values: list[int], time: TimerValues) -> int:
        kept = [*self.list.get(), *((v,) for v in values)]
        self.list.put(kept[-10:])
        return len(kept)


class ColumnLatest(_Columns):
    """Read each key's list, and replace it by the newest ten rows: the same as `RowLatest`, in the vectorised API."""

    init = RowAppend.init

    def take(self, batch: KeyedBatch, values: pa.Table) -> Any:
        before = self.list.get()
        held, new = np.diff(before.offsets), np.diff(batch.row_offsets)
        keys = np.concatenate([np.repeat(np.arange(len(held)), held), batch.key_of_row])
        order = np.argsort(keys, kind="stable")
        rows, keys = pa.concat_tables([before.rows, values]).take(order), keys[order]
        ends = np.cumsum(held + new)
        newest = np.arange(len(keys)) >= np.repeat(ends - 10, held + new)
        self.list.put(keys[newest], rows.filter(pa.array(newest)))
        return held + new


class RowCounts(_Rows):
    """Count in a map how often each key had each value."""

    def init(self, handle: Any) -> None:
        self.counts = handle.getMapState("counts", "v bigint", "n bigint")

    def take(self, values: list[int], time: TimerValues) -> int:
        for v in values:
            (n,) = self.counts.getValue((v,)) or (0,)
            self.counts.updateValue((v,), (n + 1,))
        return len(values)


class ColumnCounts(_Columns):
    """Count in a map how often each key had each value: the same as `RowCounts`, in the vectorised API."""

    init = RowCounts.init

    def take(self, batch: KeyedBatch, values: pa.Table) -> Any:
        seen = values.append_column("k", pa.array(batch.key_of_row))
        seen = seen.group_by(["k", "v"], use_threads=False).aggregate([([], "count_all")])
        keys, user_keys = seen["k"].to_numpy(), seen.select(["v"])
        before, _ = self.counts.getValue(keys, user_keys)
        n = before["n"].fill_null(0).to_numpy() + seen["count_all"].to_numpy()
        self.counts.updateValue(keys, user_keys, pa.table({"n": n}))
        return np.diff(batch.row_offsets)


class RowMapRead(_Rows):
    """Fill each key's map once, and read the whole map in later intervals."""

    def init(self, handle: Any) -> None:
        self.counts = handle.getMapState("counts", "v bigint", "n bigint")

    def take(self, values: list[int], time: TimerValues) -> int:
        found = sum(n for _, (n,) in self.counts.iterator())
        if not found:
            for v in values:
                self.counts.updateValue((v,), (1,))
        return found


class ColumnMapRead(_Columns):
    """Fill each key's map once, and read the whole map in later intervals: the same as `RowMapRead`, in the vectorised API."""

    init = RowMapRead.init

    def take(self, batch: KeyedBatch, values: pa.Table) -> Any:
        found = self.counts.iterator()
        totals = np.append(0, np.cumsum(found.values["n"].to_numpy()))
        n = np.diff(totals[found.offsets])
        new = n[batch.key_of_row] == 0
        if new.any():
            some = values.filter(pa.array(new))
            self.counts.updateValue(batch.key_of_row[new], some, pa.table({"n": np.ones(len(some), np.int64)}))
        return n


class RowTimers(_Rows):
    """Register a timer for each row. Timers of the previous interval fire and clear a value."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", "n bigint")

    def take(self, values: list[int], time: TimerValues) -> int:
        at_ms = time.getCurrentProcessingTimeInMs()
        for v in values:
            self.handle.registerTimer(at_ms + 1000 + v)
        self.value.update((len(values),))
        return len(values)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        self.value.clear()
        yield Row(k=key[0], n=expiredTimerInfo.getExpiryTimeInMs())


class ColumnTimers(_Columns):
    """Register a timer for each row, and clear a value when it fires: the same as `RowTimers`, in the vectorised API."""

    init = RowTimers.init

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        at_ms = batch.time.getCurrentProcessingTimeInMs()
        self.handle.registerTimer(batch.key_of_row, at_ms + 1000 + batch.rows["v"].to_numpy())
        n = pa.table({"n": np.diff(batch.row_offsets)})
        return BatchResult(states={"value": n}, output=with_keys(batch, n))

    def handleExpiredTimers(self, batch: KeyedBatch) -> BatchResult:
        keys = batch.keys["k"].take(pa.array(batch.key_of_row))
        cleared = {"value": np.ones(len(batch.keys), np.bool_)}
        return BatchResult(cleared=cleared, output=pa.table({"k": keys, "n": batch.rows["expiry_ms"]}))


class RowExpiry(_Rows):
    """Append each key's rows to a list whose elements expire after half an hour.

    The elements of one interval expire at the end of the next interval.
    """

    def init(self, handle: Any) -> None:
        self.list = handle.getListState("list", "v bigint", HOUR_MS // 2)

    take = RowAppend.take


class ColumnExpiry(_Columns):
    """Append rows to a list whose elements expire: the same as `RowExpiry`, in the vectorised API."""

    init, take = RowExpiry.init, ColumnAppend.take


WORKLOADS: dict[str, dict[str, Any]] = {
    "append": {"row": RowAppend, "arrow": ColumnAppend},
    "latest": {"row": RowLatest, "arrow": ColumnLatest},
    "counts": {"row": RowCounts, "arrow": ColumnCounts},
    "map read": {"row": RowMapRead, "arrow": ColumnMapRead},
    "timers": {"row": RowTimers, "arrow": ColumnTimers},
    "expiry": {"row": RowExpiry, "arrow": ColumnExpiry},
}


def batches_of(keys: int, rows: int, seed: int) -> list[pa.RecordBatch]:
    """Return rows in the order in which Spark delivers them: sorted by key group, key and value."""
    random = np.random.default_rng(seed)
    k, v = random.integers(0, keys, rows), random.integers(0, 32, rows)
    group = k % KEY_GROUPS
    order = np.lexsort((v, k, group))
    k, v, group = k[order], v[order], group[order]
    columns = {
        "__key_group": pa.array(group, pa.int32()),
        "__kind": pa.array(np.full(rows, INPUT), pa.int8()),
        key_columns(1)[0]: pa.array(k),
        "__input": pa.StructArray.from_arrays([pa.array(k), pa.array(v)], ["k", "v"]),
    }
    batch = pa.RecordBatch.from_pydict(columns)
    return [batch.slice(begin, BATCH_ROWS) for begin in range(0, rows, BATCH_ROWS)]


class Shard:
    """The state of one processor, over as many intervals as `run` is called."""

    def __init__(self, processor: type, api: str, folder: Path, stack: ExitStack) -> None:
        self._processor, self._api, self._folder = processor, api, folder
        folder.mkdir()
        self._storage = LocalStorage(folder / "root")
        self._store = stack.enter_context(RocksStore(folder / "db"))
        handle = DeclaringHandle(parse_ddl_locally, "processing")
        processor().init(handle)
        self._descriptors = list(handle.declared.values())
        self._groups: Any = ()

    def run(self, batches: list[pa.RecordBatch], number: int) -> tuple[float, float, Any]:
        """Run one interval and return the CPU seconds, the wall seconds, and the state and output to compare."""
        now_ms = (number + 1) * HOUR_MS
        state = ShardState(
            self._store,
            key_groups=self._groups,
            descriptors=self._descriptors,
            now_ms=now_ms,
            struct_factory=row_maker,
        )
        path = self._folder / f"out-{number}.parquet"
        output = LocalParquet(OUTPUT, path)
        late = LocalParquet(OUTPUT, self._folder / "late.parquet")
        inputs = InputBatches(iter(batches), KeyGroupRange(first=0, last=KEY_GROUPS - 1), None, late)
        values = TimerValues(now_ms, 0)
        clock = Clock(mode="processing", now=values, expired=values, due_ms=now_ms)
        user_code = UserCode(_INTERVAL, "vectorised")
        wall, cpu = time.perf_counter(), time.process_time()
        with rare_garbage_collection():
            runner: Any
            if self._api == "arrow":
                columns = InputColumns(key_schema=KEY, input_schema=INPUT_SCHEMA, event_time=None)
                runner = ArrowRunner(self._processor, state, columns, output, user_code, clock)
                runner.process(inputs)
            else:
                keys = KeyCodec(parse_struct(KEY.jsonValue()), struct_factory=row_maker)
                runner = KeyedRunner(self._processor, state, keys, OutputRows(output, UTC), user_code, clock)
                runner.process(KeyedInput(inputs, KeyColumns(keys.schema), {INPUT: row_slices(INPUT_SCHEMA)}, state))
            runner.fire_timers()
            runner.close()
            expire(state)
        # Changes in RocksDB's memory become a file here, as at the end of every interval. The next interval reads that
        # file.
        self._store.capture(self._folder / f"captured-{number}")
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        self._groups = state.key_group_states()
        output.finish(self._storage, f"{number}")
        found = pq.read_table(path).sort_by([("k", "ascending"), ("n", "ascending")])
        return cpu, wall, (self._groups, found)


def measure(name: str, keys: int, rows: int, rounds: int, folder: Path) -> _Samples:
    """Run a workload with both APIs.

    Returns:
        The CPU and wall seconds of every measured interval, by workload and API.

    Raises:
        SystemExit: The APIs differ in state or output.
    """
    samples: _Samples = {(name, api): [] for api in WORKLOADS[name]}
    with ExitStack() as stack:
        shards = {
            api: Shard(processor, api, folder / f"{name} {api}", stack) for api, processor in WORKLOADS[name].items()
        }
        for number in range(rounds + 1):
            batches = batches_of(keys, rows, number)
            found = []
            for api, shard in shards.items():
                cpu, wall, result = shard.run(batches, number)
                found.append(result)
                if number:
                    samples[name, api].append((cpu, wall))
            if found[0][0] != found[1][0] or not found[0][1].equals(found[1][1]):
                raise SystemExit(f"{name}: the APIs differ in state or output after interval {number}")
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(WORKLOADS))
    options = parser.parse_args()
    print(
        f"load before the start {os.getloadavg()[0]:.1f}; {options.rows:,} rows on {options.keys:,} keys; "
        "microseconds per row, medians",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="cairn-vectorised-") as folder:
        for name in options.only.split(","):
            found = measure(name, options.keys, options.rows, options.rounds, Path(folder))
            cpu, wall = (
                {api: statistics.median(pair[at] for pair in found[name, api]) for api in ("row", "arrow")}
                for at in (0, 1)
            )
            line = f"{name:9} "
            for kind, seconds in (("CPU", cpu), ("wall", wall)):
                row, arrow = (seconds[api] / options.rows * 1e6 for api in ("row", "arrow"))
                line += f"  {kind}: row {row:6.2f}  vectorised {arrow:6.2f}  {row / arrow:5.1f} x"
            print(f"{line}   state and output equal", flush=True)


if __name__ == "__main__":
    main()
