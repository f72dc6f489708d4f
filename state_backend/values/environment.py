"""The environment variables that Cairn reads: name, meaning and default.

`make api` writes them into docs/settings.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum


class Variable(StrEnum):
    """An environment variable. The value is its name."""

    default: str
    meaning: str

    ROOT = "CAIRN_ROOT", "storage URL of the folder that holds all pipelines, for commands without `--root`"
    PIPELINE = "CAIRN_PIPELINE", "name of a pipeline, for commands without `--pipeline`"
    CODE = "CAIRN_CODE", "place of a pipeline's code, `module:NAME`, for commands without `--code`"
    SPARK = "CAIRN_SPARK", "`sc://host:port` or a Spark master, for commands without `--spark`", "local[*]"
    SPARK_LOG = (
        "CAIRN_SPARK_LOG",
        "log level of Spark if a command starts it: `off`, `error` (with Spark's stack traces), `warn` or `info`",
        "off",
    )
    AIRFLOW = "CAIRN_AIRFLOW", "address of Airflow, for commands without `--airflow`", "http://127.0.0.1:8080"
    AIRFLOW_TOKEN = "CAIRN_AIRFLOW_TOKEN", "token of Airflow's API. An Airflow of `make ui` needs none"
    AIRFLOW_WAIT = (
        "CAIRN_AIRFLOW_WAIT",
        "longest wait of `cairn pause` and `cairn savepoint --stop` for running tasks, and of `cairn backfill` for an earlier backfill",
        "30m",
    )
    SPARK_TOKEN = (
        "SPARK_CONNECT_AUTHENTICATE_TOKEN",
        "token of a Spark Connect server. A server of `cairn spark` needs none",
    )
    DAEMON_IDLE_S = (
        "CAIRN_DAEMON_IDLE_S",
        "seconds without work after which a Python daemon of a [Connect server](clusters.md#a-shared-connect-server) ends. 0: never",
        "600",
    )
    STATE_HOME = (
        "XDG_STATE_HOME",
        "folder whose subfolder `cairn/` holds the tokens of servers that you started",
        "~/.local/state",
    )
    DATA = "CAIRN_DATA", "folder for state, savepoints and Data Docs of the example DAGs", "data"
    DOCS = "CAIRN_DOCS", "folder of the Data Docs that Airflow's UI shows", "<CAIRN_DATA>/docs"
    UI_PIPELINES = (
        "CAIRN_UI_PIPELINES",
        "folders of pipelines, separated by white space, that the [Checkpoints page](checkpoints-page.md) shows beside those of DAGs. "
        "Or set `[cairn] ui_pipelines` in `airflow.cfg`",
    )
    S3_ADDRESSING = (
        "CAIRN_S3_ADDRESSING",
        "place of the bucket in an S3 URL: `path`, `virtual` (in the host name), or `auto` (the AWS SDK decides)",
        "auto",
    )
    S3_REQUEST_PAYER = "CAIRN_S3_REQUEST_PAYER", "`requester`, if the bucket is a Requester Pays bucket"
    S3_ENCRYPTION = "CAIRN_S3_ENCRYPTION", "encryption of new objects: `AES256` or `aws:kms`. Default: the bucket's"
    S3_KMS_KEY_ID = (
        "CAIRN_S3_KMS_KEY_ID",
        "id of the KMS key for `aws:kms`. Your identity also needs `kms:GenerateDataKey` and `kms:Decrypt`",
    )
    AZURE_LOGIN = (
        "CAIRN_AZURE_LOGIN",
        "path of a JSON file with variables of Azure's login, such as `AZURE_STORAGE_ACCOUNT`. They replace those of the environment",
    )
    EXPECTATIONS_DAYS = "CAIRN_EXPECTATIONS_DAYS", "days between two evaluations of expectations in the demo's DAG", "1"
    FLIGHTS = "CAIRN_FLIGHTS", "folder of the input of the example `aircraft`", "data/flights"
    WEATHER = "CAIRN_WEATHER", "folder of the input of the example `weather`", "data/weather"
    OWNER = "CAIRN_OWNER", "set by Cairn to mark the processes of one local server"
    PYTHON_PATH = "CAIRN_PYTHON_PATH", "set by Cairn to pass a task's import path to its driver"

    def __new__(cls, name: str, meaning: str, default: str = "") -> Variable:
        made = str.__new__(cls, name)
        made._value_, made.default, made.meaning = name, default, meaning
        return made

    @property
    def given(self) -> str | None:
        """The value in this process's environment; None if the variable is not set or empty."""
        return os.environ.get(self) or None


@contextmanager
def environment(given: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process's environment within the block."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
