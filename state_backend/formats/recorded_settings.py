"""Settings of a processor in the metadata of a state's schema.

A schema with other settings is the same schema: it gets no new version, and states that differ only in settings are
equal.
"""

from __future__ import annotations

from typing import Any

# Key in the metadata of a field: settings of the processor that must not change, because they decide how entries are
# read. The value maps names to texts for error messages, such as "early = True".
SETTINGS = "cairn.settings"
# Key in the metadata of a field, for a setting that decides the name of the state. The value maps each name that the
# state would have with another setting to two texts for error messages: that setting, and the declared setting.
INSTEAD_OF = "cairn.instead_of"


def without_settings(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a struct's JSON without the processor's settings in its metadata, for a comparison of two states."""
    fields = [_with_metadata(field, {SETTINGS: None, INSTEAD_OF: None}) for field in schema.get("fields", ())]
    return {**schema, "fields": fields} if fields else schema


def with_settings_of(schema: dict[str, Any], declared: dict[str, Any]) -> dict[str, Any]:
    """Return `schema` with the processor's settings of `declared`: each field gets those of its namesake."""
    settings = {field["name"]: field.get("metadata", {}).get(SETTINGS) for field in declared["fields"]}
    fields = [_with_metadata(field, {SETTINGS: settings.get(field["name"])}) for field in schema["fields"]]
    return {**schema, "fields": fields}


def _with_metadata(field: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a field's JSON with `changes` to its metadata. The value None removes a key."""
    old = field.get("metadata", {})
    new = {name: value for name, value in {**old, **changes}.items() if value is not None}
    return field if new == old else {**field, "metadata": new}
