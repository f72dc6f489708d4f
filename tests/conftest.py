"""Fixtures that several floors of tests share."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Spark's Python workers convert instants by the process's zone; tests and workers agree on UTC.
os.environ["TZ"] = "UTC"
# Before anything imports Airflow: its files belong neither into the repository nor into the user's home.
os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="cairn-airflow-")

if os.environ.get("CAIRN_MESSAGES"):
    from tests.support.messages import record_to

    record_to(Path(os.environ["CAIRN_MESSAGES"]))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """An in-process Spark with two cores."""
    from cairn.spark_session import connect

    # Its connections are closed when Python ends, after pytest has taken the log's stream away.
    logging.getLogger("py4j").setLevel(logging.WARNING)
    session = connect("local[2]", "cairn tests")
    yield session
    session.stop()
