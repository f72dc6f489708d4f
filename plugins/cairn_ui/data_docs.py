"""List pages of Data Docs by pipeline and checkpoint. Only names of files and folders are read, not the pages."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

_OF_CHECKPOINT = re.compile(r"checkpoint (\d+) ")
_LISTED = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class DocsPage:
    """One page of Data Docs.

    Attributes:
        path: Path below the folder of all Data Docs, with `/`.
        pipeline: Name of the pipeline.
        of: What was validated, in words: such as `checkpoint 3`, an attempt or a savepoint.
        table: The state or output that the expectations are about.
        at: Time of the validation; None if the name of its folder is no time.
        checkpoint: Id of the validated checkpoint; None if an attempt or a savepoint was validated.
    """

    path: str
    pipeline: str
    of: str
    table: str
    at: datetime | None
    checkpoint: int | None


def pages_in(root: Path, pipeline: str | None = None) -> list[DocsPage]:
    """Return the newest pages of Data Docs, at most 500, newest first.

    Args:
        root: The folder of all Data Docs.
        pipeline: List only pages of the pipeline with this name; None lists pages of all pipelines.
    """
    folders = (
        [root / pipeline]
        if pipeline is not None
        else [p for p in root.iterdir() if p.is_dir()]
        if root.is_dir()
        else []
    )
    found = [path for folder in folders if folder.is_dir() for path in folder.glob("validations/**/*.html")]
    found.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return [page for path in found[:_LISTED] if (page := _page(path.relative_to(root))) is not None]


def of_checkpoints(root: Path, pipeline: str) -> dict[int, str]:
    """Return, for each checkpoint with Data Docs, the path of its newest page by checkpoint id.

    Args:
        root: The folder of all Data Docs.
        pipeline: Name of the pipeline.
    """
    found: dict[int, str] = {}
    if "/" in pipeline or pipeline.startswith("."):
        return found
    for page in pages_in(root, pipeline):
        if page.checkpoint is not None:
            found.setdefault(page.checkpoint, page.path)
    return found


def page_at(path: str) -> DocsPage | None:
    """Return the page at a path below the folder of all Data Docs; None if the path is no page of a validation."""
    return _page(Path(path))


def _page(inside: Path) -> DocsPage | None:
    # Great Expectations names a page <pipeline>/validations/<pipeline>/<table>/<run>/<time>/<file>.
    parts = inside.parts
    if len(parts) < 7 or parts[1] != "validations":
        return None
    match = _OF_CHECKPOINT.match(parts[4])
    words = parts[4].rpartition(" ")[0] or parts[4]
    return DocsPage(
        path=inside.as_posix(),
        pipeline=parts[0],
        of=words,
        table=parts[3],
        at=_time(parts[5]),
        checkpoint=int(match[1]) if match else None,
    )


def _time(folder: str) -> datetime | None:
    # Great Expectations writes times in UTC, such as 20240109T010000.000000Z.
    for form in ("%Y%m%dT%H%M%S.%fZ", "%Y%m%dT%H%M%SZ"):
        with suppress(ValueError):
            return datetime.strptime(folder, form).replace(tzinfo=UTC)
    return None
