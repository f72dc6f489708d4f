"""The record of a checkpoint, for `cairn checkpoints ID`."""

from __future__ import annotations

from cairn.command.options import PUT_BACK, open_log
from cairn.command.printing import cell, measure, print_json, print_table, print_text
from state_backend.checkpoint.dropped_checkpoint import telling_drops
from state_backend.checkpoint.find_checkpoint import record_of
from state_backend.inspection.describe import describe_checkpoint, in_words
from state_backend.ports.storage import Storage
from state_backend.shard.manifest import manifest_of
from state_backend.values.errors import CorruptFile, NotFound
from state_backend.values.human_units import size, span
from state_backend.values.records import Record, ShardManifest


def show_checkpoint(root: str, pipeline: str, checkpoint: str, *, as_json: bool) -> int:
    at, log = open_log(root, pipeline)
    storage, record = at.storage, record_of(at, checkpoint)
    shown = describe_checkpoint(log, record, _manifests(record, storage))
    if as_json:
        return print_json(shown)
    for name, value in shown.items():
        if name not in ("shards", "outputs", "totals", "durations_us", "states", "reads"):
            print_text(f"{name:<16} {cell(value)}")
    for read in shown["reads"]:
        print_text(f"{'reads':<16} {in_words(read)}")
    for title, name, words in (
        ("totals", "totals", measure),
        ("durations", "durations_us", lambda _, us: span(us / 1_000_000)),
    ):
        print_text(f"\n{title}")
        for key, value in shown[name].items():
            print_text(f"  {key:<16} {words(key, value):>16}")
    print_text("\nstates")
    for state in shown["states"]:
        print_text(f"  {state['name']} ({state['kind']}), schema version {state['versions'][-1]['version']}")
    rows = []
    for s in shown["shards"]:
        groups = "{} to {}".format(*s["key_groups"])
        cells = (s["shard"], groups, s["entries"], size(s["bytes"]), len(s["files"]), s["digest"])
        rows.append(([*map(cell, cells)], ""))
    print_table(("shard", "key groups", "entries", "bytes", "files", "digest"), rows)
    for output in shown["outputs"]:
        print_text(f"{'late output' if output['late'] else 'output'} {output['path']}: {output['rows']:,} rows")
    return 0


def _manifests(record: Record, storage: Storage) -> list[ShardManifest]:
    try:
        with telling_drops(storage, record.id):
            return [manifest_of(ref, storage) for ref in record.content.shards]
    except NotFound as error:
        raise CorruptFile(f"checkpoint {record.id}: a manifest is missing: {error}\n{PUT_BACK}") from error
