"""Hooks for the two connection types of Spark.

Airflow needs a hook class for each connection type, and calls its `test_connection` for the Test button in the UI.
Cairn's operators do not use these hooks.
"""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

from airflow.sdk import BaseHook

from cairn_operators.spark_location import spark_location


class _Location(BaseHook):  # type: ignore[misc]  # Airflow is not type-checked here
    conn_name_attr = "spark_conn_id"
    default_conn_name = "cairn_spark"

    def __init__(self, spark_conn_id: str = "cairn_spark", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.spark_conn_id = spark_conn_id

    def get_conn(self) -> str:
        return spark_location(self.spark_conn_id).url

    def test_connection(self) -> tuple[bool, str]:
        url = self.get_conn()
        hosts = [part for part in url.partition("://")[2].partition("/")[0].split(",") if part]
        for host in hosts:
            address = urlsplit(f"//{host}")
            try:
                socket.create_connection((address.hostname or "", address.port or 15002), timeout=5).close()
            except OSError as error:
                return False, f"can't connect to {host}: {error}"
        return (
            True,
            f"{url} accepts connections" if hosts else f"{url} runs inside the driver, so there is no server to test",
        )


class SparkConnectLocation(_Location):
    """The hook of a connection to a Spark Connect server."""

    conn_type = "spark_connect"
    hook_name = "Spark Connect"


class SparkMasterLocation(_Location):
    """The hook of a connection to a Spark master: standalone, YARN, Kubernetes or local."""

    conn_type = "spark"
    hook_name = "Spark"
