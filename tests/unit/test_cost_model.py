"""What `cairn estimate` makes of numbers, where it stops, and what it prints. `test_requests.py` compares its requests with counted ones."""

from __future__ import annotations

import csv
import json
import statistics
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cairn.command.cli import app
from state_backend.adapters.rocks import BLOCK_BYTES
from state_backend.inspection.cost_model import (
    MEASURED,
    MIB,
    MOST_SHARDS,
    TB,
    Held,
    Prices,
    Requests,
    Usage,
    estimate,
    interval_requests,
    memory_overhead_mib,
    plan_held,
    usage_of,
)
from state_backend.values.errors import UsageError
from state_backend.values.retention import AllOf, AnyOf, KeepLast, KeepPerDay, KeepYounger, default_retention
from tests.integration.test_docs import blocks_of, commands_in, quoted_in
from tests.support.checkpoints import PIPELINE
from tests.support.layout import REPOSITORY
from tests.support.real_shards import RealPipeline

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
COUNTING = Usage(keys=2_000, bytes_per_key=50, changed=0.1, shards=2, every=DAY, uploaded_files=0)
MILLION = Usage(keys=1_000_000, bytes_per_key=100, changed=0.01, shards=2, every=HOUR)


@pytest.mark.parametrize(
    ("retention", "every", "held"),
    [
        (KeepLast(3), DAY, (3, 1, 1)),
        (KeepYounger(3 * DAY), DAY, (3, 1, 1)),
        (AllOf((KeepLast(9), KeepPerDay(2))), HOUR, (1, 1, 1)),
        (KeepPerDay(3), HOUR, (3, 24, 3)),
        (AnyOf((KeepLast(2), KeepPerDay(2))), HOUR, (3, 23, 2)),
        # As benchmarks/REPORT.md counts in a root of 1,000 hourly intervals.
        (default_retention(HOUR), HOUR, (81, 24, 33)),
        (default_retention(DAY), DAY, (35, 1, 1)),
        (default_retention(timedelta(minutes=1)), timedelta(minutes=1), (334, 1440, 35)),
        (AllOf(()), HOUR, (2, 1, 0)),
    ],
)
def test_what_a_retention_holds(retention: Any, every: timedelta, held: tuple[int, int, int]) -> None:
    """Checkpoints, the widest gap, and those that have lost their base."""
    found = plan_held(retention, every)
    assert (found.checkpoints, max(found.gaps, default=1), found.without_base) == held


def test_cents_are_those_of_the_docs() -> None:
    """docs/storage.md's table: 1,000 intervals on 2 and on 16 shards on the second day, and on 16 on the 60th."""
    young, old = Held(gaps=(1,), drops=0), plan_held(default_retention(DAY), DAY)
    for usage, held, cents in (
        (COUNTING, young, 5.0),
        (replace(COUNTING, shards=16), young, 21.6),
        (replace(COUNTING, shards=16), old, 25.3),
    ):
        phases = interval_requests(usage, held)
        all_but_look = sum((requests for phase, requests in phases.items() if phase != "look"), Requests())
        assert round(all_but_look.dollars(Prices()) * 100 * 1_000, 1) == cents


def test_bytes_objects_and_seconds_follow_what_they_are_made_of() -> None:
    found = estimate(replace(MILLION, retention=KeepLast(3), savepoint_every=DAY, savepoints_kept=4))
    uploaded = 1_000_000 * 100 * 0.01 * MEASURED.uploaded_to_changed
    state = 100e6 * MEASURED.stored_to_live
    assert found.uploaded_bytes == pytest.approx(uploaded)
    assert found.stored_bytes == pytest.approx(state + 2 * uploaded)
    assert found.savepoint_bytes == pytest.approx(4 * 100e6)
    assert found.dollars["checkpoints"] == pytest.approx(found.stored_bytes / 2**30 * 0.02)
    assert found.dollars["all"] == pytest.approx(sum(v for k, v in found.dollars.items() if k != "all"))
    blocks = found.usage.changed_blocks
    work_us = 10_000 * MEASURED.row_us["row"] + blocks * MEASURED.block_us
    assert 5_900 < blocks < state / BLOCK_BYTES and found.seconds == pytest.approx(
        MEASURED.interval_s + work_us / 1e6 / 2
    )
    assert found.month == pytest.approx(730.5) and found.stops == ()
    # Longer values need more memory.
    assert (found.worker_mib, estimate(replace(MILLION, bytes_per_key=570)).worker_mib) == (529, 892)
    assert [memory_overhead_mib(529, cores) for cores in (1, 4)] == [913, 2_500]
    # A retained checkpoint has no more files of its own than a whole state, however long ago it was.
    days = estimate(replace(MILLION, changed=1, retention=KeepPerDay(10)))
    assert days.stored_bytes == pytest.approx(10 * state) and days.uploaded_bytes == pytest.approx(2 * state)
    # Nothing changes: nothing is uploaded but what says so.
    still = estimate(replace(MILLION, changed=0))
    assert (still.uploaded_bytes, still.requests["shards"], still.requests["prepare"]) == (
        0,
        Requests(),
        Requests(write=1),
    )
    # Ten times the keys on ten times the shards: as long, and as much memory each.
    wide = estimate(replace(MILLION, keys=10_000_000, shards=20, retention=KeepLast(3)))
    assert (wide.seconds, wide.disk_bytes) == pytest.approx((found.seconds, found.disk_bytes), rel=1e-4)


def test_bytes_are_those_of_a_thousand_measured_batches() -> None:
    """docs/history.csv: 200,000 keys of 100 bytes, 20.8 MB when compacted, in four shards, ten checkpoints retained; from batch 50 on."""
    with (REPOSITORY / "docs/history.csv").open() as file:
        batches = [row for row in csv.DictReader(file) if int(row["batch"]) >= 50]
    uploaded, stored, retained, files = (
        statistics.mean(float(row[name]) for row in batches)
        for name in ("uploaded_bytes", "checkpoint_bytes", "retained_bytes", "live_files")
    )
    found = estimate(
        Usage(
            keys=200_000,
            bytes_per_key=104,
            changed=0.01,
            shards=4,
            every=HOUR,
            retention=KeepLast(10),
            live_files=files / 4,
        )
    )
    assert found.usage.state_bytes == pytest.approx(stored, rel=0.01)
    assert found.uploaded_bytes == pytest.approx(uploaded, rel=0.05)
    assert found.stored_bytes == pytest.approx(retained, rel=0.05)


@pytest.mark.parametrize(
    ("keys", "state_mib", "seconds"), [(100_000, 9, 0.43), (1_000_000, 91, 0.45), (10_000_000, 907, 1.08), (100_000_000, 9_040, 10.4)]
)  # fmt: skip
def test_seconds_are_those_of_the_runs_at_size(keys: int, state_mib: int, seconds: float) -> None:
    """benchmarks/REPORT.md, *At size*: 1 % of the keys, drawn at random, on two cores."""
    usage = Usage(
        keys=keys,
        bytes_per_key=state_mib * MIB / keys,
        stored_to_live=1,
        changed=0.01,
        shards=20,
        cores=2,
        every=HOUR,
        api="arrow",
    )
    assert estimate(usage).seconds == pytest.approx(seconds, rel=0.2)


def test_small_files_travel_in_manifests_and_large_ones_in_pieces() -> None:
    held = Held(gaps=(1,), drops=0)
    few = replace(MILLION, changed=0.00001)
    assert interval_requests(few, held)["shards"].write == 2  # the output
    # 327 MB a shard: six files of 64 MiB at most, each in a request and one for each 8 MiB.
    large = replace(MILLION, keys=10_000_000, changed=0.2)
    each = large.uploaded_bytes / 2 / 5
    assert interval_requests(large, held)["shards"].write == 2 + 10 * (1 + -(-each // (8 * MIB)))
    # A restore on hosts without a cache fetches every file once.
    assert interval_requests(replace(few, cold=1), held)["shards"].read == 2 * MEASURED.files_per_shard


def test_ten_terabytes_on_ten_thousand_shards_are_estimated_and_no_more() -> None:
    most = Usage(keys=10**11, bytes_per_key=100, changed=0.001, shards=MOST_SHARDS, every=HOUR, stored_to_live=1)
    found = estimate(most)
    assert found.usage.state_bytes == 10 * TB and found.requests["prepare"].write == MOST_SHARDS + 1
    assert [stop.split()[0] for stop in found.stops] == ["memory", "commits", "seconds", "30,001"]
    for beyond in ({"shards": MOST_SHARDS + 1}, {"keys": 10**11 + 1}):
        with pytest.raises(UsageError, match=r"nothing larger was measured\.\nSplit the pipeline"):
            replace(most, **beyond)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"keys": 11_000_000}, "11,000,000 keys a shard|5,500,000. With 3 shards or more"),
        ({"shards": 1_001}, "up to 1,000 shards"),
        ({"shards": 9, "cores": 4}, "4 cores for 9 shards: the shards run in 3 rounds"),
        ({"keys": 10**8}, "a change of 1 % of 13 GiB took four times as long"),
        ({"keys": 10_000_000, "changed": 1, "every": timedelta(seconds=30)}, "the pipeline falls behind"),
        ({"retention": KeepLast(1_001)}, "1,001 checkpoints are retained"),
    ],
)
@pytest.mark.long("half a second", runs_in="ci")
def test_where_it_stops_is_said(changes: dict[str, Any], says: str) -> None:
    stops = estimate(replace(MILLION, **changes)).stops
    assert any(part in stop for stop in stops for part in says.split("|")), stops


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"keys": 0}, "keys=0"),
        ({"bytes_per_key": -1}, "bytes_per_key=-1"),
        ({"changed": 1.5}, "changed=1.5 is not a share"),
        ({"every": timedelta(0)}, "must be more than 0"),
        ({"savepoint_every": timedelta(0)}, "must be more than 0"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        replace(MILLION, **changes)


# --- the command -----------------------------------------------------------------------------------------------------------------


def cairn(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["estimate", *arguments])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("estimate")
    pipeline = RealPipeline(folder, policy=KeepLast(3))
    for n in range(1, 5):
        pipeline.run(n, f"a{n}", {key: n for key in ("abcdefgh" if n == 1 else "ab")})
    return folder


@pytest.mark.long("half a second", runs_in="ci")
def test_a_pipeline_is_estimated_from_its_own_history(root: Path) -> None:
    there = ("--root", f"file://{root}", "--pipeline", PIPELINE)
    found = json.loads(cairn(*there, "--json").stdout)
    assert (found["usage"]["keys"], found["usage"]["every_s"], found["history"]["intervals"]) == (
        8,
        DAY.total_seconds(),
        3,
    )
    assert 0 < found["usage"]["changed"] < 1 and found["dollars_per_month"]["all"] > 0
    # What is asked counts instead, and what hung on it is no longer of the history.
    asked = json.loads(
        cairn(*there, "--shards", "16", "--keys", "1000000", "--keep", "7", "--changed", "1%", "--json").stdout
    )
    assert (asked["usage"]["shards"], asked["checkpoints"]) == (16, 7)
    assert asked["usage"]["bytes_per_key"] == found["usage"]["bytes_per_key"]
    assert asked["interval"]["requests"]["prepare"]["write"] == 17
    lines = cairn(*there).stdout.splitlines()
    assert lines[0].startswith("8 keys of ") and lines[1].startswith(
        "from the last 3 intervals of the pipeline, which took "
    )
    assert usage_of([]) is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            "--keys 5",
            "--bytes-per-key, --changed, --shards, --every\nOr name a pipeline that has run: cairn estimate",
        ),
        ("--root {root} --pipeline none", "no retained checkpoint at {root}/none has state"),
        ("--keys 5 --changed much", "--changed much is not a share\nWrite it as in 1% or 0.01"),
        ("--api sql", "--api sql: expected row or arrow"),
        (
            "--keys 5 --bytes-per-key 9 --changed 1 --shards 1 --every 1h --keep 300000",
            "the retention covers 300,002 intervals",
        ),
    ],
)
def test_what_can_not_be_estimated_says_what_to_give(root: Path, arguments: str, says: str) -> None:
    refused = cairn(*arguments.format(root=f"file://{root}").split())
    assert refused.exit_code == 2 and says.format(root=f"file://{root}") in refused.stderr, refused.output


def test_the_example_of_the_docs_is_what_is_printed() -> None:
    whole, part = (b for b in blocks_of("docs/storage.md") if "cairn estimate" in b.text)
    for command, expected in [*commands_in(whole.text), *commands_in(part.text)]:
        assert command.startswith("cairn estimate ")
        done = cairn(*command.split()[2:])
        assert done.exit_code == 0 and quoted_in(expected, done.stdout), done.output
        assert "…" in expected or done.stdout.splitlines() == expected, done.output


def test_prices_of_a_list_apply_unless_an_option_replaces_them() -> None:
    usage = "--keys 1000000 --bytes-per-key 104 --changed 1% --shards 2 --every 1h --json"
    gcs, s3, own = (
        json.loads(cairn(*usage.split(), *more.split()).output)["prices"]
        for more in ("", "--prices s3", "--prices s3 --price-reads 0")
    )
    assert (gcs["gib_month"], s3["gib_month"]) == (0.020, 0.023)
    assert own == {**s3, "class_b": 0}


def test_an_unknown_list_of_prices_is_refused() -> None:
    result = cairn("--prices", "azure")
    assert result.exit_code != 0
    assert "--prices azure: expected gcs or s3" in result.output + str(result.exception)
