"""The program stays small: each room has a budget of lines and of tokens, the tests have one of lines, and no file is large.

Growth of a room is a decision: raise its budget in the commit that needs it, and lower another room's.
"""

from __future__ import annotations

import ast

from state_backend.values.parse_source import parse_source
from tests.tools.mass import FOLDERS, ROOT, mass

MOST_METHODS, MOST_LINES_OF_A_MODULE, MOST_LINES_OF_TESTS = 25, 800, 83_014

# For each room, the most lines of its files, and the most tokens without comments and docstrings.
BUDGETS = {
    "dags": (142, 551),
    "jobs/cairn": (2_610, 13_692),
    "jobs/cairn/aggregates": (1_086, 7_351),
    "jobs/cairn/command": (4_765, 33_073),
    "jobs/cairn/data_sources": (569, 3_880),
    "jobs/cairn/driver": (740, 4_341),
    "jobs/cairn/operations": (953, 6_221),
    "jobs/cairn/operations/intervals": (4_159, 28_780),
    "jobs/cairn/operations/savepoints": (878, 5_986),
    "jobs/cairn/operations/validation": (1_961, 14_823),
    "jobs/cairn/processors": (3_271, 27_289),
    "jobs/cairn/replay": (1_366, 9_999),
    "jobs/cairn/rows": (2_215, 15_707),
    "jobs/cairn/runners": (2_224, 14_646),
    "jobs/cairn/shard_jobs": (1_324, 8_607),
    "jobs/cairn/shipping": (1_515, 10_296),
    "jobs/cairn/sinks": (2_208, 14_268),
    "jobs/cairn/spark": (1_465, 7_585),
    "jobs/cairn/trials": (1_215, 8_824),
    "jobs/local_stack": (1_516, 8_692),
    "jobs/pipelines": (961, 5_591),
    "plugins/cairn_operators": (5_235, 28_996),
    "plugins/cairn_provider": (89, 321),
    "plugins/cairn_ui": (3_456, 25_054),
    "state_backend": (5, 0),
    "state_backend/adapters": (3_967, 25_943),
    "state_backend/chains": (1_049, 9_163),
    "state_backend/checkpoint": (5_867, 38_320),
    "state_backend/formats": (5_981, 39_841),
    "state_backend/inspection": (3_839, 30_986),
    "state_backend/ports": (197, 378),
    "state_backend/shard": (1_606, 9_520),
    "state_backend/state": (3_145, 26_500),
    "state_backend/values": (3_813, 14_104),
}


def test_each_package_stays_within_its_budget_of_lines_and_tokens() -> None:
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
