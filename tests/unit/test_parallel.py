"""Which tests a worker of xdist runs together."""

from __future__ import annotations

import pytest

from tests.support.parallel import SPLIT, group_of
from tests.support.tiers import REPOSITORY


@pytest.mark.parametrize(
    ("test", "together_with", "yes"),
    [
        ("tests/unit/test_cli.py::test_a", "tests/unit/test_cli.py::TestB::test_c[1]", True),
        ("tests/unit/test_cli.py::test_a", "tests/unit/test_log.py::test_a", False),
        ("tests/contract/test_sinks.py::test_a[delta-1]", "tests/contract/test_sinks.py::test_a[delta-2]", True),
        ("tests/contract/test_sinks.py::test_a[delta-1]", "tests/contract/test_sinks.py::test_a[iceberg-1]", False),
        ("tests/contract/test_sinks.py::test_a[delta]", "tests/contract/test_sinks.py::test_b[delta]", False),
        ("tests/contract/test_sinks.py::test_a", "tests/contract/test_sinks.py::test_a", True),
    ],
)
def test_a_worker_takes_a_file_or_a_function_of_a_long_file(test: str, together_with: str, yes: bool) -> None:
    assert (group_of(test) == group_of(together_with)) is yes


def test_split_files_exist() -> None:
    assert [name for name in SPLIT if not (REPOSITORY / name).is_file()] == []
