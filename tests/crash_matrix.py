"""The whole crash matrix, with its figures: ``python -m tests.crash_matrix``."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import get_args

from tests.support.crash_matrix import OPERATIONS, Fault, InMemory, OnDisk, Place, Totals, crash_matrix


def main() -> None:
    """Every operation on memory and on disk, at every call, under every fault; a line for each and one for all."""
    everything, began_s = Totals(), time.monotonic()
    for operation in OPERATIONS:
        with tempfile.TemporaryDirectory() as folder:
            places: list[Place] = [InMemory(), OnDisk(Path(folder, "disk", "root"))]
            for place in places:
                for fault in get_args(Fault):
                    (work := Path(folder, f"{place.name} {fault}")).mkdir()
                    totals = crash_matrix(operation, place.copy(), work, fault=fault)
                    everything.add(totals)
                    print(f"{operation.name}, {place.name}, {fault}: {totals}", flush=True)
    print(f"in all, {time.monotonic() - began_s:.0f} s: {everything}")


if __name__ == "__main__":
    main()
