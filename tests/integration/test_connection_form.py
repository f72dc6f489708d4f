"""The connection to Spark Connect in Airflow's own form, in a browser: with the names of its fields, and saved as it is read later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from selenium.webdriver import Keys
from selenium.webdriver.common.by import By

from tests.support.browser import browser, wait_for
from tests.support.shown_airflow import shown_airflow

pytestmark = [pytest.mark.airflow, pytest.mark.browser, pytest.mark.long("starts Airflow and a browser")]


def test_the_connection_form_of_airflow_saves_a_spark_connect_connection(tmp_path: Path) -> None:
    with shown_airflow(tmp_path) as airflow, browser() as chrome:
        chrome.get(f"{airflow.url}/auth/login")
        chrome.add_cookie({"name": "_token", "value": airflow.tokens["ada"]})
        chrome.get(f"{airflow.url}/connections")
        wait_for(lambda: chrome.find_element(By.XPATH, "//button[contains(., 'Add Connection')]")).click()
        wait_for(lambda: chrome.find_element(By.NAME, "connection_id")).send_keys("cairn_spark")
        kind = chrome.find_element(By.CSS_SELECTOR, "[role=dialog] input[role=combobox]")
        kind.send_keys("Spark Connect")
        wait_for(lambda: chrome.find_element(By.XPATH, "//*[@role='option' and .='Spark Connect']"))
        kind.send_keys(Keys.ENTER)
        form = chrome.find_element(By.CSS_SELECTOR, "[role=dialog]")
        wait_for(lambda: "User id" in form.text and "Token" in form.text and "Schema" not in form.text)
        form.find_element(By.NAME, "host").send_keys("sc://spark.example.org")
        form.find_element(By.NAME, "password").send_keys("t0ken")
        form.find_element(By.XPATH, ".//button[normalize-space()='Extra Fields']").click()
        wait_for(lambda: "Use TLS" in form.text and "Spark configuration" in form.text)
        form.find_element(By.XPATH, ".//button[normalize-space()='Save']").click()
        wait_for(lambda: not chrome.find_elements(By.CSS_SELECTOR, "[role=dialog]"))
        wait_for(lambda: "cairn_spark" in chrome.find_element(By.TAG_NAME, "body").text)
        status, body = airflow.get("/api/v2/connections/cairn_spark", "ada")
    saved = json.loads(body)
    assert (status, saved["conn_type"], saved["host"]) == (200, "spark_connect", "sc://spark.example.org")
    assert "t0ken" not in body
