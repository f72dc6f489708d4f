"""What `cairn status` costs over chains of pipelines with long logs.

    python -m benchmarks.chains [--pipelines 50] [--intervals 10000] [--times 3] [--root FOLDER]

The program builds pipelines of hourly intervals on a disk, in chains of five. Most of a log is written directly: tombstones,
as retention leaves them, and the files in `settled/`. Real commits follow: some intervals, a correction of the first
pipeline of each chain, the intervals that read it again, and one more interval. Then it calls `cairn status` as a command,
and counts the requests of the same command in this process, as an object store would get them. At last the first
pipeline of each chain is corrected once more, and both are measured again: now each chain has four pipelines out of date.
It prints JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import google_crc32c

from cairn.command import list_pipelines
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.chains import judge_inputs
from state_backend.chains.judge_inputs import Chains, followed_in
from state_backend.chains.pin_inputs import Reader, check_earlier, pin
from state_backend.checkpoint.clean_up_dropped import tombstone_of
from state_backend.checkpoint.log import kept_of
from state_backend.formats import paths, record_codec
from state_backend.inspection import find_pipelines
from state_backend.ports.storage import Storage
from state_backend.values.handles import FileInfo, Handle
from state_backend.values.inputs import Edge, InputPart, InputRead, followed_after
from state_backend.values.intervals import Interval
from state_backend.values.marks import Head, Settled
from state_backend.values.records import OutputFile, Permissions, Prepared, Record, Retained, Summary
from state_backend.values.retention import KeepLast
from tests.support.checkpoints import START, content, start_ms
from tests.support.coordinator import Coordinator

LENGTH, HOUR, RETENTION = 5, timedelta(hours=1), KeepLast(4)
LISTED = 1_000  # names in one answer of an object store


def hour(n: int) -> Interval:
    return Interval(START + (n - 1) * HOUR, START + n * HOUR)


def name_of(chain: int, level: int) -> str:
    return f"chain{chain:02}-{level}"


def output_of(n: int, attempt: str) -> OutputFile:
    return OutputFile(
        handle=Handle(path=paths.output(hour(n), attempt, 0, 0), size_bytes=4, crc32c=0), rows=1, digest=n
    )


def old_record(level: int, n: int) -> Record:
    """Return the n-th record of a pipeline of the first chain, without a summary."""
    inputs: tuple[InputRead, ...] = ()
    if level:
        part = InputPart(span=hour(n), intervals=1, last_id=n, rows=1, digest=n)
        inputs = (InputRead(edge=Edge(pipeline=name_of(0, level - 1)), span=hour(n), log="a1", head=n, parts=(part,)),)
    made = content(
        hour(n), f"a{n}", n - 1 or None, inputs=inputs, outputs=(output_of(n, f"a{n}"),), retention=RETENTION, digest=n
    )
    return Record(
        id=n,
        retained=(Retained(id=n, stale_by=None),),
        reproduces=None,
        content=replace(made, pipeline=name_of(0, level), followed=followed_after((), inputs)),
    )


def renamed(data: bytes, chain: int) -> bytes:
    """Return a plain file of the first chain as that of another chain."""
    body = data[len(b'{"body":') : data.rindex(b',"cairn":')].replace(b'"chain00-', b'"chain%02d-' % chain)
    was, now = (b'"crc32c":"%08x"' % google_crc32c.value(b) for b in (data[8 : data.rindex(b',"cairn":')], body))
    return b'{"body":' + body + data[data.rindex(b',"cairn":') :].replace(was, now)


def build_past(root: Path, chains: int, past: int) -> None:
    """Write what `past` intervals of each pipeline leave."""
    for chain in range(chains):
        for level in range(LENGTH):
            (root / name_of(chain, level) / "checkpoints").mkdir(parents=True)
    settled_before = set[Path]()
    for n in range(1, past + 1):
        settled = Settled(id=n, kind="interval", interval=hour(n), outputs=(output_of(n, f"a{n}"),))
        data, at = record_codec.encode(settled), paths.settled(hour(n), n, "interval")
        first = root / name_of(0, 0) / at
        for chain in range(chains):
            for level in range(LENGTH):
                path = root / name_of(chain, level) / at
                if n < past:
                    if path.parent not in settled_before:
                        path.parent.mkdir(parents=True)
                        settled_before.add(path.parent)
                    path.write_bytes(data) if path == first else os.link(first, path)
        for level in range(LENGTH):
            record = old_record(level, n)
            made = record_codec.encode(tombstone_of(record))
            if n == past:
                summary = Summary(kept=(kept_of(record),), levels=(0,), latest_end_ms=hour(n).end_ms, settled=n)
                made = record_codec.encode(replace(record, summary=summary))
            for chain in range(chains):
                folder = root / name_of(chain, level)
                (folder / paths.record(n)).write_bytes(renamed(made, chain) if chain else made)
                if n == past:
                    (folder / paths.HEAD).write_bytes(record_codec.encode(Head(id=n)))


def commit(root: str, name: str, n: int, attempt: str, edge: Edge | None, digest: int) -> None:
    """Commit one interval of a pipeline, as a driver and the task `checkpoint` do."""
    storage = open_storage(join_url(root, name))
    at, chains = Coordinator(storage, name, policy=RETENTION, remembers=True), Chains()
    begun = at.begin(hour(n), permissions=Permissions(), pipeline_start_ms=start_ms())
    assert begun.log is not None and begun.base is not None
    reads: tuple[InputRead, ...] = ()
    if edge is not None:
        reader = Reader(root=root, pipeline=name, interval=hour(n), schedule=None)
        check_earlier(chains, reader, begun.log)
        reads = (pin(chains, reader, edge)[0],)
    handle = storage.create(paths.output(hour(n), attempt, 0, 0), b"rows")
    made = content(
        hour(n),
        attempt,
        begun.base.id,
        pipeline=name,
        inputs=reads,
        followed=followed_after(followed_in(begun.log), reads),
        fresh_at=chains.fresh_at(root, name, reads) if reads else None,
        outputs=(OutputFile(handle=handle, rows=1, digest=digest),),
        retention=RETENTION,
        digest=n,
    )
    at.prepare(Prepared(h0=begun.h0, content=made))
    at.commit(attempt)
    at.publish(None)
    at.clean_up()


def run_all(root: str, chains: int, n: int, attempt: str, *, digest: int, levels: int = LENGTH) -> None:
    for chain in range(chains):
        for level in range(levels):
            edge = Edge(pipeline=name_of(chain, level - 1)) if level else None
            commit(root, name_of(chain, level), n, attempt, edge, digest)


class Counting:
    """A storage that counts requests, as an object store would get them: a listing has a thousand names in an answer."""

    lists_what_is_there = True

    def __init__(self, inner: Storage, counts: Counter[str]) -> None:
        self.inner, self.counts = inner, counts

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name in ("url", "folders"):
            return found

        def counted(*args: Any, **how: Any) -> Any:
            self.counts[name] += 1
            return found(*args, **how)

        return counted

    def list(self, prefix: str) -> Iterator[FileInfo]:
        infos = [*self.inner.list(prefix)]
        self.counts["list"] += max(1, math.ceil(len(infos) / LISTED))
        return iter(infos)


def count_requests(root: str) -> Counter[str]:
    counts: Counter[str] = Counter()

    def counted(url: str) -> Any:
        storage = open_storage(url)
        return storage if url.rstrip("/") == root.rstrip("/") else Counting(storage, counts)

    with ExitStack() as stack:
        for module in (list_pipelines, find_pipelines):
            stack.enter_context(mock.patch.object(module, "open_storage", counted))
        stack.enter_context(
            mock.patch.object(judge_inputs, "locate", lambda r, p: mock.Mock(storage=counted(join_url(r, p))))
        )
        stack.enter_context(redirect_stdout(StringIO()))
        list_pipelines.list_pipelines(root, as_json=True)
    return counts


def measure(root: str, pipelines: int, times: int) -> dict[str, Any]:
    figures = []
    for _ in range(times):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(
            [str(Path(sys.executable).with_name("cairn")), "status", "--root", root, "--json"],
            check=True,
            capture_output=True,
            text=True,
        )
        wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        figures.append({"wall_s": round(wall, 2), "cpu_s": round(cpu, 2)})
    states = Counter(f"{one['state']} {' '.join(one['problems'])}".strip() for one in json.loads(done.stdout))
    counts = count_requests(root)
    return {
        "states": states,
        "command": figures,
        "requests": counts,
        "requests_per_pipeline": counts.total() / pipelines,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chains")
    parser.add_argument("--pipelines", type=int, default=50)
    parser.add_argument("--intervals", type=int, default=10_000)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--root", help="an empty folder; kept")
    options = parser.parse_args()
    folder = Path(options.root or tempfile.mkdtemp(prefix="cairn-chains-"))
    root, chains, past = f"file://{folder}", options.pipelines // LENGTH, options.intervals - 8
    try:
        began = time.monotonic()
        with mock.patch.object(os, "fsync", lambda _: None):  # The build need not survive a crash.
            build_past(folder, chains, past)
            print(f"past: {time.monotonic() - began:.0f} s", file=sys.stderr)
            for n in range(past + 1, past + 8):
                run_all(root, chains, n, f"b{n}", digest=n)
            run_all(root, chains, past + 6, "corrected", digest=0)
            run_all(root, chains, past + 8, "last", digest=past + 8)
            print(f"built: {time.monotonic() - began:.0f} s", file=sys.stderr)
        found = {"fresh": measure(root, options.pipelines, options.times)}
        run_all(root, chains, past + 7, "again", digest=1, levels=1)
        found["corrected"] = measure(root, options.pipelines, options.times)
        print(json.dumps(found, indent=1))
    finally:
        if options.root is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
