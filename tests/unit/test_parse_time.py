"""What Airflow shows as an import error of a DAG."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from cairn_operators import backfill_pipeline, restore_pipeline, stateful_pipeline, trial_pipeline
from cairn_operators.check_dag_arguments import check_code_and_root
from state_backend.adapters.open_storage import open_storage
from state_backend.values.errors import UsageError


@pytest.mark.parametrize(
    ("root", "fine"),
    [
        ("file:///srv/state", True),
        ("/srv/state", True),
        ("memory://name/folder", True),
        ("data/st5", False),
        ("./data", False),
        ("file://data/st5", False),
        ("s3://bucket/state", True),
        ("hdfs://bucket/state", False),
        ("", False),
    ],
)
def test_a_root_is_refused_by_the_dag_if_and_only_if_the_storage_refuses_it(root: str, fine: bool) -> None:
    if fine:
        check_code_and_root("d", "m:P", root)
        open_storage(root)
    else:
        with pytest.raises(
            ValueError, match="expected file:///absolute/path, /absolute/path or gs://bucket/prefix"
        ) as raised:
            check_code_and_root("d", "m:P", root)
        assert f"DAG d: root {root!r} is no storage URL" in str(raised.value)
        with pytest.raises(UsageError, match="not a storage URL"):
            open_storage(root)


@pytest.mark.parametrize("pipeline", ["pipelines.clicks", "pipelines/clicks.py:CLICKS", ":CLICKS", "clicks:", ""])
def test_a_pipeline_that_is_not_written_as_module_and_name_is_refused(pipeline: str) -> None:
    with pytest.raises(ValueError, match=r"is not module:NAME, as in pipelines\.clicks:CLICKS"):
        check_code_and_root("d", pipeline, "gs://bucket/state")


def test_templates_in_code_and_root_are_accepted_at_parse_time() -> None:
    check_code_and_root("d", "{{ params.pipeline }}", "{{ var.value.root }}/state")


@pytest.mark.parametrize("factory", [stateful_pipeline, backfill_pipeline, restore_pipeline, trial_pipeline])
def test_every_dag_factory_refuses_an_invalid_root(factory: Any) -> None:
    scheduled: Any = {"schedule": "@daily", "start_date": datetime(2024, 1, 1, tzinfo=UTC)}
    more = scheduled if factory is stateful_pipeline else {"pipeline": "p"}
    factory("d", "m:P", "file:///r", **more)
    with pytest.raises(ValueError, match="DAG d: root 'data' is no storage URL"):
        factory("d", "m:P", "data", **more)
