"""The aircraft pipeline under a real Airflow scheduler and a real Spark Connect server. Fixtures make the days that several tests need."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from selenium.webdriver.common.by import By

from cairn_ui.read_logs import FRESH_S
from local_stack.airflow_server import run_path
from local_stack.demo import DAG, FIRST_DAY, DriverKiller
from local_stack.owned_process import command_line
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.chains.judge_inputs import Chains
from state_backend.checkpoint.log import read_log
from state_backend.checkpoint.savepoints import read_savepoint
from state_backend.values.records import Record
from tests.oracles.aircraft import expected, row_order
from tests.support.airflow_names import ASKING, as_object, needs
from tests.support.browser import browser, log_in, wait_for
from tests.support.checkpoints import day as tally_day
from tests.support.layout import REPOSITORY as ROOT
from tests.support.local_stack import AirflowClient, AirflowServer, RestError, SparkConnectServer
from tests.support.reading import read_output, read_state
from tests.support.shared_airflow import AZURE, CHAIN_OF_DAGS, KEY, day, drivers, log_of, run_as_printed, run_of, states
from tests.support.tally import Tally, day_of
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.airflow, pytest.mark.spark]


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
    # A day of this data takes a warm driver about half a second. A later kill would miss the driver on a fast machine.
    killer = DriverKiller(airflow.processes, FIRST_DAY + timedelta(days=1), after_s=0.1)
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
def test_range_run_gives_digests_of_separate_runs(airflow: AirflowServer, data: Path, three_days: ThreeDays) -> None:
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
    pause = [*command[:3], "pause", "--pipeline", DAG, "--airflow", airflow.client.url, "--json"]
    told = subprocess.run(pause, cwd=ROOT, env=airflow.env, capture_output=True, check=True, timeout=60).stdout
    assert json.loads(told) == {"paused": DAG, "waiting_runs": [run]}

    airflow.client.pause(DAG, False)
    assert airflow.client.wait_for_runs(DAG, [run], timeout_s=120) == {run: "success"}
    assert airflow.client.xcom(DAG, run, "checkpoint")["checkpoint"] == log_of(data).head_id == head + 1


@pytest.mark.usefixtures("three_days")
@pytest.mark.long("half a minute")
def test_restore_commits_only_after_approval_in_airflow(airflow: AirflowServer, data: Path) -> None:
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
