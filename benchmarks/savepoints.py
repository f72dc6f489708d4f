"""What savepoints cost: taken of a pipeline and restored into a new one of the same parallelism, through Spark on two cores.

    python -m benchmarks.savepoints [--keys 1000000] [--rounds 5]

The pipeline is that of ``benchmarks.validation``: values of about 100 bytes, two shards, the last two intervals changed a tenth of the
keys each. Times are of the public functions in a warm session, without the host's cache, and include the commit of a restore;
medians of the rounds, whose steps take turns. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.validation import hour, medians_s, texts_of
from cairn.operations.restore_savepoint import restore_savepoint
from cairn.operations.run_interval import run_interval
from cairn.operations.take_savepoint import take_savepoint
from cairn.spark.session import connect
from state_backend.adapters.open_storage import join_url
from state_backend.values.records import Record

FORMATS: tuple[Literal["native", "canonical"], ...] = ("native", "canonical")


def steps(spark: Any, pipeline: Any, root: str, record: Record, folder: Path) -> dict[str, Callable[[], None]]:
    """Each takes or restores a savepoint, which the next round's step replaces."""

    def take(format: Literal["native", "canonical"]) -> Callable[[], None]:
        def run() -> None:
            to = folder / format
            shutil.rmtree(to, ignore_errors=True)
            take_savepoint(spark, pipeline, join_url(root, pipeline.name), record, str(to), format)

        return run

    def restore(format: str) -> Callable[[], None]:
        def run() -> None:
            into = folder / f"from-{format}"
            shutil.rmtree(into, ignore_errors=True)
            restored = restore_savepoint(spark, replace(pipeline, name="other"), str(into), str(folder / format))
            assert restored.content.digest == record.content.digest

        return run

    return {f"{what} {format}": do(format) for format in FORMATS for what, do in (("take", take), ("restore", restore))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="cairn-savepoints-"))
    try:
        spark = connect("local[2]", "cairn savepoints benchmark")
        root, pipeline = str(folder / "root"), texts_of(options.keys, folder)
        for number in range(3):
            record = run_interval(spark, pipeline, hour(number), root)
        seconds = medians_s(steps(spark, pipeline, root, record, folder), options.rounds)
        spark.stop()
        totals = record.content.totals
        print(json.dumps({"keys": totals.keys, "state_bytes": totals.state_bytes, "seconds": seconds}, indent=2))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
