"""Pipelines of accounts that `cairn replay --code` names."""

from __future__ import annotations

from typing import Any

from cairn.pipeline import Interval
from tests.support.accounts import Broken, Random, accounts, days_of, position_of, read_days


def read_moved(spark: Any, interval: Interval) -> Any:
    from tests.support.accounts import SCHEMA

    return spark.createDataFrame(days_of(interval)[1:], SCHEMA), {"day": "moved"}


def read_forgetful(spark: Any, interval: Interval) -> Any:
    from tests.support.accounts import SCHEMA

    return spark.createDataFrame(days_of(interval)[1:], SCHEMA), position_of(interval)


ROW = accounts("row", source=read_days)
PANDAS = accounts("pandas", source=read_days)
ARROW = accounts("arrow", source=read_days)
BROKEN = accounts("row", source=read_days, processor=Broken)
RANDOM = accounts("row", source=read_days, processor=Random)
MOVED = accounts("row", source=read_moved)
FORGETFUL = accounts("row", source=read_forgetful)
