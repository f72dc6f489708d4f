"""A pipeline that can't be loaded is told before Spark is started, with what to mend."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from cairn.command.cli import app
from cairn.driver.load_pipeline import load_pipeline
from cairn.shipping.code_version import code_reference
from cairn.shipping.ship_processor import ship_processor
from cairn.testing import PipelineTester
from pipelines.weather import READ_SCHEMA, RECORDS
from state_backend.values.errors import RetryableError, UsageError
from state_backend.values.operation_parameters import (
    REQUESTS,
    ProcessInterval,
    PromoteTrial,
    Restore,
    RunRange,
    TakeSavepoint,
    TryCode,
    Validate,
)
from state_backend.values.records import RunRef
from tests.support.drivers import driven

START = datetime(2024, 1, 1, tzinfo=UTC)

GOOD = (
    "from datetime import UTC, datetime\nfrom cairn import Pipeline\n"
    "GOOD = Pipeline(name='good', start=datetime(2024, 1, 1, tzinfo=UTC), source=print, key={key}, processor=object, output_schema='k int')\n"
    "OTHER = 5\n"
)
MODULES = {
    "loads_well": GOOD.format(key=["k"]),
    "a_part": "class Part:\n    pass\n",
    "imports_a_part": "from a_part import Part\n"
    + GOOD.format(key=["k"]).replace("'good'", "'parted'").replace("=object", "=Part"),
    "ends_early": "def source(:\n    pass\n",
    "knows_no_name": "import os\n\ndef made():\n    return undefined_name\n\nPIPELINE = made()\n",
    "lacks_a_package": "import no_such_package_here\n",
    "ends_the_process": "raise SystemExit(3)\n",
    "declares_wrongly": GOOD.format(key="'k'"),
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_module_that_changed_after_its_import_is_refused_until_it_is_imported_anew(
    modules: None, tmp_path: Path
) -> None:
    processor = load_pipeline("imports_a_part:GOOD").processor
    (tmp_path / "a_part.py").write_text("class Part:\n    def init(self, handle): ...\n")
    says = r"pipeline 'parted': .*/a_part.py has changed since this process imported it.*\nRepeat the command.* restart the kernel"
    with pytest.raises(RetryableError, match=says):
        ship_processor(processor, "parted")
    assert ship_processor(importlib.reload(sys.modules["a_part"]).Part, "parted").name == "Part"


@pytest.mark.parametrize(
    ("reference", "lines"),
    [
        ("no_such_module:P", ["there is no module 'no_such_module'", "Python searched:"]),
        ("loads_well.inner:P", ["there is no module 'loads_well.inner'"]),
        ("loads_well:MISSING", ["'loads_well:MISSING' is not there", "has these pipelines: loads_well:GOOD"]),
        ("loads_well:OTHER", ["is a int, not a Pipeline", "has these pipelines: loads_well:GOOD"]),
        ("ends_early:P", ["importing ends_early raised SyntaxError: ", "(ends_early.py, line 1)", "Fix that module"]),
        ("knows_no_name:P", ["raised NameError: name 'undefined_name' is not defined", "Fix that module"]),
        ("lacks_a_package:P", ["raised ModuleNotFoundError: No module named 'no_such_package_here'"]),
        ("ends_the_process:P", ["importing ends_the_process raised SystemExit: 3"]),
        ("declares_wrongly:GOOD", ["pipeline 'good': key must be a list of columns, as in key=['k']"]),
        ("loads_well", ["write it as module:NAME, as in pipelines.clicks:CLICKS"]),
        ("loads_well.py:GOOD", ["there is no module 'loads_well.py'"]),
        (":GOOD", ["write it as module:NAME"]),
    ],
)
def test_the_error_for_an_unloadable_pipeline_names_its_cause(modules: None, reference: str, lines: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        load_pipeline(reference)
    text = str(error.value)
    assert [line for line in lines if line not in text] == []
    assert max(map(len, text.splitlines())) < 260


def test_the_traceback_of_a_failed_import_has_only_frames_of_the_user_module(modules: None, tmp_path: Path) -> None:
    """By the command line, as the driver has it: the frames of the user's module, none of the import."""
    result = CliRunner().invoke(
        app, ["run", "--code", "knows_no_name:P", "--root", str(tmp_path / "root"), "--every", "1h"]
    )
    assert result.exit_code == 2
    assert "return undefined_name" in result.stderr and "PIPELINE = made()" in result.stderr
    assert "importlib" not in result.stderr
    assert result.stderr.splitlines()[-1] == "Fix that module. Nothing was read or computed"
    assert not (tmp_path / "root").exists()


def test_a_task_whose_pipeline_name_differs_from_the_code_is_refused(modules: None, tmp_path: Path) -> None:
    """As Airflow's operator starts the driver: the answer is in the result."""
    where: dict[str, Any] = {"root": str(tmp_path), "code": "loads_well:GOOD", "pipeline": "better"}
    run = RunRef(run_id="r", clear_number=0, try_number=1)
    requests = [
        ProcessInterval(**where, start=START, end=START + timedelta(days=1), attempt="a", run=run),
        RunRange(**where, first="2024-01-01", last="2024-01-01", every=timedelta(days=1)),
        TryCode(**where, first="2024-01-01", last="2024-01-01"),
        PromoteTrial(**where),
        TakeSavepoint(**where, folder=f"{tmp_path}/savepoint"),
        Restore(**where, savepoint=f"{tmp_path}/savepoint"),
        Validate(**where),
    ]
    assert {type(request) for request in requests} == {*REQUESTS.values()}
    for request in requests:
        error = driven(request, tmp_path / "result.json")["error"]
        assert (error["type"], error["message"]) == (
            "UsageError",
            "loads_well:GOOD is named 'good', but 'better' is expected: by the task's pipeline in Airflow, at the command line by "
            "--pipeline or CAIRN_PIPELINE; make them the same",
        )


def test_a_printed_command_names_the_pipeline_as_it_can_be_loaded(
    modules: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of an interval keeps the name: a tester's source and sink replace the declared ones."""
    declared = load_pipeline("loads_well:GOOD")
    assert code_reference(replace(declared, source=lambda *_: None, sink=print)) == "loads_well:GOOD"
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    main.MINE = replace(declared, name="mine")  # type: ignore[attr-defined]
    assert code_reference(main.MINE) is None
    tester = PipelineTester(replace(RECORDS, parallelism=1), input_schema=READ_SCHEMA, every=timedelta(hours=1))
    assert tester.run([]).record.content.code == "pipelines.weather:RECORDS"
