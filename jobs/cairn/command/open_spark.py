"""Open the Spark session of a command."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from state_backend.values.environment import Variable
from state_backend.values.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LEVELS = ("OFF", "ERROR", "WARN", "INFO")


def open_spark(where: str, app_name: str, *, own_workers: bool = False, silent: bool = False) -> SparkSession:
    """Return a new Spark session at `where`. Unless `silent`, print on stderr that Spark starts, and how long it took.

    The start of a local Spark takes ten seconds, and a minute on a busy machine. `own_workers`: As in `connect`.
    """
    from cairn.spark.session import connect

    level = (Variable.SPARK_LOG.given or Variable.SPARK_LOG.default).upper()
    if level not in _LEVELS:
        raise UsageError(f"{Variable.SPARK_LOG} is {level!r}; set it to one of {', '.join(_LEVELS).lower()}")
    remote = where.startswith("sc://")
    began_s = time.monotonic()
    if not silent:  # The line does not contain the URL, which may contain a token.
        print("connecting to Spark" if remote else "starting Spark", file=sys.stderr, flush=True)
    session = connect(where, app_name, own_workers=own_workers)
    if not remote:
        session.sparkContext.setLogLevel(level)
    if not silent:
        print(f"Spark is ready after {time.monotonic() - began_s:.1f} s", file=sys.stderr, flush=True)
    return session
