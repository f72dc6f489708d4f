"""Render pages from the HTML files in the folder `templates`. Every value is escaped, and credentials are hidden."""

from __future__ import annotations

import hashlib
import json
import re
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from cairn_ui.phases import phases_of
from state_backend.inspection.describe import keys_of
from state_backend.values import human_units as words
from state_backend.values.hide_secrets import hide

_INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|\+00:00)")
_OPTION = re.compile(r"(?:^|\s)--?[A-Za-z][\w-]*[ =]$")
_HERE = Path(__file__).resolve().parent
STATIC = _HERE / "static"
CONTENT_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
}

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; frame-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@cache
def environment() -> Environment:
    """Return Jinja's environment with the filters of the templates. A template that uses an unknown name fails."""
    found = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: hide(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {
        "size": words.size,
        "span": words.span,
        "count": words.count,
        "segment": lambda text: quote(str(text), safe=""),
        "at": _at,
        "iso": _iso,
        "utc": _utc,
        "instants": instants,
        "json": lambda value: json.dumps(value, indent=2, default=str),
        "keys": keys_of,
        "phases": phases_of,
        "tone": tone_of,
        "type": type_of,
    }
    found.filters |= filters
    found.globals["version"] = _version()
    return found


def render(template: str, **values: Any) -> str:
    return environment().get_template(template).render(**values)


def instants(text: object) -> Markup:
    """Return a text as HTML with its UTC times marked up, so that the page's script shows them in the page's time zone.

    A time that is the value of an option, such as in `cairn backfill --from 2024-01-01T00:00:00Z`, stays as it is,
    since commands take times in UTC. A time inside of a longer word, such as a run id, stays too.
    """
    words, parts, done = hide(str(text)), list[Markup](), 0
    for found in _INSTANT.finditer(words):
        before, after = words[: found.start()], words[found.end() :]
        if _OPTION.search(before) or re.search(r"[\w/+%-]$", before) or re.match(r"[\w/+%-]", after):
            continue
        try:
            at = datetime.fromisoformat(found[0])
        except ValueError:
            continue
        markup = Markup('<time datetime="{}" data-instant{}>{}</time>').format(
            _iso(at), Markup(" data-seconds") if at.second else "", _utc(at)
        )
        parts += [escape(words[done : found.start()]), markup]
        done = found.end()
    return Markup("").join([*parts, escape(words[done:])])


def tone_of(state: str) -> str:
    """Return the tone, which decides the colour, of the label that shows a state such as `stale by 12`."""
    tones = {"quarantined": "bad", "descends": "bad", "stale": "warn", "completed": "good"}
    return tones.get(state.partition(" ")[0], "info")


def type_of(kind: Any, *, inner: bool = False) -> str:
    """Return a type of Spark's JSON as text. A whole schema is a text such as `user string, points array<int>`."""
    match kind:
        case {"type": "struct", "fields": fields}:
            said = ", ".join(f"{f['name']}{':' if inner else ''} {type_of(f['type'], inner=True)}" for f in fields)
            return f"struct<{said}>" if inner else said
        case {"type": "array", "elementType": element}:
            return f"array<{type_of(element, inner=True)}>"
        case {"type": "map", "keyType": key, "valueType": value}:
            return f"map<{type_of(key, inner=True)}, {type_of(value, inner=True)}>"
    return str(kind)


def _at(instant: datetime | str) -> datetime:
    return (datetime.fromisoformat(instant) if isinstance(instant, str) else instant).astimezone(UTC)


def _iso(instant: datetime | str) -> str:
    return _at(instant).isoformat().replace("+00:00", "Z")


def _utc(instant: datetime | str) -> str:
    """Format a time in UTC. In the browser, the page's script converts it to the time zone of Airflow's UI."""
    at = _at(instant)
    return f"{at:%Y-%m-%d %H:%M} UTC" if not at.second else f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _version() -> str:
    """Return a hash of the static files. The hash is part of their URLs, so a browser loads changed files again."""
    data = b"".join(path.read_bytes() for path in sorted(STATIC.iterdir()))
    return hashlib.sha256(data).hexdigest()[:12]
