"""The report of a suite: medians, ratios, and targets met or missed.

The functions are pure, and the report is plain JSON:

    {"format": 1, "scale", "started", "seconds", "environment": {...},
     "lines":  [{"section", "label", "unit", "higher_is_better", "ours", "peers": {variant: median}, "best_peer", "ratio",
                 "target", "verdict": "met" | "missed" | "no target" | "not judged" | "not measured", "note"}],
     "checks": [{"section", "label", "equal": true | false | null, "note"}],
     "runs":   [{"section", "variant", "status": "measured" | "not built" | "failed", "note", "settings": {...},
                 "samples": {metric: [...]}, "medians": {metric: ...}, "texts": {...}}]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Literal

FORMAT = 1
OURS = "cairn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One variant of one section, measured in a process of its own.

    Attributes:
        section: The section.
        variant: The engine or setting that was measured.
        status: "measured", "failed", or "not built" if the measured feature does not exist.
        note: The reason why the run was not measured.
        settings: The settings of the run.
        samples: The samples of each metric, one number for each batch after the warm-up. The name of a metric ends with
            its unit.
        texts: Longer texts by name, such as a CPU profile.
    """

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
    """A line of the report: a metric of one variant, beside the same metric of its peers.

    Attributes:
        section: The section.
        label: The text of the line.
        metric: The name of the metric.
        unit: The unit of the metric.
        variant: The variant whose metric is asked for.
        higher_is_better: True if a larger number is better.
        peers: The variants to compare with.
        against: The peers that count for the ratio; empty for all peers.
        at_least_ratio: The target for the ratio to the best peer.
        at_least: The target if larger numbers are better.
        at_most: The target if smaller numbers are better.
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
    """A comparison of the rows of two engines.

    Attributes:
        section: The section.
        label: The rows that were compared.
        equal: True if the rows are equal; None if they could not be compared.
        note: More about the result, such as the number of rows.
    """

    section: str
    label: str
    equal: bool | None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The runs, questions and checks that one program adds to a report."""

    runs: Sequence[Run]
    questions: Sequence[Question]
    checks: Sequence[Check]


def joined(runs: Sequence[Run]) -> list[Run]:
    """Join the rounds of each variant of each section into one run.

    The samples follow each other in the order of the rounds. If one round was not measured, the joined run is that
    round. So no figure comes only from rounds that happened to succeed.
    """
    rounds: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        rounds.setdefault((run.section, run.variant), []).append(run)
    found = []
    for of_variant in rounds.values():
        first, *others = of_variant
        bad = next((run for run in of_variant if run.status != "measured"), None)
        if bad is None and others:
            samples = {name: [s for run in of_variant for s in run.samples.get(name, ())] for name in first.samples}
            first = replace(first, samples=samples)
        found.append(bad or first)
    return found


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
    """Return the whole report. Questions about sections that did not run are left out.

    Args:
        runs: The runs, one for each variant and section.
        questions: The lines of the report.
        checks: The comparisons.
        scale: The name of the scale.
        judged: True if the scale is large enough for targets. Otherwise no verdict says met or missed.
        started: The time of the start, as ISO text.
        seconds: The duration of the suite in seconds.
        environment: The machine and the versions.
    """
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


def together(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join reports of different sections into one. The start and the machine are those of the first report.

    Raises:
        ValueError: Two reports have the same section, or their scales differ.
    """
    first = dict(reports[0])
    for other in reports[1:]:
        if twice := {run["section"] for run in first["runs"]} & {run["section"] for run in other["runs"]}:
            raise ValueError(f"two reports have {', '.join(sorted(twice))}")
        if other["scale"] != first["scale"]:
            raise ValueError(f"one report is {first['scale']}, another {other['scale']}")
        first |= {name: [*first[name], *other[name]] for name in ("lines", "checks", "runs")}
        first["seconds"] += other["seconds"]
    return first


def passed(report: Mapping[str, Any]) -> bool:
    """Return True if no run failed and no two engines differ.

    A run whose feature is not built yet, or a missed target, is no failure.
    """
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
    """Format a number with three significant digits and commas between thousands; None becomes a dash."""
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
    """Return the lines and checks as text for a terminal."""
    rows = [_HEADINGS, *_cells(report)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "", *_findings(report)])


def as_markdown(report: Mapping[str, Any]) -> str:
    """Return the lines, the checks and the description of the machine as Markdown."""
    rows = [_HEADINGS, tuple("---" for _ in _HEADINGS), *_cells(report)]
    environment = report["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment.get("versions", {}).items())
    cpu = environment.get("cpu") or {}
    caption = (
        f"Scale `{report['scale']}`, {report['started']}, {report['seconds']:.0f} s; {cpu.get('count', '?')} cores "
        f"({cpu.get('model', 'unknown')}), load before the start {environment.get('load_before', '?')}; {versions}."
    )
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    equal = sum(check["equal"] is True for check in report["checks"])
    others = {**report, "checks": [check for check in report["checks"] if check["equal"] is not True]}
    told = [f"Outputs and states of the engines were equal in {equal} of {len(report['checks'])} comparisons."]
    return "\n".join(
        [_peers_win(report), "", caption, "", *lines, "", *told, *[f"- {text}" for text in _findings(others)]]
    )


def _peers_win(report: Mapping[str, Any]) -> str:
    """Return the text that lists the lines where a peer is better, and by which factor."""
    compared = [line for line in report["lines"] if line["ratio"]]
    won: dict[str, list[str]] = {}
    for line in compared:
        if line["ratio"] < 1:
            text = f"{line['label']} ({line['best_peer']}, {number(1 / line['ratio'])}x)"
            won.setdefault(line["section"], []).append(text)
    listed = [f"- *{section}*: {', '.join(texts)}" for section, texts in won.items()]
    count = sum(map(len, won.values()))
    return "\n".join(
        [f"**A peer is better in {count} of {len(compared)} lines:**" if count else "No peer is better.", *listed]
    )


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
