"""What an interval asks of the storage, by phase: docs/storage.md has the same table. More is a regression, less a figure to mend there."""

from __future__ import annotations

import os

import pytest

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.values.retention import KeepLast
from tests.support.request_counts import count

# Of which so many are lists.
COMMITS = {(2, "young"): (14, 1), (2, "old"): (19, 1), (16, "young"): (14, 3), (16, "old"): (17, 3)}
LONG = [(2, 60), (16, 30)] if os.environ.get("CAIRN_LONG") else []


@pytest.mark.parametrize(("shards", "intervals"), [(2, 2), (2, 7), (16, 2), *LONG])
def test_an_interval_asks_as_much_at_any_age(shards: int, intervals: int) -> None:
    """Nothing is asked by retained checkpoint, or by interval that there was. From the fifth on one checkpoint is dropped each time."""
    counts = count(MemoryStorage(), intervals, shards, retention=KeepLast(3))
    most = {
        "begin": (4, 1),
        "commit": COMMITS[shards, "young" if intervals == 2 else "old"],
        "publish": (1, 0),
        "clean up": (0, 0) if intervals == 2 else (11 if shards == 2 else 56, 1),
    }
    for name, (requests, lists) in most.items():
        assert counts[name].total() <= requests and counts[name]["list"] <= lists, (name, counts[name])
    assert counts["shards"]["list"] == counts["prepare"]["list"] == 0
