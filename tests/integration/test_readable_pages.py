"""Every page about checkpoints in a browser: sizes of texts, contrasts, and nothing cut on a phone, in both themes. Below the pages is a real
Airflow whose scheduler ran a pipeline until it broke. Only with CAIRN_TESTS=all: three minutes.

    CAIRN_TESTS=all pytest tests/integration/test_readable_pages.py

With CAIRN_SCREENSHOTS=docs, two pictures of docs/checkpoints-page.md are made anew.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from tests.support.browser import browser, log_in, save_picture, wait_for
from tests.support.readability import Measures, measure, set_window
from tests.support.shown_airflow import ShownAirflow, shown_airflow
from tests.support.shown_pipelines import run_id
from tests.support.tally_driver import day_name, write_input
from tests.support.trials import production_and_trial

pytestmark = [pytest.mark.airflow, pytest.mark.browser, pytest.mark.long("three minutes")]
BASE = "/cairn/checkpoints"
FAILED_AND_REPEATED, FAILED = (quote(run_id(n), safe="") for n in (2, 3))


def kill_task(airflow: ShownAirflow) -> None:
    """Kill the process of an Airflow task while the task waits for its Spark driver. The kernel does the same if memory is short."""
    root = f"file://{airflow.data}"
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "tests.support.tally_driver" in words and any(root in word for word in words):
                process.parent().kill()
                return
        time.sleep(0.2)
    raise AssertionError("no driver began")


def run_day(airflow: ShownAirflow, number: int, meanwhile: Callable[[ShownAirflow], None] = lambda _: None) -> str:
    """The state in which the day's run of the DAG ended."""
    airflow.trigger("tolls", number)
    meanwhile(airflow)
    until_s = time.monotonic() + 180
    run = f"/api/v2/dags/tolls/dagRuns/{quote(run_id(number), safe='')}"
    while (state := airflow.call("GET", run)["state"]) in ("queued", "running"):
        assert time.monotonic() < until_s, state
        time.sleep(1)
    return str(state)


@pytest.fixture(scope="module")
def while_it_failed() -> dict[str, str]:
    """The overview and the list of pipelines between the first and the second try of day 2."""
    return {}


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory, while_it_failed: dict[str, str]) -> Iterator[ShownAirflow]:
    """The first task of day 1 is killed, the first try of day 2 fails, and day 3 has no input."""
    folder = tmp_path_factory.mktemp("broken")
    production_and_trial(folder / "tried")
    for number in (1, 2):
        write_input(folder / "tally" / "tolls", number, {"a": number})
    for what, number, text in (("slow", 1, "5"), ("slow", 2, "4"), ("fail", 2, "")):
        mark = folder / "tally" / "tolls" / what / day_name(number)
        mark.parent.mkdir(exist_ok=True)
        mark.write_text(text)
    env = {
        "CAIRN_TALLY": str(folder / "tally"),
        "CAIRN_UI_PIPELINES": f"file://{folder}/tried/counting file://{folder}/tried/empty",
    }
    with shown_airflow(folder, more_env=env, more_dags=["broken_dags"]) as server:
        server.call("PATCH", "/api/v2/dags/tolls", {"is_paused": False})
        assert run_day(server, 1, kill_task) == "success"

        def look(_: ShownAirflow) -> None:
            until_s = time.monotonic() + 90
            (key,) = set(re.findall(r"/p/(tolls-[0-9a-f]{10})/", server.get(f"{BASE}/", "ada")[1]))
            while "task process of" not in while_it_failed.get("overview", "") and time.monotonic() < until_s:
                pages = {"overview": f"/p/{key}/", "list": "/"}
                while_it_failed.update({name: server.get(f"{BASE}{path}", "ada")[1] for name, path in pages.items()})

        assert run_day(server, 2, look) == "success"
        assert run_day(server, 3) == "failed"
        yield server


@pytest.fixture(scope="module")
def chrome(airflow: ShownAirflow) -> Iterator[Chrome]:
    with browser(1440, 900) as found:
        log_in(found, airflow.url, airflow.tokens["ada"])
        yield found


@pytest.fixture(scope="module")
def keys(airflow: ShownAirflow) -> dict[str, str]:
    html = airflow.get(f"{BASE}/", "ada")[1]
    return {key.rpartition("-")[0]: key for key in re.findall(r"/p/([\w.-]+-[0-9a-f]{10})/", html)}


def shown(chrome: Chrome, airflow: ShownAirflow, path: str) -> str:
    chrome.get(f"{airflow.url}{path}")
    return str(wait_for(lambda: chrome.find_element(By.ID, "page").text))


def test_the_overview_shows_when_and_why_a_pipeline_broke_and_which_dags_wait(
    airflow: ShownAirflow, chrome: Chrome, keys: dict[str, str]
) -> None:
    set_window(chrome, 1440)
    said = shown(chrome, airflow, f"{BASE}/p/{keys['tolls']}/")
    ended = airflow.call("GET", f"/api/v2/dags/tolls/dagRuns/{FAILED}")["end_date"]
    assert f"Broken since {ended[:10]} {ended[11:16]} UTC: 1 interval failed\nintervals" in said
    assert "2024-01-03 00:00 UTC → 2024-01-04 00:00 UTC\ncause\nThe first run failed." in said
    missing = f"no result: FileNotFoundError: [Errno 2] No such file or directory: '{airflow.data.parent}"
    assert said.count(missing) == 1 and ": the same (log of process, try 2)" in said and "log of process, try 1" in said
    assert "cairn heal --root" in said and "--to 2024-01-03T00:00:00Z" in said
    waiting = chrome.find_element(By.ID, "waiting").text
    if folder := os.environ.get("CAIRN_SCREENSHOTS"):
        set_window(chrome, 1280, 760)
        save_picture(chrome, Path(folder) / "checkpoints-broken-light.png")
    assert waiting.splitlines() == [
        "DAG report, for asset cairn://tolls; it writes file:///reports/tolls",
        "DAG mail, for asset file:///reports/tolls",
    ]
    assert "processed up to\n2024-01-03 00:00 UTC" in said and "lag\n1 d" in said
    assert [bar.text for bar in chrome.find_elements(By.CSS_SELECTOR, ".runs li")] == ["✓", "✓", "✗"]
    assert "✓ 2 done" in said and "✗ 1 failed" in said


def test_the_page_of_a_run_tells_that_its_task_was_killed(airflow: ShownAirflow, chrome: Chrome) -> None:
    said = shown(chrome, airflow, f"{BASE}/run/tolls/{quote(run_id(1), safe='')}")
    killed = r"process, try 1 failed [\d :-]+ UTC: SIGKILL: Process terminated by signal\. Likely out of memory error \(OOM\)\. \(log"
    assert re.search(killed, said), said


def test_the_page_of_a_run_tells_why_its_first_try_failed_and_where_the_time_went(
    airflow: ShownAirflow, chrome: Chrome
) -> None:
    set_window(chrome, 1440)
    said = shown(chrome, airflow, f"{BASE}/run/tolls/{FAILED_AND_REPEATED}")
    assert "AirflowException: SourceError: 2024-01-02 has not landed (log of process, try 1)" in said
    rows = [row.text for row in chrome.find_elements(By.CSS_SELECTOR, ".timeline tbody tr")]
    assert [row.split()[:3] for row in rows] == [
        ["process", "failed", "1"],
        ["process", "success", "2"],
        ["checkpoint", "success", "1"],
        ["validate", "success", "1"],
    ]
    totals = dict(re.findall(r"(process|checkpoint|validate|scheduler|queue|tries) ([\d.]+) (?:ms|s)\b", said))
    assert totals.keys() == {"process", "checkpoint", "validate", "scheduler", "queue", "tries"}, said
    fills = {
        element.value_of_css_property("fill")
        for element in chrome.find_elements(By.CSS_SELECTOR, ".parts rect:not(.rail)")
    }
    assert len(fills) == 7, "three tasks, a failed try, and three kinds of waiting"
    if folder := os.environ.get("CAIRN_SCREENSHOTS"):
        set_window(chrome, 1280)
        save_picture(chrome, Path(folder) / "checkpoints-run-light.png", colours=256)
    chrome.find_element(By.LINK_TEXT, "log of process, try 1").click()
    wait_for(lambda: "2024-01-02 has not landed" in chrome.find_element(By.TAG_NAME, "body").text, 60)


PAGES = {
    "pipelines": "/",
    "pipelines of a dag": "/dag/clicks_none",
    "overview, run failed": "/p/{tolls}/",
    "overview, next can't start": "/p/{rides}/",
    "overview, well": "/p/{clicks}/",
    "overview, silent storage": "/p/{silent}/",
    "overview, template": "/p/{templated}/",
    "overview, empty": "/p/{empty}/",
    "history": "/p/{rides}/history",
    "lineage": "/p/{rides}/lineage",
    "trends": "/p/{rides}/trends",
    "compare, form": "/p/{rides}/compare",
    "compare": "/p/{rides}/compare?first=4&second=7",
    "trials, none": "/p/{rides}/trials",
    "trials": "/p/{counting}/trials",
    "trial": "/p/{counting}/trials/more",
    "checkpoint": "/p/{rides}/checkpoint/11",
    "checkpoint, quarantined": "/p/{rides}/checkpoint/14",
    "checkpoint, stale": "/p/{rides}/checkpoint/12",
    "run, failed": f"/run/tolls/{FAILED}",
    "run, repeated": f"/run/tolls/{FAILED_AND_REPEATED}",
    "task": f"/task/tolls/process/{FAILED}",
    "data docs, list": "/../docs/",
    "data docs": "/p/{rides}/docs/{page}",
    "error 404": "/p/{rides}/checkpoint/99",
    "error 422": "/p/{rides}/history?before=x",
}


TITLES = {
    "pipelines": "Checkpoints",
    "pipelines of a dag": "Checkpoints of DAG clicks_none",
    "overview, run failed": "Overview of tolls – Checkpoints",
    "history": "History of rides – Checkpoints",
    "trial": "Trial more of counting – Checkpoints",
    "checkpoint": "Checkpoint 11 of rides – Checkpoints",
    "run, failed": f"{run_id(3)} of tolls – Checkpoints",
    "task": f"Task process of {run_id(3)} of tolls – Checkpoints",
    "data docs, list": "Data Docs – Checkpoints",
    "error 404": "Not found – Checkpoints",
}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_every_page_is_readable(
    airflow: ShownAirflow, chrome: Chrome, keys: dict[str, str], theme: str, width: int
) -> None:
    chrome.get(f"{airflow.url}{BASE}/static/cairn.css")
    chrome.execute_script("localStorage.setItem('theme', arguments[0])", theme)
    docs = airflow.data.parent / "docs"
    (page,) = (quote(file.relative_to(docs).as_posix()) for file in docs.rglob("*.html"))
    measures: dict[str, Measures] = {}
    titles = {}
    for name, path in PAGES.items():
        set_window(chrome, width)
        shown(chrome, airflow, (BASE + path.format_map(keys | {"page": page})).replace("checkpoints/../", ""))
        assert "Times are in UTC" in chrome.find_element(By.CSS_SELECTOR, "[data-zone]").text, name
        measures[name] = measure(chrome)
        titles[name] = chrome.title
    problems = {name: found.problems for name, found in measures.items() if found.problems}
    assert problems == {} and {found.theme for found in measures.values()} == {theme}
    assert {name: title for name, title in titles.items() if TITLES.get(name, title) != title} == {}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_tabs_in_airflow_have_its_theme_and_are_readable_on_a_phone(
    airflow: ShownAirflow, chrome: Chrome, theme: str
) -> None:
    """Airflow's menu leaves the frame less than the width of the phone."""
    chrome.get(f"{airflow.url}{BASE}/static/cairn.css")
    chrome.execute_script("localStorage.setItem('theme', arguments[0])", theme)
    for name, path in {
        "list": "/plugin/cairn-checkpoints",
        "tab of a dag": "/dags/tolls/plugin/cairn-checkpoints-dag",
        "tab of a run": f"/dags/tolls/runs/{FAILED_AND_REPEATED}/plugin/cairn-checkpoints-dag-run",
    }.items():
        set_window(chrome, 390)
        chrome.get(airflow.url + path)
        chrome.switch_to.frame(wait_for(lambda: chrome.find_element(By.CSS_SELECTOR, "iframe")))
        wait_for(lambda: chrome.find_element(By.CSS_SELECTOR, "#page h1").text)
        found, second = measure(chrome), chrome.find_elements(By.CSS_SELECTOR, ".inside h1")
        chrome.switch_to.default_content()
        assert (found.problems, found.theme, len(second)) == ([], theme, name == "tab of a dag"), name


def test_a_pipeline_whose_task_fails_is_not_green_although_airflow_tries_again(
    airflow: ShownAirflow, while_it_failed: dict[str, str]
) -> None:
    """Its page said "The next interval can start"."""
    overview, listed = while_it_failed["overview"], while_it_failed["list"]
    assert 'class="callout warn" id="state"' in overview and "Failing since" in overview
    assert "failed" in overview and "Airflow tries again" in overview and "2024-01-02 has not landed" in overview
    assert '<span class="chip warn">failing</span>' in listed
