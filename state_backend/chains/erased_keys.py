"""Follow keys that `cairn erase` removed from an upstream into the pipelines that read it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace

from state_backend.chains.inputs_of import unexchanged
from state_backend.chains.judge_inputs import Chains, Node, followed_in, root_of_edge
from state_backend.checkpoint.forgotten_keys import is_key
from state_backend.checkpoint.log import Log
from state_backend.formats.types import names_and_types, parse_struct
from state_backend.values.errors import CairnError
from state_backend.values.inputs import Followed, followed_after
from state_backend.values.records import ForgottenKey, Record, Tombstone


def followed_without(root: str, log: Log, keys: Collection[bytes]) -> tuple[Followed, ...]:
    """Return a pipeline's upstreams for the record of a `cairn erase`, which removes `keys` from state and output.

    An upstream's erasure of the same keys makes no result stale if the upstream has the same key columns and each
    result read the upstream's rows as they are. `Followed.erased` lists such erasures.
    """
    found, chains = list(known := followed_in(log)), Chains()
    for one in known:
        with suppress(CairnError):
            at = root_of_edge(one.root, root), one.pipeline
            found.append(replace(one, erased=tuple(_without_effect(root, log, chains.node(*at), at, keys))))
    return followed_after(found, ())


def _without_effect(root: str, log: Log, upstream: Node, at: tuple[str, str], keys: Collection[bytes]) -> Iterator[str]:
    # Until a `cairn erase` of the upstream has exchanged the output files, readers may still read the erased rows.
    if not upstream.erased or not _same_key(log, upstream.log) or unexchanged(upstream.log):
        return
    current = [n for _, (n, _) in log.current_outputs().items()]
    log.entries.load(current)
    entries = [entry for n in current if isinstance(entry := log.entries[n], Record | Tombstone)]
    inputs = [entry.content.inputs if isinstance(entry, Record) else entry.inputs for entry in entries]
    reads = [r for one in inputs for r in one if (root_of_edge(r.edge.root, root), r.edge.pipeline) == at]
    for n, attempt in {(n, attempt) for _, n, attempt in upstream.erased}:
        erased = _keys_of(upstream.log, n)
        plain = all(read.plain for read in reads if read.head < n)
        if plain and all(any(is_key(one, key) for key in keys) for one in erased):
            yield attempt


def _keys_of(log: Log, checkpoint_id: int) -> list[ForgottenKey]:
    """Return the keys that a commit of `cairn erase` removed. If it is dropped, also those of later such commits.

    The later ones are needed because the log names a key that was erased twice only with the later commit.
    """
    entry = log.entries[checkpoint_id]
    if isinstance(entry, Record) and entry.content.forget is not None:
        return [*entry.content.forget.keys]
    return [forgotten.key for forgotten in log.summary.forgotten if forgotten.id >= checkpoint_id]


def _same_key(one: Log, other: Log) -> bool:
    kinds = [names_and_types(parse_struct(n.content.key_schema)) for n in (one.newest, other.newest) if n is not None]
    return kinds[1:] == kinds[:1]
