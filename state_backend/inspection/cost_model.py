"""Estimate of the long-term costs of a pipeline: objects, requests, bytes, dollars, seconds and memory. Pure functions.

The model describes one interval on Google Cloud Storage after the pipeline has run longer than its retention keeps
checkpoints. Then each commit drops one checkpoint. docs/storage.md explains the requests of each phase, and
`tests/unit/test_cost_model.py` compares them with counted requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Literal

from state_backend.adapters.rocks import BLOCK_BYTES, EngineOptions
from state_backend.shard.snapshot import INLINE_FILE_BYTES, inline_budget_bytes
from state_backend.values.errors import UsageError
from state_backend.values.human_units import size
from state_backend.values.intervals import Interval
from state_backend.values.records import Content
from state_backend.values.retention import (
    RetentionPolicy,
    default_retention,
)

MIB, GIB, TB = 1 << 20, 1 << 30, 10**12
MONTH = timedelta(days=365.25 / 12)
# Pipelines with more shards or bytes are not estimated, because nothing of that size was measured.
MOST_SHARDS, MOST_STATE_BYTES = 10_000, 10 * TB
# A retention that keeps more checkpoints than this is not simulated.
_MOST_CHECKPOINTS = 200_000
_PIECE_BYTES, _PAGE = 8 * MIB, 1_000
_TARGET_FILE_BYTES = EngineOptions().target_file_bytes
# From this number of shards on, manifests are files, because together they are too large for a record. Measured: all
# manifests were inline with 2 shards, some with 3, and none with 4.
_SHARDS_WITH_FILED_MANIFESTS = 4

Api = Literal["row", "arrow"]
Phase = Literal["look", "begin", "shards", "prepare", "commit", "publish", "clean up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured figures that the estimate uses. The measurements ran on two cores.

    The first three are from docs/history.md: a thousand intervals that each change 1 % of the keys. The benchmarks "CPU
    per update" and "At size" are in benchmarks/REPORT.md.
    """

    # Uploaded bytes divided by changed bytes.
    uploaded_to_changed: float = 3.27
    # Average bytes of a checkpoint divided by the bytes of the compacted state.
    stored_to_live: float = 1.41
    files_per_shard: float = 12
    interval_s: float = 0.35
    row_us: Mapping[str, float] = field(default_factory=lambda: {"row": 9.4, "arrow": 5.9})
    block_us: float = 25
    in_memory_bytes: float = 9.5e9
    # The most memory of a Python worker in "At size" with 100 bytes a key, in MiB.
    worker_mib: int = 529
    # The most memory of a Python worker in "At size" with 570 bytes a key, in MiB.
    wide_worker_mib: int = 892
    # The estimate uses `worker_mib` up to this number of bytes a key, and above it `wide_worker_mib`.
    narrow_bytes: int = 200
    keys_per_shard: int = 5_000_000
    shards: int = 1_000
    # The largest measured ratio of a checkpoint's bytes to the bytes of the compacted state.
    disk_to_live: float = 1.81


MEASURED = Measured()
# Spark's least `spark.executor.memoryOverhead`, which the JVM itself uses.
JVM_OVERHEAD_MIB = 384


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of a storage, in US dollars. The default: Cloud Storage's Standard class in us-central1.

    Free quotas, discounts and traffic between regions are left out. Traffic inside a region costs nothing. Source of the
    default: copies of Google's pages "Cloud Storage pricing" and "Pricing examples".
    """

    gib_month: float = 0.020
    class_a: float = 0.005
    class_b: float = 0.0004
    read_on: str = "2026-11-22"


PRICE_LISTS = {
    "gcs": Prices(),
    # S3 Standard in us-east-1, the first 50 TB of a month; HEAD costs the price of GET. Source: third parties' guides to
    # Amazon's prices, the newest of March 2026. Amazon's own page was not read.
    "s3": Prices(gib_month=0.023, class_a=0.005, class_b=0.0004, read_on="2026-11-26"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Size and load of the pipeline to estimate."""

    keys: int
    # Stored bytes per key, compressed, without obsolete versions.
    bytes_per_key: float
    changed: float
    shards: int
    every: timedelta
    rows_per_changed_key: float = 1
    # The retention policy; None: the default.
    retention: RetentionPolicy | None = None
    output_bytes: float = 0
    uploaded_to_changed: float = MEASURED.uploaded_to_changed
    # State files that a changed shard uploads in an interval; None: computed from the bytes.
    uploaded_files: float | None = None
    stored_to_live: float = MEASURED.stored_to_live
    live_files: float = MEASURED.files_per_shard
    # True if manifests are files of their own; None: decided by the number of shards.
    manifests_filed: bool | None = None
    # The share of bytes that a restore downloads because the host's cache lacks them, 0 to 1.
    cold: float = 0
    # The time between two savepoints; None: no savepoints.
    savepoint_every: timedelta | None = None
    savepoints_kept: int = 1
    # The number of cores that run shards; None: one for each shard.
    cores: int | None = None
    api: Api = "row"

    def __post_init__(self) -> None:
        for name, least in (
            ("keys", 1),
            ("shards", 1),
            ("savepoints_kept", 1),
            ("bytes_per_key", 0),
            ("output_bytes", 0),
        ):
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)} can't be estimated.\nGive at least {least}")
        for name in ("changed", "cold"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(
                    f"{name}={getattr(self, name)} is not a share.\nGive a number from 0 to 1; 0.01 is 1 %"
                )
        if self.every <= timedelta(0) or (self.savepoint_every is not None and self.savepoint_every <= timedelta(0)):
            raise UsageError(
                "the length of intervals and the time between savepoints must be more than 0.\nGive a time like 1h or 1d"
            )
        if self.shards > MOST_SHARDS or self.state_bytes > MOST_STATE_BYTES:
            raise UsageError(
                f"{self.shards:,} shards with {size(self.state_bytes)} can't be estimated. The limits are {MOST_SHARDS:,} shards and "
                f"{size(MOST_STATE_BYTES)}, because nothing larger was measured.\n"
                "Split the pipeline by key, and add up the estimates of its parts"
            )

    @property
    def state_bytes(self) -> float:
        """Return the bytes of one checkpoint."""
        return self.keys * self.bytes_per_key * self.stored_to_live

    @property
    def changed_keys(self) -> float:
        """Return the number of keys that an interval changes."""
        return self.keys * self.changed

    @property
    def rows(self) -> float:
        """Return the number of input rows of an interval."""
        return self.changed_keys * self.rows_per_changed_key

    @property
    def changed_shards(self) -> int:
        """Return the expected number of shards with a changed key, for uniformly hashed keys, rounded up."""
        return (
            math.ceil(self.shards * -math.expm1(self.changed_keys * math.log1p(-1 / self.shards)) - 1e-9)
            if self.shards > 1
            else int(self.changed_keys > 0)
        )

    @property
    def filed(self) -> bool:
        """Return True if each manifest is a file of its own, and not a part of the record."""
        return self.shards >= _SHARDS_WITH_FILED_MANIFESTS if self.manifests_filed is None else self.manifests_filed

    @property
    def changed_blocks(self) -> float:
        """Return the expected number of RocksDB blocks with a changed key, if the changed keys are drawn at random."""
        blocks = self.state_bytes / BLOCK_BYTES
        if blocks <= 1:
            return min(blocks, self.changed_keys)
        return blocks * -math.expm1(self.changed_keys * math.log1p(-1 / blocks))

    @property
    def uploaded_bytes(self) -> float:
        """Return the bytes of state that an interval uploads: at most twice the state's bytes."""
        return min(self.changed_keys * self.bytes_per_key * self.uploaded_to_changed, 2 * self.state_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Number of HTTP requests by kind. Fractions are averages."""

    write: float = 0
    list: float = 0
    # Requests that read an object's bytes.
    read: float = 0
    look: float = 0
    delete: float = 0

    def __add__(self, other: Requests) -> Requests:
        return Requests(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def total(self) -> float:
        """Return the number of requests of all kinds."""
        return self.write + self.list + self.read + self.look + self.delete

    def dollars(self, prices: Prices) -> float:
        """Return the price of the requests in US dollars."""
        return ((self.write + self.list) * prices.class_a + (self.read + self.look) * prices.class_b) / 1_000


def interval_requests(usage: Usage, held: Held) -> dict[Phase, Requests]:
    """Return the requests of one interval by phase.

    The phase `look` is the read of the log by Airflow's task, before the task starts a driver.
    """
    changed, manifests = usage.changed_shards, usage.changed_shards if usage.filed else 0
    files = _uploaded_files(usage)
    per_file = usage.uploaded_bytes / files if files else 0
    # A commit checks files of a folder one by one if there are at most two, and by a listing if there are more.
    looked, listed = 0.0, 0
    for there in (changed, files + manifests):
        if there > 2:
            listed += math.ceil(there / _PAGE)
        else:
            looked += there
    read_manifests = usage.shards if usage.filed else 0
    # The clean-up reads the records and manifests of the dropped checkpoint and of each retained checkpoint whose base
    # is dropped.
    opened = 1 + held.without_base if held.drops else 0
    gone = held.drops * (1 + files + manifests)
    log = Requests(read=3, list=1)
    return {
        "look": log,
        "begin": log,
        "shards": Requests(
            write=changed + files * _pieces(per_file), read=read_manifests + usage.cold * usage.live_files * usage.shards
        ),
        "prepare": Requests(write=1 + manifests),
        "commit": Requests(
            read=6 + held.drops, write=3, look=2 + looked + 2 * held.drops, list=1 + listed
        ),
        "publish": Requests(write=1),
        "clean up": Requests(
            list=held.drops, look=held.drops + gone, write=2 * held.drops, read=opened * (1 + read_manifests), delete=gone
        ),
    }  # fmt: skip


def _uploaded_files(usage: Usage) -> float:
    """Return the number of state files that all shards together upload in an interval."""
    if usage.uploaded_files is not None:
        return usage.uploaded_files * usage.changed_shards
    if not usage.changed_shards:
        return 0
    each = usage.uploaded_bytes / usage.changed_shards
    # A change of this size is stored inside the manifest and uploads no file.
    if each <= min(INLINE_FILE_BYTES, inline_budget_bytes(usage.shards)):
        return 0
    return usage.changed_shards * math.ceil(each / _TARGET_FILE_BYTES)


def _pieces(size_bytes: float) -> int:
    return 1 if size_bytes <= _PIECE_BYTES else 1 + math.ceil(size_bytes / _PIECE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The checkpoints that a retention policy keeps in the long run, after a simulation of very many intervals."""

    gaps: tuple[int, ...]
    drops: int

    @property
    def checkpoints(self) -> int:
        """Return the number of retained checkpoints."""
        return len(self.gaps) + 1

    @property
    def without_base(self) -> int:
        """Return the number of retained checkpoints whose base was dropped.

        The base of a checkpoint is the checkpoint of the interval before it. So the base was dropped if the
        next older retained checkpoint is more than one interval older. The base of the oldest retained checkpoint was
        dropped if commits drop checkpoints.
        """
        return self.drops + sum(gap > 1 for gap in self.gaps)


def plan_held(retention: RetentionPolicy, every: timedelta) -> Held:
    """Simulate which checkpoints the policy keeps after very many intervals of length `every`."""
    many = retention.intervals_back(every) + 2
    if many > _MOST_CHECKPOINTS:
        raise UsageError(
            f"the retention covers {many:,} intervals; at most {_MOST_CHECKPOINTS:,} can be estimated.\n"
            "With --keep, give the number of checkpoints to retain"
        )
    # The simulated newest interval ends at midnight, so the policies for whole days keep it.
    first = datetime(2013, 1, 1, tzinfo=UTC) - many * every
    ended = [_Ended(n, Interval(first + (n - 1) * every, first + n * every)) for n in range(1, many + 1)]
    kept = sorted(retention.keep(ended) | {many})
    gaps = tuple(later - earlier for earlier, later in pairwise(kept))
    return Held(gaps=gaps, drops=int(len(kept) < many))


@dataclass(frozen=True, slots=True)
class _Ended:
    id: int
    interval: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Estimated bytes, requests and dollars."""

    usage: Usage
    checkpoints: int
    month: float
    requests: Mapping[Phase, Requests]
    savepoint_requests: Requests
    uploaded_bytes: float
    downloaded_bytes: float
    stored_bytes: float
    objects: float
    savepoint_bytes: float
    growth_bytes: float
    growth_objects: float
    seconds: float
    worker_mib: int
    disk_bytes: float
    dollars: Mapping[str, float]
    stops: tuple[str, ...]


def estimate(usage: Usage, prices: Prices = Prices()) -> Estimate:
    """Estimate the costs of a pipeline."""
    held = plan_held(usage.retention or default_retention(usage.every), usage.every)
    requests = interval_requests(usage, held)
    each = sum(requests.values(), Requests())
    month = MONTH / usage.every
    # `gap` is the number of intervals from a retained checkpoint to the next retained one. Each of these intervals
    # replaces files of the state, and the storage keeps the replaced files for the older checkpoint. The model takes the
    # state's size as constant, so each interval replaces as many bytes as it uploads. An older checkpoint keeps at most
    # the bytes of one whole state, therefore `min`.
    older = sum(min(gap * usage.uploaded_bytes, usage.state_bytes) for gap in held.gaps)
    stored = usage.state_bytes + older
    files = _uploaded_files(usage) + (usage.changed_shards if usage.filed else 0)
    live = usage.live_files * usage.shards + (usage.shards if usage.filed else 0)
    saved = savepoint_requests(usage)
    savepoints = 0.0 if usage.savepoint_every is None else MONTH / usage.savepoint_every
    # A native savepoint is compacted, so it has no obsolete versions: `stored_to_live` does not apply to it.
    savepoint_bytes = usage.keys * usage.bytes_per_key * usage.savepoints_kept if savepoints else 0.0
    growth = usage.output_bytes * month
    cores = min(usage.shards, usage.cores or usage.shards)
    work_us = usage.rows * MEASURED.row_us[usage.api] + usage.changed_blocks * MEASURED.block_us
    seconds = MEASURED.interval_s + work_us / 1e6 / cores
    dollars = {
        "requests": each.dollars(prices) * month,
        "checkpoints": stored / GIB * prices.gib_month,
        "savepoints": saved.dollars(prices) * savepoints + savepoint_bytes / GIB * prices.gib_month,
        "output": growth / GIB * prices.gib_month,
    }
    return Estimate(
        usage=usage,
        checkpoints=held.checkpoints,
        month=month,
        requests=requests,
        savepoint_requests=saved if savepoints else Requests(),
        uploaded_bytes=usage.uploaded_bytes,
        downloaded_bytes=usage.cold * usage.state_bytes,
        stored_bytes=stored,
        objects=live + sum(min(gap * files, live) for gap in held.gaps),
        savepoint_bytes=savepoint_bytes,
        growth_bytes=growth,
        # Each interval leaves four objects that nothing deletes: a record, two files in `settled/`, and a publishing
        # mark.
        growth_objects=month * (4 + usage.changed_shards),
        seconds=seconds,
        worker_mib=MEASURED.worker_mib if usage.bytes_per_key <= MEASURED.narrow_bytes else MEASURED.wide_worker_mib,
        disk_bytes=usage.keys * usage.bytes_per_key / usage.shards * MEASURED.disk_to_live,
        dollars={**dollars, "all": sum(dollars.values())},
        stops=tuple(_stops(usage, held, requests, seconds)),
    )


def memory_overhead_mib(worker_mib: int, cores: int) -> int:
    """Return the memory of an executor outside its JVM, in MiB: Spark's `spark.executor.memoryOverhead`.

    YARN and Kubernetes kill an executor that needs more. The Python worker of each running task lies in this memory.
    """
    return JVM_OVERHEAD_MIB + worker_mib * cores


def savepoint_requests(usage: Usage) -> Requests:
    """Return the requests of one native savepoint.

    Counted are: creation and deletion of a lease, a check that the checkpoint is still retained, the read and write of
    every shard, and `savepoint.json`. Not counted are the search for the checkpoint, and the lease's renewals every five
    minutes.
    """
    each = usage.state_bytes / usage.shards
    files = max(1, math.ceil(each / _TARGET_FILE_BYTES))
    return Requests(
        read=4 + usage.shards * (usage.live_files + int(usage.filed)),
        write=2 + usage.shards * files * _pieces(each / files),
        list=2,
        look=2,
        delete=1,
    )


def _stops(usage: Usage, held: Held, requests: Mapping[Phase, Requests], seconds: float) -> Sequence[str]:
    """Return a sentence for each reason why the estimate may be wrong or the pipeline too slow.

    Most reasons are sizes beyond the measured ones, on which the estimate is based.
    """
    said = []
    if usage.keys / usage.shards > MEASURED.keys_per_shard:
        need = math.ceil(usage.keys / MEASURED.keys_per_shard)
        fewer = f" With {need:,} shards or more, a shard has fewer." if need <= MOST_SHARDS else ""
        said.append(
            f"memory and seconds were measured with up to {MEASURED.keys_per_shard:,} keys a shard. This pipeline has "
            f"{usage.keys // usage.shards:,}.{fewer}"
        )
    if usage.shards > MEASURED.shards:
        said.append(
            f"commits and clean-ups were measured with up to {MEASURED.shards:,} shards. For more shards, the seconds leave out the time "
            "that Spark needs to start so many tasks."
        )
    if usage.state_bytes > MEASURED.in_memory_bytes:
        said.append(
            "seconds are estimated for state that fits into the hosts' free memory. With 7.5 GiB of free memory, a change of 1 % of 13 GiB took four "
            "times as long as estimated here."
        )
    if usage.cores is not None and usage.cores < usage.shards:
        said.append(
            f"{usage.cores:,} cores for {usage.shards:,} shards: the shards run in {math.ceil(usage.shards / usage.cores):,} rounds."
        )
    if seconds > usage.every.total_seconds():
        said.append(
            f"an interval takes {seconds:,.0f} s, but the next one begins after {usage.every.total_seconds():,.0f} s: the pipeline falls "
            "behind. Use more cores and shards, or longer intervals."
        )
    burst = requests["shards"].write + requests["prepare"].write
    if burst > 1_000:
        said.append(
            f"{burst:,.0f} files are written at the end of an interval. At first, a bucket accepts about 1,000 a second. It answers 429 to "
            "the others, and Cairn sends them again."
        )
    if held.checkpoints > 1_000:
        said.append(
            f"{held.checkpoints:,} checkpoints are retained, and every record lists them all. Up to 300 were measured."
        )
    return said


# --- from a pipeline's own history -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Averages of a pipeline's newest intervals."""

    intervals: int
    usage: Usage
    seconds: float


def usage_of(contents: Sequence[Content]) -> History | None:
    """Compute the input of the cost model, size and load of a pipeline, from the pipeline's own intervals.

    The first interval of a pipeline loads the initial data, so it is left out if other intervals exist.
    """
    shown = [c for c in contents if c.kind == "interval"]
    if len(shown) > 1:
        shown = [c for c in shown if c.base_id is not None] or shown
    if not shown or not max(shown[-1].totals.keys, shown[-1].totals.entries):
        return None
    newest, many = shown[-1], len(shown)
    # A pipeline without a value state counts no keys. Then the number of its entries is used instead.
    keys = newest.totals.keys or newest.totals.entries
    touched = sum(c.totals.keys_touched for c in shown) / many
    bytes_per_key = newest.totals.state_bytes / keys
    restored = sum(c.totals.downloaded_bytes + c.totals.cached_bytes for c in shown)
    lengths = sorted(c.interval.end - c.interval.start for c in shown)
    seconds = sorted(sum(c.durations_us.values()) / 1e6 for c in shown)
    changed = min(1.0, touched / keys)
    usage = Usage(
        keys=keys,
        bytes_per_key=bytes_per_key,
        changed=changed,
        shards=newest.parallelism,
        every=lengths[many // 2],
        rows_per_changed_key=sum(c.totals.input_rows for c in shown) / many / touched if touched else 1,
        retention=newest.retention,
        output_bytes=sum(o.handle.size_bytes for c in shown for o in c.outputs) / many,
        uploaded_to_changed=sum(c.totals.uploaded_bytes for c in shown) / many / (touched * bytes_per_key)
        if touched
        else 1,
        uploaded_files=_files_each(shown),
        # `bytes_per_key` is computed from whole checkpoints, so it includes obsolete versions already.
        stored_to_live=1,
        live_files=newest.totals.state_files / newest.parallelism,
        manifests_filed=any(ref.inline is None for ref in newest.shards),
        cold=sum(c.totals.downloaded_bytes for c in shown) / restored if restored else 0,
    )
    return History(intervals=many, usage=usage, seconds=seconds[many // 2])


def _files_each(shown: Sequence[Content]) -> float:
    """Estimate the state files that a changed shard uploads in an interval.

    Records do not say how many shards changed. The number of output files is used instead, as a changed shard usually
    writes one.
    """
    shards = sum(max(1, min(c.parallelism, len(c.outputs))) for c in shown)
    return sum(c.totals.uploaded_files for c in shown) / shards
