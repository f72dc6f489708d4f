"""What Airflow learns of an installed Cairn: connection types with their forms, operators, the link to Data Docs.

Not its plugins: Airflow loads those of providers only where `[core] lazy_discover_providers` is off, so that they are entry points of
their own (`airflow.plugins`).

A package of its own: Airflow reads it while it reads its own configuration, so that nothing of Airflow can be imported here.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

_CONF = {
    "label": "Spark configuration",
    "description": 'A JSON object like {"spark.executor.memory": "4g"}. A task\'s spark_conf counts before it',
    "schema": {"type": ["string", "null"]},
}
_SSL = {"label": "Use TLS", "schema": {"type": ["boolean", "null"], "default": False}}


def get_provider_info() -> dict[str, Any]:
    """The entry point ``apache_airflow_provider``."""
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
                        "incremental_checkpoint",
                        "micro_batch",
                        "restore_state",
                        "savepoint",
                        "sweep_state",
                        "validate_state",
                    )
                ],
            }
        ],
        "integrations": [{"integration-name": "Cairn", "external-doc-url": "", "tags": ["software"]}],
        "extra-links": ["cairn_operators.data_docs.DataDocsLink"],
    }


def _has_spark_provider() -> bool:
    """Apache's provider has both types, and Airflow warns of a type that two packages declare."""
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
