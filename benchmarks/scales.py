"""The sizes of the suite's sections.

The scale `small` shows within minutes that everything works. The scale `full` gives the figures.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Keys, rows and batches of every section.

    Numbers of batches include the first batch, which warms up and does not count.

    Attributes:
        judged: True if the scale is large enough for the targets.
        tuned_peer: True if Spark also runs with tuned settings.
        rounds: The number of rounds of sections with a peer.
    """

    judged: bool
    tuned_peer: bool
    rounds: int
    batches: int
    row_keys: int
    steady_keys: int
    steady_batches: int
    pandas_keys: int
    list_keys: int
    list_preload: int
    list_appends: int
    aggregate_keys: int
    rss_keys: int
    rss_intervals: int
    engine_entries: int
    backfill_days: int
    merge_keys: int
    merge_batches: int
    profiled_rows: int
    profiled_frames: int


SCALES = {
    "small": Scale(
        judged=False,
        tuned_peer=False,
        rounds=1,
        batches=2,
        row_keys=1_000,
        steady_keys=20_000,
        steady_batches=2,
        pandas_keys=300,
        list_keys=4,
        list_preload=1_000,
        list_appends=20,
        aggregate_keys=20_000,
        rss_keys=100_000,
        rss_intervals=2,
        engine_entries=100_000,
        backfill_days=4,
        merge_keys=20_000,
        merge_batches=3,
        profiled_rows=20_000,
        profiled_frames=1_000,
    ),
    "full": Scale(
        judged=True,
        tuned_peer=True,
        rounds=2,
        batches=4,
        row_keys=100_000,
        steady_keys=500_000,
        steady_batches=4,
        pandas_keys=10_000,
        list_keys=20,
        list_preload=5_000,
        list_appends=500,
        aggregate_keys=1_000_000,
        rss_keys=5_000_000,
        rss_intervals=5,
        engine_entries=1_000_000,
        backfill_days=5,
        merge_keys=1_000_000,
        merge_batches=7,
        profiled_rows=200_000,
        profiled_frames=10_000,
    ),
}
