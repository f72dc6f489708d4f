"""Seconds and bytes of `cairn get`, `cairn history` and `cairn replay` for one key, on a disk and on a GCS server.

    python -m benchmarks.one_key                                                1,000 intervals, 64 shards, 1,000,000 keys
    python -m benchmarks.one_key --intervals 30 --shards 8 --keys 20000

The first interval writes all keys. Each later interval changes `--changed` keys at random, and among them, in every
tenth interval, the key that is looked up. The intervals run without Spark. Bytes are those that the storage returned;
seconds are those of the functions, without the start of Python.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

from cairn.aggregates import Count, RunningAggregate
from cairn.command.get import look_up
from cairn.operations.coordinator_of import coordinator_of
from cairn.pipeline import Interval, Pipeline
from cairn.replay.replay_key import replay_key
from cairn.testing import PipelineTester
from state_backend.adapters.gcs_storage import GcsStorage
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.formats.types import parse_struct
from state_backend.inspection.key_entries import SearchedKey
from state_backend.inspection.key_history import history_of_key
from state_backend.inspection.state_table import StateSource
from state_backend.values.retention import KeepLast
from tests.support.gcs_server import BUCKET, gcs_server

START, STEP, KEY = datetime(2024, 1, 1, tzinfo=UTC), timedelta(hours=1), 4711
SCHEMA = "account long, n long"


class Rows(RunningAggregate):
    """Counts the rows of each account."""

    count = Count()


def interval(n: int) -> Interval:
    """Return the n-th interval, from 0."""
    return Interval(START + n * STEP, START + (n + 1) * STEP)


def accounts_of(n: int, keys: int, changed: int) -> list[int]:
    """Return the accounts that have a row in an interval, ascending."""
    if n == 0:
        return [*range(keys)]
    drawn = {*random.Random(n).sample(range(keys), changed)} - {KEY}
    return sorted(drawn | ({KEY} if n % 10 == 0 else set()))


def pipeline_of(arguments: argparse.Namespace) -> Pipeline:
    """Return the pipeline, whose source makes the rows of an interval."""

    def read(spark: Any, of: Interval) -> Any:
        n = (of.start - START) // STEP
        rows = [(account, n) for account in accounts_of(n, arguments.keys, arguments.changed)]
        return spark.createDataFrame(rows, SCHEMA), {"interval": n}

    return Pipeline(
        name="accounts",
        start=START,
        source=read,
        key=["account"],
        processor=Rows,
        api="arrow",
        schedule=STEP,
        parallelism=arguments.shards,
        max_parallelism=1024,
        retention=KeepLast(arguments.intervals + 1),
    )


def build(pipeline: Pipeline, root: str, arguments: argparse.Namespace) -> None:
    """Run all intervals."""
    tester = PipelineTester(pipeline, input_schema=SCHEMA, root=root)
    for n in range(arguments.intervals):
        accounts = accounts_of(n, arguments.keys, arguments.changed)
        tester.run(pa.table({"account": accounts, "n": [n] * len(accounts)}), interval(n), position={"interval": n})


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the bytes that storages return within the block; the list gets one number for each call."""
    counts: list[int] = []
    with _patched(counts):
        yield counts


@contextmanager
def _patched(counts: list[int]) -> Iterator[None]:
    """Replace `read` and `download` of both storages by methods that also count."""
    before = [(of, of.read, of.download) for of in (LocalStorage, GcsStorage)]

    def reading(method: Any) -> Any:
        def read(self: Any, path: str, **more: Any) -> bytes:
            data: bytes = method(self, path, **more)
            counts.append(len(data))
            return data

        return read

    def downloading(method: Any) -> Any:
        def download(self: Any, handle: Any, destination: Path) -> None:
            counts.append(handle.size_bytes)
            method(self, handle, destination)

        return download

    for of, read, download in before:
        mock.patch.object(of, "read", reading(read)).start()
        mock.patch.object(of, "download", downloading(download)).start()
    try:
        yield
    finally:
        mock.patch.stopall()


def measure(pipeline: Pipeline, root: str, where: str) -> None:
    """Print seconds, calls and bytes of each command."""
    url = join_url(root, "accounts")

    def get() -> Any:
        record = coordinator_of(pipeline, root).record("latest")
        return look_up(StateSource.of_record(url, record), [(KEY,)], hold=False)

    def history() -> Any:
        storage, log = open_storage(url), coordinator_of(pipeline, root).log()
        content = log.completed()[-1].content
        key = SearchedKey.of((KEY,), parse_struct(content.key_schema), content.max_parallelism)
        with work_folder("bench") as work:
            return [*history_of_key(log, url, key, storage, work)]

    def replay() -> Any:
        log = coordinator_of(pipeline, root).log()
        newest = max(r.interval.start for r in log.completed() if (r.interval.start - START) // STEP % 10 == 0)
        return replay_key(pipeline, (KEY,), Interval(newest, newest + STEP), root, log=log)

    commands: dict[str, Callable[[], Any]] = {"get": get, "history": history, "replay": replay}
    for name, command in commands.items():
        with counted() as counts:
            began_s = time.perf_counter()
            found = command()
            seconds = time.perf_counter() - began_s
        size = f"{len(found)} steps" if name == "history" else f"same: {found.same}" if name == "replay" else ""
        print(
            f"{where:<5} {name:<8} {seconds:8.2f} s {len(counts):6,} reads {sum(counts):13,} bytes  {size}", flush=True
        )


def copy_to(root: str, folder: Path) -> None:
    """Copy a folder into another root."""
    target, source = open_storage(root), LocalStorage(folder)
    for info in source.list(""):
        target.upload(info.path, folder / info.path)


def main() -> None:
    """Build the root, and print a line for each command and storage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--intervals", type=int, default=1000)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--changed", type=int, default=1000)
    arguments = parser.parse_args()
    pipeline = pipeline_of(arguments)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        began_s = time.perf_counter()
        build(pipeline, f"file://{folder}", arguments)
        print(f"{arguments.intervals} intervals in {time.perf_counter() - began_s:.0f} s", flush=True)
        measure(pipeline, f"file://{folder}", "disk")
        with gcs_server():
            root = f"gs://{BUCKET}/state"
            copy_to(f"{root}/accounts", folder / "accounts")
            measure(pipeline, root, "gcs")


if __name__ == "__main__":
    main()
