"""Where Spark is: an Airflow connection, as the URL that the driver takes, and beside it what only the driver may see."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowFailException, AirflowNotFoundException
from airflow.sdk.log import mask_secret

from cairn_operators.hidden_settings import Hidden, is_secret, redaction_of

DEFAULT_CONN_ID = "cairn_spark"
# Masters that Spark knows by a word; every other master has a scheme, as in spark://host:7077.
_WORD = re.compile(r"local(\[.*\])?|local-cluster\[.*\]|yarn")
# Connection types that are the scheme of a URL, as Airflow makes them of sc://host:15002 or k8s://host:6443.
_SCHEMES = {"sc": "spark_connect", "k8s": "spark", "yarn": "spark"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkLocation:
    """``url`` may be shown and logged. ``token`` and ``conf``, Spark's configuration by name, go to the driver by its stdin: the
    arguments of a process are everybody's to read."""

    url: str
    token: str | None = field(default=None, repr=False)
    conf: Mapping[str, str] = field(default_factory=dict, repr=False)


def spark_location(conn_id: str, conf: Mapping[str, Any] | None = None) -> SparkLocation:
    """Read where Spark is from a connection; ``conf`` counts before the configuration of the connection.

    Only the default connection may be missing: then Spark runs inside the driver on all cores.
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


def spark_url(conn_type: str, host: str | None, port: int | None, schema: str | None = None) -> str:
    """Build the URL for the parts of a connection.

    Airflow takes the connection URI spark://host:7077 apart into type ``spark``, host ``host`` and port 7077. The scheme that is
    lost so is put back. Airflow stores a type that it did not know as ``generic``: then the host tells the type.

    Raises: AirflowFailException for a type that does not lead to Spark.
    """
    host = host or ""
    if conn_type == "generic" and host:
        conn_type = "spark_connect" if host.startswith("sc://") else "spark"
    kind = _SCHEMES.get(conn_type, conn_type)
    if kind == "spark_connect":
        address, _, parameters = (host or "localhost").removeprefix("sc://").partition("/;")
        # The parameters of sc://host:15002/;use_ssl=true are the path of the URI, which Airflow calls the schema.
        parameters = parameters or (schema or "").removeprefix(";")
        address = _bracketed(address.rstrip("/"))
        if port or ":" not in address.rpartition("]")[2]:
            address = f"{address}:{port or 15002}"
        return f"sc://{address}{f'/;{parameters}' if parameters else ''}"
    if kind == "spark":
        return _master(conn_type, host, port)
    raise AirflowFailException(
        f"a connection of type {conn_type!r} does not lead to Spark; use spark_connect or spark, or of type generic a host like "
        "sc://HOST or spark://HOST"
    )


def _master(conn_type: str, host: str, port: int | None) -> str:
    if conn_type == "yarn" or not host:
        return "yarn" if conn_type == "yarn" else "local[*]"
    if _WORD.fullmatch(host):
        return host
    if conn_type == "k8s" and not host.startswith("k8s://"):
        host = f"k8s://{host}"
    elif "://" not in host:
        host = f"spark://{_bracketed(host)}"
    return f"{host}{f':{port}' if port else ''}"


def _bracketed(host: str) -> str:
    """An address of IPv6 in brackets, which Airflow removes from a URI; any other host as it is."""
    return f"[{host}]" if host.count(":") > 1 and not {"[", ","} & set(host) else host


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
    """Spark's configuration takes texts. From here on Airflow masks the secrets among them in all logs of the task."""
    plain = {name: value.text if isinstance(value, Hidden) else value for name, value in conf.items()}
    texts, redaction = {}, redaction_of(plain)
    for name, value in plain.items():
        if not isinstance(value, str | int | float):
            raise AirflowFailException(
                f"{what}: {name} is a {type(value).__name__}, not a text, a number, true or false"
            )
        texts[name] = str(value).lower() if isinstance(value, bool) else str(value)
        if isinstance(value, str) and value and is_secret(name, value, redaction):
            mask_secret(value)
    return texts
