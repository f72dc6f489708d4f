"""A driver for tests of the order of things: it takes the commands of ``cairn.driver.driver``, keeps real state in RocksDB, and starts
no Spark, so that an interval takes half a second.

The pipeline adds up numbers by key. Below ``CAIRN_TALLY/<pipeline>/``: ``input/2024-01-01.json`` holds a day's numbers;
``fail/2024-01-01`` makes one try of that day fail, and is gone then; ``slow/2024-01-01`` holds seconds that it takes;
``trace`` gets a line for every try: day, pid, base, begin and end.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cairn.driver import driver
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.adapters.rocks import EngineOptions
from state_backend.formats import paths
from state_backend.formats.spark_hash import key_group
from state_backend.formats.types import parse_struct
from state_backend.shard.manifest import manifest_of
from state_backend.state.shard_state import ShardState
from state_backend.state.state_variables import ValueState
from state_backend.values.errors import CairnError, SourceError
from state_backend.values.intervals import Interval
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.operation_parameters import ProcessInterval, from_json
from state_backend.values.records import InlineShard, LogicalTime, OutputFile, Permissions, Prepared, RunRef
from tests.support.chains import Chain
from tests.support.checkpoints import START, content, start_ms
from tests.support.coordinator import Coordinator
from tests.support.schema_json import struct
from tests.support.shards import KEY_SCHEMA, KEYS, descriptor

STATES = (descriptor("value", "value", 1),)
MAX_PARALLELISM = 16
OUTPUT_SCHEMA = struct(key="string", total="long", day="string")


def prepare(
    root: str, pipeline: str, interval: Interval, *, attempt: str, run: RunRef, permissions: Permissions
) -> Prepared:
    """One interval, up to *prepared*."""
    began_s = time.time()
    folder = Path(os.environ["CAIRN_TALLY"], pipeline)
    day = interval.start.date().isoformat()
    coordinator = Coordinator(open_storage(join_url(root, pipeline)), pipeline)
    begun = coordinator.begin(interval, permissions=permissions, pipeline_start_ms=start_ms())
    base_id = begun.base.id if begun.base is not None else None
    if (slow := folder / "slow" / day).exists():
        time.sleep(float(slow.read_text()))
    if (fail := folder / "fail" / day).exists():
        fail.unlink()
        raise SourceError(f"{day} has not landed")
    landed = folder / "input" / f"{day}.json"
    numbers: dict[str, int] = json.loads(landed.read_text())
    storage = coordinator.storage
    work = Path(tempfile.mkdtemp(prefix="cairn-tally-"))
    chain = Chain(
        work / "shards",
        storage,
        max_parallelism=MAX_PARALLELISM,
        states=STATES,
        engine=EngineOptions(cache_dir=None),
        inline_budget_bytes=1 << 16,
    )
    chain.manifests = [manifest_of(ref, storage) for ref in begun.base.content.shards] if begun.base is not None else []
    chain.now_ms = interval.end_ms
    rows = []

    def change(state: ShardState, _: KeyGroupRange) -> None:
        for key, number in sorted(numbers.items()):
            state.set_key(key_group((key,), parse_struct(KEY_SCHEMA), MAX_PARALLELISM), KEYS.encode((key,)))
            value = ValueState(state, "value")
            before = value.get()
            total = number + (before[0] if before is not None else 0)
            value.update((total, day))
            rows.append({"key": key, "total": total, "day": day})
        state.flush()

    (manifest,) = chain.step(1, "incremental", change, attempt=attempt)
    pq.write_table(pa.Table.from_pylist(rows), work / "rows.parquet")
    output = storage.create(paths.output(interval, attempt, 0, 0), (work / "rows.parquet").read_bytes())
    shutil.rmtree(work)
    made = content(
        interval,
        attempt,
        base_id,
        pipeline=pipeline,
        run=run,
        permissions=permissions,
        max_parallelism=MAX_PARALLELISM,
        key_schema=KEY_SCHEMA,
        states=STATES,
        time=LogicalTime(mode="processing", processing_time_ms=interval.end_ms, watermark_ms=None),
        source_position={"files": [{"path": f"file://{landed}", "size_bytes": landed.stat().st_size}]},
        output_schema=OUTPUT_SCHEMA,
        digest=manifest.digest,
        shards=(InlineShard(shard=0, inline=manifest),),
        outputs=(OutputFile(handle=output, rows=len(rows)),),
    )
    totals = replace(made.totals, entries=manifest.entries, keys=manifest.entries, output_rows=len(rows))
    prepared = Prepared(h0=begun.h0, content=replace(made, totals=totals))
    coordinator.prepare(prepared)
    with (folder / "trace").open("a") as trace:
        trace.write(json.dumps([day, os.getpid(), base_id, began_s, time.time()]) + "\n")
    return prepared


def main() -> int:
    options = driver.parser().parse_args()
    request = from_json(ProcessInterval, options.request)
    try:
        made = prepare(
            request.root,
            request.pipeline,
            Interval(request.start, request.end),
            attempt=request.attempt,
            run=request.run,
            permissions=request.permissions,
        )
        result = {"ok": {"attempt": request.attempt, "sink": "", "output_rows": made.content.totals.output_rows}}
    except CairnError as error:
        again = error.rerun and error.rerun.as_json()
        result = {"error": {"type": type(error).__name__, "message": str(error), "rerun": again}}
    Path(options.result).write_text(json.dumps(result))
    return 0 if "ok" in result else 1


def write_input(folder: Path, day: int, numbers: dict[str, int]) -> None:
    """The numbers of the n-th day, from 1."""
    file = folder / "input" / f"{day_name(day)}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(numbers))


def day_name(day: int) -> str:
    return START.replace(day=day).date().isoformat()


if __name__ == "__main__":
    sys.exit(main())
