"""The operator around the sweep: what it returns, and which errors Airflow retries."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from cairn_operators import SweepStateOperator
from cairn_operators.airflow_versions import AirflowException, AirflowFailException
from state_backend.adapters.local_storage import LocalStorage
from state_backend.formats import paths
from tests.support.checkpoints import PIPELINE


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    """A folder with an attempt that crashed, and somebody's notes; beside it, a file that a removed trial wrote."""
    LocalStorage(tmp_path / ".trials" / PIPELINE).create("roots/gone/x", b"1")
    storage = LocalStorage(tmp_path / PIPELINE)
    storage.create(paths.shared("crashed", 0, 0, 0, "sst"), b"12345")
    storage.create("notes.txt", b"x")
    return storage


def execute(root: Path, **options: Any) -> Any:
    return SweepStateOperator(task_id="sweep", pipeline=PIPELINE, root=str(root), **options).execute({})


def test_the_operator_sweeps_the_pipeline_and_returns_the_counts(storage: LocalStorage, tmp_path: Path) -> None:
    counts: dict[str, Any] = {"dry_run": False, "record": 1, "abandoned": ["crashed"], "planned": 1, "deleted_files": 1}
    counts |= {"deleted_bytes": 5, "shrunk": 0, "unknown": 1, "rebuilt": 0}
    counts["trials"] = [{"name": "gone", "files": 1, "bytes": 1}]
    planned = {"dry_run": True, "record": None, "deleted_files": 0, "deleted_bytes": 0}
    assert execute(tmp_path, dry_run=True)["planned"] == 0
    assert execute(tmp_path, min_age=timedelta(0), dry_run=True) == counts | planned
    assert execute(tmp_path, min_age=timedelta(0)) == counts
    assert [info.path for info in storage.list("")] == [paths.HEAD, paths.record(1), "notes.txt"]
    assert execute(tmp_path, min_age=timedelta(0))["planned"] == 0


def test_a_log_in_doubt_fails_for_good_and_storage_trouble_is_retried(storage: LocalStorage, tmp_path: Path) -> None:
    storage.create(paths.record(1), b"garbage")
    with pytest.raises(AirflowFailException, match="CorruptRecord"):
        execute(tmp_path)
    (tmp_path / "blocked").symlink_to("blocked")
    with pytest.raises(AirflowException, match="StorageUnavailable") as caught:
        execute(tmp_path / "blocked")
    assert not isinstance(caught.value, AirflowFailException)
