"""Reading the manifest that a record refers to. Apart from ``restore``, since whoever only counts files needs no RocksDB."""

from __future__ import annotations

import google_crc32c

from state_backend.formats import record_codec
from state_backend.ports.storage import Storage
from state_backend.values.errors import CorruptFile, CorruptRecord
from state_backend.values.records import ShardManifest, ShardRef


def manifest_of(ref: ShardRef, storage: Storage) -> ShardManifest:
    """The manifest, inline or from its file, verified. NotFound if the file is gone."""
    if ref.inline is not None:
        return ref.inline
    handle = ref.manifest
    if handle is None:
        raise CorruptRecord(f"shard {ref.shard} has neither an inline manifest nor a file of one")
    data = storage.read(handle.path)
    crc32c = google_crc32c.value(data)
    if len(data) != handle.size_bytes or crc32c != handle.crc32c:
        raise CorruptFile(
            f"{handle.path}: {len(data)} bytes, crc32c {crc32c:08x}; expected {handle.size_bytes} bytes, {handle.crc32c:08x}"
        )
    return record_codec.decode(data, handle.path, ShardManifest)
