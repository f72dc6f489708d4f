"""Inputs that are corrected several times within an hour, through Airflow and Spark Connect. `tests.corrections` does it for hours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.corrections import FIRST_OF_CHAIN, corrected

pytestmark = [pytest.mark.airflow, pytest.mark.spark]


def test_each_correction_is_read(tmp_path: Path) -> None:
    """A driver once read what the driver before it had read within the same hour of the clock."""
    names = ("c_lookup", "c_folder", FIRST_OF_CHAIN, "c_chained")
    with corrected(tmp_path / "all", names, hours=2) as world:
        world.begin(at_once=2)
        assert [text for name in names for text in world.differences(name)] == []
        assert world.correct_all(6, seed=1, at_once=2) == []
        assert set(world.done.values()) == {2}
