"""What Airflow loads: the pages below /cairn/checkpoints, under Browse and as tabs of a DAG, a run and a task instance; and Data Docs.

Every process of Airflow loads plugins, tasks too, and only the API server serves pages. So what serves them is imported with their
first request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any

from airflow.plugins_manager import AirflowPlugin

_CHECKPOINTS, _DOCS = "/cairn/checkpoints", "/cairn/docs"


class Mounted:
    """An ASGI application: ``app`` of a module, which is imported when somebody asks for a page."""

    def __init__(self, module: str) -> None:
        self._module = module

    async def __call__(
        self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        """Passes the request on."""
        module = await asyncio.to_thread(import_module, self._module)
        await module.app(scope, receive, send)


def _view(destination: str, path: str) -> dict[str, str]:
    return {
        "name": "Checkpoints",
        "href": f"{_CHECKPOINTS.lstrip('/')}/{path}",
        "destination": destination,
        "url_route": f"cairn-checkpoints-{destination.replace('_', '-')}",
    }


class CairnCheckpointsPlugin(AirflowPlugin):  # type: ignore[misc]  # Airflow is not type-checked here
    """Checkpoints in Airflow's UI; reads only."""

    name = "cairn_checkpoints"
    fastapi_apps = [  # noqa: RUF012
        {"app": Mounted("cairn_ui.routes"), "url_prefix": _CHECKPOINTS, "name": "cairn checkpoints"}
    ]
    external_views = [  # noqa: RUF012
        {**_view("nav", ""), "category": "browse", "url_route": "cairn-checkpoints"},
        _view("dag", "dag/{DAG_ID}"),
        _view("dag_run", "run/{DAG_ID}/{RUN_ID}"),
        _view("task_instance", "task/{DAG_ID}/{TASK_ID}/{RUN_ID}"),
    ]


class CairnDocsPlugin(AirflowPlugin):  # type: ignore[misc]  # Airflow is not type-checked here
    """Serves Data Docs, and lists them under Browse."""

    name = "cairn_data_docs"
    fastapi_apps = [  # noqa: RUF012
        {"app": Mounted("cairn_ui.docs_routes"), "url_prefix": _DOCS, "name": "cairn Data Docs"}
    ]
    external_views = [  # noqa: RUF012
        {
            "name": "Data Docs",
            "href": f"{_DOCS.lstrip('/')}/",
            "destination": "nav",
            "category": "browse",
            "url_route": "cairn-docs",
        }
    ]
