"""`cairn heal` over random histories under a real Airflow: failed, stale, quarantined and missing days, and open, paused and cancelled
backfills. At the end state and output of each day equal those of a run that nobody disturbed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.airflow_on_postgres import airflow_on_postgres
from tests.support.heal_histories import DAGS, play
from tests.support.local_stack import AirflowServer
from tests.support.tally import Tally
from tests.support.tiers import at_tier

pytestmark = [pytest.mark.airflow]

FIRST = int(os.environ.get("CAIRN_FIRST_SEED", "0"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("CAIRN_SEEDS", at_tier(fast=1, ci=3, all=6))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("heal")
    (made / "dags").mkdir()
    text = DAGS.replace("@FIRST@", str(SEEDS[0])).replace("@LAST@", str(SEEDS[-1] + 1))
    (made / "dags" / "heal_dags.py").write_text(text)
    return made


@pytest.fixture(scope="module")
def airflow(folder: Path) -> Iterator[AirflowServer]:
    env = {"CAIRN_TALLY": str(folder / "tally")}
    with airflow_on_postgres(folder, env, dags=[f"heal_{seed}" for seed in SEEDS]) as server:
        yield server


@pytest.mark.long("minutes: histories of some twenty runs each")
def test_a_healed_pipeline_is_what_a_fresh_run_gives(airflow: AirflowServer, folder: Path) -> None:
    def heal(seed: int) -> str:
        try:
            play(Tally(airflow.client, folder / "tally", f"heal_{seed}"), seed, airflow.env, folder / "histories")
        except AssertionError as error:
            return str(error)
        return ""

    # Most of the time a history waits: Airflow notices the end of a backfill up to half a minute late.
    with ThreadPoolExecutor(3) as pool:
        assert "\n\n".join(filter(None, pool.map(heal, SEEDS))) == ""
