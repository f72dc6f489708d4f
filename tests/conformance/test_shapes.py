"""Many small processors under Spark and here: outputs with their Python types, states and timers must be the same."""

from __future__ import annotations

import ast
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance.generator import DIFFERENT, WRITTEN_ROWS
from tests.conformance.shapes import (
    EVENT_SHAPES,
    FIELDS,
    INPUT_SCHEMA,
    INTS,
    KEY,
    OUTPUT_SCHEMA,
    SHAPES,
    EventMux,
    EventMuxFrames,
    Mux,
    MuxFrames,
    batches,
    states_of,
)
from tests.support.both_engines import Both, run_both
from tests.support.spark_streaming import Case
from tests.support.tiers import ALL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

LONG = ALL
MUXES: dict[tuple[str, str], type[Mux]] = {
    ("row", "processing"): Mux,
    ("pandas", "processing"): MuxFrames,
    ("row", "event"): EventMux,
    ("pandas", "event"): EventMuxFrames,
}
if not LONG:
    # tests/integration/test_differential.py compares rows by processing time.
    MUXES = {case: MUXES[case] for case in [("row", "event")]}
READ = {"Composite_v", "IntoState_m", "Reorder_waiting"}


Differences = dict[str, list[str]]


@pytest.fixture(scope="module")
def compared(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Differences]:
    """Per API and time mode. One query of each engine for all shapes."""
    found = {}
    for (api, mode), mux in MUXES.items():
        both = run_both(spark, _case(api, mode, mux), tmp_path_factory.mktemp(f"{api}-{mode}"))
        assert all(by_shape(both, shape) for shape in mux.table if shape != "Quiet"), "a shape put nothing out"
        found[api, mode] = _by_shape(both)
    return found


def by_shape(both: Both, shape: str) -> list[Any]:
    return [row for rows in both.spark.outputs for row in rows if row["shape"] == shape]


def _case(api: str, mode: str, mux: type[Mux]) -> Case:
    # A state takes Spark a second to read.
    keys = ("a", "b", "", None) if LONG else ("a", None)
    # Under Spark a null in any key's rows makes floats of all integers of the batch; here only of that key's.
    nulls = () if mode == "event" else FIELDS if api == "row" else [name for name in FIELDS if name not in INTS]
    event: dict[str, Any] = {"event_time": "at", "watermark_delay": timedelta(seconds=0)} if mode == "event" else {}
    return Case(
        processor=mux,
        input_schema=INPUT_SCHEMA,
        output_schema=OUTPUT_SCHEMA,
        key=KEY,
        batches=batches(mux.table, seed=7, count=4 if LONG else 3, keys=keys, nulls=nulls),
        states={name: kind for name, kind in states_of(mux).items() if LONG or name in READ},
        api=api,
        time_mode=mode,
        **event,
    )


def _by_shape(both: Both) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in both.differences():
        key: Any = ast.literal_eval(line.split("key ", 1)[1].split(", item")[0])
        shape, _ = key if isinstance(key, list) else key[0]
        found.setdefault(shape, []).append(line)
    return found


CASES = [(api, mode, shape) for api, mode in MUXES for shape in (EVENT_SHAPES if mode == "event" else SHAPES)]


@pytest.mark.parametrize(("api", "mode", "shape"), CASES, ids=lambda v: str(v).replace(" ", "-"))
def test_each_shape_of_state_gives_what_sparks_operator_gives(
    compared: dict[tuple[str, str], Differences], api: str, mode: str, shape: str
) -> None:
    if shape == "Composite" and WRITTEN_ROWS in DIFFERENT:
        pytest.skip("Spark's operator refuses a Row inside a struct, also one that it gave")
    found = compared[api, mode].get(shape, [])
    assert found == [], "\n".join(found[:20])
