"""Decide which DAGs and pipelines the user of a request may read. Airflow's auth manager answers each question."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
from airflow.api_fastapi.core_api.security import get_user
from airflow.models.dag import DagModel
from fastapi import Depends

from cairn_ui.pipelines_of_dags import PipelineRef


class Rights:
    """The rights of one user. Make an object for each request, since it keeps what the auth manager has answered."""

    def __init__(self, user: Any) -> None:
        self._user = user
        self._known: dict[str, bool] = {}

    def may_read_dag(self, dag_id: str) -> bool:
        if dag_id not in self._known:
            details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id))
            answer = get_auth_manager().is_authorized_dag(method="GET", details=details, user=self._user)
            self._known[dag_id] = bool(answer)
        return self._known[dag_id]

    def may_read_logs(self, dag_id: str) -> bool:
        details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id))
        entity = DagAccessEntity.TASK_LOGS
        manager = get_auth_manager()
        return bool(manager.is_authorized_dag(method="GET", access_entity=entity, details=details, user=self._user))

    def may_read(self, ref: PipelineRef) -> bool:
        if ref.dag_id is not None:
            return self.may_read_dag(ref.dag_id)
        return bool(get_auth_manager().is_authorized_configuration(method="GET", user=self._user))

    def readable(self, refs: Iterable[PipelineRef]) -> list[PipelineRef]:
        return [ref for ref in refs if self.may_read(ref)]

    def may_read_docs(self, name: str, refs: Iterable[PipelineRef]) -> bool:
        """Return True if the user may read all pipelines with this name, whose Data Docs share one folder.

        The answer is False if no pipeline has this name, as after its DAG was deleted: then no right can be checked.
        """
        named = [ref for ref in refs if ref.name == name]
        return bool(named) and all(self.may_read(ref) for ref in named)


def rights_of(user: Annotated[Any, Depends(get_user)]) -> Rights:
    return Rights(user)


Asks = Annotated[Rights, Depends(rights_of)]
