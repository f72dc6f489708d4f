"""What the benchmark report makes of samples, and how profiled time is shared out."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks import suite
from benchmarks.cpu_profile import NOBODY, owner_by_path, shares
from benchmarks.flink.__main__ import questions, samples_of
from benchmarks.flink.inputs import ROW, Workload, in_order_per_key, write_batches
from benchmarks.report import (
    Check,
    Part,
    Question,
    Run,
    as_markdown,
    as_table,
    build_report,
    joined,
    number,
    passed,
    together,
)
from benchmarks.report_files import into_report
from benchmarks.report_summary import MAIN_LINES, as_main_table
from benchmarks.scales import Scale

REPOSITORY = Path(__file__).resolve().parents[2]

FAST = Question(
    section="row", label="rate", metric="keys_per_s", unit="keys/s", peers=("spark", "spark tuned"), at_least_ratio=40
)
SLOW = Question(
    section="row",
    label="time",
    metric="append_us",
    unit="us",
    higher_is_better=False,
    peers=("spark", "spark tuned"),
    against=("spark",),
)
BOUND = Question(section="rss", label="peak", metric="peak_mib", unit="MiB", higher_is_better=False, at_most=1024)


def measured(section: str, variant: str, **samples: tuple[float, ...]) -> Run:
    return Run(section=section, variant=variant, status="measured", samples=samples)


def report(
    *runs: Run, questions: tuple[Question, ...], checks: tuple[Check, ...] = (), judged: bool = True
) -> dict[str, Any]:
    return build_report(
        runs,
        questions,
        checks,
        scale="full",
        judged=judged,
        started="2024-01-01T00:00:00+00:00",
        seconds=1.5,
        environment={"versions": {"pyspark": "4.3.0"}, "cpu": {"model": "x", "count": 2}, "load_before": 0.1},
    )


ROW_RUNS = (
    measured("row", "cairn", keys_per_s=(90.0, 100.0, 400.0), append_us=(2.0,)),
    measured("row", "spark", keys_per_s=(1.0, 2.0), append_us=(300.0,)),
    measured("row", "spark tuned", keys_per_s=(2.0,), append_us=(50.0,)),
)


def test_ratio_is_of_medians_and_to_the_better_peer() -> None:
    fast, slow = report(*ROW_RUNS, questions=(FAST, SLOW))["lines"]
    assert (fast["ours"], fast["peers"]) == (100, {"spark": 1.5, "spark tuned": 2})
    assert (fast["best_peer"], fast["ratio"], fast["verdict"]) == ("spark tuned", 50, "met")
    # The tuned peer is better, but only the default one is asked for.
    assert (slow["peers"], slow["best_peer"], slow["ratio"]) == ({"spark": 300, "spark tuned": 50}, "spark", 150)
    assert slow["verdict"] == "no target"


@pytest.mark.parametrize(
    ("question", "ours", "verdict"),
    [
        (FAST, 80.0, "met"),
        (FAST, 79.9, "missed"),
        (replace(FAST, at_least=100.0), 90.0, "missed"),
        (replace(FAST, at_least=100.0, at_least_ratio=None), 100.0, "met"),
        (replace(FAST, at_most=90.0), 91.0, "missed"),
        (replace(FAST, at_least_ratio=None), 80.0, "no target"),
    ],
)
def test_verdicts(question: Question, ours: float, verdict: str) -> None:
    runs = (measured("row", "cairn", keys_per_s=(ours,)), measured("row", "spark", keys_per_s=(2.0,)))
    assert report(*runs, questions=(question,))["lines"][0]["verdict"] == verdict
    small = report(*runs, questions=(question,), judged=False)["lines"][0]["verdict"]
    assert small == ("no target" if verdict == "no target" else "not judged")


def test_an_upper_bound_of_our_own() -> None:
    for peak, verdict in ((1024.0, "met"), (1025.0, "missed")):
        (line,) = report(measured("rss", "cairn", peak_mib=(peak,)), questions=(BOUND,))["lines"]
        assert (line["verdict"], line["target"], line["ratio"]) == (verdict, "<= 1,024", None)


@pytest.mark.parametrize("status", ["not built", "failed"])
@pytest.mark.parametrize("missing", ["cairn", "spark"])
def test_what_was_not_measured_is_said_and_not_judged(status: Any, missing: str) -> None:
    runs = [
        Run(section="row", variant=variant, status=status, note="log\nwhy")
        if variant == missing
        else measured("row", variant, keys_per_s=(1.0,))
        for variant in ("cairn", "spark")
    ]
    made = report(*runs, questions=(FAST, BOUND))
    (line,) = made["lines"]  # the section that did not run at all is left out
    assert line["verdict"] == "not measured"
    assert line["ratio"] is None
    assert line["note"] == f"{missing}: {status}; spark tuned: not run"
    assert passed(made) is (status == "not built")
    assert f"row/{missing}: {status}: why" in as_table(made)


def test_engines_that_differ_fail_the_suite() -> None:
    for equal, expected in ((True, True), (None, True), (False, False)):
        made = report(*ROW_RUNS, questions=(FAST,), checks=(Check(section="row", label="state", equal=equal),))
        assert passed(made) is expected


def test_a_run_without_samples_is_not_measured() -> None:
    with pytest.raises(ValueError, match="no samples of"):
        measured("row", "cairn", keys_per_s=())
    with pytest.raises(ValueError, match="no samples of anything"):
        measured("row", "cairn")
    with pytest.raises(ValueError, match="is 'failed'"):
        replace(measured("row", "cairn", keys_per_s=(1.0,)), status="failed")


def test_the_report_is_json_and_reads_back_into_the_same_tables() -> None:
    made = report(*ROW_RUNS, questions=(FAST, SLOW), checks=(Check(section="row", label="state", equal=True),))
    again = json.loads(json.dumps(made))
    assert as_table(again) == as_table(made)
    markdown = as_markdown(again)
    assert "| row | rate | keys/s | 100 | spark 1.5, spark tuned 2 | 50x | ratio >= 40 | met |" in markdown
    assert markdown.startswith("No peer is better.\n")
    lost = report(
        *ROW_RUNS,
        measured("row", "fast", append_us=(0.5,)),
        questions=(FAST, replace(SLOW, peers=("fast",), against=())),
    )
    assert as_markdown(lost).startswith("**A peer is better in 1 of 2 lines:**\n- *row*: time (fast, 4x)\n")
    assert markdown.endswith("Outputs and states of the engines were equal in 1 of 1 comparisons.")
    assert again["runs"][0]["samples"]["keys_per_s"] == [90, 100, 400]
    assert again["runs"][0]["medians"]["keys_per_s"] == 100


def test_rounds_are_joined_and_one_that_failed_counts_for_all() -> None:
    rounds = [
        measured("row", v, keys_per_s=(float(n),)) for n, v in ((1, "cairn"), (2, "spark"), (3, "spark"), (4, "cairn"))
    ]
    assert [(run.variant, run.samples) for run in joined(rounds)] == [
        ("cairn", {"keys_per_s": [1.0, 4.0]}),
        ("spark", {"keys_per_s": [2.0, 3.0]}),
    ]
    broken = Run(section="row", variant="spark", status="failed", note="why")
    assert joined([*rounds, broken])[1] == joined([broken, *rounds])[0] == broken


def test_peers_that_cannot_be_installed_are_part_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(work: Path, scale: Scale) -> Part:
        raise AssertionError("no index")

    monkeypatch.setattr(suite, "OTHERS", {"merge": refused, "flink": refused})
    out = tmp_path / "report.json"
    assert suite.main(["--scale", "small", "--only", "merge,flink", "--out", str(out), "--work", str(tmp_path)]) == 1
    runs = json.loads(out.read_text())["runs"]
    assert [(run["variant"], run["status"], run["note"]) for run in runs] == [
        ("merge", "failed", "no index"),
        ("flink", "failed", "no index"),
    ]
    assert [*tmp_path.iterdir()] == [out]


def test_reports_of_different_sections_make_one() -> None:
    row = report(*ROW_RUNS, questions=(FAST, SLOW), checks=(Check(section="row", label="state", equal=True),))
    rss = report(measured("rss", "cairn", peak_mib=(1024.0,)), questions=(BOUND,))
    made = together([row, rss])
    assert [line["label"] for line in made["lines"]] == ["rate", "time", "peak"] and made["seconds"] == 3
    assert made["runs"] == row["runs"] + rss["runs"] and made["checks"] == row["checks"] and len(row["lines"]) == 2
    with pytest.raises(ValueError, match="two reports have row"):
        together([row, row])
    with pytest.raises(ValueError, match="one report is full, another small"):
        together([row, {**rss, "scale": "small"}])


@pytest.mark.long("half a second", runs_in="ci")
def test_the_pages_get_tables_samples_and_plot(tmp_path: Path) -> None:
    page = "before\n<!-- results: begin -->\nold\n<!-- results: end -->\nafter\n"
    (tmp_path / "REPORT.md").write_text(page)
    short_page = tmp_path / "short.md"
    short_page.write_text(page.replace("results", "main table"))
    main = replace(FAST, label="processing phase")
    made = report(*ROW_RUNS, questions=(main, SLOW))
    for _ in range(2):
        into_report(made, tmp_path, short_page)
        short = short_page.read_text()
        assert "| row API, state and user code only, keys/s | 100 | Spark tuned 2 | Cairn, 50x |" in short
        assert "old" not in short and short.startswith("before\n<!-- main") and short.endswith("end -->\nafter\n")
        text = (tmp_path / "REPORT.md").read_text()
        assert "old" not in text and as_markdown(made) in text
        assert text.startswith("before\n<!-- results: begin -->\n") and text.endswith(
            "\n<!-- results: end -->\nafter\n"
        )
    kept = json.loads((tmp_path / "benchmarks.json").read_text())
    assert (
        kept["runs"][0]["samples"] == {"keys_per_s": [90, 100, 400], "append_us": [2]}
        and "texts" not in kept["runs"][0]
    )
    assert (tmp_path / "benchmarks.png").read_bytes().startswith(b"\x89PNG")


def test_the_main_table_of_the_docs_quotes_the_report() -> None:
    page = (REPOSITORY / "docs" / "benchmarks.md").read_text()
    full = (REPOSITORY / "benchmarks" / "REPORT.md").read_text()
    kept = json.loads((REPOSITORY / "benchmarks" / "benchmarks.json").read_text())
    lines = {(line["section"], line["label"]): line for line in kept["lines"]}
    expected = []
    for what, (section, label) in MAIN_LINES.items():
        (line,) = (line for line in full.splitlines() if line.startswith(f"| {section} | {label} | "))
        _, _, unit, ours, peers, ratio, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        peer = lines[section, label]["best_peer"]
        (figure,) = re.findall(rf"(?:^|, ){peer} ([\d,.]*\d)(?=, |$)", peers)
        lost = lines[section, label]["ratio"] < 1
        inverse = number(1 / lines[section, label]["ratio"])
        better = f"**{peer.capitalize()}, {inverse}x**" if lost else f"Cairn, {ratio}"
        assert lost == (float(ratio.rstrip("x")) < 1)
        expected.append(f"| {what}, {unit} | {ours} | {peer.capitalize()} {figure} | {better} |")
    table = re.search(r"<!-- main table: begin -->\n\|.*\n\|[-|]+\n((?:\|.*\n)+)\n<!-- main table: end -->", page)
    assert table and table[1].splitlines() == expected
    # The samples of benchmarks.json are rounded, so only the first two lines are equal: the headings.
    assert as_main_table(kept).splitlines()[:2] == page.split("<!-- main table: begin -->\n")[1].splitlines()[:2]
    better = re.search(r"\*\*A peer is better in (\d+) of (\d+) lines", full)
    equal = re.search(r"were equal in (\d+ of \d+) comparisons", full)
    assert better and f"better in {better[1]} of the {better[2]} comparisons" in page
    assert equal and f"equal in {equal[1]} comparisons" in page


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.0123456, "0.0123"), (1.5, "1.5"), (99.96, "100"), (123456.7, "123,457")]
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


# --- profiles ---------------------------------------------------------------------------------------------------------------

MAIN, USER, LIBRARY, BUILTIN, HELPER = (
    ("main", 1, "f"),
    ("user", 1, "f"),
    ("lib", 1, "f"),
    ("~", 0, "c"),
    ("std", 1, "g"),
)
OWNERS = {"main": "cairn", "user": "user", "lib": "pandas"}


def owner(function: tuple[str, int, str]) -> str | None:
    return OWNERS.get(function[0])


def test_time_of_builtins_counts_for_their_callers() -> None:
    stats = {
        MAIN: (1, 1, 1.0, 10.0, {}),
        USER: (1, 1, 2.0, 9.0, {MAIN: (1, 1, 2.0, 9.0)}),
        LIBRARY: (1, 1, 3.0, 6.0, {USER: (1, 1, 3.0, 6.0)}),
        BUILTIN: (4, 4, 4.0, 4.0, {LIBRARY: (3, 3, 3.0, 3.0), USER: (1, 1, 1.0, 1.0)}),
    }
    assert shares(stats, owner) == pytest.approx({"pandas": 0.6, "user": 0.3, "cairn": 0.1})


def test_time_passes_through_what_nobody_owns() -> None:
    stats = {
        USER: (1, 1, 0.0, 4.0, {}),
        HELPER: (1, 1, 1.0, 4.0, {USER: (1, 1, 1.0, 4.0)}),
        # Calls itself and its caller's caller; only what is outside the circle counts.
        BUILTIN: (3, 3, 3.0, 3.0, {HELPER: (2, 2, 3.0, 3.0), BUILTIN: (1, 1, 1.0, 1.0)}),
    }
    assert shares(stats, owner) == {"user": 1.0}
    assert shares({HELPER: (1, 1, 1.0, 1.0, {})}, owner) == {NOBODY: 1.0}


def test_owners_by_path() -> None:
    root = Path(__file__).resolve().parents[2]
    found = {
        name: owner_by_path((file, 1, name))
        for name, file in {
            "handleInputRows": str(root / "benchmarks" / "processors.py"),
            "run_shard_s": str(root / "benchmarks" / "floors.py"),
            "flush": str(root / "state_backend" / "state" / "shard_state.py"),
            "concat": "/env/lib/site-packages/pandas/core/reshape/concat.py",
            "mean": "/env/lib/site-packages/numpy/_core/_methods.py",
            "loads": "/usr/lib/python3.11/json/__init__.py",
            "<method 'to_pandas' of 'pyarrow.lib._PandasConvertible' objects>": "~",
            "<built-in method builtins.len>": "~",
        }.items()
    }
    assert list(found.values()) == ["user", None, "cairn", "pandas", "pandas", None, "pyarrow", None]


# --- beside Flink ------------------------------------------------------------------------------------------------------------------


def test_both_engines_get_the_same_rows_and_one_source_has_all_rows_of_a_key(tmp_path: Path) -> None:
    for drawn in ("uniform", "random", "zipf"):
        folder, repeats = tmp_path / drawn, drawn != "uniform"
        folder.mkdir()
        files = write_batches(folder, 500, 2, Workload(part=0.5, drawn=drawn))
        assert [file.name for file in files] == ["000.parquet", "001.parquet", "002.parquet"]
        for n in range(4):
            sources = [np.fromfile(folder / f"{n:03d}-{source}.bin", ROW) for source in range(2)]
            assert all((rows["k"] % 2 == source).all() for source, rows in enumerate(sources))
            whole, keys = n in (0, 3), np.concatenate(sources)["k"]
            assert len(keys) == (500 if whole else 250) and (len(set(keys)) < len(keys)) == (repeats and not whole)
            if n < 3:
                table = pq.read_table(files[n]).to_pylist()
                as_bytes = sorted((int(k), int(v), p.decode()) for rows in sources for k, v, p in rows)
                assert sorted(tuple(row.values()) for row in table) == as_bytes


def test_rows_of_a_key_are_sorted_and_keys_stay_where_they_were() -> None:
    rows = np.array([(2, 5, b"b"), (1, 9, b"a"), (2, 5, b"a"), (1, -3, b"z"), (2, 1, b"c")], ROW)
    ordered = [(int(k), int(v), bytes(p)) for k, v, p in in_order_per_key(rows)]
    assert ordered == [(2, 1, b"c"), (1, -3, b"z"), (2, 5, b"a"), (1, 9, b"a"), (2, 5, b"b")]


def test_the_load_and_the_first_batch_are_in_no_median() -> None:
    def batch(wall_s: float, **more: float) -> dict[str, Any]:
        return {"step": "batch", "wall_s": wall_s, "cpu_s": 2.0, "rows": 10, "written_mb": 1.0, **more}

    steps = [
        batch(9),
        batch(8),
        batch(1, checkpoint_s=0.5),
        batch(2),
        {"step": "restore 2 to 1", "wall_s": 3.0, "cpu_s": 4.0},
    ]
    batches, moves = samples_of([steps, steps])
    assert batches["wall_s"] == [1, 2, 1, 2] and batches["load_s"] == [9, 9] and batches["all_written_mb"] == [3, 3]
    assert batches["checkpoint_s"] == [0.5, 0.5] and batches["cpu_us_per_row"] == [2e5] * 4
    assert moves == {"restore 2 to 1, s": [3, 3], "restore 2 to 1, cpu_s": [4, 4]}
    asked = {question.metric for question in questions() if question.section != "flink, moves"}
    assert asked <= batches.keys() | {"load_cpu_s", "load_mb"}
