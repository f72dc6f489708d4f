"""What the benchmark report makes of samples, and that the docs quote the report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.report import (
    Check,
    Question,
    Run,
    build_report,
    number,
)
from benchmarks.report_summary import MAIN_LINES, as_main_table

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
