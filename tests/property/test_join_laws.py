"""The ready-made joins give the rows of SQL queries over the whole history, however the history is cut into intervals."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.processors import IntervalJoin, LookupJoin
from tests.support.cut_histories import as_texts, ask, histories, oracle_laws, pipeline_of, run_cut, three_cuts, union

pytestmark = pytest.mark.long("up to 100 histories for each join, each in three cuts", runs_in="ci")

_SIDES = """
WITH l AS (SELECT k, arrived AS l_arrived, seq AS l_seq, t AS l_t, l_value FROM history WHERE kind = 'l'),
r AS (SELECT k, arrived AS r_arrived, seq AS r_seq, t AS r_t, r_value, r_gone FROM history WHERE kind = 'r')
"""
_two_inputs = histories(
    columns={
        "kind": ("string", st.sampled_from(["l", "r"])),
        "l_value": ("int", st.none() | st.integers(0, 2)),
        "r_value": ("string", st.none() | st.sampled_from(["", "a"])),
        "r_gone": ("boolean", st.sampled_from([None, False, False, True])),
    }
)


@oracle_laws
@given(
    _two_inputs,
    three_cuts(),
    st.sampled_from([(-30, 30), (0, 60), (-90, -10), (10, 10), (0, 0), (5, 300)]),
    st.sampled_from(["inner", "left", "right", "full"]),
)
def test_interval_join_rows_equal_an_sql_join(history: Any, cuts: Any, minutes: tuple[int, int], how: Any) -> None:
    lower, upper = (timedelta(minutes=m) for m in minutes)
    declared = {"left": "l", "right": "r", "lower": lower, "upper": upper, "how": how}
    pipeline = pipeline_of(type("Close", (IntervalJoin,), declared))
    expected = ask(
        f"""{_SIDES} SELECT coalesce(l.k, r.k) AS k, l.* EXCLUDE k, r.* EXCLUDE k FROM l {how} JOIN r
        ON l.k = r.k AND r_t BETWEEN l_t + to_minutes({minutes[0]}) AND l_t + to_minutes({minutes[1]})""",
        history,
    )
    for cut in cuts:
        assert union(run_cut(pipeline, history, cut)) == as_texts(expected), cut


@oracle_laws
@given(_two_inputs, three_cuts(), st.sampled_from(["left", "inner"]), st.booleans())
def test_lookup_join_rows_equal_an_sql_join(history: Any, cuts: Any, how: Any, deletes: bool) -> None:
    declared = {"facts": "l", "table": "r", "how": how, **({"deleted": "r_gone"} if deletes else {})}
    pipeline = pipeline_of(type("AsOf", (LookupJoin,), declared))
    live = "r_gone IS NOT TRUE" if deletes else "TRUE"
    expected = ask(
        f"""{_SIDES}, ranked AS (
            SELECT l.*, r.* EXCLUDE k, row_number() OVER (PARTITION BY l_seq ORDER BY r_t DESC NULLS LAST, r_seq DESC) AS place
            FROM l LEFT JOIN r ON l.k = r.k AND r_t <= l_t
        ) SELECT l.*, r.* EXCLUDE (k {", r_gone" if deletes else ""})
        FROM ranked f JOIN l USING (l_seq) {how} JOIN r ON r.r_seq = f.r_seq AND {live.replace("r_gone", "r.r_gone")} WHERE place = 1""",
        history,
    )
    for cut in cuts:
        assert union(run_cut(pipeline, history, cut)) == as_texts(expected), cut
