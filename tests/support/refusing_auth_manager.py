"""Airflow's simple auth manager with one thing that it lacks: DAGs that somebody may not read."""

from __future__ import annotations

from typing import Any

from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager

REFUSED = {"nils": "secret"}
"""Who may not read which DAG."""


class RefusingAuthManager(SimpleAuthManager):  # type: ignore[misc]  # Airflow is not type-checked here
    """Roles as ever; a user in REFUSED does not get that DAG."""

    def is_authorized_dag(self, *, method: Any, user: Any, access_entity: Any = None, details: Any = None) -> bool:
        """False for the DAG that the user may not read."""
        if details is not None and details.id is not None and REFUSED.get(user.username) == details.id:
            return False
        return bool(super().is_authorized_dag(method=method, user=user, access_entity=access_entity, details=details))
