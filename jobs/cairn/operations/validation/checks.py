"""The results of a validation's checks. The task log, the quarantine file and the page of a checkpoint show them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable

from state_backend.adapters.open_storage import join_url
from state_backend.formats import paths
from state_backend.values.frozen import frozen

MOST_KEYS = 20
_LONGEST_KEY = 300


@frozen
class FailingRows:
    number: int
    keys: tuple[str, ...]  # The keys of the first rows, at most `MOST_KEYS`, as JSON.
    # URL of the folder with all rows as Parquet; None if the rows are not stored.
    url: str | None = None
    # Why the rows are not stored; None if they are.
    not_stored: str | None = None

    def __str__(self) -> str:
        more = self.number - len(self.keys)
        text = f"keys: {', '.join(self.keys)}{f' and {more:,} more' if more > 0 else ''}"
        return "; ".join(
            [text, *([f"all rows: {self.url}"] if self.url else [self.not_stored] if self.not_stored else [])]
        )


@frozen
class FailingStore:
    # URL of the pipeline's folder, where failing rows are stored; None stores none.
    root: str | None
    attempt: str
    # Why failing rows are not stored, if `root` is None.
    not_stored: str = ""

    def keep(self, keys: Iterable[str], count: Callable[[], int], store: Callable[[str, str], int]) -> FailingRows:
        """Store failing rows by calling `store(root, folder)`, which returns their number, and return a description.

        `keys`: The first rows' keys. `count`: Counts the rows if they are not stored. If `store` fails, raise no error,
        because an error would end the validation before it marks the checkpoint. Instead, the returned value says why.
        """
        shown = tuple(key if len(key) <= _LONGEST_KEY else f"{key[:_LONGEST_KEY]}…" for key in keys)
        if self.root is None:
            return FailingRows(number=count(), keys=shown, not_stored=self.not_stored)
        folder = paths.failing(self.attempt, str(uuid.uuid4()))
        try:
            number = store(self.root, folder)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            return FailingRows(number=count(), keys=shown, not_stored=f"the rows could not be stored: {reason}")
        return FailingRows(number=number, keys=shown, url=join_url(self.root, folder.rstrip("/")))


@frozen
class Check:
    """One check of a validation, and its result."""

    table: str  # Name of the state; empty for a check of the files or of the restored state.
    what: str  # Name of the expectation, or of the step of the validation.
    # The column or columns that the check is about; empty for checks of whole tables.
    column: str = ""
    expected: str = ""  # The arguments of the expectation.
    observed: str = ""  # The result in words.
    success: bool
    # The rows that fail; None if the check passed, or does not concern single rows.
    failing: FailingRows | None = None

    @property
    def finding(self) -> str:
        if not self.table:
            return self.observed
        expected = f"expected {self.expected}; " if self.expected else ""
        said = f"state {self.table!r}: {f'{self.what} {self.column}'.rstrip()}: {expected}{self.observed}"
        return f"{said}; {self.failing}" if self.failing is not None else said
