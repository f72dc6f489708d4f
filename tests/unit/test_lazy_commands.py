"""The table of commands, and the modules that a call of `cairn` imports."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cairn.command.cli import COMMANDS, app
from cairn.command.lazy_group import Row
from tests.support.checkpoints import PIPELINE
from tests.support.real_shards import RealPipeline

HEAVY = (
    "pyspark",
    "pyarrow",
    "numpy",
    "pandas",
    "rocksdict",
    "google",
    "airflow",
    "great_expectations",
    "requests",
    "cloudpickle",
    "rich",
)


@pytest.mark.parametrize("row", COMMANDS, ids=lambda row: row.name)
def test_a_command_s_help_is_its_row_and_then_its_docstring(row: Row) -> None:
    assert row.command().help == "\n\n".join(filter(None, (row.help, inspect.getdoc(row.load()))))


@pytest.mark.parametrize("arguments", ["--help", "checkpoints", "status", "plan", "key a", "key a --history"])
@pytest.mark.long("half a second", runs_in="ci")
def test_a_light_command_imports_no_heavy_module(tmp_path: Path, arguments: str) -> None:
    RealPipeline(tmp_path).run(1, "a1", {"a": 1})
    where = () if arguments == "--help" else ("--root", str(tmp_path), "--pipeline", PIPELINE)
    probe = (
        "import sys\n"
        "from cairn.command.cli import main\n"
        "try:\n    main()\n"
        f"finally:\n    print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)\n"
    )
    words = [sys.executable, "-c", probe, *arguments.split(), *where]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    needed = {"--help": ["rich"], "key a": ["rocksdict"], "key a --history": ["pyarrow", "numpy", "rocksdict"]}
    assert done.stderr.strip() == str(needed.get(arguments, [])) and done.stdout


@pytest.mark.long("half a second", runs_in="ci")
def test_completion_offers_names_without_the_commands_modules() -> None:
    probe = (
        "import os, sys\n"
        "os.environ |= {'_CAIRN_COMPLETE': 'complete_bash', 'COMP_WORDS': 'cairn s', 'COMP_CWORD': '1'}\n"
        "from cairn.command.cli import app\n"
        "try:\n    app(prog_name='cairn')\n"
        "finally:\n    print([m for m in sys.modules if m.startswith('state_backend.checkpoint')], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True)
    assert set(done.stdout.split()) == {row.name for row in COMMANDS if row.name.startswith("s")}
    assert done.stderr.strip() == "[]"


def test_help_all_shows_and_counts_the_commands_and_their_options() -> None:
    """More than 26 commands or 61 options is a decision. An option's name has one default, but for two."""
    said = CliRunner().invoke(app, ["--help-all"]).stdout
    shown = {part.split("\n")[0]: part for part in f"\n{said}".split("\ncairn ")[1:]}
    assert shown.keys() == {row.name for row in COMMANDS}
    defaults: dict[str, set[str]] = {}
    for row in COMMANDS:
        for one in (one for one in row.command().params if one.name != "help"):
            option = one.param_type_name == "option"
            name = one.opts[0] if option else one.metavar
            assert name in shown[row.name] and one.help in shown[row.name], (row.name, name)
            if option:
                defaults.setdefault(name, set()).update([str(one.default)] if one.default else [])
    assert said.splitlines()[-1] == f"{len(COMMANDS)} commands, {len(defaults)} options"
    assert len(COMMANDS) <= 26 and len(defaults) <= 61
    assert {name for name, of in defaults.items() if len(of) > 1} == {"--limit", "--reprocess"}
