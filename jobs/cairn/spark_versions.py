"""The differences between versions of PySpark, and the private parts of PySpark and pandas that Cairn uses.

No other module asks for a version, imports a private module, or reads an underscore attribute of such objects
(`tests/architecture/test_spark_versions.py`). Modules that take seconds to import are imported where they are used.
"""

from __future__ import annotations

import atexit
import copy
import faulthandler
import os
import signal
import tempfile
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pyarrow as pa
import pyspark
from pyspark.sql import types as t

from state_backend.formats.types import UnsupportedType, parse_struct, walk
from state_backend.values.errors import UsageError

if TYPE_CHECKING:
    import grpc
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession

Version = tuple[int, int]


class Since(NamedTuple):
    """The first version of PySpark that has a feature, and what Cairn does on an older version (`before`)."""

    version: Version
    before: str


SINCE = {
    "timezone of to_arrow_schema": Since((4, 2), "instants are in UTC, and Cairn sets the zone in the Arrow schema"),
    "copies of Connect sessions": Since((4, 1), "each session of a Connect server has Python workers of its own"),
    "arrow_udf": Since((4, 1), "the bytes of variants come from a UDF that gets Python's values, which is slower"),
    "settings that delete shuffle files": Since((4, 1), "there is one, for servers of Spark Connect alone"),
    "file of the fault handler": Since((4, 1), "Cairn opens the file anew and gives it to the fault handler"),
    "time": Since((4, 1), "a schema with this type is refused"),
    "geography": Since((4, 1), "a schema with this type is refused"),
    "geometry": Since((4, 1), "a schema with this type is refused"),
}
OLDEST, NEWEST = (4, 0), (4, 3)
# For each client version, the other server versions of Spark Connect that were tried with it: two intervals, a
# validation, a read of a state table, and an operation that SIGTERM interrupts. On a server of 4.0, `createDataFrame`
# of every newer client fails, and on a server of 4.1 that of the clients 4.2 and 4.3.
TRIED_SERVERS: dict[Version, tuple[Version, ...]] = {
    (4, 0): ((4, 1), (4, 2), (4, 3)),
    (4, 1): ((4, 2), (4, 3)),
    (4, 2): ((4, 3),),
    (4, 3): ((4, 2),),
}


def version_of(text: str) -> Version:
    """Return (major, minor) of a version of Spark, such as (4, 1) for "4.1.1" or (4, 2) for "4.2.0.dev1"."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _version() -> Version:
    """Return the version of Spark that this PySpark belongs to.

    For a vendor's version number, such as 17.3, PySpark's features tell the version.
    """
    if KNOWN:
        return version_of(PYSPARK)
    from pyspark.sql.pandas.types import to_arrow_schema

    if "timezone" in signature(to_arrow_schema).parameters:
        return 4, 2
    return (4, 1) if hasattr(t, "TimeType") else OLDEST


PYSPARK: str = pyspark.__version__
# False for version numbers of vendors, such as 17.3. `pip` installs no other version outside of the range.
KNOWN = OLDEST <= version_of(PYSPARK) <= NEWEST
VERSION = _version()


def check_server(session: Any) -> None:
    """Raise `UsageError` if a Spark Connect server has a version that was not tried with this PySpark."""
    server, tried = session.version, (VERSION, *TRIED_SERVERS.get(VERSION, ()))
    if version_of(server) not in tried and KNOWN:
        raise UsageError(
            f"the Spark Connect server runs Spark {server}, and this driver PySpark {PYSPARK}. This pair was not "
            f"tried\nStart a server of Spark {' or '.join(map(_text, tried))}. Or install the server's version where drivers "
            f"run: pip install 'pyspark[connect]=={_text(version_of(server))}.*'"
        )


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def check_classic(who: str, runs: str) -> None:
    """Raise `UsageError` if `who`, a part of a classic cluster, runs the Spark version `runs`, other than PySpark's."""
    if version_of(runs) != VERSION and KNOWN:
        raise UsageError(
            f"{who} runs Spark {runs}, and this driver PySpark {PYSPARK}. On a classic cluster both "
            f"need the same version\nInstall the cluster's version where drivers run: pip install 'pyspark=={_text(version_of(runs))}.*'"
        )


def check_jvm(session: Any) -> None:
    """Raise `UsageError` if the JVM of a classic session has another version of Spark than this PySpark."""
    check_classic("the JVM in SPARK_HOME", session.version)


def version_here(_: object) -> str:
    """Return the version of PySpark in the process that calls this function, such as a Python worker."""
    return PYSPARK


def has(name: str) -> bool:
    """Return True if this version of PySpark has the feature that `SINCE` lists as `name`."""
    return SINCE[name].version <= VERSION


class _Lacking:
    """A stand-in for a class that this PySpark lacks, so that `isinstance` checks are always False."""


GeographyType: Any = getattr(t, "GeographyType", _Lacking)
GeometryType: Any = getattr(t, "GeometryType", _Lacking)
# The package `pyspark-client`, which is only for Spark Connect, has no `Broadcast`, no RDDs and no Py4J.
if TYPE_CHECKING:
    Broadcast = pyspark.Broadcast
else:
    Broadcast = getattr(pyspark, "Broadcast", _Lacking)


def struct_of(schema: dict[str, Any]) -> t.StructType:
    """Return the Spark schema for its JSON form, as a record holds it.

    `StructType.fromJson` changes the JSON of strings with a collation, and a second call on the changed JSON fails. So
    the function parses a copy.

    Raises:
        UsageError: This PySpark lacks the type of a column. The record is intact: a newer PySpark wrote it.
    """
    for path, found in walk(parse_struct(schema)):
        name = found.name.partition("(")[0] if isinstance(found, UnsupportedType) else ""
        if name in SINCE and not has(name):
            since, here = _text(SINCE[name].version), _text(VERSION)
            raise UsageError(
                f"the column {path!r} has the type {found}, which PySpark has since {since}; this process runs PySpark {here}\n"
                f"Use PySpark {since} or newer on every host that runs or reads this pipeline"
            )
    return t.StructType.fromJson(copy.deepcopy(schema))


# Arrow and pandas


def to_arrow_type(of: t.DataType, zone: str = "UTC") -> pa.DataType:
    """Return the Arrow type for a Spark type. Instants get the time zone `zone`."""
    return to_arrow_schema(t.StructType([t.StructField("_", of)]), zone).field(0).type


def to_arrow_schema(schema: t.StructType, zone: str = "UTC") -> pa.Schema:
    """Return the Arrow schema for a Spark schema. Instants get the time zone `zone`."""
    from pyspark.sql.pandas import types

    if has("timezone of to_arrow_schema"):
        return types.to_arrow_schema(schema, timezone=zone, prefers_large_types=False)
    made = types.to_arrow_schema(schema)
    return made if zone == "UTC" else pa.schema([field.with_type(_in_zone(field.type, zone)) for field in made])


def _in_zone(of: pa.DataType, zone: str) -> pa.DataType:
    """Return an Arrow type in which each instant, also in nested types, has the time zone `zone`."""
    if pa.types.is_timestamp(of):
        return of if of.tz is None else pa.timestamp(of.unit, zone)
    if pa.types.is_struct(of):
        return pa.struct([field.with_type(_in_zone(field.type, zone)) for field in of])
    if pa.types.is_map(of):
        key, item = (field.with_type(_in_zone(field.type, zone)) for field in (of.key_field, of.item_field))
        return pa.map_(key, item, of.keys_sorted)
    if pa.types.is_list(of):
        return pa.list_(of.value_field.with_type(_in_zone(of.value_type, zone)))
    return of


def from_arrow_schema(schema: pa.Schema) -> t.StructType:
    """Return the Spark schema for an Arrow schema. Times without a zone are TIMESTAMP_NTZ."""
    from pyspark.sql.pandas import types

    return types.from_arrow_schema(schema, prefer_timestamp_ntz=True)


def from_arrow_type(of: pa.DataType) -> t.DataType:
    """Return the Spark type for an Arrow type. A time without a zone is TIMESTAMP_NTZ."""
    from pyspark.sql.pandas import types

    return types.from_arrow_type(of, prefer_timestamp_ntz=True)


def series_of(column: pa.Array, zone: str) -> pd.Series[Any]:
    """Return a column as Spark's worker gives it to a pandas UDF: instants are naive in `zone`, structs are dicts."""
    from pyspark.sql.pandas import types

    nested = pa.types.is_nested(column.type)
    values = column.to_pandas(date_as_object=True, coerce_temporal_nanoseconds=True, integer_object_nulls=nested)
    convert = types._create_converter_to_pandas(from_arrow_type(column.type), timezone=zone, struct_in_pandas="dict")
    return cast("pd.Series[Any]", convert(values))


def column_of_series(series: pd.Series[Any], of: t.DataType, zone: str, *, safe: bool) -> pa.Array:
    """Return a Series as an Arrow array of the Spark type `of`, as Spark's worker converts the result of a pandas UDF.

    With `safe`, raise an error for a number that the type can't hold exactly.
    """
    import pandas as pd
    from pyspark.sql.pandas import types

    if isinstance(series.dtype, pd.CategoricalDtype):
        series = series.astype(series.dtype.categories.dtype)
    convert: Any = types._create_converter_from_pandas(of, timezone=zone, error_on_duplicated_field_names=False)
    series, wanted = convert(series), to_arrow_type(of, zone)
    mask = None if hasattr(series.array, "__arrow_array__") else series.isnull()
    try:
        return pa.Array.from_pandas(series, mask=mask, type=wanted, safe=safe)
    except pa.ArrowInvalid:
        return pa.Array.from_pandas(series, mask=mask).cast(wanted, safe=safe)


def rows_of_frame(frame: Any, start: int, end: int) -> Any:
    """Return the rows `start` to `end - 1` as a frame that shares memory with `frame`. Its index begins at 0.

    The new frame is made of pandas' internal blocks: `frame.iloc` would take a third of the time of a shard's task.
    The blocks are the same in pandas 2.2 and 2.3, and Cairn's dependencies allow no other pandas.
    """
    import pandas as pd

    blocks = frame._mgr.get_slice(slice(start, end), axis=1)
    # Each frame gets its own view of the labels. Otherwise a handler that sets `columns.name` would set it in the
    # frames of all keys.
    blocks.axes[:] = frame.columns.view(), pd.RangeIndex(end - start)
    made: Any = pd.DataFrame
    return made._from_mgr(blocks, blocks.axes)


def values_of_labels(labels: Any) -> list[Any]:
    """Return the labels of an index from the array below it, which user code may have changed in place."""
    found: list[Any] = labels._values.tolist()
    return found


def arrays_of_frame(frame: Any) -> list[Any]:
    """Return the array of each column of a DataFrame, without the Series around it, which costs time."""
    return [frame._mgr.iget_values(at) for at in range(frame.shape[1])]


# Frames and columns of classic sessions and of Spark Connect


def is_connect(made: object) -> bool:
    """Return True for a session, a frame or a column of Spark Connect."""
    return type(made).__module__.startswith("pyspark.sql.connect")


def executed_plan(frame: Any) -> Any:
    """Return the executed physical plan, a JVM object, of a query that has run in a classic session."""
    return frame._jdf.queryExecution().executedPlan()


def analyzed_plan(frame: Any) -> Any:
    """Return the analyzed logical plan, a JVM object before any optimisation, of a query of a classic session."""
    return frame._jdf.queryExecution().analyzed()


def connect_plan(frame: Any) -> Any:
    """Return the plan of a DataFrame of Spark Connect, as the protobuf message that the client sends to the server."""
    return frame._plan.plan(frame.sparkSession.client)


def connect_metrics(frame: Any) -> list[Any]:
    """Return the metrics of each plan node of a Spark Connect query; an empty list if the query has not run."""
    executed = frame.executionInfo
    return [] if executed is None else list(executed.metrics._metrics)


def with_schema(frame: DataFrame, schema: t.StructType) -> DataFrame:
    """Return the DataFrame. On Spark Connect, cache its known schema in it, which saves a request to the server."""
    if is_connect(frame):
        remote: Any = frame
        remote._cached_schema = schema
    return frame


def java_column(column: Any) -> Any:
    """Return the JVM's expression node of a column of a classic session; None for a column of Spark Connect."""
    return column._jc.node() if hasattr(column, "_jc") else None


def connect_column(column: Any) -> Any:
    """Return the expression object of a column of Spark Connect; None for a column of a classic session."""
    return getattr(column, "_expr", None)


class Grouping(NamedTuple):
    """The parts of a grouped DataFrame. `kind`: How `groupBy`, `cube` or `rollup` made it of `frame`."""

    kind: str
    frame: DataFrame
    columns: list[Any]
    # True: `columns` are expression nodes of the JVM, from a classic session. False: columns of Spark Connect.
    of_jvm: bool


def grouping_of(grouped: Any) -> Grouping | None:
    """Return the parts of a grouped DataFrame; None for another object."""
    if not hasattr(grouped, "_df"):
        return None
    if hasattr(grouped, "_jgd"):
        expressions, kind = grouped._jgd.groupingExprs(), grouped._jgd.toString().rpartition("type: ")[2].rstrip("]")
        return Grouping(kind, grouped._df, [expressions.apply(i) for i in range(expressions.size())], True)
    return Grouping(grouped._group_type, grouped._df, list(grouped._grouping_cols), False)


def parser_of(spark: Any) -> Callable[[str], t.DataType]:
    """Return the function of a session that parses DDL text with Spark's own parser, to a Spark type."""
    parse: Callable[[str], t.DataType] = getattr(spark, "_parse_ddl", None) or spark.sparkContext._parse_ddl
    return parse


# Sessions


def context_of(spark: Any) -> Any:
    """Return the SparkContext of a classic session; None for a session of Spark Connect."""
    return getattr(spark, "_sc", None)


def is_stopped(spark: Any) -> bool:
    """Return True for a session that was stopped, classic or of Spark Connect."""
    context = context_of(spark)
    return context._jsc is None if context is not None else bool(getattr(spark, "is_stopped", False))


@contextmanager
def ctrl_c_kept() -> Iterator[None]:
    """Keep PySpark from replacing the handler of Ctrl-C when it makes a SparkContext in the `with` block.

    PySpark's handler calls the JVM. If Ctrl-C interrupts another call of the JVM, both calls use one connection. The
    interrupted call may then raise `Py4JError` instead of `KeyboardInterrupt`, and Py4J logs tracebacks.
    """
    from pyspark.core import context

    # In the block, the name `signal` in PySpark's module `context` is an object that installs no handler.
    module: Any = context
    module.signal = SimpleNamespace(signal=lambda *_: None, SIGINT=signal.SIGINT)
    try:
        yield
    finally:
        module.signal = signal


@contextmanager
def gateway_in(folder: Any) -> Iterator[None]:
    """Let PySpark put its temporary folder, for a file with the address of the JVM, into `folder`, in the `with` block.

    By default the folder is in the system's temporary folder, and nobody deletes it if this process is killed
    meanwhile.
    """
    from pyspark import java_gateway

    # In the block, the name `tempfile` in PySpark's module is an object that makes temporary folders below `folder`.
    module: Any = java_gateway
    module.tempfile = SimpleNamespace(mkdtemp=lambda: tempfile.mkdtemp(dir=folder), mkstemp=tempfile.mkstemp)
    try:
        yield
    finally:
        module.tempfile = tempfile


def fault_handler_file() -> Any:
    """Return the open file to which a Python worker's fault handler writes; None if Spark has not asked for one."""
    from pyspark import util

    if has("file of the fault handler"):
        return getattr(getattr(util, "_faulthandler_helper", None), "_log_file", None)
    file = Path(os.environ.get("PYTHON_FAULTHANDLER_DIR", ""), str(os.getpid()))
    if not file.is_file():
        return None
    # Nobody closes the file: the fault handler writes to it until PySpark disables the handler, at the end of the task.
    opened = file.open("r+")
    faulthandler.enable(file=opened)
    return opened


def id_of_broadcast(variable: Any) -> int | None:
    """Return Spark's id of a broadcast variable on the driver; None in a task, which does not know the id."""
    return None if variable._jbroadcast is None else int(variable._jbroadcast.id())


def made_broadcast(value: Any) -> Any:
    """Return a broadcast variable that already holds `value`, for use in a task."""
    variable: Any = pyspark.Broadcast(path="")
    variable._value = value
    return variable


# Spark Connect


def connect_channel(url: str, token: str | None, loopback: Container[str]) -> Any:
    """Return the builder of a gRPC channel to the Spark Connect server at `url`.

    The channel sends a token without TLS only to the addresses `loopback` of this machine. Spark's own client does so
    only to the host name localhost, which may lead to ::1, where another user could listen and receive the token. So
    Cairn connects to 127.0.0.1.
    """
    import grpc
    from pyspark.sql.connect.client import DefaultChannelBuilder

    class ConnectChannel(DefaultChannelBuilder):  # type: ignore[misc]  # PySpark is not type-checked here
        def toChannel(self) -> grpc.Channel:
            if self.token is None or self.use_ssl or self.host.strip("[]") not in loopback:
                return super().toChannel()
            credentials = grpc.composite_channel_credentials(
                grpc.local_channel_credentials(), grpc.access_token_call_credentials(self.token)
            )
            return self._secure_channel(self.endpoint, credentials)

    channel = ConnectChannel(url)
    if token is not None:
        channel.set(channel.PARAM_TOKEN, token)
    return channel


def connect_client(channel: Any) -> Any:
    """Return a Spark Connect client without a `SparkSession`. `channel`: What `connect_channel` returns."""
    from pyspark.sql.connect.client import SparkConnectClient

    return SparkConnectClient(channel)


def connect_session(channel: Any, *, registered: bool = True) -> SparkSession:
    """Return a new session of a Connect server. With `registered`, it becomes PySpark's active session.

    The client's exit hook is removed, since it would only clear the session's cache of ML models on the server.
    """
    from pyspark.sql.connect.session import SparkSession as RemoteSession

    session: Any = (
        RemoteSession.builder.channelBuilder(channel).create() if registered else RemoteSession(connection=channel)
    )
    forget_exit(session.client)
    return cast("SparkSession", session)


def forget_exit(client: Any) -> None:
    """Remove the client's exit hooks, so that the client does nothing when this process ends."""
    for name in ("_on_exit", "_cleanup_ml_cache", "_cleanup_ml"):  # The hook's names in PySpark 4.2, 4.1 and 4.0.
        if (exits := getattr(client, name, None)) is not None:
            atexit.unregister(exits)


def clean_up_setting(*, connect: bool) -> str:
    """Return the setting that deletes a query's shuffle files. `connect`: For Spark Connect, else for classic Spark."""
    of = ("connect." if connect else "classic.") if has("settings that delete shuffle files") else ""
    return f"spark.sql.{of}shuffleDependency.fileCleanup.enabled"


def set_retries(client: Any, **policy: Any) -> None:
    """Make a Spark Connect client retry failed requests by Spark's default policy, with the arguments in `policy`."""
    from pyspark.sql.connect.client.retries import DefaultPolicy

    client.set_retry_policies([DefaultPolicy(**policy)])
