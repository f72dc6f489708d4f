"""The check of a data source's options. Spark accepts every option, so a misspelt one would be ignored silently."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from state_backend.values.errors import UsageError
from state_backend.values.similar_names import did_you_mean


def check_options(source: str, given: Mapping[str, str], known: Collection[str]) -> None:
    for name in given:
        if name.lower() not in known:
            more = "; load() takes no path" if name.lower() == "path" else ""
            raise UsageError(f"format({source!r}) has no option {name!r}{more}{did_you_mean(name.lower(), known)}")
