"""Parsing a DAG must stay cheap: what it imports is paid for by every task and by the DAG processor, again and again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from local_stack.owned_process import python_path

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "pyspark",
    "rocksdict",
    "great_expectations",
    "google.cloud",
    "pandas",
    "pyarrow",
    "cairn",
    "pipelines",
    "state_backend",
    "cairn_ui.routes",
)

# The kinds of storage, for the check of a root; and schedules, for a DAG that takes the schedule of its Pipeline. These modules import the
# standard library alone.
LIGHT = {
    "state_backend",
    "state_backend.adapters",
    "state_backend.adapters.schemes",
    "state_backend.values",
    "state_backend.values.errors",
    "state_backend.values.frozen",
    "state_backend.values.hide_secrets",
    "state_backend.values.intervals",
    "state_backend.values.parse_source",
    "state_backend.values.schedule",
    "state_backend.values.zones",
}

PROBE = """
import json, runpy, sys
from airflow.sdk import DAG
before = {{*sys.modules}}
{what}
print(json.dumps(sorted(sys.modules.keys() - before)))
"""


@pytest.mark.parametrize(
    "what",
    [
        "import cairn_operators",
        # Every process of Airflow loads plugins, with what Airflow has imported for that by then.
        "import airflow.plugins_manager; before = {*sys.modules}; import cairn_ui.plugin",
        *(f"runpy.run_path({str(dag)!r})" for dag in sorted((ROOT / "dags").glob("*.py"))),
    ],
)
@pytest.mark.long("seconds", runs_in="ci")
def test_dags_and_plugins_import_no_heavy_modules(what: str, tmp_path: Path) -> None:
    env = {**os.environ, "AIRFLOW_HOME": str(tmp_path), "PYTHONPATH": python_path(ROOT / "plugins")}
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(what=what)],
        check=False,
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    modules = json.loads(done.stdout.splitlines()[-1])
    heavy = [name for name in modules if any(name == h or name.startswith(f"{h}.") for h in HEAVY)]
    assert {*heavy} <= LIGHT
    # Modules and not seconds, which depend on who else uses the machine.
    assert 0 < len(modules) < 110, modules


@pytest.mark.long("seconds", runs_in="ci")
def test_scheduler_preloads_modules_of_its_tasks_but_no_pipeline_code(tmp_path: Path) -> None:
    """Its workers are forks of it. What it imported may be neither a user's code nor start a thread."""
    code = """
import json, sys, threading
import cairn_ui.plugin as plugin
plugin.Preload().on_starting(None)
before = {*sys.modules}
sys.argv = ["airflow", "scheduler"]
plugin.Preload().on_starting(None)
print(json.dumps([sorted(before), sorted({*sys.modules} - before), threading.active_count()]))
"""
    env = {**os.environ, "AIRFLOW_HOME": str(tmp_path), "AIRFLOW__CORE__EXECUTOR": "LocalExecutor"}
    env["PYTHONPATH"] = python_path(ROOT / "plugins", ROOT)
    done = subprocess.run([sys.executable, "-c", code], check=False, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    elsewhere, there, threads = json.loads(done.stdout.splitlines()[-1])
    needed = {"state_backend.checkpoint.commit_attempt", "cairn_operators.predecessor"}
    assert needed <= {*there} and not needed & {*elsewhere} and threads == 1
    heavy = {*HEAVY} - {"pyarrow", "state_backend"}
    found = [name for name in there if any(name == h or name.startswith(f"{h}.") for h in heavy)]
    assert not found


def test_no_module_imports_a_test_module() -> None:
    """What several tests share is in tests/support, which no test's collection depends on."""
    imported = re.compile(r"^\s*(?:from|import) tests\.(?:\w+\.)*test_\w+", re.MULTILINE)
    assert [str(file) for file in (ROOT / "tests").rglob("*.py") if imported.search(file.read_text())] == []
