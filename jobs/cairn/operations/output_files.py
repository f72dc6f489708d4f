"""Published output for whoever reads Parquet: DuckDB, pandas, Polars. Needs no Spark."""

from __future__ import annotations

from datetime import datetime

from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint.log import read_log


def output_files(
    root: str, pipeline: str, *, late: bool = False, start: datetime | None = None, end: datetime | None = None
) -> list[str]:
    """The Parquet files that are current now, by interval: absolute paths, or URLs where the root is no local folder.

    late: the late rows instead. start, end: only intervals within.
    A folder's other files are not output: they are of replaced intervals and of tries that did not count. A re-run may delete a
    file that is named here, so ask anew for each query.
    """
    url = join_url(root, pipeline)
    outputs = read_log(open_storage(url)).current_outputs()
    folder = url.removeprefix("file://")
    return [
        f"{folder}/{file.handle.path}"
        for interval, (_, files) in sorted(outputs.items())
        for file in files
        if file.late == late and (start is None or interval.start >= start) and (end is None or interval.end <= end)
    ]
