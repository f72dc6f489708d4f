"""The form of every message that an error of ours has: read at night, in a log, by somebody who did not write it."""

from __future__ import annotations

import re

from state_backend.values import errors
from tests.support.messages import CLASSES, sites

# These group others, or are answers inside of this package that a caller turns into one of the others.
GROUPS = {"CairnError", "AttemptLost", "StorageError", "UserCodeError"}


def test_every_kind_of_error_is_raised_and_says_what_to_do_with_it() -> None:
    assert len(sites()) > 400
    assert {site.kind for site in sites()} == CLASSES - GROUPS
    assert [name for name in CLASSES if not getattr(errors, name).__doc__] == []


def test_no_line_of_a_message_is_longer_than_170_characters() -> None:
    """What is filled in comes on top. What goes on longer is what to do next, and has a line of its own."""
    long = {str(site): line for site in sites() for line in site.template.splitlines() if len(line) > 170}
    assert long == {}


def test_a_command_with_options_has_a_line_of_its_own() -> None:
    """So that it can be copied whole."""
    program = re.compile(r"(?<!^)(?<!: )(?<!')(?<!`)\b(?:cairn|airflow|python -m) [a-z.]+ --", re.MULTILINE)
    assert [str(site) for site in sites() if program.search(site.template)] == []


def test_messages_have_no_exclamation_mark_and_end_in_no_comma_or_colon() -> None:
    odd = [
        str(s)
        for s in sites()
        if re.search(r"!|[,;:]$|\s$|^\s", s.template.replace("!r}", "")) and "\n" not in s.template
    ]
    assert odd == []
