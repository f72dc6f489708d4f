"""The datasets that a checkpoint read and wrote, with the names that OpenLineage prescribes.

The functions are pure: they read a checkpoint's record and need no OpenLineage library. `lineage_event` makes
OpenLineage's event of the datasets.

Source: https://openlineage.io/docs/spec/naming
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from state_backend.formats.table_schema import table_schema
from state_backend.formats.types import parse_struct
from state_backend.values.frozen import frozen

if TYPE_CHECKING:
    from state_backend.values.records import Content, Record

# Object stores: for the scheme of a URL, the scheme in OpenLineage's namespace. Their names begin without a slash.
_OBJECTS = {
    **{"s3": "s3", "s3a": "s3", "s3n": "s3", "gs": "gs"},
    **{"abfss": "abfss", "abfs": "abfs", "wasbs": "wasbs", "wasb": "wasb"},
}
# Azure's schemes: their URLs have the container before the `@`. Other URLs may have user name and password there.
_WITH_CONTAINER = ("abfss", "abfs", "wasbs", "wasb")
# Databases: for the scheme of a URL, the scheme in OpenLineage's namespace, and the port if the URL has none.
_DATABASES = {
    "postgres": ("postgres", 5432),
    "postgresql": ("postgres", 5432),
    "mysql": ("mysql", 3306),
    "kafka": ("kafka", 9092),
}
# A host or bucket with an optional port. A URL with another text there may show a password, so it names no dataset.
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(:\d+)?")
_FILE = re.compile(r"[^/]*\.[A-Za-z][A-Za-z0-9]*")
# Columns that the sinks in `cairn.sinks` add to each row of a table, as fields of Spark's JSON schema.
_INTERVAL_COLUMNS = ({"name": "interval_start", "type": "timestamp"}, {"name": "interval_end", "type": "timestamp"})


@frozen
class Field:
    """A column, or a part of a nested column: a field of a struct, or an element, key or value of an array or map."""

    name: str
    type: str
    # Parts of a nested type; empty for other types.
    fields: tuple[Field, ...] = ()


@frozen
class Dataset:
    """A folder or a table, named as OpenLineage prescribes: `namespace` is the storage, `name` the place in it."""

    namespace: str
    name: str
    # Checkpoint id or table version as text; None if it is unknown.
    version: str | None = None
    # The columns; None if they are unknown.
    fields: tuple[Field, ...] | None = None
    # Rows that the checkpoint wrote; None for an input.
    rows: int | None = None
    # Bytes that the checkpoint wrote; None for an input or a table.
    size_bytes: int | None = None
    # Files that the checkpoint wrote; None for an input or a table.
    files: int | None = None


def dataset_of(url: str) -> Dataset | None:
    """Return the dataset that a URL names, without user, password and query; None for other texts and other schemes."""
    scheme, separator, rest = url.strip().partition("://")
    scheme = scheme.lower()
    authority, _, path = rest.partition("?")[0].partition("/")
    if scheme not in _WITH_CONTAINER:
        authority = authority.rpartition("@")[2]
    path = path.rstrip("/")
    if not separator or not path or (not authority and scheme != "file") or not _HOST.fullmatch(authority):
        return None
    if scheme in _OBJECTS:
        namespace, name = f"{_OBJECTS[scheme]}://{authority}", path
    elif scheme in ("file", "hdfs", "dbfs"):
        namespace, name = f"{scheme}://{authority}" if authority else "file", f"/{path}"
    elif scheme in _DATABASES:
        system, port = _DATABASES[scheme]
        known = re.search(r":\d+$", authority)
        namespace, name = f"{system}://{authority}{'' if known else f':{port}'}", path.replace("/", ".")
    elif scheme == "bigquery":
        namespace, name = "bigquery", f"{authority}.{path.replace('/', '.')}"
    else:
        return None
    return Dataset(namespace=namespace, name=name)


def inputs_of(source_position: dict[str, Any]) -> tuple[Dataset, ...]:
    """Return a dataset for each URL in a source position, in the order of their first URLs.

    A URL may be a value or a key, at any depth. For a file, the dataset is the file's folder. A `version` in the same
    object as the URL is the dataset's version.
    """
    return _one_each(_with_versions((dataset_of(_folder(url)), v) for url, v in _urls(source_position, None)))


def all_inputs_of(content: Content, pipeline_url: str) -> tuple[Dataset, ...]:
    """Return the datasets that an interval read: `output` folders of other pipelines, and URLs in the source position.

    A folder's version is the upstream's checkpoint id if the interval read only one checkpoint. A read of an upstream's
    state or late rows is also listed as its `output` folder, so that a catalog connects the two pipelines.
    """
    own, read = _with_scheme(pipeline_url).rpartition("/")[0], list[tuple[str, str, str | None]]()
    for one in content.inputs:
        alone = str(one.parts[0].last_id) if sum(part.intervals for part in one.parts) == 1 else None
        read.append((one.edge.root or own, one.edge.pipeline, alone))
    read += [(one.root, one.pipeline, None) for one in content.untracked]
    named = [(dataset_of(f"{_with_scheme(root.rstrip('/'))}/{name}/output"), version) for root, name, version in read]
    return _one_each([*_with_versions(named), *inputs_of(content.source_position)])


def _with_versions(named: Iterable[tuple[Dataset | None, str | None]]) -> Iterator[Dataset]:
    yield from (replace(dataset, version=version) for dataset, version in named if dataset is not None)


def _one_each(datasets: Iterable[Dataset]) -> tuple[Dataset, ...]:
    """Return each dataset once. If a dataset occurs with different versions, its version becomes None."""
    found: dict[tuple[str, str], Dataset] = {}
    for dataset in datasets:
        before = found.setdefault((dataset.namespace, dataset.name), dataset)
        if before.version != dataset.version:
            found[dataset.namespace, dataset.name] = replace(dataset, version=None)
    return tuple(found.values())


def outputs_of(record: Record, pipeline_url: str, tables: Sequence[tuple[str, bool]] = ()) -> tuple[Dataset, ...]:
    schema = table_schema(map(parse_struct, record.output_schemas)).to_json() if record.output_schemas else None
    files = [output for output in record.content.outputs if not output.late]
    rows = sum(output.rows for output in files)
    found = []
    if (folder := dataset_of(f"{_with_scheme(pipeline_url)}/output")) is not None:
        size_bytes = sum(output.handle.size_bytes for output in files)
        folder = replace(folder, version=str(record.id), fields=_columns(schema))
        found.append(replace(folder, rows=rows, size_bytes=size_bytes, files=len(files)))
    for url, late in tables:
        if (table := dataset_of(url)) is None:
            continue
        if late:
            late_rows = sum(output.rows for output in record.content.outputs if output.late)
            found.append(replace(table, rows=late_rows))
        else:
            found.append(replace(table, fields=_columns(schema, _INTERVAL_COLUMNS), rows=rows))
    return tuple(found)


def checkpoint_facet(record: Record) -> dict[str, Any]:
    """Return the values of the run facet `cairn_checkpoint`, as its JSON schema describes them."""
    content = record.content
    return {
        "pipeline": content.pipeline,
        "checkpoint": record.id,
        "baseCheckpoint": content.base_id,
        "attempt": content.attempt,
        "stateDigest": f"{content.digest:016x}",
        "intervalStart": content.interval.start.isoformat(),
        "intervalEnd": content.interval.end.isoformat(),
    }


def _urls(value: Any, version: str | None) -> Iterator[tuple[str, str | None]]:
    match value:
        case str():
            yield value, version
        case dict():
            beside = value.get("version")
            known = isinstance(beside, str | int) and not isinstance(beside, bool)
            for key, part in value.items():
                yield key, None
                yield from _urls(part, str(beside) if known else None)
        case list():
            for part in value:
                yield from _urls(part, version)


def _folder(url: str) -> str:
    """Return the URL of the folder of a file, since OpenLineage sees it as one dataset. Other URLs stay unchanged."""
    scheme, separator, path = url.partition("?")[0].partition("://")
    folder, _, last = path.rpartition("/")
    is_file = scheme.lower() not in _DATABASES and "/" in folder and _FILE.fullmatch(last)
    return f"{scheme}{separator}{folder}" if is_file else url


def _with_scheme(url: str) -> str:
    return f"file://{url}" if url.startswith("/") else url


def _columns(schema: dict[str, Any] | None, more: tuple[dict[str, Any], ...] = ()) -> tuple[Field, ...] | None:
    return None if schema is None else tuple(_field(part["name"], part["type"]) for part in (*schema["fields"], *more))


def _field(name: str, kind: Any) -> Field:
    match kind:
        case {"type": "struct", "fields": parts}:
            return Field(name=name, type="struct", fields=tuple(_field(part["name"], part["type"]) for part in parts))
        case {"type": "array", "elementType": element}:
            return Field(name=name, type="array", fields=(_field("_element", element),))
        case {"type": "map", "keyType": key, "valueType": value}:
            return Field(name=name, type="map", fields=(_field("key", key), _field("value", value)))
        case {"type": str(other)}:
            return Field(name=name, type=other)
    return Field(name=name, type=str(kind))
