"""The commands that a checkpoint's page prints to look up one key, run as they are printed."""

from __future__ import annotations

import html
import re
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

from cairn.command.cli import app as cli
from cairn.testing import PipelineTester
from cairn_ui.pipelines_of_dags import PipelineRef
from state_backend.adapters.local_storage import LocalStorage
from tests.support.accounts import DAYS, SCHEMA, accounts
from tests.support.checkpoints import day

pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx` with")
ASKED = {
    "cairn key KEY 2": '{"total": 16, "due_ms": 1704412800000}',
    "cairn key KEY --history": "~ balance: total 5 -> 16",
    "cairn replay KEY 2": "2024-01-02",
}


@pytest.mark.long("seconds", runs_in="ci")
def test_the_key_commands_of_a_checkpoint_page_work_as_printed(tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    from tests.support.shown_app import shown_app

    tester = PipelineTester(accounts(), input_schema=SCHEMA, root=f"file://{tmp_path}")
    for n in (1, 2, 3):
        tester.run(DAYS[n], day(n))
    ref = PipelineRef(name="accounts", root=f"file://{tmp_path}", dag_id="accounts", code="tests.support.replayed:ROW")
    with shown_app({"accounts": LocalStorage(tmp_path / "accounts")}, [ref], refused={}) as app:
        page: Any = TestClient(app, cookies={"_token": "admin"}).get(
            f"/cairn/checkpoints/p/{quote(ref.key)}/checkpoint/2"
        )
    printed = [html.unescape(command) for command in re.findall(r'data-copy="(cairn [^"]*)"', page.text)]
    for begins, says in ASKED.items():
        (command,) = [one for one in printed if one.startswith(f"{begins} --root file://{tmp_path}")]
        done = CliRunner().invoke(cli, shlex.split(command.replace("KEY", "ann"))[1:])
        assert done.exit_code == 0 and says in done.output, done.output
