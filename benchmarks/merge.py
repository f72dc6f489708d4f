"""Keyed state beside its alternatives: MERGE into a table format, and computing the whole result again.

    python -m benchmarks.merge [--keys 1000000] [--batches 7] [--parts 0.01,0.1] [--only cairn,delta,...] [--rounds 2]

The state has one row for each key with six fields, one of them 64 characters. The first batch has every key. Each
further batch has a part of the keys, drawn at random, each key once. At the end of a batch, every engine has its state
durable in a local folder, and the batch's rows of `k, n, total` in a Parquet file:

- **cairn**: `run_interval` with the vectorised API on two shards in Spark's local mode. Checkpoint, output and clean-up
  are included.
- **delta**: `deltalake`, with one MERGE for each batch. Replaced files stay in the folder until a vacuum.
- **iceberg**: `pyiceberg` has no MERGE with computed values. The table is read, joined with the batch by DuckDB, and
  overwritten.
- **recompute**: DuckDB over all batches so far. There is no state, and every batch writes the whole result.

Each engine runs in a process of its own, one after the other. All engines must end with the same state, row by row, or
the run fails. CPU seconds are those of the process and its descendants (for Cairn Spark's JVM too). Medians leave out
the first two batches. Every second round runs the engines in reverse order. `make bench` runs this program as the
section *merge*.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.cpu_per_update import updates_over
from benchmarks.engines import interval, start_spark
from benchmarks.processes import ROOT, cpu_s
from benchmarks.report import OURS, Check, Part, Question, Run
from benchmarks.report_files import Started
from cairn.data_sources.keyed_state import KeyedState
from cairn.operations.intervals.run_interval import run_interval
from tests.support.environments import environment_with

PARTS = (0.01, 0.1)
_DEADLINE_S = 1_800.0
FIELDS = ("n", "total", "low", "high", "last", "payload")
# In the SQL below, `b` is the batch and `t` is the state. A batch has one row for each of its keys.
_FROM_BATCH = "k, 1::bigint n, v total, v low, v high, v last, payload"
_MERGED = (
    "coalesce(b.k, t.k) k, coalesce(t.n, 0) + (b.k is not null)::bigint n, (coalesce(t.total, 0) + coalesce(b.v, 0))::bigint total, "
    'least(t.low, b.v) low, greatest(t.high, b.v) high, coalesce(b.v, t.last) "last", coalesce(b.payload, t.payload) payload'
)


def write_input(folder: Path, keys: int, batches: int, part: float) -> list[Path]:
    """Write one file for each batch."""
    random = np.random.default_rng(20130101)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz0123456789", "S1")
    files = []
    for number in range(batches + 1):
        drawn = random.permutation(keys)[: keys if number == 0 else max(1, round(keys * part))]
        columns = {
            "k": drawn,
            "v": random.integers(-1_000_000, 1_000_000, len(drawn)),
            "payload": random.choice(letters, (len(drawn), 64)).view("S64")[:, 0].astype(str),
        }
        files.append(folder / f"{number:03d}.parquet")
        pq.write_table(pa.table(columns), files[-1])
    return files


def query(sql: str, **tables: pa.Table) -> pa.Table:
    """Run a DuckDB query over Arrow tables and return the result."""
    with duckdb.connect() as connection:
        connection.execute("set threads = 2")
        for name, table in tables.items():
            connection.register(name, table)
        return connection.execute(sql).to_arrow_table()


class Cairn:
    """State in Cairn, with the vectorised API."""

    def __init__(self, folder: Path, files: list[Path]) -> None:
        self._root, self._spark = folder / "state", start_spark()
        self._pipeline = updates_over(files, "arrow")

    def batch(self, number: int) -> None:
        """Process the input file of this number."""
        run_interval(self._spark, self._pipeline, interval(number), str(self._root))

    def state(self) -> pa.Table:
        """Return the whole state."""
        self._spark.dataSource.register(KeyedState)
        reader = self._spark.read.format("keyed_state").option("root", str(self._root)).option("pipeline", "updates")
        return (
            reader.option("state", "state").load().selectExpr("key.k k", *(f"value.{f} {f}" for f in FIELDS)).toArrow()
        )

    def close(self) -> None:
        """Stop the JVM."""
        self._spark.stop()


class Delta:
    """State in a Delta table, with MERGE by `deltalake`."""

    def __init__(self, folder: Path, files: list[Path]) -> None:
        self._table, self._out, self._files = str(folder / "table"), folder, files

    def batch(self, number: int) -> None:
        """Merge the input file of this number into the table, and write the output rows of its keys."""
        from deltalake import DeltaTable, write_deltalake

        rows = pq.read_table(self._files[number])
        if number == 0:
            write_deltalake(self._table, query(f"select {_FROM_BATCH} from rows", rows=rows))
        else:
            merge = DeltaTable(self._table).merge(rows, predicate="t.k = b.k", source_alias="b", target_alias="t")
            new = {
                "n": "t.n + 1",
                "total": "t.total + b.v",
                "low": "least(t.low, b.v)",
                "high": "greatest(t.high, b.v)",
                "last": "b.v",
                "payload": "b.payload",
            }
            first = {
                "k": "b.k",
                "n": "1",
                **dict.fromkeys(("total", "low", "high", "last"), "b.v"),
                "payload": "b.payload",
            }
            merge.when_matched_update(new).when_not_matched_insert(first).execute()
        kept = DeltaTable(self._table).to_pyarrow_table(columns=["k", "n", "total"])
        made = query("select k, n, total from kept semi join rows using (k)", kept=kept, rows=rows)
        pq.write_table(made, self._out / f"output-{number:03d}.parquet")

    def state(self) -> pa.Table:
        """Return the whole state."""
        from deltalake import DeltaTable

        return DeltaTable(self._table).to_pyarrow_table()

    def close(self) -> None:
        """Do nothing, because the engine holds no resources."""


class Iceberg:
    """State in an Iceberg table that `pyiceberg` reads and overwrites in each batch."""

    def __init__(self, folder: Path, files: list[Path]) -> None:
        from pyiceberg.catalog.sql import SqlCatalog

        self._out, self._files = folder, files
        self._catalog = SqlCatalog("here", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/warehouse")
        self._catalog.create_namespace("state")

    def batch(self, number: int) -> None:
        """Join the input file of this number with the table, and write the table and the output rows of its keys."""
        rows = pq.read_table(self._files[number])
        if number == 0:
            merged = query(f"select {_FROM_BATCH} from rows", rows=rows)
            self._catalog.create_table("state.state", schema=merged.schema)
        else:
            kept = self.state()
            merged = query(f"select {_MERGED} from kept t full join rows b on t.k = b.k", kept=kept, rows=rows)
        self._catalog.load_table("state.state").overwrite(merged)
        made = query("select k, n, total from merged semi join rows using (k)", rows=rows, merged=merged)
        pq.write_table(made, self._out / f"output-{number:03d}.parquet")

    def state(self) -> pa.Table:
        """Return the whole state."""
        return self._catalog.load_table("state.state").scan().to_arrow()

    def close(self) -> None:
        """Do nothing, because the engine holds no resources."""


class Recompute:
    """The whole result, computed again by DuckDB in each batch."""

    def __init__(self, folder: Path, files: list[Path]) -> None:
        self._out, self._files, self._last = folder, files, 0

    def batch(self, number: int) -> None:
        """Compute the whole result from the files up to this number, and delete the previous result."""
        files = [str(file) for file in self._files[: number + 1]]
        duckdb.execute(
            'copy (select k, count(*) n, sum(v)::bigint total, min(v) low, max(v) high, arg_max(v, filename) "last", '
            f"arg_max(payload, filename) payload from read_parquet({files!r}, filename = true) group by k) "
            f"to '{self._out}/result-{number:03d}.parquet' (format parquet)"
        )
        duckdb.execute(
            f"copy (select k, n, total from '{self._out}/result-{number:03d}.parquet' semi join '{files[-1]}' using (k)) "
            f"to '{self._out}/output-{number:03d}.parquet' (format parquet)"
        )
        if number:
            (self._out / f"result-{self._last:03d}.parquet").unlink()
        self._last = number

    def state(self) -> pa.Table:
        """Return the whole result."""
        return pq.read_table(self._out / f"result-{self._last:03d}.parquet")

    def close(self) -> None:
        """Do nothing, because the engine holds no resources."""


ENGINES: dict[str, Callable[[Path, list[Path]], Any]] = {
    "cairn": Cairn,
    "delta": Delta,
    "iceberg": Iceberg,
    "recompute": Recompute,
}


def run_here(name: str, folder: Path, inputs: list[Path]) -> dict[str, list[float]]:
    """Measure one engine in this process, and write its last state to `folder/last.parquet`.

    Returns:
        The samples of each metric, one for each batch.
    """
    found: dict[str, list[float]] = {"wall_s": [], "cpu_s": [], "written_mb": []}
    duckdb.execute("set threads = 2")
    engine = ENGINES[name](folder, inputs)
    try:
        known: set[tuple[str, int]] = set()
        for number in range(len(inputs)):
            before, began_s = sum(cpu_s().values()), time.monotonic()
            engine.batch(number)
            found["wall_s"].append(time.monotonic() - began_s)
            found["cpu_s"].append(sum(cpu_s().values()) - before)
            there = {(str(f), f.stat().st_size) for f in folder.rglob("*") if f.is_file()}
            found["written_mb"].append(sum(size for _, size in there - known) / 1e6)
            known = there
        columns = pa.table(engine.state()).select(["k", *FIELDS])
        schema = pa.schema([("k", pa.int64()), *((f, pa.int64()) for f in FIELDS[:-1]), ("payload", pa.string())])
        pq.write_table(columns.cast(schema).sort_by("k"), folder / "last.parquet")
    finally:
        engine.close()
    return found


def measured(work: Path, keys: int, batches: int, parts: Sequence[float], engines: Sequence[str], rounds: int) -> Part:
    """Measure every engine with every size of batch, in folders below `work`.

    Args:
        work: The folder for environments, inputs and results.
        keys: The number of keys.
        batches: The number of batches after the first.
        parts: The sizes of a batch, as parts of the number of keys.
        engines: The names of the engines.
        rounds: The number of rounds.
    """
    python = environment_with(work, Path(__file__).with_name("peers.lock"))
    runs: list[Run] = []
    checks: list[Check] = []
    for part in parts:
        inputs, section = work / "inputs", f"merge {part:.0%}"
        inputs.mkdir()
        write_input(inputs, keys, batches, part)
        first: pa.Table | None = None
        for number in range(rounds):
            for name in engines[:: -1 if number % 2 else 1]:
                folder = work / "run"
                folder.mkdir()
                began_s, load = time.monotonic(), os.getloadavg()[0]
                try:
                    found = _run_apart(str(python), name, folder, inputs)
                    state = pq.read_table(folder / "last.parquet")
                except (subprocess.SubprocessError, OSError) as error:
                    # The other engines continue, so that the report of a long run keeps their figures. The suite still
                    # fails.
                    runs.append(Run(section=section, variant=name, status="failed", note=str(error)))
                else:
                    runs.append(Run(section=section, variant=name, status="measured", samples=found))
                    first = state if first is None else first
                    label = f"state of {name}, round {number + 1}"
                    equal = state.equals(first)
                    checks.append(Check(section=section, label=label, equal=equal, note=f"{state.num_rows} rows"))
                took_s = time.monotonic() - began_s
                print(f"{section}, {name}: {runs[-1].status}, {took_s:.1f} s, load before it {load:.1f}", flush=True)
                shutil.rmtree(folder)
        shutil.rmtree(inputs)
    return Part(runs=runs, questions=questions(parts), checks=checks)


def _run_apart(python: str, name: str, folder: Path, inputs: Path) -> dict[str, list[float]]:
    command = [python, "-m", "benchmarks.merge", "--here", name, str(folder), str(inputs)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, timeout=_DEADLINE_S)
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    # The load of all keys has samples of its own. The two batches after the load warm up and do not count.
    warm = {name: samples[3:] or samples[1:] for name, samples in found.items()}
    return {**warm, "load_s": found["wall_s"][:1], "load_cpu_s": found["cpu_s"][:1]}


def questions(parts: Sequence[float]) -> list[Question]:
    """Return the questions of the report for each size of batch."""
    peers = tuple(name for name in ENGINES if name != OURS)
    return [
        Question(
            section=f"merge {part:.0%}", label=label, metric=metric, unit=unit, higher_is_better=False, peers=peers
        )
        for part in parts
        for label, metric, unit in (
            ("batch, durable", "wall_s", "s"),
            ("CPU of a batch", "cpu_s", "s"),
            ("written per batch", "written_mb", "MB"),
            ("load of all keys", "load_s", "s"),
        )
        if metric != "load_s" or part == parts[0]  # The load is the same for all sizes of batch.
    ]


def main(arguments: list[str]) -> int:
    """Run the command line. The exit code is 1 if a run fails or two engines differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--batches", type=int, default=7)
    parser.add_argument("--parts", default=",".join(map(str, PARTS)))
    parser.add_argument("--only", default=",".join(ENGINES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "out" / "merge.json")
    parser.add_argument("--here", nargs=3, metavar=("ENGINE", "FOLDER", "INPUTS"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.here:
        name, folder, inputs = given.here
        print(json.dumps(run_here(name, Path(folder), sorted(Path(inputs).iterdir()))))
        return 0
    started, parts = Started(), [float(part) for part in given.parts.split(",")]
    with tempfile.TemporaryDirectory(prefix="cairn-merge-") as scratch:
        part = measured(Path(scratch), given.keys, given.batches, parts, given.only.split(","), given.rounds)
    return started.finish([part], given.out, scale=f"{given.keys:,} keys", judged=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
