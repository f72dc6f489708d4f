"""What happens to a cluster, under a real Airflow: one day of a pipeline per disturbance. Drivers connect to a Spark standalone cluster
whose two hosts share nothing with them but the S3 server, and whose Python lacks Cairn (tests/integration/test_ten_days.py has a GCS
server). At the end state and outputs of all days are those of a run that nobody disturbed, and nothing is left behind. The tests build
on each other; each also runs alone. Only with CAIRN_TESTS=all: a quarter of an hour on two busy cores.

    CAIRN_TESTS=all pytest -s tests/integration/test_cluster.py        # -s shows the table

With older versions of Airflow, and of Spark on driver and cluster:

    PYTHONPATH=$(python -m tests.support.overlays airflow-3.2.2 pyspark-4.1.4) CAIRN_TESTS=all pytest -s tests/integration/test_cluster.py
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from local_stack.owned_process import command_line, python_path
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.sweep_files import sweep
from state_backend.inspection.verify import verify_pipeline
from tests.support.held_days import HeldDay, HeldDays
from tests.support.local_stack import AirflowServer, SparkConnectServer
from tests.support.postgres_server import folder_of_a_server
from tests.support.reading import unnamed_files
from tests.support.s3_server import BUCKET, s3_server
from tests.support.spark_cluster import HOSTS, SPARE, Cluster, Seen, cluster_in, seen_in
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.airflow,
    pytest.mark.spark,
    pytest.mark.cluster,
    pytest.mark.s3,
    pytest.mark.long("a quarter of an hour: a Spark cluster of processes"),
]

ROOT = Path(__file__).resolve().parents[2]
DAYS = 13  # more than there are tests
FAR_MS = 4_102_444_800_000  # the year 2100: what nobody needs is old
SPECULATION = {
    "spark.speculation": True,
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": 0.5,
    "spark.speculation.multiplier": 1.1,
    "spark.speculation.minTaskRuntime": "100ms",
}
DYNAMIC = {
    "spark.dynamicAllocation.enabled": True,
    "spark.dynamicAllocation.shuffleTracking.enabled": True,
    "spark.dynamicAllocation.shuffleTracking.timeout": "1s",
    "spark.dynamicAllocation.initialExecutors": 1,
    "spark.dynamicAllocation.maxExecutors": 2,
    # Spark does not remove an executor that holds shuffle data, so the first executor has to write the whole shuffle. On a loaded
    # machine the first executor must therefore survive the seconds before its first job, and Spark must not request the second
    # executor before the shards wait.
    "spark.dynamicAllocation.executorIdleTimeout": "20s",
    "spark.dynamicAllocation.schedulerBacklogTimeout": "20s",
    "spark.scheduler.minRegisteredResourcesRatio": 0,
}
DECOMMISSION = {
    "spark.decommission.enabled": True,
    "spark.storage.decommission.enabled": True,
    "spark.storage.decommission.shuffleBlocks.enabled": True,
}
EXCLUDE = {"spark.excludeOnFailure.taskAndStage.enabled": True}
DAGS = {
    "plain": {},
    "three": {"spark_conf": {"spark.cores.max": 3}},
    "speculation": {"spark_conf": SPECULATION},
    "dynamic": {"spark_conf": DYNAMIC},
    # A server takes a minute to be there again, and each second a try sees that it is not.
    "connect": {"spark_conn_id": "cairn_connect", "retries": 60},
}


@dataclass
class Stack:
    cluster: Cluster
    connect: SparkConnectServer
    airflow: AirflowServer
    days: HeldDays
    small_disk: bool
    logged: dict[str, int] = field(default_factory=dict)
    connect_runs: bool = False

    def day(self, dag_id: str, held: str = "all") -> HeldDay:
        self.logged = {_application(log): log.stat().st_size for log in self.cluster.events.iterdir()}
        return HeldDay(self.days, self.airflow, dag_id, held)

    def seen(self) -> Seen:
        """What happened to the day's last application, which is the one that came through."""
        log = max(self.cluster.events.iterdir(), key=lambda log: log.stat().st_mtime)
        return seen_in(log, after=self.logged.get(_application(log), 0))

    def connect_server(self) -> None:
        """It takes the whole cluster from the first test that needs it on."""
        if not self.connect_runs:
            self.connect_runs = True
            self.connect.start()
        self.connect.wait_until_ready(240)
        wait_until(lambda: self._executors() == set(HOSTS), 120, "the server has an executor on each host")

    def _executors(self) -> set[str]:
        log = max(self.cluster.events.glob("*.inprogress"), key=lambda log: log.stat().st_mtime, default=None)
        return set(seen_in(log).executors) if log is not None else set()

    def note(self, disturbance: str, seen: str, day: HeldDay) -> None:
        """Compares all days so far, and prints a line of the table."""
        self.days.assert_undisturbed()
        digest = day.succeed().content.digest
        print(f"\n{disturbance:<20} | {seen} | tries {len(day.tries())} | {digest:016x} as undisturbed", flush=True)


def _application(log: Path) -> str:
    return log.name.removesuffix(".inprogress")


@contextmanager
def small_disk() -> Iterator[tuple[Path, bool]]:
    """A folder with a disk of 24 MB, and True; False if this user may not mount one.

    The folder is not below pytest's own: if a killed run leaves the disk mounted, later runs could not remove that folder, and would fail.
    """
    folder = Path(tempfile.mkdtemp(prefix="cairn-disk-"))
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "cairn-tests", str(folder)],
        capture_output=True,
        check=False,
    )
    try:
        yield folder, mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=True)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("cluster")
    with (
        folder_of_a_server() as database,
        s3_server(),
        small_disk() as (disk, mounted),
        cluster_in(folder / "cluster", temp={HOSTS[1]: disk}) as cluster,
    ):
        days = HeldDays(folder, f"s3://{BUCKET}/cluster", DAGS)
        lacks = subprocess.run(
            [cluster.python, "-I", "-c", "import rocksdict, cairn"], capture_output=True, text=True, check=False
        )
        assert "No module named 'cairn'" in lacks.stderr
        # Its executors do have Cairn: a Connect server is sent nothing.
        conf = {
            key: json.dumps(value).strip('"')
            for key, value in (cluster.conf | DECOMMISSION | EXCLUDE).items()
            if key != "spark.pyspark.python"
        }
        connect = SparkConnectServer(ROOT, log_dir=folder / "logs", master=cluster.url, conf=conf)
        spark = {"conn_type": "spark", "host": cluster.url, "extra": {"conf": cluster.conf}}
        env = {
            "AIRFLOW_CONN_CAIRN_SPARK": json.dumps(spark),
            "AIRFLOW_CONN_CAIRN_CONNECT": connect.airflow_connection,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYTHONPATH": python_path(folder),
            "AIRFLOW__CORE__DAGS_FOLDER": str(folder / "dags"),
        }
        where = {"home": folder / "home", "log_dir": folder / "logs", "database_dir": database / "data"}
        try:
            with days.undisturbed(DAYS), AirflowServer(ROOT, env=env, **where) as airflow:
                for dag_id in DAGS:
                    airflow.wait_for_dag(dag_id)
                yield Stack(cluster, connect, airflow, days, mounted)
        finally:
            connect.stop()


FIRST, SECOND = HOSTS


def test_both_hosts_work_and_get_cairn_from_the_driver(stack: Stack) -> None:
    """Executors that lack Cairn get it from the driver, and both hosts work."""
    day = stack.day("plain")
    assert {t.host for t in day.shard_tries()} == set(HOSTS)
    workers = [pid for host in HOSTS for pid in stack.cluster.python_workers(host)]
    assert {command_line(pid)[0] for pid in workers} == {str(stack.cluster.python)}
    day.let_go()
    day.succeed()
    assert {t.host for t in day.shard_tries()} == set(HOSTS)
    stack.note("none", f"executors on {' and '.join(sorted(stack.seen().added))}", day)


def test_shards_of_a_lost_host_run_again_on_the_other_host(stack: Stack) -> None:
    """kill -9 of its Spark worker and of all that this one started."""
    day = stack.day("plain")
    lost = [t for t in day.shard_tries() if t.host == FIRST]
    assert lost, "no shard was there, so this shows nothing"
    stack.cluster.kill_host(FIRST)
    day.let_go()
    day.succeed()
    again = [t for t in day.shard_tries() if t.number > 0 or t.host == SECOND]
    assert {t.shard for t in lost} <= {t.shard for t in again}
    removed = stack.seen().removed
    assert removed
    stack.note("worker killed", f"{len(lost)} shards run again on {SECOND}; {removed[0]}", day)
    stack.cluster.start_worker(FIRST)


def test_shard_of_one_lost_host_of_three_runs_again_on_another_host(stack: Stack) -> None:
    stack.cluster.start_worker(SPARE)
    day = stack.day("three")
    lost, *kept = day.shard_tries()
    stack.cluster.kill_host(lost.host)
    day.let_go()
    day.succeed()
    assert set(stack.seen().added) == {*HOSTS, SPARE}
    again = [t for t in day.shard_tries() if t.shard == lost.shard and t.host != lost.host]
    assert again
    stack.note("one of three killed", f"shard {lost.shard} again on {again[-1].host}, {len(kept)} others stay", day)
    stack.cluster.kill_host(SPARE)
    if lost.host in HOSTS:
        stack.cluster.start_worker(lost.host)


def test_interval_succeeds_after_an_executor_is_killed(stack: Stack) -> None:
    day = stack.day("plain")
    lost = [t for t in day.shard_tries() if t.host == SECOND]
    assert lost, "no shard was there, so this shows nothing"
    stack.cluster.kill_executor(SECOND)
    day.let_go()
    day.succeed()
    removed = stack.seen().removed
    assert removed
    stack.note("executor killed", f"{len(lost)} shards run again; {removed[0]}", day)


def test_after_the_driver_is_killed_a_retry_succeeds(stack: Stack) -> None:
    """Of the Spark application; its executors end with it, and Airflow's retry starts another one."""
    day = stack.day("plain")
    (driver,) = day.drivers()
    os.kill(driver, signal.SIGKILL)
    day.let_go()
    day.succeed()
    assert len(day.tries()) == 2
    assert "the Spark driver was killed (SIGKILL)" in day.log_of_try(1)
    stack.note("driver killed", "another application", day)


def test_slow_shard_is_computed_by_a_speculative_copy_on_the_other_host(stack: Stack) -> None:
    """The slow one would wait for minutes; its copy on the other host does not, and is the one that counts."""
    day = stack.day("speculation", held="0")
    day.succeed()
    assert day.hold.exists(), "the slow one was let go, so this shows nothing"
    first, copy = (t for t in day.shard_tries() if t.shard == 0)
    assert first.host != copy.host
    seen = stack.seen()
    assert seen.copies >= 1
    stack.note("speculation", f"shard 0 on {first.host}, copied to {copy.host}; {', '.join(seen.failures)}", day)


def test_interval_succeeds_while_dynamic_allocation_adds_and_removes_executors(stack: Stack) -> None:
    """Dynamic allocation begins with one executor, adds another while shards wait, and takes the idle one away while a shard is at
    work."""
    day = stack.day("dynamic", held="0")
    (working,) = {t.host for t in day.shard_tries() if t.shard == 0}
    (idle,) = set(HOSTS) - {working}
    wait_until(lambda: set(stack.seen().added) == set(HOSTS), 120, "a second executor comes")
    wait_until(lambda: stack.seen().removed and not stack.cluster.executors(idle), 120, "the idle executor goes")
    day.let_go()
    day.succeed()
    seen = stack.seen()
    assert len(seen.added) >= 2 and seen.removed
    stack.note("dynamic allocation", f"{len(seen.added)} executors added, {len(seen.removed)} removed", day)


# Those below on a Connect server of the cluster, whose executors live longer than a day.


def test_shards_of_a_decommissioned_host_run_again_on_the_other_host(stack: Stack) -> None:
    """As a provider takes a host back: it is announced, nothing more is started there, and then the host is gone, with a shard at
    work. (Without the second part Spark lets the shard end there.)"""
    stack.connect_server()
    day = stack.day("connect")
    lost = [t for t in day.shard_tries() if t.host == FIRST]
    assert lost, "no shard was there, so this shows nothing"
    stack.cluster.decommission(FIRST)
    stack.cluster.kill_host(FIRST)
    day.let_go()
    day.succeed()
    assert {t.host for t in day.shard_tries() if t.shard == lost[0].shard} == {FIRST, SECOND}
    removed = stack.seen().removed
    assert removed
    stack.note("decommission", f"{len(lost)} shards run again; {removed[0]}", day)
    stack.cluster.start_worker(FIRST)


def test_tasks_that_fail_on_a_full_disk_need_no_airflow_retry(stack: Stack) -> None:
    """That of the second host's TMPDIR. Shards fail there, and run on the first."""
    if not stack.small_disk:
        pytest.skip("this user may not mount a tmpfs")
    stack.connect_server()
    ballast = stack.cluster.temp[SECOND] / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"\0" * 4096)
    # Room for the file with which `tempfile` tests TMPDIR. Without room, `tempfile` falls back to /tmp, where the disk is not full.
    os.truncate(ballast, ballast.stat().st_size - 2 * 4096)
    try:
        day = stack.day("connect", held="")
        day.succeed()
    finally:
        ballast.unlink()
    failures = stack.seen().failures
    assert failures and len(day.tries()) == 1
    stack.note("full disk", f"{len(failures)} tasks failed: {', '.join(sorted(set(failures)))}", day)


def test_after_the_connect_server_is_killed_a_retry_succeeds(stack: Stack) -> None:
    stack.connect_server()
    day = stack.day("connect")
    stack.connect.kill()
    stack.connect.start()
    day.let_go()
    stack.connect.wait_until_ready(240)
    day.succeed()
    assert "lost its Spark Connect server" in day.log_of_try(1)
    stack.connect.stop()
    stack.connect_runs = False
    stack.note("Connect server killed", "another server", day)


def test_state_equals_an_undisturbed_run_and_hosts_keep_no_file_or_process(stack: Stack, tmp_path: Path) -> None:
    stack.connect.stop()
    last = stack.day("plain")  # whoever works on a host removes what killed tasks left there
    last.let_go()
    last.succeed()
    worked = stack.seen().added
    stack.note("none", f"executors on {' and '.join(sorted(worked))}", last)
    for host in (*HOSTS, SPARE):
        wait_until(lambda host=host: not stack.cluster.executors(host), 30, "executors end")  # type: ignore[misc]
        wait_until(lambda host=host: not stack.cluster.python_workers(host), 30, "Python workers end")  # type: ignore[misc]
        left = [f for work in stack.cluster.temp[host].glob("cairn-work-*") for f in work.iterdir()]
        assert left == [] or host not in worked  # Nothing has worked on the spare host since a task was killed there.
    assert [f for f in (stack.days.folder / "memory").rglob("*") if f.is_file()] == []
    storage = open_storage(f"{stack.days.root}/sums")
    sweep(storage, "sums", now_ms=FAR_MS)
    assert unnamed_files(storage, stack.days.log()) == set()
    assert verify_pipeline(storage, work=tmp_path).success
