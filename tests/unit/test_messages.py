"""The form of every message that an error of ours has: read at night, in a log, by somebody who did not write it."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from state_backend.values import errors
from tests.support import messages
from tests.support.messages import (
    CLASSES,
    SECOND_HAND,
    UNSEEN,
    Made,
    Site,
    as_plain,
    from_plain,
    missing,
    provoked,
    sites,
)

# These group others, or are answers inside of this package that a caller turns into one of the others.
GROUPS = {"CairnError", "RetryableError", "AttemptLost", "StorageError", "UserCodeError"}


def test_every_kind_of_error_is_raised_and_says_what_to_do_with_it() -> None:
    assert len(sites()) > 400
    assert {site.kind for site in sites()} == CLASSES - GROUPS
    assert [name for name in CLASSES if not getattr(errors, name).__doc__] == []


def test_no_line_is_a_paragraph() -> None:
    """What is filled in comes on top. What goes on longer is what to do next, and has a line of its own."""
    long = {str(site): line for site in sites() for line in site.template.splitlines() if len(line) > 170}
    assert long == {}


def test_a_command_with_options_has_a_line_of_its_own() -> None:
    """So that it can be copied whole."""
    program = re.compile(r"(?<!^)(?<!: )(?<!')(?<!`)\b(?:cairn|airflow|python -m) [a-z.]+ --", re.MULTILINE)
    assert [str(site) for site in sites() if program.search(site.template)] == []


def test_it_does_not_shout_or_end_in_the_middle() -> None:
    odd = [
        str(s)
        for s in sites()
        if re.search(r"!|[,;:]$|\s$|^\s", s.template.replace("!r}", "")) and "\n" not in s.template
    ]
    assert odd == []


# --- each of them is provoked ------------------------------------------------------------------------------------------------------

HERE = Site(file="jobs/a.py", first=3, last=5, kind="UsageError", template="the key … is none of the columns …")
THERE = Site(file="jobs/a.py", first=9, last=9, kind="SourceError", template="…")
BUG = Site(file="jobs/b.py", first=1, last=1, kind="InvariantViolated", template="this can't be")


@pytest.mark.parametrize(
    ("made", "seen"),
    [
        (Made(file="jobs/a.py", line=4, kind="UsageError", message="m"), [HERE]),
        (Made(file="jobs/a.py", line=9, kind="SourceError", message="m"), [THERE]),
        (Made(file="jobs/a.py", line=6, kind="UsageError", message="the key k is none of the columns a"), []),
        # Out of one of Spark's processes: its words tell.
        (Made(file=SECOND_HAND, line=1, kind="UsageError", message="p: the key k is none of the columns a; b"), [HERE]),
        (Made(file=SECOND_HAND, line=1, kind="SourceError", message="the key k is none of the columns a"), []),
    ],
)
def test_what_was_made_is_found_by_its_place_or_its_words(made: Made, seen: list[Site]) -> None:
    every = [HERE, THERE, BUG]
    found = provoked(from_plain(as_plain([made])), every)
    assert list(found) == seen
    assert missing(found, every) == [s for s in (HERE, THERE) if s not in seen]


def test_what_nobody_sees_provoked_is_there_and_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {
        (file, start) for file, start in UNSEEN for s in sites() if s.file == file and s.template.startswith(start)
    }
    assert there == UNSEEN.keys() and all(UNSEEN.values())
    monkeypatch.setattr(messages, "UNSEEN", {("jobs/a.py", "the key"): "a reason"})
    assert missing([], [HERE, THERE, BUG]) == [THERE]


@pytest.mark.parametrize(
    ("options", "whole"),
    [
        ({}, True),
        ({"keyword": "cli"}, False),
        ({"markexpr": "not spark"}, False),
        ({"ignore": ["tests/unit"]}, False),
        ({"args_source": pytest.Config.ArgsSource.ARGS}, False),
        ({"exitstatus": pytest.ExitCode.TESTS_FAILED}, False),
    ],
)
def test_only_a_whole_run_that_passed_has_to_have_met_all(options: dict[str, Any], whole: bool) -> None:
    source = options.pop("args_source", pytest.Config.ArgsSource.TESTPATHS)
    status = options.pop("exitstatus", pytest.ExitCode.OK)
    config: Any = SimpleNamespace(args_source=source, getoption=options.get)
    assert messages.is_whole_run(config, status) is whole
