"""Every Python block of docs/sources.md runs as it stands there, without Spark. Its sources run in tests/integration/test_sources_page.py."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.support.doc_blocks import Block, blocks_of

BLOCKS = [block for block in blocks_of("docs/sources.md") if block.kind == "python"]


def test_the_page_has_three_python_examples_and_one_uses_the_tester() -> None:
    assert len(BLOCKS) == 3
    assert sum("PipelineTester(" in block.text for block in BLOCKS) == 1


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_each_python_example_of_the_page_runs(block: Block, tmp_path: Path) -> None:
    program = tmp_path / "block.py"
    program.write_text(block.text)
    runpy.run_path(str(program), run_name=f"sources_page_{block.line}")
