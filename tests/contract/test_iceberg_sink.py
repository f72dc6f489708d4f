"""Tables of Iceberg: calls that die, catalogs that can't tell, nested columns, and S3."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from pyiceberg import exceptions
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.schema import Schema
from pyiceberg.types import IntegerType, NestedField, StringType, TimestamptzType

from cairn import sinks
from cairn.errors import UsageError
from cairn.sinks.table_sink import Publication, hash_of_rows
from tests.support.clicks_pipeline import catalog, iceberg
from tests.support.clicks_table import OWNER, Killed, die_at, hour, iceberg_properties, publish
from tests.support.s3_server import BUCKET, SEAWEEDFS, s3_server
from tests.support.sink_calls import SECONDS


@SECONDS
@pytest.mark.parametrize("rows", [1, pytest.param(0, marks=pytest.mark.long("ten seconds"))])
def test_killed_publish_is_completed_by_the_next(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each request to the catalog or the files, one case dies before it and one after. Then the sink is called again."""
    old, new = (
        pa.table({"user": users, "clicks": range(len(users))}) for users in (["old"], ["ann", "bob"][: 2 * rows])
    )
    died, at = True, 0
    while died:
        folder = tmp_path / str(at)
        folder.mkdir()
        sink = iceberg(folder)
        publish(sink, hour(0, 2), 1, old)
        with monkeypatch.context() as patched:
            die_at(patched, at, REQUESTS_OF_ICEBERG)
            try:
                publish(sink, hour(0), 2, new)
                died = False
            except Killed:
                pass
        counts = sink.row_counts()
        assert counts in ({hour(0, 2): 1}, {hour(0): 2} if rows else {}), at
        assert died or counts == ({hour(0): 2} if rows else {})
        publish(sink, hour(0, 2), 1, old)
        assert sink.row_counts() == counts, "an old call changed the table"
        publish(sink, hour(0), 2, new)
        assert sink.row_counts() == ({hour(0): 2} if rows else {}), at
        before = snapshots(folder)
        publish(sink, hour(0), 2, new)
        publish(sink, hour(0, 2), 1, old)
        assert snapshots(folder) == before, at
        at += 1
    assert at > 10


REQUESTS_OF_ICEBERG = [(SqlCatalog, name) for name in ("load_table", "commit_table", "create_table")]
REQUESTS_OF_ICEBERG += [(PyArrowFileIO, name) for name in ("new_output", "new_input")]


def snapshots(tmp_path: Path) -> list[tuple[int, str | None]]:
    """The snapshots of the table, each with the checkpoint in its summary."""
    with catalog(tmp_path) as opened:
        found = opened.load_table("shop.clicks").snapshots()
    return [(one.snapshot_id, one.summary["cairn.checkpoint"] if one.summary else None) for one in found]


@pytest.mark.parametrize("error", [exceptions.CommitStateUnknownException, exceptions.CommitFailedException])
@pytest.mark.parametrize("landed", [True, False])
def test_commit_with_unknown_result_is_repeated_only_if_it_did_not_land(
    landed: bool, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal may be that of a repeated request: the HTTP client repeats a request whose answer was lost."""
    sink, commit, calls = iceberg(tmp_path), SqlCatalog.commit_table, []

    def unknown(*arguments: Any) -> Any:
        calls.append(arguments)
        if landed or len(calls) > 1:
            made = commit(*arguments)
        if len(calls) == 1:
            raise error("502 Bad Gateway, or 409 Conflict")
        return made

    monkeypatch.setattr(SqlCatalog, "commit_table", unknown)
    publish(sink, hour(0), 1, pa.table({"user": ["ann"], "clicks": [1]}))
    assert sink.row_counts() == {hour(0): 1}
    assert [checkpoint for _, checkpoint in snapshots(tmp_path)] == ["1"]
    assert len(calls) == (1 if landed else 2)


@SECONDS
def test_older_publish_does_not_replace_rows_of_a_newer_one_committed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process publishes a newer output of the interval, between this call's read and its commit. Both outputs may be empty."""
    sink, commit = iceberg(tmp_path), SqlCatalog.commit_table
    user = pa.table({"user": ["ann"], "clicks": [1]})
    publish(sink, hour(1), 1, user)
    for n, (slow, fast) in enumerate([(0, 1), (1, 0), (1, 1), (0, 0)]):
        interval, older = hour(2 + n), 10 * n + 2
        newer = partial(publish, sink, interval, older + 1, user.slice(0, fast))

        def overtaken(*arguments: Any, _newer: Callable[[], None] = newer) -> Any:
            monkeypatch.setattr(SqlCatalog, "commit_table", commit)
            _newer()
            return commit(*arguments)

        monkeypatch.setattr(SqlCatalog, "commit_table", overtaken)
        publish(sink, interval, older, user.slice(0, slow))
        assert sink.row_counts().get(interval, 0) == fast
        assert snapshots(tmp_path)[-1][1] == str(older + 1)
    monkeypatch.setattr(import_module("cairn.sinks.iceberg"), "_WAIT_S", 0)

    for error, calls in ((exceptions.CommitFailedException, 30), (exceptions.CommitStateUnknownException, 3)):
        failing = Mock(side_effect=error("failed"))
        monkeypatch.setattr(SqlCatalog, "commit_table", failing)
        with pytest.raises(error):
            publish(sink, hour(9), 99, user)
        assert failing.call_count == calls


def test_publish_to_an_existing_table_keeps_its_own_rows_and_partitioning(tmp_path: Path) -> None:
    """Own types, no partitions, other rows, files of several intervals, and manifests that pyiceberg merges at once."""
    sink = iceberg(tmp_path)
    schema = Schema(
        NestedField(1, "note", StringType(), required=False),
        NestedField(2, "clicks", IntegerType(), required=False),
        NestedField(3, "interval_start", TimestamptzType(), required=False),
        NestedField(4, "interval_end", TimestamptzType(), required=False),
    )
    own = {"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "2"}
    rows = pa.table({"user": ["ann", "bob"], "clicks": [1, 2]})
    with catalog(tmp_path) as opened:
        table = opened.create_table("shop.clicks", schema, properties=own)
        table.append(pa.table({"note": ["mine"]}))
        with pytest.raises(UsageError, match="has rows, but the sink has never written to it"):
            sink.clear(OWNER)
        assert sink.row_counts() == {None: 1}
        for n in range(4):
            publish(sink, hour(n), n + 1, rows)
        table.refresh()
        # Stands in for the owner's compaction: one file, in which a call must rewrite the rows of other intervals.
        table.overwrite(table.scan().to_arrow())
        assert len(table.inspect.files()) == 1
        for n, again in ((1, rows.slice(0, 1)), (2, rows.slice(0, 0)), (5, rows)):
            publish(sink, hour(n), n + 10, again)
        assert sink.row_counts() == {hour(0): 2, hour(1): 1, hour(3): 2, hour(5): 2, None: 1}
        assert hash_of_rows(sink.rows(hour(3), rows.schema)) == hash_of_rows(rows)
        assert [*filter(None, table.refresh().scan().to_arrow()["note"].to_pylist())] == ["mine"]
        assert table.spec().is_unpartitioned()
        sink.clear(OWNER)
        assert len(table.refresh().scan().to_arrow()) == 0
        assert not [name for name in table.properties if name.startswith("cairn.checkpoint")]
    publish(sink, hour(0), 1, rows)
    assert sink.row_counts() == {hour(0): 2}


def test_publish_adds_missing_interval_columns_to_an_existing_table(tmp_path: Path) -> None:
    sink = iceberg(tmp_path)
    with catalog(tmp_path) as opened:
        opened.create_table("shop.clicks", Schema(NestedField(1, "user", StringType(), required=False)))
    assert sink.row_counts() == {}
    publish(sink, hour(0), 1, pa.table({"user": ["ann"]}))
    assert sink.row_counts() == {hour(0): 1}


def test_published_checkpoint_ids_survive_expiry_of_snapshots(tmp_path: Path) -> None:
    """Partitions are days. The owner may expire all old snapshots: the ids stay. Metadata files do not become more and more."""
    sink = iceberg(tmp_path)
    user = pa.table({"user": ["ann"], "clicks": [1]})
    for n in (0, 1, 25):
        publish(sink, hour(n), n + 1, user)
    publish(sink, hour(26), 27, user.slice(0, 0))
    with catalog(tmp_path) as opened:
        table = opened.load_table("shop.clicks")
        assert table.inspect.partitions()["partition"].to_pylist() == [
            {"interval_start_day": date(2024, 1, day)} for day in (2, 1)
        ]
        assert table.properties["cairn.pipeline"] == "clicks@here"
        assert table.properties["cairn.checkpoint.2024-01-02T02:00:00Z/2024-01-02T03:00:00Z"] == "27"
        summary = table.current_snapshot().summary
        assert summary["cairn.interval"] == "2024-01-02T02:00:00Z/2024-01-02T03:00:00Z"
        table.maintenance.expire_snapshots().by_ids([s.snapshot_id for s in table.snapshots()[:-1]]).commit()
        with table.transaction() as transaction:
            transaction.set_properties({"write.metadata.previous-versions-max": "2"})
    sink.publish(Publication(OWNER, hour(0), 1))
    assert sink.row_counts() == {hour(0): 1, hour(1): 1, hour(25): 1}
    for n in range(30, 36):
        publish(sink, hour(n), n, user)
    assert len([*(tmp_path / "warehouse" / "shop" / "clicks" / "metadata").glob("*.metadata.json")]) < 6


def test_nested_columns_of_an_iceberg_table_gain_fields(tmp_path: Path) -> None:
    sink = iceberg(tmp_path)
    narrow = pa.table(
        {"s": pa.array([{"p": 1}], pa.struct([("p", pa.int32())])), "l": pa.array([[1]], pa.list_(pa.int32()))}
    )
    wide = pa.table(
        {
            "s": pa.array([{"p": 2**40, "q": "x"}], pa.struct([("p", pa.int64()), ("q", pa.string())])),
            "l": pa.array([[2**40, None]], pa.list_(pa.int64())),
        }
    )
    for n, rows in enumerate((narrow, wide, narrow)):
        publish(sink, hour(n), n + 1, rows)
    for n, rows in enumerate((narrow, wide, narrow)):
        assert hash_of_rows(sink.rows(hour(n), rows.schema)) == hash_of_rows(rows)
    with pytest.raises(UsageError, match=r"can't hold the column 's' of type struct<p: string>"):
        publish(sink, hour(4), 5, pa.table({"s": pa.array([{"p": "x"}])}))
    required = pa.schema([pa.field("s", narrow.schema.field("s").type), pa.field("n", pa.int64(), nullable=False)])
    publish(sink, hour(4), 5, pa.table([narrow["s"], [1]], schema=required))
    assert sink.row_counts()[hour(4)] == 1


STRUCT = pa.struct([("p", pa.int64()), ("l", pa.list_(pa.int64()))])


@pytest.mark.parametrize(
    ("kind_of_column", "loses"),
    [
        (pa.list_(STRUCT), True),
        (pa.list_(pa.list_(STRUCT)), False),
        (pa.list_(pa.map_(pa.string(), pa.int64())), False),
        (pa.list_(pa.struct([("s", STRUCT)])), True),
        (pa.list_(pa.struct([("l", pa.list_(STRUCT))])), True),
        (pa.map_(pa.string(), STRUCT), True),
        (pa.map_(pa.string(), pa.list_(STRUCT)), False),
        (pa.struct([("l", pa.list_(STRUCT))]), True),
        (pa.struct([("l", pa.list_(pa.int64())), ("s", STRUCT)]), False),
    ],
    ids=str,
)
def test_nested_values_are_read_back_and_nulls_that_pyiceberg_loses_are_refused(
    kind_of_column: pa.DataType, loses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nulls or without, the values come back. pyiceberg loses nulls of some types: a call with a null in such a column fails."""
    sink, pick = iceberg(tmp_path), random.Random(1)
    for n, share in enumerate((0.0, 0.3)):
        column = pa.array([nested(kind_of_column, pick, share) for _ in range(40)], kind_of_column)
        rows = pa.table({"v": column})
        if share and loses:
            with pytest.raises(UsageError, match="'v' has a null instead of a list or map of structs"):
                publish(sink, hour(n), n + 1, rows)
            monkeypatch.setattr(import_module("cairn.sinks.iceberg"), "_loses_nulls", lambda column: False)
        publish(sink, hour(n), n + 1, rows)
        # The refusal can go as soon as pyiceberg keeps these nulls.
        same = hash_of_rows(sink.rows(hour(n), rows.schema)) == hash_of_rows(rows)
        assert same != bool(share and loses)


def nested(kind: pa.DataType, pick: random.Random, nulls: float) -> Any:
    if pick.random() < nulls:
        return None
    if pa.types.is_list(kind):
        return [nested(kind.value_type, pick, nulls) for _ in range(pick.randrange(3))]
    if pa.types.is_map(kind):
        return [(f"k{n}", nested(kind.item_type, pick, nulls)) for n in range(pick.randrange(3))]
    if pa.types.is_struct(kind):
        return {field.name: nested(field.type, pick, nulls) for field in kind}
    return pick.randrange(9)


@pytest.mark.s3
@pytest.mark.long("seconds", runs_in="ci")
@pytest.mark.parametrize("catalog_type", ["sql", "glue"])
def test_publish_on_s3_replaces_rows_of_overlapping_intervals(catalog_type: str, tmp_path: Path) -> None:
    """moto stands in for S3 and Glue. It ignores the version that Glue compares in a commit, so no calls overtake each other here."""
    if catalog_type == "glue" and SEAWEEDFS:
        pytest.skip("SeaweedFS has no Glue")
    with s3_server() as server:
        keys = {
            "access-key-id": "tests",
            "secret-access-key": "tests",
            "region": "us-east-1",
            "endpoint": server.server_url,
        }
        given = {f"{service}.{name}": value for service in ("s3", "glue") for name, value in keys.items()}
        given |= {
            "type": catalog_type,
            "uri": f"sqlite:///{tmp_path}/catalog.db",
            "warehouse": f"s3://{BUCKET}/warehouse",
        }
        with load_catalog("tests", **given) as opened:
            opened.create_namespace("shop")
        sink = sinks.iceberg("shop.clicks", "tests", given)
        rows = pa.table({"user": ["ann", "bob"], "clicks": [1, 2]})
        for interval, n, made in (
            (hour(0), 1, rows),
            (hour(1), 2, rows),
            (hour(0, 2), 3, rows.slice(0, 1)),
            (hour(1), 2, rows),
            (hour(2), 4, rows.slice(0, 0)),
            (hour(3), 5, pa.table({"user": ["cid"], "more": [0.5]})),
        ):
            publish(sink, interval, n, made)
        assert sink.row_counts() == {hour(0, 2): 1, hour(3): 1}
        assert hash_of_rows(sink.rows(hour(0, 2), rows.schema)) == hash_of_rows(rows.slice(0, 1))
        sink.clear(OWNER)
        publish(sink, hour(1), 2, rows)
        assert sink.row_counts() == {hour(1): 2}


def test_error_for_a_missing_namespace_names_the_command_that_creates_it(tmp_path: Path) -> None:
    sink = sinks.iceberg("nowhere.clicks", "tests", iceberg_properties(tmp_path))
    with pytest.raises(UsageError, match=r"'tests' has no namespace 'nowhere'(?s:.*)create_namespace\('nowhere'\)"):
        publish(sink, hour(0), 1, pa.table({"user": ["ann"]}))
