"""`trial_pipeline` under a real scheduler, triggerer and Spark Connect server: the form, the question in Required Actions, and what an answer
does. The tests build on each other. Only with CAIRN_TESTS=all: four minutes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.by import By

from cairn_operators.trial_tasks import PROMOTE
from local_stack.demo import pipeline_env
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint.log import Log, read_log
from state_backend.checkpoint.trials import list_trials, root_of_trial
from tests.support.airflow_names import ASKING, needs
from tests.support.airflow_on_postgres import airflow_on_postgres
from tests.support.browser import browser, log_in, programs, wait_for
from tests.support.local_stack import AirflowServer, RestError, SparkConnectServer, running_drivers
from tests.support.trials import bytes_of
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.airflow, pytest.mark.browser, pytest.mark.spark, pytest.mark.long("minutes")]
NEXT, PAST, NO = PROMOTE
NAME, FORM = "aircraft", "aircraft_try"
OLD, WRONG, LATER = "pipelines.aircraft:AIRCRAFT", *(f"tests.support.changed_aircraft:{n}" for n in ("WRONG", "LATER"))
FIRST = datetime(2013, 1, 1, tzinfo=UTC)
DAYS = 4
KEY = "kind, tailnum, row_number"

DAGS = """
# Airflow DAGs: production's, which is paused, and the form. ``CODE`` is the pipeline that production runs.
import os
from datetime import datetime, timedelta, timezone
from cairn_operators.airflow_versions import CronDataIntervalTimetable
from cairn_operators import stateful_pipeline, trial_pipeline

root = os.environ["CAIRN_ROOT"]
daily = CronDataIntervalTimetable("@daily", timezone="UTC")
production = stateful_pipeline("aircraft", CODE, root, schedule=daily, start_date=datetime(2013, 1, 1, tzinfo=timezone.utc),
                               end_date=datetime(2013, 12, 31, tzinfo=timezone.utc), is_paused_upon_creation=True)
form = trial_pipeline("aircraft_try", CODE, root, pipeline="aircraft")
"""


def day(number: int) -> str:
    """The start of a day, from 1."""
    return (FIRST + timedelta(days=number - 1)).isoformat()


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("form")


@pytest.fixture(scope="module")
def airflow(form: Path, data: Path, connect: SparkConnectServer) -> Iterator[AirflowServer]:
    """With four days in production, and its DAG paused."""
    (form / "dags").mkdir()
    write_dags(form, OLD)
    run = ["run", "--code", OLD, "--from", day(1)[:10], "--to", day(DAYS)[:10], "--every", "1d", "--root", root(form)]
    command = [sys.executable, "-m", "cairn.command.cli", *run, "--spark", connect.url]
    env = pipeline_env(form, data / "flights", connect)
    with airflow_on_postgres(form, env, dags=(NAME, FORM)) as server:
        subprocess.run(command, env=server.env, check=True, capture_output=True)
        yield server


def write_dags(form: Path, code: str) -> None:
    (form / "dags" / "aircraft.py").write_text(DAGS.replace("CODE", repr(code)))


def root(form: Path) -> str:
    return f"file://{form}/state"


def log_of(above: str) -> Log:
    return read_log(open_storage(join_url(above, NAME)))


def made(above: str) -> dict[datetime, tuple[int, list[int]]]:
    """Digest and output of each interval, as they are current."""
    records = sorted(log_of(above).completed(), key=lambda r: r.id)
    return {
        r.content.interval.start: (r.content.digest, sorted(o.handle.crc32c for o in r.content.outputs))
        for r in records
        if r.content.kind == "interval"
    }


def production(form: Path) -> dict[str, str]:
    return bytes_of(form / "state" / NAME)


def begin(airflow: AirflowServer, code: str, promote: str, first: int = 2, **more: str) -> str:
    """Fills in the form; its run."""
    conf = {"code": code, "from": day(first)[:10], "to": day(DAYS)[:10], "match": KEY, "promote": promote, **more}
    run: str = airflow.client.trigger(FORM, conf=conf)["dag_run_id"]
    return run


def states(airflow: AirflowServer, run: str) -> dict[str, str]:
    return {task["task_id"]: task["state"] for task in airflow.client.task_instances(FORM, run)}


def said(airflow: AirflowServer, run: str, task: str, number: int = 1) -> str:
    return "\n".join(airflow.client.log(FORM, run, task, number))


def ends(airflow: AirflowServer, run: str) -> dict[str, str]:
    airflow.client.wait_for_runs(FORM, [run], timeout_s=240)
    return states(airflow, run)


def question(airflow: AirflowServer, run: str) -> dict[str, Any]:
    """What a person is asked, once one is."""
    wait_until(lambda: states(airflow, run).get("promote") == ASKING, 180, "a person is asked", poll_s=0.5)
    pending = airflow.client.call("GET", f"/api/v2/dags/{FORM}/dagRuns/~/hitlDetails?response_received=false")
    (asked,) = pending["hitl_details"]
    assert asked["task_instance"]["dag_run_id"] == run
    # Airflow fails a task whose answer comes before its scheduler has noticed that it waits; no person is that fast.
    time.sleep(3)
    found: dict[str, Any] = asked
    return found


def answer(airflow: AirflowServer, run: str, option: str) -> None:
    details = f"/api/v2/dags/{FORM}/dagRuns/{run}/taskInstances/promote/-1/hitlDetails"
    airflow.client.call("PATCH", details, {"chosen_options": [option], "params_input": {}})


def drivers(airflow: AirflowServer, command: str) -> list[int]:
    return [driver.pid for driver in running_drivers(airflow.processes) if driver.command.startswith(f"{command} ")]


def test_a_form_that_cannot_be_run_is_refused_at_once(airflow: AirflowServer, form: Path) -> None:
    before = production(form)
    for conf in ({}, {"from": day(2)[:10], "to": day(3)[:10], "promote": "perhaps"}):
        with pytest.raises(RestError):
            airflow.client.trigger(FORM, conf=conf)
    for code, first, says in (
        (f"{OLD}S", 2, "AIRCRAFTS"),
        ("pipelines.weather:WEATHER", 2, "pipelines.weather:WEATHER is named"),
        (OLD, 3, "can't begin at"),
    ):
        more = {"from": "2014-02-01", "to": "2014-02-02"} if first == 3 else {}
        run = begin(airflow, code, PAST, **more)
        assert ends(airflow, run) == {"try": "failed", "promote": "upstream_failed"}
        assert len(airflow.client.tries(FORM, run, "try")) == 1 and says in said(airflow, run, "try")
    assert production(form) == before and not list_trials(root(form), NAME)


def test_a_trial_without_promotion_leaves_production_unchanged(airflow: AirflowServer, form: Path) -> None:
    before = production(form)
    run = begin(airflow, OLD, NO)
    assert ends(airflow, run) == {"try": "success", "promote": "skipped"}
    found = airflow.client.xcom(FORM, run, "try")
    assert found["same"] and found["computed"] == DAYS - 1
    assert "no difference: every digest is equal" in said(airflow, run, "try")
    assert production(form) == before


def test_a_rejection_leaves_production_as_it_was(airflow: AirflowServer, form: Path) -> None:
    before = production(form)
    run = begin(airflow, WRONG, PAST)
    asked = question(airflow, run)
    assert "run its intervals again in production" in asked["subject"] and asked["options"] == ["Approve", "Reject"]
    for line in (f"output in {DAYS - 1} intervals", "prior_mean_delay_minutes", "by 1 on average and 1 at most"):
        assert line in asked["body"], asked["body"]
    assert production(form) == before
    answer(airflow, run, "Reject")
    assert ends(airflow, run) == {"try": "success", "promote": "failed"}
    assert len(airflow.client.tries(FORM, run, "promote")) == 1
    assert "has rejected the promotion; nothing is promoted" in said(airflow, run, "promote")
    assert production(form) == before


@needs("task state store")
def test_a_trial_approved_for_past_intervals_gives_production_the_trials_results(
    airflow: AirflowServer, form: Path
) -> None:
    """The deployment's driver is killed on the way: the next try goes on, and asks nobody again. Without a browser the API approves."""
    old, before = made(root(form)), log_of(root(form)).head_id
    run = begin(airflow, LATER, PAST)
    body = question(airflow, run)["body"]
    assert "state seen at" in body and "at_ms: " in body
    if programs() is None:
        answer(airflow, run, "Approve")  # what comes next builds on it
    else:
        approve_in_browser(airflow, run, len(body.splitlines()))
    wait_until(lambda: drivers(airflow, "promote"), 60, "the driver runs")
    (driver,) = drivers(airflow, "promote")

    def commits() -> bool:  # The driver stands still while the test looks, so that the driver can't end meanwhile.
        os.kill(driver, signal.SIGCONT)
        time.sleep(0.05)
        os.kill(driver, signal.SIGSTOP)
        return log_of(root(form)).head_id > before

    wait_until(commits, 120, "an interval is committed")
    os.kill(driver, signal.SIGKILL)
    assert ends(airflow, run) == {"try": "success", "promote": "success"}
    tries = airflow.client.tries(FORM, run, "promote")
    assert len(tries) == 2, "asked once, killed once"

    trial = airflow.client.xcom(FORM, run, "try")["trial"]
    new, tried = made(root(form)), made(root_of_trial(root(form), NAME, trial))
    assert new == old | tried and all(new[start][0] != old[start][0] for start in tried)
    done = airflow.client.xcom(FORM, run, "promote")
    assert (done["again"], done["behind"]) == (DAYS - 1, 0)
    assert done["back"] == f"cairn restore 1 --root {root(form)} --pipeline {NAME} --yes"
    events = airflow.client.call("GET", f"/api/v2/assets/events?source_dag_id={FORM}")["asset_events"]
    assert sorted(e["extra"]["checkpoint"] for e in events)[-1] == log_of(root(form)).head_id
    assert f"Let the DAG of {NAME} run {LATER} from the next interval on" in said(airflow, run, "promote", len(tries))


def approve_in_browser(airflow: AirflowServer, run: str, lines: int) -> None:
    """On the page of the run, whose text has so many lines."""
    with browser() as chrome:
        log_in(chrome, airflow.client.url, airflow.client.token())
        chrome.get(f"{airflow.client.url}/dags/{FORM}/runs/{run}/tasks/promote/required_actions")
        # Lines behind one another would be one wall of words.
        items = wait_for(lambda: [i.text for i in chrome.find_elements(By.CSS_SELECTOR, "li > code")], 60)
        assert any(i.startswith("at_ms: ") for i in items) and len(items) == lines, items
        wait_for(lambda: [b for b in chrome.find_elements(By.TAG_NAME, "button") if b.text == "Approve"])[0].click()
        wait_until(lambda: states(airflow, run)["promote"] != ASKING, 60, "the answer is taken")


@needs("task state store")
def test_production_continues_with_the_code_of_an_approved_trial(airflow: AirflowServer, form: Path) -> None:
    """It was paused all the time. Its DAG names the new code now; a trial for what comes next has nothing to run again."""
    assert airflow.client.dag_runs(NAME) == []
    written = datetime.now(UTC)
    write_dags(form, LATER)
    run = begin(airflow, LATER, NEXT)
    assert "from the next interval on" in question(airflow, run)["subject"]
    head = log_of(root(form)).head_id
    answer(airflow, run, "Approve")
    assert ends(airflow, run) == {"try": "success", "promote": "success"}
    assert airflow.client.xcom(FORM, run, "promote")["again"] == 0 and log_of(root(form)).head_id == head

    airflow.client.pause(NAME, False)
    wait_until(lambda: parsed(airflow) > written, 90, "the DAG names the new code", poll_s=1)
    interval = {"data_interval_start": day(DAYS + 1), "data_interval_end": day(DAYS + 2)}
    run = airflow.client.trigger(NAME, day(DAYS + 1), **interval)["dag_run_id"]
    assert airflow.client.wait_for_runs(NAME, [run], timeout_s=180) == {run: "success"}
    newest = log_of(root(form)).completed()[-1]
    assert (newest.id, newest.content.base_id, newest.content.code_version) == (head + 1, head, "later")


def parsed(airflow: AirflowServer) -> datetime:
    return datetime.fromisoformat(airflow.client.call("GET", f"/api/v2/dags/{NAME}")["last_parsed_time"])
