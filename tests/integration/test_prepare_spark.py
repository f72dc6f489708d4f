"""The archive of Spark's classes: written by the command, used by JVMs, and ignored where it does not fit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from cairn.command.cli import app
from cairn.spark.class_archive import archive_path, with_jvm_options
from cairn.spark.server_command import server_environment

pytestmark = [pytest.mark.spark]

SESSION = """
import sys
from pathlib import Path
sys.prefix = sys.argv[1]
from cairn.spark.session import connect
session = connect("local[1]", "t")
rows = session.range(3).count()
jvm = session.sparkContext._jvm.ProcessHandle.current().pid()
maps = Path(f"/proc/{jvm}/maps").read_text()
print(rows, sorted({line.split()[-1] for line in maps.splitlines() if line.endswith(".jsa")}))
session.stop()
"""


def run_session() -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SESSION, sys.prefix]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)


@pytest.mark.long("a minute")
def test_prepare_writes_a_class_archive_that_sessions_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "share/cairn").mkdir(parents=True)
    (tmp_path / "share/cairn/spark-classes-of-another-java.jsa").touch()
    result = CliRunner().invoke(app, ["spark", "--prepare"])
    archive = archive_path()
    assert archive is not None and archive.is_relative_to(tmp_path)
    assert result.exit_code == 0 and result.stdout.startswith(f"Spark's classes are in {archive} (")
    assert list(archive.parent.iterdir()) == [archive] and archive.stat().st_size > 50_000_000
    assert str(archive) in run_session().stdout


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_session_maps_the_archive_of_its_environment(spark: SparkSession) -> None:
    archive = archive_path()
    if archive is None or not archive.is_file():
        pytest.skip("no archive: make test and cairn spark --prepare write it")
    said = run_session().stdout
    assert said.startswith("3 [") and str(archive) in said


def test_a_class_archive_that_is_invalid_for_the_jvm_is_ignored_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    archive = archive_path()
    assert archive is not None
    archive.parent.mkdir(parents=True)
    archive.write_bytes(b"of another Java" * 1000)
    environment = with_jvm_options(server_environment("t"))
    assert str(archive) in environment["SPARK_SUBMIT_OPTS"]
    submit = str(Path(environment["SPARK_HOME"], "bin/spark-submit"))
    ran = subprocess.run(
        [submit, "--version"], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert "version 4" in ran.stderr and "cds" not in ran.stdout + ran.stderr and "archive" not in ran.stderr
