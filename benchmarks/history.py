"""State over a long history, and restores of it, against their targets. No Spark.

    python -m benchmarks.history [--small] [--docs]

The long part updates 1 % of the keys, uniformly drawn, in each of many batches, each of which restores and checkpoints every
shard as an interval does. The wide part measures one larger state: ten such batches, cold and warm restores, other
parallelisms. The part of sessions is three days of lists, maps, timers and expiry, with files and with a changelog. Figures are
ratios of things measured in the same run on the same files. ``--docs`` keeps the batches and the plots as docs/history.csv and
docs/history.png. ``--small`` shows that everything works; no target is judged.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.history_plots import Plot, draw
from benchmarks.session_history import session_history
from benchmarks.state_history import Batch, History
from state_backend.shard.changelog import ChangelogOptions
from state_backend.shard.file_cache import FileCache

ROOT = Path(__file__).resolve().parents[1]
GIB = 1024**3
EARLY = 50
RESTORE_EVERY = 25
SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measured value, in what its name says; ``most``: the target, met by that or less."""

    name: str
    value: float
    most: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Long:
    """The long part: every batch, the bytes of the live state, and by batch the seconds of a cold restore of all shards, and
    those of the checkpoint of batch 50, whose files were put aside, in turn with it: machines are not equally fast for minutes.
    """

    batches: list[Batch]
    live_bytes: int
    restores_s: dict[int, tuple[float, float]]


def main(arguments: list[str] | None = None) -> int:
    """0 if all targets are met or none is judged, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.history", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--docs", action="store_true", help="rewrite docs/history.csv and docs/history.png")
    parser.add_argument("--only", choices=("long", "wide", "sessions"))
    parser.add_argument("--work", type=Path, help="where the temporary folder is made; a local disk")
    options = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="cairn-history-", dir=options.work))
    figures: list[Figure] = []
    try:
        if options.only in (None, "long"):
            long = run_long(work / "long", *(20_000, 120) if options.small else (200_000, 1000))
            figures += long_figures(long)
            if options.docs:
                keep(long, ROOT / "docs")
        if options.only in (None, "wide"):
            figures += run_wide(work / "wide", 50_000 if options.small else 1_000_000)
        if options.only in (None, "sessions"):
            for changelog in (None, ChangelogOptions()):
                folder = work / ("sessions-changelog" if changelog else "sessions")
                figures += run_sessions(folder, *(1000, 26) if options.small else (10_000, 72), changelog)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    missed = [f.name for f in figures if f.most is not None and f.value > f.most]
    for figure in figures:
        target = (
            "" if figure.most is None else f"  (<= {figure.most:g}: {'missed' if figure.name in missed else 'met'})"
        )
        print(f"{figure.value:12.3f}  {figure.name}{'' if options.small else target}")
    print(json.dumps({"machine": platform.machine(), "python": platform.python_version(), "small": options.small}))
    return 1 if missed and not options.small else 0


def run_long(folder: Path, keys: int, batches: int) -> Long:
    """A history of ``batches`` updates. Its host has a cache, as by default; the restores that are timed do without."""
    folder.mkdir()
    history = History(folder=folder, keys=keys, parallelism=4, cache=FileCache(folder / "cache", GIB))
    history.load()
    live_bytes = history.compacted_bytes()
    restores_s: dict[int, tuple[float, float]] = {}
    started = time.monotonic()
    for number in range(1, batches + 1):
        history.update(SHARE)
        if number == EARLY:
            aside = history.copied(folder / "aside")
        if (number % RESTORE_EVERY == 0 and number >= EARLY) or number == batches:
            rounds = 15 if number == batches else 5
            both = [(sum(history.restore_seconds()), sum(aside.restore_seconds())) for _ in range(rounds)]
            restores_s[number] = (
                statistics.median(now for now, _ in both),
                statistics.median(then for _, then in both),
            )
        if number % 100 == 0:
            print(f"{number} batches, {time.monotonic() - started:.0f} s", file=sys.stderr)
    if history.stored_bytes() != history.accounted_bytes():
        raise AssertionError(
            f"{history.stored_bytes()} bytes are stored, {history.accounted_bytes()} are accounted for"
        )
    return Long(batches=history.batches[1:], live_bytes=live_bytes, restores_s=restores_s)


def long_figures(long: Long) -> list[Figure]:
    """The targets of the long part. Files, bytes and restores at the last batch are judged against those at batch 50, and,
    since all three go up and down, their maxima over the last hundred against those over the first."""
    batches, live, restores = long.batches, long.live_bytes, long.restores_s
    last = len(batches)
    early, late = batches[EARLY - 1], batches[-1]
    settled = batches[EARLY - 1 :]
    first_100, last_100 = batches[:100], batches[-100:]
    changed = sum(b.changed_bytes for b in batches)
    longest = max(batches, key=lambda b: b.seconds)
    largest = max(batches, key=lambda b: b.uploaded_bytes)
    return [
        Figure(name=f"live files, batch {last} to batch 50", value=late.live_files / early.live_files, most=1.5),
        Figure(
            name=f"checkpoint bytes, batch {last} to batch 50",
            value=late.checkpoint_bytes / early.checkpoint_bytes,
            most=1.5,
        ),
        Figure(name=f"cold restore, batch {last} to batch 50", value=restores[last][0] / restores[last][1], most=1.5),
        Figure(
            name="live files, most of the last hundred batches to most of the first",
            value=max(b.live_files for b in last_100) / max(b.live_files for b in first_100),
            most=1.5,
        ),
        Figure(
            name="checkpoint bytes, most of the last hundred batches to most of the first",
            value=max(b.checkpoint_bytes for b in last_100) / max(b.checkpoint_bytes for b in first_100),
            most=1.5,
        ),
        Figure(
            name="cold restore, median over all batches from 50 on to batch 50",
            value=statistics.median(now / then for now, then in restores.values()),
            most=1.5,
        ),
        Figure(
            name="storage to live state, one checkpoint, worst batch from 50 on",
            value=max(b.checkpoint_bytes for b in settled) / live,
            most=2.2,
        ),
        Figure(
            name="storage to live state, ten checkpoints, worst batch from 50 on",
            value=max(b.retained_bytes for b in settled) / live,
            most=3.3,
        ),
        Figure(
            name="uploaded to changed bytes, all batches",
            value=sum(b.uploaded_bytes for b in batches) / changed,
            most=4.0,
        ),
        Figure(name="most live files, 4 shards", value=max(b.live_files for b in batches)),
        Figure(name="live state, MB", value=live / 1e6),
        Figure(name="largest upload of a batch, share of the live state", value=largest.uploaded_bytes / live),
        Figure(name="largest file, MB", value=max(b.largest_file_bytes for b in batches) / 1e6),
        Figure(name="median batch, seconds", value=statistics.median(b.seconds for b in batches)),
        Figure(name="longest batch, seconds", value=longest.seconds),
        Figure(name="median batch, CPU seconds", value=statistics.median(b.cpu_seconds for b in batches)),
        Figure(name="longest batch, CPU seconds", value=max(b.cpu_seconds for b in batches)),
        Figure(name="whole shards rewritten", value=sum(_rewritten(b) for b in batches)),
        Figure(name="most shards rewritten in one batch", value=max(_rewritten(b) for b in batches)),
    ]


def _rewritten(batch: Batch) -> int:
    return sum(c.whole for c in batch.merged)


def keep(long: Long, folder: Path) -> None:
    """The batches as CSV, and four plots of them."""
    live = long.live_bytes
    with (folder / "history.csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(
            [
                *("batch", "changed_bytes", "uploaded_bytes", "live_files", "checkpoint_bytes", "retained_bytes"),
                *("shards_merged", "shards_rewritten", "milliseconds", "cold_restore_ms", "cold_restore_of_50_ms"),
            ]
        )
        for n, b in enumerate(long.batches, 1):
            restore = [f"{s * 1000:.1f}" for s in long.restores_s.get(n, ())] or ["", ""]
            merged = sum(c.merged_runs > 0 for c in b.merged)
            rows.writerow(
                [
                    *(n, b.changed_bytes, b.uploaded_bytes, b.live_files, b.checkpoint_bytes, b.retained_bytes),
                    *(merged, _rewritten(b), f"{b.seconds * 1000:.0f}", *restore),
                ]
            )
    numbered = list(enumerate(long.batches, 1))
    uploaded = np.cumsum([b.uploaded_bytes for b in long.batches])
    changed = np.cumsum([b.changed_bytes for b in long.batches])
    plots = [
        Plot(title="live files (4 shards)", lines={"": [(n, b.live_files) for n, b in numbered]}),
        Plot(
            title="storage, in sizes of the live state; limits 2.2 and 3.3",
            lines={
                "one checkpoint": [(n, b.checkpoint_bytes / live) for n, b in numbered],
                "ten checkpoints": [(n, b.retained_bytes / live) for n, b in numbered],
            },
            limits=(2.2, 3.3),
        ),
        Plot(
            title="cold restore, to that of batch 50 at the same time; limit 1.5",
            lines={"": [(n, now / then) for n, (now, then) in long.restores_s.items()]},
            limits=(1.5,),
        ),
        Plot(
            title="uploaded to changed bytes since the first batch; limit 4",
            lines={"": [(n, float(u / c)) for (n, _), u, c in zip(numbered, uploaded, changed, strict=True)]},
            limits=(4.0,),
        ),
    ]
    draw(plots, folder / "history.png")


def run_wide(folder: Path, keys: int) -> list[Figure]:
    """Ten batches on a larger state in two shards, then every kind of restore. Times are medians of five."""
    folder.mkdir()
    history = History(folder=folder, keys=keys, parallelism=2, cache=FileCache(folder / "cache", 4 * GIB))
    loaded = history.load()
    updates = [history.update(SHARE) for _ in range(10)]
    unchanged = history.update(0.0)
    cold = statistics.median(sum(history.restore_seconds()) for _ in range(5))
    copied = statistics.median(history.copy_seconds() for _ in range(5))
    warm = statistics.median(sum(history.restore_seconds(cache=history.cache)) for _ in range(5))
    merging = statistics.median(sum(history.restore_seconds(1, cache=history.cache)) for _ in range(5))
    merged = history.run(np.arange(0), parallelism=1)
    merged_bytes = history.batches[-2].checkpoint_bytes
    warm_one = statistics.median(sum(history.restore_seconds(cache=history.cache)) for _ in range(5))
    splitting = statistics.median(max(history.restore_seconds(2, cache=history.cache)) for _ in range(5))
    split = history.run(np.arange(0), parallelism=2)
    uploaded = sum(b.uploaded_bytes for b in updates)
    return [
        Figure(
            name="ten batches of 1 %, uploaded to changed bytes",
            value=uploaded / sum(b.changed_bytes for b in updates),
            most=2.0,
        ),
        Figure(name="bytes that a checkpoint without changes uploads", value=unchanged.uploaded_bytes, most=0),
        Figure(
            name="upload of a 1 % update to a full snapshot, largest of ten",
            value=max(b.uploaded_bytes for b in updates) / loaded.checkpoint_bytes,
        ),
        Figure(name="cold restore to a parallel copy of the same files", value=cold / copied, most=1.3),
        Figure(name="cold restore, ms", value=cold * 1000),
        Figure(name="warm restore of both shards, ms", value=warm * 1000, most=100.0),
        Figure(
            name="1 to 2 shards, the slower shard, to a warm restore of the one", value=splitting / warm_one, most=1.5
        ),
        Figure(name="2 to 1 shards, ms", value=merging * 1000, most=1000.0),
        Figure(
            name="first checkpoint after 2 to 1, uploaded to all bytes",
            value=merged.uploaded_bytes / merged_bytes,
            most=0.6,
        ),
        Figure(
            name="first checkpoint after 1 to 2, uploaded to all bytes",
            value=split.uploaded_bytes / merged_bytes,
            most=0.01,
        ),
    ]


def run_sessions(folder: Path, users: int, hours: int, changelog: ChangelogOptions | None) -> list[Figure]:
    """Hours of sessions in four shards. Every checkpoint is compared with a copy of it that has nothing obsolete."""
    history = session_history(folder, users, 4, changelog)
    ratios = [history.hour().checkpoint_bytes / history.compacted_bytes() for _ in range(hours)]
    batches = history.batches
    what = f"{hours} hours of sessions, {'changelog' if changelog else 'files'}"
    return [
        Figure(name=f"{what}: checkpoint to its compacted copy, worst hour", value=max(ratios), most=2.5),
        Figure(name=f"{what}: checkpoint to its compacted copy, mean", value=statistics.mean(ratios)),
        Figure(
            name=f"{what}: uploaded to changed bytes",
            value=sum(b.uploaded_bytes for b in batches) / sum(b.changed_bytes for b in batches),
            most=1.0,
        ),
        Figure(name=f"{what}: most live files", value=max(b.live_files for b in batches)),
        Figure(name=f"{what}: largest checkpoint, MB", value=max(b.checkpoint_bytes for b in batches) / 1e6),
    ]


if __name__ == "__main__":
    sys.exit(main())
