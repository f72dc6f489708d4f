"""Columns as the Python values that handlers get."""

import pyarrow as pa
import pytest

from cairn.runners.input_rows import python_values

FIRST_US, LAST_US = -62_135_596_800_000_000, 253_402_300_799_999_999


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Vienna"])
def test_timestamps_become_the_same_python_values_as_with_arrow(zone):
    edges = [0, 1] if zone == "Europe/Vienna" else [FIRST_US, LAST_US]
    column = pa.array([None, 0, -1, 10**15 + 7, *edges], pa.timestamp("us", zone))
    for part in (column, column[1:4], column[:1], column[:0]):
        found, wanted = python_values(part), part.to_pylist()
        assert repr(found) == repr(wanted)
        assert [getattr(value, "tzinfo", None) for value in found] == [getattr(v, "tzinfo", None) for v in wanted]


def test_a_timestamp_beyond_the_range_of_datetime_raises_an_overflow_error():
    with pytest.raises(OverflowError):
        python_values(pa.array([LAST_US + 1], pa.timestamp("us", "UTC")))
