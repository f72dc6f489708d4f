"""DAG `aircraft`: the history of every aircraft, one day of 2013 after the other.

This file only connects the pipeline with Airflow. The pipeline is in jobs/pipelines/aircraft.py.
"""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cairn_operators import restore_pipeline, stateful_pipeline

DATA = Path(os.environ.get("CAIRN_DATA", Path(__file__).resolve().parents[1] / "data"))

PIPELINE = "pipelines.aircraft:AIRCRAFT"
ROOT = os.environ.get("CAIRN_ROOT", f"file://{DATA}/state")

dag = stateful_pipeline(
    "aircraft",
    code=PIPELINE,
    root=ROOT,
    savepoint={"folder": f"file://{DATA}/savepoints"},
    validate={
        "docs": f"{DATA}/docs",
        "expectations_every": timedelta(days=int(os.environ.get("CAIRN_EXPECTATIONS_DAYS", "1"))),
    },
    schedule="@daily",
    start_date=datetime(2013, 1, 1, tzinfo=UTC),
    end_date=datetime(2013, 12, 31, tzinfo=UTC),
    tags=["cairn"],
    doc_md="""
### What it does
The DAG reads one day of flights from New York, and keeps the history of each aircraft (by tail number) as keyed state in
RocksDB. It commits state, source position and output of the day together as one checkpoint.

| task | does |
|---|---|
| `process` | processes the day on Spark |
| `checkpoint` | commits the day |
| `validate` | restores the checkpoint and checks it with Great Expectations |
| `savepoint` | copies the state once a week to a folder that retention never deletes |

### How to run it
Each day starts from the checkpoint of the day before. So begin with 1 January.

* **Backfill** a range of days: choose Trigger › Backfill in the UI, and reprocess *All runs* or *Missing and Errored Runs*. Or type
  `airflow backfill create --dag-id aircraft --from-date 2013-01-01 --to-date 2013-01-14 --max-active-runs 1 --reprocess-behavior completed`
  Cairn processes the days in order even with more active runs: a day waits until the checkpoint of the day before exists.
* **Trigger** one day: enter a *logical date*. The run covers the day that ends at this date. Cairn refuses a run without a date.
* **Run a day again**: clear its `process` task with downstream. If the result differs, the later days are stale. Cairn then
  refuses the next run that would start from a stale day, and names the days to run again.
* **Clear `checkpoint` alone** to publish the output again. If Cairn can't publish it, the task's log says why.
* **Go back** to an earlier checkpoint or a savepoint: trigger the DAG `aircraft_restore`.

The parameters `allow_gap` and `allow_stale_base` allow one run to start from another state than that of the day before.
`replace_overlapping` allows one run to replace output of intervals with other boundaries, after a change of the schedule.
""",
)

restore = restore_pipeline("aircraft_restore", PIPELINE, ROOT, tags=["cairn"])
