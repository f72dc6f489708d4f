"""Every code block of these pages is run as it stands there, one after the other, in a copy of the repository.

A console block is lines that begin with ``$``, each followed by what it says, in order, as far as the page quotes it; … stands for anything.
A block that is not run has a reason above it: ``<!-- not run: … -->``.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cairn.command.cli import app
from tests.support.doc_blocks import PAGES, Block, block_with, blocks_of, commands_in, quoted_in
from tests.support.layout import copy_layout, environment_of, run_there
from tests.support.terminal import Terminal

# Pages of which only some blocks are run: a line that the block has, and what stands before it. One process for each page.
_AIRCRAFT = """
import os
from datetime import datetime, timedelta
from pipelines.aircraft import AIRCRAFT, READ_SCHEMA
flight = {
    "tailnum": "N14228", "scheduled_departure": datetime(2013, 1, 1, 6), "origin": "EWR", "dest": "IAH", "departed": True,
    "arrived": True, "departure_delay_minutes": 2, "arrival_delay_minutes": 11,
}
"""
PARTS: dict[str, dict[str, str]] = {
    "README.md": {"tester = PipelineTester(ORDERS": ""},
    "docs/index.md": {"tester = PipelineTester(ORDERS": ""},
    "docs/processors.md": {"class Visits(ArrowProcessor)": ""},
    "docs/state-table.md": {
        "import duckdb": f"""
{_AIRCRAFT}
from cairn.operations.export_state import export_state
from state_backend.inspection.state_source import find_state
from cairn.testing import PipelineTester
PipelineTester(AIRCRAFT, input_schema=READ_SCHEMA, every=timedelta(days=1), root="file:///data/state").run([flight])
export_state(find_state(root="file:///data/state", pipeline="aircraft"), "/tmp/tables")
""",
        "from duckdb import sql": "",
    },
}
PROMPT = "(Pdb) "
SLOW = {
    "docs/deduplicate.md",
    "docs/first-pipeline.md",
    "docs/joins.md",
    "docs/ready-made.md",
    "docs/routine.md",
    "docs/top-n.md",
    "docs/trying.md",
    "docs/upgrade.md",
    "docs/windows.md",
    "docs/wrong-balance.md",
}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A Spark Connect server's address, for the commands that run Spark: a JVM of its own for each of them would take half of these
    tests' time. It is started by the command that `cairn spark` prints where its port is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refused = CliRunner().invoke(app, ["spark", "--port", str(taken.getsockname()[1])])
        assert refused.exit_code == 2
    (command,) = re.findall(r"as in: (.*)", refused.stderr)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    started = subprocess.Popen(
        ["bash", "-c", f"exec {command}"], env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, text=True
    )
    with started as spark:
        assert spark.stdout is not None
        try:
            said = [""]
            while not said[-1].startswith("Spark Connect: "):
                said.append(spark.stdout.readline())
                assert said[-1], f"{command} ended with {spark.wait()}: {said}"
            yield said[-1].split()[2]
        finally:
            # As by Ctrl-C, which a process does not get whose shell runs it in the background.
            spark.terminate()
            rest = spark.stdout.read()
        assert "Spark Connect is stopped" in rest
    assert spark.returncode == 130


@pytest.mark.spark
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.long("a minute for the page")) if page in SLOW else page for page in PAGES],
)
def test_every_block_of_the_page_runs(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    layout, blocks, environment = copy_layout(tmp_path), blocks_of(page), {}
    if any("cairn run " in block.text for block in blocks):
        environment["CAIRN_SPARK"] = request.getfixturevalue("server")
    for block in blocks:
        if block.reason is None:
            run_block(layout, block, environment)


@pytest.mark.spark
@pytest.mark.parametrize("page", PARTS)
def test_selected_code_blocks_of_the_page_run(page: str, tmp_path: Path) -> None:
    """In one process, since the later ones use the names of the earlier; with folders of this test's own."""
    code = "\n".join(f"{before}\n{block_with(page, line)}" for line, before in PARTS[page].items())
    code = code.replace("/data/state", f"{tmp_path}/state").replace("/tmp/tables", f"{tmp_path}/tables")
    done = run_there(copy_layout(tmp_path / "layout"), [sys.executable, "-W", "ignore", "-c", code])
    assert done.returncode == 0, f"{page}: {done.stdout}"


def run_block(layout: Path, block: Block, environment: dict[str, str]) -> None:
    match block.kind:
        case "python" if "\ndef test_" in block.text:
            (layout / "test_page.py").write_text(block.text)
            _run(
                layout,
                block,
                environment,
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_page.py"],
            )
        case "python":
            _run(layout, block, environment, [sys.executable, "-W", "ignore", "-c", block.text])
        case "console":
            for command, expected in commands_in(block.text):
                if "--pdb" in command:
                    talk(layout, block, environment, command, expected)
                    continue
                said = _run(layout, block, environment, ["bash", "-c", command])
                assert quoted_in(expected, said), f"{block}: {command}\nsaid\n{said}\nnot\n{expected}"
        case "" | "text":
            pass  # a drawing
        case kind:
            pytest.fail(f"{block}: a block of {kind!r} is not run; say python or console, or why it is not run")


def _run(layout: Path, block: Block, environment: dict[str, str], command: list[str]) -> str:
    done = run_there(layout, command, **environment)
    assert done.returncode == 0, f"{block}: {command[-1]}\n{done.stdout}"
    return done.stdout


def talk(layout: Path, block: Block, environment: dict[str, str], command: str, lines: list[str]) -> None:
    """Run a command in a pseudo-terminal, and type what stands behind each prompt of pdb."""
    terminal = Terminal(["bash", "-c", command], environment_of(layout, **environment), layout)
    try:
        said, expected = terminal.wait_for(PROMPT), []
        for line in [*lines, None]:
            if line is None or line.startswith(PROMPT):
                assert quoted_in(expected, said), f"{block}: {command}\nsaid\n{said}\nnot\n{expected}"
                expected = []
                if line is not None:
                    terminal.type(line.removeprefix(PROMPT))
                    said = terminal.wait_for(PROMPT) if line != f"{PROMPT}continue" else terminal.rest()
            else:
                expected.append(line)
        assert terminal.end() == 0
    finally:
        terminal.close()


def test_quoted_lines_must_occur_whole_and_in_order_in_a_commands_output() -> None:
    assert quoted_in(["a … c", "d"], "x\na b c\ny\nd\n")
    assert not quoted_in(["d", "a … c"], "a b c\nd\n")
    assert not quoted_in(["a"], "ab")
    assert commands_in("$ a\nb\n$ c\n") == [("a", ["b"]), ("c", [])]


def test_skipped_code_blocks_have_a_reason_and_are_at_most_thirteen() -> None:
    reasons = [block.reason for page in PAGES for block in blocks_of(page) if block.reason is not None]
    assert all(len(reason.split()) > 3 for reason in reasons)
    assert len(reasons) <= 13
