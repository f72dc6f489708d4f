"""Where the archive of Spark's classes is, and the environment in which a JVM uses it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cairn.command import prepare_spark
from cairn.spark.class_archive import archive_path, folder_for_new, install, jvm_options_in_use


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Java, and a Python environment for its archive."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    java = tmp_path / "jdk/bin/java"
    java.parent.mkdir(parents=True)
    java.touch(mode=0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    return java


def write_archive() -> Path:
    path = archive_path()
    assert path is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_a_server_that_ends_has_the_time_to_write_its_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = """if True:
        import pathlib, signal, sys, time
        def end(*_): time.sleep(0.1), pathlib.Path("archive").touch(), sys.exit()
        signal.signal(signal.SIGTERM, end), pathlib.Path("ready").touch(), signal.pause()"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare_spark, "server_command", lambda *_: [sys.executable, "-c", server])
    monkeypatch.setattr(prepare_spark, "answers", lambda _: Path("ready").exists())
    monkeypatch.setattr(
        prepare_spark.subprocess, "run", lambda *_, **__: prepare_spark.subprocess.CompletedProcess([], 0)
    )
    prepare_spark._record(tmp_path / "archive", tmp_path)


def test_another_java_has_another_archive(home: Path) -> None:
    first = archive_path()
    home.write_text("updated")
    assert archive_path() not in (None, first)
    home.unlink()
    assert archive_path() is None


def test_java_is_found_as_spark_finds_it(home: Path) -> None:
    by_home = archive_path()
    assert archive_path({"PATH": str(home.parent)}) == by_home
    assert archive_path({"PATH": ""}) is None


@pytest.mark.parametrize("before", [None, "-Dmine=1"])
def test_jvm_options_of_the_user_are_kept(home: Path, monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    if before is None:
        monkeypatch.delenv("SPARK_SUBMIT_OPTS", raising=False)
    else:
        monkeypatch.setenv("SPARK_SUBMIT_OPTS", before)
    with jvm_options_in_use():
        assert "-XX:SharedArchiveFile" not in os.environ["SPARK_SUBMIT_OPTS"], "there is no archive yet"
    path = write_archive()
    with jvm_options_in_use():
        options = os.environ["SPARK_SUBMIT_OPTS"].split()
        assert options.index("-XX:Tier4CompileThreshold=600000") < options.index(before or options[-1])
        assert f"-XX:SharedArchiveFile={path}" in options
    assert os.environ.get("SPARK_SUBMIT_OPTS") == before


def test_leftovers_of_a_killed_command_are_deleted_an_hour_later(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_archive()
    left, running = (path.parent / f"new-{name}" for name in ("left", "running"))
    for folder, age_s in ((left, 3660), (running, 3540)):
        folder.mkdir()
        (folder / "half.jsa").touch()
        os.utime(folder, (0, path.stat().st_mtime - age_s))
    with folder_for_new(path) as folder:
        assert not left.exists() and running.exists() and folder.parent == path.parent
        (folder / path.name).write_text("new")
        (other := path.with_name("spark-classes-of-another-java.jsa")).touch()
        synced: list[tuple[str, int]] = []
        monkeypatch.setattr(os, "fsync", lambda file: synced.append((path.read_text(), os.fstat(file).st_ino)))
        install(folder / path.name, path)
    assert synced == [("", path.stat().st_ino)], "an archive is on the disk before it has its name"
    assert path.read_text() == "new" and not other.exists() and not folder.exists()
