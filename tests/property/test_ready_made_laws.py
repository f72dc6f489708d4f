"""Ready-made processors beside oracles in SQL, which see the whole history. The cut into intervals changes nothing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.processors import Deduplicate
from tests.support.cut_histories import (
    as_texts,
    ask,
    histories,
    oracle_laws,
    pipeline_of,
    run_cut,
    three_cuts,
    union,
)

pytestmark = pytest.mark.long("up to 300 histories for each processor, each in three cuts", runs_in="ci")

# --- Deduplicate ------------------------------------------------------------------------------------------------------

_WALK = """
WITH RECURSIVE timed AS (
    SELECT *, row_number() OVER (PARTITION BY k ORDER BY arrived, seq) AS n FROM history WHERE t IS NOT NULL
), walk AS (
    SELECT k, seq, n, t, t AS opened, 0 AS number FROM timed WHERE n = 1
    UNION ALL
    SELECT n.k, n.seq, n.n, n.t,
        CASE WHEN n.t >= w.opened + {horizon} THEN n.t ELSE w.opened END,
        CASE WHEN n.t >= w.opened + {horizon} THEN 0 ELSE w.number + 1 END
    FROM walk w JOIN timed n ON n.k IS NOT DISTINCT FROM w.k AND n.n = w.n + 1
), horizons AS (
    SELECT *, count_if(number = 0) OVER (PARTITION BY k ORDER BY n) AS h FROM walk
), ranked AS (
    SELECT *,
        row_number() OVER (PARTITION BY k, h ORDER BY t DESC, n DESC) AS place,
        max({{'t': t, 'n': n, 'seq': seq}}) OVER (
            PARTITION BY k, h ORDER BY n ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS best_before
    FROM horizons
), untimed AS (SELECT seq, 0 AS number FROM history WHERE t IS NULL),
numbered AS ({numbered})
SELECT h.*, {number} FROM numbered JOIN history h USING (seq)
"""
_COUNTED = {
    "first": "SELECT seq, number FROM walk WHERE number = 0 UNION ALL FROM untimed",
    "last": "SELECT seq, 0 AS number FROM ranked WHERE place = 1 UNION ALL FROM untimed",
}
_DUPLICATES = {
    "first": "SELECT seq, number FROM walk WHERE number > 0",
    "last": "SELECT if(t >= best_before.t, best_before.seq, seq), number FROM ranked WHERE number > 0",
}
_FOR_EVER = """
SELECT *, row_number() OVER (PARTITION BY k ORDER BY arrived, seq) - 1 AS duplicate_number FROM history
"""


def deduplicated(keep: str, horizon: timedelta | None, output_duplicates: bool) -> str:
    if horizon is None:
        every = f"SELECT * FROM ({_FOR_EVER})"
        return (
            every
            if output_duplicates
            else f"SELECT * EXCLUDE duplicate_number FROM ({_FOR_EVER}) WHERE duplicate_number = 0"
        )
    numbered = _COUNTED[keep] + (f" UNION ALL {_DUPLICATES[keep]}" if output_duplicates else "")
    return _WALK.format(
        horizon=f"INTERVAL {horizon // timedelta(minutes=1)} MINUTES",
        numbered=numbered,
        number="CAST(number AS BIGINT) AS duplicate_number" if output_duplicates else "NULL AS nothing",
    )


@oracle_laws
@given(
    histories(columns={"value": ("int", st.none() | st.integers(0, 2))}),
    three_cuts(),
    st.sampled_from(["first", "last"]),
    st.sampled_from([timedelta(minutes=m) for m in (5, 60, 600)] + [None]),
    st.booleans(),
)
def test_deduplicate(history: Any, cuts: Any, keep: str, horizon: timedelta | None, output_duplicates: bool) -> None:
    if horizon is None:
        keep = "first"
    declared = {"keep": keep, "horizon": horizon, "output_duplicates": output_duplicates}
    pipeline = pipeline_of(type("Once", (Deduplicate,), declared))
    expected = ask(deduplicated(keep, horizon, output_duplicates), history)
    for row in expected:
        row.pop("nothing", None)
    for cut in cuts:
        assert union(run_cut(pipeline, history, cut)) == as_texts(expected), cut
