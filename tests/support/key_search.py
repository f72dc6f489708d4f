"""Search for a key's bytes in every file below a folder: raw, decompressed, and in the entries of RocksDB and Parquet files."""

from __future__ import annotations

import base64
import binascii
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from state_backend.adapters.local_storage import LocalStorage
from state_backend.formats import changelog, record_codec
from state_backend.formats.rocksdb_table import versions_in
from state_backend.shard.manifest import manifest_of, mentions_key, ssts_of
from state_backend.values.errors import CairnError
from state_backend.values.marks import Savepoint
from state_backend.values.records import Prepared, Record, ShardManifest


def files_with(root: Path, needle: bytes) -> set[str]:
    """Return the files below the root, by their path, that have the needle in any form.

    An SST counts if one of its puts has the needle, or if its range of keys in a MANIFEST does.
    """
    found: set[str] = set()
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        name, data = str(path.relative_to(root)), path.read_bytes()
        if any(needle in text for text in _texts(path, data)):
            found.add(name)
        for storage_root, manifest in _manifests(path, data):
            found |= {
                str((storage_root / sst).relative_to(root)) if sst else name
                for sst in _ssts_with(storage_root, manifest, needle)
            }
    return found


def _texts(path: Path, data: bytes) -> Iterator[bytes]:
    yield data
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            yield repr(file.read().to_pydict()).encode()
            yield repr([file.metadata.row_group(n).to_dict() for n in range(file.num_row_groups)]).encode()
    elif path.suffix == ".log":
        yield from _in_segment(data)
    elif path.suffix in {".json", ".manifest"}:
        if data[:2] == b"\x1f\x8b":
            data = zlib.decompress(data, wbits=31)
            yield data
        for text in _strings(json.loads(data)):
            yield text.encode()
            try:
                decoded = base64.b64decode(text, validate=True)
            except (binascii.Error, ValueError):
                continue
            yield decoded
            if decoded.startswith(changelog.MAGIC):
                yield from _in_segment(decoded)


def _in_segment(data: bytes) -> Iterator[bytes]:
    file = io.BytesIO(data)
    file.read(len(changelog.MAGIC))
    kind = changelog.RANGES
    while kind != changelog.END:
        kind, _, raw = changelog._read_block(file, "a segment")
        yield raw


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from _strings(inner)


def _manifests(path: Path, data: bytes) -> Iterator[tuple[Path, ShardManifest]]:
    """Yield the manifests of a file, each with the folder that its files are relative to."""
    if path.suffix == ".manifest":
        yield path.parents[2], record_codec.decode(data, str(path), ShardManifest)
        return
    if path.suffix != ".json":
        return
    try:
        value: Any = record_codec.decode(data, str(path), Record, Prepared, Savepoint)
    except CairnError:
        return
    folder = path.parent if isinstance(value, Savepoint) else path.parents[2 if isinstance(value, Prepared) else 1]
    for ref in value.content.shards:
        with suppress(CairnError):
            yield folder, manifest_of(ref, LocalStorage(folder))


def _ssts_with(folder: Path, manifest: ShardManifest, needle: bytes) -> Iterator[str]:
    """Yield the path of each SST with the needle, or an empty text for one that lies inside the manifest."""
    if mentions_key(manifest, needle):
        yield ""
    handles = {f.name: f.handle.path for f in manifest.files}
    inline = {f.name: f.data for f in manifest.inline_files}
    for name in (f"{sst.number:06d}.sst" for sst in ssts_of(manifest)):
        path = folder / handles.get(name, "")
        if name in handles and not path.exists():  # deleted since
            continue
        table = path.read_bytes() if name in handles else inline[name]
        entries = versions_in(memoryview(table), [(b"", None)]).entries
        if any(value is not None and (needle in key or needle in value) for key, _, value in entries):
            yield handles.get(name, "")
