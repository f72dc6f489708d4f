"""What Airflow loads: the pages below /cairn/checkpoints, under Browse, and as tabs of a DAG, a run and a task instance."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin

from cairn_ui.routes import URL_PREFIX, app

_HREF = URL_PREFIX.lstrip("/")


def _view(destination: str, path: str) -> dict[str, str]:
    return {
        "name": "Checkpoints",
        "href": f"{_HREF}/{path}",
        "destination": destination,
        "url_route": f"cairn-checkpoints-{destination.replace('_', '-')}",
    }


class CairnCheckpointsPlugin(AirflowPlugin):  # type: ignore[misc]  # Airflow is not type-checked here
    """Checkpoints in Airflow's UI; reads only."""

    name = "cairn_checkpoints"
    fastapi_apps = [{"app": app, "url_prefix": URL_PREFIX, "name": "cairn checkpoints"}]  # noqa: RUF012
    external_views = [  # noqa: RUF012
        {**_view("nav", ""), "category": "browse", "url_route": "cairn-checkpoints"},
        _view("dag", "dag/{DAG_ID}"),
        _view("dag_run", "run/{DAG_ID}/{RUN_ID}"),
        _view("task_instance", "task/{DAG_ID}/{TASK_ID}/{RUN_ID}"),
    ]
