"""What begin, commit, publish, clean-up and a list cost at any age of a pipeline, and with any number of shards. No Spark.

    python -m benchmarks.log_growth [--small] [--only disk|server] [--markdown]

Each measured call runs in a process of its own, which has read nothing, on a root with that many hourly intervals; the next interval is
prepared before. Three intervals in a row are measured, and the median of each figure is shown:

    requests    of the storage; on the server HTTP requests, so that a listing counts by page
    ms, CPU ms  from the opened storage to the result; imports are not in it
    KiB         the most resident memory above what the process had before the call

**disk** is a temporary folder; **server** is fake-gcs-server behind the proxy of the tests, which adds a few ms a request.

Intervals: every one has two shards, the default retention, and an output that is published. Up to 1,000 of them are committed by a
``Coordinator``, in memory, and the files written out. Of older roots the last 1,000 are, and what lies before is written as commits, publication
and clean-up leave it: ``prove_past`` commits all of a root, and compares. The server gets only the files of those last 1,000, since it
searches all objects at every request; the calls of the storage must be those on the disk, where all files are.

Shards: five intervals, three kept, every shard changed: a state file, a manifest and an output each. ``commit`` must stay within 30
calls of the storage, whose listings the server answers by pages, and a record within 64 KiB.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import io
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import UUID

from cairn.command import cli
from state_backend.adapters.gcs_storage import EMULATOR_VARIABLE
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint.clean_up import tombstone_of
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.formats import paths, record_codec
from state_backend.ports.storage import Storage
from state_backend.values.intervals import Interval
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.records import (
    AttemptEnd,
    FiledShard,
    Head,
    InlineShard,
    KeyGroupState,
    LocalFile,
    OutputFile,
    Permissions,
    Prepared,
    Published,
    Record,
    Retained,
    Settled,
    ShardManifest,
    ShardRef,
    Summary,
    Tombstone,
    Unpublished,
)
from state_backend.values.retention import KeepLast, RetentionPolicy, default_retention
from tests.support.checkpoints import PIPELINE, START, content, run, start_ms
from tests.support.faulty_storage import FaultyStorage
from tests.support.gcs_server import BUCKET, GcsServer, gcs_server

HOUR = timedelta(hours=1)
REAL = 1000
"""So many intervals at the end of a root are committed. More than 35 days of hours: none of the older ones is retained."""
HOURLY = default_retention(HOUR)
CALLS = ("begin", "commit", "publish", "clean_up", "list")
SAMPLES = 3
MOST_CALLS, MOST_RECORD_BYTES = 30, 64 * 1024
_MAX_PARALLELISM = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A root to measure: its age, its width, and the policy of its retention."""

    intervals: int
    shards: int
    policy: RetentionPolicy = HOURLY

    @property
    def name(self) -> str:
        """For a folder."""
        return f"{self.intervals}x{self.shards}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One call in one process. ``calls``: of the storage, by method; ``requests``: of the server, if there is one, else those."""

    calls: dict[str, int]
    wall_ms: float
    cpu_ms: float
    memory_kib: float
    requests: int = 0


# --- roots -----------------------------------------------------------------------------------------------------------------------


def hour(number: int) -> Interval:
    """The n-th interval, from 1; its checkpoint has this id."""
    return Interval(START + (number - 1) * HOUR, START + number * HOUR)


def attempt(number: int) -> str:
    """As long as a real one."""
    return str(UUID(int=number << 64 | number))


def made(storage: Storage, case: Case, number: int) -> Prepared:
    """Writes an attempt's files as its shards would, and what it prepares: each shard has a new state file, and the two that the two
    intervals before it wrote."""
    name, refs, outputs, written = attempt(number), [], [], []
    for shard in range(case.shards):
        first, last = (_MAX_PARALLELISM * n // case.shards for n in (shard, shard + 1))
        files = []
        for age in (0, 1, 2):
            handle = storage.create if age == 0 else _handle_of
            if number > age:
                data = f"state {number - age} of shard {shard}".encode()
                files.append(handle(paths.shared(attempt(number - age), shard, 0, 0, "sst"), data))
        manifest = ShardManifest(
            shard=shard,
            key_groups=KeyGroupRange(first=first, last=last - 1),
            files=tuple(LocalFile(name=f"{number - n:06d}.sst", handle=h) for n, h in enumerate(files)),
            inline_files=(),
            segments=(),
            key_group_states=(KeyGroupState(key_group=first, entries={"total": number}, digest=number),),
        )
        ref: ShardRef = InlineShard(shard=shard, inline=manifest)
        if case.shards > 2:
            stored = storage.create(paths.shared(name, shard, 0, 0, "manifest"), record_codec.encode(manifest))
            ref = FiledShard(shard=shard, manifest=stored)
            written.append(stored)
        output = storage.create(paths.output(hour(number), name, shard, 0), f"output {number}".encode())
        written += [files[0], output]
        refs.append(ref)
        outputs.append(OutputFile(handle=output, rows=1))
    content_ = content(
        hour(number),
        name,
        number - 1 or None,
        digest=number,
        parallelism=case.shards,
        max_parallelism=_MAX_PARALLELISM,
        shards=tuple(refs),
        outputs=tuple(outputs),
        retention=case.policy,
    )
    return Prepared(h0=number - 1, content=content_, written=tuple(written))


def _handle_of(path: str, data: bytes) -> Any:
    return MemoryStorage().create(path, data)


def commit_one(storage: Storage, case: Case, number: int) -> None:
    """One interval, as its tasks do it."""
    coordinator = Coordinator(storage, PIPELINE)
    begin(coordinator, number)
    coordinator.prepare(made(storage, case, number))
    if coordinator.commit(attempt(number)).id != number:
        raise AssertionError(f"interval {number} got another id")
    coordinator.publish(None)
    coordinator.clean_up()


def begin(coordinator: Coordinator, number: int) -> object:
    """Picks the base of an interval."""
    return coordinator.begin(
        hour(number),
        run=run(),
        permissions=Permissions(),
        pipeline_start_ms=start_ms(),
        attempt=attempt(number),
    )


def recent(case: Case, real: int = REAL) -> MemoryStorage:
    """The last ``real`` intervals of the root, committed; before them one that is written as if it were alone."""
    storage, first = MemoryStorage(), case.intervals - real
    with remembered_decoding():
        if first > 0:
            put_alone(storage, case, first)
        for number in range(max(first, 0) + 1, case.intervals + 1):
            commit_one(storage, case, number)
    return storage


def put_alone(storage: MemoryStorage, case: Case, number: int) -> None:
    """A checkpoint as the newest of its log, which retains no other; and its base's files, which its own manifests name."""
    for age in (2, 1):
        if number > age:
            made(storage, case, number - age)
    prepared = made(storage, case, number)
    storage.create(paths.prepared(attempt(number)), record_codec.encode(prepared))
    record = Record(
        id=number,
        retained=(Retained(id=number, stale_by=None),),
        reproduces=None,
        content=prepared.content,
        summary=Summary(
            unpublished=(Unpublished(interval=hour(number), id=number),),
            levels=(0,),
        ),
    )
    storage.create(paths.record(number), record_codec.encode(record))
    storage.create(paths.HEAD, record_codec.encode(Head(id=number)))
    mark = Published(id=number, interval=hour(number))
    storage.create(paths.published(hour(number), number), record_codec.encode(mark))


def settled_past(case: Case, last: int) -> Iterator[tuple[str, bytes]]:
    """The files of the intervals up to ``last``, dropped long ago, as their clean-up leaves them."""
    for number in range(1, last + 1):
        storage = MemoryStorage()
        content_ = made(storage, case, number).content
        name, interval = content_.attempt, content_.interval
        record = Record(id=number, retained=(), reproduces=None, content=content_)
        yield paths.record(number), record_codec.encode(tombstone_of(record))
        yield paths.attempt_end(name), record_codec.encode(AttemptEnd(attempt=name, id=number))
        settled = Settled(id=number, kind="interval", interval=interval, outputs=content_.outputs)
        yield paths.settled(interval, number, "interval"), record_codec.encode(settled)
        yield paths.published(interval, number), record_codec.encode(Published(id=number, interval=interval))
        for output in content_.outputs:
            yield output.handle.path, storage.read(output.handle.path)


def files_of(storage: MemoryStorage) -> dict[str, bytes]:
    return {info.path: storage.read(info.path) for info in storage.list("")}


@contextlib.contextmanager
def remembered_decoding() -> Iterator[None]:
    """Decodes equal bytes once: what is committed is the same, a hundred times sooner."""
    plain = record_codec.decode
    record_codec.decode = functools.lru_cache(maxsize=4096)(plain)  # type: ignore[assignment]
    try:
        yield
    finally:
        record_codec.decode = plain


def prove_past(intervals: int, real: int) -> None:
    """Commits all of a root, and compares it with one whose past is written: the same files with the same bytes. Only which of the
    ids that are done a summary still lists takes turns, so that it is left out."""
    case = Case(intervals=intervals, shards=2, policy=KeepLast(real // 2))
    last = intervals - real
    whole = files_of(recent(case, intervals))
    partly = {**files_of(recent(case, real)), **dict(settled_past(case, last))}
    made_alone = {p for p in partly if p not in whole}
    if made_alone or whole.keys() != partly.keys():
        raise AssertionError(sorted(whole.keys() ^ partly.keys())[:10])
    for path, data in whole.items():
        if _without_turns(path, data) != _without_turns(path, partly[path]):
            raise AssertionError(f"{path}: {data!r} {partly[path]!r}")


def _without_turns(path: str, data: bytes) -> object:
    if not path.startswith(paths.CHECKPOINTS):
        return data
    record: Record | Tombstone = record_codec.decode(data, path, Record, Tombstone)  # type: ignore[assignment]
    if isinstance(record, Tombstone) or record.summary is None:
        return record
    return replace(record, summary=replace(record.summary, dropping=(), unpublished=()))


def write_out(files: Iterator[tuple[str, bytes]], folder: Path) -> None:
    """As plain files, unsynced: nobody else reads the folder meanwhile."""
    there: set[str] = set()
    for path, data in files:
        parent = path.rpartition("/")[0]
        if parent not in there:
            (folder / parent).mkdir(parents=True, exist_ok=True)
            there.add(parent)
        (folder / path).write_bytes(data)
        if path.startswith(paths.SETTLED_ATTEMPTS):  # of what was deleted, empty folders stay on a disk
            for kind in (paths.ATTEMPTS, paths.SHARED):
                (folder / kind / Path(path).stem).mkdir(parents=True, exist_ok=True)


# --- measuring -------------------------------------------------------------------------------------------------------------------


def measure(call: str, url: str, number: int, emulator: str) -> Sample:
    """What one call takes, in this process, which has called nothing of this root before."""
    commit_one(
        MemoryStorage(), Case(intervals=0, shards=2), 1
    )  # what is imported and built once per process is not counted
    gc.collect()
    os.environ[EMULATOR_VARIABLE] = emulator
    counted = FaultyStorage(open_storage(join_url(url, PIPELINE)), {})
    coordinator = Coordinator(counted, PIPELINE)
    command = ["list", "--newest", "10", "--root", url, "--pipeline", PIPELINE]
    works: dict[str, Callable[[], object]] = {
        "begin": lambda: begin(coordinator, number),
        "commit": lambda: coordinator.commit(attempt(number)),
        "publish": lambda: coordinator.publish(None),
        "clean_up": coordinator.clean_up,
        "list": lambda: cli.app(command, standalone_mode=False),
    }
    before_bytes = _memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    with mock.patch.object(cli, "open_storage", lambda _: counted), contextlib.redirect_stdout(io.StringIO()):
        works[call]()
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    return Sample(
        calls=dict(sorted(Counter(method for method, _ in counted.calls).items())),
        wall_ms=wall_s * 1000,
        cpu_ms=cpu_s * 1000,
        memory_kib=max(0, _memory_bytes("VmHWM") - before_bytes) / 1024,
    )


def _memory_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def in_new_process(work: Callable[..., Sample], *arguments: object) -> Sample:
    """Of a process that has the modules, and nothing else of this one."""
    context = get_context("forkserver")
    context.set_forkserver_preload(
        ["cairn.command.cli", "state_backend.adapters.gcs_storage", "tests.support.gcs_server"]
    )
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *arguments).result()


def samples_of(url: str, case: Case, server: GcsServer | None) -> dict[str, list[Sample]]:
    """The next intervals on that root, call by call."""
    found: dict[str, list[Sample]] = {call: [] for call in CALLS}
    storage = open_storage(join_url(url, PIPELINE))
    for number in range(case.intervals + 1, case.intervals + 1 + SAMPLES):
        fast = MemoryStorage()
        prepared = made(fast, case, number)
        upload(files_of(fast), storage)
        for call in CALLS:
            if call == "commit":
                Coordinator(storage, PIPELINE).prepare(prepared)
            requests = len(server.requests) if server is not None else 0
            sample = in_new_process(measure, call, url, number, os.environ.get(EMULATOR_VARIABLE, ""))
            asked = len(server.requests) - requests if server is not None else sum(sample.calls.values())
            found[call].append(replace(sample, requests=asked))
    check_bounds(case, found, storage)
    return found


def upload(files: dict[str, bytes], storage: Storage) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda path: storage.create(path, files[path]), files))


def check_bounds(case: Case, found: dict[str, list[Sample]], storage: Storage) -> None:
    """AssertionError if a commit makes requests by shard, or its record is larger than may be."""
    record_bytes = len(storage.read(paths.record(case.intervals + 1)))
    calls = max(sum(sample.calls.values()) for sample in found["commit"])
    if case.policy != HOURLY and (calls > MOST_CALLS or record_bytes > MOST_RECORD_BYTES):
        raise AssertionError(f"{case.name}: a commit of {calls} calls, a record of {record_bytes} bytes")
    print(f"{case.name}: a record of {record_bytes} bytes", file=sys.stderr, flush=True)


# --- what is measured ------------------------------------------------------------------------------------------------------------


def cases(small: bool) -> list[Case]:
    ages = (20, 100) if small else (100, 1_000, 10_000, 100_000)
    widths = (2, 20) if small else (2, 100, 1_000)
    return [
        *(Case(intervals=n, shards=2) for n in ages),
        *(Case(intervals=5, shards=n, policy=KeepLast(3)) for n in widths),
    ]


def run_case(case: Case, work: Path, only: str | None) -> dict[str, dict[str, list[Sample]]]:
    """On the disk, then on the server. AssertionError if the calls differ."""
    newest = recent(case)
    found = {}
    if only != "server":
        folder = work / case.name
        write_out(iter(files_of(newest).items()), folder / PIPELINE)
        write_out(settled_past(case, case.intervals - REAL), folder / PIPELINE)
        found["disk"] = samples_of(f"file://{folder}", case, None)
        shutil.rmtree(folder)
    if only != "disk":
        with gcs_server() as server:
            url = f"gs://{BUCKET}/{case.name}"
            upload(files_of(newest), open_storage(join_url(url, PIPELINE)))
            found["server"] = samples_of(url, case, server)
    if len(found) == 2:
        for call in CALLS:
            calls = [[sample.calls for sample in found[where][call]] for where in ("disk", "server")]
            if calls[0] != calls[1]:
                raise AssertionError(f"{case.name}, {call}: {calls[0]} on the disk, {calls[1]} on the server")
    return found


def table(results: list[tuple[Case, dict[str, dict[str, list[Sample]]]]], where: str) -> list[list[str]]:
    """A row per case; of each call the medians."""
    rows = [["intervals", "shards", *(f"{call.replace('_', ' ')}" for call in CALLS)]]
    for case, found in results:
        cells = []
        for call in CALLS:
            samples = found[where][call]
            figures: list[list[float]] = [
                [s.requests for s in samples],
                [s.wall_ms for s in samples],
                [s.cpu_ms for s in samples],
                [s.memory_kib for s in samples],
            ]
            cells.append(" / ".join(f"{statistics.median(figure):,.0f}" for figure in figures))
        rows.append([f"{case.intervals:,}", f"{case.shards:,}", *cells])
    return rows


def printed(rows: list[list[str]], markdown: bool) -> str:
    if markdown:
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.log_growth", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--small", action="store_true", help="shows that everything works")
    parser.add_argument("--only", choices=("disk", "server"))
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    prove_past(*(40, 30) if options.small else (160, 120))
    work = Path(tempfile.mkdtemp(prefix="cairn-log-growth-"))
    results = []
    try:
        for case in cases(options.small):
            started_s = time.monotonic()
            results.append((case, run_case(case, work, options.only)))
            print(f"{case.name}: {time.monotonic() - started_s:.0f} s", file=sys.stderr, flush=True)
            for where in results[-1][1]:
                print(where, *table(results[-1:], where)[1], sep="  ", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    for where in results[0][1]:
        print(f"\n{where}: requests / ms / CPU ms / KiB")
        print(printed(table(results, where), options.markdown))


if __name__ == "__main__":
    main()
