"""Laws of sketches and running aggregates: a model of registers, exact sums, and that cuts of the input change
nothing."""

import struct
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cairn.aggregates import ApproxDistinct, Count, First, Last, Max, Mean, Min, RunningAggregate, StdDev, Sum, Variance
from state_backend.formats.hyperloglog import Sketches
from state_backend.values.errors import ProcessorError
from tests.support.arrow_driver import ArrowDriver

# Time is no law: a loaded machine must not fail a test.
laws = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


PRECISION, OWNERS = 5, 4


class Registers:
    """The definition: by owner and register the highest rank."""

    def __init__(self):
        self.ranks = [[0] * (1 << PRECISION) for _ in range(OWNERS)]

    def add(self, owner, value):
        bits = f"{value:064b}"
        register, rest = int(bits[:PRECISION], 2), bits[PRECISION:]
        rank = len(rest) - len(rest.lstrip("0")) + 1
        self.ranks[owner][register] = max(self.ranks[owner][register], rank)

    def encode(self):
        return [self._encode(ranks) for ranks in self.ranks]

    def _encode(self, ranks):
        entries = [(register, rank) for register, rank in enumerate(ranks) if rank]
        if not entries:
            return None
        if 4 * len(entries) < len(ranks):
            words = [register << 6 | rank for register, rank in entries]
            return bytes([1, 1, PRECISION, 0]) + struct.pack(f"<{len(words)}I", *words)
        return bytes([1, 2, PRECISION, 0, *ranks])


hashes = st.integers(0, 2**64 - 1) | st.integers(0, 64).map(lambda bits: (1 << bits) - 1)
additions = st.lists(st.tuples(st.integers(0, OWNERS - 1), hashes), max_size=60)


@laws
@given(st.lists(st.tuples(st.sampled_from(["add", "union", "reread"]), additions), max_size=5))
@example([("add", [(0, (1 << bits) - 1)]) for bits in range(64, -1, -1)])  # each rank of the first register
def test_a_sketch_encodes_the_highest_rank_of_each_register(steps):
    model, sketches = Registers(), Sketches.decode(pa.nulls(OWNERS, pa.binary()), PRECISION)
    empty = sketches
    for step, pairs in steps:
        for owner, value in pairs:
            model.add(owner, value)
        owners = np.array([owner for owner, _ in pairs], np.int64)
        values = np.array([value for _, value in pairs], np.uint64)
        sketches = sketches.union(empty.add(owners, values)) if step == "union" else sketches.add(owners, values)
        if step == "reread":
            sketches = Sketches.decode(sketches.encode(), PRECISION)
        assert sketches.encode().to_pylist() == model.encode()
    assert Sketches.decode(sketches.encode(), PRECISION).estimate().tolist() == sketches.estimate().tolist()


class Total(RunningAggregate):
    total = Sum("value")


@st.composite
def wholes_of_a_type(draw):
    """A bigint or a decimal column, and what its sum may be."""
    if draw(st.booleans()):
        values, of, scale = st.integers(-(2**63), 2**63 - 1), pa.int64(), 0
        bounds = (-(2**63), 2**63 - 1)
    else:
        precision = draw(st.integers(1, 38))
        scale = draw(st.integers(0, precision))
        top = 10**precision - 1
        values, of = st.integers(-top, top) | st.sampled_from([top, -top]), pa.decimal128(precision, scale)
        bounds = (1 - 10 ** min(38, precision + 10), 10 ** min(38, precision + 10) - 1)
    return draw(st.lists(st.none() | values, min_size=1, max_size=12)), of, scale, bounds


@laws
@given(wholes_of_a_type(), st.sets(st.integers(1, 11)))
def test_sums_are_exact_or_refused(column, cuts):
    values, of, scale, (low, high) = column
    unscaled = [None if value is None else value if of == pa.int64() else scaled(value, scale) for value in values]
    rows = pa.table({"key": pa.array([1] * len(values)), "value": pa.array(unscaled, of)})
    batches = np.split(np.array(values, object), sorted(cut for cut in cuts if cut < len(values)))
    totals, so_far = [], 0
    for batch in batches:
        so_far += sum(value for value in batch if value is not None)
        totals.append(so_far)
    driver = ArrowDriver(Total(), rows.schema, ["key"])
    if all(low <= total <= high for total in totals):
        (row,) = driver.run(rows, sorted(cuts)).to_pylist()
        some = any(value is not None for value in values)
        exact = so_far if of == pa.int64() else scaled(so_far, scale)
        assert row["total"] == (exact if some else None)
    else:
        try:
            driver.run(rows, sorted(cuts))
        except ProcessorError as error:
            assert "'value'" in str(error)
        else:
            raise AssertionError(f"the sums {totals} are not all in {low} .. {high}")


def scaled(unscaled, scale):
    """Without rounding to the 28 digits of Python's own context."""
    sign, digits, _ = Decimal(unscaled).as_tuple()
    return Decimal((sign, digits, -scale))


class Several(RunningAggregate):
    rows = Count()
    values = Count("number")
    total = Sum("number")
    mean = Mean("number")
    spread = Variance("number")
    deviation = StdDev("number")
    least = Min("number")
    most = Max("number")
    lowest = Min("text")
    highest = Max("text")
    first = First("text")
    last = Last("text")
    some_first = First("text", ignore_nulls=True)
    some_last = Last("number", ignore_nulls=True)
    different = ApproxDistinct("text", relative_error=0.3)


SCHEMA = pa.schema([("key", pa.int64()), ("number", pa.float64()), ("text", pa.string())])
value_rows = st.fixed_dictionaries(
    {"key": st.integers(0, 4), "number": st.none() | st.floats(), "text": st.none() | st.text(max_size=3)}
)


@laws
@given(st.lists(value_rows, max_size=40), st.lists(st.integers(0, 40), max_size=6), st.integers(0, 40))
@pytest.mark.long("half a second", runs_in="ci")
def test_aggregates_are_identical_for_any_batches_and_intervals(rows, cuts, later):
    """Rows of a key in one interval, in batches, or in two intervals: its state, and its last output, are the same."""

    def table(part):
        return pa.Table.from_pylist(sorted(part, key=lambda row: row["key"]), SCHEMA)

    def last_outputs(*parts):
        driver, found = ArrowDriver(Several(), SCHEMA, ["key"]), {}
        for part in parts:
            found |= {row["key"]: repr(row) for row in run(driver, table(part))}
        return found, {key: repr(values) for key, values in driver.stored["aggregates"].items()}

    def run(driver, part):
        return driver.run(part, cuts).to_pylist() if len(part) else []

    whole, outputs = ArrowDriver(Several(), SCHEMA, ["key"]), []
    if rows:
        outputs = whole.run(table(rows)).to_pylist()
    state = {key: repr(values) for key, values in whole.stored["aggregates"].items()}
    expected = {row["key"]: repr(row) for row in outputs}, state
    assert last_outputs(rows) == expected
    assert last_outputs(rows[:later], rows[later:]) == expected
