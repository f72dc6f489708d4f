"""The docs quote the benchmark report."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.report import number
from benchmarks.report_summary import MAIN_LINES, as_main_table

REPOSITORY = Path(__file__).resolve().parents[2]


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
