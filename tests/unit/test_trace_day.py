"""The steps of a day through Airflow, from what its API and its task logs say."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

from benchmarks.trace_day import STEPS, WHO, Step, median_day, picture, steps_of, table

RUN = {"start_date": "2026-01-01T00:00:00.000Z", "end_date": "2026-01-01T00:00:03.000Z"}
# Milliseconds from the start of the run: start and end of each task, and its log lines.
TASKS: dict[str, tuple[int, int, list[tuple[int, str]]]] = {
    "process": (
        100,
        1500,
        [
            (150, "::group::Pre Execute"),
            (300, "::endgroup::"),
            (400, "Spark runs at sc://h:1"),
            (500, "sums [a, b): attempt x starts from checkpoint 1 (2 entries)"),
            (600, "sums [a, b): source position {}"),
            (1200, "sums [a, b): prepared: 0 bytes downloaded"),
            (1300, "::group::Post Execute"),
            (1400, "::endgroup::"),
        ],
    ),
    "checkpoint": (1700, 2000, [(1800, "::endgroup::"), (1850, "::endgroup::"), (1900, "::group::Post Execute")]),
    "validate": (2200, 2900, [(2300, "::endgroup::"), (2700, "checkpoint 2, full: no findings")]),
}


def at(ms: int) -> str:
    return f"2026-01-01T00:00:0{ms // 1000}.{ms % 1000:03}000Z"


def steps() -> list[Step]:
    tasks: list[dict[str, Any]] = [
        {"task_id": name, "start_date": at(start), "end_date": at(end)} for name, (start, end, _) in TASKS.items()
    ]
    logs = {
        name: "\n".join(json.dumps({"timestamp": at(ms), "event": event}) for ms, event in lines)
        for name, (_, _, lines) in TASKS.items()
    }
    return steps_of(RUN, tasks[::-1], logs)


def test_the_steps_of_a_day_cover_it_without_a_gap() -> None:
    found = steps()
    assert [(s.start_ms, s.end_ms) for s in found if s.task == "process"] == [
        *((0, 100), (100, 300), (300, 400), (400, 500), (500, 600), (600, 1200), (1200, 1300), (1300, 1500))
    ]
    assert [s.name for s in found if s.task == "checkpoint"] == [
        "wait for the scheduler",
        *(n for n, _, _ in STEPS["checkpoint"]),
    ]
    ends = [0.0, *(step.end_ms for step in found)]
    assert [step.start_ms for step in found] == ends[:-1] and ends[-1] == 3000
    assert {step.who for step in found} <= WHO.keys()


def test_a_step_without_its_log_line_takes_no_time() -> None:
    """Such as the end of the driver in a task that failed, or a line that another release words differently."""
    last = [step for step in steps() if step.task == "validate"][-2:]
    assert [(step.start_ms, step.end_ms) for step in last] == [(2700, 2700), (2700, 2900)]


def test_table_and_picture_show_each_step_of_the_median_day() -> None:
    day = steps()
    longer = [*day, Step(task="run", name="end", who="Spark", start_ms=3000, end_ms=9000)]
    assert median_day([longer, day, longer]) == longer and median_day([day, longer]) == day
    lines = table("warm", day)
    assert lines[0] == "warm: 3000 ms" and len(lines) == 2 + len(day)
    root = ElementTree.fromstring(picture({"cold": longer, "warm": day}))
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    assert "cold: 9,000 ms" in texts and "warm: 3,000 ms" in texts and "Airflow's task" in texts
    assert texts.count("process: Spark job") == 2
    height = float(root.attrib["height"])
    assert all(float(element.attrib.get("y", 0)) < height for element in root.iter())
