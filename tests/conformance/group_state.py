"""A function of ``applyInPandasWithState`` whose rows say what it calls, so that one query asks many keys many things."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd
from pyspark.sql.streaming.state import GroupState

from cairn.pandas_with_state import PandasWithState, pandas_with_state

KEY = ["k", "s"]
INPUT_SCHEMA = "k int, s string, seq int, call string, f float, b bigint, d decimal(10, 2), at timestamp"
STATE_SCHEMA = "n long, t timestamp, x string"
OUTPUT_SCHEMA = "k int, s string, answer string"
T0 = datetime(2024, 1, 1, tzinfo=UTC)
T0_MS = 1_704_067_200_000


def scripted(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Makes the calls of its rows, and yields what each gave, types included."""
    seen: dict[str, Any] = {
        "key": repr(key),
        "types": [type(part).__name__ for part in key],
        "state": [state.hasTimedOut, state.exists, repr(state.getOption), str(state), state.oldTimeoutTimestamp],
        "watermark": _result("state.getCurrentWatermarkMs()", state),
        "frames": [],
        "calls": [],
    }
    for frame in frames:
        first = [f"{v!r} {type(v).__name__}" for v in frame.iloc[0]] if len(frame) else []
        cells = [f"{frame[c].iloc[0]!r}" for c in frame] if len(frame) else []
        seen["frames"].append([len(frame), [f"{c} {frame[c].dtype}" for c in frame], repr(frame.index), first, cells])
        seen["calls"] += [[call, _result(call, state)] for call in frame["call"]]
    k = None if pd.isna(key[0]) else int(key[0])
    # One frame that is empty, and the answer in two rows.
    yield pd.DataFrame()
    yield pd.DataFrame({"k": [k, k], "s": [key[1]] * 2, "answer": [json.dumps(seen), "more"]})


def _result(call: str, state: GroupState) -> str:
    scope = {"state": state, "now": state.getCurrentProcessingTimeMs(), "np": np, "pd": pd, "datetime": datetime}
    try:
        return repr(eval(call, scope))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def by_processing_time() -> PandasWithState:
    return _processor("ProcessingTimeTimeout")


def by_event_time() -> PandasWithState:
    return _processor("EventTimeTimeout")


def untimed() -> PandasWithState:
    return _processor("NoTimeout")


def _processor(timeout: Any) -> PandasWithState:
    return pandas_with_state(scripted, key=KEY, input_schema=INPUT_SCHEMA, state_schema=STATE_SCHEMA, timeout=timeout)


def rows(*calls: tuple[int | None, str], hour: int = 0) -> list[tuple[Any, ...]]:
    """A batch of ``(key, call)``; every event is at this hour."""
    at = T0.replace(hour=hour)
    return [(k, None if k is None else f"s{k}", n, call, 0.1, 2**40, None, at) for n, (k, call) in enumerate(calls)]
