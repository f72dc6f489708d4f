"""What Spark read must be what the source's position says. No Spark here: the metrics of an executed plan are given."""

from __future__ import annotations

from typing import Any

import pytest

from cairn.operations.intervals.prove_read import unproven
from cairn.spark.file_scans import Scans


def files(*lengths: Any, name: str = "bytes") -> dict[str, Any]:
    return {"files": [{"path": "a.json", name: length} for length in lengths]}


@pytest.mark.parametrize(
    ("position", "scans"),
    [
        ({}, [(1, 6)]),
        ({"files": []}, [(1, 6)]),
        ({"files": "a.json"}, [(1, 6)]),
        ({"files": ["a.json"]}, [(1, 6)]),
        (files(None), [(1, 6)]),
        (files(157), [(1, 157)]),
        (files(157, name="size_bytes"), [(1, 157)]),
        (files(10, 20), [(2, 30)]),
        (files(10, 20), [(1, 20), (1, 10)]),
        (files(10, 20), [(1, 20), (5, 7), (1, 10)]),  # a table to join that the position does not list
        (files(10), [(1, 10), (1, 10)]),  # one file, read twice
        (files(157), []),  # the source reads its file without Spark
        (files(0), [(1, 0)]),
        (files(0), [(0, 0)]),  # Spark leaves empty files out
        (files(10, 0), [(1, 10)]),
        (files(10, 0), [(2, 10)]),
        (files(*[1 << 40] * 40), [(1, 1 << n) for n in range(40)]),  # too many sums to try them all
    ],
)
def test_a_read_that_fits_its_position_is_proven(position: dict[str, Any], scans: list[tuple[int, int]]) -> None:
    assert unproven(position, Scans(files=tuple(scans)), shared_cache=True) is None


@pytest.mark.parametrize(
    ("position", "scans", "says"),
    [
        (files(157), [(1, 57)], "lists files: 1 with 157 bytes; Spark read: 1 with 57 bytes"),
        (files(10, 20), [(1, 10)], "lists files: 2 with 30 bytes; Spark read: 1 with 10 bytes"),  # an older list
        (files(10), [(2, 10)], "Spark read: 2 with 10 bytes"),
        (files(10, 20), [(1, 10), (1, 19)], "Spark read: 1 with 10 and 1 with 19 bytes"),
        (files(0), [(1, 57)], "lists files: 1 with 0 bytes; Spark read: 1 with 57 bytes"),
        (files(10, 20), [(1, 30)], "Spark read: 1 with 30 bytes"),
    ],
)
def test_a_read_of_other_files_is_unproven(position: dict[str, Any], scans: list[tuple[int, int]], says: str) -> None:
    why = unproven(position, Scans(files=tuple(scans)), shared_cache=False)
    assert why is not None and says in why


@pytest.mark.parametrize(
    ("position", "scans", "shared", "refused"),
    [
        ({}, [], True, True),
        ({}, [], False, False),
        (files(10), [], False, True),
        (files(10), [(1, 10)], False, False),  # the recorded files were read, and a cached table was joined
        (files(10), [(1, 10)], True, True),
    ],
)
def test_cached_rows_are_unproven_if_the_cache_is_shared_or_listed_files_were_not_read(
    position: dict[str, Any], scans: list[tuple[int, int]], shared: bool, refused: bool
) -> None:
    why = unproven(position, Scans(files=tuple(scans), cached=True), shared_cache=shared)
    assert (why is not None and "come from Spark's cache" in why) == refused
