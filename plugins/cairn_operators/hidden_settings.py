"""Find the secrets among Spark's settings, and hide them in what Airflow shows of a task."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# A setting is secret if its name contains one of these words. Spark's own pattern is not enough: it does not match
# fs.azure.account.key, the key to a whole storage account.
_NAMES = ("password", "passphrase", "secret", "token", "credential", "private", "key")
_REDACTION_SETTING = "spark.redaction.regex"
# Spark's default for spark.redaction.regex. Spark applies the pattern to the names and the values of settings.
_REDACTION = "(?i)secret|password|token|access[.]?key|credential"


class Hidden:
    """A secret that Airflow renders as a template, but shows as `***` in rendered fields, serialized DAG and logs."""

    template_fields: Sequence[str] = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def serialize(self) -> str:
        return "***"

    def __repr__(self) -> str:
        return "***"


def hide_secrets(conf: Mapping[str, Any]) -> dict[str, Any]:
    """Return Spark's settings `conf` by name, with each secret value wrapped in `Hidden`."""
    pattern = redaction_of(conf)
    return {
        name: Hidden(value) if isinstance(value, str) and value and is_secret(name, value, pattern) else value
        for name, value in conf.items()
    }


def redaction_of(conf: Mapping[str, Any]) -> re.Pattern[str]:
    """Return the pattern in `spark.redaction.regex` of Spark's configuration.

    The result is Spark's default pattern if the setting is missing, or if Python can't compile it.
    """
    try:
        return re.compile(str(conf.get(_REDACTION_SETTING) or _REDACTION))
    except re.error:
        return re.compile(_REDACTION)


def is_secret(name: str, value: str, redaction: re.Pattern[str]) -> bool:
    """Return True if a setting's name contains one of `_NAMES`, or if `redaction` matches its name or value."""
    if name == _REDACTION_SETTING:
        return False
    return any(word in name.lower() for word in _NAMES) or bool(redaction.search(name) or redaction.search(value))
