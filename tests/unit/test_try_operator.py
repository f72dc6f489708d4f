"""The operators that try and promote code: their requests to the driver, their question to a person, and how the driver
carries the requests out. No test needs Spark.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cairn import testing
from cairn.driver import driver
from cairn_operators import PromoteTrialOperator, TryCodeOperator, trial_pipeline
from cairn_operators.airflow_versions import AirflowFailException, AirflowSkipException
from cairn_operators.ask_person import as_markdown
from cairn_operators.trial_tasks import PROMOTE
from state_backend.values.operation_parameters import COMMITTED, PromoteTrial, TryCode
from tests.support.airflow_names import TaskAsking
from tests.support.coordinator import coordinator_of
from tests.support.counting import DAYS, day
from tests.support.drivers import driven
from tests.support.operator_calls import Events, Store, answer, context
from tests.support.trials import CHANGED, OLD, SESSION, run

NEXT, PAST, NO = PROMOTE
OF_CODE: Any = {"root": "file:///r", "code": "m:NEW", "pipeline": "p"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    def run_driver(self: Any, request: Any, on_line: Any = None) -> dict[str, Any]:
        made.append(request)
        if on_line is not None:
            on_line(COMMITTED + json.dumps({"checkpoint": 8, "interval": "i", "output_rows": 3, "state_bytes": 4}))
        tried = {"name": "t", "same": False, "comparison": ["what", "differs", "here"], "other_input": ["i"]}
        return tried | {"again": 1, "behind": 0, "back": "cairn"}

    for operator in (TryCodeOperator, PromoteTrialOperator):
        monkeypatch.setattr(operator, "run_driver", run_driver)
    return made


def tasks(how: str = PAST) -> tuple[Any, Any]:
    dag = trial_pipeline("t", "m:NEW", "file:///r", pipeline="p", every=timedelta(hours=1))
    tried, promote = dag.get_task("try"), dag.get_task("promote")
    tried.code = promote.code = "m:NEW"  # as rendered from the form
    tried.first, tried.last, tried.match = "2024-01-04", "2024-01-04T06:00", "user, kind"
    promote.how, promote.trial, promote.comparison = how, "t", "what differs"
    return tried, promote


def where() -> Any:
    made = context(task_state_store=Store(), outlet_events=Events())
    made["ti"] = SimpleNamespace(try_number=1, id="ti", xcom_push=lambda **_: None)
    return made


@pytest.mark.parametrize(
    ("most", "shown"), [(3, "what\ndiffers\nhere"), (2, "what\ndiffers\nthe rest is in the log of this task")]
)
def test_the_driver_gets_form_values(calls: list[Any], monkeypatch: pytest.MonkeyPatch, most: int, shown: str) -> None:
    monkeypatch.setattr("cairn_operators.trial_tasks._SHOWN_LINES", most)
    tried, _ = tasks()
    pushed: dict[str, Any] = {}
    there = where()
    there["ti"].xcom_push = lambda key, value: pushed.update({key: value})
    result = tried.execute(there)
    assert (result["comparison"], result["other_input"]) == (shown, 1)
    assert pushed == {"trial": "t", "comparison": shown} and not there["outlet_events"]
    assert calls == [
        TryCode(
            **OF_CODE,
            first="2024-01-04",
            last="2024-01-04T06:00",
            every=timedelta(hours=1),
            compare=True,
            match=("user", "kind"),
        )
    ]
    with pytest.raises(ValueError, match="longer than zero"):
        trial_pipeline("t", "m:NEW", "file:///r", pipeline="p", keep_for=timedelta(0))


def test_a_person_decides_with_the_comparison_and_a_retry_does_not_ask_again(
    calls: list[Any], asked: list[dict[str, Any]]
) -> None:
    _, promote = tasks()
    there = where()
    with pytest.raises(TaskAsking) as parked:
        promote.execute(there)
    assert (
        not calls
        and "what differs" in asked[0]["body"]
        and "run its intervals again in production" in asked[0]["subject"]
    )
    assert promote.after_answer(there, answer("Approve"), **parked.value.kwargs)["again"] == 1
    assert calls == [PromoteTrial(**OF_CODE, trial="t", past=True)]
    assert there["outlet_events"][promote.alias].told[0][0] == "cairn://p/"
    promote.execute(there)
    assert len(asked) == 1 and len(calls) == 2
    for promote.trial, promote.how in (("other", PAST), ("t", NEXT)):  # other questions
        with pytest.raises(TaskAsking):
            promote.execute(there)


def test_no_code_is_promoted_after_a_rejection_a_timeout_or_a_no(calls: list[Any], asked: list[dict[str, Any]]) -> None:
    _, promote = tasks(NEXT)
    with pytest.raises(AirflowFailException, match="ann has rejected the promotion"):
        promote.after_answer(where(), answer("Reject"), asked="")
    with pytest.raises(AirflowFailException, match="somebody has rejected the promotion"):
        promote.after_answer(where(), {**answer("Reject"), "responded_by_user": None}, asked="")
    with pytest.raises(AirflowFailException, match="no person has answered"):
        promote.after_answer(where(), {"error": "x", "error_type": "timeout"}, asked="")
    promote.how = NO
    with pytest.raises(AirflowSkipException):
        promote.execute(where())
    promote.how = "maybe"
    with pytest.raises(AirflowFailException, match="expected one of"):
        promote.execute(where())
    assert not calls and not asked


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "output in 3 intervals\n  total: 2 changed\n\nseconds",
            "- `output in 3 intervals`\n  - `total: 2 changed`\n- `seconds`",
        ),
        ("  ~ a_b *c* <i>", "- `~ a_b *c* <i>`"),
        ("a `b` ```c", "- ````a `b` ```c````"),
        ("`b`", "- `` `b` ``"),
        ("", ""),
    ],
)
def test_comparison_lines_become_a_markdown_list_in_required_actions(text: str, shown: str) -> None:
    assert as_markdown(text) == shown


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for n in range(3):
        DAYS[day(n).start] = [("ann", "pear", n + 1), ("bob", "fig", 5)]
    run(OLD, tmp_path / "state", range(3))
    monkeypatch.setattr(driver.Driver, "connect", lambda *_: SESSION)
    monkeypatch.setattr(
        "cairn.operations.intervals.process_interval._on_spark",
        lambda spark, job, inputs: testing._on_shards(CHANGED.processor, spark, job, inputs),
    )
    yield tmp_path
    DAYS.clear()


def test_the_driver_tries_compares_and_deploys(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    state = str(root / "state")
    of: Any = {"root": state, "code": "tests.support.trials:CHANGED", "pipeline": "counting"}
    span: Any = {"first": day(1).start.isoformat(), "last": day(2).start.isoformat(), "every": timedelta(days=1)}

    def called(request: Any) -> Any:
        return driven(request, root / "result")

    tried = TryCode(**of, **span, keep_for=timedelta(minutes=1), compare=True, match=("user",), trial="more")
    made = called(tried)["ok"]
    assert (made["name"], made["same"], made["computed"], made["other_input"]) == ("more", False, 2, [])
    assert "state seen_at" in "".join(made["comparison"])
    assert "comparison" not in called(replace(tried, compare=False))["ok"]
    assert called(PromoteTrial(**of, trial="more"))["ok"]["again"] == 0
    capfd.readouterr()
    promoted = called(PromoteTrial(**of, trial="more", past=True))["ok"]
    assert (promoted["again"], promoted["behind"]) == (2, 0) and promoted["back"].startswith("cairn restore 1 --root ")
    assert promoted["promoted"] and coordinator_of(OLD, state).log().head_id == 5
    assert capfd.readouterr().out.count(COMMITTED) == 2
    DAYS[day(2).start] = [("bob", "fig", 6)]
    assert called(PromoteTrial(**of, trial="other", past=True))["error"]["type"] == "UsageError"
