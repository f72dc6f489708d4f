"""Fixtures of the tests without Spark and Airflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
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


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes the driver do the given thing; returns the directory where it leaves its traces."""
    from tests.support.operator_calls import FAKE_DRIVER  # imports Airflow

    (tmp_path / "fake_driver.py").write_text(FAKE_DRIVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_DRIVER_DIR", str(tmp_path))
    monkeypatch.setenv("AIRFLOW_CONN_CAIRN_SPARK", '{"conn_type": "spark_connect", "host": "sc://h", "port": 7}')
    monkeypatch.setattr("cairn_operators.driver_operator.DriverOperator.driver_module", "fake_driver")
    monkeypatch.setattr("cairn_operators.earlier_runs._previous", lambda *_: None)

    def behave(what: str) -> Path:
        monkeypatch.setenv("FAKE_DRIVER", what)
        return tmp_path

    return behave
