"""A pipeline whose shards wait where a test says, and its days under a real Airflow: each is disturbed while its shards are at work. In
the end state and outputs of all days have to be those of a run that nobody disturbed.

Below the test's folder, which all processes see: ``hold`` holds the number of a shard, or "all", whose first try waits until the file is
gone, for five minutes at most, and writes into ``beat`` meanwhile; ``tries`` gets a file for each try at a shard that came to its first row.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from local_stack.owned_process import python_path
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.log import Log, read_log
from state_backend.values.records import Record
from tests.support.local_stack import AirflowServer, RestError, running_drivers
from tests.support.reading import read_output
from tests.support.waiting import wait_until

START = datetime(2024, 1, 1, tzinfo=UTC)
SHARDS = 2

PIPELINE = """
import hashlib, json, os, pathlib, time, uuid
from datetime import UTC, datetime
from pyspark import TaskContext
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row
from cairn import Pipeline
from state_backend.adapters.rocks import EngineOptions

FOLDER = pathlib.Path("@FOLDER@")

def source(spark, interval):
    rows = spark.range(0, 2_000, 1, 2).filter(f"id % 3 = {interval.start.day % 3} or {interval.start.day} = 1")
    return rows.selectExpr("concat('user-', id % 1000) as user", f"id * {interval.start.day} as amount")

class Sums(StatefulProcessor):
    def init(self, handle):
        self._sum = handle.getValueState("sum", "total long, padding string")
        self._waited = False

    def handleInputRows(self, key, rows, timerValues):
        if not self._waited:
            self._wait()
        total = (self._sum.get() or (0, ""))[0] + sum(row.amount for row in rows)
        # Does not compress, so that each shard has files of its own on the storage.
        padding = "".join(hashlib.sha256(f"{key[0]} {total} {n}".encode()).hexdigest() for n in range(12))
        self._sum.update((total, padding))
        yield Row(user=key[0], total=total)

    def _wait(self):
        self._waited = True
        task = TaskContext.get()
        told = {"shard": task.partitionId(), "try": task.attemptNumber(), "host": os.environ.get("SPARK_LOCAL_IP"), "pid": os.getpid()}
        (FOLDER / "tries" / uuid.uuid4().hex).write_text(json.dumps(told))
        deadline_s = time.monotonic() + 300
        while task.attemptNumber() == 0 and self._held(task.partitionId()) and time.monotonic() < deadline_s:
            (FOLDER / "beat").write_text(str(time.monotonic()))
            time.sleep(0.05)

    def _held(self, shard):
        try:
            return (FOLDER / "hold").read_text() in ("all", str(shard))
        except FileNotFoundError:
            return False

SUMS = Pipeline(name="sums", start=datetime(2024, 1, 1, tzinfo=UTC), source=source, key=["user"], processor=Sums,
                output_schema="user string, total long", parallelism=2, max_parallelism=16,
                engine=EngineOptions(metadata_dir="@FOLDER@/memory"))
"""

DAGS = """
# Airflow DAGs.
from datetime import UTC, datetime, timedelta
from cairn_operators.airflow_versions import CronDataIntervalTimetable
from cairn_operators import stateful_pipeline

for name, more in @DAGS@.items():
    limit = {"execution_timeout": timedelta(seconds=more.pop("timeout_s"))} if "timeout_s" in more else {}
    globals()[name] = stateful_pipeline(
        name, "sums_pipeline:SUMS", "@ROOT@", pipeline="sums",
        schedule=CronDataIntervalTimetable("@daily", timezone="UTC"), start_date=datetime(2024, 1, 1, tzinfo=UTC),
        end_date=datetime(2024, 12, 31, tzinfo=UTC),
        process={"retry_delay": timedelta(seconds=1), "retries": more.pop("retries", 5), **limit},
        checkpoint={"retry_delay": timedelta(seconds=1)}, **more,
    )
"""

# Without Airflow, in one process on two cores, and nobody is killed.
_UNDISTURBED = """
import sys
from datetime import timedelta
from sums_pipeline import SUMS
from cairn.pipeline import Interval
from cairn.operations.intervals.run_interval import run_interval
from cairn.spark.session import connect
spark = connect("local[2]", "undisturbed")
for n in range(int(sys.argv[2])):
    start = SUMS.start + timedelta(days=n)
    run_interval(spark, SUMS, Interval(start, start + timedelta(days=1)), sys.argv[1])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """Of Spark at a shard."""

    shard: int
    number: int
    host: str
    pid: int


def alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


class HeldDays:
    """``root``: the URL below which the pipeline keeps its state. ``dags``: ``retries`` and ``timeout_s`` of `process`, and more arguments of `stateful_pipeline`, by the name of a DAG; all
    DAGs process the one pipeline."""

    def __init__(self, folder: Path, root: str, dags: dict[str, dict[str, Any]]) -> None:
        self.folder, self.root = folder, root
        # Who runs undisturbed has a folder of its own, where nobody holds a shard.
        self.alone = folder / "undisturbed"
        for where in (folder, self.alone):
            for name in ("tries", "memory"):
                (where / name).mkdir(parents=True)
            (where / "sums_pipeline.py").write_text(PIPELINE.replace("@FOLDER@", str(where)))
        (folder / "dags").mkdir()
        (folder / "dags/sums.py").write_text(DAGS.replace("@ROOT@", root).replace("@DAGS@", repr(dags)))
        (self.alone / "undisturbed.py").write_text(_UNDISTURBED)

    def log(self) -> Log:
        return read_log(open_storage(f"{self.root}/sums"))

    @contextmanager
    def undisturbed(self, days: int) -> Iterator[None]:
        """Within the block another process makes what so many days come to undisturbed, for `assert_undisturbed`."""
        path = python_path(self.alone)
        command = [sys.executable, str(self.alone / "undisturbed.py"), f"{self.alone}/state", str(days)]
        with (self.folder / "undisturbed.log").open("wb") as log:
            self._undisturbed = subprocess.Popen(
                command, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            yield
        finally:
            self._undisturbed.terminate()
            self._undisturbed.wait()

    def assert_undisturbed(self) -> None:
        """Digest and rows of every day so far are those of an undisturbed run, and each day was committed once."""
        assert self._undisturbed.wait() == 0, (self.folder / "undisturbed.log").read_text()[-3000:]
        disturbed = self.log().completed()
        assert [(r.content.base_id, r.content.interval.start) for r in disturbed] == [
            (before.id if before else None, START + timedelta(days=n))
            for n, before in enumerate([None, *disturbed[:-1]])
        ]
        root = f"{self.alone}/state"
        undisturbed = read_log(open_storage(f"{root}/sums")).completed()
        for ours, theirs in zip(disturbed, undisturbed, strict=False):
            assert ours.content.digest == theirs.content.digest, ours.content.interval
            rows = read_output(f"{self.root}/sums", ours)
            assert rows and rows == read_output(f"{root}/sums", theirs), ours.content.interval


class HeldDay:
    """One interval, which Airflow runs, and whose shards wait until ``let_go``. ``held``: a shard's number, or "all"."""

    def __init__(self, days: HeldDays, airflow: AirflowServer, dag_id: str, held: str = "all") -> None:
        self.days, self.airflow, self.dag_id = days, airflow, dag_id
        self.hold = days.folder / "hold"
        self.start = START + timedelta(days=len(days.log().completed()))
        for told in (days.folder / "tries").iterdir():
            told.unlink()
        self.hold.unlink(missing_ok=True)
        if held:
            self.hold.write_text(held)
        span = {"data_interval_start": self.start.isoformat(), "data_interval_end": self.end.isoformat()}
        self.run_id: str = airflow.client.trigger(dag_id, self.start.isoformat(), **span)["dag_run_id"]
        if held:
            self.wait_for_shards(range(SHARDS))

    @property
    def end(self) -> datetime:
        return self.start + timedelta(days=1)

    def wait_for_shards(self, shards: Iterable[int]) -> None:
        """Until each of them has come to its first row. Raises: AssertionError if the run fails before."""
        wanted = set(shards)
        wait_until(lambda: wanted <= self._at_work(), 300, f"shards {wanted} are at work", poll_s=0.5)

    def _at_work(self) -> set[int]:
        found = {t.shard for t in self.shard_tries()}
        if not found and self.tries()[-1]["state"] == "failed":
            raise AssertionError(self.log_of_try(len(self.tries())))
        return found

    def shard_tries(self) -> list[Try]:
        """Spark's, by shard and number."""
        found = [json.loads(text) for f in (self.days.folder / "tries").iterdir() if (text := f.read_text())]
        made = [Try(shard=t["shard"], number=t["try"], host=t["host"], pid=t["pid"]) for t in found]
        return sorted(made, key=lambda t: (t.shard, t.number))

    def drivers(self) -> list[int]:
        return [driver.pid for driver in running_drivers(self.airflow.processes)]

    def still_beats(self) -> bool:
        """Whether a shard waits, whoever started it."""
        beat = self.days.folder / "beat"
        before = beat.read_text()
        time.sleep(0.3)
        return beat.read_text() != before

    def let_go(self) -> None:
        """From now on no shard waits."""
        self.hold.unlink()

    def tries(self) -> list[dict[str, Any]]:
        """Airflow's."""
        return self.airflow.client.tries(self.dag_id, self.run_id, "process")

    def log_of_try(self, number: int) -> str:
        """Its lines; none if there is no such try yet."""
        if number > len(self.tries()):
            return ""
        try:
            return "\n".join(self.airflow.client.log(self.dag_id, self.run_id, "process", number))
        except RestError as error:
            if error.status != 404:  # Airflow is just making the next try of it
                raise
            return ""

    def succeed(self) -> Record:
        """Waits for the run; its record."""
        ended = self.airflow.client.wait_for_runs(self.dag_id, [self.run_id], timeout_s=400)
        assert ended == {self.run_id: "success"}, self.log_of_try(len(self.tries()))
        newest = self.days.log().completed()[-1]
        assert newest.content.interval.start == self.start
        assert newest.content.run.try_number == len(self.tries())
        return newest
