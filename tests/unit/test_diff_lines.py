"""The lines of `cairn diff`: fields, not JSON."""

from __future__ import annotations

from typing import Any

import pytest

from state_backend.inspection.diff_lines import changed_fields, line_of


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"n": 1, "s": "a"}, {"n": 2, "s": "a"}, [("n", "1", "2")]),
        ({"n": None}, {"n": 0}, [("n", "null", "0")]),
        ({"n": 1}, {"n": 1, "new": "x"}, [("new", "-", '"x"')]),
        ({"at": {"city": "Ulm", "zip": 1}}, {"at": {"city": "Bonn", "zip": 1}}, [("at.city", '"Ulm"', '"Bonn"')]),
        ({"tags": [1, 2, 3]}, {"tags": [1, 4]}, [("tags[1]", "2", "4"), ("tags[2]", "3", "-")]),
        ({"tags": []}, {"tags": ["x"]}, [("tags", "[]", "-"), ("tags[0]", "-", '"x"')]),
        (1, 2, [("", "1", "2")]),
        ({"n": 1}, {"n": 1}, []),
    ],
)
def test_only_changed_fields_are_listed(before: Any, after: Any, expected: list[tuple[str, str, str]]) -> None:
    assert changed_fields(before, after) == expected


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"state": "seen", "change": "changed", "key": {"user": "u1"}, "before": {"n": 1, "s": 5}, "after": {"n": 2, "s": 5}},
            '~ seen user="u1": n 1 -> 2',
        ),
        (
            {"state": "clicks", "change": "added", "key": {"user": "u1"}, "pos": 3, "after": {"page": "a", "ms": 7}},
            '+ clicks user="u1" [3]: page="a", ms=7',
        ),
        (
            {"state": "m", "change": "removed", "key": {"a": 1, "b": 2}, "user_key": {"k": "x"}, "before": {"v": None}},
            '- m a=1, b=2 k="x": v=null',
        ),
        (
            {"state": "t", "change": "changed", "key": {"a": 1}, "before": {"v": 1}, "after": {"v": 1},
             "before_expires_at": "2024-01-01T00:00:00Z", "after_expires_at": "2024-01-02T00:00:00Z"},
            "~ t a=1: expires 2024-01-01T00:00:00Z -> 2024-01-02T00:00:00Z",
        ),
    ],
)  # fmt: skip
def test_an_entry_change_is_printed_as_one_line_of_fields(change: dict[str, Any], line: str) -> None:
    assert line_of(change) == line
