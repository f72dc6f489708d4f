"""The requests: as JSON to a driver, as options of the command line, and beside the explicit signatures of operators and functions."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import MISSING, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

import cairn
from cairn.driver import driver
from cairn_operators import (
    ProcessIntervalOperator,
    PromoteTrialOperator,
    RestoreStateOperator,
    RunIntervalsOperator,
    SavepointOperator,
    SweepStateOperator,
    TryCodeOperator,
    ValidateStateOperator,
    backfill_pipeline,
    trial_pipeline,
)
from cairn_operators.failures import failure
from cairn_operators.request_of import request_of
from state_backend.values.errors import UsageError
from state_backend.values.operation_parameters import (
    REQUESTS,
    Call,
    Fork,
    ProcessInterval,
    PromoteTrial,
    Restore,
    RunRange,
    Sweep,
    TakeSavepoint,
    TryCode,
    Validate,
    from_json,
    to_json,
)
from state_backend.values.records import Permissions, RunRef
from state_backend.values.release import RELEASE

WHERE: Any = {"root": "gs://b/état", "code": "m:P", "pipeline": "p"}
RUN = RunRef(run_id="scheduled__2024-01-01T00:00:00+00:00", clear_number=2, try_number=3)
ALLOWED = Permissions(allow_gap=True, replace_overlapping=True)
START = datetime(2024, 1, 1, 6, 30, tzinfo=UTC)
# Each field has another value than its default. The other requests have fields of the same types.
GIVEN: dict[type[Any], dict[str, Any]] = {
    ProcessInterval: {
        "run": RUN,
        "start": START,
        "end": START + timedelta(microseconds=1),
        "attempt": "a",
        "mode": "full",
        "earlier": {"attempt": "a0", "options": {"mode": "full"}},
        "committed": True,
        "schedule": {"cron": "0 6 * * *", "zone": "UTC"},
        "newest_first": True,
        "permissions": ALLOWED,
    },
    RunRange: {
        "first": "2024-01-01",
        "last": "2024-01-02",
        "count": 2,
        "every": timedelta(hours=1, microseconds=1),
        "reprocess": "none",
        "replace_overlapping": True,
        "dry_run": True,
        "mode": "changelog",
        "permissions": ALLOWED,
        "run": RUN,
    },
    TryCode: {
        "first": "2024-01-01",
        "last": "2024-01-02",
        "every": timedelta(days=1),
        "trial": "t",
        "savepoint": "/s",
        "keep_for": timedelta(hours=12),
        "chain": True,
        "code_of": ("p=m:P",),
        "compare": True,
        "match": ("user", "kind"),
    },
}


@pytest.mark.parametrize("kind", GIVEN, ids=lambda kind: kind.__name__)
def test_a_request_travels_as_json(kind: type[Any]) -> None:
    given = {**WHERE, **GIVEN[kind]}
    assert {*given} == {field.name for field in fields(kind)}
    value = kind(**given)
    text = to_json(value)
    assert from_json(kind, text) == value and json.loads(text).keys() == given.keys()
    # What has its default is left out: each other field alone survives too.
    needed = {field.name: given[field.name] for field in fields(kind) if field.default is MISSING}
    assert json.loads(to_json(kind(**needed))).keys() == needed.keys()
    for name, one in given.items():
        alone = kind(**{**needed, name: one})
        assert from_json(kind, to_json(alone)) == alone and (name in needed or alone != kind(**needed)), name


@pytest.mark.parametrize(
    ("kind", "wrong", "told"),
    [
        (Restore, {"savepoint": "/s", "claim": "STEAL"}, "claim is 'STEAL': input should be 'NO_CLAIM' or 'CLAIM'"),
        (RunRange, {"first": "2024-01-01", "count": "many"}, "count is 'many': "),
        (RunRange, {"first": "2024-01-01", "only_new": True}, "only_new is True: unexpected"),
        (Call, {"spark": "local", "new": 1}, "new is 1: unexpected"),
        (Call, {}, "\nspark: field required"),
    ],
    ids=["value", "type", "field of a newer release", "field of a call", "missing field"],
)
def test_a_driver_refuses_unknown_or_invalid_request_fields(kind: type[Any], wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as refused:
        from_json(kind, json.dumps(wrong if kind is Call else {**WHERE, **wrong}))
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("command", "request_has", "call_has", "told"),
    [
        ("run", {"only_new": True}, {}, "only_new is True: unexpected keyword argument"),
        ("run", {}, {"queue": "q"}, "queue is 'q': unexpected keyword argument"),
        ("compact", {}, {}, "the driver has no command 'compact'"),
    ],
    ids=["field of a request", "field of a call", "command"],
)
@pytest.mark.parametrize("release", ["9.0.0", "0.0.1", RELEASE, None], ids=["newer", "older", "own", "unnamed"])
def test_a_driver_error_names_the_versions_of_task_and_driver_if_they_differ(
    command: str, request_has: dict[str, Any], call_has: dict[str, Any], told: str, release: str | None, tmp_path: Path
) -> None:
    """The driver answers before it opens Spark, so that the task fails for good, and names the field."""
    request = json.dumps({**WHERE, "first": "2024-01-01", **request_has})
    call = json.dumps({"spark": "spark://nowhere:7077", **call_has, **({"release": release} if release else {})})
    result = tmp_path / "result.json"
    assert driver.main([command, request, "--call", call, "--result", str(result)]) == 1
    error = json.loads(result.read_text())["error"]
    assert error["type"] == "UsageError" and told in error["message"]
    both = (
        f"The Airflow task runs {f'Cairn {release}' if release else 'an older Cairn'}, its driver runs Cairn {RELEASE}"
    )
    assert (both in error["message"]) == (release != RELEASE)
    assert isinstance(failure(error["type"], error["message"]), AirflowFailException)


def test_each_command_of_a_driver_has_its_request() -> None:
    assert {command: kind.command for command, kind in REQUESTS.items()} == {command: command for command in REQUESTS}
    from cairn.driver.driver import _operation

    for kind in REQUESTS.values():
        operation = _operation(kind(**WHERE, **GIVEN.get(kind, {"folder": "/s"} if kind is TakeSavepoint else {})))
        needed = [one for one in inspect.signature(operation).parameters.values() if one.default is one.empty]
        assert [one.name for one in needed] == ["request", "place"], kind


# The request, the callable, other names of its parameters, and defaults that differ: those that a task must give, and those that
# Airflow's form sends as text.
GIVEN_BY_TASK = inspect.Parameter.empty
SIGNATURES: list[tuple[type[Any], Callable[..., Any], dict[str, str], dict[str, Any]]] = [
    (ProcessInterval, ProcessIntervalOperator.__init__, {}, {"permissions": None}),
    (
        RunRange,
        RunIntervalsOperator.__init__,
        {},
        {"pipeline": GIVEN_BY_TASK, "first": GIVEN_BY_TASK, "last": GIVEN_BY_TASK, "permissions": None},
    ),
    (RunRange, backfill_pipeline, {}, {}),
    (RunRange, cairn.run_intervals, {"pipeline": "", "spark": ""}, {}),
    (ProcessInterval, cairn.run_interval, {"pipeline": "", "spark": ""}, {"run": None}),
    (TryCode, TryCodeOperator.__init__, {}, {"pipeline": GIVEN_BY_TASK, "trial": "", "match": ""}),
    (TryCode, trial_pipeline, {}, {}),
    (TryCode, cairn.try_code, {"pipeline": "", "spark": ""}, {}),
    (PromoteTrial, PromoteTrialOperator.__init__, {}, {"pipeline": GIVEN_BY_TASK, "trial": GIVEN_BY_TASK}),
    (PromoteTrial, cairn.plan_promotion, {"pipeline": "", "spark": ""}, {}),
    (TakeSavepoint, SavepointOperator.__init__, {}, {"checkpoint": GIVEN_BY_TASK}),
    (Restore, RestoreStateOperator.__init__, {}, {"pipeline": GIVEN_BY_TASK}),
    (Fork, RestoreStateOperator.__init__, {}, {"pipeline": GIVEN_BY_TASK, "fork_as": None}),
    (Sweep, SweepStateOperator.__init__, {}, {}),
    (Validate, ValidateStateOperator.__init__, {}, {"checkpoint": None}),
]


@pytest.mark.parametrize(
    ("kind", "called", "names", "defaults"), SIGNATURES, ids=lambda one: getattr(one, "__qualname__", "")
)
def test_a_signature_has_the_names_and_defaults_of_its_request(
    kind: type[Any], called: Callable[..., Any], names: dict[str, str], defaults: dict[str, Any]
) -> None:
    theirs = {field.name: field.default for field in fields(kind)}
    own = {name: one.default for name, one in inspect.signature(called).parameters.items()}
    shared = {name: names.get(name, name) for name in own if names.get(name, name) in theirs}
    assert {*names} <= {*own} and shared, own
    for name, field in shared.items():
        expected = theirs[field] if theirs[field] is not MISSING else inspect.Parameter.empty
        assert own[name] == defaults.get(name, expected), name
    assert {*defaults} <= {*shared}, "a default that no longer differs by name"
    stated = {name for name, field in shared.items() if name in defaults and theirs[field] == own[name]}
    assert not stated, f"these are the same by now: {stated}"


NAMED: Any = {"code": "m:P", "root": "/r", "pipeline": "p"}
STARTED: Any = {"first": "2024-01-01", "last": "2024-01-02", "every": timedelta(hours=1)}
OF_RUN: Any = {"run": RUN, "start": START, "end": START, "attempt": "a", "permissions": ALLOWED}
# The operator, what only the task has, the request, what only the request has, and what both have.
ARGUMENTS: list[tuple[Callable[..., Any], Any, type[Any], Any, Any]] = [
    (ProcessIntervalOperator, {}, ProcessInterval, OF_RUN, {**NAMED, "mode": "full"}),
    (RunIntervalsOperator, {}, RunRange, {"permissions": ALLOWED}, {**NAMED, **STARTED, "mode": "full"}),
    (
        TryCodeOperator,
        {},
        TryCode,
        {},
        {**NAMED, **STARTED, "trial": "t", "match": "k", "keep_for": timedelta(hours=1)},
    ),
    (PromoteTrialOperator, {"how": "no"}, PromoteTrial, {}, {**NAMED, "trial": "t"}),
    (SavepointOperator, {}, TakeSavepoint, {}, {"code": "m:P", "root": "/r", "checkpoint": "1", "folder": "/s"}),
    (ValidateStateOperator, {}, Validate, {"attempt": "a"}, {**NAMED, "checkpoint": "1", "docs": "/d", "fast": True}),
    (RestoreStateOperator, {"target": "5"}, Restore, {}, {**NAMED, "claim": "CLAIM", "allow_stale": True}),
    (RestoreStateOperator, {"target": "5", "code": "m:P"}, Fork, {}, {"root": "/r", "pipeline": "p", "fork_as": "x"}),
    (SweepStateOperator, {}, Sweep, {}, {"root": "/r", "pipeline": "p", "min_age": timedelta(hours=1)}),
]


@pytest.mark.parametrize(("operator", "of_task", "kind", "of_request", "both"), ARGUMENTS)
def test_each_operator_argument_fills_the_request_field_of_the_same_name(
    operator: Callable[..., Any], of_task: Any, kind: type[Any], of_request: Any, both: Any
) -> None:
    """A field without an argument has its default, though Airflow's ``BaseOperator`` has a method ``dry_run``."""
    assert request_of(kind, operator(task_id="t", **of_task, **both), **of_request) == kind(**of_request, **both)
