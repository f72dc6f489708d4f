"""Register Cairn's pages with Airflow: checkpoints under Browse and as tabs of a DAG, a run and a task, and Data Docs.

Every process of Airflow loads plugins, even each task, but only the API server serves pages. So this module imports the
code of the pages only when the first request arrives.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any

from airflow.configuration import conf
from airflow.listeners import hookimpl
from airflow.plugins_manager import AirflowPlugin

_CHECKPOINTS, _DOCS = "/cairn/checkpoints", "/cairn/docs"


class Mounted:
    """An ASGI application whose module is imported when the first request arrives."""

    def __init__(self, module: str) -> None:
        self._module = module

    async def __call__(
        self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        module = await asyncio.to_thread(import_module, self._module)
        await module.app(scope, receive, send)


# Modules that Cairn's tasks import in every run, which costs half a second of CPU per run. It is safe to import these
# modules in the scheduler: none of them opens a connection, starts a thread, or belongs to a pipeline.
_NEEDED_BY_TASKS = (
    "cairn_operators.earlier_runs",
    "cairn_operators.predecessor",
    "cairn_operators.previous_checkpoint_trigger",
    "state_backend.values.operation_parameters",
    "state_backend.adapters.die_with_parent",
    "state_backend.adapters.open_storage",
    "state_backend.checkpoint.commit_attempt",
    "state_backend.checkpoint.publish_output",
    "state_backend.inspection.describe",
    "state_backend.values.airflow_commands",
    "state_backend.values.human_units",
)


class Preload:
    """A listener that imports modules of Cairn's tasks in the scheduler, before LocalExecutor forks its workers.

    The workers then need not import these modules for each task. After a change of the modules' code, restart the
    scheduler.
    """

    @hookimpl  # type: ignore[untyped-decorator]
    def on_starting(self, component: Any) -> None:
        if sys.argv[1:2] == ["scheduler"] and "LocalExecutor" in conf.get("core", "executor"):
            for module in _NEEDED_BY_TASKS:
                import_module(module)
            import_module("state_backend.formats.record_codec").build_adapters()


def _view(destination: str, path: str) -> dict[str, str]:
    return {
        "name": "Checkpoints",
        "href": f"{_CHECKPOINTS.lstrip('/')}/{path}",
        "destination": destination,
        "url_route": f"cairn-checkpoints-{destination.replace('_', '-')}",
    }


class CairnCheckpointsPlugin(AirflowPlugin):  # type: ignore[misc]  # Airflow is not type-checked here
    name = "cairn_checkpoints"
    listeners = [Preload()]  # noqa: RUF012
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
    name = "cairn_data_docs"
    fastapi_apps = [  # noqa: RUF012
        {"app": Mounted("cairn_ui.data_docs_routes"), "url_prefix": _DOCS, "name": "cairn Data Docs"}
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
