"""The whole crash matrix, with its figures: ``python -m tests.crash_matrix``."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from tests.support.crash_matrix import OPERATIONS, InMemory, OnDisk, Place, Totals, crash_matrix


def main() -> None:
    """Every operation on memory and on disk, at every call; a line for each and one for all."""
    everything, began_s = Totals(), time.monotonic()
    for operation in OPERATIONS:
        with tempfile.TemporaryDirectory() as folder:
            places: list[Place] = [InMemory(), OnDisk(Path(folder, "disk", "root"))]
            for place in places:
                (work := Path(folder, place.name)).mkdir()
                totals = crash_matrix(operation, place, work)
                everything.add(totals)
                print(f"{operation.name}, {place.name}: {totals}", flush=True)
    print(f"in all, {time.monotonic() - began_s:.0f} s: {everything}")


if __name__ == "__main__":
    main()
