"""Report of the demo: a table with a row for each day, and whether all checks passed. Every number is measured."""

from __future__ import annotations

from collections.abc import Sequence

from state_backend.values.frozen import frozen

_HEADER = "{:10}  {:>10}  {:>7}  {:>6}  {:>10}  {:>10}  {:>7}  {:>5}".format(
    "day", "checkpoint", "flights", "keys", "new bytes", "full bytes", "seconds", "tries"
)
_ROW = (
    "{r.day:10}  {r.checkpoint:>10}  {r.input_rows:>7,}  {r.keys:>6,}  {r.uploaded_bytes:>10,}  {r.state_bytes:>10,}  "
    "{r.seconds:>7.1f}  {r.tries:>5}"
)


@frozen
class DayResult:
    day: str
    checkpoint: int
    input_rows: int
    keys: int
    # The bytes of state that the day uploaded.
    uploaded_bytes: int
    # The size of the whole state after the day. A full checkpoint would upload these bytes.
    state_bytes: int
    seconds: float
    tries: int
    # The number of data checks that passed; None if the checkpoint was not validated.
    expectations: int | None = None
    # The number of entries that validation restored; None without validation.
    entries: int | None = None


def table_of(results: Sequence[DayResult]) -> list[str]:
    """Return a table with a line for each day, of at most 80 columns."""
    return [_HEADER, *(_ROW.format(r=r) for r in results)]


def sums_of(results: Sequence[DayResult]) -> list[str]:
    new, full = sum(r.uploaded_bytes for r in results), sum(r.state_bytes for r in results)
    sentences = [f"Uploaded in total: {new:,} bytes. Full checkpoints would have been {full:,} bytes."]
    if checked := [r for r in results if r.expectations is not None]:
        last = checked[-1]
        with_expectations = [r for r in checked if r.expectations]
        sentences.append(
            f"Validation restored {_count(len(checked), 'checkpoint')} from storage, each into an empty folder. The last one has "
            f"{last.entries:,} entries of {last.keys:,} keys, as recorded. "
            f"{_count(sum(r.expectations or 0 for r in checked), 'data check')} passed, "
            f"in {_count(len(with_expectations), 'checkpoint')}."
        )
    return sentences


def verdict_of(results: Sequence[DayResult], killed_day: str | None) -> str:
    """Return the verdict on a demo whose days all succeeded, as one sentence."""
    parts = [_count(len(results), "day")]
    recovered = " and recovered" if any(r.day == killed_day and r.tries > 1 for r in results) else ""
    parts.append(f"1 driver killed{recovered}" if killed_day else "no driver killed")
    if checks := sum(r.expectations or 0 for r in results):
        parts.append(f"{_count(checks, 'check')} passed")
    new, full = sum(r.uploaded_bytes for r in results), sum(r.state_bytes for r in results)
    saved = round(100 * (1 - new / full)) if full else 0
    if saved > 0:
        parts.append(f"{saved} % fewer bytes uploaded than with full checkpoints")
    return ", ".join(parts)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"
