"""The pipeline of docs/tables.md without Spark, a process that runs some of its hours, and calls of a sink that die."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cairn import Interval, Pipeline, sinks
from cairn.aggregates import Count, RunningAggregate
from cairn.sinks.table_sink import Owner, Publication, TableSink
from cairn.testing import PipelineTester
from state_backend.values.errors import StateUnusable
from tests.support.bigquery_server import client_of

START = datetime(2024, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
SCHEMA = "user string"
OWNER = Owner("clicks", "here")
_PATIENCE_S = 300


class Clicks(RunningAggregate):
    clicks = Count()


def clicks(sink: Any) -> Pipeline:
    return Pipeline(
        name="clicks", start=START, source=lambda spark, interval: None, key=["user"], processor=Clicks, sink=sink
    )


def sink_of(kind: str, folder: Path, address: str) -> TableSink:
    """The sink of a kind. The files of Delta and Iceberg are in the folder; the other two have a server at the address."""
    if kind == "bigquery":
        return sinks.bigquery("shop.clicks", lambda: client_of(address))
    if kind == "delta":
        return sinks.delta(f"file://{folder}/table")
    if kind == "iceberg":
        return sinks.iceberg("shop.clicks", "tests", lambda: iceberg_properties(folder))
    return sinks.postgres("clicks", lambda: address)


def iceberg_properties(folder: Path) -> dict[str, str]:
    """A catalog in SQLite, and files on the disk."""
    return {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/warehouse"}


def hour(n: int, hours: int = 1) -> Interval:
    return Interval(START + n * HOUR, START + (n + hours) * HOUR)


def rows_of(n: int) -> list[tuple[str]]:
    """The clicks of an hour: several users; every seventh hour has none."""
    pick = random.Random(n)
    return [] if n % 7 == 3 else [("ann",), ("bob",), *((pick.choice("cdefgh"),) for _ in range(pick.randrange(9)))]


def run_hours(kind: str, folder: Path, address: str, root: str, hours: range) -> None:
    """Run these hours, each as soon as the hour before it is committed. Other processes run the other hours."""
    tester = PipelineTester(
        clicks(sink_of(kind, folder, address)), input_schema=SCHEMA, every=HOUR, root=root, call_sink=True
    )
    for n in hours:
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                tester.run(rows_of(n), hour(n))
                break
            except StateUnusable:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.02)


@dataclass(frozen=True)
class Made(Publication):
    """Output that no pipeline made."""

    made: pa.Table | None = None

    def output(self) -> Iterator[pa.Table]:
        if self.made is not None:
            yield self.made


def publish(sink: TableSink, interval: Interval, checkpoint_id: int, rows: pa.Table, owner: Owner = OWNER) -> None:
    sink.publish(Made(owner, interval, checkpoint_id, made=rows))


class Killed(Exception):
    """The process that called the sink has ended."""


def die_at(patched: pytest.MonkeyPatch, at: int, requests: Iterable[tuple[type, str]]) -> None:
    """End the process at one of the requests, given as class and method: 2n before request n, 2n + 1 after it."""
    left = [at]
    # pyiceberg writes some files in other threads.
    lock = threading.Lock()
    for owner, name in requests:
        called = getattr(owner, name)

        def dying(*arguments: Any, _called: Any = called, **more: Any) -> Any:
            with lock:
                here, left[0] = left[0], left[0] - 2
            if here <= 0 and here != 1:
                raise Killed(_called.__name__)
            made = _called(*arguments, **more)
            if here == 1:
                raise Killed(_called.__name__)
            return made

        patched.setattr(owner, name, dying)
