"""Time zones by Spark's names, and a process that lives in one."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from cairn.operations.intervals.plan_interval import plan_zone
from cairn.operations.validation.row_json import row_json
from state_backend.values import zones
from state_backend.values.errors import UsageError
from state_backend.values.zones import local_zone, zone_of

WINTER, SUMMER = datetime(2024, 1, 1, tzinfo=UTC), datetime(2024, 7, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("name", "canonical", "winter_minutes", "summer_minutes"),
    [
        ("UTC", "UTC", 0, 0),
        ("Z", "UTC", 0, 0),
        ("GMT", "UTC", 0, 0),
        ("Etc/UTC", "UTC", 0, 0),
        ("+00:00", "UTC", 0, 0),
        ("+5", "+05:00", 300, 300),
        ("+05:30", "+05:30", 330, 330),
        ("+0530", "+05:30", 330, 330),
        ("GMT-3", "-03:00", -180, -180),
        ("UTC+01:00", "+01:00", 60, 60),
        ("EST", "-05:00", -300, -300),
        ("IST", "Asia/Kolkata", 330, 330),
        ("PST", "America/Los_Angeles", -480, -420),
        ("America/New_York", "America/New_York", -300, -240),
        ("Australia/Lord_Howe", "Australia/Lord_Howe", 660, 630),
    ],
)
def test_spark_zone_names_give_utc_offsets(name: str, canonical: str, winter_minutes: int, summer_minutes: int) -> None:
    """The rules for datetimes and the C library's say the same, and TZ is afterwards what it was."""
    zone, before = zone_of(name), os.environ.get("TZ")
    assert zone.name == canonical
    assert (zone.rules is UTC) == (canonical == "UTC")
    with local_zone(zone):
        for at, minutes in ((WINTER, winter_minutes), (SUMMER, summer_minutes)):
            offset = timedelta(minutes=minutes)
            assert at.astimezone(zone.rules).utcoffset() == at.astimezone().utcoffset() == offset
            assert datetime.fromtimestamp(at.timestamp()) == at.replace(tzinfo=None) + offset
            (shown,) = row_json(pa.table({"at": pa.array([at], pa.timestamp("us", "UTC"))}), ["at"], name).to_pylist()
            assert datetime.fromisoformat(shown[7:-2]).utcoffset() == offset
    assert os.environ.get("TZ") == before
    assert datetime.fromtimestamp(0).astimezone().utcoffset() == timedelta(0)


@pytest.mark.parametrize("name", ["Mars/Olympus", "", "+25:00", "+05:99", "../etc/passwd"])
def test_an_unknown_zone_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="no time zone"):
        zone_of(name)


def test_a_host_without_zone_files_takes_those_of_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The C library would take such a zone for UTC without a word."""
    zone = zones.Zone(name="Europe/Berlin", rules=zone_of("Europe/Berlin").rules, posix="Nowhere/Berlin")
    with local_zone(zone):
        assert time.tzname == ("CET", "CEST")
    monkeypatch.setattr(zones, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="no data for the time zone 'Europe/Berlin'"), local_zone(zone):
        raise AssertionError("not reached")
    assert os.environ.get("TZ") == "UTC"


@pytest.mark.parametrize(
    ("wanted", "session", "recorded", "expected"),
    [
        (None, "UTC", None, "UTC"),
        (None, "IST", "Asia/Kolkata", "Asia/Kolkata"),
        (None, "UTC", "Asia/Kolkata", None),
        ("UTC", "UTC", "Asia/Kolkata", "UTC"),
        ("Europe/Berlin", "UTC", None, "Europe/Berlin"),
        ("Europe/Berlin", "UTC", "Europe/Berlin", "Europe/Berlin"),
    ],
)
def test_an_interval_runs_in_the_pipelines_zone_or_the_sessions(
    wanted: str | None, session: str, recorded: str | None, expected: str | None
) -> None:
    """Another one than before must be named: it may be just that of the host."""
    if expected is not None:
        assert plan_zone("p", wanted, session, recorded).name == expected
        return
    with pytest.raises(UsageError, match="but this Spark session has 'UTC'\nSet"):
        plan_zone("p", wanted, session, recorded)
