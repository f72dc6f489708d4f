"""The cost of a day of flights in a past range: with one call for each day, and with one call for all days.

    python -m benchmarks.backfill [--days 60] [--flights FOLDER]

One Spark session on two cores runs both ways. They take turns of five days, each in a root of its own. So other load on
the machine affects both. The program prints the median seconds of a day, the median CPU seconds of a day in this
process (without the JVM and its workers), and the cost of a range whose days are all computed already. It fails if the
states or outputs of the two ways differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from cairn.operations.intervals.run_interval import run_interval
from cairn.operations.intervals.run_intervals import run_intervals
from cairn.pipeline import Interval
from cairn.spark.session import connect
from pipelines import land_flights
from pipelines.aircraft import AIRCRAFT
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import read_log

TURN = 5


def results(root: str) -> dict[Interval, Any]:
    """Return the digest and the output checksums of each day whose checkpoint is retained."""
    return {
        record.content.interval: (record.content.digest, [o.handle.crc32c for o in record.content.outputs])
        for record in read_log(locate(root, AIRCRAFT.name).storage).completed()
    }


def take_turns(days: Sequence[Interval], ways: dict[str, Callable[[Sequence[Interval]], None]]) -> dict[str, Any]:
    """Run the ways in turns of five days. The first turn warms up.

    Returns:
        The median seconds and CPU seconds of a day, by way.
    """
    wall_s: dict[str, list[float]] = {name: [] for name in ways}
    cpu_s: dict[str, list[float]] = {name: [] for name in ways}
    for first in range(0, len(days), TURN):
        turn = days[first : first + TURN]
        for name, run in ways.items():
            started_s, cpu_started_s = time.perf_counter(), time.process_time()
            run(turn)
            if first:
                wall_s[name].append((time.perf_counter() - started_s) / len(turn))
                cpu_s[name].append((time.process_time() - cpu_started_s) / len(turn))
    return {
        name: {
            "seconds_per_day": round(statistics.median(wall_s[name]), 3),
            "driver_cpu_seconds_per_day": round(statistics.median(cpu_s[name]), 3),
        }
        for name in ways
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--days", type=int, default=60, help="at least 10; 365 are there")
    parser.add_argument(
        "--flights", type=Path, help="where the flights are landed; left out: they are landed for this run"
    )
    options = parser.parse_args()
    if options.days < 2 * TURN:
        parser.error(f"--days must be at least {2 * TURN}, since the first {TURN} warm up")
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
        alone, together = str(folder / "alone"), str(folder / "together")
        spark = connect("local[2]", "cairn backfill benchmark")
        spark.sparkContext.setLogLevel("ERROR")

        def each(turn: Sequence[Interval]) -> None:
            for day in turn:
                run_interval(spark, AIRCRAFT, day, alone)

        found = take_turns(
            days, {"alone": each, "in one go": lambda turn: run_intervals(spark, AIRCRAFT, turn, together) and None}
        )
        if results(alone) != results(together):
            raise RuntimeError("the states or outputs of both ways differ")
        started_s = time.perf_counter()
        kept = run_intervals(spark, AIRCRAFT, days, together)
        if any(outcome.computed for outcome in kept):
            raise RuntimeError("a day was computed again, though nothing has changed")
        found["again, all there"] = {"seconds_per_day": round((time.perf_counter() - started_s) / len(days), 3)}
        spark.stop()
    print(json.dumps({"days": options.days, **found}, indent=1))


if __name__ == "__main__":
    main()
