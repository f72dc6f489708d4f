"""Which settings of Spark are secrets, and how they are kept out of what Airflow shows of a task."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# Spark's own pattern leaves out fs.azure.account.key, which is a key to the whole storage account.
_NAMES = ("password", "passphrase", "secret", "token", "credential", "private", "key")
_REDACTION_SETTING = "spark.redaction.regex"
# Spark's default. Spark applies the pattern to names and values.
_REDACTION = "(?i)secret|password|token|access[.]?key|credential"


class Hidden:
    """A text that Airflow renders as a template and shows as ``***``: in rendered fields, in the serialized DAG and in logs."""

    template_fields: Sequence[str] = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def serialize(self) -> str:
        """The text that Airflow stores and shows."""
        return "***"

    def __repr__(self) -> str:
        return "***"


def hide_secrets(conf: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the secrets among Spark's settings by `Hidden` ones."""
    pattern = redaction_of(conf)
    return {
        name: Hidden(value) if isinstance(value, str) and value and is_secret(name, value, pattern) else value
        for name, value in conf.items()
    }


def redaction_of(conf: Mapping[str, Any]) -> re.Pattern[str]:
    """The pattern in ``spark.redaction.regex``, or Spark's default where Python can't read the pattern."""
    try:
        return re.compile(str(conf.get(_REDACTION_SETTING) or _REDACTION))
    except re.error:
        return re.compile(_REDACTION)


def is_secret(name: str, value: str, redaction: re.Pattern[str]) -> bool:
    """True if the name says so, or if Spark itself would redact the setting for its name or its value."""
    if name == _REDACTION_SETTING:
        return False
    return any(word in name.lower() for word in _NAMES) or bool(redaction.search(name) or redaction.search(value))
