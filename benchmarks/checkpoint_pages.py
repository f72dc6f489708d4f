"""What the pages in Airflow's UI cost over a long history: each view on the first look of a process, and on the next. No Spark, no browser.

    python -m benchmarks.checkpoint_pages [--intervals 10000] [--only disk|kept|server]

**disk**: a temporary folder with that many hourly intervals and the default retention, so that most are dropped, as ``benchmarks.log_growth``
writes it. **kept**: the same many, and every one is retained. **server**: fake-gcs-server behind the proxy of the tests, with the files of the last
1,000 intervals, since it searches all objects at every request.

ms of wall and of CPU of this process, from the request to the whole page. The first look is with a reader that has read nothing; for the second
one the clock is ten seconds further, so that the end of the log is looked at again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from benchmarks.log_growth import Case, files_of, made, recent, settled_past, write_out
from cairn_ui.find_pipelines import PipelineRef
from state_backend.adapters.gcs_storage import EMULATOR_VARIABLE
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.formats import paths, record_codec
from state_backend.ports.storage import Storage
from state_backend.values.records import Head, Record, Retained, Summary
from tests.support.gcs_server import BUCKET, gcs_server

NAME = "long"
REAL = 1000


def kept_files(case: Case) -> Iterator[tuple[str, bytes]]:
    """A root that retains all its checkpoints: what ``read_log`` reads of it."""
    for number in range(1, case.intervals + 1):
        storage = MemoryStorage()
        content = made(storage, case, number).content
        last = number == case.intervals
        ids = range(1, number + 1) if last else (number,)
        record = Record(
            id=number,
            retained=tuple(Retained(id=n, stale_by=None) for n in ids),
            reproduces=None,
            content=content,
            summary=Summary(levels=(0,)),
        )
        yield paths.record(number), record_codec.encode(record)
    yield paths.HEAD, record_codec.encode(Head(id=case.intervals))


def measure(title: str, storage: Storage, intervals: int) -> None:
    """Prints a line for each view."""
    from starlette.testclient import TestClient

    from cairn_ui import routes
    from cairn_ui.read_logs import Reader
    from tests.support.shown_app import shown_app

    ref = PipelineRef(
        name=NAME, root="file:///unused", dag_id=NAME, code="m:X", process="process", savepoint="savepoint"
    )
    views = {
        "pipelines": "/",
        "overview": f"/p/{ref.key}/",
        "history": f"/p/{ref.key}/history",
        "history, in the middle": f"/p/{ref.key}/history?before={intervals // 2}",
        "lineage": f"/p/{ref.key}/lineage",
        "trends": f"/p/{ref.key}/trends",
        "checkpoint": f"/p/{ref.key}/checkpoint/{intervals}",
    }
    with shown_app({NAME: storage}, [ref], refused={}) as app:
        client = TestClient(app, cookies={"_token": "admin"})
        client.get("/cairn/checkpoints/p/none/")  # imports and templates
        for view, path in views.items():
            now_s = [0.0]
            clock = lambda now_s=now_s: now_s[0]  # noqa: E731
            figures = []
            with mock.patch.object(routes, "reader", Reader(lambda _: storage, clock=clock)):
                for _ in range(2):
                    wall_s, cpu_s = time.perf_counter(), time.process_time()
                    answer = client.get(f"/cairn/checkpoints{path}")
                    figures += [1000 * (time.perf_counter() - wall_s), 1000 * (time.process_time() - cpu_s)]
                    if answer.status_code != 200 or "not answered" in answer.text:
                        raise AssertionError(f"{view}: {answer.status_code}: {answer.text[:2000]}")
                    now_s[0] += 10
            first, first_cpu, second, second_cpu = figures
            print(
                f"{title:8} {view:24} first {first:7.0f} ms ({first_cpu:6.0f} CPU)   second {second:7.0f} ms ({second_cpu:6.0f} CPU)",
                flush=True,
            )


def main(arguments: list[str]) -> int:
    """Measures what is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--intervals", type=int, default=10_000)
    parser.add_argument("--only", choices=("disk", "kept", "server"))
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    case = Case(intervals=given.intervals, shards=2)
    folder = Path(tempfile.mkdtemp(prefix="cairn-pages-"))
    try:
        ends = files_of(recent(case, min(REAL, given.intervals))) if given.only != "kept" else {}
        if given.only in (None, "disk"):
            past = settled_past(case, given.intervals - REAL)
            write_out(iter([*past, *ends.items()]), folder / "disk" / NAME)
            measure("disk", open_storage(join_url(f"file://{folder}/disk", NAME)), given.intervals)
        if given.only in (None, "kept"):
            write_out(kept_files(case), folder / "kept" / NAME)
            measure("kept", open_storage(join_url(f"file://{folder}/kept", NAME)), given.intervals)
        if given.only in (None, "server"):
            with gcs_server() as server:
                os.environ[EMULATOR_VARIABLE] = server.url
                storage = open_storage(f"gs://{BUCKET}/{NAME}")
                for path, data in ends.items():
                    storage.create(path, data)
                measure("server", storage, given.intervals)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
