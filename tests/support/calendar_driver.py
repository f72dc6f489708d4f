"""The driver of the operators, without Spark: each shard runs in this process."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from cairn import testing
from cairn.driver import driver
from cairn.operations.intervals import process_interval
from tests.support.counting import Counting

if __name__ == "__main__":
    # `cairn.testing` runs a shard's part of an interval in the same way.
    driver.Driver.connect = lambda *_: testing.PlanningSession("UTC")  # type: ignore[assignment, method-assign]
    on_shards: Any = partial(testing._on_shards, Counting)
    process_interval._on_spark = on_shards
    sys.exit(driver.main())
