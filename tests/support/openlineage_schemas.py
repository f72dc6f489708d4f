"""The check of an OpenLineage event against the JSON schemas of OpenLineage, and of Cairn's own facet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from referencing import Registry, Resource

from state_backend.values.handles import Handle
from state_backend.values.records import OutputFile
from tests.support.schema_json import array, mapping, struct

_OURS = Path(__file__).resolve().parent / "openlineage"
EVENT = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"


def check_event(event: Mapping[str, Any], facet_schemas: Mapping[str, Any]) -> set[str]:
    """Raise `ValidationError` if the event or a facet does not fit its schema.

    Args:
        event: The event, as it was sent.
        facet_schemas: Schemas of custom facets, by URL.

    Returns:
        The names of the facets whose own schemas are here. The schema of the event covers the other facets.
    """
    schemas = [json.loads(file.read_text()) for file in sorted(_OURS.glob("*.json"))]
    found = {schema["$id"]: schema for schema in schemas} | {**facet_schemas}
    registry: Registry[Any] = Registry().with_resources((url, Resource.from_contents(s)) for url, s in found.items())

    def check(value: Any, url: str) -> None:
        Draft202012Validator({"$ref": url}, registry=registry, format_checker=FormatChecker()).validate(value)

    check(event, EVENT)
    checked = set()
    for name, facet in _facets(event):
        if facet["_schemaURL"].partition("#")[0] in found:
            check(facet, facet["_schemaURL"])
            checked.add(name)
    return checked


def _facets(event: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for part in (event["run"], event["job"], *event["inputs"], *event["outputs"]):
        for key in ("facets", "inputFacets", "outputFacets"):
            yield from part.get(key, {}).items()


SCHEMA = struct(
    user="string",
    pages=array(struct(url="string")),
    sums=mapping("string", "decimal(10,2)"),
    other={"type": "udt", "class": "C"},
)


def output(name: str, size_bytes: int, rows: int, *, late: bool = False) -> OutputFile:
    return OutputFile(handle=Handle(path=name, size_bytes=size_bytes, crc32c=0), rows=rows, late=late)
