"""Fixtures that several floors of tests share."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.support import tiers, time_limits
from tests.support.messages import Made, Recorder, Site, as_plain, from_plain, is_whole_run, missing, sites
from tests.support.random_order import SEED, shuffle_tests

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Spark's Python workers convert instants by the process's zone; tests and workers agree on UTC.
os.environ["TZ"] = "UTC"
# Before anything imports Airflow: its files belong neither into the repository nor into the user's home.
os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="cairn-airflow-")
atexit.register(shutil.rmtree, os.environ["AIRFLOW_HOME"], ignore_errors=True)

# Tests start hundreds of JVMs that live for seconds. Without the second compiler they take half of the CPU, and without G1's threads 6 % less.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# The garbage collector would take a third of the CPU of the collection of tests, where nearly nothing becomes garbage.
gc.disable()

WITHOUT = pytest.StashKey[list[Site]]()
# The errors that this process makes; those of xdist's workers come to the process that started them.
MADE = Recorder()
OF_WORKERS: list[Made] = []

# No deadline for one example: another process may have the processor meanwhile.
settings.register_profile(tiers.TIER, deadline=None, max_examples=tiers.at_tier(fast=10, ci=15, all=100))
settings.load_profile(tiers.TIER)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(time_limits)
    if version("pyspark").startswith(("4.0.", "4.1.")):
        # These versions leave it to the garbage collector to close the sockets on which they read rows.
        config.addinivalue_line("filterwarnings", "ignore:unclosed <socket:ResourceWarning")
    if version("apache-airflow-core") < "3.3":
        # Other packages of its time (tests/support/overlays) warn about this Python and about each other.
        config.addinivalue_line("filterwarnings", "default")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Keep the formatter of pytest's log handlers. pytest adds its handlers to loggers that do not propagate, and those of PySpark, which
    exist after an error of a query, would give each handler a formatter of JSON for all later tests."""
    plugin: Any = session.config.pluginmanager.getplugin("logging-plugin")
    for handler in (plugin.caplog_handler, plugin.report_handler) if plugin else ():
        handler.setFormatter = lambda formatter: None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.support.parallel import ByFile

    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    OF_WORKERS.extend(from_plain(getattr(node, "workeroutput", {}).get("errors_made", [])))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect garbage from here on, also in the process that starts xdist's workers. Modules and tests stay out of it."""
    gc.freeze()
    gc.enable()


def pytest_report_header() -> str | None:
    return f"order of tests: by chance, CAIRN_ORDER={SEED}" if SEED else None


# First: pytest then brings tests together that share a parameter of a module's fixture.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the tier leaves out, and in `make test-all` what passed before on this commit."""
    tiers.choose_tests(config, items)
    shuffle_tests(items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        from tests.support.parallel import begin_with_airflow

        begin_with_airflow(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol() -> bool | None:
    """Leave a test to the next part, without a report."""
    return True if tiers.is_part_over() else None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    tiers.remember_passed(report)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A whole run says which errors that a user can meet it did not meet. With CAIRN_TESTS=all it fails by that; without, some long tests
    are left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["errors_made"] = as_plain(MADE.made)
        return
    made = tiers.remember_errors([*MADE.made, *OF_WORKERS])
    left = tiers.remember_part(session.testscollected) if tiers.ALL else 0
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and tiers.parts():  # All tests passed in the parts before.
        session.exitstatus = exitstatus = pytest.ExitCode.OK
    if not left and is_whole_run(session.config, exitstatus) and (without := missing(made, sites())):
        session.config.stash[WITHOUT] = without
        if tiers.ALL:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in [*tiers.missing_software(), *tiers.parts()]:
        terminalreporter.write_line(line)
    without = config.stash.get(WITHOUT, [])
    for site in without:
        terminalreporter.write_line(f"{site}\n    {site.template.replace(chr(10), chr(10) + '    ')}")
    if without:
        terminalreporter.write_line(f"no test provokes these {len(without)} errors: add tests that meet them")


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """An in-process Spark with two cores, and a folder of its own."""
    from cairn.spark.session import connect

    # Its connections are closed when Python ends, after pytest has taken the log's stream away.
    logging.getLogger("py4j").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="cairn-spark-", ignore_cleanup_errors=True) as folder:
        # Spark 4.1 has geographic types only with this setting.
        conf = {"spark.local.dir": folder, "spark.sql.geospatial.enabled": "true"}
        session = connect("local[2]", "cairn tests", conf=conf)
        yield session
        session.stop()


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files of this process."""
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder
