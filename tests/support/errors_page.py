"""The page docs/errors.md, generated from the error classes, Airflow's retries and the exit codes of `cairn`.

    python -m tests.support.errors_page        # rewrites docs/errors.md

tests/unit/test_errors_page.py compares the page with `page()`.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from cairn.command.exit_codes import FINDINGS, STORAGE, USAGE, code_of
from cairn_operators.airflow_versions import AirflowFailException
from cairn_operators.failures import UserCodeFailed, failure
from cairn_operators.retries import _SECONDS, RETRIES, USER_CODE_RETRIES
from state_backend.values import errors
from tests.support.layout import REPOSITORY

PAGE = REPOSITORY / "docs" / "errors.md"
_WIDTH = 130
_SECTION = re.compile(r"^(What to do|Attributes):\n", re.MULTILINE)

_INTRO = """# Errors

This page lists every error of Cairn: its cause, and what to do. Each message contains the name of its error, such as `StateGapError`. Search this
page for the name. In Airflow, the message stands at the end of the task's log.

The commands on this page take the root and the pipeline from two variables:
```console
$ export CAIRN_ROOT=file:///data/state CAIRN_PIPELINE=clicks
```

**If you clear a task of Airflow, clear it together with its downstream tasks.** Otherwise Airflow may compute the interval, but not commit it.

The first error of each section is the base class of the others in the section. Import errors from `cairn.errors`.

The retries on this page are those of tasks that `stateful_pipeline` and `backfill_pipeline` make. Give the same retries to tasks of your own with
[`retry_arguments()`](airflow.md#retry).
"""

_CODES = f"""## Exit codes of `cairn`

| exit code | meaning and errors |
|---|---|
| 0 | The command succeeded |
| {FINDINGS} | The command found a problem, or can't use the state, the input or the pipeline's code: {{{FINDINGS}}} |
| {USAGE} | The call is wrong, or the checkpoint does not exist: {{{USAGE}}} |
| {STORAGE} | A server or a disk failed, or the storage refuses permission: {{{STORAGE}}} |
| 130 | Ctrl-C stopped the command |

`cairn status` and `cairn check` return {FINDINGS} if they find a problem. `cairn diff` and `cairn compare` return 0 even if the two compared sides
differ. With `--json`, the field `same_state` of `cairn diff` and the field `same` of `cairn compare` show a difference.
"""


@dataclass(frozen=True, slots=True)
class Group:
    """Errors after which the caller does the same.

    Attributes:
        title: Heading of the group.
        about: A sentence about the group, or nothing.
        classes: The classes, in the order of the code. The first class is the base of the others.
    """

    title: str
    about: str
    classes: tuple[type[errors.CairnError], ...]


def groups() -> list[Group]:
    """Return the groups as `state_backend.values.errors` divides them: by comments like `# --- Title: sentence. ---`."""
    source = Path(errors.__file__).read_text()
    parts = re.split(r"^# --- (.+?)\.? -+$", source, flags=re.MULTILINE)
    found = [Group("All errors", "Every error of Cairn is a `CairnError`.", (errors.CairnError,))]
    for comment, code in zip(parts[1::2], parts[2::2], strict=True):
        title, about = comment.split(": ")
        names = re.findall(r"^class (\w+)\(", code, re.MULTILINE)
        found.append(Group(title, f"{about[0].upper()}{about[1:]}.", tuple(getattr(errors, name) for name in names)))
    return found


def sections(error: type[errors.CairnError]) -> tuple[str, str]:
    """Return the cause and the text of `What to do:` of a class; the second is empty if the docstring lacks it."""
    cause, *rest = _SECTION.split(inspect.getdoc(error) or "")
    named = dict(zip(rest[::2], rest[1::2], strict=True))
    return cause.strip(), " ".join(named.get("What to do", "").split())


def in_airflow(error: type[errors.CairnError]) -> str:
    """Say what Airflow does with a task of `stateful_pipeline` that failed by this error; nothing for the base of all."""
    if error is errors.CairnError:
        return ""
    if issubclass(error, errors.InputNotReady):
        return "In Airflow, the waiting task takes no slot and needs no retry."
    if isinstance(raised := failure(error.__name__, ""), AirflowFailException):
        return "In Airflow, the task fails at once, without a retry."
    if isinstance(raised, UserCodeFailed):
        return f"In Airflow, the task has {USER_CODE_RETRIES} retries, {_SECONDS[0]} seconds apart."
    # CommitCheckpointOperator raises AirflowFailException for these errors.
    end = ", but the task `checkpoint` has none." if issubclass(error, errors.AttemptLost) else "."
    return f"In Airflow, the task has {RETRIES} retries within about {round(sum(_SECONDS) / 60)} minutes{end}"


def page() -> str:
    """Return the text of docs/errors.md."""
    parts = [_INTRO]
    codes: dict[str, list[str]] = {str(code): [] for code in (FINDINGS, USAGE, STORAGE)}
    for group in groups():
        usual = in_airflow(group.classes[0])
        about = f"{group.about} {usual.replace('the task', 'a task with one of these errors', 1)}"
        parts.append(f"## {group.title}\n{_filled(about)}\n")
        for error in group.classes:
            cause, what = sections(error)
            codes[str(code_of(error("")))].append(f"`{error.__name__}`")
            text = f"{cause}\n\n**What to do:** {what} {in_airflow(error).replace(usual, '')}"
            parts.append(f"### `{error.__name__}`\n{_paragraphs(text)}\n")
    parts.append(re.sub(r"\{(\d)\}", lambda found: ", ".join(codes[found[1]]), _CODES))
    return "\n".join(parts)


def _paragraphs(text: str) -> str:
    return "\n\n".join(_filled(_linked(" ".join(part.split()))) for part in text.split("\n\n"))


def _linked(text: str) -> str:
    """Replace `docs/page.md#heading` by a link to it, relative to the folder of the pages."""
    return re.sub(r"\bdocs/(([\w-]+\.md)(?:#[\w-]+)?)", r"[\2](\1)", text)


def _filled(text: str) -> str:
    """Break the text into lines, without a break inside of a command or a name."""
    whole = re.sub(r"`[^`]+`", lambda code: code[0].replace(" ", "\0"), text)
    return textwrap.fill(whole, _WIDTH, break_on_hyphens=False, break_long_words=False).replace("\0", " ")


if __name__ == "__main__":
    PAGE.write_text(page())
