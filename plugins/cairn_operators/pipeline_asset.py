"""The Airflow asset that gets an event for each checkpoint of a pipeline."""

from __future__ import annotations

from airflow.sdk import Asset


def pipeline_asset(pipeline_name: str) -> Asset:
    """Return the asset of a pipeline, without a name: the same as `Asset("cairn://sums")` in a DAG that consumes it.

    The asset must not get a name of its own. If two assets have the same URI and different names, Airflow deactivates
    one of them, and the task that writes it fails without a retry.
    """
    return Asset(f"cairn://{pipeline_name}")
