"""Hundreds of corrections of inputs under a real Airflow and a Spark Connect server, each compared with an oracle.

    python -m tests.corrections [--corrections 200] [--hours 3] [--seed 1] [--minutes 120]

All templates of `cairn new`, all interfaces, a folder of Parquet files, a join with a table of the hour, and a chain of two
pipelines. Exit code 0 if each correction was read and no hour differs from the oracle.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.support.corrections import OWN, TEMPLATES, corrected


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--corrections", type=int, default=200)
    parser.add_argument("--hours", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=120, help="no correction begins later than this")
    options = parser.parse_args()
    names = (*(f"c_{template}" for template in TEMPLATES), *OWN)
    until_s = time.monotonic() + options.minutes * 60
    with tempfile.TemporaryDirectory(prefix="cairn-corrections-") as folder:
        Path(folder).chmod(0o711)  # PostgreSQL runs as another user if this process runs as root.
        with corrected(Path(folder) / "all", names, options.hours) as world:
            began_s = time.monotonic()
            world.begin(at_once=4)
            print(f"{len(names)} pipelines ran {options.hours} hours in {time.monotonic() - began_s:.0f} s", flush=True)
            found = [text for name in names for text in world.differences(name)]
            found += world.correct_all(options.corrections, options.seed, 4, until_s)
    for text in found:
        print(f"WRONG: {text}")
    counts = ", ".join(f"{name} {count}" for name, count in sorted(world.done.items()))
    print(f"{world.done.total()} corrections in {time.monotonic() - began_s:.0f} s, {len(found)} differences: {counts}")
    return 1 if found or world.done.total() < options.corrections else 0


if __name__ == "__main__":
    sys.exit(main())
