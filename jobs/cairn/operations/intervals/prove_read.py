"""Comparison of the files that a source recorded in its position with the files that Spark read.

A position that lists `files`, each with its length, says which input the interval had. Spark may have read other input:
files of an older list, or rows in its cache. Then the result must not be committed under this position.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from cairn.spark.file_scans import Scans

_LENGTHS = ("bytes", "size_bytes")
# Cairn adds up the scans in at most this number of ways. If there are more ways, Cairn skips the comparison.
_MOST_SUMS = 10_000


def recorded_lengths(position: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the lengths of the files that a position lists; None if it lists no files with lengths."""
    files = position.get("files")
    if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
        return None
    lengths = [next((file[name] for name in _LENGTHS if name in file), None) for file in files]
    known = tuple(length for length in lengths if isinstance(length, int))
    return known if known and len(known) == len(lengths) else None


def unproven(position: Mapping[str, Any], scans: Scans, *, shared_cache: bool) -> str | None:
    """Return why the rows may not be those of the files that the position lists; None if there is no doubt.

    Some scans together must have read all recorded files. Other scans may read other files, such as a table to join. If
    a query scans no files, there is no doubt, because its source has read the files itself.
    """
    lengths = recorded_lengths(position)
    if lengths is not None and scans.files and not _can_sum_up(scans.files, lengths):
        read = " and ".join(f"{files} with {size}" for files, size in scans.files)
        return (
            f"the source's position lists files: {len(lengths)} with {sum(lengths)} bytes; Spark read: {read} bytes\n"
            "The input changed while the source read it, or Spark used an older list of files: run the interval again\n"
            'If the position lists files that Spark does not read, give these files no length ("bytes", "size_bytes")'
        )
    if scans.cached and (shared_cache or (lengths is not None and not scans.files)):
        return (
            "the source's rows come from Spark's cache, which may hold the rows of an earlier read\n"
            "Do not call cache() or persist() in the source; to empty the cache: spark.catalog.clearCache()"
        )
    return None


def _can_sum_up(scans: Iterable[tuple[int, int]], lengths: Collection[int]) -> bool:
    """Return True if some of the scans together have the number of files and the bytes of the recorded files.

    Most scans of Spark leave out empty files, so the number of files may be lower by the number of empty files.
    """
    least, most, wanted = sum(length > 0 for length in lengths), len(lengths), sum(lengths)
    sums = {(0, 0)}
    for files, size in scans:
        more = {(n + files, total + size) for n, total in sums if n + files <= most and total + size <= wanted}
        if any(n >= least and total == wanted for n, total in more) or len(sums) > _MOST_SUMS:
            return True
        sums |= more
    return False
