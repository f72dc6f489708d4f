"""The program stays small: each room has a budget of lines and of tokens, the tests have one of lines, and no file is large.

Growth of a room is a decision: raise its budget in the commit that needs it, and lower another room's.
"""

from __future__ import annotations

import ast

from state_backend.values.parse_source import parse_source
from tests.tools.mass import FOLDERS, ROOT, mass

MOST_METHODS, MOST_LINES_OF_A_MODULE, MOST_LINES_OF_TESTS = 25, 800, 82_366

# For each room, the most lines of its files, and the most tokens without comments and docstrings.
BUDGETS = {
    "dags": (142, 551),
    "jobs/cairn": (2_603, 13_678),
    "jobs/cairn/aggregates": (1_074, 7_225),
    "jobs/cairn/command": (4_739, 32_787),
    "jobs/cairn/data_sources": (572, 3_880),
    "jobs/cairn/driver": (741, 4_319),
    "jobs/cairn/operations": (946, 6_213),
    "jobs/cairn/operations/intervals": (4_095, 28_461),
    "jobs/cairn/operations/savepoints": (871, 5_920),
    "jobs/cairn/operations/validation": (1_926, 14_675),
    "jobs/cairn/processors": (3_255, 27_274),
    "jobs/cairn/replay": (1_369, 10_003),
    "jobs/cairn/rows": (2_222, 15_685),
    "jobs/cairn/runners": (2_075, 13_255),
    "jobs/cairn/shard_jobs": (1_325, 8_574),
    "jobs/cairn/shipping": (1_450, 9_859),
    "jobs/cairn/sinks": (2_141, 13_581),
    "jobs/cairn/spark": (1_466, 7_558),
    "jobs/cairn/trials": (1_152, 8_165),
    "jobs/local_stack": (1_528, 8_708),
    "jobs/pipelines": (961, 5_591),
    "plugins/cairn_operators": (5_168, 28_456),
    "plugins/cairn_provider": (89, 321),
    "plugins/cairn_ui": (3_429, 24_969),
    "state_backend": (5, 0),
    "state_backend/adapters": (3_966, 25_943),
    "state_backend/chains": (1_000, 8_874),
    "state_backend/checkpoint": (5_804, 37_812),
    "state_backend/formats": (5_984, 39_841),
    "state_backend/inspection": (3_836, 30_986),
    "state_backend/ports": (200, 378),
    "state_backend/shard": (1_592, 9_466),
    "state_backend/state": (3_088, 26_226),
    "state_backend/values": (3_795, 14_049),
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


def test_the_tests_stay_within_their_budget_and_no_file_of_them_is_large() -> None:
    lines = {path: path.read_text().count("\n") for path in (ROOT / "tests").rglob("*.py")}
    assert sum(lines.values()) <= MOST_LINES_OF_TESTS
    assert [path.name for path, count in lines.items() if count > MOST_LINES_OF_A_MODULE] == []
