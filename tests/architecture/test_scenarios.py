"""A scenario's id says nothing to a reader who can't look it up."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_every_scenario_that_a_test_names_is_described() -> None:
    described = set(re.findall(r"^- \*\*([FS]\d+)\*\* \w", (TESTS / "SCENARIOS.md").read_text(), re.MULTILINE))
    named = {
        name
        for file in TESTS.rglob("*.py")
        for docstring in re.findall(r'"""(.*?)"""', file.read_text(), re.DOTALL)
        for name in re.findall(r"\b[FS]\d{1,2}\b", docstring)
    }
    assert named == described
