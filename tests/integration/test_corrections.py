"""Inputs that are corrected several times within an hour, through Airflow and Spark Connect. `tests.corrections` does it for hours."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.corrections import Corrected
from tests.support.local_stack import AirflowServer
from tests.support.shared_airflow import CORRECTED, HOURS

pytestmark = [pytest.mark.airflow, pytest.mark.spark]


def test_each_correction_is_read(airflow: AirflowServer, data: Path) -> None:
    """A driver once read what the driver before it had read within the same hour of the clock."""
    world = Corrected(folder=data / "corrected", airflow=airflow, names=CORRECTED, hours=HOURS, done=Counter())
    world.begin(at_once=2)
    assert [text for name in CORRECTED for text in world.differences(name)] == []
    assert world.correct_all(3, seed=1, at_once=2) == []
    assert set(world.done.values()) == {1}
