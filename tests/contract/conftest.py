"""Fixtures of the contracts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import deltalake
import duckdb
import psycopg
import pytest

from cairn.sinks.table_sink import TableSink
from tests.support.bigquery_server import BigQueryServer, bigquery_server
from tests.support.clicks_pipeline import Rows, catalog, iceberg
from tests.support.clicks_table import sink_of
from tests.support.postgres_server import postgres_server
from tests.support.sink_calls import SECONDS


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A PostgreSQL."""
    with postgres_server() as address:
        yield address


@pytest.fixture(scope="module")
def stand_in() -> Iterator[BigQueryServer]:
    """A server that answers like BigQuery."""
    with bigquery_server() as server:
        yield server


@pytest.fixture(params=["delta", *(pytest.param(kind, marks=SECONDS) for kind in ("bigquery", "iceberg", "postgres"))])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sink(kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TableSink:
    address = ""
    if kind == "bigquery":
        stand_in = request.getfixturevalue("stand_in")
        stand_in.forget()
        monkeypatch.setattr(import_module("cairn.sinks.bigquery"), "_WAIT_S", 0.05)
        address = stand_in.url
    if kind == "iceberg":
        return iceberg(tmp_path)
    if kind == "postgres":
        address = request.getfixturevalue("server")
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute("DROP TABLE IF EXISTS clicks, cairn_publications")
    return sink_of(kind, tmp_path, address)


@pytest.fixture
def read(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[], Rows]:
    """Reads the table without the sink: interval and output columns of all rows, sorted."""
    columns = ["interval_start", "interval_end", "user", "clicks"]
    if kind == "bigquery":
        stand_in = request.getfixturevalue("stand_in")
        return lambda: stand_in.rows("clicks", columns)
    if kind == "delta":

        def read_delta() -> Rows:
            if not (tmp_path / "table").exists():
                return []
            found = deltalake.DeltaTable(f"file://{tmp_path}/table").to_pyarrow_table()
            if "user" not in found.column_names:
                assert len(found) == 0
                return []
            found = found.select(columns)
            return sorted(tuple(row.values()) for row in found.to_pylist())

        return read_delta
    if kind == "iceberg":

        def read_iceberg() -> Rows:
            with catalog(tmp_path) as opened:
                table = opened.load_table("shop.clicks") if opened.table_exists("shop.clicks") else None
                if table is None or table.current_snapshot() is None:
                    return []
                found = table.scan().to_arrow()
            if "user" not in found.column_names:
                assert len(found) == 0
                return []
            return duckdb.sql(
                "SET TimeZone = 'UTC'; SELECT interval_start, interval_end, user, clicks FROM found ORDER BY ALL"
            ).fetchall()

        return read_iceberg
    address = request.getfixturevalue("server")

    def read_postgres() -> Rows:
        with psycopg.connect(address, options="-c timezone=UTC") as connection:
            if connection.execute("SELECT to_regclass('clicks')").fetchone() == (None,):
                return []
            names = ", ".join(f'"{name}"' for name in columns)
            return sorted(connection.execute(f"SELECT {names} FROM clicks".encode()).fetchall())

    return read_postgres
