"""What an interval asks of the storage, by phase: docs/requests.md has the same table. More is a regression, less a figure to mend there."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from cairn.operations.savepoints import take_savepoint as operation
from cairn.shard_jobs import write_savepoint as shard_job
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.rocks import EngineOptions
from state_backend.ports.storage import Storage
from state_backend.values.retention import KeepLast
from tests.support.faulty_storage import FaultyStorage
from tests.support.in_process import run_here
from tests.support.layout import REPOSITORY
from tests.support.request_counts import PHASES, count
from tests.support.savepoints import SmallPipeline

# Writes, lists, reads, looks and deletes of each phase, by shards and number of intervals. From the fifth interval on, each drops a checkpoint.
KINDS = (("create", "replace", "upload"), ("list",), ("read", "download"), ("stat",), ("delete",))
NOTHING, BEGIN, ONE = (0, 0, 0, 0, 0), (0, 1, 3, 0, 0), (1, 0, 0, 0, 0)
ASKED = {
    (2, 7): [BEGIN, (3, 0, 0, 0, 0), ONE, (3, 1, 7, 7, 0), ONE, (2, 1, 2, 1, 1)],
    (2, 60): [BEGIN, (3, 0, 2, 0, 0), (2, 0, 0, 0, 0), (3, 1, 7, 8, 0), ONE, (2, 1, 3, 1, 1)],
    (4, 7): [BEGIN, (4, 0, 4, 0, 0), (5, 0, 0, 0, 0), (3, 3, 7, 4, 0), ONE, (2, 1, 10, 1, 5)],
    (16, 2): [BEGIN, (16, 0, 16, 0, 0), (17, 0, 0, 0, 0), (3, 3, 6, 2, 0), ONE, NOTHING],
    (16, 30): [BEGIN, (16, 0, 16, 0, 0), (17, 0, 0, 0, 0), (3, 3, 7, 4, 0), ONE, (2, 1, 34, 1, 17)],
}
MINUTES = pytest.mark.long("minutes")


def by_kind(counts: Counter[str]) -> tuple[int, ...]:
    assert counts.keys() <= {name for kind in KINDS for name in kind}
    return tuple(sum(counts[name] for name in kind) for kind in KINDS)


@pytest.mark.parametrize(
    ("shards", "intervals"), [pytest.param(*case, marks=MINUTES if case[1] > 7 else ()) for case in ASKED]
)
@pytest.mark.long("seconds", runs_in="ci")
def test_storage_requests_of_an_interval_do_not_grow_with_the_pipelines_age(shards: int, intervals: int) -> None:
    """Nothing is asked by retained checkpoint, or by interval that there was."""
    counts = count(MemoryStorage(), intervals, shards, retention=KeepLast(3))
    assert {phase: by_kind(counts[phase]) for phase in PHASES} == dict(
        zip(PHASES, ASKED[shards, intervals], strict=True)
    )


@pytest.mark.long("seconds", runs_in="ci")
def test_storage_with_late_listings_gets_more_requests_but_no_more_lists() -> None:
    """Where a listing may be old; not one list more."""
    counts = [
        count(FaultyStorage(MemoryStorage(), {}, late=late), 7, 2, retention=KeepLast(3)) for late in (False, True)
    ]
    more = {phase: asked.total() - counts[0][phase].total() for phase, asked in counts[1].items()}
    assert more == {"begin": 1, "shards": 0, "prepare": 0, "commit": 3, "publish": 0, "clean up": 1}
    assert all(counts[0][phase]["list"] == counts[1][phase]["list"] for phase in more)


@pytest.mark.parametrize("shards", [2, 16])
@pytest.mark.long("seconds", runs_in="ci")
def test_docs_page_shows_the_measured_requests_and_price_of_a_second_day(shards: int) -> None:
    """In docs/requests.md: 0.5 cents for 1,000 writes or lists, and 0.04 for 1,000 reads or metadata requests."""
    lines = (REPOSITORY / "docs/requests.md").read_text().splitlines()
    head, _, *rows = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")][
        :10
    ]
    column = head.index(f"{shards} shards, 2nd day")
    asked = [by_kind(phase) for phase in count(MemoryStorage(), 2, shards).values()]
    asked.append(tuple(map(sum, zip(*asked, strict=True))))
    shown = [f"{sum(kinds)}{f' ({kinds[1]})' if kinds[1] else ''}" for kinds in asked]
    writes, lists, reads, looks, _ = asked[-1]
    cents = (writes + lists) * 0.5 + (reads + looks) * 0.04
    assert [row[column] for row in rows] == [*shown, f"{cents:.1f}"]


@pytest.mark.parametrize(("shards", "asked"), [(1, (3, 2, 5, 1, 1)), (4, (6, 2, 8, 1, 1))])
def test_a_savepoint_makes_one_read_and_one_write_per_file(tmp_path: Path, shards: int, asked: tuple[int, ...]) -> None:
    pipeline = SmallPipeline(tmp_path, parallelism=shards)
    opened: list[FaultyStorage] = []

    def counted(url: str) -> Storage:
        opened.append(FaultyStorage(open_storage(url), {}))
        opened[-1].lists_what_is_there = True  # as of a server
        return opened[-1]

    with (
        mock.patch.object(operation, "open_storage", counted),
        mock.patch.object(shard_job, "open_storage", counted),
        mock.patch.object(operation, "run_on_shards", run_here),
    ):
        options: Any = SimpleNamespace(engine=EngineOptions())
        assert pipeline.record is not None
        none: Any = None
        operation.take_savepoint(none, options, pipeline.url, pipeline.record, str(tmp_path / "to"))
    assert by_kind(Counter(name for storage in opened for name, _ in storage.calls)) == asked


@pytest.mark.long("seconds", runs_in="ci")
def test_the_request_count_tool_prints_the_requests_of_each_phase() -> None:
    made = subprocess.run(
        [sys.executable, "-m", "tests.support.request_counts"], capture_output=True, text=True, check=True
    )
    asked = {line[:8].strip(): int(line[8:].split()[0]) for line in made.stdout.splitlines()}
    assert asked == {"begin": 4, "shards": 2, "prepare": 1, "commit": 14, "publish": 1, "clean up": 0, "all": 22}
