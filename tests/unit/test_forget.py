"""`cairn forget`: a key is removed, stays away, and leaves no byte behind. Without Spark."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cairn.command.cli import app
from cairn.operations.coordinator_of import coordinator_of
from cairn.pipeline import Interval
from state_backend.adapters.local_storage import LocalStorage
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.checkpoint.log import read_log
from state_backend.values.records import Record
from tests.support.counting import DAYS, day
from tests.support.key_search import files_with
from tests.support import trials
from tests.support.trials import SESSION, Averaging, bytes_of, run, try_days

NAME = "counting"
SECRET = "zaphod-beeblebrox"
NEEDLE = SECRET.encode()
KEY = json.dumps({"user": SECRET})
OTHERS = [f"user-{n}" for n in range(40)]


def read(spark: Any, interval: Interval) -> Any:
    """Return the rows of the day, and a position that does not quote them."""
    rows, _ = trials.read(spark, interval)
    return rows, {"rows": hashlib.sha256(repr(DAYS[interval.start]).encode()).hexdigest()}


PIPELINE = trials.pipeline_of(processor=Averaging, source=read)


def _long(seed: str) -> str:
    """Return a text that compresses badly, so that SSTs are too large to lie inline."""
    return "".join(hashlib.sha512(f"{seed} {n}".encode()).hexdigest() for n in range(16))


def fill() -> None:
    DAYS.clear()
    for n in range(7):
        others = [(user, _long(f"{user} {n}"), n) for user in OTHERS[n % 3 :: 3]]
        DAYS[day(n).start] = [*others, *([(SECRET, "pear", n + 1), (SECRET, f"item {n}", 7)] if n > 0 else [])]


@pytest.fixture(autouse=True)
def days() -> Iterator[None]:
    fill()
    yield
    DAYS.clear()


@pytest.fixture(scope="module")
def production(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five days; the secret user comes on the second. Three in SSTs, then changelog segments, the last of which are inline."""
    fill()
    made = tmp_path_factory.mktemp("production")
    run(PIPELINE, made, range(3))
    run(PIPELINE, made, range(3, 5), mode="changelog")
    return made


@pytest.fixture
def root(production: Path, tmp_path: Path) -> Path:
    """A copy of production."""
    return Path(shutil.copytree(production, tmp_path / "state"))


def storage_of(root: Path) -> LocalStorage:
    return LocalStorage(root / NAME)


def coordinator(root: Path) -> Coordinator:
    return coordinator_of(PIPELINE, str(root))


def cairn(root: Path, *arguments: str) -> Result:
    command, *rest = arguments
    return CliRunner().invoke(app, [command, "--root", str(root), "--pipeline", NAME, *rest])


def forget(root: Path, *options: str, key: str = KEY) -> dict[str, Any]:
    done = cairn(root, "forget", "--key", key, "--yes", "--json", *options)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def newest(root: Path) -> Record:
    record = coordinator(root).log().newest
    assert record is not None
    return record


def search(root: Path, work: Path) -> set[str]:
    work.mkdir(exist_ok=True)
    return files_with(root, NEEDLE, work)


def users_of(root: Path, tmp_path: Path) -> set[str]:
    """The users of the newest state, by an export of all states and timers."""
    to = tmp_path / f"export-{len(list(tmp_path.iterdir()))}"
    assert CliRunner().invoke(app, ["export", "--root", str(root), "--pipeline", NAME, "--to", str(to)]).exit_code == 0
    import pyarrow.parquet as pq

    return {row["key"]["user"] for file in to.rglob("*.parquet") for row in pq.read_table(file).to_pylist()}


def test_no_file_has_the_key_afterwards(root: Path, tmp_path: Path) -> None:
    """With all options only the savepoint, the trial and the export, which the command names, still have it."""
    run(PIPELINE, root, [5])
    take_savepoint_of(root, root / "saved")
    try_days(PIPELINE, root, [6], name="tried")
    assert cairn(root, "export", "--to", str(root / "exported")).exit_code == 0
    before = search(root, tmp_path / "before")
    assert {path.split("/")[1] for path in before if path.startswith(NAME)} >= {"checkpoints", "shared", "output"}
    was = newest(root)
    said = forget(root, "--drop-checkpoints", "--rewrite-output")
    assert said["entries"] == {"$timers": 1, "total": 1, "seen_at": 1, "items": 4, "amounts": 10}
    assert said["dropped"] == [2, 3, 4, 5, 6] and said["output_files"] == 5 and said["holding"] == []
    now = newest(root)
    left = search(root, tmp_path / "after")
    assert [path for path in left if path.startswith(NAME)] == []
    assert {path.split("/")[0] for path in left} == {"saved", ".trials", "exported"}
    places = {place["what"]: place for place in said["places"]}
    assert places["savepoint"]["where"].endswith("/saved") and places["export"]["where"].endswith("/exported")
    assert places["trial"]["then"] == f"cairn trials remove --root {root} --pipeline {NAME} tried"
    assert now.content.kind == "forget" and now.content.base_id == was.id
    assert now.content.digest != was.content.digest
    assert now.content.totals.entries == was.content.totals.entries - 17
    assert cairn(root, "verify").exit_code == 0
    assert SECRET not in users_of(root, tmp_path)
    run(PIPELINE, root, [6])  # the user comes again, as a new customer
    assert SECRET in users_of(root, tmp_path)
    assert cairn(root, "verify").exit_code == 0


def take_savepoint_of(root: Path, to: Path) -> None:
    from tests.support.savepoints import take

    log = read_log(storage_of(root))
    assert log.newest is not None
    take(str(root / NAME), log.newest, to, "native")
