"""``cairn new`` in a copy of the repository: what it writes passes its own test, is as the formatter has it, and runs by the commands
that it prints."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cairn.command.cli import app
from cairn.command.new_pipeline import INTERFACES, Form
from state_backend.adapters.open_storage import open_storage
from tests.support.coordinator import Coordinator
from tests.support.layout import copy_layout, run_there
from tests.support.printed_commands import run_printed

MADE = {
    "clicks": ["--schedule", "hourly", "--key", "user", "--template", "row"],
    "taps": ["--schedule", "daily", "--key", "device", "--template", "pandas"],
    "views": ["--schedule", "hourly", "--key", "user", "--template", "arrow"],
}


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_layout(tmp_path_factory.mktemp("layout"))


@pytest.fixture(scope="module")
def printed(layout: Path) -> dict[str, str]:
    """What each call said."""
    said = {}
    for name, options in MADE.items():
        result = CliRunner().invoke(app, ["new", name, *options, "--yes", "--folder", str(layout)])
        assert result.exit_code == 0, result.output
        said[name] = result.output
    return said


@pytest.fixture(scope="module")
def ready_made(layout: Path) -> list[str]:
    """The names of pipelines of all templates; the schedules take turns."""
    names = []
    for name, template in enumerate(form for form in Form if form not in INTERFACES):
        schedule = ("hourly", "daily")[name % 2]
        names.append(f"ready_{template.value}")
        options = ["--template", template.value, "--schedule", schedule, "--yes", "--folder", str(layout)]
        result = CliRunner().invoke(app, ["new", names[-1], *options])
        assert result.exit_code == 0, result.output
    return names


def run(layout: Path, command: list[str], **more: str) -> str:
    done = run_there(layout, command, **more)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}"
    return done.stdout


def commands_in(text: str) -> list[list[str]]:
    return [shlex.split(line) for line in re.findall(r"^  (?:PYTHONPATH=\S+ )?(\.venv/.*)$", text, re.MULTILINE)]


def test_the_tests_of_a_new_pipeline_pass_by_the_printed_commands(layout: Path, printed: dict[str, str]) -> None:
    (test, *_), *others = map(commands_in, printed.values())
    files = [commands[0][-1] for commands in others]
    assert "10 passed" in run(layout, [*test, *files, "-q"])


@pytest.mark.long("half a minute: linters and mypy")
def test_the_files_of_a_new_pipeline_pass_the_linters_and_mypy(layout: Path, printed: dict[str, str]) -> None:
    files = [
        f"{folder}{name}.py" for name in printed for folder in ("jobs/pipelines/", "dags/", "tests/pipelines/test_")
    ]
    bin_ = Path(sys.prefix) / "bin"
    run(layout, [f"{bin_}/ruff", "check", *files])
    run(layout, [f"{bin_}/ruff", "format", "--check", *files])
    run(layout, [f"{bin_}/mypy", "--config-file", "pyproject.toml", *files[::3]])


@pytest.mark.long("half a minute", runs_in="ci")
def test_the_tests_of_each_template_pass_and_its_files_pass_the_linters(layout: Path, ready_made: list[str]) -> None:
    tests = [f"tests/pipelines/test_{name}.py" for name in ready_made]
    said = run(layout, [".venv/bin/python", "-m", "pytest", *tests, "-q"])
    assert re.search(r"^\d+ passed", said, re.MULTILINE), said
    files = [f"{folder}/{name}.py" for name in ready_made for folder in ("jobs/pipelines", "dags")] + tests
    bin_ = Path(sys.prefix) / "bin"
    run(layout, [f"{bin_}/ruff", "check", *files])
    run(layout, [f"{bin_}/ruff", "format", "--check", *files])


@pytest.mark.spark
@pytest.mark.long("half a minute", runs_in="ci")
def test_a_pipeline_of_each_template_runs(layout: Path, ready_made: list[str]) -> None:
    """All in one process, which starts Spark once."""
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom cairn.command.cli import app\n"
        "for n, name in enumerate(sys.argv[1:]):\n"
        "    every = ('1h', '1d')[n % 2]\n"
        "    code = f'pipelines.{name}:{name.upper()}'\n"
        f"    options = ['--every', every, '--count', '2', '--root', 'file://{layout}/data/ready']\n"
        "    result = CliRunner().invoke(app, ['run', '--code', code, *options])\n"
        "    print(name, result.exit_code, result.output)\n"
        "    assert result.exit_code == 0, result.exception\n"
    )
    said = run(layout, [sys.executable, "-c", code, *ready_made])
    # The daily sample data has no rows on its second day.
    rows = re.findall(r"\[2024\S+ \S+ checkpoint (\d), ([\d,]+) rows in", said)
    assert [number for number, _ in rows] == ["1", "2"] * len(ready_made), said
    assert "0" not in [count for number, count in rows if number == "1"], said
    assert "stateful_source" not in said


@pytest.mark.airflow
def test_new_dags_load_in_airflow(layout: Path, printed: dict[str, str], ready_made: list[str], tmp_path: Path) -> None:
    names = ", ".join([*printed, *ready_made])
    loads = f"import sys; sys.path.insert(0, 'dags'); import {names}; print([m.dag.dag_id for m in ({names})])"
    found = run(layout, [sys.executable, "-W", "ignore", "-c", loads], AIRFLOW_HOME=str(tmp_path))
    assert found.splitlines()[-1] == str([*printed, *ready_made])


@pytest.mark.spark
@pytest.mark.long("a minute; docs/first-pipeline.md runs the same commands")
def test_the_printed_command_runs_the_first_interval(layout: Path, printed: dict[str, str]) -> None:
    _, first, listed = commands_in(printed["clicks"])
    said = run(layout, [*first, "--count", "3"])
    lines = [line for line in said.splitlines() if line.startswith("[2024")]
    assert re.fullmatch(
        r"\[2024-01-01T00:00:00Z, 2024-01-01T01:00:00Z\): checkpoint 1, \d\d rows in, 0 of them late, 0 out, \d+ entries of state and timers",
        lines[0],
    )
    assert len(lines) == 3
    root = f"file://{layout}/data/state"
    assert [r.id for r in Coordinator(open_storage(f"{root}/clicks"), "clicks").log().completed()] == [1, 2, 3]
    assert "2024-01-01T02:00Z to 03:00Z" in run(layout, listed)
    # Left to itself it goes on where the newest ends, by the newest one's length.
    assert "[2024-01-01T03:00:00Z, 2024-01-01T04:00:00Z): checkpoint 4" in run(layout, first[:4] + first[6:])


@pytest.mark.spark
def test_a_garbage_input_file_is_reported_without_a_stack_trace(layout: Path, printed: dict[str, str]) -> None:
    file = layout / "data" / "clicks" / "2024-01-01T00.json"
    whole = file.read_bytes()
    file.write_text("garbage {\n")
    try:
        command = [
            ".venv/bin/cairn",
            "run",
            "--code",
            "pipelines.clicks:CLICKS",
            "--every",
            "1h",
            "--root",
            f"file://{layout}/garbage",
        ]
        done = run_there(layout, command)
    finally:
        file.write_bytes(whole)
    assert done.returncode == 1, done.stdout
    said = done.stdout[done.stdout.index("For Spark's own stack trace, run") :].splitlines()
    assert 3 <= len(said) <= 6 and ".scala" not in done.stdout and ".java" not in done.stdout, done.stdout
    assert said[1].startswith("SourceError: pipeline 'clicks', [2024-01-01T00:00:00Z, ") and file.name in said[1]
    assert all(line.startswith("Because: ") for line in said[2:-1])
    assert said[-1].startswith("Fix the file, or fix the schema and options in the source")


def test_a_new_pipeline_is_refused_if_one_of_its_files_exists(layout: Path, printed: dict[str, str]) -> None:
    (layout / "dags" / "other.py").write_text("mine")
    before = sorted(layout.rglob("*"))
    result = CliRunner().invoke(app, ["new", "other", "--yes", "--folder", str(layout)])
    assert result.exit_code == 2
    assert result.stderr.startswith("UsageError: nothing was written, since these files exist already:\n")
    assert f"  {layout}/dags/other.py\n" in result.stderr
    assert sorted(layout.rglob("*")) == before
    assert (layout / "dags" / "other.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["Clicks"], "name 'Clicks' can't be used"),
        (["class"], "name 'class' can't be used"),
        (["events", "--key", "at"], "--key 'at' is the name of another column of the sample data"),
        ([], "a name is needed"),
        (["events", "--template", "topn", "--key", "player"], "--key 'player' is the name of another column"),
        (["events", "--template", "join", "--key", "kind"], "--key 'kind' is the name of another column"),
    ],
)
def test_invalid_names_and_conflicting_key_columns_are_refused(layout: Path, arguments: list[str], why: str) -> None:
    result = CliRunner().invoke(app, ["new", *arguments, "--yes", "--folder", str(layout)])
    assert (result.exit_code, why in result.stderr) == (2, True)


def test_a_wrong_answer_is_asked_again_with_the_choices(layout: Path) -> None:
    answers = "asked\nweekly\ndaily\ndevice\n\n"
    result = CliRunner().invoke(app, ["new", "--folder", str(layout)], input=answers)
    assert result.exit_code == 0, result.output
    assert "'weekly' is not one of hourly, daily" in result.output
    text = (layout / "jobs" / "pipelines" / "asked.py").read_text()
    assert 'key=["device"]' in text
    assert 'api="row"' in text
    assert len(list((layout / "data" / "asked").iterdir())) == 3


def test_the_printed_command_finds_the_module_in_the_environment_of_another_clone(tmp_path: Path) -> None:
    for folder in ("jobs/pipelines", "dags"):
        (tmp_path / folder).mkdir(parents=True)
    result = CliRunner().invoke(app, ["new", "clicks", "--yes", "--folder", str(tmp_path)])
    (command,) = re.findall(r"^  (.*cairn run .*)$", result.stdout, re.MULTILINE)
    assert command.startswith(f"PYTHONPATH={tmp_path}/jobs cairn run --code pipelines.clicks:CLICKS ")
    dry = "--from 2024-01-01 --to 2024-01-01 --reprocess none --dry-run"
    assert "1 of 1 intervals would be computed" in run_printed(f"{command} {dry}", tmp_path)


def test_outside_a_repository_the_error_names_the_folder_to_go_to(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["new", "clicks", "--yes", "--folder", str(tmp_path)])
    assert (result.exit_code, "go to the repository's folder" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([], "give the length of an interval with `every`, as in --every 1d"),
        (["--every", "1x"], "not a duration"),
        (["--every", "1h", "--from", "yesterday"], "is not a date or time"),
    ],
)
def test_cairn_run_refuses_missing_or_invalid_interval_options(tmp_path: Path, options: list[str], why: str) -> None:
    result = CliRunner().invoke(
        app, ["run", "--code", "pipelines.aircraft:AIRCRAFT", "--root", str(tmp_path), *options]
    )
    assert (result.exit_code, why in result.stderr) == (2, True)
