"""Time zones by the names that Spark accepts, and a context manager that sets the time zone of the process.

PySpark passes naive datetimes to processors and takes them back. In frames these are wall time in the session's zone.
In state they are wall time in the zone of the worker's process. Two hosts may have different zones, and a processor
would then compute different results on them. Therefore a task sets its process to the session's zone on every host.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from state_backend.values.errors import UsageError
from state_backend.values.frozen import frozen

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# No zone changes its clocks by so much: Casey in Antarctica sets them back by three hours.
_LONGEST_CHANGE_MS = 4 * 3_600_000
_UTC_NAMES = {"UTC", "Z", "GMT", "UT", "Etc/UTC", "Etc/GMT", "Etc/UCT", "UCT", "Zulu", "Etc/Zulu", "Universal", "GMT0"}
_OFFSET = re.compile(r"(?:UTC|GMT|UT)?([+-])(\d{1,2})(?::?(\d{1,2}))?(?::?(\d{2}))?")
# Short names of zones that Spark accepts, for a region or a fixed offset. Source: java.time.ZoneId.SHORT_IDS.
_SHORT = {
    "ACT": "Australia/Darwin",
    "AET": "Australia/Sydney",
    "AGT": "America/Argentina/Buenos_Aires",
    "ART": "Africa/Cairo",
    "AST": "America/Anchorage",
    "BET": "America/Sao_Paulo",
    "BST": "Asia/Dhaka",
    "CAT": "Africa/Harare",
    "CNT": "America/St_Johns",
    "CST": "America/Chicago",
    "CTT": "Asia/Shanghai",
    "EAT": "Africa/Addis_Ababa",
    "ECT": "Europe/Paris",
    "EST": "-05:00",
    "HST": "-10:00",
    "IET": "America/Indiana/Indianapolis",
    "IST": "Asia/Kolkata",
    "JST": "Asia/Tokyo",
    "MIT": "Pacific/Apia",
    "MST": "-07:00",
    "NET": "Asia/Yerevan",
    "NST": "Pacific/Auckland",
    "PLT": "Asia/Karachi",
    "PNT": "America/Phoenix",
    "PRT": "America/Puerto_Rico",
    "PST": "America/Los_Angeles",
    "SST": "Pacific/Guadalcanal",
    "VST": "Asia/Ho_Chi_Minh",
}


@frozen
class Zone:
    """One time zone in three notations."""

    # "UTC", a region, or an offset such as "+05:30". Pandas and Arrow accept these names.
    name: str
    # The zone as a `tzinfo` for datetimes; `datetime.UTC` itself for UTC.
    rules: tzinfo
    # The zone as a value of the environment variable TZ.
    posix: str


@cache
def zone_of(name: str) -> Zone:
    """Return the zone that a value of Spark's setting `spark.sql.session.timeZone` names."""
    known = _SHORT.get(name, name)
    if known in _UTC_NAMES:
        return Zone(name="UTC", rules=UTC, posix="UTC0")
    if match := _OFFSET.fullmatch(known):
        sign, hours, minutes, seconds = match[1], int(match[2]), int(match[3] or 0), int(match[4] or 0)
        offset = timedelta(hours=hours, minutes=minutes, seconds=seconds)
        if not offset:
            return Zone(name="UTC", rules=UTC, posix="UTC0")
        if offset <= timedelta(hours=18) and minutes < 60 and seconds < 60:
            text = f"{hours:02}:{minutes:02}" + (f":{seconds:02}" if seconds else "")
            west = "-" if sign == "+" else "+"
            rules = timezone(offset if sign == "+" else -offset)
            return Zone(name=f"{sign}{text}", rules=rules, posix=f"<{sign}{text.replace(':', '')}>{west}{text}")
    try:
        return Zone(name=known, rules=ZoneInfo(known), posix=known)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise UsageError(
            f"this host has no time zone {name!r}: {error}\nName a region such as 'Europe/Berlin', or install the tzdata package"
        ) from None


def settled_wall_ms(at_ms: int, rules: tzinfo) -> int:
    """Return the latest wall time that no instant after `at_ms` comes before, in ms as if the zone were UTC.

    Mostly this is the wall time at `at_ms`. If clocks will repeat the hour of `at_ms`, it is the start of that hour.
    """
    low, offset = at_ms, _offset_ms(rules, at_ms)
    high = at_ms + _LONGEST_CHANGE_MS
    if _offset_ms(rules, high) >= offset:
        return at_ms + offset
    while high - low > 1:  # Find the first instant with the smaller offset.
        middle = (low + high) // 2
        low, high = (low, middle) if _offset_ms(rules, middle) < offset else (middle, high)
    return min(at_ms + offset, high + _offset_ms(rules, high))


def _offset_ms(rules: tzinfo, at_ms: int) -> int:
    try:
        offset = (_EPOCH + timedelta(milliseconds=at_ms)).astimezone(rules).utcoffset()
    except OverflowError:  # Before the year 1 or after 9999.
        return 0
    return 0 if offset is None else offset // timedelta(milliseconds=1)


def name_of(rules: tzinfo | None) -> str:
    """Return the name of a datetime's zone: a region if the zone has a key, as `ZoneInfo` has, else an offset."""
    return getattr(rules, "key", None) or str(rules or UTC)


@contextmanager
def local_zone(zone: Zone) -> Iterator[None]:
    """Run the block with the process's local time in the zone, and restore TZ afterwards."""
    if os.environ.get("TZ") == zone.posix:
        time.tzset()
        yield
        return
    from state_backend.values.environment import environment  # The parse of a DAG file does not need it.

    try:
        with environment({"TZ": zone.posix}):
            _set_local(zone)
            yield
    finally:
        time.tzset()


def _set_local(zone: Zone) -> None:
    # On a host without zone files, the C library silently treats a region as UTC. The files of Python's tzdata package
    # are tried next.
    for value in (zone.posix, *_list_packaged(zone.name)):
        os.environ["TZ"] = value
        time.tzset()
        here = [datetime.fromtimestamp(at).astimezone().utcoffset() for at in _PROBES_S]
        if here == [datetime.fromtimestamp(at, zone.rules).utcoffset() for at in _PROBES_S]:
            return
    raise UsageError(f"this host has no data for the time zone {zone.name!r}; install the system's tzdata package")


# Instants in January and July 2024: in a zone with daylight saving time, their offsets differ.
_PROBES_S = (1_704_067_200, 1_719_792_000)


def _list_packaged(name: str) -> list[str]:
    package = find_spec("tzdata")
    folders = package.submodule_search_locations if package is not None else None
    files = [Path(folder) / "zoneinfo" / name for folder in folders or ()]
    return [f":{file}" for file in files if file.is_file()]
