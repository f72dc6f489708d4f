"""Durable bytes that somebody else wrote: decoded to what they may mean, or refused by an error of ours, in bounded time and memory.

Checksums are made right again where a hostile writer would. CAIRN_EXAMPLES sets the examples of each test (default 60).
"""

from __future__ import annotations

import io
import json
import os
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import google_crc32c
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.adapters.rocks import EngineOptions
from state_backend.checkpoint.log import read_log
from state_backend.checkpoint.savepoints import native_manifest, read_savepoint
from state_backend.formats import changelog, paths, record_codec, rocksdb_manifest
from state_backend.formats.canonical_tables import read_tables, state_schema
from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.row_codec import RowCodec
from state_backend.formats.types import parse_struct
from state_backend.shard.manifest import manifest_of
from state_backend.shard.restore import restore_shard
from state_backend.state.state_variables import ValueState
from state_backend.values.errors import (
    CairnError,
    CorruptFile,
    CorruptRecord,
    InvariantViolated,
    StateSchemaError,
    UnsupportedFormat,
    UsageError,
)
from state_backend.values.handles import Handle, check_path
from state_backend.values.key_groups import KeyGroupRange, range_of
from state_backend.values.marks import Savepoint
from state_backend.values.records import FiledShard, InlineFile, InlineShard, ShardManifest
from tests.support.chains import Chain
from tests.support.hostile_store import Opener
from tests.support.record_examples import ALL, VALUES
from tests.support.schema_json import array, mapping
from tests.support.schema_json import struct as struct_of
from tests.support.shards import KEY_SCHEMA, KEYS, STATES
from tests.support.version_edits import log_of

EXAMPLES = int(os.environ.get("CAIRN_EXAMPLES", "60"))
hostile = settings(
    deadline=None, max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
MOST_BYTES = 64 * 1024 * 1024

NASTY: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**400, -(10**30), 1e308, 0.5, "", "..", "../../etc/passwd", "/etc/passwd",
    "a/../b", "a\\b", "\x00", "\ud800", "x" * 5_000, ".tmp/x", "2024-01-01T00:00:00", "9999-99-99T00:00:00+00:00", [], [[]], {}, {"": {}},
    [{}] * 50,
]  # fmt: skip


@contextmanager
def bounded() -> Iterator[None]:
    """At most 64 MiB of Python's memory at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += [(value, key), *places(inner)]
    return found


def sealed(envelope: dict[str, Any]) -> bytes:
    """With a checksum that fits, whatever the body."""
    body = json.dumps(envelope["body"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    envelope["crc32c"] = f"{google_crc32c.value(body.encode(errors='surrogatepass')):08x}"
    text = json.dumps(envelope, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode(errors="surrogatepass")


@st.composite
def changed_records(draw: st.DrawFn, values: list[Any] = VALUES) -> bytes:
    """A valid record with up to three places changed: another value, taken out, doubled, renamed, or wrapped."""
    envelope = json.loads(record_codec.encode(draw(st.sampled_from(values))))
    for _ in range(draw(st.integers(1, 3))):
        container, key = draw(st.sampled_from(places(envelope) or [(envelope, "body")]))
        what = draw(st.sampled_from(["set", "drop", "double", "rename", "wrap", "swap"]))
        if what == "drop":
            del container[key]
        elif what == "double" and isinstance(container[key], list):
            container[key] = container[key] * 2
        elif what == "rename" and isinstance(container, dict):
            container[draw(st.text(max_size=8))] = container.pop(key)
        elif what == "wrap":
            container[key] = [container[key]]
        elif what == "swap":
            other, there = draw(st.sampled_from(places(envelope)))
            container[key] = json.loads(json.dumps(other[there]))
        else:
            container[key] = deepcopy(draw(st.sampled_from(NASTY)))
        if not isinstance(envelope.get("body"), dict):
            break
    return sealed({"body": None, **envelope})


@hostile
@given(changed_records())
def test_a_changed_record_is_refused_or_round_trips(data: bytes) -> None:
    """What is accepted says the same when it is written again: nothing was guessed or dropped."""
    with bounded(), suppress(CorruptRecord, UnsupportedFormat):
        value = record_codec.decode(data, "p", *ALL)
        assert record_codec.decode(record_codec.encode(value), "p", *ALL) == value


@hostile
@given(st.sampled_from(VALUES), st.data())
def test_changed_bytes_of_a_record_are_refused(value: Any, data: st.DataObject) -> None:
    encoded = bytearray(record_codec.encode(value))
    at = data.draw(st.integers(0, len(encoded) - 1))
    what = data.draw(st.sampled_from(["insert", "cut", "flip", "repeat"]))
    if what == "insert":
        encoded[at:at] = data.draw(st.binary(min_size=1, max_size=8).filter(bytes.strip))
    elif what == "cut":
        del encoded[at:]
    elif what == "flip":
        encoded[at] ^= data.draw(st.integers(1, 255))
    else:
        encoded += encoded[at:]
    with pytest.raises((CorruptRecord, UnsupportedFormat)):
        if record_codec.decode(bytes(encoded), "p", *ALL) == value:
            raise CorruptRecord("only the release is another, which no value depends on")


DEEP = b"[" * 900 + b"]" * 900


@pytest.mark.parametrize(
    "body",
    [
        b'{"id":NaN}', b'{"id":Infinity}', b'{"id":-Infinity}', b'{"id":1e999}', b'{"id":' + b"9" * 5_000 + b"}",
        b'{"id":1,"id":1}', b'{"a":{"id":1,"id":2}}', DEEP, b"[" * 100_000, b'{"a":' * 400 + b"1" + b"}" * 400, b'"\\ud800"',
    ],
    ids=["NaN", "Infinity", "-Infinity", "1e999", "5,000 digits", "twice", "twice inside", "deep", "unclosed", "objects", "surrogate"],
)  # fmt: skip
def test_a_record_with_invalid_or_too_deep_json_is_refused(body: bytes) -> None:
    crc32c = f"{google_crc32c.value(body):08x}".encode()
    for position in (body, b'{"source_position":' + body + b"}"):
        data = b'{"cairn":"checkpoint","format":1,"crc32c":"' + crc32c + b'","body":' + position + b"}"
        with bounded(), pytest.raises(CorruptRecord):
            record_codec.decode(data, "p", *ALL)


@pytest.mark.parametrize("number", ["NaN", "1e999", "-Infinity"])
def test_a_source_offset_of_nan_or_infinity_is_refused_by_reads_and_writes(number: str) -> None:
    """And nothing of the kind is written: what could not be read again."""
    envelope = json.loads(record_codec.encode(VALUES[0]))
    envelope["body"]["content"]["source_position"] = {"at": float(number)}
    with pytest.raises(CorruptRecord, match="number"):
        record_codec.decode(sealed(envelope), "p", *ALL)
    wrong = replace(VALUES[0], content=replace(VALUES[0].content, source_position={"at": float(number)}))
    with pytest.raises(UsageError, match="source position"):
        record_codec.encode(wrong)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("retained",), [{"id": 1, "stale_by": None}] * 2, "retained ids"),
        (("retained",), [{"id": 3, "stale_by": None}], "retained ids"),
        (("id",), -1, "retained ids|id is -1"),
        (("content", "parallelism"), 10**9, "parallelism"),
        (("content", "max_parallelism"), 0, "parallelism"),
        (("content", "pipeline"), "x; rm -rf /", "can't be a name"),
        (("content", "totals", "entries"), -1, "entries is -1"),
        (("content", "digest"), 2**64, "digest"),
        (("content", "shards"), [], None),
        (("content", "shards", 0, "shard"), 1, "it lists shards"),
        (("content", "shards", 0, "inline", "files", 0, "name"), "../../x", "local file"),
        (("content", "shards", 0, "inline", "inline_files", 0, "name"), "\x00", "local file"),
        (("content", "shards", 0, "inline", "key_groups", "last"), 10**6, "not a valid range"),
        (("content", "shards", 0, "inline", "key_group_states", 0, "key_group"), 99, "key groups"),
        (("content", "shards", 0, "inline", "files", 0, "handle", "crc32c"), 2**32, "crc32c"),
        (("content", "shards", 0, "inline", "files", 0, "handle", "size_bytes"), -1, "size_bytes"),
        (("content", "states", 0, "state_id"), 10**30, "state_id"),
    ],
)  # fmt: skip
def test_a_record_with_impossible_values_is_refused(path: tuple[Any, ...], value: Any, says: str | None) -> None:
    """Huge and negative counts, ids twice, shards left out, names that lead elsewhere."""
    envelope = json.loads(record_codec.encode(VALUES[0]))
    at = envelope["body"]
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    if says is None:
        record_codec.decode(sealed(envelope), "p", *ALL)
        return
    with pytest.raises(CorruptRecord, match=says):
        record_codec.decode(sealed(envelope), "p", *ALL)


# --- a folder ------------------------------------------------------------------------------------------------------------------------


@hostile
@given(st.lists(st.tuples(st.integers(1, 3), changed_records()), min_size=1, max_size=3))
def test_a_log_of_changed_records_is_refused_or_read(records: list[tuple[int, bytes]]) -> None:
    """F50."""
    storage = MemoryStorage()
    for checkpoint_id, data in records:
        with suppress(CairnError):
            storage.create(paths.record(checkpoint_id), data)
    with suppress(CorruptRecord, UnsupportedFormat):
        read_log(storage).current_outputs()


EMPTY = replace(next(v for v in VALUES if isinstance(v, ShardManifest)), files=(), inline_files=(), key_group_states=())
SAVEPOINTS = [v for v in VALUES if isinstance(v, Savepoint)]


def native(*halves: int) -> Savepoint:
    """A savepoint of two shards, each with that half of the key groups."""
    made = [replace(EMPTY, shard=n, key_groups=range_of(half, 2, 16)) for n, half in enumerate(halves)]
    shards = tuple(InlineShard(shard=one.shard, inline=one) for one in made)
    return replace(SAVEPOINTS[0], content=replace(SAVEPOINTS[0].content, states=STATES, parallelism=2, shards=shards))


@hostile
@given(changed_records([native(0, 1), *SAVEPOINTS]))
@example(record_codec.encode(native(1, 0)))
def test_a_changed_savepoint_is_refused_or_read(data: bytes) -> None:
    storage = MemoryStorage()
    storage.create(paths.SAVEPOINT_RECORD, data)
    with suppress(CorruptFile, UnsupportedFormat):
        content = (savepoint := read_savepoint(storage)).content
        for n in range(len(content.shards)):
            owned = range_of(n, content.parallelism, content.max_parallelism)
            assert native_manifest(savepoint, n, storage).key_groups == owned


@hostile
@given(st.text(max_size=60) | st.builds("checkpoints/{}.json".format, st.text("0123456789٣²", max_size=25)))
def test_any_path_is_refused_or_lies_below_the_root(path: str) -> None:
    found = paths.record_id(path)
    assert found is None or paths.record(found) in (path, f"checkpoints/{path}")
    paths.published_id(path)
    paths.attempt_of(path)
    paths.is_of_savepoint(path)
    with suppress(UsageError):
        check_path(path)
        assert (Path("/root") / path).resolve().is_relative_to("/root")


# --- shards --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> tuple[MemoryStorage, Any]:
    """A real shard of a few entries whose files all lie inline."""
    storage = MemoryStorage()
    chain = Chain(tmp_path_factory.mktemp("chain"), storage, max_parallelism=1, inline_budget_bytes=1_000_000)

    def change(state: Any, owned: KeyGroupRange) -> None:
        for n in range(50):
            state.set_key(0, KEYS.encode((f"k{n}",)))
            ValueState(state, "value").update((n, "x" * n))

    return storage, chain.step(1, "incremental", change)[0]


@pytest.fixture(scope="module")
def opener() -> Iterator[Opener]:
    with Opener() as one:
        yield one


@hostile
@given(data=st.data())
@pytest.mark.long("half a second", runs_in="ci")
def test_changed_files_of_a_store_are_refused_or_opened(opener: Opener, shard: Any, data: st.DataObject) -> None:
    """Inline files have no checksum but the record's, which a hostile writer makes right: RocksDB sees the bytes."""
    _, manifest = shard
    at = data.draw(st.integers(0, len(manifest.inline_files) - 1))
    file = manifest.inline_files[at]
    changed = bytearray(file.data)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(changed) - 1))
        changed[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del changed[data.draw(st.integers(0, len(changed) - 1)) :]
    files = list(manifest.inline_files)
    files[at] = replace(file, data=bytes(changed))
    opener.open(replace(manifest, inline_files=tuple(files)))


# RocksDB's reader of logs never comes back from it, and keeps the GIL: the second record has the length 0 and a kind of write-ahead logs.
SPINS = bytes.fromhex(
    "a422c4bb27000181402433386663346566642d666564392d343830372d623665652d303166643234363165336634052b284300000635403f88200001011a6c6576656c64"
    "622e4279746577697365436f6d70617261746f7289400101f4030c5a04000102000400fc2c26f9060001090003060400e740d08d64000102040900030904326700"
    "08cb1210000001016b300001010100000000000010000001016b3900010132000000000000013205898eb7a7d80606058eb7a7d8060d010107000807556e6b6e6f776e"
    "0c101f320b71f17e1ef8267ecc91488f98740f02a009014b76b04a080001090003090a040432"
)


def test_a_manifest_that_rocksdb_reads_for_ever_is_refused(opener: Opener) -> None:
    current = InlineFile(name="CURRENT", data=b"MANIFEST-000001\n")
    files = current, InlineFile(name="MANIFEST-000001", data=SPINS)
    assert "CorruptFile" in str(opener.open(replace(EMPTY, inline_files=files)))


@hostile
@given(data=st.data())
@pytest.mark.long("half a second", runs_in="ci")
def test_changed_rocksdb_manifests_with_right_checksums_are_refused_or_opened(
    opener: Opener, shard: Any, data: st.DataObject
) -> None:
    """RocksDB believes what a record says, once its checksum is right: a great log number crashed it."""
    _, manifest = shard
    files = list(manifest.inline_files)
    at = next(n for n, file in enumerate(files) if file.name.startswith("MANIFEST-"))
    records = [bytearray(record) for record in rocksdb_manifest._records(files[at].data)]
    changed = data.draw(st.sampled_from([record for record in records if record]))
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    files[at] = replace(files[at], data=log_of(*map(bytes, records)))
    opener.open(replace(manifest, inline_files=tuple(files)))


@pytest.mark.parametrize(
    "current", [b"MANIFEST-../../../etc/passwd\n", b"/etc/passwd\n", b"MANIFEST-000004", b"", b"\xff" * 16]
)
def test_a_store_with_an_invalid_current_file_is_refused(shard: Any, tmp_path: Path, current: bytes) -> None:
    """RocksDB opens the file that CURRENT names, wherever that is."""
    storage, manifest = shard
    files = tuple(replace(f, data=current) if f.name == "CURRENT" else f for f in manifest.inline_files)
    with pytest.raises(CorruptFile, match="CURRENT"):
        restore_shard(
            manifest.key_groups, [replace(manifest, inline_files=files)], storage, tmp_path / "db", EngineOptions()
        )
    assert not (tmp_path / "db").exists()


@pytest.mark.parametrize("name", ["../000009.sst", "a/000009.sst", "a\\000009.sst", "..", ".", ""])
def test_no_file_of_a_manifest_is_written_outside_of_the_folder(shard: Any, tmp_path: Path, name: str) -> None:
    """The decoder of manifests refuses such names before; a restore does not rely on that."""
    storage, manifest = shard
    files = (*manifest.inline_files, replace(manifest.inline_files[0], name=name))
    with pytest.raises(InvariantViolated, match="outside of"):
        restore_shard(
            manifest.key_groups, [replace(manifest, inline_files=files)], storage, tmp_path / "db", EngineOptions()
        )
    assert not [*tmp_path.iterdir()]


@hostile
@given(st.binary(max_size=200), st.integers(-5, 5), st.booleans())
def test_a_shard_manifest_with_wrong_size_or_content_is_refused(data: bytes, more: int, right: bool) -> None:
    storage = MemoryStorage()
    data = data if right else record_codec.encode(next(v for v in VALUES if isinstance(v, ShardManifest)))
    storage.create("shared/a/m", data)
    size_bytes, crc32c = len(data) + (0 if right else more), google_crc32c.value(data) ^ (not right and not more)
    handle = Handle(path="shared/a/m", size_bytes=size_bytes, crc32c=crc32c)
    with pytest.raises(CorruptFile):
        manifest_of(FiledShard(shard=0, manifest=handle), storage)


# --- segments ------------------------------------------------------------------------------------------------------------------------

_HEAD = struct.Struct(">BQII")


def block(kind: int, count: int, raw_size: int, stored: bytes, stored_size: int | None = None) -> bytes:
    """A block with any head and a checksum that fits."""
    head = _HEAD.pack(kind, count, raw_size, len(stored) if stored_size is None else stored_size)
    return head + struct.pack(">I", google_crc32c.extend(google_crc32c.value(head), stored)) + stored


sizes = st.sampled_from([0, 1, 7, 8, 100, 2**20, 2**31, 2**32 - 1])
raws = st.binary(max_size=64) | st.just(b"\x00\x00\x00\x01\xff\xff\xff\xffk") | st.just(b"\xff" * 16)


@st.composite
def blocks(draw: st.DrawFn) -> bytes:
    raw = draw(raws)
    stored = draw(st.sampled_from([raw, pa.Codec("zstd", 1).compress(raw, asbytes=True)]))
    count = draw(st.sampled_from([0, 1, 2, 2**31, 2**63, 2**64 - 1]))
    claimed = draw(sizes | st.just(len(raw)))
    return block(draw(st.integers(0, 3)), count, claimed, stored, draw(st.none() | sizes))


@hostile
@given(st.lists(blocks(), max_size=4), st.booleans())
def test_segment_blocks_with_wrong_contents_are_refused_or_read(parts: list[bytes], ended: bool) -> None:
    data = changelog.MAGIC + b"".join(parts) + (block(changelog.END, len(parts), 0, b"") if ended else b"")
    with bounded(), suppress(CorruptFile, UnsupportedFormat):
        for _, pairs in changelog.read_segment(io.BytesIO(data), "a segment"):
            assert all(isinstance(first, bytes) for first, _ in pairs)


def test_a_block_that_says_it_is_huge_is_not_read(tmp_path: Path) -> None:
    """A few kilobytes that would fill the memory, as a head says or as zstd makes of them."""
    bomb = pa.Codec("zstd", 1).compress(bytes(300 * 1024 * 1024), asbytes=True)
    assert len(bomb) < 100_000
    for data in (
        block(changelog.ENTRIES, 1, 2**32 - 1, bomb),
        block(changelog.ENTRIES, 1, 9, bomb),
        block(changelog.ENTRIES, 1, 9, b"", stored_size=2**32 - 1),
    ):
        (tmp_path / "segment").write_bytes(changelog.MAGIC + data)
        before = pa.default_memory_pool().max_memory()
        with bounded(), (tmp_path / "segment").open("rb") as file, pytest.raises(CorruptFile):
            list(changelog.read_segment(file, "a segment"))
        assert pa.default_memory_pool().max_memory() - before < MOST_BYTES


# --- canonical files -----------------------------------------------------------------------------------------------------------------

DESCRIPTOR = next(d for d in STATES if d.name == "value")
SCHEMA = state_schema(DESCRIPTOR, parse_struct(KEY_SCHEMA))


def canonical_file() -> bytes:
    rows = [
        {
            "key": {"k": f"k{n}"},
            "value": {"n": n, "s": "x" * n},
            "expires_at_ms": None,
            "key_group": n,
            "schema_version": 1,
        }
        for n in range(20)
    ]
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), file, compression="zstd")
    return file.getvalue()


CANONICAL = canonical_file()


@hostile
@given(data=st.data())
def test_a_canonical_file_with_changed_bytes_is_refused_or_read(data: st.DataObject) -> None:
    """Its checksum would show it; here it is what Parquet's own metadata makes of it."""
    changed = bytearray(CANONICAL)
    footer = len(changed) - 8 - int.from_bytes(changed[-8:-4], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(footer, len(changed) - 1) | st.integers(0, len(changed) - 1))
        changed[at] = data.draw(st.integers(0, 255))
    with TemporaryDirectory() as folder, suppress(CorruptFile, UnsupportedFormat):
        file = Path(folder, "file.parquet")
        file.write_bytes(changed)
        for table in read_tables(file, SCHEMA, KeyGroupRange(first=0, last=5), "a file"):
            table.validate(full=True)


# --- schemas, keys and rows ----------------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.sampled_from(NASTY) | st.sampled_from(["struct", "array", "map", "long", "decimal(99999999999,1)", "decimal(٣,١)", "udt"]),
    lambda of: st.lists(of, max_size=3)
    | st.dictionaries(
        st.sampled_from(["type", "fields", "name", "nullable", "elementType", "containsNull", "keyType", "valueType", "metadata"]), of
    ),
    max_leaves=12,
)  # fmt: skip


@hostile
@given(json_values)
def test_any_json_is_parsed_as_a_schema_or_refused(value: Any) -> None:
    with suppress(StateSchemaError):
        parse_struct(struct_of(a=value))
    with suppress(StateSchemaError):
        parse_struct(value)


@pytest.mark.long("half a second", runs_in="ci")
def test_a_schema_nested_too_deeply_is_refused() -> None:
    value: Any = "long"
    for _ in range(5_000):
        value = array(value)
    with pytest.raises(StateSchemaError):
        parse_struct(struct_of(a=value))


ROWS = parse_struct(struct_of(a=array("long"), m=mapping("string", "binary"), d="decimal(38,2)", s="string"))


@hostile
@given(st.data())
def test_decoding_rows_and_keys_with_false_lengths_takes_bounded_memory(data: st.DataObject) -> None:
    """Anywhere in a row or a key: no memory is taken for what is only claimed."""
    codec = RowCodec("x", ROWS, 1)
    encoded = bytearray(codec.encode(([1, 2, None], {"k": b"v"}, None, "text")))
    at, size = data.draw(st.integers(2, len(encoded) - 1)), data.draw(st.sampled_from([1, 2, 4, 8]))
    encoded[at : at + size] = data.draw(st.sampled_from([b"\xff", b"\x7f", b"\x00"])) * size
    with bounded(), suppress(CorruptFile, UnsupportedFormat):
        codec.decode(bytes(encoded))
    keys = KeyCodec(parse_struct(KEY_SCHEMA))
    with bounded(), suppress(CorruptFile, UnsupportedFormat):
        keys.decode(bytes(encoded))
