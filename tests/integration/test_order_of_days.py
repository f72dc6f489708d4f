"""Days of a pipeline without Spark under a real Airflow: their order, what is refused or waits, and the commands that repair it."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from cairn_operators.airflow_versions import has
from local_stack.airflow_server import run_path
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.log import read_log
from state_backend.values.records import Record
from tests.support.browser import wait_for
from tests.support.checkpoints import day as tally_day
from tests.support.coordinator import Coordinator
from tests.support.local_stack import AirflowServer
from tests.support.shared_airflow import ON_AZURE, printed_commands, run_as_printed
from tests.support.shown_airflow import ShownAirflow
from tests.support.tally import Tally, day_of
from tests.support.tiers import ALL
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.airflow]


@pytest.fixture
def tally(airflow: AirflowServer, data: Path) -> Callable[[str], Tally]:
    return lambda name: Tally(airflow.client, data / "tally", name)


# Ten days take two to three times as long as five and test nothing more, so only `CAIRN_TESTS=all` runs them.
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


def test_a_paused_backfill_with_a_failed_try_commits_its_days_in_order(five_days: tuple[Tally, list[Record]]) -> None:
    """Runs that are too early defer."""
    days, records = five_days
    assert [record.content.interval.start for record in records] == [tally_day(n).start for n in range(1, DAYS + 1)]
    assert [record.content.base_id for record in records] == [None, *range(1, DAYS)]
    assert "SourceError: 2024-01-02 has not landed" in days.process_log(2) and days.tries(2) >= 2
    assert any("waiting, without a worker slot" in days.process_log(n) for n in range(2, DAYS + 1))
    assert days.mine(DAYS) == days.undisturbed(DAYS)
    days.assert_one_at_a_time()


@pytest.mark.long("half a minute; test_object_stores runs days on Azurite")
def test_days_on_azure_give_the_digests_of_a_local_disk(tally: Callable[[str], Tally], azurite: str | None) -> None:
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


def test_a_cleared_day_with_the_same_result_does_not_block_the_next_run(five_days: tuple[Tally, list[Record]]) -> None:
    days, _ = five_days
    last, stale = last_day(days), stale_checkpoints(days)
    days.input(last + 1, {"every": last + 1})
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


def test_a_cleared_day_with_a_changed_result_defers_the_next_run_and_logs_the_heal_command(
    airflow: AirflowServer, five_days: tuple[Tally, list[Record]]
) -> None:
    days, _ = five_days
    last = last_day(days)
    days.input(last + 1, {"every": last + 1})
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
def test_the_heal_command_of_the_page_repairs_quarantined_failed_and_missing_days(
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
def test_the_printed_command_replaces_output_of_another_interval_length(
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


def test_an_alert_is_sent_for_a_late_run_and_for_a_failed_validation(
    tally: Callable[[str], Tally], pages: tuple[str, list[str]]
) -> None:
    """By the code of docs/checkpoints-page.md. The run's validation can't find its pipeline, which is as good a failure as another."""
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
def test_concurrent_backfills_create_every_run_while_the_scheduler_runs(airflow: AirflowServer) -> None:
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
