"""Do shards return to the host that has their files? Bytes and requests of each interval on a cluster of two hosts.

    python -m benchmarks.affinity [--intervals 10] [--only session,no-locality]

A Spark standalone cluster of two workers with two cores and a TMPDIR each, state on fake-gcs-server, 16 shards, 16 MB of state, of which
each interval changes a twentieth. The cases:

    session        one Spark application for all intervals, as a Connect server is one
    one-file       the same, and the input is one file
    no-locality    as one-file, with spark.shuffle.reduceLocality.enabled=false
    applications   an application for each interval, as drivers of a master make them
    no-cache       as session, and hosts keep no files

Shown for each interval after the first: shards that ran where they ran the interval before; bytes downloaded and bytes taken from the
cache, of the state's; bytes uploaded; and HTTP requests at the server: those that download, and all.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from state_backend.adapters.open_storage import open_storage
from tests.support.gcs_server import BUCKET, GcsServer, gcs_server
from tests.support.spark_cluster import Cluster, cluster_in

_ROOT = Path(__file__).resolve().parents[1]
_NO_LOCALITY = {"spark.shuffle.reduceLocality.enabled": "false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How the intervals of one pipeline run."""

    input_files: int = 4
    applications: bool = False
    cache: bool = True
    conf: tuple[tuple[str, str], ...] = ()


CASES = {
    "session": Case(),
    "one-file": Case(input_files=1),
    "no-locality": Case(input_files=1, conf=tuple(_NO_LOCALITY.items())),
    "applications": Case(applications=True),
    "no-cache": Case(cache=False),
}


def main() -> int:
    """Prints a table of all cases, and of each interval."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--intervals", type=int, default=10)
    parser.add_argument("--only", default=",".join(CASES))
    options = parser.parse_args()
    names = options.only.split(",")
    with tempfile.TemporaryDirectory(prefix="cairn-affinity-") as folder:
        for name in names:
            with gcs_server() as server, cluster_in(Path(folder, name)) as cluster:
                _show(name, _run(name, CASES[name], options.intervals, server, cluster))
    return 0


def _run(name: str, case: Case, intervals: int, server: GcsServer, cluster: Cluster) -> list[dict[str, Any]]:
    """What each interval took, in their order."""
    found, counted = [], 0
    driver = _driver(name, case, cluster, 0, intervals) if not case.applications else None
    for n in range(intervals):
        own = driver or _driver(name, case, cluster, n, n + 1)
        assert own.stdout is not None
        line = own.stdout.readline()
        if not line:
            raise RuntimeError(f"{name}: the driver ended with {own.wait()}")
        interval = json.loads(line)
        requests = server.requests[counted:]
        counted = len(server.requests)
        downloads = sum(r.method == "GET" and ".sst" in r.target and "alt=media" in r.target for r in requests)
        found.append(interval | {"downloads": downloads, "requests": len(requests)})
        if own is not driver:
            own.wait()
    if driver is not None:
        driver.wait()
    return found


def _driver(name: str, case: Case, cluster: Cluster, first: int, end: int) -> subprocess.Popen[str]:
    conf = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in cluster.conf.items()}
    conf |= dict(case.conf) | {"spark.eventLog.enabled": "false", "spark.sql.shuffle.partitions": "16"}
    call = f"from benchmarks.affinity import drive; drive({cluster.url!r}, {conf!r}, {first}, {end}, {case.cache})"
    return subprocess.Popen(
        [sys.executable, "-c", call],
        cwd=_ROOT,
        env={**os.environ, "CAIRN_INPUT_FILES": str(case.input_files), "SPARK_LOCAL_IP": "127.0.0.1"},
        stdout=subprocess.PIPE,
        stderr=(cluster.folder / f"driver-{first}.log").open("w"),
        text=True,
    )


def drive(url: str, conf: dict[str, str], first: int, end: int, cache: bool) -> None:
    """Runs intervals in this process, and prints a line of JSON for each."""
    from benchmarks.affinity_pipeline import BLOBS, hour
    from cairn.operations.run_interval import run_interval
    from cairn.spark_session import connect

    pipeline = BLOBS if cache else changed(BLOBS, engine=changed(BLOBS.engine, cache_dir=None))
    root = f"gs://{BUCKET}/affinity"
    spark = connect(url, "affinity", conf=conf)
    for n in range(first, end):
        content = run_interval(spark, pipeline, hour(n), root).content
        storage = open_storage(f"{root}/{pipeline.name}")
        hosts = {}
        for output in content.outputs:
            shard = Path(output.handle.path).name.split("-")[1]
            table = pq.read_table(io.BytesIO(storage.read(output.handle.path)))
            (hosts[shard],) = set(table["host"].to_pylist())
        totals = content.totals
        print(
            json.dumps(
                {
                    "hosts": hosts,
                    "state_bytes": totals.state_bytes,
                    "downloaded_bytes": totals.downloaded_bytes,
                    "cached_bytes": totals.cached_bytes,
                    "uploaded_bytes": totals.uploaded_bytes,
                }
            ),
            flush=True,
        )
    spark.stop()


def _show(name: str, found: list[dict[str, Any]]) -> None:
    print(f"{name}: of {len(found)} intervals")
    print("  stayed of 16 | on each host | downloaded | cached | uploaded | state KB | downloads | requests")
    stayed = []
    for before, now in itertools.pairwise(found):
        same = sum(before["hosts"].get(shard) == host for shard, host in now["hosts"].items())
        stayed.append(same)
        counts = sorted(list(now["hosts"].values()).count(host) for host in set(now["hosts"].values()))
        shown = [now[what] // 1000 for what in ("downloaded_bytes", "cached_bytes", "uploaded_bytes", "state_bytes")]
        print(f"  {same:12} | {counts} | {' | '.join(map(str, shown))} | {now['downloads']} | {now['requests']}")
    later = found[1 + len(found) // 2 :]
    share = statistics.mean(n["downloaded_bytes"] / n["state_bytes"] for n in later)
    print(f"  second half: {statistics.mean(stayed):.1f} of 16 stayed; {share:.0%} of the state downloaded", flush=True)


if __name__ == "__main__":
    sys.exit(main())
