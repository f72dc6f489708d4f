"""Records decode to exactly what was encoded, or not at all."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import random
import sys
import tomllib
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from state_backend.formats import paths, record_codec
from state_backend.values import release
from state_backend.values.errors import CorruptRecord, UnsupportedFormat, UsageError
from state_backend.values.handles import Handle
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.records import (
    FiledShard,
    InlineShard,
    InSegment,
    OutputFile,
    Prepared,
    Record,
    ShardChanges,
    ShardManifest,
    ShardRef,
)
from state_backend.values.release import RELEASE
from state_backend.values.retention import AllOf, AnyOf, KeepLast, KeepPerDay, KeepQuarantined, KeepYounger
from tests.support.checkpoints import content, day, record
from tests.support.record_examples import ALL, RECORD, VALUES

REPOSITORY = Path(__file__).parents[2]


def resealed(change: Callable[[dict[str, Any]], Any], value: Any = RECORD) -> bytes:
    """An encoding whose body was changed, with the checksum made right again: what a hostile writer would do."""
    envelope = json.loads(record_codec.encode(value))
    change(envelope["body"])
    body = json.dumps(envelope["body"], sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    envelope["crc32c"] = f"{google_crc32c.value(body):08x}"
    return json.dumps(envelope, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def test_a_policy_is_found_by_its_tag_and_in_older_records_by_its_fields() -> None:
    policies = (KeepLast(3), KeepPerDay(4), KeepYounger(timedelta(hours=5)), KeepQuarantined(6), AllOf((KeepLast(1),)))
    tagged = replace(RECORD, content=replace(RECORD.content, retention=AnyOf(policies)))

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without(inner) for name, inner in value.items() if name != "policy"}
        return [without(inner) for inner in value] if isinstance(value, list) else value

    old = resealed(lambda b: b["content"].update(retention=without(b["content"]["retention"])), tagged)
    assert b'"policy":"AnyOf"' in record_codec.encode(tagged) and b'"policy"' not in old
    assert (
        record_codec.decode(old, "c", Record) == record_codec.decode(record_codec.encode(tagged), "c", Record) == tagged
    )


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_every_kind_of_record_survives_encode_and_decode(value: Any) -> None:
    """F64: metadata of every kind survives encoding, byte for byte the second time too."""
    data = record_codec.encode(value)
    decoded = record_codec.decode(data, "p", *ALL)
    assert decoded == value and record_codec.encode_and_decode(value) == (data, decoded)
    assert type(decoded) is type(value)
    assert record_codec.encode(decoded) == data


FILE = Handle(path="shared/a/1-0-0.manifest", size_bytes=7, crc32c=9)
FILE_JSON = '{"crc32c":9,"path":"shared/a/1-0-0.manifest","size_bytes":7}'
CHANGES = ShardChanges(segments=(), key_group_states=())
CHANGES_JSON = '{"key_group_states":[],"segments":[]}'
WHERE = InSegment(offset=1, changes=2, content_bytes=3)
WHERE_JSON = '{"changes":2,"content_bytes":3,"offset":1}'
EMPTY = ShardManifest(
    shard=1, key_groups=KeyGroupRange(first=0, last=7), files=(), inline_files=(), segments=(), key_group_states=()
)
EMPTY_JSON = (
    '{"files":[],"inline_files":[],"key_group_states":[],"key_groups":{"first":0,"last":7},"segments":[],"shard":1}'
)


@pytest.mark.parametrize(
    ("ref", "inline", "manifest", "changes", "in_segment"),
    [
        (InlineShard(shard=1, inline=EMPTY), EMPTY_JSON, "null", "null", "null"),
        (FiledShard(shard=1, manifest=FILE), "null", FILE_JSON, "null", "null"),
        (FiledShard(shard=1, manifest=FILE, changes=CHANGES), "null", FILE_JSON, CHANGES_JSON, "null"),
        (FiledShard(shard=1, manifest=FILE, in_segment=WHERE), "null", FILE_JSON, "null", WHERE_JSON),
        (
            FiledShard(shard=1, manifest=FILE, changes=CHANGES, in_segment=WHERE),
            *("null", FILE_JSON, CHANGES_JSON, WHERE_JSON),
        ),
    ],
    ids=["inline", "file", "changes", "segment", "segment-changes"],
)
def test_shard_json_has_five_fields(ref: ShardRef, inline: str, manifest: str, changes: str, in_segment: str) -> None:
    """All forms have the same five fields."""
    filed = record(1, day(1), parallelism=2, shards=(InlineShard(shard=0, inline=replace(EMPTY, shard=0)), ref))
    now = (
        f'{{"changes":{changes},"in_segment":{in_segment},"inline":{inline},"manifest":{manifest},"shard":1}}'.encode()
    )
    data = record_codec.encode(filed)
    assert data.count(now) == 1
    assert record_codec.decode(data, "p", Record) == filed


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: b.pop("retained"), "retained"),
        (lambda b: b["content"].pop("digest"), "content.digest"),
        (lambda b: b["content"].update(digest="7"), "content.digest"),
        (lambda b: b["content"].update(digest=7.0), "content.digest"),
        (lambda b: b["content"].update(parallelism=True), "content.parallelism"),
        (lambda b: b["content"].update(kind="other"), "content.kind"),
        (
            lambda b: b["content"]["shards"][0]["inline"]["segments"][0].update(handle=None),
            "either in a file or inline",
        ),
        (
            lambda b: b["content"]["shards"][0]["inline"]["segments"][0].update(data="AA=="),
            "either in a file or inline",
        ),
        (lambda b: b["content"]["shards"][0]["inline"].pop("segments"), "inline.segments"),
        (lambda b: b["content"]["shards"][0].pop("inline"), "shards.0"),
        (lambda b: b["content"]["shards"][0].update(inline=None), "shards.0"),
        (lambda b: b["content"]["shards"][0].update(changes={"segments": [], "key_group_states": []}), "shards.0"),
        (lambda b: b["content"]["shards"][1].update(inline=b["content"]["shards"][0]["inline"]), "shards.1"),
        (lambda b: b["content"]["shards"][1]["manifest"].pop("crc32c"), "manifest.crc32c"),
        (
            lambda b: b["content"]["shards"][0]["inline"]["key_group_states"][0].update(size_bytes=-1),
            "size_bytes is -1",
        ),
        (lambda b: b["content"].update(retention={"count": -1}), "expected a whole number"),
        (lambda b: b["content"].update(retention={"count": 1, "days": 1}), "content.retention"),
        (lambda b: b["content"].update(retention={"count": 1, "policy": "KeepPerDay"}), "content.retention"),
        (lambda b: b.update(id=None), "id"),
        (lambda b: b["content"]["interval"].update(end="2024-01-01T00:00:00"), "no time zone"),
        (lambda b: b["content"]["interval"].update(end=b["content"]["interval"]["start"]), "start < end"),
    ],
)
def test_a_body_of_another_shape_is_refused(change: Callable[[dict[str, Any]], Any], says: str) -> None:
    with pytest.raises(CorruptRecord, match=f"^some/path: .*{says}"):
        record_codec.decode(resealed(change), "some/path", Record)


def test_the_fast_reader_and_the_writer_refuse_what_no_reader_accepts() -> None:
    def impossible(body: dict[str, Any]) -> None:
        body["content"]["totals"]["keys"] = -1

    with pytest.raises(CorruptRecord, match=r"^some/path: keys is -1"):
        record_codec.decode_content(resealed(impossible), "some/path")
    position: Any = reduce(lambda inner, _: {"deep": inner}, range(210), {})
    with pytest.raises(UsageError, match=r"can't write prepared: .*recursion"):
        record_codec.encode_and_decode(Prepared(h0=0, content=content(day(1), "a", source_position=position)))


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../other/x", "a/../../x", "a//b", "", ".", "a\\b", "a\nb", ".tmp/x", "a/./b"]
)
def test_no_handle_leads_out_of_its_root(path: str) -> None:
    """A record from an untrusted bucket can't name files elsewhere, at any depth."""
    for handle in (
        lambda content: content["outputs"][0]["handle"],
        lambda content: content["shards"][0]["inline"]["files"][0]["handle"],
        lambda content: content["shards"][0]["inline"]["segments"][0]["handle"],
        lambda content: content["shards"][1]["manifest"],
    ):
        data = resealed(lambda body, of=handle: of(body["content"]).update(path=path))  # type: ignore[misc]
        with pytest.raises(CorruptRecord, match="not a storage path"):
            record_codec.decode(data, "p", Record)


@pytest.mark.parametrize(
    ("version", "says"),
    [
        *((version, "its format is") for version in (b"0", b'"1"', b"null", b"true")),
        (b'1,"format":1', "named twice"),
        (b'2,"format":1', "named twice"),
    ],
)
def test_an_invalid_or_repeated_format_version_is_refused(version: bytes, says: str) -> None:
    """S27: the format version is recorded and never guessed."""
    data = record_codec.encode(RECORD).replace(b'"format":1', b'"format":' + version)
    with pytest.raises(CorruptRecord, match=says):
        record_codec.decode(data, "p", Record)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda e: e.update(format=2, release="0.7.0"),
            r"Cairn 0\.7\.0 wrote format 2; .* reads format 1\n.*Use Cairn 0\.7\.0 or",
        ),
        (
            lambda e: e.update(format=2, release="1!weird"),
            r"Cairn 1!weird wrote format 2; .*\n.*Use Cairn 1!weird or a newer",
        ),
        (lambda e: e.update(format=2), r"wrote format 2; .* If only this build ever wrote here, the file is damaged"),
        (
            lambda e: (e.update(format=2), e.pop("release")),
            r"another release of Cairn wrote format 2; .*Use the release of Cairn that",
        ),
        (lambda e: (e.update(format=2, sha256=e.pop("crc32c")), e.pop("body")), "wrote format 2"),
        (
            lambda e: e.update(cairn="index", release="0.7.0"),
            r"Cairn 0\.7\.0 wrote a 'index' record; .*Use Cairn 0\.7\.0",
        ),
        (lambda e: e["body"].update(extra=1), "wrote the field extra; .* reads format 1 without that field"),
        (lambda e: e["body"]["content"].update(extra=1), "the field content.extra;"),
        (lambda e: e["body"]["content"]["shards"][0].update(extra=1), "the field content.shards.0.InlineShard.extra;"),
        (
            lambda e: e["body"]["content"].update(retention={"any_of": [{"no_such_policy": 1}]}),
            r"the field content\.retention.*no_such_policy;",
        ),
    ],
)
def test_the_error_for_a_record_of_another_release_names_the_release_to_use(
    change: Callable[[dict[str, Any]], Any], says: str
) -> None:
    """Nobody is told to put a copy in the place of a good record."""
    envelope = json.loads(record_codec.encode(RECORD))
    change(envelope)
    if "crc32c" in envelope:
        compact = json.dumps(envelope["body"], sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        envelope["crc32c"] = f"{google_crc32c.value(compact):08x}"
    with pytest.raises(UnsupportedFormat, match=f"(?s)^some/path: .*{says}") as raised:
        record_codec.decode(json.dumps(envelope).encode(), "some/path", Record)
    assert f"this is Cairn {RELEASE}" in str(raised.value)
    assert "copy" not in str(raised.value)


def test_the_release_is_that_of_the_package() -> None:
    """The build writes both from the git tags. Sources on the path that were never built have the fallback of pyproject.toml."""
    fallback = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools_scm"]["fallback_version"]
    assert RELEASE in (importlib.metadata.version("cairn-state"), fallback)


@pytest.mark.parametrize("part", ["", "# file generated\nversion: str\n", "version = '0."])
def test_a_partial_version_file_gives_the_fallback(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_version.py").write_text(part)
    monkeypatch.setattr("state_backend.values.__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "state_backend.values._version", raising=False)
    assert release._version() == "0.1.dev0"


@pytest.mark.parametrize(
    ("wrote", "reads", "newer"),
    [
        ("0.2.0", "0.1.0", True),
        ("0.10.dev1", "0.9.dev3", True),
        ("0.1.0", "0.1.0", False),
        ("0.1.1.dev5", "0.1.1", False),
        ("0.0.9", "0.1.dev9", False),
        ("weird", "0.1.0", True),
    ],
)
def test_releases_are_compared_by_their_version_numbers(
    wrote: str, reads: str, newer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "RELEASE", reads)
    assert release.is_newer(wrote) == newer


def test_a_record_of_an_unexpected_type_is_refused() -> None:
    with pytest.raises(CorruptRecord, match=r"expected a prepared record, found 'checkpoint'"):
        record_codec.decode(record_codec.encode(RECORD), "p", Prepared)


def test_a_record_of_a_thousand_shards_stays_small() -> None:
    """Shards of 40 attempts and an output of each shard take at most 64 KiB."""
    chance = random.Random(1)

    def handle(path: str) -> Handle:
        return Handle(path=path, size_bytes=chance.randrange(10**5, 10**6), crc32c=chance.getrandbits(32))

    attempts = [str(uuid.UUID(int=chance.getrandbits(128))) for _ in range(40)]
    files = [handle(paths.shared(chance.choice(attempts), shard, 7, 0, "manifest")) for shard in range(1000)]
    large = record(
        40,
        day(1),
        parallelism=1000,
        max_parallelism=4096,
        shards=tuple(FiledShard(shard=n, manifest=file) for n, file in enumerate(files)),
        outputs=tuple(
            OutputFile(handle=handle(paths.output(day(1), attempts[-1], n, 7)), rows=chance.randrange(10**4))
            for n in range(1000)
        ),
    )
    data = record_codec.encode(large)
    assert len(data) <= 64 * 1024
    assert record_codec.decode(data, "p", *ALL) == large
    assert json.loads(gzip.decompress(data))["cairn"] == "checkpoint"


@pytest.mark.long("seconds", runs_in="ci")
def test_a_decompression_bomb_is_refused() -> None:
    for bomb in (gzip.compress(bytes(65 * 2**20), mtime=0), record_codec._gzip(bytes(65 * 2**20))):
        with pytest.raises(CorruptRecord, match="too large"):
            record_codec.decode(bomb, "p", *ALL)


def test_a_tombstone_stays_small() -> None:
    assert len(record_codec.encode(VALUES[3])) < 1024


def test_a_record_above_the_size_limit_is_neither_written_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_codec, "MAX_BYTES", 10)
    with pytest.raises(UsageError, match="Cairn reads at most 10: nothing is written"):
        record_codec.encode(RECORD)
    with pytest.raises(CorruptRecord, match=r"checkpoints/1.json: 11 bytes; a record has at most 10"):
        record_codec.decode(b"x" * 11, "checkpoints/1.json", Record)
