"""What messages print for Airflow. That Airflow does what they say is shown by tests/integration/test_airflow.py."""

from __future__ import annotations

from datetime import timedelta

import pytest

from state_backend.values.airflow_commands import backfill_command, clear_command
from state_backend.values.errors import Rerun, UsageError
from tests.support.checkpoints import START, day

AGAIN = Rerun(first=day(1).start, last=day(3).start)


def test_the_backfill_command_spans_the_first_to_the_last_interval_start() -> None:
    assert backfill_command("daily", AGAIN) == (
        "cairn backfill --dag daily --from 2024-01-01T00:00:00Z --to 2024-01-03T00:00:00Z"
    )
    replacing = Rerun(first=day(1).start, last=day(1).start, replace_overlapping=True)
    assert backfill_command("daily", replacing).endswith(""" --replace-overlapping""")


def test_the_clear_command_names_the_task_and_warns_if_other_tasks_are_cleared_too() -> None:
    assert clear_command("daily", "process", START) == (
        "airflow tasks clear daily -t process -d -s 2024-01-01T00:00:00+00:00 -e 2024-01-01T00:00:00+00:00 -y"
    )
    text = clear_command("daily", "process", START, {"process", "preprocess", "publish"})
    assert text.splitlines()[1].startswith("(this also clears preprocess: ")


def test_a_reversed_rerun_range_is_refused_and_a_range_round_trips_through_json() -> None:
    with pytest.raises(UsageError, match="is later than the last"):
        Rerun(first=START, last=START - timedelta(seconds=1))
    assert Rerun.from_json(AGAIN.as_json()) == AGAIN
