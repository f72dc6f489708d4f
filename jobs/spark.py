"""Where Spark is: a Spark Connect server (``sc://host:port``) or any master (``local[2]``, ``spark://...``)."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
import uuid
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from state_backend.values.errors import StorageUnavailable, UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Instants in rows are naive UTC, whatever the machine's zone.
_CONF = {"spark.sql.session.timeZone": "UTC"}
_LOCAL_CONF = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "8",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def connect(where: str, app_name: str, *, shared_as: str | None = None) -> SparkSession:
    """A session there. ``shared_as``: on a Connect server, drivers of that name that start within one hour use one session, so
    that only the first pays for starting its Python workers (seconds). An hour, since the server closes a session for good
    when nobody has used it for that long. StorageUnavailable if the server can't be reached, UsageError without a Java runtime for a master."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    if where.startswith("sc://"):
        _check_listening(where)
        if shared_as is not None and ";" not in where:
            hour = int(time.time() // 3600)
            where = f"{where.rstrip('/')}/;session_id={uuid.uuid5(uuid.NAMESPACE_URL, f'cairn:{shared_as}:{hour}')}"
        session = SparkSession.builder.remote(where).getOrCreate()
        try:
            for key, value in _CONF.items():
                session.conf.set(key, value)
        except Exception as error:
            raise StorageUnavailable(
                f"no Spark Connect server answers at {where}: {str(error).strip().splitlines()[0]}"
            ) from error
        return session
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        raise UsageError(
            f"Spark master {where!r} needs a Java 17+ runtime, and there is no java on the PATH; run 'make java'"
        )
    builder = SparkSession.builder.master(where).appName(app_name)
    for key, value in (_CONF | (_LOCAL_CONF if where.startswith("local") else {})).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _check_listening(where: str) -> None:
    """Spark Connect's client tries a dead server again for ten minutes; Airflow's own retry is the better place to wait."""
    address = urlsplit(where)
    try:
        socket.create_connection((address.hostname or "", address.port or 15002), timeout=10).close()
    except OSError as error:
        raise StorageUnavailable(f"no Spark Connect server answers at {where}: {error}") from None
