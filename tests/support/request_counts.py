"""The requests of one interval to the storage, by phase and kind: what Airflow's driver and its `checkpoint` task do, without Spark.

    python -m tests.support.request_counts [--intervals N] [--shards N] [--server gcs|s3]

``--server``: HTTP requests to a test server of Google Cloud Storage or S3, instead of calls of a storage in memory. Each interval is
a day with rows for every shard; the last of them is counted.
"""

from __future__ import annotations

import argparse
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from cairn import testing
from cairn.operations.intervals import process_interval as running
from cairn.operations.intervals.plan_interval import Attempt
from cairn.pipeline import Pipeline
from cairn.rows.local_rows import LocalRows
from cairn.shard_jobs import interval as shard_job
from cairn.spark.ddl import parse_ddl_locally
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.adapters.open_storage import open_storage
from state_backend.ports.storage import Storage
from state_backend.values.records import RunRef
from state_backend.values.retention import RetentionPolicy
from state_backend.values.zones import zone_of
from tests.support import gcs_server, s3_server
from tests.support.coordinator import Coordinator
from tests.support.counting import INPUT_SCHEMA, counting, day
from tests.support.faulty_proxy import FaultyProxy
from tests.support.faulty_storage import FaultyStorage

PHASES = ("begin", "shards", "prepare", "commit", "publish", "clean up")
KEYS = 2_000
Counts = dict[str, Counter[str]]


def pipeline_of(shards: int, retention: RetentionPolicy | None = None) -> Pipeline:
    def read(spark: Any, interval: Any) -> Any:
        users = KEYS if interval == day(0) else 200
        rows = [(f"user-{n}", "fig", 1) for n in range(users)]
        return LocalRows(rows, parse_ddl_locally(INPUT_SCHEMA), zone_of("UTC"), "the input")

    return counting(source=read, parallelism=shards, retention=retention)


def count(
    storage: Storage,
    intervals: int,
    shards: int,
    *,
    retention: RetentionPolicy | None = None,
    seen: Callable[[], list[str]] | None = None,
) -> Counts:
    """The requests of the last of so many intervals. ``retention``: None for the default. ``seen``: the kinds of requests that a server got so far; None: the calls of the
    storage are counted."""
    counts: Counts = {}
    for n in range(intervals):
        counts = one_interval(storage, pipeline_of(shards, retention), n, seen)
    return counts


def one_interval(storage: Storage, pipeline: Pipeline, n: int, seen: Callable[[], list[str]] | None = None) -> Counts:
    """The requests of one interval, in the two processes that Airflow gives it."""
    calls = FaultyStorage(storage, {})
    counted: Storage = calls if seen is None else storage
    so_far = seen or (lambda: [method for method, _ in calls.calls])
    marks: list[tuple[str, int]] = []

    def phase(name: str) -> None:
        marks.append((name, len(so_far())))

    def on_shards(spark: Any, job: Any, inputs: Any) -> Any:
        phase("shards")
        acks = testing._on_shards(pipeline.processor, spark, job, inputs)
        phase("prepare")
        return acks

    attempt = str(uuid.uuid4())
    run = RunRef(run_id=f"day-{n}", clear_number=0, try_number=1)
    opens = partial(_same, counted)
    task = Coordinator(counted, pipeline.name, remembers=True)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(shard_job, "open_storage", opens))
        phase("begin")
        running.process_interval(
            testing.PlanningSession("UTC"),  # type: ignore[arg-type]
            pipeline,
            replace(task.at, root="memory://counted"),
            Attempt(id=attempt, interval=day(n), run=run),
            on_shards=on_shards,
        )
        phase("commit")
        task.commit(attempt)
        phase("publish")
        task.publish(None)
        phase("clean up")
        task.clean_up()
    ends = [at for _, at in marks[1:]] + [len(so_far())]
    return {name: Counter(so_far()[at:end]) for (name, at), end in zip(marks, ends, strict=True)}


def _same(storage: Storage, url: str) -> Storage:
    return storage


def kinds_on_s3(server: FaultyProxy) -> list[str]:
    """Return the kind of each request to S3: those of the XML interface."""

    def kind(method: str, target: str) -> str:
        if method == "GET":
            return "list" if "list-type=" in target else "read"
        if method == "POST":
            return "batch" if "?delete" in target else "upload"
        return {"HEAD": "stat", "PUT": "upload"}.get(method, method.lower())

    return [kind(request.method, request.target) for request in server.requests]


def kinds_on_gcs(server: FaultyProxy) -> list[str]:
    """Return the kind of each request to Google Cloud Storage: those of the JSON interface."""

    def kind(method: str, target: str) -> str:
        if method == "GET":
            return "list" if "/o?" in target else "read" if "alt=media" in target else "stat"
        return "upload" if "/upload/" in target else "batch" if target.startswith("/batch/") else method.lower()

    return [kind(request.method, request.target) for request in server.requests]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.request_counts")
    parser.add_argument("--intervals", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--server", choices=["gcs", "s3"])
    options = parser.parse_args(arguments)
    if options.server == "gcs":
        with gcs_server.gcs_server() as server:
            storage = open_storage(f"gs://{gcs_server.BUCKET}/counted")
            counts = count(storage, options.intervals, options.shards, seen=partial(kinds_on_gcs, server))
    elif options.server == "s3":
        with s3_server.s3_server() as server:
            storage = open_storage(f"s3://{s3_server.BUCKET}/counted")
            counts = count(storage, options.intervals, options.shards, seen=partial(kinds_on_s3, server))
    else:
        counts = count(MemoryStorage(), options.intervals, options.shards)
    for name, found in counts.items():
        print(f"{name:>8} {found.total():>4}  {dict(sorted(found.items()))}")
    every = sum((counts[name] for name in PHASES), Counter[str]())
    print(f"{'all':>8} {every.total():>4}  {dict(sorted(every.items()))}")


if __name__ == "__main__":
    main()
