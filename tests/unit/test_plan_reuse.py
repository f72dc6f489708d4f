"""When a retry takes what an earlier try of the same run has prepared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.operations.intervals.plan_reuse import input_hash, options_of, source_hash, why_recompute
from cairn.pipeline import Pipeline
from state_backend.values.records import Permissions, Prepared, Record, SweepRecord
from tests.support.checkpoints import content, day, record, run
from tests.support.counting import counting
from tests.support.log_in_memory import log_in_memory

POSITION = {"files": [{"path": "f", "size": 3}]}
OPTIONS = {"mode": "incremental", "parallelism": "2", "engine": "0a0a"}
ME = run("mine", clear_number=1, try_number=1)
ARGUMENTS = ("log", "earlier", "now", "initial_state")
CONTENT = content(day(2), "m1", 1, run=ME, source_position=POSITION, code_hash="c" * 64)
DAY_1 = record(1, day(1))
PREPARED = Prepared(h0=1, content=CONTENT)
NOW = content(day(2), "m2", 1, run=replace(ME, try_number=2), source_position=POSITION, code_hash="c" * 64)


def why(**changes: Any) -> str | None:
    given: Any = {"log": log_in_memory(entries={1: DAY_1}), "earlier": PREPARED, "then": OPTIONS, "now": OPTIONS}
    given |= {"initial_state": False} | {name: changes.pop(name) for name in [*changes] if name in ARGUMENTS}
    return why_recompute(**given, content=replace(NOW, **changes))


def with_log(*more: Record | SweepRecord) -> dict[str, Any]:
    return {"log": log_in_memory(entries={1: DAY_1, **{entry.id: entry for entry in more}})}


def test_a_prepared_attempt_is_reused_if_nothing_has_changed() -> None:
    assert why() is None
    # As JSON has it: the source may give tuples.
    assert why(source_position={"files": ({"path": "f", "size": 3},)}) is None


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        ({"earlier": None}, "it did not finish"),
        ({"run": run("mine", clear_number=2, try_number=2)}, "the run was cleared since"),
        ({"run": run("other", clear_number=1)}, "belongs to run 'mine'"),
        ({"interval": day(3)}, "belongs to run 'mine', [2024-01-02T00:00:00Z"),
        ({"now": OPTIONS | {"mode": "full"}}, "mode was incremental and is now full"),
        ({"now": OPTIONS | {"order_by": "1"}}, "order_by was nothing and is now 1"),
        ({"permissions": Permissions(allow_gap=True)}, "permissions were"),
        ({"code_hash": "d" * 64}, "the processor's code was cccccccccccc and is now dddddddddddd"),
        ({"initial_state": True}, "initial state"),
        ({"source_position": {}}, "the source records no position"),
        ({"source_position": {"files": []}}, "the input has changed"),
        # Day 1 was run again: the base is another one.
        (with_log(record(2, day(1), None, {1: 2, 2: None})), "can no longer be committed: "),
        # The base was dropped.
        (with_log(record(2, day(5), 1, {2: None})), "which retention has dropped since"),
        # Somebody else committed the interval.
        (with_log(record(2, day(2), 1, run=run("other"))), "committed checkpoint 2 for"),
        (
            with_log(SweepRecord(id=2, retained=DAY_1.retained, sweep="s", abandoned=("m1",))),
            "sweep 2 abandoned this attempt",
        ),
    ],
)
def test_a_prepared_attempt_is_computed_again_after_any_change(now: dict[str, Any], reason: str) -> None:
    assert reason in (why(**now) or "")


def test_each_setting_of_a_job_and_its_source_are_options_that_a_retry_compares() -> None:
    names = ["mode", "api", "parallelism", "max_parallelism", "zone", "on_type_mismatch", "returning", "dropped"]
    names += [*("input_schema", "initial_schema", "output_schema", "event_time", "engine", "changelog", "order_by")]
    job = {"content": CONTENT, **dict.fromkeys(names, 0)}
    jobs: list[Any] = [SimpleNamespace(**job), *(SimpleNamespace(**job | {name: 1}) for name in names)]
    found = [options_of(jobs[0], "other source"), *(options_of(one, "source") for one in jobs)]
    assert len({*map(str, found)}) == len(names) + 2


def test_an_attempt_that_is_already_committed_is_reused() -> None:
    """A try that died after its checkpoint was committed: publishing is all that is left to do."""
    committed = record(2, day(2), 1, attempt="m1", run=ME)
    assert why(**with_log(committed)) is None


def read_days(spark: object, interval: object) -> None: ...


class Days:
    def __init__(self, folder: object) -> None:
        self.folder = folder

    def __call__(self, spark: object, interval: object) -> None: ...


def days_of(folder: str) -> Callable[[object, object], None]:
    def read(spark: object, interval: object) -> None:
        print(folder)

    return read


def test_arguments_bound_to_a_source_are_part_of_its_hash() -> None:
    same = [read_days, partial(read_days, None), partial(read_days, None), days_of("a"), days_of("a"), days_of("b")]
    plain, bound, bound_again, a, a_again, b = map(source_hash, same)
    assert (bound, a) == (bound_again, a_again)
    assert len({plain, bound, a, b, source_hash(partial(read_days, 1))}) == 5
    days, same_days, locked = Days("a"), Days("a"), Days(Lock())
    assert source_hash(days) == source_hash(same_days) != source_hash(Days("b"))
    assert source_hash(locked) != source_hash(locked)  # nothing says that it reads the same


def test_each_part_of_the_input_hash_decides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: Any = ("c" * 64, {"files": []}, {}, {}, "UTC")
    other: Any = ("d" * 64, {"files": [1]}, {"a": 1}, {"a": 1}, "CET")
    found = {input_hash(counting(), *given[:n], value, *given[n + 1 :]) for n, value in enumerate(other)}
    renamed = [{"renamed": {f"total.{name}": "clicks"}} for name in "nm"]
    pipelines: list[Any] = [{}, {"key": ["item"]}, {"order_by": ["item"]}, {"parallelism": 3}, *renamed]
    found |= {input_hash(counting(**settings), *given) for settings in (*pipelines, {"source": read_days})}
    monkeypatch.setattr("cairn.operations.intervals.plan_reuse.runtime_version", lambda: "of another release")
    assert len(found | {input_hash(counting(), *given)}) == 13


def test_a_record_names_settings_as_the_pipeline_does() -> None:
    assert {*CONTENT.settings} < {setting.name for setting in fields(Pipeline)}
    same = counting(start=CONTENT.settings["start"], max_parallelism=CONTENT.max_parallelism)
    assert [*same.changed_since(CONTENT)] == []
    other = replace(same, start=day(9).start, time_mode="none", max_parallelism=99, parallelism=3)
    assert [name for name, _, _ in other.changed_since(CONTENT)] == ["start", "time_mode", "max_parallelism"]
