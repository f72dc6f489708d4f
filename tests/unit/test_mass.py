"""The program stays small: each room has a budget of lines and of tokens, the tests have one of lines.

Growth of a room is a decision: raise its budget in the commit that needs it, and lower another room's.
"""

from __future__ import annotations

import ast

from state_backend.values.parse_source import parse_source
from tests.tools.mass import FOLDERS, ROOT, mass

MOST_METHODS, MOST_LINES_OF_A_MODULE, MOST_LINES_OF_TESTS = 25, 800, 82_230

# For each room, the most lines of its files, and the most tokens without comments and docstrings.
BUDGETS = {
    "dags": (150, 600),
    "jobs/cairn": (2_530, 13_151),
    "jobs/cairn/aggregates": (1_074, 7_225),
    "jobs/cairn/command": (4_846, 32_868),
    "jobs/cairn/data_sources": (594, 3_730),
    "jobs/cairn/driver": (750, 4_400),
    "jobs/cairn/operations": (979, 6_261),
    "jobs/cairn/operations/intervals": (3_837, 26_142),
    "jobs/cairn/operations/savepoints": (900, 6_000),
    "jobs/cairn/operations/validation": (1_972, 14_792),
    "jobs/cairn/processors": (3_354, 27_488),
    "jobs/cairn/replay": (1_373, 10_100),
    "jobs/cairn/rows": (2_238, 15_865),
    "jobs/cairn/runners": (2_076, 13_250),
    "jobs/cairn/shard_jobs": (1_351, 8_693),
    "jobs/cairn/shipping": (1_469, 9_924),
    "jobs/cairn/sinks": (2_144, 13_581),
    "jobs/cairn/spark": (1_474, 7_624),
    "jobs/cairn/trials": (1_162, 8_213),
    "jobs/local_stack": (1_660, 9_600),
    "jobs/pipelines": (960, 5_600),
    "plugins/cairn_operators": (5_114, 28_210),
    "plugins/cairn_provider": (90, 400),
    "plugins/cairn_ui": (3_480, 25_190),
    "state_backend": (10, 100),
    "state_backend/adapters": (4_004, 25_784),
    "state_backend/chains": (1_000, 8_905),
    "state_backend/checkpoint": (5_898, 37_863),
    "state_backend/formats": (6_019, 39_837),
    "state_backend/inspection": (3_543, 28_644),
    "state_backend/ports": (200, 380),
    "state_backend/shard": (1_610, 9_500),
    "state_backend/state": (3_110, 26_300),
    "state_backend/values": (3_801, 13_920),
}


def test_each_room_stays_within_its_budget() -> None:
    lines, tokens = mass()
    assert lines.keys() == BUDGETS.keys(), "a new room needs a budget"
    over = {
        room: (lines[room], tokens[room])
        for room, (most_lines, most_tokens) in BUDGETS.items()
        if lines[room] > most_lines or tokens[room] > most_tokens
    }
    assert over == {}


def test_no_class_and_no_module_is_large() -> None:
    large = []
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        source = path.read_text()
        classes = [node for node in ast.walk(parse_source(source)) if isinstance(node, ast.ClassDef)]
        methods = max((sum(isinstance(one, ast.FunctionDef) for one in node.body) for node in classes), default=0)
        if methods > MOST_METHODS or source.count("\n") > MOST_LINES_OF_A_MODULE:
            large.append(path.relative_to(ROOT).as_posix())
    assert large == []


def test_the_tests_stay_within_their_budget() -> None:
    assert sum(path.read_text().count("\n") for path in (ROOT / "tests").rglob("*.py")) <= MOST_LINES_OF_TESTS
