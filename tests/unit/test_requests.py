"""What an interval asks of the storage, by phase: docs/storage.md has the same table. More is a regression, less a figure to mend there.
The cost model says the same of each."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from cairn.operations import take_savepoint as operation
from cairn.shard_jobs import take_savepoint as shard_job
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.rocks import EngineOptions
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.inspection.cost_model import (
    Held,
    Requests,
    Usage,
    estimate,
    interval_requests,
    plan_held,
    savepoint_requests,
    usage_of,
)
from state_backend.ports.storage import Storage
from state_backend.values.records import Record
from state_backend.values.retention import KeepLast
from tests.support.faulty_storage import FaultyStorage
from tests.support.in_process import run_here
from tests.support.request_counts import Counts, count
from tests.support.savepoints import SmallPipeline

# Of which so many are lists.
COMMITS = {
    (2, "young"): (14, 1), (2, "old"): (19, 1), (4, "old"): (17, 3), (16, "young"): (14, 3), (16, "old"): (17, 3),
}  # fmt: skip
CLEAN_UPS = {2: 11, 4: 19, 16: 56}
KIND = {
    "create": "write",
    "replace": "write",
    "upload": "write",
    "list": "list",
    "read": "read",
    "download": "read",
    "stat": "look",
    "delete": "delete",
}
MINUTES = pytest.mark.long("minutes")


@pytest.mark.parametrize(
    ("shards", "intervals"),
    [(2, 7), (4, 7), (16, 2), pytest.param(2, 60, marks=MINUTES), pytest.param(16, 30, marks=MINUTES)],
)
@pytest.mark.long("seconds", runs_in="ci")
def test_an_interval_asks_as_much_at_any_age(shards: int, intervals: int) -> None:
    """Nothing is asked by retained checkpoint, or by interval that there was. From the fifth on one checkpoint is dropped each time."""
    storage = MemoryStorage()
    counts = count(storage, intervals, shards, retention=KeepLast(3))
    most = {
        "begin": (4, 1),
        "commit": COMMITS[shards, "young" if intervals == 2 else "old"],
        "publish": (1, 0),
        "clean up": (0, 0) if intervals == 2 else (CLEAN_UPS[shards], 1),
    }
    for name, (requests, lists) in most.items():
        assert counts[name].total() <= requests and counts[name]["list"] <= lists, (name, counts[name])
    assert counts["shards"]["list"] == counts["prepare"]["list"] == 0
    assert_the_model_says_so(storage, counts, shards, intervals)


@pytest.mark.long("seconds", runs_in="ci")
def test_a_disk_is_asked_for_names_too() -> None:
    """Where a listing may be old; not one list more."""
    counts = [
        count(FaultyStorage(MemoryStorage(), {}, late=late), 7, 2, retention=KeepLast(3)) for late in (False, True)
    ]
    more = {phase: asked.total() - counts[0][phase].total() for phase, asked in counts[1].items()}
    assert more == {"begin": 1, "shards": 0, "prepare": 0, "commit": 3, "publish": 0, "clean up": 1}
    assert all(counts[0][phase]["list"] == counts[1][phase]["list"] for phase in more)


def assert_the_model_says_so(storage: MemoryStorage, counts: Counts, shards: int, intervals: int) -> None:
    """The same requests of each kind in each phase, and about as many bytes and objects, from what the last record says."""
    log = Coordinator(storage, "counting").log()
    contents = [record.content for n in sorted(log.retained) if isinstance(record := log.entries[n], Record)]
    if len({ref.inline is None for ref in contents[-1].shards}) > 1:
        return  # One manifest just fits into the record and the other does not: the model knows all or none.
    history = usage_of(contents[-1:])
    assert history is not None and history.usage.keys == 2_000
    held = plan_held(KeepLast(3), history.usage.every) if intervals > 3 else Held(gaps=(1,), drops=0)
    modelled = interval_requests(history.usage, held)
    for phase, counted in counts.items():
        of_kind = dict.fromkeys(("write", "list", "read", "look", "delete"), 0)
        for name, number in counted.items():
            of_kind[KIND[name]] += number
        if phase == "clean up":
            # A call of the storage that deletes is a look and a delete on a server; and what is dropped has other files than what
            # is written, if only by one or two.
            of_kind["look"] += of_kind["delete"]
            said = modelled["clean up"]
            assert (
                abs(said.delete - of_kind["delete"]) <= 2
                and said.look - said.delete == of_kind["look"] - of_kind["delete"]
            )
            of_kind |= {"look": said.look, "delete": said.delete}
        assert modelled[phase] == Requests(**of_kind), phase  # type: ignore[index]
    assert modelled["look"] == modelled["begin"]
    files = list(storage.list("shared/"))
    found = estimate(history.usage)
    # Manifests are most of so small a state, and the record has some of it.
    assert intervals < 4 or 0.5 <= len(files) / found.objects * found.checkpoints / 3 <= 2


@pytest.mark.parametrize("shards", [1, 4])
def test_a_savepoint_asks_what_the_model_says(tmp_path: Path, shards: int) -> None:
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
    of_kind = dict.fromkeys(("write", "list", "read", "look", "delete"), 0)
    for storage in opened:
        for name, _ in storage.calls:
            of_kind[KIND[name]] += 1
    of_kind["look"] += of_kind["delete"]  # on a server
    usage = Usage(
        keys=10,
        bytes_per_key=50,
        changed=0,
        shards=shards,
        every=timedelta(days=1),
        live_files=1,
        manifests_filed=False,
    )
    assert savepoint_requests(usage) == Requests(**of_kind)


@pytest.mark.long("seconds", runs_in="ci")
def test_the_counts_as_printed() -> None:
    made = subprocess.run(
        [sys.executable, "-m", "tests.support.request_counts"], capture_output=True, text=True, check=True
    )
    asked = {line[:8].strip(): int(line[8:].split()[0]) for line in made.stdout.splitlines()}
    assert asked == {"begin": 4, "shards": 2, "prepare": 1, "commit": 14, "publish": 1, "clean up": 0, "all": 22}
