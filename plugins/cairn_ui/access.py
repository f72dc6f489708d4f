"""Whom Airflow lets read what: each question goes to its auth manager, for the user of the request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import DagDetails
from airflow.models.dag import DagModel

from cairn_ui.find_pipelines import PipelineRef


class Rights:
    """What one user may read. Answers are kept for the one request."""

    def __init__(self, user: Any) -> None:
        self._user = user
        self._known: dict[str, bool] = {}

    def may_read_dag(self, dag_id: str) -> bool:
        """As on the DAG's own page."""
        if dag_id not in self._known:
            details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id))
            answer = get_auth_manager().is_authorized_dag(method="GET", details=details, user=self._user)
            self._known[dag_id] = bool(answer)
        return self._known[dag_id]

    def may_read(self, ref: PipelineRef) -> bool:
        """The pipeline of a DAG: who may read the DAG. One that only the setting names: who may read Airflow's configuration."""
        if ref.dag_id is not None:
            return self.may_read_dag(ref.dag_id)
        return bool(get_auth_manager().is_authorized_configuration(method="GET", user=self._user))

    def readable(self, refs: Iterable[PipelineRef]) -> list[PipelineRef]:
        """Those that the user may read."""
        return [ref for ref in refs if self.may_read(ref)]

    def may_read_docs(self, name: str, refs: Iterable[PipelineRef]) -> bool:
        """True if the user may read every pipeline of this name: their Data Docs lie in one folder.

        Data Docs of a name without a pipeline belong to a DAG that Airflow has no more. Nobody can be asked about them.
        """
        named = [ref for ref in refs if ref.name == name]
        return bool(named) and all(self.may_read(ref) for ref in named)
