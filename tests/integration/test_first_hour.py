"""What docs/first-pipeline.md leaves to its reader, from a fresh clone: set-up, the demo, and a new pipeline's 72 hours in Airflow. Only
with CAIRN_TESTS=all: half an hour on two cores.

    CAIRN_TESTS=all pytest tests/integration/test_first_hour.py
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from selenium.webdriver.common.by import By

from cairn import output_files
from local_stack.owned_process import free_port
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.log import read_log
from state_backend.inspection.pipeline_status import status_of
from tests.support.browser import browser, log_in, wait_for
from tests.support.layout import REPOSITORY
from tests.support.local_stack import AirflowClient
from tests.support.printed_commands import in_docs, run_printed

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.browser]

HOURS, GAP, START = 72, timedelta(minutes=30), datetime(2024, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def clone() -> Iterator[Path]:
    """Not below pytest's own folder, which nobody but its owner may enter: PostgreSQL does not run as root."""
    folder = Path(tempfile.mkdtemp(prefix="cairn-clone-"))
    folder.chmod(0o755)
    try:
        run_printed(f"git clone -q {REPOSITORY} cairn", folder)
        run_printed("make setup", folder / "cairn")
        yield folder / "cairn"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sessions_that_ended(clone: Path) -> list[tuple[str, datetime, datetime, int]]:
    """By hand: of the clicks that came in time, what lies half an hour or more before what follows and before the last watermark."""
    clicks: dict[str, list[datetime]] = {}
    for hour in range(HOURS):
        late_before = START + timedelta(hours=hour - 1)
        for line in (clone / f"data/clicks/{START + timedelta(hours=hour):%Y-%m-%dT%H}.json").read_text().splitlines():
            row = json.loads(line)
            at = datetime.fromisoformat(row["at"])
            if hour == 0 or at >= late_before:
                clicks.setdefault(row["user"], []).append(at)
    found = []
    for user, times in clicks.items():
        of_user: list[list[datetime]] = []
        for at in sorted(times):
            if of_user and at - of_user[-1][-1] < GAP:
                of_user[-1].append(at)
            else:
                of_user.append([at])
        ended = (s for s in of_user if s[-1] + GAP <= START + timedelta(hours=HOURS - 1))
        found += [(user, s[0], s[-1], len(s)) for s in ended]
    return sorted(found)


@contextmanager
def started(clone: Path, *command: str, **variables: str) -> Iterator[list[str]]:
    """What stays in its terminal, once it has said its last line; ended as a terminal that is closed does it, with all that it runs."""
    env = {**os.environ, **variables}
    # A file and not a pipe: a server that nobody reads from stands still once the pipe is full.
    with (
        tempfile.TemporaryFile("w+") as out,
        subprocess.Popen(
            command, cwd=clone, env=env, stdout=out, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as server,
    ):

        def said() -> list[str]:
            """Read anew each time by a handle of its own: that of the server is where it writes next."""
            return Path(f"/proc/self/fd/{out.fileno()}").read_text().splitlines()

        try:
            deadline_s = time.monotonic() + 300
            while not any(sign in line for line in said() for sign in ("For Airflow:", "CAIRN_AIRFLOW=")):
                assert server.poll() is None and time.monotonic() < deadline_s, f"{command}: {said()}"
                time.sleep(0.2)
            yield said()
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(timeout=120)
        assert any("is stopped" in line for line in said())


@pytest.mark.long("half an hour: clones, sets up, starts Airflow and a browser")
def test_a_new_pipeline_in_a_fresh_clone_backfills_72_hours_with_the_expected_sessions(clone: Path) -> None:
    """As the page prints it; but another Airflow may be running on this machine, so that its port is a free one."""
    (backfill,) = (text for text, pages in in_docs().items() if text.startswith("cairn backfill --dag clicks"))
    run_printed("cairn new clicks --schedule hourly --key user --template row --yes", clone)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = subprocess.run(["make", "ui", f"PORT={port}"], cwd=clone, capture_output=True, text=True, check=False)
    assert (
        refused.returncode != 0
        and f"another program uses port {port}; choose another port: make ui PORT=8081" in refused.stderr
    )

    with started(clone, "make", "spark", f"SPARK_PORT={free_port()}") as spark_lines:
        (connection,) = (line for line in spark_lines if line.startswith("For Airflow:"))
        variables = dict([connection.partition("export ")[2].strip().replace("'", "").split("=", 1)])
        port = free_port()
        with started(clone, "make", "ui", f"PORT={port}", **variables) as ui_lines:
            (address,) = (line.split("CAIRN_AIRFLOW=")[1] for line in ui_lines if "CAIRN_AIRFLOW=" in line)
            (listing,) = (m[0] for line in ui_lines if (m := re.search(r"AIRFLOW_HOME=.*airflow dags list$", line)))
            assert "clicks" in run_printed(listing, clone)
            run_printed(backfill, clone, CAIRN_AIRFLOW=address)
            client = AirflowClient(address)
            runs = [run["dag_run_id"] for run in client.dag_runs("clicks") if run["run_type"] == "backfill"]
            assert len(runs) == HOURS
            assert set(client.wait_for_runs("clicks", runs, timeout_s=3600).values()) == {"success"}

    root = f"file://{clone}/data/state"
    log = read_log(open_storage(f"{root}/clicks"))
    assert status_of(log, "clicks", open_storage(f"{root}/clicks")).well
    rows = pa.concat_tables(pq.read_table(file) for file in output_files(root, "clicks")).to_pylist()
    made = sorted((row["user"], row["started_at"], row["ended_at"], row["events"]) for row in rows)
    assert len(made) > 1000 and made == sessions_that_ended(clone)


@pytest.mark.long("half an hour: clones, sets up, starts Airflow and a browser")
def test_make_demo_runs_its_days_and_shows_their_checkpoints_in_the_browser(clone: Path) -> None:
    """Of three days instead of fourteen."""
    said = run_printed("make demo", clone, DAYS="3")
    (data,) = re.findall(r"CAIRN_DATA=\$PWD/(\S+) make ui", said)
    made = read_log(open_storage(f"file://{clone}/{data}/state/aircraft")).completed()
    days = sorted({record.content.interval.start.day for record in made})
    assert days == [1, 2, 3] and "Airflow and Spark are stopped" in said

    # Its last line, in another port; then the checkpoints of these days in the browser.
    port = free_port()
    with started(clone, "make", "ui", f"PORT={port}", CAIRN_DATA=str(clone / data)) as lines, browser() as chrome:
        (address,) = (line.split("CAIRN_AIRFLOW=")[1] for line in lines if "CAIRN_AIRFLOW=" in line)
        log_in(chrome, address, AirflowClient(address).token())

        def page(path: str) -> str:
            chrome.switch_to.default_content()
            chrome.get(f"{address}{path}")
            chrome.switch_to.frame(wait_for(lambda: chrome.find_element(By.CSS_SELECTOR, "iframe"), 60))
            return str(wait_for(lambda: chrome.find_element(By.ID, "page").text))

        listed = page("/plugin/cairn-checkpoints")
        row = chrome.find_element(By.CSS_SELECTOR, "tr[data-pipeline=aircraft]").text
        newest = made[-1]
        assert "no problems" in row and f"{newest.content.totals.keys:,}" in row, listed
        tab = "/dags/aircraft/plugin/cairn-checkpoints-dag"
        for view in ("Overview", "History", "Lineage", "Trends"):
            page(tab)
            chrome.find_element(By.LINK_TEXT, view).click()
            shown = wait_for(lambda: (text := chrome.find_element(By.ID, "page").text) and "2013-01-0" in text and text)
            assert "did not answer" not in shown, view
        page(tab)
        chrome.find_element(By.LINK_TEXT, "History").click()
        ids = wait_for(lambda: [link.text for link in chrome.find_elements(By.CSS_SELECTOR, "tbody th a")])
        assert str(newest.id) in ids, ids
