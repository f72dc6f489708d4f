"""Many small processors under Spark and here: outputs with their Python types, states and timers must be the same."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance.shapes import (
    EVENT_SHAPES,
    FIELDS,
    INPUT_SCHEMA,
    INTS,
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
READ = {"Composite_v", "IntoState_m", "Script_v", "Script_i", "Script_l", "Script_m", "Reorder_waiting"}


@dataclass(frozen=True, slots=True)
class Compared:
    """Per shape what differs, and per key of ``Script`` what either engine emitted."""

    differences: dict[str, list[str]]
    spark: dict[str, list[str]]
    cairn: dict[str, list[str]]


@pytest.fixture(scope="module")
def compared(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Compared]:
    """Per API and time mode. One query of each engine for all shapes."""
    found = {}
    for (api, mode), mux in MUXES.items():
        both = run_both(spark, _case(api, mode, mux), tmp_path_factory.mktemp(f"{api}-{mode}"))
        assert all(by_shape(both, shape) for shape in mux.table if shape != "Quiet"), "a shape put nothing out"
        found[api, mode] = Compared(_by_shape(both), _scripts(both.spark.outputs), _scripts(both.cairn.outputs))
    return found


def _scripts(outputs: list[list[dict[str, Any]]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in outputs[0]:
        if row["shape"] == "Script":
            found.setdefault(row["k"], []).append(row["out"])
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
        shape, k = key if isinstance(key, list) else key[0]
        found.setdefault(f"Script {k}" if shape == "Script" else shape, []).append(line)
    return found


# What Spark stores, or turns to null without a word, and what is done here. In a tuple (result of the write, what is read).
_NULLS = "tuple(NoneType None, tuple(NoneType None, NoneType None))"
BY_DESIGN: dict[str, tuple[str, str]] = {
    "dict": (_NULLS, "tuple(NoneType None, tuple(int 1, float 2.0))"),
    "float_from_int": (
        "tuple(NoneType None, tuple(int 1, NoneType None))",
        "tuple(NoneType None, tuple(int 1, float 3.0))",
    ),
    "float_overflow": ("tuple(NoneType None, tuple(int 1, float inf))", "raised StateTypeError"),
    "int_from_bool": ("tuple(NoneType None, tuple(NoneType None, float 1.0))", "raised StateTypeError"),
    "int_from_float": (_NULLS, "raised StateTypeError"),
    "long_int": ("tuple(NoneType None, tuple(int -2147483648, NoneType None))", "raised StateTypeError"),
}
SAME = [*(shape for shape in SHAPES if shape != "Script"), *(f"Script {k}" for k in WRITES if k not in BY_DESIGN)]
CASES = [(api, mode, shape) for api, mode in MUXES for shape in (EVENT_SHAPES if mode == "event" else SAME)]


@pytest.mark.parametrize(("api", "mode", "shape"), CASES, ids=lambda v: str(v).replace(" ", "-"))
def test_a_shape(compared: dict[tuple[str, str], Compared], api: str, mode: str, shape: str) -> None:
    found = compared[api, mode].differences.get(shape, [])
    assert found == [], "\n".join(found[:20])


@pytest.mark.parametrize("api", ["row", "pandas"])
@pytest.mark.long("a minute of Spark")
def test_what_differs_by_design(compared: dict[tuple[str, str], Compared], api: str) -> None:
    """The docs list these."""
    runs = compared[api, "processing"]
    assert {k: (runs.spark[k], runs.cairn[k]) for k in BY_DESIGN} == {k: ([a], [b]) for k, (a, b) in BY_DESIGN.items()}
