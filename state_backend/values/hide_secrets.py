"""Hide credentials in texts that leave a process: messages, logs, records, commands, process titles, pages.

`hide` is the only function that knows how a credential looks. Errors of Cairn, its logger, the lines of drivers, the
texts of the command line and the pages all pass through it, so that no caller has to think of it.
"""

from __future__ import annotations

import logging
import re
import traceback
from contextlib import suppress
from typing import Any

HIDDEN = "***"

# Pattern of the names of parameters, options and settings whose values are secrets.
_SECRET = (
    r"[\w.\-]{0,100}(?:token|password|passwd|passphrase|secret|signature|credential"
    r"|(?:api|access|account|private|secret)[._-]?key(?:[._-]?id)?)|sig|pwd|sas"
)
_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_RULES = (
    # user:password@ of a URL. A password may have a slash, as S3 secret keys often do. But :8080/…@ begins with a port.
    # With the limits of 300 characters, the time stays linear for a long text without spaces.
    (
        re.compile(r"(://)[^\s/@:\[\]'\"]{0,300}:(?:[^\s/'\"]{0,300}|(?!\d{1,5}[/?#;])[^\s@'\"]{1,300})@"),
        rf"\1{HIDDEN}@",
    ),
    # https://TOKEN@host: a user without a password counts as a token.
    (re.compile(r"(\bhttps?://)[^\s/@:'\"]{1,300}@"), rf"\1{HIDDEN}@"),
    # ;token=…  ?sig=…  password='…'  --password …
    (re.compile(rf"(?i)((?:^|[\s?&;,({{'\"\[])(?:{_SECRET})\s*=\s*)(?:{_QUOTED}|[^\s&;,'\"<>)}}\]]+)"), rf"\1{HIDDEN}"),
    (re.compile(rf"(?i)(--(?:{_SECRET})\s+)(?:{_QUOTED}|[^\s'\"-][^\s'\"]*)"), rf"\1{HIDDEN}"),
    # "password": "…" of JSON, and of the repr of a dict. {"token": "…"} is not hidden: it may be a key of the state.
    (
        re.compile(
            rf"(?i)(([\"'])(?!(?:(?!access|auth|refresh|session|security)\w)*token\2)(?:{_SECRET})\2\s*:\s*)(?:{_QUOTED})"
        ),
        rf'\1"{HIDDEN}"',
    ),
    # The value of the HTTP header Authorization
    (re.compile(r"\b((?:Bearer|Basic) )(?=[^\s'\"]*[\d._~+/=\\-])[^\s'\"]{6,}"), rf"\1{HIDDEN}"),
)


def hide(text: str) -> str:
    """Return a text with `***` in place of each credential: in URLs, parameters, options, JSON and HTTP headers."""
    for pattern, shown in _RULES:
        text = pattern.sub(shown, text)
    return text


def hide_all(value: Any) -> Any:
    """Return a JSON value with `hide` applied to each text in it. Lists and tuples stay what they are."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, dict):
        return {hide_all(key): hide_all(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(hide_all, value))
    return value


def hide_in(error: BaseException) -> None:
    """Hide credentials in an exception of another library: in its texts and notes, and in those of its causes."""
    seen, pending = set[int](), [error]
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.args = tuple(hide(part) if isinstance(part, str) else part for part in one.args)
        if isinstance(message := getattr(one, "message", None), str):  # Click's errors
            one.message = hide(message)  # type: ignore[attr-defined]
        if notes := getattr(one, "__notes__", None):
            notes[:] = map(hide, notes)
        pending += [other for other in (one.__cause__, one.__context__) if other is not None]


def hide_title(command: str) -> None:
    """Make `ps` show this process's command without credentials. Nothing happens if the command has none.

    Every user of a machine can read the command lines of all processes. Airflow depends on the library setproctitle;
    without the library, this function does nothing.
    """
    if hide(command) != command:
        with suppress(ImportError):
            from setproctitle import setproctitle

            setproctitle(hide(command))


def _hide_in_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = hide(record.getMessage()), ()
    if record.exc_info:
        told = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        if hide(told) != told:
            # A JSON formatter, such as PySpark's, would format `exc_info` again, with the credentials.
            record.exc_text, record.exc_info = hide(told), None
    return True


for _name in ("cairn", "cairn.spark"):  # A filter of a logger does not see records of its child loggers.
    logging.getLogger(_name).addFilter(_hide_in_record)
