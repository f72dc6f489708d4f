"""What processors put into state, value by value: the calls that Spark and Cairn are compared on."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import Row

TYPES = {
    "boolean": "v boolean",
    "tinyint": "v tinyint",
    "smallint": "v smallint",
    "int": "v int",
    "bigint": "v bigint",
    "float": "v float",
    "double": "v double",
    "string": "v string",
    "binary": "v binary",
    "date": "v date",
    "timestamp": "v timestamp",
    "timestamp_ntz": "v timestamp_ntz",
    "decimal": "v decimal(10,2)",
    "wide": "v decimal(38,6)",
    "array": "v array<string>",
    "map": "v map<string, int>",
    "struct": "v struct<a: int, b: string>",
    "pair": "a string, b string",
}


Named = collections.namedtuple("Named", "a b")

# What the expressions may use.
SCOPE = {
    "np": np,
    "pd": pd,
    "Row": Row,
    "D": Decimal,
    "UTC": UTC,
    "date": date,
    "datetime": datetime,
    "timedelta": timedelta,
    "timezone": timezone,
    "Named": Named,
    "deque": collections.deque,
}


class Puts(StatefulProcessor):
    """Puts what an expression gives into the state of a type and tells what comes back."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.values = {name: handle.getValueState(f"v_{name}", ddl) for name, ddl in TYPES.items()}

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            yield Row(n=key[0], type=row.type, expression=row.expression, result=self.put(row.type, row.expression))

    def put(self, name: str, expression: str) -> str:
        state = self.values[name]
        try:
            state.update(eval(expression, dict(SCOPE)))
        except Exception as error:
            return f"refused: {type(error).__name__}"
        value = state.get()
        return f"{value!r} {[type(v).__name__ for v in value]}"
