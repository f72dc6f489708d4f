"""A pipeline of clicks whose rows go to a table of any kind, and what its tests read and do beside the sink."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from cairn import Interval, Pipeline
from cairn.sinks.table_sink import Owner, Publication, TableSink, owner_of, published_output
from cairn.testing import PipelineTester
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.log import read_log
from state_backend.checkpoint.rewind import rewind
from state_backend.values.records import OutputFile, Permissions, RunRef
from tests.support.clicks_table import HOUR, OWNER, SCHEMA, START, Killed, iceberg_properties, sink_of
from tests.support.coordinator import Coordinator, coordinator_of

LATE = Owner("clicks/late", "here")


ANYTHING = Permissions(allow_stale_base=True, allow_gap=True, replace_overlapping=True)


class Clicks(StatefulProcessor):  # type: ignore[misc]
    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n = (self._count.get() or (0,))[0] + sum(1 for _ in rows)
        self._count.update((n,))
        yield Row(user=key[0], clicks=n)


def pipeline(sink: Any, **changes: Any) -> Pipeline:
    declared = Pipeline(
        name="clicks",
        start=START,
        source=lambda spark, interval: None,
        key=["user"],
        processor=Clicks,
        output_schema="user string, clicks bigint",
        sink=sink,
    )
    return replace(declared, **changes)


Rows = list[tuple[Any, ...]]


def iceberg(tmp_path: Path) -> TableSink:
    with catalog(tmp_path) as opened:
        opened.create_namespace_if_not_exists("shop")
    return sink_of("iceberg", tmp_path, "")


def catalog(tmp_path: Path) -> Catalog:
    return load_catalog("tests", **iceberg_properties(tmp_path))


def expected(tester: PipelineTester) -> Rows:
    """The rows of the current output."""
    found = []
    for interval, (_, files) in read_log(open_storage(f"{tester.root}/clicks")).current_outputs().items():
        for file in files:
            if file.late:
                continue
            table = pq.read_table(output_path(tester, file))
            found += [(interval.start, interval.end, row["user"], row["clicks"]) for row in table.to_pylist()]
    return sorted(found)


def run_of(sink: Any, tmp_path: Path) -> PipelineTester:
    return PipelineTester(
        pipeline(sink), input_schema=SCHEMA, every=HOUR, root=f"file://{tmp_path}/state", call_sink=True
    )


def restored(tester: PipelineTester, target: int) -> Coordinator:
    """The pipeline went back to a checkpoint, and retracted the output of later intervals. Nobody has called the sink."""
    coordinator = coordinator_of(tester.pipeline, tester.root)
    run = RunRef(run_id="restore", clear_number=0, try_number=1)
    rewind(coordinator.at, target, run=run, attempt=str(uuid.uuid4()), retract_output=True)
    coordinator.clean_up()
    return coordinator


def by_interval(rows: Rows) -> dict[Interval, Rows]:
    return {Interval(*key): [*group] for key, group in groupby(rows, lambda row: row[:2])}


def kill(patched: pytest.MonkeyPatch, owner: type, name: str, after: bool) -> None:
    called = getattr(owner, name)

    def killed(*arguments: Any) -> Any:
        if after:
            called(*arguments)
        raise Killed(name)

    patched.setattr(owner, name, killed)


def current(tester: PipelineTester, *, late: bool = False) -> list[Publication]:
    root = f"{tester.root}/clicks"
    outputs = read_log(open_storage(root)).current_outputs()
    owner = owner_of("clicks", root, late=late) if outputs else OWNER
    return [published_output(owner, root, interval, n, files, late=late) for interval, (n, files) in outputs.items()]


def output_path(tester: PipelineTester, file: OutputFile) -> str:
    return f"{tester.root.removeprefix('file://')}/clicks/{file.handle.path}"
