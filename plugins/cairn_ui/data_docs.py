"""List pages of Data Docs by pipeline and checkpoint. Only names of files and folders are read, not the pages."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from state_backend.values.frozen import frozen

_OF_CHECKPOINT = re.compile(r"checkpoint (\d+) ")
_LISTED = 500


@frozen
class DocsPage:
    path: str
    pipeline: str
    of: str
    # Name of the state whose expectations the page shows; None for Cairn's own page with all checks.
    table: str | None
    # Time of the validation; None if it is unknown.
    at: datetime | None
    # Id of the validated checkpoint; None if an attempt or a savepoint was validated.
    checkpoint: int | None


def pages_in(root: Path, pipeline: str | None = None) -> list[DocsPage]:
    """Return the newest pages of Data Docs below `root`, newest first, at most 500. `pipeline`: None for all."""
    folders = [root / pipeline] if pipeline is not None else [*root.glob("*")]
    found = [
        path for folder in folders for kind in ("validations/**", "checks") for path in folder.glob(f"{kind}/*.html")
    ]
    found.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    listed = [page_at(path.relative_to(root), _written(path)) for path in found[:_LISTED]]
    return [page for page in listed if page is not None]


def _written(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC)


def of_checkpoints(root: Path, pipeline: str) -> dict[int, str]:
    """Return a path below `root` by checkpoint id: Cairn's page with all checks, else a page of Great Expectations."""
    found: dict[int, str] = {}
    if "/" in pipeline or pipeline.startswith("."):
        return found
    own = [page_at(path.relative_to(root)) for path in (root / pipeline).glob("checks/*.html")]
    for page in (*own, *pages_in(root, pipeline)):
        if page is not None and page.checkpoint is not None:
            found.setdefault(page.checkpoint, page.path)
    return found


def page_at(path: Path | str, written: datetime | None = None) -> DocsPage | None:
    """Return the page at `path` below the folder of Data Docs, `written` then; None if it is no validation page."""
    inside = Path(path)
    # Great Expectations names a page <pipeline>/validations/<pipeline>/<table>/<run>/<time>/<file>.
    # Cairn names the page with all checks <pipeline>/checks/<run>.html.
    parts = inside.parts
    if len(parts) == 3 and parts[1] == "checks" and inside.suffix == ".html":
        run, table, at = inside.stem, None, written
    elif len(parts) >= 7 and parts[1] == "validations":
        run, table, at = parts[4], parts[3], _time(parts[5])
    else:
        return None
    match = _OF_CHECKPOINT.match(run)
    return DocsPage(
        path=inside.as_posix(),
        pipeline=parts[0],
        of=run.rpartition(" ")[0] or run,
        table=table,
        at=at,
        checkpoint=int(match[1]) if match else None,
    )


def _time(folder: str) -> datetime | None:
    # Great Expectations writes times in UTC, such as 20240109T010000.000000Z.
    for form in ("%Y%m%dT%H%M%S.%fZ", "%Y%m%dT%H%M%SZ"):
        with suppress(ValueError):
            return datetime.strptime(folder, form).replace(tzinfo=UTC)
    return None
