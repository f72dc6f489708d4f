"""Do shards return to the host that has their files, and what is it worth? Bytes and requests of each interval.

    python -m benchmarks.affinity [--intervals 12] [--only 2-anywhere,2-returns]      # a minute for each case; neither Spark nor a cluster
    python -m benchmarks.affinity --spark [--intervals 7] [--only applications]         # on a Spark cluster of two hosts

16 shards, 16 MB of state, of which each interval changes a twentieth of the keys; state on fake-gcs-server.

Without ``--spark`` the shards of an interval run in this process one after the other, each with the cache of its host. The cases are a
number of hosts, and who chooses the host of a shard:

    anywhere    chance, as Spark does
    returns     each shard runs on one host for ever: what preferred locations would give at best
    nothing     as anywhere, and hosts keep no files

With ``--spark`` the cluster is a master and two workers of one core:

    session        one application for all intervals
    one-file       the same, and the input is one file
    applications   an application for each interval, as drivers of a master make them

Shown for each interval after the first: shards that ran where they ran the interval before; how many ran on each host; bytes downloaded, taken from the
cache, and uploaded, and all of the state's; and HTTP requests at the server: those that download state, and all.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq

from benchmarks.affinity_pipeline import BLOBS, CHANGED, KEYS, SHARDS, hour
from cairn.shard_jobs.interval import IntervalJob
from cairn.testing import PipelineTester
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.prepare_content import ShardAck
from tests.support.gcs_server import BUCKET, GcsServer, gcs_server
from tests.support.spark_cluster import Cluster, cluster_in

_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How the intervals of one pipeline run."""

    input_files: int = 4
    applications: bool = False


CASES = {
    "session": Case(),
    "one-file": Case(input_files=1),
    "applications": Case(applications=True),
}
PLACED = [f"{hosts}-{who}" for hosts in (2, 8) for who in ("anywhere", "returns")] + ["2-nothing"]


def main() -> int:
    """Prints a table of all cases, and of each interval."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--intervals", type=int, default=12)
    parser.add_argument("--only")
    parser.add_argument("--spark", action="store_true")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(CASES if options.spark else PLACED)
    with tempfile.TemporaryDirectory(prefix="cairn-affinity-") as folder:
        for name in names:
            with gcs_server() as server:
                if options.spark:
                    with cluster_in(Path(folder, name)) as cluster:
                        _show(name, _run(name, CASES[name], options.intervals, server, cluster))
                else:
                    _show(name, _run_placed(name, options.intervals, server, Path(folder, name)))
    return 0


def _run_placed(name: str, intervals: int, server: GcsServer, folder: Path) -> list[dict[str, Any]]:
    """What each interval took, with shards on hosts as the case has it."""
    count, _, who = name.partition("-")
    hosts, chance = [f"10.0.0.{n}" for n in range(int(count))], random.Random(7)
    found: list[dict[str, Any]] = []
    placed: list[str] = []
    original = IntervalJob.run_shard

    def run_shard(job: IntervalJob, batches: Any, shard: int, task: int) -> ShardAck:
        cache = None if who == "nothing" else str(folder / placed[shard])
        return original(changed(job, engine=changed(job.engine, cache_dir=cache)), batches, shard, task)

    os.environ["SPARK_LOCAL_IP"] = "here"
    tester = PipelineTester(BLOBS, input_schema="id long", root=f"gs://{BUCKET}/affinity")
    with mock.patch.object(IntervalJob, "run_shard", run_shard):
        for n in range(intervals):
            placed = [
                hosts[shard % len(hosts)] if who == "returns" else chance.choice(hosts) for shard in range(SHARDS)
            ]
            ids = range(KEYS) if n == 0 else chance.sample(range(KEYS), round(CHANGED * KEYS))
            before = len(server.requests)
            record = tester.run([(number,) for number in ids]).record
            assert record is not None
            found.append(_counted(server, before, record.content.totals) | {"hosts": dict(enumerate(placed))})
    return found


def _counted(server: GcsServer, before: int, totals: Any) -> dict[str, Any]:
    requests = server.requests[before:]
    # Metadata are asked for by create-if-absent and by listings; what is read as media is state, a manifest or a record.
    media = [r for r in requests if r.method == "GET" and "alt=media" in r.target]
    return {
        "requests": len(requests),
        "downloads": sum(".sst" in r.target for r in media),
        **{
            what: getattr(totals, what)
            for what in ("state_bytes", "downloaded_bytes", "cached_bytes", "uploaded_bytes")
        },
    }


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
    call = f"from benchmarks.affinity import drive; drive({cluster.url!r}, {conf!r}, {first}, {end})"
    return subprocess.Popen(
        [sys.executable, "-c", call],
        cwd=_ROOT,
        env={**os.environ, "CAIRN_INPUT_FILES": str(case.input_files), "SPARK_LOCAL_IP": "127.0.0.1"},
        stdout=subprocess.PIPE,
        stderr=(cluster.folder / f"driver-{first}.log").open("w"),
        text=True,
    )


def drive(url: str, conf: dict[str, str], first: int, end: int) -> None:
    """Runs intervals in this process, and prints a line of JSON for each."""
    from cairn.operations.run_interval import run_interval
    from cairn.spark.session import connect

    root = f"gs://{BUCKET}/affinity"
    spark = connect(url, "affinity", conf=conf)
    for n in range(first, end):
        content = run_interval(spark, BLOBS, hour(n), root).content
        storage = open_storage(f"{root}/{BLOBS.name}")
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
    later = found[max(1, len(found) // 2) :]
    share = statistics.mean(n["downloaded_bytes"] / n["state_bytes"] for n in later)
    print(f"  second half: {statistics.mean(stayed):.1f} of 16 stayed; {share:.0%} of the state downloaded", flush=True)


if __name__ == "__main__":
    sys.exit(main())
