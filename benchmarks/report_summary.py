"""The main table of a report, which `docs/benchmarks.md` shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.report import number

# The text of each row of the table, and the section and label of its line in the report.
MAIN_LINES: Mapping[str, tuple[str, str]] = {
    "row API, whole micro-batch": ("row", "whole micro-batch"),
    "row API, state and user code only": ("row", "processing phase"),
    "row API, CPU of a batch": ("row", "CPU of a batch"),
    "pandas API, whole micro-batch": ("pandas", "whole micro-batch"),
    "aggregate, whole micro-batch": ("aggregate", "whole micro-batch"),
    "updates of 1 % of the keys, time": ("flink, 1% uniform", "batch with its checkpoint"),
    "updates of 10 % of the keys, time": ("flink, 10% uniform", "batch with its checkpoint"),
    "updates of 10 % of the keys, written": ("flink, 10% uniform", "written per batch"),
    "as many updates as keys, time": ("flink, 100% random", "batch with its checkpoint"),
    "as many updates as keys, CPU of a row": (
        "flink, 100% random",
        "CPU of a row, vectorised API, with its checkpoint",
    ),
    "first load of 1,000,000 keys": ("flink, 10% uniform", "load of all keys"),
    "canonical savepoint, take": ("flink, moves", "take canonical"),
    "restore, 2 shards to 1": ("flink, moves", "restore 2 to 1"),
    "MERGE of 1 % of the keys, time": ("merge 1%", "batch, durable"),
    "MERGE of 10 % of the keys, time": ("merge 10%", "batch, durable"),
    "MERGE of 10 % of the keys, written": ("merge 10%", "written per batch"),
    "a day of flights through Airflow": ("backfill", "a day through Airflow, one run at a time"),
}
_HEADINGS = ("measurement", "Cairn", "best other engine", "better")


def as_main_table(report: Mapping[str, Any]) -> str:
    """Return the table of `MAIN_LINES` as Markdown, without lines that were not measured.

    The last column names the better engine and its factor, in bold if it is not Cairn.
    """
    lines = {(line["section"], line["label"]): line for line in report["lines"] if line["ratio"]}
    rows = []
    for text, key in MAIN_LINES.items():
        if key not in lines:
            continue
        line = lines[key]
        ratio, peer = line["ratio"], line["best_peer"].capitalize()
        better = f"Cairn, {number(ratio)}x" if ratio >= 1 else f"**{peer}, {number(1 / ratio)}x**"
        figures = (number(line["ours"]), f"{peer} {number(line['peers'][line['best_peer']])}")
        rows.append((f"{text}, {line['unit']}", *figures, better))
    head, *cells = ("| " + " | ".join(row) + " |" for row in (_HEADINGS, *rows))
    return "\n".join([head, "|---" * len(_HEADINGS) + "|", *cells])
