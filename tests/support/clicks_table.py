"""The pipeline of docs/tables.md without Spark: a process that runs its hours, and a driver for Airflow.

Airflow's workers and the processes find the table by `CAIRN_CLICKS_TABLE`, the URL of a Delta table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from cairn import Interval, Pipeline, sinks, testing
from cairn.aggregates import Count, RunningAggregate
from cairn.operations.coordinator_of import coordinator_of
from cairn.operations.plan_interval import Attempt
from cairn.operations.process_interval import process_interval
from cairn.rows.local_rows import LocalRows
from cairn.sinks.table_sink import TableSink
from cairn.testing import PipelineTester
from state_backend.values.errors import CairnError, StateUnusable
from state_backend.values.records import Permissions, RunRef

START = datetime(2024, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
SCHEMA = "user string"
CODE = "tests.support.clicks_table:CLICKS"
_PATIENCE_S = 300


class Clicks(RunningAggregate):
    clicks = Count()


def clicks(sink: Any) -> Pipeline:
    return Pipeline(
        name="clicks",
        start=START,
        source=lambda spark, interval: None,
        key=["user"],
        processor=Clicks,
        sink=sink,
    )


CLICKS = clicks(sinks.delta(os.environ.get("CAIRN_CLICKS_TABLE", "file:///nowhere")))


def sink_of(kind: str, folder: Path, address: str) -> TableSink:
    """The sink of the kind `delta`, `iceberg` or `postgres`. The first two have their files in the folder."""
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


def main() -> int:
    """Process an hour, as `cairn.driver.driver` does with Spark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    for name in ("root", "start", "end", "run-id", "attempt", "result"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("clear-number", "try-number"):
        parser.add_argument(f"--{name}", required=True, type=int)
    parser.add_argument("--permissions", type=json.loads, default={})
    options, _ = parser.parse_known_args()
    interval = Interval(datetime.fromisoformat(options.start), datetime.fromisoformat(options.end))
    tester = PipelineTester(CLICKS, input_schema=SCHEMA, every=HOUR, root=options.root)
    rows = LocalRows(rows_of((interval.start - START) // HOUR), tester._schema, tester._zone, "clicks")
    pipeline = tester._as_run(rows, None)
    run = RunRef(run_id=options.run_id, clear_number=options.clear_number, try_number=options.try_number)
    session: Any = testing.PlanningSession("UTC")
    try:
        made = process_interval(
            session,
            pipeline,
            options.root,
            Attempt(id=options.attempt, interval=interval, run=run, permissions=Permissions(**options.permissions)),
            coordinator=coordinator_of(pipeline, options.root),
            on_shards=partial(testing._on_shards, pipeline.processor),
        )
        result: dict[str, Any] = {
            "ok": {"attempt": options.attempt, "sink": CODE, "output_rows": made.content.totals.output_rows}
        }
    except CairnError as error:
        again = error.rerun and error.rerun.as_json()
        result = {"error": {"type": type(error).__name__, "message": str(error), "rerun": again}}
    Path(options.result).write_text(json.dumps(result))
    return 0 if "ok" in result else 1


if __name__ == "__main__":
    sys.exit(main())
