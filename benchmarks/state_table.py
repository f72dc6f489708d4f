"""Reading state as a table: how many bytes and how long, of a look-up by key and of everything, beside a bare restore.

    python -m benchmarks.state_table [--keys 1000000] [--shards 64] [--spark]

Local disk, one process, shards one after the other; with ``--spark`` also through ``format("keyed_state")`` on two cores. Prints
one JSON object: medians of three, seconds and bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from cairn.data_sources.state_selection import plan_read
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.rocks import EngineOptions, RocksStore
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.formats.key_columns import KeyColumns
from state_backend.formats.row_columns import RowColumns
from state_backend.formats.spark_hash import key_groups as key_groups_of
from state_backend.formats.types import parse_struct
from state_backend.inspection.state_table import StateSource, read_table
from state_backend.shard.canonical_files import EntryWriter
from state_backend.shard.manifest import write_manifests
from state_backend.shard.restore import restore_shard
from state_backend.shard.snapshot import take_snapshot
from state_backend.state.canonical_columns import Located
from state_backend.values.intervals import Interval, from_ms
from state_backend.values.key_groups import range_of
from state_backend.values.records import (
    Content,
    LogicalTime,
    Permissions,
    Prepared,
    RunRef,
    SchemaVersion,
    StateDescriptor,
    Totals,
)

MAX_PARALLELISM = 128
TIMES = 3
FIELDS = (("k", "long"), ("count", "long"), ("sum", "double"), ("last", "string"))


def _struct(*fields: tuple[str, str]) -> dict[str, Any]:
    return {
        "type": "struct",
        "fields": [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in fields],
    }


KEY, VALUE = _struct(FIELDS[0]), _struct(*FIELDS[1:])
STATE = StateDescriptor(
    name="totals",
    kind="value",
    state_id=1,
    ttl_ms=None,
    versions=(SchemaVersion(version=1, value=VALUE, user_key=None),),
)


def make(root: Path, keys: int, shards: int, work: Path) -> None:
    """A pipeline ``bench`` with one checkpoint: a value of about 70 bytes for each key."""
    storage = LocalStorage(root / "bench")
    rng = np.random.default_rng(1)
    columns = [pa.array(rng.permutation(keys)), pa.array(rng.integers(0, 1000, keys)), pa.array(rng.random(keys))]
    columns.append(pa.array([f"{n:032x}" for n in rng.integers(0, 2**62, keys).tolist()]))
    key_schema = parse_struct(KEY)
    groups = key_groups_of(columns[:1], key_schema, MAX_PARALLELISM)
    rests = KeyColumns(key_schema).encode(columns[:1])
    entries = RowColumns("totals", parse_struct(VALUE), 1).encode(
        pa.table(columns[1:], names=[n for n, _ in FIELDS[1:]])
    )
    manifests = []
    for shard in range(shards):
        owned = range_of(shard, shards, MAX_PARALLELISM)
        with RocksStore(work / f"db-{shard}") as store:
            writer = EntryWriter(store, [STATE], key_schema, owned, MAX_PARALLELISM)
            mine = (groups >= owned.first) & (groups <= owned.last)
            writer.put_entries(STATE, Located(rests, entries), groups, mine)
            snapshot = take_snapshot(
                store,
                storage,
                image=work / f"image-{shard}",
                attempt="made",
                shard=shard,
                task=0,
                key_groups=owned,
                key_group_states=writer.state.key_group_states(),
                opened=(),
                opened_inline=frozenset(),
                full=True,
                inline_budget_bytes=0,
            )
        manifests.append(snapshot.manifest)
    counts = dict.fromkeys(Totals.__slots__, 0) | {"keys": keys, "entries": keys}
    content = Content(
        kind="interval",
        pipeline="bench",
        pipeline_start_ms=0,
        interval=Interval(from_ms(0), from_ms(86_400_000)),
        run=RunRef(run_id="bench", clear_number=0, try_number=1),
        attempt="made",
        base_id=None,
        permissions=Permissions(),
        parallelism=shards,
        max_parallelism=MAX_PARALLELISM,
        key_schema=KEY,
        states=(STATE,),
        time=LogicalTime(mode="none", processing_time_ms=86_400_000, watermark_ms=None),
        source_position={},
        code_hash="0" * 16,
        totals=Totals(**counts),
        digest=sum(m.digest for m in manifests) % 2**64,
        shards=write_manifests(manifests, "made", storage),
        outputs=(),
        durations_us={},
        worker_pids=(),
    )
    coordinator = Coordinator(storage, "bench")
    coordinator.prepare(Prepared(h0=0, content=content))
    coordinator.commit("made")


class Counted:
    """Bytes that were read from local storage while it is entered."""

    def __enter__(self) -> Counted:
        self.bytes_read = 0
        download, read = LocalStorage.download, LocalStorage.read

        def counting_download(storage: Any, handle: Any, destination: Path) -> None:
            self.bytes_read += handle.size_bytes
            download(storage, handle, destination)

        def counting_read(storage: Any, path: str) -> bytes:
            data = read(storage, path)
            self.bytes_read += len(data)
            return data

        self._patches = [
            patch.object(LocalStorage, "download", counting_download),
            patch.object(LocalStorage, "read", counting_read),
        ]
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *error: object) -> None:
        for each in self._patches:
            each.stop()


def timed(work: Callable[[Path], int]) -> dict[str, Any]:
    """Seconds (median), and rows and bytes of one more run."""
    seconds = []
    for _ in range(TIMES):
        with tempfile.TemporaryDirectory(prefix="cairn-bench-") as folder:
            started = time.perf_counter()
            work(Path(folder))
            seconds.append(time.perf_counter() - started)
    with tempfile.TemporaryDirectory(prefix="cairn-bench-") as folder, Counted() as counted:
        rows = work(Path(folder))
    return {"seconds": round(statistics.median(seconds), 3), "rows": rows, "bytes_read": counted.bytes_read}


def measure(source: StateSource) -> dict[str, Any]:
    from state_backend.shard.manifest import manifest_of

    storage = LocalStorage(Path(source.url))
    keys = [int(k) for k in np.random.default_rng(2).integers(0, source.content.totals.keys, 20)]

    def restore(folder: Path, *, scan: bool) -> int:
        rows = 0
        for ref in source.content.shards:
            manifest = manifest_of(ref, storage)
            opened = restore_shard(manifest.key_groups, [manifest], storage, folder / str(ref.shard), EngineOptions())
            with opened.store as store:
                rows += sum(1 for _ in store.scan(b"", None)) if scan else 0
        return rows

    def read(folder: Path) -> int:
        rows = 0
        for ref in source.content.shards:
            (work := folder / str(ref.shard)).mkdir()
            rows += sum(t.num_rows for t in read_table(source, "totals", ref.shard, storage, work))
        return rows

    def look_up(folder: Path) -> int:
        rows = 0
        for n, key in enumerate(keys):
            plan = plan_read(source.content, keys=[(key,)])
            for shard in plan.shards:
                (work := folder / str(n)).mkdir()
                tables = read_table(source, "totals", shard, storage, work, plan.part_of(shard, source.content))
                rows += sum(t.num_rows for t in tables)
        return rows

    found = {
        "restore": timed(lambda folder: restore(folder, scan=False)),
        "restore and pass by every entry": timed(lambda folder: restore(folder, scan=True)),
        "read as a table": timed(read),
    }
    several = timed(look_up)
    found["look up one key (mean of 20)"] = {
        "seconds": round(several["seconds"] / 20, 4),
        "rows": several["rows"] / 20,
        "bytes_read": several["bytes_read"] // 20,
    }
    return found


def through_spark(root: Path) -> dict[str, Any]:
    from cairn.data_sources.keyed_state import KeyedState
    from cairn.spark.session import connect

    spark = connect("local[2]", "cairn state table")
    spark.dataSource.register(KeyedState)
    found = {}
    for what, key in (("look up one key", {"key": '{"k": 4711}'}), ("sum over all", {})):
        seconds = []
        for _ in range(TIMES + 1):
            started = time.perf_counter()
            reader = spark.read.format("keyed_state").option("state", "totals")
            table = reader.options(**key).load(str(root / "bench"))
            rows = table.selectExpr("count(*) as n", "sum(value.sum)").collect()
            seconds.append(time.perf_counter() - started)
        found[f"Spark: {what}"] = {"seconds": round(statistics.median(seconds[1:]), 2), "rows": rows[0].n}
    spark.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--spark", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cairn-bench-") as folder:
        root, work = Path(folder) / "root", Path(folder) / "work"
        work.mkdir()
        make(root, options.keys, options.shards, work)
        record = Coordinator(LocalStorage(root / "bench"), "bench").record("latest")
        found: dict[str, Any] = {"keys": options.keys, "shards": options.shards}
        found |= measure(StateSource.of_record(str(root / "bench"), record))
        if options.spark:
            found |= through_spark(root)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
