"""Schemas as Spark writes them in JSON."""

from __future__ import annotations

from typing import Any


def field(name: str, type_: Any, nullable: bool = True, **metadata: Any) -> dict[str, Any]:
    return {"name": name, "type": type_, "nullable": nullable, "metadata": metadata}


def struct_of(*fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "struct", "fields": list(fields)}


def struct(**types: Any) -> dict[str, Any]:
    """Of nullable fields."""
    return struct_of(*(field(name, of) for name, of in types.items()))


def array(element: Any, contains_null: bool = True) -> dict[str, Any]:
    return {"type": "array", "elementType": element, "containsNull": contains_null}


def mapping(key: Any, value: Any, contains_null: bool = True) -> dict[str, Any]:
    return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": contains_null}
