"""The crash matrix on Google Cloud Storage and S3, at the granularity of requests, before a real server process.

The suite plays a few cells that a seed picks. All cells, or CAIRN_CELLS of each operation, are played and counted by
``python -m tests.integration.test_server_crash gcs|s3 [operation ...]``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.crash_matrix import OPERATIONS
from tests.support.server_crash import STORES, play

NAMES = tuple(o.name for o in OPERATIONS)


@pytest.mark.parametrize("kind", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in STORES])
@pytest.mark.long("half a minute; test_gcs and test_s3 have faults too")
def test_a_server_fault_leaves_the_old_or_new_state_and_the_next_try_succeeds(kind: str, tmp_path: Path) -> None:
    """S7, S8, S13, F54: one fault is made good; a server that is gone leaves the old state or the new one, and the next try ends
    where an undisturbed one would."""
    store = STORES[kind]
    with store.running() as server:
        figures = play(store, server, tmp_path, most_cells=10, names=("interval",))
    assert figures.faults == 10
    assert figures.made_good >= 5
    assert figures.old + figures.new > 0


def main() -> None:
    """A line for each operation."""
    most_cells = int(os.environ["CAIRN_CELLS"]) if "CAIRN_CELLS" in os.environ else None
    store = STORES[sys.argv[1]]
    for name in sys.argv[2:] or NAMES:
        with store.running() as server, tempfile.TemporaryDirectory() as work:
            print(f"{name}: {play(store, server, Path(work), most_cells=most_cells, names=(name,))}", flush=True)


if __name__ == "__main__":
    main()
