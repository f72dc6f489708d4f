"""Program that looks up one key for the Checkpoints page: it reads a question from stdin, and prints an answer as JSON.

    question   {"root": …, "pipeline": …, "checkpoint": id, "key": the key as a person writes it}
    answer     {"key": …, "states": [[state, entry, expires, value], …], "history": [[line, …], …], "more": bool, "replay": id or null}

`history` has the lines of each change, the newest change first. `more` is true if older checkpoints were not searched.
`replay` is the checkpoint's id if its interval can be replayed. Entries, values and lines are texts, and long ones are
cut. The program writes no file. Only the answer has the key and values: error messages have none.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from cairn.command.get import look_up
from cairn.command.history import lines_of
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.checkpoint.log import read_newest
from state_backend.formats.json_keys import parse_key
from state_backend.formats.types import parse_struct
from state_backend.inspection.describe import plain
from state_backend.inspection.key_entries import SearchedKey
from state_backend.inspection.key_history import describe_step, history_of_key
from state_backend.inspection.state_table import StateSource
from state_backend.values.errors import CairnError

MOST_STEPS, MOST_SECONDS = 20, 12.0
MOST_CHARACTERS = 2000


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a question."""
    url = join_url(asked["root"], asked["pipeline"])
    storage = open_storage(url)
    wanted, log = asked["checkpoint"], read_newest(storage)
    # The record of a dropped checkpoint takes a search through all records.
    record = log.whole(wanted) if wanted in log.retained else Coordinator(storage, asked["pipeline"]).record(wanted)
    content = record.content
    schema = parse_struct(content.key_schema)
    values = parse_key(asked["key"], schema)
    source = StateSource.of_record(url, record)
    states = next(iter(look_up(source, [values]).values()), {})
    entries = [
        [state, cut(_entry(row)), row.get("expires_at", ""), cut(_text(row["value"]) if "value" in row else "")]
        for state, rows in states.items()
        for row in rows
    ]
    key = SearchedKey.of(values, schema, content.max_parallelism)
    steps: list[list[str]] = []
    more = False
    began_s = time.monotonic()
    with work_folder("look-up") as work:
        for step in history_of_key(log, url, key, storage, work, newest_first=True):
            if len(steps) == MOST_STEPS or time.monotonic() - began_s > MOST_SECONDS:
                more = True
                break
            steps.append([*map(cut, lines_of(describe_step(step), rows=False))])
    there = content.kind == "interval" and (content.base_id is None or content.base_id in log.retained)
    return {
        "key": plain(key.named),
        "states": entries,
        "history": steps,
        "more": more,
        "replay": record.id if there else None,
    }


def cut(text: str) -> str:
    """Return a short text unchanged. Of a longer text, return the beginning and the number of characters of the whole."""
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}… ({len(text):,} characters)"


def _entry(row: Mapping[str, Any]) -> str:
    return next((_text(row[name]) for name in ("user_key", "pos") if name in row), "")


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def main() -> int:
    """Answer the question on stdin, and return the exit code."""
    try:
        found = answer(json.load(sys.stdin))
    except CairnError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
