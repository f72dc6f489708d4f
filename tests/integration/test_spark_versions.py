"""Each older version of PySpark gives what the environment's own gives. `make test-versions` installs the versions.

SHORT=1 CAIRN_TESTS=all pytest tests/integration/test_spark_versions.py -k pyspark-4.1.4
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from pipelines.land_flights import land
from pipelines.land_weather import FIRST_HOUR, land_weather
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.log import read_log
from tests.support.overlays import PYSPARKS, environment
from tests.support.two_weeks import PIPELINES

pytestmark = [pytest.mark.spark, pytest.mark.long("minutes, and an installed PySpark of each version")]

FIRST = date(2013, 1, 1)
DAYS, SEEDS = (2, 4) if os.environ.get("SHORT") else (14, 30)
Run = Callable[[str | None], Any]


def run(version: str | None, module: str, *arguments: object, **variables: str) -> str:
    """Run a module of tests with a version of PySpark; None: with the environment's own."""
    env = environment(version) if version else dict(os.environ)
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, env=env | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def two_weeks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("two-weeks")
    land(folder / "flights", first=FIRST, last=FIRST + timedelta(days=DAYS - 1))
    land_weather(folder / "weather", first=FIRST_HOUR, hours=24 * DAYS)
    landed = {"CAIRN_FLIGHTS": str(folder / "flights"), "CAIRN_WEATHER": str(folder / "weather")}
    return lambda version: (
        run(version, "tests.support.two_weeks", DAYS, folder / f"root-{version}", **landed)
        or results(folder / f"root-{version}")
    )


def results(root: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Return digest, watermark, hashes and output files of each day."""
    found = {}
    for name in (pipeline.name for pipeline in PIPELINES):
        contents = [record.content for record in read_log(open_storage(str(root / name))).completed()]
        assert len(contents) == DAYS
        found[name] = [
            (
                c.digest,
                c.time.watermark_ms,
                c.code_hash,
                c.input_hash,
                [_hash(root / name / f.handle.path) for f in c.outputs],
            )
            for c in contents
        ]
    return found


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def two_weeks_here(two_weeks: Run) -> Any:
    return two_weeks(None)


@pytest.mark.parametrize("version", PYSPARKS)
def test_the_examples_give_equal_results_in_each_version(two_weeks: Run, two_weeks_here: Any, version: str) -> None:
    """States, code, inputs and the bytes of all output files."""
    assert two_weeks(version) == two_weeks_here


def generated(version: str | None) -> str:
    return run(version, "tests.conformance.generator", "--seeds", SEEDS, "--outcomes")


@pytest.fixture(scope="module")
def generated_here() -> str:
    return generated(None)


@pytest.mark.parametrize("version", PYSPARKS)
def test_generated_processors_give_equal_outcomes_in_each_version(generated_here: str, version: str) -> None:
    """Output rows, states and timers, with the same clock. PySpark 4.0 has no operator of rows to compare with."""
    assert generated(version).splitlines() == generated_here.splitlines()
