"""Many small processors under Spark and here: outputs with their Python types, states and timers must be the same."""

from __future__ import annotations

import ast
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance.shapes import (
    EVENT_SHAPES,
    INPUT_SCHEMA,
    KEY,
    OUTPUT_SCHEMA,
    SHAPES,
    WRITES,
    EventMux,
    EventMuxFrames,
    Mux,
    MuxFrames,
    batches,
    states_of,
)
from tests.support.both_engines import Both, run_both
from tests.support.spark_streaming import Case

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

MUXES: dict[tuple[str, str], type[Mux]] = {
    ("row", "processing"): Mux,
    ("pandas", "processing"): MuxFrames,
    ("row", "event"): EventMux,
    ("pandas", "event"): EventMuxFrames,
}
LONG = bool(os.environ.get("CAIRN_LONG"))
READ = {"Composite_v", "IntoState_m", "Script_v", "Script_i", "Script_l", "Script_m", "Reorder_waiting"}
Differences = dict[tuple[str, str], dict[str, list[str]]]


@pytest.fixture(scope="module")
def differences(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Differences:
    """Per API and time mode, and per shape, what differs. One query of each engine for all shapes."""
    found: Differences = {}
    for (api, mode), mux in MUXES.items():
        both = run_both(spark, _case(api, mode, mux), tmp_path_factory.mktemp(f"{api}-{mode}"))
        found[api, mode] = _by_shape(both)
        assert all(by_shape(both, shape) for shape in mux.table if shape != "Quiet"), "a shape put nothing out"
    return found


def by_shape(both: Both, shape: str) -> list[Any]:
    return [row for rows in both.spark.outputs for row in rows if row["shape"] == shape]


def _case(api: str, mode: str, mux: type[Mux]) -> Case:
    # A state takes Spark a second to read.
    keys = ("a", "b", "", None) if LONG else ("a", None)
    event: dict[str, Any] = {"event_time": "at", "watermark_delay": timedelta(seconds=0)} if mode == "event" else {}
    return Case(
        processor=mux,
        input_schema=INPUT_SCHEMA,
        output_schema=OUTPUT_SCHEMA,
        key=KEY,
        batches=batches(mux.table, seed=7, count=4 if LONG else 3, keys=keys, event=mode == "event"),
        states={name: kind for name, kind in states_of(mux).items() if LONG or name in READ},
        api=api,
        time_mode=mode,
        **event,
    )


def _by_shape(both: Both) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in both.differences():
        key: Any = ast.literal_eval(line.split("key ", 1)[1].split(", item")[0])
        shape, k = key if isinstance(key, list) else key[0]
        found.setdefault(f"Script {k}" if shape == "Script" else shape, []).append(line)
    return found


CASES = [
    *((api, "processing", s) for api in ("row", "pandas") for s in [*SHAPES, *(f"Script {k}" for k in WRITES)]),
    *((api, "event", s) for api in ("row", "pandas") for s in EVENT_SHAPES),
]
KNOWN: dict[tuple[str, str], str] = {}


@pytest.mark.parametrize(("api", "mode", "shape"), CASES, ids=lambda v: str(v).replace(" ", "-"))
def test_a_shape(differences: Differences, api: str, mode: str, shape: str, request: pytest.FixtureRequest) -> None:
    reason = KNOWN.get((api, shape))
    if reason:
        request.node.add_marker(pytest.mark.xfail(strict=True, reason=reason))
    found = differences[api, mode].get(shape, [])
    assert found == [], "\n".join(found[:20])
