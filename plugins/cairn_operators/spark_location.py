"""Where Spark is: an Airflow connection, as the URL that the driver takes, and beside it what only the driver may see."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowFailException, AirflowNotFoundException
from airflow.sdk.log import mask_secret

_SECRET = ("password", "secret", "token", "credential", "private", "key")


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkLocation:
    """``url`` may be shown and logged. ``token`` and ``conf``, Spark's configuration by name, go to the driver by its stdin: the
    arguments of a process are everybody's to read."""

    url: str
    token: str | None = field(default=None, repr=False)
    conf: Mapping[str, str] = field(default_factory=dict, repr=False)


def spark_location(conn_id: str, conf: Mapping[str, Any] | None = None) -> SparkLocation:
    """The connection's location; ``conf`` counts before what the connection says. Without any connection, and so without any
    set-up, Spark runs inside the driver on all cores."""
    try:
        connection = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        return SparkLocation(url="local[*]", conf=_texts("spark_conf", conf or {}))
    extra = connection.extra_dejson
    url = spark_url(connection.conn_type, connection.host, connection.port)
    url, within = _without_token(url)
    token = connection.password or extra.get("token") or within
    if url.startswith("sc://"):
        for name, value in (("use_ssl", _yes(extra.get("use_ssl"))), ("user_id", connection.login)):
            if value and f";{name}=" not in url:
                url = f"{url}{'' if ';' in url else '/'};{name}={value}"
    elif token:
        raise AirflowFailException(
            f"connection {conn_id!r} has a token or password, and leads to the Spark master {url!r}, which takes none; tokens are for "
            "Spark Connect (sc://host)"
        )
    if token:
        mask_secret(token)
    return SparkLocation(
        url=url,
        token=token or None,
        conf={
            **_texts(f"connection {conn_id!r}: conf", _parsed(conn_id, extra.get("conf"))),
            **_texts("spark_conf", conf or {}),
        },
    )


def spark_url(conn_type: str, host: str | None, port: int | None) -> str:
    """The URL for the parts of a connection. A ``generic`` one, which Airflow makes of a type that it did not know when the
    connection was added, is told by its host."""
    if conn_type == "generic" and host:
        conn_type = "spark_connect" if host.startswith("sc://") else "spark"
    if conn_type == "spark_connect":
        address, _, parameters = (host or "localhost").removeprefix("sc://").partition("/;")
        address = address.rstrip("/")
        if port or ":" not in address:
            address = f"{address}:{port or 15002}"
        return f"sc://{address}{f'/;{parameters}' if parameters else ''}"
    if conn_type == "spark":
        return f"{host or 'local[*]'}{f':{port}' if port else ''}"
    raise AirflowFailException(
        f"a connection of type {conn_type!r} does not lead to Spark; use spark_connect or spark, or of type generic a host like "
        "sc://HOST or spark://HOST"
    )


def _without_token(url: str) -> tuple[str, str | None]:
    """A token that somebody wrote into the host does not belong into the driver's arguments."""
    if not url.startswith("sc://") or ";" not in url:
        return url, None
    address, *parameters = url.split(";")
    tokens = [p.partition("=")[2] for p in parameters if p.startswith("token=")]
    kept = ";".join([address, *(p for p in parameters if p and not p.startswith("token="))])
    return (kept if ";" in kept else kept.rstrip("/")), tokens[0] if tokens else None


def _yes(value: Any) -> str:
    return "true" if str(value).strip().lower() in ("true", "1", "yes") else ""


def _parsed(conn_id: str, conf: Any) -> Mapping[str, Any]:
    """A JSON object, or the text of one that was put into a form field."""
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
    """Spark's configuration takes texts."""
    texts = {}
    for name, value in conf.items():
        if not isinstance(value, str | int | float):
            raise AirflowFailException(
                f"{what}: {name} is a {type(value).__name__}, not a text, a number, true or false"
            )
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if text and any(word in name.lower() for word in _SECRET):
            mask_secret(text)
        texts[name] = text
    return texts
