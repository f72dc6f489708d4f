"""Files of a report: its JSON with the machine's description, its plot, and its tables in two Markdown pages."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.report import Part
from benchmarks.report_summary import as_main_table

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
SHORT_PAGE = ROOT / "docs" / "benchmarks.md"


def describe_machine() -> dict[str, Any]:
    """Return the machine, the versions, and the load before the suite starts."""
    model = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [int(line.split()[1]) // 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal:")]
    java = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False).stderr.splitlines()
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        check=False,
    )
    names = ("pyspark", "rocksdict", "pyarrow", "pandas", "numpy")
    return {
        "cpu": {"model": model[0] if model else platform.processor(), "count": os.cpu_count()},
        "memory_mib": memory[0] if memory else None,
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "java": java[0] if java else None,
        "commit": commit.stdout.strip() or None,
        "versions": {name: importlib.metadata.version(name) for name in names},
    }


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The start of a suite.

    Attributes:
        at: The time of the start.
        at_s: The monotonic time of the start, in seconds.
        machine: The machine's description.
    """

    at: datetime = field(default_factory=lambda: datetime.now(tz=UTC))
    at_s: float = field(default_factory=time.monotonic)
    machine: dict[str, Any] = field(default_factory=describe_machine)

    def finish(self, parts: Sequence[Part], out: Path, *, scale: str, judged: bool) -> int:
        """Write the report and print its table.

        Returns:
            The exit code: 0 if no run failed and no two engines differ, else 1.
        """
        made = self.write(parts, out, scale=scale, judged=judged)
        print(f"\n{report.as_table(made)}\n\n{out} has every sample, the settings and the profiles")
        return 0 if report.passed(made) else 1

    def write(self, parts: Sequence[Part], out: Path, *, scale: str, judged: bool) -> dict[str, Any]:
        """Write the report of the parts so far to `out`, completely or not at all."""
        made = report.build_report(
            report.joined([run for part in parts for run in part.runs]),
            [question for part in parts for question in part.questions],
            [check for part in parts for check in part.checks],
            scale=scale,
            judged=judged,
            started=self.at.isoformat(timespec="seconds"),
            seconds=time.monotonic() - self.at_s,
            environment=self.machine,
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_suffix(".partial")
        partial.write_text(json.dumps(made, indent=1) + "\n")
        partial.replace(out)
        return made


def into_report(made: dict[str, Any], folder: Path = BENCHMARKS, short_page: Path = SHORT_PAGE) -> None:
    """Write a run's report into the two pages that show it, and the files beside `REPORT.md`.

    All lines go between the marks in the folder's `REPORT.md`, the samples to `benchmarks.json`, and the plot to
    `benchmarks.png`. The main lines go between the marks in the short page.
    """
    from benchmarks.report_plot import draw_ratios

    _replace_marked(folder / "REPORT.md", "results", report.as_markdown(made))
    _replace_marked(short_page, "main table", as_main_table(made))
    # The JSON file leaves out the profiles, because they are long.
    runs = [{name: value for name, value in run.items() if name != "texts"} for run in made["runs"]]
    (folder / "benchmarks.json").write_text(_compact({**made, "runs": runs}) + "\n")
    draw_ratios(made["lines"], folder / "benchmarks.png")


def _replace_marked(page: Path, name: str, text: str) -> None:
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, rest = page.read_text().split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}{text}\n\n{end}{after}")


def _compact(made: dict[str, Any]) -> str:
    """Return the report as JSON, with numbers of five significant digits.

    Each run and each line of the table has a line of its own.
    """

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.5g}")
        if isinstance(value, dict):
            return {name: rounded(one) for name, one in value.items()}
        return [rounded(one) for one in value] if isinstance(value, list) else value

    parts = []
    for name, value in rounded(made).items():
        if isinstance(value, list):
            text = "[\n" + ",\n".join(json.dumps(one) for one in value) + "\n]"
        else:
            text = json.dumps(value)
        parts.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}"
