"""The command `cairn estimate`: costs of a pipeline over time, from its history, from options, or from both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Annotated, Any

import typer

from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.inspection.checkpoint_names import parse_duration
from state_backend.inspection.cost_model import (
    JVM_OVERHEAD_MIB,
    PRICE_LISTS,
    Estimate,
    History,
    Prices,
    Requests,
    Usage,
    estimate,
    memory_overhead_mib,
    usage_of,
)
from state_backend.values.environment import Variable
from state_backend.values.errors import UsageError
from state_backend.values.human_units import size
from state_backend.values.records import Record
from state_backend.values.retention import KeepLast

# The history is computed from at most this many of the newest retained checkpoints.
_MOST_RECORDS = 50


def estimate_(
    root: Annotated[
        str | None,
        typer.Option(
            envvar=Variable.ROOT, help="URL of the folder that holds all pipelines, to use a pipeline's history."
        ),
    ] = None,
    pipeline: Annotated[
        str | None, typer.Option(envvar=Variable.PIPELINE, help="Name of a pipeline that has run.")
    ] = None,
    keys: Annotated[int | None, typer.Option(help="Number of keys in the state.")] = None,
    bytes_per_key: Annotated[float | None, typer.Option(help="Stored bytes per key, compressed.")] = None,
    changed: Annotated[str | None, typer.Option(help="Share of keys that an interval changes: 1% or 0.01.")] = None,
    rows: Annotated[float | None, typer.Option(help="Input rows per changed key.")] = None,
    shards: Annotated[int | None, typer.Option(help="Number of shards (parallelism).")] = None,
    every: Annotated[str | None, typer.Option(help="Length of an interval: 15m, 1h, 1d.")] = None,
    keep: Annotated[int | None, typer.Option(help="Number of checkpoints to retain.")] = None,
    savepoint_every: Annotated[str | None, typer.Option(help="Time between two native savepoints: 1d, 7d.")] = None,
    savepoints_kept: Annotated[int, typer.Option(help="Number of savepoints kept at a time.")] = 1,
    output_bytes: Annotated[float | None, typer.Option(help="Bytes of output per interval.")] = None,
    cold: Annotated[
        str | None, typer.Option(help="Share of restored bytes that the hosts' file caches lack: 0 to 1, or 100%.")
    ] = None,
    cores: Annotated[int | None, typer.Option(help="Number of shards that run at a time; left out: all.")] = None,
    api: Annotated[str, typer.Option(help="Interface of the processor, for the seconds: row or arrow.")] = "row",
    price_list: Annotated[str, typer.Option("--prices", help="Prices of a storage: gcs or s3.")] = "gcs",
    price_gib_month: Annotated[float | None, typer.Option(help="US dollars per GiB and month.")] = None,
    price_writes: Annotated[float | None, typer.Option(help="US dollars per 1,000 writes or lists.")] = None,
    price_reads: Annotated[float | None, typer.Option(help="US dollars per 1,000 reads or metadata requests.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")] = False,
) -> int:
    """Estimate a pipeline's objects, requests, bytes, dollars on Google Cloud Storage or Amazon S3, seconds and memory."""
    if api not in ("row", "arrow"):
        raise UsageError(f"--api {api}: expected row or arrow")
    if price_list not in PRICE_LISTS:
        raise UsageError(f"--prices {price_list}: expected {' or '.join(PRICE_LISTS)}")
    history = _history(root, pipeline) if root is not None and pipeline is not None else None
    asked = {
        "keys": keys,
        "bytes_per_key": bytes_per_key,
        "changed": None if changed is None else share("--changed", changed),
        "rows_per_changed_key": rows,
        "shards": shards,
        "every": None if every is None else parse_duration(every),
        "retention": None if keep is None else KeepLast(keep),
        "output_bytes": output_bytes,
        "cold": None if cold is None else share("--cold", cold),
    }
    usage = asked_usage({name: value for name, value in asked.items() if value is not None}, history)
    usage = replace(
        usage,
        savepoint_every=None if savepoint_every is None else parse_duration(savepoint_every),
        savepoints_kept=savepoints_kept,
        cores=cores,
        api=api,  # type: ignore[arg-type]
    )
    given = {"gib_month": price_gib_month, "class_a": price_writes, "class_b": price_reads}
    prices = replace(PRICE_LISTS[price_list], **{name: price for name, price in given.items() if price is not None})  # type: ignore[arg-type]
    found = estimate(usage, prices)
    typer.echo(
        json.dumps(as_values(found, history, prices), indent=2)
        if as_json
        else "\n".join(_lines(found, history, prices))
    )
    return 0


def share(option: str, text: str) -> float:
    """Convert `1%` or `0.01` to 0.01."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise UsageError(f"{option} {text} is not a share\nWrite it as in 1% or 0.01") from None


def asked_usage(asked: dict[str, Any], history: History | None) -> Usage:
    """Return the usage to estimate: the history's usage, where each given option replaces one value."""
    if history is None:
        missing = [name for name in ("keys", "bytes_per_key", "changed", "shards", "every") if name not in asked]
        if missing:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
            raise UsageError(
                f"without a pipeline's history, these options are needed: {options}\n"
                "Or name a pipeline that has run: cairn estimate --root URL --pipeline NAME"
            )
        return Usage(**asked)
    usage = replace(history.usage, **asked)
    if asked.keys() & {"keys", "bytes_per_key", "changed", "shards"}:
        # The history's file count belongs to other sizes and another number of shards.
        usage = replace(usage, uploaded_files=None)
    if "shards" in asked and asked["shards"] != history.usage.shards:
        usage = replace(usage, manifests_filed=None)
    return usage


def _history(root: str, pipeline: str) -> History:
    storage = open_storage(join_url(root, pipeline))
    log = Coordinator(storage, pipeline).log()
    ids = sorted(log.retained)[-_MOST_RECORDS:]
    log.entries.load(ids)
    entries = [log.entries[n] for n in ids]
    history = usage_of([entry.content for entry in entries if isinstance(entry, Record)])
    if history is None:
        raise UsageError(
            f"no retained checkpoint at {storage.url} has state, so there is no history to estimate from\n"
            "Check --root and --pipeline with: cairn list\n"
            "Or leave them out, and give --keys, --bytes-per-key, --changed, --shards and --every"
        )
    return history


# --- printing ---------------------------------------------------------------------------------------------------------


def as_values(found: Estimate, history: History | None, prices: Prices) -> dict[str, Any]:
    """Return the estimate as JSON values.

    Values are bytes, seconds, dollars per month, and requests per interval by phase and kind.
    """
    usage = found.usage
    return {
        "usage": {
            **{
                name: getattr(usage, name)
                for name in (
                    "keys", "bytes_per_key", "changed", "shards", "rows", "changed_shards", "output_bytes", "uploaded_to_changed", "cold",
                    "savepoints_kept", "cores", "api",
                )
            },
            "every_s": usage.every.total_seconds(),
            "savepoint_every_s": None if usage.savepoint_every is None else usage.savepoint_every.total_seconds(),
        },
        "history": None if history is None else {"intervals": history.intervals, "seconds": history.seconds},
        "interval": {
            "requests": {phase: asdict(requests) for phase, requests in found.requests.items()},
            "uploaded_bytes": found.uploaded_bytes,
            "downloaded_bytes": found.downloaded_bytes,
            "seconds": found.seconds,
        },
        "savepoint": {"requests": asdict(found.savepoint_requests)},
        "intervals_per_month": found.month,
        "checkpoints": found.checkpoints,
        "stored_bytes": found.stored_bytes,
        "objects": found.objects,
        "savepoint_bytes": found.savepoint_bytes,
        "growth_bytes_per_month": found.growth_bytes,
        "growth_objects_per_month": found.growth_objects,
        "worker_mib": found.worker_mib,
        "shard_disk_bytes": found.disk_bytes,
        "dollars_per_month": dict(found.dollars),
        "prices": asdict(prices),
        "stops": list(found.stops),
    }  # fmt: skip


def _lines(found: Estimate, history: History | None, prices: Prices) -> Iterator[str]:
    usage, dollars = found.usage, found.dollars
    every = _duration(usage.every)
    yield (
        f"{usage.keys:,} keys of {usage.bytes_per_key:,.0f} bytes; a share of {usage.changed:.3g} changes every {every}; {usage.shards:,} shards; "
        f"{found.checkpoints:,} checkpoints retained"
    )
    if history is not None:
        yield f"from the last {history.intervals} intervals of the pipeline, which took {history.seconds:.2f} s each; given options replace measured values"
    yield ""
    yield f"{'per interval':<12}{'writes':>9}{'lists':>9}{'reads':>9}{'metadata':>9}{'deletes':>9}"
    each = sum(found.requests.values(), Requests())
    for name, r in [*found.requests.items(), ("all", each)]:
        yield f"{name:<12}" + "".join(f"{value:>9,.0f}" for value in (r.write, r.list, r.read, r.look, r.delete))
    yield f"uploads {size(found.uploaded_bytes)} of state and downloads {size(found.downloaded_bytes)}"
    yield (
        f"takes {found.seconds:.1f} s in a warm session; each shard needs {size(found.worker_mib * 2**20)} of memory and {size(found.disk_bytes)} of disk"
    )
    yield (
        "an executor of 4 cores on YARN or Kubernetes needs spark.executor.memoryOverhead="
        f"{memory_overhead_mib(found.worker_mib, 4)}m: {JVM_OVERHEAD_MIB} MiB, and {found.worker_mib} MiB for each core"
    )
    yield ""
    yield f"{'per month':<12}{'':>30}{'US dollars':>15}"
    for name, what in (
        ("requests", f"{each.total * found.month:,.0f} in {found.month:,.0f} intervals"),
        ("checkpoints", f"{size(found.stored_bytes)} in {found.objects:,.0f} objects"),
        ("savepoints", size(found.savepoint_bytes)),
        ("output", f"{size(found.growth_bytes)} more each month"),
        ("all", ""),
    ):
        yield f"{name:<12}{what:>30}{dollars[name]:>15,.4f}"
    yield (
        f"{found.growth_objects:,.0f} more objects each month: output files, and four small files per interval. Prices of {prices.read_on}: "
        f"{prices.gib_month:g} per GiB, {prices.class_a:g} per 1,000 writes or lists, {prices.class_b:g} per 1,000 reads or metadata requests"
    )
    for sentence in found.stops:
        yield f"note: {sentence}"


def _duration(length: timedelta) -> str:
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if length.total_seconds() % seconds == 0:
            return f"{length.total_seconds() / seconds:g}{unit}"
    return f"{length.total_seconds():g}s"
