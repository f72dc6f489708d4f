"""A root is independent of PySpark's version: one that moves, a day each, equals one that stayed.

CAIRN_TESTS=all pytest tests/integration/test_root_moves.py    # after: make test-versions
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.log import read_log
from tests.support.both_engines import read_parquet
from tests.support.overlays import PYSPARKS, environment

pytestmark = [pytest.mark.spark, pytest.mark.long("minutes, and an installed PySpark of each version")]

NAMES = ("row", "pandas")


def go_on(root: Path, last: int, version: str | None) -> dict[str, list[int]]:
    """Process the days up to the last one with a version of PySpark. The days that keep their result, by pipeline."""
    command = [sys.executable, "-m", "tests.support.moving_root", str(root), str(last)]
    env = environment(version) if version else dict(os.environ)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    kept: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    return kept


def results(root: Path, name: str) -> list[dict[str, Any]]:
    """What each day has left."""
    return [
        {
            "digest": c.digest,
            "watermark": c.time.watermark_ms,
            "code": c.code_hash,
            "input": c.input_hash,
            "states": c.states,
            "schemas": (c.key_schema, c.input_schema, c.output_schema),
            "rows": read_parquet(root / name, c.outputs, late=False),
            "late rows": read_parquet(root / name, c.outputs, late=True),
        }
        for c in (record.content for record in read_log(open_storage(str(root / name))).completed())
    ]


def test_a_root_moved_through_pyspark_versions_equals_one_that_stayed(tmp_path: Path) -> None:
    versions = [None, *PYSPARKS, None]
    moved, stayed = tmp_path / "moved", tmp_path / "stayed"
    for n, version in enumerate(versions, 1):
        # Each version keeps the results that others computed: it makes the same hashes of code and input.
        assert go_on(moved, n, version) == {name: [*range(1, n)] for name in NAMES}
    go_on(stayed, len(versions), None)
    for name in NAMES:
        theirs, ours = results(stayed, name), results(moved, name)
        for n, (there, here) in enumerate(zip(theirs, ours, strict=True), 1):
            assert here == there, f"{name}, day {n}: {[part for part in there if here[part] != there[part]]}"
        # The days have what the test is about.
        assert len(theirs) == len(versions) and len({there["digest"] for there in theirs}) == len(theirs)
        assert all(there["late rows"] for there in theirs[2:])  # The watermark comes from the days before.
        assert {row["kind"] for there in theirs for row in there["rows"]} == {"seen", "idle"}
