"""Credentials of each kind, and texts that only look like one."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from state_backend.values.errors import StorageUnavailable
from state_backend.values.hide_secrets import hide, hide_all, hide_in

SECRET = "pl4nt3d-S3cr3t"
PLANTED = [
    f"sc://spark.example:15002/;token={SECRET}",
    f"sc://spark.example:15002/;use_ssl=true;token={SECRET};user_id=me",
    f"sc://spark.example:15002?token={SECRET}",
    f"http://admin:{SECRET}@airflow.example:8080/api",
    f"https://{SECRET}@git.example/team",
    f"s3://AKIAEXAMPLE:{SECRET}@bucket/state",
    f"s3://AKIAEXAMPLE:a/b+{SECRET}@bucket/state",
    f"postgresql://me:{SECRET}@db/name",
    f"postgresql://me:p@{SECRET}@db/name",
    f"https://account.blob.example/c/b.csv?sv=2022&sig={SECRET}&se=2030",
    f"https://bucket.example/k?X-Amz-Credential={SECRET}&X-Amz-Signature={SECRET}&X-Amz-Security-Token={SECRET}",
    f"https://bucket.example/k?AWSAccessKeyId={SECRET}&Signature={SECRET}",
    f"host=db password={SECRET} user=me",
    f"host=db password='with space {SECRET}' user=me",
    f"AccountName=a;AccountKey={SECRET};Suffix=x",
    f"Invalid header value b'Bearer {SECRET}\\n'",
    f"Authorization: Basic {SECRET}",
    f'{{"token": "{SECRET}", "conf": {{}}}}',
    f"{{'spark.hadoop.fs.s3a.secret.key': 1, 'password': '{SECRET}'}}",
    f"spark.hadoop.fs.s3a.secret.key={SECRET} --conf spark.ssl.keyPassword={SECRET}",
    f"cairn heal --spark 'sc://h:1/;token={SECRET}' --to 2024-01-01",
    f"--airflow-token {SECRET} --to x",
    f"AWS_SECRET_ACCESS_KEY={SECRET} cairn run",
]
HARMLESS = [
    "sc://spark.example:15002/;use_ssl=true;user_id=me@example.com",
    "abfss://container@account.dfs.core.windows.net/state",
    "s3://bucket/2024:01/a@b.csv",
    "http://localhost:8080/users/a@b",
    "http://[::1]:8080/users/a@b",
    "gs://bucket/token=7/part-0.parquet",
    "postgresql://me@db/name",
    "Its token:     /home/me/.local/state/cairn/spark-connect.host.15002",
    "Put the token of a user who may edit DAG x into the environment variable CAIRN_AIRFLOW_TOKEN",
    "Basic processors get one row; a Bearer token is sent with TLS only",
    "cairn heal --root file:///data/state --pipeline clicks --to 2024-01-01",
    "[2024-01-01T00:00:00Z, 2024-01-01T01:00:00Z): checkpoint 1",
    'assignee="a" sigma=3 design=b; signal = 4',
]


@pytest.mark.parametrize("text", PLANTED)
def test_a_credential_is_hidden_and_the_rest_of_the_text_stays(text: str) -> None:
    assert SECRET not in hide(text) and "***" in hide(text)
    assert hide(hide(text)) == hide(text)
    assert hide(f"cannot open {text!r}; try again").endswith("; try again")


@pytest.mark.parametrize("text", HARMLESS)
def test_a_text_without_a_credential_stays(text: str) -> None:
    assert hide(text) == text


def test_parts_of_a_value_are_hidden_and_types_stay() -> None:
    value = {"files": [PLANTED[9], "a.csv"], "count": 3, "at": (1, None)}
    hidden = hide_all(value)
    assert SECRET not in str(hidden) and hidden["files"][1] == "a.csv" and hidden["count"] == 3
    assert hidden["at"] == (1, None)


@pytest.mark.parametrize("text", PLANTED)
def test_errors_and_log_lines_hide_credentials(text: str, caplog: pytest.LogCaptureFixture) -> None:
    error = StorageUnavailable(f"no answer from {text}")
    error.add_note(f"tried {text}")
    error.args = (f"{error.args[0]}; again {text}",)
    foreign = OSError(f"refused by {text}")
    foreign.__cause__ = ValueError(text)
    hide_in(foreign)
    with caplog.at_level(logging.INFO, "cairn"):
        logging.getLogger("cairn").warning("lost %s", text)
        try:
            raise RuntimeError(text)
        except RuntimeError:
            logging.getLogger("cairn").exception("failed")
    logged: Any = [*caplog.messages, caplog.text]
    said = [str(error), repr(error), *error.__notes__, str(foreign), str(foreign.__cause__), *logged]
    assert not [one for one in said if SECRET in one]
