"""A process that tries other code on some days without Spark, to be killed at any time: ``python -m tests.support.trial_driver ROOT DAYS``.

Production is that of ``tests.support.range_driver``; the first of its days are tried. It prints ``ready`` when it begins.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from cairn import testing
from cairn.trials.try_code import try_code
from tests.support.counting import Counting, day
from tests.support.range_driver import pipeline


class Shouting(Counting):
    """Counts each row twice."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        twice = [row for row in rows for _ in range(2)]
        yield from super().handleInputRows(key, iter(twice), timerValues)


def try_days(root: str, days: int) -> None:
    piped = replace(pipeline(), processor=Shouting)
    try_code(
        testing.PlanningSession("UTC"),  # type: ignore[arg-type]
        piped,
        [day(n) for n in range(1, days)],
        root,
        code="tests.support.trial_driver:SHOUTING",
        trial="shouting",
        now_ms=time.time_ns() // 1_000_000,
        on_shards=partial(testing._on_shards, piped.processor),
        on_outcome=lambda outcome, progress: print(progress.done, flush=True),
    )


if __name__ == "__main__":
    print("ready", flush=True)
    try_days(sys.argv[1], int(sys.argv[2]))
