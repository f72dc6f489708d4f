"""The names of datasets in lineage events, and what an event says about a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from openlineage.client.naming import dataset as named

from cairn_operators.lineage_datasets import Dataset, Field, checkpoint_facet, dataset_of, inputs_of, outputs_of
from tests.support.checkpoints import day, record
from tests.support.openlineage_schemas import SCHEMA, output
from tests.support.schema_json import struct

NAMES: list[tuple[str, Any]] = [
    ("file:///data/clicks/", named.LocalFileSystem("/data/clicks")),
    ("file://nas/data", named.RemoteFileSystem("nas", "/data")),
    ("s3://lake/a/b", named.S3("lake", "a/b")),
    ("s3a://KEY:SECRET@lake/a?sig=SECRET", named.S3("lake", "a")),
    ("GS://lake/a b", named.GCS("lake", "a b")),
    ("abfss://box@store.dfs.core.windows.net/a", named.ABFSS("box", "store", "a")),
    ("hdfs://node:8020/a", named.HDFS("node", "8020", "/a")),
    ("postgresql://me:SECRET@db/shop/public/orders", named.Postgres("db", "5432", "shop", "public", "orders")),
    ("postgres://db:6432/shop.public.orders?password=SECRET", named.Postgres("db", "6432", "shop", "public", "orders")),
    ("postgres://[::1]:5432/shop/public/orders", named.Postgres("[::1]", "5432", "shop", "public", "orders")),
    ("mysql://db/shop/orders", named.MySQL("db", "3306", "shop", "orders")),
    ("kafka://broker/clicks", named.Kafka("broker", "9092", "clicks")),
    ("bigquery://acme/shop/orders", named.BigQuery("acme", "shop", "orders")),
]


@pytest.mark.parametrize(("url", "naming"), NAMES)
def test_a_url_has_the_name_of_openlineages_own_client(url: str, naming: Any) -> None:
    assert dataset_of(url) == Dataset(namespace=naming.get_namespace(), name=naming.get_name())


@pytest.mark.parametrize(
    "text",
    [
        *("", "2024-01-01", "clicks/a.parquet", "/data/a", "s3://lake", "s3:///a", "https://example.com/a", "file:///"),
        # A password with a slash is not in the place of a password.
        *("postgres://me:SEC/RET@db/shop/orders", "s3a://KEY:SEC/RET@lake/a", "abfss://me:SECRET@box/a"),
    ],
)
def test_texts_that_are_no_dataset_url_give_no_dataset(text: str) -> None:
    assert dataset_of(text) is None


POSITIONS: list[tuple[dict[str, Any], list[tuple[str, str, str | None]]]] = [
    ({}, []),
    ({"clicks": "2024-01-01T05", "counts": {"rows": 3}}, []),
    ({"clicks": "s3://lake/clicks/2024-01-01"}, [("s3://lake", "clicks/2024-01-01", None)]),
    # Files are their folder, once.
    (
        {"files": [{"path": f"gs://lake/clicks/part-{n}.snappy.parquet", "size_bytes": n} for n in (1, 2)]},
        [("gs://lake", "clicks", None)],
    ),
    ({"s3://lake/rates/eur.json": "a-hash"}, [("s3://lake", "rates", None)]),
    ({"file": "s3://lake/only.csv"}, [("s3://lake", "only.csv", None)]),
    # A table of a database is no file, whatever its name.
    ({"table": "postgres://db/shop/public.orders"}, [("postgres://db:5432", "shop.public.orders", None)]),
    (
        {
            "orders": {"table": "s3://lake/orders", "version": 41},
            "rates": {"table": "s3://lake/rates", "version": "v2"},
        },
        [("s3://lake", "orders", "41"), ("s3://lake", "rates", "v2")],
    ),
    # The version belongs to its own object.
    ({"version": 1, "orders": {"table": "s3://lake/orders"}}, [("s3://lake", "orders", None)]),
    ({"table": "s3://lake/orders", "version": True}, [("s3://lake", "orders", None)]),
    # Two versions of a table are none.
    (
        {"before": {"t": "s3://lake/orders", "version": 1}, "after": {"t": "s3://lake/orders", "version": 2}},
        [("s3://lake", "orders", None)],
    ),
]


@pytest.mark.parametrize(("position", "expected"), POSITIONS)
def test_lineage_inputs_are_the_urls_in_the_source_offset(
    position: dict[str, Any], expected: list[tuple[str, str, str | None]]
) -> None:
    assert [(one.namespace, one.name, one.version) for one in inputs_of(position)] == expected


COLUMNS = (
    Field(name="user", type="string"),
    Field(
        name="pages",
        type="array",
        fields=(Field(name="_element", type="struct", fields=(Field(name="url", type="string"),)),),
    ),
    Field(
        name="sums", type="map", fields=(Field(name="key", type="string"), Field(name="value", type="decimal(10,2)"))
    ),
    Field(name="other", type="udt"),
)
INTERVAL = (Field(name="interval_start", type="timestamp"), Field(name="interval_end", type="timestamp"))


def test_outputs_are_the_folder_and_the_tables() -> None:
    outputs = (output("a", 10, 2), output("b", 5, 1), output("c", 7, 9, late=True))
    made = replace(record(4, day(2), 3, outputs=outputs), output_schemas=(struct(), SCHEMA))
    tables = [("postgres://db:5432/shop/public/clicks", False), ("bigquery://shop/web/late", True)]
    folder, table, late = outputs_of(made, "s3://lake/state/clicks", tables)
    assert folder == Dataset(
        namespace="s3://lake", name="state/clicks/output", version="4", fields=COLUMNS, rows=3, size_bytes=15, files=2
    )
    assert table == Dataset(
        namespace="postgres://db:5432", name="shop.public.clicks", fields=(*COLUMNS, *INTERVAL), rows=3
    )
    assert late == Dataset(namespace="bigquery", name="shop.web.late", rows=9)


def test_an_older_record_has_no_schema_and_a_root_may_be_a_path() -> None:
    (folder,) = outputs_of(record(1, day(1)), "/data/state/clicks")
    assert (folder.namespace, folder.name, folder.fields) == ("file", "/data/state/clicks/output", None)
    assert outputs_of(record(1, day(1)), "memory://state/clicks", [("elsewhere://t", False)]) == ()


def test_the_facet_names_checkpoint_base_attempt_and_state() -> None:
    made = record(4, day(2), 3, pipeline="clicks", attempt="an-attempt", digest=255)
    assert checkpoint_facet(made) == {
        "pipeline": "clicks",
        "checkpoint": 4,
        "baseCheckpoint": 3,
        "attempt": "an-attempt",
        "stateDigest": "00000000000000ff",
        "intervalStart": "2024-01-02T00:00:00+00:00",
        "intervalEnd": "2024-01-03T00:00:00+00:00",
    }
