"""The Airflow asset that gets an event for each checkpoint of a pipeline."""

from __future__ import annotations

from airflow.sdk import Asset


def pipeline_asset(pipeline: str) -> Asset:
    """Return the asset of a pipeline. Its name and its URI are both `cairn://<pipeline>`.

    A consuming DAG refers to the asset as `Asset("cairn://sums")`. Do not give the asset another name: if two assets
    have the same URI and different names, Airflow deactivates one of them, and the task that writes it fails without a
    retry.
    """
    return Asset(f"cairn://{pipeline}")
