"""Find places that may still hold a key after `cairn erase`, which prints them with the next step for each.

Places outside of the root, such as the sink's tables, are listed without a search.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import NamedTuple

from state_backend.adapters.open_storage import join_url, list_own, open_storage
from state_backend.chains.judge_inputs import root_of_edge
from state_backend.checkpoint.forgotten_keys import is_key
from state_backend.checkpoint.log import read_log
from state_backend.checkpoint.record_reader import RecordReader, sweep_command
from state_backend.checkpoint.savepoints import read_savepoint
from state_backend.checkpoint.sweep_files import sweep
from state_backend.checkpoint.trials import list_trials, root_of_trial
from state_backend.formats import paths
from state_backend.ports.storage import Storage
from state_backend.values.airflow_commands import command_line
from state_backend.values.errors import CairnError, CorruptFile
from state_backend.values.frozen import frozen
from state_backend.values.records import Content, Record

_REPORT = "export.json"


class Place(NamedTuple):
    """A place where a key can still be present, and what to do about it (`then`)."""

    what: str
    # Path or URL of the place; empty if Cairn does not know it.
    where: str
    then: str

    def __str__(self) -> str:
        return f"{self.what}{f' {self.where}' if self.where else ''}: {self.then}"


@frozen
class Left:
    """What may still hold a key in the pipeline's folder after `cairn erase`."""

    dropped: Collection[int]  # ids of checkpoints that the erasure has dropped, but whose files may still exist
    holding: Collection[int]  # ids of retained checkpoints that may hold a key
    output_rewritten: bool  # True: the output has no rows of the keys any more
    unknown_output: Collection[str]  # paths of output files without the key's columns


def places_of(root: str, pipeline: str, encoded: Collection[bytes], texts: Collection[str], left: Left) -> list[Place]:
    """Return the places that may hold the forgotten keys, those in the pipeline's own folder first.

    `encoded`: The keys as encoded bytes. `texts`: The texts by which messages may quote a key. The function lists all
    files below the root; of a folder behind a symbolic link, only the files directly in it.
    """
    storage = open_storage(join_url(root, pipeline))
    found = [*_own(storage, pipeline, texts, left)]
    for trial in list_trials(root, pipeline):
        then = command_line("trials", root=root, pipeline=pipeline, remove=trial.name)
        found.append(Place("trial", root_of_trial(root, pipeline, trial.name), then))
    found += _below_root(root, pipeline, encoded)
    content = _newest(storage)
    if content is not None and content.restored_from is not None:
        found.append(Place(f"savepoint {content.restored_from}, which the state came from", "", _DELETE))
    return [*found, *_ELSEWHERE]


_DELETE = "delete it, and take a new one"
_ELSEWHERE = (
    Place("the source of the input", "", "delete the key there; a re-run reads it again"),
    Place("the sink's target", "", "delete the key there"),
    Place("savepoints and exports outside of the root", "", _DELETE),
    Place("Data Docs of validations", "", "delete the pages of validations before this one"),
    Place(
        "caches of hosts (cache_dir of EngineOptions, by default cairn-cache-UID in the temp folder)",
        "",
        "delete the folder on each host; only time is lost",
    ),
    Place("logs of tasks", "", "a processor may have logged the key"),
    Place(
        "buckets with versioning, soft delete or backups, and snapshots of disks",
        "",
        "deleted files stay there for as long as the storage is told to keep them",
    ),
)


def _own(storage: Storage, pipeline: str, texts: Collection[str], left: Left) -> Iterator[Place]:
    for checkpoint_id in left.holding:
        then = "add --drop-checkpoints, or wait until retention drops it"
        yield Place(f"checkpoint {checkpoint_id}", f"{storage.url}/{paths.record(checkpoint_id)}", then)
    for checkpoint_id in left.dropped:
        if isinstance(RecordReader(storage, checkpoint_id).fresh(checkpoint_id), Record):
            then = "a reader or a waiting sink keeps its files; the next clean-up after that deletes them"
            yield Place(f"dropped checkpoint {checkpoint_id}", f"{storage.url}/{paths.record(checkpoint_id)}", then)
    if not left.output_rewritten:
        then = "add --rewrite-output, which also finds late rows"
        yield Place("output", f"{storage.url}/{paths.OUTPUT}", then)
    for path in left.unknown_output:
        yield Place("output without the key's columns", f"{storage.url}/{path}", "look at it yourself")
    try:
        waiting = len(sweep(storage, pipeline, min_age=timedelta(0), dry_run=True).plan.delete)
    except CorruptFile:
        waiting = 1
    if waiting:
        what = "files of attempts that were never committed, or whose output was replaced"
        yield Place(what, storage.url, f"{sweep_command(storage)} deletes them three days after their last write")
    for record in read_log(storage).completed():
        if _quotes(json.dumps(record.content.source_position, ensure_ascii=False), texts):
            what, where_ = "source position that quotes the key", f"{storage.url}/{paths.record(record.id)}"
            yield Place(what, where_, "change the source, so that positions of later intervals do not quote it")
    failing = set()
    for info in storage.list(""):
        kind = paths.kind_of(info.path)
        if kind in ("quarantine", "refused") and _finding_quotes(storage.read(info.path), texts):
            yield Place("findings of a validation", f"{storage.url}/{info.path}", "it quotes the key")
        if kind == "failing":
            failing.add(info.path.rsplit("/", 2)[0])
    for folder in sorted(failing):
        then = "delete the folder; it is also deleted with its checkpoint"
        yield Place("rows that failed an expectation", f"{storage.url}/{folder}", then)


def _finding_quotes(mark: bytes, texts: Collection[str]) -> bool:
    """Return True if a mark's findings quote one of the texts, as it is or inside of JSON."""
    try:
        said = "\n".join(json.loads(mark)["body"]["findings"])
    except (ValueError, LookupError, TypeError):  # The file is damaged, as `cairn check` reports. Search its raw text.
        said = mark.decode(errors="replace")
    return any(text in said for text in texts if text) or _quotes(said, texts)


def _quotes(said: str, texts: Collection[str]) -> bool:
    return any(json.dumps(text, ensure_ascii=False)[1:-1] in said for text in texts if text)


def _below_root(root: str, pipeline: str, encoded: Collection[bytes]) -> Iterator[Place]:
    above = open_storage(root)
    own, trials = f"{pipeline}/", f"{paths.TRIALS}/"
    content = _newest(open_storage(join_url(root, pipeline)))
    for info in list_own(above):
        folder, _, name = info.path.rpartition("/")
        # Earlier releases wrote exports into a pipeline's folder too, so only savepoints are skipped there.
        skipped = (own, trials) if name == paths.SAVEPOINT_RECORD else trials
        if info.path.startswith(skipped) or name not in (paths.SAVEPOINT_RECORD, _REPORT, paths.HEAD):
            continue
        url = join_url(root, folder)
        if name == paths.HEAD:
            other = _newest(open_storage(url))
            if other is not None and content is not None:
                yield from _other_pipeline(root, pipeline, folder, content, other)
        elif name == _REPORT:
            yield Place("export", url, _DELETE)
        else:
            try:
                saved = read_savepoint(open_storage(url)).content
            except CairnError:
                saved = None
            said = saved.forget.keys if saved is not None and saved.forget is not None else ()
            if not all(any(is_key(forgotten, key) for forgotten in said) for key in encoded):
                yield Place("savepoint", url, _DELETE)


def _other_pipeline(root: str, pipeline: str, folder: str, content: Content, other: Content) -> Iterator[Place]:
    own, url = (root.rstrip("/"), pipeline), join_url(root, folder)
    reads = [r for r in other.inputs if (root_of_edge(r.edge.root, root), r.edge.pipeline) == own]
    ever = {(root_of_edge(one.root, root), one.pipeline) for one in other.followed}
    same = other.key_schema == content.key_schema
    if reads and same and all(read.plain for read in reads):
        command = command_line("erase", root=root, pipeline=folder, rewrite_output=True)
        yield Place("pipeline with the same key that reads this one", url, command)
    elif reads or own in ever | {(one.root, one.pipeline) for one in other.untracked}:
        command = command_line("status", root=root, pipeline=folder)
        yield Place("pipeline that reads this one", url, f"its results were made of the key's rows too: {command}")
    elif same and folder != pipeline:
        yield Place("pipeline with the same key", url, command_line("erase", root=root, pipeline=folder))


def _newest(storage: Storage) -> Content | None:
    try:
        newest = read_log(storage).newest
    except CairnError:
        return None
    return newest.content if newest is not None else None
