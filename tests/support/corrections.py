"""Inputs of many pipelines that are corrected again and again under a real Airflow and a Spark Connect server.

Each correction changes the files of one hour, and Airflow runs the hour and all later ones again. Then every hour of the
pipeline must have read what the files hold now, by the number of rows, the recorded hashes, and the output. The oracle
reads the files in Python and runs the processor without Spark.

The pipelines are those that `cairn new` writes, of each template and interface, and these kinds of sources: a folder of
Parquet files, a join with a table of the hour, and the output of another pipeline.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cairn.command.new_pipeline import Form, NewPipeline, Schedule, parts_of
from cairn.pipeline import Pipeline
from cairn.testing import PipelineTester
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.log import read_log
from tests.support.airflow_on_postgres import airflow_on_postgres
from tests.support.local_stack import SparkConnectServer

ROOT = Path(__file__).resolve().parents[2]
START = datetime(2024, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
TEMPLATES = tuple(form.value for form in Form)
FIRST_OF_CHAIN = "c_arrow"

OWN_SOURCES = """
import hashlib, os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pyspark.sql import functions as F

from cairn import Pipeline, read_log, register_data_sources
from cairn.aggregates import Count, Max, RunningAggregate
from cairn.errors import SourceError

DATA, ROOT = Path(os.environ["CAIRN_CORRECTED"]), os.environ["CAIRN_CORRECTED_ROOT"]


def described(*paths):
    return [{"path": p.name, "bytes": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()} for p in paths]


def read_folder(spark, interval):
    folder = DATA / "c_folder" / f"{interval.start:%Y-%m-%dT%H}"
    return spark.read.parquet(f"file://{folder}"), {"files": described(*sorted(folder.glob("*.parquet")))}


def read_joined(spark, interval):
    orders, rates = (DATA / "c_joined" / f"{kind}-{interval.start:%Y-%m-%dT%H}.json" for kind in ("orders", "rates"))
    table = spark.read.schema("currency string, rate long").json(f"file://{rates}")
    rows = spark.read.schema("user string, currency string, amount long").json(f"file://{orders}")
    joined = rows.join(F.broadcast(table), "currency", "left")
    return joined.withColumn("euro", F.col("amount") * F.col("rate")), {"files": described(orders, rates)}


def read_first(spark, interval):
    outputs = read_log(ROOT, "FIRST").current_outputs(within=interval)
    if sum((done.end - done.start for done in outputs), timedelta()) < interval.end - interval.start:
        raise SourceError("the first pipeline has not committed the interval")
    ids = sorted(checkpoint_id for checkpoint_id, _ in outputs.values())
    register_data_sources(spark)
    reader = spark.read.format("keyed_output").options(root=ROOT, pipeline="FIRST", checkpoints=",".join(map(str, ids)))
    rows = reader.options(start=interval.start.isoformat(), end=interval.end.isoformat(), valid="true").load()
    return rows, {"checkpoints": ids}


class Sizes(RunningAggregate):
    rows = Count()
    largest = Max("amount")


class Euros(RunningAggregate):
    rows = Count()
    largest = Max("euro")


class Repeats(RunningAggregate):
    rows = Count()
    largest = Max("events")


def pipeline(name, source, processor):
    return Pipeline(
        name=name, start=datetime(2024, 1, 1, tzinfo=UTC), source=source, key=["user"], processor=processor, api="arrow",
        output_schema="user string, rows bigint, largest bigint", time_mode="none", parallelism=2, max_parallelism=16,
    )


C_FOLDER = pipeline("c_folder", read_folder, Sizes)
C_JOINED = pipeline("c_joined", read_joined, Euros)
C_CHAINED = pipeline("c_chained", read_first, Repeats)
""".replace("FIRST", FIRST_OF_CHAIN)
OWN = {
    "c_folder": "user string, amount long",
    "c_joined": "user string, currency string, amount long, rate long, euro long",
    "c_chained": "user string, events bigint, pages bigint, last_at timestamp",
}

DAGS = """
# An Airflow DAG: where a file says neither word, Airflow skips it.
from datetime import UTC, datetime, timedelta
from cairn_operators.airflow_versions import CronDataIntervalTimetable
from cairn_operators import stateful_pipeline

quick = {"retry_delay": timedelta(seconds=1), "retries": 5}
for name, pipeline in @PIPELINES@.items():
    globals()[name] = stateful_pipeline(
        name, code=pipeline, root="@ROOT@", schedule=CronDataIntervalTimetable("@hourly", timezone="UTC"),
        start_date=datetime(2024, 1, 1, tzinfo=UTC), end_date=datetime(2024, 1, 2, tzinfo=UTC),
        process={**quick, "poll": timedelta(seconds=0.5)}, checkpoint=quick,
    )
"""


def made_by(name: str) -> NewPipeline:
    """What `cairn new` writes for a pipeline of this module that is no one of `OWN`."""
    what = name.removeprefix("c_")
    return NewPipeline(name=name, schedule=Schedule.hourly, key=parts_of(what)["key"], template=Form(what))


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """A running Airflow with its pipelines.

    Attributes:
        folder: The folder of inputs, modules and state.
        airflow: Airflow.
        names: The pipelines.
        hours: The number of hours that each of them has.
        done: How often the input of each pipeline was corrected.
    """

    folder: Path
    airflow: Any
    names: tuple[str, ...]
    hours: int
    done: Counter[str]

    @property
    def root(self) -> Path:
        """Return the root of the pipelines."""
        return self.folder / "state"

    # --- inputs ---------------------------------------------------------------------------------------------------------------

    def paths(self, name: str, hour: int) -> list[Path]:
        """Return the input files of an hour; of a folder those that exist."""
        data, stamp = self.folder / "data" / name, f"{START + hour * HOUR:%Y-%m-%dT%H}"
        if name == "c_folder":
            return sorted((data / stamp).glob("*.parquet"))
        return sorted(path for path in data.glob(f"*{stamp}.json"))

    def correct(self, name: str, hour: int, chance: random.Random) -> str:
        """Change the input of an hour. Return how."""
        how = chance.choice(["more", "fewer", "other values", "replaced"])
        if name == "c_folder":
            folder = self.folder / "data" / name / f"{START + hour * HOUR:%Y-%m-%dT%H}"
            files = sorted(folder.glob("*.parquet"))
            if how in ("other values", "replaced"):
                write_table(files[0], chance)
            elif how == "more" or len(files) < 2:
                write_table(folder / f"part-{len(files)}-{chance.randrange(1 << 30)}.parquet", chance)
            else:
                files[-1].unlink()
            return how
        path = chance.choice([p for p in self.paths(name, hour) if not p.name.startswith("rates")])
        lines = path.read_text().splitlines(keepends=True)
        # Values take the places of others of the same row kind, so that lengths often stay.
        if how == "more":
            lines += chance.choices(lines, k=chance.randint(1, 100))
        elif how == "fewer":
            lines = lines[: max(1, len(lines) - chance.randint(1, 20))]
        elif how == "other values":
            lines = [
                line.replace('"a"', '"b"').replace("1", "2", 1) if '"at"' not in line else line.replace('"a"', '"b"')
                for line in lines
            ]
            lines[chance.randrange(len(lines))] = chance.choice(lines)
        else:
            lines = chance.sample(lines, max(1, len(lines) // 2))
        path.write_text("".join(lines))
        return how

    # --- Airflow ----------------------------------------------------------------------------------------------------------------

    def run(self, name: str, first: int) -> None:
        """Let Airflow run the hours from `first` on again, in order.

        Raises:
            RuntimeError: A run failed. The message has the end of the log.
        """
        client = self.airflow.client
        there = {run["logical_date"]: run["dag_run_id"] for run in client.dag_runs(name) if run["logical_date"]}
        by_hour = {datetime.fromisoformat(date): run for date, run in there.items()}
        for hour in range(first, self.hours):
            start = START + hour * HOUR
            run_id = by_hour.get(start)
            if run_id is None:
                span = {"data_interval_start": start.isoformat(), "data_interval_end": (start + HOUR).isoformat()}
                run_id = client.trigger(name, start.isoformat(), **span)["dag_run_id"]
            else:
                client.clear(name, run_id, ["process"])
            (state,) = client.wait_for_runs(name, [run_id], timeout_s=600).values()
            if state != "success":
                log = client.log(name, run_id, "process", 1)
                raise RuntimeError(f"{name} {start}: {state}\n" + "\n".join(map(str, log[-30:])))

    # --- the oracle -------------------------------------------------------------------------------------------------------------

    def rows(self, name: str, hour: int) -> list[dict[str, Any]]:
        """Return the input rows of an hour as the files have them, read without Spark."""
        if name == "c_folder":
            return [row for path in self.paths(name, hour) for row in pq.read_table(path).to_pylist()]
        found = {path: [*map(json.loads, path.read_text().splitlines())] for path in self.paths(name, hour)}
        if name == "c_joined":
            (rates,) = (rows for path, rows in found.items() if path.name.startswith("rates"))
            (orders,) = (rows for path, rows in found.items() if path.name.startswith("orders"))
            known = {row["currency"]: row["rate"] for row in rates}
            joined = [row | {"rate": known.get(row["currency"])} for row in orders]
            return [row | {"euro": None if row["rate"] is None else row["amount"] * row["rate"]} for row in joined]
        made, rows = made_by(name), list[dict[str, Any]]()
        for path, lines in found.items():
            kind = path.name.rpartition(f"-{START + hour * HOUR:%Y-%m-%dT%H}")[0]
            for line in lines:
                at = datetime.fromisoformat(line["at"]).replace(tzinfo=None)
                own = {name: value for name, value in line.items() if name not in (made.key, "at")}
                named = {f"{kind}_{name}": value for name, value in own.items()} | {"kind": kind} if kind else own
                rows.append({made.key: line[made.key], "at": at, **named})
        return rows

    def expected(self, name: str) -> list[tuple[int, list[str]]]:
        """Return, for each hour, the number of input rows and the output."""
        if name == "c_chained":
            first = self._tested(FIRST_OF_CHAIN, [self.rows(FIRST_OF_CHAIN, hour) for hour in range(self.hours)])
            inputs = [[*map(without_zone, output)] for _, output in first]
        else:
            inputs = [self.rows(name, hour) for hour in range(self.hours)]
        return [(count, shown(output)) for count, output in self._tested(name, inputs)]

    def _tested(self, name: str, inputs: list[list[dict[str, Any]]]) -> list[tuple[int, list[dict[str, Any]]]]:
        module = module_of(self.folder, name)
        pipeline: Pipeline = getattr(module, name.upper())
        tester = PipelineTester(pipeline, input_schema=OWN.get(name) or module.INPUT_SCHEMA, every=HOUR)
        found = [(len(rows), tester.run(rows)) for rows in inputs]
        return [(count, [*tested.output]) for count, tested in found]

    def differences(self, name: str) -> list[str]:
        """Return what the committed hours of a pipeline have read or made otherwise than the files say."""
        storage = open_storage(str(self.root / name))
        log = read_log(storage)
        current = {interval.start: files for interval, (_, files) in log.current_outputs().items()}
        records = {r.content.interval.start: r for r in sorted(log.completed(), key=lambda r: r.id)}
        found = []
        for hour, (count, output) in enumerate(self.expected(name)):
            start = START + hour * HOUR
            record = records[start]
            if record.content.totals.input_rows != count:
                found.append(
                    f"{name} {start:%H}: read {record.content.totals.input_rows} rows, but the files have {count}"
                )
            files = [self.root / name / f.handle.path for f in current[start] if not f.late]
            if shown(row for file in files for row in pq.read_table(file).to_pylist()) != output:
                found.append(f"{name} {start:%H}: the output is not the oracle's")
            recorded = {file["path"]: file["sha256"] for file in record.content.source_position.get("files", ())}
            if name != "c_chained" and recorded != {p.name: sha256(p) for p in self.paths(name, hour)}:
                found.append(f"{name} {start:%H}: the position is not that of the files")
        return found

    # --- all of it --------------------------------------------------------------------------------------------------------------

    def begin(self, at_once: int) -> None:
        """Run all hours of all pipelines for the first time."""
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(lambda name: self.run(name, 0), [n for n in self.names if n != "c_chained"]))
        if "c_chained" in self.names:
            self.run("c_chained", 0)

    def correct_all(self, count: int, seed: int, at_once: int, until_s: float | None = None) -> list[str]:
        """Make corrections in a random order, several pipelines at once. Return what differs from the oracle.

        Args:
            count: The number of corrections.
            seed: Decides pipelines, hours and changes.
            at_once: The number of pipelines that run at once.
            until_s: When to stop at the latest, by the monotonic clock; None: never.
        """
        chance, found, lock = random.Random(seed), list[str](), threading.Lock()
        sources = [name for name in self.names if name != "c_chained"]
        # By pipeline, because two corrections of one pipeline must not overlap. Every pipeline comes once before any comes again.
        work: dict[str, list[int]] = {name: [] for name in sources}
        for n in range(count):
            work[sources[n % len(sources)]].append(chance.randrange(1 << 30))

        def correct(name: str) -> None:
            for one in work[name]:
                if until_s is not None and time.monotonic() > until_s:
                    return
                own = random.Random(one)
                hour = own.randrange(self.hours)
                how = self.correct(name, hour, own)
                chain = [name, *(["c_chained"] if name == FIRST_OF_CHAIN and "c_chained" in self.names else [])]
                for each in chain:
                    self.run(each, hour)
                differ = [f"{text} (after {how} in hour {hour})" for each in chain for text in self.differences(each)]
                with lock:
                    found.extend(differ)
                    self.done[name] += 1
                    if self.done.total() % 10 == 0:
                        print(
                            f"{datetime.now():%H:%M:%S} {self.done.total()} corrections, {len(found)} differences",
                            flush=True,
                        )

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(correct, chance.sample(sources, len(sources))))
        return found


def write_pipelines(folder: Path, names: tuple[str, ...], hours: int) -> dict[str, str]:
    """Write modules, DAGs and inputs of pipelines into a new folder, and return the variables that their processes need.

    Args:
        folder: The folder: `modules` is for the path of Python, `dags` for Airflow.
        names: The pipelines, such as `c_windows`.
        hours: The number of hours of each pipeline.
    """
    modules, dags = folder / "modules", folder / "dags"
    for one in (modules, dags, folder / "data"):
        one.mkdir(parents=True)
    (modules / "own_sources.py").write_text(OWN_SOURCES)
    pipelines, chance = dict[str, str](), random.Random(0)
    env: dict[str, str] = {"CAIRN_CORRECTED": str(folder / "data"), "CAIRN_CORRECTED_ROOT": f"file://{folder}/state"}
    for name in names:
        pipelines[name] = f"{'own_sources' if name in OWN else f'{name}_made'}:{name.upper()}"
        if name in OWN:
            write_inputs(folder / "data" / name, hours, chance)
            continue
        env[f"CAIRN_{name.upper()}"] = str(folder / "data" / name)
        for path, text in made_by(name).files().items():
            if path.startswith("jobs/"):
                (modules / f"{name}_made.py").write_text(text)
            elif path.startswith("data/") and any(
                f"{START + hour * HOUR:%Y-%m-%dT%H}" in path for hour in range(hours)
            ):
                (folder / path).parent.mkdir(exist_ok=True)
                (folder / path).write_text(text)
    text = DAGS.replace("@PIPELINES@", repr(pipelines)).replace("@ROOT@", f"file://{folder}/state")
    (dags / "corrected.py").write_text(text)
    os.environ.update(env)  # The oracle imports the modules too.
    return env


@contextmanager
def corrected(folder: Path, names: tuple[str, ...], hours: int) -> Iterator[Corrected]:
    """Start Spark and an Airflow of its own with the pipelines."""
    env = write_pipelines(folder, names, hours)
    with SparkConnectServer(ROOT, log_dir=folder / "logs") as spark:
        env |= {
            "AIRFLOW_CONN_CAIRN_SPARK": spark.airflow_connection,
            "AIRFLOW__CORE__PARALLELISM": "4",
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "jobs", ROOT / "plugins", ROOT, folder / "modules"))),
        }
        with airflow_on_postgres(folder, env, dags=names) as airflow:
            yield Corrected(folder=folder, airflow=airflow, names=names, hours=hours, done=Counter())


def write_inputs(folder: Path, hours: int, chance: random.Random) -> None:
    """Write the input files of a pipeline of this module; `cairn new` writes those of the other pipelines."""
    for hour in range(hours):
        stamp = f"{START + hour * HOUR:%Y-%m-%dT%H}"
        if folder.name == "c_folder":
            (folder / stamp).mkdir(parents=True)
            write_table(folder / stamp / "part-0.parquet", chance)
        elif folder.name == "c_joined":
            folder.mkdir(exist_ok=True)
            orders = [
                {
                    "user": f"u{chance.randrange(9)}",
                    "currency": chance.choice("abcx"),
                    "amount": chance.randrange(100, 999),
                }
                for _ in range(50)
            ]
            rates = [{"currency": name, "rate": chance.randrange(1, 9)} for name in "abc"]
            for kind, rows in (("orders", orders), ("rates", rates)):
                (folder / f"{kind}-{stamp}.json").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_table(path: Path, chance: random.Random) -> None:
    rows = [{"user": f"u{chance.randrange(9)}", "amount": chance.randrange(100)} for _ in range(chance.randint(20, 40))]
    pq.write_table(pa.Table.from_pylist(rows, pa.schema([("user", pa.string()), ("amount", pa.int64())])), path)


def module_of(folder: Path, name: str) -> Any:
    """Import a pipeline's module from the folder."""
    file = "own_sources" if name in OWN else f"{name}_made"
    if file not in sys.modules:
        spec = importlib.util.spec_from_file_location(file, folder / "modules" / f"{file}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[file] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[file])
    return sys.modules[file]


def without_zone(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its instants as naive UTC."""
    return {
        name: value.astimezone(UTC).replace(tzinfo=None) if isinstance(value, datetime) and value.tzinfo else value
        for name, value in row.items()
    }


def shown(rows: Any) -> list[str]:
    """Return rows as text, in an order of their own."""
    return sorted(repr(sorted(without_zone(row).items(), key=lambda item: item[0])) for row in rows)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
