"""Credentials for Google Cloud Storage, from an Airflow connection of type `google_cloud_platform`.

The key never appears in an argument, a log line, an XCom or a record. It is written to a file that only this user can
read, and an environment variable holds the path. The file is deleted when the `with` block ends. Airflow's Google
provider is not needed.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowFailException
from airflow.sdk.log import mask_secret

_PREFIX = "extra__google_cloud_platform__"  # Airflow 2 put this prefix before each field's name.
_UNKNOWN = ("key_secret_name", "credential_config_file", "impersonation_chain", "is_anonymous")


@contextmanager
def google_credentials(conn_id: str | None) -> Iterator[dict[str, str]]:
    """Yield the environment variables that give a process the identity in a Google connection.

    Args:
        conn_id: Id of the connection; None for application default credentials.

    Yields:
        Values of the variables by name; an empty dict for application default credentials. If a variable names a key
        file, use the file only inside the `with` block: it may be deleted at the end.

    Raises:
        AirflowFailException: The connection gives its key in a way that Cairn does not support, or `keyfile_dict` is
            not the JSON of a key file.
    """
    if conn_id is None:
        yield {}
        return
    fields = _fields(BaseHook.get_connection(conn_id).extra_dejson)
    if useless := [name for name in _UNKNOWN if fields.get(name)]:
        raise AirflowFailException(
            f"connection {conn_id!r} has {', '.join(useless)}, which Cairn does not support. Give key_path or keyfile_dict, or "
            "neither of them to use application default credentials"
        )
    environment = {"GOOGLE_CLOUD_PROJECT": str(fields["project"])} if fields.get("project") else {}
    if fields.get("key_path"):
        yield {**environment, "GOOGLE_APPLICATION_CREDENTIALS": str(fields["key_path"])}
        return
    if not fields.get("keyfile_dict"):
        yield environment
        return
    key = _key(conn_id, fields["keyfile_dict"])
    with tempfile.TemporaryDirectory(prefix="cairn-key-") as folder:  # Only this user can read this folder.
        file = Path(folder, "key.json")
        file.touch(mode=0o600)
        file.write_text(key)
        yield {**environment, "GOOGLE_APPLICATION_CREDENTIALS": str(file)}


@contextmanager
def as_google_identity(conn_id: str | None) -> Iterator[None]:
    """Give this process the identity in a Google connection until the `with` block ends, by environment variables.

    Args:
        conn_id: Id of the connection; None for application default credentials.

    Raises:
        AirflowFailException: The connection gives its key in a way that Cairn does not support, or `keyfile_dict` is
            not the JSON of a key file.
    """
    with google_credentials(conn_id) as environment:
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _fields(extra: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name.removeprefix(_PREFIX): value for name, value in extra.items() if value}
    if "keyfile_path" in fields:
        fields.setdefault("key_path", fields["keyfile_path"])
    return fields


def _key(conn_id: str, value: Any) -> str:
    """Return a service account's key as JSON text, and let Airflow mask its secrets.

    Args:
        conn_id: Id of the connection, for the error message.
        value: The connection's `keyfile_dict`: an object or JSON text.
    """
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
