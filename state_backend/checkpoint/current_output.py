"""The current output of a pipeline as readers get it, with the intervals whose result is no longer valid.

The current output of an interval is that of its last commit, unless a later commit replaced or retracted it (`Log`). If
the checkpoint becomes stale or quarantined, the output stays current until the interval runs again or a person retracts
it, because the sink has its rows. So a reader gets this output too, and `spoilt` names the intervals.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from state_backend.checkpoint.choose_base import lines_of
from state_backend.checkpoint.interval_results import spoilt_results
from state_backend.checkpoint.log import Log
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval, to_ms
from state_backend.values.records import OutputFile


@frozen
class CurrentOutput:
    commits: Mapping[Interval, int]  # ids of the commits that made the output
    files: Mapping[Interval, tuple[OutputFile, ...]]
    spoilt: Mapping[Interval, str]  # why a result is not valid

    def list_files(self, *, late: bool) -> list[OutputFile]:
        """Return the files of the output or of the late rows, in the order of their intervals."""
        return [file for _, file in self.files_by_interval(late=late)]

    def files_by_interval(self, *, late: bool) -> list[tuple[Interval, OutputFile]]:
        return [(interval, file) for interval, files in self.files.items() for file in files if file.late == late]

    def notice(self, root: str, pipeline: str) -> str | None:
        """Return a text about the intervals whose result is not valid; None if there are none."""
        if not self.spoilt:
            return None
        shown = lines_of(f"{interval}: {why}" for interval, why in self.spoilt.items())
        return (
            f"pipeline {pipeline!r}: the current output has the rows of {len(self.spoilt)} interval(s) whose result is not valid:{shown}\n"
            f"To run these intervals again, see:\ncairn status --root {root} --pipeline {pipeline}"
        )


def current_output(log: Log, start: datetime | None = None, end: datetime | None = None) -> CurrentOutput:
    start_ms, end_ms = (None if at is None else to_ms(at) for at in (start, end))
    # If both `start` and `end` are given, only the files in `settled/commits/` for these days are read.
    found = log.current_outputs(Interval(start, end) if start is not None and end is not None and start < end else None)
    within = {
        interval: found[interval]
        for interval in sorted(found)
        if (start_ms is None or interval.start_ms >= start_ms) and (end_ms is None or interval.end_ms <= end_ms)
    }
    commits = {interval: n for interval, (n, _) in within.items()}
    return CurrentOutput(
        commits=commits,
        files={interval: files for interval, (_, files) in within.items()},
        spoilt={i: r.spoilt for i, r in spoilt_results(log, commits).items() if r.spoilt is not None},
    )
