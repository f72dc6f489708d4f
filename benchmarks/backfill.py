"""The cost of a day of flights in a past range: by a call for each day, or by one call in three ways.

    python -m benchmarks.backfill [--days 60] [--turn 20] [--flights FOLDER]

The one call has a Spark job for each day, a job for several days, or a job for several days whose source reads them by
one query (`range_source`). One Spark session on two cores runs all ways. They take turns of some days, each in a root of its own. So other load on
the machine affects all of them. The first turn has the JVM's warm-up, and counts too. The program prints the seconds
and the CPU seconds of all processes per day, and the speed of the machine: the seconds of 20,000,000 additions before
and after. It fails if the states or outputs differ.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from benchmarks.processes import cpu_s
from cairn.operations.intervals.plan_chunk import ChunkLimits
from cairn.operations.intervals.run_interval import run_interval
from cairn.operations.intervals.run_intervals import run_intervals
from cairn.pipeline import Interval
from cairn.spark.session import connect
from pipelines import land_flights
from pipelines.aircraft import AIRCRAFT
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import read_log

ONE = ChunkLimits(intervals=1)


def read_day(spark: SparkSession, interval: Interval) -> Any:
    """Return the flights of a day, as a source that reads one interval does."""
    return AIRCRAFT.source(spark, interval)


PLAIN = replace(AIRCRAFT, source=read_day)


def results(root: str) -> dict[Interval, Any]:
    """Return the digest and the output checksums of each day whose checkpoint is retained."""
    return {
        record.content.interval: (record.content.digest, [o.handle.crc32c for o in record.content.outputs])
        for record in read_log(locate(root, AIRCRAFT.name).storage).completed()
    }


def take_turns(
    days: Sequence[Interval], length: int, ways: dict[str, Callable[[Sequence[Interval]], object]]
) -> dict[str, Any]:
    """Run the ways in turns. Return the mean seconds and CPU seconds of a day: with, and without, the first turn."""
    spent: dict[str, list[tuple[int, float, float]]] = {name: [] for name in ways}
    for first in range(0, len(days), length):
        turn = days[first : first + length]
        for name, run in ways.items():
            started_s, cpu_started_s = time.perf_counter(), sum(cpu_s().values())
            run(turn)
            spent[name].append((len(turn), time.perf_counter() - started_s, sum(cpu_s().values()) - cpu_started_s))
    return {
        name: {"all turns": _per_day(turns), "after the first": _per_day(turns[1:])} for name, turns in spent.items()
    }


def _per_day(turns: Sequence[tuple[int, float, float]]) -> dict[str, float]:
    counts, wall_s, all_cpu_s = zip(*turns, strict=True)
    return {"seconds": round(sum(wall_s) / sum(counts), 3), "cpu_seconds": round(sum(all_cpu_s) / sum(counts), 3)}


def loop_s() -> float:
    """Return the CPU seconds of 20,000,000 additions: the speed of the machine."""
    began_s, total = time.process_time(), 0
    for n in range(20_000_000):
        total += n
    return round(time.process_time() - began_s, 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--days", type=int, default=60, help="365 are there")
    parser.add_argument("--turn", type=int, default=20, help="days of a turn; at most half of --days")
    parser.add_argument(
        "--flights", type=Path, help="where the flights are landed; left out: they are landed for this run"
    )
    options = parser.parse_args()
    if options.days < 2 * options.turn:
        parser.error("--turn must be at most half of --days")
    days = [
        Interval(AIRCRAFT.start + timedelta(days=n), AIRCRAFT.start + timedelta(days=n + 1))
        for n in range(options.days)
    ]
    with tempfile.TemporaryDirectory(prefix="cairn-backfill-") as text:
        folder = Path(text)
        flights = options.flights or folder / "flights"
        if options.flights is None:
            land_flights.main(["--to", str(flights), "--from", "2013-01-01", "--days", str(options.days)])
        os.environ["CAIRN_FLIGHTS"] = str(flights.resolve())
        each, alone, union, together = (str(folder / name) for name in ("each", "alone", "union", "together"))
        spark = connect("local[2]", "cairn backfill benchmark")
        spark.sparkContext.setLogLevel("ERROR")
        before_s = loop_s()
        found = take_turns(
            days,
            options.turn,
            {
                "a call each": lambda turn: [run_interval(spark, PLAIN, day, each) for day in turn],
                "one call, a job each": lambda turn: run_intervals(spark, PLAIN, turn, alone, limits=ONE),
                "one call, in chunks": lambda turn: run_intervals(spark, PLAIN, turn, union),
                "one call, in chunks, range source": lambda turn: run_intervals(spark, AIRCRAFT, turn, together),
            },
        )
        if not results(each) == results(alone) == results(union) == results(together):
            raise RuntimeError("the states or outputs of the ways differ")
        started_s = time.perf_counter()
        kept = run_intervals(spark, AIRCRAFT, days, together)
        if any(outcome.computed for outcome in kept):
            raise RuntimeError("a day was computed again, though nothing has changed")
        found["again, all there"] = {"seconds_per_day": round((time.perf_counter() - started_s) / len(days), 3)}
        spark.stop()
    print(json.dumps({"days": options.days, "20,000,000 additions, s": [before_s, loop_s()], **found}, indent=1))


if __name__ == "__main__":
    main()
