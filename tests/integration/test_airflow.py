"""The aircraft pipeline under a real Airflow scheduler and a real Spark Connect server. Fixtures make the days that several tests need."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from selenium.webdriver.common.by import By

from cairn_operators.airflow_versions import has
from cairn_ui.read_logs import FRESH_S
from local_stack.airflow_server import run_path
from local_stack.demo import DAG, FIRST_DAY, DriverKiller, pipeline_env
from local_stack.owned_process import command_line, python_path
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.chains.judge_inputs import Chains
from state_backend.checkpoint.log import Log, read_log
from state_backend.checkpoint.savepoints import read_savepoint
from state_backend.values.records import Record
from tests.oracles.aircraft import expected, row_order
from tests.support.airflow_names import ASKING, DEADLINES, as_object, needs
from tests.support.airflow_on_postgres import airflow_on_postgres
from tests.support.azure_server import BUCKET, VARIABLE, azure_server
from tests.support.browser import browser, log_in, wait_for
from tests.support.checkpoints import day as tally_day
from tests.support.coordinator import Coordinator
from tests.support.http_listener import http_listener
from tests.support.local_stack import AirflowClient, AirflowServer, RestError, SparkConnectServer, running_drivers
from tests.support.reading import read_output, read_state
from tests.support.shown_airflow import ShownAirflow
from tests.support.tally import Tally, day_of
from tests.support.tiers import ALL
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.airflow, pytest.mark.spark]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("airflow")
    command = [sys.executable, "-m", "pipelines.land_flights", "--to", str(folder / "flights"), "--days", "12"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def connect(data: Path) -> Iterator[SparkConnectServer]:
    with SparkConnectServer(ROOT, log_dir=data / "logs") as server:
        yield server


@pytest.fixture(scope="module")
def pages() -> Iterator[tuple[str, list[str]]]:
    """Somebody who is called by a web hook: its URL, and the texts that it got."""
    texts: list[str] = []

    def take(_: str, body: bytes) -> int:
        texts.append(json.loads(body)["text"])
        return 204

    with http_listener(take) as port:
        yield f"http://127.0.0.1:{port}", texts


def write_alarms(dags: Path, plugins: Path) -> None:
    """The code of docs/alarms.md as it stands there, for the pipeline of the tests and with a deadline of seconds."""
    pager, dag = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "alarms.md").read_text(), re.DOTALL)
    plugins.mkdir()
    (plugins / "pager.py").write_text(pager)
    for said, here in (
        ('"clicks"', '"tally_alarms"'),
        ("pipelines.clicks:CLICKS", "unused:TALLY"),
        ('"file:///data/state"', "ROOT"),
        ("@hourly", "@daily"),
        ("minutes=30", "seconds=4"),
        ("/data/docs", str(plugins)),
        ("from airflow.sdk import AsyncCallback", f"from {DEADLINES} import AsyncCallback"),
    ):
        assert said in dag
        dag = dag.replace(said, here)
    own = "from tests.support.tally_dags import DRIVER, ROOT\n"
    (dags / "alarms.py").write_text(f"{own}{dag}dag.get_task('process').driver_module = DRIVER\n")


RANGE = """
# An Airflow DAG.
import os
from datetime import timedelta
from cairn_operators import backfill_pipeline

data = os.environ["CAIRN_DATA"]
dag = backfill_pipeline("aircraft_range", "pipelines.aircraft:AIRCRAFT", f"file://{data}/range", pipeline="aircraft",
                        every=timedelta(days=1), validate={"docs": f"{data}/range-docs"}, backfill={"spark_conf": {"@AZURE@": "@KEY@", "spark.sql.shuffle.partitions": 2}})
"""
CHAINED = """
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from cairn import Pipeline, upstream, upstreams

class Step(StatefulProcessor):
    "Gives rows of one day; its state is the number of days."

    def init(self, handle):
        self.state = handle.getValueState("state", "n long")

    def handleInputRows(self, key, rows, timerValues):
        (before,), rows = self.state.get() or (0,), list(rows)
        self.state.update((self.after(before, rows),))
        yield Row(user=key[0], n=self.given(before, rows))

    def after(self, before, rows):
        return before + 1

    def given(self, before, rows):
        return sum(row.n for row in rows)

class Sessions(Step):
    def given(self, before, rows):
        return sum(-(-row.n // 10) for row in rows)

class Total(Step):
    after = given = lambda self, before, rows: before + sum(row.n for row in rows)

def landed(spark, interval):
    read = json.loads(Path(os.environ["CAIRN_DATA"], "landed", f"{interval.start.day}.json").read_text())
    return spark.createDataFrame([*read.items()], "user string, n long")

def both(spark, interval, sessions, events):
    return sessions.unionByName(events)

common = {"start": datetime(2024, 1, 1, tzinfo=UTC), "key": ["user"], "parallelism": 1, "output_schema": "user string, n long"}
EVENTS = Pipeline(name="events", source=landed, processor=Step, **common)
SESSIONS = Pipeline(name="sessions", source=upstream("events"), processor=Sessions, **common)
REPORT = Pipeline(name="report", source=upstreams(both, sessions=upstream("sessions"), events=upstream("events", back=1)), processor=Total, **common)
"""
CHAIN = """
# Three Airflow DAGs.
import os
from datetime import UTC, datetime
from cairn_operators import stateful_pipeline

for name in ("events", "sessions", "report"):
    globals()[name] = stateful_pipeline(
        name, f"chained:{name.upper()}", f"file://{os.environ['CAIRN_DATA']}/chain/state", pipeline=name, schedule="@daily",
        catchup=True, start_date=datetime(2024, 1, 1, tzinfo=UTC), end_date=datetime(2024, 1, 30, tzinfo=UTC), is_paused_upon_creation=True,
    )
"""
CHAIN_OF_DAGS = ("events", "sessions", "report")
ON_AZURE = f"az://{BUCKET}/airflow"
AZURE, KEY = "spark.hadoop.fs.azure.account.key.store.dfs.core.windows.net", "bm90LWEtcmVhbC1rZXk="


@pytest.fixture(scope="module")
def azurite() -> Iterator[str | None]:
    """The connection string of a server that stands in for Azure; None where Azurite can't be installed."""
    with ExitStack() as stack:
        try:
            stack.enter_context(azure_server())
        except pytest.skip.Exception:
            yield None
            return
        yield os.environ[VARIABLE]


@pytest.fixture(scope="module")
def airflow(
    data: Path, connect: SparkConnectServer, pages: tuple[str, list[str]], azurite: str | None
) -> Iterator[AirflowServer]:
    """One Airflow and one Spark server for all tests of this file; the DAGs are the repository's and the tests' own."""
    dags = data / "dags"
    dags.mkdir()
    write_alarms(dags, data / "plugins")
    (dags / "aircraft.py").symlink_to(ROOT / "dags" / "aircraft.py")
    (dags / "range.py").write_text(RANGE.replace("@AZURE@", AZURE).replace("@KEY@", KEY))
    (dags / "chain.py").write_text(CHAIN)
    (dags / "chained.py").write_text(CHAINED)
    (data / "landed").mkdir()
    (dags / "tally.py").symlink_to(ROOT / "tests" / "support" / "tally_dags.py")
    env = pipeline_env(data, data / "flights", connect) | {
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "CAIRN_TALLY": str(data / "tally"),
        "PAGER_URL": pages[0],
        "CAIRN_TALLY_AZURE": ON_AZURE if azurite else "",
        "AIRFLOW_CONN_AZURITE": json.dumps({"conn_type": "wasb", "extra": {"connection_string": azurite}}),
        VARIABLE: "",
        "PYTHONPATH": python_path(ROOT, ROOT / "plugins", data / "plugins"),
    }
    own = "killed aircraft_restore aircraft_range tally tally_deleted tally_shown tally_whole tally_halves tally_alarms created_0"
    dag_ids = [DAG, *own.split(), *CHAIN_OF_DAGS, *(["tally_azure"] if azurite else [])]
    with airflow_on_postgres(data, env, dags=dag_ids) as server:
        yield server


def day(number: int) -> str:
    return (FIRST_DAY + timedelta(days=number - 1)).isoformat()


def log_of(data: Path) -> Log:
    return read_log(open_storage(join_url(f"file://{data}/state", DAG)))


def drivers(airflow: AirflowServer) -> list[int]:
    return [driver.pid for driver in running_drivers(airflow.processes)]


def run_of(airflow: AirflowServer, number: int) -> str:
    start = datetime.fromisoformat(day(number))
    for run in airflow.client.dag_runs(DAG):
        if run["logical_date"] and datetime.fromisoformat(run["logical_date"]) == start:
            run_id: str = run["dag_run_id"]
            return run_id
    raise AssertionError(f"no run for day {number}")


def printed_commands(text: str) -> list[str]:
    """The commands of a log, each a line of its own."""
    return [line for line in text.splitlines() if line.startswith(("airflow ", "cairn backfill ", "cairn heal "))]


def run_as_printed(airflow: AirflowServer, command: str) -> str:
    """Runs a line in a shell, with what ``make ui`` says that a terminal needs: AIRFLOW_HOME, Airflow's address, and .venv/bin on the
    PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**airflow.env, "PATH": path, "CAIRN_AIRFLOW": airflow.client.url}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def states(airflow: AirflowServer, run_id: str, dag_id: str = DAG) -> dict[str, str]:
    return {task["task_id"]: task["state"] for task in airflow.client.task_instances(dag_id, run_id)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreeDays:
    """The facts that tests need about a backfill of the first three days, as they are right after it.

    Attributes:
        runs: Airflow's id of the run of each day.
        tries: Number of tries of each day's `process` task.
        completed: The log's record of each checkpoint.
        tasks: Airflow's state of each task of the third day.
        events: The asset events, the oldest first.
    """

    runs: list[str]
    tries: list[int]
    completed: list[Record]
    tasks: dict[str, str]
    events: list[dict[str, Any]]


@pytest.fixture(scope="module")
def three_days(airflow: AirflowServer, data: Path) -> ThreeDays:
    """A backfill of three days; the driver of the second day is killed once."""
    client = airflow.client
    killer = DriverKiller(airflow.processes, FIRST_DAY + timedelta(days=1), after_s=0.5)
    client.create_backfill(DAG, FIRST_DAY, FIRST_DAY + timedelta(days=2))
    runs = [run_of(airflow, number) for number in (1, 2, 3)]
    deadline_s = time.monotonic() + 120
    while not killer.done:
        assert time.monotonic() < deadline_s, "no driver to kill"
        killer.look()
        time.sleep(0.1)
    assert set(client.wait_for_runs(DAG, runs, timeout_s=240).values()) == {"success"}
    assert not drivers(airflow)
    events = client.call("GET", f"/api/v2/assets/events?source_dag_id={DAG}")["asset_events"]
    return ThreeDays(
        runs=runs,
        tries=[len(client.tries(DAG, run, "process")) for run in runs],
        completed=list(log_of(data).completed()),
        tasks=states(airflow, runs[2]),
        events=sorted(events, key=lambda event: event["id"]),
    )


def stale(data: Path) -> set[int]:
    return {number for number, retained in log_of(data).retained.items() if retained.stale_by}


def test_backfill_survives_a_killed_driver(airflow: AirflowServer, data: Path, three_days: ThreeDays) -> None:
    assert three_days.tries == [1, 2, 1]
    assert "the Spark driver was killed (SIGKILL)" in "\n".join(
        airflow.client.log(DAG, three_days.runs[1], "process", 1)
    )
    completed = three_days.completed
    assert [(record.id, record.content.base_id) for record in completed] == [(1, None), (2, 1), (3, 2)]
    assert [record.content.interval.start.isoformat() for record in completed] == [day(1), day(2), day(3)]
    assert completed[1].content.run.try_number == 2
    assert three_days.tasks == {
        "process": "success",
        "checkpoint": "success",
        "validate": "success",
        "savepoint": "skipped",
    }
    assert airflow.client.xcom(DAG, three_days.runs[2], "checkpoint")["checkpoint"] == 3
    told = [(event["extra"]["checkpoint"], event["extra"]["validated"]) for event in three_days.events]
    assert told == [(1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
    assert three_days.events[0]["extra"]["rows"] == completed[0].content.totals.output_rows

    # And all of it, the killed day included, is what pandas says.
    oracle = expected(FIRST_DAY.date(), 3)
    root = data / "state" / DAG
    for number, record in enumerate(completed):
        rows = sorted(read_output(root, record), key=row_order)
        assert rows == oracle.rows[FIRST_DAY.date() + timedelta(days=number)]
    history = read_state(root, completed[-1], "history", data / "restored")
    assert {tail: fields for (tail,), fields in history.items()} == oracle.history
    routes = read_state(root, completed[-1], "routes", data / "restored")
    counts = {(tail, origin, dest): fields["flights"] for (tail, origin, dest), fields in routes.items()}
    assert counts == {(tail, *route): n for tail, flown in oracle.routes.items() for route, n in flown.items()}


@pytest.mark.browser
@pytest.mark.long("minutes: a hundred runs on Spark")
def test_a_correction_goes_through_a_chain_of_dags(airflow: AirflowServer, data: Path) -> None:
    """Events, sessions, and a report that reads both over 30 days. With CAIRN_SCREENSHOTS=docs, the pictures of docs/chains.md are made anew."""
    client, root, last, fifth = airflow.client, f"file://{data}/chain/state", 30, 5
    chain = {name: Tally(client, data / "chain", name) for name in CHAIN_OF_DAGS}
    landed = {n: {"ann": n, "bob": 3 * n} for n in range(1, last + 1)}

    def land() -> None:
        for n, numbers in landed.items():
            (data / "landed" / f"{n}.json").write_text(json.dumps(numbers))

    def by_python() -> dict[str, list[dict[str, int]]]:
        """The output of each day, by user."""
        events = [*landed.values()]
        sessions = [{user: -(-n // 10) for user, n in one.items()} for one in events]
        report, total = [], {"ann": 0, "bob": 0}
        for today, yesterday in zip(sessions, [total, *events], strict=False):
            total = {user: total[user] + today[user] + yesterday[user] for user in total}
            report.append(total)
        return {"events": events, "sessions": sessions, "report": report}

    def outputs() -> dict[str, list[dict[str, int]]]:
        days = {name: [rows for _, (_, rows) in sorted(one.mine().items())] for name, one in chain.items()}
        return {name: [{row["user"]: row["n"] for row in rows} for rows in found] for name, found in days.items()}

    def judged() -> dict[str, dict[int, str]]:
        found = {name: Chains().judged(root, name) for name in chain}
        return {name: {i.start.day: verdict.kind for i, verdict in one.items()} for name, one in found.items()}

    def wait_until_deferred(name: str, run: str) -> str:
        wait_until(lambda: states(airflow, run, name).get("process") == "deferred", 240, f"{name} waits", poll_s=1)
        return "\n".join(client.log(name, run, "process", 1))

    def clear(n: int) -> None:
        """Clear a run of the events as the button of the UI does."""
        run = chain["events"].run_of(n)
        client.call("POST", f"{run_path('events', run)}/clear", {"dry_run": False, "only_failed": False})
        assert chain["events"].wait([n]) == {"success"}

    # Downstream comes first: its runs wait without a slot.
    for name in ("report", "sessions"):
        client.pause(name, False)
        wait_until(lambda name=name: 1 in chain[name].runs(), 60, f"a run of {name}")  # type: ignore[misc]
        said = wait_until_deferred(name, chain[name].run_of(1))
    pool = client.call("GET", "/api/v2/pools/default_pool")
    assert (pool["running_slots"], pool["queued_slots"], pool["deferred_slots"]) == (0, 0, 2)
    waits = "waiting, without a worker slot, for another pipeline: InputNotReady: pipeline 'sessions', "
    assert f"{waits}{tally_day(1)}: it reads events" in said
    assert f"cairn status --root {root} --pipeline events" in said
    land()
    client.pause("events", False)
    for one in chain.values():
        wait_until(lambda one=one: len(one.runs()) == last, 1200, f"{last} runs of {one.name}", poll_s=2)  # type: ignore[misc]
        assert one.wait(range(1, last + 1)) == {"success"}
        assert {one.tries(n) for n in (1, 2, last)} == {1}, "a wait is no retry"
    assert outputs() == by_python()
    clear(3)  # The same rows again change nothing.
    assert judged() == {name: {} for name in chain}

    # Day 5 is corrected, and somebody clears its run. Nothing else runs by itself.
    landed[fifth]["bob"] += 40
    land()
    clear(fifth)
    later = dict.fromkeys(range(fifth + 1, last + 1), "pending")
    report = {fifth: "pending", **later, fifth + 1: "stale"}
    assert judged() == {"events": {}, "sessions": {fifth: "stale", **later}, "report": report}
    plan = json.loads(run_as_printed(airflow, f"cairn plan --root {root} --json"))["pipelines"]
    planned = {row["pipeline"]: {int(one["start"][8:10]) for one in row["intervals"]} for row in plan}
    assert planned == {name: {*range(fifth, last + 1)} for name in ("sessions", "report")}
    healthy, said = dict.fromkeys(chain, "healthy"), f"1 stale, {last - fifth} pending"
    with browser() as chrome:
        log_in(chrome, client.url, client.token())

        def shown(picture: str = "") -> dict[str, str]:
            """What the page says of each pipeline."""
            time.sleep(FRESH_S)
            chrome.get(f"{client.url}/cairn/checkpoints/")
            nodes = wait_for(lambda: chrome.find_elements(By.CSS_SELECTOR, "[data-node]"))
            if picture and (folder := os.environ.get("CAIRN_SCREENSHOTS")):
                drawing = chrome.find_element(By.CSS_SELECTOR, "svg:has([data-node])")
                drawing.screenshot(str(Path(folder) / f"chains-{picture}-light.png"))
            return dict(str(node.get_attribute("aria-label")).split(": ") for node in nodes)

        assert shown("before") == healthy | {"sessions": said, "report": said}
        chrome.find_element(By.CSS_SELECTOR, "tr[data-pipeline=report] th a").click()
        copied = wait_for(lambda: chrome.find_element(By.CSS_SELECTOR, "#state [data-copy]"))
        command = str(copied.get_attribute("data-copy"))
        assert command.endswith(" --chain")
        # The command of the page, as it is printed.
        assert run_as_printed(airflow, command).splitlines()[-1].startswith("report is healthy up to ")
        assert judged() == {name: {} for name in chain} and outputs() == by_python()
        assert shown("after") == healthy
    # What ran twice: what somebody cleared, and what read it.
    facts = {name: [fact.interval.start.day for fact in one.log().facts(None)] for name, one in chain.items()}
    twice = {name: {n for n in days if days.count(n) == 2} for name, days in facts.items()}
    assert twice == {"events": {3, fifth}, "sessions": {fifth}, "report": {*range(fifth, last + 1)}}
    assert all(twice[name] <= planned[name] for name in planned), "no more ran than the plan has"
    assert all(len(facts[name]) == last + len(twice[name]) for name in chain)


@pytest.mark.long("40 seconds: three runs of a form")
def test_a_range_in_one_go_from_the_form(airflow: AirflowServer, data: Path, three_days: ThreeDays) -> None:
    """The days of the test above, on another root: a dry run, all of them, and the same once more. Each has the digest that it had as a
    run of its own."""
    client, days = airflow.client, {"from": day(1)[:10], "to": day(3)[:10]}
    command_lines: set[str] = set()

    def note_command_lines() -> None:
        command_lines.update(" ".join(command_line(pid)) for pid in airflow.pids())

    def ran(**conf: Any) -> tuple[str, Any, dict[str, str]]:
        run = client.trigger("aircraft_range", conf={**days, **conf})["dag_run_id"]
        ended = client.wait_for_runs("aircraft_range", [run], timeout_s=180, check=note_command_lines)
        assert ended == {run: "success"}
        said = "\n".join(client.log("aircraft_range", run, "backfill", 1))
        # Before Airflow 3.3, a list of tasks comes without what was rendered.
        task = client.call("GET", f"{run_path('aircraft_range', run)}/taskInstances/backfill")
        assert as_object(task["rendered_fields"]["spark_conf"]) == {AZURE: "***", "spark.sql.shuffle.partitions": 2}
        return said, client.xcom("aircraft_range", run, "backfill"), states(airflow, run, "aircraft_range")

    client.call("PATCH", "/api/v2/dags/aircraft_range", {"is_paused": False})
    said, result, ended = ran(dry_run=True)
    assert said.count("would be computed: ") == 3 and result["checkpoint"] is None
    assert ended == {"backfill": "success", "validate": "skipped"}
    url = f"file://{data}/range/aircraft"
    assert not read_log(open_storage(url)).head_id
    said, result, ended = ran()
    assert result["checkpoint"] == 3 and ended == {"backfill": "success", "validate": "success"}
    made = {r.content.interval: r.content.digest for r in read_log(open_storage(url)).completed()}
    assert made == {r.content.interval: r.content.digest for r in three_days.completed} and len(made) == 3
    events = client.call("GET", "/api/v2/assets/events?source_dag_id=aircraft_range")["asset_events"]
    assert sorted((e["extra"]["checkpoint"], e["extra"]["validated"]) for e in events) == [
        (1, False), (2, False), (3, False), (3, True)
    ]  # fmt: skip
    said, result, ended = ran()
    assert result["checkpoint"] == 3 and read_log(open_storage(url)).head_id == 3

    assert any("cairn.driver.driver run" in line for line in command_lines)
    assert not [line for line in command_lines if KEY in line]
    kept = [
        f for folder in ("range", "logs", "home/logs", "range-docs") for f in (data / folder).rglob("*") if f.is_file()
    ]
    assert len(kept) > 20 and not [file for file in kept if KEY.encode() in file.read_bytes()]


def test_who_reaches_the_port_of_airflow_needs_its_password(
    airflow: AirflowServer, tmp_path: Path, three_days: ThreeDays
) -> None:
    """A command of the same user finds the password; any other user gets no token and no answer."""
    found = {run["dag_run_id"] for run in AirflowClient(airflow.client.url).dag_runs(DAG)}
    assert {*three_days.runs} <= found
    with pytest.MonkeyPatch.context() as other:
        other.setenv("XDG_STATE_HOME", str(tmp_path))
        stranger = AirflowClient(airflow.client.url)
        for path in ("/auth/token", "/api/v2/connections"):
            with pytest.raises(RestError) as raised:
                stranger.call("GET", path)
            assert raised.value.status == 403
    for page in ("/api/v2/connections", "/cairn/checkpoints/", "/cairn/docs/"):
        with pytest.raises(HTTPError) as refused:
            urlopen(airflow.client.url + page, timeout=30)
        with refused.value:  # holds the connection
            assert refused.value.code == 401, page
    assert stat.S_IMODE(airflow.passwords.stat().st_mode) == 0o600


def test_clearing_only_the_checkpoint_commits_nothing(
    airflow: AirflowServer, data: Path, three_days: ThreeDays
) -> None:
    run, head = three_days.runs[2], log_of(data).head_id
    checkpoint = airflow.client.xcom(DAG, run, "checkpoint")["checkpoint"]
    airflow.client.clear(DAG, run, ["checkpoint"], downstream=False)
    assert airflow.client.wait_for_runs(DAG, [run], timeout_s=60) == {run: "success"}
    assert log_of(data).head_id == head
    assert airflow.client.xcom(DAG, run, "checkpoint")["checkpoint"] == checkpoint


def test_a_run_without_date_is_refused(airflow: AirflowServer) -> None:
    run = airflow.client.trigger(DAG)["dag_run_id"]
    assert airflow.client.wait_for_runs(DAG, [run], timeout_s=60) == {run: "failed"}
    assert "this run has no data interval" in "\n".join(airflow.client.log(DAG, run, "process", 1))


@pytest.mark.usefixtures("three_days")
@pytest.mark.long("40 seconds")
def test_stopping_with_a_savepoint_loses_no_interval(
    airflow: AirflowServer, data: Path, connect: SparkConnectServer
) -> None:
    """F47, F76: `cairn savepoint --stop` while an interval is under way: the DAG is paused, the interval ends and is committed, the
    savepoint has it. Unpaused, the run's own `checkpoint` finds that done, and the run succeeds."""
    head = log_of(data).head_id
    interval = {"data_interval_start": day(5), "data_interval_end": day(6)}
    # The fourth day may be missing: another test makes it.
    run = airflow.client.trigger(DAG, day(5), conf={"allow_gap": True}, **interval)["dag_run_id"]
    wait_until(lambda: drivers(airflow), 60, "a driver runs")
    (driver, *_) = drivers(airflow)
    os.kill(driver, signal.SIGSTOP)  # so that it ends after the pause, however fast the machine is
    folder = data / "stopped"
    where = ["--root", f"file://{data}/state", "--code", "pipelines.aircraft:AIRCRAFT", "--spark", connect.url]
    command = [
        sys.executable,
        "-m",
        "cairn.command.cli",
        "savepoint",
        *where,
        "--folder",
        str(folder),
        "--stop",
        "--airflow",
        airflow.client.url,
        "--json",
    ]
    with subprocess.Popen(command, cwd=ROOT, env=airflow.env, stdout=subprocess.PIPE, text=True) as stopping:
        try:
            wait_until(lambda: airflow.client.call("GET", f"/api/v2/dags/{DAG}")["is_paused"], 60, "the DAG is paused")
        finally:
            os.kill(driver, signal.SIGCONT)
        said, _ = stopping.communicate(timeout=180)
    assert stopping.returncode == 0
    answer = json.loads(said)
    assert (answer["committed"], answer["checkpoint"], answer["paused"]) == ([head + 1], head + 1, DAG)
    assert read_savepoint(LocalStorage(folder)).content.interval.start.isoformat() == day(5)
    assert states(airflow, run)["process"] == "success" and states(airflow, run)["checkpoint"] != "success"
    assert airflow.client.call("GET", f"/api/v2/dags/{DAG}")["is_paused"]

    airflow.client.pause(DAG, False)
    assert airflow.client.wait_for_runs(DAG, [run], timeout_s=120) == {run: "success"}
    assert airflow.client.xcom(DAG, run, "checkpoint")["checkpoint"] == log_of(data).head_id == head + 1


@pytest.mark.usefixtures("three_days")
@pytest.mark.long("half a minute")
def test_going_back_waits_for_a_person(airflow: AirflowServer, data: Path) -> None:
    """Back to day 2: it asks, validates on Spark, commits; the next interval starts from there."""
    client, dag_id = airflow.client, "aircraft_restore"
    log = log_of(data)
    head = log.head_id
    target = next(r.id for r in reversed(log.completed()) if r.content.interval.start.isoformat() == day(2))
    run = client.trigger(dag_id, conf={"target": str(target)})["dag_run_id"]
    wait_until(lambda: states(airflow, run, dag_id) == {"restore": ASKING}, 60, "a person is asked")
    assert log_of(data).head_id == head
    details = f"/api/v2/dags/{dag_id}/dagRuns/{run}/taskInstances/restore/-1/hitlDetails"
    asked = client.call("GET", details)
    assert "newer checkpoint(s)?" in asked["subject"] and f"back to checkpoint {target}" in asked["body"]
    assert f" --dag {DAG}" in asked["body"] and "cairn heal --root " in asked["body"]

    # Airflow fails a task whose answer comes before its scheduler has noticed that it waits; no person is that fast.
    time.sleep(3)
    client.call("PATCH", details, {"chosen_options": ["Approve"], "params_input": {}})
    assert client.wait_for_runs(dag_id, [run], timeout_s=120) == {run: "success"}
    restored = log_of(data).completed()[-1]
    assert (restored.id, restored.content.kind, restored.content.base_id) == (head + 1, "restore", target)
    assert restored.content.run.run_id == run
    assert any("no findings" in line for line in client.log(dag_id, run, "restore", 1))

    third = run_of(airflow, 3)
    client.clear(DAG, third, ["process"])
    assert client.wait_for_runs(DAG, [third], timeout_s=120) == {third: "success"}
    assert log_of(data).completed()[-1].content.base_id == restored.id


@needs("task state store")
def test_a_retry_takes_what_a_killed_task_had_prepared(airflow: AirflowServer, data: Path) -> None:
    """kill -9 of the task after its driver was done: the next try computes nothing. After a clear it is computed again."""
    client, storage = airflow.client, open_storage(join_url(f"file://{data}/tally/state/killed", DAG))
    client.pause("killed", False)
    wait_until(lambda: client.dag_runs("killed"), 60, "its one scheduled run")
    [run] = [r["dag_run_id"] for r in client.dag_runs("killed")]
    assert client.wait_for_runs("killed", [run], timeout_s=120) == {run: "success"}
    assert len(client.tries("killed", run, "process")) == 2
    text = "\n".join(client.log("killed", run, "process", 2))
    assert "try 1 has prepared attempt" in text and "nothing is computed again" in text
    [first] = read_log(storage).completed()
    assert first.content.run.try_number == 1
    # Nothing was written beside it: the second try had no attempt of its own.
    assert {info.path.split("/")[1] for info in storage.list("attempts/")} == {first.content.attempt}
    assert client.xcom("killed", run, "checkpoint")["checkpoint"] == 1

    client.clear("killed", run, ["process"])
    assert client.wait_for_runs("killed", [run], timeout_s=120) == {run: "success"}
    again = read_log(storage).completed()[-1]
    assert (again.id, again.reproduces) == (2, 1) and again.content.attempt != first.content.attempt
    text = "\n".join(client.log("killed", run, "process", 3))
    assert "is not used: the run was cleared since, so the interval is computed again" in text


@pytest.mark.long("ten seconds: a deleted DAG")
def test_deleting_the_dag_deletes_no_state(airflow: AirflowServer, data: Path) -> None:
    """All that Airflow knows of the DAG is gone, its runs and XComs too; every file of the pipeline is there as it was."""
    days = Tally(airflow.client, data / "tally", "tally_deleted")

    def files() -> dict[str, tuple[int, int]]:
        paths = sorted(path for path in (days.base / "state" / days.name).rglob("*") if path.is_file())
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}

    days.input(1, {"a": 1})
    run = days.trigger(f"{day_of(2)[:10]}T00:00:01+00:00")
    assert days.client.wait_for_runs(days.name, [run], timeout_s=120) == {run: "success"}
    before = files()
    days.client.pause(days.name, True)
    days.client.call("DELETE", f"/api/v2/dags/{days.name}")
    # The DAG processor finds the file again, and makes a DAG without a past of it.
    airflow.wait_for_dag(days.name)
    assert days.client.dag_runs(days.name) == []
    assert before and files() == before
    assert days.log().head_id == 1 and days.mine() == days.undisturbed(1)


@pytest.mark.long("half a minute: each command of Airflow imports for seconds")
def test_commands_for_airflow_do_what_the_docs_say(airflow: AirflowServer) -> None:
    """By Airflow's own command line, in one process, since each one of them imports for seconds."""
    printed = [
        "airflow dags list",
        "airflow dags list-import-errors",
        "airflow providers list",
        "airflow connections add cairn_spark --conn-type spark --conn-host 'local[2]'",
        "airflow connections delete cairn_spark",
        "airflow connections add cairn_spark --conn-type spark_connect --conn-host sc://127.0.0.1 --conn-port 15002",
    ]
    ours = [shlex.split(line) for line in printed]
    program = (
        "import json, sys\nfrom airflow.__main__ import main\n"
        "for words in json.loads(sys.argv[1]):\n    sys.argv = words\n    print('$', *words, flush=True)\n    main()\n"
    )
    said = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, json.dumps(ours)],
        env={**airflow.env, "COLUMNS": "250"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    dags, failed, providers, *_ = said.stdout.split("$ airflow ")[1:]
    assert DAG in dags and "tally_halves" in dags
    assert "No data found" in failed
    assert re.search(r"^cairn\b", providers, re.MULTILINE)
    stored = airflow.client.call("GET", "/api/v2/connections/cairn_spark")
    assert [stored[name] for name in ("conn_type", "host", "port")] == ["spark_connect", "sc://127.0.0.1", 15002]
    airflow.client.call("DELETE", "/api/v2/connections/cairn_spark")


# --- the order of things ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tally(airflow: AirflowServer, data: Path) -> Callable[[str], Tally]:
    return lambda name: Tally(airflow.client, data / "tally", name)


# Ten days take two to three times as long and show the same: for `CAIRN_TESTS=all`.
DAYS = 10 if ALL else 5


@pytest.fixture(scope="module")
def five_days(airflow: AirflowServer, data: Path) -> tuple[Tally, list[Record]]:
    """A backfill with max-active-runs 4, paused half-way, and continued; the second day's input comes late."""
    days = Tally(airflow.client, data / "tally", "tally")
    for n in range(1, DAYS + 3):
        days.input(n, {"every": n, f"even{n % 2}": 1, f"only{n}": 2})
    days.fails_once(2)
    backfill = days.backfill(1, DAYS)
    wait_until(lambda: days.log().head_id >= 1, 90, "the first day is committed")
    days.client.call("PUT", f"/api/v2/backfills/{backfill}/pause")
    time.sleep(2)
    assert "queued" in {run["state"] for run in days.runs().values()}, "the backfill was not interrupted"
    days.client.call("PUT", f"/api/v2/backfills/{backfill}/unpause")
    assert days.wait(range(1, DAYS + 1)) == {"success"}
    return days, list(days.log().completed())


def last_day(days: Tally) -> int:
    """Return the number of the last day that has a checkpoint."""
    return max(record.content.interval.start for record in days.log().completed()).day


def stale_checkpoints(days: Tally) -> set[int]:
    return {retained.id for retained in days.log().retained.values() if retained.stale_by}


def test_days_in_order_with_a_failing_try_interrupted_and_continued(five_days: tuple[Tally, list[Record]]) -> None:
    """Runs that are too early defer."""
    days, records = five_days
    assert [record.content.interval.start for record in records] == [tally_day(n).start for n in range(1, DAYS + 1)]
    assert [record.content.base_id for record in records] == [None, *range(1, DAYS)]
    assert "SourceError: 2024-01-02 has not landed" in days.process_log(2) and days.tries(2) >= 2
    assert any("waiting, without a worker slot" in days.process_log(n) for n in range(2, DAYS + 1))
    assert days.mine(DAYS) == days.undisturbed(DAYS)
    days.assert_one_at_a_time()


def test_days_on_azure_with_the_login_of_a_connection(tally: Callable[[str], Tally], azurite: str | None) -> None:
    """Each day leaves the same state as on a disk. Only the test's own process has the login in its environment."""
    if azurite is None:
        pytest.skip("Azurite can't be installed here; tests/support/azure_server.py says why")
    days = tally("tally_azure")
    for n in range(1, DAYS + 1):
        days.input(n, {"every": n, f"even{n % 2}": 1, f"only{n}": 2})
    days.backfill(1, DAYS)
    assert days.wait(range(1, DAYS + 1)) == {"success"}
    found = [record.content.digest for record in read_log(open_storage(f"{ON_AZURE}/tally_azure")).completed()]
    assert found == [digest for _, (digest, _) in sorted(days.undisturbed(DAYS).items())]
    assert "AccountKey" not in days.process_log(DAYS)


def test_a_cleared_day_with_the_same_result_lets_tomorrow_pass(five_days: tuple[Tally, list[Record]]) -> None:
    days, _ = five_days
    last, stale = last_day(days), stale_checkpoints(days)
    base = max((r.content.interval.end, r.id) for r in days.log().completed())[1]
    days.clear(2)
    assert days.wait([2]) == {"success"}
    assert stale_checkpoints(days) <= stale
    # Triggered by hand at a second past midnight: the interval is the day that ended then.
    run = days.trigger(f"{day_of(last + 2)[:10]}T00:00:01+00:00")
    assert days.client.wait_for_runs("tally", [run], timeout_s=60) == {run: "success"}
    newest = days.log().completed()[-1]
    assert (newest.content.interval, newest.content.base_id) == (tally_day(last + 1), base)
    assert days.mine() == days.undisturbed(last + 1)


def test_a_cleared_day_with_another_result_makes_tomorrow_wait_with_the_command(
    airflow: AirflowServer, five_days: tuple[Tally, list[Record]]
) -> None:
    days, _ = five_days
    last = last_day(days)
    days.input(1, {"every": 100, "new": 1})
    days.clear(1)
    assert days.wait([1]) == {"success"}
    head = days.log().head_id
    run = days.trigger(f"{day_of(last + 2)[:10]}T00:00:01+00:00")
    wait_until(lambda: states_of(days, run)["process"] == "deferred", 60, "the run waits")
    text = "\n".join(days.client.log("tally", run, "process", 1))
    assert f"its base, checkpoint {head - 1}, is stale" in text
    (heal,) = dict.fromkeys(printed_commands(text))
    assert heal.startswith("cairn heal --root ") and heal.endswith(
        f"--to {day_of(last)[:10]}T00:00:00Z --dag tally --airflow {airflow.client.url}"
    )
    assert days.log().head_id == head

    # The command, as it is printed. The run that waits goes on by itself.
    before = {n: days.runs()[n]["dag_run_id"] for n in range(2, DAYS + 1)}
    said = run_as_printed(airflow, heal)
    assert said.splitlines()[-1].startswith("tally is healthy up to ")
    assert {n: days.runs()[n]["dag_run_id"] for n in before} == before
    assert days.client.wait_for_runs("tally", [run], timeout_s=60) == {run: "success"}
    made = [record for record in days.log().completed() if record.id > head]
    assert [record.content.interval for record in made] == [tally_day(n) for n in range(2, last + 2)]
    assert days.log().completed()[-1].content.interval == tally_day(last + 1)
    assert days.mine() == days.undisturbed(last + 1)


def test_a_run_over_a_gap_is_refused_with_the_command_that_closes_it(
    airflow: AirflowServer, five_days: tuple[Tally, list[Record]]
) -> None:
    days, _ = five_days
    last = last_day(days)
    for n in (last + 1, last + 2):
        days.input(n, {"every": n})
    run = days.trigger(f"{day_of(last + 3)[:10]}T00:00:01+00:00")
    assert days.client.wait_for_runs("tally", [run], timeout_s=90) == {run: "failed"}
    text = "\n".join(days.client.log("tally", run, "process", 1))
    (heal,) = dict.fromkeys(printed_commands(text))
    assert "StateGapError" in text and f"--to {day_of(last + 2)[:10]}T00:00:00Z --dag tally --airflow " in heal
    assert run_as_printed(airflow, heal).splitlines()[-1].startswith("tally is healthy up to ")
    assert last_day(days) == last + 2
    assert days.mine() == days.undisturbed(last + 2)


@pytest.mark.long("two minutes: three troubles")
def test_the_command_of_the_page_repairs_each_trouble(
    airflow: AirflowServer, data: Path, tally: Callable[[str], Tally]
) -> None:
    """A refused checkpoint, a task that fails until somebody lands its input, and a day that never ran."""
    days = tally("tally_shown")
    site = ShownAirflow(url=airflow.client.url, tokens={"ada": airflow.client.token()}, data=data, log=data)

    def commands() -> list[str]:
        status, text = site.get(f"/cairn/checkpoints/dag/{days.name}", "ada")
        assert status == 200, text
        return [html.unescape(one) for one in re.findall(r'<pre tabindex="0">(cairn [^<]*)</pre>', text)]

    def repair(last: int) -> None:
        (heal,) = wait_for(commands, 60)
        to = f"--to {day_of(last)[:10]}T00:00:00Z"
        assert heal.startswith("cairn heal --root ") and f"{to} --dag {days.name} --airflow " in heal
        assert run_as_printed(airflow, heal).splitlines()[-1].startswith(f"{days.name} is healthy up to ")
        assert days.mine() == days.undisturbed(last) and last_day(days) == last
        wait_until(lambda: commands() == [], 60, "the page has no command any more")

    for n in (1, 2, 4, 5):
        days.input(n, {"every": n})
    days.backfill(1, 2)
    assert days.wait([1, 2]) == {"success"}
    where = open_storage(f"file://{days.base}/state/{days.name}")
    Coordinator(where, days.name).quarantine(days.log().head_id, "a sum is wrong")
    repair(2)

    days.backfill(3, 3)
    (later,) = wait_for(commands, 60)
    assert days.wait([3]) == {"failed"}
    days.input(3, {"every": 3})
    assert [later] == commands()
    repair(3)

    days.backfill(5, 5)
    assert days.wait([5]) == {"failed"}
    repair(5)


@pytest.mark.long("fifteen seconds")
def test_the_command_that_replaces_output_of_another_cut_does_so(
    airflow: AirflowServer, tally: Callable[[str], Tally]
) -> None:
    """Days are to become halves of days. The first half is refused; the message's command runs both halves, and the day is gone."""
    days = tally("tally_whole")
    days.input(1, {"a": 1})
    whole = days.trigger(f"{day_of(2)[:10]}T00:00:01+00:00")
    assert days.client.wait_for_runs(days.name, [whole], timeout_s=60) == {whole: "success"}
    halves = "tally_halves"
    interval = {"data_interval_start": day_of(1), "data_interval_end": f"{day_of(1)[:10]}T12:00:00+00:00"}
    run = days.client.trigger(halves, day_of(1), **interval)["dag_run_id"]
    assert days.client.wait_for_runs(halves, [run], timeout_s=60) == {run: "failed"}
    text = "\n".join(days.client.log(halves, run, "process", 1))
    replace, again = dict.fromkeys(printed_commands(text))
    assert f"--dag {halves} " in replace and "--replace-overlapping" in replace
    assert again.startswith(f"airflow tasks clear {halves} -t process -d ")
    if not has("conf for runs that exist"):
        days.client.call("DELETE", run_path(halves, run))
    run_as_printed(airflow, replace)

    def half_days() -> list[str]:
        return [r["dag_run_id"] for r in days.client.dag_runs(halves) if r["run_type"] == "backfill"]

    wait_until(lambda: len(half_days()) == 2, 60, "both halves")
    assert set(days.client.wait_for_runs(halves, half_days(), timeout_s=60).values()) == {"success"}
    current = sorted(i for i in days.log().current_outputs() if i.start < tally_day(2).start)
    noon = tally_day(1).start + timedelta(hours=12)
    assert [(i.start, i.end) for i in current] == [(tally_day(1).start, noon), (noon, tally_day(1).end)]


def test_somebody_is_called_when_a_run_is_late_and_when_validation_fails(
    tally: Callable[[str], Tally], pages: tuple[str, list[str]]
) -> None:
    """By the code of docs/alarms.md. The run's validation can't find its pipeline, which is as good a failure as another."""
    days, texts = tally("tally_alarms"), pages[1]
    days.input(1, {"a": 1})
    days.slow(1, 8.0)
    run = days.trigger(f"{day_of(2)[:10]}T00:00:01+00:00")
    assert days.client.wait_for_runs("tally_alarms", [run], timeout_s=90) == {run: "failed"}
    assert states_of(days, run)["checkpoint"] == "success" and states_of(days, run)["validate"] == "failed"
    late = "clicks: a run was not done half an hour after it was queued"
    wait_until(lambda: late in texts, 60, "somebody is called")
    (failed,) = (text for text in texts if text.startswith(f"tally_alarms.validate, {run}: "))
    assert "can't load the pipeline 'unused:TALLY'" in failed


def states_of(days: Tally, run: str) -> dict[str, str]:
    return {task["task_id"]: task["state"] for task in days.client.task_instances(days.name, run)}


@pytest.mark.long("minutes: 432 runs")
def test_backfills_in_numbers_are_whole_while_the_scheduler_runs(airflow: AirflowServer) -> None:
    """Hourly ones, several at a time, each DAG's next one while the one before still counts: none is refused, none lacks a run."""
    dags, rounds = (6, 3) if ALL else (3, 2)
    hours = [f"2024-01-01T{hour:02}:00:00+00:00" for hour in range(24)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**airflow.env, "PATH": path, "CAIRN_AIRFLOW": airflow.client.url}

    def create(number: int) -> list[int]:
        command = (
            f"cairn backfill --dag created_{number} --from 2024-01-01 --to 2024-01-01T23:00 --max-active-runs 16 --json"
        )
        made = []
        for _ in range(rounds):
            done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            made.append(json.loads(done.stdout)["runs"])
            runs = [run for run in airflow.client.dag_runs(f"created_{number}") if run["run_type"] == "backfill"]
            ids = [run["dag_run_id"] for run in runs]
            assert [run["logical_date"].replace("Z", "+00:00") for run in runs] == hours
            assert set(airflow.client.wait_for_runs(f"created_{number}", ids, timeout_s=300).values()) == {"success"}
        return made

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(create, range(dags))) == [[24] * rounds] * dags
    assert len(airflow.client.healthy_parts()) == 4
    airflow.processes.check_alive()
