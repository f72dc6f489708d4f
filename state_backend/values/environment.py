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

    ROOT = "CAIRN_ROOT", "storage URL of the folder that holds all pipelines; `--root` of the commands"
    PIPELINE = "CAIRN_PIPELINE", "name of a pipeline; `--pipeline` of the commands"
    CODE = "CAIRN_CODE", "place of a pipeline's declaration, as `module:NAME`; `--code` of the commands"
    SPARK = "CAIRN_SPARK", "address of Spark, `sc://host:port` or a master; `--spark` of the commands", "local[*]"
    SPARK_LOG = (
        "CAIRN_SPARK_LOG",
        "log level of a Spark that a command starts: `off`, `error` (with Spark's stack traces), `warn`, `info`",
        "off",
    )
    AIRFLOW = "CAIRN_AIRFLOW", "address of Airflow, for `cairn backfill` and `cairn heal`", "http://127.0.0.1:8080"
    AIRFLOW_TOKEN = "CAIRN_AIRFLOW_TOKEN", "token of Airflow's API; an Airflow of `make ui` needs none"
    AIRFLOW_WAIT = (
        "CAIRN_AIRFLOW_WAIT",
        "how long `cairn savepoint --stop` waits for running tasks, and `cairn backfill` for an earlier backfill",
        "30m",
    )
    SPARK_TOKEN = (
        "SPARK_CONNECT_AUTHENTICATE_TOKEN",
        "token of a Spark Connect server; a server of `cairn spark` needs none",
    )
    DAEMON_IDLE_S = (
        "CAIRN_DAEMON_IDLE_S",
        "idle seconds after which a Python daemon of a [Connect server](clusters.md#a-shared-connect-server) ends. 0: never",
        "600",
    )
    STATE_HOME = (
        "XDG_STATE_HOME",
        "folder whose subfolder `cairn/` holds the tokens of servers that you started",
        "~/.local/state",
    )
    DATA = "CAIRN_DATA", "folder of state, savepoints and Data Docs in the example DAGs", "data"
    DOCS = "CAIRN_DOCS", "folder of the Data Docs that the UI shows", "<CAIRN_DATA>/docs"
    UI_PIPELINES = (
        "CAIRN_UI_PIPELINES",
        "folders of pipelines, separated by white space, that the [Checkpoints page](checkpoints-page.md) shows beside those of DAGs; "
        "or `[cairn] ui_pipelines` in `airflow.cfg`",
    )
    S3_ADDRESSING = (
        "CAIRN_S3_ADDRESSING",
        "`path`: the bucket is in the path of an S3 URL. `virtual`: in the host name. `auto`: the AWS SDK decides",
        "auto",
    )
    S3_REQUEST_PAYER = "CAIRN_S3_REQUEST_PAYER", "`requester`, if the bucket is a Requester Pays bucket"
    S3_ENCRYPTION = "CAIRN_S3_ENCRYPTION", "`AES256` or `aws:kms`; without it, the bucket's default applies"
    S3_KMS_KEY_ID = (
        "CAIRN_S3_KMS_KEY_ID",
        "id of the KMS key for `aws:kms`. The identity also needs `kms:GenerateDataKey` and `kms:Decrypt`",
    )
    AZURE_LOGIN = (
        "CAIRN_AZURE_LOGIN",
        "path of a JSON file with variables of Azure's login, such as `AZURE_STORAGE_ACCOUNT`, in place of the environment's",
    )
    EXPECTATIONS_DAYS = "CAIRN_EXPECTATIONS_DAYS", "days between two evaluations of expectations in the demo's DAG", "1"
    FLIGHTS = "CAIRN_FLIGHTS", "folder of the input of the example `aircraft`", "data/flights"
    WEATHER = "CAIRN_WEATHER", "folder of the input of the example `weather`", "data/weather"
    OWNER = "CAIRN_OWNER", "set by Cairn: marks the processes of one local server"
    PYTHON_PATH = "CAIRN_PYTHON_PATH", "set by Cairn: the import path of a task, for its driver"

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
