"""Templates of the files that `cairn new` writes.

The values of the chosen interface (`PARTS`) replace `$word`. Then the user's answers replace `$$word`.
"""

from __future__ import annotations

_PIPELINE = '''"""The pipeline ``$$name``: $about

Its input lies in the folder that CAIRN_$$constant names (an absolute path; default: ``data/$$name`` in the repository). The
folder has $files of JSON lines for each $$interval.
"""

from __future__ import annotations

import hashlib
import os
$imports
$imports_more
from cairn import Interval, Pipeline
${imports_own}from cairn.errors import SourceError
$imports_after
$schemas
$constants
$source
$processor
def expectations() -> dict[str, list[Any]]:
    """Return what must be true of the state after every $$interval. The DAG validates it."""
    import great_expectations.expectations as gxe

    return {
        "$state": [
            gxe.ExpectColumnValuesToNotBeNull(column="key_$$key"),
$expectations
        ],
    }


$$constant = Pipeline(
    name="$$name",
    start=datetime(2024, 1, 1, tzinfo=UTC),
    source=read_$$name,
    key=["$$key"],
    processor=$class,
    api="$$api",
$output$time    time_zone="UTC",
    parallelism=2,
    max_parallelism=128,
    expectations=expectations,
)
'''

_DAG = '''"""The pipeline ``$$name``, one $$interval after the other. Wiring only: the pipeline is jobs/pipelines/$$name.py."""

import os
from datetime import UTC, datetime
from pathlib import Path

from airflow.sdk import CronDataIntervalTimetable

from cairn_operators import restore_pipeline, stateful_pipeline

DATA = Path(os.environ.get("CAIRN_DATA", Path(__file__).resolve().parents[1] / "data"))

PIPELINE = "pipelines.$$name:$$constant"
ROOT = os.environ.get("CAIRN_ROOT", f"file://{DATA}/state")

dag = stateful_pipeline(
    "$$name",
    pipeline=PIPELINE,
    root=ROOT,
    validate={"docs_dir": f"{DATA}/docs"},
    schedule=CronDataIntervalTimetable("@$$schedule", timezone="UTC"),
    start_date=datetime(2024, 1, 1, tzinfo=UTC),
    # The last $$interval of the sample data. It is past, so Airflow creates no run by itself: `cairn backfill` runs all.
    # For your own data, remove this line, and set start_date and the pipeline's start to your first $$interval. An unpaused
    # DAG then runs the newest $$interval first: `cairn backfill` runs those before.
    end_date=datetime($$last, tzinfo=UTC),
    tags=["cairn"],
)

restore = restore_pipeline("$$name_restore", PIPELINE, ROOT, tags=["cairn"])
'''.replace("$$name_restore", "$${name}_restore")

_TEST = '''"""The pipeline ``$$name``, without Spark and Airflow."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from cairn.testing import PipelineTester
from pipelines.$$name import $$imported


@pytest.fixture
def tester() -> PipelineTester:
    return PipelineTester($$constant, input_schema=INPUT_SCHEMA, every=timedelta($$every))


def at(minute: int) -> datetime:
    """$$sample_hour_text"""
    return datetime(2024, 1, 1, $$sample_hour) + timedelta(minutes=minute)


$tests
'''

SOURCE = '''def read_$name(spark: SparkSession, interval: Interval) -> tuple[DataFrame, dict[str, Any]]:
    """Return the ROWS that arrived in ``[start, end)``, whenever they happened, and the file that they were read from."""
    default = Path(__file__).resolve().parents[2] / "data" / "$name"
    path = Path(os.environ.get("CAIRN_$constant") or default) / f"{interval.start:$file_format}.json"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SourceError(f"the ROWS of the $interval {interval} are missing: {error}; put them into {path}") from None
    rows = spark.read.schema(INPUT_SCHEMA).option("mode", "FAILFAST").json(f"file://{path}")
    return rows, {"files": [{"path": path.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}]}

'''
EVENTS = {
    "schemas": 'INPUT_SCHEMA = "$key string, page string, at timestamp"',
    "source": SOURCE.replace("ROWS", "events"),
    "imports_after": "",
    "files": "one file",
}

TEMPLATES = {
    "jobs/pipelines/$name.py": _PIPELINE,
    "dags/$name.py": _DAG,
    "tests/pipelines/test_$name.py": _TEST,
}

_STATE = """        self._handle = handle
        self._open = handle.getListState("open", "started_ms long, last_ms long, events long")
"""
_ADD = '''
    def _add(self, events_ms: list[int]) -> None:
        """Add events to the sessions that they touch. An event between two sessions joins them."""
        sessions = [*self._open.get(), *((ms, ms, 1) for ms in events_ms)]
        for _, last_ms, _ in self._open.get():
            self._handle.deleteTimer(last_ms + GAP_MS)
        merged: list[tuple[int, int, int]] = []
        for started_ms, last_ms, events in sorted(sessions):
            if merged and started_ms - merged[-1][1] < GAP_MS:
                before = merged.pop()
                merged.append((before[0], max(before[1], last_ms), before[2] + events))
            else:
                merged.append((started_ms, last_ms, events))
        self._open.put(merged)
        for _, last_ms, _ in merged:
            self._handle.registerTimer(last_ms + GAP_MS)
'''
_ENDED = """        ended_ms = expiredTimerInfo.getExpiryTimeInMs() - GAP_MS
        sessions = list(self._open.get())
        self._open.clear()
        if still_open := [session for session in sessions if session[1] != ended_ms]:
            self._open.put(still_open)
"""
_TIMES = """                started_at=datetime.fromtimestamp(started_ms / 1000, UTC),
                ended_at=datetime.fromtimestamp(last_ms / 1000, UTC),
"""
_SESSION_PARTS = {
    **EVENTS,
    "about": "sessions of events. A session ends when its $key has had no event for half an hour.",
    "constants": """GAP_MS = 30 * 60 * 1000

""",
    "imports_own": "",
    "class": "Sessions",
    "state": "open",
    "expectations": """            gxe.ExpectColumnValuesToBeBetween(column="events", min_value=1),
            gxe.ExpectColumnPairValuesAToBeGreaterThanB(column_A="last_ms", column_B="started_ms", or_equal=True),""",
    "output": """    output_schema="$key string, started_at timestamp, ended_at timestamp, events bigint",
""",
    "time": """    time_mode="event",
    event_time="at",
    # The watermark is the end of the interval minus this delay. A session is output when the watermark passes its end. An
    # event at or before the watermark of the previous interval is late: it goes to the late rows and into no session.
    watermark_delay=timedelta(hours=1),
    watermark="interval",
""",
    "tests": """def test_a_session_ends_when_it_was_quiet_for_half_an_hour(tester: PipelineTester) -> None:
    tester.run([("ann", "a", at(5)), ("ann", "b", at(20)), ("ann", "c", at(55)), ("bob", "a", at(10))])
    assert [(row["key_$key"], row["events"]) for row in tester.state("open")] == [("ann", 2), ("ann", 1), ("bob", 1)]
    ended = tester.run().output + tester.run().output
    assert sorted((row["$key"], row["events"]) for row in ended) == [("ann", 1), ("ann", 2), ("bob", 1)]
    assert tester.state("open") == tester.timers() == []


def test_an_event_between_two_sessions_makes_them_one(tester: PipelineTester) -> None:
    tester.run([("ann", "a", at(1)), ("ann", "a", at(50))])
    ended = tester.run([("ann", "b", at(25))]).output + tester.run().output
    assert [row["events"] for row in ended] == [3]


def test_an_event_before_the_watermark_is_late(tester: PipelineTester) -> None:
    tester.run()
    tester.run()
    late = tester.run([("ann", "a", at(1))])
    assert [row["$key"] for row in late.late] == ["ann"]
    assert tester.state("open") == []


def test_another_number_of_shards_and_a_lost_try_change_nothing(tester: PipelineTester) -> None:
    tester.run([(f"user{n}", "a", at(n + 1)) for n in range(20)])
    before = tester.state("open")
    tester.run([("ann", "a", at(59))], commit=False)
    tester.rescale(3)
    assert tester.state("open") == before
    assert len(tester.run().output) == 20""",
}
_IMPORTS = """from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
"""
_STREAMING = """from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)
"""

_ROW = {
    **_SESSION_PARTS,
    "imports": _IMPORTS,
    "imports_more": "from pyspark.sql import DataFrame, Row, SparkSession\n" + _STREAMING,
    "processor": f'''class Sessions(StatefulProcessor):  # type: ignore[misc]
    """Processes one $key after the other. The state is its open sessions; a timer ends each session."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state: a list of open sessions."""
{_STATE}
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        """Add the events of one $key to its sessions."""
        self._add([round(row.at.timestamp() * 1000) for row in rows if row.at is not None])
        yield from ()
{_ADD}
    def handleExpiredTimer(
        self, key: Any, timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[Row]:
        """Yield the sessions that end at this timer, and remove them from the state."""
{_ENDED}        for started_ms, last_ms, events in sessions:
            if last_ms == ended_ms:
                yield Row(
                    $key=key[0],
                    started_at=datetime.fromtimestamp(started_ms / 1000, UTC),
                    ended_at=datetime.fromtimestamp(last_ms / 1000, UTC),
                    events=events,
                )

''',
}
_PANDAS = {
    **_SESSION_PARTS,
    "imports": _IMPORTS,
    "imports_more": "import pandas as pd\nfrom pyspark.sql import DataFrame, SparkSession\n" + _STREAMING,
    "processor": f'''class Sessions(StatefulProcessor):  # type: ignore[misc]
    """Processes one $key after the other, with rows as DataFrames. The state is its open sessions; a timer ends each."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state: a list of open sessions."""
{_STATE}
    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[pd.DataFrame]:
        """Add the events of one $key to its sessions."""
        for frame in rows:
            self._add(frame["at"].dropna().to_numpy().astype("datetime64[ms]").astype("int64").tolist())
        yield from ()
{_ADD}
    def handleExpiredTimer(
        self, key: Any, timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[pd.DataFrame]:
        """Yield the sessions that end at this timer, and remove them from the state."""
{_ENDED}        ended = pd.DataFrame(
            [session for session in sessions if session[1] == ended_ms], columns=["started_ms", "last_ms", "events"]
        )
        yield pd.DataFrame(
            {{
                "$key": key[0],
                "started_at": pd.to_datetime(ended["started_ms"], unit="ms"),
                "ended_at": pd.to_datetime(ended["last_ms"], unit="ms"),
                "events": ended["events"],
            }}
        )

''',
}
_ARROW = {
    **EVENTS,
    "about": "how many events each $key has had, and when the last one was.",
    "imports": """from datetime import UTC, datetime
from pathlib import Path
from typing import Any
""",
    "imports_more": "from pyspark.sql import DataFrame, SparkSession\n",
    "constants": "\n",
    "imports_own": "from cairn.aggregates import ApproxDistinct, Count, Max, RunningAggregate\n",
    "processor": '''class Totals(RunningAggregate):
    """Totals of each $key so far. The output has a row for each $key with events in the $interval."""

    events = Count()
    pages = ApproxDistinct("page")
    last_at = Max("at")

''',
    "class": "Totals",
    "state": "aggregates",
    "expectations": """            gxe.ExpectColumnValuesToBeUnique(column="key_$key"),""",
    "output": """    output_schema="$key string, events bigint, pages bigint, last_at timestamp",
""",
    "time": """    time_mode="none",
""",
    "tests": """def test_events_are_counted_over_intervals(tester: PipelineTester) -> None:
    first = tester.run([("ann", "a", at(5)), ("ann", "b", at(20)), ("bob", "a", at(10))])
    assert sorted((row["$key"], row["events"], row["pages"]) for row in first.output) == [("ann", 2, 2), ("bob", 1, 1)]
    second = tester.run([("ann", "a", at(59))])
    assert [(row["$key"], row["events"], row["pages"]) for row in second.output] == [("ann", 3, 2)]


def test_another_number_of_shards_and_a_lost_try_change_nothing(tester: PipelineTester) -> None:
    tester.run([(f"user{n}", "a", at(n)) for n in range(20)])
    before = tester.state("aggregates")
    tester.run([("ann", "a", at(59))], commit=False)
    tester.rescale(3)
    tester.run()
    assert tester.state("aggregates") == before""",
}
PARTS = {"row": _ROW, "pandas": _PANDAS, "arrow": _ARROW}
