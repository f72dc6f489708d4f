"""Credentials for a storage, from an Airflow connection of type `google_cloud_platform`, `aws` or `wasb`.

No secret ever appears in an argument, a log line, an XCom or a record. Cairn writes the secret to a file that only this
user can read, and an environment variable holds the path. Cairn deletes the file when the `with` block ends. Airflow's
providers of Google, Amazon and Microsoft are not needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from airflow.sdk import BaseHook
from airflow.sdk.log import mask_secret

from cairn_operators.airflow_versions import AirflowFailException

_PREFIX = "extra__google_cloud_platform__"  # Airflow 2 put this prefix before each field's name.
_PROFILE = "cairn-connection"
# The fields of connections that Cairn does not support, by the connection's type.
_REFUSED = {
    "google_cloud_platform": ("key_secret_name", "credential_config_file", "impersonation_chain", "is_anonymous"),
    "aws": ("config_kwargs", "session_kwargs", "assume_role_kwargs", "external_id"),
    "wasb": ("workload_identity_tenant_id", "authority", "proxies"),
}
_INSTEAD = {
    "google_cloud_platform": "key_path or keyfile_dict, or neither of them to use application default credentials",
    "aws": "login and password, profile_name, role_arn, region_name and endpoint_url",
    "wasb": "login and password, host, connection_string, sas_token, tenant_id or managed_identity_client_id",
}


@contextmanager
def storage_credentials(conn_id: str | None) -> Iterator[dict[str, str]]:
    """Yield the environment variables that sign a process in as a connection's account; none without a connection."""
    if conn_id is None:
        yield {}
        return
    from state_backend.adapters.work_folders import work_folder

    connection = BaseHook.get_connection(conn_id)
    kind, fields = connection.conn_type, _fields(connection.extra_dejson)
    if kind not in _REFUSED:
        raise AirflowFailException(
            f"connection {conn_id!r} has the type {kind!r}; storage_conn_id takes a connection of type {' or '.join(_REFUSED)}"
        )
    # `verify` and `use_ssl` could switch off certificate checks and encryption. Cairn does not support that, so it
    # refuses any value but True.
    encryption = [name for name in ("verify", "use_ssl") if connection.extra_dejson.get(name) not in (True, None, "")]
    if useless := [name for name in _REFUSED[kind] if fields.get(name)] + (encryption if kind == "aws" else []):
        raise AirflowFailException(
            f"connection {conn_id!r} has {', '.join(useless)}, which Cairn does not support. Give {_INSTEAD[kind]}"
        )
    # Only this user can read the folder. If this task is killed, the next task on this host deletes the key.
    with work_folder("key") as folder:
        if kind == "aws":
            yield _amazon(conn_id, connection.login, connection.password, fields, folder)
        elif kind == "wasb":
            yield _microsoft(conn_id, connection, fields, folder)
        else:
            yield _google(conn_id, fields, folder)


def _google(conn_id: str, fields: Mapping[str, Any], folder: Path) -> dict[str, str]:
    environment = {"GOOGLE_CLOUD_PROJECT": str(fields["project"])} if fields.get("project") else {}
    if fields.get("key_path"):
        return {**environment, "GOOGLE_APPLICATION_CREDENTIALS": str(fields["key_path"])}
    if not fields.get("keyfile_dict"):
        return environment
    return {
        **environment,
        "GOOGLE_APPLICATION_CREDENTIALS": _private_file(folder / "key.json", _key(conn_id, fields["keyfile_dict"])),
    }


def _amazon(
    conn_id: str, login: str | None, password: str | None, fields: Mapping[str, Any], folder: Path
) -> dict[str, str]:
    """Return environment variables for an `aws` connection, whose `fields` are those of Airflow's Amazon provider.

    Access keys (`login`, `password`) and a role become a profile in a file in `folder`. Amazon's SDK assumes the role,
    and renews its credentials.
    """
    names = {"region_name": "AWS_DEFAULT_REGION", "endpoint_url": "AWS_ENDPOINT_URL_S3", "profile_name": "AWS_PROFILE"}
    environment = {variable: str(fields[name]) for name, variable in names.items() if fields.get(name)}
    if "AWS_DEFAULT_REGION" in environment:
        environment["AWS_REGION"] = environment["AWS_DEFAULT_REGION"]
    key, secret = login or fields.get("aws_access_key_id"), password or fields.get("aws_secret_access_key")
    token, role = fields.get("aws_session_token"), fields.get("role_arn")
    if bool(key) != bool(secret):
        raise AirflowFailException(
            f"connection {conn_id!r} has one key of two: give an access key (login) and a secret key (password), or neither"
        )
    if not key:
        if role:
            raise AirflowFailException(
                f"connection {conn_id!r} has role_arn but no keys: give login and password. Or give the role to the host or "
                "pod, and leave storage_conn_id out"
            )
        return environment
    for value in filter(None, (secret, token)):
        mask_secret(str(value))
    values = {"aws_access_key_id": key, "aws_secret_access_key": secret, "aws_session_token": token}
    profile = [f"{name} = {value}" for name, value in values.items() if value]
    if role:
        profile = [f"role_arn = {role}", f"source_profile = {_PROFILE}-keys", f"[profile {_PROFILE}-keys]", *profile]
    text = "\n".join([f"[profile {_PROFILE}]", *profile])
    if any("\n" in str(value) for value in (*values.values(), role)):
        raise AirflowFailException(f"connection {conn_id!r} has a line break in a key or in role_arn")
    # The worker may have access keys in environment variables, which the SDK prefers to a profile. So they are emptied.
    without = dict.fromkeys(map(str.upper, values), "")
    return {
        **environment,
        **without,
        "AWS_PROFILE": _PROFILE,
        "AWS_CONFIG_FILE": _private_file(folder / "config", text),
    }


def _microsoft(conn_id: str, connection: Any, fields: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Return the variable that names a file in `folder` with the login of a `wasb` connection of Azure's provider."""
    from state_backend.values.environment import Variable

    login, secret = connection.login or "", connection.password or fields.get("shared_access_key")
    host = (connection.host or "").removeprefix("https://").partition("/")[0]
    values = {
        "AZURE_STORAGE_CONNECTION_STRING": fields.get("connection_string"),
        "AZURE_STORAGE_ACCOUNT": host.partition(".")[0] or login,
        "AZURE_STORAGE_SAS_TOKEN": fields.get("sas_token"),
    }
    if tenant := fields.get("tenant_id"):
        values |= {"AZURE_TENANT_ID": tenant, "AZURE_CLIENT_ID": login, "AZURE_CLIENT_SECRET": secret}
    else:
        values |= {"AZURE_STORAGE_KEY": secret, "AZURE_CLIENT_ID": fields.get("managed_identity_client_id")}
    given = {name: str(value) for name, value in values.items() if value}
    if "." in host and not host.endswith(".blob.core.windows.net"):
        raise AirflowFailException(
            f"connection {conn_id!r} has the host {host!r}; Cairn takes only accounts at blob.core.windows.net from a "
            "connection. Leave the host out, and give a root that names it"
        )
    if not given:
        raise AirflowFailException(
            f"connection {conn_id!r} names no account: give its name as login, its address as host, or connection_string"
        )
    for name in (
        "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_KEY",
        "AZURE_CLIENT_SECRET",
    ):
        if name in given:
            mask_secret(given[name])
    return {Variable.AZURE_LOGIN: _private_file(folder / "login.json", json.dumps(given))}


def _private_file(file: Path, text: str) -> str:
    file.touch(mode=0o600)
    file.write_text(text)
    return str(file)


@contextmanager
def as_storage_identity(conn_id: str | None) -> Iterator[None]:
    from state_backend.values.environment import environment

    with storage_credentials(conn_id) as variables, environment(variables):
        yield


def _fields(extra: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name.removeprefix(_PREFIX): value for name, value in extra.items() if value}
    if "keyfile_path" in fields:
        fields.setdefault("key_path", fields["keyfile_path"])
    return fields


def _key(conn_id: str, value: Any) -> str:
    """Return a service account's key, a dict or JSON text, as JSON text. Let Airflow mask its secrets in logs."""
    try:
        key = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        key = None
    if not isinstance(key, dict):
        raise AirflowFailException(f"connection {conn_id!r}: keyfile_dict is not the JSON of a key file")
    for name in ("private_key", "client_secret", "refresh_token"):
        if isinstance(key.get(name), str):
            mask_secret(key[name])
    return json.dumps(key)
