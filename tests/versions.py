"""The tests that meet PySpark or Airflow, under each version that Cairn supports.

    make test-versions                                                     # hours
    VERSIONS="pyspark-4.1.4 airflow-3.2.2" SHORT=1 make test-versions      # minutes

VERSIONS: names of `tests/support/overlays`, or the environment's own versions. WORKERS: processes of pytest. The exit code is 1 if a test
fails under any version.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.metadata import version

from tests.support.overlays import LOCKS, REPOSITORY, environment, install

OWN = [f"pyspark-{version('pyspark')}", f"airflow-{version('apache-airflow-core')}"]
ACROSS = "tests/integration/test_spark_versions.py"
LONG = [
    "tests/conformance",
    *(
        f"tests/integration/test_{name}.py"
        for name in ("routing", "differential", "input_types", "input_layout", "pandas", "processor_forms")
    ),
    *(
        f"tests/integration/test_{name}.py"
        for name in ("pipeline", "keyed_state", "streaming_moves", "replay_spark", "weather")
    ),
    "tests/integration/test_connect.py",
    *(f"tests/contract/test_{name}.py" for name in ("sinks", "sink_late_rows", "sink_checks", "iceberg_sink")),
    "tests/integration/test_airflow_kills.py::test_after_kill_9_of_the_driver_a_retry_succeeds",
    "tests/integration/test_airflow_kills.py::test_after_kill_9_of_the_spark_server_a_retry_succeeds",
]
SHORT = [
    "tests/integration/test_routing.py",
    "tests/integration/test_differential.py::test_row_api_calls_equal_sparks_except_deleted_timers_and_wrong_types",
    "tests/integration/test_pandas.py",
    "tests/integration/test_replay_spark.py",
    "tests/integration/test_connect.py::test_a_driver_sees_nothing_of_the_driver_before",
    "tests/integration/test_connect.py::test_errors_and_crashes_of_user_code_come_through_the_server",
]
TESTS = {
    "pyspark": (LONG, SHORT),
    "airflow": (
        [
            f"tests/integration/test_{name}.py"
            for name in ("airflow", "order_of_days", "calendars", "heal", "airflow_kills")
        ],
        [
            "tests/integration/test_airflow.py",
            "tests/integration/test_order_of_days.py",
            *(f"tests/unit/test_{name}.py" for name in ("operators", "checkpoint_operators", "operator_connections")),
        ],
    ),
}


def run(name: str, tests: list[str], *arguments: str, env: dict[str, str]) -> bool:
    """Run the tests, and say how they ended."""
    started = time.monotonic()
    parallel = ["-n", os.environ.get("WORKERS") or "3", "--max-worker-restart", "0", "--dist", "loadfile"]
    command = [sys.executable, "-m", "pytest", "-q", *parallel, "--no-loadscope-reorder", *tests, *arguments]
    print(f"{name}: {' '.join(tests)}", flush=True)
    ended = subprocess.run(command, env=env, cwd=REPOSITORY, check=False).returncode == 0
    print(f"{name}: {'passed' if ended else 'FAILED'} in {time.monotonic() - started:.0f} s", flush=True)
    return ended


def main() -> int:
    short = bool(os.environ.get("SHORT"))
    known = [*LOCKS, *OWN]
    names = (os.environ.get("VERSIONS") or " ".join(known)).split()
    if unknown := [name for name in names if name not in known]:
        sys.exit(
            f"VERSIONS names {', '.join(unknown)}; tests/support/overlays and this environment have {', '.join(known)}"
        )
    everything = {**os.environ, "CAIRN_TESTS": "all"}
    passed = []
    for name in names:
        kind = name.partition("-")[0]
        env = everything | ({"CAIRN_TESTS": "ci"} if short else {})
        if name in LOCKS:
            install(name)
            env = environment(name, env)
        passed.append(run(name, TESTS[kind][short], env=env))
        if name in LOCKS and kind == "pyspark":
            passed.append(run(f"{name} beside {OWN[0]}", [ACROSS], "-k", name, env=everything))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
