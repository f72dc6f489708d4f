"""Read Spark's address, token and configuration from an Airflow connection.

The address may be shown. The token and the configuration may be secret, so the driver gets them on its stdin.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from airflow.sdk import BaseHook
from airflow.sdk.log import mask_secret

from cairn_operators.airflow_versions import AirflowFailException, AirflowNotFoundException
from cairn_operators.hidden_settings import Hidden, is_secret, redaction_of
from state_backend.values.frozen import frozen
from state_backend.values.hide_secrets import hide

DEFAULT_CONN_ID = "cairn_spark"
# Spark masters that are a single word. Every other master has a scheme, as in spark://host:7077.
_WORD = re.compile(r"local(\[.*\])?|local-cluster\[.*\]|yarn")
# Airflow takes the scheme of a connection URI as the connection's type: `sc` for sc://host:15002. `_SCHEMES` maps such
# a type to `spark_connect` or `spark`, the two types of Spark connections.
_SCHEMES = {"sc": "spark_connect", "k8s": "spark", "yarn": "spark"}


@frozen
class SparkLocation:
    """The address of Spark, and the settings that only the driver may see.

    Any user of the host can read the arguments of a process. So `token` and `conf` go to the driver on its stdin.
    """

    url: str
    # Token for a Spark Connect server; None if the connection has none.
    token: str | None = field(default=None, repr=False)
    conf: Mapping[str, str] = field(default_factory=dict, repr=False)


def spark_location(conn_id: str, conf: Mapping[str, Any] | None = None) -> SparkLocation:
    """Return Spark's address, token and configuration from an Airflow connection, with the settings in `conf` added.

    If the default connection does not exist, Spark runs inside the driver on all cores.
    """
    try:
        connection = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        if conn_id != DEFAULT_CONN_ID:
            raise AirflowFailException(
                f"Airflow has no connection {conn_id!r}, which spark_conn_id names. Correct spark_conn_id, or add the connection:\n"
                f"airflow connections add {shlex.quote(conn_id)} --conn-type spark_connect --conn-host sc://HOST --conn-port 15002"
            ) from None
        return SparkLocation(url="local[*]", conf=_texts("spark_conf", conf or {}))
    extra = connection.extra_dejson
    url = spark_url(connection.conn_type, connection.host, connection.port, connection.schema)
    url, within = _without_token(url)
    if hide(url) != url:
        raise AirflowFailException(
            f"connection {conn_id!r}: the address {hide(url)!r} contains credentials, which commands and logs would repeat. "
            "Put the token into the connection's password"
        )
    token = connection.password or extra.get("token") or within
    if url.startswith("sc://"):
        for name, value in (("use_ssl", _yes(extra.get("use_ssl"))), ("user_id", connection.login)):
            if value and f";{name}=" not in url:
                url = f"{url}{'' if ';' in url else '/'};{name}={value}"
    elif token:
        raise AirflowFailException(
            f"connection {conn_id!r} has a token or password, but a Spark master such as {url!r} takes none. Remove it; only Spark "
            "Connect (sc://HOST) takes tokens"
        )
    if token:
        mask_secret(token)
    return SparkLocation(
        url=url,
        token=token or None,
        conf={
            **_texts(f"connection {conn_id!r}: conf", _parse(conn_id, extra.get("conf"))),
            **_texts("spark_conf", conf or {}),
        },
    )


def spark_url(conn_type: str, host: str | None, port: int | None, schema: str | None = None) -> str:
    """Return the URL of Spark for the parts of an Airflow connection.

    Airflow splits the connection URI spark://host:7077 into type `spark`, host `host` and port 7077. This function puts
    the scheme back. For the type `generic`, which Airflow stores in place of an unknown type, the scheme in the host
    decides.
    """
    host = host or ""
    if conn_type == "generic" and host:
        conn_type = "spark_connect" if host.startswith("sc://") else "spark"
    kind = _SCHEMES.get(conn_type, conn_type)
    if kind == "spark_connect":
        address, _, parameters = (host or "localhost").removeprefix("sc://").partition("/;")
        # Airflow calls the path of a URI its schema. In sc://host:15002/;use_ssl=true the path holds the parameters.
        parameters = parameters or (schema or "").removeprefix(";")
        address = _bracket(address.rstrip("/"))
        if port or ":" not in address.rpartition("]")[2]:
            address = f"{address}:{port or 15002}"
        return f"sc://{address}{f'/;{parameters}' if parameters else ''}"
    if kind == "spark":
        return _master(conn_type, host, port)
    raise AirflowFailException(
        f"the connection to Spark has type {conn_type!r}; expected spark_connect or spark, or generic with a host like sc://HOST or "
        "spark://HOST"
    )


def _master(conn_type: str, host: str, port: int | None) -> str:
    if conn_type == "yarn" or not host:
        return "yarn" if conn_type == "yarn" else "local[*]"
    if _WORD.fullmatch(host):
        return host
    if conn_type == "k8s" and not host.startswith("k8s://"):
        host = f"k8s://{host}"
    elif "://" not in host:
        host = f"spark://{_bracket(host)}"
    return f"{host}{f':{port}' if port else ''}"


def _bracket(host: str) -> str:
    """Return an IPv6 address in brackets, which Airflow removes from a URI. Return any other host unchanged."""
    return f"[{host}]" if host.count(":") > 1 and not {"[", ","} & set(host) else host


def _without_token(url: str) -> tuple[str, str | None]:
    """Return a Spark Connect URL without its token, and the token; None if the URL has none.

    The URL becomes an argument of the driver, which any user of the host can read.
    """
    if not url.startswith("sc://") or ";" not in url:
        return url, None
    address, *parameters = url.split(";")
    tokens = [p.partition("=")[2] for p in parameters if p.startswith("token=")]
    kept = ";".join([address, *(p for p in parameters if p and not p.startswith("token="))])
    return (kept if ";" in kept else kept.rstrip("/")), tokens[0] if tokens else None


def _yes(value: Any) -> str:
    return "true" if str(value).strip().lower() in ("true", "1", "yes") else ""


def _parse(conn_id: str, conf: Any) -> Mapping[str, Any]:
    """Return the Spark configuration in `conf`, an object or its JSON text, from the connection `conn_id`."""
    try:
        conf = json.loads(conf) if isinstance(conf, str) and conf.strip() else conf or {}
    except ValueError:
        conf = None
    if not isinstance(conf, Mapping):
        raise AirflowFailException(
            f'connection {conn_id!r}: conf is not a JSON object like {{"spark.executor.memory": "4g"}}'
        )
    return conf


def _texts(what: str, conf: Mapping[str, Any]) -> dict[str, str]:
    """Return Spark's settings as texts, and let Airflow mask secret ones in the task's logs. `what`: For errors."""
    plain = {name: value.text if isinstance(value, Hidden) else value for name, value in conf.items()}
    texts, redaction = {}, redaction_of(plain)
    for name, value in plain.items():
        if not isinstance(value, str | int | float):
            raise AirflowFailException(
                f"{what}: {name} is a {type(value).__name__}; expected a text, a number, true or false"
            )
        texts[name] = str(value).lower() if isinstance(value, bool) else str(value)
        if isinstance(value, str) and value and is_secret(name, value, redaction):
            mask_secret(value)
    return texts
