"""The checkpoints' pages in a browser, inside a real Airflow whose users have roles and whose auth manager refuses one of them a DAG. Only with
CAIRN_TESTS=all: two minutes.

    CAIRN_TESTS=all pytest tests/integration/test_checkpoints_page.py
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import quote

import pytest
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.by import By

from tests.support.browser import browser, wait_for
from tests.support.shown_airflow import HOSTILE, ShownAirflow, shown_airflow
from tests.support.shown_pipelines import run_id
from tests.support.trials import production_and_trial

pytestmark = [pytest.mark.airflow, pytest.mark.browser, pytest.mark.long("two minutes")]
RUN = quote(run_id(9), safe="")
DAG_TAB = "/dags/rides/plugin/cairn-checkpoints-dag"
ALL = "/plugin/cairn-checkpoints"


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShownAirflow]:
    folder = tmp_path_factory.mktemp("shown")
    production_and_trial(folder / "tried")
    with shown_airflow(folder, more_env={"CAIRN_UI_PIPELINES": f"file://{folder}/tried/counting"}) as server:
        server.trigger("rides", 9)
        yield server


@pytest.fixture(scope="module")
def chrome() -> Iterator[Chrome]:
    with browser() as found:
        yield found


@pytest.fixture
def vera(airflow: ShownAirflow, chrome: Chrome) -> Chrome:
    """The browser of somebody who may look at everything."""
    return log_in(airflow, chrome, "vera")


def log_in(airflow: ShownAirflow, chrome: Chrome, user: str, **stored: str) -> Chrome:
    chrome.switch_to.default_content()
    chrome.get(f"{airflow.url}/cairn/checkpoints/static/cairn.css")
    chrome.delete_all_cookies()
    chrome.add_cookie({"name": "_token", "value": airflow.tokens[user], "path": "/"})
    chrome.execute_script("localStorage.clear()")
    for name, value in {"theme": "light", "timezone": "UTC", **stored}.items():
        chrome.execute_script("localStorage.setItem(arguments[0], arguments[1])", name, value)
    return chrome


def frame(airflow: ShownAirflow, chrome: Chrome, path: str) -> None:
    """Opens a page of Airflow's UI, and goes into the frame that it shows ours in."""
    chrome.switch_to.default_content()
    chrome.get(airflow.url + path)
    chrome.switch_to.frame(wait_for(lambda: chrome.find_element(By.CSS_SELECTOR, "iframe")))
    wait_for(lambda: chrome.find_element(By.CSS_SELECTOR, "#page h1").text)


def said(chrome: Chrome) -> str:
    return str(chrome.find_element(By.ID, "page").text)


def key_of(airflow: ShownAirflow, name: str) -> str:
    _, html = airflow.get("/cairn/checkpoints/", "ada")
    (key,) = set(re.findall(rf"/p/({name}-[0-9a-f]{{10}})/", html))
    return str(key)


def test_the_tab_of_a_dag_leads_through_all_views_and_out_to_airflow(airflow: ShownAirflow, vera: Chrome) -> None:
    frame(airflow, vera, DAG_TAB)
    assert "is quarantined: " in said(vera) and "cairn heal --root" in said(vera)
    for view, shows in (
        ("History", "replaced by 13"),
        ("Lineage", "went back to checkpoint 11"),
        ("Trends", "From top to bottom"),
        ("Compare", "Choose two retained checkpoints"),
        ("Overview", "Latest validated"),
    ):
        vera.find_element(By.LINK_TEXT, view).click()
        wait_for(lambda shows=shows: shows in said(vera))  # type: ignore[misc]
        assert vera.find_element(By.CSS_SELECTOR, ".tabs [aria-current]").text == view
    resources = vera.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert resources and all(name.startswith(airflow.url) for name in resources)
    refused = [line["message"] for line in vera.get_log("browser") if "Content Security Policy" in line["message"]]
    assert not [line for line in refused if "/cairn/" in line], refused
    vera.find_element(By.LINK_TEXT, "History").click()
    wait_for(lambda: vera.find_elements(By.CSS_SELECTOR, "table.history"))
    instants = [element.text for element in vera.find_elements(By.TAG_NAME, "time")]
    assert instants and all(re.fullmatch(r"\d{4}-\d\d-\d\d [\d:]+ UTC", text) for text in instants), instants
    vera.find_element(By.CSS_SELECTOR, "tr[data-id='14'] a[data-airflow]").click()
    vera.switch_to.default_content()
    wait_for(lambda: f"/dags/rides/runs/{run_id(9)}".replace("+", "%2B") in vera.current_url.replace("%3A", ":"))


def test_the_graph_shows_branches_and_leads_to_the_detail(airflow: ShownAirflow, vera: Chrome) -> None:
    vera.get(f"{airflow.url}/cairn/checkpoints/p/{key_of(airflow, 'rides')}/lineage")
    lanes = {
        int(row.get_attribute("data-id")): row.get_attribute("data-lane")
        for row in vera.find_elements(By.CSS_SELECTOR, "tr[data-lane]")
    }
    assert lanes[11] == lanes[13] != lanes[12] and lanes[7] != lanes[4] == lanes[6]
    vera.find_element(By.LINK_TEXT, "11").click()
    wait_for(lambda: "Checkpoint 11" in said(vera))
    assert "airflow dags trigger rides_restore" in said(vera) and "the largest shard has 1.9 × the mean bytes" in said(
        vera
    )
    vera.find_element(By.LINK_TEXT, "Data Docs").click()
    wait_for(lambda: "Data Docs: total, checkpoint 11" in said(vera))
    vera.switch_to.frame(vera.find_element(By.CSS_SELECTOR, "iframe.docs"))
    assert "Expectations of total" in vera.find_element(By.TAG_NAME, "body").text
    vera.switch_to.default_content()
    vera.find_element(By.LINK_TEXT, "← Checkpoint 11").click()
    wait_for(lambda: "Checkpoint 11" in said(vera))


def test_a_chart_says_figures_and_zooms(airflow: ShownAirflow, vera: Chrome) -> None:
    vera.get(f"{airflow.url}/cairn/checkpoints/p/{key_of(airflow, 'clicks')}/trends")
    # On a busy host, the storage may not answer in time, and the page asks again.
    drawn = wait_for(lambda: vera.find_elements(By.CSS_SELECTOR, ".chart [data-id]"))
    spots = {int(spot.get_attribute("data-id")): spot for spot in drawn}
    assert len(spots) == 30
    ActionChains(vera).move_to_element(spots[12]).perform()
    assert "state: 52 MiB" in wait_for(lambda: vera.find_element(By.CSS_SELECTOR, ".chart .tip").text)
    ActionChains(vera).move_to_element(spots[10]).click_and_hold().move_to_element(spots[20]).release().perform()
    wait_for(lambda: "11 checkpoints" in said(vera))
    assert "first=10&last=20" in vera.current_url


def test_run_page_shows_restored_and_committed_checkpoints(airflow: ShownAirflow, vera: Chrome) -> None:
    frame(airflow, vera, f"/dags/rides/runs/{RUN}/plugin/cairn-checkpoints-dag-run")
    wait_for(lambda: "Committed: checkpoint 14" in said(vera))
    assert "Restored: checkpoint 13" in said(vera) and "refreshed every 5 s" in said(vera)
    frame(airflow, vera, f"/dags/rides/runs/{RUN}/tasks/process/plugin/cairn-checkpoints-task-instance")
    wait_for(lambda: "This try" in said(vera) and "Committed by an earlier try: checkpoint 12" in said(vera))


def test_overview_lists_pipelines_with_hostile_name_or_silent_storage(airflow: ShownAirflow, vera: Chrome) -> None:
    frame(airflow, vera, ALL)
    rows = {
        row.get_attribute("data-pipeline"): row.text for row in vera.find_elements(By.CSS_SELECTOR, "tr[data-pipeline]")
    }
    assert rows.keys() == {"rides", "clicks", "secret", HOSTILE, "silent", "templated", "counting"}
    assert "did not answer within" in rows["silent"] and "by a template" in rows["templated"]
    assert "next interval can't start" in rows["rides"] and "no problems" in rows["clicks"], rows["clicks"]
    vera.find_element(By.LINK_TEXT, HOSTILE).click()
    wait_for(lambda: vera.find_element(By.TAG_NAME, "h1").text == HOSTILE)
    assert vera.execute_script("return [typeof window.pwned, typeof window.parent.pwned]") == ["undefined", "undefined"]
    # The page asks again by itself as long as something is not answered.
    frame(airflow, vera, ALL)
    before = vera.find_element(By.CSS_SELECTOR, "footer time").get_attribute("datetime")
    wait_for(lambda: vera.find_element(By.CSS_SELECTOR, "footer time").get_attribute("datetime") != before, 15)


@pytest.mark.parametrize(("theme", "zone", "midnight"), [("light", "UTC", "00:00"), ("dark", "Asia/Tokyo", "09:00")])
def test_theme_and_zone_are_airflows(
    airflow: ShownAirflow, chrome: Chrome, theme: str, zone: str, midnight: str
) -> None:
    log_in(airflow, chrome, "vera", theme=theme, timezone=zone)
    frame(airflow, chrome, DAG_TAB)
    assert wait_for(lambda: chrome.execute_script("return document.documentElement.dataset.theme")) == theme
    assert f"2024-01-10 {midnight}" in said(chrome)


def test_pages_fit_a_narrow_screen_and_all_controls_have_names(airflow: ShownAirflow, vera: Chrome) -> None:
    rides = f"{airflow.url}/cairn/checkpoints/p/{key_of(airflow, 'rides')}"
    try:
        vera.set_window_size(500, 900)
        for view in ("/", "/history", "/lineage", "/trends", "/checkpoint/11", "/compare?first=4&second=7"):
            vera.get(rides + view)
            widths = vera.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
            assert widths[0] <= widths[1], view
    finally:
        vera.set_window_size(1280, 900)
    vera.get(rides + "/")
    names = vera.execute_script(
        "return [...document.querySelectorAll('a, button, input, select')].map(e => (e.ariaLabel || e.textContent || e.labels?.[0]?.textContent || '').trim())"
    )
    assert all(names)
    vera.find_element(By.TAG_NAME, "body").send_keys("\ue004")  # Tab
    assert vera.switch_to.active_element.text == "Skip to the content"


def test_a_refused_user_sees_nothing_of_the_pipeline(airflow: ShownAirflow, chrome: Chrome) -> None:
    key = key_of(airflow, "secret")
    log_in(airflow, chrome, "nils")
    frame(airflow, chrome, ALL)
    assert "rides" in said(chrome) and "secret" not in said(chrome)
    for view in ("/", "/history", "/lineage", "/trends", "/checkpoint/1", "/compare?first=1&second=2"):
        assert airflow.get(f"/cairn/checkpoints/p/{key}{view}", "nils")[0] == 404
        assert airflow.get(f"/cairn/checkpoints/p/{key}{view}", "vera")[0] == 200
        assert airflow.get(f"/cairn/checkpoints/p/{key}{view}", None)[0] == 401
    assert airflow.get(f"/cairn/checkpoints/run/secret/{RUN}", "nils")[0] == 403


def test_nobody_reads_data_docs_of_a_dag_that_became_stale(airflow: ShownAirflow) -> None:
    """As the DAG processor leaves a DAG whose file is gone."""
    (page,) = (airflow.data.parent / "docs").rglob("*.html")
    path = f"/cairn/docs/{quote(page.relative_to(airflow.data.parent / 'docs').as_posix())}"
    assert [airflow.get(path, user)[0] for user in ("ada", "vera")] == [200, 200]
    try:
        set_stale(airflow, "rides", True)
        assert [airflow.get(path, user)[0] for user in ("ada", "vera", "nils")] == [403] * 3
        assert "rides" not in airflow.get("/cairn/docs/", "ada")[1].partition("</head>")[2]
    finally:
        set_stale(airflow, "rides", False)
    assert airflow.get(path, "vera")[0] == 200


def set_stale(airflow: ShownAirflow, dag_id: str, stale: bool) -> None:
    change(airflow, "UPDATE dag SET is_stale = ? WHERE dag_id = ?", stale, dag_id)


def change(airflow: ShownAirflow, statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(airflow.data.parent / "home" / "airflow.db", timeout=30)) as database, database:
        assert database.execute(statement, values).rowcount == 1


def test_forged_xcom_that_names_a_class_is_ignored_by_the_page(airflow: ShownAirflow) -> None:
    """A task returns a text that names a class. Airflow's reader looks for the class, and the page would end with an error."""
    entries = f"/api/v2/dags/rides/dagRuns/{RUN}/taskInstances/savepoint/xcomEntries"
    airflow.call("POST", entries, {"key": "return_value", "value": {"checkpoint": 3}})
    page = f"/cairn/checkpoints/p/{key_of(airflow, 'rides')}/"
    assert "Last savepoint 3" in text_of(airflow.get(page, "vera")[1])
    forged = {"__classname__": "not.allowed.Class", "__version__": 1, "__data__": {"checkpoint": 3}}
    # As the API of tasks stores a text: the column is JSON.
    change(airflow, "UPDATE xcom SET value = ? WHERE task_id = 'savepoint'", json.dumps(json.dumps(forged)))
    status, shown = airflow.get(page, "vera")
    assert status == 200 and "database has no savepoint of this DAG" in text_of(shown)


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page.partition("</head>")[2]))
