"""The tests that meet PySpark or Airflow, under each version that Cairn supports.

    make test-versions                            # hours
    VERSIONS=4.1.4 SHORT=1 make test-versions     # what CI runs: minutes

VERSIONS: versions of PySpark, those of `tests/support/spark.lock` or the environment's own. AIRFLOWS: for each other Airflow, the Python of an
environment that has it. WORKERS: processes of pytest. The exit code is 1 if a test fails under any version.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.metadata import version

from tests.support.spark_overlays import LOCKED, REPOSITORY, environment, install

OWN = version("pyspark")
ACROSS = "tests/integration/test_spark_versions.py"
LONG = [
    "tests/conformance",
    *(
        f"tests/integration/test_{name}.py"
        for name in ("routing", "differential", "input_types", "pandas", "processor_forms")
    ),
    *(
        f"tests/integration/test_{name}.py"
        for name in ("pipeline", "keyed_state", "streaming_moves", "replay_spark", "weather")
    ),
    "tests/integration/test_connect.py",
    "tests/contract/test_sinks.py",
    "tests/integration/test_airflow_kills.py::test_kill_9_of_the_driver",
    "tests/integration/test_airflow_kills.py::test_kill_9_of_the_spark_server",
]
SHORT = [
    "tests/integration/test_routing.py",
    "tests/integration/test_differential.py::test_contract_of_the_row_api",
    "tests/integration/test_pandas.py",
    "tests/integration/test_replay_spark.py",
    "tests/integration/test_connect.py::test_a_driver_sees_nothing_of_the_driver_before",
    "tests/integration/test_connect.py::test_errors_and_crashes_of_user_code_come_through_the_server",
]
AIRFLOW = [f"tests/integration/test_{name}.py" for name in ("airflow", "calendars", "heal", "airflow_kills")]


def run(name: str, tests: list[str], *arguments: str, env: dict[str, str], python: str = sys.executable) -> bool:
    """Run the tests, and say how they ended."""
    started = time.monotonic()
    parallel = ["-n", os.environ.get("WORKERS") or "3", "--max-worker-restart", "0", "--dist", "loadfile"]
    command = [python, "-m", "pytest", "-q", *parallel, "--no-loadscope-reorder", *tests, *arguments]
    print(f"{name}: {' '.join(tests)}", flush=True)
    ended = subprocess.run(command, env=env, cwd=REPOSITORY, check=False).returncode == 0
    print(f"{name}: {'passed' if ended else 'FAILED'} in {time.monotonic() - started:.0f} s", flush=True)
    return ended


def main() -> int:
    short = bool(os.environ.get("SHORT"))
    versions = (os.environ.get("VERSIONS") or " ".join([*LOCKED, OWN])).split()
    if unknown := [name for name in versions if name not in (*LOCKED, OWN)]:
        sys.exit(
            f"VERSIONS names {', '.join(unknown)}; tests/support/spark.lock and this environment have {', '.join([*LOCKED, OWN])}"
        )
    everything = {**os.environ, "CAIRN_TESTS": "all"}
    passed = []
    for name in versions:
        env = everything | ({"CAIRN_TESTS": "ci"} if short else {})
        if name != OWN:
            install(name)
            env = environment(name, env)
        passed.append(run(f"PySpark {name}", SHORT if short else LONG, env=env))
        if name != OWN:
            passed.append(run(f"PySpark {name} beside {OWN}", [ACROSS], "-k", name, env=everything))
    for python in os.environ.get("AIRFLOWS", "").split():
        passed.append(run(f"Airflow of {python}", AIRFLOW, env=everything, python=python))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
