"""The crash matrix on Google Cloud Storage, at the granularity of requests, before a real server process.

The suite plays a few cells that a seed picks. All of them, or CAIRN_GCS_CELLS of each operation, are played and counted by
``python -m tests.integration.test_gcs_crash [operation ...]``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.crash_matrix import OPERATIONS
from tests.support.gcs_crash import play
from tests.support.gcs_server import gcs_server

pytestmark = pytest.mark.gcs

NAMES = tuple(o.name for o in OPERATIONS)


@pytest.mark.long("half a minute; test_gcs has faults too")
def test_a_few_faults_of_every_kind(tmp_path: Path) -> None:
    """S7, S8, S13, F54: one fault is made good; a server that is gone leaves the old state or the new one, and the next try ends
    where an undisturbed one would."""
    with gcs_server() as server:
        figures = play(server, tmp_path, most_cells=10, names=("interval",))
    assert figures.faults == 10
    assert figures.made_good >= 5
    assert figures.old + figures.new > 0


def main() -> None:
    """A line for each operation."""
    most_cells = int(os.environ["CAIRN_GCS_CELLS"]) if "CAIRN_GCS_CELLS" in os.environ else None
    for name in sys.argv[1:] or NAMES:
        with gcs_server() as server, tempfile.TemporaryDirectory() as work:
            print(f"{name}: {play(server, Path(work), most_cells=most_cells, names=(name,))}", flush=True)


if __name__ == "__main__":
    main()
