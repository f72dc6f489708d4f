"""Ready-made processors give the rows of SQL queries over the whole history, however the history is cut into intervals.

Windows and funnels: test_window_laws.py; joins: test_join_laws.py.
"""

from __future__ import annotations

from datetime import date, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.processors import Deduplicate, History, Latest, TopN
from tests.support.cut_histories import as_texts, ask, histories, oracle_laws, pipeline_of, run_cut, three_cuts, union

pytestmark = pytest.mark.long("up to 100 histories for each processor, each in three cuts", runs_in="ci")


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


_VALUES: dict[str, Any] = {
    "int": st.integers(-1, 2),
    "string": st.sampled_from(["", "a", "Z", "ä"]),
    "double": st.sampled_from([-1.5, 0.0, float("nan"), float("inf")]),
    "decimal(9,2)": st.sampled_from([Decimal("-1.00"), Decimal("0.50")]),
    "date": st.sampled_from([date(2024, 1, 1), date(1969, 1, 1)]),
    "boolean": st.booleans(),
}


def of_some_type(name: str, **others: tuple[str, Any]) -> Any:
    """Return histories that have a column of any type with an order."""
    return st.sampled_from(sorted(_VALUES)).flatmap(
        lambda of: histories(columns={name: (of, st.none() | _VALUES[of]), **others})
    )


@oracle_laws
@given(
    of_some_type("version", gone=("boolean", st.none() | st.booleans())),
    three_cuts(),
    st.sampled_from([None, "version", ("version", "t")]),
    st.booleans(),
    st.sampled_from([None, timedelta(days=1)]),
)
def test_latest_has_the_newest_row_per_key(history: Any, cuts: Any, version: Any, deletes: bool, horizon: Any) -> None:
    declared = {"version": version, **({"deleted": "gone", "horizon": horizon} if deletes else {})}
    pipeline = pipeline_of(type("Newest", (Latest,), declared))
    columns = () if version is None else (version,) if isinstance(version, str) else version
    newest_first = ", ".join([*(f"{name} DESC NULLS LAST" for name in columns), "arrived DESC", "seq DESC"])
    for cut in cuts:
        table: dict[str, Any] = {}
        for end, output in zip(cut.ends, run_cut(pipeline, history, cut), strict=True):
            assert len({repr(row["k"]) for row in output}) == len(output)
            for row in output:
                before = table.pop(repr(row["k"]), None)
                assert before is None or as_texts([before]) != as_texts([row]), "the newest row has not changed"
                if not (deletes and row["gone"]):
                    table[repr(row["k"])] = row
            expected = ask(
                f"""SELECT * EXCLUDE place FROM (
                    SELECT *, row_number() OVER (PARTITION BY k ORDER BY {newest_first}) AS place
                    FROM history WHERE arrived < '{end}'
                ) WHERE place = 1 AND {"gone IS NOT TRUE" if deletes else "TRUE"}""",
                history,
            )
            assert as_texts(list(table.values())) == as_texts(expected), (cut, end)


@oracle_laws
@given(
    of_some_type("score"),
    three_cuts(),
    st.integers(1, 3),
    st.sampled_from(["score", "score desc", ("score desc", "t asc"), ("t", "score desc")]),
    st.sampled_from(["first", "all"]),
)
def test_top_n_has_the_best_n_rows_per_key_as_in_sql(history: Any, cuts: Any, n: int, order: Any, ties: str) -> None:
    pipeline = pipeline_of(type("Best", (TopN,), {"n": n, "order": order, "ties": ties}))
    columns = [order] if isinstance(order, str) else order
    in_sql = [f"{column} NULLS {'LAST' if 'desc' in column else 'FIRST'}" for column in columns]
    by = ", ".join(in_sql if ties == "all" else [*in_sql, "arrived", "seq"])
    number = "rank" if ties == "all" else "row_number"
    for cut in cuts:
        table: dict[str, list[Any]] = {}
        for end, output in zip(cut.ends, run_cut(pipeline, history, cut), strict=True):
            for key in {repr(row["k"]) for row in output}:
                table[key] = [row for row in output if repr(row["k"]) == key]
            expected = ask(
                f"""SELECT * FROM (
                    SELECT *, {number}() OVER (PARTITION BY k ORDER BY {by}) AS rank FROM history WHERE arrived < '{end}'
                ) WHERE rank <= {n}""",
                history,
            )
            assert as_texts([row for rows in table.values() for row in rows]) == as_texts(expected), (cut, end)


@oracle_laws
@given(
    histories(
        columns={
            "value": ("int", st.none() | st.integers(0, 1)),
            "other": ("double", st.sampled_from([None, 0.5, float("nan")])),
            "gone": ("boolean", st.none() | st.sampled_from([False, False, True])),
        },
        null_times=False,
    ),
    three_cuts(),
    st.booleans(),
    st.sampled_from([None, "value", ("other", "value"), "t"]),
)
def test_history_has_the_versions_of_each_key_as_in_sql(history: Any, cuts: Any, deletes: bool, tracked: Any) -> None:
    declared = {"tracked": tracked, **({"deleted": "gone"} if deletes else {})}
    pipeline = pipeline_of(type("Versions", (History,), declared))
    names = tracked or ("value", "other", *(() if deletes else ("gone",)))
    compared = (names,) if isinstance(names, str) else names
    now = f"[{', '.join(f'{name}::VARCHAR' for name in compared)}]"
    for cut in cuts:
        table: dict[Any, Any] = {}
        for end, output in zip(cut.ends, run_cut(pipeline, history, cut), strict=True):
            versions = [(repr(row["k"]), row["valid_from"]) for row in output]
            assert len(set(versions)) == len(versions)
            for version, row in zip(versions, output, strict=True):
                assert version not in table or as_texts([table[version]]) != as_texts([row]), "nothing has changed"
                table[version] = row
                if row["valid_from"] == row["valid_to"]:
                    del table[version]
            expected = ask(
                f"""WITH rows AS (
                    SELECT * EXCLUDE place FROM (
                        SELECT *, row_number() OVER (PARTITION BY k, t ORDER BY arrived DESC, seq DESC) AS place
                        FROM history WHERE arrived < '{end}'
                    ) WHERE place = 1
                ), compared AS (
                    SELECT *, {"gone IS TRUE" if deletes else "FALSE"} AS deletes, {now} AS compared FROM rows
                ), changes AS (
                    SELECT * FROM compared QUALIFY deletes
                        OR row_number() OVER (PARTITION BY k ORDER BY t) = 1
                        OR lag(deletes) OVER (PARTITION BY k ORDER BY t)
                        OR compared IS DISTINCT FROM lag(compared) OVER (PARTITION BY k ORDER BY t)
                ), versions AS (
                    SELECT *, t AS valid_from, lead(t) OVER (PARTITION BY k ORDER BY t) AS valid_to FROM changes
                )
                SELECT * EXCLUDE (t, deletes, compared {", gone" if deletes else ""}) FROM versions WHERE NOT deletes""",
                history,
            )
            assert as_texts(list(table.values())) == as_texts(expected), (cut, end)
