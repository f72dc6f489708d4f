"""The code blocks of the pages of docs, and what their console blocks quote."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.support.layout import REPOSITORY

# Pages of which all blocks are run.
PAGES = [
    "docs/first-pipeline.md",
    "docs/testing.md",
    "docs/concepts.md",
    "docs/routine.md",
    "docs/upgrade.md",
    "docs/trying.md",
    "docs/wrong-balance.md",
    "docs/from-structured-streaming.md",
    "docs/from-flink.md",
    "docs/settings.md",
    "docs/ready-made.md",
    "docs/deduplicate.md",
    "docs/top-n.md",
    "docs/windows.md",
    "docs/joins.md",
]
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    page: str
    line: int
    kind: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    text = (REPOSITORY / page).read_text()
    return [
        Block(
            page=page,
            line=text[: found.start("text")].count("\n") + 1,
            kind=found["kind"],
            text=found["text"],
            reason=found["reason"],
        )
        for found in _BLOCK.finditer(text)
    ]


def block_with(page: str, line: str) -> str:
    (found,) = (block.text for block in blocks_of(page) if line in block.text)
    return found


def commands_in(text: str) -> list[tuple[str, list[str]]]:
    """Each command with the lines that follow it."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def quoted_in(expected: list[str], said: str) -> bool:
    """Whether the lines stand there in this order, others between them or not."""
    lines = iter(said.splitlines())
    patterns = [".*".join(map(re.escape, line.rstrip().split("…"))) for line in expected]
    return all(any(re.fullmatch(pattern, line.rstrip()) for line in lines) for pattern in patterns)
