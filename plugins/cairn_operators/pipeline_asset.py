"""The Airflow asset that gets an event for each checkpoint of a pipeline."""

from __future__ import annotations

from airflow.sdk import Asset


def pipeline_asset(pipeline_name: str) -> Asset:
    """Return the asset of a pipeline, equal to what a consumer writes: `Asset("cairn://sums")`.

    If two assets have one URI and different names, Airflow deactivates one of them. Then the task that writes it fails
    without a retry.
    """
    return Asset(f"cairn://{pipeline_name}")
