"""What docs/checkpoints-page.md has people watch: metrics reach a collector by Airflow's own settings, from the operators as they run."""

from __future__ import annotations

import importlib
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cairn.testing import PipelineTester
from local_stack.owned_process import python_path
from pipelines.aircraft import READ_SCHEMA
from state_backend.values.errors import SinkFailed
from tests.support.http_listener import http_listener
from tests.support.layout import REPOSITORY

FLIGHTS = [
    {
        "tailnum": "N14228", "scheduled_departure": datetime(2013, 1, 1, 6), "origin": "EWR", "dest": "IAH", "departed": True,
        "arrived": True, "departure_delay_minutes": 2, "arrival_delay_minutes": 1,
    }
]  # fmt: skip
MONITORING = ("grafana-dashboard.json", "prometheus-alerts.yaml")
pytestmark = pytest.mark.airflow

PIPELINE = """
from dataclasses import replace
from pipelines.aircraft import AIRCRAFT

def sink(spark, files, interval, checkpoint_id):
    if checkpoint_id == 1:
        raise ValueError("no partition")

ALARMED = replace(AIRCRAFT, sink=sink)
"""
# Metrics as Airflow's task runner sets them up. Checkpoint 2 is committed while the sink does not take 1; then a file is damaged.
TASKS = """
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from cairn_operators.airflow_versions import AirflowFailException
from cairn_operators.airflow_versions import stats
from cairn_operators import CommitCheckpointOperator, ValidateStateOperator
from cairn_operators.airflow_versions import has
root, attempt = sys.argv[1:]
if has("metrics as functions"):
    from airflow.sdk.observability.metrics.stats_utils import get_stats_factory
    stats.initialize(factory=get_stats_factory(), export_legacy_names=False)
elif has("airflow.sdk.observability"):
    from airflow.sdk.observability.metrics.stats_utils import get_stats_factory
    stats.initialize(factory=get_stats_factory(stats))
start = datetime(2013, 1, 2, tzinfo=UTC)
context = {
    "dag_run": SimpleNamespace(run_id="r", dag_id="aircraft", clear_number=0, logical_date=start),
    "data_interval_start": start, "data_interval_end": datetime(2013, 1, 3, tzinfo=UTC), 
    "ti": SimpleNamespace(try_number=1, xcom_push=lambda **_: None),
    "dag": SimpleNamespace(start_date=start), "task": SimpleNamespace(task_id="t", downstream_list=[]),
}

def run(kind, **arguments):
    operator = kind(task_id="t", pipeline="aircraft", root=root, **arguments)
    return kind.execute.__wrapped__(operator, context)

run(CommitCheckpointOperator, attempt=attempt, sink_of="alarmed:ALARMED")
validate = {"code": "alarmed:ALARMED", "checkpoint": "2", "fast": True}
run(ValidateStateOperator, **validate)
for file in Path(root.removeprefix("file://")).rglob("part-*.parquet"):
    file.write_bytes(b"garbage")
try:
    run(ValidateStateOperator, **validate)
except AirflowFailException as error:
    print(str(error).splitlines()[0])
"""


@contextmanager
def collector() -> Iterator[tuple[int, list[bytes]]]:
    """An OpenTelemetry collector: its port, and what it was sent."""
    bodies: list[bytes] = []

    def take(_: str, body: bytes) -> int:
        bodies.append(body)
        return 200

    with http_listener(take) as port:
        yield port, bodies


def metrics_in(bodies: list[bytes]) -> dict[str, list[tuple[str, float]]]:
    """By name the pipeline and value of each point, oldest first."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    found: dict[str, list[tuple[str, float]]] = {}
    for body in bodies:
        for of_resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            for metric in (m for scope in of_resource.scope_metrics for m in scope.metrics):
                for point in getattr(metric, metric.WhichOneof("data")).data_points:
                    tags = {a.key: a.value.string_value for a in point.attributes}
                    value = point.sum if hasattr(point, "sum") else point.as_double or point.as_int
                    found.setdefault(metric.name, []).append((tags.get("pipeline", ""), value))
    return found


@contextmanager
def statsd() -> Iterator[tuple[int, list[bytes]]]:
    """A StatsD server: its port, and the datagrams that it was sent."""
    datagrams: list[bytes] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(0.1)
        done = threading.Event()

        def listen() -> None:
            while True:
                try:
                    datagrams.append(server.recv(65536))
                except TimeoutError:
                    if done.is_set():
                        return

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield server.getsockname()[1], datagrams
        finally:
            done.set()
            thread.join()


def metrics_of(datagrams: list[bytes]) -> dict[str, list[tuple[str, float]]]:
    """As :func:`metrics_in`, of lines like ``airflow.cairn.checkpoint.lag_s,pipeline=aircraft:1.5|g``. What is counted is added up."""
    found: dict[str, list[tuple[str, float]]] = {}
    for line in b"\n".join(datagrams).decode().splitlines():
        name, _, rest = line.partition(":")
        name, *tags = name.split(",")
        value, kind = rest.split("|")[:2]
        of = dict(tag.split("=", 1) for tag in tags).get("pipeline", "")
        before = found.get(name, [("", 0.0)])[-1][1] if kind == "c" else 0.0
        found.setdefault(name, []).append((of, before + float(value)))
    return found


@pytest.mark.parametrize(
    ("switch", "server", "read"),
    [
        pytest.param("otel_on", collector, metrics_in, marks=pytest.mark.long("a quarter of a minute")),
        ("statsd_on", statsd, metrics_of),
    ],
)
def test_operator_metrics_reach_a_collector_by_the_documented_settings(
    switch: str, server: Any, read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the settings of the page, but for the port."""
    root = tmp_path / "state"
    (tmp_path / "alarmed.py").write_text(PIPELINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "alarmed", raising=False)
    pipeline = importlib.import_module("alarmed").ALARMED
    where = {"every": timedelta(days=1), "root": f"file://{root}", "call_sink": True}
    tester = PipelineTester(pipeline, input_schema=READ_SCHEMA, **where)
    with pytest.raises(SinkFailed):
        tester.run(FLIGHTS)
    before = set((root / "aircraft" / "attempts").iterdir())
    tester.run(FLIGHTS, commit=False)
    (prepared,) = set((root / "aircraft" / "attempts").iterdir()) - before
    (settings,) = re.findall(
        rf"```ini\n(\[metrics\]\n{switch}.*?)```", (REPOSITORY / "docs/checkpoints-page.md").read_text(), re.DOTALL
    )
    with server() as (port, received):
        (tmp_path / "airflow.cfg").write_text(settings.replace("8125", str(port)))
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", TASKS, f"file://{root}", prepared.name],
            cwd=tmp_path,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW__")},
                "AIRFLOW_HOME": str(tmp_path),
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
                "PYTHONPATH": python_path(tmp_path, REPOSITORY / "plugins", REPOSITORY),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("validation refused checkpoint 2")
    sent = {name.removeprefix("airflow."): points for name, points in read(received).items()}
    assert {of for name, points in sent.items() if name.startswith("cairn.") for of, _ in points} == {"aircraft"}
    newest = {name: points[-1][1] for name, points in sent.items()}
    assert newest["cairn.checkpoint.unpublished"] == newest["cairn.checkpoint.committed"] == 1
    assert newest["cairn.validation.passed"] == newest["cairn.validation.refused"] == 1
    assert newest["cairn.checkpoint.lag_s"] > timedelta(days=365).total_seconds()
    assert newest["cairn.interval.restore"] > 0 and newest["cairn.checkpoint.input_rows"] == 1
    pages = [(REPOSITORY / "docs" / page).read_text() for page in ("checkpoints-page.md", "airflow.md")]
    listed = {name for page in pages for name in re.findall(r"`(cairn\.[a-z]+\.[a-z_]+)`", page)}
    # Dashboard and rules name the metrics as statsd_exporter does: with underscores, and a timer's sum and count apart.
    files = [(REPOSITORY / "docs/monitoring" / file).read_text() for file in MONITORING]
    of_files = {name for file in files for name in re.findall(r"airflow_(cairn_\w+?)(?:_sum|_count)?\b", file)}
    assert len(of_files) > 10
    listed |= {name.replace("_", ".", 2) for name in of_files}
    assert listed - {"cairn.process.duration"} - sent.keys() == set()  # that one is the driver's, which needs Spark
