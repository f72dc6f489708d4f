"""What a suite's measurements say: medians, ratios, targets met or missed. Pure; the report is plain JSON.

{"format": 1, "scale", "started", "seconds", "environment": {...},
 "lines":  [{"section", "label", "unit", "higher_is_better", "ours", "peers": {variant: median}, "best_peer", "ratio",
             "target", "verdict": "met" | "missed" | "no target" | "not judged" | "not measured", "note"}],
 "checks": [{"section", "label", "equal": true | false | null, "note"}],
 "runs":   [{"section", "variant", "status": "measured" | "not built" | "failed", "note", "settings": {...},
             "samples": {metric: [...]}, "medians": {metric: ...}, "texts": {...}}]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

FORMAT = 1
OURS = "cairn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One variant of one section, measured in a process of its own. ``samples``: by metric, one number per warm batch; a
    metric's name ends with its unit. ``note``: why it was not measured."""

    section: str
    variant: str
    status: Literal["measured", "not built", "failed"]
    note: str = ""
    settings: Mapping[str, str | int | float] = field(default_factory=dict)
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        empty = [metric for metric, values in self.samples.items() if not values]
        if empty or (self.status == "measured") != bool(self.samples):
            raise ValueError(
                f"{self.section}/{self.variant} is {self.status!r}, with no samples of {empty or 'anything'}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a line of the report asks: a metric of ``variant``, beside the same metric of the peers where there are any.

    ``at_least_ratio``: by how much ours is to be better than the better peer. ``at_least`` / ``at_most``: bounds of ours.
    ``against``: the only peers that count for the ratio; all that were measured if empty.
    """

    section: str
    label: str
    metric: str
    unit: str
    variant: str = OURS
    higher_is_better: bool = True
    peers: Sequence[str] = ()
    against: Sequence[str] = ()
    at_least_ratio: float | None = None
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Whether two engines gave the same rows; ``equal`` None: could not be told."""

    section: str
    label: str
    equal: bool | None
    note: str = ""


def build_report(
    runs: Sequence[Run],
    questions: Sequence[Question],
    checks: Sequence[Check],
    *,
    scale: str,
    judged: bool,
    started: str,
    seconds: float,
    environment: Mapping[str, Any],
) -> dict[str, Any]:
    """The whole report. Questions about sections that did not run are left out. ``judged``: whether this scale is one that
    targets are meant for; if not, no verdict says met or missed."""
    sections = {run.section for run in runs}
    return {
        "format": FORMAT,
        "scale": scale,
        "started": started,
        "seconds": round(seconds, 1),
        "environment": dict(environment),
        "lines": [_answer(question, runs, judged) for question in questions if question.section in sections],
        "checks": [asdict(check) for check in checks],
        "runs": [
            asdict(run) | {"medians": {metric: median(values) for metric, values in run.samples.items()}}
            for run in runs
        ],
    }


def passed(report: Mapping[str, Any]) -> bool:
    """Whether every run could be measured or is not built yet, and no two engines differ. A missed target is a finding, not
    a failure."""
    return all(run["status"] != "failed" for run in report["runs"]) and all(
        check["equal"] is not False for check in report["checks"]
    )


def _answer(question: Question, runs: Sequence[Run], judged: bool) -> dict[str, Any]:
    found = {run.variant: run for run in runs if run.section == question.section}
    medians = {
        variant: median(found[variant].samples[question.metric])
        for variant in (question.variant, *question.peers)
        if variant in found and question.metric in found[variant].samples
    }
    ours = medians.pop(question.variant, None)
    counted = {v: m for v, m in medians.items() if not question.against or v in question.against}
    best = (max if question.higher_is_better else min)(counted, key=counted.__getitem__, default=None)
    ratio = None
    if ours and best is not None and counted[best]:
        ratio = ours / counted[best] if question.higher_is_better else counted[best] / ours
    verdict, target = _verdict(question, ours, ratio, judged)
    return {
        "section": question.section,
        "label": question.label,
        "unit": question.unit,
        "higher_is_better": question.higher_is_better,
        "ours": ours,
        "peers": medians,
        "best_peer": best,
        "ratio": ratio,
        "target": target,
        "verdict": verdict,
        "note": _missing(question, found),
    }


def _verdict(question: Question, ours: float | None, ratio: float | None, judged: bool) -> tuple[str, str]:
    bounds = [
        (f"ratio >= {number(question.at_least_ratio)}", ratio, question.at_least_ratio, 1),
        (f">= {number(question.at_least)}", ours, question.at_least, 1),
        (f"<= {number(question.at_most)}", ours, question.at_most, -1),
    ]
    asked = [(text, value, bound, sign) for text, value, bound, sign in bounds if bound is not None]
    target = ", ".join(text for text, *_ in asked)
    if ours is None or any(value is None for _, value, _, _ in asked):
        return "not measured", target
    if not asked:
        return "no target", target
    if not judged:
        return "not judged", target
    met = all(value is not None and sign * value >= sign * bound for _, value, bound, sign in asked)
    return ("met" if met else "missed"), target


def _missing(question: Question, found: Mapping[str, Run]) -> str:
    notes = []
    for variant in (question.variant, *question.peers):
        run = found.get(variant)
        if run is None:
            notes.append(f"{variant}: not run")
        elif run.status != "measured":
            notes.append(f"{variant}: {run.status}")
        elif question.metric not in run.samples:
            notes.append(f"{variant}: has no {question.metric}")
    return "; ".join(notes)


# --- as text ----------------------------------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """Three significant digits, thousands with commas; a dash for none."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


_HEADINGS = ("section", "what", "unit", "ours", "peers", "ratio", "target", "verdict")


def _cells(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            line["section"],
            line["label"],
            line["unit"],
            number(line["ours"]),
            ", ".join(f"{variant} {number(value)}" for variant, value in line["peers"].items()) or "-",
            "-" if line["ratio"] is None else f"{number(line['ratio'])}x",
            line["target"] or "-",
            line["verdict"] + (f" ({line['note']})" if line["note"] else ""),
        )
        for line in report["lines"]
    ]


def as_table(report: Mapping[str, Any]) -> str:
    """Lines and checks for a terminal."""
    rows = [_HEADINGS, *_cells(report)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "", *_findings(report)])


def as_markdown(report: Mapping[str, Any]) -> str:
    """Lines and checks, and on what they were measured."""
    rows = [_HEADINGS, tuple("---" for _ in _HEADINGS), *_cells(report)]
    environment = report["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment.get("versions", {}).items())
    cpu = environment.get("cpu") or {}
    caption = (
        f"Scale `{report['scale']}`, {report['started']}, {report['seconds']:.0f} s; {cpu.get('count', '?')} cores "
        f"({cpu.get('model', 'unknown')}), load before the start {environment.get('load_before', '?')}; {versions}."
    )
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([caption, "", *lines, "", *[f"- {text}" for text in _findings(report)]])


def _findings(report: Mapping[str, Any]) -> list[str]:
    told = {True: "equal", False: "DIFFERENT", None: "not compared"}
    checks = [
        f"{c['section']}, {c['label']}: {told[c['equal']]}" + (f" ({c['note']})" if c["note"] else "")
        for c in report["checks"]
    ]
    return checks + [
        f"{run['section']}/{run['variant']}: {run['status']}: {run['note'].strip().splitlines()[-1] if run['note'] else ''}"
        for run in report["runs"]
        if run["status"] != "measured"
    ]
