"""Two intervals on a Spark Connect server, by the PySpark that this process imports.

python -m tests.support.client_of_server sc://127.0.0.1:PORT ROOT
"""

from __future__ import annotations

import sys

from cairn.operations.intervals.run_intervals import run_intervals
from cairn.spark.session import connect
from tests.support.counting import DAYS, counting, day


def main(url: str, root: str) -> None:
    DAYS.update({day(n).start: [("a", "x", n + 1), ("b", "y", 2)] for n in range(2)})
    for outcome in run_intervals(connect(url, "client of server"), counting(), [day(0), day(1)], root):
        assert outcome.record is not None or outcome.checkpoint
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
