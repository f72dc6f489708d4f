"""Fixtures of the tests without Spark and Airflow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="module")
def _no_warm_drivers() -> Iterator[None]:
    """Start each driver as a process. A host process would outlive the test, with the test's environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIRFLOW__CAIRN__WARM_DRIVERS", "False")
        yield


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return what Airflow is asked to ask a person."""
    questions: list[dict[str, Any]] = []
    monkeypatch.setattr("airflow.sdk.execution_time.hitl.upsert_hitl_detail", lambda **more: questions.append(more))
    return questions
