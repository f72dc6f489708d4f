"""The wheel in a blank virtual environment and a blank AIRFLOW_HOME outside of this repository: three days with what Airflow itself
ships as defaults. Only with CAIRN_TESTS=all: each Python takes minutes, and has its packages installed.

    CAIRN_TESTS=all pytest tests/integration/test_wheel.py            # every Python of CAIRN_PYTHONS, or 3.11 to 3.13 as far as here
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.printed_commands import run_printed
from tests.support.sums_pipeline import WITHOUT_FACTOR
from tests.support.wheel import UV, build_wheel

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("3.11", "3.12", "3.13")

# Beside the pipeline, in a folder of a default name, and with nothing of this repository.
DAG = """
# An Airflow DAG.
from datetime import UTC, datetime
from cairn_operators import stateful_pipeline

dag = stateful_pipeline("sums", code="sums_pipeline:SUMS", root={root!r}, schedule="@daily", start_date=datetime(2024, 1, 1, tzinfo=UTC),
                        spark_conf={{"spark.sql.shuffle.partitions": 2}})
"""


def pythons() -> list[str]:
    """Interpreters of the versions that are here."""
    if given := os.environ.get("CAIRN_PYTHONS"):
        return given.split(os.pathsep)
    found = []
    for version in VERSIONS:
        pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        found += [str(pyenv[-1])] if pyenv else [path for path in [shutil.which(f"python{version}")] if path]
    return found


def ran(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.mark.long("half a minute: builds the wheel", runs_in="ci")
def test_the_wheel_brings_templates_and_static_files(tmp_path: Path) -> None:
    folders = {"cairn": "jobs/", "cairn_ui": "plugins/"}
    listed = ran("git", "ls-files", *(folder + package for package, folder in folders.items()), cwd=ROOT).split()
    data = {path.partition("/")[2] for path in listed if not path.endswith(".py")}
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(build_wheel(tmp_path)) as wheel:
        assert data <= {*wheel.namelist()}
        wheel.extractall(unpacked)
    for folder in ("jobs/pipelines", "dags"):
        (tmp_path / folder).mkdir(parents=True)
    code = "import cairn, sys; from cairn.command.cli import main; print(cairn.__file__); main()"
    arguments = ("new", "clicks", "--template", "windows", "--yes", "--folder", tmp_path)
    said = ran(sys.executable, "-c", code, *arguments, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(unpacked)})
    assert (
        said.startswith(f"{unpacked}/")
        and "class Hourly(TumblingWindow)" in (tmp_path / "jobs/pipelines/clicks.py").read_text()
    )


@pytest.mark.spark
@pytest.mark.long("half a minute of Spark")
def test_the_documented_spark_job_runs_with_the_wheel(tmp_path: Path) -> None:
    """The program of docs/platforms.md by the commands of the page. Spark finds Cairn and the pipeline in the files that it is given."""
    wheel = build_wheel(tmp_path)
    page = (ROOT / "docs" / "platforms.md").read_text()
    program = page.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "cairn_job.py").write_text(
        program + "import cairn, pipelines\nprint(cairn.__file__, pipelines.__path__)\n"
    )
    pipelines = tmp_path / "jobs" / "pipelines"
    pipelines.mkdir(parents=True)
    (pipelines / "__init__.py").touch()
    code = WITHOUT_FACTOR.replace("SUMS = ", "CLICKS = ").replace('amount long")', 'amount long"), {"version": 1}', 1)
    (pipelines / "clicks.py").write_text(code)
    (zipped,) = re.findall(r"^\$ (python -m zipfile .*)$", page, re.MULTILINE)
    run_printed(zipped, tmp_path)
    (submitted,) = re.findall(r"^\$ (spark-submit .*)$", page, re.MULTILINE)
    submitted = submitted.replace("cairn_state-VERSION-py3-none-any.whl", wheel.name).replace("/data", str(tmp_path))
    said = run_printed(submitted, tmp_path, SPARK_LOCAL_IP="127.0.0.1", PYTHONPATH="")
    assert "checkpoint 1, because the interval has no result yet" in said
    assert f"/{wheel.name}/cairn/__init__.py" in said and "/pipelines.zip/pipelines" in said
    assert "keeps checkpoint 1: " in run_printed(submitted, tmp_path, SPARK_LOCAL_IP="127.0.0.1", PYTHONPATH="")


@pytest.mark.long("minutes: installs the wheel for each Python")
@pytest.mark.airflow
@pytest.mark.spark
@pytest.mark.parametrize("python", pythons())
def test_the_wheel_processes_three_days_in_a_blank_airflow(tmp_path: Path, python: str) -> None:
    venv, home = tmp_path / "a venv", tmp_path / "a home"
    wheel = build_wheel(tmp_path)
    ran(python, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    wanted = f"cairn-state[airflow,spark] @ {wheel.as_uri()}"
    ran(UV, "pip", "install", "-q", "--python", venv / "bin/python", wanted, cwd=tmp_path)

    (home / "dags").mkdir(parents=True)
    (home / "dags/sums_pipeline.py").write_text(WITHOUT_FACTOR)
    (home / "dags/sums.py").write_text(DAG.format(root=str(tmp_path / "state")))
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AIRFLOW", "CAIRN", "PYTHON", "PYSPARK", "SPARK"))
    }
    env |= {"AIRFLOW_HOME": str(home), "PATH": f"{venv / 'bin'}:{env['PATH']}", "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    airflow = venv / "bin/airflow"
    ran(airflow, "db", "migrate", cwd=tmp_path, env=env)
    assert "cairn" in ran(airflow, "providers", "list", cwd=tmp_path, env=env)
    ran(airflow, "connections", "add", "cairn_spark", "--conn-type", "spark", "--conn-host", "local[1]",
        cwd=tmp_path, env=env)  # fmt: skip
    with sqlite3.connect(home / "airflow.db") as database:
        assert database.execute("SELECT conn_type FROM connection WHERE conn_id = 'cairn_spark'").fetchall() == [
            ("spark",)
        ]
    for day in (2, 3, 4):  # by hand: of the day that ended last
        ran(airflow, "dags", "test", "sums", f"2024-01-0{day}", cwd=tmp_path, env=env)

    read = (
        "import json, sys; from state_backend.adapters.open_storage import open_storage;"
        "from state_backend.checkpoint.log import read_log;"
        "print(json.dumps([[r.id, str(r.content.interval), r.content.totals.entries] for r in "
        "read_log(open_storage(sys.argv[1])).completed()]))"
    )
    records = json.loads(ran(venv / "bin/python", "-c", read, tmp_path / "state/sums", cwd=tmp_path, env=env))
    assert [(number, entries) for number, _, entries in records] == [(1, 2), (2, 2), (3, 2)]
    shown = ran(venv / "bin/cairn", "export", str(tmp_path / "state"), "sums", "--help", cwd=tmp_path, env=env)
    assert "Usage" in shown


@pytest.mark.long("minutes: installs both archives, each with PySpark")
@pytest.mark.spark
def test_release_check_runs_the_readme_pipeline_from_both_archives(tmp_path: Path) -> None:
    """`make release-check` in a clone of the commit, with this Python."""
    ran("git", "clone", "--quiet", ROOT, tmp_path / "clone", cwd=tmp_path)
    (tmp_path / "clone/.venv").symlink_to(Path(sys.executable).parents[1])
    env = {**os.environ, "PYTHONS": sys.executable}
    said = ran("make", "release-check", "--assume-old=setup", cwd=tmp_path / "clone", env=env)
    assert said.count("runs README's pipeline") == 2
    assert len([*(tmp_path / "clone/dist").iterdir()]) == 2
