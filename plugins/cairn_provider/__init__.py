"""Describe Cairn to Airflow: connection types with their forms, operators, and the link to Data Docs.

Cairn's plugins are not listed here. Airflow loads plugins of providers only if `[core] lazy_discover_providers` is off.
So the plugins have entry points of their own (`airflow.plugins`).

This package is separate because Airflow calls it while it reads its own configuration: it must import nothing of
Airflow.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

_CONF = {
    "label": "Spark configuration",
    "description": 'A JSON object like {"spark.executor.memory": "4g"}. Settings in a task\'s spark_conf override it',
    "schema": {"type": ["string", "null"]},
}
_SSL = {"label": "Use TLS", "schema": {"type": ["boolean", "null"], "default": False}}


def get_provider_info() -> dict[str, Any]:
    """Return the description of this provider. The entry point `apache_airflow_provider` names this function."""
    return {
        "package-name": "cairn-state",
        "name": "Cairn",
        "description": "Stateful batch pipelines on Airflow and Spark",
        "connection-types": [] if _has_spark_provider() else _connection_types(),
        "operators": [
            {
                "integration-name": "Cairn",
                "python-modules": [
                    f"cairn_operators.{module}"
                    for module in (
                        "commit_checkpoint",
                        "process_data_interval",
                        "range_tasks",
                        "restore_state",
                        "savepoint",
                        "sweep_state",
                        "trial_tasks",
                        "validate_state",
                    )
                ],
            }
        ],
        "integrations": [{"integration-name": "Cairn", "external-doc-url": "", "tags": ["software"]}],
        "extra-links": ["cairn_operators.data_docs_link.DataDocsLink"],
    }


def _has_spark_provider() -> bool:
    """Return True if Apache's Spark provider is installed.

    That provider declares the connection types `spark` and `spark_connect` itself, and Airflow warns if two packages
    declare the same type. Then Cairn declares neither.
    """
    try:
        return find_spec("airflow.providers.apache.spark") is not None
    except ModuleNotFoundError:
        return False


def _connection_types() -> list[dict[str, Any]]:
    return [
        {
            "connection-type": "spark_connect",
            "hook-class-name": "cairn_operators.spark_hooks.SparkConnectLocation",
            "hook-name": "Spark Connect",
            "conn-fields": {"use_ssl": _SSL, "conf": _CONF},
            "ui-field-behaviour": {
                "hidden-fields": ["schema"],
                "relabeling": {"password": "Token", "login": "User id"},
                "placeholders": {"host": "sc://HOST", "port": "15002"},
            },
        },
        {
            "connection-type": "spark",
            "hook-class-name": "cairn_operators.spark_hooks.SparkMasterLocation",
            "hook-name": "Spark",
            "conn-fields": {"conf": _CONF},
            "ui-field-behaviour": {
                "hidden-fields": ["schema", "login", "password"],
                "relabeling": {"host": "Master"},
                "placeholders": {"host": "spark://HOST, yarn, k8s://HOST or local[2]"},
            },
        },
    ]
