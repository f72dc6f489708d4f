"""DAG `aircraft`: the history of every aircraft, one day of 2013 after the other.

This file only connects the pipeline with Airflow. The pipeline is in jobs/pipelines/aircraft.py.
"""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from airflow.sdk import CronDataIntervalTimetable

from cairn_operators import restore_pipeline, stateful_pipeline

DATA = Path(os.environ.get("CAIRN_DATA", Path(__file__).resolve().parents[1] / "data"))

PIPELINE = "pipelines.aircraft:AIRCRAFT"
ROOT = os.environ.get("CAIRN_ROOT", f"file://{DATA}/state")

dag = stateful_pipeline(
    "aircraft",
    pipeline=PIPELINE,
    root=ROOT,
    savepoint={"to": f"file://{DATA}/savepoints"},
    validate={
        "docs_dir": f"{DATA}/docs",
        "expectations_every": timedelta(days=int(os.environ.get("CAIRN_EXPECTATIONS_DAYS", "1"))),
    },
    # The preset "@daily" would give intervals of zero length in an Airflow whose configuration does not set
    # `create_cron_data_intervals`.
    schedule=CronDataIntervalTimetable("@daily", timezone="UTC"),
    start_date=datetime(2013, 1, 1, tzinfo=UTC),
    end_date=datetime(2013, 12, 31, tzinfo=UTC),
    tags=["cairn"],
    doc_md="""
### What it does
Reads one day of flights from New York, keeps the history of every aircraft (by tail number) as keyed state in RocksDB,
and commits state, source position and output of the day together as one checkpoint.

`process` runs the day on Spark · `checkpoint` commits it · `validate` restores the checkpoint and checks it with Great
Expectations · `savepoint` writes a copy of the state that nothing deletes, once a week.

### How to run it
Every day starts from the checkpoint of the day before, so begin with 1 January:

* **Backfill** (UI: Trigger › Backfill; choose to reprocess *All runs* or *Missing and Errored Runs*), or
  `airflow backfill create --dag-id aircraft --from-date 2013-01-01 --to-date 2013-01-14 --max-active-runs 1 --reprocess-behavior completed`
  With more active runs the days are processed in order all the same: a day defers until the checkpoint of the day before is there.
* **Trigger** one day: with a *logical date*. A manual run covers the day that ends there; without a date it is refused.
* **Re-run** a day: clear its `process` task with downstream. If the result differs, the later days are stale: the next
  run that would start from one of them is refused and names the days to run again.
* **Clearing `checkpoint` alone** publishes again, or says why it can't.

**Going back** to an earlier checkpoint or a savepoint: trigger the DAG `aircraft_restore`.

The parameters `allow_gap` and `allow_stale_base` give one run the permission to start from other state than its own;
`replace_overlapping` lets it take the place of output of intervals with other boundaries (after a change of the schedule).
""",
)

restore = restore_pipeline("aircraft_restore", PIPELINE, ROOT, tags=["cairn"])
