"""Who sees which pipeline under Airflow's FAB auth manager, with users, roles, and roles of some DAGs only. A real API server and its database; no
browser. Only with CAIRN_TESTS=all: FAB is installed.

    CAIRN_TESTS=all pytest tests/integration/test_fab.py
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.environments import environment_with
from tests.support.layout import REPOSITORY
from tests.support.shown_airflow import SET_UP, ShownAirflow, shown_airflow

pytestmark = [pytest.mark.airflow, pytest.mark.long("installs FAB")]

ROLES = {"ada": "Admin", "vera": "Viewer", "riku": "Riders", "pia": "Public"}
PAGES = ("", "history", "lineage", "trends", "checkpoint/2", "compare?first=1&second=2")
USERS_AND_ROLES = f"""
from airflow.providers.fab.auth_manager.cli_commands.utils import get_application_builder
with get_application_builder() as builder:
    manager = builder.sm
    manager.sync_roles()
    riders = manager.add_role("Riders")
    manager.add_permission_to_role(riders, manager.create_permission("can_read", "Website"))
    manager.sync_perm_for_dag("rides", {{"Riders": {{"DAGs": {{"can_read"}}}}}})
    for name, role in {ROLES!r}.items():
        assert manager.add_user(name, name, name, name + "@example.com", manager.find_role(role), password=name)
"""


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShownAirflow]:
    folder = tmp_path_factory.mktemp("fab")
    with shown_airflow(
        folder / "shown",
        python=environment_with(folder, REPOSITORY / "tests/support/fab.lock"),
        users=ROLES,
        set_up=SET_UP + USERS_AND_ROLES,
        more_env={"AIRFLOW__CORE__AUTH_MANAGER": "airflow.providers.fab.auth_manager.fab_auth_manager.FabAuthManager"},
    ) as server:
        yield server


@pytest.mark.parametrize(
    ("user", "answer", "sees"),
    [
        ("ada", 200, {"rides", "clicks", "secret"}),
        ("vera", 200, {"rides", "clicks", "secret"}),
        ("riku", 200, {"rides"}),
        ("pia", 403, set()),
        (None, 401, set()),
    ],
)
def test_each_user_sees_only_pipelines_whose_dags_the_user_may_read(
    airflow: ShownAirflow, user: str | None, answer: int, sees: set[str]
) -> None:
    _, listed = airflow.get("/cairn/checkpoints/", "ada")
    keys = {name: listed.split(f"/p/{name}-")[1][:10] for name in ("rides", "clicks", "secret")}
    status, page = airflow.get("/cairn/checkpoints/", user)
    assert status == answer
    for name, key in keys.items():
        assert (key in page) == (name in sees)
        for part in PAGES:
            status, shown = airflow.get(f"/cairn/checkpoints/p/{name}-{key}/{part}", user)
            if name in sees:
                assert status == 200 and name in shown, part
            else:
                assert status in (401, 403, 404) and "Checkpoint " not in shown, part
