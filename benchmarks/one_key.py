"""Seconds and bytes of `cairn key`, `cairn key --history` and `cairn replay` for one key, on a disk and on a GCS server.

    python -m benchmarks.one_key                                                1,000 intervals, 64 shards, 1,000,000 keys
    python -m benchmarks.one_key --intervals 30 --shards 8 --keys 20000
    python -m benchmarks.one_key --folder /data/root                            keeps the root; a second run only measures

The first interval writes all keys. Each later interval changes `--changed` keys at random, and among them, in every
tenth interval, the key that is looked up. The intervals run without Spark. Reads and bytes are those that the storage
returned. Seconds are medians of `--runs` calls of the functions, and of as many runs of the commands with the start of
Python. The files are in the operating system's cache.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

from cairn.aggregates import Count, RunningAggregate
from cairn.command.key import look_up
from cairn.pipeline import Interval, Pipeline
from cairn.replay.replay_key import replay_key
from cairn.testing import PipelineTester
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.object_store import ObjectStore
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.log import read_newest
from state_backend.formats.types import parse_struct
from state_backend.inspection.history_of_key import history_of_key
from state_backend.inspection.key_entries import SearchedKey
from state_backend.inspection.state_source import find_state
from state_backend.values.retention import KeepLast
from tests.support.gcs_server import BUCKET, gcs_server

START, STEP, KEY = datetime(2024, 1, 1, tzinfo=UTC), timedelta(hours=1), 4711
SCHEMA = "account long, n long"
# The sizes of the pipeline `ACCOUNTS`, which commands import: intervals, shards, keys, changed keys.
SIZES = "CAIRN_ONE_KEY"


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


def pipeline_of(intervals: int, shards: int, keys: int, changed: int) -> Pipeline:
    """Return the pipeline, whose source makes the rows of an interval."""

    def read(spark: Any, of: Interval) -> Any:
        n = (of.start - START) // STEP
        rows = [(account, n) for account in accounts_of(n, keys, changed)]
        return spark.createDataFrame(rows, SCHEMA), {"interval": n}

    return Pipeline(
        name="accounts",
        start=START,
        source=read,
        key=["account"],
        processor=Rows,
        api="arrow",
        schedule=STEP,
        parallelism=shards,
        max_parallelism=1024,
        retention=KeepLast(intervals + 1),
    )


ACCOUNTS = pipeline_of(*map(int, os.environ.get(SIZES, "1000,64,1000000,1000").split(",")))


def build(root: str, intervals: int, keys: int, changed: int) -> None:
    """Run all intervals."""
    tester = PipelineTester(ACCOUNTS, input_schema=SCHEMA, root=root)
    for n in range(intervals):
        accounts = accounts_of(n, keys, changed)
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
    before = [(of, of.read, of.download) for of in (LocalStorage, ObjectStore)]

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


def measure(root: str, where: str, runs: int) -> None:
    """Print seconds, reads and bytes of each command."""
    url = join_url(root, "accounts")

    newest = find_state("latest", root=root, pipeline="accounts").content.interval
    changed = interval((newest.start - START) // STEP // 10 * 10)

    def get() -> Any:
        return look_up(find_state("latest", root=root, pipeline="accounts"), [(KEY,)])

    def history() -> Any:
        log = read_newest(storage := open_storage(url))
        content = log.whole(max(log.retained)).content
        key = SearchedKey.of((KEY,), parse_struct(content.key_schema), content.max_parallelism)
        with work_folder("bench") as work:
            return [*history_of_key(log, key, storage, work)]

    def replay() -> Any:
        return replay_key(ACCOUNTS, (KEY,), changed, root)

    functions: dict[str, Callable[[], Any]] = {"key": get, "key --history": history, "replay": replay}
    for name, function in functions.items():
        with counted() as counts:
            found = function()
        called = [timed(function) for _ in range(runs)]
        more = ["--pipeline", "accounts"]
        if name == "replay":
            more = [changed.start.isoformat(), "--code", "benchmarks.one_key:ACCOUNTS"]
        command = [sys.executable, "-m", "cairn.command.cli", *name.split(), str(KEY), "--root", root, *more]
        ran = [timed(lambda c=command: subprocess.run(c, check=True, stdout=subprocess.DEVNULL)) for _ in range(runs)]
        size = f"{len(found)} steps" if name == "key --history" else f"same: {found.same}" if name == "replay" else ""
        print(
            f"{where:<5} {name:<8} {len(counts):6,} reads {sum(counts):13,} bytes; function {middle(called)}; "
            f"command {middle(ran)}  {size}",
            flush=True,
        )


def timed(function: Callable[[], Any]) -> tuple[float, float]:
    """Call a function, and return the seconds and the seconds of CPU that it and its processes took."""
    began_s, began_cpu_s = time.perf_counter(), _cpu_s()
    function()
    return time.perf_counter() - began_s, _cpu_s() - began_cpu_s


def _cpu_s() -> float:
    used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def middle(times: list[tuple[float, float]]) -> str:
    """Return the medians of seconds and of seconds of CPU."""
    seconds, cpu = (statistics.median(column) for column in zip(*times, strict=True))
    return f"{seconds:.2f} s, CPU {cpu:.2f} s"


@contextmanager
def served(folder: Path) -> Iterator[None]:
    """Run a GCS server that has the files of `folder` as `gs://<BUCKET>/state`."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as temp:
        loaded = Path(temp)
        shutil.copytree(folder, loaded / BUCKET / "state", copy_function=os.link)
        with gcs_server(loaded):
            yield


def main() -> None:
    """Build the root, and print a line for each command and storage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--intervals", type=int, default=1000)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--changed", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="the root; it is built if it is missing, and stays")
    given = parser.parse_args()
    sizes = f"{given.intervals},{given.shards},{given.keys},{given.changed}"
    if os.environ.get(SIZES) != sizes:  # The processes of the commands need the same pipeline.
        os.execve(
            sys.executable, [sys.executable, "-m", "benchmarks.one_key", *sys.argv[1:]], {**os.environ, SIZES: sizes}
        )
    with ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not (folder / "accounts").exists():
            began_s = time.perf_counter()
            build(f"file://{folder}", given.intervals, given.keys, given.changed)
            print(f"{given.intervals} intervals in {time.perf_counter() - began_s:.0f} s", flush=True)
        measure(f"file://{folder}", "disk", given.runs)
        with served(folder):
            measure(f"gs://{BUCKET}/state", "gcs", given.runs)


if __name__ == "__main__":
    # A pipeline of `__main__` has other code than that of the module, which the commands import.
    from benchmarks.one_key import main as run

    run()
