"""What validation costs beside a cold restore of the same checkpoint.

    python -m benchmarks.validation [--keys 1000000] [--rounds 5]

A pipeline of two shards loads the keys, then updates a tenth of them twice; values are rows of a long and a string of random
letters, about 100 bytes. Of the last checkpoint each round measures, one after the other:

    in one process, shard after shard, in seconds and in seconds of CPU, which other load on the machine changes less
        restore     every shard into an empty folder from the storage, without the host's cache
        fast        `verify_files`
        full        the same, then every shard restored and walked
    on Spark, two cores, a warm session
        interval    one without input, without the host's cache: what a cold restore costs a pipeline
        fast, full  `validate_checkpoint` without expectations

Files lie on the local disk, where nothing keeps checksums: fast has to read them. Figures are medians; ratios are those of the
medians.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.arrow_processor import ArrowProcessor, BatchResult, KeyedBatch
from cairn.operations.run_interval import coordinator_of, run_interval
from cairn.operations.validate import validate_checkpoint
from cairn.pipeline import Interval, Pipeline
from cairn.shard_jobs.validate import ValidationJob
from cairn.spark.session import connect
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.adapters.rocks import EngineOptions
from state_backend.inspection.verify import verify_files
from state_backend.shard.manifest import manifest_of
from state_backend.shard.restore import restore_shard
from state_backend.values.records import Record

START = datetime(2024, 1, 1, tzinfo=UTC)
SCHEMA = "n bigint, text string"
COLD = EngineOptions(cache_dir=None)


class Texts(ArrowProcessor):
    """The newest number and text of each key; no output."""

    def init(self, handle: Any) -> None:
        handle.getValueState("text", SCHEMA)

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        last = pa.array(batch.row_offsets[1:] - 1)
        return BatchResult(states={"text": batch.rows.select(["n", "text"]).take(last)})


def hour(number: int) -> Interval:
    return Interval(START + timedelta(hours=number), START + timedelta(hours=number + 1))


def texts_of(keys: int, folder: Path) -> Pipeline:
    """Interval 0 has all keys, 1 and 2 a tenth of them each, later ones none."""
    import pyarrow.parquet as pq

    random = np.random.default_rng(7)
    for number in range(3):
        chosen = np.arange(keys) if number == 0 else random.choice(keys, keys // 10, replace=False)
        letters = random.integers(97, 123, (len(chosen), 84), np.uint8).view("S84")[:, 0].astype(str)
        pq.write_table(
            pa.table({"k": chosen.astype(np.int64), "n": chosen.astype(np.int64), "text": letters}),
            folder / f"{number}.parquet",
        )
    pq.write_table(pq.read_table(folder / "0.parquet").slice(0, 0), folder / "none.parquet")

    def read(spark: Any, interval: Interval) -> Any:
        number = (interval.start - START) // timedelta(hours=1)
        return spark.read.parquet(str(folder / (f"{number}.parquet" if number < 3 else "none.parquet")))

    return Pipeline(
        name="texts",
        start=START,
        source=read,
        key=["k"],
        processor=Texts,
        api="arrow",
        output_schema="k bigint",
        time_mode="none",
        parallelism=2,
        engine=COLD,
    )


def in_process(root: str, record: Record, work: Path) -> dict[str, Callable[[], None]]:
    """Restore, fast and full of all shards, one after the other, in this process."""
    storage, content = open_storage(root), record.content
    manifests = [manifest_of(ref, storage) for ref in content.shards]
    job = ValidationJob(root=root, content=content, canonical=(), engine=COLD)

    def restore() -> None:
        for manifest in manifests:
            restore_shard(manifest.key_groups, [manifest], storage, work / "db", COLD).store.close()
            shutil.rmtree(work / "db")

    def fast() -> None:
        (work / "files").mkdir()
        assert verify_files(content, storage, work=work / "files").findings == ()
        (work / "files").rmdir()

    def full() -> None:
        fast()
        found = [job.run_shard(iter(()), manifest.shard, 0) for manifest in manifests]
        assert job.findings(found) == () and sum(f.entries for f in found) == content.totals.entries

    return {"restore": restore, "fast": fast, "full": full}


def on_spark(spark: Any, pipeline: Pipeline, root: str, record: Record) -> dict[str, Callable[[], None]]:
    """An interval without input, fast and full by way of the public functions."""
    number = [3]

    def interval() -> None:
        run_interval(spark, pipeline, hour(number[0]), root)
        number[0] += 1

    def validate(mode: Any) -> Callable[[], None]:
        def run() -> None:
            assert validate_checkpoint(spark, pipeline, root, record, mode=mode, with_expectations=False).success

        return run

    return {"interval": interval, "fast": validate("fast"), "full": validate("full")}


def medians_s(
    measured: dict[str, Callable[[], None]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Seconds by the clock; the measured take turns, after a round that warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in measured}
    for number in range(rounds + 1):
        for name, run in measured.items():
            started_s = clock()
            run()
            if number:
                seconds[name].append(clock() - started_s)
    return {name: round(statistics.median(values), 3) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="cairn-validation-"))
    try:
        spark = connect("local[2]", "cairn validation benchmark")
        root = str(folder / "root")
        pipeline = texts_of(options.keys, folder)
        for number in range(3):
            record = run_interval(spark, pipeline, hour(number), root)
        totals = record.content.totals
        print(f"{totals.keys:,} keys, {totals.state_bytes:,} bytes in {totals.state_files} files", flush=True)
        alone = medians_s(in_process(join_url(root, pipeline.name), record, folder), options.rounds)
        cpu = medians_s(in_process(join_url(root, pipeline.name), record, folder), options.rounds, time.process_time)
        session = medians_s(on_spark(spark, replace(pipeline), root, record), options.rounds)
        assert coordinator_of(pipeline, root).log().quarantined == {}
        spark.stop()
        report = {
            "keys": totals.keys,
            "state_bytes": totals.state_bytes,
            "in_process_s": alone,
            "in_process_cpu_s": cpu,
            "on_spark_s": session,
            "fast_to_full": {
                "in_process": round(alone["fast"] / alone["full"], 3),
                "in_process_cpu": round(cpu["fast"] / cpu["full"], 3),
                "on_spark": round(session["fast"] / session["full"], 3),
            },
            "full_to_cold_restore": {
                "in_process": round(alone["full"] / alone["restore"], 2),
                "in_process_cpu": round(cpu["full"] / cpu["restore"], 2),
                "on_spark": round(session["full"] / session["interval"], 2),
            },
        }
        print(json.dumps(report, indent=2))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
