"""Where Spark is: an Airflow connection, as the URL that the driver takes."""

from __future__ import annotations

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowFailException, AirflowNotFoundException


def spark_location(conn_id: str) -> str:
    """``sc://host:port`` for a Spark Connect connection, the master for a Spark one. Without any connection, and so
    without any set-up, Spark runs inside the driver on all cores."""
    try:
        connection = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        return "local[*]"
    return spark_url(connection.conn_type, connection.host, connection.port)


def spark_url(conn_type: str, host: str | None, port: int | None) -> str:
    """The URL for the parts of a connection."""
    if conn_type == "spark_connect":
        return f"sc://{(host or 'localhost').removeprefix('sc://')}:{port or 15002}"
    if conn_type == "spark":
        return f"{host or 'local[*]'}{f':{port}' if port else ''}"
    raise AirflowFailException(f"a connection of type {conn_type!r} does not lead to Spark; use spark_connect or spark")
